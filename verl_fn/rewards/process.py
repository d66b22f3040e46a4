"""A process that runs reward functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl_fn.rewards import worker
from verl_fn.rewards.child import Child, GarbledError, garbled, one_line, parsed
from verl_fn.rewards.reward import RewardError
from verl_fn.rewards.worker import KINDS, Outcome


class RewardProcess(Child):
    """A process that runs reward functions.

    Args:
        folder: the current folder of the process.
        environment: its environment variables.
    """

    def __init__(self, folder: str, environment: Mapping[str, str]) -> None:
        super().__init__(worker.__file__, folder, environment)

    def load(self, functions: Sequence[str], folder: str, timeout: float, arguments: Mapping[str, Any]) -> list[str]:
        """Loads the functions in the process, with their arguments, and returns the kind of each.

        Raises:
            RewardError: a function cannot be loaded.
        """
        reply = self.greet([folder, list(functions), timeout, arguments], "reward.functions", RewardError)
        match reply:
            case [*kinds] if len(kinds) == len(functions) and all(kind in KINDS for kind in kinds):
                return kinds
        raise RewardError(f"importing reward.functions {garbled(json.dumps(reply).encode())}")

    def reports(self) -> list[tuple[int | None, Outcome | None]]:
        """Returns what has arrived: the place of each row, with None if it has begun, otherwise with its outcome.

        A string in place of None stands for a failure of the whole call.

        Raises:
            EOFError, OSError: the process has ended or closed its connection.
            GarbledError: something other than reports has arrived.
        """
        return [_report(line) for line in self.lines(0.0)]


def _report(line: bytes) -> tuple[int | None, Outcome | None]:
    match parsed(line):
        case str(problem):
            return None, one_line(problem)
        case [int(row), None]:
            return row, None
        case [int(row), str(problem)]:
            return row, one_line(problem)
        case [int(row), [float(score), float() | None as acc, str() | None as pred, dict(metrics)]] if all(
            isinstance(value, float | str) for value in metrics.values()
        ):
            return row, (score, acc, pred, metrics)
    raise GarbledError(garbled(line))
