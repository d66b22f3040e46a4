"""Metrics are commutative monoids, so a metric cannot depend on how a batch was split."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from state_builders import MODEST

from verl_fn.state import Max, Min, Moments, Sum, Weighted, metrics, tree

MASKED = st.lists(st.tuples(st.integers(-999, 999), st.integers(-999, 999), st.booleans()), min_size=3, max_size=12)
KINDS = {
    "weighted": lambda x, y, mask: Weighted.of(x, mask),
    "sum": lambda x, y, mask: Sum((x * mask).sum()),
    "max": lambda x, y, mask: Max.of(x, mask),
    "min": lambda x, y, mask: Min.of(x, mask),
    "std": lambda x, y, mask: Moments.of(x, mask, stat="std"),
    "correlation": lambda x, y, mask: Moments.of(x, mask, y, stat="correlation"),
    "ess": lambda x, y, mask: Moments.of(x.abs() + 0.1, mask, stat="ess"),
}


def columns(rows):
    x, y, mask = zip(*rows, strict=True)
    return torch.tensor(x) / 8.0, torch.tensor(y) / 8.0, torch.tensor(mask).float()


def same(a, b):
    return math.isclose(a, b, rel_tol=1e-7, abs_tol=1e-9) or (math.isnan(a) and math.isnan(b)) or a == b


@pytest.mark.parametrize("kind", KINDS)
@given(rows=MASKED, cuts=st.tuples(st.integers(0, 12), st.integers(0, 12)))
@MODEST
def test_any_split_gives_the_metric_of_the_whole(kind, rows, cuts):
    """Three parts, possibly empty, added from the left, from the right and backwards."""
    whole = columns(rows)
    low, high = sorted(cuts)
    a, b, c = (KINDS[kind](*(t[part] for t in whole)) for part in (slice(low), slice(low, high), slice(high, None)))
    expected = KINDS[kind](*whole).value
    assert same(((a + b) + c).value, expected)
    assert same((a + (b + c)).value, expected)
    assert same(((c + b) + a).value, expected)


def by_numpy(kind, x, y):
    if not len(x):
        return {"sum": 0.0, "max": -math.inf, "min": math.inf}.get(kind, math.nan)
    if kind == "correlation":
        flat = x.std() == 0 or y.std() == 0
        return math.nan if flat else float(np.corrcoef(x, y)[0, 1])
    if kind == "ess":
        w = np.abs(x) + 0.1
        return float(w.sum() ** 2 / (len(w) * (w**2).sum()))
    return float({"weighted": np.mean, "sum": np.sum, "max": np.max, "min": np.min, "std": np.std}[kind](x))


@pytest.mark.parametrize("kind", KINDS)
@given(rows=MASKED)
@MODEST
def test_the_value_is_numpys_over_unmasked_entries(kind, rows):
    x, y, mask = columns(rows)
    selected = mask.bool()
    expected = by_numpy(kind, x[selected].double().numpy(), y[selected].double().numpy())
    got = KINDS[kind](x, y, mask).value
    assert isinstance(got, float)
    assert same(got, expected) or got == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(st.lists(st.tuples(st.integers(-99, 99), st.integers(0, 9)), min_size=1, max_size=8))
@MODEST
def test_a_weighted_mean_weighs(pairs):
    values, weights = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    total = sum(w for _, w in pairs)
    expected = sum(v * w for v, w in pairs) / total if total else math.nan
    assert same(Weighted.of(values, weights).value, expected)


def test_masked_entries_do_not_count_even_when_not_finite():
    x = torch.tensor([1.0, math.nan, math.inf, 3.0])
    mask = torch.tensor([1.0, 0.0, 0.0, 1.0])
    assert Weighted.of(x, mask).value == 2.0
    assert (Max.of(x, mask).value, Min.of(x, mask).value) == (3.0, 1.0)
    assert Moments.of(x, mask, stat="std").value == 1.0
    assert Moments.of(x, mask, -x, stat="correlation").value == pytest.approx(-1.0)


def test_an_unmasked_nan_is_not_hidden():
    x, ones = torch.tensor([1.0, math.nan]), torch.ones(2)
    assert all(math.isnan(KINDS[kind](x, x, ones).value) for kind in ("weighted", "max", "min", "ess"))


def test_metrics_are_accumulated_in_float64():
    """Adding 1 to 2^24 in float32 would be lost."""
    x = torch.tensor([2.0**24, 1.0, 1.0])
    assert Weighted.of(x, torch.ones(3)).value * 3 == 2**24 + 2
    assert Weighted.of(torch.ones(3), x).weight.item() == 2**24 + 2


def test_metrics_hold_no_graph():
    x = torch.ones(3, requires_grad=True)
    for make in KINDS.values():
        metric = make(x.detach() if make is KINDS["sum"] else x, x, torch.ones(3))
        assert not any(leaf.requires_grad for leaf in tree.leaves(metric) if isinstance(leaf, torch.Tensor))


def test_floats_and_tensors_add_up():
    assert (Weighted(3.0, 1.0) + Weighted(torch.tensor(1.0), torch.tensor(3.0))).value == 1.0
    assert (Max(2.5) + Max(torch.tensor(1.0, dtype=torch.float64))).value == 2.5
    assert (Min(torch.tensor(1.0, dtype=torch.float64)) + Min(2.5)).value == 1.0


def test_the_effective_sample_size_of_equal_weights_is_one():
    assert Moments.of(torch.full((5,), 0.25), torch.ones(5), stat="ess").value == 1.0
    lone = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert Moments.of(lone, torch.ones(4), stat="ess").value == 0.25


def test_statistics_without_spread():
    """Rounding may make the variance of equal values negative."""
    x, other, ones = torch.full((3,), 0.1, dtype=torch.float64), torch.arange(3.0), torch.ones(3)
    spread = Moments.of(x, ones, stat="std")
    assert spread.xx / 3 < (spread.x / 3) ** 2 and spread.value == 0.0
    for first, second in ((x, other), (other, x), (other, None)):
        assert math.isnan(Moments.of(first, ones, second, stat="correlation").value)
    zeros = torch.zeros(2)
    assert math.isnan(Moments.of(zeros, torch.ones(2), stat="ess").value)
    assert [math.isnan(Moments.of(zeros, zeros, stat=stat).value) for stat in ("std", "ess")] == [True, True]
    assert math.isnan(Weighted.of(zeros, zeros).value)


def test_an_unknown_stat_is_refused():
    with pytest.raises(ValueError, match="'median'; it must be std, correlation or ess"):
        Moments.of(torch.ones(1), torch.ones(1), stat="median")


def test_merge_adds_by_name_and_leaves_its_parts_alone():
    first, second = {"a": Sum(1), "b": Max(1.0)}, {"a": Sum(2), "c": Weighted(1.0, 4.0)}
    merged = metrics.merge(first, second)
    assert metrics.to_floats(merged) == {"a": 3.0, "b": 1.0, "c": 0.25}
    assert first["a"].value == 1.0 and set(first) == {"a", "b"}
    assert metrics.merge() == {}


def test_metrics_of_two_classes_do_not_add():
    with pytest.raises(
        ValueError, match=r"metrics named 'a' are a Sum and Max and do not add; name them differently"
    ):
        metrics.merge({"a": Sum(1)}, {"a": Max(1.0)})
