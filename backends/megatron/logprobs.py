"""Log-probabilities, entropy and collision probability of a shared vocabulary, with few logits at a time.

No rank ever has logits of the whole vocabulary, or of its part for all tokens. With logits of this rank's part r and
their log-normaliser z_r, the log-normaliser of all is z = log sum_r exp(z_r), and the entropy is
sum_r w_r (H_r - log w_r), where w_r = exp(z_r - z) and H_r is the entropy of softmax over only that part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from verl_fn.backends.hf.logprobs import at, default_chunk, gradients, reduce_rows, scaled, slices


def shared_logprobs_and_entropy(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "v H"],
    targets: Int[Tensor, " N"],
    temperature: Float[Tensor, " N"] | None,
    *,
    first: int,
    group: Any,
    entropy: bool = False,
    chunk: int | None = None,
    grad_buffer: Float[Tensor, "v H"] | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    """Returns the log-probabilities of ``targets`` under softmax(logits / temperature), in nats, and the entropies.

    The results are the same on all ranks of ``group``. The gradient of ``hidden`` is this rank's part, whose sum over
    the ranks is the gradient.

    Args:
        hidden: a hidden state for each target, the same on all ranks.
        weight: this rank's rows of the output layer.
        targets: token ids.
        temperature: one for each target; None stands for 1.
        first: the token id of the first of these rows.
        group: the ranks that have the other rows.
        entropy: also compute entropies; otherwise they are None.
        chunk: how many tokens the forward pass computes at a time; the backward pass has as many logits at a time.
        grad_buffer: in fp32; each backward pass adds the gradient of ``weight`` to it, instead of returning one.
        softcap: the bound c of logits c * tanh(logits / c), if they have one.
    """
    chunk = chunk or default_chunk(hidden, weight)
    own = targets - first
    # A kernel writes the gradient of the target where the number of a column is its id; -1 is none.
    own = torch.where((own >= 0) & (own < len(weight)), own, -1)
    logprobs, entropies = _SharedLogProbs.apply(
        hidden, weight, own, temperature, group, entropy, chunk, grad_buffer, softcap
    )
    return logprobs, entropies if entropy else None


@torch.no_grad()
def shared_sum_pi_squared(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "v H"],
    temperature: Float[Tensor, " N"] | None,
    *,
    group: Any,
    chunk: int | None = None,
    softcap: float | None = None,
) -> Float[Tensor, " N"]:
    """Returns the sum of squared probabilities under softmax(logits / temperature), as a constant for autograd.

    With s_r = log sum exp(2 x) over this rank's logits x, it is exp(log sum_r exp(s_r) - 2 z).

    Args:
        hidden: hidden states, the same on all ranks.
        weight: this rank's rows of the output layer.
        temperature: one for each hidden state; None stands for 1.
        group: the ranks that have the other rows.
        chunk: how many tokens are computed at a time.
        softcap: as for ``shared_logprobs_and_entropy``.
    """
    chunk = chunk or default_chunk(hidden, weight)
    own = torch.empty(2, len(hidden), dtype=torch.float32, device=hidden.device)
    for part in slices(len(hidden), chunk):
        logits = scaled(torch.nn.functional.linear(hidden[part], weight), at(temperature, part), softcap)
        own[0, part] = logits.logsumexp(-1)
        own[1, part] = logits.mul_(2.0).logsumexp(-1)
        del logits
    by_rank = own.new_empty(group.size(), *own.shape)
    dist.all_gather_into_tensor(by_rank.view(-1), own.view(-1), group=group)
    log_z, log_squares = by_rank.logsumexp(0)
    return (log_squares - 2.0 * log_z).exp()


class _SharedLogProbs(torch.autograd.Function):
    """The fused function: log-probabilities, and entropies: zeros unless asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        group: Any,
        entropy: bool,
        chunk: int,
        grad_buffer: Tensor | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        log_z, entropies = torch.empty_like(logprobs), torch.zeros_like(logprobs)
        for part in slices(len(hidden), chunk):
            logits = torch.nn.functional.linear(hidden[part], weight)
            of_part = entropies[part] if entropy else None
            heat, own = at(temperature, part), targets[part].clamp(min=0)
            reduce_rows(logits, own, heat, logprobs[part], log_z[part], of_part, softcap)
            del logits
        # Of the target's logit (one rank has it) and of the parts of the normaliser.
        logit = torch.where(targets >= 0, logprobs + log_z, 0.0)
        by_rank = log_z.new_empty(group.size(), len(log_z))
        dist.all_gather_into_tensor(by_rank.view(-1), log_z, group=group)
        whole_z = torch.logsumexp(by_rank, 0)
        if entropy:
            share = log_z - whole_z
            entropies = share.exp() * (entropies - share)
        sums = torch.stack([logit, entropies])
        dist.all_reduce(sums, group=group)
        logprobs, entropies = sums[0] - whole_z, sums[1]
        ctx.save_for_backward(hidden, weight, targets, temperature, whole_z, entropies)
        ctx.entropy, ctx.chunk, ctx.grad_buffer, ctx.softcap = entropy, chunk, grad_buffer, softcap
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, d_logprobs: Tensor, d_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, log_z, entropies = ctx.saved_tensors
        d_hidden, d_weight, _ = gradients(
            hidden, weight, None, targets, temperature, log_z, d_logprobs, entropies if ctx.entropy else None,
            d_entropies, (*ctx.needs_input_grad[:2], False), ctx.chunk * len(weight), ctx.grad_buffer,
            ctx.softcap,
        )  # fmt: skip
        return d_hidden, d_weight, None, None, None, None, None, None, None
