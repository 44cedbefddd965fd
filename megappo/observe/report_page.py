"""One self-contained page of one run, or of several in comparison. Torch-free."""

import base64
import hashlib
import html
import json
import time
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

import yaml

ASSETS = Path(__file__).parent / "page"
LIBRARY, LIBRARY_STYLE = "uPlot.iife.min.js", "uPlot.min.css"
"""uPlot 1.6.32, under the MIT licence of uPlot.LICENSE."""
SCRIPTS = ("dom.js", "charts.js", "time.js", "samples.js", "main.js")


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
    charts = yaml.safe_load(_asset("charts.yaml"))
    data = {"title": title, "written": time.strftime("%Y-%m-%d %H:%M"), "charts": charts, "runs": runs}
    text = Template(_asset("page.html")).substitute(
        policy=f"default-src 'none'; {scripts}; style-src {_checksum(style)}",
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
