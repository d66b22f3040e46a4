"""Laws of outputs, a part of ``check_backend``: which tokens an output depends on, and what temperature does."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from verl_fn.backends.protocol import Handle
from verl_fn.state import PER_ROW, Batch, TrainState

from .backend_case import BackendCase
from .violation import require, require_close

LAW = "Outputs"


def check_outputs(case: BackendCase, state: Handle[TrainState]) -> None:
    """Checks that the outputs of a token depend on the tokens before it, and log-probs on the token as well.

    Raises:
        LawViolation: Outputs is broken.
    """
    names = case.loss.needs - PER_ROW
    if not names:
        return
    places, changed = _with_other_tokens(case.batch)
    before = case.outputs(state.params, needs=names).by_name
    after = case.outputs(state.params, changed, names).by_name
    for name in sorted(names):
        _depends_on_the_past(case, name, places, before[name], after[name])
    if "logprobs" in names:
        _temperature(case, state, places, changed)
    if "entropy" in names:
        _entropy(case, state)


def _with_other_tokens(batch: Batch) -> tuple[Tensor, Batch]:
    """Replaces a token in the middle of each response.

    Returns:
        The indices of the replaced tokens, and the batch with the new tokens.
    """
    middle = []
    for row in range(len(batch)):
        (targets,) = torch.where((batch["response_mask"] != 0) & (batch.row_ids == row))
        middle.extend(targets[len(targets) // 2 : len(targets) // 2 + 1].tolist())
    places = torch.tensor(middle)
    # Only ids that the batch has are known to be in the vocabulary.
    vocabulary = batch.tokens.unique()
    tokens = batch.tokens.clone()
    tokens[places] = vocabulary[(torch.searchsorted(vocabulary, tokens[places]) + 1) % len(vocabulary)]
    return places, attrs.evolve(batch, tokens=tokens)


def _depends_on_the_past(case: BackendCase, name: str, places: Tensor, before: Tensor, after: Tensor) -> None:
    """Checks an output before and after the tokens at ``places`` were replaced, of which each row has one at most."""
    batch, rows = case.batch, case.batch.row_ids
    changed_at = torch.full((len(batch),), batch.num_tokens).index_copy(0, rows[places], places)[rows]
    index, targets = torch.arange(batch.num_tokens), batch["response_mask"] != 0
    # The log-prob of a token depends on the token itself, and every other output only on the tokens before it.
    first_to_change = changed_at if name == "logprobs" else changed_at + 1
    past = targets & (index < first_to_change)
    require_close(
        LAW,
        f"after a token was replaced, {name} of the tokens up to it",
        before[past],
        after[past],
        "an output that is off by one token, or a model that sees later tokens",
        tolerance=case.tolerance,
        floor=1.0,
    )
    at_once = targets & (index == first_to_change)
    require(
        not bool(at_once.any()) or not torch.equal(before[at_once], after[at_once]),
        LAW,
        f"after a token was replaced, {name} stays the same at the first token that depends on it",
        "an output that is off by one token",
    )


def _temperature(case: BackendCase, state: Handle[TrainState], places: Tensor, changed: Batch) -> None:
    """Checks that logits are divided by the temperature: log p(a) - log p(b) is then proportional to its inverse."""
    rows = torch.arange(len(case.batch)) % 3
    temperature = torch.tensor([0.5, 1.0, 2.0])[rows]

    def difference(temperature: Tensor) -> Tensor:
        one, other = (
            case.outputs(state.params, batch.with_rows(temperature=temperature), frozenset({"logprobs"})).logprobs
            for batch in (case.batch, changed)
        )
        return (one - other)[places]

    plain = torch.ones(len(case.batch))
    require_close(
        LAW,
        "log p(a) - log p(b) at the rows' temperatures, times the temperature,",
        difference(plain),
        difference(temperature) * temperature[case.batch.row_ids[places]],
        "logits that are not divided by the row's temperature",
        tolerance=case.tolerance,
        floor=1.0,
    )
    missing = case.batch.without("temperature")
    require_close(
        LAW,
        "logprobs of a batch without temperatures",
        case.outputs(state.params, missing.with_rows(temperature=plain), frozenset({"logprobs"})).logprobs,
        case.outputs(state.params, missing, frozenset({"logprobs"})).logprobs,
        "another default temperature than 1",
        tolerance=case.tolerance,
        floor=1.0,
    )


def _entropy(case: BackendCase, state: Handle[TrainState]) -> None:
    cold, hot = (
        case.outputs(
            state.params,
            case.batch.with_rows(temperature=torch.full((len(case.batch),), temperature)),
            frozenset({"entropy"}),
        ).entropy.sum()
        for temperature in (0.5, 2.0)
    )
    require(
        bool(cold < hot),
        LAW,
        f"entropy sums to {float(cold):.4g} at temperature 0.5 and to {float(hot):.4g} at temperature 2",
        "an entropy of logits that are not divided by the row's temperature",
    )
