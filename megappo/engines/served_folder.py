"""Folder that SGLang serves a model from, where it does not read the model's own config.json."""

import json
import tempfile
from pathlib import Path

from megappo.architecture.families import LAYER_SIZES
from megappo.architecture.model_folder import CONFIG_FILE, first_architecture, read_json_file
from megappo.architecture.parsing import read_architecture

WITH_TWO_SIZES_OF_HEADS = "Gemma4ForCausalLM"


def served_folder(model_path: str) -> str:
    """Return the model's folder, or for Gemma 4 one in TMPDIR with links to its files and a config.json for SGLang.

    SGLang 0.5.23 expects the heads of layers with a window under names of its own. It derives these for the model with
    vision only (utils/hf_transformers/config.py, `_apply_gemma4_attention_overrides`).

    Raises:
        TextFileError: config.json cannot be read.
    """
    config_file = Path(model_path, CONFIG_FILE)
    config = read_json_file(config_file) if config_file.is_file() else {}
    if first_architecture(config) != WITH_TWO_SIZES_OF_HEADS:
        return model_path
    architecture = read_architecture(model_path)
    full = architecture.heads_of(architecture.num_layers - 1)
    config |= {"head_dim": full.size, "num_key_value_heads": full.kv_heads, LAYER_SIZES: None}
    config |= {"swa_head_dim": architecture.head_size, "swa_num_key_value_heads": architecture.num_kv_heads}
    folder = Path(tempfile.mkdtemp(prefix="served-"))
    for file in Path(model_path).resolve().iterdir():
        if file.name != CONFIG_FILE:
            (folder / file.name).symlink_to(file)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return str(folder)
