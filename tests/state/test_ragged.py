"""Fields with any number of entries per row go with their rows, whatever is taken, split or joined."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from state_builders import MODEST, batch_of

from verl_fn.backends.agreement import of_batch
from verl_fn.state import Batch, Ragged, concatenate, split_by_count, split_by_tokens, tree

COUNTS = st.lists(st.integers(0, 3), min_size=1, max_size=8)


def with_images(counts) -> Batch:
    """Rows with so many images of two numbers, which are all different, and one answer of a tool per second row."""
    starts = [sum(counts[:i]) for i in range(len(counts))]
    images = [[[100.0 * row, float(starts[row] + i)] for i in range(n)] for row, n in enumerate(counts)]
    calls = [[row] * (row % 2) for row in range(len(counts))]
    return batch_of([1 + row % 3 for row in range(len(counts))]).with_ragged(images=images, calls=calls)


def entries(batch, name="images"):
    return [row.tolist() for row in batch.rows(name)]


@given(COUNTS, st.data())
@MODEST
def test_take_gives_the_entries_of_the_named_rows(counts, data):
    batch = with_images(counts)
    chosen = data.draw(st.lists(st.integers(0, len(counts) - 1), min_size=1, max_size=8))
    part = batch.take(chosen)
    for name in ("images", "calls"):
        assert entries(part, name) == [entries(batch, name)[i] for i in chosen]
    assert [len(row) for row in entries(part)] == part.ragged["images"].counts.tolist()


@pytest.mark.parametrize("split", [lambda b: split_by_tokens(b, 3), lambda b: split_by_count(b, 2)])
@given(counts=COUNTS)
@MODEST
def test_parts_of_a_split_join_to_the_whole(split, counts):
    batch = with_images(counts)
    parts = split(batch)
    whole = concatenate(list(parts))
    assert tree.equal(whole.take(parts.inverse), batch)


@given(st.lists(COUNTS, min_size=1, max_size=3))
@MODEST
def test_concatenate_lays_the_entries_of_all_in_order(many):
    batches = [with_images(counts) for counts in many]
    assert entries(concatenate(batches)) == [row for batch in batches for row in entries(batch)]


def test_a_field_by_hand():
    batch = batch_of([1, 2, 1]).with_ragged(images=[[[1.0, 2.0]], [], [[3.0, 4.0], [5.0, 6.0]]])
    assert batch["images"].tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]] and "images" in batch
    assert batch.ragged["images"].offsets.tolist() == [0, 1, 1, 3]
    assert entries(batch.take(torch.tensor([False, True, True]))) == [[], [[3.0, 4.0], [5.0, 6.0]]]
    assert "images" not in batch.without("images") and batch.without("images")["score"].tolist() == [0.0, 10.0, 20.0]
    assert batch.to("meta")["images"].device.type == "meta"
    assert tree.equal(tree.map(torch.clone, batch), batch) and tree.equal(batch.detached(), batch)


def test_rows_without_entries_take_the_kind_of_the_others():
    field = Ragged.of([[], [[1, 2]], []])
    assert (field.values.dtype, field.values.shape, field.counts.tolist()) == (torch.int64, (1, 2), [0, 1, 0])
    assert Ragged.of([[], []]).counts.tolist() == [0, 0]


def test_entries_can_be_a_list_of_tensors():
    field = Ragged.of([[torch.zeros(2, 2), torch.ones(2, 2)], (), [torch.zeros(2, 2)]])
    assert field.values.shape == (3, 2, 2) and field.counts.tolist() == [2, 0, 1]


def test_an_array_is_copied():
    array = np.ones((2, 2), dtype=np.float32)
    batch = batch_of([1]).with_ragged(images=[array])
    array[:] = 7.0
    assert batch["images"].tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.with_ragged(images=[[1.0]]), "ragged field 'images' has 1 rows; the batch has 2"),
        (lambda b: b.with_ragged(images=[]), "at least one row"),
        (lambda b: b.with_ragged(images=[[[1.0]], [[1.0, 2.0]]]), "row 1 has entries of shape .* must be alike"),
        (lambda b: b.with_ragged(images=[[1.0], [1]]), "row 1 has entries of shape .* must be alike"),
        (lambda b: b.with_ragged(score=[[1.0], []]), "'score' is already a field of another kind"),
        (lambda b: b.with_ragged(tokens=[[1.0], []]), "'tokens' is already a field of another kind"),
        (lambda b: b.with_ragged(images=[[], []]).with_rows(images=[1, 2]), "already a field of another kind"),
        (lambda b: b.with_ragged(images=[[], []]).with_tokens(images=[1, 2]), "already a field of another kind"),
        (lambda b: concatenate([b, b.with_ragged(images=[[], []])]), r"differ in their fields: \['images'\]"),
    ],
)
def test_fields_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        change(batch_of([1, 1]))


def test_ranks_compare_the_entries_and_whose_they_are():
    batch = batch_of([1, 1])
    one, other, third = (batch.with_ragged(x=rows) for rows in ([[1.0], []], [[], [1.0]], [[2.0], []]))
    assert len({of_batch(b) for b in (batch, one, other, third)}) == 4
    assert of_batch(one) == of_batch(batch.with_ragged(x=[[1.0], []]))
