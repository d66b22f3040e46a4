"""The gradients of log-probabilities and entropies, with few logits at a time.

Each token's log-normaliser is known from the forward pass, so logits can be computed again for all tokens and a block
of the vocabulary. The gradient of the output layer is then whole with each block, and the gradient of the hidden
states is summed in fp32. If the output layer is frozen, logits are computed for a chunk of tokens and the whole
vocabulary, and the gradient of their hidden states needs no sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor

from verl_fn.backends.hf.logits import at, gradient_in_place, slices
from verl_fn.state import NotDifferentiable

BLOCK_MULTIPLE = 256  # of the rows of a block, for the tiles of a GPU

Gradients: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]


def gradients(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " N"],
    temperature: Float[Tensor, " N"] | None,
    log_z: Float[Tensor, " N"],
    d_logprobs: Float[Tensor, " N"],
    entropies: Float[Tensor, " N"] | None,
    d_entropies: Float[Tensor, " N"],
    needed: Sequence[bool],
    size: int,
    grad_buffer: Float[Tensor, "V H"] | None = None,
    softcap: float | None = None,
) -> Gradients:
    """Returns the gradients of hidden states, weight and bias, from the gradients of log-probabilities and entropies.

    Args:
        hidden: a hidden state for each target.
        weight: of the output layer, or rows of it.
        bias: of the output layer, if it has one.
        targets: rows of ``weight``; -1 is none of them.
        temperature: one for each target; None stands for 1.
        log_z: the log-normalisers, over the whole vocabulary.
        d_logprobs: the gradient of the log-probabilities.
        entropies: over the whole vocabulary; None where they were not computed.
        d_entropies: the gradient of the entropies.
        needed: which of the three gradients are computed; the others are None.
        size: the most logits at a time.
        grad_buffer: in fp32; the gradient of ``weight`` is added to it, and None is returned for it.
        softcap: the bound of soft-capped logits, if they have one.

    Raises:
        NotDifferentiable: later, if a derivative of these gradients is taken.

    Example:
        >>> hidden, weight, log_z, d = torch.ones(1, 1), torch.zeros(2, 1), torch.tensor([2.0]).log(), torch.ones(1)
        >>> gradients(hidden, weight, None, torch.tensor([1]), None, log_z, d, None, d, (False, True, False), 1)[1]
        tensor([[-0.5000],
                [ 0.5000]])
    """
    found: Gradients = _Once.apply(
        hidden, weight, bias, targets, temperature, log_z, d_logprobs.contiguous(), entropies,
        d_entropies.contiguous(), needed, size, grad_buffer, softcap,
    )  # fmt: skip
    return found


class _Once(torch.autograd.Function):
    """Gradients without derivatives, in which log-normalisers and entropies would be constants."""

    @staticmethod
    def forward(*given: Any) -> Gradients:
        head = _Head(*given)
        return head.by_block() if any(head.needed[1:]) else head.by_chunk()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        """Keeps nothing."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotDifferentiable("these log-probs have no second derivatives; logprobs_and_entropy(plain=True) has")


@attrs.frozen(eq=False)
class _Head:
    """The arguments of ``gradients``."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    temperature: Tensor | None
    log_z: Tensor
    d_logprobs: Tensor
    entropies: Tensor | None
    d_entropies: Tensor
    needed: Sequence[bool]
    size: int
    grad_buffer: Tensor | None
    softcap: float | None

    def by_block(self) -> Gradients:
        hidden, weight, bias, grad_buffer = self.hidden, self.weight, self.bias, self.grad_buffer
        for_hidden, for_weight, for_bias = self.needed
        d_hidden = torch.zeros_like(hidden, dtype=torch.float32) if for_hidden else None
        d_weight = torch.empty_like(weight) if for_weight and grad_buffer is None else None
        d_bias = torch.empty_like(bias) if bias is not None and for_bias else None
        for block in slices(len(weight), _block(self.size, len(hidden))):
            rows = weight[block]
            own = self.targets - block.start
            own = torch.where((own >= 0) & (own < len(rows)), own, -1)
            d_logits = self._d_logits(hidden, rows, None if bias is None else bias[block], own, slice(None))
            if d_hidden is not None:
                _add_product(d_hidden, d_logits, rows)
            if d_weight is not None:
                torch.mm(d_logits.t(), hidden, out=d_weight[block])
            elif for_weight and grad_buffer is not None:
                _add_product(grad_buffer[block], d_logits.t(), hidden)
            if d_bias is not None:
                d_bias[block] = d_logits.sum(0)
            # Before the next block's are made.
            del d_logits
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias

    def by_chunk(self) -> Gradients:
        d_hidden = torch.empty_like(self.hidden)
        for part in slices(len(self.hidden), max(1, self.size // max(1, len(self.weight)))):
            d_logits = self._d_logits(self.hidden[part], self.weight, self.bias, self.targets[part], part)
            torch.mm(d_logits, self.weight, out=d_hidden[part])
            del d_logits
        return d_hidden, None, None

    def _d_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, part: slice) -> Tensor:
        """Returns the gradient of the logits of a part of the tokens, for these rows of the output layer."""
        logits = torch.nn.functional.linear(hidden, weight, bias)
        entropies = None if self.entropies is None else self.entropies[part]
        gradient_in_place(
            logits, targets, at(self.temperature, part), self.log_z[part], self.d_logprobs[part], entropies,
            self.d_entropies[part], self.softcap,
        )  # fmt: skip
        return logits


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a matrix product to a total in fp32."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.add_(a @ b)


def _block(size: int, tokens: int) -> int:
    """Returns how many rows of the vocabulary to compute at a time.

    Example:
        >>> _block(10_000, 16), _block(100, 16), _block(1, 16)
        (512, 6, 1)
    """
    rows = size // max(1, tokens)
    return rows // BLOCK_MULTIPLE * BLOCK_MULTIPLE if rows >= BLOCK_MULTIPLE else max(1, rows)
