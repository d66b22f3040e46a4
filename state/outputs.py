"""What a model says about the tokens and rows of a batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .node import Node, node

# Outputs with one value a row; all others have one a token.
PER_ROW = frozenset({"row_values"})


@node
class TokenOutputs(Node):
    """The outputs that were asked for: one value a token, ``[T]``, or one a row, ``[B]``.

    ``logprobs[t]`` is the log-probability of token t at the row's sampling temperature, ``entropy[t]`` the
    entropy of the distribution it was drawn from (both in nats), ``values[t]`` the value of the state before it.
    All three are zero where ``response_mask`` is zero. ``row_values[b]`` is the value of the state after the last token
    of row b: what a reward model says of the whole row.

    >>> import torch
    >>> outputs = TokenOutputs({"logprobs": torch.zeros(3)})
    >>> outputs.logprobs.shape
    torch.Size([3])
    >>> outputs.entropy
    Traceback (most recent call last):
    AttributeError: these outputs have no 'entropy', only ['logprobs']; a loss names what it reads in its needs
    """

    by_name: dict[str, Tensor]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "by_name":
            return super().__getattr__(name)
        if name in self.by_name:
            return self.by_name[name]
        raise AttributeError(
            f"these outputs have no {name!r}, only {sorted(self.by_name)}; a loss names what it reads in its needs"
        )
