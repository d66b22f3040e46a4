"""Environments: classes of the user that answer the policy, so that a response becomes a conversation.

This package is imported by the processes that run environments, so it loads neither torch nor any part of an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import attrs

Message: TypeAlias = Mapping[str, Any]
"""A chat message: ``role`` and ``content``, and any other keys that the chat template knows, as values of JSON."""


@attrs.frozen
class Done:
    """Ends a conversation.

    Attributes:
        reward: the reward of the whole conversation.
        acc: how right it was, from 0 to 1; by default 1 if the reward is at least 1, otherwise 0.

    Example:
        >>> Done(1.0).acc, Done(0.5).acc, Done(0.5, acc=1.0).acc
        (1.0, 0.0, 1.0)
    """

    reward: float
    acc: float = attrs.field()

    @acc.default
    def _whether_right(self) -> float:
        try:
            return float(self.reward >= 1.0)
        except TypeError:
            return 0.0  # what calls the environment refuses a reward that is no number


class Environment(Protocol):
    """The methods of an environment. An instance, made with ``env.arguments``, serves one conversation.

    ``random`` and ``numpy.random`` are seeded before each call, so a conversation can be repeated. Where another
    conversation has ended the process, the calls of an instance are made again in a new one. So an instance must
    depend only on its calls and on these random numbers.

    An instance may have an attribute ``tools`` once ``reset`` has returned: a list of JSON schemas of functions
    that the chat template shows to the model. A method ``close``, if there is one, is called at the end of a
    conversation.

    A class may have a static method ``score_group``. It gets the instances of the conversations of a problem that the
    environment has ended, and returns ``Done`` for each, in place of the one that ``step`` returned. ``close`` is
    called after it.

    Example:
        >>> class Echo:
        ...     def reset(self, problem):
        ...         self.answer = problem.answer
        ...         return [{"role": "user", "content": problem.prompt}]
        ...
        ...     def step(self, reply):
        ...         if reply == self.answer:
        ...             return Done(1.0)
        ...         return [{"role": "user", "content": "again"}]
        >>> from types import SimpleNamespace
        >>> echo = Echo()
        >>> echo.reset(SimpleNamespace(prompt="2+3?", answer="5"))
        [{'role': 'user', 'content': '2+3?'}]
        >>> echo.step("5")
        Done(reward=1.0, acc=1.0)
    """

    def reset(self, problem: Any) -> Sequence[Message]:
        """Begins a conversation.

        Args:
            problem: has the attributes ``prompt``, ``answer``, ``id``, ``data_source`` and ``extra_info`` of a
                ``verl_fn.data.tasks.Problem``.

        Returns:
            The first messages, such as the user's; the model replies to them.
        """
        ...

    def step(self, reply: str) -> Sequence[Message] | Done:
        """Answers a reply of the model. The reply comes without its end token; other special tokens are a part of it.

        Returns:
            Messages to which the model replies, or the end.
        """
        ...
