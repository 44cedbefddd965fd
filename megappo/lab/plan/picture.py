"""Print the placement: each component with its stages and shards, and each rank. Without torch."""

import re
from collections.abc import Sequence

from megappo.placement.layout import Layout, format_ranks
from megappo.placement.run_plan import RunPlan

MOST_BLOCKS = 8
RANKS_SHOWN = 32
NUMBER = re.compile(r"-?\d[\d,]*(\.\d+)?%?")


def placement_lines(plan: RunPlan) -> dict[str, str]:
    """Return, for each component and the engines, a line with its ranks and sizes."""
    lines = {}
    for name, layout in plan.layouts.items():
        lines[name] = f"ranks {format_ranks(sorted(layout.ranks))}: {_component_sizes(name, layout)}"
    return lines


def placement_picture(plan: RunPlan) -> str:
    """Return each component's sizes, then a line per pipeline stage with the ranks of every data-parallel shard."""
    lines = []
    for name, layout in plan.layouts.items():
        is_engines = name == "rollout"
        lines.append(f"  {name}: {_component_sizes(name, layout)}")
        for stage in range(layout.pipeline):
            head = f"stage {stage}  " if layout.pipeline > 1 else ""
            lines.append(f"    {head}{_blocks('engine ' if is_engines else 'dp', layout, stage)}")
    return "\n".join(lines)


def rank_table(plan: RunPlan) -> str:
    """Return a line for each of the first ranks: its coordinates in each component, and its engine."""
    rows = [["rank", *(name if name != "rollout" else "engine" for name in plan.layouts)]]
    for rank in range(min(plan.world_size, RANKS_SHOWN)):
        rows.append([str(rank), *(_cell(name, layout, rank) for name, layout in plan.layouts.items())])
    if plan.world_size > RANKS_SHOWN:
        rows.append(["..."] * len(rows[0]))
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as columns of equal width, with numbers aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = [cell.rjust(width) if NUMBER.fullmatch(cell) else cell.ljust(width) for cell, width in cells]
        lines.append(f"  {'  '.join(padded)}".rstrip())
    return "\n".join(lines)


def _cell(name: str, layout: Layout, rank: int) -> str:
    place = layout.coordinates(rank)
    if place is None:
        return "-"
    if name == "rollout":
        return f"e{place.data}" + " owner" * (place.tensor == 0)
    context = f" cp{place.context}" if layout.context > 1 else ""
    return f"dp{place.data}{context} tp{place.tensor} pp{place.stage}"


def _component_sizes(name: str, layout: Layout) -> str:
    return f"{layout.data} engine(s) of {layout.tensor} rank(s)" if name == "rollout" else _sizes(layout)


def _sizes(layout: Layout) -> str:
    text = f"data {layout.data}"
    text += f" x context {layout.context}" if layout.context > 1 else ""
    text += f" x tensor {layout.tensor} x pipeline {layout.pipeline}"
    text += f", {layout.virtual_pipeline} chunks on each stage" if layout.virtual_pipeline > 1 else ""
    text += f", experts over {layout.expert}" if layout.expert > 1 else ""
    return text + (f", each cut over {layout.expert_tensor}" if layout.expert_tensor > 1 else "")


def _blocks(word: str, layout: Layout, stage: int) -> str:
    """Return one stage's shards, without the middle of many: the table of ranks has them."""
    blocks = [f"[{word}{shard}: {format_ranks(layout.block(stage, shard))}]" for shard in range(layout.data)]
    if len(blocks) > MOST_BLOCKS:
        blocks[MOST_BLOCKS - 2 : -1] = ["..."]
    return " ".join(blocks)
