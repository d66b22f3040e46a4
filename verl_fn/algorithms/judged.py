"""The parts that algorithms on judged responses share: batches of them, and metrics on held-out pairs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_fn.data.examples import pack_labelled, pack_pairs
from verl_fn.data.judged import Judged
from verl_fn.data.tasks import Problem
from verl_fn.errors import ArgumentError
from verl_fn.state import Batch
from verl_fn.steps import aggregate_rows

from .contract import Report
from .workers import Workers


def judged(problems: Sequence[Problem]) -> list[Judged]:
    """Returns problems after checking that they hold judged responses.

    Raises:
        ArgumentError: one does not.
    """
    judged_ones = [problem for problem in problems if isinstance(problem, Judged)]
    if len(judged_ones) < len(problems):
        raise ArgumentError(
            "this algorithm learns from judged responses, and a problem has none; the source of problems must give "
            "verl_fn.data.judged.Judged, as files with the columns chosen and rejected do"
        )
    return judged_ones


def pair_batch(problems: Sequence[Problem], w: Workers) -> Batch:
    """Returns the rows of pairs, weighted for the mean over pairs."""
    batch = pack_pairs(judged(problems), w.tokenizer, w.end_tokens)
    return aggregate_rows(batch, "group-mean", group="pair")


def labelled_batch(problems: Sequence[Problem], w: Workers) -> Batch:
    """Returns the rows of labelled responses, and behind them rows with responses to other prompts.

    Only the former have a weight.
    """
    batch = pack_labelled(judged(problems), w.tokenizer, w.end_tokens)
    weight = 1.0 - batch["mismatched"]
    return batch.with_rows(row_weight=weight / weight.sum())


def held_out_pairs(problems: Sequence[Problem]) -> list[Judged]:
    """Returns the held-out problems that are pairs."""
    return [p for p in problems if isinstance(p, Judged) and len(p.chosen) == len(p.rejected) == 1]


def pair_report(pairs: Sequence[Judged], scores: Float[Tensor, " B"], prefix: str, suffix: str) -> Report:
    """Returns, by data source, the share of pairs whose chosen response has the higher score, and the mean margin.

    A tie does not count, as in TRL's metrics.

    Args:
        pairs: the held-out pairs.
        scores: of the rows of ``pack_pairs``.
        prefix: the first part of the metrics' names.
        suffix: the name of the share.

    Example:
        >>> pair = Judged("a", "", data_source="mine", chosen=("b",), rejected=("c",))
        >>> pair_report([pair], torch.tensor([2.0, 0.5]), "val-core", "acc/mean@1")
        {'val-core/mine/acc/mean@1': 1.0, 'val-aux/mine/margin/mean@1': 1.5}
        >>> pair_report([pair], torch.tensor([0.5, 0.5]), "val-core", "acc/mean@1")["val-core/mine/acc/mean@1"]
        0.0
    """
    chosen, rejected = scores.reshape(-1, 2).unbind(1)
    report: Report = {}
    for source in dict.fromkeys(pair.data_source for pair in pairs):
        rows = torch.tensor([pair.data_source == source for pair in pairs])
        margin = (chosen - rejected)[rows].double()
        report[f"{prefix}/{source}/{suffix}"] = float((margin > 0).double().mean())
        report[f"val-aux/{source}/margin/mean@1"] = float(margin.mean())
    return report


def label_report(problems: Sequence[Judged], gained: Bool[Tensor, " B"]) -> Report:
    """Returns, by data source, the share of labelled responses that the policy prefers if and only if they are good.

    Args:
        problems: the held-out problems.
        gained: whether each response has gained more than the reference point.

    Example:
        >>> good, bad = Judged("a", "", 0, "mine", chosen=("b",)), Judged("c", "", 1, "mine", rejected=("d",))
        >>> label_report([good, bad], torch.tensor([True, True]))
        {'val-aux/mine/label_acc/mean@1': 0.5}
    """
    rows = [(problem.data_source, good) for problem in problems for _, good in problem.responses]
    right = gained == torch.tensor([good for _, good in rows])
    report: Report = {}
    for source in dict.fromkeys(name for name, _ in rows):
        own = torch.tensor([name == source for name, _ in rows])
        report[f"val-aux/{source}/label_acc/mean@1"] = float(right[own].double().mean())
    return report
