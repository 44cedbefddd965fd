"""Models in the local cache of the Hugging Face hub, by their ids."""

import os
import re
from pathlib import Path

from megappo.errors import ActionableError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
"""The id of a model, such as Qwen/Qwen2.5-7B. A relative path may look like one."""
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/\w+", re.ASCII)
"""The end of the path of a model in the cache."""


def cached_model(path: str) -> str:
    """Return the folder in the local cache of the model with this id; any other path, or one that exists, is returned
    unchanged.

    Raises:
        ActionableError: a file of the cache cannot be read.
    """
    if not HUB_ID.fullmatch(path) or os.path.lexists(path):
        return path
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = os.environ.get("HF_HUB_CACHE") or f"{home}/hub"
    model = Path(cache).expanduser() / f"models--{path.replace('/', '--')}"
    revision = model / "refs" / "main"
    try:
        snapshot = model / "snapshots" / (revision.read_text("ascii").strip() if revision.is_file() else "none")
        return str(snapshot) if snapshot.is_dir() else path
    except (OSError, ValueError) as error:
        raise ActionableError(
            f"cannot read {revision} ({error}): remove {model}, or name the model's folder"
        ) from error


def cached_id(folder: Path) -> str | None:
    """Return the id of the model whose snapshot a folder is; None for a folder outside the cache."""
    match = CACHED.fullmatch("/".join(folder.parts[-3:]))
    return "/".join(match.groups()) if match else None
