"""The estimate as tables that people can read."""

from collections.abc import Iterator

from megappo.config.describe import show
from megappo.config.errors import shorten
from megappo.estimate.fitting import SPARE, fits, remedies
from megappo.estimate.gpus import GIB, GPU
from megappo.estimate.memory import MemoryEstimate, Place
from megappo.estimate.seconds import TimeEstimate
from megappo.placement.picture import aligned
from megappo.placement.ranks import format_ranks


def memory_table(estimate: MemoryEstimate) -> str:
    """Of the GPU that is fullest: what is on it in each phase; the peaks of the others; the host's memory."""
    _, fullest, _ = estimate.peak()
    ledgers = estimate.ledgers[fullest]
    entries = dict.fromkeys(entry for ledger in ledgers.values() for entry in ledger)
    rows = [["", *(phase.replace("update_", "update ") for phase in ledgers)]]
    rows += [[entry, *(_gib(ledger.get(entry)) for ledger in ledgers.values())] for entry in entries]
    rows.append(["together", *(_gib(sum(ledger.values())) for ledger in ledgers.values())])
    rows.append(["free", *(_gib(estimate.gpu_bytes - sum(ledger.values())) for ledger in ledgers.values())])
    host = estimate.host()
    parts = ", ".join(f"{entry} {_gib(size)}" for entry, size in host.items() if size)
    return "\n".join(
        [
            f"  on {_ranks(estimate, fullest)}, the fullest",
            aligned(rows),
            *_others(estimate, fullest),
            f"  host memory of the fullest node, about: {_gib(sum(host.values()))} ({parts})",
        ]
    )


def _others(estimate: MemoryEstimate, fullest: Place) -> list[str]:
    lines = []
    for place in estimate.places:
        if place != fullest:
            totals = {phase: sum(ledger.values()) for phase, ledger in estimate.ledgers[place].items()}
            phase = max(totals, key=lambda name: totals[name])
            lines.append(f"  on {_ranks(estimate, place)}: {_gib(totals[phase])} at most, in {phase}")
    return lines


def _ranks(estimate: MemoryEstimate, place: Place) -> str:
    text = shorten(format_ranks(estimate.places[place]))
    return f"{'rank' if text.isdigit() else 'ranks'} {text}"


def time_table(estimate: TimeEstimate) -> str:
    """Seconds of each phase, its share of the step, and the MFU of the updates."""
    rows = [["", "seconds", "share", "MFU"]]
    for phase, seconds in estimate.seconds.items():
        mfu = estimate.mfu(phase)
        rows.append([phase, _seconds(seconds), f"{seconds / estimate.step:.0%}", "" if mfu is None else f"{mfu:.0%}"])
    rows.append(["together", _seconds(estimate.step), "", ""])
    return aligned(rows)


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}" if seconds >= 1 else f"{seconds:.2f}"


def misfits(estimate: MemoryEstimate, gpu: GPU) -> Iterator[str]:
    """Why a run does not fit, and with what it would; nothing where it fits."""
    if fits(estimate):
        return
    world_size = sum(map(len, estimate.places.values()))
    found_remedies = remedies(estimate.config, world_size, estimate.gpu_bytes, estimate.shapes)
    most, place, phase = estimate.peak()
    largest = sorted(estimate.ledgers[place][phase].items(), key=lambda entry: -entry[1])[:3]
    parts = ", ".join(f"{entry} {_gib(size)}" for entry, size in largest)
    found = f"{_ranks(estimate, place)}: {_gib(most)} GiB in {phase} ({parts})"
    if most <= (1 - SPARE) * estimate.gpu_bytes:
        found = f"the engines have room for {max(estimate.cache_tokens(), 0):,.0f} tokens, fewer than one row's"
    room = f"{gpu.name} GPUs of {_gib(estimate.gpu_bytes)} GiB, of which {SPARE:.0%} should stay free"
    if found_remedies is None:
        advice = "no offload, recomputation or smaller micro-batch alone would do: take more GPUs, or see --suggest"
    else:
        advice = "it would fit with " + " ".join(f"'{key}={_written(value)}'" for key, value in found_remedies.items())
    yield f"placement: this run does not fit {room}: {found}: {advice}"


def _written(value: object) -> str:
    """As an override on the command line."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else show(value).strip('"')


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:,.1f}"
