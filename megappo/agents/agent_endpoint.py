"""The HTTP server of a worker's agents, on loopback: OpenAI's chat completions and Responses API, Anthropic's Messages
API, and rewards of turns.

Each session has an address and a key of its own. A request becomes an event for the trainer, whose answer becomes the
reply. A client that leaves cancels its request. Assistant messages of a request are recognised as turns of the session
by their text and calls, since clients drop ids, thoughts and empty fields, and spell arguments their own way.
"""

import asyncio
import hmac
import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from megappo.agents.chat_form import (
    BAD_REQUEST,
    ApiError,
    AskedChat,
    ChatForm,
    CompletedChat,
    ReplyTurn,
    strict_json,
)
from megappo.agents.messages_form import MessagesForm
from megappo.agents.responses_form import ResponsesForm
from megappo.agents.turn_parser import TurnParser
from megappo.userland.grades import fits_float32
from megappo.userland.user_code import JsonObject, named

MAX_BODY_BYTES = 2**24
"""Longest request. Its line of JSON for the trainer, up to three times as long, must fit `worker_process.MAX_BYTES`."""
MAX_BATCH_BYTES = 2**22
"""Requests beyond this length wait for the next line. A line has at most this and one more request."""
MAX_IN_PROGRESS = 256
"""Requests of a session at a time."""
BACKLOG = 4096
"""Connections that wait for the server."""
KEEP_ALIVE_SECONDS = 5.0
"""Time between the comments of a stream that waits for its turn."""
IDLE_SECONDS = 20.0
"""Time after which an idle connection is closed: agents leave their clients open. Clients wait for less (httpx 5 s,
aiohttp 15 s) before they prefer a new one."""
FORMS = (ChatForm, ResponsesForm, MessagesForm)
SENT = ("messages", "tools", "max_tokens", "n", "stop", "ignored")
"""Attributes of `AskedChat` that the trainer gets."""


class EndpointSession:
    """The session of one agent.

    Attributes:
        base_url: address for clients of OpenAI.
        key: the key for it.
        slots: places for requests in progress; further ones wait unread.
    """

    def __init__(self, base_url: str, key: str):
        self.base_url = base_url
        self.key = key
        self.slots = asyncio.Semaphore(MAX_IN_PROGRESS)
        self._events: list[tuple[int, JsonObject]] = []
        self._changed = asyncio.Event()
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[JsonObject]] = {}
        self._turns: dict[str, list[tuple[int, int | None]]] = {}
        self._turns_of: dict[str, list[int]] = {}

    def add(self, event: JsonObject, num_bytes: int = 0) -> None:
        """Add an event for the trainer."""
        self._events.append((num_bytes, event))
        self._changed.set()

    async def next_events(self, seconds: float) -> list[JsonObject]:
        """Wait for events for some time; return them, or none."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return []
        events: list[JsonObject] = []
        total = 0
        while self._events and total <= MAX_BATCH_BYTES:
            num_bytes, event = self._events.pop(0)
            total += num_bytes
            events.append(event)
        if not self._events:
            self._changed.clear()
        return events

    def answer(self, request: int, answer: JsonObject) -> None:
        """Take the trainer's answer; do nothing if the request's client is gone."""
        waiting = self._pending.get(request)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def end(self) -> None:
        """Refuse the requests in progress. The trainer drops them, even if their answer is here but not yet sent."""
        for request, waiting in self._pending.items():
            self.add({"cancelled": {"request": request}})
            if not waiting.done():
                waiting.set_exception(session_ended())

    @contextmanager
    def request(self, asked: AskedChat, *, is_retry: bool, num_bytes: int) -> Iterator["PendingRequest"]:
        """Pass a request on to the trainer. Any error of the block cancels it, except a refusal by the trainer."""
        number = next(self._numbers)
        turns = self._recognised(asked.messages)
        event = {name: getattr(asked, name) for name in SENT}
        event |= {"number": number, "turns": turns, "is_retry": is_retry}
        self.add({"request": event}, num_bytes)
        pending = PendingRequest(asked, turns, asyncio.get_running_loop().create_future())
        self._pending[number] = pending.answer
        try:
            yield pending
        except ApiError:
            raise
        except BaseException:
            self._forget(pending.chat_id)
            self.add({"cancelled": {"request": number}})
            raise
        finally:
            del self._pending[number]

    def record(self, pending: "PendingRequest", chat_id: str, turns: Mapping[int, ReplyTurn]) -> None:
        """Remember the turns of an answer, by number, by the messages as which their client will send them back: a turn
        that continues a message of the client with that message."""
        parent = next((turn for turn in reversed(pending.turns) if turn is not None), None)
        last = pending.asked.messages[-1]
        before = last["content"] if last["role"] == "assistant" else ""
        for number, turn in turns.items():
            calls = [{"function": {"name": name, "arguments": arguments}} for _, name, arguments in turn.calls]
            text = canonical({"content": before + turn.content, "tool_calls": calls})
            self._turns.setdefault(text, []).append((number, parent))
        pending.chat_id = chat_id
        self._turns_of[chat_id] = list(turns)

    def _forget(self, chat_id: str) -> None:
        numbers = self._turns_of.pop(chat_id, ())
        for turns in self._turns.values():
            turns[:] = [turn for turn in turns if turn[0] not in numbers]

    def _recognised(self, messages: Sequence[JsonObject]) -> list[int | None]:
        """Return for each message the number of the turn that it is: the latest whose parent is the last one found,
        else the latest."""
        found: list[int | None] = []
        last = None
        for message in messages:
            hits = self._turns.get(canonical(message), []) if message["role"] == "assistant" else []
            if hits:
                following = [number for number, parent in hits if parent == last]
                last = following[-1] if following else hits[-1][0]
            found.append(last if hits else None)
        return found

    def reward(self, body: JsonObject) -> None:
        """Pass a reward of a turn on to the trainer.

        Raises:
            ApiError: the reward is not a finite number, or there is no such turn.
        """
        reward, chat_id, index = body.get("reward"), body.get("id"), body.get("index", 0)
        if not fits_float32(reward):
            raise ApiError(BAD_REQUEST, "invalid_request", f"reward: expected a finite number, found {reward!r:.80}")
        numbers = self._turns_of.get(chat_id, []) if isinstance(chat_id, str) else []
        if not isinstance(index, int) or not 0 <= index < len(numbers):
            expected = "expected the id of a completion of this session, and the index of one of its choices"
            raise ApiError(BAD_REQUEST, "invalid_request", f"id {chat_id!r:.80}, index {index!r:.20}: {expected}")
        self.add({"reward": {"turn": numbers[index], "reward": float(reward)}})


@dataclass
class PendingRequest:
    """A request that waits for the trainer's answer.

    Attributes:
        turns: number of the turn that each message is.
        chat_id: id of the answer.
    """

    asked: AskedChat
    turns: Sequence[int | None]
    answer: asyncio.Future[JsonObject]
    chat_id: str = ""


def canonical(message: JsonObject) -> str:
    """Return a text by which a message is recognised."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return json.dumps([message["content"].strip(), calls], sort_keys=True)


def session_ended() -> ApiError:
    return ApiError(410, "session_ended", "the session has ended: its agent has returned, or was stopped")


class AgentEndpoint:
    """The server of a worker's sessions."""

    def __init__(self, parser: TurnParser):
        self._parser = parser
        self._secret = secrets.token_bytes(32)
        self._sessions: dict[str, EndpointSession] = {}
        self._starting = asyncio.Lock()
        self._address = ""

    async def start(self) -> None:
        """Start to listen, the first time."""
        async with self._starting:
            if self._address:
                return
            app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[errors_as_json])
            folder = "/sessions/{session}/v1"
            for form in FORMS:
                app.router.add_post(folder + form.path, partial(self._complete, form))
            app.router.add_get(folder + "/models", self._models)
            app.router.add_post(folder + "/reward", self._reward)
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None, keepalive_timeout=IDLE_SECONDS)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0, backlog=BACKLOG)
            await site.start()
            host, port, *_ = runner.addresses[0]
            self._address = f"http://{host}:{port}"

    def open(self) -> EndpointSession:
        """Open a session."""
        name = secrets.token_urlsafe(16)
        base_url = f"{self._address}/sessions/{name}/v1"
        session = self._sessions[name] = EndpointSession(base_url, self._key(name))
        return session

    def end(self, session: EndpointSession) -> None:
        """End a session; its requests are refused from now on. May be called again."""
        name = session.base_url.split("/")[-2]
        if self._sessions.pop(name, None) is not None:
            session.end()

    def _key(self, name: str) -> str:
        """Return the key of a session. It follows from the name, so keys of past sessions are not stored."""
        return hmac.digest(self._secret, name.encode(), "sha256").hex()

    def _session(self, request: web.Request) -> EndpointSession:
        name = request.match_info["session"]
        _, _, bearer = request.headers.get("Authorization", "").partition("Bearer ")
        given = bearer or request.headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._key(name).encode()):
            raise ApiError(401, "invalid_api_key", "there is no such session, or the key is not the key of this one")
        if name not in self._sessions:
            raise session_ended()
        return self._sessions[name]

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "megappo"}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._session(request)
        session.reward(await body_of(request))
        return web.json_response({})

    async def _complete(self, form: Any, request: web.Request) -> web.StreamResponse:
        """Answer a request in any form."""
        session = self._session(request)
        async with session.slots:
            asked = _read(form, await body_of(request))
            tools = self._tools(asked)
            is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
            num_bytes = len(await request.read())
            self._session(request)  # it may have ended while the body came
            with session.request(asked, is_retry=is_retry, num_bytes=num_bytes) as pending:
                completed = partial(self._completed, form, session, pending, tools)
                if asked.is_stream:
                    return await _write_stream(form, request, pending, completed)
                response = web.json_response(form.whole(completed(await pending.answer)))
                await response.prepare(request)
                await response.write_eof()
                return response

    def _tools(self, asked: AskedChat) -> Any:
        """Return the tools whose calls are parsed, as the parser takes them."""
        if not asked.parses_calls:
            return []
        if not self._parser.parses_calls:
            reason = "tools: no parser would find their calls: set rollout.tool_call_parser"
            raise ApiError(BAD_REQUEST, "no_tool_call_parser", reason)
        try:
            return self._parser.tools(asked.tools)
        except ValueError as error:
            raise ApiError(BAD_REQUEST, "invalid_request", f"tools: {error}") from error

    def _completed(
        self,
        form: Any,
        session: EndpointSession,
        pending: PendingRequest,
        tools: Any,
        answer: Mapping[str, Any],
    ) -> CompletedChat:
        """Return the reply of an answer, whose turns the session remembers.

        Raises:
            ApiError: the trainer refuses the request.
        """
        if "status" in answer:
            raise ApiError(answer["status"], answer["code"], answer["message"])
        turns = {}
        for turn in answer["turns"]:
            content, reasoning, found = self._parser.parse(turn["text"], tools)
            calls = [("call_" + secrets.token_hex(12), *call) for call in found]
            reason = "tool_calls" if calls else turn["finish_reason"]
            turns[turn["number"]] = ReplyTurn(content, reasoning, calls, reason)
        chat_id = form.prefix + secrets.token_hex(16)
        session.record(pending, chat_id, turns)
        counts = answer["prompt_tokens"], answer["completion_tokens"]
        return CompletedChat(pending.asked, chat_id, int(time.time()), [*turns.values()], *counts)


async def _write_stream(
    form: Any,
    request: web.Request,
    pending: PendingRequest,
    completed: Callable[[JsonObject], CompletedChat],
) -> web.StreamResponse:
    """Write a reply as server-sent events, with comments while it waits. A refusal is an HTTP error, unless it comes
    after the first comment."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    while not (await asyncio.wait([pending.answer], timeout=KEEP_ALIVE_SECONDS))[0]:
        await response.prepare(request)
        await response.write(b": waiting\n\n")
    try:
        text = "".join(form.stream(completed(await pending.answer)))
    except ApiError as error:
        if not response.prepared:
            raise
        text = form.stream_error(error)
    await response.prepare(request)
    await response.write(text.encode())
    await response.write_eof()
    return response


def _read(form: Any, body: JsonObject) -> AskedChat:
    try:
        return form.read(body)
    except (KeyError, TypeError, AttributeError) as error:
        reason = f"the request is not as {form.path} expects it: {named(error)}"
        raise ApiError(BAD_REQUEST, "invalid_request", reason) from error


async def body_of(request: web.Request) -> JsonObject:
    """Return the JSON object of a request.

    Raises:
        ApiError: the body is not a JSON object.
    """
    try:
        body = strict_json(await request.read())
    except ValueError as error:
        raise ApiError(BAD_REQUEST, "invalid_json", f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(BAD_REQUEST, "invalid_json", "the body is not a JSON object")
    return body


@web.middleware
async def errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answer with errors in the form of the request."""
    form = next((form for form in FORMS if request.path.endswith(form.path)), ChatForm)
    try:
        return await handler(request)
    except ApiError as error:
        found = error
    except web.HTTPException as error:
        found = ApiError(error.status, error.reason.lower().replace(" ", "_"), f"{request.path}: {error.text}")
    return web.json_response(form.error(found), status=found.status)
