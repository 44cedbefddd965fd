"""Configs that cannot be read, or not safely: what is no YAML, bases, odd bytes, odd files, odd arguments."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from megappo.config.config_error import ConfigError
from megappo.config.loading import load_config

REPOSITORY = Path(__file__).parents[2]


NOT_SUPPORTED = "bad.yaml:2: not valid YAML: tags (!) are not supported: drop it"
DOCUMENTS = {
    "": "bad.yaml:1: expected sections such as `model:`",
    "# nothing\n": "bad.yaml:1: expected sections such as `model:`",
    "- 1\n": "bad.yaml:1: expected sections such as `model:`",
    "just text\n": "bad.yaml:1: expected sections such as `model:`",
    "actor:\n    clip_ratio: 0.1\n  ppo_epochs: 2\n": "bad.yaml:3: not valid YAML: the line is not indented like",
    "model: {path: m\n\n\n": "bad.yaml:1: not valid YAML: { is not closed; correct it",
    "data:\n  val_files: [a\ntrainer:\n  seed: 1\n": "bad.yaml:2: not valid YAML: [ is not closed; correct it",
    "model:\n  path: m\n    dtype: fp32\n": "bad.yaml:3: not valid YAML: a key follows a value: the inden",
    "a: \tb: c\n": "bad.yaml:1: not valid YAML: ",
    "actor:\n\tclip_ratio: 1\n": "bad.yaml:2: not valid YAML: a tab cannot indent: use spaces; correct",
    "a: 1\n---\na: 2\n": "bad.yaml:2: not valid YAML: but found another document",
    "actor: *nowhere\n": "bad.yaml:1: not valid YAML: found undefined alias 'nowhere'",
    "ref: 'x\n": "bad.yaml:1: not valid YAML: ' is not closed; correct it",
    "actor: {clip_ratio: 1\0}\n": "bad.yaml: not valid YAML: unacceptable character #x0000: special characters are not",
    "base: bad.yaml\n": "bad.yaml:1: base: cannot read bad.yaml: it is a base of itself: remove one",
    "\nbase: absent.yaml\n": "bad.yaml:2: base: cannot read absent.yaml: No such file or directory (looked in",
    "base: 3\n": "bad.yaml:1: base: expected a path or a list of paths, found 3",
    "base: [run.yaml, [run.yaml]]\n": "bad.yaml:1: base: expected a path or a list of paths, found ['run.yaml', ['run",
    'base: "a\\0b"\n': "bad.yaml:1: base: cannot read a\\x00b: embedded null byte: correct the path",
    "base: ''\n": "bad.yaml:1: base: expected a path or a list of paths, found ''",
    "base: pipe\n": "bad.yaml:1: base: cannot read pipe: it is a folder, or no ordinary file: name a file",
    "base: circle\n": "bad.yaml:1: base: cannot read circle: Too many levels of symbolic links (looked in",
    "base: run.yaml\nalgorithm.adv_estimator: rloo\n": (
        "bad.yaml:2: algorithm.adv_estimator: unknown key; dots are for the command line; here nest it: "
        "algorithm: {adv_estimator: ...}"
    ),
    "base: run.yaml\nactor: {<<: {}}\n": "bad.yaml:2: actor.<<: unknown key",
    "base: run.yaml\nactor: &a {optim: *a}\n": (
        "bad.yaml:2: not valid YAML: with its aliases (*) it holds inf values, more than 65,536; correct it"
    ),
    "base: run.yaml\nactor: {}\nactor: {}\n": "bad.yaml:3: actor: set twice, first at bad.yaml:2; remove one",
    "base: run.yaml\nactor: {optim: {lr: 1, lr: 2}}\n": "bad.yaml:2: actor.optim.lr: set twice, first at bad.yaml:2",
    "base: run.yaml\nplacement:\n  actor: all\n  critic, actor: 0-3\n": (
        "bad.yaml:4: placement.actor: set twice, first at bad.yaml:3; remove one"
    ),
    "base: run.yaml\nplacement:\n  actor, critc: 0-3\n": (
        "bad.yaml:3: placement.critc: unknown key; did you mean placement.critic?"
    ),
    "base: run.yaml\nplacement: {critic: 0-1, actor}\n": "bad.yaml:2: placement.actor: expected text, found null",
    "base: run.yaml\ndata: !!set {shuffle}\n": NOT_SUPPORTED,
    "base: run.yaml\nmodel: {path: !!binary aGk=}\n": NOT_SUPPORTED,
    "base: run.yaml\nmodel: !!python/object:os.system {}\n": NOT_SUPPORTED,
    "base: run.yaml\ntrainer: {seed: 2020-13-45}\n": 'bad.yaml:2: trainer.seed: expected int >= 0, found "2020-13-45"',
    "base: run.yaml\ntrainer: {seed: 0x_}\n": "bad.yaml:2: not valid YAML: 0x_ is not a decimal number; corr",
    f"base: run.yaml\nactor: {'[' * 100_000}\n": "bad.yaml:2: not valid YAML: it is nested too deep",
    "".join(f"{c}: &{c} [{','.join(['*' + b] * 9)}]\n" for b, c in pairwise("zabcdefgh")).replace("*z", "1"): (
        "bad.yaml:5: not valid YAML: with its aliases (*) it holds 66,430 values, more than 65,536"
    ),
    "base: run.yaml\ntrainer: {total_steps: 0100}\n": "bad.yaml:2: not valid YAML: 0100 is not a decimal number; co",
    "base: run.yaml\ntrainer: {time_limit: 1:30:00}\n": "bad.yaml:2: not valid YAML: 1:30:00 is not a decimal number",
    f"base: run.yaml\nactor: {'x' * 300_000}\n": "bad.yaml: it has 300,023 bytes, more than 262,144: is it the right",
}


@pytest.fixture
def odd_folder(run_folder) -> Path:
    (run_folder / "circle").symlink_to("circle")
    os.mkfifo(run_folder / "pipe")
    return run_folder


@pytest.mark.parametrize(("text", "message"), DOCUMENTS.items(), ids=range(len(DOCUMENTS)))
def test_a_file_that_cannot_be_read(odd_folder, refusals, text, message):
    (odd_folder / "bad.yaml").write_text(text)
    assert refusals(config="bad.yaml")[0].startswith(message)


BYTES = {
    b"\xff\xfeb\x00a\x00": "bad.yaml: it is not UTF-8 text (line 1): save it as UTF-8",
    "base: run.yaml\nactor: {}\n".encode("utf-16"): "bad.yaml: it is not UTF-8 text (line 1): save it as UTF-8",
    "base: run.yaml\n# é\n".encode("latin-1"): "bad.yaml: it is not UTF-8 text (line 2): save it as UTF-8",
    b"\x80\x04\x95": "bad.yaml: it is not UTF-8 text (line 1)",
    b"PK\x03\x04": "bad.yaml: not valid YAML: unacceptable character #x0003",
}


@pytest.mark.parametrize(("text", "message"), BYTES.items(), ids=range(len(BYTES)))
def test_a_file_that_is_not_text(run_folder, refusals, text, message):
    (run_folder / "bad.yaml").write_bytes(text)
    assert refusals(config="bad.yaml")[0].startswith(message)


PATHS = {
    "absent.yaml": "No such file or directory (looked in ",
    "absent/run.yaml": "No such file or directory (looked in ",
    "run.yaml/x.yaml": "Not a directory (looked in ",
    "model.yaml": "it is a folder, or no ordinary file: name a file",
    "pipe.yaml": "it is a folder, or no ordinary file: name a file",
    "zero.yaml": "it is a folder, or no ordinary file: name a file",
    "circle.yaml": "Too many levels of symbolic links (looked in ",
    "y" * 5000 + ".yaml": "File name too long (looked in ",
    "caf\udce9.yaml": "No such file or directory (looked in ",
}


@pytest.mark.parametrize(("path", "message"), PATHS.items(), ids=range(len(PATHS)))
def test_a_path_that_leads_to_no_config(run_folder, refusals, path, message):
    (run_folder / "model").rename(run_folder / "model.yaml")
    os.mkfifo(run_folder / "pipe.yaml")
    (run_folder / "zero.yaml").symlink_to("/dev/zero")
    (run_folder / "circle.yaml").symlink_to("circle.yaml")
    (error,) = refusals(config=path)
    assert message in error


def test_a_file_that_may_not_be_read(run_folder):
    """The process runs as nobody, because root can read every file."""
    (run_folder / "run.yaml").chmod(0)
    run_folder.chmod(0o755)
    lines = ("from megappo.commands import plan", "import os, sys", "if os.getuid() == 0: os.setuid(65534)")
    code = "\n".join([*lines, "sys.exit(plan.main(['run.yaml']))"])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, **CAPTURED)
    assert done.returncode == 2
    assert done.stderr.startswith("error: run.yaml: Permission denied (looked in ")


CAPTURED = {"capture_output": True, "text": True, "timeout": 60}


def test_bases_that_name_each_other(run_folder, refusals):
    (run_folder / "a.yaml").write_text("base: b.yaml\n")
    (run_folder / "b.yaml").write_text("\nbase: a.yaml\n")
    assert refusals(config="a.yaml") == ["b.yaml:2: base: cannot read a.yaml: it is a base of itself: remove one"]


def test_the_error_of_a_base_of_two_files_comes_once(run_folder, refusals):
    (run_folder / "0.yaml").write_text("base: run.yaml\nrollout: {n: 3, n: 4}\n")
    for name in ("1.yaml", "2.yaml"):
        (run_folder / name).write_text("base: 0.yaml\n")
    (run_folder / "3.yaml").write_text("base: [1.yaml, 2.yaml]\n")
    assert refusals(config="3.yaml") == ["0.yaml:2: rollout.n: set twice, first at 0.yaml:2; remove one"]


def test_of_thousands_of_errors_the_first_are_listed_and_the_others_counted(run_folder):
    (run_folder / "bad.yaml").write_text("base: run.yaml\n" + "".join(f"x{i}: 1\n" for i in range(5001)))
    with pytest.raises(ConfigError) as refused:
        load_config(run_folder / "bad.yaml")
    *first, last = refused.value.errors
    assert len(first) == 50 and first[0].startswith(f"{run_folder}/bad.yaml:2: x0: unknown key; ")
    assert last == "4951 more errors: correct the first ones"


def test_a_list_of_thousands_of_wrong_values_is_one_error(refusals):
    (error,) = refusals(f"data.train_files=[{'1, ' * 4000}]")
    expected = "non-empty list of text | keys with float >= 0"
    assert error == f"command line: data.train_files: expected {expected}, found 1"


ARGUMENTS = {
    "rollout.n": "'rollout.n': expected key=value, such as trainer.total_steps=10",
    "=3": "'=3': expected key=value",
    "++actor.optim.l=1": "actor.optim.l: unknown key; did you mean actor.optim.lr?",
    "algorithm={gamma:1.0,lam:0.9}": "a key and its value have no space between them: write {key: value}",
    "~actor.optim.lr": "'~actor.optim.lr': keys cannot be removed: set the key to its default",
    "actor..lr=1": "'actor..lr=1': expected key=value",
    "rollout.stop=[a": "not valid YAML: [ is not closed; correct it, or quote what is text (in 'rollout.stop=[a')",
    "rollout.stop=!!python/name:os.system": "tags (!) are not supported: drop it",
    "model.path=caf\udce9": "not valid YAML: unacceptable character #xdce9: special characters are not allowed",
    "caf\udce9=1": "'caf\\udce9=1': expected key=value",
    "actor=" + "[" * 100_000: "not valid YAML: it is nested too deep",
    "trainer.seed=\x1b[2J": "not valid YAML: unacceptable character #x001b",
    "placement={critic: 0-1, actor,}": "placement.actor has no ranks: write {actor, critic: 0-7}",
}


@pytest.mark.parametrize(("argument", "message"), ARGUMENTS.items(), ids=range(len(ARGUMENTS)))
def test_an_argument_that_cannot_be_read(refusals, argument, message):
    (error,) = refusals(argument)
    assert error.startswith("command line: ") and message in error


ACCEPTED = {
    "base: run.yaml\ntrainer: {output_dir: 2026-11-22}\n": 'output_dir="2026-11-22"',
    "\ufeffbase: run.yaml\n": "nothing is wrong",
    "base: run.yaml\r\ntrainer: {seed: 3}\r\n": "seed=3",
    "base: run.yaml\nactor: &a {parallel: &p {tensor: 2}}\ncritic: {parallel: *p}\n": "critic: data 2 x tensor 2",
    "base: run.yaml\nplacement: {'actor, critic': 0-3, rollout: 0}\n": 'reward_model=null  rollout="0"',
    "base: run.yaml\nplacement: {actor, critic: 0-3, rollout: 0}\n": 'reward_model=null  rollout="0"',
    "base: run.yaml\nplacement: {ref: , critic: 0-3}\n": 'critic="0-3"  ref=null',
}


@pytest.mark.parametrize(("text", "shown"), ACCEPTED.items(), ids=range(len(ACCEPTED)))
def test_what_is_read_as_it_is_meant(run_folder, accepted, text, shown):
    (run_folder / "good.yaml").write_text(text)
    printed = accepted("--all-keys", config="good.yaml")
    assert shown in printed


def test_what_must_be_set(run_folder, refusals):
    (run_folder / "bad.yaml").write_text("actor: {}\n")
    assert [error.split(": must be set")[0] for error in refusals(config="bad.yaml")] == [
        "bad.yaml: model.path",
        "bad.yaml: data.train_files",
        "bad.yaml: trainer.output_dir",
    ]


RUN = (b"run.yaml", b"--world-size=4")
PROCESSES = {
    "text": ([b"bad.yaml"], {}, "bad.yaml:2: model: expected section, found"),
    "bytes": ([b"run.yaml", b"caf\xe9=1"], {}, "command line: 'caf\\udce9=1': expected key=value"),
    "path": ([b"caf\xe9.yaml"], {}, "caf\\udce9.yaml: No such file or directory"),
    "ascii": ([*RUN, "model.path=é".encode()], {"PYTHONIOENCODING": "ascii"}, "model.path: no folder \\xe9 (looked"),
    "key": ([*RUN, b"actor.ppo_mini_batch_size=3"], {}, "command line: actor.ppo_mini_batch"),
    "model": ([*RUN, b"model.path=absent"], {}, "command line: model.path: no folder absent"),
    "many": ([b"run.yaml", b"--world-size=100001"], {}, "expected a number of at least 1, at most 100000"),
}


@pytest.mark.parametrize(("arguments", "environment", "message"), PROCESSES.values(), ids=PROCESSES)
def test_the_command_itself(run_folder, arguments, environment, message):
    (run_folder / "bad.yaml").write_text("base: run.yaml\nmodel: 3\n")
    command = [sys.executable.encode(), b"-m", b"megappo", b"plan", *arguments]
    variables = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    variables |= {"PYTHONPATH": str(REPOSITORY)} | environment
    done = subprocess.run(command, env=variables, **CAPTURED)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
