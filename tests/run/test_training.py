"""A short run from beginning to end, killed and terminated on its way (see `run`)."""

import gzip
import itertools
import json
import math
import re
import statistics
from pathlib import Path

import pytest
import torch
from program import logged
from pyarrow import parquet
from report_pages import content_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import recorded
from transformers import AutoModelForCausalLM, AutoTokenizer

from megappo.batch.rows_file import RowsFile
from megappo.config.loading import load_config
from megappo.observe.run_file import git_commit
from megappo.observe.timeline import read_timeline

TOTAL_STEPS = 10
STATISTICS = ("mean", "max", "min")
PROMISED = {
    *(f"actor/{name}" for name in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy")),
    *(f"{name}/{metric}" for name in ("actor", "critic") for metric in ("grad_norm", "lr", "mfu")),
    *(f"critic/{name}" for name in ("vf_loss", "vf_clipfrac", "vf_explained_var")),
    *(f"{name}/{kind}" for name in ("reward/score", "reward/kl_penalty") for kind in STATISTICS),
    *(f"{name}/{kind}" for name in ("advantages", "returns", "values") for kind in STATISTICS),
    *(f"rollout/{name}/{kind}" for name in ("response_length", "log_prob_diff") for kind in STATISTICS),
    *("reward/kl_coef", "rollout/truncated_frac", "rollout/num_tokens", "rollout/tokens_per_second"),
    *("sync/bytes", "sync/seconds", "sync/gib_per_second", "memory/host_peak_gib/sum"),
}
PHASES = ("rollout", "reward", "scatter", "old_log_probs", "ref_log_probs", "values", "advantages")
PHASES += ("gather", "scatter_fields", "update_actor", "update_critic", "gather_metrics", "sync")

pytestmark = pytest.mark.timeout(600)


def test_each_step_is_logged_once_with_all_that_is_promised(run):
    steps = logged(run)
    assert [metrics["step"] for metrics in steps] == list(range(TOTAL_STEPS + 1))
    for metrics in steps[1:]:
        assert metrics.keys() >= PROMISED | {f"timing_s/{phase}" for phase in PHASES}
        assert all(value is not None for value in metrics.values())
        assert 0 < metrics["actor/mfu"] < 1 and 0 < metrics["critic/mfu"] < 1
    assert "timing_s/save" in steps[10], "what stands between two steps counts in the second"
    evaluated = [metrics["step"] for metrics in steps if "val/held_out/score/mean" in metrics]
    assert evaluated == [0, 5, 10]


def test_the_engine_samples_from_the_weights_being_trained(run):
    for metrics in logged(run)[1:]:
        assert metrics["rollout/log_prob_diff/mean"] < 1e-4


def test_an_unhealthy_run_is_reported_once_although_it_was_resumed(run):
    """The random model rarely ends its responses."""
    steps = logged(run)[1:]
    assert [metrics["health/truncation"] for metrics in steps] == [0, 0] + [1] * (TOTAL_STEPS - 2)
    outputs = [(run.parent / part / "output.txt").read_text() for part in ("1", "2", "3")]
    [finding] = re.findall(r"^unhealthy \(truncation\): .*\n((?:  score .*\n)*)", "".join(outputs), re.M)
    assert len(finding.splitlines()) == 3
    assert "truncation in 8 steps" in outputs[-1]


def test_the_phases_add_up_to_the_step(run):
    for metrics in logged(run)[1:]:
        phases = [v for name, v in metrics.items() if name.startswith("timing_s/") and name != "timing_s/step"]
        assert sum(phases) == pytest.approx(metrics["timing_s/step"], rel=0.03)
        assert metrics["timing_s/other"] < 0.25 * metrics["timing_s/step"]  # little, were the machine idle


def test_the_timeline_has_every_step_of_each_rank_once(run):
    timeline, steps = read_timeline(run), logged(run)[1:]
    assert list(timeline) == [metrics["step"] for metrics in steps]
    for ranks, metrics in zip(timeline.values(), steps, strict=True):
        assert len(ranks) == 2
        starts = {name: start for name, start, _ in ranks[0]}
        assert starts["rollout"] < starts["values"] < starts["update_actor"] < starts["sync"]
        for phases in ranks.values():
            assert {phase.name for phase in phases} >= set(PHASES)
        for name in PHASES:
            seconds = sum(phase.seconds for phase in ranks[0] if phase.name == name)
            assert seconds == pytest.approx(metrics[f"timing_s/{name}"], abs=1e-4)


def test_a_profile_has_the_operators_of_a_step_within_its_phases(run):
    [path] = (run / "profile").iterdir()
    assert path.name == "step_00000010_rank_00001.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spans = {}
    for event in events:
        if event.get("ph") == "X":
            spans.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert spans.keys() >= set(PHASES)
    [(start, end)] = spans["update_critic"]
    products = [span for name in ("aten::mm", "aten::addmm") for span in spans.get(name, [])]
    assert any(start <= begin < finish <= end for begin, finish in products)
    assert max(finish for _, finish in products) <= spans["sync"][0][1], "evaluations compute in the engine"


def test_rollouts_are_kept_of_the_first_step_and_with_each_evaluation(run, config):
    """The first half of the step's rows, which are in the record, too."""
    files = sorted((run / "rollouts").glob("*.parquet"))
    assert [path.stem for path in files] == ["step_00000001", "step_00000005", "step_00000010"]
    tokenizer = AutoTokenizer.from_pretrained(config.parent / "model")
    for path, metrics in zip(files, (logged(run)[step] for step in (1, 5, 10)), strict=True):
        rows = parquet.read_table(path).to_pylist(maps_as_pydicts="strict")
        with RowsFile(run / "record" / f"{path.stem}.safetensors") as file:
            recorded_rows = file.rows(0, 64)
        scores, log_probs = recorded_rows.fields["scores"], recorded_rows.fields["rollout_log_probs"]
        assert [row["score"] for row in rows] == scores.tolist()
        for row, sequence, length in zip(rows, recorded_rows.sequences, recorded_rows.prompt_lengths, strict=True):
            assert row["tokens"] == sequence[length:].tolist()
            assert row["prompt"] == tokenizer.decode(sequence[:length])
            assert row["score"] == pytest.approx(row["response"].count("7") / max(1, len(row["response"])))
            assert row["response"] == re.sub("<unk>|<pad>|<eos>", "", "".join(row["texts"]))
            left, right = row["prompt"].removesuffix("=").split("+")
            assert int(row["label"]) == int(left) + int(right)
        for number, row in enumerate(rows):
            assert row["rollout_log_probs"] == log_probs[number, : len(row["tokens"])].tolist()
            assert row["old_log_probs"] == pytest.approx(row["rollout_log_probs"], abs=1e-3)
        for name in ("values", "advantages", "returns"):
            numbers = [number for row in rows for number in row[name]]
            assert metrics[f"{name}/min"] <= min(numbers) < max(numbers) <= metrics[f"{name}/max"]
            assert statistics.fmean(numbers) == pytest.approx(metrics[f"{name}/mean"], abs=0.5)


def test_it_learns(run):
    steps = logged(run)
    rewards = [metrics["reward/score/mean"] for metrics in steps[1:]]
    assert rewards[0] < 0.2
    assert min(rewards[-2:]) > 0.6
    assert steps[0]["val/held_out/score/mean"] < 0.5 < steps[-1]["val/held_out/score/mean"]


def test_the_config_written_is_the_config_run(run, config):
    overrides = recorded(run, config)
    for folder in (run, run / "checkpoints" / "step_00000010"):
        assert load_config(folder / "config.yaml") == load_config(config, overrides)


def test_the_newest_checkpoints_are_kept_and_nothing_half_written(run):
    found = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert found == ["latest", "step_00000009", "step_00000010"]
    assert (run / "checkpoints" / "latest").read_text() == "step_00000010\n"


def samples_of(run: Path, name: str) -> list[dict]:
    """Return the samples of a data set's last evaluation."""
    lines = (run / "rollouts" / "step_00000010.jsonl").read_text().splitlines()
    return [sample for sample in map(json.loads, lines) if sample["dataset"] == name]


def test_a_data_set_is_evaluated_with_settings_of_its_own(run, config):
    """All prompts are saved with all of their scores, so that the reported metrics can be recomputed."""
    samples, metrics = samples_of(run, "sums"), logged(run)[-1]
    records = [json.loads(line) for line in (config.parent / "held_out.jsonl").read_text().splitlines()]
    assert [(one["label"], one["prompt"]) for one in samples] == [(one["prompt"], one["label"]) for one in records]
    for one in samples:
        assert one["score"] == one["scores"][0] == 2 * one["response"].count("7") / max(1, len(one["response"]))
        assert len(one["scores"]) == 4 and len(one["response"]) <= 4 and "answers" not in one
    found = {name.removeprefix("val/sums/"): value for name, value in metrics.items() if name.startswith("val/sums/")}
    of_prompts = [one["scores"] for one in samples]
    means = list(map(statistics.fmean, of_prompts))
    expected = {"mean@4": statistics.fmean(means), "mean@4/ci95": 1.96 * statistics.stdev(means) / math.sqrt(8)}
    kinds = {"best": max, "worst": min, "pass": lambda scores: float(max(scores) >= 1)}
    for k, (name, of_chosen) in itertools.product([2, 4], kinds.items()):
        chosen = [of_k for scores in of_prompts for of_k in itertools.combinations(scores, k)]
        expected[f"{name}@{k}"] = statistics.fmean(map(of_chosen, chosen))
    expected |= {"score/mean": expected["mean@4"], "score/max": max(map(max, of_prompts))}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert 0 < found["response_length/mean"] <= 4 and "maj@4" not in found, "the function returns no answers"


def test_the_exported_actor_answers_as_the_last_evaluation_did(run):
    samples = samples_of(run, "held_out")
    assert len(samples) == 8
    tokenizer = AutoTokenizer.from_pretrained(run / "hf_actor")
    model = AutoModelForCausalLM.from_pretrained(run / "hf_actor", dtype=torch.float32)
    for sample in samples:
        prompt = tokenizer(sample["prompt"], return_tensors="pt")
        tokens = model.generate(**prompt, do_sample=False, max_new_tokens=6)[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(tokens, skip_special_tokens=True) == sample["response"]
        assert sample["score"] == sample["response"].count("7") / len(sample["response"])


def test_the_exported_actor_is_not_the_one_it_started_from(run, config):
    start = load_config(config, ["trainer.output_dir=unused"]).model.path
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (start, run / "hf_actor"))
    assert before.keys() == after.keys()
    assert all((before[name] - after[name]).abs().max() > 1e-4 for name in before)


def test_no_pickle_beside_the_model_was_read(run, config):
    model = Path(load_config(config, ["trainer.output_dir=unused"]).model.path)
    assert (model / "pytorch_model.bin").is_file() and not (model / "went off").exists()


def test_report_and_tensorboard_are_there(run):
    assert "mean reward" in (run / "report.html").read_text()  # its summary
    [report] = content_of(run / "report.html")["runs"]
    assert report["status"] == "finished" and report["steps"] == [[step, step] for step in range(TOTAL_STEPS + 1)]
    assert report["commit"] == git_commit(Path(__file__).parent)
    last = report["timeline"][str(TOTAL_STEPS)]
    assert len(last) > 1 and all("rollout" in [phase for phase, _, _ in spans] for spans in last.values())
    kept = [sample for sample in report["samples"] if "texts" in sample]
    assert kept and all(len(sample["advantages"]) == len(sample["texts"]) for sample in kept)
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward/score/mean")] == list(range(1, TOTAL_STEPS + 1))
