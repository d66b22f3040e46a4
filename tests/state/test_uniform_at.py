"""Numbers drawn at (seed, position) are SplitMix64's, uniform, and independent of the other pairs."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from state_builders import MODEST

from verl_fn.state import Key, uniform_at

INT64 = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.integers(0, 2**40)
DRAWS = 2**15


def splitmix64(seed: int, nth: int) -> int:
    """The nth output of the generator, in arithmetic modulo 2^64 as published."""
    wrap = 2**64 - 1
    z = (seed + (nth + 1) * 0x9E3779B97F4A7C15) & wrap
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & wrap
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & wrap
    return z ^ (z >> 31)


def test_the_reference_gives_the_published_stream():
    """The first outputs of seed 1234567 are those of the generator's public test vector."""
    assert [splitmix64(1234567, i) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(st.lists(st.tuples(INT64, POSITIONS), min_size=1, max_size=20))
@MODEST
def test_it_is_the_top_53_bits_of_splitmix64(pairs):
    seeds, positions = (torch.tensor(column) for column in zip(*pairs, strict=True))
    got = uniform_at(seeds, positions)
    assert got.dtype == torch.float64
    assert got.tolist() == [(splitmix64(s, p) >> 11) / 2**53 for s, p in pairs]


@given(st.lists(st.tuples(INT64, POSITIONS), min_size=1, max_size=20), st.randoms(use_true_random=False))
@MODEST
def test_a_draw_does_not_depend_on_its_neighbours(pairs, random):
    seeds, positions = (torch.tensor(column) for column in zip(*pairs, strict=True))
    together = uniform_at(seeds, positions)
    order = list(range(len(pairs)))
    random.shuffle(order)
    some = torch.tensor(order[: len(order) // 2 + 1])
    assert torch.equal(uniform_at(seeds[some], positions[some]), together[some])


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 7046029254386353131])
def test_draws_lie_in_the_half_open_unit_interval(seed):
    draws = uniform_at(torch.full((1000,), seed), torch.arange(1000))
    assert float(draws.min()) >= 0.0 and float(draws.max()) < 1.0


@pytest.mark.parametrize("across", ["positions", "seeds", "both", "keys"])
def test_draws_are_uniform(across):
    """64 bins of 2^15 draws pass a chi-squared test at about 5 sigma, whichever argument counts up."""
    counting, fixed = torch.arange(DRAWS), torch.full((DRAWS,), 42)
    if across == "keys":
        key = Key.from_seed(0)
        draws = uniform_at(torch.tensor([key.fold_in(i).seed() for i in range(DRAWS // 8)]), fixed[: DRAWS // 8])
    else:
        draws = uniform_at(fixed if across == "positions" else counting, fixed if across == "seeds" else counting)
    counts = np.histogram(draws.numpy(), bins=64, range=(0.0, 1.0))[0]
    expected = len(draws) / 64
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_squared - 63) < 5 * np.sqrt(2 * 63)


def test_neighbouring_draws_are_uncorrelated():
    seeds, positions = torch.arange(200).repeat_interleave(200), torch.arange(200).repeat(200)
    table = uniform_at(seeds, positions).reshape(200, 200).numpy()
    for left, right in ((table[:, :-1], table[:, 1:]), (table[:-1], table[1:])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 5 / 200


def test_no_two_of_many_draws_coincide():
    seeds, positions = torch.arange(100).repeat_interleave(100), torch.arange(100).repeat(100)
    assert len(uniform_at(seeds, positions).unique()) == 10_000
