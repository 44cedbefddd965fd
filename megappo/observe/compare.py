"""One page of several runs, overlaid; runs that differ by their seed alone are a band. Torch-free."""

from collections.abc import Sequence
from pathlib import Path

from megappo.observe.metrics_file import read_metrics
from megappo.observe.report import summary
from megappo.observe.report_data import run_data
from megappo.observe.report_page import page
from megappo.observe.report_samples import MOST_CHARACTERS


def write_comparison(folders: Sequence[Path], output: Path) -> Path:
    """Write the page of several runs.

    Raises:
        ConfigError: a run's metrics.jsonl or config.yaml is damaged.
    """
    names = short_names(folders)
    runs, summaries = [], []
    for folder, name in zip(folders, names, strict=True):
        steps = read_metrics(folder)
        runs.append(run_data(folder, steps, MOST_CHARACTERS // len(folders)) | {"name": name})
        summaries.append(f"{name}\n{summary(folder, steps)}")
    output.write_bytes(page(f"Comparison of {len(folders)} runs", runs, "\n\n".join(summaries)))
    return output


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ from each other, as many runs are in a folder named run."""
    parts = [folder.resolve().parts for folder in folders]
    names = ["/".join(path) for path in parts]
    for length in range(max(map(len, parts)), 0, -1):
        shorter = ["/".join(path[-length:]) for path in parts]
        if len(set(shorter)) < len(set(names)):
            break
        names = shorter
    return names
