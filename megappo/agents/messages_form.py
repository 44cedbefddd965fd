"""Anthropic's Messages API, translated to and from chat completions."""

import json
from collections.abc import Iterator
from typing import Any

from megappo.agents.chat_form import ApiError, AskedChat, CompletedChat, read_chat, sent_event
from megappo.userland.user_code import JsonObject

ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
}
ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read_message_request(body: JsonObject) -> AskedChat:
    """Return a request, checked; see `read_chat`."""
    given = dict(body)
    system = given.pop("system", None)
    messages = [{"role": "system", "content": _content(system)}] if system else []
    for message in given.pop("messages", []):
        messages += _messages(message)
    given |= {"messages": messages, "stop": given.pop("stop_sequences", None)}
    given["tools"] = [_tool(tool) for tool in given.pop("tools", None) or ()]
    choice = given.pop("tool_choice", None) or {"type": "auto"}
    given["tool_choice"] = choice["type"]
    output = given.pop("output_config", None) or {}
    given |= {"response_format": output.get("format"), "reasoning_effort": output.get("effort")}
    return read_chat(given)


def _content(content: Any) -> Any:
    """Return content in the form of chat completions, without Anthropic's `cache_control`."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part["text"]} if part["type"] == "text" else part for part in content]


def _messages(message: JsonObject) -> list[JsonObject]:
    """Return the messages that a message becomes: each result of a tool is a message of its own."""
    if isinstance(message["content"], str):
        return [message]
    own: JsonObject = {"role": message["role"], "content": []}
    results = []
    for part in message["content"]:
        match part["type"]:
            case "tool_result":
                content = _content(part.get("content", ""))
                results.append({"role": "tool", "tool_call_id": part["tool_use_id"], "content": content})
            case "tool_use":
                function = {"name": part["name"], "arguments": part["input"]}
                own.setdefault("tool_calls", []).append({"id": part["id"], "function": function})
            case "thinking":
                own["reasoning_content"] = own.get("reasoning_content", "") + part["thinking"]
            case _:
                own["content"] += _content([part])
    return [*results, own] if own["content"] or not results else results


def _tool(tool: JsonObject) -> JsonObject:
    """Return a tool in the form of chat completions, which refuse the types that Anthropic defines."""
    if (tool.get("type") or "custom") != "custom":
        return tool
    renamed = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get("input_schema")}
    function = {name: value for name, value in (renamed | {"strict": tool.get("strict")}).items() if value}
    return {"type": "function", "function": function}


class MessagesForm:
    """Anthropic's Messages API."""

    path = "/messages"
    prefix = "msg_"
    read = staticmethod(read_message_request)

    @staticmethod
    def error(error: ApiError) -> JsonObject:
        """Return an error as Anthropic's clients expect it."""
        beginning = "prompt is too long: " if error.code == "context_length_exceeded" else ""  # clients search for it
        kind = ERRORS.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": beginning + str(error)}}

    @staticmethod
    def whole(chat: CompletedChat) -> JsonObject:
        """Return a reply."""
        turn = chat.turns[0]
        content: list[JsonObject] = []
        if turn.reasoning:
            content.append({"type": "thinking", "thinking": turn.reasoning, "signature": ""})
        if turn.content:
            content.append({"type": "text", "text": turn.content})
        for identity, name, arguments in turn.calls:
            content.append({"type": "tool_use", "id": identity, "name": name, "input": arguments})
        return {
            **{"id": chat.id, "type": "message", "role": "assistant", "model": chat.asked.model},
            **{"content": content, "stop_reason": ENDS[turn.finish_reason], "stop_sequence": None},
            "usage": {"input_tokens": chat.prompt_tokens, "output_tokens": chat.completion_tokens},
        }

    @classmethod
    def stream(cls, chat: CompletedChat) -> Iterator[str]:
        """Yield the events of a reply as server-sent events."""
        whole = cls.whole(chat)
        yield _sent("message_start", message={**whole, "content": [], "stop_reason": None})
        for index, block in enumerate(whole["content"]):
            begun, delta = _begun(block)
            yield _sent("content_block_start", index=index, content_block=begun)
            yield _sent("content_block_delta", index=index, delta=delta)
            yield _sent("content_block_stop", index=index)
        end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        yield _sent("message_delta", delta=end, usage={"output_tokens": chat.completion_tokens})
        yield _sent("message_stop")

    @classmethod
    def stream_error(cls, error: ApiError) -> str:
        """Return an error after the beginning of a stream."""
        return sent_event(cls.error(error), "error")


def _sent(kind: str, **more: Any) -> str:
    return sent_event({"type": kind, **more}, kind)


def _begun(block: JsonObject) -> tuple[JsonObject, JsonObject]:
    """Return a block before its delta, and the delta."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    name = block["type"]
    return {**block, name: ""}, {"type": f"{name}_delta", name: block[name]}
