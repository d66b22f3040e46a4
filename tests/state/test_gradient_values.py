"""Gradients add up, scale and have a norm; parameters know which of them are trained."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from state_builders import MODEST, grads, train_state

from verl_fn.state import DonatedError, Grads, Params, TokenOutputs, donate, sum_of_squares, tree

NUMBERS = st.integers(-8, 8).map(lambda n: n / 4)
LEAVES = st.tuples(st.lists(NUMBERS, min_size=2, max_size=2), st.lists(NUMBERS, min_size=3, max_size=3))


def make(values) -> Grads:
    return Grads({name: torch.tensor(v) for name, v in zip("ab", values, strict=True)})


@given(LEAVES, LEAVES, LEAVES)
@MODEST
def test_addition_is_associative_and_commutative(x, y, z):
    x, y, z = make(x), make(y), make(z)
    assert tree.equal((x + y) + z, x + (y + z))
    assert tree.equal(x + y, y + x)
    assert tree.equal(x + x.scale(0.0), x.scale(1.0) + x.scale(0.0))


@given(LEAVES, LEAVES, NUMBERS)
@MODEST
def test_scaling_distributes(x, y, factor):
    x, y = make(x), make(y)
    left, right = (x + y).scale(factor), x.scale(factor) + y.scale(factor)
    assert all(torch.equal(left[name], right[name]) for name in "ab")


@given(LEAVES)
@MODEST
def test_the_global_norm_is_that_of_all_elements(x):
    expected = math.sqrt(sum(v * v for leaf in x for v in leaf))
    assert float(make(x).global_norm()) == pytest.approx(expected, rel=1e-6)


def test_the_norm_of_nothing_is_zero():
    assert float(Grads({}).global_norm()) == 0.0
    assert float(Grads({"a": torch.zeros(0), "b": torch.tensor([2.0])}).global_norm()) == 2.0


def test_reduce_adds_what_other_processes_hold():
    assert float(sum_of_squares(grads().values(), lambda local: local + 11.0)) == pytest.approx(36.0)


def test_the_norm_of_a_large_tensor_in_half_precision_keeps_its_digits():
    values = torch.full((2**15 + 1,), 0.1, dtype=torch.bfloat16)
    expected = float(values[0].double()) * math.sqrt(len(values))
    assert float(Grads({"a": values}).global_norm()) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("size", [3, 2**15 + 1])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_norm_with_one_value_that_is_not_finite_is_not_finite(value, size):
    for place in (0, size - 1):
        values = torch.ones(size)
        values[place] = value
        assert not torch.isfinite(Grads({"a": values, "b": torch.zeros(3)}).global_norm())


def test_addition_leaves_its_terms_alone():
    x = grads()
    x + x.scale(2.0)
    assert tree.equal(x, grads())


def test_gradients_of_other_names_do_not_add():
    with pytest.raises(ValueError, match=r"different names: \['b', 'c'\]"):
        grads() + Grads({"a": torch.ones(2), "c": torch.ones(1, 1)})


def test_gradients_are_a_mapping():
    value = grads()
    assert list(value) == ["a", "b"] and len(value) == 2 and "a" in value and "c" not in value
    assert {name: tuple(g.shape) for name, g in value.items()} == {"a": (2,), "b": (1, 1)}
    assert repr(value) == "Grads(2 tensors, 3 elements)"
    with pytest.raises(KeyError):
        value["c"]


def test_gradients_compare_by_identity():
    """Item by item, tensors have no truth value; tree.equal compares contents."""
    value = grads()
    assert value == value and value != grads() and value in {value}


def test_all_parameters_are_trained_unless_some_are_named():
    assert Params({"a": torch.ones(1), "b": torch.ones(1)}).trained() == ["a", "b"]
    assert Params({"a": torch.ones(1), "b": torch.ones(1)}, frozenset()).trained() == []
    assert train_state().params.trained() == ["head.weight"]


def test_outputs_name_what_they_have_and_what_they_lack():
    outputs = TokenOutputs({"logprobs": torch.zeros(2), "values": torch.ones(2)})
    assert outputs.values.tolist() == [1.0, 1.0]
    with pytest.raises(AttributeError, match=r"no 'entropy', only \['logprobs', 'values'\]"):
        outputs.entropy  # noqa: B018


def test_donated_outputs_say_so():
    outputs = TokenOutputs({"logprobs": torch.zeros(2)})
    donate(outputs, "consume")
    for read in (lambda: outputs.logprobs, lambda: outputs.by_name):
        with pytest.raises(DonatedError, match="TokenOutputs was donated to consume"):
            read()


@pytest.mark.parametrize("size", [1, 1000, 2**15, 3_000_001])
def test_the_norm_of_many_elements_is_exact(size):
    """A sum of equal squares in fp32 is 0.2 % too high for 3 million of them, and 1.4 % too low for 25 million."""
    values = torch.full((size,), 1e-3)
    exact = float(values.double().square().sum().sqrt())
    value = Grads({"a": values, "b": torch.zeros(3)})
    assert float(value.global_norm()) == pytest.approx(exact, rel=1e-7)
    assert torch.equal(value.global_norm(), value.global_norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e30, 0.3, 1e-21, 1e-25])
@pytest.mark.parametrize("size", [3, 2**15 + 1])
def test_squares_neither_overflow_nor_vanish(size, scale, dtype):
    value = Grads({"a": torch.full((size, 2), scale, dtype=dtype).t(), "b": torch.zeros(0, dtype=dtype)})
    assert float(value.global_norm()) == pytest.approx(float(value["a"][0, 0]) * math.sqrt(2.0 * size), rel=1e-6)
