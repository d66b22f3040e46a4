"""A value that was flattened into tensors and scalars comes back bitwise; errors name the leaf that does not fit."""

import json

import pytest
import torch
from state_builders import train_state

from verl_fn.state import tree

WEIGHT = ".params['head.weight']"


def test_flatten_names_every_leaf_once():
    tensors, scalars = tree.flatten(train_state())
    assert set(tensors) | set(scalars) == set(tree.paths(train_state()))
    assert scalars == {
        ".optimizer['count']": 4,
        ".optimizer['seen'].weight": 2.0,
        ".scheduler": 5,
        ".rng.bits": train_state().rng.bits,
        ".step": 7,
    }


def test_unflatten_undoes_flatten_also_through_json():
    """Only the structure of ``like`` is used; a key of 128 bits survives as a JSON number."""
    tensors, scalars = tree.flatten(train_state())
    like = tree.map(lambda leaf: leaf * 0, train_state())
    restored = tree.unflatten(like, tensors, json.loads(json.dumps(scalars)))
    assert tree.equal(restored, train_state()) and not tree.equal(restored, like)
    assert restored.params.trainable == frozenset({"head.weight"})


def test_bits_survive_in_every_dtype():
    value = {
        str(d): torch.tensor([0.0, -0.0, float("nan")]).to(d) for d in (torch.bfloat16, torch.float16, torch.float64)
    }
    value |= {"flag": True, "text": "a", "rate": 0.1, "nothing": None}
    tensors, scalars = tree.flatten(value)
    assert "['nothing']" not in tensors | scalars
    assert tree.equal(tree.unflatten(value, tensors, scalars), value)


def test_restored_tensors_have_storages_of_their_own():
    given = {"['w']": torch.ones(2)}
    restored = tree.unflatten({"w": torch.zeros(2)}, given, {})
    given["['w']"].fill_(9.0)
    assert restored["w"].tolist() == [1.0, 1.0]


def test_a_number_takes_the_type_that_the_structure_has():
    restored = tree.unflatten({"rate": 0.5, "step": 0}, {}, {"['rate']": 1, "['step']": 7})
    assert tree.equal(restored, {"rate": 1.0, "step": 7})


def test_missing_and_superfluous_leaves_are_named():
    tensors, scalars = tree.flatten(train_state())
    with pytest.raises(ValueError, match=r"lacks 1 of 11 leaves, such as .*head\.weight"):
        tree.unflatten(train_state(), {n: t for n, t in tensors.items() if n != WEIGHT}, scalars)
    with pytest.raises(ValueError, match=r"1 leaves too many, such as .*\.extra"):
        tree.unflatten(train_state(), tensors, scalars | {".extra": 1})


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (torch.zeros(3), r"torch.float32\(3,\) in the saved state, not torch.float32\(2,\)"),
        (torch.zeros(2).bfloat16(), r"torch.bfloat16\(2,\) in the saved state, not torch.float32\(2,\)"),
        (1.0, r"is a float in the saved state, not a Tensor"),
    ],
)
def test_a_leaf_that_does_not_fit_is_reported_with_its_path(leaf, message):
    tensors, scalars = tree.flatten(train_state())
    with pytest.raises(ValueError, match=rf"head\.weight'\] .*{message}"):
        tree.unflatten(train_state(), {**tensors, WEIGHT: leaf}, scalars)


def test_what_a_file_cannot_hold_is_refused_by_its_path():
    with pytest.raises(TypeError, match=r"\['f'\] is a object; only tensors, numbers and strings"):
        tree.flatten({"f": object()})
