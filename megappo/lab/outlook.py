"""The outlook of a run, for the command that starts it: estimates of its plan, its report, a monitor of its health."""

from megappo.lab.estimate.gpu_memory import Cluster, MemoryEstimate
from megappo.lab.plan.picture import placement_lines
from megappo.lab.report.health import health_of
from megappo.lab.report.report import Report
from megappo.observe.loggers import Outlook
from megappo.placement.run_plan import RunPlan
from megappo.runtime.gpus import GIB


def outlook_of(plan: RunPlan, gpu_bytes: float | None) -> Outlook:
    """Return the placement of a run, its planned memory, the monitor of its health and its report.

    Args:
        gpu_bytes: memory of a GPU; None without GPUs, where nothing is estimated.
    """
    planned, loads = {}, {}
    if gpu_bytes is not None and plan.training:
        estimate = MemoryEstimate(plan, Cluster(gpu_bytes))
        planned, loads = estimate.allocated(), estimate.expert_loads()
    facts = {
        "placement": placement_lines(plan),
        "planned_gib": {phase: nbytes / GIB for phase, nbytes in planned.items()},
        "limits": {f"{name}/expert_rank_load_max": load for name, load in loads.items()},
    }
    return Outlook(facts, health_of, {"report": Report()})
