"""Runs micro-batches through Megatron's schedules, with any pipeline, and reads the outputs at its end.

The vocabulary may be shared. No rank ever has logits of all of it, or of its part for all tokens. With logits of this
rank's part r and their log-normaliser z_r, the log-normaliser of all is z = log sum_r exp(z_r), and the entropy is
sum_r w_r (H_r - log w_r), where w_r = exp(z_r - z) and H_r is the entropy of softmax over only that part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from verl_fn.backends.hf.logprobs import (
    at,
    default_chunk,
    gradients,
    logprobs_and_entropy,
    reduce_rows,
    scaled,
    slices,
    sum_pi_squared,
)
from verl_fn.backends.megatron.layout import Layout
from verl_fn.backends.megatron.model import Built
from verl_fn.backends.megatron.routing import Routing
from verl_fn.backends.megatron.rows import MicroBatch
from verl_fn.state import Metrics, TokenOutputs

Finish = Callable[[int, MicroBatch, TokenOutputs], tuple[Tensor, Metrics]]


def run(
    built: Built,
    layout: Layout,
    micro_batches: Sequence[MicroBatch],
    wanted: frozenset[str],
    finish: Finish,
    *,
    forward_only: bool,
    routing: Routing | None = None,
) -> None:
    """Runs the forward passes of all micro-batches, and their backward passes unless ``forward_only``.

    Args:
        micro_batches: of this rank; with several pipeline stages, all have as many rows and tokens.
        finish: takes the number of a micro-batch, the micro-batch and its outputs, and returns the loss to
            differentiate and what to report; it is called on the last stage.
        forward_only: compute no gradients.
        routing: what routers record or replay, if they do.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(numbers: Iterator[int], ddp: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        number = next(numbers)
        micro_batch = micro_batches[number]
        with contextlib.nullcontext() if routing is None else routing.of(number, micro_batch):
            hidden = ddp(
                micro_batch.tokens,
                micro_batch.positions,
                None,
                packed_seq_params=micro_batch.packed,
                output_processor=_hidden_states,
                **built.embedded(layout, micro_batch),
            )

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, Metrics]:
            outputs = outputs_of(built, layout, micro_batch, hidden, wanted)
            total, reported = finish(number, micro_batch, outputs)
            if built.fully_sharded and total.requires_grad:
                # Otherwise it begins with the hidden states, and would lose the gradient of the output layer.
                total.register_hook(lambda g: built.ddp.module.pre_backward(skip_backward_hook=False))
            # With a number of tokens Megatron adds the losses up without dividing.
            return total, torch.zeros((), dtype=torch.int, device=hidden.device), reported

        return hidden, loss

    schedule = get_forward_backward_func(layout.sizes.pp, None)
    schedule(
        forward_step_func=forward_step,
        data_iterator=iter(range(len(micro_batches))),
        model=built.ddp,
        num_microbatches=len(micro_batches),
        seq_length=micro_batches[0].tokens.shape[1] * layout.sizes.cp,
        micro_batch_size=len(micro_batches[0].tokens),
        forward_only=forward_only,
    )


def _hidden_states(*, hidden_states: Tensor, **others: Any) -> Tensor:
    """Stops Megatron's model before its output layer: that would make logits of the whole micro-batch."""
    return hidden_states


def outputs_of(
    built: Built, layout: Layout, micro_batch: MicroBatch, hidden: Tensor, wanted: frozenset[str]
) -> TokenOutputs:
    """Returns the outputs for all targets of a micro-batch, or for its rows, on every rank of the last stage.

    Args:
        hidden: the last hidden states of this rank's tokens, ``[t, b, H]``.
    """
    from megatron.core.tensor_parallel import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
    )

    group, sizes = layout.groups.tp, layout.sizes
    values = not wanted.isdisjoint({"values", "row_values"})
    if sizes.sp:
        # Ranks that all compute the same values have the same gradient; of parts of the logits, they add theirs up.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=not values, group=group)
    elif sizes.tp > 1 and not values:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
    hidden = hidden.transpose(0, 1).flatten(0, 1)
    if values:
        layer, by_name = built.model.output_layer, {}
        if "values" in wanted:
            by_name["values"] = micro_batch.spread(layer(hidden.index_select(0, micro_batch.seen)).float()[:, 0])
        if "row_values" in wanted:
            last = layer(hidden.index_select(0, micro_batch.last)).float()[:, 0]
            by_name["row_values"] = micro_batch.spread(last, rows=True)
        return TokenOutputs(by_name)
    at, tokens = hidden.index_select(0, micro_batch.seen), micro_batch.batch.tokens[micro_batch.targets]
    entropy = "entropy" in wanted
    heat, softcap = built.fit.heat(micro_batch.temperature, at)
    # A gradient of the output layer beside the buffer would be the largest of all gradients.
    first, weight, grad_buffer = built.output(layout.tp_rank)
    if sizes.tp == 1:
        logprobs, entropies = logprobs_and_entropy(
            at, weight, None, tokens, heat, entropy=entropy, grad_buffer=grad_buffer, softcap=softcap
        )
    else:
        logprobs, entropies = shared_logprobs_and_entropy(
            at, weight, tokens, heat, first=first, group=group, entropy=entropy, grad_buffer=grad_buffer,
            softcap=softcap,
        )  # fmt: skip
    outputs = {"logprobs": micro_batch.spread(logprobs)}
    if entropies is not None:
        outputs["entropy"] = micro_batch.spread(entropies)
    if "sum_pi_squared" in wanted:
        squares = (
            sum_pi_squared(at, weight, None, heat, softcap=softcap)
            if sizes.tp == 1
            else shared_sum_pi_squared(at, weight, heat, group=group, softcap=softcap)
        )
        outputs["sum_pi_squared"] = micro_batch.spread(squares)
    return TokenOutputs({name: t for name, t in outputs.items() if name in wanted})


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
    the ranks is the gradient. Other arguments are as for ``logprobs_and_entropy``.

    Args:
        hidden: a hidden state for each target, the same on all ranks.
        weight: this rank's rows of the output layer.
        first: the token id of the first of these rows.
        group: the ranks that have the other rows.
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

    With s_r = log sum exp(2 x) over this rank's logits x, it is exp(log sum_r exp(s_r) - 2 z). Arguments are as for
    ``shared_logprobs_and_entropy``.
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
