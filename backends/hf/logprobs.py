"""Log-probabilities and entropies from hidden states, without logits of the whole micro-batch, ``[T, vocab]``.

The forward pass computes the logits of a chunk of tokens at a time, reduces them and drops them: kernels do it on
CUDA, torch's functions elsewhere, in fp32 whatever the dtype of the logits. The backward pass computes them again.
The forward pass has left each token's log-normaliser, so the backward pass takes all tokens and a block of the
vocabulary at a time: the gradient of the output layer is whole with each block, and the gradient of the hidden states
is summed in fp32. If the output layer is frozen, it takes a chunk of tokens and the whole vocabulary, without a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import attrs
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from verl_fn.state import NotDifferentiable

# The most logits that exist at a time: few enough for the caches of a CPU, enough to fill a GPU.
CPU_CHUNK, CUDA_CHUNK = 2**24, 2**27
# A log-probability below which the probability is 0 in fp32. It stands for -inf, since -inf times 0 is NaN.
LEAST = -1e4
BLOCK_MULTIPLE = 256  # of the rows of a block, for the tiles of a GPU

Gradients: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]


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
    kernels: Kernels | None = None,
    shard: Shard | None = None,
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
        kernels: of the forward pass; by default torch's product and ``reduce_rows``.
        shard: which rows of the output layer ``weight`` has, if other ranks have the others. Results are the same on
            all of these ranks; the gradient of ``hidden`` is this rank's part, whose sum over them is the gradient.

    Raises:
        ValueError: ``grad_buffer`` is not in fp32, or ``plain`` goes with ``grad_buffer`` or ``shard``.

    Example:
        >>> lp, h = logprobs_and_entropy(torch.zeros(1, 2), torch.zeros(4, 2), None, torch.tensor([1]), entropy=True)
        >>> round(lp.item(), 4), round(h.item(), 4)
        (-1.3863, 1.3863)
    """
    if grad_buffer is not None and (plain or grad_buffer.dtype != torch.float32):
        raise ValueError(
            "plain=True has no grad_buffer" if plain else f"grad_buffer is {grad_buffer.dtype}, not float32"
        )
    if plain and shard is not None:
        raise ValueError("plain=True has no shard")
    if plain:
        return _plain(hidden, weight, bias, targets, temperature, entropy, softcap)
    chunk = chunk or default_chunk(hidden, weight)
    if shard is not None:
        targets = _among(targets, shard.first, len(weight))
    logprobs, entropies, _ = _LogProbs.apply(
        hidden, weight, bias, targets, temperature, entropy, chunk, grad_buffer, softcap, kernels or TORCH, shard
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
    shard: Shard | None = None,
) -> Float[Tensor, " N"]:
    """Returns the sum of squared probabilities under softmax(logits / temperature), as a constant for autograd.

    It is the chance that two draws are the same token. Arguments are as for ``logprobs_and_entropy``.

    Example:
        >>> sum_pi_squared(torch.zeros(1, 2), torch.zeros(4, 2), None).tolist()
        [0.25]
    """
    chunk = chunk or default_chunk(hidden, weight)
    sums = torch.empty(2, len(hidden), dtype=torch.float32, device=hidden.device)
    for part in slices(len(hidden), chunk):
        logits = scaled(torch.nn.functional.linear(hidden[part], weight, bias), at(temperature, part), softcap)
        sums[0, part] = logits.logsumexp(-1)
        sums[1, part] = logits.mul_(2.0).logsumexp(-1)
        del logits
    log_z, log_squares = sums if shard is None else shard.log_sum(sums)
    return (log_squares - 2.0 * log_z).exp()


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
    log_probs = _scaled_for_autograd(logits, temperature, softcap).log_softmax(-1)
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
        kernels: Kernels,
        shard: Shard | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        log_z = torch.empty_like(logprobs)
        entropies = torch.zeros_like(logprobs)
        rows = targets if shard is None else targets.clamp(min=0)
        for part in slices(len(hidden), chunk):
            logits = kernels.product(hidden[part], weight, bias)
            of_part = entropies[part] if entropy else None
            kernels.reduce(logits, rows[part], at(temperature, part), logprobs[part], log_z[part], of_part, softcap)
            # Before the next chunk's are made.
            del logits
        if shard is not None:
            logits = torch.where(targets >= 0, logprobs + log_z, 0.0)
            return shard.joined(logits, log_z, entropies if entropy else None)
        return logprobs, entropies, log_z

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        hidden, weight, bias, targets, temperature, ctx.entropy, ctx.chunk, ctx.grad_buffer, ctx.softcap, *_ = inputs
        _, entropies, log_z = output
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, log_z, entropies)
        ctx.mark_non_differentiable(*([log_z] if ctx.entropy else [log_z, entropies]))

    @staticmethod
    def backward(ctx: Any, d_logprobs: Tensor, d_entropies: Tensor, d_log_z: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, log_z, entropies = ctx.saved_tensors
        grads: Gradients = _Gradients.apply(
            hidden, weight, bias, targets, temperature, log_z, d_logprobs.contiguous(),
            entropies if ctx.entropy else None, d_entropies.contiguous(), ctx.needs_input_grad[:3],
            ctx.chunk * len(weight), ctx.grad_buffer, ctx.softcap,
        )  # fmt: skip
        return *grads, None, None, None, None, None, None, None, None


@attrs.frozen(eq=False)
class Shard:
    """Some rows of an output layer; other ranks have the others.

    With logits of this rank's rows r and their log-normaliser z_r, the log-normaliser of all is
    z = log sum_r exp(z_r), and the entropy is sum_r w_r (H_r - log w_r), where w_r = exp(z_r - z) and H_r is the
    entropy of softmax over only these rows.

    Attributes:
        first: the token id of the first of these rows.
        group: the ranks that share the vocabulary.
    """

    first: int
    group: Any

    def log_sum(self, logs: Float[Tensor, "*n N"]) -> Float[Tensor, "*n N"]:
        """Returns the logarithms of sums over the ranks, from the logarithm of each rank's part."""
        by_rank = logs.new_empty(self.group.size(), *logs.shape)
        dist.all_gather_into_tensor(by_rank.view(-1), logs.view(-1), group=self.group)
        return by_rank.logsumexp(0)

    def joined(
        self, logits: Float[Tensor, " N"], log_z: Float[Tensor, " N"], entropies: Float[Tensor, " N"] | None
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Returns log-probs, entropies and log-normalisers over the whole vocabulary; entropies of None are zeros.

        Args:
            logits: of the targets, on the rank that has them; 0 on the others.
            log_z: the log-normalisers of this rank's rows.
            entropies: of softmax over only these rows.
        """
        whole_z = self.log_sum(log_z)
        share = log_z - whole_z
        parts = torch.zeros_like(log_z) if entropies is None else share.exp() * (entropies - share)
        sums = torch.stack([logits, parts])
        dist.all_reduce(sums, group=self.group)
        return sums[0] - whole_z, sums[1], whole_z


def _among(targets: Tensor, first: int, count: int) -> Tensor:
    """Returns the places of targets among ``count`` rows from ``first`` on; -1 for a target that is none of them."""
    own = targets - first
    return torch.where((own >= 0) & (own < count), own, -1)


def default_chunk(hidden: Tensor, weight: Tensor) -> int:
    """Returns how many tokens to compute at a time, so that their logits stay small."""
    return max(16, (CUDA_CHUNK if hidden.is_cuda else CPU_CHUNK) // max(1, len(weight)))


def on_cuda() -> Any:
    """Returns the module of kernels for GPUs: Triton is installed only with CUDA."""
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
        on_cuda().reduce_rows(logits, targets, temperature, logprobs, log_z, entropies, softcap)
        return
    logits = scaled(logits, temperature, softcap)
    torch.logsumexp(logits, -1, out=log_z)
    logprobs.copy_(logits.gather(1, targets[:, None])[:, 0] - log_z)
    if entropies is not None:
        log_probs = logits.sub_(log_z[:, None]).clamp_(min=LEAST)
        entropies.copy_(-torch.einsum("nv,nv->n", log_probs.exp(), log_probs))


@attrs.frozen
class Kernels:
    """The kernels of the forward pass.

    Attributes:
        product: ``(hidden, weight, bias) -> logits``.
        reduce: as ``reduce_rows``.
    """

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    reduce: Callable[..., None]


TORCH = Kernels(torch.nn.functional.linear, reduce_rows)


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
        on_cuda().gradient_in_place(logits, targets, temperature, log_z, d_logprobs, entropies, d_entropies, softcap)
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


def _scaled_for_autograd(logits: Tensor, temperature: Tensor | None, softcap: float | None) -> Tensor:
    """Does what ``scaled`` does, but not in place, so that autograd can go through it."""
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits if temperature is None else logits / temperature[:, None]


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


def at(numbers: Tensor | None, part: slice) -> Tensor | None:
    """Returns a part of the numbers of tokens, such as temperatures, if there are any."""
    return None if numbers is None else numbers[part]


class _Gradients(torch.autograd.Function):
    """The gradients of hidden states, weight and bias, from the gradients of log-probabilities and entropies.

    They have no derivatives: in these, log-normalisers and entropies would be constants.
    """

    @staticmethod
    def forward(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor | None,
        log_z: Tensor,
        d_logprobs: Tensor,
        entropies: Tensor | None,
        d_entropies: Tensor,
        needed: Sequence[bool],
        size: int,
        grad_buffer: Tensor | None,
        softcap: float | None,
    ) -> Gradients:
        """Returns the gradients that are needed, from at most ``size`` logits at a time, and None for the others."""

        def d_logits(targets: Tensor, tokens: slice = slice(None), rows: slice = slice(None)) -> Tensor:
            logits = torch.nn.functional.linear(hidden[tokens], weight[rows], at(bias, rows))
            gradient_in_place(
                logits, targets, at(temperature, tokens), log_z[tokens], d_logprobs[tokens], at(entropies, tokens),
                d_entropies[tokens], softcap,
            )  # fmt: skip
            return logits

        for_hidden, for_weight, for_bias = needed
        if not for_weight and not for_bias:
            d_hidden = torch.empty_like(hidden)
            for part in slices(len(hidden), max(1, size // max(1, len(weight)))):
                torch.mm(d_logits(targets[part], part), weight, out=d_hidden[part])
            return d_hidden, None, None
        sum_hidden = torch.zeros_like(hidden, dtype=torch.float32) if for_hidden else None
        d_weight = torch.empty_like(weight) if for_weight and grad_buffer is None else None
        d_bias = torch.empty_like(bias) if bias is not None and for_bias else None
        for block in slices(len(weight), _block(size, len(hidden))):
            of_block = d_logits(_among(targets, block.start, block.stop - block.start), rows=block)
            if sum_hidden is not None:
                _add_product(sum_hidden, of_block, weight[block])
            if d_weight is not None:
                torch.mm(of_block.t(), hidden, out=d_weight[block])
            elif for_weight and grad_buffer is not None:
                _add_product(grad_buffer[block], of_block.t(), hidden)
            if d_bias is not None:
                d_bias[block] = of_block.sum(0)
            # Before the next block's are made.
            del of_block
        return None if sum_hidden is None else sum_hidden.to(hidden.dtype), d_weight, d_bias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        """Keeps nothing."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotDifferentiable("these log-probs have no second derivatives; logprobs_and_entropy(plain=True) has")


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
        logprobs: of the targets, with their gradient.
        candidates: token ids; one past the end of the vocabulary, as a model with a larger one gives it, has the
            log-probability -inf.

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
    logits = _scaled_for_autograd(logits, temperature, softcap)
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

    They are constants for autograd. Other arguments are as for ``logprobs_and_entropy``.

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
    for part in slices(len(hidden), chunk or default_chunk(hidden, weight)) or [slice(0, 0)]:
        logits = scaled(torch.nn.functional.linear(hidden[part], weight, bias), at(temperature, part), softcap)
        top = logits.topk(count, -1)
        values.append(top.values - logits.logsumexp(-1, keepdim=True))
        ids.append(top.indices)
        del logits
    return torch.cat(values), torch.cat(ids)
