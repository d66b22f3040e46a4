"""Lists of tensors for torch's fused kernels."""

from __future__ import annotations

from torch import Tensor, empty_like

from verl_fn.state import Named


def tensors_of(tree: Named, names: list[str]) -> list[Tensor]:
    """Returns the tensors with these names, in the same order."""
    leaves = tree.leaves
    return [leaves[name] for name in names]


def laid_out_as(grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    """Returns the gradients in the memory layout of their parameters, which fused kernels need and do not check."""
    if all(map(Tensor.is_contiguous, grads)) and all(map(Tensor.is_contiguous, params)):
        return grads
    pairs = zip(grads, params, strict=True)
    return [g if g.stride() == p.stride() else empty_like(p).copy_(g) for g, p in pairs]
