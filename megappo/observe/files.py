"""Names in a run's output folder that several parts of the program look for."""

CHECKPOINTS = "checkpoints"
CONFIG_FILE = "config.yaml"
"""The resolved config, in a run's folder and in each checkpoint."""
HF_ACTOR = "hf_actor"
"""The trained actor as a Hugging Face folder, written at the end of a run."""

EVALUATIONS = "evaluations"
"""The evaluations of a run's checkpoints, by trainer.eval_only: a folder each."""
EVALUATION_FILE = "evaluation.json"
"""What was evaluated, and its metrics."""
REPORT_FILE = "report.html"
"""Written at the end of a run, and removed when it goes on: where it is, a run has done everything."""
