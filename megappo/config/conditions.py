"""The conditions under which a run reads keys: each section of the schema lists its own in `read_if`."""

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
        keys: names in the section; the name of a section stands for all of its keys.
        switches: the dotted keys that decide.
        by: a property of the config that decides in their place.
        unless: the keys are read unless all switches are on.
        reason: why they are not read; {} stand for the first switch and its value.
        but: keys of a section in `keys` that are always read.
    """

    keys: str
    switches: str
    by: str = ""
    unless: bool = False
    reason: str = "{} is {}"
    but: str = ""

    def reads(self, config: Any, name: str) -> bool:
        """Whether a run of this config reads a key of this name."""
        is_on = all(attrgetter(key)(config) not in OFF for key in (self.by or self.switches).split())
        return is_on != self.unless or name in self.but.split()


@dataclass(frozen=True, kw_only=True)
class ReadByMethod(ReadIf):
    """For the keys of a section that only some of its methods read."""

    methods: Mapping[str, Method]
    reason: str = "{} {} does not read it"

    def reads(self, config: Any, name: str) -> bool:
        reading = [method for method, one in self.methods.items() if name in one.reads]
        return not reading or attrgetter(self.switches)(config) in reading


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
