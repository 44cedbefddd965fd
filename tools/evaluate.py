"""Evaluate a checkpoint of a run, or a Hugging Face folder, on a config's held-out data: megappo evaluate."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megappo.architecture.model_folder import CONFIG_FILE, no_model
from megappo.checkpoint.folders import CheckpointError, candidates, checkpoints_in, is_checkpoint, is_component
from megappo.commands.arguments import evaluate_arguments
from megappo.commands.local import start
from megappo.config.config_error import ConfigError
from megappo.config.hub import cached_model
from megappo.config.loading import load_config
from megappo.observe.files import CHECKPOINTS
from megappo.placement.placing import smallest_world
from megappo.runtime.machine import num_gpus


def main(arguments: Sequence[str] | None = None) -> int:
    """Replace this process by the evaluation; return 2 for an invalid command."""
    args = evaluate_arguments(arguments)
    try:
        source = Path(cached_model(str(args.source)))
        weights, name, beside = _source(source)
        if source != args.source:  # a model of the hub's cache
            name, beside = args.source.name, Path("outputs")
        config = args.config or str(_config_of(args.source, beside))
        where = f"trainer.output_dir={json.dumps(str((args.output or beside) / 'evaluations' / name))}"
        overrides = [*args.overrides, "trainer.eval_only=true", where, *weights]
        num_ranks = args.nproc or smallest_world(load_config(config, overrides)) or num_gpus() or 1
    except (ConfigError, CheckpointError) as error:
        print(*(f"error: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return 2
    return start(config, overrides, num_ranks)


def _config_of(source: Path, run: Path) -> Path:
    """Return the config of the run that wrote what is evaluated.

    Raises:
        ConfigError: there is none.
    """
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{source} is of no run with a config.yaml: name a config, megappo evaluate {source} CONFIG")
    return run / "config.yaml"


def _source(folder: Path) -> tuple[list[str], str, Path]:
    """Return the overrides that select the model, the model's name, and the default parent of evaluations/NAME.

    Raises:
        ConfigError: the folder is neither a run, nor a checkpoint, nor a Hugging Face folder.
        CheckpointError: a run's `latest` names none of its checkpoints.
    """
    if not folder.is_dir():
        raise ConfigError(no_model(folder, "a run, a checkpoint, or a Hugging Face folder"))
    if is_component(folder):
        remedy = "name the checkpoint that it is in, or convert it by megappo convert megatron-to-hf"
        raise ConfigError(f"{folder} is a Megatron folder by itself: {remedy}")
    given, folder = folder, folder.resolve()
    if (folder / CONFIG_FILE).is_file():
        own_weights = [f"model.path={json.dumps(str(folder))}", "model.dist_checkpointing_path=null"]
        return own_weights, folder.name, folder.parent
    if is_checkpoint(folder):
        return [f"trainer.eval_checkpoint={json.dumps(str(folder))}"], folder.name, folder.parents[1]
    if checkpoints_in(folder / CHECKPOINTS):
        found, _ = candidates(folder / CHECKPOINTS)
        return _source(found[0])
    runs = [path.parent for path in sorted(given.glob(f"*/{CHECKPOINTS}"))]
    remedy = f"did you mean {runs[0]}?" if runs else "name one of these"
    raise ConfigError(
        f"{given} is neither a run's folder with checkpoints/, nor a checkpoint (step_XXXXXXXX with state.json), nor "
        f"a Hugging Face folder with {CONFIG_FILE}: {remedy}"
    )


if __name__ == "__main__":
    sys.exit(main())
