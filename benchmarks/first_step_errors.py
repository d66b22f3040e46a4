"""How far the first step of a layout is from a reference's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

LAST_BIT = 2**-23  # of a parameter in fp32


def compare_tensors(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], before: Mapping[str, Tensor], device: str
) -> dict[str, float]:
    """The worst relative error of any parameter's gradient and updates, and the worst cosine of its gradient.

    Args:
        tensors: ``gradient.NAME``, ``update.NAME`` and ``from_reference.NAME`` of the layout.
        wanted: these of the reference.
        before: the parameters that the updates begin with.
        device: computes the errors.

    Example:
        >>> import torch
        >>> kinds, w = ("gradient", "update", "from_reference"), torch.ones(4)
        >>> wanted = {f"{kind}.w": w for kind in kinds}
        >>> errors = compare_tensors({**wanted, "update.w": w * (1 + 2**-23)}, wanted, {"w": w}, "cpu")
        >>> errors["gradient"], errors["cosine"], errors["update"], errors["update_to_the_last_bit"] > 0
        (0.0, 1.0, 0.0, True)
    """
    every: dict[str, list[float]] = {"gradient": [], "cosine": []}
    for _, ours, theirs, size in _pairs("gradient", tensors, wanted, device):
        every["gradient"].append(float((ours - theirs).norm()) / size)
        if float(theirs.norm()) == size:
            every["cosine"].append(float((ours * theirs).sum() / ours.norm()) / size)
    for kind, error in (("update", "update"), ("from_reference", "update_from_reference")):
        every |= {error: [], f"{error}_to_the_last_bit": []}
        for name, ours, theirs, size in _pairs(kind, tensors, wanted, device):
            gap = ours - theirs
            every[f"{error}_to_the_last_bit"].append(float(gap.norm()) / size)
            # How large the parameter is, before or after its update.
            large = before[name].to(device).double().abs() + theirs.abs()
            every[error].append(float(gap.masked_fill(gap.abs() <= LAST_BIT * large, 0.0).norm()) / size)
    return {name: _worst(values, min if name == "cosine" else max) for name, values in every.items()}


def worst_gradient(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], device: str) -> str:
    """Returns the name of the parameter whose gradient has the largest relative error; NaN is the largest.

    Args:
        tensors: ``gradient.NAME`` of the layout.
        wanted: these of the reference.
        device: computes the errors.
    """
    errors = {
        name: float((ours - theirs).norm()) / size
        for name, ours, theirs, size in _pairs("gradient", tensors, wanted, device)
    }
    return max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))


def _worst(values: Sequence[float], of: Callable[[Sequence[float]], float]) -> float:
    """Returns the worst value; min and max pass over NaN."""
    return math.nan if any(map(math.isnan, values)) else of(values)


def _pairs(
    kind: str, tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], device: str
) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """Yields each parameter's name, its tensors of a kind in float64, and the size that errors are relative to."""
    names = [name.partition(".")[2] for name in wanted if name.startswith(f"{kind}.")]
    norms = {name: float(wanted[f"{kind}.{name}"].to(device).double().norm()) for name in names}
    # A parameter whose gradient is only rounding has no relative error of its own.
    floor = 1e-6 * math.hypot(*norms.values())
    for name in names:
        ours, theirs = (tensors_of[f"{kind}.{name}"].to(device).double() for tensors_of in (tensors, wanted))
        yield name, ours, theirs, max(norms[name], floor)
