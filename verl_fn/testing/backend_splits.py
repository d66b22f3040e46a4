"""Laws of splits, a part of ``check_backend``: results don't depend on how a batch is split."""

from __future__ import annotations

import operator
import warnings

import attrs
import torch

from verl_fn.backends.protocol import Handle
from verl_fn.state import PER_ROW, Batch, Metrics, TokenOutputs, TrainState
from verl_fn.steps import Loss, Term, aggregate_rows, total_loss
from verl_fn.steps import loss as as_loss

from .backend_case import BackendCase, merged, require_agreement
from .builders import some_splits
from .violation import require_close


def check_splits(case: BackendCase, state: Handle[TrainState]) -> None:
    """Checks that one call for a batch agrees with the sum of calls for its parts.

    Raises:
        LawViolation: Split invariance is broken.
    """
    rows_per_call: list[int] = []
    loss = case.loss

    def counted(term: Term) -> Term:
        def fn(outputs: TokenOutputs, batch: Batch) -> tuple[torch.Tensor, Metrics]:
            rows_per_call.append(len(batch))
            return term.fn(outputs, batch)

        return attrs.evolve(term, fn=fn)

    first, *others = loss.terms
    at_once, reported = case.gradients(state, loss=Loss((counted(first), *others)))
    if rows_per_call == [len(case.batch)]:
        warnings.warn("the backend took the batch as one micro-batch; give it a smaller token budget", stacklevel=4)
    for name, split in some_splits(case.batch, case.key, loss.together).items():
        results = [case.gradients(state, part) for part in split]
        added = results[0][0]
        for grads, _ in results[1:]:
            added = case.made(operator.add, added, grads)
        cause = (
            "a denominator for each micro-batch, a gradient that is overwritten or dropped, or rows that see each "
            "other; denominators belong in loss_weight"
        )
        of_parts = (case.read(added), merged(results))
        require_agreement(
            case, "Split invariance", f"one call against {name}:", (case.read(at_once), reported), of_parts, cause
        )
        outputs = [case.outputs(state.params, part) for part in split]
        joined = split.join_outputs(outputs).by_name
        require_close(
            "Split invariance",
            f"one call of forward against {name}:",
            case.outputs(state.params).by_name,
            joined,
            "results that are not put back into the order of the rows",
            tolerance=case.tolerance,
        )


def check_groups(case: BackendCase, state: Handle[TrainState]) -> None:
    """Checks that rows which a loss keeps together are never split, and that ``row_weight`` weights row losses.

    Raises:
        LawViolation: Split invariance is broken.
    """
    paired = _squared_sums(min(case.loss.needs))
    cause = (
        "rows of one group in different micro-batches or on different ranks (split_by_tokens and deal take "
        "together=loss.together), or row_weight that is ignored"
    )
    for shift in range(3):
        batch = _with_pairs(case.batch, shift)
        outputs = case.outputs(state.params, batch, paired.needs)
        grads, reported = case.gradients(state, batch, paired)
        require_close(
            "Split invariance",
            "a loss of pairs of rows, computed from forward's outputs, against forward_backward's,",
            float(total_loss(paired, outputs, batch)[0]),
            reported["loss"].value,
            cause,
            tolerance=case.tolerance,
            floor=1.0,
        )
    smallest = some_splits(batch, case.key, "together")["the smallest micro-batches"]
    results = [case.gradients(state, part, paired) for part in smallest]
    added = results[0][0]
    for part, _ in results[1:]:
        added = case.made(operator.add, added, part)
    require_agreement(
        case,
        "Split invariance",
        "a loss of pairs, one call against one call a pair:",
        (case.read(grads), reported),
        (case.read(added), merged(results)),
        cause,
    )


def _squared_sums(name: str) -> Loss:
    """Makes a row loss of the output ``name`` whose gradient for a row depends on all rows of its group."""

    @as_loss(needs=[name], level="row", together="together")
    def squared_sums(outputs: TokenOutputs, batch: Batch) -> tuple[torch.Tensor, Metrics]:
        values = outputs.by_name[name]
        rows = values if name in PER_ROW else batch.sum_rows(values)
        _, ids = batch["together"].unique(return_inverse=True)
        sums = rows.new_zeros(len(batch)).index_add(0, ids, rows)
        return sums[ids].square(), {}

    return squared_sums


def _with_pairs(batch: Batch, shift: int) -> Batch:
    """Pairs rows in the field ``together``, such that every pair fits a budget that fits the longest row.

    Raises:
        ValueError: no two rows are together as short as the longest row.
    """
    lengths = batch.lengths.tolist()
    ids, alone = list(range(len(batch))), sorted(range(len(batch)), key=lambda row: (lengths[row], row))
    alone = alone[shift:] + alone[:shift]
    while alone:
        first = alone.pop(0)
        fits = [row for row in alone if lengths[first] + lengths[row] <= max(lengths)]
        if fits:
            ids[fits[-1]] = ids[first]
            alone.remove(fits[-1])
    if len(set(ids)) == len(batch):
        raise ValueError("no two rows of the batch are together as short as its longest row; add two short rows")
    # The ids are not valid indices, and the weights of rows differ.
    paired = aggregate_rows(batch.with_rows(together=[1000 - 7 * i for i in ids]), "group-mean", group="together")
    # Weights of both signs show a backend that takes them for magnitudes.
    sign = 1.0 - 2.0 * (paired["together"] % 2)
    return paired.with_rows(row_weight=sign * paired["row_weight"])
