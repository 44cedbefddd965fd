"""OpenAI's chat completions: requests, replies, streams and errors. The other forms are translated to and from it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megappo.userland.user_code import MAX_CHOICES, JsonObject

BAD_REQUEST = 400
CHANGES_SAMPLING = "the tokens would be sampled from another distribution than the one that is trained"
REASONS = {
    "response_format": CHANGES_SAMPLING,
    "logit_bias": CHANGES_SAMPLING,
    "frequency_penalty": CHANGES_SAMPLING,
    "presence_penalty": CHANGES_SAMPLING,
    "tool_choice": f"only auto and none are supported, with others {CHANGES_SAMPLING}",
}
"""Refused field -> the reason. Unknown fields are refused, too."""
WITHOUT_EFFECT: Mapping[str, Sequence[Any]] = {
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "background": (False,),
    "truncation": ("disabled",),
}
"""Values that change nothing."""
NO_CONCERN = {
    *("metadata", "client_metadata", "user", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "include"),
}
"""Fields that do not concern the policy."""
IGNORED = {
    *("model", "temperature", "top_p", "seed", "parallel_tool_calls"),
    *("reasoning_effort", "verbosity", "prediction", "thinking", "context_management"),
}
"""Fields that are ignored with a warning."""


class ApiError(Exception):
    """An error as its client gets it: HTTP's status, OpenAI's code and a message."""

    def __init__(self, status: int, code: str, message: str):
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class ReplyTurn:
    """A turn of the policy as a message.

    Attributes:
        reasoning: thoughts; "" without any.
        calls: id, name and arguments of each call of a tool.
    """

    content: str
    reasoning: str
    calls: Sequence[tuple[str, str, JsonObject]]
    finish_reason: str


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _ContentPart(_Checked):
    type: Literal["text"]
    text: str


class _CalledFunction(_Checked):
    name: str
    arguments: str | JsonObject


class _ToolCall(_Checked):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _CalledFunction


class _ChatMessage(_Checked):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_ContentPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: None = None
    audio: None = None


class _OfferedFunction(_Checked):
    name: str
    strict: Literal[False] | None = None


class _OfferedTool(_Checked):
    type: Literal["function"]
    function: _OfferedFunction


class _StreamOptions(_Checked):
    include_usage: bool = False


class ChatRequest(BaseModel):
    """The fields of a request that have an effect."""

    model_config = ConfigDict(strict=True, extra="forbid")
    messages: list[_ChatMessage] = Field(min_length=1)
    tools: list[_OfferedTool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: str | list[str] = []
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()


@dataclass(frozen=True)
class AskedChat:
    """A request, whatever its form.

    Attributes:
        messages: messages whose content is a text; arguments of calls are objects.
        tools: tools as the client describes them.
        ignored: names of fields that have no effect.
    """

    messages: list[JsonObject]
    tools: list[JsonObject]
    parses_calls: bool
    max_tokens: int | None
    n: int
    stop: Sequence[str]
    is_stream: bool
    with_usage: bool
    model: str
    ignored: Sequence[str]


@dataclass(frozen=True)
class CompletedChat:
    """A reply, whatever its form.

    Attributes:
        id: its id, which cannot be guessed.
        created: seconds since the epoch.
    """

    asked: AskedChat
    id: str
    created: int
    turns: Sequence[ReplyTurn]
    prompt_tokens: int
    completion_tokens: int


def read_chat(body: JsonObject) -> AskedChat:
    """Return a request, checked.

    Raises:
        ApiError: a field is wrong or not supported.
    """
    given = {name: value for name, value in body.items() if value is not None and name not in NO_CONCERN}
    given = {name: value for name, value in given.items() if value not in WITHOUT_EFFECT.get(name, ())}
    ignored = sorted(given.keys() & IGNORED)
    for name in ignored:
        del given[name]
    try:
        request = ChatRequest.model_validate(given)
        messages = [_plain(message) for message in request.messages]
        tools = given.get("tools", [])
        stop = [request.stop] if isinstance(request.stop, str) else request.stop
        if "" in stop:
            raise ValueError("stop: an empty string would end every turn at once")
        json.dumps([messages, tools, stop], ensure_ascii=False).encode()
    except ValidationError as error:
        raise ApiError(BAD_REQUEST, "invalid_request", _fault(error)) from error
    except ValueError as error:  # a lone surrogate, too
        raise ApiError(BAD_REQUEST, "invalid_request", str(error)) from error
    limits = [limit for limit in (request.max_tokens, request.max_completion_tokens) if limit is not None]
    return AskedChat(
        messages,
        tools,
        parses_calls=bool(tools) and request.tool_choice == "auto",
        max_tokens=min(limits, default=None),
        n=request.n,
        stop=stop,
        is_stream=request.stream,
        with_usage=request.stream_options.include_usage,
        model=str(body.get("model", "policy")),
        ignored=[name for name in ignored if name != "model"],
    )


def _fault(error: ValidationError) -> str:
    """Return a message about the first error."""
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    name = str(first["loc"][0])
    if name in REASONS:
        return f"{name} {first['input']!r:.80} is not supported: {REASONS[name]}; remove it"
    if first["type"] == "extra_forbidden":
        return f"{name} is not supported: remove it; supported are {', '.join(ChatRequest.model_fields)}"
    if first["loc"][-1] == "strict":
        return f"{place}: strict tools are not supported, as {CHANGES_SAMPLING}; set strict to false"
    return f"{place}: {first['msg']}, found {first['input']!r:.80}"


def _plain(message: _ChatMessage) -> JsonObject:
    """Return a message as chat templates take it."""
    content = message.content or ""
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    plain: JsonObject = {"role": role, "content": content}
    optional = ("reasoning_content", "tool_call_id", "name")
    plain |= {name: getattr(message, name) for name in optional if getattr(message, name)}
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    return plain


def _plain_call(call: _ToolCall) -> JsonObject:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        arguments = strict_json(arguments or "{}")
    if not isinstance(arguments, dict):
        found = f"{call.function.arguments!r:.80}"
        raise ValueError(f"tool_calls: expected a JSON object as arguments of {call.function.name}, found {found}")
    identity = {"id": call.id} if call.id else {}
    return {**identity, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def strict_json(text: str | bytes) -> Any:
    """Return what JSON holds.

    Raises:
        ValueError: the text is not JSON, holds NaN or an infinity, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def chat_error(error: ApiError) -> JsonObject:
    """Return an error as OpenAI's clients expect it."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


class ChatForm:
    """OpenAI's chat completions."""

    path = "/chat/completions"
    prefix = "chatcmpl-"
    read = staticmethod(read_chat)
    error = staticmethod(chat_error)

    @classmethod
    def whole(cls, chat: CompletedChat) -> JsonObject:
        """Return a reply."""
        choices = [
            {"index": index, "message": _message(one), "finish_reason": one.finish_reason, "logprobs": None}
            for index, one in enumerate(chat.turns)
        ]
        return {**cls._head(chat, "chat.completion"), "choices": choices, "usage": _usage(chat)}

    @classmethod
    def stream(cls, chat: CompletedChat) -> Iterator[str]:
        """Yield the events of a reply as server-sent events."""
        head = cls._head(chat, "chat.completion.chunk")
        for index, turn in enumerate(chat.turns):
            for delta, finish_reason in _deltas(turn):
                chunk = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
                yield sent_event({**head, "choices": [chunk], "usage": None})
        if chat.asked.with_usage:
            yield sent_event({**head, "choices": [], "usage": _usage(chat)})
        yield "data: [DONE]\n\n"

    @staticmethod
    def stream_error(error: ApiError) -> str:
        """Return an error after the beginning of a stream."""
        return sent_event(chat_error(error))

    @staticmethod
    def _head(chat: CompletedChat, kind: str) -> JsonObject:
        return {"id": chat.id, "object": kind, "created": chat.created, "model": chat.asked.model}


def sent_event(value: JsonObject, name: str = "") -> str:
    """Return a server-sent event."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(value)}\n\n"


def _message(turn: ReplyTurn) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": turn.content or (None if turn.calls else "")}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {"id": identity, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for identity, name, arguments in turn.calls
        ]
    return message


def _deltas(turn: ReplyTurn) -> Iterator[tuple[JsonObject, str | None]]:
    """Yield the parts of a message, and the reason of its end with the last one."""
    message = _message(turn)
    yield {"role": "assistant", "content": None if message["content"] is None else ""}, None
    for name in ("reasoning_content", "content"):
        if message.get(name):
            yield {name: message[name]}, None
    for index, call in enumerate(message.get("tool_calls", ())):
        yield {"tool_calls": [{"index": index, **call}]}, None
    yield {}, turn.finish_reason


def _usage(chat: CompletedChat) -> JsonObject:
    total = chat.prompt_tokens + chat.completion_tokens
    counts = {"prompt_tokens": chat.prompt_tokens, "completion_tokens": chat.completion_tokens}
    return {**counts, "total_tokens": total}
