"""Account of a run that has ended before its last step: where it resumes, what is lost, and the command that resumes
it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megappo.checkpoint.folders import NOT_BEGUN, checkpoints_in, position_of
from megappo.config.config_error import ConfigError, counted
from megappo.config.sources import Sources
from megappo.observe.files import CHECKPOINTS
from megappo.observe.metrics_file import read_metrics
from megappo.observe.run_file import RUN_FILE, read_run


class Ending(NamedTuple):
    """End of a run.

    Attributes:
        account: where the run resumes, and what is lost.
        reason: why it was interrupted; "" if it was not, or has not noted it.
        has_trained: it has begun, and has finished or saved a step, now or earlier.
    """

    account: str
    reason: str
    has_trained: bool


def ending_of(arguments: Sequence[str], started: float) -> Ending | None:
    """Return the end of the run with these arguments of megappo.train, from the files in its folder.

    Args:
        started: seconds since 1970 when the ranks were started. A run that was refused has written no run.json since.
    Returns:
        None for a run that trains nothing, or whose config cannot be read.
    """
    configs = [word for word in arguments if "=" not in word]
    if not configs:
        return None
    sources = Sources(configs[0])
    try:
        sources.read_file(Path(configs[0]))
        for word in arguments:
            if "=" in word:
                sources.read_override(word)
    except ConfigError:
        return None
    trainer = sources.values.get("trainer")
    if not isinstance(trainer, dict) or "output_dir" not in trainer or trainer.get("eval_only"):
        return None
    folder = Path(str(trainer["output_dir"]))
    steps = read_metrics(folder)
    num_done = steps[-1]["step"] if steps else 0
    checkpoints = checkpoints_in(folder / CHECKPOINTS)
    run = read_run(folder)
    reason = run["message"] if run.get("status") == "interrupted" else ""
    file = folder / RUN_FILE
    has_begun = file.is_file() and file.stat().st_mtime >= started
    return Ending(_account(checkpoints, num_done), reason, has_begun and bool(num_done or checkpoints))


def _account(checkpoints: Sequence[Path], num_done: int) -> str:
    if not checkpoints:
        lost = f"no checkpoint yet; {counted(num_done, 'step')} lost"
        return lost if num_done else "before the first step; nothing is lost"
    step, num_updates = position_of(checkpoints[-1])
    place = f"after step {step}" if num_updates == NOT_BEGUN else f"in the middle of step {step + 1}"
    num_lost = num_done - step
    return f"resumes {place}; {counted(num_lost, 'step')} lost" if num_lost > 0 else f"resumes {place}; nothing is lost"
