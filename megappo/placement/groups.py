"""One set of process groups per component, so that models with different layouts share one torchrun world.

megatron-core is handed a component's ProcessGroupCollection wherever it takes one. What it still reads from globals is
filled in by `ComponentGroups.active()`; the calls it hard-wires to the default process group run in `as_world()`.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from torch.distributed import distributed_c10d

from megappo.placement.layout import Layout, Ranks, embedding_groups, rank_groups
from megappo.runtime import platform

GLOBALS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_PIPELINE_GLOBAL_RANKS": "pp",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_CONTEXT_PARALLEL_GLOBAL_RANKS": "cp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GLOBAL_RANKS": "dp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_MODEL_PARALLEL_GLOBAL_RANKS": "mp",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": "dp_cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp_cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_MODEL_PARALLEL_RANKS": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    "_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "intra_expt_dp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "_EMBEDDING_GROUP": "embd",
    "_EMBEDDING_GLOBAL_RANKS": "embd",
    "_POSITION_EMBEDDING_GROUP": "pos_embd",
    "_POSITION_EMBEDDING_GLOBAL_RANKS": "pos_embd",
}
"""Global of parallel_state -> field of the collection: its group, or its global ranks (RANKS in the name)."""

Groups = dict[Ranks, dist.ProcessGroup | None]
"""The group of each set of ranks; None if this rank is not in it."""
RngState = tuple[dict[str, torch.Tensor], torch.Tensor]


@dataclass
class ComponentGroups:
    """A component's process groups as this rank sees them.

    Attributes:
        layout: the component's ranks and their arrangement.
        collection: what megatron-core takes as `pg_collection`; None on ranks outside the component.
    """

    layout: Layout
    collection: ProcessGroupCollection | None
    _globals: dict[str, Any] = field(default_factory=dict, repr=False)
    _rng: RngState | None = field(default=None, repr=False)
    _is_active: bool = field(default=False, repr=False)

    @property
    def member(self) -> bool:
        """True if this rank belongs to the component."""
        return self.collection is not None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make megatron-core's globals and random streams this component's, for every call into it.

        Re-entrant; components may nest in each other; what was there before comes back.
        """
        self._require_member()
        if self._is_active:
            yield
            return
        before = {name: getattr(parallel_state, name) for name in self._globals}
        rng_before = _rng_state()
        self._is_active = True
        vars(parallel_state).update(self._globals)
        _set_rng_state(self._rng)
        try:
            yield
        finally:
            self._rng = _rng_state()
            _set_rng_state(rng_before)
            vars(parallel_state).update(before)
            self._is_active = False

    @contextlib.contextmanager
    def as_world(self) -> Iterator[None]:
        """Make the component's group the default one: for building the optimizer and dist_checkpointing.save/load.

        Ranks count from 0 within the component meanwhile. Create no groups and address no other component while the
        block runs. torch has no public way to do this, hence its private names (torch is pinned, a test covers this).
        """
        self._require_member()
        group = self.collection.intra_dist_opt
        outer = dist.group.WORLD
        if group is outer:
            yield
            return
        numbers = {rank: i for i, rank in enumerate(self.layout.ranks)}
        maps = distributed_c10d._world.pg_group_ranks
        before = {own: maps[own] for own in self._groups()}
        maps.update({own: {numbers[rank]: i for rank, i in ranks.items()} for own, ranks in before.items()})
        distributed_c10d._update_default_pg(group)
        try:
            yield
        finally:
            distributed_c10d._update_default_pg(outer)
            maps.update(before)

    def _groups(self) -> set[dist.ProcessGroup]:
        groups = {getattr(self.collection, name) for name in GLOBALS.values()}
        return {group for group in groups if group is not None}

    def _require_member(self) -> None:
        if not self.member:
            raise RuntimeError(
                f"rank {dist.get_rank()} is not among the component's ranks {self.layout.ranks}: check .member first"
            )


def build_groups(layouts: dict[str, Layout], seed: int, timeout: timedelta | None = None) -> dict[str, ComponentGroups]:
    """Create every component's process groups. All ranks of the world call it together, with the same arguments.

    Components with equal rank sets share groups. A pipeline's group runs one collective, since NCCL's first batched
    point-to-point call on a group needs every member; the others connect at their first use, and groups without any
    never take NCCL's memory. All ranks make all groups, in one order: torch names a group that its members make alone
    by the number of groups that each of them is in, which differs.

    Args:
        layouts: component -> layout, whose ranks ascend, as torch orders groups by rank.
        seed: seed of the components' random streams.
        timeout: time after which a collective on these groups ends the run; None = torch's default.
    Raises:
        ValueError: a layout's ranks are not all in the world.
    """
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    named = {name: list(rank_groups(layout)) for name, layout in layouts.items()}
    of_the_host = {
        ranks
        for component, layout in layouts.items()
        for name, ranks in named[component]
        if _is_of_the_host(name, layout)
    }
    made: Groups = {tuple(range(dist.get_world_size())): dist.group.WORLD}
    for name, ranks in chain.from_iterable(named.values()):
        if ranks not in made:
            backend = platform.backend(of_the_host=ranks in of_the_host)
            made[ranks] = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        if name == "pp" and dist.get_rank() in ranks and len(ranks) > 1:
            dist.all_reduce(torch.zeros(1, device=platform.device()), group=made[ranks])
    return {name: _component_groups(layout, seed, named[name], made) for name, layout in layouts.items()}


def _is_of_the_host(name: str, layout: Layout) -> bool:
    """Return whether a group also carries CPU tensors and objects.

    dist_checkpointing exchanges objects over all of a component's ranks, and gathers the optimizer's state over the
    data-parallel ones, where experts without expert parallelism are among the other weights.
    """
    return name in ("intra_dist_opt", "intra_dp_cp") or (name == "intra_expt_dp" and layout.expert > 1)


def _component_groups(
    layout: Layout,
    seed: int,
    named: list[tuple[str, Ranks]],
    made: Groups,
) -> ComponentGroups:
    own = {name: ranks for name, ranks in named if dist.get_rank() in ranks}
    if dist.get_rank() not in layout.ranks:
        return ComponentGroups(layout, None)
    # hcp (hierarchical context parallelism) and inter_dist_opt (several optimizer instances) are not in use.
    absent = dict.fromkeys(("embd", "pos_embd", "hcp", "inter_dist_opt"))
    collection = ProcessGroupCollection(**absent | {name: made[ranks] for name, ranks in own.items()})
    groups = ComponentGroups(layout, collection, _globals(layout, collection, own))
    groups._rng = _fresh_rng_state(groups, seed)
    return groups


def _globals(layout: Layout, collection: ProcessGroupCollection, own: dict[str, Ranks]) -> dict[str, Any]:
    """Return parallel_state's globals for this component. Its embedding ranks are in this rank's pipeline."""
    ranks = own | embedding_groups(own["pp"])
    return {
        **{name: list(ranks[of]) if "RANKS" in name else getattr(collection, of) for name, of in GLOBALS.items()},
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
    }


def _fresh_rng_state(groups: ComponentGroups, seed: int) -> RngState:
    """Return the component's random streams, seeded as in Megatron: separate for pipeline stages and tensor ranks."""
    before = _rng_state()
    tensor_rank = groups.collection.tp.rank()
    stage = groups.collection.pp.rank()
    model_parallel_cuda_manual_seed(
        seed + 100 * stage,
        tp_rank=tensor_rank,
        ep_rank=groups.collection.ep.rank(),
        etp_rank=groups.collection.expt_tp.rank(),
    )
    fresh = _rng_state()
    _set_rng_state(before)
    return fresh


def _rng_state() -> RngState:
    return get_cuda_rng_tracker().get_states(), torch.cuda.get_rng_state()


def _set_rng_state(state: RngState) -> None:
    tracked, default = state
    get_cuda_rng_tracker().set_states(tracked)
    torch.cuda.set_rng_state(default)
