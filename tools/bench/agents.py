"""Time the endpoint of agents with many sessions at once, and count what they leave behind.

    .venv/bin/python tools/bench/agents.py

One worker has all sessions. The client is another process, and this one answers each request with the same text in
place of the policy. The seconds are of the worker alone. No session, task or socket may be left after the end.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

from timed import Row, parser_of, report

from megappo.userland.agent_sessions import AgentPool, Answer, AnsweredTurn, Finished, TurnRequest, load_agent

AGENT = Path(__file__).parent / "waiting_agent.py"
MAX_SECONDS = 3e-3
"""Seconds of one core for a request."""


def pool_of(function: str) -> AgentPool:
    limits = {"agent_timeout_seconds": 3600.0, "environment_timeout_seconds": 600.0, "num_environment_workers": 1}
    parsers = {"tool_call_parser": None, "reasoning_parser": None}
    rollout = SimpleNamespace(agent=f"{AGENT}:{function}", agent_command=None, **limits, **parsers)
    return load_agent(rollout, SimpleNamespace(weights={}, memory_limit_gib=None, pass_env=()))


async def serve(pool: AgentPool, row: dict[str, str], turns: int) -> None:
    """Answer the requests of one session."""
    async with pool.session() as session:
        await session.begin(row)
        number = 0
        while number < turns:
            for event in await session.next_events():
                assert isinstance(event, TurnRequest), event
                number += 1
                assert event.turns.count(None) == len(event.turns) - (number - 1), "all turns are recognised"
                await session.answer(event.number, Answer([AnsweredTurn(number, f"word {number}", "stop")], 600, 3))


async def counts(pool: AgentPool) -> dict[str, float]:
    """Return what the worker has now."""
    async with pool.session() as session:
        await session.begin({"count": "1"})
        while not (events := await session.next_events()):
            pass
        [finished] = events
        assert isinstance(finished, Finished) and not finished.error, finished
        return finished.numbers


async def seconds_and_counts(num_sessions: int, turns: int) -> tuple[float, float, dict[str, float]]:
    """Return the worker's seconds of one core for a request, the seconds of the whole, and what remains of it."""
    with tempfile.TemporaryDirectory() as folder, pool_of("run") as pool:
        addresses = Path(folder, "addresses")
        before = await counts(pool)
        serving = [asyncio.create_task(serve(pool, {"addresses": str(addresses)}, turns)) for _ in range(num_sessions)]
        while not addresses.exists() or len(addresses.read_text().splitlines()) < num_sessions:
            await asyncio.sleep(0.1)
        begun = await counts(pool)
        start = time.monotonic()
        client = await asyncio.create_subprocess_exec(sys.executable, AGENT, addresses, str(turns))
        await asyncio.gather(*serving)
        took = time.monotonic() - start
        assert await client.wait() == 0
        await asyncio.sleep(1.0)  # the sessions are being closed
        after = await counts(pool)
        left = {name: after[name] - before[name] for name in ("sessions", "tasks", "sockets")}
        return (after["seconds"] - begun["seconds"]) / (num_sessions * turns), took, left


def main() -> None:
    parser = parser_of(__doc__, repeats=1)
    parser.add_argument("--sessions", type=int, default=2000, help="sessions at once (default %(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="requests of each (default %(default)s)")
    args = parser.parse_args()
    seconds, took, left = asyncio.run(seconds_and_counts(args.sessions, args.turns))
    print(f"{args.sessions} sessions of {args.turns} turns: {took:.1f} s")
    assert not any(left.values()), f"left behind: {left}"
    anchor = f"{MAX_SECONDS * 1000:g} ms"
    report(
        [Row("Worker's time for a request of an agent", seconds / MAX_SECONDS, "at most 1", anchor, seconds)], args.json
    )


if __name__ == "__main__":
    main()
