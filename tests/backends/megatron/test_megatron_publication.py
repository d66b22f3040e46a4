"""Whole tensors of Megatron's parameters come in buckets: one exchange between ranks each, and every bit."""

import pytest
from megatron_support import EXPERTS, MARKS

from verl_fn.backends.hf.lora import Lora

pytestmark = MARKS


def call(ranks, name, *args):
    return ranks.run(f"megatron_publication_cases.{name}", *args)


LAYOUTS = [
    ({}, {}),
    ({}, {"tp": 2}),
    ({"tie_word_embeddings": False}, {"pp": 2}),
    (EXPERTS, {"ep": 2}),
    (EXPERTS, {"tp": 2, "sp": True}),
]


@pytest.mark.parametrize(("settings", "options"), [*LAYOUTS, ({}, {"fsdp": True})], ids=str)
def test_a_bucket_is_one_exchange(megatron_ranks, small, settings, options):
    """The other one tells which parameters the value has."""
    limit = 4000
    for count, calls, sizes in call(megatron_ranks(2), "exchanges", small(**settings), options, limit):
        assert sorted(calls) == ["all_gather_object", *["all_reduce"] * len(sizes)]
        assert 1 < len(sizes) < count
        assert all(nbytes <= limit or parameters == 1 for nbytes, parameters in sizes)


def test_a_small_model_is_one_bucket_with_its_adapters_in_another(megatron_ranks, small):
    options = {"tp": 2, "lora": Lora(rank=4, alpha=8.0)}
    for _, calls, sizes in call(megatron_ranks(2), "exchanges", small(), options, 2**20):
        assert len(sizes) == 2 and len(calls) == 4


@pytest.mark.parametrize(("settings", "options"), LAYOUTS, ids=str)
def test_every_bit_comes_out_as_it_went_in(megatron_ranks, small, settings, options):
    assert call(megatron_ranks(2), "bits", small(**settings), options) == [True, True]


@pytest.mark.parametrize("broken", ["adds_numbers", "swaps_shards", "other_stage"])
def test_mutants_are_noticed(megatron_ranks, small, broken):
    assert False in call(megatron_ranks(2), "bits", small(), {"tp": 2}, broken)
