"""Names in a run's output folder that others than the observer look for."""

REPORT_FILE = "report.html"
"""Written at the end of a run, and removed when it goes on: where it is, a run has done everything."""
