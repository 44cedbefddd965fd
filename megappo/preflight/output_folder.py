"""Check what a run finds in its output folder, by names and state.json alone. Without torch, for the dry run."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from megappo.checkpoint.checksums import refuse_altered
from megappo.checkpoint.folders import (
    LATEST,
    STATE,
    CheckpointError,
    begun_step,
    candidates,
    is_checkpoint,
    read_state,
    step_of,
)
from megappo.config.config_error import ConfigError, Errors, looked_in
from megappo.config.schema import Config
from megappo.config.text_files import read_record
from megappo.observe.files import CHECKPOINTS, EVALUATION_FILE, EVALUATIONS, recorded_steps
from megappo.observe.run_file import exported_model, has_finished
from megappo.placement.model_lines import models_in_words


class EvaluationFacts(BaseModel):
    """Types of the part of evaluation.json that is read again."""

    weights: str


def resume_errors(config: Config) -> list[str]:
    """Return why a run cannot resume from its checkpoint."""
    trainer = config.trainer
    try:
        if not config.recipe.has_steps:
            errors = [*_unfit_to_evaluate(trainer.eval_checkpoint), *_other_evaluation(config)]
            weights = evaluation_of(config).trainer.eval_checkpoint
            return errors if errors or weights is None else list(_wrong_models(config, Path(weights)))
        checkpoint, _ = _choice(config)
    except CheckpointError as error:
        return [str(error)]
    if checkpoint is None:
        return list(_missing_rollouts(config, 0))
    if trainer.resume == "never":
        return [
            f"{checkpoint} exists, and trainer.resume is never: set it to auto, or choose another trainer.output_dir"
        ]
    if not config.recipe.trains:
        return [
            f"{checkpoint} exists, but trainer.rollout_only rolls out by model.path's weights: convert it "
            "(megappo convert megatron-to-hf), name that as model.path, and choose another trainer.output_dir"
        ]
    begun = begun_step(checkpoint)
    if trainer.total_steps < begun:
        return [
            f"trainer.total_steps {trainer.total_steps} is below the {begun} steps that {checkpoint} has: raise it, "
            f"write the name of an older one into {checkpoint.with_name(LATEST)}, or choose another trainer.output_dir"
        ]
    return [*_wrong_models(config, checkpoint), *_missing_rollouts(config, begun)]


def _unfit_to_evaluate(checkpoint: str | None) -> Errors:
    if checkpoint is None:
        return
    path = Path(checkpoint)
    if not path.is_dir():
        yield f"trainer.eval_checkpoint: no folder {path}{looked_in(path)}: correct the path"
    elif not is_checkpoint(path):
        yield (
            f"trainer.eval_checkpoint: {path} is no checkpoint of a run: name a folder step_XXXXXXXX with state.json, "
            "or set model.path to a Hugging Face folder"
        )


def with_own_folder(config: Config, weights: Path) -> Config:
    """Return the config of an evaluation, which writes into `evaluations/NAME` of output_dir, unless that is such a
    folder already: it leaves the files of a run in output_dir alone."""
    folder, own = Path(config.trainer.output_dir), Path(EVALUATIONS, weights.resolve().name)
    if folder.resolve().parts[-2:] == own.parts:
        return config
    return config.changed("trainer.output_dir", str(folder / own))


def evaluation_of(config: Config) -> Config:
    """Return the config of an evaluation with the checkpoint that it evaluates, if any, and a folder of its own."""
    checkpoint = config.trainer.eval_checkpoint or _choice(config)[0]
    chosen = config.changed("trainer.eval_checkpoint", checkpoint and str(checkpoint))
    return with_own_folder(chosen, Path(checkpoint or config.initial_weights))


def _other_evaluation(config: Config) -> Errors:
    """Yield an error if the evaluation's folder holds the evaluation of other weights with the same name."""
    own = evaluation_of(config)
    weights = Path(own.trainer.eval_checkpoint or own.initial_weights)
    file = Path(own.trainer.output_dir, EVALUATION_FILE)
    try:
        content = read_record(file, EvaluationFacts.model_validate, "remove it, or choose another folder")
    except ConfigError as error:
        yield f"trainer.output_dir: {error}"
        return
    recorded = Path(content.get("weights", weights))
    if recorded.exists() and recorded.resolve() != weights.resolve():  # a run's folder may have been moved since
        yield (
            f"trainer.output_dir: {file} evaluates {recorded}, and the evaluation of {weights} would overwrite it: "
            "choose another one (megappo evaluate: --output)"
        )


def _wrong_models(config: Config, checkpoint: Path) -> Errors:
    """Yield an error if the checkpoint is of a run with other models."""
    try:
        saved = read_state(checkpoint).get("models")
    except CheckpointError:  # the run takes the one before, or fails because there is none
        return
    wanted = models_in_words(config)
    if not isinstance(saved, dict) or saved == wanted or (not config.recipe.has_steps and saved | wanted == saved):
        return
    holds, has = (", ".join(map(str, models.values())) for models in (saved, wanted))
    yield (
        f"{checkpoint} holds {holds}, but this run has {has}: set model.path, critic.model_path, trainer.train, "
        "algorithm.adv_estimator, algorithm.shared_backbone, actor.lora, critic.lora, critic.freeze, critic.ensemble "
        "and the keys of critic.value_loss as they were, or choose another trainer.output_dir"
    )


def _missing_rollouts(config: Config, begun: int) -> Errors:
    """Yield an error if a step that has not begun has no rollouts to replay."""
    if config.trainer.replay_rollouts is None:
        return
    held_out = config.trainer.replay_held_out
    if held_out is not None and recorded_steps(Path(held_out)) != [1]:
        yield (
            f"trainer.replay_held_out: {held_out}{looked_in(Path(held_out))} must hold the rollouts of step 1 alone: "
            "record rollouts of held-out prompts by trainer.rollout_only and trainer.total_steps=1"
        )
    folder = Path(config.trainer.replay_rollouts)
    recorded = set(recorded_steps(folder))
    missing = next((step for step in range(begun + 1, config.trainer.total_steps + 1) if step not in recorded), None)
    if missing is not None:
        yield (
            f"trainer.replay_rollouts: {folder}{looked_in(folder)} has no rollouts of step {missing}: correct the "
            "path, or lower trainer.total_steps"
        )


def already_finished(config: Config) -> str:
    """Return a message if a run has nothing to do, else "": it has all steps and its export, ended
    well, and evaluates nothing."""
    if not config.recipe.has_steps:
        return ""
    folder, total = Path(config.trainer.output_dir), config.trainer.total_steps
    checkpoint, _ = _choice(config)
    exported = not config.trainer.export_hf or exported_model(folder) is not None
    if checkpoint is None or step_of(checkpoint) < total or not exported or not has_finished(folder):
        return ""
    remedy = "raise trainer.total_steps to train on, or set another trainer.output_dir for a new run"
    return f"already finished: {folder} has all {total} steps; {remedy}"


def resume_warnings(config: Config) -> Iterator[str]:
    """Yield which checkpoint the run resumes from and why, if `latest` does not name it."""
    try:
        checkpoint, faults = _choice(config)
    except CheckpointError:  # among the errors
        return
    if checkpoint and faults and config.trainer.eval_checkpoint is None:
        yield f"{'; '.join(faults)}: the run resumes from {checkpoint}, the newest intact one"


def _choice(config: Config) -> tuple[Path | None, list[str]]:
    """Return the checkpoint that a run resumes from, judged by names and state.json's checksum, and the faults of
    `latest` and of newer checkpoints.

    Raises:
        CheckpointError: all are damaged, or there is only `latest`.
    """
    checkpoints, problem = candidates(Path(config.trainer.output_dir) / CHECKPOINTS)
    faults = [problem] if problem else []
    for path in checkpoints:
        try:
            refuse_altered(path, STATE)
            return path, faults
        except CheckpointError as error:
            faults.append(str(error))
    if checkpoints:
        raise CheckpointError("; ".join(faults))
    return None, faults
