"""report.html: one self-contained page of a run, or of several for comparison, from the files in their folders.
Torch-free."""

import base64
import hashlib
import html
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from megappo.lab.report.report_data import run_data
from megappo.lab.report.report_samples import MOST_CHARACTERS
from megappo.observe.charts import charts
from megappo.observe.files import REPORT_FILE
from megappo.observe.findings import LoggedMetrics
from megappo.observe.loggers import Logger, RunEnd, RunInfo
from megappo.observe.metrics_file import read_metrics
from megappo.observe.run_summary import summary
from megappo.runtime.durable_files import put_whole

REPORT_SECONDS = 30.0
"""Least time between two reports while a run trains."""
REPORT_SHARE = 0.005
"""Most of a run's time that reports after the first may take."""
ASSETS = Path(__file__).parent / "page"
LIBRARY, LIBRARY_STYLE = "uPlot.iife.min.js", "uPlot.min.css"
"""uPlot 1.6.32, under the MIT licence of uPlot.LICENSE."""
SCRIPTS = ("dom.js", "lines.js", "charts.js", "export.js", "time.js", "samples.js", "main.js")


class Report(Logger):
    """Writes report.html from time to time while a run trains, and at its end."""

    def on_start(self, run: RunInfo) -> None:
        """Remove the report of an earlier run."""
        self._output_dir = run.output_dir
        self._due = time.monotonic() + REPORT_SECONDS
        (run.output_dir / REPORT_FILE).unlink(missing_ok=True)

    def on_step(self, step: int, metrics: LoggedMetrics) -> None:
        """Write the report, if it is due: after `REPORT_SECONDS`, or more where it is so large that writing takes more
        than `REPORT_SHARE` of the time."""
        start = time.monotonic()
        if start >= self._due:
            write_report(self._output_dir)
            end = time.monotonic()
            self._due = end + max(REPORT_SECONDS, (end - start) / REPORT_SHARE)

    def on_end(self, end: RunEnd) -> None:
        """Write the last report, with the status that run.json has by now."""
        write_report(self._output_dir)


def write_report(output_dir: str | Path) -> Path:
    """Write `report.html` from the files in a run's folder.

    Raises:
        ConfigError: metrics.jsonl or config.yaml is damaged.
    """
    folder = Path(output_dir)
    return _write_page(folder / REPORT_FILE, "/".join(folder.resolve().parts[-2:]), [folder])


def write_comparison(folders: Sequence[Path], output: Path) -> Path:
    """Write one page that overlays several runs; runs that differ only in their seed are a band.

    Raises:
        ConfigError: a run's metrics.jsonl or config.yaml is damaged.
    """
    return _write_page(output, f"Comparison of {len(folders)} runs", folders)


def _write_page(path: Path, title: str, folders: Sequence[Path]) -> Path:
    runs, summaries = [], []
    for name, folder in zip(short_names(folders), folders, strict=True):
        steps = read_metrics(folder)
        runs.append(run_data(name, folder, steps, MOST_CHARACTERS // len(folders)))
        summaries.append(f"{name}\n{summary(folder, steps)}")
    content = page(title, runs, "\n\n".join(summaries))
    put_whole(path, lambda partial: partial.write_bytes(content))
    return path


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the paths below the folder that all are in: many runs are in folders of one name."""
    paths = [folder.resolve() for folder in folders]
    shared = os.path.commonpath([path.parent for path in paths])
    return [os.path.relpath(path, shared) for path in paths]


def page(title: str, runs: Sequence[dict[str, Any]], summary: str) -> bytes:
    """Return the page, in UTF-8.

    Nothing of a run can run as code: its texts are JSON, from which the script makes text nodes, and the policy in the
    page's head allows only its own scripts, by their checksums, and no request.

    Args:
        runs: as `run_data` returns them.
        summary: shown where there is no JavaScript.
    """
    library, script = _asset(LIBRARY), "\n".join(map(_asset, SCRIPTS))
    style = _asset(LIBRARY_STYLE) + _asset("page.css")
    scripts = f"script-src {_checksum(library)} {_checksum(script)}"
    data = {"title": title, "written": time.time(), "reload": REPORT_SECONDS, "charts": charts(), "runs": runs}
    text = Template(_asset("page.html")).substitute(
        policy=f"default-src 'none'; img-src data:; {scripts}; style-src {_checksum(style)}",
        title=html.escape(title),
        style=style,
        summary=html.escape(summary),
        data=json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        library=library,
        script=script,
    )
    return text.encode("utf-8", "backslashreplace")  # a lone surrogate of a response becomes its JSON escape


def _asset(name: str) -> str:
    return (ASSETS / name).read_text("utf-8")


def _checksum(text: str) -> str:
    """Return the checksum of a script or style as a content security policy has it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
