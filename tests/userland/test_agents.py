"""Agents in worker processes: real clients meet a script in place of the policy. Whatever agents do, the trainer
continues or reports why not."""

import asyncio
import itertools
import sys
import time
from pathlib import Path

import httpx
import pytest
from agent_scripts import agents_of, played

from megappo.agents import agent_endpoint
from megappo.agents.agent_host import AgentHost
from megappo.agents.chat_form import read_chat
from megappo.userland import worker_process
from megappo.userland.agent_sessions import AgentPool, Cancelled, Finished, Refusal, TurnRequest, TurnReward
from megappo.userland.episode_pool import EnvironmentFault, EpisodeLost

AGENTS = Path(__file__).parent / "agents.py"
CALLS = (
    '<think>\nhm\n</think>\n\nI call.\n<tool_call>\n{"name": "multiply", "arguments": {"a": 2, "b": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "multiply", "arguments": {"a": 4, "b": 5}}\n</tool_call>'
)
UNREADABLE = '<tool_call>\n{"name": "multiply", "arguments": {"a": \n</tool_call>'


@pytest.fixture(scope="module")
def pool():
    with agents_of(f"{AGENTS}:run", environment_timeout_seconds=10.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def parsing_pool():
    with agents_of(f"{AGENTS}:run", tool_call_parser="qwen25", reasoning_parser="qwen3") as pool:
        yield pool


def scripted(*texts: str):
    """Write the same text always, or these one after the other."""
    written = itertools.cycle(texts)

    async def script(request: TurnRequest):
        return [next(written) for _ in range(request.n)]

    return script


def play(pool: AgentPool, case: str, script=None, **row):
    finished, events = asyncio.run(played(pool, {"case": case, **row}, script or scripted("turn 1")))
    return finished, events


def play_well(pool: AgentPool, case: str, script=None, **row):
    """Return the events of an episode without an error."""
    finished, events = play(pool, case, script, **row)
    assert (finished.error, finished.reward) == ("", 1.0)
    return events


def requests_of(events) -> list[TurnRequest]:
    return [event for event in events if isinstance(event, TurnRequest)]


@pytest.mark.parametrize("text", [CALLS, UNREADABLE, "plain", ""], ids=["calls", "unreadable", "plain", "empty"])
def test_a_stream_is_the_whole_reply_in_parts(parsing_pool, text):
    play_well(parsing_pool, "streams", scripted(text))


def test_messages_are_recognised_as_turns_however_their_client_spells_them(parsing_pool):
    events = play_well(parsing_pool, "calls", scripted(CALLS, UNREADABLE, "the end"))
    first, second, third, last = requests_of(events)
    assert first.turns == [None] and second.turns == [None, 1, None, None]
    assert third.turns == [None, 1, None, None, 2, None] and last.turns == [*third.turns, 3, None]
    functions = [call["function"] for call in last.messages[1]["tool_calls"]]
    assert functions == [{"name": "multiply", "arguments": {"a": a, "b": a + 1}} for a in (2, 4)]
    assert last.messages[1]["content"] == "I call.\n"
    assert second.messages[1]["reasoning_content"].strip() == "hm"
    assert last.messages[4] == {"role": "assistant", "content": UNREADABLE}
    assert first.tools == last.tools and first.tools[0]["function"].keys() == {"name", "parameters"}


def by_prompt(*texts: str):
    """Write a text for each number of messages."""

    async def script(request: TurnRequest):
        return [texts[sum(message["role"] == "assistant" for message in request.messages)]]

    return script


def test_the_responses_api(parsing_pool):
    refused = [
        {"input": "x", "previous_response_id": "resp_1"},
        {"input": "x", "text": {"format": {"type": "json_object"}}},
        {"input": "x", "tools": [{"type": "function", "name": "f", "strict": True}]},
        {"input": "x", "tools": [{"type": "web_search"}]},
        {"input": [{"type": "item_reference", "id": "1"}]},
        {"input": [{"type": "message"}]},
        {"input": [1]},
        {},
    ]
    events = play_well(parsing_pool, "responds", by_prompt(CALLS, "It is 6.", "yes"), refused=refused)
    first, _, second, _, last = requests_of(events)
    assert first.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert first.tools[0]["function"].keys() == {"name", "parameters"}
    assert second.turns == [None, 2, None, None] and last.turns == [None, 2, None, None, 4, None]
    turn = second.messages[1]
    assert turn["reasoning_content"].strip() == "hm" and turn["content"] == "I call." and len(turn["tool_calls"]) == 2
    assert last.max_tokens == 5


def test_the_messages_api_of_anthropic(parsing_pool):
    uses = [{"type": "tool_use", "id": "x", "name": "multiply", "input": {"a": a, "b": a + 1}} for a in (2, 4)]
    thinking = {"type": "thinking", "thinking": "\nhm\n", "signature": ""}
    text = {"type": "text", "text": "I call."}
    expected = [[[thinking, text, *uses], "tool_use"], [[{**text, "text": "It is 6."}], "end_turn"]]
    refused = [
        {"tool_choice": {"type": "any"}},
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [{"role": "user"}]},
        {"messages": 1},
    ]
    script = by_prompt(CALLS, "It is 6.", "yes")
    events = play_well(parsing_pool, "messages_api", script, expected=expected, refused=refused)
    first, _, second, _, last = requests_of(events)
    assert first.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert first.max_tokens == 9 and first.tools[0]["function"].keys() == {"name", "parameters"}
    assert second.turns == [None, None, 2, None, None, None] and last.turns == [*second.turns, 4, None]
    assert [message["role"] for message in second.messages[3:]] == ["tool", "tool", "user"]


def test_of_equal_turns_the_one_that_follows_the_turn_before_is_meant(pool):
    events = play_well(pool, "repeats_itself", scripted("same"))
    assert requests_of(events)[-1].turns == [None, 1, None, 2, None]


def test_a_prefill_with_its_turn_is_recognised_as_the_turn(pool):
    events = play_well(pool, "prefills", scripted("am", "so", "well"))
    assert [request.turns for request in requests_of(events)] == [[None, None], [None, 1, None], [None, None, None]]


def test_a_retry_after_a_timeout_leaves_one_turn(pool):
    async def script(request):
        return ["late"] if request.is_retry or len(request.messages) > 1 else None

    events = play_well(pool, "retries", script)
    assert [type(event) for event in events] == [TurnRequest, Cancelled, TurnRequest, TurnRequest, Finished]
    first, cancelled, second, third = events[:4]
    assert cancelled.request == first.number and (first.is_retry, second.is_retry) == (False, True)
    assert third.turns == [None, 1, None]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(pool, stream):
    async def script(request):
        return None if request.number == 1 else ["x"]

    events = play_well(pool, "cancels", script, stream=stream)
    assert events[1] == Cancelled(1)


def test_an_answer_that_nobody_reads_is_cancelled(pool):
    events = play_well(pool, "leaves_an_answer_unread", scripted("x" * 2**24))
    assert events[1] == Cancelled(1)


def test_rewards_of_turns(pool):
    finished, events = play(pool, "rewards", scripted("a", "b"))
    assert finished == Finished(2.0, {"steps": 3.0})
    assert [event for event in events if isinstance(event, TurnReward)] == [TurnReward(2, 0.5)]


def test_fields_are_honoured_ignored_with_a_warning_or_refused(pool, capfd):
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1]"}}
    distribution = "another distribution"
    refused = [
        ({"response_format": {"type": "json_object"}}, distribution),
        ({"logit_bias": {"1": 5}}, distribution),
        ({"frequency_penalty": 0.5}, distribution),
        ({"presence_penalty": 0.5}, distribution),
        ({"tools": [tool], "tool_choice": "required"}, distribution),
        ({"tools": [strict]}, "strict"),
        ({"tools": [tool]}, "rollout.tool_call_parser"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"logprobs": True}, "logprobs is not supported"),
        ({"top_k": 5}, "top_k is not supported"),
        ({"messages": [{"role": "user", "content": [image]}]}, "image_url"),
        ({"messages": [{"role": "assistant", "tool_calls": [called]}]}, "JSON object"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogates"),
        ({"messages": [{"role": "robot", "content": ""}]}, "role"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n:"),
        ({"stop": ""}, "stop"),
        ({"stream": "yes"}, "stream"),
    ]
    nothing = {"temperature": 0.1, "top_p": 0.2, "seed": 1, "response_format": {"type": "text"}, "logprobs": False}
    own = {"stop": ["a", "b"], "max_tokens": 9, "max_completion_tokens": 5, "user": "me", "tool_choice": "none"}
    accepted = [nothing, nothing, {**own, "tools": [tool]}]
    events = play_well(pool, "asks_for_too_much", refused=refused, accepted=accepted)
    *_, last = requests_of(events)
    assert len(requests_of(events)) == 3 and (last.max_tokens, last.stop, last.tools) == (5, ("a", "b"), [tool])
    assert capfd.readouterr().out.count("sets seed, temperature, top_p, which is ignored") == 1


def test_a_refusal_reaches_the_client_before_a_stream_begins(pool):
    async def script(request):
        return Refusal(400, "context_length_exceeded", "it has 9 tokens")

    finished, events = play(pool, "too_long", script)
    assert "ValueError: I give up" in finished.error and "agents.py" in finished.error
    assert len(requests_of(events)) == 2


def test_a_stream_that_waits(pool):
    async def script(request):
        await asyncio.sleep(0.5)
        return ["turn 1"] if request.number == 1 else Refusal(400, "context_length_exceeded", "it has 9 tokens")

    play_well(pool, "waits_for_a_stream", script)


REQUEST = {
    "number": 1,
    "messages": [{"role": "user", "content": "x"}],
    "turns": [None],
    "tools": [],
    "max_tokens": None,
}
REQUEST |= {"n": 1, "stop": [], "is_retry": False}


@pytest.mark.parametrize(
    "event",
    [
        3,
        {},
        {"other": 1},
        {"request": {}},
        {"request": {**REQUEST, "turns": []}},
        {"request": {**REQUEST, "n": 10**9}},
        {"request": {**REQUEST, "messages": [{"content": "x"}]}},
        {"request": REQUEST},
        {"request": {**REQUEST, "messages": [{"role": "user", "content": "\ud800"}]}},
        {"reward": {"turn": 1, "reward": float("inf")}},
        {"cancelled": {"request": "all"}},
        {"raised": 1},
    ],
)
def test_a_worker_is_not_trusted(pool, event):
    with pytest.raises(EpisodeLost, match="sent something other than its requests"):
        play(pool, "forges", event=event)


def test_models_and_unknown_paths(pool):
    assert play(pool, "models") == (Finished(1.0), [Finished(1.0)])


def test_no_session_reads_or_writes_another(pool, tmp_path):
    others = str(tmp_path / "others")

    async def both():
        return await asyncio.gather(
            played(pool, {"case": "waits", "others": others}, scripted("x")),
            played(pool, {"case": "intrudes", "others": others}, scripted("x")),
        )

    for finished, events in asyncio.run(both()):
        assert (finished.error, finished.reward, len(events)) == ("", 1.0, 1)


def test_a_session_that_has_ended_is_gone(pool):
    finished, _ = play(pool, "publishes")
    port, name, key = finished.numbers
    address = f"http://127.0.0.1:{port}/sessions/{name}/v1"
    for method, path in (("POST", "chat/completions"), ("POST", "reward"), ("GET", "models")):
        reply = httpx.request(method, f"{address}/{path}", headers={"Authorization": f"Bearer {key}"}, json={})
        assert reply.status_code == 410 and reply.json()["error"]["code"] == "session_ended"
        assert httpx.request(method, f"{address}/{path}", json={}).status_code == 401


def test_floods_are_refused_or_wait(pool):
    is_full = asyncio.Event()
    arrived = []

    async def script(request):
        arrived.append(request.number)
        if len(arrived) == 256:
            await asyncio.sleep(1.0)
            assert len(arrived) == 256, "the others wait"
            is_full.set()
        await is_full.wait()
        return ["x"]

    events = play_well(pool, "floods", script)
    assert len(requests_of(events)) == 400


@pytest.mark.parametrize(
    ("case", "finished"),
    [
        ({"case": "nothing"}, Finished()),
        ({"case": "returns", "value": "true"}, Finished(1.0)),
        ({"case": "forks"}, Finished(1.0)),
        ({"case": "raises"}, "raised KeyError: 'no such thing'"),
        ({"case": "exits"}, "raised SystemExit: 3"),
        ({"case": "returns", "value": "set"}, "returned something that is no JSON"),
    ],
)
def test_how_agents_end(pool, case, finished):
    found, _ = play(pool, **case)
    assert found == finished if isinstance(finished, Finished) else found.error.startswith(finished), found


@pytest.mark.parametrize("value", ["text", "nan", "named"])
def test_a_reward_that_is_no_number_is_a_fault(pool, value):
    with pytest.raises(EnvironmentFault, match=r"agent .*agents.py:run returned .*; expected a finite number"):
        play(pool, "returns", value=value)


def test_requests_in_progress_at_the_end_are_cancelled(pool):
    async def script(request):
        return None

    events = play_well(pool, "ends_with_a_request", script)
    assert [type(event) for event in events] == [TurnRequest, Cancelled, Finished]


def test_a_request_whose_reply_is_not_written_at_the_end_is_cancelled():
    async def end_with_an_answer():
        session = agent_endpoint.EndpointSession("", "")
        asked = read_chat({"messages": [{"role": "user", "content": "x"}]})
        with session.request(asked, is_retry=False, num_bytes=1):
            session.answer(1, {})
            session.end()
            return await session.next_events(1.0)

    assert asyncio.run(end_with_an_answer())[1:] == [{"cancelled": {"request": 1}}]


def test_an_agent_that_is_closed_while_it_begins_ends(monkeypatch):
    monkeypatch.setattr("threading.stack_size", lambda size: 0)

    async def close_at_once():
        host = AgentHost(5.0, False, None, None, code=(str(AGENTS), "run"))
        beginning = asyncio.create_task(host.begin(1, {"case": "hangs"}))
        await asyncio.sleep(0)
        await host.close(1)
        await beginning
        return [task for task in asyncio.all_tasks() if "_play" in repr(task)]

    assert asyncio.run(close_at_once()) == []


def test_requests_of_a_batch_fit_into_a_line():
    most = agent_endpoint.MAX_BATCH_BYTES + agent_endpoint.MAX_BODY_BYTES
    assert 3 * most < worker_process.MAX_BYTES


def test_agents_that_are_killed_or_hang_are_lost_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(worker_process, "GRACE_SECONDS", 1.0)
    with agents_of(f"{AGENTS}:run", environment_timeout_seconds=2.0) as pool:
        for case, reason in (
            ("hangs", "sent no request for 2 seconds"),
            ("blocks", "was stopped"),
            ("dies", "ended its process"),
        ):
            with pytest.raises(EpisodeLost, match=reason):
                play(pool, case)
            assert play(pool, "nothing")[0] == Finished()


def test_the_time_for_answers_is_not_the_agents_but_counts_for_the_episode():
    async def script(request):
        await asyncio.sleep(3.5)
        return ["turn 1"]

    with agents_of(f"{AGENTS}:plain", environment_timeout_seconds=3.0) as pool:
        assert play(pool, "", script)[0] == Finished(1.0)
    with agents_of(f"{AGENTS}:plain", agent_timeout_seconds=1.0) as pool:
        start = time.monotonic()
        with pytest.raises(EpisodeLost, match=r"took longer than 1 seconds \(rollout.agent_timeout_seconds\)"):
            play(pool, "hangs")
        assert time.monotonic() - start < 5.0


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        ({"agent": f"{AGENTS}:wrong"}, r"takes \(base_url\); expected \(base_url, api_key, row\)"),
        ({"agent": f"{AGENTS}:nowhere"}, "does not exist"),
        ({"command": "no-such-program --now"}, "there is no program no-such-program"),
    ],
)
def test_an_agent_that_cannot_be_loaded(agent, reason):
    with pytest.raises(EnvironmentFault, match=reason):
        agents_of(**agent)


RUNS_ROW = "import json, os; os.execvp('sh', ['sh', '-c', json.load(open(os.environ['MEGAPPO_ROW']))['case']])"


@pytest.fixture(scope="module")
def shells():
    """Agents that are the shell commands of their rows."""
    with agents_of(command=f'{sys.executable} -c "{RUNS_ROW}"') as pool:
        yield pool


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (f"{sys.executable} {AGENTS.with_name('agent_program.py')}", Finished(0.6, {"exit_code": 0.0})),
        ("""echo x; echo '{"reward": 2, "n": 3}'""", Finished(2.0, {"n": 3.0, "exit_code": 0.0})),
        ("echo $ANTHROPIC_BASE_URL | grep -v v1", Finished(1.0, {"exit_code": 0.0})),
        ("false", Finished(0.0, {"exit_code": 1.0})),
        ("echo broken >&2; exit 3", "ended with exit code 3; the end of its errors: broken"),
        ("kill -9 $$", "ended with SIGKILL"),
    ],
)
def test_how_commands_end(shells, command, expected):
    if isinstance(expected, Finished):
        assert play(shells, command)[0] == expected
    else:
        with pytest.raises(EpisodeLost, match=expected):
            play(shells, command)


LEAVES_CHILDREN = "setsid sleep 600 & (sleep 600 & setsid nohup sleep 600 &) ; "


def test_a_command_leaves_no_process():
    with agents_of(command=f"sh -c '{LEAVES_CHILDREN} echo 0.5'") as pool:
        assert play(pool, "")[0].reward == 0.5
    hangs = f"sh -c '{LEAVES_CHILDREN} sleep 600'"
    is_lost = pytest.raises(EpisodeLost, match="sent no request for 1 seconds")
    with agents_of(command=hangs, environment_timeout_seconds=1.0) as pool, is_lost:
        play(pool, "")


def test_a_command_need_not_print_a_reward_where_a_function_scores_and_its_first_failure_is_shown(capfd):
    with agents_of(command="sh -c 'echo a crash >&2; exit 1'", scored=True) as pool:
        assert [play(pool, "")[0] for _ in range(2)] == [Finished(None, {"exit_code": 1.0})] * 2
    assert capfd.readouterr().err.count("exit code 1; the end of its errors: a crash") == 1
