"""Megatron's model beside transformers': log-probs, gradients and weights, by parameter.

A mistake in a mapping comes back as it went in, so an export equals the folder bit by bit while the model computes
something else. Gradients show it: the parameters whose gradients are furthest from transformers' own are the ones
whose mapping to look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from verl_fn.backends.hf.config import read_config
from verl_fn.benchmarks.families import (
    BAR,
    ROWS,
    batch_of,
    compared,
    gradient_errors,
    of_layout,
    reference,
)

from .verdict import Check

NAMES = ("log-probs equal transformers'", "gradients equal transformers'", "weights come out as they went in")
SHOWN = 3  # parameters that a failure names


def rows_for(vocabulary: int) -> list[list[int]]:
    """Returns rows of tokens that a model of this vocabulary has.

    Example:
        >>> max(max(row) for row in rows_for(24)) < 24
        True
    """
    return [[1 + (token - 1) % (vocabulary - 1) for token in row] for row in ROWS]


def parity(folder: Path, device: str, layout: str = "megatron") -> list[Check]:
    """Compares a layout in fp32 with transformers' own forward of each row in float64.

    Args:
        folder: a model folder.
        device: of the layout.
        layout: as for ``bench first-step``; this process has to be its only rank.
    """
    rows = rows_for(read_config(folder).get_text_config().vocab_size)
    batch = batch_of(rows)
    expected = reference(folder, batch)
    found = of_layout(folder, layout, device, rows)
    result = compared(found, expected)
    errors = gradient_errors(found, expected)
    bar = BAR
    if not max(errors.values()) <= BAR:
        # Linear attention of transformers' own is no more exact in fp32 on some CPUs.
        bar = max(BAR, 2 * max(gradient_errors(reference(folder, batch, torch.float32), expected).values()))
    changed = sorted(
        name for name, t in expected.weights.items()
        if name not in found.weights or not torch.equal(found.weights[name], t.float())
    )  # fmt: skip
    return [
        Check(NAMES[0], result["logprobs"] <= BAR, f"{result['logprobs']:.1e} nats at most, bar {BAR:.0e}"),
        Check(NAMES[1], max(errors.values()) <= bar, f"{_worst(errors)}, bar {bar:.0e}"),
        Check(NAMES[2], not changed, _named(changed) if changed else f"{len(expected.weights)} bitwise"),
    ]


def _worst(errors: dict[str, float]) -> str:
    """Returns the parameters with the largest errors; NaN is the largest.

    Example:
        >>> _worst({"a": 0.1, "b": float("nan"), "c": 0.5, "d": 0.0})
        'b nan, c 5.0e-01, a 1.0e-01'
    """
    order = sorted(errors, key=lambda name: (errors[name] == errors[name], -errors[name]))
    return ", ".join(f"{name} {errors[name]:.1e}" for name in order[:SHOWN])


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more} changed"
