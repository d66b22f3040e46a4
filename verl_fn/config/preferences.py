"""The options of algorithms that learn from preferences, each the ``[algorithm]`` table under its ``name``."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from attrs.validators import ge, gt, le, lt

from .fields import MOST, one_of, opt
from .roles import LearnsFrom, Role, one_a_step

LOSS_TYPES = ("dpo", "cdpo", "ipo", "simpo", "orpo", "kto")
WITHOUT_REFERENCE = ("simpo", "orpo")
# The options that only one loss reads.
OF_LOSS_TYPE: Mapping[str, tuple[str, ...]] = {
    "cdpo": ("label_smoothing",),
    "simpo": ("simpo_gamma",),
    "kto": ("desirable_weight", "undesirable_weight"),
}


@attrs.frozen(kw_only=True)
class DPO:
    """Options of direct preference optimization and its family."""

    loss_type: str = opt("dpo", "dpo, cdpo, ipo, simpo, orpo, or kto, which needs no pairs", one_of(*LOSS_TYPES))
    beta: float | None = opt(
        None,
        "scale of implicit rewards; orpo's weight of the odds ratio; by default 0.1, for simpo 2",
        gt(0),
        le(MOST),
    )
    label_smoothing: float = opt(0.1, "cdpo: share of the preferences that are wrong", ge(0), lt(0.5))
    simpo_gamma: float = opt(1.0, "simpo: margin by which the preferred response must win", ge(0), le(MOST))
    desirable_weight: float = opt(1.0, "kto: weight of desirable responses", ge(0), le(MOST))
    undesirable_weight: float = opt(1.0, "kto: weight of undesirable responses", ge(0), le(MOST))

    @property
    def roles(self) -> Mapping[str, Role]:
        """Returns the actor, and the reference policy unless the loss has none."""
        if self.loss_type in WITHOUT_REFERENCE:
            return {"actor": Role()}
        return {"actor": Role(), "reference": Role(trained=False, copy_of="actor")}

    @property
    def learns_from(self) -> LearnsFrom:
        """Returns ``labels`` for kto, otherwise ``pairs``."""
        return "labels" if self.loss_type == "kto" else "pairs"

    @property
    def needs_reward(self) -> bool:
        """Returns False: nothing is sampled."""
        return False

    @property
    def min_n(self) -> int:
        """Returns 1: nothing is sampled."""
        return 1

    updates = staticmethod(one_a_step)


@attrs.frozen(kw_only=True)
class RewardModel:
    """Options of a reward model: a value head that scores whole responses, trained on pairs (Bradley-Terry)."""

    center_rewards_coefficient: float = opt(
        0.0,
        "weight of the squared sum of a pair's scores, which keeps scores of different prompts comparable",
        ge(0),
        le(MOST),
    )

    @property
    def roles(self) -> Mapping[str, Role]:
        """Returns the actor, which is the reward model: it is evaluated and exported."""
        return {"actor": Role(head="value")}

    @property
    def learns_from(self) -> LearnsFrom:
        """Returns ``pairs``."""
        return "pairs"

    @property
    def needs_reward(self) -> bool:
        """Returns False: nothing is sampled."""
        return False

    @property
    def min_n(self) -> int:
        """Returns 1: nothing is sampled."""
        return 1

    updates = staticmethod(one_a_step)
