"""Scores of answers as strings, and of their form and length."""

from __future__ import annotations

import re
from typing import Any

Score = dict[str, Any]
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_THINKS = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL)


def judged(right: bool, pred: str) -> Score:
    """Returns the score of an answer that is right or wrong, with the final answer.

    Example:
        >>> judged(True, "5")
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
    return judged(pred == ground_truth.strip(), pred)


def matches(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Score:
    """Scores 1 if the ground truth, a regular expression, matches the whole response without white space around it.

    Example:
        >>> matches("colours", "Grey", "(?i)gr[ae]y")["score"], matches("colours", "dark grey", "gr[ae]y")["score"]
        (1.0, 0.0)
    """
    pred = solution_str.strip()
    return judged(re.fullmatch(ground_truth, pred) is not None, pred)


def tagged(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Score:
    """Scores 1 if what the last ``<answer>`` tag holds is the ground truth, apart from white space around both.

    Example:
        >>> tagged("sums", "<think>2+3</think><answer> 5 </answer>", "5")["pred"]
        '5'
    """
    tags = TAGGED.findall(solution_str)
    pred = tags[-1].strip() if tags else ""
    return judged(bool(tags) and pred == ground_truth.strip(), pred)


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
