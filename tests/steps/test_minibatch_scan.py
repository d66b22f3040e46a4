"""Minibatches of an epoch are a partition of the batch; scan is a fold that keeps what it emits."""

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_builders import MODEST

from verl_fn.state import Batch, Key, tree
from verl_fn.steps import minibatches, scan


def numbered(count, **per_row):
    return Batch.from_rows([[i] * (i % 3 + 1) for i in range(count)], per_row={"row": list(range(count))} | per_row)


def epochs_of(parts, count):
    """The row numbers of each minibatch, gathered by epoch."""
    epochs = [[]]
    for batch in parts:
        if sum(map(len, epochs[-1])) == count:
            epochs.append([])
        epochs[-1].append(batch["row"].tolist())
    return epochs


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 3), st.one_of(st.none(), st.integers(0, 99)))
@MODEST
def test_every_row_is_used_once_an_epoch(count, rows, epochs, seed):
    shuffle = None if seed is None else Key.from_seed(seed)
    passes = epochs_of(minibatches(numbered(count), rows, epochs=epochs, shuffle=shuffle), count)
    assert len(passes) == epochs
    for epoch in passes:
        assert sorted(i for part in epoch for i in part) == list(range(count))
        assert [len(part) for part in epoch[:-1]] == [rows] * (len(epoch) - 1) and 1 <= len(epoch[-1]) <= rows


def test_without_a_key_the_order_is_kept():
    assert epochs_of(minibatches(numbered(5), 2, epochs=2), 5) == [[[0, 1], [2, 3], [4]]] * 2


@pytest.mark.parametrize("together", [None, "pair"])
def test_a_key_gives_every_epoch_its_own_order_and_always_the_same(together):
    def in_order_of(key):
        batch = numbered(20, pair=[i // 2 for i in range(20)])
        return epochs_of(minibatches(batch, 20, epochs=3, shuffle=key, together=together), 20)

    first, second = (in_order_of(Key.from_seed(4)) for _ in range(2))
    assert first == second
    orders = [epoch[0] for epoch in first] + [list(range(20))]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert in_order_of(Key.from_seed(5)) != first


def test_the_first_epochs_do_not_depend_on_how_many_follow():
    key = Key.from_seed(4)
    short, long = (minibatches(numbered(9), 4, epochs=n, shuffle=key) for n in (1, 3))
    assert all(tree.equal(a, b) for a, b in zip(short, long, strict=False))


@pytest.mark.parametrize("seed", [None, 0, 1])
@given(groups=st.lists(st.integers(0, 3), min_size=1, max_size=10))
@MODEST
def test_groups_stay_in_one_minibatch(seed, groups):
    rows = max(groups.count(g) for g in groups)
    shuffle = None if seed is None else Key.from_seed(seed)
    parts = [*minibatches(numbered(len(groups), pair=groups), rows, shuffle=shuffle, together="pair")]
    assert sorted(i for part in parts for i in part["row"].tolist()) == list(range(len(groups)))
    assert sum(len(set(part["pair"].tolist())) for part in parts) == len(set(groups))
    assert all(len(part) <= rows for part in parts)


def test_the_batch_passed_in_is_unchanged():
    batch = numbered(6)
    before = tree.digest(batch)
    list(minibatches(batch, 2, epochs=2, shuffle=Key.from_seed(0)))
    assert tree.digest(batch) == before


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
@MODEST
def test_a_share_of_prompts_is_that_share_of_the_rows(count, size, prompts):
    rows, updates = Fraction(count * min(size, prompts), prompts), math.ceil(prompts / min(size, prompts))
    parts = [part["row"].tolist() for part in minibatches(numbered(count), rows)]
    assert [*itertools.chain(*parts)] == list(range(count))
    assert len(parts) == updates or (len(parts) < updates and count < prompts)
    assert all(abs(len(part) - rows) <= 1 for part in parts[:-1]) and 0 < len(parts[-1]) <= rows + 1


@pytest.mark.parametrize("rows", [0, -1])
def test_an_update_batch_has_a_row(rows):
    with pytest.raises(ValueError, match="at least one row"):
        next(minibatches(numbered(2), rows))


@given(st.lists(st.integers(-9, 9)))
@MODEST
def test_scan_folds_and_emits(xs):
    total, partial = scan(lambda carry, x: (carry + x, (carry, x)), 100, iter(xs))
    assert total == 100 + sum(xs)
    assert partial == [(100 + sum(xs[:i]), x) for i, x in enumerate(xs)]
