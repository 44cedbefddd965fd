"""A model's weights under their Hugging Face names, equal to the bit to the files they came from: speed, and the cost
of looking for values that are not finite.

    python tests/gpu/stages/export.py
"""

import tempfile
from pathlib import Path

import torch
from common import DEVICE, GIB, assert_equal, measured, num_bytes, one_rank, report, sized
from engines import model_folder, trained_engine
from safetensors.torch import load_file

from megappo.architecture.parsing import read_architecture
from megappo.weights.buckets import all_finite, into_buckets
from megappo.weights.export import Export

BUCKET_BYTES = sized(512 * 2**20, 2**12)


def measure() -> dict:
    with one_rank() as groups, tempfile.TemporaryDirectory() as root:
        folder = model_folder(Path(root))
        export = Export(trained_engine(folder, groups).chunks, read_architecture(folder), groups)
        found = {name: one.cpu() for bucket in export.buckets(BUCKET_BYTES) for name, one in bucket}
        assert_equal(
            found, {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}
        )

        def gather() -> None:
            for bucket in into_buckets(export.tensors, BUCKET_BYTES):
                export.gather(bucket)

        _, figure = measured(gather)
        flat = torch.cat([one.flatten() for one in found.values()]).to(DEVICE)
        is_finite, check = measured(lambda: all_finite(flat))
        assert is_finite
        flat[-1] = torch.nan
        assert not all_finite(flat)
    gib = num_bytes(found) / GIB
    return {
        "stage": "export",
        "weights_gib": gib,
        "gather_gib_per_second": gib / figure["seconds"],
        "finite_check_gib_per_second": gib / check["seconds"],
        **{f"gather_{key}": value for key, value in figure.items()},
        **{f"finite_check_{key}": value for key, value in check.items()},
    }


if __name__ == "__main__":
    report(measure)
