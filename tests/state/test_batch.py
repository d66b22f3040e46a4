"""Packed batches keep rows apart, whatever is built, taken or joined."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from state_builders import MODEST, batch_of

from verl_fn.errors import ArgumentError
from verl_fn.state import Batch, concatenate, tree

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@given(LENGTHS)
@MODEST
def test_rows_lie_end_to_end(lengths):
    batch = batch_of(lengths)
    assert len(batch) == len(lengths)
    assert batch.num_tokens == sum(lengths)
    assert batch.lengths.tolist() == lengths
    assert batch.cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert batch.positions.tolist() == [t for n in lengths for t in range(n)]
    assert batch.row_ids.tolist() == [row for row, n in enumerate(lengths) for _ in range(n)]
    assert batch.last.tolist() == [sum(lengths[: i + 1]) - 1 for i in range(len(lengths))]
    assert [row.tolist() for row in batch.rows("positions")] == [list(range(n)) for n in lengths]


@given(LENGTHS, st.data())
@MODEST
def test_take_gives_the_named_rows_in_the_named_order(lengths, data):
    """Rows may be left out, reordered and repeated; every field goes with its row."""
    batch = batch_of(lengths)
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=8))
    part = batch.take(chosen)
    for name in ("tokens", "positions", "weight"):
        assert [r.tolist() for r in part.rows(name)] == [batch.rows(name)[i].tolist() for i in chosen]
    assert part["score"].tolist() == [10.0 * i for i in chosen]
    assert part.cu_seqlens.dtype == batch.cu_seqlens.dtype


@given(st.lists(LENGTHS, min_size=1, max_size=4))
@MODEST
def test_concatenate_lays_the_rows_of_all_in_order(many):
    batches = [batch_of(lengths) for lengths in many]
    whole = concatenate(batches)
    for name in ("tokens", "positions", "weight"):
        assert [r.tolist() for r in whole.rows(name)] == [r.tolist() for b in batches for r in b.rows(name)]
    assert whole["score"].tolist() == [s for b in batches for s in b["score"].tolist()]


@given(LENGTHS, st.data())
@MODEST
def test_parts_concatenate_to_the_whole(lengths, data):
    batch = batch_of(lengths)
    cut = data.draw(st.integers(0, len(lengths)))
    parts = [batch.take(list(range(cut))), batch.take(list(range(cut, len(lengths))))]
    assert tree.equal(concatenate(parts), batch)


@given(LENGTHS)
@MODEST
def test_padded_is_the_rows_and_then_fill(lengths):
    batch = batch_of(lengths)
    longest = max(lengths)
    rows = [row.tolist() for row in batch.rows("weight")]
    assert batch.padded("weight", fill=-1).tolist() == [row + [-1.0] * (longest - len(row)) for row in rows]


@given(LENGTHS)
@MODEST
def test_sum_rows_and_spread_stay_within_a_row(lengths):
    batch = batch_of(lengths)
    assert batch.sum_rows(batch["weight"]).tolist() == [float(row.sum()) for row in batch.rows("weight")]
    assert batch.spread(batch["score"]).tolist() == [10.0 * i for i, n in enumerate(lengths) for _ in range(n)]


def test_fields_keep_their_trailing_sizes_and_dtypes():
    batch = batch_of([2, 1]).with_tokens(topk=torch.arange(6).reshape(3, 2)).with_rows(bits=torch.ones(2, 4).bool())
    part = batch.take([1, 0])
    assert part["topk"].tolist() == [[4, 5], [0, 1], [2, 3]]
    assert part["bits"].shape == (2, 4) and part["bits"].dtype == torch.bool


def test_a_batch_is_never_changed_by_its_methods():
    batch = batch_of([2, 3])
    before = tree.digest(batch)
    batch.with_tokens(extra=torch.ones(5)).without("weight", "no_such_field").take([1]).to("cpu")
    batch.with_rows(score=[0.0, 0.0])
    assert tree.digest(batch) == before
    assert "extra" not in batch
    assert "weight" not in batch.without("weight") and "score" in batch.without("weight")


def test_with_tokens_and_with_rows_replace_a_field_of_that_name():
    batch = batch_of([1, 1]).with_tokens(weight=[7.0, 8.0]).with_rows(score=[1.0, 2.0])
    assert batch["weight"].tolist() == [7.0, 8.0] and batch["score"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("rows", [[], [[1], []]])
def test_empty_rows_are_refused(rows):
    with pytest.raises(ValueError, match="at least one"):
        Batch.from_rows(rows)


def test_a_field_of_the_wrong_length_is_named():
    with pytest.raises(ValueError, match="'mask' has rows of other lengths"):
        Batch.from_rows([[1, 2], [3]], per_token={"mask": [[1.0], [1.0, 1.0]]})
    with pytest.raises(ValueError, match=r"per_token field 'mask' has shape \(2,\); its first size must be 3"):
        batch_of([2, 1]).with_tokens(mask=torch.ones(2))
    with pytest.raises(ValueError, match=r"per_row field 'uid' has shape \(\); its first size must be 2"):
        batch_of([2, 1]).with_rows(uid=5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"input_ids": [[1, 2]]},), r"rows is .*, not a dict with \['input_ids'\]; pass its input_ids"),
        ((["ab"],), "row 0 is a sequence of token ids, not the string 'ab'; tokenize it first"),
        (([[1], [None]],), r"row 1 cannot be made a tensor of \[None\]"),
        (([1, 2],), r"row 0 has the shape \(\); rows is a sequence of rows"),
        (([[[1, 2]]],), r"row 0 has the shape \(1, 2\)"),
        (([[1, 2]], {"mask": [0, 1]}), "per-token field 'mask' is flat; give it"),
        (([[1, 2]], {"mask": [[0, None]]}), r"per-token field 'mask' cannot be made a tensor of \[0, None\]"),
        (([[1], [2]], None, {"uid": ["a", "b"]}), r"per_row field 'uid' .* of \['a', 'b'\] .*; give it numbers"),
        (([[1], [2]], None, {"score": [0.5, None]}), "per_row field 'score' cannot be made a tensor"),
    ],
    ids=str,
)
def test_what_is_no_number_is_named(arguments, message):
    with pytest.raises((ValueError, ArgumentError), match=message):
        Batch.from_rows(*arguments)


def test_entries_of_a_ragged_field_are_numbers():
    with pytest.raises(ValueError, match=r"a ragged field cannot be made a tensor of \['a'\]"):
        batch_of([1]).with_ragged(images=[["a"]])


def test_a_mask_and_values_of_rows_have_the_length_of_the_batch():
    batch = batch_of([2, 1, 1])
    assert batch.take([True, False, True]).lengths.tolist() == [2, 1]
    for mask in ([True, True], torch.ones(4, dtype=torch.bool), torch.tensor(True)):
        with pytest.raises(ValueError, match=r"a mask of shape .* does not fit the batch's 3 rows"):
            batch.take(mask)
    for values in (batch["weight"], torch.ones(2), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"one value for each of the batch's 3 rows, not the shape .*"):
            batch.spread(values)


def test_a_name_belongs_to_one_kind_of_field():
    batch = batch_of([2])
    for clash in (lambda: batch.with_rows(weight=[1.0]), lambda: batch.with_tokens(score=[1.0, 2.0])):
        with pytest.raises(ValueError, match="already a field of another kind"):
            clash()
    with pytest.raises(ValueError, match="'tokens' is already a field"):
        batch.with_tokens(tokens=[1, 2])


def test_a_missing_field_is_told_with_those_that_exist():
    with pytest.raises(KeyError, match=r"no field 'values'.*cu_seqlens.*score.*weight"):
        batch_of([1])["values"]
    batch = batch_of([1]).with_ragged(pictures=[[0.5]])
    for name, hint in (
        ("loss_weight", "; steps.aggregate writes it into a whole update batch; it has"),
        ("pictres", r"; did you mean pictures\?.* it has .*, pictures, "),
        ("xyz", "'xyz'; it has cu_seqlens, pictures, positions, "),
    ):
        with pytest.raises(KeyError, match=hint) as caught:
            batch[name]
        assert caught.value.name == name
    with pytest.raises(KeyError, match="'score' is a per-row field"):
        batch_of([1]).rows("score")


def test_batches_of_other_fields_do_not_concatenate():
    with pytest.raises(ValueError, match=r"differ in their fields: \['weight'\]"):
        concatenate([batch_of([1]), batch_of([1]).without("weight")])


@pytest.mark.parametrize("make", [lambda b, a: b.with_tokens(x=a), lambda b, a: b.with_rows(x=a)])
def test_an_array_is_copied_into_a_batch(make):
    array = np.ones(2, dtype=np.float32)
    batch = make(batch_of([1, 1]), array)
    array[:] = 7.0
    assert batch["x"].tolist() == [1.0, 1.0] and batch["x"].dtype == torch.float32


def test_no_tensor_has_two_names_in_a_batch():
    batch, values = batch_of([1, 1]), torch.ones(2)
    batch = batch.with_tokens(a=values, b=values)
    batch = batch.with_tokens(c=batch["a"]).with_rows(d=batch["b"])
    assert len({batch[name].data_ptr() for name in "abcd"}) == 4
    assert all(batch[name].tolist() == [1.0, 1.0] for name in "abcd")


def test_a_field_under_its_own_name_is_not_copied():
    batch = batch_of([1, 1]).with_tokens(a=torch.zeros(2), b=torch.ones(2))
    a, b = batch["a"], batch["b"]
    again = batch.with_tokens(a=a, b=b, c=a)
    assert again["a"] is a and again["b"] is b and again["c"] is not a
    swapped = batch.with_tokens(a=b, b=a)
    assert swapped["a"] is b and swapped["b"] is a


def test_tokens_are_integers():
    with pytest.raises(ValueError, match=r"row 1 holds numbers of torch\.float32; token ids are integers"):
        Batch.from_rows([[1, 2], [1.5]])
    assert Batch.from_rows([np.array([1, 2], dtype=np.int32), torch.tensor([3])]).tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize(("device", "asynchronous"), [("cpu", False), (torch.device("cpu"), False), ("meta", True)])
def test_the_host_waits_for_a_copy_to_itself(device, asynchronous, monkeypatch):
    """It could read the tensors before an asynchronous copy from a GPU has filled them."""
    calls, move = [], torch.Tensor.to

    def recorded(self, *args, **kwargs):
        calls.append(kwargs.get("non_blocking", False))
        return move(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", recorded)
    batch_of([1, 2]).to(device)
    assert calls == [asynchronous] * 5


def test_detached_fields_are_constants_for_autograd():
    weight = torch.ones(2, requires_grad=True)
    batch = batch_of([1, 1]).with_tokens(weight=weight * 2.0)
    assert batch["weight"].requires_grad and not batch.detached()["weight"].requires_grad
    assert tree.equal(batch.detached(), batch)
