"""Sessions of agents whose requests a script answers, as the trainer does."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace

from megappo.userland.agent_sessions import (
    AgentPool,
    AgentSession,
    Answer,
    AnsweredTurn,
    Event,
    Finished,
    Refusal,
    TurnRequest,
    load_agent,
)

PROMPT_TOKENS = 7
Script = Callable[[TurnRequest], Awaitable[Sequence[str] | Refusal | None]]
"""Texts of the turns that answer a request, or its refusal; None: no answer."""


def agents_of(agent: str | None = None, command: str | None = None, *, scored: bool = False, **own) -> AgentPool:
    """Return the workers of a function or a command, with the keys of `rollout` that differ from the usual ones."""
    usual = {
        "tool_call_parser": None,
        "reasoning_parser": None,
        "agent_timeout_seconds": 60.0,
        "environment_timeout_seconds": 20.0,
        "num_environment_workers": 1,
    }
    rollout = SimpleNamespace(agent=agent, agent_command=command, **usual | own)
    reward = SimpleNamespace(weights={"gsm8k": 1.0} if scored else {}, memory_limit_gib=16.0, pass_env=())
    return load_agent(rollout, reward)


class ScriptedTrainer:
    """Answers the requests of one session.

    Attributes:
        events: all events in their order.
        num_turns: turns that were written.
    """

    def __init__(self, session: AgentSession, script: Script):
        self._session = session
        self._script = script
        self.events: list[Event] = []
        self.num_turns = 0

    async def play(self) -> Finished:
        """Answer requests, any number at once, until the agent ends."""
        tasks = set()
        while True:
            for event in await self._session.next_events():
                self.events.append(event)
                if isinstance(event, TurnRequest):
                    tasks.add(asyncio.create_task(self._answer(event)))
                if isinstance(event, Finished):
                    for task in tasks:
                        task.cancel()
                    return event

    async def _answer(self, request: TurnRequest) -> None:
        written = await self._script(request)
        if isinstance(written, Refusal):
            await self._session.answer(request.number, written)
        elif written is not None:
            first = self.num_turns + 1
            self.num_turns += len(written)
            turns = [AnsweredTurn(number, text, "stop") for number, text in enumerate(written, first)]
            num_tokens = sum(map(len, written))
            await self._session.answer(request.number, Answer(turns, PROMPT_TOKENS, num_tokens))


async def played(pool: AgentPool, row: dict, script: Script) -> tuple[Finished, list[Event]]:
    """Play one episode; return how it ended, and all events."""
    async with pool.session() as session:
        await session.begin(row)
        trainer = ScriptedTrainer(session, script)
        return await trainer.play(), trainer.events
