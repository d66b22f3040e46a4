"""Sequence parallelism: ranks share each packed micro-batch, by tokens outside attention and by heads inside.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509). Every rank gets the log-probs of all tokens, so losses need
not support it.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from verl_fn.backends.hf.config import kv_heads
from verl_fn.errors import UserError


class LayoutError(UserError, ValueError):
    """Ranks cannot share the work as asked, or disagree about it."""


@attrs.frozen(eq=False)
class Sequence:
    """One packed sequence over the ranks of a group.

    Attributes:
        group: the ranks.
        tokens: how many tokens the sequence has.
    """

    group: dist.ProcessGroup
    tokens: int

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """The number of this rank in the group."""
        return dist.get_rank(self.group)

    @property
    def each(self) -> int:
        """How many tokens each rank has, padding of the last ranks included."""
        return -(-self.tokens // self.size)

    @property
    def start(self) -> int:
        """The number of this rank's first token."""
        return self.rank * self.each

    def part(self, x: Tensor) -> Tensor:
        """Returns this rank's part of ``[T]``, padded with zeros."""
        padded = torch.nn.functional.pad(x, (0, self.each * self.size - self.tokens))
        return padded[self.start : self.start + self.each]

    def to_heads(self, x: Float[Tensor, "t heads dim"]) -> Float[Tensor, "T part dim"]:
        """Exchanges this rank's tokens of all heads for all tokens of this rank's heads."""
        if x.shape[1] < self.size:
            x = x.repeat_interleave(self.size // x.shape[1], dim=1)
        parts = x.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        return _Exchange.apply(parts, self.group).flatten(0, 1)[: self.tokens]

    def to_tokens(self, x: Float[Tensor, "T part dim"]) -> Float[Tensor, "t heads dim"]:
        """Exchanges all tokens of this rank's heads for this rank's tokens of all heads."""
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, self.each * self.size - self.tokens))
        parts = _Exchange.apply(padded.unflatten(0, (self.size, -1)).contiguous(), self.group)
        return parts.transpose(0, 1).flatten(1, 2)

    def whole(self, x: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Returns the sum over ranks, each of which has its own entries and zeros elsewhere."""
        return Whole.apply(x, self.group)


class _Exchange(torch.autograd.Function):
    """Sends part i to rank i and receives part i from rank i. It is its own inverse."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grad.contiguous(), ctx.group), None


class Whole(torch.autograd.Function):
    """Sums over ranks that then all compute the same loss, so each rank's gradient is its own entries' gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def check_heads(config: Any, sp: int) -> None:
    """Raises an error if ``sp`` ranks cannot share the heads of a model.

    Raises:
        LayoutError: ``sp`` does not divide the query heads, or neither of ``sp`` and the key-value heads divides the
            other.
    """
    if sp == 1:
        # State-space models have no heads.
        return
    text = config.get_text_config()
    heads, kv = text.num_attention_heads, kv_heads(text)
    if heads % sp:
        raise LayoutError(f"sp = {sp} does not divide the model's {heads} attention heads")
    if kv % sp and sp % kv:
        raise LayoutError(f"sp = {sp} and the model's {kv} key-value heads: one must be a multiple of the other")
