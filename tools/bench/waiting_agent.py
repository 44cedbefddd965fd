"""Agents of tools/bench/agents.py, and the client of their sessions, a process of its own.

python waiting_agent.py ADDRESSES TURNS
"""

import asyncio
import gc
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil

PROMPT = "x" * 2000


async def run(base_url: str, api_key: str, row: dict[str, Any]) -> dict[str, float] | None:
    """Wait, or count what the worker has."""
    return await (count() if "count" in row else wait(base_url, api_key, row))


async def wait(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    """Write the session's address and key to a file, and wait."""
    with Path(row["addresses"]).open("a") as file:
        file.write(f"{base_url} {api_key}\n")
    await asyncio.Event().wait()


async def count() -> dict[str, float]:
    """Return the sessions, tasks and sockets of the worker, and the seconds that it has computed."""
    sessions = sum(type(one).__name__ == "EndpointSession" for one in gc.get_objects())
    tasks, sockets = len(asyncio.all_tasks()), len(psutil.Process().net_connections())
    counts = {"sessions": sessions, "tasks": tasks, "sockets": sockets}
    return {"reward": 0.0, **counts, "seconds": time.process_time()}


async def main() -> None:
    addresses = [line.split() for line in Path(sys.argv[1]).read_text().splitlines()]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        await asyncio.gather(*(play(http, *address, int(sys.argv[2])) for address in addresses))


async def play(http: aiohttp.ClientSession, base_url: str, api_key: str, turns: int) -> None:
    """Send the requests of one session."""
    messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": "go"}]
    headers = {"Authorization": f"Bearer {api_key}"}
    for _ in range(turns):
        body = {"model": "policy", "messages": messages}
        async with http.post(f"{base_url}/chat/completions", json=body, headers=headers) as response:
            reply = await response.json()
            assert response.status == 200, reply
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "more"}]


if __name__ == "__main__":
    asyncio.run(main())
