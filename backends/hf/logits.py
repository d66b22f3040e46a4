"""What is computed from logits: log-probabilities and entropies, and gradients in the logits' place.

Kernels do it on CUDA, and torch's functions elsewhere, in fp32 whatever the dtype of the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The most logits that exist at a time: few enough for the caches of a CPU, enough to fill a GPU.
CPU_CHUNK, CUDA_CHUNK = 2**24, 2**27
# A log-probability below which the probability is 0 in fp32. It stands for -inf, since -inf times 0 is NaN.
LEAST = -1e4


def default_chunk(hidden: Tensor, weight: Tensor) -> int:
    """Returns how many tokens to compute at a time, so that their logits stay small."""
    return max(16, (CUDA_CHUNK if hidden.is_cuda else CPU_CHUNK) // max(1, len(weight)))


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
    softcap: float | None = None,
) -> None:
    """Writes log-probabilities, log-normalisers and entropies: with kernels on CUDA, else with torch's functions.

    ``softcap`` is the bound c of logits c * tanh(logits / c); these are divided by the temperature afterwards.

    Example:
        >>> logprobs, log_z = torch.empty(1), torch.empty(1)
        >>> reduce_rows(torch.zeros(1, 4), torch.tensor([1]), None, logprobs, log_z, None)
        >>> round(logprobs.item(), 4), round(log_z.item(), 4)
        (-1.3863, 1.3863)
    """
    if logits.is_cuda:
        _on_cuda().reduce_rows(logits, targets, temperature, logprobs, log_z, entropies, softcap)
        return
    logits = scaled(logits, temperature, softcap)
    torch.logsumexp(logits, -1, out=log_z)
    logprobs.copy_(logits.gather(1, targets[:, None])[:, 0] - log_z)
    if entropies is not None:
        log_probs = logits.sub_(log_z[:, None]).clamp_(min=LEAST)
        entropies.copy_(-torch.einsum("nv,nv->n", log_probs.exp(), log_probs))


def gradient_in_place(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    log_z: Tensor,
    d_logprobs: Tensor,
    entropies: Tensor | None,
    d_entropies: Tensor,
    softcap: float | None = None,
) -> None:
    """Overwrites logits with the gradient with respect to them; a target of -1 is in none of these columns.

    Example:
        >>> logits = torch.zeros(1, 2)
        >>> gradient_in_place(logits, torch.tensor([-1]), None, torch.zeros(1), torch.ones(1), None, torch.zeros(1))
        >>> logits
        tensor([[-1., -1.]])
    """
    if logits.is_cuda:
        _on_cuda().gradient_in_place(logits, targets, temperature, log_z, d_logprobs, entropies, d_entropies, softcap)
        return
    given_logits = logits
    slope = None if softcap is None else torch.cosh(logits.float() / softcap).pow_(-2)
    log_probs = scaled(logits, temperature, softcap).sub_(log_z[:, None])
    probs = log_probs.exp()
    if entropies is None:
        d_logits = probs.mul_(-d_logprobs[:, None])
    else:
        # d entropy / d logit = -p (log p + entropy)
        d_logits = log_probs.clamp_(min=LEAST).add_(entropies[:, None]).mul_(-d_entropies[:, None])
        d_logits = d_logits.sub_(d_logprobs[:, None]).mul_(probs)
    d_logits.scatter_add_(1, targets.clamp(min=0)[:, None], torch.where(targets >= 0, d_logprobs, 0.0)[:, None])
    if temperature is not None:
        d_logits.div_(temperature[:, None])
    if slope is not None:
        d_logits.mul_(slope)
    given_logits.copy_(d_logits)


def scaled(logits: Tensor, temperature: Tensor | None, softcap: float | None = None) -> Tensor:
    """Returns fp32 logits, soft-capped and divided by the temperature, in place where they have this dtype already.

    Example:
        >>> scaled(torch.tensor([[0.0, 1e9]]), torch.tensor([2.0]), softcap=30.0)
        tensor([[ 0., 15.]])
    """
    logits = logits.float()
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits if temperature is None else logits.div_(temperature[:, None])


def entropy_of(log_probs: Tensor) -> Tensor:
    """Returns entropies of log-probabilities; a token of probability 0 adds 0 to the value and the gradient.

    Example:
        >>> entropy_of(torch.tensor([[0.0, -torch.inf], [0.5, 0.5]]).log_softmax(-1)).tolist()
        [-0.0, 0.6931471824645996]
    """
    return -(log_probs.exp() * log_probs.clamp(min=LEAST)).sum(-1)


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
