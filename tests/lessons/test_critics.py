"""A critic starts from a language model, in a layout of its own, and its values are no logits: bugs of others."""

import statistics
from pathlib import Path

import pytest
import torch
from component_engines import build, train, weights
from hf_training import hf_train
from ppo_engines import LENGTHS, OPTIM, TEMPERATURE, Case, hf_outputs, make_rows, with_score
from safetensors.torch import load_file, save_file
from spawn import run_ranks
from tiny_models import hf_folder, hf_model

from megappo.architecture.parameters import EMBEDDING, LM_HEAD, VALUE_HEAD
from megappo.batch.rows import NO_TOKENS, Rows
from megappo.lab.report.health import Health
from megappo.observe.metrics import Metric, reduce_ranks
from megappo.placement.layout import Layout
from megappo.trainer.value_metrics import value_metrics

PP2 = Case(Layout((0, 1), pipeline=2), max_tokens=9)


def values_by(model: torch.nn.Module, weight: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Hugging Face's, of a head of this weight [1, H], one row after the other."""
    head = torch.nn.Linear(weight.shape[1], 1, bias=False)
    head.weight.data.copy_(weight)
    return torch.cat([values.detach() for (values,) in hf_outputs(model, head, rows)])


def start(rank: int, world_size: int, folder: Path, found: Path) -> None:
    engines, rows = build({"critic": folder}, {"critic": PP2}), make_rows(91)
    loaded = {name.removeprefix("critic/"): x for name, x in weights(engines, {"critic": folder}).items()}
    outputs = engines["critic"].forward(rows)
    assert bool(outputs) == (rank == 1)
    if outputs:
        parts = zip(outputs["values"], rows.response_lengths.tolist(), strict=True)
        save_file(loaded | {"values": torch.cat([row[:length] for row, length in parts])}, found)


@pytest.mark.parametrize("tied", [True, False])
def test_a_critic_starts_from_a_policy(tied: bool, tmp_path: Path) -> None:
    """A policy's checkpoint has an output layer of another shape or, with tied embeddings, none: the critic's head was
    looked for there, and the load failed before a head could be drawn, or filled it with what was not its own.

    https://github.com/THUDM/slime/pull/2259 and https://github.com/THUDM/slime/pull/1878

    And the sampling temperature divided the values as it does logits: https://github.com/THUDM/slime/pull/1928
    """
    folder, rows = hf_folder(tmp_path / "hf", "qwen2", tie_word_embeddings=tied), make_rows(91)
    run_ranks(2, start, folder, tmp_path / "found")
    found, policy = load_file(tmp_path / "found"), load_file(folder / "model.safetensors")
    values, head = found.pop("values"), found.pop(VALUE_HEAD)
    language_head = policy.pop(LM_HEAD, policy[EMBEDDING])
    assert found.keys() == policy.keys() and all(torch.equal(found[name], policy[name]) for name in policy)
    model = hf_model(folder)
    torch.testing.assert_close(values, values_by(model, head, rows), rtol=0, atol=1e-5)
    for wrong in (values_by(model, language_head[:1], rows), values / TEMPERATURE):
        assert (wrong - values).abs().max() > 0.02


def check_layouts(rank: int, world_size: int, folders: dict[str, Path], norms: dict[str, float]) -> None:
    cases = {"actor": Case(Layout((0, 1), tensor=2)), "critic": Case(Layout((1,)), max_tokens=9)}
    engines = build(folders, cases)
    assert [engine is not None for engine in engines.values()] == [True, rank == 1]
    for name, found in train(engines, 1).items():
        assert not name.endswith("grad_norm") or found == pytest.approx(norms[name], rel=2e-5), name
    actor = engines["actor"].groups.collection.tp.size()
    assert actor == 2 and (rank == 0 or engines["critic"].groups.collection.tp.size() == 1)


def test_a_critic_need_not_have_the_actors_layout(tmp_path: Path) -> None:
    """The critic took over the actor's GPUs and its sizes of tensor, pipeline and context parallelism, whatever its own
    model needs. Here they differ, and each has Hugging Face's gradient.

    https://github.com/radixark/miles/pull/1735
    """
    folders = {name: hf_folder(tmp_path / name, "qwen2") for name in ("actor", "critic")}
    with_score(folders["critic"])
    found = {name: hf_train(folder, name, None, num_steps=1, lengths=LENGTHS) for name, folder in folders.items()}
    run_ranks(2, check_layouts, folders, {f"{name}/grad_norm": one["grad_norms"][0] for name, one in found.items()})


def step_sizes(rank: int, world_size: int, folder: Path) -> None:
    """Adam's first steps on the same rows move the head by about the learning rate, or not at all."""
    warming = OPTIM.model_copy(update={"lr_warmup_steps": 4, "clip_grad": 0.0, "eps": 1e-12})
    engines = build({"critic": folder}, {"critic": Case(Layout((0,)), optim=warming)})
    head, rates, moved = weights(engines, {"critic": folder})[f"critic/{VALUE_HEAD}"], [], []
    for _ in range(4):
        rates.append(train(engines, 1)["critic/lr"])
        after = weights(engines, {"critic": folder})[f"critic/{VALUE_HEAD}"]
        moved.append(float((after - head).abs().max()))
        head = after
    assert rates == pytest.approx([OPTIM.lr * step / 4 for step in range(4)])
    assert moved == pytest.approx(rates, rel=0.3), "a schedule that is ignored moves it by OPTIM.lr each time"


def test_the_learning_rate_that_is_logged_is_the_optimizers(tmp_path: Path) -> None:
    """The critic's scheduler was built, but its optimizer did not use it: no warm-up and no decay, whatever was logged.

    https://github.com/NVIDIA-NeMo/RL/pull/2530 (found in review)
    """
    run_ranks(1, step_sizes, hf_folder(tmp_path / "hf", "qwen2"))


def rows_of(scores: list[float], values: list[list[float]]) -> Rows:
    """Return rows of two tokens, of which the second of odd rows is padding that is far away."""
    mask = torch.ones(len(scores), 2)
    mask[1::2, 1] = 0.0
    returns = torch.tensor(scores)[:, None].expand(-1, 2)
    far = 1000.0 * (1 - mask)
    fields = {"values": torch.tensor(values) + far, "returns": returns - far, "response_mask": mask}
    ids = torch.arange(len(scores))
    fields["scores"] = torch.tensor(scores)
    return Rows(ids, ids, torch.ones_like(ids), mask.sum(1).long(), NO_TOKENS, fields)


def test_explained_variance_is_that_of_all_tokens() -> None:
    """It was the mean over micro-batches, each of which compared with its own mean: where a micro-batch holds the
    responses to one prompt, a critic that knows the prompts looked useless; and padding counted.

    https://github.com/RLinf/RLinf/issues/1247
    """
    easy = rows_of([1.0, 1.0, 0.9, 1.0], [[0.9, 1.0]] * 4)
    hard = rows_of([0.0, 0.1, 0.0, 0.0], [[0.1, 0.0]] * 4)
    parts = [{name: Metric.of(*part) for name, part in value_metrics(rows).items()} for rows in (easy, hard)]
    wrong = statistics.fmean(part["vf_explained_var"].value for part in parts)
    found = reduce_ranks(parts)["vf_explained_var"]
    pairs = [(0.9, 1.0), (1.0, 1.0), (0.9, 1.0), (0.9, 0.9), (1.0, 0.9), (0.9, 1.0)]
    pairs += [(0.1, 0.0), (0.0, 0.0), (0.1, 0.1), (0.1, 0.0), (0.0, 0.0), (0.1, 0.0)]
    residual = statistics.variance(target - value for value, target in pairs)
    expected = 1 - residual / (statistics.variance(target for _, target in pairs) + 1e-5)
    assert found == pytest.approx(expected, abs=1e-6) and found > 0.9 > 0 > wrong


def test_explained_variance_that_falls_is_reported() -> None:
    """It fell from 0.3 to -5 over a run, which went on; nothing but the curve showed it.

    https://github.com/NVIDIA-NeMo/RL/issues/3412
    """
    health = Health({"trainer": {"stop_on": ["explained_variance"]}})
    found = []
    for step, explained in enumerate([0.1, 0.2, 0.3, 0.3, 0.1, -0.2, -0.6, -1.5, -3.0, -5.0], 1):
        metrics = {"critic/vf_explained_var": explained, "reward/score/std": 0.5}
        found += [(finding.rule, step) for finding in health.check(step, metrics)[1]]
    assert found == [("explained_variance", 8)]
    assert health.stop_reason == "trainer.stop_on (explained_variance at step 8)"
