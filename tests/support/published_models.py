"""Folders of public models, without weights and tokenizers: they can be planned without a download."""

import json
from pathlib import Path

import published_configs

PUBLISHED = {name.rpartition("/")[2]: config for name, (config, _) in published_configs.PUBLISHED.items()}
"""By the name of the repository on the Hugging Face hub."""


def published_folders(root: Path) -> Path:
    """Write `models/NAME/config.json` of each model under a root, without weights and tokenizers."""
    for name, config in PUBLISHED.items():
        (root / "models" / name).mkdir(parents=True)
        (root / "models" / name / "config.json").write_text(json.dumps(config))
    return root
