"""Several components with their own layouts in one world: groups, contexts, and training against Hugging Face."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.parallel_state import (
    RankGenerator,
    default_embedding_ranks,
    default_position_embedding_ranks,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from spawn import run_ranks
from tiny_models import hf_folder
from tiny_training import Trained, Trainee, check_outputs, reference
from torch.testing._internal.distributed.fake_pg import FakeStore

from megappo.lab.estimate.gpu_memory import _communicators
from megappo.placement.groups import ComponentGroups, build_groups
from megappo.placement.layout import EXPERT_GROUPS, GROUPS, Layout, num_groups, rank_groups
from megappo.runtime import platform

NUM_STEPS = 2


def _groups_of_every_rank(rank: int, world_size: int) -> None:
    layouts = {"actor": Layout((0, 1, 2, 3), tensor=2), "critic": Layout((1, 3), pipeline=2)}
    groups = build_groups(layouts, seed=0)
    actor = groups["actor"].collection
    expected = {"tp": rank // 2 * 2 + torch.arange(2), "dp": rank % 2 + 2 * torch.arange(2), "pp": [rank]}
    for name, ranks in expected.items():
        assert dist.get_process_group_ranks(getattr(actor, name)) == [int(i) for i in ranks], name
    assert dist.get_process_group_ranks(actor.intra_dist_opt) == [0, 1, 2, 3]
    assert groups["critic"].member == (rank in (1, 3))
    if not groups["critic"].member:
        with pytest.raises(RuntimeError, match="not among the component's ranks"), groups["critic"].active():
            pass
        return
    critic = groups["critic"].collection
    assert dist.get_process_group_ranks(critic.pp) == [1, 3]
    assert dist.get_process_group_ranks(critic.embd) == [1, 3]
    assert (critic.pos_embd is None) == (rank == 3), "only the first stage has position embeddings"


def test_groups_follow_the_layouts() -> None:
    run_ranks(4, _groups_of_every_rank)


def _context_groups(rank: int, world_size: int) -> None:
    """Eight ranks as 2 tensor x 2 context x 2 data, then x 2 stages instead of data, against the groups by hand."""
    ranks = tuple(range(8))
    layouts = {"data": Layout(ranks, tensor=2, context=2), "stages": Layout(ranks, tensor=2, context=2, pipeline=2)}
    groups = build_groups(layouts | {"experts": Layout(ranks, tensor=2, context=2, expert=4)}, seed=0)
    tensor, context, slowest = rank % 2, rank // 2 % 2, rank // 4
    half = [4 * slowest + i for i in range(4)]
    held_with = [4 * slowest + tensor, 4 * slowest + tensor + 2]
    shared = {"tp": [4 * slowest + 2 * context, 4 * slowest + 2 * context + 1], "cp": held_with, "tp_cp": half}
    peers = [rank % 4, rank % 4 + 4]
    expected = {
        "data": {"dp": peers, "dp_cp": [tensor, tensor + 2, tensor + 4, tensor + 6], "pp": [rank]},
        "stages": {"dp": [rank], "dp_cp": held_with, "pp": peers},
        "experts": {"ep": half, "expt_dp": peers, "tp_dp_cp": [*ranks]},
    }
    expected["stages"]["mp"] = [2 * context, 2 * context + 1, 2 * context + 4, 2 * context + 5]
    for name, named in expected.items():
        for field, members in (shared | named | {"intra_dist_opt": [*ranks]}).items():
            assert dist.get_process_group_ranks(getattr(groups[name].collection, field)) == members, (name, field)
    with groups["data"].active():
        assert parallel_state.get_context_parallel_world_size() == 2
        assert parallel_state.get_context_parallel_rank() == context


def test_context_comes_between_tensor_and_data() -> None:
    run_ranks(8, _context_groups)


def _expert_groups(rank: int, world_size: int) -> None:
    """Eight ranks as 2 tensor x 2 data x 2 stages, with and without experts shared out and cut, by hand."""
    layouts = {
        f"{expert} x {ways}": Layout(tuple(range(8)), tensor=2, pipeline=2, expert=expert, expert_tensor=ways)
        for expert, ways in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4))
    }
    groups = build_groups(layouts, seed=0)
    first, place = rank // 4 * 4, rank % 4
    stage = range(first, first + 4)
    neighbours = [first + place // 2 * 2, first + place // 2 * 2 + 1]
    apart = [first + place % 2, first + place % 2 + 2]
    expected = {
        "1 x 1": {"expt_tp": [rank], "ep": [rank], "tp_ep": [rank], "expt_dp": [*stage]},
        "2 x 1": {"expt_tp": [rank], "ep": neighbours, "tp_ep": neighbours, "expt_dp": apart},
        "4 x 1": {"expt_tp": [rank], "ep": [*stage], "tp_ep": [*stage], "expt_dp": [rank]},
        "1 x 2": {"expt_tp": neighbours, "ep": [rank], "tp_ep": neighbours, "expt_dp": apart},
        "2 x 2": {"expt_tp": neighbours, "ep": apart, "tp_ep": [*stage], "expt_dp": [rank]},
        "1 x 4": {"expt_tp": [*stage], "ep": [rank], "tp_ep": [*stage], "expt_dp": [rank]},
    }
    for layout, named in expected.items():
        pipelines = sorted(other + offset for other in named["tp_ep"] for offset in (-first, 4 - first))
        for name, ranks in (named | {"tp_ep_pp": pipelines}).items():
            found = dist.get_process_group_ranks(getattr(groups[layout].collection, name))
            assert found == ranks, (layout, name)


def test_experts_are_shared_out_over_runs_of_a_stages_ranks() -> None:
    run_ranks(8, _expert_groups)


def _contexts(rank: int, world_size: int) -> None:
    layouts = {"actor": Layout((0, 1), tensor=2), "critic": Layout((0, 1), pipeline=2), "alone": Layout((1,))}
    groups = build_groups(layouts, seed=0)
    actor, critic = groups["actor"], groups["critic"]
    assert not parallel_state.model_parallel_is_initialized()
    with actor.active():
        assert parallel_state.get_tensor_model_parallel_world_size() == 2
        with critic.active(), critic.active():
            assert parallel_state.get_tensor_model_parallel_world_size() == 1
            assert parallel_state.is_pipeline_last_stage() == (rank == 1)
        assert parallel_state.get_tensor_model_parallel_world_size() == 2
    assert not parallel_state.model_parallel_is_initialized()
    with pytest.raises(ZeroDivisionError), actor.active():
        1 / 0  # noqa: B018
    assert not parallel_state.model_parallel_is_initialized(), "an error left the component's globals behind"
    if rank == 1:
        with groups["alone"].as_world():
            assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
            assert dist.get_process_group_ranks(groups["alone"].collection.tp) == [0]
            dist.broadcast_object_list([0], src=0)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
    assert dist.get_process_group_ranks(dist.group.WORLD) == [0, 1]


def test_contexts_nest_and_restore_what_was_there() -> None:
    run_ranks(2, _contexts)


def _disjoint_worlds(rank: int, world_size: int) -> None:
    layouts = {"actor": Layout((0, 1)), "critic": Layout((2, 3), tensor=2)}
    groups = build_groups(layouts, seed=0)["actor" if rank < 2 else "critic"]
    with groups.as_world():
        members: list = [None, None]
        dist.all_gather_object(members, rank)
        assert members == ([0, 1] if rank < 2 else [2, 3])
        assert dist.get_rank() == rank % 2
        subgroup = groups.collection.dp if rank < 2 else groups.collection.tp
        assert dist.get_rank(subgroup) == rank % 2
        value = torch.tensor([rank])
        dist.broadcast(value, src=dist.get_global_rank(subgroup, 1), group=subgroup)
        assert value.item() == (1 if rank < 2 else 3)


def test_each_component_is_a_world_of_its_own() -> None:
    run_ranks(4, _disjoint_worlds)


def _draw(groups: ComponentGroups) -> tuple[float, float]:
    with groups.active():
        replicated = torch.rand(1, device=platform.device()).item()
        with get_cuda_rng_tracker().fork():
            return replicated, torch.rand(1, device=platform.device()).item()


def _random_streams(rank: int, world_size: int) -> None:
    layout = Layout((0, 1), tensor=2)
    alone = build_groups({"actor": layout}, seed=5)["actor"]
    expected = [_draw(alone) for _ in range(3)]
    groups = build_groups({"actor": layout, "critic": layout}, seed=5)
    drawn = []
    for _ in range(3):
        drawn.append(_draw(groups["actor"]))
        torch.rand(7, device=platform.device())
        outside = torch.cuda.get_rng_state()
        _draw(groups["critic"])
        assert torch.equal(torch.cuda.get_rng_state(), outside), "a component's draws moved the stream outside"
    assert drawn == expected, "another component's draws moved this one's stream"
    assert len(set(drawn)) == 3
    others: list = [None, None]
    dist.all_gather_object(others, drawn)
    assert [pair[0] for pair in others[0]] == [pair[0] for pair in others[1]], "outside tensor-parallel regions: equal"
    assert others[0][0][1] != others[1][0][1], "inside tensor-parallel regions: different"


def test_components_keep_their_own_random_streams() -> None:
    run_ranks(2, _random_streams)


def _made(patch: pytest.MonkeyPatch, layouts: dict[str, Layout], rank: int, world_size: int) -> dict[tuple, str]:
    """The groups that one rank of a large world makes, and their backends; its peers are not there."""
    made, new_group = {}, dist.new_group

    def record(ranks: list[int], *, backend: str, **options: object) -> dist.ProcessGroup:
        assert tuple(ranks) not in made, "made twice"
        made[tuple(ranks)] = backend
        return new_group(ranks, **options)

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    patch.setattr(dist, "new_group", record)
    build_groups(layouts, seed=0)
    patch.setattr(dist, "new_group", new_group)
    return made


def _backends(rank: int, world_size: int) -> None:
    everyone = tuple(range(4096))
    dense = {"actor": Layout(everyone, tensor=8, pipeline=8), "critic": Layout(everyone, tensor=4, pipeline=2)}
    with pytest.MonkeyPatch.context() as patch:
        assert set(_made(patch, {"actor": Layout((0, 1), tensor=2)}, 0, 2).values()) == {"gloo"}
        patch.setattr(platform, "has_cuda", lambda: True)
        patch.setattr(platform, "device", lambda: torch.device("cpu"))
        first, second = (_made(patch, dense, member, 4096) for member in (0, 1500))
        assert first == second, "ranks disagree on the groups, or on their order"
        assert list(first) == list(second)
        sockets = [group for group, backend in first.items() if "gloo" in backend and 0 in group]
        assert sorted(map(len, sockets)) == [64, 512], "data-parallel shards of the actor, and of the critic"
        shared_out = {"actor": Layout(tuple(range(8)), tensor=2, expert=4), "critic": Layout((0, 1), tensor=2)}
        made = _made(patch, shared_out, 0, 16)
    mixed, nccl = "cpu:gloo,cuda:nccl", "nccl"
    expected = {tuple(range(8)): mixed, (0, 2, 4, 6): mixed, (0, 4): mixed}  # all; shards of weights; and of experts
    expected |= {(2, 3): nccl, (0, 1, 2, 3): nccl}  # the actor's tensor and expert parallelism
    assert made.items() >= (expected | {(0, 1): mixed}).items(), "two that the actor cuts tensors over are a critic"


def test_on_gpus_only_groups_that_the_host_speaks_over_have_sockets() -> None:
    run_ranks(1, _backends)


def _connected(rank: int, world_size: int) -> None:
    reduced, all_reduce = [], dist.all_reduce

    def noted(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        reduced.append(tuple(dist.get_process_group_ranks(group)))
        all_reduce(tensor, group=group)

    dist.all_reduce = noted
    try:
        build_groups({"actor": Layout((0, 1, 2, 3), tensor=2, pipeline=2), "critic": Layout((0, 1), tensor=2)}, seed=0)
    finally:
        dist.all_reduce = all_reduce
    assert reduced == [(rank % 2, rank % 2 + 2)]


def test_only_pipelines_connect_before_they_are_used() -> None:
    run_ranks(4, _connected)


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        (Layout((0,)), 0),
        (Layout(tuple(range(8))), 1),  # the gradients' ranks are the norm's
        (Layout(tuple(range(8)), tensor=8), 1),
        (Layout(tuple(range(8)), tensor=2), 3),
        (Layout(tuple(range(512)), tensor=8, pipeline=2), 4),
        (Layout(tuple(range(16)), tensor=2, context=2, pipeline=2), 5),
    ],
)
def test_the_plan_counts_the_groups_that_are_used(layout: Layout, count: int) -> None:
    assert _communicators(layout) == count


def _count_groups(rank: int, world_size: int, layouts: dict[str, Layout]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        made = []
        new_group = dist.new_group
        patch.setattr(dist, "new_group", lambda *args, **options: made.append(args) or new_group(*args, **options))
        build_groups(layouts, seed=0)
    assert len(made) == num_groups(layouts.values(), world_size)


def test_the_plan_counts_the_groups_of_the_start() -> None:
    both = {"actor": Layout((0, 1, 2, 3), tensor=2, pipeline=2), "critic": Layout((0, 1, 2, 3), expert=2, pipeline=2)}
    run_ranks(4, _count_groups, both | {"ref": Layout((0, 1)), "reward_model": Layout((3,))})


ORDER = "tp-cp-ep-dp-pp"
ARRANGED = [
    {},
    {"tensor": 2, "pipeline": 2, "context": 2},
    {"tensor": 2, "context": 4, "expert": 8},
    {"tensor": 2, "pipeline": 4, "expert": 2, "expert_tensor": 2},
]


@pytest.mark.parametrize("arranged", ARRANGED)
def test_groups_are_those_of_megatron(arranged: dict[str, int]) -> None:
    layout = Layout(tuple(range(1, 48, 3)), **arranged)
    tensor, context, pipeline = layout.tensor, layout.context, layout.pipeline
    dense = RankGenerator(tp=tensor, ep=1, dp=layout.data, pp=pipeline, cp=context, order=ORDER)
    replicas = tensor * context * layout.data // layout.expert // layout.expert_tensor
    ways = layout.expert_tensor
    experts = RankGenerator(tp=ways, ep=layout.expert, dp=replicas, pp=pipeline, cp=1, order=ORDER)
    expected = {
        (name, tuple(layout.ranks[i] for i in places))
        for generator, table in ((dense, GROUPS), (experts, EXPERT_GROUPS))
        for name, dimensions in table.items()
        for places in generator.get_ranks(dimensions)
    }
    for ranks in [list(ranks) for name, ranks in expected if name == "pp"]:
        expected.add(("embd", tuple(default_embedding_ranks(ranks))))
        expected.add(("pos_embd", tuple(default_position_embedding_ranks(ranks))))
    assert set(rank_groups(layout)) == expected


def _misplaced(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="Rank 2 is out of range"):
        build_groups({"critic": Layout((0, 2))}, seed=0)


def test_ranks_outside_the_world_are_refused() -> None:
    run_ranks(1, _misplaced)


def _train_all(
    rank: int, world_size: int, folders: dict[str, Path], trainees: dict[str, Trainee], expected: dict[str, tuple]
) -> None:
    groups = build_groups({name: trainee.layout for name, trainee in trainees.items()}, seed=0)
    trained = {
        name: Trained(trainee, groups[name], folders[name]) for name, trainee in trainees.items() if groups[name].member
    }
    norms: dict[str, list[float]] = {name: [] for name in trained}
    for _ in range(NUM_STEPS):
        for name, component in trained.items():
            norms[name].append(component.step())
    for name, component in trained.items():
        expected_norms, expected_outputs = expected[name]
        exact = component.trainee.dtype == "fp32"
        assert norms[name] == pytest.approx(expected_norms, rel=2e-5 if exact else 0.03), name
        check_outputs(component, expected_outputs, tolerance=1e-4 if exact else 0.15)


ALL = (0, 1, 2, 3)
TRAINEES = {
    "actor tp2": Trainee(False, Layout((0, 1), tensor=2)),
    "critic pp2 on the same ranks": Trainee(True, Layout((0, 1), pipeline=2), distributed=True),
    "critic pp2 vpp2 bf16": Trainee(
        True, Layout((0, 3), pipeline=2, virtual_pipeline=2), distributed=True, dtype="bf16"
    ),
    "actor pp2 tied, disjoint": Trainee(False, Layout((2, 3), pipeline=2), distributed=True),
    "critic tp2 sp recomputed, overlapping": Trainee(True, Layout((1, 2), tensor=2), sequence=True, recompute="full"),
    "actor tp2 dp2 sp on all": Trainee(False, Layout(ALL, tensor=2), sequence=True, distributed=True),
    "actor tp2 bf16": Trainee(False, Layout((2, 3), tensor=2), sequence=True, dtype="bf16"),
    "critic pp2 bf16": Trainee(True, Layout((0, 1), pipeline=2), distributed=True, dtype="bf16"),
    "critic dp2": Trainee(True, Layout((0, 3)), distributed=True),
}


def test_components_training_in_one_world_follow_hugging_face(tmp_path: Path) -> None:
    folders = {name: hf_folder(tmp_path / name, "qwen2", tie_word_embeddings="tied" in name) for name in TRAINEES}
    expected = {name: reference(folders[name], trainee.value_head, NUM_STEPS) for name, trainee in TRAINEES.items()}
    run_ranks(4, _train_all, folders, TRAINEES, expected, timeout=300)
