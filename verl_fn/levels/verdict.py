"""Verdicts of checks, of parts, of levels and of a whole run of ``verl-fn levels``.

A level passes only if every check that it is defined by was made and held. What says nothing about the provider,
such as a missing package, blocks a level and never fails it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs


class Verdict(enum.StrEnum):
    """What became of a deliverable."""

    PASS = "Pass"
    FAIL = "Fail"
    BLOCKED = "Blocked"
    SKIPPED = "Skipped"
    NOT_REQUESTED = "Not requested"


STATUS = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.BLOCKED: 3}
"""The exit status of the command for its result."""


@attrs.frozen
class Check:
    """One criterion of a level.

    Attributes:
        name: what must hold.
        held: whether it does.
        found: what was measured, with the bar.
    """

    name: str
    held: bool
    found: str


@attrs.frozen
class Outcome:
    """What one process of a level found.

    Attributes:
        checks: the criteria that it looked at.
        limitations: what it could not test.
        notes: what it did, for the evidence.
        imports: the folder that each process imported ``megatron.bridge`` and ``megatron.core`` from.
        blocked: why it could not test the provider; empty if it could.
        failed: the error that ended it; empty if none did.
    """

    checks: tuple[Check, ...] = ()
    limitations: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    imports: Mapping[str, str] = attrs.field(factory=dict)
    blocked: str = ""
    failed: str = ""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Outcome:
        """Returns the outcome that ``attrs.asdict`` made a table of.

        Example:
            >>> outcome = Outcome((Check("one", True, "1"),), notes=("a",))
            >>> Outcome.of(attrs.asdict(outcome)) == outcome
            True
        """
        many = {name: tuple(saved[name]) for name in ("limitations", "notes")}
        return cls(**{**saved, **many, "checks": tuple(Check(**check) for check in saved["checks"])})


@attrs.frozen
class Deliverable:
    """A line of the report.

    Attributes:
        name: of the deliverable.
        verdict: what became of it.
        reason: why, in one sentence.
        outcomes: of its processes, by the names of their logs.
    """

    name: str
    verdict: Verdict
    reason: str
    outcomes: Mapping[str, Outcome] = attrs.field(factory=dict)

    @property
    def checks(self) -> list[Check]:
        """The checks of all its processes."""
        return [check for outcome in self.outcomes.values() for check in outcome.checks]


def of_level(name: str, required: Sequence[str], outcomes: Mapping[str, Outcome]) -> Deliverable:
    """Returns the verdict about a level.

    Args:
        name: of the level.
        required: the names of the checks that it is defined by.
        outcomes: of its processes, by name.

    Example:
        >>> of_level("Level 0", ["a", "b"], {"one": Outcome((Check("a", True, "0 of 1"),))}).reason
        'not checked: b'
        >>> of_level("Level 0", ["a"], {"one": Outcome((Check("a", False, "3 of 1"),))}).reason
        'a: 3 of 1'
    """
    checks = [check for outcome in outcomes.values() for check in outcome.checks]
    missed = [check for check in checks if not check.held]
    failed = [outcome.failed for outcome in outcomes.values() if outcome.failed]
    blocked = [outcome.blocked for outcome in outcomes.values() if outcome.blocked]
    absent = [one for one in required if one not in {check.name for check in checks}]
    if missed:
        reasons = [f"{check.name}: {check.found}" for check in missed]
        return Deliverable(name, Verdict.FAIL, "; ".join([*reasons, *failed]), outcomes)
    if failed:
        return Deliverable(name, Verdict.FAIL, failed[0], outcomes)
    if blocked:
        return Deliverable(name, Verdict.BLOCKED, blocked[0], outcomes)
    if absent or not checks:
        return Deliverable(name, Verdict.FAIL, f"not checked: {', '.join(absent) or 'anything'}", outcomes)
    return Deliverable(name, Verdict.PASS, f"{len(checks)} checks held", outcomes)


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """Returns the result of a run: Fail before Blocked before Pass, and Pass only if something passed.

    Example:
        >>> overall([Verdict.PASS, Verdict.SKIPPED]), overall([Verdict.BLOCKED, Verdict.FAIL]), overall([])
        (<Verdict.PASS: 'Pass'>, <Verdict.FAIL: 'Fail'>, <Verdict.BLOCKED: 'Blocked'>)
    """
    found = set(verdicts)
    for verdict in (Verdict.FAIL, Verdict.BLOCKED):
        if verdict in found:
            return verdict
    return Verdict.PASS if Verdict.PASS in found else Verdict.BLOCKED
