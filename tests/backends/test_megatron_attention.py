"""Attention over packed rows without transformer-engine: how ranks share rows, and where it is used."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from verl_fn.backends.megatron.attention import PackedAttention, Pieces, _attend, shared_pieces, with_packed_attention

SCALE = 0.25


def qkv(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(tokens, heads, 8, generator=generator) for heads in (4, 2, 2))
    return query, key, value


def own_tokens(rows, cp, rank):
    """The tokens of chunks r and 2 cp - 1 - r of each row."""
    own = []
    for start, end in itertools.pairwise(rows.tolist()):
        chunks = torch.arange(start, end).chunk(2 * cp)
        own += [chunks[rank], chunks[2 * cp - 1 - rank]]
    return torch.cat(own)


@given(cp=st.integers(2, 4), chunks=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_a_rank_computes_what_whole_rows_give(cp, chunks, data):
    rank = data.draw(st.integers(0, cp - 1))
    rows = torch.tensor([0, *itertools.accumulate(2 * cp * chunk for chunk in chunks)], dtype=torch.int32)
    longest = int(rows.diff().max())
    query, key, value = qkv(int(rows[-1]))
    whole = _attend(query, key, value, Pieces(rows, rows, longest, longest), SCALE)
    own = own_tokens(rows, cp, rank)
    order = torch.cat([own_tokens(rows, cp, other) for other in range(cp)])
    index, pieces = shared_pieces(rows, longest, len(own), cp, rank)
    part = _attend(query[own], key[order][index], value[order][index], pieces, SCALE)
    assert torch.allclose(part, whole[own], atol=1e-5)
    assert pieces.queries.dtype == pieces.keys.dtype == torch.int32
    assert pieces.most_queries == int(pieces.queries.diff().max())
    assert pieces.most_keys == int(pieces.keys.diff().max())


def test_a_token_sees_its_own_row_up_to_itself():
    query, key, value = (x.requires_grad_() for x in qkv(7))
    rows = torch.tensor([0, 4, 7], dtype=torch.int32)
    out = _attend(query, key, value, Pieces(rows, rows, 4, 4), SCALE)
    for token, row_start in ((2, 0), (5, 4)):
        (gradient,) = torch.autograd.grad(out[token].sum(), value, retain_graph=True)
        seen = gradient.flatten(1).abs().sum(1).nonzero()[:, 0].tolist()
        assert seen == list(range(row_start, token + 1))


class Replaced(nn.Module):
    """Stands for transformer-engine's attention, which needs a GPU."""

    def __init__(self, softmax_type="vanilla", window_size=None, value_width=8):
        super().__init__()
        self.config = SimpleNamespace(softmax_type=softmax_type, window_size=window_size)
        self.softmax_type, self.softmax_scale = softmax_type, SCALE
        self.layer_number, self.attn_mask_type = 1, "causal"
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = 8, value_width


@pytest.mark.parametrize(
    ("options", "packed"),
    [
        ({}, True),
        ({"softmax_type": "learnable"}, False),
        ({"window_size": (128, 0)}, False),
        ({"value_width": 4}, False),
    ],
    ids=str,
)
def test_attention_of_another_kind_stays_transformer_engines(options, packed):
    attention = nn.Module()
    attention.core_attention = Replaced(**options)
    model = nn.Sequential(nn.Linear(1, 1), attention)
    assert with_packed_attention([model], Replaced) == [model]
    assert isinstance(attention.core_attention, PackedAttention) == packed
    assert not packed or attention.core_attention.scale == SCALE
