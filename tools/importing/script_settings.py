"""Settings that a training script of another system passes on, read without running it: of a shell script, or of a
Python file with TRL's config classes."""

import ast
import re
import shlex
from collections.abc import Iterable, Iterator
from itertools import chain, takewhile
from pathlib import Path
from string import Template
from typing import Any

import yaml
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from megappo.config.config_error import ConfigError
from megappo.config.elsewhere import System
from megappo.config.sources import LARGEST_FILE
from megappo.config.text_files import TextFileError, read_text

_IN_PARENTHESES = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"
_TEXT = r"""(?:\\.|"(?:\\.|[^"\\])*"|'[^']*'|.)"""
_PREFIX = r"^[ \t]*(?:export[ \t]+)?(?:\w+=[\w./:,-]*[ \t]+(?=\S))*"
_STATEMENT = re.compile(rf"{_PREFIX}(?:(\w+)=(?:\(({_IN_PARENTHESES})\)|({_TEXT}*))|({_TEXT}+))$", re.MULTILINE)
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
_ARITHMETIC = re.compile(rf"\$\(\(({_IN_PARENTHESES})\)\)")
_COMMAND = re.compile(r"\$\([^()]*\)|`[^`]*`")
_DEFAULT = re.compile(r"\$\{(\w+):?-((?:[^{}]|\$\{\w+\})*)\}")
_ARRAY = re.compile(r'("?)\$\{(\w+)\[@\]\}\1')
_SETTING = re.compile(r"(?:--(?=[A-Za-z])|\+*(?=[\w.-]+\.[\w-]+=))([\w.-]+)(?:=(.*))?", re.DOTALL)
_NO_ARGUMENT = re.compile(r"[|&;]+|[\d&]?>.*|\$[@*]")
"""Words that end a command, or stand for the script's own arguments."""
DEEPEST = 20
"""Variables within variables that are followed."""
TRL_CLASSES = ("GRPOConfig", "PPOConfig", "RLOOConfig", "GRPOTrainer", "PPOTrainer", "RLOOTrainer", "LoraConfig")
PROGRAM = "program"
"""Setting with the script or the trainer's class that a system starts, where it has a row."""


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


def _of_shell(text: str, system: System) -> dict[str, Any]:
    """Return the settings behind a system's program, and those of a launcher before it that have a row."""
    settings: dict[str, Any] = {}
    for words in _commands(text, system):
        start = next((number for number, word in enumerate(words) if re.search(system.program, word)), None)
        if start is not None:
            launcher = _settings(words[:start])
            settings |= {key: value for key, value in launcher.items() if key in system.rows}
            settings |= {PROGRAM: words[start]} if PROGRAM in system.rows else {}
            settings |= _settings(takewhile(lambda word: not _NO_ARGUMENT.fullmatch(word), words[start + 1 :]))
    return settings


def _settings(words: Iterable[str]) -> dict[str, Any]:
    """Return settings of the form `--key value ...`, `--key=value`, `a.key=value`, or `--key`, which is true."""
    found: dict[str, list[Any]] = {}
    values: list[Any] = []
    for word in words:
        if match := _SETTING.fullmatch(word):
            values = []
            found[match[1]] = values if match[2] is None else [_value(match[2])]
        else:
            values.append(_value(word.rstrip(",")))
    return {key: values if len(values) > 1 else next(iter(values), True) for key, values in found.items()}


def _value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
        return float(value) if isinstance(value, str) else value  # 1e-6 is a text to YAML
    except (yaml.YAMLError, ValueError):
        return None if text == "None" else text


def _commands(text: str, system: System) -> Iterator[list[str]]:
    """Yield the words of each command of a shell script, with the variables that it sets before them."""
    variables = {"HOME": "~", "PWD": "."}
    for name, array, value, command in _STATEMENT.findall(_COMMENT.sub("", text.replace("\\\n", " "))):
        try:
            words = shlex.split(_expanded(value or command, variables))
        except ValueError:  # a quotation over several lines
            continue
        if name:
            variables[name] = _expanded(" ".join(array.split()) or " ".join(words), variables)
        else:
            yield list(chain.from_iterable(_unquoted(word, system) for word in words))


def _unquoted(word: str, system: System) -> list[str]:
    """Return the words of a command line that is one word, as behind `bash -c`, if it starts the program."""
    try:
        words = shlex.split(word) if " " in word else []
    except ValueError:  # a quote that is text
        return [word]
    return words if any(re.search(system.program, part) for part in words) else [word]


def _expanded(text: str, variables: dict[str, str]) -> str:
    """Return a text with the values of its variables and its arithmetic."""
    text = _ARRAY.sub(r"${\2}", text)
    for _ in range(DEEPEST):
        defaults = dict(_DEFAULT.findall(text))
        text = _DEFAULT.sub(r"${\1}", _COMMAND.sub("$OUTPUT", text.replace("$(pwd)", "$PWD")))
        text = Template(text).safe_substitute(defaults | variables)
    return _ARITHMETIC.sub(lambda match: _number(match, variables), text)


def _number(match: re.Match[str], variables: dict[str, str]) -> str:
    """Return the value of `$((a * b))`, in which names are variables; the text as it is if it has none."""
    numbers = {name: _value(text) for name, text in variables.items()}
    environment = SandboxedEnvironment(undefined=StrictUndefined)
    try:
        return str(environment.compile_expression(match[1].replace("/", "//"), undefined_to_none=False)(numbers))
    except (TemplateError, ArithmeticError, TypeError):
        return match[0]
