"""Megatron-FSDP in place of Megatron's DDP: the laws, the first steps beside one process, and what it refuses."""

import pytest
from megatron_support import EXPERTS, MARKS, check_first_step, check_run

from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.local import Local
from verl_fn.state import tree
from verl_fn.steps import ppo_clip
from verl_fn.testing import tiny_batch

pytestmark = MARKS
FSDP = {"fsdp": True}
UNTIED = {"tie_word_embeddings": False}


def call(ranks, name, *args):
    return ranks.run(f"megatron_fsdp_cases.{name}", *args)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        (UNTIED, {"checkpointing": True}),
        (UNTIED, {"head": "value", "cp": 2}),
        (EXPERTS, {}),
        (EXPERTS, {"ep": 2, "checkpointing": True}),
    ],
    ids=str,
)
def test_the_first_steps_are_those_of_one_process(megatron_ranks, small, settings, options):
    check_first_step(call(megatron_ranks(2), "first_step", small(**settings), FSDP | options, 9)[0])


def test_the_first_steps_in_bf16(megatron_ranks, small):
    worst = call(megatron_ranks(2), "first_step", small(**UNTIED), FSDP | {"dtype": "bfloat16"}, 9)[0]
    assert worst["loss"] <= 1e-3 and worst["grad_norm"] <= 5e-3 and worst["gradient"] <= 0.05, worst


def test_fewer_rows_than_ranks(megatron_ranks, small):
    worst = call(megatron_ranks(2), "first_step", small(), FSDP, 1)[0]
    assert worst["loss"] <= 1e-6 and worst["gradient"] <= 1e-4, worst


@pytest.mark.parametrize(
    ("size", "options", "name"),
    [(1, {}, "Megatron"), (2, {"checkpointing": True, "head": "value"}, "FreesBuffers")],
    ids=str,
)
def test_laws(megatron_ranks, small, size, options, name):
    call(megatron_ranks(size), "laws", small(num_hidden_layers=1, **UNTIED), FSDP | options, 1e-5, name)


def test_routes_are_replayed(megatron_ranks, small):
    call(megatron_ranks(2), "replay_splits", small(**EXPERTS), FSDP | {"ep": 2}, 1e-5)


@pytest.mark.parametrize(("settings", "options"), [(UNTIED, {}), (EXPERTS, {"ep": 2})], ids=str)
def test_weights_to_publish(megatron_ranks, small, settings, options):
    assert call(megatron_ranks(2), "published", small(**settings), FSDP | options) == [True, True]


def test_parameters_are_divided_between_calls(megatron_ranks, small):
    """Of the layers, a rank keeps its part alone; of the rest, such as embeddings, everything."""
    for layers, held, own in call(megatron_ranks(2), "memory", small(num_hidden_layers=4)):
        assert layers > 0 and held == 0
        assert own == pytest.approx(layers / 2, rel=0.1)


def test_a_state_moves_between_layouts_and_backends(megatron_ranks, small, tmp_path):
    from rank_cases import KEY, optimizer

    one, batch = Local(small(**UNTIED), optimizer(), max_tokens=24), tiny_batch()
    state = one.init(KEY)
    state, _ = one.apply_update(state, one.forward_backward(state, batch, ppo_clip())[0])
    one.save(state, tmp_path / "one")
    digest = tree.digest(dict(state.params))
    for options, source, into in ((FSDP, "one", "two"), ({"tp": 2}, "two", "three"), (FSDP, "three", "four")):
        moved = call(megatron_ranks(2), "moves", small(**UNTIED), options, tmp_path / source, tmp_path / into)
        assert moved == [digest] * 2
    for file in ("model.safetensors", "train_state.safetensors"):
        assert (tmp_path / "four" / file).read_bytes() == (tmp_path / "one" / file).read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pp": 2}, "Megatron-FSDP has no pipeline parallelism, and pp = 2"),
        ({"tp": 2}, "Megatron-FSDP was not tried with tp = 2"),
        ({"lora": Lora(4)}, "Megatron-FSDP was not tried with adapters"),
        ({"updates_by": "megatron"}, "Megatron-FSDP was not tried with Megatron's own optimizer"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(megatron_ranks, small, options, message):
    for error in call(megatron_ranks(2), "refused", small(), FSDP | options):
        assert error.startswith("LayoutError") and message in error


def test_calls_after_an_error(megatron_ranks, small):
    for error, same in call(megatron_ranks(2), "after_an_error", small()):
        assert "field" in error and same


def test_a_backward_pass_that_begins_late_loses_the_gradient_of_the_output_layer(megatron_ranks, small):
    assert call(megatron_ranks(2), "first_step", small(**UNTIED), FSDP, 9, "StartsLate")[0]["gradient"] > 1e-3


def test_a_run_is_that_of_one_process(megatron_ranks, tmp_path):
    check_run(megatron_ranks(2), tmp_path, ["actor.megatron.use_megatron_fsdp=true"])
