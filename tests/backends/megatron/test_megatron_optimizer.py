"""Updates by Megatron's own distributed optimizer: laws, ours beside it, checkpoints, and what it cannot compute."""

import math
import re

import attrs
import pytest
import torch
from megatron_support import EXPERTS, FP32, MARKS, check_run

from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.local import Local
from verl_fn.backends.megatron.distributed_optimizer import Distributed, _translated, check_updates_by
from verl_fn.steps import AdamW, adamw, chain, clip_by_global_norm, ppo_clip, sgd, stateless
from verl_fn.testing import tiny_batch

pytestmark = MARKS


def call(ranks, name, *args):
    return ranks.run(f"megatron_optimizer_cases.{name}", *args)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {"pp": 2}),
        ({"tie_word_embeddings": False}, {"tp": 2, "sp": True}),
        ({}, {"tp": 2, "head": "value"}),
        ({}, {"lora": Lora(rank=4, alpha=8.0), "tp": 2}),
        (EXPERTS, {"ep": 2}),
        ({}, {}),
        ({}, {"tp": 2, "dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_updates_are_ours(megatron_ranks, small, settings, options):
    """Three, with clipping, a schedule and a mask; states of both are the same tensors."""
    for weight, moment, norm, change, copies in call(megatron_ranks(2), "beside_ours", small(**settings), options):
        assert weight <= 1e-6 and moment <= 1e-5 and norm <= 1e-6, (weight, moment, norm)
        assert change > 1e-3 and copies == 0


def test_an_update_keeps_the_mask_that_megatrons_optimizer_was_made_with():
    made = chain(clip_by_global_norm(1.0), adamw(1e-3, weight_decay_mask={"w": True}))
    theirs = Distributed(made, 1.0, made.parts[-1], None, {}, None)
    given = chain(clip_by_global_norm(0.5), adamw(1e-4, (0.8, 0.9), weight_decay_mask={"w": True}))
    changed = theirs.with_settings_of(given)
    assert (changed.optimizer, changed.max_norm, changed.adamw) == (given, 0.5, given.parts[-1])
    with pytest.raises(ValueError, match="keeps the weight_decay_mask"):
        theirs.with_settings_of(chain(clip_by_global_norm(1.0), adamw(1e-3)))
    with pytest.raises(ValueError, match="cannot compute SGD"):
        theirs.with_settings_of(sgd(0.1))


def test_a_norm_without_end_clips_nothing():
    """Gradients are scaled for Megatron's norm only if clipping undoes it."""
    adam = adamw(1e-3)
    assert _translated(chain(clip_by_global_norm(math.inf), adam)) == (0.0, adam)
    scales = [Distributed(adam, norm, adam, None, {}, None)._scale(2.0**70) for norm in (0.0, 1.0, 2.0**59, 2.0**60)]
    assert scales == [1.0, 2.0**-11, 1.0, 1.0]


@pytest.mark.parametrize("more", [{}, {"lora": Lora(rank=4, alpha=8.0)}], ids=str)
def test_updates_of_experts_on_four_ranks_are_ours(megatron_ranks, small, more):
    options = {"tp": 2, "sp": True, "ep": 2, **more}
    for weight, moment, norm, *_, copies in call(megatron_ranks(4), "beside_ours", small(**EXPERTS), options):
        assert weight <= 1e-6 and moment <= 1e-5 and norm <= 1e-6 and copies == 0


def test_updates_of_several_buckets_are_ours(megatron_ranks, small):
    for weight, moment, norm, *_ in call(megatron_ranks(2), "beside_ours", small(), {"tp": 2}, "SeveralBuckets"):
        assert weight <= 1e-6 and moment <= 1e-5 and norm <= 1e-6


@pytest.mark.parametrize(
    ("size", "options", "name"),
    [
        (1, {}, "FreesBuffers"),
        (2, {"tp": 2, "sp": True, "checkpointing": True}, "Megatron"),
        (2, {"pp": 2, "head": "value"}, "FreesBuffers"),
    ],
    ids=str,
)
def test_laws(megatron_ranks, small, size, options, name):
    folder = small(num_hidden_layers=2 if "pp" in options else 1)
    call(megatron_ranks(size), "laws", folder, options, FP32, name)


def test_a_run_goes_through_all_backends(megatron_ranks, small, tmp_path):
    """One step each by Megatron's optimizer, fsdp, local, ours and Megatron's again are five of one process."""
    from megatron_optimizer_cases import KEY, scheduled

    folder = small(tie_word_embeddings=False)
    one, batch = Local(folder, scheduled(), max_tokens=24), tiny_batch()
    state = one.init(KEY)
    one.save(state, tmp_path / "0")

    def step(state):
        return one.apply_update(state, one.forward_backward(state, batch, ppo_clip())[0])[0]

    theirs = {"updates_by": "megatron"}
    call(megatron_ranks(2), "one_step", folder, {"tp": 2, **theirs}, tmp_path / "0", tmp_path / "1")
    call(megatron_ranks(2), "one_step", folder, {"fsdp": True}, tmp_path / "1", tmp_path / "2")
    one.save(step(one.restore(tmp_path / "2")), tmp_path / "3")
    call(megatron_ranks(2), "one_step", folder, {"tp": 2}, tmp_path / "3", tmp_path / "4")
    call(megatron_ranks(2), "one_step", folder, {"pp": 2, **theirs}, tmp_path / "4", tmp_path / "5")
    found, wanted = one.restore(tmp_path / "5"), state
    for _ in range(5):
        wanted = step(wanted)
    assert found.step == found.scheduler == found.optimizer[-1].count == 5
    for name, t in wanted.params.items():
        torch.testing.assert_close(found.params[name], t, rtol=0, atol=1e-5)
    for moment in ("exp_avg", "exp_avg_sq"):
        ours, theirs = getattr(wanted.optimizer[-1], moment), getattr(found.optimizer[-1], moment)
        assert ours.keys() == theirs.keys()
        for name, t in ours.items():
            assert float((theirs[name] - t).norm()) <= 1e-3 * float(t.norm())


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}], ids=str)
def test_states_of_one_backend_are_apart(megatron_ranks, small, options):
    call(megatron_ranks(2), "two_states", small(), options)


def test_gradients_whose_squares_overflow_are_clipped(megatron_ranks, small):
    for ours, theirs in call(megatron_ranks(2), "huge_gradients", small()):
        assert theirs == pytest.approx(ours, rel=1e-5) and theirs[0] > 1e20 and theirs[1] > 1e-3


def test_a_model_that_is_not_trained_needs_no_optimizer(megatron_ranks, small):
    for error in call(megatron_ranks(1), "not_updated", small()):
        assert "frozen()" in error


@pytest.mark.parametrize(
    ("name", "options", "check", "law"),
    [
        ("OwnMoments", {}, "updates", "Update"),
        ("FirstLearningRate", {}, "updates", "Update"),
        ("FirstPosition", {}, "updates", "Update"),
        ("StaleBuffer", {"pp": 2}, "persistence", "Persistence"),
    ],
)
def test_broken_uses_are_caught(megatron_ranks, small, name, options, check, law):
    assert call(megatron_ranks(2), "mutant", small(), name, options, check) == [law] * 2


def test_a_norm_without_shared_parameters_differs(megatron_ranks, small):
    for weight, _, norm, *_ in call(megatron_ranks(2), "beside_ours", small(), {"tp": 2}, "NormOfTheFirstRank"):
        assert weight > 1e-6 and norm > 1e-5


def test_tensors_that_megatron_keeps_are_copied(megatron_ranks, small):
    """By donation, which leaves alone what others refer to."""
    for *_, copies in call(megatron_ranks(2), "beside_ours", small(), {}, "KeepsTensors"):
        assert copies > 0


@attrs.frozen
class Other(AdamW):
    """AdamW that might do something else."""


@pytest.mark.parametrize(
    ("optimizer", "part"),
    [
        (sgd(0.1), "SGD("),
        (chain(clip_by_global_norm(1.0), sgd(0.1)), "SGD("),
        (
            chain(clip_by_global_norm(1.0), chain(clip_by_global_norm(2.0), adamw(0.1))),
            "ClipByGlobalNorm(max_norm=2.0",
        ),
        (chain(stateless(lambda grads, update: (grads, update)), adamw(0.1)), "Stateless("),
        (Other(0.1), "Other("),
    ],
    ids=["sgd", "clipped sgd", "two clips", "stateless", "subclass"],
)
def test_what_megatrons_optimizer_cannot_compute_is_refused_by_name(optimizer, part):
    with pytest.raises(ValueError, match=f"Megatron's own optimizer cannot compute {re.escape(part)}"):
        check_updates_by("megatron", optimizer)


def test_other_names_are_refused():
    with pytest.raises(ValueError, match="updates_by = 'apex' must be one of verl_fn, megatron"):
        check_updates_by("apex", adamw(0.1))


def test_a_run_is_that_of_one_process(megatron_ranks, tmp_path):
    check_run(
        megatron_ranks(2),
        tmp_path,
        ["actor.megatron.tensor_model_parallel_size=2", "actor.megatron.optimizer=megatron"],
    )
