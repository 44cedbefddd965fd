"""Evaluate a checkpoint of a run, or a Hugging Face folder, on a config's held-out data.

.venv/bin/python tools/evaluate.py CHECKPOINT_OR_HF_FOLDER CONFIG [key=value ...]
.venv/bin/python tools/evaluate.py outputs/quickstart/run configs/quickstart.yaml rollout.val_n=4 \\
    rollout.val_temperature=1

The first argument is a run's folder (its newest checkpoint), one of its checkpoints (step_XXXXXXXX), or a Hugging Face
folder. CONFIG sets the held-out data (data.val_files, eval.datasets), the sampling and the ranks; it may be the run's
own, with further data sets on the command line. Engines are started, nothing is trained, and the run does not change.
evaluations/NAME gets metrics.jsonl, evaluation.json, rollouts/ and report.html. They replace those of the previous
evaluation; only its metrics are kept, with their date. Choose another --output to keep everything.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megappo.architecture.model_folder import CONFIG_FILE
from megappo.checkpoint.folders import CheckpointError, candidates, checkpoints_in, is_checkpoint
from megappo.checkpoint.metadata import is_component
from megappo.config.config_error import ConfigError, looked_in
from megappo.config.loading import load_config
from megappo.placement.placing import smallest_world

# isort: split
import torch

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Replace this process by the evaluation; return 2 for an invalid command."""
    args = _arguments()
    try:
        weights, name, beside = _source(args.source)
        where = f"trainer.output_dir={json.dumps(str((args.output or beside) / 'evaluations' / name))}"
        overrides = [*args.overrides, "trainer.eval_only=true", where, weights]
        config = load_config(args.config, overrides)
        num_ranks = args.nproc or smallest_world(config) or torch.cuda.device_count() or 1
    except (ConfigError, CheckpointError) as error:
        print(*(f"error: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return 2
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    words = [args.config, *overrides]
    plan = [sys.executable, "-P", "-m", "megappo.plan", "--world-size", str(num_ranks), *words]
    if code := subprocess.run(plan, env=environment, stdout=subprocess.DEVNULL).returncode:
        return code
    launcher = ["-m", "megappo.torchrun", "--standalone", "--nproc-per-node", str(num_ranks)]
    os.execve(sys.executable, [sys.executable, "-P", *launcher, "-m", "megappo.train", *words], environment)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="CHECKPOINT_OR_HF_FOLDER", help="what to evaluate")
    parser.add_argument("config", metavar="CONFIG", help="YAML file of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys that win over the file")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: beside what is evaluated")
    help_of_nproc = "processes to start (default: as many as the placement names, else one per GPU)"
    parser.add_argument("--nproc", type=int, metavar="N", help=help_of_nproc)
    return parser.parse_intermixed_args()


def _source(folder: Path) -> tuple[str, str, Path]:
    """Return the override that selects the model, the model's name, and the default parent of evaluations/NAME.

    Raises:
        ConfigError: the folder is neither a run, nor a checkpoint, nor a Hugging Face folder.
        CheckpointError: a run's `latest` names none of its checkpoints.
    """
    if not folder.is_dir():
        raise ConfigError(f"no folder {folder}{looked_in(folder)}: name a checkpoint, or a Hugging Face folder")
    if is_component(folder):
        remedy = "name the checkpoint that it is in, or convert it by tools/convert.py megatron-to-hf"
        raise ConfigError(f"{folder} is a Megatron folder by itself: {remedy}")
    folder = folder.resolve()
    if (folder / CONFIG_FILE).is_file():
        return f"model.path={json.dumps(str(folder))}", folder.name, folder.parent
    if is_checkpoint(folder):
        return f"trainer.eval_checkpoint={json.dumps(str(folder))}", folder.name, folder.parents[1]
    if checkpoints_in(folder / "checkpoints"):
        found, _ = candidates(folder / "checkpoints")
        return _source(found[0])
    raise ConfigError(
        f"{folder} is neither a run's folder with checkpoints/, nor a checkpoint (step_XXXXXXXX with state.json), nor "
        f"a Hugging Face folder with {CONFIG_FILE}: name one of these"
    )


if __name__ == "__main__":
    sys.exit(main())
