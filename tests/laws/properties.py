"""How the property tests of the laws vary what they are given."""

from hypothesis import Phase, settings
from hypothesis import strategies as st

from verl_fn.state import Key

KEYS = st.integers(0, 2**32).map(Key.from_seed)


def examples(count):
    """The same examples in every run; a smaller seed is no simpler, so none is looked for."""
    return settings(derandomize=True, deadline=None, max_examples=count, phases=[Phase.generate])
