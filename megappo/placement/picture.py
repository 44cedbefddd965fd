"""Print the placement: each component with its stages and shards, and each rank. Without torch."""

from collections.abc import Iterator, Sequence

from megappo.placement.layout import Layout
from megappo.placement.ranks import format_ranks
from megappo.placement.run_plan import RunPlan

MOST_BLOCKS = 8
RANKS_SHOWN = 32


def placement_picture(plan: RunPlan) -> str:
    """Return each component's sizes, then a line per pipeline stage with the ranks of every data-parallel shard."""
    lines: list[str] = []
    for name, layout in plan.layouts.items():
        spec = plan.components.get(name)
        lines += _component(name, layout, spec.parallel.value.pipeline_split if spec else None)
    return "\n".join(lines)


def rank_table(plan: RunPlan) -> str:
    """Return a line per rank, without the middle of many: its coordinates in each component, and its engine."""
    layouts, world_size = plan.layouts, plan.world_size
    title = ["rank", *(name if name != "rollout" else "engine" for name in layouts)]
    hidden = range(RANKS_SHOWN // 2, world_size - RANKS_SHOWN // 2)
    shown = [rank for rank in range(world_size) if rank not in hidden]
    rows = [[str(rank), *(_cell(name, layout, rank) for name, layout in layouts.items())] for rank in shown]
    if hidden:
        rows.insert(hidden.start, ["..."] * len(title))
    return aligned([title, *rows])


def aligned(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Return rows as columns of equal width, with numbers aligned to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(_padded(cell, width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(indent + line.rstrip() for line in lines)


def _padded(cell: str, width: int) -> str:
    is_number = cell.lstrip("-").rstrip("%").replace(",", "").replace(".", "", 1).isdigit()
    return cell.rjust(width) if is_number else cell.ljust(width)


def _cell(name: str, layout: Layout, rank: int) -> str:
    place = layout.coordinates(rank)
    if place is None:
        return "-"
    if name == "rollout":
        return f"e{place.data}" + " owner" * (place.tensor == 0)
    context = f" cp{place.context}" if layout.context > 1 else ""
    return f"dp{place.data}{context} tp{place.tensor} pp{place.stage}"


def _component(name: str, layout: Layout, split: Sequence[int] | None) -> Iterator[str]:
    if name == "rollout":
        yield f"  {name}: {layout.data} engine(s) of {layout.tensor} rank(s)"
    else:
        experts = f", experts over {layout.expert}" if layout.expert > 1 else ""
        experts += f", each cut over {layout.expert_tensor}" if layout.expert_tensor > 1 else ""
        chunks = f", {layout.virtual_pipeline} chunks on each stage" if layout.virtual_pipeline > 1 else ""
        data = f"data {layout.data}" + (f" x context {layout.context}" if layout.context > 1 else "")
        yield f"  {name}: {data} x tensor {layout.tensor} x pipeline {layout.pipeline}{chunks}{experts}"
    for stage in range(layout.pipeline):
        layers = f" (layers {_layers(split, stage, layout.pipeline)})" if split else ""
        head = f"stage {stage}{layers}  " if layout.pipeline > 1 else ""
        yield f"    {head}" + " ".join(_blocks("engine " if name == "rollout" else "dp", layout, stage))


def _layers(split: Sequence[int], stage: int, num_stages: int) -> str:
    """Return the layers of a stage's chunks, counted from 0 over the whole model."""
    starts = [sum(split[:chunk]) for chunk in range(len(split))]
    chunks = range(stage, len(split), num_stages)
    return format_ranks(layer for chunk in chunks for layer in range(starts[chunk], starts[chunk] + split[chunk]))


def _blocks(word: str, layout: Layout, stage: int) -> list[str]:
    """Return one stage's shards, without the middle of many: the table of ranks has them."""
    blocks = [f"[{word}{shard}: {format_ranks(layout.block(stage, shard))}]" for shard in range(layout.data)]
    return blocks if len(blocks) <= MOST_BLOCKS else [*blocks[: MOST_BLOCKS - 2], "...", blocks[-1]]
