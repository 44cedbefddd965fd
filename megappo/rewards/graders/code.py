"""Programs: whether what a response writes passes its label's tests."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
ENDING_SECONDS = 20.0
TOLERANCE = 1e-6
"""Of decimal numbers that a program writes."""
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

    The program is the response's last block between ```, or else all of it. Each test runs it in a process of its own
    without network, without files but those of a new folder, and without other processes (`rewards.jail`).

    Args:
        ground_truth: see LABELS, also as JSON.
        partial_credit: the share is the score.
        test_seconds: of a test; total_seconds: of all tests of a response: those beyond fail.
        memory_mib: of a process.
        unprotected: where the kernel has no such protection, do without it.
    Raises:
        ValueError: the label is none of these.
        RuntimeError: programs cannot be confined here.
    """
    tests, expected = trials_of(ground_truth)
    job = {
        "code": program_in(solution_str),
        "tests": tests,
        "test_seconds": test_seconds,
        "total_seconds": total_seconds,
        "memory_bytes": memory_mib * 2**20,
        "is_protected": not unprotected,
    }
    passed = [_passes(outcome, one) for outcome, one in zip(_tried(job, total_seconds), expected, strict=True)]
    share = sum(passed) / len(passed)
    return {"score": share if partial_credit else float(all(passed)), "passed_frac": share}


def program_in(response: str) -> str:
    """The last block of a response, or all of it where it has none."""
    blocks = BLOCK.findall(response)
    return blocks[-1] if blocks else response


def trials_of(label: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """What `trial.Job` takes, and the expected output or result of each test (None: it says itself whether it passes).

    Raises:
        ValueError: it is no label of such tests.
    """
    told = _parsed(label) if isinstance(label, str) else label
    match told:
        case {"inputs": [_, *_] as inputs, "outputs": [_, *_] as outputs} if len(inputs) == len(outputs):
            name = told.get("fn_name")
            if not name:
                return [{"stdin": _text(one)} for one in inputs], [_text(one) for one in outputs]
            called = [{"function": name, "arguments": _arguments(one)} for one in inputs]
            return called, [_parsed(one) if isinstance(one, str) else one for one in outputs]
        case {"test": str(test), "entry_point": str(name)}:
            return [{"test": test, "entry_point": name}], [None]
        case str():
            return [{"test": told, "entry_point": None}], [None]
        case [str(), *_] if all(isinstance(one, str) for one in told):
            return [{"test": one, "entry_point": None} for one in told], [None] * len(told)
    raise ValueError(f"code needs tests as label, {LABELS}; found {label!r:.80}")


def _tried(job: Mapping[str, Any], seconds: float) -> list[dict[str, Any]]:
    package_parent = str(Path(__file__).resolve().parents[3])
    environment = {"PATH": os.defpath, "PYTHONPATH": package_parent, "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}
    done = subprocess.run(
        [sys.executable, "-s", "-m", "megappo.rewards.trial"],
        input=json.dumps(job),
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds + ENDING_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"the trial of a program ended with {done.returncode}: {done.stderr[-1000:]}")
    told = json.loads(done.stdout)
    if isinstance(told, dict):
        remedy = "run elsewhere, or without protection by reward.options={code: {unprotected: true}}"
        raise RuntimeError(f"programs cannot be confined here: {told['unprotected']}; {remedy}")
    return told


def _passes(outcome: Mapping[str, Any], expected: Any) -> bool:
    if "output" in outcome:
        return _same_text(outcome["output"], expected)
    if "result" in outcome:
        return outcome["result"] in (expected, [expected]) or [outcome["result"]] == expected
    return "passed" in outcome


def _same_text(found: str, expected: str) -> bool:
    """But for spaces at the ends of lines, and for the last digits of decimal numbers."""
    lines, wanted = ([line.split() for line in text.strip().splitlines()] for text in (found, expected))
    return len(lines) == len(wanted) and all(
        len(line) == len(other) and all(map(_same_word, line, other)) for line, other in zip(lines, wanted, strict=True)
    )


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    try:
        return "." in expected and math.isclose(float(found), float(expected), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except ValueError:
        return False


def _arguments(given: Any) -> list[Any]:
    """Of a call: a list, or a text with one on each line, as JSON."""
    if isinstance(given, str):
        return [_parsed(line) for line in given.splitlines()]
    return given if isinstance(given, list) else [given]


def _text(given: Any) -> str:
    """Of a program's input or output; a list of lines is one, too."""
    return "\n".join(map(str, given)) if isinstance(given, Sequence) and not isinstance(given, str) else str(given)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
