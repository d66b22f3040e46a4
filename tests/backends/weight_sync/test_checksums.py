"""Checksums of published weights see every change, whatever the dtype, the layout and the number of slices."""

import pytest
import torch
from made_tensors import made

from verl_fn.backends import tensor_file
from verl_fn.backends.tensor_file import checksum
from verl_fn.backends.weight_sync import apart

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]
# Fewer bytes than a word, a word, parts of a row of words, and several slices with a rest.
SIZES = [1, 3, 8, 1000, 9_001, 70_003]


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(tensor_file, "SLICE", 2048)


def drawn(size, dtype):
    return torch.randint(-100, 100, (size,), generator=torch.Generator().manual_seed(size)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_every_bit_counts(dtype, size):
    values = drawn(size, dtype)
    whole = checksum(values)
    assert checksum(values.clone()) == whole
    nbytes = values.view(torch.uint8).numel()
    for place in {0, nbytes // 2, nbytes - 1}:
        for bit in range(8):
            changed = values.clone()
            changed.view(torch.uint8)[place] ^= 1 << bit
            assert checksum(changed) != whole


@pytest.mark.parametrize("distance", [1, 4, 1024, 2048, 16_384, 60_000])
def test_swapped_elements_count(distance):
    values = drawn(70_003, torch.float32)
    values[17], values[17 + distance] = 5.0, 6.0
    swapped = values.clone()
    swapped[17], swapped[17 + distance] = 6.0, 5.0
    assert checksum(swapped) != checksum(values)


def test_swapped_slices_count():
    values = drawn(2048 * 8, torch.int8).view(torch.int64)
    values = torch.cat([values, values + 1])
    assert checksum(values) != checksum(torch.cat([values[2048:], values[:2048]]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_of_another_dtype(dtype, size):
    values = drawn(size, torch.float32) / 3
    assert checksum(values, dtype) == checksum(values.to(dtype))
    slices = made(lambda: checksum(values, dtype))
    assert max(numel * of.itemsize for numel, of in slices) <= tensor_file.SLICE * tensor_file.WORD


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_layout_in_memory_does_not_count(dtype):
    values = drawn(9_001, dtype)
    assert checksum(values[3:]) == checksum(values[3:].clone()), "words that are not aligned"
    square = values[:9000].view(90, 100)
    assert checksum(square.t()) == checksum(square.t().contiguous()) != checksum(square)


def test_swapped_words_that_differ_in_one_bit_count():
    """Weights of two words can differ by an even number, at which a difference of the highest bit would be lost."""
    values = drawn(4096 * 8, torch.int8).view(torch.int64)
    for bit in range(64):
        values[5], values[9] = 1, 1 ^ (1 << bit) if bit < 63 else 1 - 2**63
        swapped = values.clone()
        swapped[5], swapped[9] = values[9], values[5]
        assert checksum(swapped) != checksum(values)


@pytest.mark.parametrize(
    "write", [lambda t: t.mul_(2), lambda t: t[:1].zero_(), lambda t: t.detach().view(-1).add_(1)]
)
def test_a_checksum_that_is_kept_is_of_what_was_written_last(write):
    base = {"m.weight": torch.ones(40, 2)}
    before = apart(base, {"m.lora_A.weight": torch.ones(1, 2)}).identify()
    write(base["m.weight"])
    again = {"m.weight": base["m.weight"].clone()}
    written, equal = (apart(tensors, {"m.lora_A.weight": torch.ones(1, 2)}).identify() for tensors in (base, again))
    assert before != written == equal
