"""Settings that a training script of another system passes on, read without running it: of a shell script, or of a
Python file with TRL's config classes."""

import ast
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment

from megappo.config.config_error import ConfigError
from megappo.config.elsewhere import System
from megappo.config.sources import LARGEST_FILE, TextFileError, read_text

_STATEMENT = re.compile(r"^[ \t]*(?:export[ \t]+)?(?:(\w+)=(?:\(([^)]*)\)|(.*))|(.+))$", re.MULTILINE)
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)(?!\))")
_COMMAND = re.compile(r"\$\([^()]*\)|`[^`]*`")
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[@\])?(?::?-([^{}]*))?\}|\$(\w+)")
_OVERRIDE = re.compile(r"[+]*([A-Za-z_]\w*(?:\.[\w-]+)+)=(.*)", re.DOTALL)
DEEPEST = 20
"""Variables within variables that are followed."""
TRL_CLASSES = ("GRPOConfig", "PPOConfig", "GRPOTrainer", "PPOTrainer", "LoraConfig")


def read_settings(path: Path, system: System) -> dict[str, Any]:
    """Return the settings in a script of a system, by its keys, with values as YAML reads them.

    What the script does not set by itself stays as `$NAME` in a value, and the output of a command as `$OUTPUT`.

    Raises:
        ConfigError: the script cannot be read, or holds none.
    """
    try:
        text = read_text(path, LARGEST_FILE)
        settings = _of_python(text, path) if path.suffix == ".py" else _of_shell(text, system)
    except (TextFileError, SyntaxError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not settings:
        raise ConfigError(f"{path}: found no settings of {system.title}: name the script that starts its training")
    return settings


def _of_python(text: str, path: Path) -> dict[str, Any]:
    """Return the keyword arguments of TRL's classes in a Python file."""
    settings: dict[str, Any] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in TRL_CLASSES:
            for keyword in node.keywords:
                settings[str(keyword.arg)] = _literal(keyword.value, path)
    return settings


def _literal(node: ast.expr, path: Path) -> Any:
    """Return the value of an expression, the place of a function, or else the expression as a variable."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        name = ast.unparse(node)
        return f"{path}:{name}" if isinstance(node, ast.Name) else f"${name}"


def _of_shell(text: str, system: System) -> dict[str, Any]:
    """Return the flags behind a system's program, with those of a launcher before it that have a row; or overrides."""
    settings: dict[str, Any] = {}
    program = system.program
    for words in _commands(text):
        starts = [number for number, word in enumerate(words) if program and re.search(program, word)]
        if starts:
            launcher = _flags(words[: starts[0]])
            settings |= {key: value for key, value in launcher.items() if key in system.rows}
            settings |= _flags(words[starts[0] + 1 :])
        elif not program:
            matches = filter(None, map(_OVERRIDE.fullmatch, words))
            settings |= {match[1]: _value(match[2]) for match in matches}
    return settings


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of the form `--key value ...`, `--key=value` or `--key`, which is true."""
    settings: dict[str, Any] = {}
    name = ""
    for word in words:
        if re.match("--[a-z]", word):
            name, equals, value = word[2:].partition("=")
            settings[name] = _value(value) if equals else True
        elif name and settings[name] is True:
            settings[name] = _value(word.rstrip(","))
        elif name:
            before = settings[name]
            settings[name] = [*(before if isinstance(before, list) else [before]), _value(word.rstrip(","))]
    return settings


def _value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
        return float(value) if isinstance(value, str) else value  # 1e-6 is a text to YAML
    except (yaml.YAMLError, ValueError):
        return None if text == "None" else text


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell script, with the variables that it sets before them."""
    variables = {"HOME": "~"}
    for name, array, value, command in _STATEMENT.findall(_COMMENT.sub("", text.replace("\\\n", " "))):
        try:
            words = shlex.split(_expanded(value or command, variables))
        except ValueError:  # a quotation over several lines
            continue
        if name:
            variables[name] = _expanded(" ".join(array.split()), variables) if array else " ".join(words)
        else:
            yield words


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with the values of its variables and its arithmetic."""
    text = re.sub(r'"(\$\{\w+\[@\]\})"', r"\1", text)
    for _ in range(DEEPEST):
        text = _VARIABLE.sub(lambda match: _variable(match, variables), _COMMAND.sub("$OUTPUT", text))
    return _ARITHMETIC.sub(lambda match: _number(match, variables), text)


def _variable(match: re.Match[str], variables: Mapping[str, str]) -> str:
    name = match[1] or match[3]
    return variables.get(name, f"${name}" if match[2] is None else match[2])


def _number(match: re.Match[str], variables: Mapping[str, str]) -> str:
    """Return the value of `$((a * b))`, in which names are variables; the text as it is if it has none."""
    numbers = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1])
    if not re.fullmatch(r"(?:[\d\s+\-%/()]|\*(?!\*))+", numbers):
        return match[0]
    try:
        return str(Environment().compile_expression(numbers.replace("/", "//"))())
    except (ArithmeticError, ValueError, TypeError):
        return match[0]
