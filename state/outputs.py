"""The outputs of a model for the tokens and rows of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .frozen import FrozenDict
from .node import Node, mapping, node

# Outputs with one value per row; all others have one value per token.
PER_ROW = frozenset({"row_values"})


def _in_order(by_name: Mapping[str, Tensor]) -> FrozenDict[str, Tensor]:
    return FrozenDict(sorted(by_name.items()))


@node
class TokenOutputs(Node):
    """The requested outputs of a model, by name: one value per token, ``[T]``, or one per row, ``[B]``.

    * ``logprobs[t]``: the log-probability of token t at the row's sampling temperature, in nats.
    * ``entropy[t]``: the entropy of the distribution that token t was drawn from, in nats.
    * ``sum_pi_squared[t]``: the sum of squared probabilities of that distribution, the chance that two draws are
      equal; it has no gradient, so only ``forward`` gives it.
    * ``values[t]``: the value of the state before token t.
    * ``row_values[b]``: the value of the state after the last token of row b; a reward model's score of the row.

    * ``routed_experts[t]``: the experts that token t goes to, ``[L, k]``: their numbers in each layer with experts. A
      backend gives it that can replay it (see the page on Megatron), for every token.

    Other outputs per token are zero where ``response_mask`` is zero.

    Example:
        >>> import torch
        >>> outputs = TokenOutputs({"logprobs": torch.zeros(3)})
        >>> outputs.logprobs.shape
        torch.Size([3])
        >>> outputs.entropy
        Traceback (most recent call last):
        AttributeError: these outputs have no 'entropy', only ['logprobs']; a loss names what it reads in its needs
    """

    # In the order of the names: the needs of a loss are a set, whose order differs between processes.
    by_name: Mapping[str, Tensor] = mapping(converter=_in_order)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "by_name":
            return super().__getattr__(name)
        if name in self.by_name:
            return self.by_name[name]
        raise AttributeError(
            f"these outputs have no {name!r}, only {sorted(self.by_name)}; a loss names what it reads in its needs"
        )
