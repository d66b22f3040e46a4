"""Donation reuses buffers that have no other references, copies the others, and invalidates the donated value."""

import copy
import pickle

import attrs
import numpy as np
import pytest
import torch
from state_builders import grads, train_state

from verl_fn.state import DonatedError, Grads, Params, donate, is_donated, snapshot, spare, tree

TENSORS, FROZEN = 6, ("['embed.weight']", "['router.bias']")
WRITTEN = TENSORS - 2


def overwrite(value) -> None:
    """Writes to all leaves that are not frozen, as a kernel does."""
    for path, leaf in tree.paths(value).items():
        if isinstance(leaf, torch.Tensor) and not path.endswith(FROZEN):
            leaf.fill_(-99.0)


def pointers(value) -> dict[str, int]:
    return {path: leaf.data_ptr() for path, leaf in tree.paths(value).items() if isinstance(leaf, torch.Tensor)}


def test_buffers_that_nobody_shares_are_moved():
    state = train_state()
    before = pointers(state)
    new, copies = donate(state, "apply_update")
    assert copies == 0
    assert pointers(new) == before
    assert tree.equal(new, train_state()) and new.params.trainable == frozenset({"head.weight"})


def test_donation_after_donation_still_moves():
    state, before = train_state(), None
    for _ in range(3):
        state, copies = donate(state, "apply_update")
        assert copies == 0
        assert before in (None, pointers(state))
        before = pointers(state)


USES = {
    "field": lambda s: s.params,
    "step": lambda s: s.step,
    "evolve": lambda s: attrs.evolve(s, step=1),
    "leaves": lambda s: tree.leaves(s),
    "digest": lambda s: tree.digest(s),
    "snapshot": lambda s: snapshot(s),
    "repr": lambda s: repr(s),
    "pickle": lambda s: pickle.dumps(s),
    "copy": lambda s: copy.copy(s),
    "deepcopy": lambda s: copy.deepcopy(s),
    "donate": lambda s: donate(s, "apply_update"),
}


@pytest.mark.parametrize("use", USES)
def test_any_later_use_says_what_happened_and_what_to_do(use):
    state = train_state(step=12)
    donate(state, "apply_update")
    with pytest.raises(DonatedError) as caught:
        USES[use](state)
    for part in ("TrainState of step 12", "donated to apply_update", "donate=False", "snapshot(value)"):
        assert part in str(caught.value)


@pytest.mark.parametrize("use", [len, list, dict, repr, lambda g: g["a"], lambda g: g + g, lambda g: g.global_norm()])
def test_a_donated_mapping_is_spent_too(use):
    value = grads()
    donate(value, "accumulate")
    with pytest.raises(DonatedError, match="this Grads was donated to accumulate"):
        use(value)


def test_is_donated_tells_without_raising():
    value = grads()
    assert not is_donated(value)
    new, _ = donate(value, "f")
    assert is_donated(value) and not is_donated(new)


def test_an_unknown_field_of_a_live_value_is_a_plain_attribute_error():
    with pytest.raises(AttributeError, match="TrainState has no field 'parameters'"):
        train_state().parameters  # noqa: B018


HOLDERS = {
    "tensor": lambda s: s.params["head.weight"],
    "view": lambda s: s.params["head.weight"][1],
    "transpose": lambda s: s.params["head.weight"].t(),
    "detached": lambda s: s.params["head.weight"].detach(),
    "numpy": lambda s: torch.as_tensor(s.params["head.weight"].numpy()),
    "params": lambda s: s.params,
    "leaves": lambda s: s.params.leaves,
    "lora view": lambda s: Params(s.params.leaves, frozenset()),
    "reference": lambda s: Params(dict(s.params.leaves)),
    "optimizer": lambda s: s.optimizer,
    "slots": lambda s: s.optimizer["averages"][0],
    "node": lambda s: s.optimizer["seen"],
    "in a list": lambda s: s.optimizer["averages"][1],
    "buffers": lambda s: s.buffers,
    "evolved state": lambda s: attrs.evolve(s, step=100),
    "mapped state": lambda s: tree.map(lambda leaf: leaf, s),
    "shallow copy": lambda s: copy.copy(s),
    "snapshot": lambda s: snapshot(s),
    "two holders": lambda s: (s.params, attrs.evolve(s, step=100), s.buffers["router.bias"][:1]),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_whoever_holds_a_part_keeps_its_values(holder):
    state = train_state()
    shared = HOLDERS[holder](state)
    expected = tree.digest(shared)
    new, _ = donate(state, "apply_update")
    assert tree.equal(new, train_state())
    overwrite(new)
    assert tree.digest(shared) == expected


@pytest.mark.parametrize(
    ("holder", "copies"),
    [
        ("tensor", 1),
        ("view", 1),
        ("params", 1),
        ("reference", 1),
        ("optimizer", 3),
        ("slots", 1),
        ("node", 1),
        ("buffers", 0),
        ("evolved state", WRITTEN),
        ("shallow copy", WRITTEN),
        ("snapshot", 0),
    ],
)
def test_every_copy_is_counted_and_no_other_is_made(holder, copies):
    state = train_state()
    before = pointers(state)
    shared = HOLDERS[holder](state)
    new, counted = donate(state, "apply_update")
    assert counted == copies
    moved = [path for path, pointer in pointers(new).items() if pointer == before[path]]
    assert len(moved) == TENSORS - copies
    assert shared is not None


@pytest.mark.parametrize("holder", ["base", "leaf", "numpy"])
def test_a_frozen_leaf_passes_on_whoever_holds_it(holder):
    """A reference policy made of the frozen base shares its tensors across updates."""
    state = train_state()
    leaf = state.params["embed.weight"]
    shared = {"base": state.params.base, "leaf": leaf, "numpy": leaf.numpy()}[holder]
    for _ in range(3):
        state, copies = donate(state, "apply_update")
        assert copies == 0 and state.params["embed.weight"] is leaf
    copied = spare(state)
    assert copied.params["embed.weight"] is leaf and copied.params["head.weight"] is not state.params["head.weight"]
    assert tree.equal(copied, state) and shared is not None


def test_parameters_that_are_all_trained_have_no_base():
    with pytest.raises(ValueError, match="they have no frozen base"):
        Params({"w": torch.ones(1)}).base  # noqa: B018


def test_letting_go_of_the_holder_makes_the_next_donation_free():
    state = train_state()
    shared = attrs.evolve(state, step=100)
    state, copies = donate(state, "f")
    assert copies == WRITTEN
    del shared
    assert donate(state, "f")[1] == 0


def test_of_two_states_that_share_the_last_one_moves():
    first = train_state()
    second = attrs.evolve(first, step=100)
    moved, copies = donate(first, "f")
    assert copies == WRITTEN
    before = pointers(second)
    again, copies = donate(second, "f")
    assert copies == 0 and pointers(again) == before
    assert (moved.step, again.step) == (7, 100)


def test_a_tensor_that_is_twice_in_a_value_becomes_two():
    """Kernels write through every leaf, so leaves of one value may not alias either."""
    value = Grads({name: w for w in [torch.ones(2)] for name in "ab"})
    new, copies = donate(value, "f")
    assert copies == 1
    new["a"].fill_(5.0)
    assert new["b"].tolist() == [1.0, 1.0]


def test_memory_that_torch_did_not_allocate_is_copied():
    array = np.zeros(2, dtype=np.float32)
    new, copies = donate(Grads({"w": torch.from_numpy(array)}), "f")
    overwrite(new)
    assert copies == 1 and array.tolist() == [0.0, 0.0]


STORAGES = {
    "storage": lambda t: t.untyped_storage(),
    "typed storage": lambda t: torch.storage.TypedStorage(
        wrap_storage=t.untyped_storage(), dtype=t.dtype, _internal=True
    ),
    "storage in a list": lambda t: [t.untyped_storage()],
    "slice of it": lambda t: t.untyped_storage()[0:4],
    "capsule": lambda t: torch.utils.dlpack.to_dlpack(t),
    "buffer": lambda t: memoryview(t.numpy()),
}


@pytest.mark.parametrize("kind", STORAGES)
def test_memory_that_is_held_without_a_tensor_is_copied(kind):
    for count in (1, 2):
        value = Grads({name: torch.ones(2) for name in "ab"[:count]})
        held, before = STORAGES[kind](value["a"]), value["a"].data_ptr()
        new, copies = donate(value, "f")
        assert copies == 1 and new["a"].data_ptr() != before
        assert held is not None


def test_a_held_storage_of_views_is_seen():
    """Such as the buffer of all gradients of a layer."""
    value = Grads(dict(zip("abc", flat_views(), strict=True)))
    held = value["b"].untyped_storage()
    new, copies = donate(value, "f")
    overwrite(new)
    assert copies == 3
    assert torch.empty(0).set_(held, 0, (12,), (1,)).tolist() == [float(i) for i in range(12)]


def test_a_pickled_value_outlives_the_donation():
    state = train_state()
    pickled = pickle.dumps(state)
    overwrite(donate(state, "apply_update")[0])
    assert tree.equal(pickle.loads(pickled), train_state())


def test_a_graph_that_saved_a_leaf_still_gives_its_gradient():
    value = grads()
    x = torch.ones(2, requires_grad=True)
    out = (x * value["a"]).sum()
    overwrite(donate(value, "f")[0])
    out.backward()
    assert x.grad.tolist() == [3.0, 0.0]


def test_a_digest_costs_no_copy_at_the_next_donation():
    grads = Grads({"w": torch.zeros(2)})
    tree.digest(grads)
    assert donate(grads, "apply_update")[1] == 0


def flat_views(count=3, size=4):
    """Adjacent tensors in one buffer that have the storage in common, but no base tensor."""
    flat = torch.arange(float(count * size))
    storage = flat.untyped_storage()
    return [torch.empty(0).set_(storage, i * size, (size,), (1,)) for i in range(count)]


def test_views_that_share_a_buffer_among_themselves_alone_are_moved():
    value = Grads(dict(zip("abc", flat_views(), strict=True)))
    new, copies = donate(value, "test")
    assert copies == 0
    assert len({t.untyped_storage().data_ptr() for t in new.values()}) == 1


@pytest.mark.parametrize("which", ["a leaf", "a view of it", "another view"])
def test_views_of_a_buffer_that_somebody_else_sees_are_copied(which):
    views = flat_views(4)
    shared = {"a leaf": views[0], "a view of it": views[0][:2], "another view": views[3]}[which]
    value = Grads(dict(zip("abc", views[:3], strict=True)))
    before = shared.clone()
    del views
    new, copies = donate(value, "test")
    assert copies >= 1
    for t in new.values():
        t.fill_(-1.0)
    assert torch.equal(shared, before)


@pytest.mark.parametrize("second", [(1, (4,), (1,)), (4, (4,), (1,))], ids=["shifted", "between strides"])
def test_views_that_overlap_are_copied(second):
    storage = torch.arange(8.0).untyped_storage()
    first = (0, (4,), (2,) if second[0] == 4 else (1,))
    value = Grads({n: torch.empty(0).set_(storage, *view) for n, view in zip("ab", (first, second), strict=True)})
    del storage
    assert donate(value, "test")[1] == 2
