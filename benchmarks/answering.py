"""The environment of ``verl-fn bench turns``; its processes import it without torch."""

from __future__ import annotations

from typing import Any

from verl_fn.environments import Done


class Answering:
    """Answers at once, always with the same message, and ends after so many replies.

    Args:
        turns: replies of a conversation.
        message: the answer to each but the last.
    """

    def __init__(self, turns: int, message: str) -> None:
        self.turns, self.message = turns, message

    def reset(self, problem: Any) -> list[dict[str, str]]:
        """Returns the problem's prompt as a message of the user."""
        self.replies = 0
        return [{"role": "user", "content": problem.prompt}]

    def step(self, reply: str) -> list[dict[str, str]] | Done:
        """Returns the message, or the end after the last reply."""
        self.replies += 1
        return Done(1.0) if self.replies == self.turns else [{"role": "user", "content": self.message}]
