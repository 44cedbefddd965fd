"""Print estimates as tables."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter

from megappo.architecture.switches import Decision, SwitchContext, decisions, te_fault
from megappo.config.config_error import Errors, shorten, show
from megappo.lab.estimate.fitting import SPARE, fits, remedies
from megappo.lab.estimate.gpu_memory import ROLLOUT, SYNC, MemoryEstimate, RankKind
from megappo.lab.estimate.placed_model import Shapes
from megappo.lab.estimate.seconds import GROUP_SECONDS, TENSOR_SECONDS, TimeEstimate
from megappo.lab.plan.picture import aligned
from megappo.placement.layout import format_ranks, num_groups
from megappo.placement.run_plan import RunPlan
from megappo.runtime.gpus import GIB, GPU

LANE_WIDTH = 100
"""Characters of a step's picture."""
UNEVEN = 0.05
"""Share of a step that one side may wait for the other without advice."""


def memory_table(estimate: MemoryEstimate) -> str:
    """Return the memory of the fullest GPU in each phase, the peaks of the others, and the memory of the host."""
    fullest = estimate.fullest
    ledgers = fullest.ledgers.values()
    rows = [["", *fullest.ledgers]]
    for entry in dict.fromkeys(chain.from_iterable(ledgers)):
        rows.append([entry, *(_gib(ledger[entry]) if entry in ledger else "" for ledger in ledgers)])
    sums = [sum(ledger.values()) for ledger in ledgers]
    rows.append(["together", *map(_gib, sums)])
    rows.append(["free", *(_gib(estimate.cluster.gpu_bytes - size) for size in sums)])
    lines = [f"  on {_ranks(fullest)}, the fullest", aligned(rows)]
    for rank_kind in estimate.rank_kinds:
        if rank_kind is not fullest:
            most, phase = rank_kind.peak
            lines.append(f"  on {_ranks(rank_kind)}: {_gib(most)} at most, in {phase}")
    for name, load in estimate.expert_loads().items():
        lines.append(f"  experts of the {name}: a rank may get {load:.1f} times its even share of the tokens")
    host = estimate.host()
    parts = ", ".join(f"{entry} {_gib(size)}" for entry, size in host.items() if size)
    lines += [f"  host memory of the fullest node, about {_gib(sum(host.values()))} GiB:", f"    {parts}"]
    return "\n".join(lines)


def _ranks(rank_kind: RankKind) -> str:
    ranks = rank_kind.ranks
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shorten(format_ranks(ranks))}"


def time_table(estimate: TimeEstimate) -> str:
    """Return the seconds of each phase, its share of the step, and the MFU of phases that compute; and the two sides of
    a step in which the engines run ahead."""
    rows = [["", "seconds", "share", "MFU"]]
    for phase, seconds in estimate.seconds.items():
        mfu = f"{estimate.mfu[phase]:.0%}" if phase in estimate.mfu else ""
        rows.append([phase, written_seconds(seconds), f"{seconds / estimate.step:.0%}", mfu])
    rows.append(["overlapped" if estimate.overlap else "together", written_seconds(estimate.step), "", ""])
    steps = estimate.config.trainer.total_steps
    duration = f"  {steps:,} steps: {_duration(steps * estimate.step)}, without evaluations and saves"
    plan, tensors = estimate.memory.plan, estimate.num_tensors
    groups = num_groups([plan.layouts[name] for name in plan.components], plan.world_size)
    meeting = written_seconds(groups * plan.world_size * GROUP_SECONDS)
    sent = f"  a sync sends {tensors:,} tensors, assuming {TENSOR_SECONDS * 1e6:.0f} us each besides their bytes"
    made = f"  at the start ranks make the models' {groups:,} process groups, in an assumed {meeting} s"
    return "\n".join([aligned(rows), *_timeline(estimate), *([sent] if tensors else []), made, duration])


def _timeline(estimate: TimeEstimate) -> Iterator[str]:
    """Yield the lines of a step's picture, a lane for each side, and which side waits for the other."""
    overlap = estimate.overlap
    if overlap is None:
        if estimate.config.rollout.runs_ahead:
            yield "  engines and models share GPUs: the phases count as if they took turns"
        return
    phases = dict(estimate.seconds)
    sync = {SYNC: phases.pop(SYNC)}
    del phases[ROLLOUT]
    sampling = overlap.step - overlap.engines_wait - overlap.sync
    yield f"  engines   {_lane({ROLLOUT: sampling, '': overlap.engines_wait} | sync, overlap.step)}"
    yield f"  trainers  {_lane({'': overlap.trainers_wait} | phases | sync, overlap.step)}"
    waits = {"engines": (overlap.engines_wait, "models"), "trainers": (overlap.trainers_wait, "engines")}
    side, (seconds, other) = max(waits.items(), key=itemgetter(1))
    share = seconds / overlap.step
    advice = f": give the {other} more of the GPUs" if share > UNEVEN else ""
    yield f"  the {side} wait for {share:.0%} of the step{advice}"


def _lane(blocks: Mapping[str, float], step: float) -> str:
    """Return blocks of seconds after each other, each as long as its share of the step; "" is a wait."""
    lane, end = "|", 0.0
    for name, seconds in blocks.items():
        end += seconds
        width = round(end / step * LANE_WIDTH) - len(lane)
        if width > 0:
            lane += name[:width].ljust(width, "-" if name else ".") + "|"
    return lane


def _duration(seconds: float) -> str:
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} seconds"


def written_seconds(seconds: float) -> str:
    """Return seconds with one decimal, or two below a second."""
    return f"{seconds:,.1f}" if seconds >= 1 else f"{seconds:.2f}"


def switch_table(plan: RunPlan, shapes: Shapes, *, capability: int) -> str:
    """Return a line for each decision about fast paths with TransformerEngine; components with the same decision share
    it.

    Args:
        capability: compute capability of the GPUs, times ten.
    """
    rows = []
    for decision, names in sorted(_decided(plan, shapes, capability, has_te=True).items()):
        rows.append([decision.name, "on" if decision.is_on else "off", ", ".join(names), decision.reason])
    return aligned(rows)


def switch_summary(plan: RunPlan, shapes: Shapes, *, capability: int | None, has_te: bool) -> str:
    """Return how many of the switches are on, and the attention on GPUs.

    Args:
        capability: as for `switch_table`; None without GPUs.
        has_te: TransformerEngine is installed.
    """
    decided = _decided(plan, shapes, capability, has_te)
    switches = {decision.name for decision in decided}
    off = {decision.name for decision in decided if not decision.is_on}
    num_on = len(switches - off)
    summary = f"performance: {num_on} of {len(switches)} features on; plan --gpu TYPE explains them"
    return "\n".join([*(_attention(plan, decided) if capability else ()), summary])


def _attention(plan: RunPlan, decided: Mapping[Decision, Sequence[str]]) -> Iterator[str]:
    """Yield a line for each attention of packed rows, with the components that have it."""
    others = list(plan.components)
    for decision, names in decided.items():
        if decision.name == "varlen_attn":
            others = [name for name in others if name not in names]
            kind = "torch's varlen_attn" if decision.is_on else f"torch's, row by row, as {decision.reason}"
            yield f"attention: {kind} ({', '.join(names)})"
    if others:
        yield f"attention: TransformerEngine's ({', '.join(others)})"


def _decided(plan: RunPlan, shapes: Shapes, capability: int | None, has_te: bool) -> dict[Decision, list[str]]:
    """Return the components for which each switch is decided so."""
    found, model = defaultdict[Decision, list[str]](list), plan.config.model
    for name, spec in plan.components.items():
        architecture, parallel = shapes.of(spec).architecture, spec.parallel.value
        fault = te_fault(architecture, parallel, model.dtype, capability)
        context = SwitchContext(
            architecture,
            parallel,
            data=plan.layouts[name].data,
            dtype=model.dtype,
            is_trained=spec.training is not None,
            capability=capability,
            has_te=has_te and model.layer_spec != "torch" and not fault,
        )
        for decision in decisions(context):
            found[decision].append(name)
    return found


def memory_errors(estimate: MemoryEstimate, gpu: GPU) -> Errors:
    """Yield why a run does not fit, and the remedy; nothing where it fits."""
    if fits(estimate):
        return
    fullest = estimate.fullest
    gpu_bytes = estimate.cluster.gpu_bytes
    most, phase = fullest.peak
    if most > (1 - SPARE) * gpu_bytes:
        entries = sorted(fullest.ledgers[phase].items(), key=itemgetter(1), reverse=True)
        largest = ", ".join(f"{entry} {_gib(size)}" for entry, size in entries[:3])
        found = f"{_ranks(fullest)}: {_gib(most)} GiB in {phase} ({largest})"
    else:
        found = f"the engines have room for {max(estimate.engine.cache_tokens, 0):,.0f} tokens, fewer than one row's"
    helpful = remedies(estimate.plan, estimate.cluster)
    if helpful is None:
        advice = (
            "no offload and no smaller micro-batch would do: take another layout (--suggest looks for some), or more "
            "or larger GPUs"
        )
    else:
        overrides = []
        for key, value in helpful.items():
            written = f"[{','.join(map(str, value))}]" if isinstance(value, list) else show(value).strip('"')
            overrides.append(f"'{key}={written}'")
        advice = f"it would fit with {' '.join(overrides)}"
    room = f"{gpu.name} GPUs of {_gib(gpu_bytes)} GiB, of which {SPARE:.0%} should stay free"
    yield f"placement: this run does not fit {room}: {found}: {advice}"


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f}"
