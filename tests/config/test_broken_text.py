"""Configs that cannot be read, or not safely: what is no YAML, bombs, bases, odd bytes, odd files, odd arguments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def bomb(levels: int, leaf: str, node: str) -> str:
    """Each level holds the one below twice."""
    lines = [f"a0: &a0 {leaf}", *(f"a{i}: &a{i} {node.format(f'*a{i - 1}')}" for i in range(1, levels))]
    return "\n".join(["base: run.yaml", *lines, ""])


DOCUMENTS = {
    "": "bad.yaml:1: expected sections such as `model:`, found nothing",
    "# nothing\n": "bad.yaml:1: expected sections such as `model:`, found nothing",
    "- 1\n": "bad.yaml:1: expected sections such as `model:`, found [1]",
    "just text\n": "bad.yaml:1: expected sections such as `model:`, found 'just text'",
    "model: {path: m\n": "bad.yaml:2: not valid YAML: while parsing a flow mapping, expected ',' or '}'",
    "a: \tb: c\n": "bad.yaml:1: not valid YAML: ",
    "actor:\n\tclip_ratio: 1\n": "bad.yaml:2: not valid YAML: while scanning for the next token, found",
    "a: 1\n---\na: 2\n": "bad.yaml:2: not valid YAML: expected a single document in the stream, but found another",
    "%YAML 9.9\n---\na: 1\n": "bad.yaml:1: not valid YAML: found incompatible YAML document",
    "actor: *nowhere\n": "bad.yaml:1: not valid YAML: found undefined alias 'nowhere'",
    "actor: &a 1\ncritic: &a 2\n": "bad.yaml:2: not valid YAML: found duplicate anchor 'a'",
    "ref: 'x\n": "bad.yaml:2: not valid YAML: while scanning a quoted scalar, found unexpected end of stream",
    "actor: {clip_ratio: 1\0}\n": "bad.yaml:1: not valid YAML: the character '\\x00' is not allowed: remove it",
    "actor: 1\ncritic: \x07\n": "bad.yaml:2: not valid YAML: the character '\\x07' is not allowed: remove it",
    'model: {path: "\\ud800"}\n': "bad.yaml:1: model.path: 'utf-8' codec can't encode character '\\ud800' in position",
    "base: bad.yaml\n": "bad.yaml:1: base: goes round in circles: bad.yaml -> bad.yaml: remove one",
    "\nbase: absent.yaml\n": "bad.yaml:2: base: cannot read absent.yaml: No such file or directory (looked in",
    "base: 3\n": "bad.yaml:1: base: expected a path or a list of paths, found 3",
    "base: [run.yaml, [run.yaml]]\n": "bad.yaml:1: base: expected a path or a list of paths, found ['run.yaml', ['run",
    'base: "a\\0b"\n': "bad.yaml:1: base: expected a path or a list of paths, found ['a\\x00b']",
    "base: ''\n": "bad.yaml:1: base: expected a path, found '' (it is empty",
    f"base: {'b' * 5000}\n": "bad.yaml:1: base: cannot read " + "b" * 80,
    "base: pipe\n": "bad.yaml:1: base: cannot read pipe: it is no ordinary file: name a file",
    "base: circle\n": "bad.yaml:1: base: cannot read circle: Too many levels of symbolic links: correct the path",
    "base: run.yaml\nalgorithm.adv_estimator: rloo\n": (
        "bad.yaml:2: algorithm.adv_estimator: unknown key; dots are for the command line; here nest it: "
        "algorithm: {adv_estimator: ...}"
    ),
    "base: run.yaml\nactor: {<<: {}}\n": "bad.yaml:2: merge keys (<<) are not read; use base:",
    "base: run.yaml\nactor: &a {optim: *a}\n": "bad.yaml: it nests too deeply, or an alias holds itself: write out",
    "base: run.yaml\nactor: &a [*a]\n": "bad.yaml: it nests too deeply, or an alias holds itself",
    "base: run.yaml\nactor: {[1]: 2}\n": "bad.yaml:2: a key must be a name",
    "base: run.yaml\nactor: {? {a: 1} : 2}\n": "bad.yaml:2: a key must be a name",
    'base: run.yaml\nactor: {"\\ud800": 2}\n': "bad.yaml:2: a key must be a name",
    "base: run.yaml\nactor: {'': 2}\n": "bad.yaml:2: a key must be a name",
    f"base: run.yaml\nactor: {{{'k' * 1001}: 1}}\n": "bad.yaml:2: a key must be a name of 1 to 1000 printable",
    "base: run.yaml\nactor: {}\nactor: {}\n": "bad.yaml:3: actor: set twice, first on line 2; remove one",
    "base: run.yaml\nrollout: {stop: [{a: 1, a: 2}]}\n": "bad.yaml:2: rollout.stop.0.a: set twice, first on line 2",
    "base: run.yaml\nplacement:\n  actor: all\n  critic, actor: 0-3\n": (
        "bad.yaml:4: placement.actor: set twice, first on line 3; remove one"
    ),
    "base: run.yaml\nplacement:\n  actor, critc: 0-3\n": (
        "bad.yaml:3: placement.critc: unknown key; did you mean placement.critic?"
    ),
    "base: run.yaml\nplacement: {actor: , critic: 0-1}\n": "bad.yaml:2: placement.actor: expected text, found null",
    "base: run.yaml\nplacement: {critic: 0-1, actor}\n": "bad.yaml:2: placement.actor: expected text, found null",
    "base: run.yaml\ndata: !!set {shuffle}\n": "bad.yaml:2: tags (! or !!) are not read: leave it out, and quote what",
    "base: run.yaml\nreward: !!omap [a: 1]\n": "bad.yaml:2: tags (! or !!) are not read",
    "base: run.yaml\nreward: !!pairs [a: 1]\n": "bad.yaml:2: tags (! or !!) are not read",
    "base: run.yaml\nmodel: {path: !!binary aGk=}\n": "bad.yaml:2: tags (! or !!) are not read",
    "base: run.yaml\nmodel: !!python/object:os.system {}\n": "bad.yaml:2: tags (! or !!) are not read",
    "base: run.yaml\nmodel: !mine {}\n": "bad.yaml:2: tags (! or !!) are not read",
    "base: run.yaml\ntrainer: {seed: 2020-13-45}\n": 'bad.yaml:2: trainer.seed: expected int >= 0, found "2020-13-45"',
    "base: run.yaml\ntrainer: {seed: =}\n": 'bad.yaml:2: trainer.seed: expected int >= 0, found "="',
    f"base: run.yaml\ntrainer: {{seed: {'9' * 5000}}}\n": (
        "bad.yaml:2: trainer.seed: a number of 5,000 characters: correct it, or quote it"
    ),
    f"base: run.yaml\ntrainer: {{seed: 1{':59' * 2000}}}\n": "bad.yaml:2: trainer.seed: a number of 6,001 characters",
    "base: run.yaml\ntrainer: {seed: 0x_}\n": "bad.yaml:2: trainer.seed: invalid literal for int() with base 16: ''",
    "base: run.yaml\ntrainer: {seed: 0b_}\n": "bad.yaml:2: trainer.seed: invalid literal for int() with base 2: ''",
    f"base: run.yaml\nactor: {'[' * 100_000}\n": "bad.yaml: it nests too deeply",
    f"base: run.yaml\nactor: {'{a: ' * 50_000}\n": "bad.yaml: it nests too deeply",
    f"base: run.yaml\nactor: [{'1, ' * 60_000}]\n": "bad.yaml:2: more than 5,000 keys and values, aliases written out",
    f"base: run.yaml\nactor: {'x' * 300_000}\n": "bad.yaml: it has 300,023 bytes, more than 262,144: is it the right",
    bomb(30, "{b: 1}", "{{x: {0}, y: {0}}}"): "bad.yaml:2: more than 5,000 keys and values, aliases written out",
    bomb(30, "[1]", "[{0}, {0}]"): "bad.yaml:2: more than 5,000 keys and values, aliases written out",
    bomb(30, "[1]", "{{? [{0}, {0}] : 1}}"): "bad.yaml:3: a key must be a name",
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
    b"PK\x03\x04": "bad.yaml:1: not valid YAML: the character '\\x03' is not allowed: remove it",
}


@pytest.mark.parametrize(("text", "message"), BYTES.items(), ids=range(len(BYTES)))
def test_a_file_that_is_not_text(run_folder, refusals, text, message):
    (run_folder / "bad.yaml").write_bytes(text)
    assert refusals(config="bad.yaml")[0].startswith(message)


PATHS = {
    "absent.yaml": "No such file or directory (looked in ",
    "absent/run.yaml": "No such file or directory (looked in ",
    "run.yaml/x.yaml": "Not a directory: correct the path or its permissions",
    "model.yaml": "it is a folder: name a file",
    "pipe.yaml": "it is no ordinary file: name a file",
    "zero.yaml": "it is no ordinary file: name a file",
    "circle.yaml": "Too many levels of symbolic links: correct the path",
    "y" * 5000 + ".yaml": "File name too long: correct the path",
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
    lines = ("from megappo import plan", "import os, sys", "if os.getuid() == 0: os.setuid(65534)")
    code = "\n".join([*lines, "sys.exit(plan.main(['run.yaml']))"])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, **CAPTURED)
    assert (done.returncode, done.stderr) == (
        2,
        "error: run.yaml: Permission denied: correct the path or its permissions\n",
    )


CAPTURED = {"capture_output": True, "text": True, "timeout": 60}


def test_bases_that_name_each_other(run_folder, refusals):
    (run_folder / "a.yaml").write_text("base: b.yaml\n")
    (run_folder / "b.yaml").write_text("\nbase: a.yaml\n")
    assert refusals(config="a.yaml") == [
        "b.yaml:2: base: goes round in circles: a.yaml -> b.yaml -> a.yaml: remove one"
    ]


def test_the_error_of_a_base_of_two_files_comes_once(run_folder, refusals):
    (run_folder / "0.yaml").write_text("base: run.yaml\nrollout: {n: 3, n: 4}\n")
    for name in ("1.yaml", "2.yaml"):
        (run_folder / name).write_text("base: 0.yaml\n")
    (run_folder / "3.yaml").write_text("base: [1.yaml, 2.yaml]\n")
    assert refusals(config="3.yaml") == ["0.yaml:2: rollout.n: set twice, first on line 2; remove one"]


def test_of_thousands_of_errors_the_first_are_printed(run_folder, refusals):
    text = "base: run.yaml\nactor:\n" + "".join(f"  clip_ratio{i}: 1\n" for i in range(2000))
    (run_folder / "bad.yaml").write_text(text)
    errors = refusals(config="bad.yaml")
    assert (
        errors[0] == "bad.yaml:3: actor.clip_ratio0: unknown key; did you mean actor.clip_ratio or actor.clip_ratio_c?"
    )
    assert len(errors) == 21 and errors[-1] == "and more: correct these first"


def test_a_list_of_thousands_of_wrong_values_is_one_error(refusals):
    (error,) = refusals(f"data.train_files=[{'1, ' * 4000}]")
    expected = "non-empty list of text | keys with float >= 0"
    assert error == f"command line: data.train_files: expected {expected}, found [{'1, ' * 26}1..."


ARGUMENTS = {
    "rollout.n": "'rollout.n': expected key=value, such as trainer.total_steps=10",
    "=3": "'=3': expected key=value",
    "rollout.stop=[a": "not valid YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'; "
    "correct it, or quote what is text (in 'rollout.stop=[a')",
    "rollout.stop=!!python/name:os.system": "tags (! or !!) are not read: leave it out",
    "model.path=caf\udce9": "not valid YAML: the character '\\udce9' is not allowed: remove it",
    "caf\udce9=1": "'caf\\udce9=1': a key must be a name of 1 to 1000 printable characters",
    "mod\u202eel.path=1": "'mod\\u202eel.path=1': a key must be a name",
    "actor..lr=1": "'actor..lr=1': a key must be a name",
    "a" * 100_000 + "=1": "a key must be a name of 1 to 1000 printable characters",
    "actor=" + "[" * 100_000: "it nests too deeply",
    "trainer.seed=\x1b[2J": "not valid YAML: the character '\\x1b' is not allowed: remove it",
}


@pytest.mark.parametrize(("argument", "message"), ARGUMENTS.items(), ids=range(len(ARGUMENTS)))
def test_an_argument_that_cannot_be_read(refusals, argument, message):
    (error,) = refusals(argument)
    assert error.startswith("command line: ") and message in error


ACCEPTED = {
    "base: run.yaml\ntrainer: {output_dir: 2026-11-22}\n": 'output_dir="2026-11-22"',
    "base: run.yaml\ntrainer: {output_dir: =}\n": 'output_dir="="',
    "\ufeffbase: run.yaml\n": "nothing is wrong",
    "base: run.yaml\r\ntrainer: {seed: 3}\r\n": "seed=3",
    "base: run.yaml\nactor: &a {parallel: &p {tensor: 2}}\ncritic: {parallel: *p}\n": "critic: data 2 x tensor 2",
    "base: run.yaml\nplacement: {actor, critic: 0-3, rollout: 0}\n": 'actor="0-3"  critic="0-3"  ref=null  rollout="0"',
    "base: run.yaml\nplacement: {rollout: 0-3, ref, actor, critic: all}\n": 'critic="all"  ref="all"  rollout="0-3"',
    "base: run.yaml\nplacement: {'actor', critic: 0-3}\n": 'actor="0-3"  critic="0-3"',
    "base: run.yaml\nplacement: {ref: , critic: 0-3}\n": 'critic="0-3"  ref=null',
    "base: run.yaml\nplacement: {ref: null, critic: 0-3}\n": 'critic="0-3"  ref=null',
}


@pytest.mark.parametrize(("text", "shown"), ACCEPTED.items(), ids=range(len(ACCEPTED)))
def test_what_is_read_as_it_is_meant(run_folder, accepted, text, shown):
    (run_folder / "good.yaml").write_text(text)
    printed = accepted(config="good.yaml")
    assert shown in printed


def test_names_before_a_comma_share_a_value_on_the_command_line_too(accepted):
    assert 'actor="0-3"  critic="0-3"  ref=null  rollout="0-1"' in accepted(
        "placement={actor, critic: 0-3, rollout: 0-1}"
    )


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
    "bytes": ([b"run.yaml", b"caf\xe9=1"], {}, "command line: 'caf\\udce9=1': a key must be a name"),
    "path": ([b"caf\xe9.yaml"], {}, "caf\\udce9.yaml: No such file or directory"),
    "ascii": ([*RUN, "model.path=é".encode()], {"PYTHONIOENCODING": "ascii"}, "model.path: no folder \\xe9 (looked"),
    "ranks": ([b"run.yaml"], {"WORLD_SIZE": "\u0664"}, "placement: every component is on 'all' ranks: set their"),
    "key": ([*RUN, b"actor.ppo_mini_batch_size=3"], {}, "command line: actor.ppo_mini_batch"),
    "model": ([*RUN, b"model.path=absent"], {}, "command line: model.path: no folder absent"),
    "many": ([b"run.yaml", b"--world-size=100001"], {}, "expected a number of ranks of at least 1, at most 100000"),
    "digits": ([b"run.yaml", "--world-size=\u0664".encode()], {}, "expected a number of ranks of at least 1"),
}


@pytest.mark.parametrize(("arguments", "environment", "message"), PROCESSES.values(), ids=PROCESSES)
def test_the_command_itself(run_folder, arguments, environment, message):
    (run_folder / "bad.yaml").write_text("base: run.yaml\nmodel: 3\n")
    command = [sys.executable.encode(), b"-m", b"megappo.plan", *arguments]
    variables = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    variables |= {"PYTHONPATH": str(REPOSITORY)} | environment
    done = subprocess.run(command, env=variables, **CAPTURED)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
