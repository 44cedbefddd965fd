"""Keys of the run itself: its steps, checkpoints, evaluations, records and trackers."""

from typing import Annotated, Literal

from annotated_types import MinLen
from pydantic import StrictBool

from megappo.config.config_error import Errors
from megappo.config.recipes import RECIPES
from megappo.config.sections import HAS_HELD_OUT
from megappo.config.values import (
    LISTED,
    FilePath,
    FilePaths,
    HealthRule,
    NonNegative,
    NonNegativeFloat,
    OneOf,
    Positive,
    ReadIf,
    Seconds,
    Section,
    Texts,
    key,
)

EVAL_INTERVAL = 10
"""Value of trainer.eval_interval where it is null and there is something to evaluate on."""
CONSOLE_FIELDS = ("reward", "val", "ref_kl", "ppo_kl", "entropy", "clipfrac", "vf_ev", "length", "tok/s", "step_s")
"""Default of trainer.console_fields: `observe.console.COLUMNS` has their metrics."""
DELETES_CHECKPOINTS = ReadIf("trainer.keep_checkpoints")
SAVES_BETWEEN = ReadIf("trainer.save_interval")
PROFILES = ReadIf("trainer.profile.steps")
ONLY_EVALUATES = ReadIf("trainer.eval_only")
TRAINS_CRITIC_ALONE = ReadIf(
    "trainer.train", lambda config: config.recipe.trains == "critic", "{} is not [critic]: PPO evaluates the policy"
)


class Profile(Section):
    steps: tuple[Positive, ...] = key((), "steps in which torch's profiler writes a trace to output_dir/profile, and on a GPU a snapshot of its memory; they take longer than others")
    ranks: tuple[NonNegative, ...] = key((0,), "ranks that are profiled", read_if=PROFILES)


class Trainer(Section):
    output_dir: FilePath = key(..., "folder for config.yaml, metrics.jsonl, tensorboard/, checkpoints/, rollouts/")
    kind: Annotated[str, OneOf(RECIPES)] = key("ppo", "ppo; sft = supervised fine-tuning of the actor on the responses of examples (megappo sft); reward_model = a reward model, trained on preferences (megappo reward-model); critic = a critic alone, trained on trajectories with scores")
    total_steps: Positive = key(100, "steps of PPO; of other kinds: optimizer steps")
    train: Annotated[tuple[Literal["actor", "critic"], ...], MinLen(1), LISTED] = key(("actor", "critic"), "models that are trained, if the run has them; [critic] = a critic alone, on rollouts of the actor as it is in model.path, or on the rollouts of replay_rollouts")
    seed: NonNegative = key(0, "seeds data order, value head and sampling")
    save_interval: NonNegative = key(20, "steps between checkpoints, besides the one at the end; 0 = at the end only")
    async_save: StrictBool = key(True, "continue training while a checkpoint is written; from the first save on, a copy of what is saved stays in host memory")
    keep_checkpoints: NonNegative = key(2, "newest checkpoints to keep; 0 = all")
    keep_every: NonNegative = key(0, "also keep the checkpoints of steps that this divides; 0 = none", read_if=(SAVES_BETWEEN, DELETES_CHECKPOINTS))
    eval_interval: NonNegative | None = key(None, "steps between evaluations on data.val_files and eval.datasets, besides evaluations before the first step and after the last; 0 = off; null = 10 if there are any")
    resume: Literal["auto", "never"] = key("auto", "auto: resume from output_dir's newest checkpoint; never: refuse a folder that has one")
    export_hf: StrictBool = key(True, "write the trained models among actor, critic and reward model as Hugging Face folders (hf_actor/, hf_critic/, hf_reward_model/) at the end")
    num_samples: NonNegative = key(4, "prompts of each held-out data set whose responses are kept per evaluation", read_if=HAS_HELD_OUT)
    print_samples: NonNegative = key(2, "kept responses that are printed at the start of each evaluation, of its first data set; 0 = none", read_if=HAS_HELD_OUT)
    console_fields: Texts = key(CONSOLE_FIELDS, "columns of the line that is printed after each step: these, or any metric by its name (docs/metrics.md)")
    stop_on: Annotated[tuple[HealthRule, ...], LISTED] = key((), "rules of docs/metrics.md#health that end the run, with everything saved and exit code 5, in the step in which one begins to hold; the others are reported")
    max_bad_steps: NonNegative = key(3, "optimizer steps in a row that may be skipped because loss or gradients are not finite, with their rows kept in bad_steps/; one more ends the run")
    time_limit: Seconds | None = key(None, "seconds that the job may take, from the start of its allocation; the run saves and ends before; null = SLURM's limit, else none")
    grace_seconds: NonNegativeFloat = key(120.0, "seconds before the limit at which the run begins to save; with async_save two saves must fit, as one may be running")
    loggers: FilePaths = key(("tensorboard",), "trackers that get metrics, samples, checkpoints and the end of the run: tensorboard, wandb, mlflow, swanlab, trackio, FILE.py:CLASS")
    keep_rollouts: NonNegative | None = key(None, "keep up to 64 rows of the training rollouts of step 1, of steps that this divides and of the last one in rollouts/step_XXXXXXXX.parquet: texts, scores, and each token's log-probs, value and advantage; 0 = off; null = with each evaluation, or every 10 steps without evaluations")
    record_rollouts: FilePath | None = key(None, "folder for a file with each step's rollouts (tokens, log-probs, scores); tools/show_rollouts.py shows them")
    replay_rollouts: FilePath | None = key(None, "folder of such files to train on, instead of starting engines")
    replay_held_out: FilePath | None = key(None, "trainer.train [critic] with replay_rollouts: folder with the recorded rollouts of held-out prompts, in one file, for evaluations", read_if=TRAINS_CRITIC_ALONE)
    profile: Profile = key(Profile(), "where the time of a step goes, operator by operator")
    rollout_only: StrictBool = key(False, "record rollouts of model.path's weights, without training")
    eval_only: StrictBool = key(False, "evaluate once and train nothing: output_dir's newest checkpoint, or model.path if there is none")
    eval_checkpoint: FilePath | None = key(None, "eval_only: checkpoint to evaluate instead of output_dir's newest, a folder step_XXXXXXXX of any run of the same model", read_if=ONLY_EVALUATES)
    extensions: FilePaths = key((), "Python files that every rank runs before it reads the config; they register your own methods, families, components, transports and metrics")
    process_group_timeout_seconds: Seconds = key(1800.0, "timeout of a collective; a longer wait ends the run")
    hang_timeout_seconds: Seconds | None = key(None, "time without a heartbeat of any rank after which the run logs the ranks' stacks and ends; null = half of process_group_timeout_seconds")

    def contradictions(self) -> Errors:
        modes = [name for name in ("eval_only", "rollout_only", "replay_rollouts") if getattr(self, name)]
        if len(modes) > 1:
            yield f"trainer.{' and trainer.'.join(modes)} exclude each other: drop one"
        if self.rollout_only and not (self.record_rollouts or self.eval_only):
            yield "trainer.rollout_only without trainer.record_rollouts keeps nothing: name a folder for the rollouts"
        if self.record_rollouts and (self.eval_only or self.replay_rollouts):
            yield "trainer.record_rollouts needs rollouts, without trainer.eval_only and trainer.replay_rollouts: drop it"
        if late := [step for step in self.profile.steps if step > self.total_steps]:
            yield f"trainer.profile.steps {late[0]} is after trainer.total_steps {self.total_steps}: choose another"
        if self.time_limit is not None and self.time_limit <= self.grace_seconds:
            yield (
                f"trainer.time_limit {self.time_limit:g} is not above trainer.grace_seconds {self.grace_seconds:g}, so "
                "that no step would begin: raise it, or lower that"
            )
