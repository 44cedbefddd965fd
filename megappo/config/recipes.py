"""Table of recipes, the kinds of run, with the facts that configs, placement and estimates need about each.

Extensions may add recipes until the config is read. A recipe's file in `megappo/recipes` builds the parts of the run
and owns its step. This module does not import torch: functions are named here, and imported when they are called.
"""

from dataclasses import dataclass, replace

from megappo.table import Function, Table

LEARNER_KEYS = ("parallel", "offload", "max_tokens_per_micro_batch", "optim", "lora", "recompute", "router")
"""Keys of the section of a model that a run trains, whatever its loss."""
ROLLOUT_KEYS = (
    "rollout",
    "reward",
    "eval",
    "placement.rollout",
    "data.gen_batch_size",
    "data.prompt_key",
    "data.image_key",
    "data.max_image_pixels",
    "data.label_key",
    "data.max_prompt_length",
    "data.order_by",
    "trainer.num_samples",
    "trainer.print_samples",
    "trainer.record_rollouts",
    "trainer.replay_rollouts",
)
"""Keys of a run that samples responses to prompts."""
ACTOR_KEYS = ("placement.actor", *(f"actor.{key}" for key in LEARNER_KEYS))
"""Keys of a run that trains the actor with a loss of its own."""
SCORING_KEYS = ("model_path", "adapter", "weight", "retokenize", "step_separator", *LEARNER_KEYS[:3])
PPO_KEYS = (
    *ROLLOUT_KEYS,
    "actor",
    "critic",
    "ref",
    "teachers",
    "distillation",
    "algorithm",
    "placement.actor",
    "placement.critic",
    "placement.ref",
    "placement.reward_model",
    "trainer.train",
    "trainer.rollout_only",
    "trainer.eval_only",
    "trainer.replay_held_out",
    "trainer.keep_rollouts",
    *(f"reward_model.{key}" for key in SCORING_KEYS),
)
"""Keys of PPO, and of the recipes in its place."""
EXAMPLE_KEYS = ("data.max_length", "data.columns")
RETURN_KEYS = (
    *(f"algorithm.{key}" for key in ("preset", "adv_estimator", "gamma", "lam", "critic_lam", "gae_level")),
    "algorithm.bootstrap_truncated",
    "algorithm.shared_backbone",
    *(f"reward.{key}" for key in ("scale", "clip", "normalize", "length_penalty", "length_penalty_factor")),
    "reward.overlong_buffer",
    "rollout.max_response_length",
)
"""Keys of what the returns of scored trajectories depend on."""
REWARD_MODEL_KEYS = (
    "placement.reward_model",
    "reward_model.center_coef",
    *(f"reward_model.{key}" for key in LEARNER_KEYS),
)


@dataclass(frozen=True)
class Recipe:
    """A kind of run.

    Attributes:
        build: function of a `megappo.trainer.run_builder.RunBuilder` that returns the `Run`.
        loop: function of that run, which runs its steps.
        components: function of the config that returns the run's models, `ComponentSpec`s by name.
        reads: keys, or sections with all of their keys. A key that some recipes name is read by these alone; a key that
            no recipe names, such as trainer.seed, is read by all.
        trains: the model that the run is for: actor, critic or reward_model; "" if it trains nothing.
        has_rollouts: its data are prompts, for rollouts that are sampled or recorded; else examples with responses.
        has_pairs: its examples are pairs of a better and a worse response.
        has_steps: it draws data in steps; else it evaluates a checkpoint once.
    """

    build: Function
    loop: Function
    components: Function
    reads: tuple[str, ...]
    trains: str = "actor"
    has_rollouts: bool = True
    has_pairs: bool = False
    has_steps: bool = True

    def names(self, key: str) -> bool:
        """Return whether `reads` has a dotted key, or a section that it is in."""
        return any(f"{key}.".startswith(f"{one}.") for one in self.reads)


OF_LEARNER = "megappo.placement.components:of_learner"
RECIPES = Table(
    "recipe",
    {
        "ppo": Recipe(
            "megappo.recipes.ppo:build", "megappo.recipes.ppo:loop", "megappo.placement.components:of_ppo", PPO_KEYS
        ),
        "sft": Recipe(
            "megappo.recipes.sft:build",
            "megappo.recipes.sft:loop",
            OF_LEARNER,
            (*EXAMPLE_KEYS, "data.train_on", *ACTOR_KEYS),
            has_rollouts=False,
        ),
        "reward_model": Recipe(
            "megappo.recipes.reward_model:build",
            "megappo.recipes.reward_model:loop",
            OF_LEARNER,
            (*EXAMPLE_KEYS, *REWARD_MODEL_KEYS),
            trains="reward_model",
            has_rollouts=False,
            has_pairs=True,
        ),
        "critic": Recipe(
            "megappo.recipes.critic:build",
            "megappo.recipes.ppo:loop",
            "megappo.placement.components:of_trajectories",
            (*EXAMPLE_KEYS, "data.train_on", *RETURN_KEYS, "critic", "placement.critic", "trainer.keep_rollouts"),
            trains="critic",
            has_rollouts=False,
        ),
    },
)
"""Recipes by trainer.kind."""

OF_PPO = {
    "critic": replace(
        RECIPES["ppo"],
        build="megappo.recipes.critic:build",
        components="megappo.placement.components:of_critic",
        trains="critic",
    ),
    "evaluate": Recipe(
        "megappo.recipes.evaluate:build",
        "megappo.recipes.evaluate:loop",
        "megappo.placement.components:of_evaluation",
        PPO_KEYS,
        trains="",
        has_steps=False,
    ),
    "record": replace(
        RECIPES["ppo"],
        build="megappo.recipes.recording:build",
        loop="megappo.recipes.recording:loop",
        trains="",
    ),
}
"""Recipes that other keys choose in the place of PPO: see `Config.recipe`."""
