"""Simulate steps in which the engines sample while the models train, with the seconds that `megappo plan` estimates.

    .venv/bin/python tools/simulate_staleness.py CONFIG [key=value ...] --gpu h100 --output outputs/staleness
    .venv/bin/python tools/simulate_staleness.py CONFIG --gpu h100 --mean 2000 --tail 1.2 --staleness 0 1 4
    .venv/bin/python tools/simulate_staleness.py CONFIG --gpu h100 --lengths outputs/mine/rollouts

Lengths of responses are lognormal, cut at rollout.max_response_length, or the lengths of a run's kept rollouts. An
engine decodes at a rate that depends on how many responses are in progress; the models' time is proportional to the
tokens of a batch. Prints a table over rollout.max_staleness; --output draws it, in FOLDER/staleness.svg.
"""

import argparse
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heapify, heappop, heappush, heapreplace
from math import ceil, inf, log
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from megappo.config.config_error import ConfigError
from megappo.config.eval_sets import longest_row
from megappo.config.loading import load_config
from megappo.config.schema import Config
from megappo.lab.estimate.fitting import resolve_offload
from megappo.lab.estimate.gpu_memory import ROLLOUT, SYNC, Cluster, MemoryEstimate
from megappo.lab.estimate.seconds import TimeEstimate
from megappo.lab.plan.picture import aligned
from megappo.placement.placing import smallest_world
from megappo.placement.run_plan import plan_run
from megappo.rollouts.group_queue import block_of, next_lookahead
from megappo.runtime.gpus import GPU, GPUS

# isort: split
# After megappo's imports, which name the Python that has these.
import numpy as np
from pyarrow import compute, parquet

WARM_UP = 0.25
"""Share of the steps that the table leaves out: the first ones fill the queue."""
HEADER = (
    "max_staleness",
    "s a step",
    "speed-up",
    "engines idle",
    "trainers idle",
    "age",
    "oldest",
    "of tokens",
    "queue",
)
WIDTH, LEFT, RIGHT, BAR = 760, 60, 250, 30
"""Sizes of the picture."""


@dataclass
class Group:
    """A prompt and its responses.

    Attributes:
        number: position in the order in which groups are begun.
        missing: responses that are not finished.
        version: finished steps when the first response was begun.
        newer: sum over the tokens of the steps that were finished between then and the token.
    """

    number: int
    lengths: Sequence[int]
    missing: int
    version: int = 0
    newer: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


class Running(NamedTuple):
    """A response in progress.

    Attributes:
        end: the engine's position at its last token.
        number: number among the engine's responses, which orders responses of the same end.
        version: the engine's syncs before its first token.
    """

    end: float
    number: int
    version: int
    length: int
    group: Group


class Engine:
    """An engine, which writes a token of each response in progress at a time.

    Args:
        decoding_step: responses in progress -> seconds of a token of each.
        most: responses in progress at once. Others that it has been sent wait.
        prompt_pass: seconds of a prompt, before its response.
    Attributes:
        clock: the engine's time, in seconds.
        position: decoding steps so far.
        idle: seconds without a response in progress.
    """

    def __init__(self, decoding_step: Callable[[int], float], most: int, prompt_pass: float = 0.0):
        self.clock = self.position = self.idle = 0.0
        self._decoding_step, self._most, self._prompt_pass = decoding_step, most, prompt_pass
        self._running: list[Running] = []
        self._waiting: deque[tuple[int, Group]] = deque()
        self._syncs: list[float] = []  # the position of each
        self._num_started = 0

    @property
    def num_open(self) -> int:
        """Responses that the engine has been sent and has not finished."""
        return len(self._running) + len(self._waiting)

    def send(self, group: Group) -> None:
        """Sample the responses to a prompt."""
        group.version = len(self._syncs)
        self._waiting.extend((length, group) for length in group.lengths)
        self._start()

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._most:
            length, group = self._waiting.popleft()
            self.clock += self._prompt_pass
            self._num_started += 1
            running = Running(self.position + length, self._num_started, len(self._syncs), length, group)
            heappush(self._running, running)

    @property
    def next_end(self) -> float:
        """The time at which the next response is finished; infinite without one."""
        if not self._running:
            return inf
        return self.clock + (self._running[0].end - self.position) * self._decoding_step(len(self._running))

    def finish_next(self) -> Group:
        """Go to the end of the next response; return its group."""
        self.clock = self.next_end
        done = heappop(self._running)
        self.position = done.end
        group = done.group
        group.missing -= 1
        group.newer += done.length * (done.version - group.version)
        group.newer += sum(self.position - sync for sync in self._syncs[done.version :])
        self._start()
        return group

    def advance(self, until: float) -> None:
        """Go to a time before the next end."""
        seconds = max(until - self.clock, 0.0)
        if self._running:
            self.position += seconds / self._decoding_step(len(self._running))
        else:
            self.idle += seconds
        self.clock = max(self.clock, until)

    def pause(self, until: float) -> None:
        """Wait until a time at which the engine has new weights."""
        self.clock = max(self.clock, until)
        self._syncs.append(self.position)


class Step(NamedTuple):
    """A simulated step.

    Attributes:
        engines_idle: mean over the engines, in seconds.
        age: mean of the batch's prompts, in steps since they were begun; oldest: the greatest.
        token_age: the same of the tokens, since each was written.
        queue: finished prompts that remain for later steps.
    """

    seconds: float
    trainers_idle: float
    engines_idle: float
    age: float
    oldest: int
    token_age: float
    queue: int


@dataclass
class Simulation:
    """A run of which only the seconds are computed.

    Args:
        batch: prompts of a step; num_responses: to each.
        lengths: returns the tokens of a number of responses.
        training: tokens of a batch's responses -> seconds of the models.
        most_open: responses that an engine is sent at once.
        finishes: responses in progress are finished before each sync.
    """

    max_staleness: int
    batch: int
    num_responses: int
    engines: Sequence[Engine]
    lengths: Callable[[int], np.ndarray]
    training: Callable[[int], float]
    sync: float
    most_open: int
    finishes: bool = False
    now: float = field(default=0.0, init=False)
    num_steps: int = field(default=0, init=False)
    num_admitted: int = field(default=0, init=False)
    lookahead: int = field(init=False)
    admitted: deque[Group] = field(default_factory=deque, init=False)
    num_finished: Counter[int] = field(default_factory=Counter, init=False)  # by block
    finished: list[Group] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.lookahead = min(1, self.max_staleness)

    def step(self) -> Step:
        """Run a step: wait for a batch, train on it, send the weights."""
        began, idle = self.now, self._engines_idle
        self._admit()
        self._run(inf, self._has_batch)
        waited = self.now - began
        self.finished.sort(key=lambda group: group.number)
        chosen, self.finished = self.finished[: self.batch], self.finished[self.batch :]
        num_tokens = sum(group.num_tokens for group in chosen)
        self._run(self.now + self.training(num_tokens), lambda: False)
        waited += self._sync()
        ages = list(map(self._age, chosen))
        token_ages = sum(self._age(group) * group.num_tokens - group.newer for group in chosen)
        self.num_steps += 1
        seconds = self.now - began
        self.lookahead = next_lookahead(self.lookahead, waited / seconds, self.max_staleness)
        return Step(
            seconds=seconds,
            trainers_idle=waited,
            engines_idle=self._engines_idle - idle,
            age=fmean(ages),
            oldest=max(ages),
            token_age=token_ages / num_tokens,
            queue=len(self.finished),
        )

    @property
    def _engines_idle(self) -> float:
        return fmean(engine.idle for engine in self.engines)

    def _age(self, group: Group) -> int:
        """Return the age of a prompt that is trained in this step."""
        return self.num_steps - group.version

    def _has_batch(self) -> bool:
        return self.num_finished[self.num_steps] == self.batch

    def _admit(self) -> None:
        """Admit prompts as `GroupQueue` does."""
        for _ in range((self.num_steps + 1 + self.lookahead) * self.batch - self.num_admitted):
            lengths = self.lengths(self.num_responses).tolist()
            self.admitted.append(Group(self.num_admitted, lengths, len(lengths)))
            self.num_admitted += 1
        while self._send(min(self.engines, key=attrgetter("num_open"))):
            pass

    def _send(self, engine: Engine) -> bool:
        """Send the next prompt to an engine that has room; return whether it was sent."""
        if not self.admitted or engine.num_open + self.num_responses > self.most_open:
            return False
        group = self.admitted.popleft()
        engine.send(group)
        return True

    def _run(self, until: float, is_complete: Callable[[], bool], *, sends: bool = True) -> None:
        """Let the engines write until a time, or until something is complete."""
        ends = [(engine.next_end, number) for number, engine in enumerate(self.engines)]
        heapify(ends)
        while not is_complete() and ends[0][0] <= until:
            self.now, number = ends[0]
            engine = self.engines[number]
            group = engine.finish_next()
            if not group.missing:
                self.num_finished[block_of(group.number, self.batch)] += 1
                self.finished.append(group)
            if sends:
                self._send(engine)
            heapreplace(ends, (engine.next_end, number))
        self.now = self.now if until == inf else until
        for engine in self.engines:
            engine.advance(self.now)

    def _sync(self) -> float:
        """Send the weights; return the seconds for which the models have waited for responses in progress."""
        began = self.now
        if self.finishes:
            self._run(inf, lambda: not any(engine.num_open for engine in self.engines), sends=False)
        waited = self.now - began
        self.now += self.sync
        for engine in self.engines:
            engine.pause(self.now)
        return waited


def lengths_of(args: argparse.Namespace, config: Config) -> Callable[[int], np.ndarray]:
    """Return a function that draws the tokens of a number of responses."""
    random = np.random.default_rng(args.seed)
    most = config.rollout.max_response_length
    if args.lengths is None:
        mean = args.mean or most / 4
        return lambda count: draw_lognormal(random, mean, args.tail, most, count)
    files = sorted(args.lengths.glob("step_*.parquet")) if args.lengths.is_dir() else [args.lengths]
    if not files:
        raise FileNotFoundError(f"--lengths: {args.lengths} has no step_*.parquet: set trainer.keep_rollouts in a run")
    kept = np.concatenate([compute.list_value_length(parquet.read_table(file)["tokens"]).to_numpy() for file in files])
    return lambda count: random.choice(kept, count).clip(1, most)


def draw_lognormal(random: np.random.Generator, mean: float, tail: float, most: int, count: int) -> np.ndarray:
    """Return lengths of a lognormal distribution.

    Args:
        mean: mean length in tokens, before the cut at `most`.
        tail: standard deviation of the logarithm; 0 = all equal.
    """
    drawn = random.lognormal(log(mean) - tail**2 / 2, tail, count)
    return drawn.round().astype(int).clip(1, most)


def simulation_of(estimate: TimeEstimate, max_staleness: int, lengths: Callable[[int], np.ndarray]) -> Simulation:
    """Return the simulation of a plan whose engines run ahead by `max_staleness` steps, whatever its own setting
    is."""
    config, memory = estimate.config, estimate.memory
    data, rollout = config.data, config.rollout
    drawn = lengths(10_000)
    context = data.max_prompt_length + float((drawn**2).mean() / drawn.mean() / 2)  # of a response in progress
    room = max(memory.engine.cache_tokens / context, 1)
    num_rows = data.train_batch_size * rollout.n
    models = sum(estimate.seconds.values()) - estimate.seconds[ROLLOUT] - estimate.seconds[SYNC]
    per_token = models / (num_rows * longest_row(config))
    step = cache(lambda running: estimate.decoding_step(running, context))
    most = min(rollout.max_running_requests, ceil(room))
    num_engines = memory.plan.layouts["rollout"].data
    return Simulation(
        max_staleness,
        data.train_batch_size,
        rollout.n,
        [Engine(step, most, estimate.prompt_pass) for _ in range(num_engines)],
        lengths,
        lambda tokens: per_token * (tokens + num_rows * data.max_prompt_length),
        estimate.seconds[SYNC],
        max(rollout.n, rollout.max_running_requests),
        finishes=bool(max_staleness) and rollout.on_sync == "finish",
    )


def mean_step(simulation: Simulation, num_steps: int) -> Step:
    """Run a simulation; return the means of its steps, and the greatest age."""
    steps = [simulation.step() for _ in range(num_steps)]
    kept = steps[int(WARM_UP * num_steps) :]
    return Step(*map(fmean, zip(*kept, strict=True)))._replace(oldest=max(step.oldest for step in steps))


def table(steps: dict[int, Step]) -> str:
    """Return the table of the mean step of each max_staleness."""
    rows: list[Sequence[str]] = [HEADER]
    slowest = next(iter(steps.values())).seconds
    for max_staleness, step in steps.items():
        idle = (f"{share / step.seconds:.0%}" for share in (step.engines_idle, step.trainers_idle))
        ages = f"{step.age:.1f}", str(step.oldest), f"{step.token_age:.1f}", f"{step.queue:,.0f}"
        rows.append((str(max_staleness), f"{step.seconds:.1f}", f"{slowest / step.seconds:.2f}", *idle, *ages))
    return aligned(rows)


def picture(steps: dict[int, Step], title: str) -> str:
    """Return an SVG with a bar for each max_staleness: the models' work, their wait, and the sync."""
    scale = (WIDTH - LEFT - RIGHT) / max(step.seconds for step in steps.values())
    height = 92 + len(steps) * (BAR + 10)
    lines = [STYLE.format(width=WIDTH, height=height, inner=WIDTH - 1, lower=height - 1, title=title)]
    for row, (max_staleness, step) in enumerate(steps.items()):
        top = 50 + row * (BAR + 10)
        waiting = step.trainers_idle * scale
        working = step.seconds * scale - waiting
        lines.append(f'  <text x="20" y="{top + 20}">k = {max_staleness}</text>')
        lines.append(f'  <rect class="wait" x="{LEFT + 10}" y="{top}" width="{waiting:.1f}" height="{BAR}"/>')
        left = LEFT + 10 + waiting
        lines.append(f'  <rect class="work" x="{left:.1f}" y="{top}" width="{working:.1f}" height="{BAR}"/>')
        idle = f"{step.seconds:.1f} s; engines idle {step.engines_idle / step.seconds:.0%}"
        lines.append(f'  <text x="{left + working + 10:.1f}" y="{top + 20}">{idle}</text>')
    for x, kind, text in (
        (LEFT + 10, "wait", "the models wait"),
        (LEFT + 160, "work", "they train, and weights are sent"),
    ):
        lines.append(f'  <rect class="{kind}" x="{x}" y="{height - 32}" width="14" height="14"/>')
        lines.append(f'  <text class="note" x="{x + 20}" y="{height - 20}">{text}</text>')
    return "\n".join([*lines, "</svg>", ""])


STYLE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
  <title>{title}</title>
  <style>
    text {{ font: 13px system-ui, sans-serif; fill: #1f2328 }}
    .ground {{ fill: #f6f8fa; stroke: #d1d9e0 }}
    .title {{ font-weight: 600 }}
    .note {{ font-size: 12px; fill: #59636e }}
    .work {{ fill: #2f63c8 }} .wait {{ fill: #c9d1d9; stroke: #8c959f; stroke-dasharray: 3 3 }}
    @media (prefers-color-scheme: dark) {{
      text {{ fill: #e6edf3 }}
      .ground {{ fill: #161b22; stroke: #3d444d }}
      .note {{ fill: #9198a1 }}
      .wait {{ fill: #30363d }}
    }}
  </style>
  <rect class="ground" x="0.5" y="0.5" width="{inner}" height="{lower}" rx="8"/>
  <text class="title" x="20" y="28">{title}</text>"""


def estimate_of(config: Config, gpu: GPU) -> TimeEstimate:
    """Return the estimate of a config on the fewest ranks that its placement needs.

    Raises:
        ConfigError: keys contradict each other, or the placement names no ranks.
    """
    num_ranks = smallest_world(config)
    if num_ranks is None:
        raise ConfigError("placement: every component is on 'all' ranks: name them, such as placement.rollout=4-7")
    cluster = Cluster(gpu.memory)
    plan = resolve_offload(plan_run(config, num_ranks), cluster)
    return TimeEstimate(MemoryEstimate(plan, cluster), gpu)


def main(words: Sequence[str] | None = None) -> int:
    """Print the table; return the process's exit code."""
    args = arguments(words)
    try:
        config = load_config(args.config, args.overrides)
        estimate = estimate_of(config, GPUS[args.gpu])
        if max(args.staleness) and not estimate.is_apart:
            raise ConfigError("placement.rollout shares GPUs with the models: give it ranks of its own")
        drawn = lengths_of(args, config)(100_000)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    engines, rows = estimate.memory.plan.layouts["rollout"].data, config.data.train_batch_size * config.rollout.n
    print(f"{args.config}: {estimate.memory.plan.world_size} {args.gpu}, {engines} engines, {rows:,} responses a step")
    nine_tenths, longest = np.quantile(drawn, 0.9), (drawn == config.rollout.max_response_length).mean()
    print(
        f"responses: {drawn.mean():,.0f} tokens, one in ten above {nine_tenths:,.0f}, {longest:.1%} of maximum length\n"
    )
    steps = {}
    for max_staleness in sorted(set(args.staleness)):
        simulation = simulation_of(estimate, max_staleness, lengths_of(args, config))
        steps[max_staleness] = mean_step(simulation, args.steps)
    print(table(steps))
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        title = f"Seconds of a step against rollout.max_staleness (k), {estimate.memory.plan.world_size} {args.gpu}"
        (args.output / "staleness.svg").write_text(picture(steps, title), "utf-8")
    return 0


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG", help="YAML file, with engines on ranks of their own")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="overrides of single keys")
    parser.add_argument("--gpu", choices=GPUS, required=True, metavar="TYPE", help=f"of {', '.join(GPUS)}")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8], metavar="K", help="0 1 2 4 8")
    parser.add_argument("--steps", type=int, default=64, help="simulated steps of each (default: 64)")
    parser.add_argument("--mean", type=float, help="tokens of a response (default: a quarter of the maximum)")
    parser.add_argument("--tail", type=float, default=1.0, help="deviation of the length's logarithm (default: 1)")
    parser.add_argument("--lengths", type=Path, metavar="PATH", help="kept rollouts of a run: their folder, or a file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="for the picture")
    return parser.parse_intermixed_args(words)


if __name__ == "__main__":
    sys.exit(main())
