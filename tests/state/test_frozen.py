"""Values cannot be changed through the mappings that they hold."""

import copy
import pickle

import attrs
import pytest
import torch

from verl_fn.state import Batch, FrozenDict, Grads, Params, Slots, TokenOutputs, donate, spare, tree
from verl_fn.state.train import Buffers


def batch() -> Batch:
    return Batch.from_rows([[5, 6], [7]], {"weight": [[0.5, 1.0], [2.0]]}, {"score": [1.0, 2.0]})


def made() -> dict:
    """A new value of each kind, with the name of a field that holds a mapping."""
    return {
        "params": (Params({"w": torch.ones(2)}), "leaves"),
        "grads": (Grads({"w": torch.ones(2)}), "leaves"),
        "slots": (Slots({"w": torch.ones(2)}), "leaves"),
        "buffers": (Buffers({"w": torch.ones(2)}), "leaves"),
        "outputs": (TokenOutputs({"logprobs": torch.ones(2)}), "by_name"),
        "tokens of a batch": (batch(), "per_token"),
        "rows of a batch": (batch(), "per_row"),
    }


WAYS = {
    "as it was made": lambda value: value,
    "evolved": attrs.evolve,
    "mapped": lambda value: tree.map(torch.clone, value),
    "pickled": lambda value: pickle.loads(pickle.dumps(value)),
    "copied": copy.copy,
    "copied deeply": copy.deepcopy,
    "donated": lambda value: donate(value, "test")[0],
    "spare": spare,
}
CHANGES = {
    "set": lambda held: held.__setitem__("other", torch.zeros(1)),
    "delete": lambda held: held.__delitem__(next(iter(held))),
    "update": lambda held: held.update({"other": torch.zeros(1)}),
    "in place or": lambda held: held.__ior__({"other": torch.zeros(1)}),
    "pop": lambda held: held.pop(next(iter(held))),
    "popitem": lambda held: held.popitem(),
    "setdefault": lambda held: held.setdefault("other", torch.zeros(1)),
    "clear": lambda held: held.clear(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", made())
def test_no_change_is_possible(kind, way):
    value, field = made()[kind]
    value = WAYS[way](value)
    held = getattr(value, field)
    for change in CHANGES.values():
        with pytest.raises(TypeError, match="part of an immutable value: make a new value"):
            change(held)
    assert tree.equal(value, made()[kind][0])


@pytest.mark.parametrize("kind", made())
def test_the_callers_own_mapping_is_copied(kind):
    value, field = made()[kind]
    own = dict(getattr(value, field))
    again = attrs.evolve(value, **{field: own})
    own.clear()
    assert tree.equal(again, value)


def test_the_structure_is_that_of_ordinary_mappings():
    """Also outside a value: leaves, paths and digests do not depend on who holds a mapping."""
    plain = {"w": torch.ones(2), "b": torch.zeros(1)}
    held = Params(plain).leaves
    assert isinstance(held, FrozenDict) and tree.equal(held, plain) and tree.equal(plain, held)
    assert tree.digest(held) == tree.digest(plain) and tree.paths(held).keys() == tree.paths(plain).keys()
    assert type(held | {"c": 1}) is dict and type(held.copy()) is dict
    assert type(tree.map(torch.clone, held)) is FrozenDict


def test_a_leaf_that_is_no_tensor_can_be_in_its_place():
    """As for transformations that put placeholders there."""
    shapes = tree.map(lambda t: tuple(t.shape), batch())
    assert shapes.per_token == {"weight": (3,)} and shapes.per_row == {"score": (2,)}
