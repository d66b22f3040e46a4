"""What travels between processes: a tensor that died or was written to is not taken for the one that it was."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from verl_fn.driver import parcels
from verl_fn.driver.parcels import Columns, Lazy, Parcels, flattened
from verl_fn.state import tree
from verl_fn.testing import tiny_batch

A, B = torch.full((200,), 1.0), torch.full((200,), 2.0)


@pytest.fixture(params=[1, 2**30], ids=["no cache", "cache"])
def sent(ray_cluster, monkeypatch, request):
    """Two tensors as they travel, and the parcels of a process that they arrive in."""
    monkeypatch.setattr(parcels, "CACHE_BYTES", request.param)
    monkeypatch.setattr(parcels, "SMALL_BYTES", 1)
    return [Parcels().out(t.clone(), Columns()) for t in (A, B)], Parcels()


def arrived(ours, *args, shared=False):
    places, flat = flattened(args)
    return ours.arguments(places, flat, shared=shared)


@pytest.mark.parametrize("shared", [False, True])
def test_a_result_at_the_address_of_an_argument_travels_as_itself(sent, shared):
    (a, b), ours = sent
    values, columns = arrived(ours, a, shared=shared)
    assert ours.out(values[0], columns) == a
    address = id(values.pop())
    # Its place in a cache goes to the next tensor.
    ours.value(b)
    made = [torch.full((200,), 3.0) for _ in range(1000)]
    again = [t for t in made if id(t) == address] or made[:1]
    assert torch.equal(Parcels().value(ours.out(again[0], columns)), again[0])


@pytest.mark.parametrize(
    "write", [lambda t: t.mul_(5), lambda t: t[3:].zero_(), lambda t: t.detach().view(2, 100).add_(1)]
)
def test_what_a_function_writes_to_an_argument_is_in_its_result_alone(sent, write):
    (a, b), ours = sent
    (mine, other), columns = arrived(ours, a, b)
    write(mine)
    expected = mine.clone()
    out = ours.out({"mine": mine, "other": other}, columns)
    assert out["other"] == b and out["mine"] != a
    assert torch.equal(Parcels().value(out)["mine"], expected)
    # A later call in this process gets the argument's value, and its result what it was when it was sent.
    assert torch.equal(ours.value(a), A)
    mine.zero_()
    assert torch.equal(ours.value(out["mine"]), expected)


def test_what_a_function_writes_to_a_lazy_result_is_not_in_another_call(sent, monkeypatch):
    (a, b), ours = sent
    monkeypatch.setattr(parcels, "CACHE_RESULTS", 1)
    inner = Lazy(1, lambda x, y: (x, x + y), (a, b), {})
    nested = Lazy(2, lambda pair, number: pair[number], (inner, 1), {})
    for lazy, expected in ((nested, 3.0), (Lazy(1, inner.fn, (a, b), {}, 0), 1.0)) * 2:
        (value,), _ = arrived(ours, lazy)
        assert value.eq(expected).all()
        value.zero_()


def test_parts_of_a_batch_that_was_extended_travel_once(sent):
    """Whatever the room of the cache, and the values are those that were sent."""
    _, ours = sent
    batch, there = tiny_batch(rows=64), Parcels()
    travelled = there.out(batch, Columns())
    for _ in range(3):
        (value,), columns = arrived(ours, travelled)
        out = ours.out(value.with_tokens(twice=value.tokens * 2.0), columns)
        assert out.tokens == travelled.tokens and out.cu_seqlens == travelled.cu_seqlens
        assert tree.equal(there.value(out).without("twice"), batch)


def test_threads_share_a_cache_without_room(sent):
    """As a publication and the requests of an engine do."""
    columns, ours = sent
    expected = [A, B]

    def read(i):
        return all(torch.equal(ours.value(columns[(i + j) % 2]), expected[(i + j) % 2]) for j in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(4)))
    assert ours._cached_bytes == sum(t.nbytes for t, _ in ours._tensors.values())
    assert set(ours._tensors) <= {column.ref.hex() for column in columns}
