"""Prove that the engines have the actor's weights."""

from collections.abc import Callable, Mapping, Sequence

import torch

from megappo.batch.exchange import Exchange
from megappo.batch.rows import Rows
from megappo.config.schema import Config
from megappo.engines.client import EngineClient, EngineError

ROUNDING = {"bf16": 0.05, "fp32": 1e-3}
"""model.dtype -> mean difference of log-probs that rounding may cause."""
FAR = 5.0
"""A run stops beyond this many times the tolerance. Below, rounding that routes tokens to other experts may explain the
difference."""
Checksums = Sequence[Mapping[str, str]]
"""For each of an engine's ranks, name of a weight -> checksum."""


def verified_sync(
    sync: Callable[[], object],
    client: EngineClient | None,
    *,
    barrier: Callable[[], object],
    as_loaded: bool,
    loaded: Checksums = (),
    overwrites: bool = True,
) -> None:
    """Overwrite the engines' weights, sync, and compare the engines' own checksums: no corrupt weight may remain.

    Args:
        client: client of the engine that this rank owns.
        barrier: waits for all ranks.
        as_loaded: the model has the weights that the engines loaded from the same folder, so the sync must restore them
            to the bit. Otherwise only a weight that was not set at all is found.
        loaded: checksums of the weights that the engine loaded, if it has slept since; empty = it still has them.
        overwrites: False for a sync of adapters, which would not restore the other weights.
    Raises:
        EngineError: some of an engine's weights were not set, or differ from the weights it loaded; the message names
            some.
    """
    corrupt = []
    if client is not None:
        corrupt = loaded = loaded or client.weight_checksums()
        if overwrites:
            client.reset_weights()
            corrupt = client.weight_checksums()
    barrier()
    sync()
    if client is None:
        return
    synced = client.weight_checksums()
    if client.has_failed:  # an engine that will be restarted proves nothing
        return
    for rank, (before, without, now) in enumerate(zip(loaded, corrupt, synced, strict=True)):
        unset = [name for name, checksum in now.items() if overwrites and checksum == without[name]]
        changed = [name for name, checksum in now.items() if as_loaded and checksum != before[name]]
        for names, what in ((unset, "were not set by"), (changed, "differ from the folder's after")):
            if names:
                raise EngineError(
                    f"{len(names)} of the {len(now)} weights of the engine's rank {rank} {what} the first weight sync: "
                    f"{', '.join(names[:5])}; the engine would not run the actor's model. If SGLang itself changes "
                    "these weights after loading (by quantization, for example), set rollout.sync.verify to false"
                )


def check_probe(
    rows: Rows,
    engine_number: int | None,
    config: Config,
    exchange: Exchange,
    warn: Callable[[str], object],
) -> dict[str, float]:
    """Return `sync/log_prob_diff/{mean,max,warnings}` of the probe after a sync; all ranks together.

    Args:
        rows: responses of this rank's engine, with old_log_probs, which are the actor's, and rollout_log_probs.
        engine_number: number of that engine; None without one.
        warn: see `check_log_probs`.
    Raises:
        EngineError: the log-probs of an engine differ too much on average; see `check_log_probs`.
    """
    mask = rows.response_mask
    difference = (rows.field("old_log_probs") - rows.field("rollout_log_probs")).abs() * mask
    found = None
    if engine_number is not None:
        mean = float(difference.sum() / mask.sum())
        found = engine_number, mean, float(difference.max())
    all_found = filter(None, exchange.all_gather(found))
    numbers, means, maxima = zip(*all_found, strict=True)

    worst = int(torch.tensor(means).argmax())  # of many engines, one that is stale would not show in the mean of all
    warnings = check_log_probs(f"engine {numbers[worst]}'s probe", means[worst], config, warn)
    return {
        "sync/log_prob_diff/mean": float(torch.tensor(means).mean()),
        "sync/log_prob_diff/max": max(maxima),
        "sync/log_prob_diff/warnings": warnings,
    }


def check_log_probs(
    tokens: str,
    difference: float,
    config: Config,
    warn: Callable[[str], object],
) -> int:
    """Check that engine and actor agree; return the number of warnings, 0 or 1.

    Args:
        tokens: a description of the compared tokens, for the message.
        difference: mean absolute difference of their log-probs.
        warn: prints a warning about a difference above `rollout.sync.probe_tolerance`.
    Raises:
        EngineError: the difference is more than FAR times that, or NaN.
    """
    tolerance = config.rollout.sync.probe_tolerance
    if difference <= tolerance:
        return 0
    dtype = config.model.dtype
    message = (
        f"trainer and SGLang engine disagree about the log-probs of {tokens} by {difference:.3g} on average, more than "
        f"rollout.sync.probe_tolerance = {tolerance}. Rounding in {dtype} explains up to about {ROUNDING[dtype]}, and "
        f"up to {FAR:g} times that in a mixture of experts, whose tokens may go to other experts: raise the tolerance "
        "then. Beyond that the engine does not run the actor's weights"
    )
    if not difference <= FAR * tolerance:
        raise EngineError(message)
    warn(f"WARNING: {message}; the run stops beyond {FAR:g} times the tolerance")
    return 1
