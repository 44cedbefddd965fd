"""Client of SGLang's HTTP API: token ids in, token ids and log-probs out. Every reply is checked."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NoReturn

import httpx

from megappo.architecture.architecture import Architecture
from megappo.engines.connections import Connections, events
from megappo.engines.generations import (
    INCOMPLETE,
    RAW_BYTES,
    EngineError,
    EngineFault,
    Generation,
    SamplingParams,
    SentImages,
    WeightVersion,
    check_prompt_length,
    checked,
    expecting_response,
    generate_body,
)
from megappo.runtime.heartbeat import heartbeat
from megappo.userland.user_code import JsonObject

ENDING_SECONDS = 3.0
"""Limit for a crashed engine to end after its connections break."""
CONNECT_SECONDS = 10.0
TIMEOUTS = (httpx.ReadTimeout, httpx.WriteTimeout)
"""Errors of an engine that has been reached and does not answer in time."""
IDLE_SECONDS = 60.0
"""Limit for an engine to become idle."""
HANG_KEY = "watchdog_timeout in rollout.server_args, or --watchdog-timeout of a server of yours"
TIMEOUT_KEY = "rollout.request_timeout_seconds"
UNCHECKED = {"skip_tensor_list": [".v_norm.weight", ".axis_map"]}
"""Tensors to leave out of checks, which no sync sends. In SGLang 0.5.23 Gemma 4's norms without weights have buffers of
ones, and Qwen3-VL's rotary positions have a table."""
HANG_SECONDS = 300.0
"""Limit for a busy engine to show that it works; SGLang's own watchdog_timeout."""
WATCH_SECONDS = 5.0
"""Between two health checks of a busy engine."""
ABORT_SECONDS = 0.05
"""Between two requests to abort everything, each of which aborts what has reached the engine by then."""
GROUP_PATHS = ("/init_weights_update_group", "/update_weights_from_distributed")
"""Requests that also fail because of another member of the group."""
ADAPTER = "actor"
"""Name of the adapter that an engine gets."""
WEIGHTS = ("weights",)
WORKING_MEMORY = ("kv_cache", "cuda_graph")
"""SGLang's tags of the memory that it frees asleep."""


class EngineClient:
    """Client of one SGLang server: an `Engine`'s or one started elsewhere.

    Args:
        url: http://host:port.
        api_key: the server's key; "" where it wants none.
        timeout: seconds that a request of `generate_async` may pass without a further response, or that the engine may
            read weights from a disk; longer is a fault.
        check_alive: called, also repeatedly and from other threads, when the server does not answer; may raise a better
            error than "connection refused".
        hang_seconds: limit for any other request; see also `watch`.
    Attributes:
        adapter: name that every generation requests once an adapter has been loaded; an unknown one is refused.
        version: version of the weights, for an engine that samples ahead of training; see `taking_weights`.
    Raises:
        EngineError: (every method) the server does not answer or refuses; the message holds its reply.
    """

    adapter: str | None = None
    version: WeightVersion | None = None
    _is_paused = False
    _fault: EngineFault | None = None
    _defers_faults = False
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
        """Return whether the server is up and answers."""
        try:
            return self._http.get("/health", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def check_health(self) -> None:
        """Check that the server answers, and that no other process does in its place."""
        self.defer(self._check_alive)
        self.defer(self.request, "GET", "/health")

    def server_args(self) -> JsonObject:
        """Return the server's arguments, by SGLang's names."""
        return self.request("GET", "/server_info")

    def held_bytes(self) -> float:
        """Return the bytes of weights and KV cache on each of the engine's GPUs; 0 after a deferred fault."""
        server_info = self.defer(self.server_args)
        if server_info is None:
            return 0.0
        usage = server_info["internal_states"][0]["memory_usage"]
        return (usage["weight"] + usage["kvcache"]) * 2**30

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        images: Sequence[SentImages] = (),
    ) -> list[Generation]:
        """Return one response to each prompt (token ids), in order, from one request.

        Args:
            images: see `generate_body`.
        """
        version = self.version
        replies = self.post("/generate", generate_body(prompts, params, self.adapter, version, images))
        if not isinstance(replies, list) or len(replies) != len(prompts):
            raise EngineFault(f"expected {len(prompts)} responses from the engine, got {str(replies)[:500]}")
        if images:
            for prompt, reply in zip(prompts, replies, strict=True):
                check_prompt_length(reply, len(prompt))
        return [checked(reply, version=version, replayed=params.replayed) for reply in replies]

    def sleep(self) -> None:
        """Free the GPU memory of weights, caches and CUDA graphs (on a CPU they stay). After `wake`, send the weights
        again."""
        self.flush_cache()  # a scheduler that still holds its last batch would end with an assertion
        self.post("/release_memory_occupation", {})

    def wake(self, memory: Sequence[str] = WEIGHTS + WORKING_MEMORY) -> None:
        """Take memory back: WEIGHTS, WORKING_MEMORY, or both, each once after a sleep."""
        self.post("/resume_memory_occupation", {"tags": list(memory)})

    def flush_cache(self) -> None:
        """Forget all cached keys and values once the engine is idle or paused; it refuses after IDLE_SECONDS at most.

        The answer to the last request arrives before the scheduler has put its batch away.
        """
        # With a timeout SGLang waits for paused requests, too (managers/scheduler_components/flush_wrapper.py).
        limit = 0.0 if self._is_paused else min(IDLE_SECONDS, self.hang_seconds / 2)
        self.post(f"/flush_cache?timeout={limit:g}", {})

    def freeze_garbage(self) -> None:
        """Exclude all present objects of its processes from garbage collection, as SGLang does after its warm-up: on a
        CPU, flush_cache otherwise spends most of its time there."""
        self.post("/freeze_gc", {})

    def begin_weight_update(self) -> None:
        """Open a weight update."""
        self.post("/begin_weight_update", {})

    def end_weight_update(self) -> None:
        """Close the weight update, and forget what is cached from the old weights unless requests still use it."""
        self.post("/end_weight_update", {})
        if not self.keeps_cache:
            self.flush_cache()

    @property
    def keeps_cache(self) -> bool:
        """True if the engine keeps what it has cached from other versions of its weights."""
        return self.version is not None and self.version.keeps_cache

    def name_weights(self, version: str) -> None:
        """Name the version of the weights: tokens from now on are of this version."""
        self.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def load_adapter(self, path: str, body: JsonObject) -> None:
        """Give the engine an adapter, in place of the one before, for all generations from now on.

        SGLang numbers adapters, so what is cached from the one before is not found any more.

        Args:
            path: path of SGLang's request that loads one.
            body: the request's body without the adapter's name.
        """
        listed = self.defer(self.request, "GET", "/v1/models")
        if listed is not None and ADAPTER in [model["id"] for model in listed["data"]]:
            self.post("/unload_lora_adapter", {"lora_name": ADAPTER})
        self.post(path, {"lora_name": ADAPTER, **body})
        self.adapter = ADAPTER

    def weight_checksums(self) -> list[dict[str, str]]:
        """Return, for each of the engine's ranks, name in SGLang's model -> checksum of its part of the weight; nothing
        after a deferred fault."""
        reply = self.post("/weights_checker", {"action": "checksum", **UNCHECKED})
        return [] if reply is None else [rank["checksums"] for rank in reply["ranks"]]

    def reset_weights(self) -> None:
        """Put random numbers in place of all weights."""
        self.post("/weights_checker", {"action": "reset_tensors", **UNCHECKED})

    def open_async(self) -> Connections:
        """Return connections for `generate_async`; use as an async context manager."""
        return Connections(self._options)

    async def generate_async(
        self,
        connections: Connections,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        images: Sequence[SentImages] = (),
    ) -> AsyncIterator[tuple[int, Generation]]:
        """Yield each prompt's position and its response as soon as that is finished; a caller that does not want all of
        them closes the iterator. Many requests may run at a time over the connections.

        Args:
            images: see `generate_body`.
        """
        path = "/generate"
        version = self.version
        missing = set(range(len(prompts)))
        lengths = list(map(len, prompts)) if images else []
        try:
            body = generate_body(prompts, params, self.adapter, version, images) | {"stream": True}
            # The stream has only the first tokens, and whole responses.
            body["sampling_params"]["stream_interval"] = params.max_response_length + 1
            async with connections.free() as http, http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._checked(path, response)
                async for data in events(response):
                    if finished := self._finished(path, data, missing, version, params.replayed, lengths):
                        yield finished
        except httpx.TransportError as error:
            raise await asyncio.to_thread(self._unreachable, path, error) from error
        if missing:
            raise EngineFault(f"expected {len(prompts)} responses from the engine, got {len(prompts) - len(missing)}")

    def _finished(
        self,
        path: str,
        data: bytes,
        missing: set[int],
        version: WeightVersion | None,
        replayed: Architecture | None,
        lengths: Sequence[int],
    ) -> tuple[int, Generation] | None:
        """Return the position and the response of an event; None where the sequence has only begun.

        Args:
            lengths: tokens of each prompt, for a model with vision.
        """
        event = self._parsed(path, data)
        with expecting_response(event):
            if "error" in event:  # found after the status had been sent
                raise self._refusal(path, event["error"]["code"], data.decode())
            if not event["meta_info"]["finish_reason"]:
                return None
            generation = checked(
                event,
                may_abort=self._aborts,
                version=version,
                replayed=replayed,
            )
            missing.remove(event["index"])
            if lengths:
                check_prompt_length(event, lengths[event["index"]])
        return event["index"], generation

    async def abort_all(self, connections: Connections, is_idle: Callable[[], bool]) -> None:
        """Abort all requests until the engine is idle; `generate_async` yields the partial responses."""
        path = "/abort_request"
        self._aborts = True
        try:
            async with connections.free() as http:
                while not is_idle():
                    self._checked(path, await http.post(path, json={"abort_all": True}))
                    await asyncio.sleep(ABORT_SECONDS)
        except httpx.TransportError as error:
            raise await asyncio.to_thread(self._unreachable, path, error) from error
        finally:
            self._aborts = False

    async def watch(self, connections: Connections) -> NoReturn:
        """Check an engine that works on requests, until cancelled.

        Raises:
            EngineFault: it has ended, or has not answered for `hang_seconds`.
        """
        seen = time.monotonic()
        while time.monotonic() - seen < self.hang_seconds:
            await asyncio.sleep(WATCH_SECONDS)
            self._check_alive()  # another process may listen at its address by now, and need not answer
            sent = time.monotonic()
            # The process that serves HTTP may be well while the processes that compute hang. Idle, they compute a token
            # for this; else they answer after their next batch.
            with contextlib.suppress(httpx.TransportError):
                async with connections.free() as http:
                    response = await http.get("/health_generate", timeout=self.hang_seconds)
                seen = sent if response.status_code == 200 else seen
        raise EngineFault(self._silent("", self.hang_seconds, HANG_KEY))

    @property
    def has_failed(self) -> bool:
        """True after a deferred fault; see `deferring_faults`."""
        return self._fault is not None

    def take_fault(self) -> EngineFault | None:
        """Return the deferred fault, if there is one, and forget it."""
        fault = self._fault
        self._fault = None
        return fault

    def post(self, path: str, body: JsonObject, timeout: float | None = None) -> Any:
        """Send any request of SGLang's HTTP API; return the reply's JSON, or None.

        Args:
            timeout: limit of a request that may take longer than `hang_seconds`.
        """
        return self.defer(self.request, "POST", path, body, timeout)

    def defer(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the call's result; None where a fault has been deferred, or is deferred now."""
        if self._fault is not None:
            return None
        try:
            return call(*arguments)
        except EngineFault as fault:
            if not self._defers_faults:
                raise
            self._fault = fault
            return None

    def request(
        self,
        method: str,
        path: str,
        body: JsonObject | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Send a request, as `post`, but raise its faults at once."""
        limit = timeout or self.hang_seconds
        try:
            with heartbeat.waiting():  # nobody watches the engine meanwhile, and all other ranks may wait
                timeouts = httpx.Timeout(limit, connect=CONNECT_SECONDS)
                response = self._http.request(method, path, json=body, timeout=timeouts)
        except TIMEOUTS as error:
            self._check_alive()
            raise EngineFault(self._silent(path, limit, TIMEOUT_KEY if timeout else HANG_KEY)) from error
        except httpx.TransportError as error:
            raise self._unreachable(path, error) from error
        return self._checked(path, response)

    def _silent(self, path: str, seconds: float, key: str) -> str:
        return f"{self.url}{path} has not answered for {seconds:g} s: if it was busy, raise {key}"

    def _unreachable(self, path: str, error: httpx.TransportError) -> EngineError:
        self._check_alive()
        if isinstance(error, TIMEOUTS):
            return EngineError(self._silent(path, self.timeout, TIMEOUT_KEY))
        deadline = time.monotonic() + ENDING_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.1)
            self._check_alive()
        return EngineFault(f"{self.url}{path} does not answer ({error!r}): is the engine running there?")

    def _checked(self, path: str, response: httpx.Response) -> Any:
        """Return the reply's JSON (or None); SGLang refuses by status or by "success": false."""
        is_json = response.headers.get("content-type", "").startswith("application/json")
        reply = self._parsed(path, response.content) if is_json and response.content else None
        is_failure = isinstance(reply, dict) and reply.get("success") is False
        if response.status_code != 200 or is_failure:
            is_fault = is_failure and path in GROUP_PATHS
            raise self._refusal(path, response.status_code, response.text, is_fault=is_fault)
        return reply

    def _parsed(self, path: str, data: bytes) -> Any:
        try:
            is_raw = RAW_BYTES in data
            return json.loads(data.decode("latin-1" if is_raw else "utf-8"), strict=not is_raw)
        except ValueError as error:
            beginning = data[:500].decode(errors="replace")
            raise EngineFault(f"{self.url}{path} did not answer with JSON ({error}): {beginning}") from error

    def _refusal(
        self,
        path: str,
        status: int,
        reply: str,
        *,
        is_fault: bool = False,
    ) -> EngineError:
        # A request that is wrong itself would fail again after a restart.
        kind = EngineFault if is_fault or status >= 500 else EngineError
        return kind(f"{self.url}{path} refused (HTTP {status}): {reply}")


@contextlib.contextmanager
def deferring_faults(client: EngineClient | None) -> Iterator[None]:
    """Defer an EngineFault that `post` or `check_health` raises while the block runs, for `take_fault`; then send no
    request.

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


@contextlib.contextmanager
def taking_weights(client: EngineClient | None, version: WeightVersion) -> Iterator[None]:
    """Pause an engine's requests, and new ones, while the block gives it weights; then they resume with the new
    weights.

    The tokens that requests have so far are processed again, unless the cache is kept. After an error requests resume,
    too, as nothing may wait for them forever, but their responses are refused. Without a client it does nothing.
    """
    if client is None:
        yield
        return
    if client.version is None and version.keeps_cache:
        client.flush_cache()  # a run before may have used the server, and the same versions
    client.post("/pause_generation", {"mode": "in_place" if version.keeps_cache else "retract"})
    client._is_paused = True
    client.version = version
    name = INCOMPLETE
    try:
        yield
        name = str(version.number)
    finally:
        client.name_weights(name)
        client.post("/continue_generation", {})
        client._is_paused = False
