"""What a run finds in its output folder, as far as names tell. Without torch, so that the dry run tells it, too."""

from pathlib import Path

from megappo.checkpoint.errors import CheckpointError
from megappo.checkpoint.folders import LATEST, candidates, step_of
from megappo.config.schema import Config
from megappo.observe.files import CHECKPOINTS, HF_ACTOR, REPORT_FILE


def resume_errors(config: Config) -> list[str]:
    """Why a run cannot go on from the checkpoint that is there."""
    try:
        checkpoint = _checkpoint(config)
    except CheckpointError as error:
        return [str(error)]
    if checkpoint is None:
        return []
    if config.trainer.resume == "never":
        return [
            f"{checkpoint} exists, and trainer.resume is never: set it to auto, or choose another trainer.output_dir"
        ]
    total, done = config.trainer.total_steps, step_of(checkpoint)
    if total < done:
        return [
            f"trainer.total_steps {total} is below the {done} steps that {checkpoint} has: raise it, write the name "
            f"of an older one into {checkpoint.with_name(LATEST)}, or choose another trainer.output_dir"
        ]
    return []


def already_finished(config: Config) -> str:
    """What to say of a run that has done everything; "" if something is left to do: steps, export or report."""
    folder, total = Path(config.trainer.output_dir), config.trainer.total_steps
    checkpoint = _checkpoint(config)
    exported = (folder / HF_ACTOR).is_dir() or not config.trainer.export_hf
    if checkpoint is None or step_of(checkpoint) < total or not exported or not (folder / REPORT_FILE).is_file():
        return ""
    remedy = "raise trainer.total_steps to train on, or set another trainer.output_dir for a new run"
    return f"already finished: {folder} has all {total} steps; {remedy}"


def _checkpoint(config: Config) -> Path | None:
    """The checkpoint a run goes on from, if that one is whole."""
    found, _ = candidates(Path(config.trainer.output_dir) / CHECKPOINTS)
    return found[0] if found else None
