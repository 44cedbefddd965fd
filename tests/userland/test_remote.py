"""Scores of servers, which are real ones on this machine: what they are sent, and every way in which they may fail."""

import re
import time
from collections.abc import Iterator

import pytest
from json_server import JsonServer, serving
from reward_pools import rows_of
from waiting import wait_until

from megappo.lab.graders.remote import SCORE
from megappo.userland.rewards import RewardError, RewardPool, load_reward


@pytest.fixture
def server() -> Iterator[JsonServer]:
    with serving() as found:
        found.url += "/v1"
        yield found


def load(name: str, server: JsonServer, settings: dict | None = None, **options: object) -> RewardPool:
    given = {name: {"url": server.url, **options}}
    return load_reward(name, num_workers=1, timeout_seconds=20, options=given, **(settings or {}))


def scores(pool: RewardPool, count: int = 3, columns: list[dict] | None = None) -> list[list[float]]:
    rows = [f"p{i}" for i in range(count)], [f"r{i}" for i in range(count)], list(range(count))
    return [one.scores for one in pool.score(rows_of(*rows, columns))]


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[JsonServer]:
    """A proxy that refuses, for the Internet."""
    with serving() as found:
        found.answers = lambda count, body: (403, "not you")
        monkeypatch.setenv("http_proxy", f"http://someone:secret@127.0.0.1:{found.server_port}")
        monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:1")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield found


def test_a_server_of_this_machine_gets_requests_without_a_proxy(server: JsonServer, other: JsonServer):
    server.answers = of_labels
    with load("http", server) as pool:
        assert scores(pool) == [[0.0], [0.5], [1.0]]
    assert other.requests == []


PROXY = r"through the proxy http://127.0.0.1:\d+ of http_proxy, https_proxy or all_proxy \(no_proxy=HOST avoids it\)"
SOCKS = r"raised ImportError: Using SOCKS proxy, but the 'socksio' package is not installed"


@pytest.mark.parametrize(
    ("url", "reply"),
    [
        ("http://scores.example.invalid/v1", rf"scores.example.invalid/v1 refused \(HTTP 403\): not you, {PROXY}"),
        ("https://scores.example.invalid/v1", SOCKS),
    ],
)
def test_a_proxy_is_named_without_its_password(server: JsonServer, other: JsonServer, url: str, reply: str):
    with load("http", server, url=url) as pool, pytest.raises(RewardError, match=reply) as caught:
        scores(pool)
    assert "secret" not in str(caught.value)


def of_labels(count: int, body: dict) -> tuple[int, dict]:
    return 200, {"scores": [{"score": label / 2, "seen": 1} for label in body["labels"]]}


def test_a_scorer_gets_what_is_documented_with_the_key(server: JsonServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SCORER_API_KEY", "abc")
    server.answers = of_labels
    with load("http", server, {"pass_env": ["SCORER_API_KEY"]}, api_key_env="SCORER_API_KEY") as pool:
        columns = [{"extra_info": {"index": i}, "data_source": "math"} for i in range(3)]
        assert scores(pool, 3, columns) == [[0.0], [0.5], [1.0]]
        assert scores(pool, 100) == [[i / 2] for i in range(100)]
    path, body, key = server.requests[0]
    assert (path, key) == ("/v1", "Bearer abc")
    assert body == {
        **{"prompts": ["p0", "p1", "p2"], "responses": ["r0", "r1", "r2"], "labels": [0, 1, 2]},
        **{"data_source": ["math"] * 3, "extra_info": [{"index": i} for i in range(3)]},
    }
    assert [len(body["labels"]) for _, body, _ in server.requests[1:]] == [64, 36]


def test_a_scorer_that_is_busy_gets_another_request(server: JsonServer):
    server.answers = lambda count, body: (503, "busy") if count < 3 else of_labels(count, body)
    with load("http", server) as pool:
        assert scores(pool) == [[0.0], [0.5], [1.0]]
    assert len(server.requests) == 3


def hangs(count: int, body: dict) -> tuple[int, dict]:
    time.sleep(3)
    return of_labels(count, body)


FAULTS = {
    "refuses": (lambda count, body: (400, "no such field"), r"refused \(HTTP 400\): no such field", 1),
    "breaks": (lambda count, body: (500, "x" * 1000), r"refused \(HTTP 500\): x{300}\.\.\. \(1000 characters\)", 2),
    "hangs": (hangs, "gave no answer in 1 seconds", 2),
    "no JSON": (lambda count, body: (200, "<html>"), "answered with no JSON: <html>", 1),
    "too few": (
        lambda count, body: (200, {"scores": [1]}),
        r'answered with {"scores": \[1\]}; expected .* with 3 of',
        1,
    ),
    "a text": (lambda count, body: (200, {"scores": [1, "good", 1]}), "returned 'good' .value 1.: expected ", 1),
}


@pytest.mark.parametrize(("answers", "message", "num_requests"), FAULTS.values(), ids=FAULTS)
def test_a_scorers_fault_is_reported(server: JsonServer, answers: object, message: str, num_requests: int):
    server.answers = answers
    seconds = 1.0 if answers is hangs else 10  # long enough for a request to arrive on a busy machine
    pool = load("http", server, retries=1, seconds=seconds)
    with pytest.raises(RewardError, match=f"reward function http (?s:.*){message}"):
        scores(pool)
    wait_until(lambda: len(server.requests) >= num_requests)  # one that was given up may arrive later
    assert len(server.requests) == num_requests


def test_a_missing_scorer_is_reported():
    with JsonServer() as gone:
        pass
    with pytest.raises(RewardError, match=rf"{gone.url} does not answer \(ConnectError"):
        scores(load("http", gone, retries=0))


def test_a_key_that_is_not_passed_on_is_reported(server: JsonServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SCORER_API_KEY", "abc")
    with pytest.raises(RewardError, match="SCORER_API_KEY is not set here: set it, and name it in reward.pass_env"):
        scores(load("http", server, api_key_env="SCORER_API_KEY"))
    assert not server.requests


def test_an_engine_gets_conversations_and_its_models_scores_count(server: JsonServer):
    server.answers = lambda count, body: (200, [{"embedding": [float(text[0]) / 2]} for text in body["text"]])
    with load("engine", server, begin="p", end="<end>") as pool:
        assert scores(pool) == [[0.0], [0.5], [1.0]]
    assert server.requests == [("/v1/classify", {"text": ["0r0<end>", "1r1<end>", "2r2<end>"]}, "")]


@pytest.mark.parametrize("answer", [[{"embedding": [0.5, 0.5]}] * 3, [{"embedding": [0.5]}] * 2, {"error": "none"}])
def test_an_engine_without_one_score_for_each_conversation_is_reported(server: JsonServer, answer: object):
    server.answers = lambda count, body: (200, answer)
    with pytest.raises(RewardError, match="reward function engine (?s:.*)expected 3 embeddings of one number: serve a"):
        scores(load("engine", server))


def judge_scores(text: str) -> dict:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_a_judge_gets_many_requests_at_once_and_its_last_score_counts(server: JsonServer):
    def answers(count: int, body: dict) -> tuple[int, dict]:
        time.sleep(0.2)
        [message] = body["messages"]
        return 200, judge_scores(f"A score: 1 would be too much. {message['content']}")

    server.answers = answers
    template = "Task {prompt}, answer {response}, {{right}}: {label}. **Score:** 0.{label}"
    with load("judge", server, model="judge-7b", template=template, temperature=0.5, concurrency=16) as pool:
        start = time.monotonic()
        assert scores(pool, 64) == [[float(f"0.{i}")] for i in range(64)]
        assert time.monotonic() - start < 0.2 * 64 / 2
    assert 8 < server.most_open <= 16
    path, body, key = server.requests[0]
    assert (path, key) == ("/v1/chat/completions", "")
    assert body | {"messages": None} == {
        **{"model": "judge-7b", "temperature": 0.5, "max_tokens": 512, "messages": None},
    }
    questions = {body["messages"][0]["content"] for _, body, _ in server.requests}
    assert "Task p7, answer r7, {right}: 7. **Score:** 0.7" in questions and len(questions) == 64


SCORES = {
    **{"Score: 1": 1, "score = 0.75.": 0.75, "Score: **0.5**": 0.5, '{"score": 0.5}': 0.5, "**Score:** 1.": 1},
    **{"Score: -1": -1, "Score: +1": 1, "Score: .5": 0.5, "Score: -.5": -0.5, "Score:\n\n-0.5": -0.5},
    **{"Score: 1e-1": 0.1, "Score (0-1): 0.7": 0.7, "Score (1)": 1, "Score: 0.5, as": 0.5},
    **dict.fromkeys(["Score: 1/2", "Score: 8 / 10", "Score: 12/20", "Score: 0.5/1", "Score: 50%", "Score: 0-1"]),
    **dict.fromkeys(["Score: 1,5", "Score: 1.5.2", "Score: 1e", "Score: \u22121", "Score: 1st", "Score: none"]),
}


@pytest.mark.parametrize(("text", "score"), SCORES.items(), ids=range(len(SCORES)))
def test_a_score_is_a_whole_number_of_a_judges_text(text: str, score: float | None):
    assert list(map(float, re.findall(SCORE, text))) == ([] if score is None else [score])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "{prompt} {answer}"}, r"needs a template of {prompt}, .* Python reads: KeyError\('answer'\)"),
        ({"template": "{"}, r"that Python reads: ValueError\(\"Single '{'"),
        ({"template": "{prompt.x}"}, r"that Python reads: AttributeError"),
        ({"template": "{prompt[a]}"}, r"that Python reads: TypeError"),
        ({"template": "{label[a]:d}"}, r"that Python reads: TypeError"),
        ({"score_pattern": "["}, r"that Python reads: error\('unterminated character set"),
        ({"score_pattern": "Score: 1"}, r"has a score_pattern without a group, 'Score: 1': put the number in paren"),
    ],
)
def test_a_judges_wrong_template_or_pattern_is_named_before_a_request(server: JsonServer, options: dict, message: str):
    with pytest.raises(RewardError, match=message):
        scores(load("judge", server, model="m", **options))
    assert server.requests == []


def test_a_judge_without_a_score_gets_another_request_and_costs_its_row_alone(server: JsonServer):
    def answers(count: int, body: dict) -> tuple[int, dict]:
        return 200, judge_scores("I do not know." if "r1" in body["messages"][0]["content"] else "Score: 1")

    server.answers = answers
    with load("judge", server, {"on_error": "zero"}, model="m", retries=1) as pool:
        assert scores(pool) == [[1.0], [], [1.0]]
    assert len(server.requests) == 4
    with pytest.raises(RewardError, match="the judge m at .* gave no score .*: I do not know.(?s:.*)response 'r1'"):
        scores(load("judge", server, model="m", retries=0))


def test_an_answer_that_is_no_chat_completion_is_reported(server: JsonServer):
    with pytest.raises(RewardError, match="answered with something other than a chat completion: {}"):
        scores(load("judge", server, model="m"))
