"""Translation of verl's settings: what becomes of each key, and the config that results."""

from __future__ import annotations

import fnmatch
import functools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import tomli_w

from verl_fn.config.describe import without_effect
from verl_fn.config.load import UNSET, default_table, flat, keys, of_epochs, put_value, structure
from verl_fn.config.options import ConfigError
from verl_fn.config.plan import make_plan
from verl_fn.config.schema import Table
from verl_fn.errors import did_you_mean

from .computed import COMPUTED, CountRows, Move
from .keys import (
    ALIASES,
    MEGATRON_DEFAULTS,
    NO_EFFECT,
    NUMBERS,
    ONLY,
    PPO_DEFAULTS,
    SAME,
    SFT_ALIASES,
    SFT_DEFAULTS,
    SFT_ENGINES,
    TABLES,
    Rule,
)
from .reading import Settings

AS_HERE = "; the default here"
_OF_ADAPTERS = ("lora_alpha", "target_modules", "exclude_modules")


@attrs.frozen
class Translation:
    """What became of verl's settings.

    Attributes:
        table: the config as nested tables, without keys at their defaults; ``?`` is a value that has to be set.
        translated: for each key that was set and translated, a line.
        defaults: a line for each default of verl that differs from the one here.
        without_effect: keys that were set and change nothing here, by the reason.
        not_possible: a line for each setting that this project cannot follow.
        unknown: a line for each key that verl does not have, with the nearest one.
        not_run: commands of a script that were not run, on whose answers settings may depend.
        lost: lines of a script with settings that its trainer does not get.
    """

    table: Table
    translated: Sequence[str]
    defaults: Sequence[str]
    without_effect: Mapping[str, Sequence[str]]
    not_possible: Sequence[str]
    unknown: Sequence[str]
    not_run: Sequence[str] = ()
    lost: Sequence[str] = ()

    @property
    def complete(self) -> bool:
        """Returns whether the config does all that the settings ask for."""
        return not self.not_possible and not self.unknown

    def toml(self) -> str:
        """Returns the config as TOML, after a comment on each setting that it does not follow."""
        sections = (("not possible here", self.not_possible), ("unknown to verl", self.unknown))
        comments = [_wrapped(f"{title}: {line}", "# ", "#   ") for title, lines in sections for line in lines]
        return "\n".join([*comments, *[""] * bool(comments), tomli_w.dumps(self.table).rstrip("\n")])

    def report(self) -> str:
        """Returns the report on all keys, in sections."""
        reasons = [f"{', '.join(keys)}: {reason}" for reason, keys in self.without_effect.items()]
        sections = (
            ("translated", self.translated),
            ("verl's defaults that differ from the defaults here", self.defaults),
            ("without effect here", reasons),
            ("not possible here", self.not_possible),
            ("unknown", self.unknown),
            ("not run, so look whether settings depend on it", self.not_run),
            ("not read by verl's trainer, since its command ends above these lines", self.lost),
        )
        lines = []
        for title, entries in sections:
            if entries:
                lines.append(f"{title}:")
                lines += map(_wrapped, entries)
        return "\n".join(lines)


def translate(settings: Settings, count_rows: CountRows = lambda files: None) -> Translation:
    """Translates verl's settings.

    verl's own defaults are part of what is translated. verl steps its learning-rate schedule once in a training step
    where schedules here count updates, so warm-ups are multiplied by the updates of a step.

    Args:
        count_rows: counts the rows of data files, for the steps of an epoch; None if they cannot be read.

    Raises:
        ConfigError: a value cannot be used.

    Example:
        >>> from .reading import read_settings
        >>> words = ["algorithm.adv_estimator=rloo", "trainer.total_training_steps=9", "data.trian_files=x"]
        >>> translation = translate(read_settings(words))
        >>> translation.table["algorithm"]["adv_estimator"], translation.table["trainer"]["total_training_steps"]
        ('rloo', 9)
        >>> translation.unknown
        ['data.trian_files = "x"; did you mean data.train_files?']
    """
    names = _canonical_names(settings)
    given = _given(settings, names)
    written: dict[str, list[str]] = {}
    for name, key in names.items():
        written.setdefault(key, []).append(name)
    defaults = dict(SFT_DEFAULTS if settings.sft else PPO_DEFAULTS)
    values = defaults | (dict(MEGATRON_DEFAULTS) if settings.engine == "megatron" else {}) | given
    refused = _no_values(given, defaults, written)
    values |= {key: defaults.get(key) for key in refused}
    found = list(_moves(values, settings, count_rows))
    problems = [move for move in found if move.problem]
    for move in problems:
        refused |= _refusal(move.keys, move.problem, written)
    moves = {move.ours: move for move in found if not move.problem}
    moved = {key for move in moves.values() for key in move.keys}
    refused |= _not_allowed({key: value for key, value in given.items() if key not in moved}, written)
    table, ignored, unusable = _config(moves)
    for key, message in unusable.items():
        # A value that is no number has been left out, and the default may not do.
        refused = _refusal(moves.pop(key).keys if key in moves else (key,), message, written) | refused
    used = {key for move in moves.values() if move.ours not in ignored for key in move.keys}
    kept = flat(table)
    for key in {move.ours for move in problems} - {""}:
        put_value(table, key, UNSET)
    others = {n: _reason(k, moves, ignored, refused) for n, k in names.items() if k not in used | refused.keys()}
    reasons = {reason: [name for name in others if others[name] == reason] for reason in others.values() if reason}
    by_user = {key: [name for k in move.keys for name in written.get(k, ())] for key, move in moves.items()}
    lines = {key: _line(move, by_user[key]) for key, move in moves.items() if key not in ignored}
    return Translation(
        table,
        [line + ("" if key in kept else AS_HERE) for key, line in lines.items() if by_user[key]],
        [line for key, line in lines.items() if not by_user[key] and (key in kept or moves[key].differs)],
        reasons,
        list(dict.fromkeys(refused.values())),
        [_unknown(name, settings) for name, reason in others.items() if not reason],
        settings.not_run,
        settings.lost,
    )


def _wrapped(line: str, first: str = "  ", others: str = "      ") -> str:
    return textwrap.fill(
        line, 116, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )


def _canonical_names(settings: Settings) -> dict[str, str]:
    """Returns for each key that was set the one of ``ppo_trainer`` of 0.9 that it stands for."""
    engine = {"engine.": SFT_ENGINES.get(settings.engine, "engine.")}
    aliases = {**({**SFT_ALIASES, **engine} if settings.sft else {}), **ALIASES}
    names = {}
    for name in settings.values:
        table = name[: name.find("lora.") + 4] if "lora." in name else ""
        # Megatron's table of adapters counts where it has a rank.
        unused = table.endswith("model.lora") and not settings.values.get(f"{table}.rank")
        key = name
        for start, replacement in () if unused else aliases.items():
            if key == start or (start[-1] in "._" and key.startswith(start)):
                key = replacement + key.removeprefix(start)
        names[name] = key
    ranks = {key: settings.values[name] for name, key in names.items() if key.endswith(".lora_rank")}
    for name, key in names.items():
        model, _, rest = key.rpartition(".")
        if rest in _OF_ADAPTERS and not ranks.get(f"{model}.lora_rank"):
            names[name] = f"{model}.lora.{rest}"
    return names


def _given(settings: Settings, names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values by canonical key; of several names of a key, the last one with more than a neutral value.

    A null leaves verl's default, except of the clip ranges, for which it means clip_ratio, and of ``data.val_files``.
    """
    given: dict[str, Any] = {}
    fixed: set[str] = set()
    for name, key in names.items():
        value = settings.values[name]
        neutral = value is None or (not isinstance(value, str) and value in (0, 1))
        # verl's optimizers are made with the overrides, whatever the other keys say.
        if overrides := ".override_optimizer_config." in name:
            fixed.add(key)
        if key not in given or overrides or (key not in fixed and not neutral) or given[key] is None:
            given[key] = value
    return {
        k: value for k, value in given.items() if value is not None or "clip_ratio_" in k or k == "data.val_files"
    }


def _moves(values: Mapping[str, Any], settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    for verl, ours in SAME.items():
        if values.get(verl) is not None:
            yield Move((verl,), ours, values[verl])
    # Later moves replace earlier ones to the same key.
    for compute in COMPUTED:
        yield from compute(values, settings, count_rows)


def _no_values(
    given: Mapping[str, Any], defaults: Mapping[str, Any], written: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Returns a line for each key that lacks its number, or is empty, as a variable without a value is."""
    lines = {}
    for key, value in given.items():
        number = key in NUMBERS or _is_number(defaults.get(key))
        if number and value is not None and not _is_number(value):
            lines[key] = f"{', '.join(written[key])}: expected a number, got {_shown(value)}{of_epochs(value)}"
        elif value == "" and defaults.get(key) not in ("", None):
            lines[key] = f"{', '.join(written[key])}: it is empty; set it, or leave it out"
    return lines


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refusal(keys: Sequence[str], problem: str, written: Mapping[str, Sequence[str]]) -> dict[str, str]:
    whose = [name for key in keys for name in written.get(key, ())] or keys
    return dict.fromkeys(keys, f"{', '.join(whose)}: {problem}")


def _config(moves: Mapping[str, Move]) -> tuple[Table, dict[str, str], dict[str, str]]:
    """Returns the table of values that are not defaults, why others are left out, and which are unusable, by key."""
    values = {key: move.value for key, move in moves.items() if move.value is not None}
    unusable: dict[str, str] = {}
    while True:
        table = _nested(values)
        try:
            cfg = structure(table)
            break
        except ConfigError as error:
            unusable |= (problem := _named(error, values))
            for key in problem:
                values.pop(key)
    try:
        make_plan(cfg)
    except ConfigError as error:
        unusable |= _named(error, values)
    with_name = f'has no effect with algorithm.name = "{cfg.algorithm.name}"'
    known = set(keys(options=type(cfg.algorithm.options)))
    others = {key: f"{key} {with_name}" for key in values if key.startswith("algorithm.") and key not in known}
    ignored = others | without_effect(cfg, dict(values))
    defaults = flat(default_table(table))
    changed = {
        key: value
        for key, value in values.items()
        if key == "algorithm.name" or (key not in ignored and not _equal(value, defaults.get(key)))
    }
    return _nested(changed), ignored, unusable


def _named(error: ConfigError, values: Mapping[str, Any]) -> dict[str, str]:
    """Returns the message of an error under the key with which it begins.

    Raises:
        ConfigError: it begins with none of the keys.
    """
    message = str(error)
    for key in values:
        if re.match(rf"{re.escape(key)}\b(?!\.)", message):
            return {key: message}
    raise error


def _nested(values: Mapping[str, Any]) -> Table:
    table: Table = {}
    for key, value in values.items():
        put_value(table, key, value)
    return table


def _equal(value: Any, default: Any) -> bool:
    """Returns whether a value is the default; a single value stands for a list of one."""
    if isinstance(default, tuple | list):
        return (value if isinstance(value, list) else [value]) == list(default)
    return bool(value == default)


@functools.cache
def _rule(key: str) -> Rule | str:
    """Returns which values a key may have and what else to do, or why it has no effect; empty for an unknown key."""
    rules: dict[str, Rule | str] = {**NO_EFFECT, **ONLY}
    if key in rules:
        return rules[key]
    patterns = (pattern for pattern in (*ONLY, *NO_EFFECT) if fnmatch.fnmatchcase(key, pattern))
    return rules.get(next(patterns, ""), "")


def _not_allowed(given: Mapping[str, Any], written: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns a line for each key whose value this project cannot follow."""
    refused = {}
    for key, value in given.items():
        rule = _rule(key)
        if not isinstance(rule, str) and value not in rule[0]:
            refused[key] = f"{', '.join(written[key])} = {_shown(value)}: {rule[1]}"
    return refused


def _reason(key: str, moves: Mapping[str, Move], ignored: Mapping[str, str], refused: Iterable[str]) -> str:
    """Returns why a key changes nothing here; empty for an unknown key."""
    for move in moves.values():
        if key in move.keys and move.ours in ignored:
            return ignored[move.ours].partition(" has no effect ")[2]
    rule = _rule(key)
    if isinstance(rule, tuple):
        return "it asks for what happens here anyway"
    switch, _, state = rule.rpartition(" is ")
    if state in ("off", "not set") and any(one.endswith(switch) for one in refused):
        return f"{switch} is not possible here"
    if rule:
        return rule
    if key == "data.val_files":
        return "no held-out files"
    known = key in SAME or key in PPO_DEFAULTS or key in SFT_DEFAULTS or key.startswith(tuple(TABLES))
    return "null leaves the default" if known else ""


def _unknown(name: str, settings: Settings) -> str:
    known = [key for key in (*SAME, *ONLY, *PPO_DEFAULTS, *NO_EFFECT) if "*" not in key]
    if settings.sft:
        backwards = {target: alias for alias, target in reversed(list(SFT_ALIASES.items()))}
        known = [next((a + k.removeprefix(t) for t, a in backwards.items() if k.startswith(t)), k) for k in known]
    return f"{name} = {_shown(settings.values[name])}{did_you_mean(name, known)}"


def _line(move: Move, names: Sequence[str]) -> str:
    line = f"{move.ours} = {_shown(move.value)}"
    if names and names != [move.ours]:
        line = f"{', '.join(names)} -> {line}"
    elif not names:
        line = f"{line} (verl: {', '.join(move.keys)})" if move.keys != (move.ours,) else line
    return f"{line}; {move.remark}" if move.remark else line


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
