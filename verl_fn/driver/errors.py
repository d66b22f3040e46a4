"""Errors of the processes of a run."""

from __future__ import annotations

from typing import Any

from verl_fn.errors import UserError

# Begins the line of a log by which the driver knows an error that comes again after a restart.
ENDED_WITH = "verl_fn ends this process, to be restarted, with "


class ActorDied(UserError, RuntimeError):
    """A worker's process ended; the message has its error and the end of its log."""


class ActorHangs(UserError, RuntimeError):
    """A worker makes no progress while others wait for it; the message has its stack.

    Args:
        message: the error's text.
        member: the worker.
    """

    def __init__(self, message: str, member: Any = None) -> None:
        super().__init__(message)
        self.member = member
