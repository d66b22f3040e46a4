"""Reading of verl's settings: YAML files and Hydra's ``key=value`` overrides, with their references resolved."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml

from verl_fn.config.fields import ConfigError, home
from verl_fn.config.tables import flat

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")
_LAUNCHER = re.compile(r"--(nproc[-_]per[-_]node|nnodes)=(\d+)")


@attrs.frozen
class Settings:
    """Settings of verl as they were written.

    Attributes:
        values: the value of each key that was set.
        sft: whether they are for ``sft_trainer``; otherwise they are for ``ppo_trainer``.
        megatron: whether the chosen config files are those of Megatron.
    """

    values: Mapping[str, Any]
    sft: bool = False
    megatron: bool = False


def read_settings(words: Sequence[str]) -> Settings:
    """Reads the words of a command line of verl, or YAML files and overrides.

    Words of a launcher (``python3 -m verl.trainer.main_ppo``, ``torchrun --nproc_per_node=8``) may stay. Later
    settings replace earlier ones.

    Args:
        words: as a shell hands them over: variables are replaced and quotes removed.

    Raises:
        ConfigError: a file cannot be read, or a word is neither a file nor a setting.

    Example:
        >>> read_settings(["algorithm.adv_estimator=grpo", "+trainer.logger=['console']", "model_engine=megatron"])
        Settings(values={'algorithm.adv_estimator': 'grpo', 'trainer.logger': ['console']}, sft=False, megatron=True)
    """
    launcher: list[str] = []
    words = [word for word in words if word.strip() not in ("", "\\")]
    if "-m" in words:
        start = words.index("-m")
        launcher, words = words[: start + 2], words[start + 2 :]
    values: dict[str, Any] = {}
    options = [word for word in words if word.startswith("--")]
    for word in words:
        if word.startswith("--"):
            continue
        key, equals, string = word.partition("=")
        if word.startswith("~") and "/" not in key:
            values.pop(key[1:], None)
        elif not equals:
            values |= _file(word)
        else:
            values[key.lstrip("+")] = _value(key, string)
    groups = [key for key in values if "." not in key and not isinstance(values[key], list | dict)]
    chosen = " ".join([*options, *(str(values.pop(key)) for key in groups if key != "defaults")])
    values |= _ranks(launcher)
    sft = "sft_trainer" in " ".join([*launcher, *options]) or any(
        key.startswith(("optim.", "engine.")) for key in values
    )
    return Settings(_resolved(values), sft, "megatron" in chosen)


def _file(name: str) -> dict[str, Any]:
    path = Path(home(name))
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--from-verl: {name!r} is neither a setting key=value nor a YAML file")
    try:
        table = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--from-verl: {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--from-verl: {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"--from-verl: {path} has no table of keys")
    return {key: _number(value) for key, value in flat(_with_names(table)).items() if value != "???"}


def _with_names(table: Mapping[Any, Any]) -> dict[str, Any]:
    """Makes every key a string: YAML reads the key ``n`` as false."""
    names = {False: "n", True: "y"}
    return {
        str(names.get(key, key) if isinstance(key, bool) else key): _with_names(value)
        if isinstance(value, Mapping) and value
        else value
        for key, value in table.items()
    }


def _value(key: str, string: str) -> Any:
    if re.search(r"\$\w", string):
        raise ConfigError(f"--from-verl: {key} has a shell variable in {string!r}; let the shell replace it first")
    if string.lstrip().startswith("{"):
        string = re.sub(r":(?=[^\s/])", ": ", string)
    try:
        return _number(yaml.safe_load(string))
    except yaml.YAMLError:
        return string


def _number(value: Any) -> Any:
    """Reads 1e-6 as a number, which YAML does not."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _ranks(launcher: Sequence[str]) -> dict[str, int]:
    """Returns the keys of verl's trainer that torchrun's options stand for."""
    names = {"nnodes": "trainer.nnodes"}
    matches = (match for word in launcher if (match := _LAUNCHER.fullmatch(word)))
    return {names.get(match[1], "trainer.n_gpus_per_node"): int(match[2]) for match in matches}


def _resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces OmegaConf's references by the values of the keys that they name; null where there is none."""

    def replaced(key: str, value: Any, depth: int = 0) -> Any:
        if not isinstance(value, str) or depth > 20 or not (match := _REFERENCE.search(value)):
            return value
        inner = _referred(key, match[1], values)
        if match[0] == value:
            return replaced(key, inner, depth + 1)
        return replaced(key, value[: match.start()] + str(inner) + value[match.end() :], depth + 1)

    return {key: replaced(key, value) for key, value in values.items()}


def _referred(key: str, reference: str, values: Mapping[str, Any]) -> Any:
    resolver, colon, rest = reference.partition(":")
    name, _, default = (rest if colon else reference).partition(",")
    if colon and resolver == "oc.env":
        return _value(key, os.environ.get(name.strip(), default))
    name = name.strip()
    dots = len(name) - len(name.lstrip("."))
    if dots:
        name = ".".join([*key.split(".")[:-dots], name[dots:]])
    return values.get(name, _value(key, default.strip()) if default.strip() else None)
