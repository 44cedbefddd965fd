"""Critics of an ensemble: which responses each trains on, the mean and the deviation of their values, the masks."""

import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ppo_engines import SPEC, at_owners, make_config, make_rows
from recorder import recorder_in
from spawn import run_ranks
from tiny_models import hf_folder

from megappo.batch.exchange import Exchange
from megappo.batch.rows import Rows
from megappo.config.checks import config_errors
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config
from megappo.placement.components import components_of, exported
from megappo.placement.layout import Layout
from megappo.placement.model_lines import models_in_words
from megappo.placement.run_plan import plan_run
from megappo.preflight.output_folder import resume_errors
from megappo.recipes.ppo import ppo_step, sample_experience
from megappo.trainer.component_batch import Component, shards_of
from megappo.trainer.models import architecture_of
from megappo.trainer.objectives import ActorLoss
from megappo.trainer.run import Run
from megappo.weights.export import Export

MASKS = {
    "actor": {"entropy_coeff": 0.1},
    "algorithm": {"mask_agreed": 0.3, "mask_disputed": 0.2, "whiten_advantages": False, "bootstrap_truncated": True},
}

# --- responses ---

PROMPTS, RESPONSES, SEGMENTS = 6, 3, (2, 1, 1)
"""Segments of each of a prompt's episodes."""


def episodes(rows: Rows) -> Rows:
    """Return the rows as the segments of episodes, the last one first."""
    of_prompt = [float(one) for one, num in enumerate(SEGMENTS) for _ in range(num)]
    return replace(rows, fields=rows.fields | {"episodes": torch.tensor(of_prompt * PROMPTS)})


def check_responses(rank: int, world_size: int, members: int, has_episodes: bool) -> None:
    exchange = Exchange(dist.group.WORLD)
    per_prompt = sum(SEGMENTS) if has_episodes else RESPONSES
    lengths = [(1 + i % 3, 1 + i * 7 % 9) for i in range(PROMPTS * per_prompt)]
    every = make_rows(91, lengths, per_prompt)
    every = episodes(every) if has_episodes else every
    batch = at_owners(exchange, every)
    layout = Layout(tuple(range(world_size)))
    trained_by = defaultdict(list)
    for member in range(members):
        spec = replace(SPEC, member=member, members=members)
        scattered = Component("critic", spec, layout, exchange).scatter(batch, 2)
        assert sorted(row for part in shards_of(scattered.split) for row in part) == list(range(len(every)))
        for whole, own in zip(scattered.split, scattered.trained, strict=True):
            assert all(len(part) and shard[: len(part)] == part for shard, part in zip(whole, own, strict=True))
            sizes = [sum(int(every.lengths[row]) for row in part) for part in own]
            assert max(sizes) - min(sizes) <= max(map(sum, lengths)), "balanced by tokens"
        parts = scattered.mini_batches()
        for (rows, num_tokens, num_rows), own in zip(parts, scattered.trained, strict=True):
            assert rows.ids.tolist() == list(own[rank])
            assert num_rows == sum(map(len, own))
            assert num_tokens == sum(int(every.response_mask[row].sum()) for part in own for row in part)
        for row in sorted(row for part in shards_of(scattered.trained) for row in part):
            trained_by[row].append(member)
    critics: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for row, [member] in trained_by.items():
        critics[row // per_prompt][int(every.fields["episodes"][row]) if has_episodes else row].add(member)
    assert len(trained_by) == len(every) and len(critics) == PROMPTS
    for of_response in critics.values():
        assert all(len(one) == 1 for one in of_response.values()), "a response is one critic's"
        counts = Counter(chain.from_iterable(of_response.values()))
        assert len(counts) == members and max(counts.values()) - min(counts.values()) <= 1, "each has its part"


@pytest.mark.parametrize(("members", "has_episodes"), [(2, False), (3, True)])
def test_each_response_is_trained_on_by_one_critic(members: int, has_episodes: bool) -> None:
    run_ranks(2, check_responses, members, has_episodes)


# --- a step ---


def config_of(bench: ModuleType, folder: Path, *changes: dict) -> Config:
    return Config.model_validate(bench.merged(bench.settings(folder), {"placement": {"rollout": "all"}}, *changes))


def by_loop(stds: torch.Tensor, mask: torch.Tensor, share: float, *, highest: bool) -> torch.Tensor:
    """Return 1 on the tokens that, with all that are as low or high, are no more than the share."""
    found = torch.zeros_like(mask)
    tokens = [(row, i) for row, i in mask.nonzero().tolist()]
    numbers = [-float(stds[token]) if highest else float(stds[token]) for token in tokens]
    for token, own in zip(tokens, numbers, strict=True):
        found[token] = sum(number <= own for number in numbers) <= share * len(numbers)
    return found


def check_step(rank: int, world_size: int, folder: Path) -> None:
    bench = recorder_in(folder)
    shared = {"critic": {"ensemble": 3, "parallel": {"tensor": 2}}}
    run = bench.build(config_of(bench, folder, MASKS, shared))
    experience, _ = sample_experience(run, 1)
    no_masks = {"algorithm": {"mask_agreed": 0.0, "mask_disputed": 0.0}}
    unmasked, _ = sample_experience(bench.build(config_of(bench, folder, MASKS, shared, no_masks)), 1)
    rows, plain = (one.batch.at_rank_0(run.exchange) for one in (experience, unmasked))
    if rank == 0:
        fields, mask = rows.fields, rows.response_mask
        for name in ("values", "bootstrap_values"):
            of_critics = np.stack([fields[f"{name}_{number}"].numpy() for number in (1, 2, 3)])
            np.testing.assert_allclose(fields[name].numpy(), of_critics.mean(axis=0), atol=1e-6)
            if name == "values":
                np.testing.assert_allclose(fields["value_std"].numpy(), of_critics.std(axis=0), atol=1e-6)
        stds = fields["value_std"]
        assert stds[mask.bool()].min() > 0, "the heads differ"
        agreed = by_loop(stds, mask, 0.3, highest=False)
        assert torch.equal(fields["agreed"], agreed)
        assert torch.equal(fields["disputed"], by_loop(stds, mask, 0.2, highest=True))
        assert torch.equal(fields["advantages"], plain.fields["advantages"] * (1 - agreed))
        found = experience.metrics["critic/ensemble_std/mean"]
        assert found == pytest.approx(float(stds[mask.bool()].mean()), rel=1e-5)
        assert experience.metrics["critic/agreed_frac"] == pytest.approx(float(agreed.sum() / mask.sum()), abs=1e-6)
    metrics = ppo_step(run, 1)
    assert run.models.trained.keys() == {"actor", "critic", "critic_2", "critic_3"}
    losses = {metrics[f"{name}/vf_loss"] for name in ("critic", "critic_2", "critic_3")}
    assert len(losses) == 3 and metrics["critic_3/num_optimizer_steps"] == 2
    assert run.phase.timers.lap().keys() >= {"timing_s/values_2", "timing_s/update_critic_3"}


def test_a_step_with_three_critics(tmp_path: Path) -> None:
    run_ranks(2, check_step, tmp_path)


def test_the_entropy_bonus_has_no_gradient_where_critics_disagree() -> None:
    config, rows = make_config("actor"), make_rows(91)
    disputed = (torch.arange(rows.max_response_length) % 2).float().expand_as(rows.response_mask)
    gradients = []
    for fields in (rows.fields, rows.fields | {"disputed": disputed}):
        entropy = torch.ones_like(rows.response_mask).requires_grad_()
        outputs = {"log_probs": rows.old_log_probs, "entropy": entropy}
        loss, metrics = ActorLoss(config, int(rows.response_mask.sum()), len(rows))(
            outputs, replace(rows, fields=fields)
        )
        loss.backward()
        gradients.append((entropy.grad, metrics["actor/entropy"].part))
    (whole, metric), (found, same) = gradients
    assert whole.any() and torch.equal(found, whole * (1 - disputed)) and torch.equal(metric, same)


# --- a critic alone ---


def weights_of(run: Run, name: str) -> dict[str, torch.Tensor]:
    engine = run.models.components[name].engine
    export = Export(engine.chunks, architecture_of(run.models.specs[name]), engine.groups)
    return {key: weight.clone() for bucket in export.buckets(2**20) for key, weight in bucket}


def check_alone(rank: int, world_size: int, folder: Path) -> None:
    """Each critic's weights after a step are a critic's that is built with its seed and gets its rows alone."""
    bench = recorder_in(folder)
    run = bench.build(config_of(bench, folder, {"critic": {"ensemble": 2, "ppo_epochs": 2}}))
    experience, shards = sample_experience(run, 1)
    run.models.scatter_fields(shards, experience.batch, 1)
    rows = experience.batch.rows
    for member, name in enumerate(("critic", "critic_2")):
        alone = bench.build(config_of(bench, folder, {"critic": {"ppo_epochs": 2}, "trainer": {"seed": member}}))
        before = weights_of(alone, "critic")
        assert all(torch.equal(before[key], weight) for key, weight in weights_of(run, name).items())
        own = rows.select(range(member, len(rows), 2))
        fields = {field: own.fields[field] for field in ("returns", "response_mask")}
        own = replace(own, fields=fields | {"values": own.fields[f"values_{member + 1}"]})
        batch = alone.exchange.number(own)
        shard = alone.models.components["critic"].scatter(batch, 2)
        shard.scatter_fields(batch, ["values", "returns"])
        alone.models.update("critic", {"critic": shard}, 1)
        run.models.update(name, shards, 1)
        after = weights_of(alone, "critic")
        assert all(torch.equal(after[key], weight) for key, weight in weights_of(run, name).items())
        assert not torch.equal(after["score.weight"], before["score.weight"])
        [one], [other] = ([step.grad_norm for step in part.optimizer_steps[:1]] for part in (shard, shards[name]))
        assert one == other > 0


def test_each_critic_learns_what_a_lone_one_learns_from_its_rows(tmp_path: Path) -> None:
    run_ranks(1, check_alone, tmp_path)


# --- config ---


def keys_of(**sections: dict) -> Config:
    required = {"model": {"path": "m"}, "data": {"train_files": ["f"]}, "trainer": {"output_dir": "o"}}
    return Config.model_validate(required | {"rollout": {"n": 4}, "critic": {"ensemble": 2}} | sections)


REFUSED = {
    "critic.ensemble 8 critics divide the responses to each prompt, of which there are 4": {"critic": {"ensemble": 8}},
    "critic.ensemble 2 has no effect, as this run builds no critic": {"algorithm": {"shared_backbone": True}},
    "critic.ensemble 2 has no effect, as trainer.train": {"trainer": {"output_dir": "o", "train": ["actor"]}},
    "algorithm.mask_agreed 0.2 has no effect": {"critic": {}, "algorithm": {"mask_agreed": 0.2}},
    "algorithm.mask_disputed 0.2 has no effect, as actor.entropy_coeff is 0": {"algorithm": {"mask_disputed": 0.2}},
    "critic.ppo_mini_batch_size 1 x rollout.n 4 = 4 trajectories / critic.ensemble 2 = 2 are fewer than": {
        "critic": {"ensemble": 2, "ppo_mini_batch_size": 1}
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_go_together_is_refused(message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_run(keys_of(**REFUSED[message]), 4)
    assert [error for error in raised.value.errors if error.startswith(message)] != [], raised.value.errors


def test_critics_are_equal_except_for_their_part() -> None:
    config = keys_of(critic={"ensemble": 3, "lora": {"rank": 2}})
    specs = components_of(config)
    assert config_errors(config) == [] and exported(specs) == ("actor", "critic", "critic_2", "critic_3")
    assert [specs[name].base for name in exported(specs)] == [None, None, "critic", "critic"], (
        "frozen weights are shared"
    )
    assert [specs[name].member for name in exported(specs)[1:]] == [0, 1, 2]
    files = {"trainer": {"output_dir": "o", "kind": "critic"}, "rollout": {}}
    assert [*components_of(keys_of(**files))] == ["critic", "critic_2"]


def test_a_checkpoint_of_more_critics_is_refused(tmp_path: Path) -> None:
    parts = {"model": {"path": str(hf_folder(tmp_path / "hf", "qwen2"))}, "trainer": {"output_dir": str(tmp_path)}}
    checkpoint = tmp_path / "checkpoints" / "step_00000001"
    checkpoint.mkdir(parents=True)
    checkpoint.with_name("latest").write_text("step_00000001\n")
    saved = models_in_words(keys_of(critic={"ensemble": 3}, **parts))
    (checkpoint / "state.json").write_text(json.dumps({"step": 1, "models": saved}))
    assert resume_errors(keys_of(critic={"ensemble": 3}, **parts)) == []
    [error] = resume_errors(keys_of(**parts))
    assert "critic_3 (" in error.partition("but this run has")[0] and "critic.ensemble" in error
