"""run.json: facts about a run, and how it ended."""

import json
import os
import subprocess
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from megappo.config.loading import leaves, read_values
from megappo.config.text_files import read_record
from megappo.observe.files import CONFIG_FILE, HF_ACTOR, HF_CRITIC, HF_REWARD_MODEL
from megappo.observe.loggers import Logger, RunEnd, RunInfo
from megappo.observe.metrics_file import read_metrics
from megappo.runtime.durable_files import write_durably

RUN_FILE = "run.json"
OTHER_DATA = (
    "the content of data.train_files has changed since the last start. If the number of records in use is the same, "
    "new records take the places of the old ones. Otherwise the order changes, and the rest of this epoch may repeat "
    "some records and leave out others. To continue unchanged, restore the files"
)
RUNNING = "running"
"""The status of a run that has not ended; a kill leaves it, too."""


class RunFacts(BaseModel, extra="allow", strict=True, allow_inf_nan=False):
    """Content of run.json that is read again, and what stands for it where a run has none."""

    status: str = ""
    message: str = ""
    run_id: str = ""
    commit: str = ""
    total_steps: int = 0
    logged_step: int = -1
    hardware: dict[str, str] = {}
    placement: dict[str, str] = {}
    planned_gib: dict[str, float] = {}
    data: str = ""


class RunFile(Logger):
    """Writes run.json: the fields of `RunInfo` except the config, which config.yaml has, then the fields of
    `RunEnd`."""

    def on_start(self, run: RunInfo) -> None:
        """Write the facts that are known at the start."""
        self._output_dir = run.output_dir
        facts = {name: value for name, value in vars(run).items() if name not in ("output_dir", "config")}
        _write(run.output_dir, facts | {"status": RUNNING, "message": ""})

    def on_end(self, end: RunEnd) -> None:
        """Add how the run ended."""
        write_end(self._output_dir, end)


def write_end(output_dir: Path, end: RunEnd) -> None:
    """Add how a run ended to its run.json."""
    _write(output_dir, read_run(output_dir) | asdict(end))


def _write(output_dir: Path, facts: dict[str, Any]) -> None:
    write_durably(output_dir / RUN_FILE, json.dumps(facts, indent=1) + "\n")


def read_run(output_dir: str | Path) -> dict[str, Any]:
    """Return the content of run.json, or what stands for it.

    Raises:
        ConfigError: it cannot be read, or is not what a run writes.
    """
    facts = read_record(Path(output_dir, RUN_FILE), RunFacts.model_validate, "remove the file")
    return RunFacts().model_dump() | facts


def has_finished(output_dir: str | Path) -> bool:
    """Return whether the last run in a folder has done everything: its steps, its export and its last evaluation."""
    return read_run(output_dir)["status"] == "finished"


def config_of(folder: Path) -> dict[str, Any]:
    """Return the content of a run's config.yaml; {} if the folder has none.

    Raises:
        ConfigError: it is damaged.
    """
    file = folder / CONFIG_FILE
    return read_values(file) if os.path.lexists(file) else {}


def exported_model(folder: Path) -> Path | None:
    """Return the Hugging Face folder that a finished run wrote: its actor's, or the folder of the model it trained
    alone.

    None without any. A run that resumes without trainer.export_hf leaves an older one as it is.
    """
    values = dict(leaves(config_of(folder)))
    name = HF_ACTOR if "actor" in str(values.get("trainer.train", "actor")) else HF_CRITIC
    model = folder / {"reward_model": HF_REWARD_MODEL, "critic": HF_CRITIC}.get(str(values.get("trainer.kind")), name)
    return model if model.is_dir() and values.get("trainer.export_hf", True) else None


def run_id_of(output_dir: str | Path, resume_step: int) -> str:
    """Return the id of the run that resumes at a step, or a new one for a run from the beginning."""
    earlier = read_run(output_dir)["run_id"] if resume_step else None
    return str(earlier or uuid.uuid4().hex[:8])


def changed_data(run: RunInfo) -> str:
    """Return a line if training files have changed since the last start of a run that resumes, else ""."""
    return OTHER_DATA if run.resume_step and read_run(run.output_dir)["data"] not in ("", run.data) else ""


def logged_step_of(output_dir: str | Path, resume_step: int) -> int:
    """Return the last step that earlier processes of the run have logged; -1 for a run from the beginning."""
    if not resume_step:
        return -1
    steps = [metrics["step"] for metrics in read_metrics(output_dir)]
    return max(read_run(output_dir)["logged_step"], *steps, -1)


def git_commit(folder: Path) -> str:
    """Return the commit of the repository that holds a folder, with "-dirty" if files differ from it; "" if there is
    no repository, or no git."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.strip()
