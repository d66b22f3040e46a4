"""A model and its adapters to publish apart: the model once, and the adapters whenever they change."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from verl_fn.backends.protocol import WeightSource


@attrs.frozen(eq=False)
class Apart:
    """A model and its adapters, not merged.

    Attributes:
        whole: the model without adapters, followed by the adapters.
        adapters: only the adapters, for an engine that has the model.
        identify: returns a string that differs where the model without adapters differs.
    """

    whole: WeightSource
    adapters: WeightSource
    identify: Callable[[], str]


def apart_of(source: WeightSource) -> Apart | None:
    """Returns the unmerged form of a source; None where it has no adapters."""
    unmerged: Apart | None = getattr(source, "apart", None)
    return unmerged
