"""Every value is a pytree: it can be mapped, walked, compared, hashed and copied."""

import copy
import pickle

import attrs
import pytest
import torch
from state_builders import batch_of, grads, train_state

from verl_fn.state import Grads, Moments, Node, Params, TokenOutputs, TrainState, Weighted, node, snapshot, tree

VALUES = {
    "state": train_state,
    "grads": grads,
    "batch": lambda: batch_of([2, 1]),
    "outputs": lambda: TokenOutputs({"logprobs": torch.tensor([-1.0, -2.0])}),
    "weighted": lambda: Weighted(torch.tensor(1.0), 2.0),
    "moments": lambda: Moments.of(torch.arange(3.0), torch.ones(3), stat="ess"),
}


def test_paths_read_as_a_person_would_write_them():
    assert list(tree.paths(train_state())) == [
        ".params['embed.weight']",
        ".params['head.weight']",
        ".params.buffers['router.bias']",
        ".optimizer['count']",
        ".optimizer['averages'][0]['head.weight']",
        ".optimizer['averages'][1][0]",
        ".optimizer['seen'].sum",
        ".optimizer['seen'].weight",
        ".scheduler",
        ".rng.bits",
        ".step",
    ]


def test_map_keeps_the_structure_and_what_is_static():
    state = train_state()
    doubled = tree.map(lambda leaf: leaf * 2, state)
    assert isinstance(doubled, TrainState) and isinstance(doubled.params, Params)
    assert doubled.params.trainable == frozenset({"head.weight"})
    assert doubled.params["head.weight"].tolist() == [1.0, 1.0]
    assert (doubled.step, doubled.scheduler, doubled.optimizer["count"]) == (14, 10, 8)
    assert tree.equal(state, train_state())


def test_map_takes_several_trees_of_one_structure():
    total = tree.map(torch.add, grads(), grads())
    assert tree.equal(total, grads() + grads())
    with pytest.raises(ValueError):
        tree.map(torch.add, grads(), Grads({"a": torch.ones(2)}))


def test_map_tensors_passes_counts_and_keys_over():
    state = tree.map_tensors(torch.zeros_like, train_state())
    assert state.step == 7 and state.rng.bits == train_state().rng.bits
    assert float(state.params["embed.weight"].sum()) == 0.0


def test_static_fields_are_structure_and_not_leaves():
    moments = VALUES["moments"]()
    assert len(tree.leaves(moments)) == 6
    assert tree.map(lambda leaf: leaf, moments).stat == "ess"


def test_rebuilding_runs_neither_validators_nor_converters():
    """A transformation may put anything at a leaf: a tracer, a placeholder, a path."""

    @node
    class Strict(Node):
        count: int = attrs.field(converter=int, validator=attrs.validators.ge(0))

    assert Strict("3").count == 3
    with pytest.raises(ValueError):
        Strict(-1)
    placeholder = object()
    assert tree.map(lambda leaf: placeholder, Strict(3)).count is placeholder
    assert tree.map(lambda leaf: -leaf, Strict(3)).count == -3


@pytest.mark.parametrize("name", VALUES)
def test_a_value_survives_pickle_and_copy(name):
    value = VALUES[name]()
    for other in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
        assert type(other) is type(value)
        assert tree.equal(other, value) and tree.digest(other) == tree.digest(value)


@pytest.mark.parametrize("name", VALUES)
def test_values_are_frozen(name):
    value = VALUES[name]()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(value, attrs.fields(type(value))[0].name, None)


def test_evolve_replaces_one_field_and_shares_the_rest():
    state = train_state()
    later = attrs.evolve(state, step=8)
    assert (state.step, later.step) == (7, 8)
    assert later.params is state.params


@pytest.mark.parametrize("name", VALUES)
def test_a_snapshot_is_equal_and_shares_no_storage(name):
    value = VALUES[name]()
    taken = snapshot(value)
    assert tree.equal(taken, value)
    for old, new in zip(tree.leaves(value), tree.leaves(taken), strict=True):
        assert not isinstance(old, torch.Tensor) or old.data_ptr() != new.data_ptr()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_one_changed_element_is_seen_in_every_dtype(dtype):
    value = {"w": torch.ones(3).to(dtype), "v": torch.zeros(2)}
    other = {"w": torch.tensor([1, 1, 0]).to(dtype), "v": torch.zeros(2)}
    assert tree.equal(value, snapshot(value)) and tree.digest(value) == tree.digest(snapshot(value))
    assert tree.first_difference(value, other) == "['w']"
    assert tree.digest(value) != tree.digest(other)


def test_one_bit_in_a_long_tensor_is_seen():
    value = torch.ones(5000)
    other = value.clone()
    other[2500] = torch.nextafter(other[2500], torch.tensor(2.0))
    assert not tree.equal(value, other) and tree.digest(value) != tree.digest(other)


@pytest.mark.parametrize(
    "other",
    [
        {"v": torch.zeros(4)},
        {"w": torch.zeros(2, 2)},
        {"w": torch.zeros(4, dtype=torch.int32)},
        {"w": torch.zeros(8, dtype=torch.bfloat16)},
        {"w": -torch.zeros(4)},
        {"w": torch.zeros(4), "v": torch.zeros(0)},
        {"w": 0.0},
        {},
    ],
)
def test_names_shapes_dtypes_and_signs_of_zero_count(other):
    value = {"w": torch.zeros(4)}
    assert not tree.equal(value, other) and not tree.equal(other, value)
    assert tree.digest(value) != tree.digest(other)


def test_nan_equals_the_same_nan():
    value = {"w": torch.tensor([float("nan"), 1.0]), "b": torch.tensor([float("nan")]).bfloat16(), "x": float("nan")}
    same = {"w": torch.tensor([float("nan"), 1.0]), "b": torch.tensor([float("nan")]).bfloat16(), "x": float("nan")}
    assert tree.equal(value, same) and tree.digest(value) == tree.digest(same)
    other = {**same, "w": torch.tensor([1.0, float("nan")])}
    assert tree.first_difference(value, other) == "['w']"


@pytest.mark.parametrize(("a", "b"), [(1, 2), (1, 1.0), (1, True), (1, "1"), (None, 0), (1, torch.tensor(1))])
def test_scalars_compare_by_type_and_value(a, b):
    assert tree.equal({"x": a}, {"x": a})
    assert not tree.equal({"x": a}, {"x": b})
    assert tree.digest({"x": a}) != tree.digest({"x": b})


def test_memory_layout_does_not_count():
    rows = torch.arange(6.0).reshape(2, 3)
    strided = rows.t().contiguous().t()
    assert strided.stride() != rows.stride()
    assert tree.equal(rows, strided) and tree.digest(rows) == tree.digest(strided)
    every_other = torch.arange(6.0)[::2]
    assert tree.equal(every_other, every_other.clone()) and tree.digest(every_other) == tree.digest(
        every_other.clone()
    )
    assert tree.digest(torch.zeros(())) != tree.digest(torch.zeros(1)) != tree.digest(torch.zeros(0))


def test_the_first_difference_is_named_by_its_path():
    state = train_state()
    assert tree.first_difference(state, train_state()) is None
    assert tree.first_difference(state, attrs.evolve(state, step=8)) == ".step"
    changed = attrs.evolve(state, optimizer={**state.optimizer, "count": 5})
    assert tree.first_difference(state, changed) == ".optimizer['count']"
    assert tree.first_difference({"a": 1}, {"a": 1, "b": 2}) == "['b']"
