"""Lists of tensors for torch's fused kernels."""

from __future__ import annotations

from torch import Tensor, empty_like

from verl_fn.state import Named, Params, Slots


def tensors_of(tree: Named, names: list[str]) -> list[Tensor]:
    """Returns the tensors with these names, in the same order."""
    leaves = tree.leaves
    return [leaves[name] for name in names]


def laid_out_as(grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    """Returns the gradients in the memory layout of their parameters; fused kernels need it and do not check it."""
    if all(map(Tensor.is_contiguous, grads)) and all(map(Tensor.is_contiguous, params)):
        return grads
    pairs = zip(grads, params, strict=True)
    return [g if g.stride() == p.stride() else empty_like(p).copy_(g) for g, p in pairs]


def check_slots(slots: Slots, names: list[str], params: Params) -> None:
    """Checks that an optimizer's tensors belong to the trained parameters; the kernels do not.

    Args:
        slots: the tensors.
        names: the names of the trained parameters.
        params: the parameters.

    Raises:
        ValueError: they have other names, or lie on another device.
    """
    if list(slots) != names:
        different = sorted(set(slots) ^ set(names))
        raise ValueError(
            f"the optimizer's state and the trainable parameters differ in their names or order: {different[:5]}; "
            "after you choose other parameters to train, make it anew with optimizer.init(params)"
        )
    check_device("the optimizer's state lies", tensors_of(slots, names[:1]), tensors_of(params, names[:1]))


def check_device(what: str, tensors: list[Tensor], params: list[Tensor]) -> None:
    """Checks the device of the first tensor only, since whole trees are placed.

    Raises:
        ValueError: the parameters are on another device.
    """
    if tensors and tensors[0].device != params[0].device:
        raise ValueError(f"{what} on {tensors[0].device}, and the parameters on {params[0].device}")
