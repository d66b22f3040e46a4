"""Log-probabilities of several tokens at each place: of given ones, with a gradient, and of the likeliest ones."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from verl_fn.backends.hf.logits import at, default_chunk, scaled, slices


def candidate_logprobs(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " N"],
    logprobs: Float[Tensor, " N"],
    candidates: Int[Tensor, "N K"],
    temperature: Float[Tensor, " N"] | None = None,
    *,
    softcap: float | None = None,
) -> Float[Tensor, "N K"]:
    """Returns the log-probabilities of ``candidates`` under softmax(logits / temperature), in nats.

    Their logits minus the target's logit, added to the target's log-probability: the normaliser is computed once, by
    ``logprobs_and_entropy``. The rows of ``weight`` for all candidates, ``[N, K, H]``, are held for the gradient.

    Args:
        hidden: a hidden state for each target.
        weight: of the output layer.
        bias: of the output layer, if it has one.
        targets: token ids.
        logprobs: of the targets, with their gradient.
        candidates: token ids; one past the end of the vocabulary, as a model with a larger one gives it, has the
            log-probability -inf.
        temperature: one for each target; None stands for 1.
        softcap: the bound of soft-capped logits, if they have one.

    Example:
        >>> ids, log_half = torch.tensor([[0, 1]]), torch.tensor([0.5]).log()
        >>> candidate_logprobs(torch.zeros(1, 3), torch.zeros(2, 3), None, torch.tensor([1]), log_half, ids).exp()
        tensor([[0.5000, 0.5000]])
    """
    outside = candidates >= len(weight)
    ids = torch.cat([candidates.masked_fill(outside, 0), targets[:, None]], 1)
    logits = torch.einsum("nh,nkh->nk", hidden.float(), weight[ids].float())
    if bias is not None:
        logits = logits + bias[ids].float()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if temperature is not None:
        logits = logits / temperature[:, None]
    return (logprobs[:, None] + logits[:, :-1] - logits[:, -1:]).masked_fill(outside, -torch.inf)


@torch.no_grad()
def top_logprobs(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    count: int,
    temperature: Float[Tensor, " N"] | None = None,
    *,
    chunk: int | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "N K"], Int[Tensor, "N K"]]:
    """Returns the log-probabilities of the likeliest tokens, from the likeliest on, and their ids.

    They are constants for autograd.

    Args:
        hidden: hidden states.
        weight: of the output layer.
        bias: of the output layer, if it has one.
        count: how many tokens.
        temperature: one for each hidden state; None stands for 1.
        chunk: how many hidden states are computed at a time, as for ``logprobs_and_entropy``.
        softcap: the bound of soft-capped logits, if they have one.

    Raises:
        ValueError: the vocabulary has fewer tokens.

    Example:
        >>> log_probs, ids = top_logprobs(torch.ones(1, 1), torch.tensor([[0.0], [2.0], [1.0]]), None, 2)
        >>> ids.tolist(), round(float(log_probs[0, 0] - log_probs[0, 1]), 4)
        ([[1, 2]], 1.0)
    """
    if count > len(weight):
        raise ValueError(f"the {count} likeliest tokens are asked for, and the vocabulary has {len(weight)}")
    values, ids = [], []
    for part in slices(len(hidden), chunk or default_chunk(hidden, weight)):
        logits = scaled(torch.nn.functional.linear(hidden[part], weight, bias), at(temperature, part), softcap)
        top = logits.topk(count, -1)
        values.append(top.values - logits.logsumexp(-1, keepdim=True))
        ids.append(top.indices)
        del logits
    if not values:
        return hidden.new_zeros(0, count, dtype=torch.float32), hidden.new_zeros(0, count, dtype=torch.int64)
    return torch.cat(values), torch.cat(ids)
