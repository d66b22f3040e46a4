"""Micro-batches on a device, and the outputs of a model for them that losses read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from verl_fn.backends.hf.attention import Packing
from verl_fn.backends.hf.logprobs import (
    candidate_logprobs,
    default_chunk,
    entropy_of,
    logprobs_and_entropy,
    slices,
    sum_pi_squared,
    top_logprobs,
)
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.backends.hf.ulysses import Sequence
from verl_fn.backends.hf.vision import Seen
from verl_fn.state import Batch, TokenOutputs, top_count

# The outputs of each head; ``row_values`` have one number for each row.
SUPPORTED_NEEDS = {
    "lm": frozenset({"logprobs", "entropy", "candidate_logprobs"}),
    "value": frozenset({"values", "row_values"}),
}
# Outputs that only ``forward`` gives, since they have no gradient.
CONSTANT_NEEDS = {"lm": frozenset({"sum_pi_squared"}), "value": frozenset[str]()}


@attrs.frozen(eq=False)
class Staged:
    """A micro-batch on the device, with what the forward pass needs.

    Attributes:
        targets: the indices of the tokens with ``response_mask``.
        temperature: one for each target, or None where all are 1.
    """

    batch: Batch
    packing: Packing
    targets: Tensor
    temperature: Tensor | None

    @classmethod
    def of(cls, batch: Batch, device: torch.device, group: Any = None) -> Staged:
        """Copies a batch from the CPU to a device.

        Raises:
            ValueError: as ``check_targets``, or ``candidates`` are not token ids.
        """
        targets = check_targets(batch)
        _check_candidates(batch)
        heat = temperatures_of(batch)
        temperature = None if heat is None else heat[targets].to(device)
        sequence = None if group is None else Sequence(group, batch.num_tokens)
        packing = Packing.of(batch, device, sequence)
        return cls(batch.to(device), packing, targets.to(device, non_blocking=True), temperature)

    def plain(self) -> Staged:
        """Returns the same micro-batch to compute with torch's own functions, for ``torch.func`` transformations."""
        return attrs.evolve(self, packing=attrs.evolve(self.packing, plain=True))


def check_targets(batch: Batch) -> Tensor:
    """Returns the indices of the tokens with ``response_mask``.

    Raises:
        ValueError: one of them is a row's first token (nothing precedes it), or ``temperature`` is not a positive
            number for each row.
    """
    if "temperature" in batch:
        if "temperature" in batch.per_token or batch["temperature"].ndim != 1:
            raise ValueError("temperature must be a per-row field with one number for each row")
        invalid = ~(batch["temperature"].isfinite() & (batch["temperature"] > 0))
        if bool(invalid.any()):
            row = int(invalid.nonzero()[0])
            raise ValueError(
                f"row {row}: temperature is {batch['temperature'][row]:g}; it must be positive and finite"
            )
    targets = batch["response_mask"].nonzero()[:, 0]
    first = batch.positions[targets] == 0
    if bool(first.any()):
        row = int(batch.row_ids[targets[first][0]])
        raise ValueError(f"row {row}: response_mask is set on its first token; that has no log-probability")
    return targets


def temperatures_of(batch: Batch) -> Tensor | None:
    """Returns the temperature of each token, or None if all are 1."""
    if "temperature" not in batch or not bool((batch["temperature"] != 1.0).any()):
        return None
    return batch.spread(batch["temperature"].float())


def _check_candidates(batch: Batch) -> None:
    if "candidates" not in batch:
        return
    ids = batch["candidates"]
    if "candidates" not in batch.per_token or ids.ndim != 2 or ids.dtype != torch.int64:
        raise ValueError(
            f"candidates is {ids.dtype}{list(ids.shape)}; it must be a per-token field with K ids for each token, "
            f"torch.int64[{batch.num_tokens}, K]"
        )
    if bool((ids < 0).any()):
        token = int((ids < 0).any(1).nonzero()[0])
        raise ValueError(f"candidates of token {token} are {ids[token].tolist()}; token ids must be at least 0")


def token_outputs(skeleton: Skeleton, staged: Staged, needs: Iterable[str]) -> TokenOutputs:
    """Runs the model on a micro-batch and returns the outputs that ``needs`` names, for its targets or rows."""
    batch, sequence = staged.batch, staged.packing.sequence
    tokens, positions = batch.tokens, batch.positions
    if sequence is not None:
        tokens, positions = sequence.part(tokens), sequence.part(positions)
    # Some models keep hidden states in fp32, whatever the dtype of their weights.
    seen = Seen.of(skeleton.family, skeleton.config, batch)
    hidden = skeleton.hidden_states(tokens, positions, staged.packing, seen).to(skeleton.output_layer.weight.dtype)
    wanted = set(needs)
    # The outputs for token t are read at token t - 1, where the model has seen exactly the tokens before t.
    at_targets = _Reading.of(staged.targets, staged.targets - 1, batch.num_tokens, sequence)
    if skeleton.head == "lm":
        outputs = _of_vocabulary(at_targets, at_targets.read(hidden), skeleton, staged, wanted)
        return TokenOutputs({name: at_targets.spread(t) for name, t in outputs.items() if name in wanted})
    outputs, layer = {}, skeleton.output_layer
    if "values" in wanted:
        outputs["values"] = at_targets.spread(layer(at_targets.read(hidden)).float()[:, 0])
    if "row_values" in wanted:
        rows = torch.arange(len(batch), device=batch.tokens.device)
        after_last = _Reading.of(rows, batch.last, len(batch), sequence)
        outputs["row_values"] = after_last.spread(layer(after_last.read(hidden)).float()[:, 0])
    return TokenOutputs(outputs)


def _of_vocabulary(
    at_targets: _Reading, hidden: Tensor, skeleton: Skeleton, staged: Staged, wanted: set[str]
) -> dict[str, Tensor]:
    """Returns outputs of the distribution over the vocabulary, for hidden states of these places."""
    plain, temperature = staged.packing.plain, at_targets.chosen(staged.temperature)
    tokens = staged.batch.tokens[at_targets.places]
    candidates = staged.batch["candidates"][at_targets.places] if "candidate_logprobs" in wanted else None
    if skeleton.fit.own_head:
        return _of_own_head(skeleton, hidden, tokens, temperature, candidates, wanted, plain)
    layer = (skeleton.output_layer.weight, skeleton.output_layer.bias)
    temperature, softcap = skeleton.fit.heat(temperature, hidden)
    logprobs, entropy = logprobs_and_entropy(
        hidden, *layer, tokens, temperature, entropy="entropy" in wanted, plain=plain, softcap=softcap,
        kernels=skeleton.head_kernels,
    )  # fmt: skip
    outputs = {"logprobs": logprobs}
    if entropy is not None:
        outputs["entropy"] = entropy
    if "sum_pi_squared" in wanted:
        outputs["sum_pi_squared"] = sum_pi_squared(hidden, *layer, temperature, softcap=softcap)
    if candidates is not None:
        outputs["candidate_logprobs"] = candidate_logprobs(
            hidden, *layer, tokens, logprobs, candidates, temperature, softcap=softcap
        )
    for count in _tops(wanted):
        values, ids = top_logprobs(hidden, *layer, count, temperature, softcap=softcap)
        outputs |= {f"top_logprobs_{count}": values, f"top_ids_{count}": ids}
    return outputs


def _of_own_head(
    skeleton: Skeleton,
    hidden: Tensor,
    tokens: Tensor,
    temperature: Tensor | None,
    candidates: Tensor | None,
    wanted: set[str],
    plain: bool,
) -> dict[str, Tensor]:
    """Computes logits by the model's own code, a chunk of tokens at a time, and again in the backward pass."""

    def compute(hidden: Tensor, part: slice) -> dict[str, Tensor]:
        logits = skeleton.own_logits(hidden).float()
        log_probs = (logits if temperature is None else logits / temperature[part, None]).log_softmax(-1)
        outputs = {"logprobs": log_probs.gather(1, tokens[part, None])[:, 0]}
        if "entropy" in wanted:
            outputs["entropy"] = entropy_of(log_probs)
        if "sum_pi_squared" in wanted:
            outputs["sum_pi_squared"] = log_probs.detach().exp().square().sum(-1)
        if candidates is not None:
            outside = candidates[part] >= log_probs.shape[-1]
            several = log_probs.gather(1, candidates[part].masked_fill(outside, 0))
            outputs["candidate_logprobs"] = several.masked_fill(outside, -torch.inf)
        for count in _tops(wanted):
            top = log_probs.detach().topk(count, -1)
            outputs |= {f"top_logprobs_{count}": top.values, f"top_ids_{count}": top.indices}
        return outputs

    parts = []
    for part in slices(len(hidden), default_chunk(hidden, skeleton.output_layer.weight)) or [slice(0, 0)]:
        inputs = (hidden[part], part)
        parts.append(compute(*inputs) if plain else checkpoint(compute, *inputs, use_reentrant=False))
    return {name: torch.cat([of_part[name] for of_part in parts]) for name in parts[0]}


def _tops(wanted: set[str]) -> set[int]:
    """Returns how many of the likeliest tokens are asked for."""
    return {count for name in wanted if (count := top_count(name)) is not None}


@attrs.frozen(eq=False)
class _Reading:
    """Which hidden states are read, and where in a whole vector the results belong.

    Attributes:
        places: the index of each result in the whole vector.
        seen: the index of each result's hidden state in this rank's part of the sequence.
        own: a mask of the results that this rank computes, or None for all.
        size: the length of the whole vector.
        sequence: the ranks that share the sequence, if any do.
    """

    places: Tensor
    seen: Tensor
    own: Tensor | None
    size: int
    sequence: Sequence | None

    @classmethod
    def of(cls, places: Tensor, seen: Tensor, size: int, sequence: Sequence | None) -> _Reading:
        if sequence is None:
            return cls(places, seen, None, size, None)
        own = (seen >= sequence.start) & (seen < sequence.start + sequence.each)
        return cls(places[own], seen[own] - sequence.start, own, size, sequence)

    def read(self, hidden: Tensor) -> Tensor:
        return hidden.index_select(0, self.seen)

    def chosen(self, values: Tensor | None) -> Tensor | None:
        return values if values is None or self.own is None else values[self.own]

    def spread(self, values: Tensor) -> Tensor:
        whole = values.new_zeros(self.size, *values.shape[1:]).index_copy(0, self.places, values)
        return whole if self.sequence is None else self.sequence.whole(whole)


def check_head(head: str) -> str:
    """Returns the name of a head after checking it.

    Raises:
        ValueError: there is no such head.

    Example:
        >>> check_head("value")
        'value'
    """
    if head not in SUPPORTED_NEEDS:
        raise ValueError(f"head is {head!r}; it must be {' or '.join(SUPPORTED_NEEDS)}")
    return head


def check_needs(
    head: str,
    needs: Iterable[str],
    *,
    forward: bool = False,
    recorded: Iterable[str] = (),
    candidates: bool = True,
) -> frozenset[str]:
    """Returns the needs as a set after checking them.

    Args:
        forward: whether outputs without a gradient may be among them.
        recorded: outputs without a gradient that the backend gives with any head.
        candidates: whether the backend gives outputs of several tokens at each place.

    Raises:
        ValueError: the head or the backend cannot compute one of them, or a loss needs one that has no gradient.

    Example:
        >>> sorted(check_needs("lm", ["logprobs"]))
        ['logprobs']
        >>> check_needs("lm", ["sum_pi_squared"])
        Traceback (most recent call last):
        ValueError: a loss cannot need ['sum_pi_squared']: it has no gradient; ...
    """
    wanted = frozenset(needs)
    tops = frozenset(name for name in wanted if head == "lm" and top_count(name) is not None)
    if (several := sorted(tops | (wanted & {"candidate_logprobs"}))) and not candidates:
        raise ValueError(f"this backend gives no {several}; set actor.strategy to local or fsdp")
    constants = CONSTANT_NEEDS[head].union(recorded)
    if constant := sorted(wanted & (constants | tops)) if not forward else []:
        raise ValueError(
            f"a loss cannot need {constant}: it has no gradient; write what forward gives into the batch"
        )
    known = SUPPORTED_NEEDS[head] | constants if forward else SUPPORTED_NEEDS[head]
    if not wanted - tops <= known:
        raise ValueError(f"a {head} model gives {sorted(known)}, not {sorted(wanted - tops - known)}")
    return wanted
