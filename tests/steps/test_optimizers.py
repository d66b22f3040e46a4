"""AdamW, SGD and clipping follow their papers, and torch.optim, over several steps."""

import math

import attrs
import numpy as np
import pytest
import torch
from torch.optim.adamw import adamw as torch_functional_adamw
from torch.optim.sgd import sgd as torch_functional_sgd
from update_builders import SHAPES, TRAINED, arrays, gradients, start

from verl_fn.errors import ArgumentError
from verl_fn.state import Grads, Key, Params, Slots, TrainState, is_donated, snapshot, tree
from verl_fn.state.tree import flatten, unflatten
from verl_fn.steps import (
    GradTransform,
    adamw,
    apply_update,
    chain,
    clip_by_global_norm,
    constant,
    cosine,
    frozen,
    linear,
    no_decay,
    sgd,
    stateless,
)
from verl_fn.steps.optim import optimizers
from verl_fn.steps.optim.optimizers import rounded
from verl_fn.steps.optim.transforms import Update

STEPS = 6
SCALES = [0.1, 3.0, 0.01, 10.0, 1.0, 0.5]
SINGLE = 3e-7  # the clip factor is an fp32 scalar, whatever it scales
ADAM = {
    "default": {},
    "no decay": {"weight_decay": 0.0},
    "strong decay": {"weight_decay": 0.3},
    "other averages": {"betas": (0.8, 0.95), "eps": 1e-3},
}


def lr(count):
    return 0.05 / (1 + count)


def clipped_by_hand(grads, most):
    norm = math.sqrt(sum((g**2).sum() for g in grads.values()))
    return {name: g * min(1.0, most / (norm + 1e-6)) for name, g in grads.items()}


def adamw_by_hand(weights, updates, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    """Decoupled decay, then the bias-corrected step."""
    mean, square = ({name: np.zeros(SHAPES[name]) for name in TRAINED} for _ in range(2))
    for t, grads in enumerate(updates, start=1):
        for name, g in grads.items():
            mean[name] = betas[0] * mean[name] + (1 - betas[0]) * g
            square[name] = betas[1] * square[name] + (1 - betas[1]) * g**2
            unbiased, scale = mean[name] / (1 - betas[0] ** t), square[name] / (1 - betas[1] ** t)
            shrunk = weights[name] * (1 - lr(t - 1) * weight_decay)
            weights[name] = shrunk - lr(t - 1) * unbiased / (np.sqrt(scale) + eps)
    return weights, mean, square


def sgd_by_hand(weights, updates, momentum):
    velocity = {name: np.zeros(SHAPES[name]) for name in TRAINED}
    for t, grads in enumerate(updates):
        for name, g in grads.items():
            velocity[name] = momentum * velocity[name] + g
            weights[name] = weights[name] - lr(t) * velocity[name]
    return weights, velocity


def train(optimizer, dtype=torch.float64):
    state = start(optimizer, dtype=dtype)
    for i, scale in enumerate(SCALES):
        state, _ = apply_update(optimizer, state, gradients(i, scale, dtype))
    return state


def assert_leaves(leaves, expected, tolerance):
    for name, want in expected.items():
        np.testing.assert_allclose(leaves[name].numpy(), want, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("options", ADAM.values(), ids=ADAM)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_adamw_follows_its_paper(options, clip):
    optimizer = adamw(lr, **options) if clip is None else chain(clip_by_global_norm(clip), adamw(lr, **options))
    state = train(optimizer)
    updates = [arrays(gradients(i, scale)) for i, scale in enumerate(SCALES)]
    updates = updates if clip is None else [clipped_by_hand(grads, clip) for grads in updates]
    weights, mean, square = adamw_by_hand(arrays(start(optimizer).params), updates, **options)
    tolerance = 1e-10 if clip is None else SINGLE
    assert_leaves(state.params, weights, tolerance)
    adam = state.optimizer if clip is None else state.optimizer[-1]
    assert_leaves(adam.exp_avg, mean, tolerance)
    assert_leaves(adam.exp_avg_sq, square, tolerance)
    assert adam.count == STEPS


def test_rounding_at_random_keeps_the_mean_and_what_bf16_holds():
    values = torch.randn(3000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 3000)
    draws = torch.stack([rounded(values, seed).float() for seed in range(600)])
    ulp = values.abs() * 2**-7
    assert bool(((draws - values).abs() <= ulp).all())
    # The mean of 600 draws is off by a fiftieth of the last place, and over all values by far less.
    gaps = (draws.mean(0) - values) / ulp
    assert float(gaps.abs().max()) < 0.12 and abs(float(gaps.mean())) < 2e-3
    held = values.bfloat16()
    assert torch.equal(rounded(held.float(), 5), held) and bool(rounded(torch.tensor([math.nan]), 1).isnan())


def test_rounding_at_random_knows_no_places_and_no_generator():
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    order = torch.randperm(64)
    assert torch.equal(rounded(values, 3)[order], rounded(values[order], 3))
    assert not torch.equal(rounded(values, 3), rounded(values, 4))


@pytest.mark.parametrize("clip", [None, 1.0])
def test_adamw_with_moments_in_bf16_follows_adamw(clip, monkeypatch):
    transforms = [] if clip is None else [clip_by_global_norm(clip)]
    wide, narrow = (train(chain(*transforms, adamw(lr, moments=m)), torch.float32) for m in (None, torch.bfloat16))
    before = start(adamw(lr), dtype=torch.float32).params
    for name in TRAINED:
        moved = float((wide.params[name] - before[name]).norm())
        assert float((narrow.params[name] - wide.params[name]).norm()) < 0.02 * moved
        for moment in ("exp_avg", "exp_avg_sq"):
            one, other = (getattr(state.optimizer[-1], moment)[name] for state in (wide, narrow))
            assert other.dtype == torch.bfloat16 and one.dtype == torch.float32
            assert float((other - one).norm()) < 0.02 * float(one.norm())
    monkeypatch.setattr(optimizers, "PIECE", 3)
    again = train(chain(*transforms, adamw(lr, moments=torch.bfloat16)), torch.float32)
    assert tree.equal(again, narrow)


def test_small_changes_of_an_average_are_not_lost_in_bf16():
    """Rounded to the nearest, an average that moves by less than half of its last place would stand still."""
    tx = adamw(0.0, moments=torch.bfloat16)
    params = Params({"w": torch.zeros(512)})
    state, expected = TrainState(params, tx.init(params), 0, Key.from_seed(0), 0), 0.0
    for step in range(200):
        gradient = 1.0 if step < 100 else 1.2
        expected = 0.999 * expected + 0.001 * gradient**2
        grads = Grads({"w": gradient * (1 + 1e-4 * torch.arange(512))})
        state, _ = apply_update(tx, state, grads)
    assert float(state.optimizer.exp_avg_sq["w"].float().mean()) == pytest.approx(1.052 * expected, rel=0.01)


def test_an_average_in_bf16_does_not_stand_still_where_it_was_rounded_down_once():
    """The same bits are rounded another way in a later update."""
    tx, params, ones = adamw(0.0, moments=torch.bfloat16), Params({"w": torch.zeros(1)}), torch.ones(1)
    state = TrainState(params, tx.init(params), 0, Key.from_seed(0), 0)
    for _ in range(1000):
        state, _ = apply_update(tx, state, Grads({"w": ones.clone()}))
    assert float(state.optimizer.exp_avg_sq["w"]) == pytest.approx(1 - 0.999**1000, rel=0.15)


def test_a_skipped_update_leaves_moments_in_bf16_alone():
    tx = adamw(lr, moments=torch.bfloat16)
    state, _ = apply_update(tx, start(tx, dtype=torch.float32), gradients(0, 1.0, torch.float32))
    kept = snapshot(state)
    bad = Grads({name: torch.full_like(g, math.nan) for name, g in gradients(1, 1.0, torch.float32).items()})
    state, _ = apply_update(tx, state, bad)
    assert tree.equal(state.optimizer.exp_avg, kept.optimizer.exp_avg) and tree.equal(state.params, kept.params)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_sgd_follows_its_definition(momentum, clip):
    plain = sgd(lr, momentum)
    optimizer = plain if clip is None else chain(clip_by_global_norm(clip), plain)
    state = train(optimizer)
    updates = [arrays(gradients(i, scale)) for i, scale in enumerate(SCALES)]
    updates = updates if clip is None else [clipped_by_hand(grads, clip) for grads in updates]
    weights, velocity = sgd_by_hand(arrays(start(optimizer).params), updates, momentum)
    tolerance = 1e-10 if clip is None else SINGLE
    assert_leaves(state.params, weights, tolerance)
    slots = (state.optimizer if clip is None else state.optimizer[-1]).momentum
    assert_leaves(slots, velocity if momentum else {}, tolerance)
    assert len(slots) == (len(TRAINED) if momentum else 0)


def torch_adamw(weights, grads, slots, count, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    torch_functional_adamw(
        weights,
        grads,
        *slots,
        [],
        [torch.tensor(float(count)) for _ in weights],
        foreach=False,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr(count),
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )


def torch_sgd(weights, grads, slots, count, momentum=0.0):
    torch_functional_sgd(
        weights,
        grads,
        slots[0],
        foreach=False,
        weight_decay=0.0,
        momentum=momentum,
        lr=lr(count),
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )


def train_with_torch(step, dtype, **options):
    """What torch.optim's classes call (they themselves import the compiler first), after torch's own clipping."""
    weights = start(sgd(lr), dtype=dtype).params
    slots = [[torch.zeros_like(weights[name]) for name in TRAINED] for _ in range(2)]
    for i, scale in enumerate(SCALES):
        for name, g in gradients(i, scale, dtype).items():
            weights[name].grad = g
        torch.nn.utils.clip_grad_norm_([weights[name] for name in TRAINED], 1.0)
        step([weights[name] for name in TRAINED], [weights[name].grad for name in TRAINED], slots, i, **options)
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options", [*ADAM.values(), {"momentum": 0.0}, {"momentum": 0.9}], ids=[*ADAM, "sgd", "momentum"]
)
def test_training_agrees_with_torch(options, dtype):
    """Every leaf, the frozen one bitwise, after steps with and without clipping and a moving learning rate."""
    tx, step = (sgd, torch_sgd) if "momentum" in options else (adamw, torch_adamw)
    state = train(chain(clip_by_global_norm(1.0), tx(lr, **options)), dtype)
    expected = train_with_torch(step, dtype, **options)
    tolerance = 1e-5 if dtype == torch.float32 else SINGLE
    for name, want in expected.items():
        torch.testing.assert_close(state.params[name], want, rtol=tolerance, atol=tolerance)
    assert torch.equal(state.params["base.weight"], expected["base.weight"])


def test_only_trained_leaves_have_optimizer_state():
    assert list(start(adamw(lr)).optimizer.exp_avg) == list(start(adamw(lr)).optimizer.exp_avg_sq) == TRAINED
    assert list(start(sgd(lr, 0.5)).optimizer.momentum) == TRAINED


@pytest.mark.parametrize(
    "optimizer", [adamw(constant(0.1), weight_decay=0.0), sgd(constant(0.1)), sgd(constant(0.1), 0.9)]
)
def test_zero_gradients_leave_fresh_parameters_bitwise_alone(optimizer):
    before = start(optimizer, dtype=torch.float32)
    after, _ = apply_update(optimizer, before, gradients(0, 0.0, torch.float32), donate=False)
    for name, tensor in before.params.items():
        assert torch.equal(after.params[name], tensor)


def step_from_zero(scale, *clips):
    """What plain descent at rate 1 takes off, from a gradient of norm ``scale``."""
    optimizer = chain(*(clip_by_global_norm(most) for most in clips), sgd(constant(1.0)))
    params = Params({"a": torch.zeros(2), "b": torch.zeros(1)})
    grads = Grads({"a": torch.tensor([0.6, 0.0]) * scale, "b": torch.tensor([0.8]) * scale})
    state = TrainState(params, optimizer.init(params), 0, Key.from_seed(0), 0)
    new, metrics = apply_update(optimizer, state, grads)
    assert metrics["grad_norm"].value == pytest.approx(scale)
    return [-x for x in new.params["a"].tolist() + new.params["b"].tolist()]


@pytest.mark.parametrize(("scale", "left"), [(0.5, 0.5), (0.999, 0.999), (1.5, 1.0), (100.0, 1.0)])
def test_clipping_scales_to_the_norm_and_keeps_the_direction(scale, left):
    """The norm that is reported is that before clipping."""
    assert step_from_zero(scale, 1.0) == pytest.approx([0.6 * left, 0.0, 0.8 * left], rel=1e-5)


def test_clipping_is_torchs_to_the_last_bits():
    """It divides by norm + 1e-6, so a norm of exactly the limit is scaled too."""
    for norm, most in ((1.0, 1.0), (3.0, 1e-3), (1e-3, 1e-4)):
        taken = step_from_zero(norm, most)
        assert taken == pytest.approx(
            [0.6 * norm * most / (norm + 1e-6), 0.0, 0.8 * norm * most / (norm + 1e-6)], rel=2e-7
        )


def test_gradients_whose_sum_of_squares_overflows_are_clipped():
    assert step_from_zero(2e19, 1.0) == pytest.approx([0.6, 0.0, 0.8], rel=1e-5)


@pytest.mark.parametrize("clips", [(2.0, 0.5), (0.5, 2.0), (0.5, 0.5)])
def test_a_second_clip_sees_what_the_first_one_left(clips):
    assert step_from_zero(8.0, *clips) == pytest.approx([0.3, 0.0, 0.4], rel=1e-5)


@pytest.mark.parametrize(
    "parts", [(), (clip_by_global_norm(1.0),), (sgd(lr), clip_by_global_norm(1.0)), (sgd(lr), sgd(lr))]
)
def test_a_chain_ends_in_its_one_optimizer(parts):
    with pytest.raises((TypeError, ValueError)):
        chain(*parts)


def test_a_frozen_optimizer_is_not_chained():
    with pytest.raises(ValueError, match="frozen"):
        chain(clip_by_global_norm(1.0), frozen())


def test_chains_nest():
    flat = train(chain(clip_by_global_norm(1.0), clip_by_global_norm(0.5), adamw(lr)))
    nested = train(chain(clip_by_global_norm(1.0), chain(clip_by_global_norm(0.5), adamw(lr))))
    assert tree.equal(flat.params, nested.params)
    assert tree.equal(flat.optimizer[-1], nested.optimizer[-1][-1])


@attrs.frozen
class Momentum(GradTransform):
    """Heavy-ball momentum before the optimizer, for a transformation with state."""

    decay: float

    def init(self, params):
        return Slots({name: torch.zeros_like(params[name]) for name in params.trained()})

    def update(self, grads, state, params, update):
        velocity = {name: self.decay * state[name] + g for name, g in grads.items()}
        return Grads(velocity), Slots(velocity), update


def with_slot(tx):
    """A state of a chain of three parts, the second of which has no state."""
    state = start(tx)
    return attrs.evolve(state, optimizer=(state.optimizer[0], (), state.optimizer[1]))


def clamped(grads, update):
    return Grads({name: g.clamp(-0.5, 0.5) for name, g in grads.items()}), update


def tenfold(grads, update):
    return grads.scale(10.0), update


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((stateless(tenfold), clip_by_global_norm(1.0)), [-0.6, -0.8]),
        ((clip_by_global_norm(1.0), stateless(tenfold)), [-6.0, -8.0]),
        ((clip_by_global_norm(1.0), stateless(clamped)), [-0.5, -0.5]),
        ((stateless(clamped), clip_by_global_norm(0.1)), [-0.1 / 2**0.5] * 2),
        ((clip_by_global_norm(1.0), stateless(tenfold), clip_by_global_norm(2.0)), [-1.2, -1.6]),
        ((clip_by_global_norm(1.0), clip_by_global_norm(0.5), stateless(clamped)), [-0.3, -0.4]),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_the_parts_of_a_chain_act_in_order(parts, expected, nested):
    """Also clipping, though it only sets a divisor: what comes after it sees clipped gradients, and their norm."""
    tx = chain(parts[0], chain(*parts[1:], sgd(1.0))) if nested else chain(*parts, sgd(1.0))
    params = Params({"w": torch.zeros(2)})
    state = TrainState(params, tx.init(params), 0, Key.from_seed(0), 0)
    state, metrics = apply_update(tx, state, Grads({"w": torch.tensor([3.0, 4.0])}))
    torch.testing.assert_close(state.params["w"], torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert metrics["grad_norm"].value == 5.0


@pytest.mark.parametrize(
    "flagged",
    [
        lambda update: update,
        lambda update: attrs.evolve(update, skip=update.skip.clone()),
        lambda update: attrs.evolve(update, skip=torch.ones_like(update.skip)),
    ],
)
def test_an_update_is_skipped_if_a_transformation_makes_gradients_that_are_not_finite(flagged):
    """Or asks for it, in a flag of its own."""
    asks = bool(flagged(Update.of(torch.tensor(1.0), 0)).skip)

    def normalized(grads, update):
        least = 1.0 if asks else 0.0
        return Grads({name: g / g.norm().clamp(min=least) for name, g in grads.items()}), flagged(update)

    tx = chain(stateless(normalized), adamw(lr))
    params = Params({"w": torch.ones(2), "adapter": torch.ones(2)})
    before = TrainState(params, tx.init(params), 0, Key.from_seed(0), 0)
    grads = Grads({"w": torch.tensor([3.0, 4.0]), "adapter": torch.zeros(2)})
    after, metrics = apply_update(tx, before, grads, donate=False)
    assert metrics["update_skipped"].value == 1 and metrics["grad_norm"].value == 5.0
    assert tree.equal(after, attrs.evolve(before, step=1))


def test_transformations_have_state():
    """Momentum before plain descent is descent with momentum; a skipped update leaves it alone; it is saved."""
    tx = chain(Momentum(0.9), sgd(lr))
    state, expected = train(tx), train(sgd(lr, 0.9))
    for name, want in expected.params.items():
        torch.testing.assert_close(state.params[name], want)
    clipped, _ = apply_update(chain(Momentum(0.9), clip_by_global_norm(1e-3), sgd(lr)), with_slot(tx), gradients(1))
    for name, want in gradients(1).items():
        torch.testing.assert_close(clipped.optimizer[0][name], want)
    before = snapshot(state.optimizer)
    skipped, metrics = apply_update(tx, state, gradients(0, float("nan")))
    assert metrics["update_skipped"].value == 1 and tree.equal(skipped.optimizer, before)
    assert tree.equal(unflatten(skipped, *flatten(skipped)), skipped)


@pytest.mark.parametrize(
    "mask", [no_decay("bias"), lambda name, t: "bias" not in name, {name: "bias" not in name for name in TRAINED}]
)
def test_weight_decay_mask(mask):
    """Masked parameters move as without decay, the others as with it; bitwise, since the kernel is the same."""
    masked, whole, none = (
        train(adamw(lr, weight_decay=0.3, weight_decay_mask=mask)),
        train(adamw(lr, weight_decay=0.3)),
        train(adamw(lr, weight_decay=0.0)),
    )
    assert any("bias" in name for name in TRAINED) and not all("bias" in name for name in TRAINED)
    for name in TRAINED:
        assert torch.equal(masked.params[name], (none if "bias" in name else whole).params[name])
        assert not torch.equal(none.params[name], whole.params[name])


def test_optimizers_with_a_mapping_have_a_hash():
    one, same, other = (adamw(1e-3, weight_decay_mask={"a": decays}) for decays in (True, True, False))
    assert len({one, same, other}) == 2


@pytest.mark.parametrize("mask", ["bias", lambda name: "bias" not in name, True, ["bias"]])
def test_a_mask_that_is_no_function_of_name_and_tensor_is_refused(mask):
    with pytest.raises(ArgumentError, match=r"weight_decay_mask is a function of name and tensor or .* no_decay"):
        adamw(lr, weight_decay_mask=mask)


def test_a_mapping_that_lacks_a_parameter_is_refused():
    with pytest.raises(ValueError, match="has no value for"):
        train(adamw(lr, weight_decay_mask={"another": True}))


def test_optimizers_compare_and_print_by_value():
    def make(rate=1e-3, max_norm=1.0, part="bias"):
        return chain(clip_by_global_norm(max_norm), adamw(linear(rate, 10), weight_decay_mask=no_decay(part)))

    assert make() == make() and repr(make()) == repr(make())
    assert len({make(), make(rate=2e-3), make(max_norm=2.0), make(part="norm")}) == 4
    assert adamw(0.1) == adamw(constant(0.1)) != sgd(0.1)
    assert make().parts[1].schedule.lr == 1e-3 and make().parts[1].betas == (0.9, 0.999)


@pytest.mark.parametrize("position", [0, 4, 10])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_schedule_is_read_at_the_states_position(kind, position):
    """The optimizer's count is another number: a new optimizer can be used in the middle of a schedule."""
    schedule = cosine(1.0, total_steps=10)
    optimizer = {"sgd": sgd(schedule), "adamw": adamw(schedule, weight_decay=0.0)}[kind]
    state, grads = start(optimizer, scheduler=position), gradients(0)["b.bias"]
    expected = state.params["b.bias"] - schedule(position) * (grads if kind == "sgd" else grads.sign())
    new, metrics = apply_update(optimizer, state, gradients(0))
    assert metrics["lr"].value == schedule(position)
    torch.testing.assert_close(new.params["b.bias"], expected, rtol=1e-6, atol=1e-6)


def test_a_frozen_model_is_not_updated_and_not_lost():
    state, grads = start(frozen()), gradients(0)
    with pytest.raises(ValueError, match="frozen"):
        apply_update(frozen(), state, grads)
    assert not is_donated(state) and not is_donated(grads)


@pytest.mark.parametrize(
    ("made", "given", "says"),
    [
        (adamw(1e-3), adamw(1e-3, moments=torch.bfloat16), "state is float64, and this optimizer keeps bfloat16"),
        (adamw(1e-3, moments=torch.bfloat16), adamw(1e-3), "state is bfloat16, and this optimizer keeps float64"),
        (sgd(0.1, momentum=0.9), sgd(0.1), "tree has momentum, and this sgd has none"),
        (sgd(0.1), sgd(0.1, momentum=0.9), "differ in their names"),
        (sgd(0.1), adamw(1e-3), "adamw did not make"),
        (chain(clip_by_global_norm(1.0), sgd(0.1)), sgd(0.1), "sgd did not make"),
    ],
)
def test_an_optimizer_that_does_not_continue_the_state_is_refused(made, given, says):
    state, grads = start(made), gradients(0)
    with pytest.raises(ValueError, match=says):
        apply_update(given, state, grads)
    assert not is_donated(state) and not is_donated(grads)
