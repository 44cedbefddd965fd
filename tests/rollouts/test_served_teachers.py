"""Log-probs of teachers that servers serve: requests, further tries and wrong answers, with a server that answers as
SGLang does; tests/run/test_served_teacher.py has SGLang's own."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from character_tokenizer import character_tokenizer
from json_server import JsonServer, serving

from megappo.batch.rows import Rows
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config
from megappo.engines.generations import EngineError
from megappo.rollouts import served_teachers
from megappo.rollouts.served_teachers import check_servers, with_served_log_probs

PROMPTS, RESPONSES, TEACHERS = [[1], [2, 3], [1], [4, 5, 6]], [[7, 8], [9], [10, 11, 12], [13]], [1, 2, 3, 2]
TOKENIZER = character_tokenizer()


def answer(tokens: list[int], start: int) -> dict[str, Any]:
    """The log-prob of a token is minus its number and a hundredth of its position."""
    entries: list = [[-(tokens[i] + i / 100), tokens[i], None] for i in range(start, len(tokens))]
    entries[0][0] = None
    return {"text": "", "meta_info": {"input_token_logprobs": entries, "prompt_tokens": len(tokens)}}


WRONG: dict[str, Callable[[list], Any]] = {
    "zip() argument 2 is longer than argument 1": lambda entries: entries.pop(),
    "TypeError": lambda entries: entries[1].__setitem__(0, None),
    "finite log-probs of tokens [7, 8], got [[nan, 7, None]": lambda entries: entries[1].__setitem__(0, float("nan")),
    "got [[-7.01, 8, None], [-8.02, 8, None]]": lambda entries: entries[1].__setitem__(1, 8),
}
"""A part of the error -> what the server does to the entries of a right answer."""


def answering(server: JsonServer) -> None:
    """Let a server answer as SGLang does, with what a test sets: other statuses, a text of token 5, changed entries."""
    server.statuses, server.fifth, server.spoil = [], "", lambda entries: None

    def answers(count: int, body: dict) -> tuple[int, dict]:
        if (status := server.statuses.pop(0) if server.statuses else 200) != 200:
            return status, {"error": "why"}
        if "tokens" in body:
            texts = [TOKENIZER.decode(tokens) for tokens in body["tokens"]]
            texts[5] = server.fifth or texts[5]
            return 200, {"text": texts}
        reply = answer(body["input_ids"], body["logprob_start_len"])
        server.spoil(reply["meta_info"]["input_token_logprobs"])
        return 200, reply

    server.answers = answers


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[JsonServer]]:
    monkeypatch.setattr(served_teachers, "PAUSES", (0.0,) * 3)
    with serving() as one, serving() as other:
        for server in (one, other):
            answering(server)
        yield [one, other]


def config_of(*urls: str) -> Config:
    """The second of three teachers is served."""
    teachers = {"a": {"when": {"x": 1}}, "b": {"when": {"x": 2}, "url": urls}, "c": {}}
    sections = {"model": {"path": "m"}, "data": {"train_files": ["f"]}, "trainer": {"output_dir": "o"}}
    return Config.model_validate(sections | {"teachers": teachers})


def rows_of(teachers: list[int] = TEACHERS) -> Rows:
    ids, lengths = torch.arange(4), torch.tensor([len(tokens) for tokens in RESPONSES])
    tokens = [token for pair in zip(PROMPTS, RESPONSES, strict=True) for part in pair for token in part]
    mask = torch.ones(4, 3)
    mask[2, 1] = 0  # an environment wrote it
    fields = {"response_mask": mask, "teacher": torch.tensor(teachers).float()}
    starts = torch.tensor([len(tokens) for tokens in PROMPTS])
    return Rows(ids, ids, starts, lengths, torch.tensor(tokens), fields)


def test_rows_get_the_log_probs_of_their_own_server(servers, monkeypatch):
    monkeypatch.setenv("MEGAPPO_TEACHER_API_KEY", "secret")
    found = with_served_log_probs(config_of(*(server.url for server in servers)), rows_of()).fields["teacher_log_probs"]
    expected = torch.tensor([[0, 0, 0], [-9.02, 0, 0], [0, 0, 0], [-13.03, 0, 0]])
    torch.testing.assert_close(found, expected)
    requests = [request for server in servers for request in server.requests]
    assert {key for _, _, key in requests} == {"Bearer secret"} and [len(one.requests) for one in servers] == [1, 1]
    assert all(body["sampling_params"] == {"max_new_tokens": 0} for _, body, _ in requests)
    masked = with_served_log_probs(config_of(servers[0].url), rows_of([2] * 4)).fields["teacher_log_probs"]
    torch.testing.assert_close(masked[2], torch.tensor([-10.01, 0.0, -12.03]))
    assert "teacher_log_probs" not in with_served_log_probs(config_of(), rows_of()).fields


def test_a_request_that_fails_is_sent_again(servers):
    servers[0].statuses = [500, 429]
    found = with_served_log_probs(config_of(servers[0].url), rows_of([2, 0, 0, 0])).fields["teacher_log_probs"]
    torch.testing.assert_close(found[0], torch.tensor([-7.01, -8.02, 0.0]))
    assert len(servers[0].requests) == 3


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_answer_names_the_teacher_and_the_server(message, servers):
    servers[0].spoil = WRONG[message]
    with pytest.raises(EngineError) as raised:
        with_served_log_probs(config_of(servers[0].url), rows_of([2, 0, 0, 0]))
    assert str(raised.value).startswith(f"teachers.b.url: {servers[0].url}: ") and message in str(raised.value)
    assert len(servers[0].requests) == 3


def test_a_dead_server_names_the_teacher(servers, monkeypatch):
    monkeypatch.setattr("megappo.engines.client.ENDING_SECONDS", 0.1)
    with pytest.raises(EngineError, match="teachers.b.url: http://127.0.0.1:9: .*/generate does not answer"):
        check_servers(config_of("http://127.0.0.1:9"), SimpleNamespace(tokenizer=TOKENIZER))


def test_the_start_compares_every_token(servers):
    datasets, config = SimpleNamespace(tokenizer=TOKENIZER), config_of(servers[0].url, servers[1].url)
    check_servers(config, datasets)
    size = len(TOKENIZER.get_vocab())
    servers[0].spoil = lambda entries: entries[1].__setitem__(1, 0)  # as SGLang writes the last token
    check_servers(config, datasets)
    servers[0].requests = servers[0].requests[:2]
    servers[1].requests = servers[1].requests[:2]
    for server in servers:
        (_, probe, _), (_, asked, _) = server.requests
        assert probe["input_ids"] == [0, size - 1] and len(asked["tokens"]) == size
        assert asked["skip_special_tokens"] is False
    servers[1].statuses = [200, 404]
    with pytest.raises(EngineError, match=f"teachers.b.url: {servers[1].url}: .*/detokenize"):
        check_servers(config, datasets)
    servers[1].fifth = "other"
    with pytest.raises(
        ConfigError, match=f"teachers.b.url: {servers[1].url} decodes 1 of the actor's 97 tokens to other texts"
    ):
        check_servers(config, datasets)
    only_evaluates = config.model_copy(update={"trainer": config.trainer.model_copy(update={"eval_only": True})})
    check_servers(only_evaluates, None)
