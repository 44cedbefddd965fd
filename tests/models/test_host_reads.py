"""Waits of the GPU for the host in a training step: none in heads and losses, nor in TransformerEngine's dense
layers; elsewhere a number per layer that must not grow."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from host_reads import host_reads
from ppo_engines import Case, make_engine, make_loss, make_rows
from spawn import run_ranks
from tiny_models import VOCAB_SIZE, hf_folder, hf_model
from tiny_shapes import MIXTURES, SHAPE, TWO_LAYERS
from transformer_engine_stub import call

from megappo.batch.packing import pack
from megappo.batch.rows import Rows
from megappo.config.methods import POLICY_LOSSES
from megappo.config.schema import Config
from megappo.models.heads import output_weight, policy_head, value_head
from megappo.models.vocab_parallel import LogitFactors
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout
from megappo.ppo.conventions import KL_KINDS, PRESETS
from megappo.ppo.reductions import AGGREGATIONS
from megappo.trainer.objectives import SELECTED, ActorLoss, critic_loss

CASES = ((2, "none", 1), (4, "none", 1), (2, "full", 2))
"""Layers, recomputation, and so how often the layers are passed forwards."""
CPU = torch.device("cpu")
HIDDEN = SHAPE["hidden_size"]
SECTIONS = {"model": {"path": "m"}, "data": {"train_files": ["f"]}, "trainer": {"output_dir": "o"}}
KL_LOSS = {"use_kl_loss": True, "kl_loss_coef": 0.1}
ACTORS = {
    **{loss: {"policy_loss": loss} for loss in POLICY_LOSSES},
    **{f"KL {kind}": {**KL_LOSS, "kl_loss_type": kind} for kind in (*KL_KINDS, "full")},
    **{mode: {"loss_agg_mode": mode} for mode in AGGREGATIONS},
    "unbiased KL, entropy, masked sequences, positive examples": {
        **KL_LOSS,
        "kl_loss_unbiased": True,
        "entropy_coeff": 0.1,
        "opsm_delta": 1e-4,
        "positive_nll_coef": 0.1,
    },
}
CRITICS = {"squared": {}, "huber": {"huber_delta": 0.3, "value_clip": None}}

DENSE = dict.fromkeys(("llama", "qwen2", "qwen3"), TWO_LAYERS)
IN_TORCH = {**dict.fromkeys(DENSE, 0), **dict.fromkeys(MIXTURES, 11)}
IN_TRANSFORMER_ENGINE = {**dict.fromkeys(DENSE, 0), **dict.fromkeys(MIXTURES, 1), "deepseek_v2": 5, "deepseek_v3": 5}
"""Reads of a layer in a pass of `make_rows`, which have five different lengths, at most; the backward pass has none.
Dense layers of torch's read the lengths of a pack once for all of them. Latent attention rotates without a fused
kernel. Where a mixture copies counts to the host on a stream of its own, on a GPU alone, that comes on top."""


FAMILIES = pytest.mark.parametrize(
    "families", [DENSE, pytest.param(MIXTURES, marks=pytest.mark.slow)], ids=["dense", "mixtures"]
)


def rows_with_all_fields() -> Rows:
    rows = make_rows(VOCAB_SIZE)
    ones = torch.ones_like(rows.fields["values"])
    more = {"ref_log_probs": -ones, "rollout_is_weights": ones, SELECTED: ones, "turns": ones, "scores": ones[:, 0]}
    return replace(rows, fields=rows.fields | more)


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_no_loss_reads_from_the_device(preset: str | None) -> None:
    rows = rows_with_all_fields()
    names = ("log_probs", "entropy", "full_kl", "values")
    outputs = {name: torch.randn(rows.response_mask.shape, requires_grad=True) for name in names}
    for shared in (False, True):
        parts = SECTIONS | {"algorithm": {"preset": preset, "shared_backbone": shared}}
        losses = {
            **{name: ActorLoss(Config.model_validate(parts | {"actor": keys}), 7, 3) for name, keys in ACTORS.items()},
            **{
                name: critic_loss(Config.model_validate(parts | {"critic": keys}), 7, 3)
                for name, keys in CRITICS.items()
            },
        }
        for name, loss in losses.items():
            assert not (found := host_reads(lambda loss=loss: loss(outputs, rows)[0])), (name, found)


def check_heads(rank: int, world_size: int) -> None:
    packed = pack(make_rows(VOCAB_SIZE), 1, CPU)
    num_tokens = packed.input_ids.shape[1]
    ref_hidden, weight = torch.randn(num_tokens, HIDDEN), torch.randn(VOCAB_SIZE, HIDDEN)
    reference = LogitFactors(ref_hidden, weight)
    policy = policy_head(lambda: weight, dist.group.WORLD, VOCAB_SIZE, 0.7, lambda packed: reference)
    for head, width in ((policy, HIDDEN), (value_head(bootstrap=True), 1)):
        output = torch.randn(1, num_tokens, width, requires_grad=True)
        found = host_reads(lambda head=head, output=output: sum(one.sum() for one in head(output, packed).values()))
        assert not found, found


def test_no_head_reads_from_the_device() -> None:
    run_ranks(1, check_heads)


def make_models(root: Path, families: Iterable[str]) -> Path:
    for family in families:
        for num_layers in (2, 4):
            changes = {**(DENSE | MIXTURES)[family], "num_hidden_layers": num_layers}
            hf_folder(root / family / str(num_layers), family, **changes)
    return root


def check_layers(root: Path, at_most: dict[str, int], outputs_too: bool) -> None:
    groups = build_groups({"actor": Layout((0,))}, seed=0)["actor"]
    rows = make_rows(VOCAB_SIZE)
    packed = pack(rows, 1, CPU)
    for family, (num_layers, recompute, passes) in product(at_most, CASES):
        folder = root / family / str(num_layers)
        engine = make_engine(folder, Case(Layout((0,)), recompute=recompute), groups, "actor")
        engine.wrapped_chunks[0].train()
        outputs = []

        def compute(engine=engine, outputs=outputs) -> torch.Tensor:
            outputs.append(engine._output(packed, engine.wrapped_chunks[0]))
            return outputs[0]

        with groups.active():
            found = host_reads(compute)
        assert found.total() <= at_most[family] * num_layers * passes, (family, num_layers, recompute, found)
        if outputs_too:
            with torch.no_grad():
                expected = torch.cat([hf_model(folder)(tokens[None]).logits[0] for tokens in rows.sequences])
            logits = outputs[0][0].detach() @ output_weight(engine.chunks[-1]).detach().T
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def check_torch(rank: int, world_size: int, root: Path, at_most: dict[str, int]) -> None:
    check_layers(root, at_most, outputs_too=False)


@FAMILIES
def test_layers_of_torchs_read_no_more_often_than_stated(families: dict, tmp_path: Path) -> None:
    at_most = {family: IN_TORCH[family] for family in families}
    run_ranks(1, check_torch, make_models(tmp_path, families), at_most)


def check_transformer_engine(root: str, *families: str) -> None:
    from transformer_engine_computed import compute

    compute()
    at_most = {family: IN_TRANSFORMER_ENGINE[family] for family in families}
    check_layers(Path(root), at_most, outputs_too=True)


@pytest.mark.slow  # TransformerEngine's layers in place of the test before, in a process of their own
@pytest.mark.xdist_group("transformer_engine")
@FAMILIES
def test_layers_of_transformer_engines_read_no_more_often_than_stated(families: dict, tmp_path: Path) -> None:
    call(check_transformer_engine, make_models(tmp_path, families), *families)


STAGES = {
    "pp2": Case(Layout((0, 1), pipeline=2)),
    "pp2, several micro-batches": Case(Layout((0, 1), pipeline=2), max_tokens=12),
    "pp2, recomputed": Case(Layout((0, 1), pipeline=2), recompute="full"),
    "tp2": Case(Layout((0, 1), tensor=2)),
    "cp2": Case(Layout((0, 1), context=2)),
    "dp2": Case(Layout((0, 1))),
}


def count_synchronizations(rank: int, world_size: int, folder: Path, cases: dict[str, Case]) -> None:
    """Each waits for all that the GPU has been given: no message between ranks may need one."""
    counted: list[str] = []
    with patch.object(torch.cuda, "synchronize", lambda device=None: counted.append("")):
        for name, case in cases.items():
            groups = build_groups({"actor": case.layout}, seed=0)["actor"]
            engine = make_engine(folder, case, groups, "actor")
            rows = make_rows(VOCAB_SIZE).select([0, 1, 2, 3])
            engine.forward(rows)
            engine.train_batch(rows, make_loss("actor", rows))
            assert not counted, (name, len(counted))
    assert engine.transformer_config.batch_p2p_sync is False


def test_no_pass_waits_for_the_whole_gpu(tmp_path: Path) -> None:
    run_ranks(2, count_synchronizations, hf_folder(tmp_path, "qwen2", num_hidden_layers=4), STAGES)
