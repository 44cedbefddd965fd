"""Agents that play episodes, in real worker processes; the policy's turns are scripted."""

import asyncio
import contextlib
import dataclasses
from pathlib import Path

import pytest
from byte_tokenizers import byte_tokenizer
from transformers import PreTrainedTokenizerFast

from megappo.config.schema import Config
from megappo.data.prompts import Prompt
from megappo.engines.generations import EngineFault, Generation
from megappo.rollouts.agent_runner import AgentRunner
from megappo.rollouts.responses import agent_metrics
from megappo.rollouts.sample_rows import Sample
from megappo.userland.agent_sessions import Cancelled, Finished, Refusal, TurnRequest, TurnReward, load_agent
from megappo.userland.episode_pool import EnvironmentFault
from megappo.userland.signatures import PROMPTS, InputSpec

AGENTS = """
import asyncio
import os

import openai

OPENAI = openai.AsyncOpenAI(base_url="", api_key="", max_retries=0)


async def play(base_url, api_key, row):
    client = OPENAI.with_options(base_url=base_url, api_key=api_key)

    async def ask(*texts, **options):
        roles = ["assistant" if number % 2 else "user" for number in range(len(texts))]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts)]
        return await client.chat.completions.create(model="policy", messages=messages, **options)

    return await globals()[row["case"]](client, ask)


def text(reply):
    return reply.choices[0].message.content


async def one_turn(client, ask):
    await ask("a")
    return {"reward": 2.0, "questions": 3}


async def chat(client, ask):
    first = text(await ask("a"))
    second = text(await ask("a", first, "b"))
    return float(first + second == "okok")


async def until_refused(client, ask):
    texts = ["a"]
    while True:
        texts += [text(await ask(*texts)), "more"]


async def bears_refusal(client, ask):
    try:
        await until_refused(client, ask)
    except openai.BadRequestError as error:
        return 0.5 if error.code == "turn_limit" else 0.0


async def wraps_refusal(client, ask):
    try:
        await until_refused(client, ask)
    except openai.BadRequestError:
        raise RuntimeError("it went wrong") from None


async def too_long(client, ask):
    await ask("a")
    await ask("x" * 1000)


async def too_long_at_once(client, ask):
    await ask("x" * 1000)


async def wrong(client, ask):
    await ask("a")
    raise KeyError("no such thing")


async def silent(client, ask):
    return 1.0


async def unrewarded(client, ask):
    await ask("a")


async def dies(client, ask):
    await ask("a")
    os._exit(3)


async def dies_at_once(client, ask):
    os._exit(3)


async def waits(client, ask):
    await ask("a")
    await asyncio.sleep(100)


async def stops(client, ask):
    return float(text(await ask("a", stop=["k"])) == "o")


async def continued(client, ask):
    first = text(await ask("a", max_tokens=1))
    return float(first == "o" and text(await ask("a", "pre")) == text(await ask("a", first)) == "ok")


async def helpers(client, ask):
    first = await ask("a")
    await client.post("/reward", cast_to=object, body={"id": first.id, "reward": 0.25})
    await asyncio.gather(ask("a", text(first), "left"), ask("a", text(first), "right"))
    await ask("a", text(first), "again", n=2)
    return 1.0


async def twins(client, ask):
    async def talk():
        await ask("a", text(await ask("a")), "b")

    await asyncio.gather(talk(), talk(), talk())
    return 1.0


async def gives_up(client, ask):
    await ask("a")
    try:
        await ask("slow", timeout=0.3)
    except openai.APITimeoutError:
        return 1.0


async def retries(client, ask):
    impatient = client.with_options(max_retries=2, timeout=0.3)
    messages = [{"role": "user", "content": "slow once"}]
    reply = await impatient.chat.completions.create(model="policy", messages=messages)
    return float(text(reply) == "ok")


async def repeats(client, ask):
    await ask("a", extra_headers={"x-stainless-retry-count": "0"})
    await ask("a", extra_headers={"x-stainless-retry-count": "1"})
    return 1.0
"""
TEMPLATE = (
    "{% for m in messages %}[{{m.role}}]{{m.content}}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MAX_TURNS = 6
SLOW_SECONDS = 1.5


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    """Return the workers of the agents above."""
    file: Path = tmp_path_factory.mktemp("agents") / "agents.py"
    file.write_text(AGENTS)
    with load_agent(make_config(file).rollout, make_config(file).reward) as pool:
        yield pool


def make_config(file: Path) -> Config:
    rollout = {"agent": f"{file}:play", "environment_timeout_seconds": 3, "max_turns": MAX_TURNS}
    data = {"train_files": "train.jsonl", "max_prompt_length": 100}
    fields = {"rollout": rollout, "reward": {"function": None}, "data": data, "model": {"path": "model"}}
    return Config.model_validate(fields | {"trainer": {"output_dir": "out"}})


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer("<|eot_id|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def play(agents, case: str, *, needs_reward: bool = False, generate=None) -> tuple[Sample, list[list[int]]]:
    """Return an episode and the contexts that its turns were sampled from."""
    tokenizer = make_tokenizer()
    messages = [{"role": "user", "content": "question"}]
    prompt = Prompt(0, [1], "question", None, {PROMPTS: messages, "case": case})
    contexts: list[list[int]] = []
    written = tokenizer.encode("ok<|eot_id|>", add_special_tokens=False)

    async def write(context: list[int], max_tokens: int) -> Generation:
        text = tokenizer.decode(context)
        if "slow" in text and not ("once" in text and contexts):
            contexts.append(context)
            await asyncio.sleep(SLOW_SECONDS)
        contexts.append(context)
        tokens = written[:max_tokens]
        log_probs = [-float(len(contexts))] * len(tokens)
        return Generation(tokens, log_probs, "stop" if tokens == written else "length")

    config = make_config(Path("agents.py"))
    runner = AgentRunner([prompt], agents, config, tokenizer, 200, 100, needs_reward=needs_reward)
    return asyncio.run(runner.play(0, 0, generate or write)), contexts


def shown(sample: Sample) -> list[str]:
    tokenizer = make_tokenizer()
    return [tokenizer.decode(segment.context) for segment in sample.segments]


def test_an_agent_returns_a_reward_and_numbers(agents):
    sample, contexts = play(agents, "one_turn")
    assert shown(sample) == ["[user]a<|eot_id|>[assistant]ok<|eot_id|>"] and len(contexts) == 1
    [segment] = sample.segments
    assert segment.rewards == [0.0, 0.0, 2.0] and segment.turns == [1, 1, 1] and segment.log_probs == [-1.0] * 3
    assert sample.ending == "done" and sample.parts == {"questions": 3.0}


def test_a_conversation_is_one_segment(agents):
    sample, contexts = play(agents, "chat")
    start = "[user]a<|eot_id|>[assistant]ok<|eot_id|>"
    assert shown(sample) == [start + "[user]b<|eot_id|>[assistant]ok<|eot_id|>"]
    assert contexts[1] == sample.segments[0].context[:-3] and sum(sample.segments[0].rewards) == 1.0


@pytest.mark.parametrize(
    ("case", "ending", "warning"),
    [
        ("until_refused", "turns", ""),
        ("bears_refusal", "done", ""),
        ("wraps_refusal", "turns", "raised RuntimeError: it went wrong"),
        ("too_long", "length", ""),
        ("dies", "lost", "ended its process (exit code 3)"),
        ("waits", "lost", "sent no request for 3 seconds (rollout.environment_timeout_seconds)"),
    ],
)
def test_an_episode_ends_by_its_agent_or_a_limit(agents, case, ending, warning):
    sample, contexts = play(agents, case)
    assert sample.ending == ending and warning in sample.lost and bool(warning) == bool(sample.lost)
    assert len(contexts) == (MAX_TURNS if "refus" in case else 1)
    assert sum(sample.segments[-1].rewards) == (0.5 if case == "bears_refusal" else 0.0)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("wrong", "raised KeyError: 'no such thing'"),
        ("silent", "ended before a request was answered"),
        ("unrewarded", "returned no reward, and reward.function is null"),
        ("too_long_at_once", "the last one was refused: context_length_exceeded"),
        ("dies_at_once", "3 times before its first request was answered"),
    ],
)
def test_a_fault_of_the_code_ends_the_run(agents, case, message):
    with pytest.raises(EnvironmentFault, match=message.replace("(", r"\(")):
        play(agents, case, needs_reward=True)


def test_a_stop_string_ends_a_turn_with_the_token_that_completes_it(agents):
    sample, _ = play(agents, "stops")
    assert shown(sample) == ["[user]a<|eot_id|>[assistant]ok"] and sample.segments[0].rewards == [0.0, 1.0]


def test_a_last_message_of_the_assistant_is_continued(agents):
    sample, _ = play(agents, "continued")
    start = "[user]a<|eot_id|>[assistant]"
    assert shown(sample) == [f"{start}ook<|eot_id|>", f"{start}preok<|eot_id|>"]
    assert sum(sample.segments[0].rewards) == 1.0


def test_helpers_and_choices_are_segments_of_the_same_episode(agents):
    sample, contexts = play(agents, "helpers")
    before = "[user]a<|eot_id|>[assistant]ok<|eot_id|>"
    assert sorted(shown(sample)) == sorted(
        [
            before + "[user]left<|eot_id|>[assistant]ok<|eot_id|>",
            before + "[user]right<|eot_id|>[assistant]ok<|eot_id|>",
            *[before + "[user]again<|eot_id|>[assistant]ok<|eot_id|>"] * 2,
        ]
    )
    turns = [turn for segment in sample.segments for turn in segment.turns if turn]
    assert sorted(set(turns)) == [1, 2, 3, 4, 5] and len(turns) == 15, "each turn is trained once"
    rewards = {turn: reward for one in sample.segments for turn, reward in zip(one.turns, one.rewards, strict=True)}
    assert rewards == {0: 0.0, 1: 0.25, 2: 0.0, 3: 0.0, 4: 0.0, 5: 1.0}
    assert [segment.parent for segment in sample.segments] == [0, 1, 1, 1]
    metrics = {name: metric.part for name, metric in agent_metrics([sample]).items()}
    assert metrics["agent/requests"] == (4, 1) and metrics["agent/new_segment_frac"] == (3, 4)
    assert len(contexts) == 5


def test_parallel_conversations_with_equal_texts_are_a_segment_each(agents):
    sample, _ = play(agents, "twins")
    assert shown(sample) == ["[user]a<|eot_id|>[assistant]ok<|eot_id|>[user]b<|eot_id|>[assistant]ok<|eot_id|>"] * 3
    assert sample.num_turns == 6


@pytest.mark.parametrize(
    ("case", "num_turns", "num_superseded"), [("gives_up", 1, 0), ("retries", 1, 0), ("repeats", 1, 1)]
)
def test_a_turn_that_nobody_read_is_not_trained(agents, case, num_turns, num_superseded):
    sample, _ = play(agents, case)
    facts = sample.agent
    assert (sample.num_turns, facts.num_superseded) == (num_turns, num_superseded)
    assert len(sample.segments) == 1 and sample.num_policy_tokens == 3 and sum(sample.segments[0].rewards) == 1.0
    assert dataclasses.asdict(facts)["num_requests"] == 2


class ScriptedAgents:
    """A pool with one session, whose worker sends these events one after the other."""

    takes = InputSpec()

    def __init__(self, *events):
        self.events = iter(events)
        self.answers = {}

    @contextlib.asynccontextmanager
    async def session(self):
        yield self

    async def begin(self, row):
        pass

    async def next_events(self):
        for _ in range(50):  # requests so far are answered
            await asyncio.sleep(0)
        event = next(self.events)
        return event if isinstance(event, list) else [event]

    async def answer(self, request, answer):
        self.answers[request] = answer

    def fault(self, reason):
        return EnvironmentFault(reason)


def request(number: int, text: str = "a", **own) -> TurnRequest:
    usual = {"turns": [None], "tools": [], "max_tokens": None, "n": 1, "stop": (), "is_retry": False}
    return TurnRequest(number, [{"role": "user", "content": text}], **usual | own)


def refused(pool: ScriptedAgents) -> list[int]:
    return [number for number, answer in pool.answers.items() if isinstance(answer, Refusal)]


def test_cancelled_requests_and_refused_ones_leave_room_for_others():
    cancelled = [event for number in range(10) for event in (request(number), Cancelled(number))]
    while_sampling = [request(10, "slow", n=MAX_TURNS), [Cancelled(10), request(11)]]
    pool = ScriptedAgents(*cancelled, *while_sampling, request(12, n=6), *map(request, range(13, 19)), Finished(1.0))
    sample, _ = play(pool, "")
    assert refused(pool) == [12, 18] and sample.ending == "done"
    assert [sorted(set(one.turns)) for one in sample.segments] == [[number] for number in range(1, 7)]
    assert sample.num_turns == MAX_TURNS


def test_a_retry_replaces_all_turns_of_its_request_and_a_cancelled_one_is_dropped_once():
    repeated = request(2, n=2, is_retry=True)
    pool = ScriptedAgents(request(1, n=2), repeated, Cancelled(1), Cancelled(1), Cancelled(9), Finished(1.0))
    sample, _ = play(pool, "")
    assert (sample.num_turns, sample.agent.num_superseded) == (2, 2)


def test_cancelled_requests_are_named_where_no_turn_is_left():
    with pytest.raises(EnvironmentFault, match="its client gave up 1 requests: give it a longer timeout, or none"):
        play(ScriptedAgents(request(1), Cancelled(1), Finished(0.0)), "")


def test_a_command_that_fails_after_a_refusal_is_truncated():
    requests = [request(1), request(2, n=MAX_TURNS)]
    for exit_code, ending in ((0.0, "done"), (1.0, "turns")):
        sample, _ = play(ScriptedAgents(*requests, Finished(0.0, {"exit_code": exit_code})), "")
        assert (sample.ending, sample.lost) == (ending, "")


def test_rewards_whose_sum_is_not_finite_are_a_fault():
    with pytest.raises(EnvironmentFault, match="sum exceeds a float32"):
        play(ScriptedAgents(request(1), TurnReward(1, 3e38), TurnReward(1, 3e38), Finished(1.0)), "")


def test_a_choice_that_fails_ends_the_others_of_its_request():
    ends = []

    async def generate(context, max_tokens):
        if not ends:
            ends.append("fails")
            raise EngineFault("the engine is gone")
        try:
            await asyncio.sleep(100)
        finally:
            ends.append("cancelled")

    with pytest.raises(ExceptionGroup):
        play(ScriptedAgents(request(1, n=2), Finished(1.0)), "", generate=generate)
    assert ends == ["fails", "cancelled"]


def test_the_search_for_stop_strings_does_not_grow_with_the_square_of_the_tokens(monkeypatch):
    decoded = []
    plain = PreTrainedTokenizerFast.decode
    counted = lambda *given, **own: decoded.append(0) or plain(*given, **own)  # noqa: E731
    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", counted)
    tokens = make_tokenizer().encode("x" * 150 + "ok", add_special_tokens=False)

    async def generate(context, max_tokens):
        done = len(context) - len("[user]a\n[assistant]")
        part = tokens[done : done + max_tokens]
        return Generation(part, [0.0] * len(part), "length")

    pool = ScriptedAgents(request(1, stop=("k",)), Finished(1.0))
    sample, _ = play(pool, "", generate=generate)
    assert pool.answers[1].turns[0].text == "x" * 150 + "o" and len(decoded) < 60
    assert sample.segments[0].tokens == tokens
