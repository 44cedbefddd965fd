"""Recorded rollouts: replayed without engines, written without training, and shown."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import assert_equal, tensors_of
from program import REPOSITORY, Program, logged, trained_on
from safetensors import safe_open
from transformers import AutoTokenizer

from megappo.batch.rows_file import RowsFile, write_rows

ADAPTIVE = "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.1, horizon: 1000}"
pytestmark = pytest.mark.timeout(600)


def shown(*arguments: object) -> str:
    command = [sys.executable, REPOSITORY / "tools" / "show_rollouts.py", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_replayed_run_is_the_same_to_the_bit(config, run, folder):
    """The recording run was killed, interrupted and resumed from its checkpoints."""
    again = folder / "again"
    replay = (f"trainer.output_dir={again}", f"trainer.replay_rollouts={run / 'record'}", "trainer.eval_interval=0")
    with Program(folder / "program", config, *replay) as program:
        assert program.wait() == 0, program.output
    assert not (again / "engines").exists()
    found = trained_on(again)
    assert len(found) == 10 and len(found[0]) > 40
    assert found == trained_on(run)
    assert_equal(tensors_of(again / "hf_actor"), tensors_of(run / "hf_actor"))


@pytest.mark.slow  # the replayed run has the record, tests/config what it needs
def test_rollouts_without_training(config, folder):
    out, record = folder / "out", folder / "record"
    settings = ("trainer.rollout_only=true", f"trainer.record_rollouts={record}", "trainer.total_steps=2")
    with Program(folder / "program", config, f"trainer.output_dir={out}", *settings) as program:
        assert program.wait() == 0, program.output
    assert not (out / "checkpoints").exists() and not (out / "hf_actor").exists()
    metrics = logged(out)
    assert [one["step"] for one in metrics] == [1, 2]
    steps = shown(record).splitlines()
    assert len(steps) == 3 and "mean score" in steps[0]
    for line, of_step in zip(steps[1:], metrics, strict=True):
        assert f"{of_step['reward/score/mean']:.3f}" in line.split()
    check_that_it_goes_on(config, folder, record, f"trainer.output_dir={out}", *settings[:2])
    text = shown(record, "--step", 2, "--num", 3, "--order", "best", "--tokens")
    assert f", scores {metrics[1]['reward/score/max']}, " in text.split("\n[prompt]")[0]
    prompts = re.findall(r"\[prompt\]   (.*)\n\[response\] (.*)\n", text)
    assert len(prompts) == 3 and all(re.fullmatch(r"\d\d\+\d\d=", prompt) for prompt, _ in prompts)
    assert check_scores(record / "step_00000001.safetensors", config.parent / "model") == 32 * 4


def check_that_it_goes_on(config: Path, folder: Path, record: Path, *settings: str) -> None:
    """Check that the run, interrupted and restarted, writes the remaining steps; and again with other settings."""
    kept = {path: path.stat().st_mtime_ns for path in record.iterdir()}
    with Program(folder / "again", config, *settings, "trainer.total_steps=200") as program:
        program.wait_until(lambda: (record / "step_00000004.safetensors").exists())
        program.process.terminate()
        assert program.wait() == 75, program.output
    assert f"continuing after step 2, the last one in {record} with " in program.output
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    out = Path(settings[0].partition("=")[2])
    assert [one["step"] for one in logged(out)] == list(range(1, len(list(record.iterdir())) + 1))
    with Program(folder / "otherwise", config, *settings, "rollout.top_k=3", "trainer.total_steps=1") as program:
        assert program.wait() == 0, program.output
    assert "continuing" not in program.output
    assert f"writing step 1 of {record} again: rollout.top_k changed" in program.output
    first = record / "step_00000001.safetensors"
    assert first.stat().st_mtime_ns > kept[first]


def check_scores(path: Path, model: Path) -> int:
    """Compare the recorded scores with the reward function's, computed from the tokens without the program's code."""
    with safe_open(path, framework="pt") as file:
        tokens, scores = file.get_tensor("tokens"), file.get_tensor("fields.scores")
        prompts, responses = file.get_tensor("prompt_lengths"), file.get_tensor("response_lengths")
    rows = tokens.split((prompts + responses).tolist())
    tokenizer = AutoTokenizer.from_pretrained(model)
    for row, start, score in zip(rows, prompts.tolist(), scores.tolist(), strict=True):
        text = tokenizer.decode(row[start:], skip_special_tokens=True)
        assert score == pytest.approx(text.count("7") / max(1, len(text)))
    return len(rows)


def leave(record: Path, out: Path, step: int, masks: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Write a recorded step again with another mask, [rows, tokens]."""
    out.mkdir(exist_ok=True)
    name = f"step_{step:08d}.safetensors"
    with RowsFile(record / name) as file:
        rows, facts = file.rows(0, len(file.table)), file.facts
    mask = masks(rows.response_mask)
    write_rows(out / name, replace(rows, fields=rows.fields | {"response_mask": mask}), facts)


def only(row: int, num_tokens: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def masks(mask: torch.Tensor) -> torch.Tensor:
        left = torch.zeros_like(mask)
        left[row, :num_tokens] = mask[row, :num_tokens]
        return left

    return masks


@pytest.mark.slow
def test_a_run_goes_on_through_steps_with_hardly_a_token_or_none(config, run, folder):
    """As with algorithm.mask_truncated: no token, one, one response, or one rank's only."""
    record, out = folder / "record", folder / "out"
    ways = (torch.zeros_like, only(40, 1), only(7, 6), lambda mask: mask * (torch.arange(len(mask)) >= 64)[:, None])
    for step, masks in enumerate(ways, start=1):
        leave(run / "record", record, step, masks)
    replay = (f"trainer.output_dir={out}", f"trainer.replay_rollouts={record}", "trainer.total_steps=4")
    with Program(folder / "program", config, *replay, "trainer.eval_interval=0", ADAPTIVE) as program:
        assert program.wait() == 0, program.output
    assert "Traceback" not in program.output
    steps = logged(out)
    assert [one["rollout/trained_tokens"] for one in steps[:2]] == [0, 1]
    assert [one["rollout/masked_frac"] for one in steps] == pytest.approx([1.0, 127 / 128, 127 / 128, 0.5])
    assert [one["critic/vf_explained_var"] is None for one in steps] == [True, True, False, False]
    assert [one["advantages/mean"] for one in steps[:2]] == [None, 0.0]
    assert steps[0]["actor/grad_norm"] == steps[0]["critic/grad_norm"] == steps[1]["actor/grad_norm"] == 0.0
    assert min(steps[1]["critic/grad_norm"], steps[2]["actor/grad_norm"]) > 0
    assert steps[0]["reward/kl_coef"] == steps[1]["reward/kl_coef"], "without a token there is no KL to adapt it to"


@pytest.mark.slow  # tests/rollouts/test_record.py has what does not fit
def test_records_that_do_not_fit_are_refused(config, run, folder):
    replay = (f"trainer.output_dir={folder / 'out'}", f"trainer.replay_rollouts={run / 'record'}")
    others = ("trainer.eval_interval=0", "rollout.temperature=0.5", "algorithm.adv_estimator=remax")
    with Program(folder / "program", config, *replay, *others) as program:
        assert program.wait() == 2, program.output
    sampled = "step_00000001.safetensors was sampled with rollout.temperature 1.0, but here it is 0.5: set it"
    assert sampled in program.output
    assert "step_00000001.safetensors has no baselines, which algorithm.adv_estimator remax needs" in program.output
    assert "Traceback" not in program.output


def test_samples_of_evaluations_are_no_record(tmp_path):
    (tmp_path / "step_00000004.jsonl").write_text("{}\n")
    command = [sys.executable, REPOSITORY / "tools" / "show_rollouts.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (
        done.returncode == 1
        and f"error: {tmp_path} holds samples of evaluations as text, and no rollouts" in done.stderr
    )
    assert f"--json-lines {tmp_path / 'step_00000004.jsonl'};" in done.stderr
