"""OpenAI's Responses API, translated to and from chat completions."""

import json
from collections.abc import Iterator
from typing import Any

from megappo.agents.chat_form import (
    BAD_REQUEST,
    ApiError,
    AskedChat,
    CompletedChat,
    chat_error,
    read_chat,
    sent_event,
)
from megappo.userland.user_code import JsonObject


def read_response(body: JsonObject) -> AskedChat:
    """Return a request, checked; see `read_chat`."""
    given = dict(body)
    given.pop("stream_options", None)
    given["max_tokens"] = given.pop("max_output_tokens", None)
    text, reasoning = given.pop("text", None) or {}, given.pop("reasoning", None) or {}
    given |= {"response_format": text.get("format"), "verbosity": text.get("verbosity")}
    given["reasoning_effort"] = reasoning.get("effort")
    items = given.pop("input", [])
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    instructions = given.pop("instructions", None)
    first = [{"role": "system", "content": instructions}] if instructions else []
    given["messages"] = [*first, *_messages(items)]
    given["tools"] = [_tool(tool) for tool in given.get("tools") or ()]
    return read_chat(given)


def _messages(items: list[JsonObject]) -> list[JsonObject]:
    """Return items as messages. The thoughts, text and calls of a turn follow each other, and become one message."""
    messages: list[JsonObject] = []
    turn: JsonObject | None = None
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            output = _text(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _text(item["content"])})
        else:
            if turn is None or kind == "reasoning" or (kind == "message" and "content" in turn):
                turn = {"role": "assistant"}
                messages.append(turn)
            _add(turn, kind, item)
            continue
        turn = None
    return messages


def _add(turn: JsonObject, kind: str, item: JsonObject) -> None:
    """Add an item to the message of its turn."""
    match kind:
        case "message":
            turn["content"] = _text(item["content"])
        case "reasoning":
            turn["reasoning_content"] = _text(item.get("content") or item.get("summary") or "")
        case "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            turn.setdefault("tool_calls", []).append({"id": item["call_id"], "function": function})
        case _:
            raise ApiError(BAD_REQUEST, "invalid_request", f"input: items of type {kind!r:.80} are not supported")


def _text(content: Any) -> Any:
    """Return content in the form of chat completions."""
    if isinstance(content, str):
        return content
    kinds = ("input_text", "output_text", "reasoning_text", "summary_text")
    parts = [{"type": "text", "text": part["text"]} if part["type"] in kinds else part for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _tool(tool: JsonObject) -> JsonObject:
    if tool.get("type") != "function":
        return tool
    function = {name: value for name, value in tool.items() if name != "type" and value not in (None, False)}
    return {"type": "function", "function": function}


class ResponsesForm:
    """OpenAI's Responses API."""

    path = "/responses"
    prefix = "resp_"
    read = staticmethod(read_response)
    error = staticmethod(chat_error)

    @classmethod
    def whole(cls, chat: CompletedChat) -> JsonObject:
        """Return a reply."""
        is_cut = chat.turns[0].finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        counts = {"input_tokens": chat.prompt_tokens, "output_tokens": chat.completion_tokens}
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        return {
            **cls._head(chat, status),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": _output(chat, status),
            "usage": {**counts, **details, "total_tokens": chat.prompt_tokens + chat.completion_tokens},
        }

    @classmethod
    def stream(cls, chat: CompletedChat) -> Iterator[str]:
        """Yield the events of a reply as server-sent events."""
        whole = cls.whole(chat)
        begun = {**cls._head(chat, "in_progress"), "output": []}
        events = [("created", {"response": begun}), ("in_progress", {"response": begun})]
        for index, item in enumerate(whole["output"]):
            place = {"output_index": index}
            events.append(("output_item.added", {**place, "item": _begun(item)}))
            events += [(kind, {**place, "item_id": item["id"], **more}) for kind, more in _parts(item)]
            events.append(("output_item.done", {**place, "item": item}))
        events.append((whole["status"], {"response": whole}))
        for number, (kind, event) in enumerate(events):
            name = f"response.{kind}"
            yield sent_event({"type": name, "sequence_number": number, **event}, name)

    @staticmethod
    def stream_error(error: ApiError) -> str:
        """Return an error after the beginning of a stream."""
        found = chat_error(error)
        return sent_event({"type": "error", "sequence_number": 0, **found["error"], **found}, "error")

    @staticmethod
    def _head(chat: CompletedChat, status: str) -> JsonObject:
        known = {"object": "response", "created_at": chat.created, "model": chat.asked.model, "status": status}
        unset = dict.fromkeys(("error", "incomplete_details", "instructions", "temperature", "top_p"))
        constant = {"metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        return {"id": chat.id, **known, **unset, **constant}


def _output(chat: CompletedChat, status: str) -> list[JsonObject]:
    """Return the items of a turn: thoughts, text and calls."""
    turn = chat.turns[0]
    items: list[JsonObject] = []

    def add(kind: str, prefix: str, **more: Any) -> None:
        items.append({"id": f"{prefix}_{chat.id}_{len(items)}", "type": kind, "status": status, **more})

    if turn.reasoning:
        add("reasoning", "rs", summary=[], content=[{"type": "reasoning_text", "text": turn.reasoning}])
    if turn.content or not turn.calls:
        part = {"type": "output_text", "text": turn.content, "annotations": []}
        add("message", "msg", role="assistant", content=[part])
    for identity, name, arguments in turn.calls:
        add("function_call", "fc", call_id=identity, name=name, arguments=json.dumps(arguments))
    return items


def _begun(item: JsonObject) -> JsonObject:
    """Return an item before its first event."""
    empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    return {**item, **empty, "status": "in_progress"}


def _parts(item: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    """Yield the events of an item."""
    if item["type"] == "function_call":
        yield "function_call_arguments.delta", {"delta": item["arguments"]}
        yield "function_call_arguments.done", {"arguments": item["arguments"], "name": item["name"]}
        return
    [part] = item["content"]
    place = {"content_index": 0}
    more = {"logprobs": []} if part["type"] == "output_text" else {}
    yield "content_part.added", {**place, "part": {**part, "text": ""}}
    yield f"{part['type']}.delta", {**place, **more, "delta": part["text"]}
    yield f"{part['type']}.done", {**place, **more, "text": part["text"]}
    yield "content_part.done", {**place, "part": part}
