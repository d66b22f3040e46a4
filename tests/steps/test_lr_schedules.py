"""Schedules are functions of the number of updates applied."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_builders import MODEST

from verl_fn.steps import constant, cosine, linear

SHAPES = st.tuples(st.integers(1, 40), st.integers(0, 20), st.sampled_from([0.0, 0.1, 0.5, 1.0]))


def warm(count, warmup):
    return min(1.0, count / warmup) if warmup else 1.0


def progress(count, total, warmup):
    if count < warmup:
        return 0.0
    return min(1.0, (count - warmup) / max(1, total - warmup))


@given(SHAPES, st.integers(0, 70))
@MODEST
def test_values(shape, count):
    total, warmup, least = shape
    ramp, done = warm(count, warmup), progress(count, total, warmup)
    assert constant(3.0, warmup)(count) == pytest.approx(3.0 * ramp)
    assert linear(3.0, total, warmup, least)(count) == pytest.approx(3.0 * ramp * (1 - done * (1 - least)))
    bow = least + (1 - least) * (1 + math.cos(math.pi * done)) / 2
    assert cosine(3.0, total, warmup, least)(count) == pytest.approx(3.0 * ramp * bow)


@pytest.mark.parametrize("make", [linear, cosine])
@given(shape=SHAPES)
@MODEST
def test_up_and_then_down_to_the_floor_for_good(make, shape):
    total, warmup, least = shape
    schedule = make(2.0, total, warmup, least)
    rates = [schedule(i) for i in range(total + warmup + 5)]
    assert all(a <= b for a, b in pairwise(rates[: warmup + 1]))
    assert all(a >= b - 1e-12 for a, b in pairwise(rates[warmup:]))
    assert rates[warmup] == pytest.approx(2.0)
    assert rates[-1] == pytest.approx(2.0 * least) == schedule(10**9)


@pytest.mark.parametrize(
    "make", [lambda w: constant(1.0, w), lambda w: linear(1.0, 100, w), lambda w: cosine(1.0, 100, w)]
)
def test_warm_up_is_linear_from_zero(make):
    assert [make(4)(i) for i in range(5)] == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])
    assert make(0)(0) == 1.0


def test_halfway_down():
    assert linear(1.0, 10, 2, 0.2)(6) == pytest.approx(0.6)
    assert cosine(1.0, 10, 2, 0.2)(6) == pytest.approx(0.6)
    assert cosine(1.0, 10, 2)(4) == pytest.approx((1 + math.sqrt(0.5)) / 2)
