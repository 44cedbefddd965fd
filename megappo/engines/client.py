"""Speaks SGLang's HTTP API: token ids in, token ids and log-probs out. Every reply is checked."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NoReturn

import httpx

from megappo.engines.generations import (
    EngineError,
    EngineFault,
    Generation,
    SamplingParams,
    checked,
    checked_all,
    expecting_response,
    generate_body,
    stream_body,
)
from megappo.runtime.heartbeat import LIFE

ENDING_SECONDS = 3.0
"""How long a crashed engine may take, from the break of its connections, to end."""
CONNECT_SECONDS = 10.0
TOO_LATE = (httpx.ReadTimeout, httpx.WriteTimeout)
"""An engine that has been reached does not answer in time."""
IDLE_SECONDS = 60.0
"""How long an engine may take to be idle."""
EVENT = b"data: "
LAST_EVENT = b"data: [DONE]"
"""Of the lines of a stream."""
HANG_SECONDS = 300.0
"""How long an engine that is asked for something may show no sign of life: SGLang's own watchdog_timeout."""
WATCH_SECONDS = 5.0
"""Between two looks for one."""
ABORT_SECONDS = 0.05
"""Between two requests to abort everything: one finds what has reached the engine by then."""
OF_GROUPS = ("/init_weights_update_group", "/update_weights_from_distributed")
"""Requests that are in vain, too, where another member of the group has ended."""
ADAPTER = "actor"
"""The name of the adapter that an engine is given."""
WEIGHTS = ("weights",)
WORKING_MEMORY = ("kv_cache", "cuda_graph")
"""SGLang's tags of what it frees asleep."""


class EngineClient:
    """One SGLang server: an `Engine`'s or one started elsewhere.

    Args:
        url: http://host:port.
        api_key: the server's key; "" where it asks for none.
        timeout: seconds for which a request of `generate_async` may go without a further response, or that a read of
            weights from a disk may take, which is a fault after that.
        check_alive: called, also repeatedly and from other threads, when the server does not answer; may raise a better
            error than "connection refused".
        hang_seconds: that any other request may take; see also `watch`.
    Attributes:
        adapter: what every generation asks for, which is refused where the engine does not have it; None until one has
            been loaded.
    Raises:
        EngineError: (every method) the server does not answer or refuses; the message holds its reply.
    """

    _fault: EngineFault | None = None
    _defers_faults = False
    adapter: str | None = None
    _aborts = False

    def __init__(
        self,
        url: str,
        api_key: str,
        timeout: float,
        check_alive: Callable[[], None] = lambda: None,
        hang_seconds: float = HANG_SECONDS,
    ):
        self.url = url
        self.timeout = timeout
        self.hang_seconds = hang_seconds
        self._check_alive = check_alive
        self._options = {
            "base_url": url,
            "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
            "timeout": httpx.Timeout(timeout, connect=CONNECT_SECONDS),
            "verify": httpx.create_ssl_context(trust_env=False),  # once: it reads all certificates that there are
            "trust_env": False,  # a proxy from the environment must not see loopback traffic
            # Drop idle connections before the server does (after 5 s), which could meet a request halfway.
            "limits": httpx.Limits(max_connections=None, keepalive_expiry=2.0),
        }
        self._http = httpx.Client(**self._options)

    def is_healthy(self) -> bool:
        """Whether the server is up and answers."""
        try:
            return self._http.get("/health", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def check_health(self) -> None:
        """See that the server is there, and no other in its place."""
        self._kept(self._check_alive)
        self._kept(self._get, "/health")

    def server_args(self) -> dict[str, Any]:
        """What the server was started with, by SGLang's names."""
        return self._get("/server_info")

    def held_bytes(self) -> float:
        """What the engine counts of weights and KV cache on each of its GPUs; 0 where a fault is kept."""
        found = self._kept(self.server_args)
        return (
            sum(found["internal_states"][0]["memory_usage"][kind] for kind in ("weight", "kvcache")) * 2**30
            if found
            else 0.0
        )

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[Generation]:
        """One response for each prompt (token ids), in order, in one request."""
        reply = self.post("/generate", generate_body(prompts, params, self.adapter))
        return checked_all(reply, len(prompts))

    def sleep(self) -> None:
        """Free the GPU memory of weights, caches and CUDA graphs (on a CPU they stay). After wake() send the weights
        anew."""
        self.flush_cache()  # a scheduler that still holds its last batch would end with an assertion
        self.post("/release_memory_occupation", {})

    def wake(self, memory: Sequence[str] = WEIGHTS + WORKING_MEMORY) -> None:
        """Take memory back: WEIGHTS, WORKING_MEMORY, or both, each once after a sleep."""
        self.post("/resume_memory_occupation", {"tags": list(memory)})

    def flush_cache(self) -> None:
        """Forget all cached keys and values, once no request runs any more; refused after IDLE_SECONDS at most.

        The answer to the last request is there before the scheduler has put its batch away.
        """
        self.post(f"/flush_cache?timeout={min(IDLE_SECONDS, self.hang_seconds / 2):g}", {})

    def freeze_garbage(self) -> None:
        """Have its processes look for garbage among what is made from now on alone, as SGLang does after its warm-up:
        on a CPU flush_cache looks at all that there is, which took longer than all else of it."""
        self.post("/freeze_gc", {})

    def begin_weight_update(self) -> None:
        """Open a weight update."""
        self.post("/begin_weight_update", {})

    def end_weight_update(self) -> None:
        """Close the weight update opened before, and forget what is cached of the old weights."""
        self.post("/end_weight_update", {})
        self.flush_cache()

    def load_adapter(self, path: str, body: dict[str, Any]) -> None:
        """Give the engine an adapter, in place of the one before, for all generations from now on.

        What is cached of the one before is not found any more: SGLang looks by the number that each gets.

        Args:
            path: of SGLang's request that loads one. body: without its name.
        """
        listed = self._kept(self._get, "/v1/models")
        if listed is not None and ADAPTER in [model["id"] for model in listed["data"]]:
            self.post("/unload_lora_adapter", {"lora_name": ADAPTER})
        self.post(path, {"lora_name": ADAPTER, **body})
        self.adapter = ADAPTER

    def weight_checksums(self) -> list[dict[str, str]]:
        """For each of the engine's ranks: name in SGLang's model -> checksum of its part of the weight. Nothing where
        a fault is kept."""
        reply = self.post("/weights_checker", {"action": "checksum"})
        return [] if reply is None else [rank["checksums"] for rank in reply["ranks"]]

    def reset_weights(self) -> None:
        """Put random numbers in place of all weights."""
        self.post("/weights_checker", {"action": "reset_tensors"})

    def open_async(self) -> httpx.AsyncClient:
        """Connections for `generate_async`; use as an async context manager."""
        return httpx.AsyncClient(**self._options)

    async def generate_async(
        self, http: httpx.AsyncClient, prompts: Sequence[list[int]], params: SamplingParams
    ) -> AsyncIterator[tuple[int, Generation]]:
        """As `generate`, over `http` from `open_async`, many requests at a time: each prompt's position, and the
        response to it, as soon as it is finished. Who does not want all of them closes it."""
        left = set(range(len(prompts)))
        try:
            with LIFE.waiting():
                async with http.stream(
                    "POST", "/generate", json=stream_body(prompts, params, self.adapter)
                ) as response:
                    async for event in self._events("/generate", response):
                        with expecting_response(event):
                            if not event["meta_info"]["finish_reason"]:
                                continue
                            position, generation = event["index"], checked(event, may_abort=self._aborts)
                            left.remove(position)
                        yield position, generation
        except httpx.TransportError as error:
            raise await asyncio.to_thread(self._unreachable, "/generate", error) from error
        if left:
            raise EngineFault(f"expected {len(prompts)} responses from the engine, got {len(prompts) - len(left)}")

    async def abort_all(self, http: httpx.AsyncClient, is_idle: Callable[[], bool]) -> None:
        """Have the engine leave all that it is at: `generate_async` gives what there is of it, until all is idle."""
        self._aborts = True
        try:
            while not is_idle():
                await self._ask_async(http, "/abort_request", {"abort_all": True})
                await asyncio.sleep(ABORT_SECONDS)
        finally:
            self._aborts = False

    async def _ask_async(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
        try:
            return self._checked(path, await http.post(path, json=body))
        except httpx.TransportError as error:
            raise await asyncio.to_thread(self._unreachable, path, error) from error

    async def _events(self, path: str, response: httpx.Response) -> AsyncIterator[Any]:
        """The JSON of server-sent events."""
        if response.status_code != 200:
            await response.aread()
            self._checked(path, response)
        rest = b""
        async for part in response.aiter_bytes():  # aiter_lines would also end them within a text
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(EVENT) and line != LAST_EVENT:
                    yield self._event(path, line.removeprefix(EVENT))

    def _event(self, path: str, data: bytes) -> Any:
        event = self._parsed(path, data)
        with expecting_response(event):
            if "error" in event:  # found after the status had been sent
                raise self._refusal(path, event["error"]["code"], data.decode())
        return event

    async def watch(self, http: httpx.AsyncClient) -> NoReturn:
        """Look after an engine that has been asked for something, until cancelled.

        Raises:
            EngineFault: it has ended, or shown no sign of life for `hang_seconds`.
        """
        seen = time.monotonic()
        while time.monotonic() - seen < self.hang_seconds:
            await asyncio.sleep(WATCH_SECONDS)
            self._check_alive()  # who listens at its address may be another process by now, which need not answer
            asked = time.monotonic()
            # Of its processes the one that serves HTTP may be well while those that compute hang. Idle, they compute a
            # token for this; else they answer after their next batch.
            with contextlib.suppress(httpx.TransportError):
                response = await http.get("/health_generate", timeout=self.hang_seconds)
                seen = asked if response.status_code == 200 else seen
        raise self._hangs()

    @property
    def has_failed(self) -> bool:
        """Whether a fault has been deferred; see `deferring_faults`."""
        return self._fault is not None

    def take_fault(self) -> EngineFault | None:
        """Return the deferred fault, if there is one, and forget it."""
        fault, self._fault = self._fault, None
        return fault

    def post(self, path: str, body: dict[str, Any], timeout: float | None = None) -> Any:
        """Any request of SGLang's HTTP API; the reply's JSON, or None.

        Args:
            timeout: of what may well take longer than `hang_seconds`.
        """
        return self._kept(self._ask, "POST", path, body, timeout)

    def _kept(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """Return the answer; None after a fault that is deferred."""
        if self._fault is not None:
            return None
        try:
            return ask(*arguments)
        except EngineFault as fault:
            if not self._defers_faults:
                raise
            self._fault = fault
            return None

    def _get(self, path: str) -> Any:
        return self._ask("GET", path)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        limit = httpx.Timeout(timeout or self.hang_seconds, connect=CONNECT_SECONDS)
        try:
            with LIFE.waiting():  # nobody watches the engine meanwhile, and all other ranks may wait
                response = self._http.request(method, path, json=body, timeout=limit)
        except httpx.TransportError as error:
            if isinstance(error, TOO_LATE):
                self._check_alive()
                raise self._hangs(path) if timeout is None else EngineFault(self._takes_long(path)) from error
            raise self._unreachable(path, error) from error
        return self._checked(path, response)

    def _hangs(self, path: str = "") -> EngineFault:
        return EngineFault(
            f"{self.url}{path} has shown no sign of life for {self.hang_seconds:g} s: if it was busy, raise "
            "watchdog_timeout in rollout.server_args, or --watchdog-timeout of a server of yours"
        )

    def _takes_long(self, path: str) -> str:
        return f"{self.url}{path} sent nothing for {self.timeout:g} s: raise rollout.request_timeout_seconds"

    def _unreachable(self, path: str, error: httpx.TransportError) -> EngineError:
        self._check_alive()
        if isinstance(error, TOO_LATE):
            return EngineError(self._takes_long(path))
        deadline = time.monotonic() + ENDING_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.1)
            self._check_alive()
        return EngineFault(f"{self.url}{path} does not answer ({error!r}): is the engine running there?")

    def _checked(self, path: str, response: httpx.Response) -> Any:
        """The reply's JSON (or None), after checking both of SGLang's ways to say no."""
        is_json = response.headers.get("content-type", "").startswith("application/json")
        reply = self._parsed(path, response.content) if is_json and response.content else None
        in_vain = isinstance(reply, dict) and reply.get("success") is False
        if response.status_code != 200 or in_vain:
            is_fault = in_vain and path in OF_GROUPS
            raise self._refusal(path, response.status_code, response.text, is_fault=is_fault)
        return reply

    def _parsed(self, path: str, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError as error:
            found = data[:500].decode(errors="replace")
            raise EngineFault(f"{self.url}{path} answered what is no JSON ({error}): {found}") from error

    def _refusal(self, path: str, status: int, reply: str, *, is_fault: bool = False) -> EngineError:
        # What is wrong with the request itself would be so another time.
        kind = EngineFault if is_fault or status >= 500 else EngineError
        return kind(f"{self.url}{path} refused (HTTP {status}): {reply}")


@contextlib.contextmanager
def deferring_faults(client: EngineClient | None) -> Iterator[None]:
    """Inside, defer an EngineFault of `post` and `check_health` for `take_fault`, and send no request after it.

    Other ranks wait at collectives that this rank must still reach. Without a client it does nothing.
    """
    if client is None:
        yield
        return
    client._defers_faults = True
    try:
        yield
    finally:
        client._defers_faults = False
