"""The score of an answer to a question of Reasoning Gym, by the scorer of its set."""

from __future__ import annotations

import copy
import functools
import json
import pickle
from collections.abc import Mapping
from typing import Any

from verl_fn.errors import install

from .answers import TAGGED, Score

SOURCE = "reasoning_gym/"


def reasoning_question(name: str, seed: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the question of a set for a seed, with its ``answer`` and ``metadata``, as Reasoning Gym makes it.

    Args:
        name: of the set.
        seed: the same seed and options give the same question.
        options: fields of the set's config.

    Raises:
        ImportError: Reasoning Gym is not installed.
        Exception: whatever the package raises for an unknown set or option.
    """
    return _made(name, seed, json.dumps(dict(options), sort_keys=True))[1]


def reasoning_gym(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Score:
    """Scores a response by the ``score_answer`` of its question's set.

    The answer is what the last ``<answer>`` tag holds, or the whole response without one. A scorer that fails on an
    answer scores 0, and ``scorer_failed`` counts it.

    Source: https://github.com/open-thought/reasoning-gym.

    Args:
        data_source: ``reasoning_gym/SET``.
        solution_str: the response.
        ground_truth: the answer of the package, of which the scorer may accept others.
        extra_info: ``seed``, ``options`` and ``question``, from which the question is made again.

    Raises:
        ImportError: Reasoning Gym is not installed.
        ValueError: the problem is not one of Reasoning Gym, or the installed version makes another question.
    """
    if not data_source.startswith(SOURCE) or not {"seed", "options", "question"} <= set(extra_info or {}):
        raise ValueError(f"{data_source!r} is not a set of data.task = reasoning_gym:SET, whose problems this scores")
    name, options = data_source.removeprefix(SOURCE), json.dumps(extra_info["options"], sort_keys=True)
    dataset, entry = _made(name, extra_info["seed"], options)
    if entry["question"] != extra_info["question"]:
        raise ValueError(
            f"the installed version of reasoning-gym makes another question of {name} and seed {extra_info['seed']}; "
            "install the version that made the problems"
        )
    tagged = TAGGED.findall(solution_str)
    pred = tagged[-1].strip() if tagged else solution_str.strip()
    try:
        score, failed = float(dataset.score_answer(pred, entry)), 0.0
    # The scorers of some sets evaluate answers as Python, and that can raise anything.
    except Exception:
        score, failed = 0.0, 1.0
    return {"score": score, "acc": float(score >= 1.0), "pred": pred, "scorer_failed": failed}


# A few, since some questions hold whole files: responses to one question are scored one after the other.
@functools.lru_cache(16)
def _made(name: str, seed: int, options: str) -> tuple[Any, dict[str, Any]]:
    dataset = _dataset(name, seed, options)
    return dataset, dataset[0]


def _dataset(name: str, seed: int, options: str) -> Any:
    """Returns a set for a seed; sets of other seeds share its data if it is the same.

    The constructors of some sets read a list of words; this takes longer than to make a question and score answers.
    """
    shared = _same_for_every_seed(name, options)
    if shared is None:
        return _created(name, seed, options)
    dataset = copy.copy(shared)
    dataset.config = copy.copy(shared.config)
    dataset.seed = dataset.config.seed = seed
    return dataset


# More than there are sets, unless one is used with several options.
@functools.lru_cache(128)
def _same_for_every_seed(name: str, options: str) -> Any:
    """Returns a set whose constructor makes the same of every seed; None for another set."""
    one, other = (_created(name, seed, options) for seed in (0, 1))
    try:
        return one if _without_seed(one) == _without_seed(other) else None
    # Whatever cannot be compared is not shared.
    except Exception:
        return None


def _without_seed(dataset: Any) -> bytes:
    config = {key: value for key, value in vars(dataset.config).items() if key != "seed"}
    others = {key: value for key, value in vars(dataset).items() if key not in ("seed", "config")}
    return pickle.dumps((config, others))


def _created(name: str, seed: int, options: str) -> Any:
    try:
        from reasoning_gym import create_dataset
    except ImportError as error:
        raise ImportError(
            f"reasoning_gym:{name} needs Reasoning Gym ({error}): " + install("'verl_fn[reasoning-gym]'")
        ) from error
    return create_dataset(name, **json.loads(options), seed=seed, size=1)
