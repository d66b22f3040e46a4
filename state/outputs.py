"""The outputs of a model for the tokens and rows of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .batch import Batch
from .node import FrozenDict, Node, mapping, node

# Outputs with one value per row; all others are per token.
PER_ROW = frozenset({"row_values"})
# Prefixes of the names of the likeliest tokens' outputs; the number of tokens follows.
TOP = ("top_logprobs_", "top_ids_")


def top_count(name: str) -> int | None:
    """Returns the number at the end of an output of the likeliest tokens; None for any other name.

    Example:
        >>> top_count("top_ids_8"), top_count("logprobs"), top_count("top_ids_0")
        (8, None, None)
    """
    prefix = next((prefix for prefix in TOP if name.startswith(prefix)), None)
    number = name.removeprefix(prefix) if prefix is not None else ""
    return int(number) if number.isdecimal() and int(number) > 0 else None


def _in_order(by_name: Mapping[str, Tensor]) -> FrozenDict[str, Tensor]:
    return FrozenDict(sorted(by_name.items()))


@node
class TokenOutputs(Node):
    """The requested outputs of a model, by name: per token, ``[T]`` or ``[T, K]``, or one value per row, ``[B]``.

    * ``logprobs[t]``: the log-probability of token t at the row's sampling temperature, in nats.
    * ``entropy[t]``: the entropy of the distribution that token t was drawn from, in nats.
    * ``sum_pi_squared[t]``: the sum of squared probabilities of that distribution, the chance that two draws are
      equal; it has no gradient, so only ``forward`` gives it.
    * ``candidate_logprobs[t, k]``: the log-probability that token t is ``candidates[t, k]``, a field of the batch;
      -inf for an id past the end of the vocabulary.
    * ``top_logprobs_K[t, k]`` and ``top_ids_K[t, k]``, with a number in place of K: the log-probabilities and ids of
      the K likeliest tokens in place of token t, from the likeliest on; as constants, so only ``forward`` gives them.
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


def output_width(name: str, batch: Batch) -> int | None:
    """Returns how many numbers an output has for each token; None for outputs that are vectors.

    Example:
        >>> from verl_fn.state import Batch
        >>> output_width("top_ids_8", Batch.from_rows([[1]])), output_width("logprobs", Batch.from_rows([[1]]))
        (8, None)
    """
    return batch["candidates"].shape[1] if name == "candidate_logprobs" else top_count(name)
