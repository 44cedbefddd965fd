"""A run that is interrupted anywhere in its updates resumes there, with bitwise the same numbers."""

import signal
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from recorder import recorder_in
from spawn import run_ranks
from vision_rows import MERGE, PROMPTS, TOKENS, Pictures, vision_folder

from megappo.architecture.vision import num_image_tokens
from megappo.checkpoint.folders import CheckpointError
from megappo.config.schema import Config
from megappo.data.prompts import Prompt
from megappo.models.train_engine import TrainedEngine
from megappo.observe.loggers import Histogram
from megappo.recipes.ppo import ppo_step
from megappo.runtime import interruption
from megappo.runtime.interruption import INTERRUPTION, Interrupted, deadline
from megappo.trainer import update
from megappo.trainer.loop import train
from megappo.trainer.models import architecture_of
from megappo.trainer.run import Run
from megappo.weights.export import Export

LAYOUT, OTHER = "actor tp2, critic pp2", "actor dp2, critic elsewhere tp2 sp"
METHODS = {
    "kl": {
        "algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "kl_coef": 0.1}},
        "reward": {"normalize": "running"},
    },
    "taught": {
        "teachers": {"even": {"parallel": {"tensor": 2}, "offload": ["weights"], "when": {"n": 0}}, "odd": {}},
        "distillation": {"task_reward": False},
    },
    "ensemble": {"critic": {"ensemble": 2}, "algorithm": {"mask_agreed": 0.2, "bootstrap_truncated": True}},
    "images": {
        "data": {"max_prompt_length": 11},
        "placement": {"rollout": "0-1"},
        "algorithm": {"use_kl_in_reward": True},
    },
    "running": {"reward": {"normalize": "running"}, "critic": {"ppo_epochs": 2}},
}


def config_of(bench: ModuleType, folder: Path, layout: str, method: str, output: str) -> Config:
    changes = {"trainer": {"output_dir": str(folder / output), "save_interval": 0}}
    return Config.model_validate(bench.merged(bench.settings(folder), bench.LAYOUTS[layout], METHODS[method], changes))


def numbers_of(bench: ModuleType, run: Run, metrics: dict[str, object]) -> dict[str, object]:
    """Metrics of a step, and all weights. Rounding moves numbers from one bucket of a histogram to the next."""
    found = {name: value for name, value in untimed(bench, metrics).items() if not isinstance(value, Histogram)}
    for name, engine in run.models.trained.items():
        if engine is not None:
            export = Export(engine.chunks, architecture_of(run.models.specs[name]), engine.groups)
            found |= {f"{name}.{key}": bench.described(w) for bucket in export.buckets(2**20) for key, w in bucket}
    return found


class After:
    """Interrupts this process after so many updates of the components on this rank."""

    def __init__(self, num_updates: int):
        self.left = num_updates
        self.train_batch = TrainedEngine.train_batch

    def __enter__(self) -> None:
        TrainedEngine.train_batch = lambda engine, *args: self.counted(engine, *args)
        if not self.left:
            INTERRUPTION._reason = "the test"

    def counted(self, engine: TrainedEngine, *args: object) -> object:
        result = self.train_batch(engine, *args)
        self.left -= 1
        if self.left <= 0:
            INTERRUPTION._reason = "the test"
        return result

    def __exit__(self, *error: object) -> None:
        TrainedEngine.train_batch = self.train_batch
        INTERRUPTION._reason = ""


def resumed(bench: ModuleType, config: Config) -> Run:
    run = bench.build(config)
    run.progress.restore(run.models)
    run.batches.num_drawn = run.progress.num_drawn
    return run


def interrupted_after(
    rank: int, world_size: int, folder: Path, layout: str, method: str, updates: tuple[int, ...]
) -> None:
    bench = recorder_in(folder)
    whole = bench.build(config_of(bench, folder, layout, method, "whole"))
    expected = []
    for step in (1, 2):
        metrics = ppo_step(whole, step)
        expected.append(numbers_of(bench, whole, metrics))
    for after in updates:
        config = config_of(bench, folder, layout, method, f"after {after}")
        run = bench.build(config)
        with After(after), pytest.raises(Interrupted, match="the test"):
            ppo_step(run, 1)
        run.save_if_needed()
        name = run.progress.checkpoint.name
        assert name.startswith("step_00000000_") and (layout == OTHER or name.endswith(f"_{after:04d}"))
        run = resumed(bench, config)
        assert run.progress.is_saved
        for step, numbers in enumerate(expected, 1):
            metrics = ppo_step(run, step)
            found = numbers_of(bench, run, metrics)
            assert found.keys() == numbers.keys(), (after, step)
            different = {key: (found[key], numbers[key]) for key in numbers if found[key] != numbers[key]}
            assert not different, (after, step, different)
            run.save()


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "method", "updates"),
    [
        (LAYOUT, "kl", (5,)),
        pytest.param(LAYOUT, "kl", (0, 1, 2, 3, 4), marks=slow),
        pytest.param(LAYOUT, "taught", (3,), marks=slow),
        pytest.param(LAYOUT, "ensemble", (1, 7), marks=slow),
        pytest.param(LAYOUT, "running", tuple(range(8)), marks=slow),
        pytest.param(OTHER, "running", (0, 1, 2, 3), marks=slow),
    ],
)
def test_interrupted_after_any_update_a_run_goes_on_there(
    layout: str, method: str, updates: tuple[int, ...], tmp_path: Path
) -> None:
    """Updates of a rank, on which one component lives, or both."""
    run_ranks(4, interrupted_after, tmp_path, layout, method, updates, timeout=280)


def see_images(bench: ModuleType, folder: Path) -> Pictures:
    """Let the recorder's runs train a model with vision, on prompts with no, one and two images; return these."""

    class ImagePrompts(bench.FixedPrompts):
        def _prompt(self, index: int, generator: torch.Generator) -> Prompt:
            length, images = PROMPTS[index % len(PROMPTS)]
            tokens = torch.randint(bench.VOCABULARY, (length,), generator=generator)
            for place, grid in images:
                tokens[place : place + num_image_tokens(grid, MERGE)] = TOKENS["image_token_id"]
            return Prompt(index, tokens.tolist(), "", None, record=(0, index % len(PROMPTS)))

    bench.FixedPrompts = ImagePrompts
    build_models = bench.build_models
    pictures = Pictures()
    bench.build_models = lambda plan, exchange: build_models(plan, exchange, pictures)
    bench.Datasets = partial(bench.Datasets, images=pictures)
    if dist.get_rank() == 0:
        vision_folder(folder, "qwen3_vl")
    dist.barrier()
    return pictures


def killed_with_images(rank: int, world_size: int, folder: Path) -> None:
    """Nothing of a step that a kill ends is saved; an interrupted one is saved in its middle."""
    bench = recorder_in(folder)
    pictures = see_images(bench, folder)
    whole = bench.build(config_of(bench, folder, LAYOUT, "images", "whole"))
    expected = []
    for step in (1, 2):
        metrics = ppo_step(whole, step)
        expected.append(numbers_of(bench, whole, metrics))
    config = config_of(bench, folder, LAYOUT, "images", "killed")
    run = bench.build(config)
    ppo_step(run, 1)
    run.save()
    for is_saved in (False, True):
        with After(3), pytest.raises(Interrupted):
            ppo_step(run, 2)
        if is_saved:
            run.save_if_needed()
        run = resumed(bench, config)
    metrics = ppo_step(run, 2)
    found = numbers_of(bench, run, metrics)
    different = {key: (found[key], number) for key, number in expected[1].items() if found[key] != number}
    assert not different and found.keys() == expected[1].keys()
    assert set(pictures.made) == {(0, 0, 0), (0, 1, 0), (0, 1, 1)}


@pytest.mark.slow
def test_killed_and_interrupted_a_run_on_images_goes_on_exactly(tmp_path: Path) -> None:
    run_ranks(2, killed_with_images, tmp_path, timeout=280)


class Watched:
    """Notes what a run does around its steps, and interrupts it in an evaluation and in a save.

    Args:
        evaluation, save: after which step; None for none.
    """

    def __init__(self, run: Run, evaluation: int | None = None, save: int | None = None):
        self.run, self.seen, self.logged, self.evaluation = run, [], {}, evaluation
        run.evaluate = self.evaluate
        run.engines.first_sync = lambda step: self.seen.append("sync" + " as loaded" * run.progress.is_new)
        run.observer.log = lambda step, metrics, examples=(): self.logged.update({step: metrics})
        run.observer.checkpoint = lambda step, path: save is not None and self.ask_to_end(run.progress.step == save)
        run.observer.end = lambda end: self.seen.append("finish")

    def evaluate(self, step: int) -> dict[str, float]:
        self.seen.append(f"evaluate {step}")
        self.ask_to_end(step == self.evaluation)
        self.run.check_interrupted()
        return {"val/score": float(step)}

    def ask_to_end(self, now: bool) -> None:
        if now and self.run.exchange.rank == 1:
            INTERRUPTION._reason = "the test"


def evaluating(bench: ModuleType, folder: Path, output: str) -> Config:
    config = config_of(bench, folder, LAYOUT, "kl", output)
    data = config.data.model_copy(update={"val_files": ["held_out.jsonl"]})
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"eval_interval": 1}), "data": data})


def in_its_first_step(rank: int, world_size: int, folder: Path) -> None:
    bench = recorder_in(folder)
    config = evaluating(bench, folder, "run")
    trainer = Watched(bench.build(config))
    with After(2), pytest.raises(Interrupted):
        train(trainer.run, ppo_step)
    assert trainer.seen == ["sync as loaded", "evaluate 0"] and trainer.logged.keys() == {0}
    trainer = Watched(resumed(bench, config))
    train(trainer.run, ppo_step)
    assert trainer.seen == ["sync", "evaluate 1", "evaluate 2", "finish"] and trainer.logged.keys() == {1, 2}


def test_one_that_is_interrupted_in_its_first_step_is_not_new(tmp_path: Path) -> None:
    """The engines' weights, loaded from the folder, are not the actor's any more, and step 0 has been evaluated."""
    run_ranks(4, in_its_first_step, tmp_path)


def around_steps(rank: int, world_size: int, folder: Path) -> None:
    bench = recorder_in(folder)
    whole = Watched(bench.build(evaluating(bench, folder, "whole")))
    train(whole.run, ppo_step)
    run, logged = bench.build(config := evaluating(bench, folder, "run")), {}
    for ending in ({"evaluation": 1}, {"evaluation": 2}, {"save": 2}):
        trainer = Watched(run, **ending)
        with After(99), pytest.raises(Interrupted, match="the test"):
            train(trainer.run, ppo_step)
        assert "finish" not in trainer.seen
        logged |= trainer.logged
        run = resumed(bench, config)
    last = Watched(run)
    train(last.run, ppo_step)
    assert last.seen == ["sync", "finish"] and last.logged == {}
    assert run.progress.kl.value == whole.run.progress.kl.value
    assert [untimed(bench, metrics) for metrics in logged.values()] == [
        untimed(bench, metrics) for metrics in whole.logged.values()
    ]


def untimed(bench: ModuleType, metrics: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in metrics.items() if not bench.OF_TIME.search(name)}


def test_what_is_left_around_a_step_is_done_when_the_run_goes_on(tmp_path: Path) -> None:
    run_ranks(4, around_steps, tmp_path)


def in_another_layout(rank: int, world_size: int, folder: Path) -> None:
    bench = recorder_in(folder)
    config = config_of(bench, folder, LAYOUT, "kl", "one")
    run = bench.build(config)
    with After(3), pytest.raises(Interrupted):
        ppo_step(run, 1)
    run.save_if_needed()
    same = resumed(bench, config)
    metrics = ppo_step(same, 1)
    expected = numbers_of(bench, same, metrics)
    other = resumed(bench, config_of(bench, folder, OTHER, "kl", "one"))
    metrics = ppo_step(other, 1)
    found = [part for part in other.exchange.all_gather(numbers_of(bench, other, metrics)) if part]
    for key, number in expected.items():
        apart = min(bench.difference(number, part[key]) for part in found if key in part)
        assert apart < 1e-5, (key, apart)
    fewer = config.model_copy(update={"critic": config.critic.model_copy(update={"ppo_mini_batch_size": 6})})
    run = bench.build(fewer)
    with pytest.raises(
        CheckpointError,
        match="with 2 mini-batches an epoch for the critic, but this run has 1",
    ):
        run.progress.restore(run.models)


def test_it_goes_on_in_another_layout_but_not_with_other_mini_batches(tmp_path: Path) -> None:
    run_ranks(4, in_another_layout, tmp_path)


def test_the_time_limit_counts_from_the_allocations_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the start of the process, which a set-up in the job may precede by long."""
    for name in ("SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME", interruption.LAUNCHER_STARTED):
        monkeypatch.delenv(name, raising=False)
    assert deadline(None, 10.0) == float("inf")
    assert deadline(100.0, 10.0) == pytest.approx(interruption._STARTED + 90.0)
    assert abs(interruption._STARTED - time.time()) < 3600
    monkeypatch.setenv(interruption.LAUNCHER_STARTED, "1500")
    assert deadline(100.0, 10.0) == 1590.0
    monkeypatch.setenv("SLURM_JOB_END_TIME", "5000")
    assert deadline(None, 10.0) == 4990.0
    monkeypatch.setenv("SLURM_JOB_START_TIME", "1000")
    assert deadline(100.0, 10.0) == 1090.0


def test_a_reason_is_the_signals_or_the_clocks() -> None:
    found = interruption.Interruption()
    found.begin_saving(time.time() + 3600)
    assert found.reason == ""
    found._on_signal(signal.SIGUSR1, None)
    assert found.reason == "a signal"
    late = interruption.Interruption()
    late.begin_saving(time.time() - 1)
    assert late.reason == "the time limit"
    assert update.INTERRUPTION is INTERRUPTION and INTERRUPTION.reason == ""
