"""Agents, programs with a loop of their own, in worker processes: the trainer's side.

An agent sends requests to the endpoint of its worker, which passes them on as events (`AgentSession.next_events`); the
trainer answers each with turns of the policy, or refuses it. Nothing that a worker sends is trusted.
"""

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, TypeAdapter, ValidationError

from megappo.config.schema import Reward
from megappo.config.sections import Rollout
from megappo.userland.episode_pool import EpisodeLost, EpisodePool, Session, episode_limits
from megappo.userland.grades import MAX_NAME_CHARACTERS, fits_float32
from megappo.userland.signatures import is_message
from megappo.userland.spec import parse_spec
from megappo.userland.user_code import MAX_CHOICES, JsonObject, cut

POLL_SECONDS = 20.0
"""Longest time without a reply from a worker whose agent sends nothing."""
Count = Annotated[int, Field(ge=0)]


def _score(value: Any) -> float:
    if not fits_float32(value):
        raise ValueError("expected a finite number that fits into a float32")
    return float(value)


Score = Annotated[float, PlainValidator(_score)]


@dataclass(frozen=True)
class TurnRequest:
    """A request of an agent for turns of the policy.

    Attributes:
        number: number of the request; a later one has a larger number.
        messages: messages whose content is a text; arguments of calls are objects.
        turns: for each message the number of the turn as which it was recognised.
        n: turns to sample.
        stop: strings that end a turn.
        is_retry: the client has sent the same request before.
        ignored: names of its fields that have no effect.
    """

    number: Count
    messages: Annotated[list[JsonObject], Field(min_length=1)]
    turns: list[Count | None]
    tools: list[JsonObject]
    max_tokens: Annotated[int, Field(ge=1)] | None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)]
    stop: tuple[str, ...]
    is_retry: bool
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.turns) != len(self.messages):
            raise ValueError("expected a turn, or None, for each message")
        if not all(map(is_message, self.messages)):
            raise ValueError("expected messages with a role and a text")
        json.dumps([self.messages, self.tools, self.stop], ensure_ascii=False).encode()  # no half of a character


@dataclass(frozen=True)
class Cancelled:
    """The client of a request left before it had read the answer."""

    request: Count


@dataclass(frozen=True)
class TurnReward:
    """A reward that the agent gives to a turn."""

    turn: Count
    reward: Score


@dataclass(frozen=True)
class Finished:
    """The agent has ended.

    Attributes:
        reward: reward of the episode; None if it returned none.
        numbers: further numbers by name.
        error: what the agent raised, and where; "" without an error.
    """

    reward: Score | None = None
    numbers: dict[str, Score] = field(default_factory=dict)
    error: str = ""


Event = TurnRequest | Cancelled | TurnReward | Finished


@dataclass(frozen=True)
class AnsweredTurn:
    """A turn of the policy as its client gets it.

    Attributes:
        number: number of the turn, unique in its session.
        text: text without the token that ends it, up to the first string of `TurnRequest.stop`.
    """

    number: int
    text: str
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class Answer:
    """The `TurnRequest.n` turns that answer a request, and numbers of tokens."""

    turns: Sequence[AnsweredTurn]
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Refusal:
    """An error that answers a request: HTTP's status, OpenAI's code and the reason."""

    status: int
    code: str
    message: str


_EVENTS: Mapping[str, TypeAdapter[Any]] = {
    "request": TypeAdapter(TurnRequest),
    "cancelled": TypeAdapter(Cancelled),
    "reward": TypeAdapter(TurnReward),
}
_RETURNED = TypeAdapter(Score | None | dict[str, Score])


class AgentSession(Session):
    """The agent of one episode."""

    names_method = False

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._unanswered: set[int] = set()
        self._last_request = -1
        self._lost = ""

    async def begin(self, row: JsonObject) -> None:
        """Start the agent.

        Raises:
            EpisodeLost: it takes too long, or its process ended.
            EnvironmentFault: it cannot be started.
        """
        await self.call("begin", {"row": row})
        self._began = self._idle_since = time.monotonic()

    async def next_events(self) -> list[Event]:
        """Wait for events and return them; [] if there are none yet.

        Raises:
            EpisodeLost: a time limit is exceeded, or the agent's process ended.
            EnvironmentFault: the agent returned something else than a reward.
        """
        if self._lost:
            raise EpisodeLost(self._lost)
        limit, episode_seconds = self.pool.timeout_seconds, self.pool.episode_seconds
        now = time.monotonic()
        remaining = self._began + episode_seconds - now
        if remaining <= 0:
            raise EpisodeLost(f"took longer than {episode_seconds:g} seconds (rollout.agent_timeout_seconds)")
        if not self._unanswered:
            remaining = min(remaining, self._idle_since + limit - now)
        if remaining <= 0:
            raise EpisodeLost(f"sent no request for {limit:g} seconds (rollout.environment_timeout_seconds)")
        events = await self.call("next", {"seconds": min(POLL_SECONDS, limit / 2, remaining)})
        if events:
            self._idle_since = time.monotonic()
        if not isinstance(events, list):
            raise self._distrusted(events)
        found = [self._checked(event) for event in events]
        return [event for event in found if event is not None]

    async def answer(self, request: int, answer: Answer | Refusal) -> None:
        """Answer a request; do nothing if its client is gone.

        Raises:
            EpisodeLost, EnvironmentFault: as in `begin`.
        """
        self._settle(request)
        await self.call("answer", {"request": request, "answer": asdict(answer)})

    def _settle(self, request: int) -> None:
        self._unanswered.discard(request)
        self._idle_since = time.monotonic()

    def _checked(self, sent: Any) -> Event | None:
        """Return an event that a worker sent; None for a loss, which the next call reports."""
        match sent:
            case {"returned": value}:
                return self._finished(value)
            case {"raised": str(error)}:
                return Finished(error=error)
            case {"lost": str(reason)}:
                self._lost = reason  # raised by the next call: other events came before it
                return None
            case dict() if len(sent) == 1 and set(sent) <= _EVENTS.keys():
                [(kind, value)] = sent.items()
            case _:
                raise self._distrusted(sent)
        try:
            event = _EVENTS[kind].validate_python(value)
        except (ValidationError, RecursionError) as error:
            raise self._distrusted(sent) from error
        match event:
            case TurnRequest(number) if number <= self._last_request:
                raise self._distrusted(sent)
            case TurnRequest(number):
                self._last_request = number
                self._unanswered.add(number)
                self.pool.warn_ignored(event.ignored)
            case Cancelled(request):
                self._settle(request)
        return event

    def _finished(self, value: Any) -> Finished:
        """Return what an agent returned, checked."""
        try:
            returned = _RETURNED.validate_python(value)
        except (ValidationError, RecursionError) as error:
            expected = "a finite number, a dictionary of such numbers by name, with 'reward', or None"
            raise self.pool.fault(f"returned {cut(repr(value), 200)}; expected {expected}") from error
        numbers = returned if isinstance(returned, dict) else {"reward": returned}
        further = {name[:MAX_NAME_CHARACTERS]: one for name, one in numbers.items() if name != "reward"}
        return Finished(numbers.get("reward"), further)

    def _distrusted(self, sent: Any) -> EpisodeLost:
        return EpisodeLost(f"sent something other than its requests to the trainer: {cut(repr(sent), 200)}")


class AgentPool(EpisodePool):
    """The workers of an agent, which may be used as a context manager.

    Args:
        spec: the agent's name, for messages.
        hosted: arguments of `AgentHost`.
        episode_seconds: time limit of a whole episode.
        limits: further arguments of `WorkerPool`; timeout_seconds also limits the time between an agent's requests.
    Raises:
        EnvironmentFault: the file cannot be imported, or defines no such function; there is no such program.
    """

    kind = "agent"
    session_type = AgentSession

    def __init__(
        self,
        spec: str,
        hosted: JsonObject,
        *,
        episode_seconds: float,
        **limits: Any,
    ):
        self.episode_seconds = episode_seconds
        self._ignored: set[str] = set()
        super().__init__(spec, "agents", hosted, **limits)

    def warn_ignored(self, names: Sequence[str]) -> None:
        """Warn once of each field of requests that has no effect."""
        new = [cut(name, MAX_NAME_CHARACTERS) for name in names if name not in self._ignored]
        self._ignored.update(names)
        if new:
            sampled = "the policy is sampled as the section rollout sets"
            print(f"warning: agent {self.spec} sets {', '.join(new)}, which is ignored: {sampled}", flush=True)


def load_agent(rollout: Rollout, reward: Reward) -> AgentPool:
    """Return the workers of the agent that `rollout` names.

    Args:
        reward: its functions' limits apply to agents, too.
    Raises:
        EnvironmentFault: see `AgentPool`.
    """
    hosted: JsonObject = {
        "seconds": rollout.environment_timeout_seconds,
        "tool_call_parser": rollout.tool_call_parser,
        "reasoning_parser": rollout.reasoning_parser,
        "is_scored": bool(reward.weights),
    }
    if rollout.agent is not None:
        agent = parse_spec(rollout.agent, "rollout.agent", {})
        hosted["code"] = [agent.source, agent.name]
    else:
        hosted["command"] = shlex.split(rollout.agent_command)
    return AgentPool(
        rollout.agent or rollout.agent_command,
        hosted,
        episode_seconds=rollout.agent_timeout_seconds,
        **episode_limits(rollout, reward),
    )
