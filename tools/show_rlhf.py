"""Show what the runs of launch/rlhf.sh have reached by the hidden rule, and plot it against the learned reward.

    .venv/bin/python tools/show_rlhf.py outputs/rlhf

A run's folder is named below; metrics.jsonl in it has the figures. Prints a table, and writes proxy.svg.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

RUNS = {"ppo": "with a KL penalty", "ppo_without_kl": "without"}
"""Folder of a run of PPO -> its name in the table and the plot."""
PROXY, TRUTH = "val/val/score/mean", "val/truth/score/mean"
"""Metrics of held-out prompts: the learned reward, and the share that the hidden rule calls right."""
WIDTH, HEIGHT, MARGIN = 560, 320, 48
COLOURS = ("#4269d0", "#ef8e3b")
STYLE = """<style>
  .ground { fill: #f6f8fa } text:not([fill]) { fill: #1f2328 }
  @media (prefers-color-scheme: dark) { .ground { fill: #161b22 } text:not([fill]) { fill: #e6edf3 } }
</style>"""


class Point(NamedTuple):
    """An evaluation: the step, the learned reward, the share of right answers."""

    step: int
    proxy: float
    truth: float


def lines_of(run: Path) -> list[dict[str, float]]:
    """Return the metrics of a run's steps."""
    return list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))


def points_of(run: Path) -> list[Point]:
    """Return a run's evaluations."""
    return [Point(line["step"], line[PROXY], line[TRUTH]) for line in lines_of(run) if TRUTH in line]


def table(folder: Path, runs: dict[str, list[Point]]) -> str:
    """Return the figures of the reward model and of each run of PPO."""
    *_, judge = [line for line in lines_of(folder / "reward_model") if "val/preferences_val/accuracy" in line]
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

    def at(proxy: float, truth: float) -> tuple[float, float]:
        x = MARGIN + (WIDTH - 2 * MARGIN) * (proxy - lowest) / span
        return round(x, 1), round(HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * truth, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        STYLE,
        f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">learned reward of held-out answers</text>',
        f'<text x="4" y="{MARGIN - 24}">right by the hidden rule</text>',
    ]
    for proxy in (lowest, lowest + span):
        parts.append(f'<text x="{at(proxy, 0)[0]}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{proxy:.1f}</text>')
    for truth in (0.0, 0.5, 1.0):
        parts.append(f'<text x="4" y="{at(lowest, truth)[1] + 4}">{truth:.0%}</text>')
    for number, (name, points) in enumerate(runs.items()):
        colour, places = COLOURS[number], [at(point.proxy, point.truth) for point in points]
        joined = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in places]
        parts.append(f'<text x="{MARGIN + 180 + 150 * number}" y="{MARGIN - 24}" fill="{colour}">{RUNS[name]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


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
