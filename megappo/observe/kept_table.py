"""Kept rollouts as they are stored: the columns of the Parquet file of a step, and reading it."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow
from pyarrow import parquet

from megappo.config.config_error import ConfigError
from megappo.config.text_files import open_file

PER_TOKEN = (
    "rollout_log_probs",
    "staleness",
    "old_log_probs",
    "ref_log_probs",
    "teacher_log_probs",
    "values",
    "advantages",
    "returns",
)
"""Fields with a number per response token that are kept, where the run has them."""
TURN = {
    "turn": pyarrow.int64(),
    "text": pyarrow.string(),
    "reward": pyarrow.float64(),
    "begins": pyarrow.string(),
    "follows": pyarrow.int64(),
    "depth": pyarrow.int64(),
}
SCHEMA = pyarrow.schema(
    {
        "step": pyarrow.int64(),
        **dict.fromkeys(("dataset", "prompt", "response", "label"), pyarrow.string()),
        "images": pyarrow.list_(pyarrow.string()),
        "score": pyarrow.float64(),
        "turns": pyarrow.list_(pyarrow.struct(TURN)),
        "parts": pyarrow.map_(pyarrow.string(), pyarrow.float64()),
        "passed": pyarrow.bool_(),
        "finish_reason": pyarrow.string(),
        "tokens": pyarrow.list_(pyarrow.int64()),
        "texts": pyarrow.list_(pyarrow.string()),
        "response_mask": pyarrow.list_(pyarrow.int8()),
        **dict.fromkeys(PER_TOKEN, pyarrow.list_(pyarrow.float32())),
    }
)


def read_kept(path: Path, columns: Sequence[str] | None = None) -> pyarrow.Table:
    """Return these columns of a file of kept rollouts, or all.

    Raises:
        ConfigError: the file cannot be read, or is not what a run writes.
    """
    try:
        with open_file(path) as file:
            table = parquet.read_table(file, columns=columns, schema=SCHEMA)
        if table["score"].null_count or table["parts"].null_count:
            raise ValueError("a row without a score")
    except (OSError, ValueError, KeyError) as error:  # pyarrow's are among them
        raise ConfigError(f"{path} is not what a run writes: {error}; remove the file") from error
    return table
