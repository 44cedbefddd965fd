"""An environment for ahead.py that takes its time over every fourth prompt, as real tools do."""

import asyncio
import zlib


class Slow:
    """One turn: the answer is right or wrong, after 1 to 3 seconds for one prompt in four."""

    async def reset(self, row):
        number = zlib.crc32(row["prompt"].encode())
        self.label = row["label"]
        self.seconds = 0.0 if number % 4 else 1 + (number // 4 % 1000) / 500

    async def step(self, message):
        await asyncio.sleep(self.seconds)
        return None, float(message["content"].strip() == str(self.label)), True
