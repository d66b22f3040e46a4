"""The options of algorithms with a loss per token: how these losses are averaged."""

from __future__ import annotations

import attrs
from attrs.validators import gt, le

from .fields import opt
from .names import one_of_or_own

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


@attrs.frozen(kw_only=True)
class Aggregation:
    """Options that all built-in algorithms share: how per-token losses are averaged."""

    loss_agg_mode: str = opt(
        "token-mean",
        f"how per-token losses are averaged: {', '.join(AGGREGATIONS)}, or a function of yours as FILE.py:NAME, from "
        "an update batch to the weight of each token",
        one_of_or_own(*AGGREGATIONS),
    )
    loss_scale_factor: float | None = opt(
        None, "divisor of seq-mean-token-sum-norm, by default data.max_response_length", gt(0), le(1e12)
    )
