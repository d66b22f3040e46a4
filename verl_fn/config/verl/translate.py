"""Translation of verl's settings: what becomes of each key, and the config that results."""

from __future__ import annotations

import difflib
import fnmatch
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from verl_fn.config.loading import default_table, keys, structure
from verl_fn.config.notes import without_effect
from verl_fn.config.tables import Table, flat

from .computed import COMPUTED, CountRows, Move
from .keys import ALIASES, NO_EFFECT, ONLY, PPO_DEFAULTS, SAME, SFT_ALIASES, SFT_DEFAULTS
from .reading import Settings

_WRAPPED = textwrap.TextWrapper(
    116, initial_indent="  ", subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
)


@attrs.frozen
class Translation:
    """What became of verl's settings.

    Attributes:
        table: the config as nested tables, without keys at their defaults.
        translated: for each key that was set and translated, a line.
        defaults: a line for each default of verl that differs from the one here.
        without_effect: keys that were set and change nothing here, by the reason.
        not_possible: a line for each setting that this project cannot follow.
        unknown: a line for each key that verl does not have, with the nearest one.
    """

    table: Table
    translated: Sequence[str]
    defaults: Sequence[str]
    without_effect: Mapping[str, Sequence[str]]
    not_possible: Sequence[str]
    unknown: Sequence[str]

    @property
    def complete(self) -> bool:
        """Returns whether the config does all that the settings ask for."""
        return not self.not_possible and not self.unknown

    def report(self) -> str:
        """Returns the report on all keys, in sections."""
        reasons = [f"{', '.join(keys)}: {reason}" for reason, keys in self.without_effect.items()]
        sections = (
            ("translated", self.translated),
            ("verl's defaults that differ from those here", self.defaults),
            ("without effect here", reasons),
            ("not possible here", self.not_possible),
            ("unknown", self.unknown),
        )
        lines = []
        for title, entries in sections:
            if entries:
                lines.append(f"{title}:")
                lines += map(_WRAPPED.fill, entries)
        return "\n".join(lines)


def translate(settings: Settings, count_rows: CountRows = lambda files: None) -> Translation:
    """Translates verl's settings.

    verl's own defaults are part of what is translated. verl steps its learning-rate schedule once in a training step
    where schedules here count updates, so warm-ups are multiplied by the updates of a step.

    Args:
        settings: verl's settings.
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
    written = {key: name for name, key in names.items()}
    values = dict(SFT_DEFAULTS if settings.sft else PPO_DEFAULTS) | given
    refused = _not_allowed(given, written)
    moves: dict[str, Move] = {}
    for move in _moves(values, settings, count_rows):
        if move.problem:
            whose = [written[key] for key in move.keys if key in written] or move.keys
            refused |= dict.fromkeys(move.keys, f"{', '.join(whose)}: {move.problem}")
        else:
            moves[move.ours] = move
    table, ignored = _config({key: move.value for key, move in moves.items()})
    used = {key for move in moves.values() if move.ours not in ignored for key in move.keys}
    kept = flat(table)
    reasons: dict[str, list[str]] = {}
    unknown: list[str] = []
    for name, key in names.items():
        if key in used or key in refused:
            continue
        if reason := _reason(key, moves, ignored):
            reasons.setdefault(reason, []).append(name)
        else:
            unknown.append(_unknown(name, settings))
    by_user = {key: [written[k] for k in move.keys if k in written] for key, move in moves.items()}
    lines = {key: _line(move, by_user[key]) for key, move in moves.items() if key not in ignored}
    return Translation(
        table,
        [line for key, line in lines.items() if by_user[key]],
        [line for key, line in lines.items() if not by_user[key] and key in kept],
        reasons,
        list(dict.fromkeys(refused.values())),
        unknown,
    )


def _canonical_names(settings: Settings) -> dict[str, str]:
    """Returns for each key that was set the one of ``ppo_trainer`` of 0.9 that it stands for."""
    aliases = {**(SFT_ALIASES if settings.sft else {}), **ALIASES}
    names = {}
    for name in settings.values:
        table = name.rpartition(".")[0]
        # Megatron's table of adapters counts where it has a rank.
        unused = table.endswith("model.lora") and not settings.values.get(f"{table}.rank")
        key = name
        for start, replacement in () if unused else aliases.items():
            if key == start or (start.endswith(".") and key.startswith(start)):
                key = replacement + key.removeprefix(start)
        names[name] = key
    return names


def _given(settings: Settings, names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values by canonical key; of several names of a key, the last one with more than a neutral value."""
    given: dict[str, Any] = {}
    for name, key in names.items():
        value = settings.values[name]
        neutral = value is None or (not isinstance(value, str) and value in (0, 1))
        if key not in given or not neutral or given[key] is None:
            given[key] = value
    return given


def _moves(values: Mapping[str, Any], settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    for verl, ours in SAME.items():
        if values.get(verl) is not None:
            yield Move((verl,), ours, values[verl])
    # Later moves replace earlier ones to the same key.
    for compute in COMPUTED:
        yield from compute(values, settings, count_rows)


def _config(values: Mapping[str, Any]) -> tuple[Table, dict[str, str]]:
    """Returns the nested table of values that are not defaults, and why others are left out, by key."""
    table = _nested(values)
    cfg = structure(table)
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
    return _nested(changed), ignored


def _nested(values: Mapping[str, Any]) -> Table:
    table: Table = {}
    for key, value in values.items():
        *path, name = key.split(".")
        inner = table
        for part in path:
            inner = inner.setdefault(part, {})
        inner[name] = value
    return table


def _equal(value: Any, default: Any) -> bool:
    """Returns whether a value is the default; a single value stands for a list of one."""
    if isinstance(default, tuple | list):
        return (value if isinstance(value, list) else [value]) == list(default)
    return bool(value == default)


def _not_allowed(given: Mapping[str, Any], written: Mapping[str, str]) -> dict[str, str]:
    """Returns a line for each key whose value this project cannot follow."""
    refused = {}
    for key, value in given.items():
        allowed, reason = ONLY.get(key, ((value,), ""))
        if value is not None and value not in allowed:
            refused[key] = f"{written[key]} = {_shown(value)}: {reason}"
    return refused


def _reason(key: str, moves: Mapping[str, Move], ignored: Mapping[str, str]) -> str:
    """Returns why a key changes nothing here; empty for an unknown key."""
    for move in moves.values():
        if key in move.keys:
            return ignored[move.ours].partition(" has no effect ")[2]
    if key in ONLY:
        return "it asks for what happens here anyway"
    reason = next((reason for pattern, reason in NO_EFFECT.items() if fnmatch.fnmatchcase(key, pattern)), "")
    return reason or ("null leaves the default" if key in SAME or key in PPO_DEFAULTS else "")


def _unknown(name: str, settings: Settings) -> str:
    known = [*SAME, *ONLY, *PPO_DEFAULTS, *(key for key in NO_EFFECT if "*" not in key)]
    if settings.sft:
        backwards = {target: alias for alias, target in reversed(list(SFT_ALIASES.items()))}
        known = [next((a + k.removeprefix(t) for t, a in backwards.items() if k.startswith(t)), k) for k in known]
    nearest = difflib.get_close_matches(name, known, 1, 0.6)
    return f"{name} = {_shown(settings.values[name])}" + (f"; did you mean {nearest[0]}?" if nearest else "")


def _line(move: Move, names: Sequence[str]) -> str:
    line = f"{move.ours} = {_shown(move.value)}"
    if names and names != [move.ours]:
        line = f"{', '.join(names)} -> {line}"
    elif not names:
        line = f"{line} (verl: {', '.join(move.keys)})" if move.keys != (move.ours,) else line
    return f"{line}; {move.remark}" if move.remark else line


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
