"""Build the run of a config's recipe. Importing this module prepares megatron-core, which takes seconds."""

from contextlib import ExitStack

from megappo.engines.handle import EngineHandle
from megappo.observe.loggers import Outlook
from megappo.placement.run_plan import RunPlan
from megappo.runtime import megatron_setup
from megappo.table import resolved

megatron_setup.install()  # must come before the first import of megatron.core

from megappo.trainer.run import Run  # noqa: E402
from megappo.trainer.run_builder import RunBuilder  # noqa: E402


def build_run(plan: RunPlan, engine_handle: EngineHandle, outlook: Outlook, cleanup: ExitStack) -> Run:
    """Build the parts of a run on this rank; all ranks together. Arguments as for `RunBuilder`."""
    return resolved(plan.config.recipe.build)(RunBuilder(plan, engine_handle, outlook, cleanup))
