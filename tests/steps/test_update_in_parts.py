"""An update in groups of leaves equals the update of all leaves bitwise, and copies shared leaves as well."""

import importlib

import attrs
import pytest
import torch

from verl_fn.state import DonatedError, Grads, Key, Params, TrainState, snapshot, tree
from verl_fn.steps import adamw, apply_update, chain, clip_by_global_norm, no_decay, sgd, stateless

rule = importlib.import_module("verl_fn.steps.optim.transforms")
NAMES = [f"layer.{i}.{kind}" for i in range(24) for kind in ("weight", "bias")]
CLIPPED = clip_by_global_norm(0.1)
OPTIMIZERS = {
    "adamw": chain(CLIPPED, adamw(1e-2, weight_decay=0.1)),
    "decay mask": chain(CLIPPED, adamw(1e-2, weight_decay=0.1, weight_decay_mask=no_decay("bias"))),
    "sgd": sgd(1e-2),
    "momentum": chain(CLIPPED, chain(CLIPPED, sgd(1e-2, momentum=0.9))),
    "not by leaf": chain(stateless(lambda grads, update: (grads, update)), adamw(1e-2)),
}


def drawn(seed):
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(3, 2, generator=rng) for name in NAMES}


def state_of(tx):
    params = Params(drawn(0))
    return TrainState(params, tx.init(params), 0, Key.from_seed(0), 0)


def updated(tx, first, monkeypatch, updates=3, gradients=drawn, reference=None):
    monkeypatch.setattr(rule, "FIRST_GROUP_ON_CPU", first)
    state = state_of(tx)
    for i in range(updates):
        state, metrics = apply_update(tx, state, Grads(gradients(i + 1)))
    return state, metrics


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("first", [1, 16])
def test_parts_give_the_same_state(name, first, monkeypatch):
    tx = OPTIMIZERS[name]
    whole, metrics = updated(tx, 0, monkeypatch)
    split, other = updated(tx, first, monkeypatch)
    assert tree.equal(whole, split) and metrics.keys() == other.keys()
    assert other["perf/residency_copies"].value == 0


def test_parts_are_taken_only_where_the_optimizer_goes_by_leaf(monkeypatch):
    monkeypatch.setattr(rule, "FIRST_GROUP_ON_CPU", 3)
    grads = Grads(drawn(1))
    sizes = {n: [len(g) for g in rule._groups(tx, state_of(tx), grads)] for n, tx in OPTIMIZERS.items()}
    assert sizes == {name: [] if name == "not by leaf" else [3, 6, 12, 24, 3] for name in OPTIMIZERS}


def test_a_skipped_update_in_parts_changes_the_step_alone(monkeypatch):
    tx = OPTIMIZERS["adamw"]
    before, _ = updated(tx, 3, monkeypatch, updates=1)
    expected = snapshot(before)
    broken = drawn(5)
    broken[NAMES[-1]] = torch.full((3, 2), float("inf"))
    after, metrics = apply_update(tx, before, Grads(broken))
    assert metrics["update_skipped"].value == 1
    assert tree.equal(after, attrs.evolve(expected, step=expected.step + 1))


@pytest.mark.parametrize("index", [0, 20, 47])
def test_a_leaf_of_any_part_that_is_held_keeps_its_value(index, monkeypatch):
    monkeypatch.setattr(rule, "FIRST_GROUP_ON_CPU", 3)
    tx = OPTIMIZERS["adamw"]
    state = state_of(tx)
    weight, moment = state.params[NAMES[index]], state.optimizer[1].exp_avg[NAMES[index]].view(-1)
    reference, values = state.params, {name: t.clone() for name, t in state.params.items()}
    old = state
    new, metrics = apply_update(tx, state, Grads(drawn(1)))
    assert metrics["perf/residency_copies"].value == len(NAMES) + 1
    assert torch.equal(weight, values[NAMES[index]]) and not moment.any()
    assert all(torch.equal(reference[name], values[name]) for name in NAMES)
    assert not torch.equal(new.params[NAMES[index]], weight)
    with pytest.raises(DonatedError):
        old.params  # noqa: B018


@pytest.mark.parametrize("own", [0, 5])
def test_gradients_that_are_views_of_one_buffer_are_no_copies(own, monkeypatch):
    """Also if views begin within a group, after gradients with storages of their own."""
    monkeypatch.setattr(rule, "FIRST_GROUP_ON_CPU", 3)
    values = drawn(1)
    buffer = torch.cat([values[name].reshape(-1) for name in NAMES[own:]])
    views = {name: part.view(3, 2) for name, part in zip(NAMES[own:], buffer.split(6), strict=True)}
    plain = {name: values.pop(name) for name in NAMES[:own]} | {
        name: g.detach().new_empty(0).set_(g.untyped_storage(), g.storage_offset(), g.size(), g.stride())
        for name, g in views.items()
    }
    del buffer, views, values
    tx = OPTIMIZERS["adamw"]
    expected, _ = apply_update(tx, state_of(tx), Grads(drawn(1)))
    state, grads = state_of(tx), Grads(plain)
    del plain
    state, metrics = apply_update(tx, state, grads)
    assert metrics["perf/residency_copies"].value == 0 and tree.equal(state, expected)
