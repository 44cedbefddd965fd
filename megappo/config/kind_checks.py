"""Contradictions that a run of any kind may have, and contradictions of a run that learns from examples."""

from megappo.config.config_error import Errors
from megappo.config.schema import Config

MOST_ROWS = 2**24


def example_errors(config: Config) -> Errors:
    """Yield what a run on examples cannot do."""
    data = config.data
    trainer = config.trainer
    if data.too_long == "truncate_left":
        yield "data.too_long truncate_left would cut the prompt that a response answers: set it to skip"
    named = set(data.columns)
    if config.recipe.trains == "critic":
        named -= {"score", "steps"}
    if config.recipe.has_pairs:
        forms = [{"chosen", "rejected"}]
        expected = "chosen and rejected"
        named -= {"prompt", "margin"}
    else:
        forms = [{"messages"}, {"prompt", "response"}]
        expected = "messages alone, or prompt and response"
    if data.columns and named not in forms:
        names = ", ".join(data.columns)
        yield f"data.columns names {names}: name {expected}, each with the field of the files that holds it"
    if trainer.eval_interval and not data.val_files:
        yield "trainer.eval_interval needs data.val_files, found none: name some, or drop it"


def offload_errors(config: Config) -> Errors:
    """Yield tensors to offload that a frozen model does not have."""
    absent = {"gradients", "optimizer"}.intersection(config.reward_model.offload)
    if absent and config.recipe.trains != "reward_model":
        names = " and ".join(sorted(absent))
        yield f"reward_model.offload names {names}, which only a model that is trained has: set it to [weights]"


def size_errors(config: Config) -> Errors:
    """Yield an error if a step has more rows than any memory holds."""
    rows = config.data.draw_size * config.rows_per_prompt
    if rows > MOST_ROWS:
        yield f"data.train_batch_size and rollout.n make {rows:,} rows a step, more than {MOST_ROWS:,}: lower one"


def hang_errors(config: Config) -> Errors:
    """Yield an error if a hang would be found too late."""
    hang_seconds = config.hang_timeout_seconds
    group_seconds = config.trainer.process_group_timeout_seconds
    if hang_seconds >= group_seconds:
        yield (
            f"trainer.hang_timeout_seconds {hang_seconds:g} must be below trainer.process_group_timeout_seconds "
            f"{group_seconds:g}, which would end a run that hangs before its ranks have logged their stacks: lower it"
        )
