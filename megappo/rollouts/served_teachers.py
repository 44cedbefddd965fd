"""Log-probs of teachers that SGLang servers serve."""

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import chain, count

from torch import Tensor

from megappo.batch.rows import Rows, padded
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config
from megappo.engines.client import EngineClient
from megappo.engines.generations import EngineError, expecting_response
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.sample_rows import floats

API_KEY = "MEGAPPO_TEACHER_API_KEY"
"""Environment variable with the key of teachers' servers; unset if they want none."""
CONCURRENCY = 64
"""Requests of a rank at once."""
PAUSES = (1.0, 8.0, 0.0)
"""Seconds after each failed try of a request."""
_client = cache(EngineClient)
"""A new client reads all certificates of the machine, which takes longer than its requests."""


def check_servers(config: Config, datasets: Datasets) -> None:
    """Check that each server of a teacher returns log-probs, and takes each token of the actor for the same text.

    Raises:
        ConfigError: it has another vocabulary. EngineError: see `with_served_log_probs`.
    """
    for key, clients in _servers(config).values():
        tokens = [[token] for token in sorted(datasets.tokenizer.get_vocab().values())]
        texts = datasets.tokenizer.batch_decode(tokens)
        for client in clients:
            _log_probs(key, client, tokens[0] + tokens[-1], 1)
            try:
                reply = client.post("/detokenize", {"tokens": tokens, "skip_special_tokens": False}, client.timeout)
                with expecting_response(reply):
                    num_other = sum(one != other for one, other in zip(texts, reply["text"], strict=True))
            except EngineError as error:
                raise EngineError(f"{key}: {client.url}: {error}") from error
            if num_other:
                raise ConfigError(
                    f"{key}: {client.url} decodes {num_other:,} of the actor's {len(texts):,} tokens to other texts: "
                    "serve a model with the actor's vocabulary"
                )


def with_served_log_probs(config: Config, rows: Rows) -> Rows:
    """Return the rows with `teacher_log_probs`, 0 where the teacher is not served, if a run has served teachers.

    Raises:
        EngineError: a server has not returned log-probs; the message names teacher and server.
    """
    servers = _servers(config)
    if not servers:
        return rows
    turns = count()

    def of_row(tokens: Tensor, start: int, teacher: float) -> list[float]:
        if teacher not in servers:
            return [0.0] * (len(tokens) - start)
        key, clients = servers[teacher]
        return _log_probs(key, clients[next(turns) % len(clients)], tokens.tolist(), start)

    columns = rows.sequences, rows.prompt_lengths.tolist(), rows.field("teacher").tolist()
    with ThreadPoolExecutor(CONCURRENCY) as threads:  # the clients note that they wait
        found = floats(chain.from_iterable(threads.map(of_row, *columns)))
    log_probs = padded(found, rows.response_lengths, rows.max_response_length) * rows.response_mask
    return replace(rows, fields=rows.fields | {"teacher_log_probs": log_probs})


def _servers(config: Config) -> dict[float, tuple[str, list[EngineClient]]]:
    """Return the key and the clients of each teacher that servers serve, by its number in rows."""
    # Other ranks wait for all tries together.
    settings = os.environ.get(API_KEY, ""), config.trainer.process_group_timeout_seconds / (len(PAUSES) + 1)
    return {
        number: (f"teachers.{name}.url", [_client(url, *settings) for url in teacher.url])
        for number, (name, teacher) in enumerate(config.teachers.items(), 1)
        if teacher.url and config.recipe.trains
    }


def _log_probs(key: str, client: EngineClient, tokens: list[int], start: int) -> list[float]:
    """Return the log-probs of the tokens from `start` on, after several requests if one fails."""
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": start - 1,  # that token has no log-prob
    }
    for pause in PAUSES:
        try:
            reply = client.post("/generate", body, client.timeout)
            with expecting_response(reply):
                entries = reply["meta_info"]["input_token_logprobs"][1:]
                found = [float(entry[0]) for entry in entries]
                # SGLang 0.5.23 writes the last token of a vocabulary as 0 (logprob_result_processor.py).
                named = [entry[1] or token for entry, token in zip(entries, tokens[start:], strict=True)]
                if named == tokens[start:] and math.isfinite(sum(found)):
                    return found
                raise ValueError(f"expected finite log-probs of tokens {tokens[start:]}, got {entries}")
        except EngineError as error:
            failure = error
        time.sleep(pause)
    raise EngineError(f"{key}: {client.url}: {failure}")
