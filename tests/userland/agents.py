"""Agents of the tests: each is a function of a client, which its row names. An assertion that fails is its error."""

import asyncio
import ctypes
import gc
import json
import os
import socket
import time

import httpx
import openai
from openai.lib.streaming.chat import ChatCompletionStreamState

from megappo.agents import agent_endpoint

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
HELLO = [{"role": "user", "content": "hello"}]


async def run(base_url, api_key, row):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        return await globals()[row["case"]](client, row)


def replayed(message):
    return message.model_dump(exclude_none=True)


async def chat(client, messages=HELLO, **own):
    return await client.chat.completions.create(model="policy", messages=messages, **own)


async def streamed(client, **own):
    """The completion that OpenAI's client makes of a stream."""
    state = ChatCompletionStreamState()
    async for chunk in await chat(client, stream=True, stream_options={"include_usage": True}, **own):
        state.handle_chunk(chunk)
    return state.get_final_completion()


async def streams(client, row):
    for own in ({}, {"tools": TOOLS}, {"n": 3}):
        whole, parts = await chat(client, **own), await streamed(client, **own)
        assert len(whole.choices) == own.get("n", 1)
        for one, other in zip(whole.choices, parts.choices, strict=True):
            assert one.finish_reason == other.finish_reason
            assert one.message.content == other.message.content
            assert getattr(one.message, "reasoning_content", "") == getattr(other.message, "reasoning_content", "")
            both = [[call.function for call in choice.message.tool_calls or ()] for choice in (one, other)]
            assert [(call.name, call.arguments) for call in both[0]] == [
                (call.name, call.arguments) for call in both[1]
            ]
        assert whole.usage == parts.usage
    return 1


async def responds(client, row):
    """Two turns by the Responses API: the calls, and what follows their results."""
    tools = [{"type": "function", "strict": False, **TOOLS[0]["function"]}]
    items = [{"role": "user", "content": "hello"}]
    for own in ({"instructions": "be brief", "tools": tools}, {}):
        asked = {"model": "policy", "input": items, **own}
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as events:
            kinds = [event.type async for event in events]
            parts = await events.get_final_response()
        assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
        assert [without_ids(item) for item in whole.output] == [without_ids(item) for item in parts.output]
        assert whole.usage == parts.usage and whole.output_text == parts.output_text
        items += [item.model_dump(exclude_none=True) for item in whole.output]
        called = [item for item in whole.output if item.type == "function_call"]
        items += [{"type": "function_call_output", "call_id": one.call_id, "output": one.arguments} for one in called]
    items += [{"role": "user", "content": [{"type": "input_text", "text": "and now?"}]}]
    await client.responses.create(model="policy", input=items, max_output_tokens=5, reasoning={"effort": "low"})
    for wrong in row["refused"]:
        await refused(client, wrong, "/responses")
    return 1


def without_ids(item):
    return item.model_dump(
        exclude_none=True, exclude={"id", "call_id", "status", "parsed_arguments"}, exclude_defaults=True
    )


async def messages_api(client, row):
    """Two turns by Anthropic's API, as JSON: the calls, and what follows their results."""
    tools = [{"name": "multiply", "input_schema": TOOLS[0]["function"]["parameters"]}]
    base_url = str(client.base_url)
    asked = {"model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "be brief"}], "tools": tools}
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    for expected in row["expected"]:
        reply = (await sent(base_url, client.api_key, {**asked, "messages": messages}, "/messages")).json()
        stream = await sent(base_url, client.api_key, {**asked, "messages": messages, "stream": True}, "/messages")
        assert blocks_of(stream.text) == blocks_of_reply(reply)
        content = [{**block, "id": "x"} if "id" in block else block for block in reply["content"]]
        assert [content, reply["stop_reason"]] == expected
        called = [block["id"] for block in reply["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": one, "content": "6"} for one in called]
        messages += [{"role": "assistant", "content": reply["content"]}]
        messages += [{"role": "user", "content": [*results, {"type": "text", "text": "go on"}]}]
    await sent(base_url, client.api_key, {**asked, "messages": messages}, "/messages")
    for wrong in row["refused"]:
        reply = await sent(base_url, client.api_key, {**asked, "messages": messages, **wrong}, "/messages")
        assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error", wrong
    return 1


def blocks_of(stream):
    """The blocks of a stream of Anthropic's, without ids, and the reason of its end."""
    blocks = {}
    for line in stream.splitlines():
        event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
        if event.get("type") == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "id": None}
        if event.get("type") == "content_block_delta":
            kind = event["delta"].pop("type")
            [(name, value)] = event["delta"].items()
            blocks[event["index"]] |= {"input": json.loads(value)} if kind == "input_json_delta" else {name: value}
        if event.get("type") == "message_delta":
            end = event["delta"]["stop_reason"]
    return [blocks[index] for index in sorted(blocks)], end


def blocks_of_reply(reply):
    return [{**block, "id": None} for block in reply["content"]], reply["stop_reason"]


async def calls(client, row):
    messages = list(HELLO)
    for _ in range(3):
        reply = await chat(client, messages, tools=TOOLS)
        messages.append(replayed(reply.choices[0].message))
        called = reply.choices[0].message.tool_calls or ()
        assert reply.choices[0].finish_reason == ("tool_calls" if called else "stop")
        messages += [{"role": "tool", "tool_call_id": call.id, "content": call.function.arguments} for call in called]
        messages += [] if called else HELLO
    # As clients send them back: other ids, other spelling, no thoughts, parts instead of a text.
    messages[1].pop("reasoning_content")
    for call in messages[1]["tool_calls"]:
        call["id"] = "call_x"
        call["function"]["arguments"] = call["function"]["arguments"].replace(" ", "")
    messages[1]["content"] = [{"type": "text", "text": messages[1]["content"] + "\n"}]
    await chat(client, messages, tools=TOOLS, tool_choice="none")
    return 1


async def repeats_itself(client, row):
    messages = list(HELLO)
    for _ in range(3):
        reply = await chat(client, messages)
        messages += [replayed(reply.choices[0].message), *HELLO]
    return 1


async def prefills(client, row):
    reply = await chat(client, [*HELLO, {"role": "assistant", "content": "I "}])
    for replay in ("I " + reply.choices[0].message.content, reply.choices[0].message.content):
        await chat(client, [*HELLO, {"role": "assistant", "content": replay}, *HELLO])
    return 1


async def retries(client, row):
    reply = await chat(client.with_options(timeout=0.4))
    await chat(client, [*HELLO, replayed(reply.choices[0].message), *HELLO])
    return 1


async def cancels(client, row):
    waiting = asyncio.create_task(chat(client, stream=row["stream"]))
    await asyncio.sleep(2)  # a busy machine takes a second for a client's first request
    waiting.cancel()
    await asyncio.wait([waiting])
    await chat(client)
    return 1


async def leaves_an_answer_unread(client, row):
    body = b'{"messages": [{"role": "user", "content": "much"}]}'
    one = raw_socket(client)
    head = (
        f"POST {client.base_url.path}chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.api_key}\r\n"
    )
    one.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await asyncio.sleep(0.5)
    one.close()
    await chat(client)
    return 1


def raw_socket(client):
    return socket.create_connection((client.base_url.host, client.base_url.port))


async def rewards(client, row):
    first = await chat(client, n=2)
    await client.post("/reward", body={"id": first.id, "index": 1, "reward": 0.5}, cast_to=object)
    for wrong, reason in ((float("nan"), "NaN"), ("1", "reward"), (None, "reward"), (1e300, "reward")):
        await refused(client, {"id": first.id, "reward": wrong}, "/reward", reason)
    await refused(client, {"id": "chatcmpl-0", "reward": 1}, "/reward", "id")
    await refused(client, {"id": first.id, "index": 2, "reward": 1}, "/reward", "index 2")
    return {"reward": 2, "steps": 3}


async def refused(client, body, path="/chat/completions", expected=""):
    reply = await sent(str(client.base_url), client.api_key, body, path)
    assert reply.status_code == 400 and expected in reply.json()["error"]["message"], (body, reply.text)


async def sent(base_url, key, body, path):
    headers = {"Authorization": f"Bearer {key}".encode("utf-8", "surrogateescape")}
    async with httpx.AsyncClient(headers=headers) as http:
        return await http.post(base_url.rstrip("/") + path, content=json.dumps(body))


async def asks_for_too_much(client, row):
    for fields, reason in row["refused"]:
        await refused(client, {"messages": HELLO, **fields}, expected=reason)
    for accepted in row["accepted"]:
        await client.post("/chat/completions", body={"messages": HELLO, **accepted}, cast_to=object)
    return 1


async def too_long(client, row):
    for stream in (False, True):
        try:
            await chat(client, stream=stream)
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"
        else:
            raise AssertionError("not refused")
    raise ValueError("I give up")


async def waits_for_a_stream(client, row):
    """Waits for a reply and a refusal, which come after the first comments."""
    agent_endpoint.KEEP_ALIVE_SECONDS = 0.1
    assert [chunk.choices[0].delta.content async for chunk in await chat(client, stream=True)] == ["", "turn 1", None]
    try:
        async for _ in await chat(client, stream=True):
            raise AssertionError("not refused")
    except openai.APIError as error:
        assert error.code == "context_length_exceeded" and not isinstance(error, openai.APIStatusError)
    agent_endpoint.KEEP_ALIVE_SECONDS = 5.0
    return 1


async def forges(client, row):
    """Sends the trainer twice an event that is none, or one that may come once."""
    for one in gc.get_objects():
        if isinstance(one, agent_endpoint.EndpointSession) and str(client.base_url).startswith(one.base_url):
            one.add(row["event"])
            one.add(row["event"])
    await asyncio.sleep(100)


async def models(client, row):
    assert [model.id async for model in client.models.list()] == ["policy"]
    for path in ("/embeddings", "/nothing"):
        try:
            await client.post(path, body={}, cast_to=object)
        except openai.NotFoundError as error:
            assert error.code == "not_found"
    return 1


async def intrudes(client, row):
    """Uses another session's address, and keys that are not its own."""
    other = await asyncio.to_thread(read_when_there, row["others"])
    own = str(client.base_url)
    pairs = [
        (other, client.api_key),
        (other, "none"),
        (own, "x" * 64),
        (own, "\udcff"),
        (own.replace("sessions/", "sessions/x"), client.api_key),
    ]
    for base_url, key in pairs:
        for path in ("/chat/completions", "/reward"):
            reply = await sent(base_url, key, {"messages": HELLO}, path)
            assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key", (key, reply.text)
    return 1


def read_when_there(path):
    while not os.path.exists(path):
        time.sleep(0.01)
    return open(path).read()


async def waits(client, row):
    with open(row["others"] + ".new", "w") as file:
        file.write(str(client.base_url))
    os.rename(row["others"] + ".new", row["others"])
    await asyncio.sleep(row.get("seconds", 3))
    return 1


async def publishes(client, row):
    return {"reward": 0, f"{client.base_url.port}": 0, str(client.base_url).split("/")[-3]: 0, client.api_key: 0}


async def floods(client, row):
    """Sends bodies that are too long, more requests than it may, and what only looks like a request."""
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {client.api_key}"}) as http:
        reply = await http.post(f"{client.base_url}chat/completions", content=b" " * (65 * 2**20))
        assert reply.status_code == 413 and reply.json()["error"]["code"] == "request_entity_too_large"
    body = b"0\r\n\r\nGET / HTTP/1.1\r\n\r\n"
    split = f"Content-Length: {len(body)}\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + body
    for rest in (split, b"X: a\nb\r\n\r\n", b"X" * 2**16 + b": 1\r\n\r\n", b"\x00\r\n\r\n"):
        with raw_socket(client) as one:
            head = f"POST {client.base_url.path}chat/completions HTTP/1.1\r\nAuthorization: Bearer {client.api_key}\r\n"
            one.sendall(head.encode() + rest)
            found = await asyncio.to_thread(one.recv, 2**16)
            assert found.startswith(b"HTTP/1.") and b" 400 " in found[:20], found
    replies = await asyncio.gather(*(chat(client) for _ in range(400)))
    assert all(reply.choices[0].message.content == "x" for reply in replies)
    return 1


async def nothing(client, row):
    return None


async def returns(client, row):
    values = {"text": "x", "nan": float("nan"), "set": {1}, "named": {"reward": "x"}, "true": True}
    return values[row["value"]]


async def raises(client, row):
    raise KeyError("no such thing")


async def exits(client, row):
    raise SystemExit(3)


async def dies(client, row):
    ctypes.string_at(0)


async def hangs(client, row):
    await asyncio.sleep(100)


async def blocks(client, row):
    time.sleep(100)


async def forks(client, row):
    """Two processes return; the trainer must hear one."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return 1


async def ends_with_a_request(client, row):
    task = asyncio.create_task(chat(client))
    await asyncio.sleep(0.3)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return 1


def plain(base_url, api_key, row):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    if row["case"] == "hangs":
        time.sleep(100)
    return client.chat.completions.create(model="policy", messages=HELLO).choices[0].message.content == "turn 1"


def wrong(base_url):
    return 1
