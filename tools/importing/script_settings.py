"""Settings that a training script of another system passes on: of a shell script, or of a Python file with TRL's config
classes."""

import ast
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from megappo.config.config_error import ConfigError, listed
from megappo.config.elsewhere import System
from megappo_tools.importing.shell_commands import RecordedCommand, ShellScript

_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_OVERRIDE = re.compile(r"\+*([~\w.@/-]+)=(.*)", re.DOTALL)
TRL_CLASSES = ("GRPOConfig", "PPOConfig", "RLOOConfig", "GRPOTrainer", "PPOTrainer", "RLOOTrainer", "LoraConfig")
PROGRAM = "program"
"""Setting with the script or the trainer's class that a system starts, where it has a row."""


def read_settings(script: ShellScript, systems: Sequence[System]) -> tuple[System, dict[str, Any]]:
    """Return the first of some systems whose program a script starts, and its settings, by that system's keys, with
    values as YAML reads them.

    A variable that the script misses stays as `$NAME` in a value, and the output of a command as `$(COMMAND)`.

    Raises:
        ConfigError: the script cannot be read, or starts no training, or several.
    """
    path = script.path
    try:
        if path.suffix == ".py" and (settings := _of_python(script.text, path)):
            return systems[0], settings
    except SyntaxError as error:
        raise ConfigError(f"{path}: {error}") from error
    commands = script.commands() if path.suffix != ".py" else []
    for system in systems:
        if trainings := trainings_of(commands, system):
            _check_decided(script, commands, trainings, system)
            return system, of_command(trainings[0], system)
    printed = f" (the last line that it prints: {script.last_line})" if script.last_line else ""
    raise ConfigError(
        f"{path}: found no settings of {systems[0].title}{printed}: name the script that starts its training, and "
        "behind it the script's arguments and variables (NAME=VALUE)"
    )


def _of_python(text: str, path: Path) -> dict[str, Any]:
    """Return the keyword arguments of TRL's classes in a Python file."""
    settings: dict[str, Any] = {}
    imported: dict[str, str] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            imported |= {one.asname or one.name: f"{node.module}:{one.name}" for one in node.names}
        elif isinstance(node, ast.Call) and (name := ast.unparse(node.func).rpartition(".")[2]) in TRL_CLASSES:
            if name.endswith("Trainer"):
                settings[PROGRAM] = name
            for keyword in node.keywords:
                settings[str(keyword.arg)] = _literal(keyword.value, path, imported)
    return settings


def _literal(node: ast.expr, path: Path, imported: dict[str, str]) -> Any:
    """Return the value of an expression, the place of a function, or else the expression as a variable."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        if isinstance(node, ast.List):
            return [_literal(element, path, imported) for element in node.elts]
        name = ast.unparse(node)
        return imported.get(name, f"{path}:{name}") if isinstance(node, ast.Name) else f"${name}"


def trainings_of(commands: Iterable[RecordedCommand], system: System) -> list[RecordedCommand]:
    """Return the commands that start a system's program, without repetitions."""
    started = {tuple(one.words): one for one in commands if any(re.search(system.program, word) for word in one.words)}
    return list(started.values())


def _check_decided(
    script: ShellScript, commands: Sequence[RecordedCommand], trainings: Sequence[RecordedCommand], system: System
) -> None:
    """Check that a script starts one training, whatever the commands beside it return.

    Raises:
        ConfigError: it does not.
    """
    if len(trainings) > 1:
        lines = ", ".join(str(one.line) for one in trainings)
        raise ConfigError(f"{script.path}: starts {len(trainings)} trainings that differ (lines {lines}): keep one")
    others = [one for one in commands if one.words != trainings[0].words]
    failing: list[RecordedCommand] = []
    if others:
        with suppress(ConfigError):  # an endless loop around what fails
            failing = trainings_of(script.commands(status=1), system)
    if failing and [one.words for one in failing] != [one.words for one in trainings]:
        names = listed(dict.fromkeys(f"{one.words[0]} (line {one.line})" for one in others))
        raise ConfigError(
            f"{script.path}: the settings depend on the exit code of a command that is not run (one of {names}): "
            "delete the branches that do not apply"
        )


def of_command(command: RecordedCommand, system: System) -> dict[str, Any]:
    """Return the settings behind a system's program, and the settings of a launcher before it that have a row."""
    words = command.words
    start = next(number for number, word in enumerate(words) if re.search(system.program, word))
    launcher = _settings(words[:start], system)
    settings = {key: value for key, value in launcher.items() if key in system.rows}
    settings |= {PROGRAM: words[start]} if PROGRAM in system.rows else {}
    return settings | _settings(words[start + 1 :], system)


def _settings(words: Iterable[str], system: System) -> dict[str, Any]:
    """Return settings of the form `--key value ...`, `--key=value`, `key=value`, or `--key`, which is true."""
    found: dict[str, list[Any]] = {}
    values: list[Any] | None = None
    for word in words:
        match = _FLAG.fullmatch(word)
        if not match and (override := _OVERRIDE.fullmatch(word)):
            is_value = values is not None and "." not in override[1] and override[1] not in system.rows
            match = None if is_value else override
        if match:
            values = [] if match[2] is None else None
            found[match[1]] = [_value(match[2])] if values is None else values
        elif values is None:
            found[word] = []
        else:
            values.append(_value(word.rstrip(",")))
    return {key: values if len(values) > 1 else next(iter(values), True) for key, values in found.items()}


def _value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
        return float(value) if isinstance(value, str) else value  # 1e-6 is a text to YAML
    except (yaml.YAMLError, ValueError):
        return None if text == "None" else text
