"""An engine's log-probs of the same sequences after one weight sync and after many of the same weights, in 16 bits and
in FP8, whose scales each sync computes again: they must stay. The engine sleeps before each sync.

python tests/gpu/stages/drift.py
"""

import tempfile
import time
from pathlib import Path

from common import CUDA, one_rank, report, sized
from engines import model_folder, trained_engine
from runs import engine_arguments
from safetensors.torch import load_file
from served import DTYPE, score, serving
from weight_sources import handle_sender
from whole_run import FP8_ARGUMENTS

from megappo.architecture.parsing import read_architecture
from megappo.placement.groups import ComponentGroups
from megappo.sync.sync import WeightSync
from megappo.weights.export import Export

SYNCS, BUCKET_BYTES = sized((20, 2**28), (3, 2**16))
ENGINES = {DTYPE: {}} | ({"fp8": FP8_ARGUMENTS} if CUDA else {})
BOUND = 1e-3
"""On the mean absolute difference: the same batches of the same weights have the same bits."""


def drift(folder: Path, name: str, arguments: dict, groups: ComponentGroups) -> dict[str, float]:
    """Return the mean differences of log-probs, of the last sync's from the first's and of the first's from the file's,
    and the seconds of a sync."""
    shapes = {tensor: tuple(one.shape) for tensor, one in load_file(folder / "model.safetensors").items()}
    with serving(f"drift_{name}", folder, engine_arguments() | arguments) as engine:
        client = engine.wait_ready()
        export = Export(trained_engine(folder, groups).chunks, read_architecture(folder), groups)
        sync = WeightSync(
            export.tensors,
            export,
            [handle_sender(client)],
            [],
            shapes,
            bucket_bytes=BUCKET_BYTES,
            barrier=lambda: None,
            engines_keep=False,
        )
        log_probs, seconds = [score(client)], 0.0
        for _ in range(SYNCS):
            client.sleep()
            start = time.perf_counter()
            client.wake()
            sync()
            seconds += time.perf_counter() - start
            log_probs.append(score(client))
    loaded, first, *_, last = log_probs
    difference = float((last - first).abs().mean())
    assert difference < BOUND, f"{name}: {SYNCS} syncs change the log-probs by {difference}"
    return {"difference": difference, "from_file": float((first - loaded).abs().mean()), "seconds": seconds / SYNCS}


def measure() -> dict:
    found: dict = {"stage": "drift", "syncs": SYNCS} | ({} if CUDA else {"skipped": "FP8 needs a GPU"})
    with one_rank() as groups, tempfile.TemporaryDirectory() as root:
        folder = model_folder(Path(root))
        for name, arguments in ENGINES.items():
            found |= {f"{name}_{key}": value for key, value in drift(folder, name, arguments, groups).items()}
    return found


if __name__ == "__main__":
    report(measure)
