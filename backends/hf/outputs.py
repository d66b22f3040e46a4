"""What a model says of packed rows: a micro-batch on the device, and the outputs that a loss reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import Tensor

from verl_fn.backends.hf.attention import Packing
from verl_fn.backends.hf.logprobs import logprobs_and_entropy
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.backends.hf.ulysses import Sequence
from verl_fn.state import PER_ROW, Batch, TokenOutputs

__all__ = ["PER_ROW", "Staged", "check_head", "check_needs", "check_targets", "token_outputs"]

# Outputs that each head gives; those in PER_ROW are one a row.
SUPPORTED_NEEDS = {
    "lm": frozenset({"logprobs", "entropy"}),
    "value": frozenset({"values", "row_values"}),
}


@attrs.frozen(eq=False)
class Staged:
    """A micro-batch on the device, with what the forward pass wants to know beforehand.

    Attributes:
        batch: the micro-batch.
        packing: its layout.
        targets: the tokens to speak of: those with ``response_mask``.
        temperature: for each of them, or None where all are 1.
    """

    batch: Batch
    packing: Packing
    targets: Tensor
    temperature: Tensor | None

    @classmethod
    def of(cls, batch: Batch, device: torch.device, group: Any = None) -> Staged:
        """Stage a batch that lies on the CPU; ``group`` is of the ranks that share its sequence, if any do.

        Raises:
            ValueError: as ``check_targets``.
        """
        targets = check_targets(batch)
        temperature = None
        if "temperature" in batch and bool((batch["temperature"] != 1.0).any()):
            temperature = batch.spread(batch["temperature"].float())[targets].to(device)
        sequence = None if group is None else Sequence(group, batch.num_tokens)
        packing = Packing.of(batch, device, sequence)
        return cls(batch.to(device), packing, targets.to(device, non_blocking=True), temperature)

    def plain(self) -> Staged:
        """The same, to be computed with torch's own functions alone, which any ``torch.func`` transformation takes."""
        return attrs.evolve(self, packing=attrs.evolve(self.packing, plain=True))


def check_targets(batch: Batch) -> Tensor:
    """The tokens with ``response_mask``.

    Raises:
        ValueError: one of them is a row's first token, which nothing precedes, or ``temperature`` is not one positive
            number a row.
    """
    if "temperature" in batch:
        if "temperature" in batch.per_token or batch["temperature"].ndim != 1:
            raise ValueError("temperature must be one number a row, a per-row field")
        odd = ~(batch["temperature"].isfinite() & (batch["temperature"] > 0))
        if bool(odd.any()):
            row = int(odd.nonzero()[0])
            raise ValueError(
                f"row {row}: temperature is {batch['temperature'][row]:g}; it must be positive and finite"
            )
    targets = batch["response_mask"].nonzero()[:, 0]
    first = batch.positions[targets] == 0
    if bool(first.any()):
        row = int(batch.row_ids[targets[first][0]])
        raise ValueError(f"row {row}: response_mask is set on its first token, which has no log-probability")
    return targets


def token_outputs(skeleton: Skeleton, staged: Staged, needs: Iterable[str]) -> TokenOutputs:
    """Runs the model over a micro-batch and returns what ``needs`` asks of its targets and rows."""
    batch, sequence = staged.batch, staged.packing.sequence
    tokens, positions = batch.tokens, batch.positions
    if sequence is not None:
        tokens, positions = sequence.part(tokens), sequence.part(positions)
    hidden = skeleton.hidden_states(tokens, positions, staged.packing)
    wanted = set(needs)
    # What speaks of token t is read where the model has seen the tokens before t.
    at_targets = _Reading.of(staged.targets, staged.targets - 1, batch.num_tokens, sequence)
    layer = skeleton.output_layer
    if skeleton.head == "lm":
        logprobs, entropy = logprobs_and_entropy(
            at_targets.read(hidden), layer.weight, layer.bias, batch.tokens[at_targets.places],
            at_targets.chosen(staged.temperature), entropy="entropy" in wanted, plain=staged.packing.plain,
        )  # fmt: skip
        outputs = {"logprobs": at_targets.spread(logprobs)}
        if entropy is not None:
            outputs["entropy"] = at_targets.spread(entropy)
        return TokenOutputs({name: t for name, t in outputs.items() if name in wanted})
    outputs = {}
    if "values" in wanted:
        outputs["values"] = at_targets.spread(layer(at_targets.read(hidden)).float()[:, 0])
    if "row_values" in wanted:
        rows = torch.arange(len(batch), device=batch.tokens.device)
        after_last = _Reading.of(rows, batch.last, len(batch), sequence)
        outputs["row_values"] = after_last.spread(layer(after_last.read(hidden)).float()[:, 0])
    return TokenOutputs(outputs)


@attrs.frozen(eq=False)
class _Reading:
    """Which hidden states are read, and where in a whole vector the results belong.

    Attributes:
        places: for each result, its index in the whole.
        seen: for each result, the index of the hidden state in this rank's part of the sequence.
        mine: which of all results this rank computes, or None for all.
        size: of the whole.
    """

    places: Tensor
    seen: Tensor
    mine: Tensor | None
    size: int
    sequence: Sequence | None

    @classmethod
    def of(cls, places: Tensor, seen: Tensor, size: int, sequence: Sequence | None) -> _Reading:
        if sequence is None:
            return cls(places, seen, None, size, None)
        mine = (seen >= sequence.start) & (seen < sequence.start + sequence.each)
        return cls(places[mine], seen[mine] - sequence.start, mine, size, sequence)

    def read(self, hidden: Tensor) -> Tensor:
        return hidden.index_select(0, self.seen)

    def chosen(self, values: Tensor | None) -> Tensor | None:
        return values if values is None or self.mine is None else values[self.mine]

    def spread(self, values: Tensor) -> Tensor:
        whole = values.new_zeros(self.size).index_copy(0, self.places, values)
        return whole if self.sequence is None else self.sequence.whole(whole)


def check_head(head: str) -> str:
    """The head, if it is one.

    Raises:
        ValueError: it is not.

    >>> check_head("value")
    'value'
    """
    if head not in SUPPORTED_NEEDS:
        raise ValueError(f"head is {head!r}; it must be {' or '.join(SUPPORTED_NEEDS)}")
    return head


def check_needs(head: str, needs: Iterable[str]) -> frozenset[str]:
    """The needs as a set.

    Raises:
        ValueError: the head cannot provide one of them.

    >>> sorted(check_needs("lm", ["logprobs"]))
    ['logprobs']
    """
    wanted = frozenset(needs)
    if not wanted <= SUPPORTED_NEEDS[head]:
        raise ValueError(
            f"a {head} model gives {sorted(SUPPORTED_NEEDS[head])}, not {sorted(wanted - SUPPORTED_NEEDS[head])}"
        )
    return wanted
