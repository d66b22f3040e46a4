"""Reward functions with verl's signature, for ``reward.functions``; what they need is imported when they run."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import re
from collections.abc import Mapping
from typing import Any

from verl_fn.errors import install

__all__ = [
    "boxed",
    "brevity",
    "equal",
    "even_share",
    "exact",
    "matches",
    "reasoning_gym",
    "tagged",
    "thinks",
    "verified",
]

SOURCE = "reasoning_gym/"
Score = dict[str, Any]
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_THINKS = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL)
_SPACING = re.compile(r"\\[!,;: ]|~|\s")
_SHORT = (
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\(left|right)(?![a-z])"), ""),
    (re.compile(r"\\(?:text|mbox|mathrm|textbf)\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\^\{?\\circ\}?|\\%|%|\\\$|\$"), ""),
    (re.compile(r"\\frac(\w)(\w)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac(\w)\{"), r"\\frac{\1}{"),
    (re.compile(r"(\\frac\{[^{}]*\})(\w)"), r"\1{\2}"),
    (re.compile(r"\\sqrt(\w)"), r"\\sqrt{\1}"),
    (re.compile(r"^(-?\d+)/(\d+)$"), r"\\frac{\1}{\2}"),
    (re.compile(r"^-\\frac\{(\d+)\}"), r"\\frac{-\1}"),
    (re.compile(r"(?<![\d.])\.(?=\d)"), "0."),
    (re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), ""),
    (re.compile(r"^(-?\d+)\.0*$"), r"\1"),
    (re.compile(r"\.$"), ""),
)


def verdict(right: bool, pred: str) -> Score:
    """Returns the score of an answer that is right or wrong, with the final answer.

    Example:
        >>> verdict(True, "5")
        {'score': 1.0, 'acc': 1.0, 'pred': '5'}
    """
    return {"score": float(right), "acc": float(right), "pred": pred}


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Score:
    """Scores 1 if the whole response is the ground truth, apart from white space around both.

    Example:
        >>> exact("sums", " 5\\n", "5")["score"]
        1.0
    """
    pred = solution_str.strip()
    return verdict(pred == ground_truth.strip(), pred)


def matches(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Score:
    """Scores 1 if the ground truth, a regular expression, matches the whole response without white space around it.

    Example:
        >>> matches("colours", "Grey", "(?i)gr[ae]y")["score"], matches("colours", "dark grey", "gr[ae]y")["score"]
        (1.0, 0.0)
    """
    pred = solution_str.strip()
    return verdict(re.fullmatch(ground_truth, pred) is not None, pred)


def tagged(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Score:
    """Scores 1 if what the last ``<answer>`` tag holds is the ground truth, apart from white space around both.

    Example:
        >>> tagged("sums", "<think>2+3</think><answer> 5 </answer>", "5")["pred"]
        '5'
    """
    tags = TAGGED.findall(solution_str)
    pred = tags[-1].strip() if tags else ""
    return verdict(bool(tags) and pred == ground_truth.strip(), pred)


def thinks(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Returns 1 for a response of one ``<think>`` and then one ``<answer>`` tag and nothing else, otherwise 0.

    It says nothing about the answer; give it a weight beside a function that does.

    Example:
        >>> thinks("sums", "<think>2+3</think><answer>5</answer>", "5"), thinks("sums", "<answer>5</answer>", "5")
        (1.0, 0.0)
    """
    return float(_THINKS.fullmatch(solution_str) is not None)


def brevity(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Returns minus the thousands of characters of a response; give it a small weight.

    Example:
        >>> brevity("sums", "x" * 500, "5")
        -0.5
    """
    return -len(solution_str) / 1000


def even_share(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Returns the share of a response's characters whose code points are even, a reward for tests.

    Random models get rewards around a half, all different, so advantages and gradients are not zero; and a policy
    learns it within a few steps.

    Example:
        >>> even_share("count", "ab", "aaa")
        0.5
    """
    return sum(ord(character) % 2 == 0 for character in solution_str) / max(1, len(solution_str))


def boxed(response: str) -> str | None:
    r"""Returns what the last ``\boxed{}`` or ``\fbox{}`` of a response holds; None if there is none that ends.

    Example:
        >>> boxed(r"so \boxed{1}, no, \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    start = max(response.rfind(r"\boxed{"), response.rfind(r"\fbox{"))
    if start < 0:
        return None
    start = response.index("{", start) + 1
    depth = 1
    for i in range(start, len(response)):
        depth += {"{": 1, "}": -1}.get(response[i], 0)
        if depth == 0:
            return response[start:i]
    return None


def equal(answer: str, truth: str) -> bool:
    r"""Returns whether two answers are the same string, apart from how LaTeX can write it.

    Spaces, sizes of brackets and fractions, text, units of degrees and per cent, and separators of thousands do not
    count; a name in front, as in ``x = 5``, neither. It does no mathematics: ``0.5`` is not ``\frac12``.

    Example:
        >>> equal(r"\dfrac12", r"\frac{1}{2}"), equal("x = 1,000", "1000"), equal("0.5", r"\frac12")
        (True, True, False)
    """
    return _plain(answer) == _plain(truth)


def verified(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Score:
    r"""Scores 1 if a response's final answer is mathematically the ground truth, by Math-Verify.

    The last box counts, or else what the last ``<answer>`` tag holds, or else the last expression that is found. The
    ground truth may be only the answer, or text with a box. It needs the extra ``verl_fn[math]``.

    Source: https://github.com/huggingface/Math-Verify.

    Raises:
        ImportError: Math-Verify is not installed.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError("verl_fn.scores:verified needs Math-Verify: " + install("'verl_fn[math]'")) from error
    truth = boxed(ground_truth) or ground_truth
    tags = TAGGED.findall(solution_str) if boxed(solution_str) is None else []
    # Both forms are tried: a bare number is no LaTeX, and LaTeX outside of dollars is not found.
    answers = parse(f"${tags[-1].strip()}$") or parse(tags[-1]) if tags else parse(solution_str)
    truths = parse(f"${truth}$") or parse(truth)
    pred = str(answers[-1]) if answers else ""
    return verdict(bool(answers and truths and verify(truths, answers)), pred)


def _plain(answer: str) -> str:
    plain = _SPACING.sub("", answer)
    if (name := re.match(r"[A-Za-z]=", plain)) is not None:
        plain = plain[name.end() :]
    for pattern, replacement in _SHORT:
        plain = pattern.sub(replacement, plain)
    return plain


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
