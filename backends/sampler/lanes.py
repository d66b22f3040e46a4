"""What a GPU knows about the rows that it decodes."""

from __future__ import annotations

from functools import partial

import attrs
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor


@attrs.frozen(eq=False)
class Lanes:
    """What a GPU knows about the rows that it decodes, by slot; the host reads it between steps only.

    Attributes:
        active: the slots that a step decodes; -1 stands for none.
        tokens: the last token of each slot's row, which is not in the cache yet.
        places: its place.
        ends: the place of the row's last draw.
        alive: whether the row goes on.
        uniforms: the number in [0, 1) that draws the token after each place.
        drawn: the token drawn for each place; likewise its log-prob with and without the cut, whether it is a near
            tie, and the version of the weights.
        version: of the weights of the next step.
        stops: whether a token ends a row; the token after the last one stands for a draw from NaN.
    """

    active: Int[Tensor, " lanes"]
    tokens: Int[Tensor, " slots"]
    places: Int[Tensor, " slots"]
    ends: Int[Tensor, " slots"]
    alive: Bool[Tensor, " slots"]
    uniforms: Float64[Tensor, "slots length"]
    drawn: Int[Tensor, "slots length"]
    log_probs: Float[Tensor, "slots length"]
    full_log_probs: Float[Tensor, "slots length"]
    near: Bool[Tensor, "slots length"]
    versions: Int[Tensor, "slots length"]
    version: Int[Tensor, ""]
    stops: Bool[Tensor, " V_and_1"]

    @classmethod
    def of(cls, slots: int, length: int, vocab: int, device: torch.device) -> Lanes:
        """Allocates them, with no row alive."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        floats, whether = (partial(zeros, slots, length, dtype=dtype) for dtype in (torch.float32, torch.bool))
        return cls(
            active=zeros(lanes_for(slots)) - 1,
            tokens=zeros(slots),
            places=zeros(slots),
            ends=zeros(slots),
            alive=zeros(slots, dtype=torch.bool),
            uniforms=zeros(slots, length, dtype=torch.float64),
            drawn=zeros(slots, length),
            log_probs=floats(),
            full_log_probs=floats(),
            near=whether(),
            versions=zeros(slots, length),
            version=zeros(),
            stops=zeros(vocab + 1, dtype=torch.bool),
        )


def lanes_for(rows: int) -> int:
    """Returns the number of lanes of the smallest graph that decodes so many rows.

    Example:
        >>> [lanes_for(rows) for rows in (1, 9, 200, 300, 1000)]
        [8, 16, 256, 384, 1024]
    """
    return max(8, 1 << (rows - 1).bit_length()) if rows <= 256 else -(-rows // 128) * 128
