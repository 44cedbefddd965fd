"""Reward functions that write where they should not, change what they are given, or leave processes behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from reward_pools import load, rows_of, score, scores_of
from waiting import wait_until

from megappo.userland.rewards import RewardError, load_reward

ROOT = Path(__file__).resolve().parents[2]
DEFINE = "import json, os, signal, stat, subprocess, sys, time\n\n"
DEFINE += "def f(prompts, responses, labels):\n"
SOCKETS = "sockets = [d for d in range(3, 64) if os.path.exists(f'/proc/self/fd/{d}')]\n"
SOCKETS += "sockets = [d for d in sockets if stat.S_ISSOCK(os.fstat(d).st_mode)]\n"


def write(data: str, then: str = "time.sleep(54321)") -> str:
    return SOCKETS + f"os.write(sockets[0], {data})\n{then}"


def line(body: str) -> str:
    return f"{body} + b'\\n'"


def reply(value: str, count: int = 3, then: str = "time.sleep(54321)") -> str:
    """Write a reply to the first call of a function, with this value for each row."""
    text = f"{{'call': 1, 'result': [{value}] * {count}}}"
    return f"import json\nanswer = json.dumps({text}).encode()\n" + write(line("answer"), then)


def function(lines: str) -> str:
    return DEFINE + textwrap.indent(textwrap.dedent(lines), "    ")


CHANGES = {
    "appends": ("responses.append('x')\nreturn [0.0] * len(responses)", "returned 4 values for 3 responses"),
    "removes": ("responses.pop()\nreturn [0.0] * len(responses)", "returned 2 values for 3 responses"),
    "appends to all": (
        "for x in (prompts, responses, labels): x.append(0)\nreturn [0.0] * len(labels)",
        "returned 4 values for 3 responses",
    ),
}


@pytest.mark.parametrize(("lines", "message"), CHANGES.values(), ids=CHANGES)
def test_a_function_that_changes_its_lists_must_still_give_one_score_each(tmp_path: Path, lines: str, message: str):
    with pytest.raises(RewardError, match=message):
        score(load(tmp_path, function(lines)))


def test_what_a_function_does_to_its_lists_has_no_effect(tmp_path: Path):
    lines = "scores = [float(x) for x in labels]\nprompts.clear(); responses.clear(); labels.clear()\nreturn scores"
    labels = [0, 1, 2]
    with load(tmp_path, function(lines), num_workers=2) as pool:
        for _ in range(2):
            assert scores_of(pool.score(rows_of(["p"] * 3, ["r"] * 3, labels))) == [[0.0], [1.0], [2.0]]
    assert labels == [0, 1, 2]


FORGED = {
    "text as scores": ("'1'", r"returned '1' \(value 0\): expected a finite number .* as score"),
    "no scores": ("[]", r"returned \[\] \(value 0\): expected 1 to 64 scores, found 0"),
    "NaN": ("float('nan')", "returned nan .*: expected a finite number"),
    "NaN as a part": ("{'score': 1, 'acc': float('nan')}", "expected a finite number .* as acc, found nan"),
    "a score beyond float32": ("1e39", "expected a finite number that fits into a float32 as score, found 1e.39"),
    "too many scores": ("[1.0] * 65", "expected 1 to 64 scores, found 65"),
    "too many parts": ("{'score': 1} | dict.fromkeys(map(str, range(33)), 1)", "at most 32 further numbers, found 33"),
    "a long name": ("{'score': 1, 'x' * 65: 1.0}", "expected names of at most 64 printable characters"),
    "a name that is no text": ("{'score': 1, '\\ud800': 1}", "expected names of at most 64 printable characters"),
    "a negative weight": ("{'score': 1, 'loss_weight': -1.0}", "expected a loss_weight of 0 or more, found -1.0"),
    "a step behind the end": ("{'score': 1, 'step_scores': [[3, 1.0]]}", r"ends from 1 to 2, .*, found \[3, 1.0\]"),
    "steps that do not ascend": (
        "{'score': 1, 'step_scores': [[2, 2.0], [2, 1.0]]}",
        r"with ascending ends from 1 to 2, .*, found \[2, 1.0\]",
    ),
    "steps of characters": ("{'score': 1, 'step_scores': ['12']}", "ascending ends from 1 to 2, .*, found '12'"),
    "a failure": ("{'failed': True}", "expected a finite number .* as score, found None"),
}
DISTRUSTED = "sent something other than its results to the trainer: "
SENDS = {
    "garbage": (write(line("b'garbage' * 20")), DISTRUSTED + "b'garbagegarbage"),
    "a line of many MB": (
        write("b''", "os.set_blocking(sockets[0], True)\nos.write(sockets[0], b'x' * 2**28)\ntime.sleep(54321)"),
        DISTRUSTED + ".* exceed the limit",
    ),
    "no JSON": (write(line("b'{no json'")), DISTRUSTED + "b'{no json"),
    "deep JSON": (write(line("b'[' * 20000")), DISTRUSTED + r"b'\[\[\["),
    "no object": (write(line("b'[1.0]'")), DISTRUSTED + r"b'\[1.0\]"),
    "a number": (write(line("b'7'")), DISTRUSTED + "b'7"),
    "an answer to no call": (write(line("b'{}'")), DISTRUSTED + "b'{}"),
    "an answer to any call": (write(line("b'{\"call\": [1]}'")), DISTRUSTED + r"b'{\"call\": \[1\]}"),
    "no result": (write(line("b'{\"call\": 1}'")), "returned None; expected a list of 3 numbers"),
    "a number as a result": (write(line('b\'{"call": 1, "result": 1.0}\'')), "returned 1.0; expected a list of 3"),
    "too few scores": (reply("1.0", 1), "returned 1 values for 3 responses"),
    **{name: (reply(value), message) for name, (value, message) in FORGED.items()},
    "closes everything": ("os.closerange(3, 64)\nreturn [0.0] * 3", "ended its process"),
    "closes everything and hangs": ("os.closerange(3, 64)\ntime.sleep(54321)", r"\(closed its connection\)"),
}


@pytest.mark.parametrize(("lines", "message"), SENDS.values(), ids=SENDS)
def test_data_that_it_writes_to_the_trainers_socket_is_an_error_at_once(tmp_path: Path, lines: str, message: str):
    pool = load(tmp_path, function(lines), timeout_seconds=60)
    start = time.monotonic()
    with pytest.raises(RewardError, match=message):
        score(pool)
    assert time.monotonic() - start < 10


def test_a_partial_answer_ends_with_the_timeout(tmp_path: Path):
    pool = load(tmp_path, function(write("b'{'")), num_workers=2, timeout_seconds=1)
    start = time.monotonic()
    with pytest.raises(RewardError, match="took longer than 1 seconds and was stopped"):
        score(pool)
    assert time.monotonic() - start < 6


def test_a_trickling_answer_ends_with_the_timeout(tmp_path: Path):
    trickle = "while True:\n    os.write(sockets[0], b'\\0')\n    time.sleep(0.3)"
    pool = load(tmp_path, function(write("b'\\0'", trickle)), timeout_seconds=1)
    start = time.monotonic()
    with pytest.raises(RewardError, match="took longer than 1 seconds"):
        score(pool)
    assert time.monotonic() - start < 6


def test_a_worker_that_does_not_read_ends_with_the_timeout(tmp_path: Path):
    stop = "subprocess.Popen(['sh', '-c', f'sleep 0.3; kill -STOP {os.getpid()}'])\nreturn [0.0] * len(labels)"
    pool = load(tmp_path, function(stop), timeout_seconds=1)
    score(pool)
    wait_until(lambda: any(one.status() == psutil.STATUS_STOPPED for one in psutil.Process().children(recursive=True)))
    start = time.monotonic()
    with pytest.raises(RewardError, match="took longer than 1 seconds and was stopped"):
        pool.score(rows_of(["p" * 10_000_000], ["r"], [0]))
    assert time.monotonic() - start < 6


def test_an_answer_too_many_is_not_taken_for_the_next_one(tmp_path: Path):
    lines = reply("9.0", then="return [0.0] * 3")
    pool = load(tmp_path, function(lines))
    assert score(pool) == [9.0] * 3
    time.sleep(0.3)
    with pytest.raises(RewardError, match=DISTRUSTED + 'b\'{"call": 1'):
        score(pool)


def test_a_forked_child_that_returns_does_not_answer(tmp_path: Path):
    with load(tmp_path, function("return [float(os.fork() == 0)] * len(labels)")) as pool:
        for _ in range(3):
            assert score(pool) == [0.0, 0.0, 0.0]
            time.sleep(0.1)


ENDS = {
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "raised KeyboardInterrupt: "),
    "sys.exit": ("sys.exit('enough')", "raised SystemExit: enough"),
    "GeneratorExit": ("raise GeneratorExit", "raised GeneratorExit"),
    "its parent": ("os.kill(os.getppid(), 9)\ntime.sleep(54321)", "ended its process"),
    "a fault": ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
    "recursion": ("return f(prompts, responses, labels)", "raised RecursionError"),
    "its message fails": (
        "class Bad(Exception):\n    def __str__(self): raise KeyError(1)\nraise Bad",
        r"raised Bad: \(its message cannot be read: KeyError\)",
    ),
    "its origin": ("try: {}[7]\nexcept KeyError as e: raise ValueError('no') from e", "caused by KeyError: 7"),
}


@pytest.mark.parametrize(("lines", "message"), ENDS.values(), ids=ENDS)
def test_every_way_to_end_is_reported(tmp_path: Path, lines: str, message: str):
    with pytest.raises(RewardError, match=message):
        score(load(tmp_path, function(lines), timeout_seconds=10))


TAKES = {
    "at once": ("bytearray(2**31)", "raised MemoryError: \n"),
    "bit by bit": ("kept = []\nwhile True: kept.append('x' * 999)", "raised MemoryError: \n"),
    "torch": ("import torch\ntorch.zeros(2**31, dtype=torch.uint8)", "raised RuntimeError: .*can't allocate memory"),
    "a child": ("subprocess.run([sys.executable, '-c', 'bytearray(2**31)'], check=True)", "raised CalledProcessError"),
}


@pytest.mark.parametrize(("lines", "message"), TAKES.values(), ids=TAKES)
def test_memory_beyond_the_limit_is_refused_with_the_remedy(tmp_path: Path, lines: str, message: str):
    with pytest.raises(RewardError, match=message) as caught:
        score(load(tmp_path, function(lines), memory_limit_gib=1.0))
    assert "reward.memory_limit_gib=1.0" in str(caught.value).splitlines()[-1]


def test_memory_within_the_limit_is_fine(tmp_path: Path):
    lines = "kept = bytearray(2**29)\nreturn [float(len(kept))] * len(labels)"
    for limit in (1.0, None):
        with load(tmp_path, function(lines), memory_limit_gib=limit) as pool:
            assert score(pool) == [2.0**29] * 3


SECRETS = (
    *("MEGAPPO_ENGINE_API_KEY", "HF_TOKEN", "AWS_ACCESS_KEY_ID", "db_password", "CREDENTIALS", "SSH_AUTH_SOCK"),
    *("DB_PASS", "DB_PWD", "GITHUB_PAT", "PAT_OF_BOT"),
)
OTHERS = ("TOKENIZERS_PARALLELISM", "KEYBOARD", "CUDA_VISIBLE_DEVICES", "PWD", "OLDPWD", "INFOPATH", "BYPASS_CACHE")


def test_secrets_of_the_environment_stay_out_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in (*SECRETS, *OTHERS, "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "hidden" if name in SECRETS else "0")
    lines = f"""
        for pid in (os.getpid(), os.getppid()):  # its keeper's, too
            assert "hidden" not in open(f"/proc/{{pid}}/environ").read()
        assert not set({SECRETS}) & set(os.environ)
        return [float(name in os.environ) for name in {(*OTHERS, "OPENAI_API_KEY")}]
    """
    with load(tmp_path, function(lines)) as pool:
        assert score(pool, len(OTHERS) + 1) == [1.0] * len(OTHERS) + [0.0]
    with load(tmp_path, function(lines), pass_env=["OPENAI_API_KEY"]) as pool:
        assert score(pool, len(OTHERS) + 1) == [1.0] * (len(OTHERS) + 1)


@pytest.mark.parametrize("character", ["x", "\\u00e9", "\\U0001f600", "\\ud800", "\\n"])
def test_a_long_message_is_cut_and_reported_once(tmp_path: Path, character: str):
    pool = load(tmp_path, function(f"raise ValueError('begin' + '{character}' * 20_000_000)"))
    with pytest.raises(RewardError, match=r"raised ValueError: begin(?s:.)* \.\.\. \(20000005 characters\)") as caught:
        score(pool)
    message = str(caught.value)
    assert len(message) < 5000 and message.count("begin") == 2, "in it, and in the line that raised it"
    assert "in f\n    raise ValueError(" in message


def test_numbers_of_every_kind_and_a_lot_of_output_are_fine(tmp_path: Path, capfd):
    lines = """
        import fractions, decimal, numpy, torch
        print("x" * 1_000_000)
        half, three = fractions.Fraction(1, 2), decimal.Decimal(3)
        return [True, 1, 0.5, numpy.float32(0.5), torch.tensor(2.0), half, three, 3.4e38]
    """
    with load(tmp_path, function(lines)) as pool:
        assert score(pool, 8) == [1.0, 1.0, 0.5, 0.5, 2.0, 0.5, 3.0, 3.4e38]
    assert len(capfd.readouterr().out) == 1_000_001


def test_labels_and_texts_arrive_as_they_are(tmp_path: Path):
    labels = [None, 0.1, 10**400, {"a": [1, {"b": "\u00e9"}]}, True]
    texts = ["", "\0", "\u2028\r\n", "\U0001f600", "\ud800"]  # a lone half of a character may be sampled
    lines = f"assert (prompts, responses, labels) == ({texts!a}, {texts!a}, {labels!a})\nreturn [1.0] * 5"
    with load(tmp_path, function(lines)) as pool:
        assert scores_of(pool.score(rows_of(texts, texts, labels))) == [[1.0]] * 5


DETACH = """
def detached():
    # A session of its own, and no parent: the double fork of a daemon.
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "54321"])
        os._exit(0)
    os.wait()
    subprocess.Popen(["sleep", "54321"], start_new_session=True)
"""
LEAVES = {
    "returns": "return [0.0] * len(labels)",
    "raises": "raise KeyError",
    "dies": "os._exit(3)",
    "hangs": "time.sleep(54321)",
}


def of_this_test(program: str = "") -> list[int]:
    """Living processes that a test has started; of a program alone, if one is named."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.environ().get("REWARDS_UNDER_TEST") == os.environ["REWARDS_UNDER_TEST"]
            named = not program or process.cmdline()[:1] == [program]
            if mine and named and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def wait_for(count: int, program: str = "") -> None:
    wait_until(lambda: len(of_this_test(program)) == count)


@pytest.mark.parametrize("ending", LEAVES.values(), ids=LEAVES)
def test_detached_processes_end_with_their_worker(tmp_path: Path, ending: str):
    body = DEFINE.replace("def f", DETACH + "\ndef f") + f"    detached()\n    {ending}\n"
    pool = load(tmp_path, body, num_workers=2, timeout_seconds=2)
    if ending == LEAVES["returns"]:
        score(pool)
        wait_for(4, "sleep")
        pool.close()
    else:
        with pytest.raises(RewardError):
            score(pool)
    assert not of_this_test()


PARENT = """
import sys
from megappo.userland.rewards import load_reward
from megappo.userland.signatures import Row
pool = load_reward(sys.argv[1], num_workers=2, timeout_seconds=1000)
pool.score([Row("", "", 0, {})] * 2)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM], ids=lambda s: s.name)
def test_detached_processes_end_with_a_killed_owner(tmp_path: Path, ending: signal.Signals):
    (tmp_path / "reward.py").write_text(
        DEFINE.replace("def f", DETACH + "\ndef f") + "    detached()\n    return [0.0] * len(labels)\n"
    )
    command = [sys.executable, "-c", PARENT, f"{tmp_path}/reward.py:f"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as parent:
        assert parent.stdout.readline() == b"ready\n"
        wait_for(4, "sleep")
        parent.send_signal(ending)
        parent.wait(10)
    wait_for(0)


def test_garbage_while_the_file_is_imported_is_reported(tmp_path: Path):
    (tmp_path / "reward.py").write_text("import os, stat\n" + write(line("b'garbage'"), "") + "\ndef f(): ...\n")
    with pytest.raises(RewardError, match="sent something other than its results"):
        load_reward(f"{tmp_path}/reward.py:f", num_workers=1, timeout_seconds=20)


DESCRIPTIONS = (
    '{"ready": true}',
    '{"inputs": {"needed": "ab", "optional": null, "raw_prompts": false}, "modes": ["one"]}',
    '{"inputs": {"needed": [1], "optional": [], "raw_prompts": false}, "modes": ["one"]}',
    '{"inputs": {"needed": [], "optional": 3, "raw_prompts": false}, "modes": ["one"]}',
    '{"inputs": {"needed": []}, "modes": ["column"]}',
    "[[[1.0], {}, null]]",
)


@pytest.mark.parametrize("answer", DESCRIPTIONS)
def test_a_forged_signature_is_not_believed(tmp_path: Path, answer: str):
    forged = f'{{"call": 0, "result": {answer}}}'.encode()
    body = "import os, stat, time\n" + write(line(f"{forged!r}")) + "\ndef f(): ...\n"
    with pytest.raises(RewardError, match="answered with something other than its signature"):
        load(tmp_path, body)


def test_a_signature_that_raises_is_reported(tmp_path: Path):
    lines = (
        "class C:\n    __call__ = len\n    @property\n    def __signature__(self): raise KeyError('gone')\nf = C()\n"
    )
    with pytest.raises(RewardError, match="raised KeyError: 'gone'"):
        load(tmp_path, lines)


def test_columns_arrive_as_they_are_and_stay_the_trainers(tmp_path: Path):
    columns = [{"a": [1, {"b": "\u00e9"}], "c d": None}, {"a": 10**400, "c d": "\ud800"}]
    body = """
        def f(responses, a, **columns):
            assert (a, columns["c d"]) == ([[1, {"b": "\\u00e9"}], 10**400], [None, "\\ud800"])
            a[0].clear(); columns.clear()
            return [1.0, 2.0]
    """
    with load(tmp_path, body) as pool:
        for _ in range(2):
            assert scores_of(pool.score(rows_of(["p"] * 2, ["r"] * 2, [0, 0], columns))) == [[1.0], [2.0]]
    assert columns[0]["a"] == [1, {"b": "\u00e9"}]
