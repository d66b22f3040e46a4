"""What the ranks of test_megatron_fsdp.py do; each function runs on all of them together."""

import megatron_mutants
from megatron_cases import first_step, laws, megatron, moves, published, refused, replay_splits, run
from rank_cases import KEY, error_of

from verl_fn.backends.megatron import Megatron
from verl_fn.state import tree
from verl_fn.steps import loss, ppo_clip
from verl_fn.testing import tiny_batch

__all__ = ["after_an_error", "first_step", "laws", "memory", "moves", "published", "refused", "replay_splits", "run"]


def memory(folder):
    """How many elements the layers have, how many of them lie gathered after an update, and how many are own ones."""
    backend, batch = megatron(folder, {"fsdp": True}), tiny_batch()
    state = backend.init(KEY)
    backend.forward(state.params, batch)
    state, _ = backend.apply_update(state, backend.forward_backward(state, batch, ppo_clip())[0])
    groups = backend._built().built.ddp.param_and_grad_buffer.parameter_groups
    units = [group for group in groups if group.fsdp_unit_id is not None]
    layers = sum(param.numel() for group in units for param in group.params)
    held = sum(p.untyped_storage().nbytes() // p.element_size() for group in units for p in group.params)
    return layers, held, sum(group.model_weight_buffer.data.numel() for group in units)


def after_an_error(folder):
    """Whether gradients of two states are what they were, after a loss has raised in between."""
    backend, batch = megatron(folder, {"fsdp": True}), tiny_batch()
    states = backend.init(KEY), backend.init(KEY.fold_in("other"))
    wanted = [backend.forward_backward(state, batch, ppo_clip())[0] for state in states]

    @loss(needs=("logprobs",))
    def broken(outputs, batch):
        raise KeyError("field")

    error = error_of(lambda: backend.forward_backward(states[0], batch, broken), KeyError)
    found = [backend.forward_backward(state, batch, ppo_clip())[0] for state in reversed(states)]
    return error, tree.equal(wanted, found[::-1])


class StartsLate(Megatron):
    """Lets Megatron-FSDP begin its backward pass with the hidden states, after the output layer has a gradient."""

    def _run(self, model, *args, **options):
        fsdp = model.built.ddp.module
        real, fsdp.pre_backward = fsdp.pre_backward, lambda **options: None
        try:
            return super()._run(model, *args, **options)
        finally:
            fsdp.pre_backward = real


megatron_mutants.StartsLate = StartsLate
