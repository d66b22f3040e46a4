"""No config, however wrong, gives a traceback, and none with an unknown key is accepted."""

import contextlib
import io
import math

import tomli_w
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from verl_fn.cli import main
from verl_fn.config import Config, ConfigError, flat, keys, load, structure, to_table
from verl_fn.config.load import elsewhere

KEYS = sorted(keys())
TABLES = sorted({key.rsplit(".", 1)[0] for key in KEYS})
DEFAULTS = flat(to_table(Config()))
# Hypothesis encodes every character there is to find out which ones UTF-8 has: all but the surrogates.
CHARACTERS = st.characters(exclude_categories=["Cs"])
NAMES = st.text("abcdefghijklmnopqrstuvwxyz_.-", min_size=1, max_size=12) | st.text(
    CHARACTERS, min_size=1, max_size=6
)
SCALARS = st.one_of(
    st.booleans(),
    st.integers(),
    st.integers(-(10**400), 10**400),
    st.floats(),
    st.text(CHARACTERS, max_size=12),
    st.dates(),
    st.sampled_from(["ppo", "grpo", "sft", "local", "ray", "auto", "linear", "count", "gae", "tensorboard"]),
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))


def near(key):
    """A real key with one letter changed, doubled or lost, and sometimes the key itself."""
    at = st.integers(0, len(key) - 1)
    letter = st.sampled_from("abcxyz_.")
    return st.one_of(
        st.just(key),
        st.builds(lambda i, c: key[:i] + c + key[i + 1 :], at, letter),
        st.builds(lambda i: key[:i] + key[i + 1 :], at),
        st.builds(lambda i, c: key[:i] + c + key[i:], at, letter),
    )


ANY_KEY = st.sampled_from(KEYS + TABLES).flatmap(near) | NAMES


def plausible(key):
    """Values of the kind that a key has, in and out of range, and other values."""
    default = DEFAULTS.get(key)
    if isinstance(default, bool):
        return st.booleans()
    if isinstance(default, int):
        return st.integers(-2, 2**64)
    if isinstance(default, float):
        return st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 1)
    return SCALARS


ENTRIES = st.sampled_from(KEYS).flatmap(lambda key: st.tuples(st.just(key), plausible(key))) | st.tuples(
    ANY_KEY, VALUES
)


def nested(entries):
    table = {}
    for key, value in entries:
        *path, name = key.split(".")
        inside = table
        for part in path:
            inside = inside.setdefault(part, {})
            if not isinstance(inside, dict):
                break
        else:
            inside[name] = value
    return table


def same(given, held):
    if isinstance(held, (list, tuple)):
        given = given if isinstance(given, (list, tuple)) else [given]
        return len(given) == len(held) and all(same(a, b) for a, b in zip(given, held, strict=True))
    if isinstance(given, str) and given.startswith("~"):
        return isinstance(held, str)
    return given == held or (isinstance(held, float) and math.isclose(given, held))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ENTRIES, min_size=1, max_size=4).map(nested))
@example({"algorithm": {"desirable_weight": {"_": False}}})
def test_a_table_is_taken_whole_or_refused_with_a_reason(table):
    try:
        cfg = structure(table)
    except ConfigError as error:
        assert str(error).strip()
        return
    held = flat(to_table(cfg))
    for key, value in flat(table).items():
        # Some keys hold tables of a user's own.
        assert key in KEYS or any(key.startswith(f"{known}.") for known in KEYS), key
        # Options of other algorithms are ignored, and reported by verl_fn.config.describe.
        ignored = any(f"{key}.".startswith(f"{other}.") for other in elsewhere(type(cfg.algorithm.options)))
        assert value is None or ignored or same(value, held[key]), key


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(ENTRIES, max_size=4).map(nested) | st.text(CHARACTERS, max_size=60),
    st.lists(st.text(CHARACTERS, max_size=20), max_size=2),
)
def test_raw_files_and_overrides_never_give_a_traceback(tmp_path_factory, table, overrides):
    file = tmp_path_factory.getbasetemp() / "fuzzed.toml"
    text = table if isinstance(table, str) else _toml(table)
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(ConfigError):
        load(file, overrides)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(ANY_KEY, SCALARS.map(str) | st.text(CHARACTERS, max_size=10)), min_size=1, max_size=3))
def test_the_command_line_answers_with_a_status_and_a_sentence(entries):
    overrides = [f"{key}={value}" for key, value in entries]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(["config", "recipes/grpo_count.toml", *overrides])
        except SystemExit as stop:  # argparse's own refusal, of what looks like an option
            status = stop.code
    assert status in (0, 2)
    if status == 2:
        assert err.getvalue().strip() and "Traceback" not in err.getvalue()


def _toml(table):
    try:
        return tomli_w.dumps(table)
    except (TypeError, ValueError):
        return repr(table)
