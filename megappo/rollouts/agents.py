"""Agents: programs with a loop of their own, whose requests the policy answers. Many run at once, and each may have
several requests in progress.

An agent rewrites its history as it likes: `TurnTree` places each request in the tree of its turns. The episode is
one trajectory of all its turns in the order in which their requests arrived, with the agent's reward on the last one.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megappo.config.schema import Config
from megappo.data.chat import Chat
from megappo.data.prompts import Prompt
from megappo.engines.generations import Generation
from megappo.rollouts.conversation import Turn, TurnPlace, TurnTree
from megappo.rollouts.episodes import MAX_RESETS, Generate
from megappo.rollouts.sample_rows import AgentFacts, Ending, Sample
from megappo.userland.agents import (
    AgentPool,
    AgentSession,
    Answer,
    AnsweredTurn,
    Cancelled,
    Finished,
    Refusal,
    TurnRequest,
    TurnReward,
)
from megappo.userland.environments import row_of
from megappo.userland.episode_pool import EpisodeLost

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STOP_CHECK_TOKENS = 32
"""Tokens after which a turn is searched for a request's stop strings: the engine knows tokens alone, so the turn is
sampled in parts of this size."""
BAD_REQUEST = 400
TOO_LONG, TOO_MANY = "context_length_exceeded", "turn_limit"
"""Codes of refusals after which an agent may give up. The first is OpenAI's."""
ENDING_AFTER: Mapping[str, Ending] = {TOO_LONG: "length", TOO_MANY: "turns"}


class AgentRunner:
    """Plays episodes from some prompts, in the agents of a pool.

    Args:
        prompts: prompts by their indices.
        needs_reward: nothing else scores an episode.
        tokenizer: serves one thread at a time.
        max_response_length: tokens of a segment after its prompt.
        longest_prompt: most tokens of a prompt.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt] | Mapping[int, Prompt],
        agents: AgentPool,
        config: Config,
        tokenizer: "PreTrainedTokenizerBase",
        max_response_length: int,
        longest_prompt: int,
        *,
        needs_reward: bool,
    ):
        self._prompts = prompts
        self._agents = agents
        self._tokenizer = tokenizer
        self._limits = EpisodeLimits(
            max_turns=config.rollout.max_turns,
            tokens=(max_response_length, longest_prompt + max_response_length),
        )
        self._chat = Chat(tokenizer, config.data)
        self._needs_reward = needs_reward

    async def play(self, prompt_index: int, sample_index: int, generate: Generate) -> Sample:
        """Play one episode from a prompt.

        Raises:
            EnvironmentFault: the agent's code failed.
        """
        prompt = self._prompts[prompt_index]
        row = row_of(prompt.columns, prompt.label)
        lost = ""
        for _ in range(MAX_RESETS):
            async with self._agents.session() as session:
                tree = TurnTree(self._chat, self._tokenizer)
                episode = _Episode(session, tree, self._limits, generate, self._tokenizer)
                lost = await episode.play(row)
                if episode.turns or not lost:
                    return self._sample(prompt_index, sample_index, episode, lost)
        raise self._agents.fault(f"{lost}, {MAX_RESETS} times before its first request was answered")

    def _sample(self, prompt_index: int, sample_index: int, episode: "_Episode", lost: str) -> Sample:
        turns = episode.turns
        finished = episode.finished
        ending: Ending = "lost"
        parts: Mapping[str, float] = {}
        if finished is not None:
            ending, lost = self._ending(finished, episode.refused)
            if not turns:
                refused = f"; the last one was refused: {episode.refused}" if episode.refused else ""
                raise self._agents.fault(f"ended before a request was answered{refused} {finished.error}".rstrip())
            parts = finished.numbers
            if ending == "done" and self._needs_reward and not episode.has_reward:
                reason = "returned no reward, and reward.function is null: return a number, or name a function"
                raise self._agents.fault(reason)
            turns[max(turns)].reward += finished.reward or 0.0
        segments = episode.tree.segments()
        return Sample(prompt_index, sample_index, segments, ending, parts, lost, agent=episode.facts())

    def _ending(self, finished: Finished, refused: str) -> tuple[Ending, str]:
        """Return how an episode ended, and a warning. An agent that raises after a limit of the run refused a request
        is truncated; any other error is a fault of its code."""
        error = finished.error
        if not error:
            return "done", ""
        if refused not in ENDING_AFTER:
            raise self._agents.fault(error)
        return ENDING_AFTER[refused], "" if refused in error else f"after {refused}, the agent {error}"


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an agent's episode.

    Attributes:
        tokens: tokens that a segment may have after its prompt, and together with it.
    """

    max_turns: int
    tokens: tuple[int, int]


class _Episode:
    """An episode while it is played.

    Attributes:
        finished: how the agent ended; None while it runs, or if it was lost.
        turns: the turns that are trained, by number.
        refused: code of the last refusal by a limit of the run; "" without one.
        has_reward: the agent has rewarded a turn, or returned a reward.
    """

    def __init__(
        self,
        session: AgentSession,
        tree: TurnTree,
        limits: EpisodeLimits,
        generate: Generate,
        tokenizer: "PreTrainedTokenizerBase",
    ):
        self.tree = tree
        self.finished: Finished | None = None
        self.refused = ""
        self.has_reward = False
        self._session = session
        self._limits = limits
        self._generate = generate
        self._tokenizer = tokenizer
        self._num_requests = 0
        self._num_turns = 0
        self._num_superseded = 0
        self._waited_seconds = 0.0
        self.turns: dict[int, Turn] = {}
        self._turns_of: dict[int, list[Turn]] = {}  # by number of the request
        self._answering: dict[int, asyncio.Task[None]] = {}

    async def play(self, row: dict[str, object]) -> str:
        """Answer the agent's requests until it ends; return how it was lost, "" if it was not."""
        async with asyncio.TaskGroup() as tasks:
            try:
                await self._session.begin(row)
                while self.finished is None:
                    for event in await self._next_events():
                        match event:
                            case TurnRequest():
                                self._begin(event, tasks)
                            case Cancelled(request):
                                self._cancel(request)
                            case TurnReward(turn, reward) if turn in self.turns:
                                self.turns[turn].reward += reward
                                self.has_reward = True
                            case Finished():
                                self.finished = event
                                self.has_reward |= event.reward is not None
            except EpisodeLost as error:
                return str(error)
            finally:
                for task in self._answering.values():
                    task.cancel()
        return ""

    async def _next_events(self) -> Sequence[object]:
        """Return the next events; count the time in which only the agent can continue."""
        since = time.perf_counter()
        is_waiting = not self._answering
        events = await self._session.next_events()
        if is_waiting:
            self._waited_seconds += time.perf_counter() - since
        return events

    def facts(self) -> AgentFacts:
        """Return the facts for metrics."""
        return AgentFacts(self._num_requests, len(self.turns), self._num_superseded, self._waited_seconds)

    def _begin(self, request: TurnRequest, tasks: asyncio.TaskGroup) -> None:
        """Answer a request in a task. Its turns are numbered now, as requests arrive."""
        self._num_requests += 1
        first = self._num_turns + 1
        if request.n <= self._limits.max_turns - self._num_turns:
            self._num_turns += request.n
            work = self._answer(request, first)
        else:
            limit = f"rollout.max_turns={self._limits.max_turns}"
            work = self._refuse(request, TOO_MANY, f"the episode has had {self._num_turns} turns of {limit}")
        task = tasks.create_task(work)
        self._answering[request.number] = task
        task.add_done_callback(lambda _: self._answering.pop(request.number))

    def _cancel(self, request: int) -> None:
        """Forget a request whose client is gone: what was sampled for it, nobody has read."""
        if request in self._answering:
            self._answering[request].cancel()
        for turn in self._turns_of.pop(request, ()):
            self._drop(turn)

    def _drop(self, turn: Turn) -> bool:
        """Take a turn back unless a later one follows it, which proves that it was read; return whether it is gone."""
        if any(one.parent is turn for one in self.turns.values()):
            return False
        self.tree.drop(turn)
        del self.turns[turn.number]
        return True

    async def _answer(self, request: TurnRequest, first: int) -> None:
        known = [None if number is None else self.turns.get(number) for number in request.turns]
        try:
            place = self.tree.place(request.messages, known, request.tools)
        except ValueError as error:
            await self._refuse(request, "invalid_messages", str(error))
            return
        room = self.tree.room(place, self._limits.tokens)
        if room <= 0:
            reason = f"the request has {len(place.tokens)} tokens, and no room is left for an answer: {self._lengths()}"
            await self._refuse(request, TOO_LONG, reason)
            return
        room = min(room, request.max_tokens or room)
        sampled = await asyncio.gather(*(self._sample(place, room, request.stop) for _ in range(request.n)))
        replaced = [turn for turn in self.turns.values() if request.is_retry and turn.prompt == place.tokens][-1:]
        turns = [self.tree.write(place, generation, number) for number, (generation, _) in enumerate(sampled, first)]
        self.turns |= {turn.number: turn for turn in turns}
        self._turns_of[request.number] = turns
        self._num_superseded += sum(self._drop(turn) for turn in replaced)
        answered = []
        for turn, (generation, end) in zip(turns, sampled, strict=True):
            reason = "stop" if end is not None else generation.finish_reason
            answered.append(AnsweredTurn(turn.number, turn.content[:end], reason))
        num_written = sum(len(generation.tokens) for generation, _ in sampled)
        await self._reply(request, Answer(answered, len(place.tokens), num_written))

    async def _sample(self, place: TurnPlace, room: int, stop: Sequence[str]) -> tuple[Generation, int | None]:
        """Return a turn, and the length of its text before the first of the stop strings; None if it has none. The
        turn ends with the token that completes the string."""
        if not stop:
            return await self._generate(place.tokens, room), None
        written: Generation | None = None
        while True:
            tokens = [] if written is None else written.tokens
            size = min(STOP_CHECK_TOKENS, room - len(tokens))
            part = await self._generate(place.tokens + tokens, size)
            written = part if written is None else written + part
            if (found := self._find(written.tokens, len(tokens), stop)) is not None:
                num_tokens, end = found
                return written.first(num_tokens, len(place.tokens)), end
            if part.finish_reason != "length" or len(written.tokens) >= room:
                return written, None

    def _find(self, tokens: list[int], num_searched: int, stop: Sequence[str]) -> tuple[int, int] | None:
        """Return the number of tokens up to the first stop string's end, and the characters before it."""
        if not any(one in self._tokenizer.decode(tokens) for one in stop):
            return None
        for count in range(num_searched + 1, len(tokens) + 1):
            text = self._tokenizer.decode(tokens[:count])
            if starts := [text.find(one) for one in stop if one in text]:
                return count, min(starts)
        return None

    async def _refuse(self, request: TurnRequest, code: str, message: str) -> None:
        if code in ENDING_AFTER:
            self.refused = code
        await self._reply(request, Refusal(BAD_REQUEST, code, message))

    async def _reply(self, request: TurnRequest, reply: Answer | Refusal) -> None:
        with suppress(EpisodeLost):  # the next events report it
            await self._session.answer(request.number, reply)

    def _lengths(self) -> str:
        after_prompt, total = self._limits.tokens
        return f"at most {after_prompt} after a segment's prompt (rollout.max_response_length), {total} in total"
