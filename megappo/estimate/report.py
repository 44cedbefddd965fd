"""The estimate as tables that people can read."""

from collections.abc import Iterator

from megappo.config.describe import show
from megappo.config.errors import shorten
from megappo.estimate.fitting import SPARE, fits, remedies
from megappo.estimate.gpus import GIB, GPU
from megappo.estimate.memory import MemoryEstimate, Place
from megappo.estimate.seconds import TimeEstimate, resume_seconds
from megappo.placement.picture import aligned
from megappo.placement.ranks import format_ranks


def memory_table(estimate: MemoryEstimate) -> str:
    """Of the GPU that is fullest: what is on it in each phase; the peaks of the others; the host's memory."""
    fullest, host = estimate.fullest, estimate.host()
    ledgers = estimate.ledgers[fullest]
    entries = dict.fromkeys(entry for ledger in ledgers.values() for entry in ledger)
    together = [sum(ledger.values()) for ledger in ledgers.values()]
    rows = [["", *ledgers]]
    rows += [[entry, *(_gib(ledger.get(entry)) for ledger in ledgers.values())] for entry in entries]
    rows += [["together", *map(_gib, together)]]
    rows += [["free", *(_gib(estimate.cluster.gpu_bytes - size) for size in together)]]
    others = [
        f"  on {_ranks(estimate, place)}: {_gib(most)} at most, in {phase}"
        for place in estimate.places
        for most, phase in [estimate.peak(place)]
        if place != fullest
    ]
    parts = ", ".join(f"{entry} {_gib(size)}" for entry, size in host.items() if size)
    node = f"  host memory of the fullest node, about {_gib(sum(host.values()))} GiB ({parts})"
    return "\n".join([f"  on {_ranks(estimate, fullest)}, the fullest", aligned(rows), *others, node])


def _ranks(estimate: MemoryEstimate, place: Place) -> str:
    text = shorten(format_ranks(estimate.places[place]))
    return f"{'rank' if text.isdigit() else 'ranks'} {text}"


def time_table(estimate: TimeEstimate) -> str:
    """Seconds of each phase, its share of the step, and the MFU of what computes."""
    rows = [["", "seconds", "share", "MFU"]]
    for phase, seconds in estimate.seconds.items():
        mfu = f"{estimate.mfu[phase]:.0%}" if phase in estimate.mfu else ""
        rows.append([phase, written_seconds(seconds), f"{seconds / estimate.step:.0%}", mfu])
    steps = estimate.config.trainer.total_steps
    whole = f"  {steps:,} steps: {steps * estimate.step / 3600:,.1f} hours, without evaluations and saves"
    return "\n".join([aligned([*rows, ["together", written_seconds(estimate.step), "", ""]]), whole])


def resume_line(estimate: MemoryEstimate, storage_gbps: float | None) -> str:
    """What a resume reads, how much host memory it takes, and how long it lasts.

    Args:
        storage_gbps: GB/s that the storage gives all nodes together; None where nobody says.
    """
    size, held = _gib(estimate.checkpoint_bytes), _gib(estimate.loading_bytes)
    line = f"  a resume reads {size} GiB twice, for its sums and to load, and holds up to {held} GiB of a node's memory"
    if storage_gbps is None:
        return f"{line}; --storage-gbps N tells how long that takes"
    seconds = written_seconds(resume_seconds(estimate, storage_gbps * 1e9))
    return f"{line}: about {seconds} s from storage of {storage_gbps:g} GB/s"


def written_seconds(seconds: float) -> str:
    """As short as they can be read."""
    return f"{seconds:,.1f}" if seconds >= 1 else f"{seconds:.2f}"


def memory_errors(estimate: MemoryEstimate, gpu: GPU) -> Iterator[str]:
    """Why a run does not fit, and with what it would; nothing where it fits."""
    if fits(estimate):
        return
    place = estimate.fullest
    most, phase = estimate.peak(place)
    if most > (1 - SPARE) * estimate.cluster.gpu_bytes:
        largest = sorted(estimate.ledgers[place][phase].items(), key=lambda entry: -entry[1])[:3]
        parts = ", ".join(f"{entry} {_gib(size)}" for entry, size in largest)
        found = f"{_ranks(estimate, place)}: {_gib(most)} GiB in {phase} ({parts})"
    else:
        found = f"the engines have room for {max(estimate.engine.cache_tokens, 0):,.0f} tokens, fewer than one row's"
    room = f"{gpu.name} GPUs of {_gib(estimate.cluster.gpu_bytes)} GiB, of which {SPARE:.0%} should stay free"
    helpful = remedies(estimate.plan, estimate.cluster)
    if helpful is None:
        advice = "offload, recomputation, smaller micro-batches and another rollout.mem_fraction_static would not do: "
        advice += "take another layout (--suggest looks for some), or more or larger GPUs"
    else:
        advice = "it would fit with " + " ".join(f"'{key}={_written(value)}'" for key, value in helpful.items())
    yield f"placement: this run does not fit {room}: {found}: {advice}"


def _written(value: object) -> str:
    """As an override on the command line."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else show(value).strip('"')


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:,.1f}"
