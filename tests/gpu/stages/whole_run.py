"""PPO steps of a random model, such as a Qwen3 of 0.6 billion parameters: actor, critic of the same size, reference and
engine on one GPU in bf16, all that may sleep offloaded; each phase's seconds and memory beside the plan's.

python tests/gpu/stages/whole_run.py NAME MODEL_TYPE {bf16,fp8,lora,critic_lora} [KEY=VALUE ...]

The model types are engines.py's. The engine's weights are in bf16 or FP8; adapters are trained for the actor and
the critic, or the critic alone. The keys are the config's.
"""

import json
import random
import shutil
import sys
from pathlib import Path

import torch
from common import CUDA, DEVICE, report, sized
from engines import CHANGES, VOCABULARY, model_folder
from runs import engine_settings, figures, output_folder, planned_gib, train
from tokenizers import Tokenizer, models, pre_tokenizers

from megappo.observe.metrics_file import read_metrics

CONFIG = Path(__file__).with_name("whole_run.yaml")
NUM_PROMPTS, PROMPT_WORDS = 256, sized(32, 4)
SMALL = (
    *("model.dtype=fp32", "data.train_batch_size=4", "actor.ppo_mini_batch_size=2", "critic.ppo_mini_batch_size=2"),
    *("rollout.max_response_length=6", "data.max_prompt_length=8", "rollout.max_total_tokens=2048"),
)
"""For a CPU."""
FP8_ARGUMENTS = {"quantization": "fp8", "load_format": "flash_rl"}
"""SGLang quantizes the weights when it loads them, and again in every sync."""
FP8 = (
    *(f"rollout.server_args.{name}={value}" for name, value in FP8_ARGUMENTS.items()),
    *("rollout.sync.verify=false", "rollout.sync.probe_tolerance=0.2", "algorithm.rollout_correction.level=token"),
)
LORA = ("actor.lora.rank=16", "actor.optim.lr=1e-5", "ref.offload=[]")
"""The engine gets adapters alone; its other weights come back from the host after a sleep."""
CRITIC_LORA = ("critic.lora.rank=16", "ref.offload=[]")
VARIANTS = {"bf16": (), "fp8": FP8, "lora": LORA + CRITIC_LORA, "critic_lora": CRITIC_LORA}
BOUND, FP8_BOUND = 0.05, 0.3
"""Limit of the mean difference between the log-probs of engine and trainer."""


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with as many words as the model's vocabulary."""
    vocabulary = {f"w{i}": i for i in range(VOCABULARY - 1)} | {"<eos>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_prompts(path: Path) -> None:
    words = random.Random(0)
    prompts = [" ".join(f"w{words.randrange(VOCABULARY - 1)}" for _ in range(PROMPT_WORDS)) for _ in range(NUM_PROMPTS)]
    path.write_text("".join(json.dumps({"prompt": prompt, "label": "w1"}) + "\n" for prompt in prompts))


def new_run(name: str, model_type: str = "qwen3", **changes: int) -> tuple[Path, tuple[str, ...]]:
    """Write a model and prompts for a run; return its output folder, and the settings that name these paths."""
    folder = output_folder(name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model_folder(folder / "model", model_type, eos_token_id=VOCABULARY - 1, bos_token_id=None, **changes)
    torch.cuda.empty_cache()
    write_tokenizer(folder / "model")
    write_prompts(folder / "train.jsonl")
    model, prompts, run = folder / "model", folder / "train.jsonl", folder / "run"
    return run, (f"model.path={model}", f"data.train_files={prompts}", f"trainer.output_dir={run}")


def measure() -> dict:
    name, model_type, variant, *keys = sys.argv[1:]
    run, paths = new_run(name, model_type, **CHANGES[model_type])
    settings = [*paths, *keys, *VARIANTS[variant], *(() if CUDA else SMALL)]
    train(CONFIG, settings)
    steps = read_metrics(run)
    planned = planned_gib(CONFIG, [*settings, *engine_settings()], torch.cuda.get_device_name(DEVICE)) if CUDA else {}
    differences = [step["rollout/log_prob_diff/mean"] for step in steps]
    assert max(differences) < (FP8_BOUND if variant == "fp8" else BOUND), differences
    found = {"stage": name, "log_prob_diffs": differences, **figures(run)}
    return found | {f"planned/{phase}_gib": size for phase, size in planned.items()}


if __name__ == "__main__":
    report(measure)
