"""How tensors are cut into buckets: each row once, within the size, and whole where they fit."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_fn.backends.weight_sync import Cut, Weights

SHAPES = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), min_size=1, max_size=6)


@settings(derandomize=True, deadline=None)
@given(shapes=SHAPES, size=st.integers(4, 400), senders=st.integers(1, 3), data=st.data())
def test_a_tensor_that_fits_is_in_one_bucket(shapes, size, senders, data):
    tensors = {str(i): torch.arange(float(rows * width)).view(rows, width) for i, (rows, width) in enumerate(shapes)}
    between = {
        name: sorted(data.draw(st.lists(st.integers(0, len(t)), min_size=senders - 1, max_size=senders - 1)))
        for name, t in tensors.items()
    }
    edges = {name: (0, *between[name], len(t)) for name, t in tensors.items()}
    specs = Weights.of(tensors).specs
    sent = []
    for number in range(senders):
        held = {name: t[edges[name][number] : edges[name][number + 1]] for name, t in tensors.items()}
        sent.append(list(Weights(specs, held.items, Cut(number, edges)).buckets(size)))
    assert len({len(buckets) for buckets in sent}) == 1
    share = size // senders
    for name, t in tensors.items():
        numbered = [(i, c) for buckets in sent for i, bucket in enumerate(buckets) for c in bucket if c.name == name]
        ordered = sorted(numbered, key=lambda one: one[1].start)
        assert torch.equal(torch.cat([t[:0], *[chunk.values for _, chunk in ordered]]), t)
        assert [i for i, _ in ordered] == sorted(i for i, _ in numbered)
        if all((last - first) * t.shape[1] * 4 <= share for first, last in pairwise(edges[name])):
            assert len({i for i, _ in numbered}) <= 1
    for bucket in (bucket for buckets in sent for bucket in buckets):
        alone = len(bucket) == 1 and len(bucket[0].values) == 1
        assert alone or sum(chunk.values.nbytes for chunk in bucket) <= share
