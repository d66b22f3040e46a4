"""One rule for an update: what advances, what is donated, and when it is skipped."""

import math

import attrs
import pytest
import torch
from update_builders import TRAINED, gradients, start

from verl_fn.state import DonatedError, Grads, Key, Params, TrainState, is_donated, snapshot, tree
from verl_fn.steps import adamw, apply_update, chain, clip_by_global_norm, linear, sgd

SCHEDULE = linear(0.1, total_steps=20)
OPTIMIZERS = {
    "adamw": adamw(SCHEDULE),
    "clipped adamw": chain(clip_by_global_norm(0.5), adamw(SCHEDULE)),
    "sgd": sgd(SCHEDULE),
    "momentum": sgd(SCHEDULE, momentum=0.9),
}
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def pointers(value):
    return {path: leaf.data_ptr() for path, leaf in tree.paths(value).items() if isinstance(leaf, torch.Tensor)}


def warm(optimizer, dtype=torch.float32):
    """A state two updates old, so that averages and counts are not their first ones."""
    state = start(optimizer, dtype=dtype)
    for i in range(2):
        state, _ = apply_update(optimizer, state, gradients(i, dtype=dtype))
    return state


def spoiled(value, name="b.bias"):
    grads = gradients(5, dtype=torch.float32)
    grads[name].view(-1)[1] = value
    return grads


@each_optimizer
def test_an_update_advances_step_position_and_metrics(optimizer):
    state, metrics = apply_update(optimizer, warm(optimizer), gradients(2, dtype=torch.float32))
    assert (state.step, state.scheduler) == (3, 3)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients(2).values()))
    assert {name: m.value for name, m in metrics.items()} == pytest.approx(
        {"grad_norm": norm, "lr": SCHEDULE(2), "update_skipped": 0.0, "perf/residency_copies": 0.0}
    )
    assert state.rng.bits == warm(optimizer).rng.bits


@each_optimizer
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", TRAINED)
def test_a_gradient_that_is_not_finite_skips_the_update(optimizer, value, name):
    """Step advances; parameters, averages, their count and the schedule's position stay bitwise."""
    before = warm(optimizer)
    for donate in (False, True):
        after, metrics = apply_update(optimizer, before, spoiled(value, name), donate=donate)
        assert tree.equal(after, attrs.evolve(warm(optimizer), step=3))
        assert metrics["update_skipped"].value == 1.0 and not math.isfinite(metrics["grad_norm"].value)
        assert metrics["lr"].value == SCHEDULE(2) and metrics["perf/residency_copies"].value == 0.0


@each_optimizer
def test_a_skipped_update_leaves_no_trace_in_later_ones(optimizer):
    plain, skipping = warm(optimizer), warm(optimizer)
    skipping, _ = apply_update(optimizer, skipping, spoiled(math.nan))
    plain, _ = apply_update(optimizer, plain, gradients(3, dtype=torch.float32))
    skipping, _ = apply_update(optimizer, skipping, gradients(3, dtype=torch.float32))
    assert tree.first_difference(plain, skipping) == ".step"
    assert tree.equal(attrs.evolve(plain, step=4), skipping)


@each_optimizer
def test_inputs_are_donated_and_their_buffers_reused(optimizer):
    state, grads = warm(optimizer), gradients(2, dtype=torch.float32)
    before = pointers(state)
    new, metrics = apply_update(optimizer, state, grads)
    assert pointers(new) == before
    assert metrics["perf/residency_copies"].value == 0.0
    for value, name in ((state, "TrainState of step 2"), (grads, "Grads")):
        with pytest.raises(DonatedError, match=f"this {name} was donated to apply_update"):
            tree.leaves(value)


@each_optimizer
def test_inputs_can_be_kept(optimizer):
    """The result is the same bits either way, and the old state can be updated again."""
    state, grads = warm(optimizer), gradients(2, dtype=torch.float32)
    before = tree.digest((state, grads))
    copied, _ = apply_update(optimizer, state, grads, donate=False)
    assert tree.digest((state, grads)) == before
    shared = set(pointers(copied).items()) & set(pointers(state).items())
    assert {path for path, _ in shared} == {".params['base.weight']"}
    again, _ = apply_update(optimizer, state, grads)
    assert tree.equal(copied, again)


@each_optimizer
def test_a_reference_taken_from_the_actor_keeps_its_values(optimizer):
    """Only what is shared and will be written is copied; the copies are counted."""
    state = warm(optimizer)
    reference, expected = state.params, snapshot(state.params)
    new, metrics = apply_update(optimizer, state, gradients(2, dtype=torch.float32))
    assert metrics["perf/residency_copies"].value == len(reference.trained())
    assert new.params["base.weight"] is reference["base.weight"]
    assert tree.equal(reference, expected) and not tree.equal(reference, new.params)
    del reference
    _, metrics = apply_update(optimizer, new, gradients(3, dtype=torch.float32))
    assert metrics["perf/residency_copies"].value == 0.0


@each_optimizer
def test_states_and_gradients_that_share_may_be_updated_in_any_order(optimizer):
    state = warm(optimizer)
    other, saved = attrs.evolve(state, step=100), snapshot(state)
    grads = gradients(2, dtype=torch.float32)
    shared = grads["b.bias"]
    expected = shared.clone()
    first, _ = apply_update(optimizer, state, grads)
    assert torch.equal(shared, expected)
    second, _ = apply_update(optimizer, other, gradients(2, dtype=torch.float32))
    third, _ = apply_update(optimizer, saved, gradients(2, dtype=torch.float32))
    assert tree.equal(first, third)
    assert tree.equal(first.params, second.params) and second.step == 101


def test_spent_inputs_are_refused():
    optimizer = OPTIMIZERS["adamw"]
    state, grads = warm(optimizer), gradients(2, dtype=torch.float32)
    new, _ = apply_update(optimizer, state, grads)
    with pytest.raises(DonatedError, match="this TrainState of step 2"):
        apply_update(optimizer, state, gradients(3, dtype=torch.float32))
    with pytest.raises(DonatedError, match="this Grads"):
        apply_update(optimizer, new, grads)
    assert not is_donated(new)


@pytest.mark.parametrize(
    "change", [lambda g: g[:1].clone(), torch.Tensor.bfloat16, lambda g: g[None]], ids=["short", "bf16", "2d"]
)
def test_gradients_of_other_shapes_are_refused_before_anything_is_donated(change):
    optimizer = OPTIMIZERS["adamw"]
    state = warm(optimizer)
    grads = Grads({name: change(torch.zeros_like(state.params[name])) for name in TRAINED})
    with pytest.raises(ValueError, match=r"the gradient of .* is .*, and the parameter is float32"):
        apply_update(optimizer, state, grads)
    assert not is_donated(state) and not is_donated(grads)


@pytest.mark.parametrize("names", [TRAINED[:1], TRAINED[::-1], [*TRAINED, "base.weight"], []])
def test_gradients_of_other_names_are_refused_before_anything_is_donated(names):
    state = warm(OPTIMIZERS["sgd"])
    grads = Grads({name: torch.zeros_like(state.params[name]) for name in names})
    with pytest.raises(ValueError, match="another order" if names == TRAINED[::-1] else "differ in their names"):
        apply_update(OPTIMIZERS["sgd"], state, grads)
    assert not is_donated(state) and not is_donated(grads)


def test_the_norm_covers_what_other_processes_hold():
    """Two halves that each see the other's sum of squares clip as the whole does."""
    optimizer = OPTIMIZERS["clipped adamw"]
    state, grads = start(optimizer), gradients(2)
    squares = {name: g.square().sum() for name, g in grads.items()}
    whole, whole_metrics = apply_update(optimizer, state, grads, donate=False)
    for name, other in (TRAINED, TRAINED[::-1]):
        half = attrs.evolve(state, params=Params({name: state.params[name]}))
        half = attrs.evolve(half, optimizer=optimizer.init(half.params))
        new, metrics = apply_update(
            optimizer, half, Grads({name: grads[name]}), donate=False, reduce=lambda x, y=squares[other]: x + y
        )
        assert metrics["grad_norm"].value == pytest.approx(whole_metrics["grad_norm"].value)
        torch.testing.assert_close(new.params[name], whole.params[name])


@each_optimizer
def test_leaves_that_require_gradients_are_updated_without_a_graph(optimizer):
    expected, _ = apply_update(optimizer, warm(optimizer), gradients(2, dtype=torch.float32))
    for donate in (False, True):
        state, grads = warm(optimizer), gradients(2, dtype=torch.float32)
        for tensor in (*state.params.values(), *grads.values()):
            tensor.requires_grad_()
        del tensor
        new, metrics = apply_update(optimizer, state, grads, donate=donate)
        assert tree.equal(new, expected) and metrics["perf/residency_copies"].value == 0.0
        assert all(leaf.grad_fn is None for leaf in tree.leaves(new) if isinstance(leaf, torch.Tensor))


def test_gradients_of_another_memory_layout_update_the_right_elements():
    """Fused kernels pair raw memory, so a transposed parameter needs its gradient laid out alike."""
    values = torch.arange(6.0).reshape(2, 3)
    for make in (lambda t: t.t().contiguous().t(), torch.Tensor.contiguous):
        tx = adamw(lambda count: 0.1)
        params = Params({"w": make(values.clone())})
        state = TrainState(params, tx.init(params), 0, Key.from_seed(0), 0)
        del params
        state, _ = apply_update(tx, state, Grads({"w": values.clone() - 2.0}))
        sign = (values - 2.0).sign()
        assert torch.allclose(state.params["w"], values * (1 - 0.1 * 0.01) - 0.1 * sign, atol=1e-4)
