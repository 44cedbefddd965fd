"""Models that start from Megatron folders: the weights are the folder's, a value head that it lacks is new."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layouts import parallel_of
from spawn import run_ranks
from tiny_models import build, hf_folder

from megappo.architecture.families import HeadKind
from megappo.architecture.parsing import read_architecture
from megappo.checkpoint.component_folder import load_initial
from megappo.checkpoint.folders import CheckpointError
from megappo.checkpoint.metadata import read_component
from megappo.checkpoint.sharded import save_sharded
from megappo.config.methods import ValueSupport
from megappo.config.sections import Model
from megappo.models.gpt import ModelChunks, build_model
from megappo.models.sharding import sharded_chunks
from megappo.placement.groups import ComponentGroups, build_groups
from megappo.placement.layout import Layout


def save(chunks: ModelChunks, groups: ComponentGroups, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    dist.barrier()
    save_sharded({"model": sharded_chunks(chunks, groups)}, folder, groups.as_world)
    return folder


def check_starts(rank: int, world_size: int, model: Path, folder: Path) -> None:
    layouts = {"tensor": Layout((0, 1), tensor=2), "pipeline": Layout((0, 1), pipeline=2)}
    groups = build_groups(layouts, seed=0)

    def built(layout: str, head: HeadKind) -> ModelChunks:
        return build(model, parallel_of(layouts[layout]), groups[layout], head=head)

    def started(layout: str, head: HeadKind, source: Path) -> ModelChunks:
        chunks = built(layout, head)
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data.fill_(9.0)
        load_initial(chunks, groups[layout], source, read_component(source), read_architecture(model, head), seed=0)
        return chunks

    policy = built("tensor", "policy")
    saved = save(policy, groups["tensor"], folder / "policy")
    for head in ("policy", "value", "policy_value"):
        found, expected = (
            dict(chunk.named_parameters()) for chunk in (*started("pipeline", head, saved), *built("pipeline", head))
        )
        assert found.keys() == expected.keys()
        for name, parameter in found.items():
            assert torch.equal(parameter, expected[name]), (head, name)
    critic = save(started("pipeline", "value", saved), groups["pipeline"], folder / "value")
    with pytest.raises(CheckpointError, match="holds a value model, but a policy model is trained"):
        started("tensor", "policy", critic)
    next(iter(policy[0].parameters())).data[0, 0] = torch.nan
    broken = save(policy, groups["tensor"], folder / "broken")
    with pytest.raises(CheckpointError, match=f"weight in {broken} holds values that are not finite"):
        started("tensor", "policy", broken)


def test_every_head_starts_from_a_language_model(tmp_path: Path) -> None:
    run_ranks(2, check_starts, hf_folder(tmp_path / "model", "qwen2", tie_word_embeddings=False), tmp_path)


CLASSES = ValueSupport(3, (0.0, 0.5, 1.0))
OTHERS = (None, ValueSupport(3), ValueSupport(3, (0.0, 1.0, 2.0)), ValueSupport(5))


def check_outputs(rank: int, world_size: int, model: Path, folder: Path) -> None:
    """All weights of the critic that is saved are 9."""
    layout = Layout((0, 1), tensor=2)
    groups = build_groups({"critic": layout}, seed=0)["critic"]

    def started(source: Path | None, support: ValueSupport | None, stored: ValueSupport | None = None) -> ModelChunks:
        architecture = replace(read_architecture(model, "value"), support=support, stored_support=stored)
        settings = Model(path=str(model), dtype="fp32")
        chunks = build_model(architecture, settings, parallel_of(layout), groups, recompute="none", trained=True)
        for parameter in chunks[0].parameters():
            parameter.data.fill_(0.0 if source else 9.0)
        if source:
            load_initial(chunks, groups, source, read_component(source), architecture, seed=0)
        return chunks

    step, alone = folder / "step_00000002", folder / "alone"
    if rank == 0:
        step.mkdir()
        (step / "state.json").write_text(json.dumps({"step": 2, "value_supports": {"critic": asdict(CLASSES)}}))
    critic = started(None, CLASSES)
    for place in (step / "critic", alone):
        dist.barrier()
        save(critic, groups, place)
    assert torch.equal(started(step / "critic", CLASSES)[0].output_layer.weight, critic[0].output_layer.weight)
    assert torch.equal(started(alone, CLASSES, CLASSES)[0].output_layer.weight, critic[0].output_layer.weight)
    for support in OTHERS:
        [found] = started(step / "critic", support)
        assert 0 < found.output_layer.weight.std() < 1, "drawn"
        assert (found.decoder.final_layernorm.weight == 9.0).all()


def test_a_value_head_of_other_outputs_is_new(tmp_path: Path) -> None:
    run_ranks(2, check_outputs, hf_folder(tmp_path / "model", "qwen2", tie_word_embeddings=False), tmp_path)
