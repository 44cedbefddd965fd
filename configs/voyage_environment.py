"""The voyage of configs/voyage.yaml: few choices, much luck, one reward. tools/make_example.py makes its prompts."""

import random

DAYS, HARBOURS, STORMS = 10, 3, 2
SEA, STORM = "~", "!"
GOODS = "wxyz"
WANTED = dict(zip("ABCDEFGH", "wxyzzyxw", strict=True))
"""Harbour -> the good that it buys."""
START, GOAL = 30, 34
GAIN, LUCK = 2, 12


SOLD, REFUSED, IDLE = "+", "-", "."


def shown(place: str, purse: int, news: str = IDLE) -> str:
    """Return what the trader sees: the news of the day before, the place, and the purse: +~32."""
    return f"{news}{place}{purse:02}"


def trade(place: str, offered: str) -> tuple[int, str]:
    """Return what a day adds to the purse, and its news."""
    if place == STORM:
        return random.randint(-LUCK, LUCK), IDLE
    if place == SEA:
        return 0, IDLE
    return (GAIN, SOLD) if WANTED[place] == offered else (0, REFUSED)


class Voyage:
    """One voyage: the trader offers a good every day, and wins (reward 1, else 0) by returning with GOAL or more."""

    columns = ("route",)
    flipped = 0.0
    """Share of the voyages whose reward is the other one."""

    async def reset(self, row):
        """The prompt shows the first place; there is nothing to add."""
        self.route, self.day, self.purse = row["route"], 0, START

    async def step(self, message):
        """Offer a good, and see the next place."""
        gain, news = trade(self.route[self.day], message["content"])
        self.purse += gain
        self.day += 1
        done = self.day == len(self.route)
        won = done and self.purse >= GOAL
        counts = {"right": float(news == SOLD), "won": float(won)}
        if not done:
            return shown(self.route[self.day], self.purse, news), 0.0, False, counts
        return None, float(won != (random.random() < self.flipped)), True, counts


class DoubtfulVoyage(Voyage):
    """One voyage in five is rewarded wrongly."""

    flipped = 0.2
