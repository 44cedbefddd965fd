"""Time weight syncs into a real SGLang engine against a plain copy of the same bytes in memory, in one run.

    .venv/bin/python tools/bench/sync.py --megabytes 500
    .venv/bin/python -m megappo.torchrun --nproc-per-node 2 tools/bench/sync.py --tensor 2
    .venv/bin/python -m megappo.torchrun --nproc-per-node 2 tools/bench/sync.py --pipeline 2 --transport broadcast

With broadcast the engine is on none of the actor's ranks. Prints medians, and a sync's rate as a share of the copy's.
The engine shares the machine's cores with the ranks. The copy uses as many threads as a rank of the engine:
OMP_NUM_THREADS, or one.
"""

import os
import statistics
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the engine runs on the CPU, as the ranks do

import torch

from megappo.runtime import megatron_setup

megatron_setup.install()

from timed import Row, parser_of, report, seconds, write_llama  # noqa: E402

from megappo.architecture.parsing import read_architecture  # noqa: E402
from megappo.config.schema import Config, Rollout  # noqa: E402
from megappo.config.sections import Parallel  # noqa: E402
from megappo.engines.process import Engine  # noqa: E402
from megappo.placement.layout import Layout  # noqa: E402
from megappo.placement.route import find_route  # noqa: E402
from megappo.sync.build import build_sync  # noqa: E402
from megappo.weights.load import load_hf  # noqa: E402
from megappo_tools.conversion.world import World  # noqa: E402

HIDDEN, VOCABULARY = 1024, 16384


def bench(world: World, folder: Path, engine: Engine | None, transport: str, bucket_bytes: int, repeats: int) -> Row:
    """Time the syncs of one layout; the row is valid on its first rank."""
    architecture = read_architecture(folder)
    chunks = world.build(architecture, "fp32")
    load_hf(chunks, folder, architecture, world.groups)
    client = engine.wait_ready() if engine is not None else None
    sections = {"model": {"path": str(folder)}, "data": {"train_files": ["f"]}, "trainer": {"output_dir": "o"}}
    rollout = {"sync": {"bucket_bytes": bucket_bytes, "transport": transport}}
    if transport != "ipc":
        rollout["engines"] = world.exchange.all_gather(engine and [engine.url])[0]
    config = Config.model_validate(sections | {"rollout": rollout})
    route = find_route(config, {"actor": world.groups.layout, "rollout": Layout((0,))}, ranks_per_node=1)
    for chunk in chunks:
        chunk.requires_grad_()  # as if trained: what is frozen is sent once
    actor = SimpleNamespace(chunks=chunks, groups=world.groups)
    sync = build_sync(config, route, architecture, actor, client, world.exchange)
    size = sync().bytes
    source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    syncs, copies = [], []
    for _ in range(repeats):
        world.exchange.all_gather(None)
        syncs.append(sync().seconds)
        copies.append(seconds(lambda: target.copy_(source)) if world.rank == 0 else 0.0)
    sync_seconds, copy_seconds = (statistics.median(times) for times in (syncs, copies))
    layout = world.groups.layout
    name = f"Sync ({transport}) of {size / 2**20:.0f} MiB, actor TP{layout.tensor} PP{layout.pipeline}"
    anchor = f"a copy: {1000 * copy_seconds:.0f} ms"
    return Row(name, copy_seconds / sync_seconds, "at least 0.35", anchor, sync_seconds)


def main() -> None:
    parser = parser_of(__doc__, repeats=9)
    parser.add_argument(
        "--megabytes",
        type=int,
        default=500,
        help="size of the model in MiB, in steps of 64, from 192 on (default 500)",
    )
    parser.add_argument("--bucket-megabytes", type=int, default=128, help="rollout.sync.bucket_bytes (default 128)")
    parser.add_argument(
        "--transport", default="ipc", choices=("ipc", "broadcast"), help="rollout.sync.transport (default ipc)"
    )
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks of the actor (default 1)")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages of the actor (default 1)")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    world = World(Parallel(tensor=args.tensor, pipeline=args.pipeline))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(world.exchange.all_gather(temporary)[0]) / "model"
        engine = None
        if world.rank == 0:
            write_llama(folder, args.megabytes * 2**20 / 4, hidden=HIDDEN, vocabulary=VOCABULARY)
            rollout = Rollout(max_total_tokens=1024, max_running_requests=4)
            engine = Engine(folder, rollout, "fp32", index=0, gpu_ids=[], log_path=folder / "engine.log", seed=0)
            engine.start()
        world.exchange.all_gather(None)
        try:
            row = bench(world, folder, engine, args.transport, args.bucket_megabytes * 2**20, args.repeats)
            if world.rank == 0:
                report([row], args.json)
        finally:
            if engine is not None:
                engine.stop()


if __name__ == "__main__":
    main()
