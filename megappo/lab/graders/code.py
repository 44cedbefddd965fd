"""Programs: the program in a response is run on the tests of its label."""

import ast
import json
import math
import os
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from threading import Timer
from typing import Any

from megappo.runtime.machine import PACKAGE_ROOT, PYTHON
from megappo.userland.user_code import JsonObject

FENCE = "```"
ENDING_SECONDS = 20.0
TOLERANCE = 1e-6
"""Tolerance for decimal numbers that a program writes."""
LABELS = (
    '{"inputs": [...], "outputs": [...]}, with "fn_name" where a function is called; a text of assertions, or a list '
    'of such; or {"test": ..., "entry_point": ...} with a function check'
)


def code(
    solution_str: str,
    ground_truth: Any,
    *,
    partial_credit: bool = False,
    test_seconds: float = 5.0,
    total_seconds: float = 30.0,
    memory_mib: int = 1024,
    unprotected: bool = False,
) -> dict[str, float]:
    """1.0 where the Python program in a response passes all tests, else 0.0; and the share of tests that it passes.

    The program is the response's last block between ``` that is tagged as Python, else its last block without a tag,
    else all of it. Each test runs it in a process of its own, without network, other processes, and files outside of a
    new folder (`jail`).

    Args:
        ground_truth: see LABELS, also as JSON.
        partial_credit: the share is the score.
        test_seconds: time limit of a test; total_seconds: time limit of all tests of a response: tests beyond it fail.
        memory_mib: memory limit of a process.
        unprotected: run tests without the jail where the kernel lacks it.
    Raises:
        ValueError: the label is none of these.
        RuntimeError: programs cannot be confined here.
    """
    tests, expected = trials_of(ground_truth)
    folder = tempfile.mkdtemp(prefix="megappo_trial_")
    job = {
        "code": program_in(solution_str),
        "tests": tests,
        "test_seconds": test_seconds,
        "total_seconds": total_seconds,
        "memory_bytes": memory_mib * 2**20,
        "is_protected": not unprotected,
        "folder": folder,
    }
    try:
        outcomes = zip(_tried(job), tests, expected, strict=False)  # tests without time have no outcome
        num_passed = sum(_passes(*one) for one in outcomes)
    finally:
        subprocess.run(["rm", "-rf", folder])  # shutil cannot remove a thousand folders within each other
    share = num_passed / len(tests)
    return {"score": share if partial_credit else float(share == 1), "passed_frac": share}


def program_in(response: str) -> str:
    """Return the last block of a response that is tagged as Python, else its last without a tag, else all of it."""
    of_tag: dict[str, str] = {}
    tag = None
    block = list[str]()
    for line in [*response.split("\n"), FENCE]:  # a last block without an end has one, too
        if tag is None:
            tag = _opened(line)
            block = []
        elif (end := line.rstrip()).endswith(FENCE):
            of_tag["py" if tag.startswith("py") else tag] = "\n".join([*block, end.rstrip("`")])
            tag = None
        else:
            block.append(line)
    return of_tag.get("py", of_tag.get("", response))


def _opened(line: str) -> str | None:
    """Return the tag of the block that begins with a line; None if no block does. Such a line ends with backquotes and
    maybe a tag, or begins with these and continues. No regular expression does this in linear time."""
    before, fence, rest = line.partition(FENCE)
    after = rest.lstrip("`")
    words = after.split()
    if not fence or "`" in before + after or (len(words) > 1 and before.strip()):
        return None
    return words[0].lower() if words else ""


def trials_of(label: Any) -> tuple[list[JsonObject], list[Any]]:
    """Return the tests for `trial`, and what each expects: an output, a list of results that count as right, or None
    if the test decides itself.

    Raises:
        ValueError: the label has no such tests.
    """
    tests = _parsed(label) if isinstance(label, str) else label
    match tests:
        case {"inputs": [_, *_] as inputs, "outputs": [_, *_] as outputs} if len(inputs) == len(outputs):
            name = tests.get("fn_name")
            if not name:
                return [{"stdin": _text(one)} for one in inputs], [_text(one) for one in outputs]
            called = [{"function": name, "arguments": one} for one in _arguments(inputs)]
            return called, [[one, _parsed(one)] if isinstance(one, str) else [one] for one in outputs]
        case {"test": str(test), "entry_point": str(name)}:
            return [{"test": test, "entry_point": name}], [None]
        case str():
            return [{"test": tests, "entry_point": None}], [None]
        case [str(), *_] if all(isinstance(one, str) for one in tests):
            return [{"test": one, "entry_point": None} for one in tests], [None] * len(tests)
    raise ValueError(f"code needs tests as label, {LABELS}; found {label!r:.80}")


def code_label(label: Any) -> None:
    """Check that a label's tests can be run, and test something.

    Raises:
        ValueError: they cannot.
    """
    for one in trials_of(label)[0]:
        text = one.get("test", "run()")
        try:
            with warnings.catch_warnings(action="ignore"):  # about escapes
                nodes = map(type, ast.walk(ast.parse(text)))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"code cannot run the test {text!r:.80}: {error}") from error
        if not {ast.Assert, ast.Call} & set(nodes):
            raise ValueError(f"code needs tests as label, {LABELS}; {text!r:.80} asserts nothing")


def _tried(job: JsonObject) -> Iterator[JsonObject]:
    """Yield the outcome of each test that was tried, as `trial` writes them: one is in memory at a time.

    Raises:
        RuntimeError: programs cannot be tried or confined here.
    """
    environment = {"PATH": os.defpath, "PYTHONPATH": str(PACKAGE_ROOT), "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}
    command = [*PYTHON, "-s", "-m", "megappo.lab.graders.trial"]
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
        given.write(json.dumps(job).encode())
        given.seek(0)
        trial = subprocess.Popen(
            command,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
        )
        timer = Timer(job["total_seconds"] + ENDING_SECONDS, trial.kill)
        timer.daemon = True
        timer.start()
        try:
            with trial:
                outcomes = (json.loads(line) for line in trial.stdout if line.endswith(b"\n"))
                begun = next(outcomes, None)
                if begun == {}:
                    yield from outcomes
        finally:
            timer.cancel()
        errors.seek(0)
        cause = errors.read().decode(errors="replace")[-1000:]
    if begun is None:
        raise RuntimeError(f"programs cannot be tried: {cause or 'it took too long'}")
    if begun:
        remedy = "run elsewhere, or without protection by reward.options={code: {unprotected: true}}"
        raise RuntimeError(f"programs cannot be confined here: {begun['unprotected']}; {remedy}")


def _passes(outcome: JsonObject, test: JsonObject, expected: Any) -> bool:
    if outcome["status"] != 0:
        return False
    if "stdin" in test:
        return _same_text(outcome["output"], expected)
    if "function" in test:
        try:
            result = json.loads(outcome["output"])
        except (ValueError, RecursionError):
            return False
        return any(result in (one, [one]) or [result] == one for one in expected)
    return True


def _same_text(output: str, expected: str) -> bool:
    """Compare texts without spaces at the ends of lines and the last digits of decimal numbers."""
    lines, wanted = (text.strip().splitlines() for text in (output, expected))
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(line: str, expected: str) -> bool:
    wanted = expected.split()
    words = line.split(maxsplit=len(wanted))  # a long line has millions of words
    return len(words) == len(wanted) and all(map(_same_word, words, wanted))


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    try:
        return "." in expected and math.isclose(
            float(word),
            float(expected),
            rel_tol=TOLERANCE,
            abs_tol=TOLERANCE,
        )
    except ValueError:
        return False


def _arguments(inputs: Sequence[Any]) -> list[list[Any]]:
    """Return the arguments of each call: a list, or a text with one on each line; the lines are JSON if all are."""
    try:
        return [_lines(one, json.loads) for one in inputs]
    except (ValueError, RecursionError):
        return [_lines(one, str) for one in inputs]


def _lines(given: Any, read: Callable[[str], Any]) -> list[Any]:
    if isinstance(given, str):
        return list(map(read, given.splitlines()))
    return given if isinstance(given, list) else [given]


def _text(given: Any) -> str:
    """Return a program's input or output as a text; it may be a list of lines."""
    return "\n".join(map(str, given)) if isinstance(given, Sequence) and not isinstance(given, str) else str(given)


def _parsed(text: str) -> Any:
    """Return the value of a text that is JSON, else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
