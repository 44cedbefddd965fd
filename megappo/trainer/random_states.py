"""The random states of all ranks in a checkpoint. The program draws nothing while it trains; what people add may."""

import random
from math import isnan, nan
from pathlib import Path

import numpy
import torch
from safetensors.torch import load_file

from megappo.batch.exchange import Exchange
from megappo.batch.files import write_tensors
from megappo.runtime import platform

RANDOM_STATES = "random_states.safetensors"


def write_random_states(folder: Path, exchange: Exchange) -> None:
    """Write those of every rank, `RANK.GENERATOR`, each as numbers; all ranks together, of which rank 0 writes.

    Raises:
        OSError, OtherRankError: they cannot be written.
    """
    states = {
        f"{rank}.{name}": state for rank, found in enumerate(exchange.share(_states())) for name, state in found.items()
    }
    exchange.on_rank_0(lambda: write_tensors(folder / RANDOM_STATES, states))


def restore_random_states(folder: Path, exchange: Exchange) -> str:
    """Take this rank's; what to say where there are none: "" if they were restored.

    They are of ranks: on another number of them none fits.
    """
    states = load_file(folder / RANDOM_STATES)
    saved = 1 + max(int(name.split(".")[0]) for name in states)
    if saved != exchange.world_size:
        return f"random states are new: those saved are of {saved} ranks, these are {exchange.world_size}"
    prefix = f"{exchange.rank}."
    mine = {key.removeprefix(prefix): state for key, state in states.items() if key.startswith(prefix)}
    torch.set_rng_state(mine["torch"])
    if platform.has_cuda() and "cuda" in mine:
        torch.cuda.set_rng_state(mine["cuda"])
    *internal, following = mine["python"].tolist()
    random.setstate((random.getstate()[0], tuple(map(int, internal)), None if isnan(following) else following))
    *keys, position, following = mine["numpy"].tolist()
    drawn = () if isnan(following) else (1, following)
    numpy.random.set_state(("MT19937", numpy.array(keys, dtype=numpy.uint32), int(position), *drawn))
    return ""


def _states() -> dict[str, torch.Tensor]:
    """Of this process: bytes of torch's; of the others numbers, the last a normal one that has been drawn already."""
    _, internal, following = random.getstate()
    _, keys, position, has_following, cached = numpy.random.get_state()
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([*internal, nan if following is None else following], dtype=torch.float64),
        "numpy": torch.tensor([*keys, position, cached if has_following else nan], dtype=torch.float64),
    }
    return states | ({"cuda": torch.cuda.get_rng_state()} if platform.has_cuda() else {})
