"""The options of algorithms that sample and then imitate: a teacher, or the best of their own responses."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from attrs.validators import ge, le

from .aggregation import Aggregation
from .fields import MOST, one_of, opt, paths
from .roles import LearnsFrom, Role, one_a_step


@attrs.frozen(kw_only=True)
class Distill(Aggregation):
    """Options of distillation on policy."""

    teacher: str = paths("", "model folder of the teacher; its tokenizer must be the student's")
    kl: str = opt(
        "reverse", "reverse: KL(student || teacher); forward: KL(teacher || student)", one_of("reverse", "forward")
    )
    top_k: int = opt(
        0,
        "compare the probabilities of the teacher's K likeliest tokens and of the rest; 0: of the drawn token alone",
        ge(0),
        le(1024),
    )

    @property
    def roles(self) -> Mapping[str, Role]:
        """Returns the actor, which is the student, and the teacher."""
        return {"actor": Role(), "teacher": Role(trained=False, path=self.teacher)}

    @property
    def min_n(self) -> int:
        """Returns 1: responses are not compared."""
        return 1

    @property
    def learns_from(self) -> LearnsFrom:
        """Returns ``samples``."""
        return "samples"

    @property
    def needs_reward(self) -> bool:
        """Returns False: the teacher says it all."""
        return False

    updates = staticmethod(one_a_step)


@attrs.frozen(kw_only=True)
class Rejection(Aggregation):
    """Options of rejection sampling: best of n, then fine-tuning on it."""

    min_score: float | None = opt(
        None, "learn from the best response to a prompt only if it scores at least this", ge(-MOST), le(MOST)
    )

    @property
    def roles(self) -> Mapping[str, Role]:
        """Returns the actor alone."""
        return {"actor": Role()}

    @property
    def min_n(self) -> int:
        """Returns 2: the best of several responses is taken."""
        return 2

    @property
    def learns_from(self) -> LearnsFrom:
        """Returns ``samples``."""
        return "samples"

    @property
    def needs_reward(self) -> bool:
        """Returns True."""
        return True

    updates = staticmethod(one_a_step)
