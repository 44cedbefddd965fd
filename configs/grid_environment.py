"""The grid game of configs/grid.yaml: walk to the goal in single steps. tools/make_example.py makes its prompts."""

SIZE = 5
STEPS = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}


def shown(place: tuple[int, int], goal: tuple[int, int]) -> str:
    """Return the walker's place and its goal, each as row and column: 10>34."""
    return f"{place[0]}{place[1]}>{goal[0]}{goal[1]}"


class Grid:
    """One game: each turn is one of U, D, L and R; reaching the goal is worth 1 and ends it."""

    columns = ("start", "goal")

    async def reset(self, row):
        """The prompt shows the start; there is nothing to add."""
        self.place, self.goal = tuple(row["start"]), tuple(row["goal"])

    async def step(self, message):
        """Anything but a step leads nowhere, and so does the border."""
        step = STEPS.get(message["content"], (0, 0))
        self.place = tuple(min(max(at + by, 0), SIZE - 1) for at, by in zip(self.place, step, strict=True))
        won = self.place == self.goal
        return shown(self.place, self.goal), float(won), won
