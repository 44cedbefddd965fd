"""Build a run whose config has been checked, and run it to its end. Importing megatron-core takes seconds."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from megappo.batch.exchange import Exchange
from megappo.checkpoint.checksums import file_sum
from megappo.config.loading import changes_since, dump_config
from megappo.config.schema import Config
from megappo.data.prompts import PromptDataset
from megappo.observe.files import CONFIG_FILE, EVALUATION_FILE
from megappo.observe.loggers import Outlook, RunEnd, RunInfo
from megappo.observe.metrics import reduce_ranks
from megappo.observe.observer import Observer, open_observer
from megappo.observe.run_file import changed_data, git_commit, logged_step_of, run_id_of
from megappo.observe.samples import drop_samples
from megappo.observe.timeline import drop_phases
from megappo.placement.run_plan import RunPlan
from megappo.runtime import megatron_setup, platform
from megappo.runtime.durable_files import write_durably
from megappo.runtime.status import STATUS

megatron_setup.install()  # must come before the first import of megatron.core

from megappo.engines.handle import EngineHandle  # noqa: E402
from megappo.rollouts.datasets import load_datasets  # noqa: E402
from megappo.rollouts.record import Record, Replay  # noqa: E402
from megappo.rollouts.rollouts import make_rollouts  # noqa: E402
from megappo.trainer import loop  # noqa: E402
from megappo.trainer.batches import make_batches  # noqa: E402
from megappo.trainer.critic_evaluation import CriticEvaluation  # noqa: E402
from megappo.trainer.example_batches import ExampleBatches  # noqa: E402
from megappo.trainer.fine_tuning import example_step  # noqa: E402
from megappo.trainer.inference import InferenceEngines, NoEngines  # noqa: E402
from megappo.trainer.models import (  # noqa: E402
    Models,
    Phases,
    build_models,
)
from megappo.trainer.progress import Progress  # noqa: E402
from megappo.trainer.response_scorer import NoResponseScorer, ResponseScorer  # noqa: E402
from megappo.trainer.run import Run  # noqa: E402
from megappo.trainer.statistics import Utilisation, row_metrics  # noqa: E402
from megappo.trainer.value_metrics import GateProgress  # noqa: E402


def execute(plan: RunPlan, engine_handle: EngineHandle, outlook: Outlook, cleanup: ExitStack) -> None:
    """Train, or only sample or evaluate; all ranks together, after the default process group exists.

    Args:
        engine_handle: this rank's engine, started. A run that replays rollouts has none.
        outlook: read on rank 0 alone.
        cleanup: closes what must be closed however the run ends.
    """
    run = build_run(plan, engine_handle, outlook, cleanup)
    if plan.config.trainer.eval_only:
        evaluate_only(run)
    elif plan.config.trainer.rollout_only:
        rollout_only(run)
    else:
        loop.train(run, loop.ppo_step if plan.config.is_ppo else example_step)


def build_run(plan: RunPlan, engine_handle: EngineHandle, outlook: Outlook, cleanup: ExitStack) -> Run:
    """Build the parts of a run on this rank; all ranks together. Arguments as for `execute`."""
    exchange = Exchange(dist.group.WORLD)
    config = plan.config
    with STATUS.step("checkpoint check"):
        progress = Progress(plan.requested, exchange)
    with STATUS.step("prompts"):
        datasets = load_datasets(config, engine_handle.workers, exchange)
        left_out = datasets.check(exchange)
    engines = NoEngines()
    models = Models(replace(plan, components={}), {}, {})
    if _needs_models(config):
        if config.samples:
            engines = InferenceEngines(plan, engine_handle, exchange, is_new=progress.is_new)
            engines.start()
        with STATUS.step("models"):
            models = build_models(plan, exchange)
        with STATUS.step("checkpoint"):
            progress.restore(models)
    folder = config.trainer.record_rollouts
    record = None if folder is None else Record(Path(folder), config, exchange)
    progress_lines = [progress.describe()]
    if record is not None and config.trainer.rollout_only:
        progress_lines = _resume_record(record, datasets.train, progress) or progress_lines
    lines = [*progress_lines, *config.absences, *left_out, *(plan.decisions() if models.training else ())]
    with STATUS.step("checksums of the training files"):
        facts = run_info(plan, progress.resume_step, outlook) if exchange.rank == 0 else None
    lines += [changed_data(facts)] if facts else []
    observer = open_observer(facts, config.trainer.loggers, outlook, lines, cleanup)
    phase = Phases(models)
    with STATUS.step("engine start"):
        engine_handle.wait_ready()
    rollouts = make_rollouts(plan, engine_handle, datasets, exchange, observer)
    engines.connect(models, rollouts, datasets, phase)
    if not config.is_ppo:
        batches = ExampleBatches(datasets.train, exchange, progress.num_drawn)
    elif config.replays:
        batches = Replay(Path(config.trainer.replay_rollouts), config, datasets.vocab_size, exchange)
    else:
        batches = make_batches(datasets, rollouts, engines, record, progress, cleanup)
    mfu = Utilisation(models, exchange)
    scorer = NoResponseScorer()
    judge = models.components.get("reward_model")
    if judge is not None and config.is_ppo:
        scorer = ResponseScorer(config, judge, datasets.train, rollouts.tokenizer, exchange)
    if exchange.rank == 0:  # not before: a folder that is refused stays as it was
        _begin_folder(plan.requested, progress, observer)
    parts = config, exchange, datasets, models, engines, rollouts, batches, progress, observer, phase, mfu
    gate = GateProgress(config.critic.gate)
    return Run(*parts, scorer, gate, CriticEvaluation(gate))


def run_info(plan: RunPlan, resume_step: int, outlook: Outlook) -> RunInfo:
    """Return the facts about a run that its loggers record."""
    trainer = plan.config.trainer
    output_dir = Path(trainer.output_dir)
    reads_data = plan.training and not plan.config.replays
    return RunInfo(
        output_dir=output_dir,
        total_steps=trainer.total_steps,
        resume_step=resume_step,
        logged_step=logged_step_of(output_dir, resume_step),
        run_id=run_id_of(output_dir, resume_step),
        config=plan.requested.model_dump(mode="json"),
        commit=git_commit(Path(__file__).parent),
        hardware={"ranks": f"{plan.world_size}, {plan.ranks_per_node} on each node", **platform.capabilities()},
        data=" ".join(file_sum(Path(path)) for path in plan.config.data.files) if reads_data else "",
        **outlook.facts,
    )


def _needs_models(config: Config) -> bool:
    """Return whether the trainer has models. Engines that a run starts read model.path themselves."""
    settings = config.trainer
    if settings.eval_only:
        others = settings.eval_checkpoint or config.model.dist_checkpointing_path or config.rollout.engines
        return config.has_reward_model or bool(others)
    return not settings.rollout_only


def _resume_record(record: Record, prompts: PromptDataset, progress: Progress) -> list[str]:
    """Continue after the last step that is recorded as this run would record it; return lines about it."""
    progress.start_step, progress.num_drawn, changed = record.valid_steps(prompts)
    step = progress.start_step
    lines = []
    if step:
        lines.append(f"continuing after step {step}, the last one in {record.folder} with the same settings")
    if changed:
        lines.append(f"writing step {step + 1} of {record.folder} again: {' and '.join(changed)} changed")
    return lines


def _begin_folder(config: Config, progress: Progress, observer: Observer) -> None:
    """Write the resolved config beside the results, report what has changed since the checkpoint's, and remove what an
    earlier run left of the steps to come."""
    output_dir = Path(config.trainer.output_dir)
    if progress.checkpoint is not None and not config.trainer.eval_only:
        for change in changes_since(progress.checkpoint / CONFIG_FILE, config):
            observer.message(f"changed since then: {change}")
    write_durably(output_dir / CONFIG_FILE, dump_config(config))
    drop_phases(output_dir, progress.resume_step)
    is_in_step = progress.experience is not None  # whose rollouts have been kept
    drop_samples(output_dir, progress.resume_step + is_in_step, "parquet")


def rollout_only(run: Run) -> None:
    """Record the rollouts of all steps that are not recorded yet, with the weights of model.path.

    Raises:
        Interrupted: a signal on any rank, or the time limit, ends the run.
    """
    run.begin_training()
    for step in range(run.progress.start_step + 1, run.config.trainer.total_steps + 1):
        run.check_interrupted()
        responses = run.batches.sample(step, run.phase)
        batch, metrics = run.batches.score(step, responses, run.phase)
        metrics |= row_metrics(run.exchange, batch.rows, step)
        metrics |= reduce_ranks(run.exchange.all_gather(run.phase.memory()))
        run.log(step, metrics)
    run.finish()


def evaluate_only(run: Run) -> None:
    """Evaluate a checkpoint, or the model of model.path, once; write evaluation.json beside metrics and report."""
    step = run.progress.step
    weights = run.progress.checkpoint or Path(run.config.initial_weights)
    with run.phase("sync"):
        run.engines.first_sync(step)
    metrics = run.evaluate(step)
    run.observer.log(step, metrics)
    content = {"weights": str(weights.resolve()), "step": step, "metrics": metrics}
    file = Path(run.config.trainer.output_dir, EVALUATION_FILE)
    run.exchange.on_rank_0(lambda: write_durably(file, json.dumps(content, indent=1) + "\n"))
    run.observer.end(RunEnd())
