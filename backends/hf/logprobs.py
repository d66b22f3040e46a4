"""Log-probabilities and entropy from hidden states, without logits of the whole micro-batch, ``[T, vocab]``.

The forward pass computes the logits of a chunk of tokens at a time, reduces them and drops them. The backward pass,
which knows each token's log-normaliser, computes them again for all tokens and a block of the vocabulary at a time:
the gradient of the output layer is then whole with each block, and needs no sum in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Logits of one chunk: small enough for the caches of a CPU, large enough to fill a GPU.
CPU_CHUNK, CUDA_CHUNK = 2**24, 2**27
ALIGNMENT = 256  # of blocks of the vocabulary, for the tiles of a GPU


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
    weight_grad: Float[Tensor, "V H"] | None = None,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    """Returns the log-probabilities of ``targets`` under softmax(logits / temperature), in nats, and the entropies.

    Reductions are in fp32 whatever the dtype of ``hidden``. Results are differentiable in hidden, weight and bias.

    Args:
        hidden: a hidden state for each target.
        weight: of the output layer.
        bias: of the output layer, if it has one.
        targets: token ids.
        temperature: one for each target; None stands for 1.
        entropy: also compute entropies, which are None otherwise.
        chunk: how many tokens are computed at a time; by default as many as keep a chunk's logits within a fixed
            size.
        plain: use torch's own functions on all logits at once, which every ``torch.func`` transformation accepts.
        weight_grad: in fp32; the backward pass adds the gradient of ``weight`` to it, instead of returning one.

    Example:
        >>> lp, h = logprobs_and_entropy(torch.zeros(1, 2), torch.zeros(4, 2), None, torch.tensor([1]), entropy=True)
        >>> round(lp.item(), 4), round(h.item(), 4)
        (-1.3863, 1.3863)
    """
    if plain:
        return _plain(hidden, weight, bias, targets, temperature, entropy)
    chunk = chunk or default_chunk(hidden, weight)
    logprobs, entropies, _ = _LogProbs.apply(hidden, weight, bias, targets, temperature, entropy, chunk, weight_grad)
    return logprobs, entropies if entropy else None


@torch.no_grad()
def sum_pi_squared(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    temperature: Float[Tensor, " N"] | None = None,
    *,
    chunk: int | None = None,
) -> Float[Tensor, " N"]:
    """Returns the sum of squared probabilities under softmax(logits / temperature), as a constant for autograd.

    It is the chance that two draws are the same token.

    Args:
        hidden: hidden states.
        weight: of the output layer.
        bias: of the output layer, if it has one.
        temperature: one for each hidden state; None stands for 1.
        chunk: how many are computed at a time, as for ``logprobs_and_entropy``.

    Example:
        >>> sum_pi_squared(torch.zeros(1, 2), torch.zeros(4, 2), None).tolist()
        [0.25]
    """
    chunk = chunk or default_chunk(hidden, weight)
    sums = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    for part in slices(len(hidden), chunk):
        logits = scaled(torch.nn.functional.linear(hidden[part], weight, bias), at(temperature, part))
        log_z = logits.logsumexp(-1)
        sums[part] = (logits.mul_(2.0).logsumexp(-1) - 2.0 * log_z).exp()
        del logits
    return sums


def default_chunk(hidden: Tensor, weight: Tensor) -> int:
    """Returns how many tokens to compute at a time, so that their logits stay small."""
    return max(16, (CUDA_CHUNK if hidden.is_cuda else CPU_CHUNK) // max(1, len(weight)))


def _plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor | None, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if temperature is not None:
        logits = logits / temperature[:, None]
    log_probs = logits.log_softmax(-1)
    entropies = -(log_probs.exp() * log_probs).sum(-1) if entropy else None
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
        weight_grad: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        log_z = torch.empty_like(logprobs)
        entropies = torch.zeros_like(logprobs)
        for part in slices(len(hidden), chunk):
            logits = torch.nn.functional.linear(hidden[part], weight, bias)
            of_part = entropies[part] if entropy else None
            reduce_rows(logits, targets[part], at(temperature, part), logprobs[part], log_z[part], of_part)
            # Before the next chunk's are made.
            del logits
        return logprobs, entropies, log_z

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        hidden, weight, bias, targets, temperature, ctx.entropy, ctx.chunk, ctx.weight_grad = inputs
        _, entropies, log_z = output
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, log_z, entropies)
        ctx.mark_non_differentiable(*([log_z] if ctx.entropy else [log_z, entropies]))

    @staticmethod
    def backward(ctx: Any, d_logprobs: Tensor, d_entropies: Tensor, d_log_z: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, log_z, entropies = ctx.saved_tensors
        grads = gradients(
            hidden, weight, bias, targets, temperature, log_z, d_logprobs, entropies if ctx.entropy else None,
            d_entropies, needed=ctx.needs_input_grad[:3], size=ctx.chunk * len(weight), weight_grad=ctx.weight_grad,
        )  # fmt: skip
        return *grads, None, None, None, None, None


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
    *,
    needed: Sequence[bool],
    size: int,
    weight_grad: Float[Tensor, "V H"] | None = None,
) -> tuple[Float[Tensor, "N H"] | None, Float[Tensor, "V H"] | None, Float[Tensor, " V"] | None]:
    """Returns the gradients of hidden states, weight and bias, from those of log-probabilities and entropies.

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
        weight_grad: in fp32; the gradient of ``weight`` is added to it, and None is returned for it.

    Example:
        >>> hidden, weight, log_z, d = torch.ones(1, 1), torch.zeros(2, 1), torch.tensor([2.0]).log(), torch.ones(1)
        >>> needed = (False, True, False)
        >>> gradients(hidden, weight, None, torch.tensor([1]), None, log_z, d, None, d, needed=needed, size=1)[1]
        tensor([[-0.5000],
                [ 0.5000]])
    """
    for_hidden, for_weight, for_bias = needed
    d_hidden = torch.zeros_like(hidden, dtype=torch.float32) if for_hidden else None
    d_weight = torch.empty_like(weight) if for_weight and weight_grad is None else None
    d_bias = torch.empty_like(bias) if bias is not None and for_bias else None
    d_logprobs, d_entropies = d_logprobs.contiguous(), d_entropies.contiguous()
    for block in slices(len(weight), _block(size, len(hidden))):
        rows = weight[block]
        logits = torch.nn.functional.linear(hidden, rows, None if bias is None else bias[block])
        own = targets - block.start
        own = torch.where((own >= 0) & (own < len(rows)), own, -1)
        gradient_in_place(logits, own, temperature, log_z, d_logprobs, entropies, d_entropies)
        if d_hidden is not None:
            _add_product(d_hidden, logits, rows)
        if d_weight is not None:
            torch.mm(logits.t(), hidden, out=d_weight[block])
        elif for_weight and weight_grad is not None:
            _add_product(weight_grad[block], logits.t(), hidden)
        if d_bias is not None:
            d_bias[block] = logits.sum(0)
        # Before the next block's are made.
        del logits
    return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias


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
    return rows // ALIGNMENT * ALIGNMENT if rows >= ALIGNMENT else max(1, rows)


def _on_cuda() -> Any:
    # Triton is installed only with CUDA.
    from verl_fn.backends.hf import kernels

    return kernels


def reduce_rows(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    logprobs: Tensor,
    log_z: Tensor,
    entropies: Tensor | None,
) -> None:
    """Writes log-probabilities, log-normalisers and entropies: with kernels on CUDA, else with torch's functions.

    Example:
        >>> logprobs, log_z = torch.empty(1), torch.empty(1)
        >>> reduce_rows(torch.zeros(1, 4), torch.tensor([1]), None, logprobs, log_z, None)
        >>> round(logprobs.item(), 4), round(log_z.item(), 4)
        (-1.3863, 1.3863)
    """
    if logits.is_cuda:
        _on_cuda().reduce_rows(logits, targets, temperature, logprobs, log_z, entropies)
        return
    logits = scaled(logits, temperature)
    torch.logsumexp(logits, -1, out=log_z)
    logprobs.copy_(logits.gather(1, targets[:, None])[:, 0] - log_z)
    if entropies is not None:
        log_probs = logits.sub_(log_z[:, None])
        entropies.copy_(-torch.einsum("nv,nv->n", log_probs.exp(), log_probs))


def gradient_in_place(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    log_z: Tensor,
    d_logprobs: Tensor,
    entropies: Tensor | None,
    d_entropies: Tensor,
) -> None:
    """Overwrites logits with the gradient with respect to them; a target of -1 is in none of these columns.

    Example:
        >>> logits = torch.zeros(1, 2)
        >>> gradient_in_place(logits, torch.tensor([-1]), None, torch.zeros(1), torch.ones(1), None, torch.zeros(1))
        >>> logits
        tensor([[-1., -1.]])
    """
    if logits.is_cuda:
        _on_cuda().gradient_in_place(logits, targets, temperature, log_z, d_logprobs, entropies, d_entropies)
        return
    given_logits = logits
    log_probs = scaled(logits, temperature).sub_(log_z[:, None])
    probs = log_probs.exp()
    if entropies is None:
        d_logits = probs.mul_(-d_logprobs[:, None])
    else:
        # d entropy / d logit = -p (log p + entropy)
        d_logits = log_probs.add_(entropies[:, None]).mul_(-d_entropies[:, None])
        d_logits = d_logits.sub_(d_logprobs[:, None]).mul_(probs)
    d_logits.scatter_add_(1, targets.clamp(min=0)[:, None], torch.where(targets >= 0, d_logprobs, 0.0)[:, None])
    if temperature is not None:
        d_logits.div_(temperature[:, None])
    given_logits.copy_(d_logits)


def scaled(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Returns fp32 logits, divided by the temperature in place where they have this dtype already."""
    logits = logits.float()
    return logits if temperature is None else logits.div_(temperature[:, None])


def slices(n: int, chunk: int) -> list[slice]:
    """Returns the parts of ``n`` tokens that are computed at a time.

    Example:
        >>> slices(5, 3)
        [slice(0, 3, None), slice(3, 5, None)]
    """
    return [slice(i, min(i + chunk, n)) for i in range(0, n, chunk)]


def at(temperature: Tensor | None, part: slice) -> Tensor | None:
    """Returns the temperatures of a part of the tokens."""
    return None if temperature is None else temperature[part]
