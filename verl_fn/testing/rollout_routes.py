"""The experts of sampled tokens, if an engine promises them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_fn.state import Sample

from .rollout_case import Case
from .violation import require

# Two computations of the same token may pick different experts where rounding decides.
ROUNDED = 0.1


def check_routes(case: Case, samples: Sequence[Sample]) -> None:
    """Checks the experts of the tokens of a call's samples."""
    promised = case.engine.capabilities.routed_experts
    for sample in samples:
        routed = sample.routed_experts
        require(
            (routed is not None) == promised,
            "Capabilities",
            f"routed_experts are {'' if promised else 'not '}promised, and a sample has {_shape(routed)}",
            "a capability that was not set, or an engine that was made without the option",
        )
        if routed is not None:
            _whole(sample, routed)
    if promised:
        _causal(samples)


def _whole(sample: Sample, routed: Tensor) -> None:
    """Every token has as many different experts in every layer."""
    length = len(sample.prompt) + len(sample.tokens)
    require(
        routed.ndim == 3 and len(routed) == length and not routed.dtype.is_floating_point,
        "Capabilities",
        f"routed_experts of a row of {length} tokens is {_shape(routed)}",
        "experts of only the response, or none for the last token, whose experts repeat the ones before",
    )
    ordered = routed.long().sort(-1).values
    different = bool((ordered.diff(dim=-1) > 0).all())
    require(different, "Capabilities", "a token goes to one expert twice", "zeros for layers without experts")
    require(
        torch.equal(routed[-1], routed[-2]),
        "Capabilities",
        "the last token has other experts than the one before, although no engine computes it",
        "experts that are shifted by a token, or memory that was never written",
    )


def _causal(samples: Sequence[Sample]) -> None:
    """Tokens with the same tokens before them have the same experts."""
    first: dict[int, Sample] = {}
    compared, other = 0, 0
    for sample in samples:
        before = first.setdefault(sample.request, sample)
        rows = [torch.cat([s.prompt, s.tokens]) for s in (before, sample)]
        size = min(len(row) for row in rows) - 1
        same = int((rows[0][:size] == rows[1][:size]).long().cumprod(0).sum())
        assert before.routed_experts is not None and sample.routed_experts is not None
        differs = (before.routed_experts[:same] != sample.routed_experts[:same]).flatten(1).any(1)
        compared, other = compared + same, other + int(differs.sum())
    require(
        other <= ROUNDED * compared,
        "Capabilities",
        f"{other} of {compared} tokens have other experts in another sample that begins with the same tokens",
        "experts that are shifted by a token, or experts of another row",
    )


def _shape(routed: Tensor | None) -> str:
    return "none" if routed is None else f"{routed.dtype}{list(routed.shape)}"
