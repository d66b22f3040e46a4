"""Megatron's buffers are no state: they are freed while an engine generates, and no value changes."""

import pytest
from megatron_support import MARKS

from verl_fn.backends.hf.lora import Lora

pytestmark = MARKS
EVERY = [
    {},
    {"tp": 2, "sp": True},
    {"pp": 2},
    {"updates_by": "megatron"},
    {"fsdp": True},
    {"tp": 2, "lora": Lora(rank=4, alpha=8.0)},
]


def call(ranks, name, *args):
    return ranks.run(f"megatron_offload_cases.{name}", *args)


@pytest.mark.parametrize("options", EVERY, ids=str)
def test_nothing_is_held_between_calls_and_no_bit_changes(megatron_ranks, folder, options):
    """Gradients are allocated by the first call that computes some, or by Megatron's own optimizer."""
    for sizes, same in call(megatron_ranks(2), "freed", folder, options):
        assert all(same), same
        for weights, none in sizes[::4]:
            assert weights > 0 and none == 0
        for weights, gradients in sizes[1::4]:
            assert weights > 0 and gradients > 0
        assert [*sizes[2::4], *sizes[3::4]] == [[0, 0]] * 4


@pytest.mark.parametrize("options", [{"tp": 2}, {"updates_by": "megatron"}], ids=str)
def test_a_state_that_stays_on_the_cpu(megatron_ranks, folder, options):
    """It is updated and published there."""
    for outputs, weights in call(megatron_ranks(2), "updated_on_the_cpu", folder, options):
        assert outputs <= 2e-6 and weights <= 1e-6


def test_buffers_that_are_freed_and_not_filled_break_a_law(megatron_ranks, folder):
    assert set(call(megatron_ranks(2), "broken", folder, "FreesWithoutForgetting")) != {None}
