"""Megatron's numbers: the model beside transformers' by parameter, and the first step of parallel layouts.

A mistake in a mapping comes back as it went in, so an export equals the folder bit by bit while the model computes
something else. Gradients show it: the parameters whose gradients are furthest from transformers' own are the ones
whose mapping to look at.

Level 2 compares the first step of each layout with ``local``, so transformers' own model in fp32, by the bars of
``bench first-step``. Layouts that need more GPUs than there are run on CPU ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from verl_fn.backends.hf.config import read_config
from verl_fn.benchmarks import first_step
from verl_fn.benchmarks.families import (
    ROWS,
    batch_of,
    gradient_errors,
    logprob_error,
    of_layout,
    reference,
)
from verl_fn.benchmarks.families_page import BAR
from verl_fn.benchmarks.first_step_batch import ragged_batch
from verl_fn.benchmarks.first_step_layout import Layout
from verl_fn.benchmarks.together import RanksFailed
from verl_fn.testing.compare import bars_of, compare_numbers, missed_bars

from .subject import Request
from .verdict import Check, Outcome, trap_in

NAMES = ("log-probs equal transformers'", "gradients equal transformers'", "weights come out as they went in")
SHOWN = 3  # parameters that a failure names
DENSE = ("megatron", "megatron:tp=2,pp=2", "megatron:tp=2,sp=true", "megatron:cp=2")
# Ranks that share the matrices of experts must share the tokens, too.
EXPERTS = ("megatron", "megatron:tp=2,pp=2,sp=true", "megatron:cp=2", "megatron:ep=2")
SHARDED = ("megatron:fsdp=true", "megatron:dp=2,fsdp=true")
LOSSES = ("sft", "ppo")
RAGGED_ROWS, LONGEST = 24, 32
# Sizes that the layout asks for and the model does not have.
DOES_NOT_FIT = re.compile(r"does not divide|no tensor parallelism|context_parallel_size must be 1|cp must be 1")


def rows_for(vocabulary: int) -> list[list[int]]:
    """Returns rows of tokens that a model of this vocabulary has.

    Example:
        >>> max(max(row) for row in rows_for(24)) < 24
        True
    """
    return [[1 + (token - 1) % (vocabulary - 1) for token in row] for row in ROWS]


def parity(folder: Path, device: str) -> list[Check]:
    """Compares Megatron in fp32, in this process, with transformers' own forward of each row in float64."""
    rows = rows_for(read_config(folder).get_text_config().vocab_size)
    batch = batch_of(rows)
    expected = reference(folder, batch)
    found = of_layout(folder, "megatron", device, rows)
    logprobs = logprob_error(found, expected)
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
        Check(NAMES[0], logprobs <= BAR, f"{logprobs:.1e} nats at most, bar {BAR:.0e}"),
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


def stress_layouts(request: Request) -> list[str]:
    """Returns the layouts of level 2."""
    return list(EXPERTS if request.experts else DENSE)


def layouts_within(layouts: Sequence[str], request: Request, device: str) -> list[str]:
    """Returns the layouts that run on a device: on CPUs, if GPUs were asked for, only what has too few of them."""
    if request.device == "cpu":
        return list(layouts)
    return [text for text in layouts if (Layout.parse(text).ranks <= request.gpus) == (device == "cuda")]


def compare_layouts(
    request: Request, layouts: Sequence[str], device: str, folder: Path, say: Callable[[str], None]
) -> Outcome:
    """Runs the first step of each layout, as ``bench first-step`` names it, and compares it with the reference's.

    There is a check for each layout that fits the model; the others, if there are any, block the level.
    """
    (folder / "model").symlink_to(request.folder)
    config = read_config(request.folder).get_text_config()
    layers = config.num_hidden_layers
    batch = ragged_batch(min(60, config.vocab_size), RAGGED_ROWS, LONGEST)
    first_step.prepare(folder, first_step.OWN, "local", LOSSES, batch, device)
    checks: list[Check] = []
    unfit: list[str] = []
    imports: dict[str, str] = {}
    try:
        _, wanted = _run(folder, "local", device, first_step.REFERENCE)
    except RanksFailed as error:
        say(str(error))
        return Outcome(blocked=f"the reference, local, failed: {trap_in(str(error)) or error.cause}")
    for text in layouts:
        try:
            logs, found = _run(folder, text, device, first_step.COMPARED)
        except RanksFailed as error:
            say(str(error))
            if trap := trap_in(str(error)):
                return Outcome(tuple(checks), imports=imports, blocked=f"{text}: {trap}")
            if DOES_NOT_FIT.search(error.cause):
                unfit.append(f"{text} does not fit the model: {error.cause}; test a config of other sizes, too")
            else:
                checks.append(Check(name_of(text), False, error.cause))
            continue
        imports |= {f"{text} {key}": file for key, file in imports_of(logs).items()}
        checks.append(check_of(text, found, wanted, layers))
        say(f"{text}: {checks[-1].found}")
    return Outcome(tuple(checks), imports=imports, blocked="; ".join(unfit))


def name_of(text: str) -> str:
    """Returns the name of a layout's check."""
    return f"{text}: the first step equals one rank's"


def check_of(text: str, found: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]], layers: int) -> Check:
    """Returns the check of a layout, from its numbers and the reference's, for each loss.

    The bars are the ones of ``bench first-step``, for models of two layers; they grow with the layers.
    """
    lines, missed = [], []
    bars = bars_of(Layout.parse(text).dtype, layers)
    for loss, ours, theirs in zip(LOSSES, found, wanted, strict=True):
        errors = compare_numbers(ours, theirs) | ours["errors"]
        missed += [f"{loss} {kind}" for kind in missed_bars(errors, bars)]
        lines.append(f"{loss}: " + ", ".join(f"{kind} {errors[kind]:.1e}" for kind in bars) + f" ({ours['worst']})")
    bounds = ", ".join(f"{kind} {bar:.0e}" for kind, bar in bars.items())
    above = f"above its bar: {', '.join(missed)}; " if missed else ""
    return Check(name_of(text), not missed, f"{above}{'; '.join(lines)}; bars: {bounds}")


def _run(folder: Path, text: str, device: str, role: str) -> tuple[Path, list[dict[str, Any]]]:
    logs = folder / "logs" / re.sub(r"\W+", "_", text)
    logs.mkdir(parents=True)
    return logs, first_step.run_layout(folder, first_step.OWN, text, LOSSES, device, role, logs=logs)


def imports_of(logs: Path) -> dict[str, str]:
    """Returns the file of each module that the ranks imported, from their logs."""
    found: dict[str, str] = {}
    for log in sorted(logs.glob("rank_*.log")):
        lines = re.findall(r"^(megatron\.(?:core|bridge)) (/.*)$", log.read_text(errors="replace"), re.MULTILINE)
        found |= {f"{log.stem} {module}": file for module, file in lines}
    return found
