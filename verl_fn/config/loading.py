"""Loading of a configuration: TOML and ``key=value`` overrides become frozen classes, and every key is checked.

If ``algorithm.name`` refers to an algorithm of the user, its module is imported for its options. That module may
import torch; nothing else here does.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from verl_fn.errors import closest

from .algorithms import BUILT_IN
from .convert import pass_through, structured
from .fields import ConfigError
from .names import beside, is_reference, load_object, options_class
from .schema import AlgorithmTable, Config
from .tables import Table, flat, put, read_table, split_override

# The class of the options depends on the algorithm's name, so structure() converts this table itself.
pass_through(AlgorithmTable)


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Reads the config of a TOML file with ``key=value`` overrides.

    Raises:
        ConfigError: the file cannot be read, a key is unknown (the message suggests the most similar one), or a
            value has the wrong type or range.

    Example:
        >>> load(overrides=["trainer.seed=3", "data.task=count"]).trainer.seed
        3
        >>> load(overrides=["algorithm.clip_ration=0.3"])
        Traceback (most recent call last):
        verl_fn.config.fields.ConfigError: unknown key algorithm.clip_ration; did you mean algorithm.clip_ratio?
    """
    return structure(raw_table(path, overrides))


def raw_table(path: str | Path | None, overrides: Iterable[str]) -> Table:
    """Reads a file and overrides as nested tables, without checking keys and values."""
    table, overrides = read_table(path), list(overrides)
    if path is not None:
        table = beside(table, Path(path).parent)
    # The algorithm's name decides which options exist, so it is looked up first among the overrides.
    names = [value.strip() for key, _, value in map(split_override, overrides) if key == "algorithm.name"]
    name = names[-1].strip("\"'") if names else _name_in(table)
    kinds = dict(_kinds(Config, "")) | dict(_kinds(algorithm_options(name), "algorithm."))
    return put(table, overrides, kinds.get)


def structure(table: Mapping[str, Any]) -> Config:
    """Makes a config from nested tables, with the checks and errors of ``load``."""
    options = algorithm_options(_name_in(table))
    unknown = list(_unknown_keys(table, Config, "", options))
    if unknown:
        known = [*keys(options=options)]
        raise ConfigError("; ".join(_advice(key, known) for key in unknown))
    fields = dict(table)
    algorithm = fields.pop("algorithm", {})
    names = {key.split(".")[1] for key in keys(options, "algorithm.")}
    values = {name: value for name, value in algorithm.items() if name in names}
    name = algorithm.get("name", "ppo")
    chosen = AlgorithmTable(name, structured(values, options, "algorithm"))
    return structured(fields | {"algorithm": chosen}, Config)


def algorithm_options(name: Any) -> type[Any]:
    """Returns the options class of an algorithm by its name.

    Raises:
        ConfigError: there is no such algorithm.

    Example:
        >>> algorithm_options("grpo").__name__
        'GRPO'
    """
    if isinstance(name, str) and name in BUILT_IN:
        return BUILT_IN[name]
    if isinstance(name, str) and is_reference(name):
        return options_class(load_object(name, "algorithm.name"), "algorithm.name")
    raise ConfigError(
        f"algorithm.name: must be {', '.join(BUILT_IN)}, or a function of yours as FILE.py:NAME or MODULE:NAME "
        f"(got {name!r})"
    )


def to_table(cfg: Config) -> Table:
    """Returns nested tables with every key that is not None; TOML has no null.

    Example:
        >>> structure(to_table(Config())) == Config()
        True
    """
    table = attrs.asdict(cfg, filter=lambda attribute, value: value is not None)
    table["algorithm"] = {"name": cfg.algorithm.name} | table["algorithm"]["options"]
    return table


def default_table(table: Mapping[str, Any]) -> Table:
    """Returns the defaults of every key for the algorithm that a table names.

    Example:
        >>> default_table({"algorithm": {"name": "grpo"}})["algorithm"]["adv_estimator"]
        'grpo'
    """
    name = _name_in(table)
    return to_table(Config(algorithm=AlgorithmTable(name, algorithm_options(name)())))


def keys(cls: type = Config, prefix: str = "", options: type | None = None) -> Iterator[str]:
    """Yields every dotted key.

    Args:
        options: the options class of the algorithm; by default the keys of all built-in ones.

    Example:
        >>> "actor.optim.lr" in set(keys()), "algorithm.lam" in set(keys())
        (True, True)
    """
    for name, kind in _hints(cls):
        if kind is AlgorithmTable:
            yield f"{prefix}{name}.name"
            classes = BUILT_IN.values() if options is None else [options]
            yield from dict.fromkeys(key for cls_ in classes for key in keys(cls_, f"{prefix}{name}."))
        elif attrs.has(kind):
            yield from keys(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


@functools.lru_cache(maxsize=64)
def elsewhere(options: type[Any]) -> frozenset[str]:
    """Returns the keys of built-in algorithms that this algorithm lacks. Such keys are ignored, and reported."""
    known = set(keys(options, "algorithm."))
    return frozenset(key for cls in BUILT_IN.values() for key in keys(cls, "algorithm.")) - known


def _name_in(table: Mapping[str, Any]) -> Any:
    algorithm = table.get("algorithm", {})
    if not isinstance(algorithm, Mapping):
        raise ConfigError(f"algorithm is a table of keys, not {algorithm!r}")
    return algorithm.get("name", "ppo")


@functools.cache
def _hints(cls: type) -> tuple[tuple[str, Any], ...]:
    """Returns the fields of a class that a table can set, with their types."""
    hints = typing.get_type_hints(cls)
    return tuple((f.name, hints.get(f.name, Any)) for f in attrs.fields(cls) if f.init)


def _kinds(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, kind in _hints(cls):
        if kind is AlgorithmTable:
            yield f"{prefix}{name}.name", str
        elif attrs.has(kind):
            yield from _kinds(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, kind


def _unknown_keys(table: Mapping[str, Any], cls: type, prefix: str, options: type) -> Iterator[str]:
    """Yields the keys of a table that do not exist."""
    hints = dict(_hints(cls))
    for name, value in table.items():
        key = f"{prefix}{name}"
        if name not in hints:
            # The keys inside an unknown table show better than the table's name what was meant.
            inner = list(flat(value)) if isinstance(value, Mapping) else []
            yield from [f"{key}.{below}" for below in inner] or [key]
        elif attrs.has(hints[name]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{key} is a table of keys, not {value!r}")
            if hints[name] is AlgorithmTable:
                ignored = elsewhere(options)
                without_name = {n: v for n, v in value.items() if n != "name"}
                for unknown in _unknown_keys(without_name, options, "algorithm.", options):
                    if unknown not in ignored:
                        yield unknown
            else:
                yield from _unknown_keys(value, hints[name], f"{key}.", options)


# The keys for which other trainers have other names, by the last part of these names.
NAMES_ELSEWHERE = {
    "n_gpus_per_node": "ray.ranks",
    "nnodes": "ray.ranks",
    "n_gpus": "ray.ranks",
    "num_gpus": "ray.ranks",
    "nproc_per_node": "ray.ranks",
    "sp": "actor.fsdp_config.ulysses_sequence_parallel_size",
    "fsdp_size": "actor.fsdp_config.replicate",
    "learning_rate": "actor.optim.lr",
    "grad_clip": "actor.optim.clip_grad",
    "max_grad_norm": "actor.optim.clip_grad",
    "epochs": "trainer.total_training_steps",
    "total_epochs": "trainer.total_training_steps",
    "critic_warmup": "algorithm.critic_warmup",
}


def _advice(key: str, known: list[str]) -> str:
    """Returns a message about an unknown key, with the known key that was probably meant."""
    match = closest(key, known, 0.8) or NAMES_ELSEWHERE.get(key.rpartition(".")[2], "")
    parts = key.split(".")
    for i in range(len(parts)):
        match = match or next((k for k in known if f".{k}".endswith("." + ".".join(parts[i:]))), "")
    match = match or closest(key, known, 0.5)
    return f"unknown key {key}" + (f"; did you mean {match}?" if match else "")
