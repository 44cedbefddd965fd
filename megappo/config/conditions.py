"""What makes a run read a key: conditions that stand beside keys, and sections, in the schema."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from megappo.config.methods import Method

OFF = (None, False, 0, "", (), "none", "fixed")


@dataclass(frozen=True)
class ReadIf:
    """A run reads the key, or all keys of the section, if the switches are on.

    Attributes:
        switches: the keys that decide; a reason names the first.
        by: a property of the config that decides for them.
        unless: the key is read unless they are on.
        reason: why it is not read.
        but: keys of the section that this is not about.
    """

    switches: tuple[str, ...]
    by: str = ""
    unless: bool = False
    reason: str = "{} is {}"
    but: tuple[str, ...] = ()

    def unread(self, config: Any, name: str) -> str:
        """Why a run of this config does not read a key of this name; "" if it does."""
        is_on = all(attrgetter(key)(config) not in OFF for key in ((self.by,) if self.by else self.switches))
        return "" if is_on != self.unless or name in self.but else self._reason(config)

    def _reason(self, config: Any) -> str:
        value = json.dumps(attrgetter(self.switches[0])(config))
        return self.reason.format(self.switches[0], value.strip('"'))


@dataclass(frozen=True, kw_only=True)
class ReadByMethod(ReadIf):
    """Of a section: the keys that only some of its methods read."""

    methods: Mapping[str, Method]
    reason: str = "{} {} does not read it"

    def unread(self, config: Any, name: str) -> str:
        reading = [method for method, one in self.methods.items() if name in one.reads]
        return self._reason(config) if reading and attrgetter(self.switches[0])(config) not in reading else ""


CLIP_RATIO = ReadIf(
    ("actor.clip_ratio_low", "actor.clip_ratio_high"), unless=True, reason="{} and actor.clip_ratio_high are set"
)
HAS_VALUES = ReadIf(("algorithm.adv_estimator",), by="has_values", reason="{} {} does without values, which gae needs")
HAS_CRITIC = ReadIf(
    ("algorithm.adv_estimator", "algorithm.shared_backbone"),
    by="has_critic",
    reason="this run builds no critic",
    but=("value_clip", "huber_delta", "loss_agg_mode"),
)
HAS_REFERENCE = ReadIf(
    ("algorithm.use_kl_in_reward", "actor.use_kl_loss"),
    by="kl_kinds",
    reason="{} and actor.use_kl_loss are false, so that no reference is built",
)
HAS_KL_LOSS = ReadIf(("actor.use_kl_loss",))
HAS_KL_IN_REWARD = ReadIf(("algorithm.use_kl_in_reward",))
ADAPTS_KL = ReadIf(("algorithm.kl_ctrl.type",))
HAS_WEIGHTS = ReadIf(("algorithm.rollout_correction.level",))
FILTERS_GROUPS = ReadIf(("algorithm.filter_groups.enable",))
SUMS_SCORES = ReadIf(
    ("algorithm.adv_estimator",),
    by="algorithm.method.needs_score_components",
    unless=True,
    reason="{} {} takes the scores one by one, not their sum",
)
HAS_HELD_OUT = ReadIf(("data.val_files", "eval.datasets"), by="held_out_names", reason="{} and eval.datasets are empty")
HAS_EPISODES = ReadIf(("rollout.environment",), by="plays_episodes")
HAS_TOOLS = ReadIf(("rollout.tools",), by="offers_tools", reason="{} is empty")
OWN_ENGINES = ReadIf(("rollout.engines",), unless=True, reason="{} run already")
