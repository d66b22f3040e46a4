"""Reading a configuration: TOML and ``key=value`` into frozen classes, every key checked.

Nothing here touches torch, so a config is read and checked in milliseconds.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import cattrs
import tomli_w

from verl_fn.config.plan import roles
from verl_fn.config.schema import Config, ConfigError, RangeError


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """The config of a TOML file with ``key=value`` overrides.

    Raises:
        ConfigError: the file cannot be read, a key is unknown (the nearest one is offered), or a value has
            the wrong type or range.

    >>> load(overrides=["algorithm.clip_ratio=0.3", "data.task=count"]).algorithm.clip_ratio
    0.3
    >>> load(overrides=["algorithm.clip_ration=0.3"])
    Traceback (most recent call last):
    verl_fn.config.schema.ConfigError: unknown key algorithm.clip_ration; did you mean algorithm.clip_ratio?
    """
    return structure(_table(path, overrides))


def origins(path: str | Path | None = None, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Where each key that is not at its default was set: the file, or the command line.

    >>> origins(overrides=["data.task=count"])
    {'data.task': 'command line'}
    """
    found = dict.fromkeys(flat(_table(path, ())), str(path))
    return found | dict.fromkeys(flat(_table(None, overrides)), "command line")


def describe(cfg: Config, origins: Mapping[str, str]) -> str:
    """The whole config as TOML, with a line of doc and an origin for every key.

    >>> print(describe(Config(), {}).splitlines()[1])
    dir = "runs/run"                      # the run's folder [default]
    """
    lines: list[str] = []
    _describe(cfg, "", origins, lines)
    return "\n".join(lines).strip() + "\n"


def notes(path: str | Path | None, overrides: Sequence[str]) -> list[str]:
    """What to say of the keys that were set and have no effect.

    A key at its default is passed over, and one of the file if it is an override that leaves it without effect.

    >>> notes(None, ["algorithm.name=sft", "algorithm.lam=0.9"])
    ['algorithm.lam has no effect with algorithm.name = "sft"']
    """
    cfg = load(path, overrides)
    found = _without_effect(cfg, flat(_table(None, overrides)))
    if path is not None:
        try:
            alone = load(path)
        except ConfigError:
            return list(found.values())
        of_file = _without_effect(alone, flat(_table(path, ())))
        found = _without_effect(cfg, of_file) | found
    return list(found.values())


def _without_effect(cfg: Config, keys: Iterable[str]) -> dict[str, str]:
    values, defaults = flat(to_table(cfg)), flat(to_table(Config()))
    rules = [(pattern, why) for pattern, used, why in _rules(cfg) if not used]
    found: dict[str, str] = {}
    for key in keys:
        if values.get(key) != defaults.get(key):
            for pattern, why in rules:
                if fnmatch.fnmatchcase(key, pattern):
                    found.setdefault(key, f"{key} has no effect {why}")
    return found


def _rules(cfg: Config) -> Iterator[tuple[str, bool, str]]:
    """Patterns of keys, whether this config looks at them, and what they would need."""
    a, d, r = cfg.algorithm, cfg.data, cfg.reward
    with_name = f'with algorithm.name = "{a.name}"'
    for pattern in _ONLY_PPO:
        yield pattern, a.name == "ppo", with_name
    for pattern in _NOT_SFT:
        yield pattern, a.name != "sft", with_name
    estimator = a.adv_estimator or {"ppo": "gae", "grpo": "grpo"}.get(a.name, "")
    yield "algorithm.norm_adv_by_std_in_grpo", estimator == "grpo", f"with {estimator}"
    yield "algorithm.gamma", estimator in ("gae", "reinforce_plus_plus"), f"with {estimator}"
    yield "algorithm.kl_loss_*", a.use_kl_loss, "without algorithm.use_kl_loss"
    yield "algorithm.kl_penalty", a.use_kl_in_reward, "without algorithm.use_kl_in_reward"
    yield "algorithm.kl_ctrl.*", a.use_kl_in_reward, "without algorithm.use_kl_in_reward"
    for name in ("target_kl", "horizon"):
        yield f"algorithm.kl_ctrl.{name}", a.kl_ctrl.type == "adaptive", 'with algorithm.kl_ctrl.type = "fixed"'
    both = a.clip_ratio_low is not None and a.clip_ratio_high is not None
    yield "algorithm.clip_ratio", not both, "with algorithm.clip_ratio_low and algorithm.clip_ratio_high"
    norm = "seq-mean-token-sum-norm"
    yield "algorithm.loss_scale_factor", a.loss_agg_mode == norm, f'without algorithm.loss_agg_mode = "{norm}"'
    whole = f"above data.train_batch_size = {d.train_batch_size}: every update takes the whole batch"
    yield "algorithm.ppo_mini_batch_size", a.ppo_mini_batch_size <= d.train_batch_size, whole
    for role, table in (("actor", cfg.actor), ("critic", cfg.critic)):
        for name in ("lora_alpha", "target_modules"):
            yield f"{role}.{name}", table.lora_rank > 0, f"without {role}.lora_rank"
        constant = table.optim.lr_scheduler_type == "constant"
        yield f"{role}.optim.min_lr_ratio", not constant, f'with {role}.optim.lr_scheduler_type = "constant"'
    sharded = "fsdp" in (cfg.actor.strategy, cfg.critic.strategy)
    yield "actor.fsdp_config.*", cfg.actor.strategy == "fsdp", 'without actor.strategy = "fsdp"'
    yield "critic.fsdp_config.*", cfg.critic.strategy == "fsdp", 'without critic.strategy = "fsdp"'
    yield "ray.timeout", cfg.driver.kind == "ray" or sharded, 'with driver.kind = "local"'
    for name in ("ranks", "separate", "address", "runtime_env", "placement"):
        yield f"ray.{name}", cfg.driver.kind == "ray", 'with driver.kind = "local"'
    lacking = [role for role in cfg.ray.separate if role not in roles(cfg)]
    yield "ray.separate", not lacking, f"for {' and '.join(lacking)}: this run trains with {', '.join(roles(cfg))}"
    yield "model.new.*", not cfg.model.path, "with model.path"
    yield "data.task", not d.train_files, "with data.train_files"
    for name in ("prompt_key", "filter_overlong_prompts"):
        yield f"data.{name}", bool(d.train_files or d.val_files), "without data.train_files"
    yield "data.shuffle", bool(d.train_files), "without data.train_files"
    for name in ("weights", "timeout", "num_workers"):
        yield f"reward.{name}", bool(r.functions), "without reward.functions"
    for name in ("project_name", "experiment_name"):
        yield f"trainer.{name}", "wandb" in cfg.trainer.logger, "without wandb in trainer.logger"


_ONLY_PPO = ("critic.*", "algorithm.lam", "algorithm.cliprange_value", "trainer.critic_warmup")
_NOT_SFT = (
    "algorithm.clip_ratio*", "algorithm.entropy_coeff", "algorithm.ppo_*", "algorithm.shuffle", "algorithm.gamma",
    "algorithm.use_kl_*", "algorithm.kl_*", "algorithm.norm_adv_by_std_in_grpo", "rollout.n", "rollout.temperature",
    "rollout.top_*",
)  # fmt: skip


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested tables by dotted key.

    >>> flat({"data": {"task": "count"}})
    {'data.task': 'count'}
    """
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def _table(path: str | Path | None, overrides: Iterable[str]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    if path is not None:
        try:
            table = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not TOML: {error}") from error
    for override in overrides:
        _put(table, override)
    return table


def _describe(value: Any, prefix: str, origins: Mapping[str, str], lines: list[str]) -> None:
    fields = attrs.fields(type(value))
    tables = [f for f in fields if attrs.has(type(getattr(value, f.name)))]
    if prefix and len(tables) < len(fields):
        lines.append(f"[{prefix}]")
    for f in fields:
        if f in tables:
            continue
        held, key = getattr(value, f.name), f"{prefix}.{f.name}"
        text = f"{f.name} = {_toml(held)}" if held is not None else f"# {f.name} ="
        lines.append(f"{text:<36}  # {f.metadata['doc']} [{origins.get(key, 'default')}]")
    lines.append("")
    for f in tables:
        _describe(getattr(value, f.name), f"{prefix}.{f.name}".lstrip("."), origins, lines)


def _toml(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")


def structure(table: Mapping[str, Any]) -> Config:
    """The config of nested tables, as ``load`` checks it."""
    _check_keys(table, Config, "")
    try:
        return _CONVERTER.structure(table, Config)
    except cattrs.BaseValidationError as error:
        raise ConfigError("; ".join(_messages(error, ""))) from error


def to_table(cfg: Config) -> dict[str, Any]:
    """Nested tables with every key, those that are None left out, as TOML has no null.

    >>> structure(to_table(Config())) == Config()
    True
    """
    return attrs.asdict(cfg, filter=lambda attribute, value: value is not None)


def keys(cls: type = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key.

    >>> "actor.optim.lr" in set(keys())
    True
    """
    hints = typing.get_type_hints(cls)
    for f in attrs.fields(cls):
        if attrs.has(hints[f.name]):
            yield from keys(hints[f.name], f"{prefix}{f.name}.")
        else:
            yield prefix + f.name


def _check_keys(table: Mapping[str, Any], cls: type, prefix: str) -> None:
    hints = typing.get_type_hints(cls)
    for name, value in table.items():
        if name not in hints:
            # Down to the key that is meant, since it says more than the table that does not exist.
            inner = next(iter(flat(value)), "") if isinstance(value, Mapping) else ""
            raise _unknown(f"{prefix}{name}.{inner}".rstrip("."))
        if attrs.has(hints[name]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{prefix}{name} is a table of keys, not {value!r}")
            _check_keys(value, hints[name], f"{prefix}{name}.")


# What other trainers call it, by the last part of the key.
ELSEWHERE = {
    "n_gpus_per_node": "ray.ranks", "nnodes": "ray.ranks", "n_gpus": "ray.ranks", "num_gpus": "ray.ranks",
    "nproc_per_node": "ray.ranks", "sp": "actor.fsdp_config.ulysses_sequence_parallel_size",
    "fsdp_size": "actor.fsdp_config.replicate", "learning_rate": "actor.optim.lr", "grad_clip": "actor.optim.clip_grad",
    "max_grad_norm": "actor.optim.clip_grad", "epochs": "trainer.total_training_steps",
    "total_epochs": "trainer.total_training_steps",
}  # fmt: skip


def _unknown(key: str) -> ConfigError:
    known = list(keys())
    near = difflib.get_close_matches(key, known, 1, 0.8)
    if not near and (there := ELSEWHERE.get(key.rpartition(".")[2])):
        near = [there]
    parts = key.split(".")
    for i in range(len(parts)):
        near = near or [k for k in known if f".{k}".endswith("." + ".".join(parts[i:]))]
    near = near or difflib.get_close_matches(key, known, 1, 0.5)
    return ConfigError(f"unknown key {key}" + (f"; did you mean {near[0]}?" if near else ""))


def _put(table: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r} is not of the form key=value")
    value = _value(key.strip(), text)
    *path, name = key.strip().split(".")
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{key}: {part} is a value, not a table of keys")
    table[name] = value


def _value(key: str, text: str) -> Any:
    """What an override's text means: TOML, or else the text itself."""
    kind = _kinds().get(key)
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if list(parsed) == ["value"] else text
    except (ValueError, RecursionError):
        if typing.get_origin(kind) is tuple and text.lstrip().startswith("["):
            raise ConfigError(
                f"{key}: {text} is not a list; texts in it need quotes, which the shell takes away "
                f"unless all is quoted once more: '{key}=[\"...\"]'"
            ) from None
        return text
    # A folder may be called 2027-01-05 or 7.
    if kind in (str, str | None, tuple[str, ...]) and not isinstance(value, (str, list, dict)):
        return text.strip()
    return value


@functools.cache
def _kinds() -> dict[str, Any]:
    """The type of every key."""

    def walk(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, hint in typing.get_type_hints(cls).items():
            if attrs.has(hint):
                yield from walk(hint, f"{prefix}{name}.")
            else:
                yield prefix + name, hint

    return dict(walk(Config, ""))


def _messages(error: BaseException, prefix: str) -> Iterator[str]:
    """One line for each leaf of cattrs's tree of errors, with the dotted key in front."""
    if isinstance(error, cattrs.BaseValidationError):
        for inner in error.exceptions:
            notes = [n for n in getattr(inner, "__notes__", ()) if isinstance(n, cattrs.AttributeValidationNote)]
            yield from _messages(inner, f"{prefix}.{notes[0].name}".lstrip(".") if notes else prefix)
    elif isinstance(error, ConfigError):
        yield str(error)
    elif isinstance(error, RangeError):
        name, text = error.args
        yield f"{prefix}.{name}".lstrip(".") + ": " + text.removeprefix(f"'{name}' ")
    else:
        yield f"{prefix}: {error.args[0] if error.args else error}"


def _strict(kind: type, *accepted: type) -> Callable[[Any, Any], Any]:
    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise TypeError(f"expected {_KINDS[kind]}, got {value!r}")
        if kind is float and not -sys.float_info.max <= value <= sys.float_info.max:
            raise TypeError(f"expected a finite number, got {value!r}")
        if kind is int and not -(2**63) <= value < 2**63:
            raise TypeError("expected a whole number of at most 64 bits")
        return kind(value)

    return hook


def _optional(value: Any, hint: Any) -> Any:
    inner = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return None if value is None else _CONVERTER.structure(value, inner)


def _tuple(value: Any, hint: Any) -> Any:
    """A list of one kind; a single value stands for a list of one, as on the command line."""
    kinds = typing.get_args(hint)
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(values)
    if len(values) != len(kinds):
        raise TypeError(f"expected {len(kinds)} values, got {value!r}")
    return tuple(_CONVERTER.structure(one, kind) for one, kind in zip(values, kinds, strict=True))


_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_CONVERTER = cattrs.Converter(forbid_extra_keys=True)
for _kind, _accepted in ((int, (int,)), (float, (int, float)), (str, (str,)), (bool, (bool,))):
    _CONVERTER.register_structure_hook(_kind, _strict(_kind, *_accepted))
_CONVERTER.register_structure_hook_func(lambda hint: typing.get_origin(hint) is tuple, _tuple)
_CONVERTER.register_structure_hook_func(
    lambda hint: isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint), _optional
)
