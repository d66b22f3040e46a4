"""Runs micro-batches through Megatron's schedules, with any pipeline, and reads the outputs at its end.

The vocabulary may be shared. No rank ever has logits of all of it, or of its part for all tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from verl_fn.backends.hf.logprobs import Shard, logprobs_and_entropy, sum_pi_squared
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
    shard = Shard(first, group) if sizes.tp > 1 else None
    logprobs, entropies = logprobs_and_entropy(
        at, weight, None, tokens, heat, entropy=entropy, grad_buffer=grad_buffer, softcap=softcap, shard=shard
    )
    outputs = {"logprobs": micro_batch.spread(logprobs)}
    if entropies is not None:
        outputs["entropy"] = micro_batch.spread(entropies)
    if "sum_pi_squared" in wanted:
        squares = sum_pi_squared(at, weight, None, heat, softcap=softcap, shard=shard)
        outputs["sum_pi_squared"] = micro_batch.spread(squares)
    return TokenOutputs({name: t for name, t in outputs.items() if name in wanted})
