"""The agents of a worker process, and their endpoint."""

import asyncio
import inspect
import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from megappo.agents.agent_command import CommandLost, run_command
from megappo.agents.agent_endpoint import AgentEndpoint, EndpointSession
from megappo.agents.turn_parser import TurnParser
from megappo.runtime.machine import search_path
from megappo.userland.environment_host import STACK_BYTES, called, cancel
from megappo.userland.model_text import as_json
from megappo.userland.signatures import InputSpec
from megappo.userland.user_code import BadFunction, JsonObject, describe, load


class AgentHost:
    """Any number of agents, each with its number.

    Args:
        seconds: time limit of a call.
        is_scored: a reward function scores episodes, so that a command needs no reward.
        tool_call_parser, reasoning_parser: SGLang's names of parsers; None: none.
        code: source and name of a function of (base_url, api_key, row).
        command: the command instead of a function.
    Attributes:
        description: the inputs: all fields of a record.
    """

    def __init__(
        self,
        seconds: float,
        is_scored: bool,
        tool_call_parser: str | None,
        reasoning_parser: str | None,
        code: Sequence[str] = (),
        command: Sequence[str] = (),
    ):
        threading.stack_size(STACK_BYTES)
        self._run = _function(*code) if code else _command(command, is_scored)
        self.description = {"inputs": asdict(InputSpec(optional=None, raw_prompts=True))}
        self._seconds = seconds
        self._endpoint = AgentEndpoint(TurnParser(tool_call_parser, reasoning_parser))
        self._agents: dict[int, tuple[EndpointSession, asyncio.Task]] = {}

    async def begin(self, number: int, row: JsonObject) -> None:
        """Start an agent."""
        await self._endpoint.start()
        session = self._endpoint.open()
        self._agents[number] = session, asyncio.create_task(self._play(session, row))
        await asyncio.sleep(0)  # what the agent does before it first waits is part of this call

    async def next(self, number: int, seconds: float) -> list[JsonObject]:
        """Wait for an agent's next events for some time; return them, or none."""
        session, _ = self._agents[number]
        return await session.next_events(seconds)

    async def answer(self, number: int, request: int, answer: JsonObject) -> None:
        """Answer a request of an agent."""
        session, _ = self._agents[number]
        session.answer(request, answer)

    async def close(self, number: int) -> None:
        """End an agent, if it has begun."""
        await self._endpoint.start()  # an agent that waits for this begins first
        if number in self._agents:
            session, task = self._agents.pop(number)
            self._endpoint.end(session)
            await cancel(task, self._seconds)

    async def _play(self, session: EndpointSession, row: JsonObject) -> None:
        pid = os.getpid()
        try:
            returned = await called(self._run, session.base_url, session.key, row)
            event = {"returned": _as_sent(returned)}
        except CommandLost as error:
            event = {"lost": str(error)}
        except BaseException as error:  # SystemExit, too: the trainer must get the reason
            event = {"raised": describe(error)}
        if os.getpid() != pid:  # this is a process that the agent has forked: it must not answer
            os._exit(0)
        self._endpoint.end(session)
        session.add(event)


def _as_sent(returned: Any) -> Any:
    try:
        return json.loads(json.dumps(returned, default=as_json))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadFunction(f"returned something that is no JSON: {error}") from error


def _function(source: str, name: str) -> Callable[..., Any]:
    function = load(source, name)
    signature = inspect.signature(function)
    try:
        signature.bind("base_url", "api_key", {})
    except TypeError as error:
        raise BadFunction(f"takes {str(signature):.200}; expected (base_url, api_key, row)") from error
    return function


def _command(command: Sequence[str], is_scored: bool) -> Callable[..., Any]:
    if not command or shutil.which(command[0], path=search_path()) is None:
        program = command[0] if command else "the empty command"
        raise BadFunction(f"cannot be started: there is no program {program} (rollout.agent_command)")
    return partial(run_command, command, is_scored)
