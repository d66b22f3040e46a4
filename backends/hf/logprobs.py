"""Log-probabilities and entropy from hidden states, without logits of the whole micro-batch, ``[T, vocab]``.

The forward pass computes the logits of a chunk of tokens at a time, reduces them and drops them. The backward pass
computes them again, part by part.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from verl_fn.backends.hf.head_gradients import gradients
from verl_fn.backends.hf.logits import at, default_chunk, entropy_of, reduce_rows, scaled, slices


def logprobs_and_entropy(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " N"],
    temperature: Float[Tensor, " N"] | None = None,
    *,
    entropy: bool = False,
    chunk: int | None = None,
    plain: bool = False,
    grad_buffer: Float[Tensor, "V H"] | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    """Returns the log-probabilities of ``targets`` under softmax(logits / temperature), in nats, and the entropies.

    Reductions are in fp32 whatever the dtype of ``hidden``. Results are differentiable in hidden, weight and bias.

    Args:
        hidden: a hidden state for each target.
        weight: of the output layer.
        bias: of the output layer, if it has one.
        targets: token ids.
        temperature: one for each target; None stands for 1.
        entropy: also compute entropies; otherwise they are None.
        chunk: how many tokens the forward pass computes at a time; by default as many as keep their logits within a
            fixed size. The backward pass has as many logits at a time.
        plain: use torch's own functions on all logits at once; every ``torch.func`` transformation accepts them.
        grad_buffer: in fp32; each backward pass adds the gradient of ``weight`` to it, instead of returning one.
        softcap: the bound c of logits c * tanh(logits / c), if they have one.

    Raises:
        ValueError: ``grad_buffer`` is not in fp32, or goes with ``plain``.

    Example:
        >>> lp, h = logprobs_and_entropy(torch.zeros(1, 2), torch.zeros(4, 2), None, torch.tensor([1]), entropy=True)
        >>> round(lp.item(), 4), round(h.item(), 4)
        (-1.3863, 1.3863)
    """
    if grad_buffer is not None and (plain or grad_buffer.dtype != torch.float32):
        raise ValueError(
            "plain=True has no grad_buffer" if plain else f"grad_buffer is {grad_buffer.dtype}, not float32"
        )
    if plain:
        return _plain(hidden, weight, bias, targets, temperature, entropy, softcap)
    chunk = chunk or default_chunk(hidden, weight)
    logprobs, entropies, _ = _LogProbs.apply(
        hidden, weight, bias, targets, temperature, entropy, chunk, grad_buffer, softcap
    )
    return logprobs, entropies if entropy else None


@torch.no_grad()
def sum_pi_squared(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    temperature: Float[Tensor, " N"] | None = None,
    *,
    chunk: int | None = None,
    softcap: float | None = None,
) -> Float[Tensor, " N"]:
    """Returns the sum of squared probabilities under softmax(logits / temperature), as a constant for autograd.

    It is the chance that two draws are the same token.

    Args:
        hidden: hidden states.
        weight: of the output layer.
        bias: of the output layer, if it has one.
        temperature: one for each hidden state; None stands for 1.
        chunk: how many are computed at a time, as for ``logprobs_and_entropy``.
        softcap: as for ``logprobs_and_entropy``.

    Example:
        >>> sum_pi_squared(torch.zeros(1, 2), torch.zeros(4, 2), None).tolist()
        [0.25]
    """
    chunk = chunk or default_chunk(hidden, weight)
    sums = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    for part in slices(len(hidden), chunk):
        logits = scaled(torch.nn.functional.linear(hidden[part], weight, bias), at(temperature, part), softcap)
        log_z = logits.logsumexp(-1)
        sums[part] = (logits.mul_(2.0).logsumexp(-1) - 2.0 * log_z).exp()
        del logits
    return sums


def _plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor | None,
    entropy: bool,
    softcap: float | None,
) -> tuple[Tensor, Tensor | None]:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if temperature is not None:
        logits = logits / temperature[:, None]
    log_probs = logits.log_softmax(-1)
    entropies = entropy_of(log_probs) if entropy else None
    return log_probs.gather(1, targets[:, None])[:, 0], entropies


class _LogProbs(torch.autograd.Function):
    """The fused function: log-probabilities, entropies (zeros unless asked for) and log-normalisers."""

    @staticmethod
    def forward(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor | None,
        entropy: bool,
        chunk: int,
        grad_buffer: Tensor | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        log_z = torch.empty_like(logprobs)
        entropies = torch.zeros_like(logprobs)
        for part in slices(len(hidden), chunk):
            logits = torch.nn.functional.linear(hidden[part], weight, bias)
            of_part = entropies[part] if entropy else None
            reduce_rows(logits, targets[part], at(temperature, part), logprobs[part], log_z[part], of_part, softcap)
            # Before the next chunk's are made.
            del logits
        return logprobs, entropies, log_z

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        hidden, weight, bias, targets, temperature, ctx.entropy, ctx.chunk, ctx.grad_buffer, ctx.softcap = inputs
        _, entropies, log_z = output
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, log_z, entropies)
        ctx.mark_non_differentiable(*([log_z] if ctx.entropy else [log_z, entropies]))

    @staticmethod
    def backward(ctx: Any, d_logprobs: Tensor, d_entropies: Tensor, d_log_z: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, log_z, entropies = ctx.saved_tensors
        grads = gradients(
            hidden, weight, bias, targets, temperature, log_z, d_logprobs, entropies if ctx.entropy else None,
            d_entropies, ctx.needs_input_grad[:3], ctx.chunk * len(weight), ctx.grad_buffer,
            ctx.softcap,
        )  # fmt: skip
        return *grads, None, None, None, None, None, None
