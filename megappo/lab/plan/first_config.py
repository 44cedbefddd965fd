"""A commented config for a model on GPUs of a type: `megappo plan --init`."""

import textwrap
from math import ceil, log2
from operator import attrgetter
from typing import Any

from megappo.architecture.model_folder import CONFIG_FILE, SHAPES, shape_folder
from megappo.config.config_error import ConfigError
from megappo.config.describe import keys, yaml_lines
from megappo.config.hub import HUB_ID
from megappo.config.schema import Config
from megappo.config.values import Section
from megappo.errors import own_command
from megappo.lab.estimate.gpu_memory import Cluster
from megappo.lab.estimate.suggest import fitting_runs, most_split, suggestion
from megappo.placement.run_plan import plan_run
from megappo.runtime.gpus import GIB, GPU, GPUS_PER_NODE

OF_MODELS = ("parallel", "offload", "recompute", "optim.lr", "ppo_mini_batch_size", "max_tokens_per_micro_batch")
SHOWN = (
    "model.path",
    *(f"{model}.{key}" for model in ("actor", "critic") for key in OF_MODELS),
    *("rollout.n", "rollout.max_response_length", "rollout.tensor_parallel", "rollout.mem_fraction_static"),
    *("data.train_files", "data.val_files", "data.prompt_key", "data.label_key"),
    *("data.train_batch_size", "data.max_prompt_length", "reward.function"),
    *("trainer.output_dir", "trainer.total_steps", "trainer.save_interval"),
)
"""Keys to touch first."""


def first_config(model: str, gpu: GPU, num_gpus: int) -> str:
    """Return the YAML of a run in the layout that fits and is the fastest by estimate.

    Args:
        model: a folder, a hub id, or a shape that ships.
    Raises:
        ConfigError: the model's sizes are unknown, or no layout of it fits.
    """
    name = model.rstrip("/").rpartition("/")[2].lower()
    files = {"train_files": "data/train.jsonl", "val_files": "data/val.jsonl"}
    values = {"model": {"path": model}, "data": files, "trainer": {"output_dir": f"outputs/{name}"}}
    config = Config.model_validate(values)
    if not (shape_folder(config.model.path) / CONFIG_FILE).is_file():
        shapes = ", ".join(sorted(folder.name for folder in SHAPES.iterdir()))
        download = f"download it ({own_command('hf')} download {model} {CONFIG_FILE})"
        remedy = download if HUB_ID.fullmatch(model) else "name a folder that has one"
        raise ConfigError(f"--init: {model} has no {CONFIG_FILE} here: {remedy}, or name one of the shapes {shapes}")
    plan = plan_run(config, num_gpus, min(num_gpus, GPUS_PER_NODE))
    cluster = Cluster(gpu.memory, min(num_gpus, GPUS_PER_NODE))
    found = fitting_runs(plan, cluster, gpu)
    if not found:
        most, phase = most_split(plan, cluster).fullest.peak
        enough = num_gpus * 2 ** max(1, ceil(log2(most / gpu.memory)))  # layouts have powers of two
        raise ConfigError(
            f"--init: no layout of {model} fits {num_gpus} {gpu.name}: split as far as possible, it needs "
            f"{most / GIB:,.0f} of {gpu.memory / GIB:,.0f} GiB in {phase}: take about {enough}, or larger GPUs"
        )
    fastest, meanings = found[0].config, {key.path: key.meaning for key in keys()}
    lines = [
        f"# {model} on {num_gpus} {gpu.name}, in the layout that is the fastest by estimate; others that fit follow."
    ]
    lines += ["# All keys: megappo plan --keys", "placement:", f"  actor, critic, ref, rollout: 0-{num_gpus - 1}"]
    for path, line in yaml_lines({path: _value(fastest, path) for path in SHOWN}):
        indent = " " * (len(line) - len(line.lstrip())) + "# "
        lines += textwrap.wrap(meanings[path], 100, initial_indent=indent, subsequent_indent=indent) if path else []
        lines.append(line)
    for number, one in enumerate(found[1:3], 2):
        lines += ["#", *(f"# {line}" for line in suggestion(number, plan, one).splitlines())]
    return "\n".join(lines)


def _value(config: Config, path: str) -> Any:
    """Return a key's value for YAML; of a section, the keys that differ from their defaults."""
    value = attrgetter(path)(config)
    if isinstance(value, Section):
        return value.model_dump(mode="json", exclude_defaults=True)
    return list(value) if isinstance(value, tuple) else value
