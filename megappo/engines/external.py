"""An SGLang engine that somebody else starts, restarts and ends."""

import os
import time

from megappo.config.schema import Rollout
from megappo.engines.client import EngineClient, EngineError
from megappo.runtime.heartbeat import heartbeat

API_KEY = "MEGAPPO_ENGINE_API_KEY"
"""Environment variable with the key of such engines; unset if they want none."""
POLL_SECONDS = 1.0


class ExternalEngine:
    """A server of rollout.engines, used as an `Engine` is, but neither started nor ended.

    Args:
        url: http://host:port.
    """

    def __init__(self, url: str, rollout: Rollout):
        self.url = url
        self._rollout = rollout

    def wait_ready(self) -> EngineClient:
        """Wait until the engine serves, and return its client.

        Raises:
            EngineError: it does not within rollout.start_timeout_seconds, or refuses the key, or differs in its
                tensor parallelism.
        """
        client = EngineClient(self.url, os.environ.get(API_KEY, ""), self._rollout.request_timeout_seconds)
        limit = self._rollout.start_timeout_seconds
        deadline = time.monotonic() + limit
        while not client.is_healthy():
            if time.monotonic() > deadline:
                raise EngineError(
                    f"rollout.engines: {self.url} has not answered within {limit:g} s (rollout.start_timeout_seconds): "
                    "is an SGLang server running there?"
                )
            heartbeat.beat()
            time.sleep(POLL_SECONDS)
        server_args = client.server_args()
        client.hang_seconds = float(server_args["watchdog_timeout"])
        found, expected = server_args["tp_size"], self._rollout.tensor_parallel
        if found != expected:
            raise EngineError(
                f"rollout.engines: {self.url} has tensor parallelism {found}, rollout.tensor_parallel is {expected}: "
                f"set it to {found}"
            )
        return client

    def stop(self) -> None:
        """Do nothing: whoever started the server ends it."""

    def restart(self) -> None:
        """Refuse.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"{self.url} of rollout.engines has failed: start it again, then the run")
