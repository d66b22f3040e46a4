"""The law Precision, a part of ``check_loss`` and ``check_advantage``: everything is computed in float32 at least."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from verl_fn.state import tree

from .violation import require

LOW = (torch.bfloat16, torch.float16)


class _LowPrecision(TorchDispatchMode):
    """Collects the names of operations with a result in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[str, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tree.leaves(result):
            if isinstance(t, Tensor) and t.dtype in LOW:
                self.operations[str(func)] = t.dtype
        return result


def require_full_precision(what: str, fn: Callable[[], object]) -> None:
    """Requires that no operation in a call has a result in bfloat16 or float16.

    Args:
        what: the subject of the error message, such as ``the loss``.
        fn: makes the call.

    Raises:
        LawViolation: an operation has.

    Example:
        >>> require_full_precision("the sum", lambda: torch.ones(2).bfloat16().sum())
        Traceback (most recent call last):
        verl_fn.testing.violation.LawViolation: Precision: the sum computes in torch.bfloat16 (aten._to_copy... ...
    """
    with _LowPrecision() as low:
        fn()
    for operation, dtype in low.operations.items():
        require(
            False,
            "Precision",
            f"{what} computes in {dtype} ({operation})",
            "a cast to the compute dtype of the model; losses and estimators compute in float32 or float64",
        )
