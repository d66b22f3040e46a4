"""Loading of a configuration: TOML and ``key=value`` overrides become frozen classes, and every key is checked.

If ``algorithm.name`` refers to an algorithm of the user, its module is imported for its options. That module may
import torch; nothing else here does.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar, cast

import attrs
import cattrs

from verl_fn.errors import MEANT, closest, did_you_mean

from .algorithms import BUILT_IN, GROUP_ESTIMATORS, LOSS_TYPES, POLICY_LOSSES, AlgorithmTable
from .names import beside, is_reference, load_object, options_class
from .options import ConfigError, RangeError
from .plan import check
from .schema import Config, Table, to_table

T = TypeVar("T")

# What a translation of another trainer's config writes for a value that the user has to set; no key accepts it.
UNSET = "?"


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Reads the config of a TOML file with ``key=value`` overrides.

    Raises:
        ConfigError: the file cannot be read, a key is unknown (the message suggests the most similar one), or a
            value has the wrong type or range. The message names the file if it names a key that the file
            sets, and none that the overrides set.

    Example:
        >>> load(overrides=["trainer.seed=3", "data.task=count"]).trainer.seed
        3
        >>> load(overrides=["algorithm.clip_ration=0.3"])
        Traceback (most recent call last):
        verl_fn.config.options.ConfigError: unknown key algorithm.clip_ration; did you mean algorithm.clip_ratio?
    """
    overrides = list(overrides)
    try:
        return structure(raw_table(path, overrides))
    except ConfigError as error:
        said = str(error)

        def blames(some: Iterable[str]) -> bool:
            return any(re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", said) for key in some)

        given = (split_override(override)[0] for override in overrides)
        if path is None or str(path) in said or blames(given) or not blames(flat(read_table(path))):
            raise
        raise ConfigError(f"{path}: {error}") from error


def raw_table(path: str | Path | None, overrides: Iterable[str]) -> Table:
    """Reads a file and overrides as nested tables, without checking keys and values."""
    table, overrides = read_table(path), list(overrides)
    if path is not None:
        table = beside(table, Path(path).parent)
    # The algorithm's name decides which options exist, so it is looked up first among the overrides.
    names = [value.strip() for key, _, value in map(split_override, overrides) if key == "algorithm.name"]
    name = names[-1].strip("\"'") if names else _name_in(table)
    if names and isinstance(given := table.get("algorithm"), Mapping):
        # Options of the file's algorithm have no effect with another one.
        with contextlib.suppress(ConfigError):
            lost = set(_option_names(_name_in(table))) - set(_option_names(name))
            table = {**table, "algorithm": {key: value for key, value in given.items() if key not in lost}}
    return put(table, overrides, keys(options=algorithm_options(name)).get)


def _option_names(name: Any) -> list[str]:
    return [field.name for field in attrs.fields(algorithm_options(name))]


def structure(table: Mapping[str, Any]) -> Config:
    """Makes a config from nested tables, with the checks and errors of ``load``."""
    options: type = algorithm_options(_name_in(table))
    known = keys(options=options)
    if unknown := list(_unknown_keys(table, known.keys() | elsewhere(options))):
        raise ConfigError("; ".join(_advice(key, [*known]) for key in unknown))
    fields = dict(table)
    algorithm = fields.pop("algorithm", {})
    values = {name: algorithm[name] for name, _ in _hints(options) if name in algorithm}
    name = algorithm.get("name", "ppo")
    chosen = AlgorithmTable(name, structured(values, options, "algorithm"))
    cfg = structured(fields | {"algorithm": chosen}, Config)
    check(cfg)
    return cfg


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
    meant = MEANT.get(str(name), name)
    part = next((f"{where}={meant}" for where, names in PARTS.items() if meant in names), "")
    raise ConfigError(
        f"algorithm.name: must be {', '.join(BUILT_IN)}, or a function of yours as FILE.py:NAME or MODULE:NAME "
        f"(got {name!r})" + (f"; set {part}" if part else did_you_mean(name, BUILT_IN))
    )


def default_table(table: Mapping[str, Any]) -> Table:
    """Returns the defaults of every key for the algorithm that a table names.

    Example:
        >>> default_table({"algorithm": {"name": "grpo"}})["algorithm"]["adv_estimator"]
        'grpo'
    """
    name = _name_in(table)
    return to_table(Config(algorithm=AlgorithmTable(name, default_options(algorithm_options(name)))))


def default_options(options: type) -> Any:
    """Returns an algorithm's options with their defaults; with None, and unchecked, if some must be set.

    Example:
        >>> Own = attrs.make_class("Own", {"strength": attrs.field(), "rounds": attrs.field(default=3)})
        >>> default_options(Own)
        Own(strength=None, rounds=3)
    """
    defaults = {field.name: field.default for field in attrs.fields(options)}
    if attrs.NOTHING not in defaults.values():
        return options()
    made: Any = object.__new__(options)
    for name, default in defaults.items():
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            # A default that depends on other options is not known either.
            default = None if default.takes_self else default.factory()
        object.__setattr__(made, name, None if default is attrs.NOTHING else default)
    return made


def keys(cls: type = Config, prefix: str = "", options: type | None = None) -> dict[str, Any]:
    """Returns every dotted key with its type.

    Args:
        options: the options class of the algorithm; by default the keys of all built-in ones.

    Example:
        >>> keys()["actor.optim.lr"], "algorithm.lam" in keys()
        (<class 'float'>, True)
    """
    found: dict[str, Any] = {}
    for name, kind in _hints(cls):
        if kind is AlgorithmTable:
            found[f"{prefix}{name}.name"] = str
            for one in BUILT_IN.values() if options is None else [options]:
                found |= keys(one, f"{prefix}{name}.")
        else:
            found |= keys(kind, f"{prefix}{name}.") if attrs.has(kind) else {prefix + name: kind}
    return found


@functools.lru_cache(maxsize=64)
def elsewhere(options: type[Any]) -> frozenset[str]:
    """Returns the keys of built-in algorithms that this algorithm lacks. Such keys are ignored, and reported."""
    return frozenset(keys()) - keys(options=options).keys()


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


def _unknown_keys(table: Mapping[str, Any], known: Set[str], prefix: str = "") -> Iterator[str]:
    """Yields the keys of a table that do not exist."""
    for name, value in table.items():
        key = f"{prefix}{name}"
        dotted = "." in name  # a quoted name, that no field has
        if key in known and not dotted:
            continue
        if dotted or not any(one.startswith(f"{key}.") for one in known):
            # The keys inside an unknown table show better than the table's name what was meant.
            inner = flat(value) if isinstance(value, Mapping) else {}
            yield from [f"{key}.{below}" for below in inner] or [key]
        elif isinstance(value, Mapping):
            yield from _unknown_keys(value, known, f"{key}.")
        else:
            raise ConfigError(f"{key} is a table of keys, not {value!r}")


WITHOUT_LIKE = {"data.val_batch_size"}  # of verl; the key that is most like it is another thing
# Losses and estimators that other trainers call algorithms, by the keys that choose them here.
PARTS = {
    "algorithm.name=dpo algorithm.loss_type": LOSS_TYPES,
    "algorithm.name=grpo algorithm.policy_loss": POLICY_LOSSES,
    "algorithm.name=grpo algorithm.adv_estimator": (*GROUP_ESTIMATORS, "reinforce_plus_plus"),
}
# The keys for which other trainers have other names, by the ends of these names.
NAMES_ELSEWHERE = {
    **dict.fromkeys(("n_gpus_per_node", "nnodes", "n_gpus", "num_gpus", "nproc_per_node"), "ray.ranks"),
    "nccl_timeout": "ray.timeout",
    "sp": "actor.fsdp_config.ulysses_sequence_parallel_size",
    "fsdp_size": "actor.fsdp_config.replicate",
    "model_dtype": "actor.dtype",
    **dict.fromkeys(("param_offload", "optimizer_offload", "grad_offload"), "rollout.offload_trainer"),
    "learning_rate": "actor.optim.lr",
    **dict.fromkeys(("grad_clip", "max_grad_norm"), "actor.optim.clip_grad"),
    "warmup_style": "actor.optim.lr_scheduler_type",
    "lr_warmup_steps_ratio": "actor.optim.lr_warmup_steps",
    "min_lr": "actor.optim.min_lr_ratio",
    **dict.fromkeys(
        ("micro_batch_size", "micro_batch_size_per_gpu", "ppo_micro_batch_size_per_gpu",
         "log_prob_micro_batch_size_per_gpu", "per_device_train_batch_size"), "actor.ppo_max_token_len_per_gpu"
    ),
    **dict.fromkeys(("epochs", "total_epochs", "num_train_epochs"), "trainer.total_training_steps"),
    "trainer.max_steps": "trainer.total_training_steps",
    "env.max_steps": "env.max_turns",
    "val_kwargs.do_sample": "rollout.val_kwargs.temperature",
    "do_sample": "rollout.temperature",
    **dict.fromkeys(("default_local_dir", "output_dir"), "trainer.dir"),
    "max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "critic_warmup": "algorithm.critic_warmup",
    "loss_mode": "algorithm.policy_loss",
    "actor.shuffle": "algorithm.shuffle",
    "critic.model.path": "critic.path",
    **dict.fromkeys(("custom_reward_function.path", "custom_reward_function.name"), "reward.functions"),
    "reward_model.path": "algorithm.reward_model",
    "reward_model.model.path": "algorithm.reward_model",
    "max_num_seqs": "rollout.slots",
    "rollout.tensor_model_parallel_size": "rollout.tensor_parallel_size",
    "num_generations": "rollout.n",
    **dict.fromkeys(("response_length", "max_tokens", "max_new_tokens"), "data.max_response_length"),
    "prompt_length": "data.max_prompt_length",
    **dict.fromkeys(("tp", "tp_size"), "rollout.tensor_parallel_size"),
    "algorithm.kl_coef": "algorithm.kl_ctrl.kl_coef",
    **dict.fromkeys(("model.name", "model_name", "model_name_or_path"), "model.path"),
}  # fmt: skip
ALL_KEYS = "verl-fn config lists all keys, and verl-fn config --from-verl KEY=VALUE says what a key of verl becomes"


def _advice(key: str, known: Sequence[str]) -> str:
    """Returns a message about an unknown key, with the known key that was probably meant.

    Example:
        >>> _advice("trainer.default_local_dir", ["trainer.dir", "trainer.rollout_data_dir"])
        'unknown key trainer.default_local_dir; did you mean trainer.dir?'
    """
    parts = key.split(".")
    ends = [".".join(parts[i:]) for i in range(len(parts))]
    meant = [NAMES_ELSEWHERE[end] for end in ends if NAMES_ELSEWHERE.get(end) in known]
    # A table's name makes all of its keys alike, so names are compared within it first.
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == key.rpartition(".")[0]}
    whole = {k: k for k in known}
    names, name = (siblings, parts[-1]) if siblings else (whole, key)
    near = [names.get(closest(name, names, cutoff), "") for cutoff in (0.8, 0.7)]
    meant += near[:1]
    meant += [k for end in ends for k in known if f".{k}".endswith(f".{end}")]
    anywhere = {k.rpartition(".")[2]: k for k in known}
    meant += [*near[1:], closest(key, known, 0.8), anywhere.get(closest(parts[-1], anywhere, 0.85), "")]
    match = "" if key in WITHOUT_LIKE else next(filter(None, meant), "")
    return f"unknown key {key}; " + (f"did you mean {match}?" if match else ALL_KEYS)


def read_table(path: str | Path | None) -> Table:
    """Reads a TOML file; returns an empty table for None.

    Raises:
        ConfigError: the file cannot be read or is not TOML.
    """
    if path is None:
        return {}
    text = ""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        return tomllib.loads(text)
    except OSError as error:
        beside = sorted({str(file) for file in Path(path).parent.glob("*.toml")} - {str(path)})
        hint = did_you_mean(path, beside) if isinstance(error, FileNotFoundError) else ""
        if "=" in Path(path).name and Path(path).suffix != ".toml" and not hint:
            hint = "; the first argument is a TOML file, and key=value follows it"
        raise ConfigError(f"{path} cannot be read: {error.strerror}{hint}") from error
    except (ValueError, RecursionError) as error:
        # The words of tomllib for a key that is added to a table in braces.
        closed = "{" in text and re.search(r"immutable|Cannot declare .* twice", str(error))
        hint = "; a table in braces is complete: write all of its keys inside, or none" if closed else ""
        raise ConfigError(f"{path} is not TOML: {error}{hint}") from error


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested tables by dotted key.

    Example:
        >>> flat({"data": {"task": "count"}})
        {'data.task': 'count'}
    """
    values: dict[str, Any] = {}
    for name, value in table.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return values


def put(table: Table, overrides: Iterable[str], kind_of: Callable[[str], Any]) -> Table:
    """Writes ``key=value`` overrides into a table and returns it.

    Args:
        table: the table; it is changed.
        kind_of: returns the type of a key, or None for an unknown key.

    Raises:
        ConfigError: an override does not have the form ``key=value``, or its value is not a list where one is
            expected, or is a word of Python's or YAML's in a table of any values.
    """
    for override in overrides:
        key, _, string = split_override(override)
        path = key.split(".")[:-1]
        free = any(_is_mapping(kind_of(".".join(path[:end]))) for end in range(1, len(path) + 1))
        put_value(table, key, _value(key, string, kind_of(key), free=free))
    return table


def put_value(table: Table, key: str, value: Any) -> None:
    """Writes a value into nested tables, under its dotted key.

    Raises:
        ConfigError: a part of the key is a value.
    """
    *path, name = key.split(".")
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{key}: {part} is a value, not a table of keys")
    table[name] = value


def split_override(override: str) -> tuple[str, str, str]:
    """Splits ``key=value`` at the first equals sign.

    Raises:
        ConfigError: there is no equals sign, or no key before it.

    Example:
        >>> split_override("data.task=count")
        ('data.task', '=', 'count')
    """
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r} is not of the form key=value")
    return key.strip(), equals, value


def _value(key: str, string: str, kind: Any, *, free: bool = False) -> Any:
    """Parses the value of an override as TOML; returns the string itself if it is not TOML.

    An empty value unsets an optional key: TOML has no null, and ``verl-fn config`` shows such a key without a value.
    It empties a table of the user's keys. A list stays as it is given: ``data.train_files=`` may be a forgotten name.
    """
    if not string.strip():
        if type(None) in typing.get_args(kind):
            return None
        if _is_mapping(kind):
            return {}
    try:
        parsed = tomllib.loads(f"value = {string}")
        value = parsed["value"] if list(parsed) == ["value"] else string
    except (ValueError, RecursionError):
        if _is_tuple(kind) and string.lstrip().startswith("["):
            raise ConfigError(
                f"{key}: {string} is not a list; strings in it need quotes, which the shell removes "
                f"unless the whole argument is quoted as well: '{key}=[\"...\"]'"
            ) from None
        if free and _is_like_a_value(string):
            # As a text, even "False" would be true in Python and in templates.
            raise ConfigError(
                f"{key}: {string} is no value of TOML and would be a text; write true, false, a number such as 0.5 "
                f'or a list such as ["a"], leave the key out for none, or quote the text: \'{key}="{string}"\''
            ) from None
        return string
    # A folder may have a name that TOML reads as a date or a number, such as 2027-01-05 or 7.
    if kind in (str, str | None, tuple[str, ...]) and not isinstance(value, (str, list, dict)):
        return string.strip()
    return value


def _is_like_a_value(string: str) -> bool:
    """Returns whether a string is a value in Python, YAML or JSON that TOML writes otherwise.

    Example:
        >>> [_is_like_a_value(string) for string in ("False", "None", ".5", "[a, b]", "a.b")]
        [True, True, True, True, False]
    """
    word = string.strip().lower()
    try:
        return word in _WORDS or word.startswith(("[", "{")) or float(word) is not None
    except ValueError:
        return False


def structured(table: Mapping[str, Any], cls: type[T], prefix: str = "") -> T:
    """Makes an instance of ``cls`` from a table.

    Args:
        prefix: the dotted key of the table, for error messages.

    Raises:
        ConfigError: values have the wrong type or range; the message names all of them.
    """
    try:
        return _CONVERTER.structure(table, cls)
    except cattrs.BaseValidationError as error:
        raise ConfigError("; ".join(_messages(error, prefix))) from error


def _messages(error: BaseException, prefix: str) -> Iterator[str]:
    """Yields a message for each leaf of cattrs's tree of errors, with the dotted key in front."""
    if isinstance(error, cattrs.BaseValidationError):
        for inner in error.exceptions:
            notes = [n for n in getattr(inner, "__notes__", ()) if isinstance(n, cattrs.AttributeValidationNote)]
            yield from _messages(inner, f"{prefix}.{notes[0].name}".lstrip(".") if notes else prefix)
    elif isinstance(error, ConfigError):
        yield str(error)
    elif isinstance(error, RangeError):
        name, message = error.args
        yield f"{prefix}.{name}".lstrip(".") + ": " + message.removeprefix(f"'{name}' ")
    else:
        yield f"{prefix}: {error.args[0] if error.args else error}"


def _strict(kind: type) -> Callable[[Any, Any], Any]:
    """Returns a hook that takes values of ``kind``, and whole numbers for floats, and rejects all others."""
    accepted = (int, float) if kind is float else kind

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            left = "; --from-verl left it open, and the comments at the head of its TOML say why" * (value == UNSET)
            raise TypeError(f"expected {_KINDS[kind]}, got {value!r}{left}{of_epochs(value)}")
        # Bytes of the command line may be no UTF-8, and then no file can have them.
        if kind is str and any("\ud800" <= character <= "\udfff" for character in cast(str, value)):
            raise TypeError(f"expected Unicode, got {value!r}")
        if kind is float and not -sys.float_info.max <= cast(float, value) <= sys.float_info.max:
            raise TypeError(f"expected a finite number, got {value!r}")
        if kind is int and not -(2**63) <= cast(int, value) < 2**63:
            raise TypeError("expected a whole number of at most 64 bits")
        return kind(value)

    return hook


def of_epochs(value: Any) -> str:
    """Returns advice about verl's word for once an epoch in place of a number of steps; else nothing."""
    return "; give the steps of an epoch: the rows divided by data.train_batch_size" * (value == "after_each_epoch")


def _optional(value: Any, hint: Any) -> Any:
    inner = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    try:
        return None if value is None else _CONVERTER.structure(value, inner)
    except TypeError as error:
        if value in ("", "none", "None", "null"):
            raise TypeError(f"{error}; to unset the key, write nothing after its =") from None
        raise


def _tuple(value: Any, hint: Any) -> Any:
    """Converts a list to a tuple; a single value becomes a tuple of one, as the command line allows."""
    kinds = typing.get_args(hint)
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(values)
    if len(values) != len(kinds):
        raise TypeError(f"expected {len(kinds)} values, got {value!r}")
    return tuple(_CONVERTER.structure(item, kind) for item, kind in zip(values, kinds, strict=True))


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _free(value: Any, _: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a table of keys, got {value!r}")
    return dict(value)


def _is_mapping(hint: Any) -> bool:
    return typing.get_origin(hint) is Mapping


_WORDS = ("true", "false", "yes", "no", "on", "off", "none", "null", "~")
_KINDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
_CONVERTER = cattrs.Converter(forbid_extra_keys=True)
for _kind in _KINDS:
    _CONVERTER.register_structure_hook(_kind, _strict(_kind))
_CONVERTER.register_structure_hook_func(_is_tuple, _tuple)
_CONVERTER.register_structure_hook_func(_is_mapping, _free)
_CONVERTER.register_structure_hook_func(
    lambda hint: isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint), _optional
)
# The class of the options depends on the algorithm's name, so structure() converts this table itself.
_CONVERTER.register_structure_hook(AlgorithmTable, lambda value, _: value)
