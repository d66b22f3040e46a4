"""Optimizers in optax's shape, and the one rule for applying an update.

An optimizer is ``init(params)`` and ``update(grads, opt_state, params, update)``. The update owns its arguments:
it runs torch's fused kernels on their storages and returns nodes around them, which is why callers go through
``apply_update``, where donation or a copy decides whose storages those are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from verl_fn.state import (
    Grads,
    Metrics,
    Named,
    Node,
    Params,
    Slots,
    Sum,
    TrainState,
    Weighted,
    donate,
    node,
    spare,
    sum_of_squares,
)
from verl_fn.steps.optim.schedules import Schedule

Reduce: TypeAlias = Callable[[Tensor], Tensor]


def _whole(t: Tensor) -> Tensor:
    """What there is to add up where one process holds all."""
    return t


@attrs.frozen(eq=False)
class Update:
    """What an update knows beyond the gradients. The numbers are on the device, so nothing waits for it.

    Attributes:
        norm: global norm of the gradients as they are, a scalar tensor.
        divisor: what the optimizer's kernel divides them by on the way, a scalar tensor: clipping costs no pass.
        skip: 1.0 where the kernel must leave everything as it is, else 0.0, a scalar tensor.
        position: updates applied before this one, for the schedule.
        reduce: adds a tensor up over the processes that hold the other shards. Gradients and parameters may be shards,
            some of their rows, so whatever spans a whole tensor has to go through it.
    """

    norm: Tensor
    divisor: Tensor
    skip: Tensor
    position: int
    reduce: Reduce = _whole

    @classmethod
    def of(cls, norm: Tensor, position: int, reduce: Reduce | None = None) -> Update:
        """The plain update of gradients with this norm, skipped where it is not finite."""
        # Torch's kernels want these in fp32 whatever they update.
        one, skip = torch.ones_like(norm, dtype=torch.float32), (~torch.isfinite(norm)).float()
        return cls(norm, one, skip, position, reduce or _whole)


@attrs.frozen(eq=False)
class GradTransform:
    """A transformation of gradients that comes before the optimizer, such as clipping.

    Each parameter's gradient divided by its own norm, whether it lies here as a whole or in shards:

    >>> def normalized(grads, update):
    ...     norm = lambda g: update.reduce(g.square().sum()).sqrt()
    ...     return Grads({name: g / norm(g) for name, g in grads.items()}), update
    >>> params, grads = Params({"w": torch.zeros(2)}), Grads({"w": torch.tensor([3.0, 4.0])})
    >>> tx = chain(GradTransform(normalized), sgd(lambda count: 1.0))
    >>> new, _, _ = tx.update(grads, tx.init(params), params, Update.of(torch.tensor(5.0), position=0))
    >>> new["w"]
    tensor([-0.6000, -0.8000])
    """

    update: Callable[[Grads, Update], tuple[Grads, Update]]


@attrs.frozen(eq=False)
class Optimizer:
    """``init(params) -> opt_state`` and ``update(grads, opt_state, params, update) -> (params, opt_state, metrics)``."""

    init: Callable[[Params], Any]
    update: Callable[[Grads, Any, Params, Update], tuple[Params, Any, Metrics]]


def clip_by_global_norm(max_norm: float) -> GradTransform:
    """Scale gradients down to ``max_norm`` where their global norm is larger (Pascanu et al. 2013)."""

    def update(grads: Grads, info: Update) -> tuple[Grads, Update]:
        seen = info.norm / info.divisor
        return grads, attrs.evolve(info, divisor=info.divisor * ((seen + 1e-6) / max_norm).clamp(min=1.0).float())

    return GradTransform(update)


def chain(*parts: GradTransform | Optimizer) -> Optimizer:
    """Gradient transformations, then one optimizer.

    >>> params = Params({"w": torch.tensor([1.0])})
    >>> tx = chain(clip_by_global_norm(1.0), sgd(lambda count: 0.1))
    >>> update = Update.of(torch.tensor(10.0), position=0)
    >>> new, _, _ = tx.update(Grads({"w": torch.tensor([10.0])}), tx.init(params), params, update)
    >>> round(new["w"].item(), 4)
    0.9
    """
    *transforms, last = parts
    if not isinstance(last, Optimizer) or not all(isinstance(t, GradTransform) for t in transforms):
        raise TypeError("chain takes gradient transformations and, last, one optimizer")

    def update(grads: Grads, opt_state: Any, params: Params, info: Update) -> tuple[Params, Any, Metrics]:
        for transform in transforms:
            grads, info = transform.update(grads, info)
        return last.update(grads, opt_state, params, info)

    return Optimizer(last.init, update)


@node
class AdamState(Node):
    """Running averages of the gradient and of its square, and the updates that they have seen."""

    count: int
    exp_avg: Slots
    exp_avg_sq: Slots


def adamw(
    schedule: Schedule,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) through torch's fused kernel.

    >>> params = Params({"w": torch.tensor([1.0])})
    >>> tx = adamw(lambda count: 0.1, weight_decay=0.0)
    >>> update = Update.of(torch.tensor(3.0), position=0)
    >>> new, opt_state, _ = tx.update(Grads({"w": torch.tensor([3.0])}), tx.init(params), params, update)
    >>> round(new["w"].item(), 4), opt_state.count
    (0.9, 1)
    """

    def init(params: Params) -> AdamState:
        zeros = lambda: Slots({n: torch.zeros_like(params[n]) for n in params.trained()})  # noqa: E731
        return AdamState(0, zeros(), zeros())

    def update(grads: Grads, state: AdamState, params: Params, info: Update) -> tuple[Params, AdamState, Metrics]:
        lr = schedule(info.position)
        names = list(grads)
        if names:
            step = torch.tensor(float(state.count + 1), device=grads[names[0]].device)
            torch._fused_adamw_(
                _tensors(params, names),
                _alike(grads, params, names),
                _tensors(state.exp_avg, names),
                _tensors(state.exp_avg_sq, names),
                [],
                [step] * len(names),
                lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=eps,
                amsgrad=False, maximize=False, grad_scale=info.divisor, found_inf=info.skip,
            )  # fmt: skip
        return params, attrs.evolve(state, count=state.count + 1), {"lr": Weighted(lr, 1.0)}

    return Optimizer(init, update)


@node
class SGDState(Node):
    """The momentum of each parameter; empty without momentum."""

    momentum: Slots


def sgd(schedule: Schedule, momentum: float = 0.0) -> Optimizer:
    """Stochastic gradient descent, with heavy-ball momentum where ``momentum`` is not 0."""

    def init(params: Params) -> SGDState:
        return SGDState(Slots({n: torch.zeros_like(params[n]) for n in params.trained()} if momentum else {}))

    def update(grads: Grads, state: SGDState, params: Params, info: Update) -> tuple[Params, SGDState, Metrics]:
        lr = schedule(info.position)
        if names := list(grads):
            torch._fused_sgd_(
                _tensors(params, names),
                _alike(grads, params, names),
                _tensors(state.momentum, names) if momentum else [],
                weight_decay=0.0, momentum=momentum, lr=lr, dampening=0.0, nesterov=False, maximize=False,
                is_first_step=False, grad_scale=info.divisor, found_inf=info.skip,
            )  # fmt: skip
        return params, state, {"lr": Weighted(lr, 1.0)}

    return Optimizer(init, update)


def _tensors(tree: Named, names: list[str]) -> list[Tensor]:
    leaves = tree.leaves
    return [leaves[name] for name in names]


def _alike(grads: Named, params: Named, names: list[str]) -> list[Tensor]:
    """The gradients in the memory layout of their parameters, since fused kernels go through both as they lie."""
    ours, theirs = _tensors(grads, names), _tensors(params, names)
    if all(map(Tensor.is_contiguous, ours)) and all(map(Tensor.is_contiguous, theirs)):
        return ours
    pairs = zip(ours, theirs, strict=True)
    return [g if g.stride() == p.stride() else torch.empty_like(p).copy_(g) for g, p in pairs]


def frozen() -> Optimizer:
    """No optimizer: for a model that is never updated, such as a reference policy."""

    return Optimizer(lambda params: {}, _refuse)


def _refuse(grads: Grads, state: Any, params: Params, info: Update) -> tuple[Params, Any, Metrics]:
    raise ValueError("this state was made with the optimizer frozen(); it is not to be updated")


def check_update(optimizer: Optimizer, params: Params, grads: Grads) -> None:
    """Refuse gradients that are not these parameters', for kernels go through both without a look.

    Raises:
        ValueError: names, shapes or dtypes differ, or the optimizer is ``frozen()``.

    >>> check_update(sgd(lambda count: 0.1), Params({"w": torch.zeros(2)}), Grads({"w": torch.zeros(1)}))
    Traceback (most recent call last):
    ValueError: the gradient of w is float32 [1], and the parameter is float32 [2]
    """
    names = params.trained()
    if list(grads) != names:
        odd = sorted(set(grads) ^ set(names))
        raise ValueError(f"gradients and trainable parameters differ in their names or order: {odd[:5]}")
    if optimizer.update is _refuse:
        _refuse(grads, None, params, Update.of(torch.zeros(()), 0))
    ours, theirs = _tensors(grads, names), _tensors(params, names)
    # All at once, since a GPU may wait for this.
    if [t.shape for t in ours] != [t.shape for t in theirs] or [t.dtype for t in ours] != [t.dtype for t in theirs]:
        kinds = ([f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in ts] for ts in (ours, theirs))
        name, mine, wanted = next(kind for kind in zip(names, *kinds, strict=True) if kind[1] != kind[2])
        raise ValueError(f"the gradient of {name} is {mine}, and the parameter is {wanted}")


@torch.no_grad()
def apply_update(
    optimizer: Optimizer,
    state: TrainState,
    grads: Grads,
    *,
    donate_inputs: bool = True,
    reduce: Reduce | None = None,
) -> tuple[TrainState, Metrics]:
    """The next state. State and gradients are donated unless ``donate_inputs`` is off.

    Where the gradient's norm is not finite the update is skipped: ``step`` advances, while parameters, the
    optimizer and the schedule's position stay, and the metric ``update_skipped`` is 1.

    Args:
        optimizer: made the ``optimizer`` tree of the state.
        reduce: adds a scalar up over the processes that hold the other shards.

    Returns:
        The state, and the metrics ``grad_norm`` (before clipping), ``lr``, ``update_skipped`` and
        ``perf/residency_copies`` (leaves copied since something else still held them).

    Raises:
        ValueError: the gradients are not those of the trainable parameters, by name, shape or dtype.
        DonatedError: an input was donated before.
    """
    # Launched first, so that a device computes while Python checks what is given and who holds it.
    norm = sum_of_squares(grads.leaves.values(), reduce).sqrt()
    # Before donation, which a refused call must not cost.
    check_update(optimizer, state.params, grads)
    copies = 0
    if donate_inputs:
        state, state_copies = donate(state, "apply_update")
        grads, grad_copies = donate(grads, "apply_update")
        copies = state_copies + grad_copies
    else:
        state, grads = spare(state), spare(grads)
    update = Update.of(norm, state.scheduler, reduce)
    params, opt_state, metrics = optimizer.update(grads, state.optimizer, state.params, update)
    # Fused kernels write without a word, and copies of these tensors may be kept somewhere.
    torch.autograd.graph.increment_version([params[name] for name in grads])
    found: Metrics = {"grad_norm": Weighted(float(norm), 1.0), "perf/residency_copies": Sum(copies)}
    if not math.isfinite(float(norm)):
        # The kernels have skipped; the optimizer's count stays too.
        new = attrs.evolve(state, step=state.step + 1)
        return new, found | metrics | {"update_skipped": Sum(1)}
    new = attrs.evolve(state, params=params, optimizer=opt_state, scheduler=state.scheduler + 1, step=state.step + 1)
    return new, found | metrics | {"update_skipped": Sum(0)}
