"""Show what the runs of launch/rlhf.sh have reached by the hidden rule, and plot it against the learned reward.

    .venv/bin/python tools/show_rlhf.py outputs/rlhf

A run's folder is named below; metrics.jsonl in it has the figures. Prints a table, and writes proxy.svg.
"""

import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import svg

from megappo.observe.metrics_file import read_metrics

RUNS = {"ppo": "with a KL penalty", "ppo_without_kl": "without"}
"""Folder of a run of PPO -> its name in the table and the plot."""
PROXY, TRUTH = "val/val/score/mean", "val/truth/score/mean"
"""Metrics of held-out prompts: the learned reward, and the share that the hidden rule calls right."""


class Point(NamedTuple):
    """An evaluation: the step, the learned reward, the share of right answers."""

    step: int
    proxy: float
    truth: float


def points_of(run: Path) -> list[Point]:
    """Return a run's evaluations."""
    return [Point(line["step"], line[PROXY], line[TRUTH]) for line in read_metrics(run) if TRUTH in line]


def table(folder: Path, runs: dict[str, list[Point]]) -> str:
    """Return the figures of the reward model and of each run of PPO."""
    *_, judge = [line for line in read_metrics(folder / "reward_model") if "val/preferences_val/accuracy" in line]
    accuracy, error = (judge[f"val/preferences_val/{name}"] for name in ("accuracy", "calibration_error"))
    lines = [f"reward model  right order of {accuracy:.1%} of held-out pairs, calibration error {error:.3f}"]
    for name, points in runs.items():
        first, last, best = points[0], points[-1], max(points, key=lambda point: point.truth)
        lines.append(
            f"{RUNS[name]:<17}  learned reward {first.proxy:.2f} -> {last.proxy:.2f}, hidden rule {first.truth:.1%} -> "
            f"{last.truth:.1%} (best: {best.truth:.1%} after step {best.step})"
        )
    return "\n".join(lines)


def plot(runs: dict[str, list[Point]]) -> str:
    """Return an SVG of the hidden rule's score over the learned reward, a dot for each evaluation."""
    proxies = [point.proxy for points in runs.values() for point in points]
    lowest, span = min(proxies), max(max(proxies) - min(proxies), 1e-6)

    def at(proxy: float, truth: float) -> svg.Point:
        return svg.place((proxy - lowest) / span, truth)

    parts = [f'<text x="4" y="{svg.MARGIN - 24}">right by the hidden rule</text>']
    for proxy in (lowest, lowest + span):
        x, y = at(proxy, 0)
        parts.append(f'<text x="{x}" y="{y + 18}" text-anchor="middle">{proxy:.1f}</text>')
    for truth in (0.0, 0.5, 1.0):
        parts.append(f'<text x="4" y="{at(lowest, truth)[1] + 4}">{truth:.0%}</text>')
    for number, (name, points) in enumerate(runs.items()):
        colour, places = svg.COLOURS[number], [at(point.proxy, point.truth) for point in points]
        parts.append(svg.line(places, colour))
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in places]
        left = svg.MARGIN + 180 + 150 * number
        parts.append(f'<text x="{left}" y="{svg.MARGIN - 24}" fill="{colour}">{RUNS[name]}</text>')
    return svg.figure("learned reward of held-out answers", parts)


def main() -> None:
    """Print the table, and write the plot into the folder."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    folder = Path(sys.argv[1])
    runs = {name: points_of(folder / name) for name in RUNS}
    print(table(folder, runs))
    (folder / "proxy.svg").write_text(plot(runs))
    print(f"plot          {folder / 'proxy.svg'}")


if __name__ == "__main__":
    main()
