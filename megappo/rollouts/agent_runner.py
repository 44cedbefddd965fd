"""Agents: programs with a loop of their own, whose requests the policy answers. Many run at once, and each may have
several requests in progress.

An agent rewrites its history as it likes: `TurnTree` finds the place of each request among its turns. The episode is
one trajectory of all turns in the order in which their requests arrived, with the agent's reward on the last one.
"""

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any

from megappo.engines.generations import Generation
from megappo.rollouts.conversation import Turn, TurnTree
from megappo.rollouts.episodes import EpisodeRunner, Generate
from megappo.rollouts.sample_rows import AgentFacts, Ending, Sample
from megappo.userland.agent_sessions import (
    AgentSession,
    Answer,
    AnsweredTurn,
    Cancelled,
    Event,
    Finished,
    Refusal,
    TurnRequest,
    TurnReward,
)
from megappo.userland.environments import row_of
from megappo.userland.episode_pool import EpisodeLost

STOP_CHECK_TOKENS = 32
"""Tokens after which a turn is searched for a request's stop strings: the engine knows tokens alone, so the turn is
sampled in parts of this size."""
TOO_LONG, TOO_MANY = "context_length_exceeded", "turn_limit"
ENDING_AFTER: Mapping[str, Ending] = {TOO_LONG: "length", TOO_MANY: "turns"}
"""Code of a refusal -> how an episode ends whose agent then raises. The first is OpenAI's."""


class AgentRunner(EpisodeRunner):
    """Plays episodes from some prompts, in the agents of a pool.

    Args:
        arguments: see `EpisodeRunner`.
        needs_reward: nothing else scores an episode.
    """

    beginning = "its first request was answered"

    def __init__(self, *arguments: Any, needs_reward: bool):
        super().__init__(*arguments)
        self._needs_reward = needs_reward

    async def _play_in(self, session: Any, prompt_index: int, sample_index: int, generate: Generate) -> Sample:
        prompt = self.prompts[prompt_index]
        episode = _Episode(self, session, generate)
        lost = await episode.play(row_of(prompt.columns, prompt.label))
        if lost and not episode.turns:
            raise EpisodeLost(lost)
        ending: Ending = "lost"
        parts: Mapping[str, float] = {}
        if finished := episode.finished:
            ending, lost = self._ending(episode, finished)
            parts = finished.numbers
            episode.turns[max(episode.turns)].reward += finished.reward or 0.0
        episode.renumber()
        segments = episode.tree.segments()
        return Sample(prompt_index, sample_index, segments, ending, parts, lost, agent=episode.facts())

    def _ending(self, episode: "_Episode", finished: Finished) -> tuple[Ending, str]:
        """Return how an episode ended, and a warning. An agent that fails after a limit of the run refused a request is
        truncated; any other error is a fault of its code."""
        error, refused = finished.error, episode.refused
        if not episode.turns:
            reason = "ended before a request was answered"
            if refused:
                reason += f"; the last one was refused: {refused}"
            if episode.num_cancelled:
                remedy = "a longer timeout, or none (max_retries=0, timeout=None)"
                reason += f"; its client gave up {episode.num_cancelled} requests: give it {remedy}"
            raise self.pool.fault(f"{reason}; it {error}" if error else reason)
        if error and not refused:
            raise self.pool.fault(error)
        if refused and (error or finished.numbers.get("exit_code")):
            is_known = not error or refused in error
            return ENDING_AFTER[refused], "" if is_known else f"{error}, after {refused}"
        if self._needs_reward and not episode.has_reward:
            reason = "returned no reward, and reward.function is null: return a number, or name a function"
            raise self.pool.fault(reason)
        return "done", ""


class _Episode:
    """An episode while it is played.

    Attributes:
        turns: the turns that are trained, by number.
        finished: how the agent ended; None while it runs, or if it was lost.
        refused: code of the last refusal by a limit of the run; "" without one.
        has_reward: the agent has rewarded a turn, or returned a reward.
        num_cancelled: requests whose clients left.
    """

    def __init__(self, runner: AgentRunner, session: AgentSession, generate: Generate):
        self.tree = TurnTree(runner.chat, runner.tokenizer)
        self.turns: dict[int, Turn] = {}
        self.finished: Finished | None = None
        self.refused = ""
        self.has_reward = False
        self.num_cancelled = 0
        self._runner = runner
        self._session = session
        self._generate = generate
        self._requests: dict[int, list[Turn]] = {}  # number of a request -> its turns
        self._numbers = itertools.count(1)
        self._sampling: dict[int, int] = {}  # number of a request -> turns that are being sampled for it
        self._num_superseded = 0
        self._waited_seconds = 0.0
        self._answering: dict[int, asyncio.Task[None]] = {}

    def facts(self) -> AgentFacts:
        """Return the facts for metrics."""
        return AgentFacts(len(self._requests), self._num_superseded, self._waited_seconds)

    def renumber(self) -> None:
        """Close the gaps in the numbers of the turns that are trained."""
        for number, turn in enumerate(sorted(self.turns.values(), key=attrgetter("number")), 1):
            turn.number = number

    async def play(self, row: dict[str, Any]) -> str:
        """Answer the agent's requests until it ends; return how it was lost, "" if it was not."""
        async with asyncio.TaskGroup() as tasks:
            try:
                await self._session.begin(row)
                while self.finished is None:
                    since, is_waiting = time.perf_counter(), not self._answering
                    events = await self._session.next_events()
                    if is_waiting:
                        self._waited_seconds += time.perf_counter() - since
                    for event in events:
                        self._handle(event, tasks)
            except EpisodeLost as error:
                return str(error)
            finally:
                for task in self._answering.values():
                    task.cancel()
        return ""

    def _handle(self, event: Event, tasks: asyncio.TaskGroup) -> None:
        match event:
            case TurnRequest(number):
                self._requests[number] = []
                task = tasks.create_task(self._answer(event))
                self._answering[number] = task
                task.add_done_callback(lambda _: self._answering.pop(number))
            case Cancelled(number):
                self.num_cancelled += 1
                self._sampling.pop(number, None)
                if number in self._answering:
                    self._answering[number].cancel()
                for turn in self._requests.get(number, ()):
                    self._drop(turn)
            case TurnReward(number, reward) if number in self.turns:
                self.turns[number].reward += reward
                self.has_reward = True
            case Finished(reward):
                self.finished = event
                self.has_reward |= reward is not None

    def _drop(self, turn: Turn) -> bool:
        """Drop a turn, unless a later one follows it, which proves that it was read; return whether it was dropped."""
        is_read = any(one.place.parent is turn for one in self.turns.values())
        if is_read or turn.number not in self.turns:
            return False
        self.tree.drop(turn)
        del self.turns[turn.number]
        return True

    async def _answer(self, request: TurnRequest) -> None:
        """Answer a request. Its turns are numbered before the first wait, so in the order in which requests arrive."""
        runner = self._runner
        num_before = len(self.turns) + sum(self._sampling.values())
        if num_before + request.n > runner.max_turns:
            reason = f"the episode has had {num_before} turns of rollout.max_turns={runner.max_turns}"
            return await self._refuse(request, TOO_MANY, reason)
        known = [None if number is None else self.turns.get(number) for number in request.turns]
        try:
            place = self.tree.place(request.messages, known, request.tools, continues=True)
        except ValueError as error:
            return await self._refuse(request, "invalid_messages", str(error))
        room = self.tree.room(place, runner.limits)
        if room <= 0:
            after_prompt, total = runner.limits
            limits = f"{after_prompt} after a segment's prompt (rollout.max_response_length), {total} in total"
            reason = f"no room is left after {len(place.tokens)} tokens: at most {limits}"
            return await self._refuse(request, TOO_LONG, reason)
        numbers = [next(self._numbers) for _ in range(request.n)]
        prompt = place.tokens
        sample = partial(self._sample, prompt, min(room, request.max_tokens or room), request.stop)
        self._sampling[request.number] = request.n
        async with asyncio.TaskGroup() as group:  # unlike gather, it cancels the others if one fails
            tasks = [group.create_task(sample()) for _ in numbers]
        sampled = [task.result() for task in tasks]
        del self._sampling[request.number]
        superseded = self._superseded(request, prompt)
        answered = []
        for number, (generation, end) in zip(numbers, sampled, strict=True):
            turn = self.tree.write(place, generation, number, _continued(request, known))
            self.turns[number] = turn
            self._requests[request.number].append(turn)
            reason = generation.finish_reason if end is None else "stop"
            answered.append(AnsweredTurn(number, turn.content[:end], reason))
        self._num_superseded += sum(self._drop(turn) for turn in superseded)
        num_written = sum(len(generation.tokens) for generation, _ in sampled)
        return await self._reply(request, Answer(answered, len(prompt), num_written))

    def _superseded(self, request: TurnRequest, prompt: list[int]) -> list[Turn]:
        """Return the turns that a retry replaces: the latest request's with the same prompt."""
        if not request.is_retry:
            return []
        for turns in reversed(self._requests.values()):
            live = [turn for turn in turns if turn.number in self.turns]
            if live and live[0].place.tokens == prompt:
                return live
        return []

    async def _sample(self, prompt: list[int], room: int, stop: Sequence[str]) -> tuple[Generation, int | None]:
        """Return a turn, and the length of its text before the first of the stop strings; None if it has none. The
        turn ends with the token that completes the string."""
        if not stop:
            return await self._generate(prompt, room), None
        written = Generation([], [], "length")
        while written.finish_reason == "length" and len(written.tokens) < room:
            num_searched = len(written.tokens)
            size = min(STOP_CHECK_TOKENS, room - num_searched)
            written += await self._generate(prompt + written.tokens, size)
            if self._stop_at(written.tokens, stop) is None:
                continue
            for count in range(num_searched + 1, len(written.tokens) + 1):
                if (start := self._stop_at(written.tokens[:count], stop)) is not None:
                    return written.first(count, len(prompt)), start
        return written, None

    def _stop_at(self, tokens: list[int], stop: Sequence[str]) -> int | None:
        """Return the place in the text of tokens where the first of the stop strings begins; None without one."""
        text = self._runner.tokenizer.decode(tokens)
        return min((text.find(one) for one in stop if one in text), default=None)

    async def _refuse(self, request: TurnRequest, code: str, message: str) -> None:
        if code in ENDING_AFTER:
            self.refused = code
        await self._reply(request, Refusal(400, code, message))

    async def _reply(self, request: TurnRequest, reply: Answer | Refusal) -> None:
        with suppress(EpisodeLost):  # the next events report it
            await self._session.answer(request.number, reply)


def _continued(request: TurnRequest, known: Sequence[Turn | None]) -> str:
    """Return the message of the assistant that a turn continues; "" for a turn that is a message of its own."""
    last, turn = request.messages[-1], known[-1]
    if last["role"] != "assistant":
        return ""
    return last["content"] if turn is None else turn.begun + turn.content
