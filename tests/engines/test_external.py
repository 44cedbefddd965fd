"""Engines that somebody else started: checks before they are used."""

import pytest
from engine_server import EngineServer

from megappo.config.schema import Rollout
from megappo.engines.client import EngineError
from megappo.engines.process import ExternalEngine


def test_its_tensor_parallelism_must_be_the_configs():
    with EngineServer() as server:
        url = f"http://127.0.0.1:{server.server_port}"
        client = ExternalEngine(url, Rollout(tensor_parallel=2)).wait_ready()
        assert client.url == url and client.hang_seconds == 7, "the server's own limit"
        with pytest.raises(EngineError, match="has tensor parallelism 2, rollout.tensor_parallel is 1: set it to 2"):
            ExternalEngine(url, Rollout()).wait_ready()


def test_a_server_that_constrains_every_request_is_refused():
    with EngineServer() as server:
        server.arguments = {"preferred_sampling_params": {"regex": "a"}, "enable_watermark": False}
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(EngineError, match="has preferred_sampling_params: start it without, as the log-probs of"):
            ExternalEngine(url, Rollout(tensor_parallel=2)).wait_ready()


def test_it_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr("megappo.engines.process.POLL_SECONDS", 0.05)
    with pytest.raises(EngineError, match="http://127.0.0.1:9 has not answered within 0.1 s .* is an SGLang server"):
        ExternalEngine("http://127.0.0.1:9", Rollout(start_timeout_seconds=0.1)).wait_ready()
