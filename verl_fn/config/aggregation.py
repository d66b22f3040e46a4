"""The options of algorithms with a loss per token: how these losses are averaged."""

from __future__ import annotations

import attrs
from attrs.validators import gt, le

from .fields import one_of, opt

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


@attrs.frozen(kw_only=True)
class Aggregation:
    """Options that all built-in algorithms share: how per-token losses are averaged."""

    loss_agg_mode: str = opt("token-mean", "how per-token losses are averaged", one_of(*AGGREGATIONS))
    loss_scale_factor: float | None = opt(
        None, "divisor of seq-mean-token-sum-norm, by default data.max_response_length", gt(0), le(1e12)
    )
