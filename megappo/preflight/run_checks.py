"""Check everything about a run that can be checked before it starts. Without torch, so that the dry run is instant."""

import os
from collections.abc import Iterator, Mapping

from megappo.config.config_error import ConfigError, shorten
from megappo.config.eval_sets import tasks
from megappo.config.schema import Config
from megappo.engines.server_args import server_args_errors
from megappo.placement.run_plan import RunPlan, plan_run
from megappo.preflight.file_checks import file_errors
from megappo.preflight.resuming import resume_errors
from megappo.userland.spec import BUILTIN, parse_spec


def check_run(
    config: Config, world_size: int, ranks_per_node: int | None = None, *, on_gpus: bool = False
) -> tuple[RunPlan | None, list[str]]:
    """Return the plan of a run, and every error in its config, one line each, where its key was written first:
    contradictions between keys, then missing files. A config that contradicts itself has no plan.

    Args:
        ranks_per_node: None if all ranks are on one node.
        on_gpus: the run would have GPUs.
    """
    plan, errors = None, list(_gpu_errors(config) if on_gpus else ())
    try:
        plan = plan_run(config, world_size, ranks_per_node)
    except ConfigError as error:
        errors += error.errors
    errors += [*file_errors(config), *server_args_errors(config.rollout.server_args), *_user_code_errors(config)]
    return plan, config.located(errors or resume_errors(config))  # which reads the output folder


def _gpu_errors(config: Config) -> Iterator[str]:
    own_engines = config.trainer.replay_rollouts is None and not config.rollout.engines
    if config.model.dtype == "fp32" and own_engines:  # sglang-kernel 0.4.10: "rmsnorm failed to dispatch Float"
        yield (
            "model.dtype: fp32 does not run on GPUs, where SGLang's norm takes 16-bit numbers alone: set "
            "model.dtype=bf16, or run on the CPU: CUDA_VISIBLE_DEVICES= before the command, and plan without --gpu"
        )


def _user_code_errors(config: Config) -> Iterator[str]:
    found = tasks(config).values()
    for key, weights in {one.reward_key: one.reward.weights for one in found}.items():
        for spec in weights:
            yield from _missing(spec, key, BUILTIN)
    for key, rollout in {one.environment_key: one.rollout for one in found}.items():
        for spec in filter(None, (rollout.environment, *rollout.tools)):
            yield from _missing(spec, key, {})
    for name in config.reward.pass_env if config.trainer.replay_rollouts is None else ():
        if name not in os.environ:
            yield f"reward.pass_env names {shorten(repr(name))}, which is not set here: set it, or drop it"


def _missing(spec: str, key: str, builtin: Mapping[str, str]) -> Iterator[str]:
    try:
        parse_spec(spec, key, builtin)
    except ValueError as error:
        yield str(error)
