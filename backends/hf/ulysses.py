"""Sequence parallelism: ranks share each packed micro-batch, by tokens outside attention and by heads inside.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509). Log-probs come back whole on every rank, so a loss does
not know of it.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from verl_fn.errors import UserError


class LayoutError(UserError, ValueError):
    """Ranks that cannot be laid out as asked."""


@attrs.frozen(eq=False)
class Sequence:
    """One packed sequence over the ranks of a group.

    Attributes:
        group: the ranks.
        tokens: of the sequence.
    """

    group: dist.ProcessGroup
    tokens: int

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def each(self) -> int:
        """Tokens of a rank; the last ranks' are filled up."""
        return -(-self.tokens // self.size)

    @property
    def start(self) -> int:
        """The first token of this rank."""
        return dist.get_rank(self.group) * self.each

    def part(self, x: Tensor) -> Tensor:
        """This rank's tokens of ``[T]``, filled up with zeros."""
        filled = torch.nn.functional.pad(x, (0, self.each * self.size - self.tokens))
        return filled[self.start : self.start + self.each]

    def to_heads(self, x: Float[Tensor, "t heads dim"]) -> Float[Tensor, "T part dim"]:
        """All tokens of a share of the heads, from a share of the tokens of all heads."""
        if x.shape[1] < self.size:
            x = x.repeat_interleave(self.size // x.shape[1], dim=1)
        parts = x.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        return _Exchange.apply(parts, self.group).flatten(0, 1)[: self.tokens]

    def to_tokens(self, x: Float[Tensor, "T part dim"]) -> Float[Tensor, "t heads dim"]:
        """A share of the tokens of all heads, from all tokens of a share of the heads."""
        filled = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, self.each * self.size - self.tokens))
        parts = _Exchange.apply(filled.unflatten(0, (self.size, -1)).contiguous(), self.group)
        return parts.transpose(0, 1).flatten(1, 2)

    def whole(self, x: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """The sum over ranks, each of which has other entries and zeros elsewhere."""
        return _Whole.apply(x, self.group)


class _Exchange(torch.autograd.Function):
    """Part i goes to rank i; what comes back from rank i is part i. Its own inverse."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        found = torch.empty_like(parts)
        dist.all_to_all_single(found, parts, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grad.contiguous(), ctx.group), None


class _Whole(torch.autograd.Function):
    """A sum over ranks that all go on to compute the same loss: each one's gradient is that of its own entries."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        found = x.clone()
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def check_heads(config: Any, sp: int) -> None:
    """Refuse a group that the heads cannot be dealt to.

    Raises:
        LayoutError: ``sp`` does not divide the query heads, or fits badly with the key-value heads.
    """
    heads = config.num_attention_heads
    kv = getattr(config, "num_key_value_heads", None) or heads
    if heads % sp:
        raise LayoutError(f"sp = {sp} does not divide the model's {heads} attention heads")
    if kv % sp and sp % kv:
        raise LayoutError(f"sp = {sp} and the model's {kv} key-value heads: one must be a multiple of the other")
