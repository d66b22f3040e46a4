"""What an update refuses, it refuses before anything is donated; it does not depend on the caller's settings."""

import attrs
import pytest
import torch
from update_builders import gradients, start

from verl_fn.errors import ArgumentError
from verl_fn.state import Grads, Key, NotDifferentiable, Params, TrainState, is_donated, tree
from verl_fn.steps import Chain, adamw, apply_update, chain, clip_by_global_norm, constant, frozen, ppo_clip, sgd
from verl_fn.steps.optim.transforms import GradTransform

CLIP = clip_by_global_norm(1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: clip_by_global_norm(0.0),
        lambda: clip_by_global_norm(float("nan")),
        lambda: adamw(-1e-2),
        lambda: sgd(float("nan")),
        lambda: adamw(1e-2, eps=-1.0),
        lambda: adamw(1e-2, weight_decay=-0.1),
        lambda: adamw(1e-2, betas=(0.9, 1.0)),
        lambda: adamw(1e-2, betas=(0.9, 95)),
        lambda: ppo_clip(-0.2),
        lambda: ppo_clip(0.2, clip_ratio_high=float("nan")),
    ],
)
def test_settings_that_no_training_has_are_refused_when_they_are_given(make):
    with pytest.raises(ValueError, match=r"must be [>(]|below 1|not negative"):
        make()


def broken_schedule(count):
    raise ZeroDivisionError("no learning rate")


@attrs.frozen
class Picky(GradTransform):
    def check(self, params, state, position):
        raise ZeroDivisionError("not these parameters")

    def update(self, grads, state, params, update):
        return grads, state, update


def chosen_anew(state):
    return attrs.evolve(state, params=attrs.evolve(state.params, trainable=frozenset({"b.bias"})))


REFUSALS = {
    "frozen in a chain": (Chain((CLIP, frozen())), Chain((CLIP, frozen())), "frozen"),
    "another optimizer": (sgd(0.1), adamw(0.1), "adamw did not make this state's optimizer tree, a SGDState"),
    "another optimizer again": (adamw(0.1), sgd(0.1), "sgd did not make this state's optimizer tree, a AdamState"),
    "no chain": (sgd(0.1), chain(CLIP, sgd(0.1)), "this chain has 2 parts"),
    "a longer chain": (chain(CLIP, sgd(0.1)), chain(CLIP, CLIP, sgd(0.1)), "this chain has 3 parts"),
    "a slot missing": (sgd(0.1), sgd(0.1, momentum=0.9), "differ in their names: "),
    "a mask by name": (adamw(0.1), adamw(0.1, weight_decay_mask={"a.weight": True}), "has no value for b.bias"),
    "no finite rate": (adamw(0.1), adamw(lambda count: float("nan")), "learning rate of update 0 is nan"),
    "no finite rate of sgd": (sgd(0.1), sgd(lambda count: float("inf")), "learning rate of update 0 is inf"),
    "a schedule": (sgd(0.1), sgd(broken_schedule), "no learning rate"),
    "a transformation": (chain(CLIP, sgd(0.1)), chain(Picky(), sgd(0.1)), "not these parameters"),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("donate", [True, False])
def test_a_refused_update_donates_nothing(name, donate):
    maker, optimizer, message = REFUSALS[name]
    state, grads = start(maker, dtype=torch.float32), gradients(0, dtype=torch.float32)
    before = tree.digest((state, grads))
    with pytest.raises((ValueError, ZeroDivisionError), match=message):
        apply_update(optimizer, state, grads, donate=donate)
    assert not is_donated(state) and not is_donated(grads) and tree.digest((state, grads)) == before


def test_an_optimizer_state_for_other_parameters_is_refused():
    state = chosen_anew(start(adamw(0.1)))
    grads = Grads({"b.bias": gradients(0)["b.bias"]})
    with pytest.raises(ValueError, match=r"\['a.weight'\]; .*make it anew with optimizer.init\(params\)"):
        apply_update(adamw(0.1), state, grads)
    assert not is_donated(state)
    # One of both moments is enough.
    for moment in ("exp_avg", "exp_avg_sq"):
        mixed = attrs.evolve(adamw(0.1).init(state.params), **{moment: getattr(state.optimizer, moment)})
        with pytest.raises(ValueError, match=r"\['a.weight'\]; .*make it anew"):
            apply_update(adamw(0.1), attrs.evolve(state, optimizer=mixed), grads)
    again = attrs.evolve(state, optimizer=adamw(0.1).init(state.params))
    assert apply_update(adamw(0.1), again, grads)[0].step == 1


@pytest.mark.parametrize("part", ["gradients", "optimizer"])
def test_another_device_is_refused(part):
    state, grads = start(adamw(0.1)), gradients(0)
    state = attrs.evolve(state, params=tree.map(lambda t: t.to("meta"), state.params))
    if part == "optimizer":
        grads = tree.map(lambda t: t.to("meta"), grads)
    else:
        state = attrs.evolve(state, optimizer=adamw(0.1).init(state.params))
    with pytest.raises(ValueError, match=f"{part}.* on cpu, and the parameters on meta"):
        apply_update(adamw(0.1), state, grads)
    assert not is_donated(state) and not is_donated(grads)


@pytest.mark.parametrize("which", ["state", "gradients"])
def test_tensors_of_inference_mode_are_refused(which):
    state, grads = start(sgd(0.1)), gradients(0)
    with torch.inference_mode():
        if which == "state":
            state = tree.map_tensors(torch.clone, state)
        else:
            grads = grads.scale(2.0)
    with pytest.raises(ValueError, match="made in inference mode"):
        apply_update(sgd(0.1), state, grads)
    assert not is_donated(state) and not is_donated(grads)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, g: (s, {}), "takes the Grads that forward_backward returned, not a dict"),
        (lambda s, g: (s, (g, {})), "not a tuple"),
        (lambda s, g: (s.params, g), "takes a TrainState, not a Params"),
    ],
)
def test_arguments_of_other_kinds_are_named(change, message):
    with pytest.raises(ArgumentError, match=message):
        apply_update(sgd(0.1), *change(start(sgd(0.1)), gradients(0)))


def test_an_update_has_no_derivative():
    grads = gradients(0)

    def after(leaves):
        state = attrs.evolve(start(sgd(0.1)), params=Params(leaves, frozenset(grads)))
        return apply_update(sgd(0.1), state, grads, donate=False)[0].params["b.bias"].sum()

    with pytest.raises(NotDifferentiable, match="apply_update has no derivative"):
        torch.func.grad(after)(dict(start(sgd(0.1)).params))


def large(scale):
    state = TrainState(Params({"w": torch.zeros(2)}), (), 0, Key.from_seed(0), 0)
    tx = chain(clip_by_global_norm(1.0), sgd(1.0))
    return apply_update(
        tx, attrs.evolve(state, optimizer=tx.init(state.params)), Grads({"w": torch.full((2,), scale)})
    )


def test_gradients_whose_squares_overflow_are_clipped():
    state, metrics = large(1e30)
    assert metrics["update_skipped"].value == 0.0
    assert metrics["grad_norm"].value == pytest.approx(1e30 * 2**0.5, rel=1e-6)
    torch.testing.assert_close(state.params["w"], torch.full((2,), -(0.5**0.5)))


def test_an_update_does_not_depend_on_the_callers_settings():
    """Also its result is made of ordinary tensors, with which autograd can go on."""
    dtype = torch.float32
    for optimizer in (adamw(0.1), chain(CLIP, sgd(constant(0.1), momentum=0.9))):
        expected, _ = apply_update(
            optimizer, start(optimizer, dtype=torch.float32), gradients(1, dtype=torch.float32)
        )
        for surroundings in (torch.inference_mode(), torch.autocast("cpu"), torch.device("meta")):
            for donate in (True, False):
                state, grads = start(optimizer, dtype=dtype), gradients(1, dtype=dtype)
                with surroundings:
                    new, _ = apply_update(optimizer, state, grads, donate=donate)
                assert tree.equal(new, expected)
                assert not any(t.is_inference() for t in tree.leaves(new) if isinstance(t, torch.Tensor))


def test_a_default_dtype_changes_no_update():
    expected, _ = apply_update(adamw(0.1), start(adamw(0.1)), gradients(1))
    torch.set_default_dtype(torch.float64)
    try:
        new, _ = apply_update(adamw(0.1), start(adamw(0.1)), gradients(1))
    finally:
        torch.set_default_dtype(torch.float32)
    assert tree.equal(new, expected)
