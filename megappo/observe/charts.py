"""Charts of a run's metrics, for TensorBoard and the report: charts.yaml."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_name("charts.yaml")


@cache
def charts() -> dict[str, list[dict[str, Any]]]:
    """Return the charts of charts.yaml, by group."""
    return yaml.safe_load(TABLE.read_text("utf-8"))
