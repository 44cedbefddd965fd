"""What makes a run read keys: each section of the schema lists its conditions in `read_if`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from megappo.config.methods import Method

OFF = (None, False, 0, "", (), "none", "fixed")
"""Values of a switch that is off."""


@dataclass(frozen=True)
class ReadIf:
    """A run reads these keys if all switches are on. Several keys are separated by spaces.

    Attributes:
        keys: names in the section; of a section it holds for what is in it.
        switches: the keys that decide, dotted; a reason names the first.
        by: a property of the config that decides for them.
        unless: the keys are read unless all are on.
        reason: why they are not read.
        but: keys of a section in `keys` that are read all the same.
    """

    keys: str
    switches: str
    by: str = ""
    unless: bool = False
    reason: str = "{} is {}"
    but: str = ""

    def unread(self, config: Any, name: str) -> str:
        """Why a run of this config does not read a key of this name; "" if it does."""
        is_on = all(attrgetter(key)(config) not in OFF for key in (self.by or self.switches).split())
        return "" if is_on != self.unless or name in self.but.split() else self.told(config)

    def told(self, config: Any) -> str:
        """The reason, in which {} stand for the first switch and its value."""
        switch = self.switches.split()[0]
        return self.reason.format(switch, json.dumps(attrgetter(switch)(config)).strip('"'))


@dataclass(frozen=True, kw_only=True)
class ReadByMethod(ReadIf):
    """Of a section: the keys that only some of its methods read."""

    methods: Mapping[str, Method]
    reason: str = "{} {} does not read it"

    def unread(self, config: Any, name: str) -> str:
        reading = [method for method, one in self.methods.items() if name in one.reads]
        return self.told(config) if reading and attrgetter(self.switches)(config) not in reading else ""


HAS_VALUES = ReadIf(
    "critic lam_alpha critic_lam bootstrap_truncated shared_backbone",
    "algorithm.adv_estimator",
    by="has_values",
    reason="{} {} does without values, which gae needs",
)
HAS_REFERENCE = ReadIf(
    "ref",
    "algorithm.use_kl_in_reward actor.use_kl_loss",
    by="kl_kinds",
    reason="{} and actor.use_kl_loss are false, so that no reference is built",
)
HAS_HELD_OUT = ReadIf(
    "val_n val_temperature val_top_p val_top_k val_pass_threshold num_samples",
    "data.val_files eval.datasets",
    by="held_out_names",
    reason="{} and eval.datasets are empty",
)
ONE_CLIP_RATIO = ReadIf(
    "clip_ratio",
    "actor.clip_ratio_low actor.clip_ratio_high",
    unless=True,
    reason="{} and actor.clip_ratio_high are set",
)
SUMS_SCORES = ReadIf(
    "scale clip normalize length_penalty",
    "algorithm.adv_estimator",
    by="algorithm.method.needs_score_components",
    unless=True,
    reason="{} {} takes the scores one by one, not their sum",
)
HAS_CRITIC = ReadIf(
    "critic",
    "algorithm.adv_estimator algorithm.shared_backbone",
    by="has_critic",
    reason="this run builds no critic",
    but="value_clip huber_delta loss_agg_mode",
)
