"""Helpers of the benchmarks: arguments, timing, medians of interleaved calls, rows of a table, ranks, random models."""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megappo.runtime import platform

LAYERS, HIDDEN, INTERMEDIATE, HEADS, VOCABULARY = 12, 768, 2048, 12, 32000
"""Sizes of the model of `write_qwen2`."""


@dataclass(frozen=True)
class Row:
    """Result of one benchmark.

    Attributes:
        ratio: the measured value over its anchor, both from the same run.
        bar: the required ratio, "at least" or "at most" a number.
        anchor: the baseline of the comparison.
        seconds: median of the measured value; 0 where it is not a time.
    """

    name: str
    ratio: float
    bar: str
    anchor: str
    seconds: float

    @property
    def holds(self) -> bool:
        direction, limit = self.bar.rsplit(" ", 1)
        return self.ratio >= float(limit) if direction == "at least" else self.ratio <= float(limit)


def markdown(rows: Sequence[Row]) -> str:
    """A table."""
    lines = ["| what | ratio | bar | to | seconds |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        bar = row.bar if row.holds else f"**{row.bar}**: missed"
        seconds = f"{row.seconds:.3g}" if row.seconds else ""
        lines.append(f"| {row.name} | {row.ratio:.3g} | {bar} | {row.anchor} | {seconds} |")
    return "\n".join(lines)


def parser_of(description: str, repeats: int = 5) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all benchmarks share, which `report` and `medians` take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repeats", type=int, default=repeats, help="of which the medians are taken (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    return parser


def check_keeps_memory() -> None:
    """Exit unless this process keeps freed memory for reuse, as the ranks of megappo.torchrun do."""
    if not platform.KEPT_MEMORY.keys() <= os.environ.keys():
        raise SystemExit(
            "start it under megappo.torchrun, whose ranks keep the memory that they have freed; where there are GPUs, "
            "with CUDA_VISIBLE_DEVICES="
        )


def report(rows: Sequence[Row], file: Path | None) -> None:
    """Print rows; also write them as JSON if a file is given."""
    print(markdown(rows))
    if file is not None:
        file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def medians(actions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each function, called in turn after one warm-up call of each."""
    found: dict[str, list[float]] = {name: [] for name in actions}
    for repeat in range(repeats + 1):
        for name, action in actions.items():
            took = seconds(action)
            if repeat:
                found[name].append(took)
    return {name: statistics.median(values) for name, values in found.items()}


def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run `function(rank, *arguments)` on forked ranks and return the first rank's result, which must fit into JSON."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (world_size, folder, function, arguments), nprocs=world_size, start_method="fork")
        return json.loads(Path(folder, "found").read_text())


def _rank(rank: int, world_size: int, folder: str, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found = function(rank, *arguments)
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def write_llama(folder: Path, parameters: float, *, hidden: int, vocabulary: int) -> None:
    """Write a random fp32 Llama of about `parameters` parameters, including embeddings and head."""
    # Here, as it takes seconds, and its import may want preparation that not all benchmarks do.
    from transformers import AutoConfig

    per_layer = 4 * hidden**2 + 3 * hidden * 4 * hidden
    config = AutoConfig.for_model(
        "llama",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=max(1, round((parameters - 2 * vocabulary * hidden) / per_layer)),
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    _write(config, folder)


def write_qwen2(folder: Path) -> None:
    """Write a random fp32 Qwen2 of 110M parameters, with a tied head."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        tie_word_embeddings=True,
    )
    _write(config, folder)


def _write(config: Any, folder: Path) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    torch.manual_seed(0)
    disable_progress_bar()
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def seconds(action: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
