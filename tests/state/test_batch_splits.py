"""A split uses every row once, keeps to its limit, and can be undone."""

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from state_builders import MODEST, batch_of

from verl_fn.state import Batch, deal, split, split_by_count, split_by_tokens
from verl_fn.state.split import balance

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=10)
SPLITS = {
    "tokens": lambda batch, limit, together=None: split_by_tokens(batch, limit, together),
    "count": lambda batch, limit, together=None: split_by_count(batch, limit, together),
}


@pytest.mark.parametrize("kind", SPLITS)
@given(lengths=LENGTHS, limit=st.integers(9, 40))
@MODEST
def test_every_row_is_in_exactly_one_part(kind, lengths, limit):
    split = SPLITS[kind](batch_of(lengths), limit)
    assert sorted(torch.cat(split.rows).tolist()) == list(range(len(lengths)))
    assert len(split) == len(split.rows) == len(list(split))
    assert all(len(part) for part in split)


@given(LENGTHS, st.integers(9, 40))
@example([3, 3, 2, 2, 2], 6)
@MODEST
def test_the_token_budget_is_strict(lengths, budget):
    parts = list(split_by_tokens(batch_of(lengths), budget))
    assert max(part.num_tokens for part in parts) <= budget
    assert len(parts) >= -(-sum(lengths) // budget)


@given(LENGTHS)
@MODEST
def test_a_budget_for_everything_makes_one_part_in_the_old_order(lengths):
    (part,) = split_by_tokens(batch_of(lengths), sum(lengths))
    assert part.tokens.tolist() == list(range(sum(lengths)))


@given(LENGTHS, st.integers(1, 12))
@MODEST
def test_parts_by_count_are_full_and_consecutive(lengths, most):
    split = split_by_count(batch_of(lengths), most)
    assert torch.cat(split.rows).tolist() == list(range(len(lengths)))
    assert all(len(rows) == most for rows in split.rows[:-1])
    assert 1 <= len(split.rows[-1]) <= most


@pytest.mark.parametrize("kind", SPLITS)
@given(data=st.data(), lengths=LENGTHS)
@MODEST
def test_groups_stay_in_one_part(kind, data, lengths):
    groups = data.draw(st.lists(st.integers(-2, 2), min_size=len(lengths), max_size=len(lengths)))
    tokens = {g: sum(n for n, other in zip(lengths, groups, strict=True) if other == g) for g in groups}
    rows = {g: groups.count(g) for g in groups}
    largest = max((tokens if kind == "tokens" else rows).values())
    limit = data.draw(st.integers(largest, 2 * largest))
    split = SPLITS[kind](batch_of(lengths).with_rows(pair=groups), limit, "pair")
    homes = [
        {g for g, row in zip(groups, range(len(groups)), strict=True) if row in part.tolist()} for part in split.rows
    ]
    assert sum(len(home) for home in homes) == len(set(groups))
    assert sorted(torch.cat(split.rows).tolist()) == list(range(len(lengths)))
    assert all((part.num_tokens if kind == "tokens" else len(part)) <= limit for part in split)


@given(data=st.data(), lengths=LENGTHS, shares=st.integers(1, 4))
@MODEST
def test_groups_are_dealt_to_one_micro_batch_of_one_rank(data, lengths, shares):
    groups = data.draw(st.lists(st.integers(-2, 2), min_size=len(lengths), max_size=len(lengths)))
    largest = max(sum(n for n, other in zip(lengths, groups, strict=True) if other == g) for g in groups)
    limit = data.draw(st.integers(largest, 2 * largest))
    dealt = deal(batch_of(lengths).with_rows(pair=groups), shares, limit, "pair")
    parts = [part for rank in dealt for part in rank]
    assert len(dealt) == shares and len({len(rank) for rank in dealt}) == 1
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert sum(len({groups[row] for row in part}) for part in parts) == len(set(groups))
    assert all(sum(lengths[row] for row in part) <= limit for part in parts)


@pytest.mark.parametrize("kind", SPLITS)
@given(lengths=LENGTHS, limit=st.integers(9, 20))
@MODEST
def test_join_restores_the_order_of_the_whole(kind, lengths, limit):
    batch = batch_of(lengths).with_tokens(pair=torch.arange(2.0 * sum(lengths)).reshape(-1, 2))
    split = SPLITS[kind](batch, limit)
    assert torch.equal(split.join([part.tokens for part in split]), batch.tokens)
    assert torch.equal(split.join([part["pair"] for part in split]), batch["pair"])


@given(LENGTHS, st.integers(9, 20))
@MODEST
def test_inverse_undoes_the_permutation_of_rows(lengths, budget):
    batch = batch_of(lengths)
    split = split_by_tokens(batch, budget)
    scores = torch.cat([part["score"] for part in split])
    assert torch.equal(scores[split.inverse], batch["score"])


@given(LENGTHS, st.integers(9, 20))
@MODEST
def test_a_split_is_a_function_of_the_lengths_alone(lengths, budget):
    batch = batch_of(lengths)
    other = batch.with_tokens(weight=torch.zeros(batch.num_tokens))
    first, second = split_by_tokens(batch, budget), split_by_tokens(other, budget)
    assert [r.tolist() for r in first.rows] == [r.tolist() for r in second.rows]


def test_parts_are_balanced_by_tokens():
    parts = list(split_by_tokens(batch_of([8, 1, 1, 1, 1, 4]), 9))
    assert sorted(part.num_tokens for part in parts) == [8, 8]


def test_a_row_over_the_budget_is_named_with_its_length():
    with pytest.raises(
        ValueError, match=r"row 1 has 6 tokens, more than the budget of 5 .*ppo_max_token_len_per_gpu"
    ):
        split_by_tokens(batch_of([2, 6, 3]), 5)


def test_a_group_over_the_limit_is_named():
    batch = batch_of([1, 3, 3]).with_rows(pair=[0, 4, 4])
    with pytest.raises(ValueError, match=r"the group pair = 4 \(2 rows, the first is row 1\) has 6 tokens"):
        split_by_tokens(batch, 5, "pair")
    with pytest.raises(ValueError, match=r"the group pair = 4 .* has more rows than the 1 that a part may have"):
        split_by_count(batch, 1, "pair")


@pytest.mark.parametrize("kind", SPLITS)
def test_a_field_that_cannot_keep_rows_together_is_named(kind):
    batch = batch_of([1, 2]).with_rows(share=[0.5, 0.5], pair=[[0, 1], [0, 1]])
    for name, message in (
        ("group", r"no per-row field of that name; it has \['pair', 'score', 'share'\]"),
        ("weight", "no per-row field of that name"),
        ("share", r"must be one integer per row; it is torch.float32\[2\]"),
        ("pair", r"must be one integer per row; it is torch.int64\[2, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            SPLITS[kind](batch, 9, name)


def test_the_padding_of_a_group_counts_against_the_budget():
    """The rows of the group have 8 tokens and would fit. Padded to the longer one they have 12."""
    batch = batch_of([3, 2, 6]).with_rows(pair=[0, 4, 4])
    assert len(split_by_tokens(batch, 11, "pair")) == 1
    assert [part.lengths.tolist() for part in split_by_tokens(batch, 12, "pair", padded=True)] == [[2, 6], [3]]
    with pytest.raises(
        ValueError, match=r"group pair = 4 .* has 12 tokens with padding, more than the budget of 11 "
    ):
        split_by_tokens(batch, 11, "pair", padded=True)


@given(LENGTHS, st.integers(1, 9))
@MODEST
def test_a_budget_below_the_longest_row_is_refused(lengths, budget):
    assume(budget < max(lengths))
    with pytest.raises(ValueError, match=f"row {lengths.index(max(lengths))} has {max(lengths)} tokens"):
        split_by_tokens(batch_of(lengths), budget)


def test_rows_above_half_of_the_budget_each_have_a_part(monkeypatch):
    """Long responses are the rule; to try one number of parts after the other took most of a minute for 1,024."""
    tried = []
    monkeypatch.setattr(split, "balance", lambda sizes, parts: tried.append(parts) or balance(sizes, parts))
    tokens = torch.zeros(1, dtype=torch.int64).expand(4096 * 8201)
    batch = Batch(tokens, tokens, torch.arange(4097, dtype=torch.int32) * 8201)
    assert torch.cat(split_by_tokens(batch, 16384).rows).sort().values.tolist() == list(range(4096))
    assert tried == [4096]
    assert [len(parts) for parts in deal(batch, 8, 16384)] == [512] * 8


@given(count=st.integers(1, 12), share=st.integers(1, 6))
@MODEST
def test_rows_that_fill_a_part_exactly_share_it(count, share):
    assert len(split_by_tokens(batch_of([7] * (count * share)), 7 * share)) == count
