"""Measure the memory that each rank takes to load a Hugging Face folder, and to export it again.

    .venv/bin/python tools/bench/weights_memory.py --megabytes 500 --layouts 1x1 2x1 1x2 2x2 --dtypes fp32 bf16

Makes a random model of that size, starts the ranks of one layout (tensor x pipeline) after the other, and samples each
rank's private memory every millisecond (peak_memory.py). The figures are peaks above the memory held after imports and
the creation of process groups. Reported is the rank closest to its bar, or furthest above it:

    bar = bytes of the parameters this rank holds + two buckets + a file of a bucket's size + the largest tensor

The parameters of all ranks together are S, the model's size in its dtype, so each has about S / ranks; but norms are
on every tensor-parallel rank, and a tied embedding (--tied) is on the first pipeline stage and on the last.
"""

import argparse
import json
import os
import sys
import tempfile
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

from megappo.runtime import megatron_setup

megatron_setup.install()  # must come before the first import of megatron.core

from child_run import run_child  # noqa: E402
from peak_memory import MIB, PeakMemory  # noqa: E402

from megappo.architecture.architecture import DTYPES, Architecture  # noqa: E402
from megappo.architecture.model_folder import write_model_config  # noqa: E402
from megappo.architecture.parameters import EMBEDDING, hf_shapes  # noqa: E402
from megappo.architecture.parsing import parse, read_architecture  # noqa: E402
from megappo.config.sections import Parallel  # noqa: E402
from megappo.models.megatron_config import TORCH_DTYPES  # noqa: E402
from megappo.weights.hf_folder import write_hf_folder  # noqa: E402
from megappo.weights.load import load_hf  # noqa: E402
from megappo.weights.safetensors_io import ShardedWriter  # noqa: E402
from megappo_tools.conversion.world import World  # noqa: E402

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16384,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}


def make_model(folder: Path, megabytes: int, dtype: str, tied: bool) -> None:
    """Write a random Hugging Face folder of about `megabytes`, in files of 128 MiB, with an even number of layers."""

    def of_layers(number: int) -> Architecture:
        return parse(CONFIG | {"tie_word_embeddings": tied, "num_hidden_layers": number}, folder)

    sizes = [bytes_of(of_layers(number), dtype) for number in (0, 2)]
    architecture = of_layers(2 * max(1, round((megabytes * 10**6 - sizes[0]) / (sizes[1] - sizes[0]))))
    folder.mkdir()
    writer = ShardedWriter(folder, 128 * MIB)
    for name, shape in hf_shapes(architecture).items():
        writer.add([(name, (0.02 * torch.randn(shape)).to(TORCH_DTYPES[dtype]))])
    writer.finish()
    write_model_config(architecture, folder, dtype)


def bytes_of(architecture: Architecture, dtype: str) -> int:
    """Return the bytes of all tensors of the model."""
    return sum(map(prod, hf_shapes(architecture).values())) * DTYPES[dtype].nbytes


def measure(args: argparse.Namespace) -> None:
    """Load and export the model on each rank, and write the measurements to a file."""
    tensor, pipeline = layout_of(args.layouts[0])
    world = World(Parallel(tensor=tensor, pipeline=pipeline, sequence=tensor > 1))
    architecture = read_architecture(args.folder)
    memory = PeakMemory()
    chunks = world.build(architecture, args.dtypes[0])
    load_hf(chunks, args.folder, architecture, world.groups)
    share = sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())
    loading = memory.take()
    sizes = {"bucket_bytes": args.bucket_mib * MIB, "max_shard_bytes": args.bucket_mib * MIB}
    write_hf_folder(chunks, architecture, world.groups, args.folder, args.output, **sizes)
    found = world.exchange.all_gather({"share": share, "loading": loading, "exporting": memory.take()})
    if world.rank == 0:
        args.report.write_text(json.dumps(found))


def layout_of(text: str) -> tuple[int, int]:
    """Parse `2x1` as (tensor, pipeline)."""
    tensor, pipeline = map(int, text.split("x"))
    return tensor, pipeline


def row(args: argparse.Namespace, folder: Path, layout: str, dtype: str) -> tuple[str, bool]:
    """Return a line of the table, and True if every rank kept below its bar."""
    ranks = prod(layout_of(layout))
    report, output = folder.with_name("report.json"), folder.with_name("exported")
    arguments = ("--layouts", layout, "--dtypes", dtype, "--bucket-mib", args.bucket_mib)
    places = ("--folder", folder, "--output", output, "--report", report)
    command = ["-m", "megappo.torchrun", "--nproc-per-node", ranks, __file__, *arguments, *places]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    run_child([sys.executable, *command], check=True, env=environment)
    architecture = read_architecture(folder)
    largest = prod(hf_shapes(architecture)[EMBEDDING]) * DTYPES[dtype].nbytes
    found = json.loads(report.read_text())
    worst = max(found, key=lambda rank: max(rank["loading"], rank["exporting"]) - rank["share"])
    bar = worst["share"] + 3 * args.bucket_mib * MIB + largest
    held = max(worst["loading"], worst["exporting"]) <= bar
    sizes = (bytes_of(architecture, dtype), worst["share"], bar, worst["loading"], worst["exporting"])
    return " ".join(f"{size / MIB:9.1f}" for size in sizes) + f"  {'PASS' if held else 'over'}", held


def table(args: argparse.Namespace) -> int:
    """Print a line for each dtype and layout; return 1 if a rank went over its bar."""
    print(f"MiB, buckets of {args.bucket_mib}; sampled every millisecond; the worst rank of each layout")
    print("tensor x pipeline  dtype      ranks         S     share       bar   loading exporting")
    all_held = True
    for dtypes in args.dtypes:
        stored, *rest = dtypes.split("-")
        with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
            folder = Path(scratch) / "model"
            make_model(folder, args.megabytes, stored, args.tied)
            for layout in args.layouts:
                line, held = row(args, folder, layout, rest[0] if rest else stored)
                print(f"{layout:17}  {dtypes:9} {prod(layout_of(layout)):6} {line}", flush=True)
                all_held = all_held and held
    return 0 if all_held else 1


def main() -> int:
    """Print the table, or measure as one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--megabytes", type=int, default=500, help="size of the model's files, about; at least two layers (default 500)"
    )
    parser.add_argument("--layouts", nargs="+", default=["1x1", "2x1", "1x2", "2x2"], help="tensor x pipeline")
    parser.add_argument(
        "--dtypes", nargs="+", default=["fp32", "bf16", "fp32-bf16", "bf16-fp32"], help="of the files, or files-model"
    )
    parser.add_argument("--bucket-mib", type=int, default=32, help="bytes gathered at a time (default 32)")
    parser.add_argument("--tied", action="store_true", help="tie the embeddings")
    parser.add_argument(
        "--scratch", type=Path, help="folder for the models, which take twice their size; default: /tmp"
    )
    for name in ("--folder", "--output", "--report"):  # of the ranks this starts
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    return table(args) if args.folder is None else measure(args) or 0


if __name__ == "__main__":
    sys.exit(main())
