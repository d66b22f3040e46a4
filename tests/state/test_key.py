"""Keys are derived, never consumed, and no two purposes share one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from state_builders import MODEST

from verl_fn.state import Key, tree

NAMES = st.one_of(st.integers(-(2**70), 2**70), st.text("ab01-é\0", max_size=6), st.integers(-20, 20).map(str))


@given(st.integers(-(2**200), 2**200), NAMES)
@MODEST
def test_derivation_is_a_function_of_the_key_and_the_name(seed, name):
    first, second = Key.from_seed(seed), Key.from_seed(seed)
    assert tree.equal(first, second)
    assert tree.equal(first.fold_in(name), second.fold_in(name))
    assert [k.bits for k in first.split(3)] == [k.bits for k in second.split(3)]


@given(st.lists(NAMES, unique_by=lambda name: (type(name), name), max_size=12))
@MODEST
def test_names_never_collide(names):
    """A number and the string that spells it give different keys, and neither is a key of split."""
    key = Key.from_seed(0)
    bits = [key.fold_in(name).bits for name in names] + [k.bits for k in key.split(4)] + [key.bits]
    assert len(set(bits)) == len(names) + 5


@pytest.mark.parametrize(("number", "string"), [(0, "0"), (-1, "-1"), (10, "10"), (1, "i1"), (1, "1\0")])
def test_a_number_and_a_like_string_differ(number, string):
    key = Key.from_seed(3)
    assert key.fold_in(number).bits != key.fold_in(string).bits


def test_folding_depends_on_the_order():
    key = Key.from_seed(0)
    assert key.fold_in("a").fold_in("b").bits != key.fold_in("b").fold_in("a").bits
    assert key.fold_in("ab").bits != key.fold_in("a").fold_in("b").bits


@given(st.lists(st.integers(-(2**130), 2**130), unique=True, max_size=12))
@MODEST
def test_different_seeds_give_different_keys(seeds):
    assert len({Key.from_seed(seed).bits for seed in seeds}) == len(seeds)


def test_a_shorter_split_is_the_beginning_of_a_longer_one():
    key = Key.from_seed(5)
    assert [k.bits for k in key.split(2)] == [k.bits for k in key.split(6)][:2]


@given(NAMES)
@MODEST
def test_seeds_fit_where_engines_take_them(name):
    seed = Key.from_seed(0).fold_in(name).seed()
    assert 0 <= seed < 2**63
    torch.Generator().manual_seed(seed)


def test_asking_twice_for_a_generator_gives_the_same_stream_twice():
    key = Key.from_seed(1).fold_in("noise")
    first, second = key.generator(), key.generator()
    one = torch.rand(5, generator=first)
    assert torch.equal(one, torch.rand(5, generator=second))
    assert not torch.equal(one, torch.rand(5, generator=first))
    assert torch.equal(one, torch.rand(5, generator=key.generator()))


def test_keys_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    key = Key.from_seed(9)
    torch.rand(3, generator=key.fold_in(2).generator())
    key.split(4)
    assert torch.equal(torch.get_rng_state(), before)


def test_keys_are_leaves_that_compare_by_their_bits():
    key = Key.from_seed(2)
    assert tree.paths({"rng": key}) == {"['rng'].bits": key.bits}
    assert tree.digest(key) == tree.digest(Key(key.bits)) != tree.digest(key.fold_in(0))
