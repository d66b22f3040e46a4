"""Configs: what is accepted, and what each mistake is told."""

import tomllib
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_fn.config import Config, ConfigError, keys, load, structure, to_table

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_recipes_load_and_round_trip(recipe):
    cfg = load(recipe)
    assert structure(tomllib.loads(tomli_w.dumps(to_table(cfg)))) == cfg


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.clip_ration=0.3", "unknown key algorithm.clip_ration; did you mean algorithm.clip_ratio?"),
        ("algoritm.clip_ratio=0.3", "unknown key algoritm; did you mean algorithm"),
        ("lr=0.3", "unknown key lr; did you mean actor.optim.lr?"),
        ("trainer=3", "trainer is a table of keys, not 3"),
        ("actor.optim.lr=fast", "actor.optim.lr: expected a number, got 'fast'"),
        ("actor.optim.lr=true", "actor.optim.lr: expected a number, got True"),
        ("rollout.n=1.5", "rollout.n: expected a whole number, got 1.5"),
        ("rollout.n=0", "rollout.n: must be >= 1: 0"),
        ("driver.kind=slurm", "driver.kind: must be in"),
        ("driver.deterministic=1", "driver.deterministic: expected true or false, got 1"),
        ("actor.optim.betas=[0.9]", "actor.optim.betas"),
        ("algorithm.adv_estimator=rloo", "algorithm.adv_estimator is 'rloo'"),
        ("trainer.seed", "'trainer.seed' is not of the form key=value"),
    ],
)
def test_every_mistake_names_its_key(override, message):
    with pytest.raises(ConfigError) as error:
        load(overrides=[override])
    assert message in str(error.value)


def test_a_group_estimator_needs_groups():
    with pytest.raises(ConfigError, match=r"rollout\.n is 1"):
        load(overrides=["algorithm.name=grpo"])
    assert load(overrides=["algorithm.name=grpo", "algorithm.adv_estimator=reinforce_plus_plus"])


def test_a_part_of_a_table_keeps_the_other_defaults():
    cfg = load(overrides=["critic.optim.weight_decay=0.5"])
    assert (cfg.critic.optim.lr, cfg.critic.optim.weight_decay) == (1e-5, 0.5)
    assert cfg.actor.optim.lr == 1e-6


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.toml cannot be read"):
        load(tmp_path / "nothing.toml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match=r"bad\.toml is not TOML"):
        load(tmp_path / "bad.toml")


def test_every_key_has_documentation():
    import typing

    import attrs

    def walk(cls):
        hints = typing.get_type_hints(cls)
        for f in attrs.fields(cls):
            if attrs.has(hints[f.name]):
                yield from walk(hints[f.name])
            else:
                yield f"{cls.__name__}.{f.name}", f.metadata.get("doc")

    assert [name for name, doc in walk(Config) if not doc] == []


VALUES = st.one_of(
    st.integers(-3, 3), st.floats(allow_nan=False), st.text(max_size=4), st.booleans(), st.lists(st.floats())
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from([*keys(), "nonsense", "actor.nonsense"]), VALUES, max_size=4))
def test_any_values_give_a_config_or_a_config_error(given_values):
    table = {}
    for key, value in given_values.items():
        *path, name = key.split(".")
        inner = table
        for part in path:
            inner = inner.setdefault(part, {})
        inner[name] = value
    try:
        cfg = structure(table)
    except ConfigError:
        return
    assert not any("nonsense" in key for key in given_values)
    assert structure(to_table(cfg)) == cfg
