"""Groups of conversations that the environment scores together: those of a problem in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from .conversation import Conversation
from .processes import Call, Failure, Result, Scores, Scoring


class Groups:
    """Has the environment score each group once, when the last of its conversations has ended.

    The environment gets the conversations that it has ended, in the order of their numbers. Others of the group keep
    their reward of 0, or have failed. If the scoring fails, so have all conversations that were to be scored.

    Args:
        conversations: of all groups.
        environments: answers jobs; without the attribute ``scores_groups``, or where it is false, nothing is scored.
    """

    def __init__(
        self, conversations: Sequence[Conversation], environments: Callable[[Sequence[Call]], list[Result]]
    ) -> None:
        self._environments = environments
        together = getattr(environments, "scores_groups", False)
        by_number = groupby(conversations, lambda one: one.group)
        self._open = {number: list(group) for number, group in by_number} if together else {}

    def score(self, advanced: Sequence[Conversation]) -> list[str]:
        """Scores the groups that have ended with these conversations.

        Returns:
            A sentence about each conversation that failed.
        """
        numbers = sorted({one.group for one in advanced if one.group in self._open})
        ended = [n for n in numbers if all(one.reason is not None for one in self._open[n])]
        groups = [[one for one in self._open.pop(n) if one.reason == "done"] for n in ended]
        groups = [group for group in groups if group]
        if not groups:
            return []
        failures = []
        results = self._environments([_scoring(group) for group in groups])
        for group, result in zip(groups, results, strict=True):
            if isinstance(result, Failure):
                for one in group:
                    one.reason, one.score, one.acc = result.reason, 0.0, 0.0
                    failures.append(f"{one.label} first: in scoring its group the environment {result.problem}")
                continue
            assert isinstance(result, Scores)
            for one, end in zip(group, result.ends, strict=True):
                one.score, one.acc = end.reward, end.acc
        return failures


def _scoring(group: Sequence[Conversation]) -> Scoring:
    """Returns the job that scores conversations of a request."""
    seed = group[0].request.key.fold_in("environment").fold_in("group").seed() % 2**32
    return Scoring(seed, tuple(one.job() for one in group))
