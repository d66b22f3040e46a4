"""The configuration for people to read: every key with its documentation and its origin, and notes about settings.

Notes name settings that are valid but probably a mistake: keys without effect, and models that never learn.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import tomli_w

from .algorithms import BUILT_IN, GRPO, PPO, AlgorithmTable, PolicyOptimization, Rejection, uses_critic
from .load import default_options, elsewhere, flat, load, raw_table
from .options import ConfigError
from .plan import completed, role_names
from .schema import Config, to_table


def origins(path: str | Path | None = None, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Returns where each key was set: the name of the file, or ``command line``; keys at their defaults are absent.

    Example:
        >>> origins(overrides=["data.task=count"])
        {'data.task': 'command line'}
    """
    keys = dict.fromkeys(flat(raw_table(path, ())), str(path))
    return keys | dict.fromkeys(flat(raw_table(None, overrides)), "command line")


def describe(cfg: Config, origins: Mapping[str, str]) -> str:
    """Returns the whole config as TOML, with a line of documentation and an origin for every key.

    Example:
        >>> print(describe(Config(), {}).splitlines()[1])
        dir = "runs/run"                      # the run's folder [default]
    """
    return "\n".join(_described(cfg, "", origins)).strip() + "\n"


def options_lines(options: Any, prefix: str) -> list[str]:
    """Returns one line for each option of an algorithm: its value and its documentation."""
    unset = (f"{prefix}.{f.name}" for f in attrs.fields(type(options)) if f.default is attrs.NOTHING)
    return list(_described(options, prefix, dict.fromkeys(unset, "must be set")))


def _described(value: Any, prefix: str, origins: Mapping[str, str]) -> Iterator[str]:
    if isinstance(value, AlgorithmTable):
        yield f"[{prefix}]"
        yield _line("name", value.name, f"{', '.join(BUILT_IN)}, or FILE.py:NAME or MODULE:NAME", prefix, origins)
        # The options belong to the table of the name, whose header is already there.
        yield from (line for line in _described(value.options, prefix, origins) if line != f"[{prefix}]")
        return
    fields = attrs.fields(type(value))
    tables = [f for f in fields if attrs.has(type(getattr(value, f.name)))]
    if prefix and len(tables) < len(fields):
        yield f"[{prefix}]"
    for f in fields:
        if f not in tables:
            yield _line(f.name, getattr(value, f.name), f.metadata.get("doc", ""), prefix, origins)
    yield ""
    for f in tables:
        yield from _described(getattr(value, f.name), f"{prefix}.{f.name}".lstrip("."), origins)


def _line(name: str, value: Any, doc: str, prefix: str, origins: Mapping[str, str]) -> str:
    setting = f"{name} = {_toml(value)}" if value is not None else f"# {name} ="
    key = f"{prefix}.{name}"
    origin = next((place for k, place in origins.items() if k == key or k.startswith(f"{key}.")), "default")
    return f"{setting:<36}  # {doc} [{origin}]"


def _toml(value: Any) -> str:
    """Formats a value as TOML on one line."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(name)} = {_toml(inner)}' for name, inner in value.items())}}}"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")


def notes(path: str | Path | None, overrides: Sequence[str]) -> list[str]:
    """Returns a sentence for each key that is set but has no effect, and for settings that are hardly meant.

    A key of the file that loses its effect only by an override is not reported. Nor is a key at its default, if
    the file has most keys, as a run's own config has, or if the default is false, 0 or empty.

    Example:
        >>> notes(None, ["algorithm.name=sft", "algorithm.lam=0.9"])
        ['algorithm.lam has no effect with algorithm.name = "sft"']
    """
    cfg = load(path, overrides)
    sentences = without_effect(cfg, flat(raw_table(None, overrides)), at_default=True)
    if path is not None:
        with contextlib.suppress(ConfigError):
            file_alone = load(path)
            table = flat(raw_table(path, ()))
            by_hand = 2 * len(table) < len(flat(to_table(file_alone)))
            ignored_in_file = without_effect(file_alone, table, at_default=by_hand)
            ignored = {key: table[key] for key in ignored_in_file}
            sentences = without_effect(cfg, ignored, at_default=by_hand) | sentences
    return [*sentences.values(), *_hardly_meant(cfg)]


def _hardly_meant(cfg: Config) -> Iterator[str]:
    """Yields sentences about values that are allowed but leave a model or a file as it is."""
    options, steps = cfg.algorithm.options, cfg.trainer.total_training_steps
    if isinstance(options, PPO) and options.critic_warmup >= steps:
        yield (
            f"algorithm.critic_warmup = {options.critic_warmup} leaves no step to the actor: "
            f"trainer.total_training_steps is {steps}"
        )
    if isinstance(options, PolicyOptimization) and options.reward_model:
        others = {"env.name": cfg.env.name, "reward.functions": cfg.reward.functions, "reward.url": cfg.reward.url}
        if judges := [key for key, value in others.items() if value]:
            yield (
                f"algorithm.reward_model is the only reward of training: {judges[0]} judges held-out answers, and "
                "nothing is learned from it"
            )
    if isinstance(options, GRPO) and options.adv_estimator == "gdpo" and cfg.reward.weights:
        yield "reward.weights do not count in what gdpo learns from: algorithm.gdpo_reward_weights do"
    if isinstance(options, Rejection) and (lag := cfg.driver.max_lag):
        yield (
            f"driver.max_lag = {lag} lets rejection learn from answers that weights up to {lag} steps older have "
            "drawn, and nothing corrects for it"
        )
    for name, role in cfg.algorithm.outline.roles.items():
        table, settings = ("critic", cfg.critic) if uses_critic(name, role) else ("actor", cfg.actor)
        if role.trained and settings.optim.lr == 0:
            yield f"{table}.optim.lr is 0: the weights of the {name} stay as they are"
    ranks, engines = cfg.ray.ranks, cfg.rollout.engines
    colocated = cfg.driver.kind == "ray" and cfg.rollout.name == "vllm" and cfg.rollout.placement == "colocated"
    if colocated and cfg.algorithm.outline.learns_from == "samples" and cfg.driver.device != "cpu":
        if engines < ranks:
            left = ranks - engines
            yield f"rollout.engines = {engines} leaves {left} of the GPUs of {ranks} ranks without an engine"
        elif engines > ranks:
            yield (
                f"rollout.engines = {engines} puts up to {-(-engines // ranks)} engines on each of {ranks} GPUs, "
                f"every one with a copy of the weights; rollout.engines = {ranks} puts one on each"
            )
    if cfg.algorithm.outline.learns_from != "samples" and cfg.trainer.journal == "samples":
        with_name = f'with algorithm.name = "{cfg.algorithm.name}"'
        yield f'trainer.journal = "samples" keeps digests alone {with_name}, which samples nothing'


def without_effect(cfg: Config, settings: dict[str, Any], *, at_default: bool = False) -> dict[str, str]:
    """Returns a sentence for each of these settings that ``cfg`` ignores, by key.

    Args:
        at_default: report a setting at its default, too, unless that default is false, 0 or empty.
    """
    chosen: type = type(cfg.algorithm.options)
    values, usual = flat(to_table(cfg)), _defaults(chosen)
    return {
        key: f"{key} has no effect {reason}"
        for key, reason in unused(cfg, settings).items()
        if (value := values.get(key, settings[key])) != usual.get(key) or (at_default and value)
    }


def unused(cfg: Config, keys: Iterable[str]) -> dict[str, str]:
    """Returns the keys that ``cfg`` ignores, whatever their values, and why.

    Example:
        >>> unused(load(overrides=["algorithm.name=grpo"]), ["env.max_turns", "rollout.n"])
        {'env.max_turns': 'without env.name'}
    """
    reasons = list(_reasons(cfg))
    # A table without effect has keys below it, and so has a table of the user's own keys.
    found = {key: next((why for name, why in reasons if f"{key}.".startswith(f"{name}.")), "") for key in keys}
    return {key: reason for key, reason in found.items() if reason}


@functools.lru_cache(maxsize=16)
def _defaults(chosen: type) -> Mapping[str, Any]:
    """Returns the default of every key, including keys of algorithms other than the one with the chosen options."""
    defaults = flat(to_table(Config()))
    for options in (*BUILT_IN.values(), chosen):
        defaults |= flat({"algorithm": attrs.asdict(default_options(options))})
    return defaults


def _reasons(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yields the keys and tables that this config does not use, with the reasons."""
    chosen: type = type(cfg.algorithm.options)
    yield from dict.fromkeys(elsewhere(chosen), f'with algorithm.name = "{cfg.algorithm.name}"').items()
    used = completed(cfg)
    yield from _unmet(used, "", used)
    yield from _of_answers(cfg)
    roles = role_names(cfg)
    if absent := [role for role in cfg.ray.separate if role not in roles]:
        yield "ray.separate", f"for {' and '.join(absent)}: this run trains with {', '.join(roles)}"


def _of_answers(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yields the keys about answers and their evaluation in a run that samples or evaluates none."""
    actor, this = cfg.algorithm.outline.roles.get("actor"), f'with algorithm.name = "{cfg.algorithm.name}"'
    samples, without = cfg.algorithm.outline.learns_from == "samples", "without data.val_files"
    evaluates = bool(cfg.data.val_files) or not cfg.data.train_files
    if not evaluates:
        keys = ("test_freq", "val_before_train", "log_val_generations")
        yield from dict.fromkeys(("data.val_size", *(f"trainer.{key}" for key in keys)), without).items()
    if not samples:
        yield "trainer.rollout_data_dir", f"{this}: nothing is sampled in a step"
    why = this if actor is None or actor.head != "lm" else "" if evaluates else without
    if why:
        yield "rollout.val_kwargs", f"{why}: no held-out prompt is answered"
    if why and not samples:
        yield "env", f"{why}: nothing is sampled"
        yield "reward", f"{why}: no answer is scored"


def _unmet(table: Any, prefix: str, cfg: Config) -> Iterator[tuple[str, str]]:
    """Yields the keys of a table and of the tables in it with a condition that does not hold."""
    for field in attrs.fields(type(table)):
        key, value = f"{prefix}{field.name}", getattr(table, field.name)
        unmet = (condition.unmet(table, prefix, cfg) for condition in field.metadata.get("when", ()))
        if reason := next(filter(None, unmet), ""):
            yield key, reason
        elif attrs.has(type(value)):
            yield from _unmet(value.options if isinstance(value, AlgorithmTable) else value, f"{key}.", cfg)
