"""Attention over packed rows without transformer-engine: how ranks share rows, and where it is used."""

import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.lora import Adapters
from verl_fn.backends.hf.skeleton import repeatable
from verl_fn.backends.megatron import attention, model
from verl_fn.backends.megatron.attention import PackedAttention, Pieces, replace_attention
from verl_fn.backends.megatron.executor import check_cuda
from verl_fn.backends.megatron.layout import Sizes
from verl_fn.backends.megatron.rows import padded_starts

SCALE = 0.25
ALONE = SimpleNamespace(sizes=Sizes())
CONFIG = SimpleNamespace(softmax_type="vanilla", window_size=None)
WITHOUT_PADDING = SimpleNamespace(get_text_config=SimpleNamespace)


@pytest.mark.parametrize(("tp", "cp", "length"), [(3, 2, 24), (2, 3, 18), (4, 2, 16), (3, 1, 15)])
def test_ranks_can_share_the_padded_rows_equally(tp, cp, length):
    """Each rank of cp has two chunks of the same length, and the ranks of tp divide them."""
    assert padded_starts(torch.tensor([13]), tp, cp)[1] == length


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


def dense(query, key, value, rows, scale):
    """Attention over all tokens at once, with a mask."""
    row = torch.arange(len(rows) - 1).repeat_interleave(torch.as_tensor(rows).diff())
    seen = (row[:, None] == row) & torch.ones(len(row), len(row), dtype=torch.bool).tril()
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def forward(module, query, key, value, rows):
    params = SimpleNamespace(pieces=Pieces.of(rows, 1, 0), cp_group=None)
    return module(query, key, value, None, packed_seq_params=params)


def packed(scale=SCALE):
    config = SimpleNamespace(softmax_type="vanilla", window_size=None)
    return PackedAttention(config, 1, None, "self", softmax_scale=scale)


@given(cp=st.integers(2, 4), chunks=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_a_rank_computes_what_whole_rows_give(cp, chunks, data):
    rank = data.draw(st.integers(0, cp - 1))
    rows = torch.tensor([0, *itertools.accumulate(2 * cp * chunk for chunk in chunks)])
    query, key, value = qkv(int(rows[-1]))
    own = own_tokens(rows, cp, rank)
    order = torch.cat([own_tokens(rows, cp, other) for other in range(cp)])
    pieces = Pieces.of(rows, cp, rank)
    part = attention._by_piece(query[own], key[order][pieces.seen], value[order][pieces.seen], pieces, SCALE)
    assert torch.allclose(part, dense(query, key, value, rows, SCALE)[own], atol=1e-5)
    assert pieces.queries.dtype == pieces.keys.dtype == torch.int32
    assert pieces.most_queries == int(pieces.queries.diff().max())
    assert pieces.most_keys == int(pieces.keys.diff().max())


@pytest.mark.parametrize("scale", [SCALE, 1.0])
def test_rows_do_not_see_each_other(scale):
    query, key, value = qkv(7)
    rows = torch.tensor([0, 4, 7])
    out = forward(packed(scale), query, key, value, rows)
    assert torch.allclose(out, dense(query, key, value, rows, scale).flatten(1), atol=1e-5)


def varlen_attn(query, key, value, queries, keys, most_queries, most_keys, *, scale, window_size):
    """Stands for torch's, which needs a GPU: the last query of a sequence sees its last key."""
    assert window_size == (-1, 0) and queries.dtype == keys.dtype == torch.int32
    assert (most_queries, most_keys) == (int(queries.diff().max()), int(keys.diff().max()))
    outputs = []
    for q, q_end, k, k_end in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True):
        padded = torch.cat([query.new_zeros(int(k_end - k - (q_end - q)), *query.shape[1:]), query[q:q_end]])
        out = dense(padded, key[k:k_end], value[k:k_end], torch.tensor([0, int(k_end - k)]), scale)
        outputs.append(out[-int(q_end - q) :])
    return torch.cat(outputs)


@pytest.mark.parametrize(("cp", "rank"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_flash_attention_is_asked_for_the_same(monkeypatch, cp, rank):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    rows = torch.tensor([0, 12, 36, 48])
    pieces = Pieces.of(rows, cp, rank)
    query, (key, value) = qkv(int(pieces.queries[-1]))[0], qkv(int(pieces.keys[-1]), seed=1)[1:]
    expected = attention._by_piece(query, key, value, pieces, SCALE)
    assert torch.allclose(attention._flash(query, key, value, pieces, SCALE), expected, atol=1e-5)


class Replaced(nn.Module):
    """Stands for transformer-engine's attention, which needs a GPU."""

    def __init__(self, softmax_type="vanilla", window_size=None, value_width=8, mask="causal", kind="self"):
        super().__init__()
        self.config = SimpleNamespace(softmax_type=softmax_type, window_size=window_size)
        self.softmax_type, self.softmax_scale = softmax_type, SCALE
        self.layer_number, self.attn_mask_type, self.attention_type = 1, mask, kind
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = 8, value_width

    def forward(self, query):
        return query


class Scales(Replaced):
    def forward(self, query):
        return 2 * query


class Derived(Replaced):
    pass


@pytest.mark.parametrize(
    ("core", "replaced"),
    [
        (Replaced(), True),
        (Derived(), True),
        (Replaced(mask="padding_causal"), True),
        (Replaced(softmax_type="learnable"), False),
        (Replaced(window_size=(128, 0)), False),
        (Replaced(value_width=4), False),
        (Replaced(mask="no_mask"), False),
        (Replaced(kind="cross"), False),
        (Scales(), False),
        (nn.Identity(), False),
    ],
)
def test_only_attention_that_computes_the_same_is_replaced(core, replaced):
    layer = nn.Module()
    layer.core_attention = core
    replace_attention(nn.Sequential(nn.Linear(1, 1), layer), Replaced)
    assert isinstance(layer.core_attention, PackedAttention) == replaced
    assert layer.core_attention.scale == SCALE if replaced else layer.core_attention is core


@pytest.fixture
def transformer_engine(monkeypatch):
    """Lets the model believe that transformer-engine is there."""
    module = ModuleType("megatron.core.extensions.transformer_engine")
    module.TEDotProductAttention = Replaced
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(model, "has_transformer_engine", lambda: True)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("repeats", [False, True])
def test_attention_is_replaced_where_backward_passes_repeat(transformer_engine, monkeypatch, repeats, plain):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeats)
    how = model.How("lm", torch.bfloat16, torch.device("cpu"), False, {})
    asked = []
    monkeypatch.setattr(model, "replace_attention", lambda *given: asked.append(given))
    model._change(nn.Linear(1, 1), None, WITHOUT_PADDING, ALONE, how, Adapters(), model._must_repeat(how, plain))
    assert bool(asked) == (repeats and not plain)


def test_fields_of_an_attention_that_is_replaced_are_refused(transformer_engine):
    how = model.How("lm", torch.bfloat16, torch.device("cpu"), False, {"cp_comm_type": "a2a"})
    with repeatable(True), pytest.raises(ModelError, match=r"field cp_comm_type .* driver.deterministic=false"):
        model._must_repeat(how, False)


def test_attention_over_a_table_is_that_of_rows_end_to_end():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(5, 3, heads, 8, generator=generator) for heads in (4, 2, 2))
    ends = torch.arange(4) * 5
    packed = SimpleNamespace(pieces=Pieces.of(ends, 1, 0), cp_group=None)
    own = PackedAttention(CONFIG, 1, None, "self")
    table = own(query, key, value, None)
    flat = own(*(x.transpose(0, 1).flatten(0, 1) for x in (query, key, value)), None, packed_seq_params=packed)
    torch.testing.assert_close(table.transpose(0, 1).flatten(0, 1), flat)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA works here")
def test_megatron_without_cuda_is_refused():
    with pytest.raises(ModelError, match=r"CUDA devices, and torch finds none here.*On CPUs"):
        check_cuda()
