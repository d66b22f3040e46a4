"""Optimizers and gradient transformations, in the manner of optax, and their application to a training state.

They are frozen attrs classes with pure functions ``init`` and ``update``, so their settings are readable, unlike a
closure's. Two of them are equal if they have the same class and equal settings. They can be compared between ranks,
printed, and translated for another library. ``apply_update`` donates buffers and skips updates that are not finite.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol, cast

import attrs
import torch
from torch import Tensor, empty_like

from verl_fn.state import (
    Grads,
    Metrics,
    Named,
    Params,
    Slots,
    Sum,
    TrainState,
    Weighted,
    ownership,
    sum_of_squares,
    tree,
)
from verl_fn.state.guards import expect_update, isolated, refuse_derivatives

# The number of leaves in an update's first group: small, because the device is idle until its kernel starts.
# Each group has twice as many as the one before. On the CPU kernels run synchronously, so groups would save no time.
FIRST_GROUP, FIRST_GROUP_ON_CPU = 8, 0

_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")


class Reduce(Protocol):
    """Adds a tensor over processes."""

    def __call__(self, t: Tensor, name: str = "") -> Tensor:
        """Returns the sum.

        Args:
            t: this process's part of the sum.
            name: the parameter whose shards are summed over; empty for a sum that belongs to no parameter.
        """
        ...


def whole(t: Tensor, name: str = "") -> Tensor:
    """Returns its argument; it is the reduction if one process holds whole tensors."""
    return t


@attrs.frozen(eq=False)
class Update:
    """What transformations and optimizers know of an update besides the gradients.

    The norm, the divisor and the skip flag are tensors on the device, so that Python never waits for their values.

    Attributes:
        norm: the global norm of the gradients before they are divided, a scalar tensor.
        skip: 1.0 if the kernel must change nothing, else 0.0, a scalar tensor. It is written to if a transformation
            returns gradients that are not finite.
        position: the number of updates applied before this one, for the schedule.
        divisor: the optimizer's kernel divides the gradients by this scalar tensor, if there is one. Clipping
            changes only the divisor, to save a pass over the gradients.
        total: adds a scalar over the processes that hold any other part of the model.
        reduce: adds a tensor over the processes that hold the other shards of the parameter that it is given the
            name of. Gradients and parameters may be shards, which are some rows of a tensor, so a sum over a whole
            tensor needs it. Different parameters can lie on different processes, as experts do.
    """

    norm: Tensor
    skip: Tensor
    position: int
    divisor: Tensor | None = None
    total: Reduce = whole
    reduce: Reduce = whole

    @classmethod
    def of(cls, norm: Tensor, position: int, reduce: Reduce = whole, total: Reduce = whole) -> Update:
        """Makes the update for gradients with this norm: without clipping, and skipped if the norm is not finite."""
        # Torch's kernels take the flag in fp32, whatever the dtype of the parameters.
        return cls(norm, (~torch.isfinite(norm)).float(), position, total=total, reduce=reduce)

    def divided(self, grads: Grads) -> tuple[Grads, Update]:
        """Returns the gradients as clipping has made them, and the update for these."""
        if self.divisor is None:
            return grads, self
        small = torch._foreach_div(list(grads.values()), self.divisor)
        return Grads(dict(zip(grads, small, strict=True))), attrs.evolve(
            self, norm=self.norm / self.divisor, divisor=None
        )

    def of_others(self, grads: Grads, skip: Tensor) -> Update:
        """Returns the update for other gradients: with their norm, and skipped if that is not finite.

        Args:
            skip: the flag that whoever runs the update reads.
        """
        norm = sum_of_squares(grads.leaves.values(), self.total).sqrt()
        skip.copy_(torch.maximum(self.skip, (~torch.isfinite(norm)).float()).maximum(skip))
        return attrs.evolve(self, norm=norm, skip=skip)


class GradTransform:
    """Base class of gradient transformations: they come before the optimizer in a ``chain``.

    A subclass is a frozen attrs class. Its state is a tree of nodes, dictionaries and tuples; without state it is
    ``()``. Tensors with the shapes of the parameters belong in ``Slots``. When an update is skipped, the old state is
    used again, so ``update`` must return a new state and not write to the tensors of the old one.

    Example:
        >>> from verl_fn.state import Slots
        >>> @attrs.frozen
        ... class Momentum(GradTransform):
        ...     decay: float
        ...     def init(self, params):
        ...         return Slots({name: torch.zeros_like(params[name]) for name in params.trained()})
        ...     def update(self, grads, state, params, update):
        ...         velocity = {name: self.decay * state[name] + g for name, g in grads.items()}
        ...         return Grads(velocity), Slots(velocity), update
        >>> Momentum(0.9) == Momentum(0.9), Momentum(0.9)
        (True, Momentum(decay=0.9))
    """

    def init(self, params: Params) -> Any:
        """Returns the state before the first update."""
        return ()

    def check(self, params: Params, state: Any, position: int) -> None:
        """Raises the errors of ``update`` that can be foreseen; it is called before anything is donated.

        After an error of ``update`` itself, a donated training state is lost.
        """

    def update(self, grads: Grads, state: Any, params: Params, update: Update) -> tuple[Grads, Any, Update]:
        """Returns the transformed gradients, the next state, and the update as the following parts see it.

        Args:
            grads: as the parts before have made them; clipping, too.
            update: has the norm of these gradients; a chain computes the norm of the returned ones.
        """
        raise NotImplementedError


class Optimizer:
    """Base class of optimizers, all frozen attrs classes.

    ``update`` overwrites its arguments: it runs torch's fused kernels on their storages and returns nodes that
    contain the same storages. Call it through ``apply_update``: this donates or copies the arguments first.

    Attributes:
        by_leaf: whether the update of a leaf depends only on that leaf, its gradient, its slots and ``update``.
            ``apply_update`` can then update groups of leaves one after the other.
        moments: the dtype of the tensors in ``Slots``; None for the parameters' own.
    """

    @property
    def by_leaf(self) -> bool:
        return False

    @property
    def moments(self) -> torch.dtype | None:
        return None

    def init(self, params: Params) -> Any:
        """Returns the optimizer's state before the first update."""
        raise NotImplementedError

    def check(self, params: Params, state: Any, position: int) -> None:
        """Raises the errors of ``update`` that can be foreseen, as in a ``GradTransform``.

        Args:
            params: the parameters; on sharded backends, DTensors.
            state: the optimizer's state.
            position: the number of updates applied so far.
        """

    def update(self, grads: Grads, state: Any, params: Params, update: Update) -> tuple[Params, Any, Metrics]:
        """Returns the next parameters, the next state and metrics."""
        raise NotImplementedError


@attrs.frozen
class Stateless(GradTransform):
    """A transformation without state, of a function ``(grads, update) -> (grads, update)``.

    Example:
        This one divides each gradient by its own norm, and also works for shards. A gradient of zeros stays so.

        >>> from verl_fn.steps import sgd
        >>> def normalized(grads, update):
        ...     norms = {name: update.reduce(g.square().sum(), name).sqrt() for name, g in grads.items()}
        ...     return Grads({name: g / norms[name].clamp(min=1e-12) for name, g in grads.items()}), update
        >>> params, grads = Params({"w": torch.zeros(2)}), Grads({"w": torch.tensor([3.0, 4.0])})
        >>> tx = chain(stateless(normalized), sgd(1.0))
        >>> new, _, _ = tx.update(grads, tx.init(params), params, Update.of(torch.tensor(5.0), position=0))
        >>> new["w"]
        tensor([-0.6000, -0.8000])
    """

    fn: Callable[[Grads, Update], tuple[Grads, Update]]

    def update(self, grads: Grads, state: Any, params: Params, update: Update) -> tuple[Grads, Any, Update]:
        grads, update = self.fn(grads, update)
        return grads, state, update


@attrs.frozen
class ClipByGlobalNorm(GradTransform):
    """Scales gradients down if their global norm is above ``max_norm``.

    It changes only a divisor that the optimizer's kernel applies. This saves a pass over the gradients.

    Attributes:
        max_norm: the global norm that gradients may have, above 0. A chain without this part does not clip.

    Example:
        >>> from verl_fn.steps import sgd
        >>> from verl_fn.state import Key
        >>> params, tx = Params({"w": torch.zeros(2)}), chain(clip_by_global_norm(1.0), sgd(1.0))
        >>> state = TrainState(params, tx.init(params), 0, Key.from_seed(0), 0)
        >>> state, metrics = apply_update(tx, state, Grads({"w": torch.tensor([3.0, 4.0])}))
        >>> state.params["w"], metrics["grad_norm"].value
        (tensor([-0.6000, -0.8000]), 5.0)

    Source: Pascanu et al. 2013 (arXiv 1211.5063).
    """

    max_norm: float = attrs.field(validator=attrs.validators.gt(0))

    def update(self, grads: Grads, state: Any, params: Params, update: Update) -> tuple[Grads, Any, Update]:
        norm = update.norm if update.divisor is None else update.norm / update.divisor
        factor = ((norm + 1e-6) / self.max_norm).clamp(min=1.0).float()
        divisor = factor if update.divisor is None else update.divisor * factor
        return grads, state, attrs.evolve(update, divisor=divisor)


@attrs.frozen
class Chain(Optimizer):
    """Transformations and an optimizer; ``chain`` makes it. Its state is a tuple of the states of its parts."""

    parts: tuple[GradTransform | Optimizer, ...]

    @property
    def by_leaf(self) -> bool:
        # After any other transformation, the norm of all leaves is computed again.
        *transforms, optimizer = self.parts
        return cast(Optimizer, optimizer).by_leaf and all(type(t) is ClipByGlobalNorm for t in transforms)

    @property
    def moments(self) -> torch.dtype | None:
        return cast(Optimizer, self.parts[-1]).moments

    def init(self, params: Params) -> tuple[Any, ...]:
        return tuple(part.init(params) for part in self.parts)

    def check(self, params: Params, state: Any, position: int) -> None:
        if not isinstance(state, tuple) or len(state) != len(self.parts):
            raise ValueError(
                f"this chain has {len(self.parts)} parts, so a state's optimizer tree is a tuple of as many states; "
                "this state was made with another optimizer"
            )
        for part, part_state in zip(self.parts, state, strict=True):
            part.check(params, part_state, position)

    def update(
        self, grads: Grads, state: tuple[Any, ...], params: Params, update: Update
    ) -> tuple[Params, tuple[Any, ...], Metrics]:
        # ``chain`` has checked the classes of the parts.
        transforms, optimizer = cast(tuple[GradTransform, ...], self.parts[:-1]), cast(Optimizer, self.parts[-1])
        states: list[Any] = []
        for transform, part_state in zip(transforms, state, strict=False):
            if type(transform) is ClipByGlobalNorm:
                grads, new_state, update = transform.update(grads, part_state, params, update)
            else:
                skip = update.skip
                grads, update = update.divided(grads)
                grads, new_state, update = transform.update(grads, part_state, params, update)
                update = update.of_others(grads, skip)
            states.append(new_state)
        params, last_state, metrics = optimizer.update(_unshared(grads, states), state[-1], params, update)
        return params, (*states, last_state), metrics


def _unshared(grads: Grads, states: list[Any]) -> Grads:
    """Returns the gradients; a tensor that is in a state too is copied: fused kernels scale gradients in place."""
    in_states = {id(t) for t in tree.leaves(states) if isinstance(t, Tensor)}
    if not in_states:
        return grads
    return Grads({name: g.clone() if id(g) in in_states else g for name, g in grads.items()})


def chain(*parts: GradTransform | Optimizer) -> Chain:
    """Chains gradient transformations and an optimizer.

    Args:
        parts: the transformations in order and, last, the optimizer or another chain.

    Raises:
        TypeError: the last part is not an optimizer, or another part is not a gradient transformation.
        ValueError: the optimizer is ``frozen()``, and takes no gradients.

    Example:
        >>> from verl_fn.steps import sgd
        >>> params = Params({"w": torch.tensor([1.0])})
        >>> tx = chain(clip_by_global_norm(1.0), sgd(0.1))
        >>> tx.parts[0].max_norm
        1.0
        >>> update = Update.of(torch.tensor(10.0), position=0)
        >>> new, _, _ = tx.update(Grads({"w": torch.tensor([10.0])}), tx.init(params), params, update)
        >>> round(new["w"].item(), 4)
        0.9
    """
    if (
        not parts
        or not isinstance(parts[-1], Optimizer)
        or not all(isinstance(part, GradTransform) for part in parts[:-1])
    ):
        raise TypeError("chain takes gradient transformations and, last, one optimizer")
    if isinstance(parts[-1], Frozen):
        raise ValueError("frozen() takes no gradients, so nothing can be chained before it; use only frozen()")
    return Chain(parts)


_REFUSAL = "the optimizer frozen() updates no state; give one that does"


@attrs.frozen
class Frozen(Optimizer):
    """The optimizer of a model that is never updated, such as a reference policy."""

    def init(self, params: Params) -> dict[str, Any]:
        return {}

    def check(self, params: Params, state: Any, position: int) -> None:
        raise ValueError(_REFUSAL)

    def update(self, grads: Grads, state: Any, params: Params, update: Update) -> tuple[Params, Any, Metrics]:
        raise ValueError(_REFUSAL)


stateless = Stateless
clip_by_global_norm = ClipByGlobalNorm
frozen = Frozen


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


def check_slots(slots: Slots, names: list[str], params: Params, dtype: torch.dtype | None = None) -> None:
    """Checks that an optimizer's tensors belong to the trained parameters; the kernels do not.

    Args:
        dtype: the dtype of the tensors; by default the parameters' own.

    Raises:
        ValueError: they have other names or another dtype, or lie on another device.
    """
    if list(slots) != names:
        if not (different := sorted(set(slots) ^ set(names))):
            raise ValueError(
                "the tensors of the optimizer's state are in another order than the parameters, as from a file; make "
                "them Slots({name: slots[name] for name in state.params.trained()})"
            )
        raise ValueError(
            f"the optimizer's state and the trainable parameters differ in their names: {different[:5]}; "
            "after you choose other parameters to train, make it anew with optimizer.init(params)"
        )
    held, weights = tensors_of(slots, names[:1]), tensors_of(params, names[:1])
    check_device("the optimizer's state lies", held, weights)
    # Of parameters in bf16, the check of gradients says what to do.
    if held and held[0].dtype != (dtype or weights[0].dtype) and torch.bfloat16 in (dtype, held[0].dtype):
        raise ValueError(
            f"the optimizer's state is {_kind(held[0]).split()[0]}, and this optimizer keeps "
            f"{str(dtype or weights[0].dtype).removeprefix('torch.')}; moments of another dtype need a new state: "
            "optimizer.init(params)"
        )


def check_device(what: str, tensors: list[Tensor], params: list[Tensor]) -> None:
    """Raises ValueError if the first tensor lies on another device; whole trees are placed."""
    if tensors and tensors[0].device != params[0].device:
        raise ValueError(f"{what} on {tensors[0].device}, and the parameters on {params[0].device}")


def check_update(optimizer: Optimizer, state: TrainState, grads: Grads) -> None:
    """Checks all that an update would refuse, before anything is donated; the kernels check nothing.

    Raises:
        ArgumentError: the arguments are not a ``TrainState`` and ``Grads``.
        ValueError: names, shapes, dtypes or devices of gradients and trained parameters differ, the optimizer did not
            make the state's optimizer tree, or the optimizer is ``frozen()``.

    Example:
        >>> from verl_fn.state import Key, Params
        >>> from verl_fn.steps import sgd
        >>> params = Params({"w": torch.zeros(2)})
        >>> state = TrainState(params, sgd(0.1).init(params), 0, Key.from_seed(0), 0)
        >>> check_update(sgd(0.1), state, Grads({"w": torch.zeros(1)}))
        Traceback (most recent call last):
        ValueError: the gradient of w is float32 [1], and the parameter is float32 [2]
    """
    expect_update(state, grads)
    params = state.params
    names = params.trained()
    if list(grads) != names:
        if not (different := sorted(set(grads) ^ set(names))):
            raise ValueError(
                "the gradients are in another order than the parameters, as from a file; make them "
                "Grads({name: grads[name] for name in state.params.trained()})"
            )
        raise ValueError(f"gradients and trainable parameters differ in their names: {different[:5]}")
    optimizer.check(params, state.optimizer, state.scheduler)
    gradients, weights = tensors_of(grads, names), tensors_of(params, names)
    # A GPU may be idle until this check ends, so the comparison avoids a loop in Python.
    same_shapes = list(map(_SHAPE, gradients)) == list(map(_SHAPE, weights))
    if not same_shapes or list(map(_DTYPE, gradients)) != list(map(_DTYPE, weights)):
        kinds = zip(names, map(_kind, gradients), map(_kind, weights), strict=True)
        name, gradient_kind, weight_kind = next(row for row in kinds if row[1] != row[2])
        note = "; what is trained is float32, so make the state with .float() of its parameters"
        cast = note if params[name].dtype != torch.float32 else ""
        raise ValueError(f"the gradient of {name} is {gradient_kind}, and the parameter is {weight_kind}{cast}")
    check_device("the gradients lie", gradients, weights)
    # Values are made whole in one mode, so the first tensor of each tells.
    if any(t.is_inference() for t in (*gradients[:1], *weights[:1])):
        raise ValueError(
            "the gradients or the parameters were made in inference mode and cannot be updated later; make "
            "them outside of it, or copy them there with snapshot(value)"
        )


def _kind(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"


@isolated()
def apply_update(
    optimizer: Optimizer,
    state: TrainState,
    grads: Grads,
    *,
    donate: bool = True,
    reduce: Reduce | None = None,
    total: Reduce | None = None,
) -> tuple[TrainState, Metrics]:
    """Returns the state after an update with these gradients.

    If the norm of the gradients is not finite, or of what a transformation makes of them, the update is skipped:
    ``step`` advances, but the parameters, the optimizer state and the position of the schedule stay the same, and the
    metric ``update_skipped`` is 1.

    Args:
        optimizer: the optimizer; its ``init`` made ``state.optimizer``.
        donate: whether state and gradients are donated, so that the result reuses their buffers.
        reduce: adds a scalar over the processes that hold the other shards of the same tensors.
        total: adds a scalar over the processes that hold any other part of the model; by default ``reduce``.

    Returns:
        The next state and the metrics: ``grad_norm`` (before clipping), ``lr``, ``update_skipped`` and
        ``perf/residency_copies`` (the number of leaves that were copied because something else references them).

    Raises:
        ArgumentError, ValueError: as ``check_update``; nothing was donated then.
        DonatedError: the state or the gradients were donated before.
        NotDifferentiable: a derivative of this function was taken.
    """
    expect_update(state, grads)
    refuse_derivatives("apply_update", state, grads)
    # The norm is launched first, so that a device computes it while Python checks the arguments.
    norm = sum_of_squares(grads.leaves.values(), total or reduce).sqrt()
    # If the check fails, the arguments must not have been donated.
    check_update(optimizer, state, grads)
    update = Update.of(norm, state.scheduler, reduce or whole, total or reduce or whole)
    groups = _groups(optimizer, state, grads)
    if donate:
        # The lists are the only references to the moved fields; a local variable would force copies.
        boxes = [ownership.taken(state, "apply_update")], [ownership.taken(grads, "apply_update")]
    else:
        boxes = [ownership.spare(state)], [ownership.spare(grads)]
    befores, afters, copies, metrics = _updated(optimizer, boxes, update, groups)
    new = ownership.joined(afters)
    new = attrs.evolve(new, scheduler=new.scheduler + 1, step=new.step + 1)
    # Reading the norm is the only wait for the device, so it comes after all kernels are launched.
    grad_norm, skipped = float(norm), float(update.skip)
    if skipped:
        # The kernels wrote nothing. The old state also has the optimizer's old count.
        old = ownership.joined(befores)
        new = attrs.evolve(old, step=old.step + 1)
    reported: Metrics = {"grad_norm": Weighted(grad_norm, 1.0), "perf/residency_copies": Sum(copies)}
    return new, reported | metrics | {"update_skipped": Sum(skipped)}


def _groups(optimizer: Optimizer, state: TrainState, grads: Grads) -> list[list[str]]:
    """Splits the names into groups that are updated one after the other, or returns no groups if that saves no time.

    Checking which leaves must be copied takes Python about as long as a kernel takes. With groups, a GPU computes on
    one group while Python checks the next one.
    """
    names = list(grads)
    size = FIRST_GROUP if names and grads[names[0]].is_cuda else FIRST_GROUP_ON_CPU
    if not size or not optimizer.by_leaf or not ownership.divisible((state.params, state.optimizer), names):
        return []
    groups: list[list[str]] = []
    while names:
        groups.append(names[:size])
        names, size = names[size:], 2 * size
    return groups


def _updated(
    optimizer: Optimizer,
    boxes: tuple[list[TrainState], list[Grads]],
    update: Update,
    groups: list[list[str]],
) -> tuple[list[TrainState], list[TrainState], int, Metrics]:
    """Runs the optimizer on each group of leaves, or on all leaves together if there are no groups.

    Args:
        boxes: a list with the state and a list with the gradients; they have the only references to both. Both
            lists are emptied.

    Returns:
        The parts of the state before and after the update, the number of copies, and the optimizer's metrics.
    """
    states, grads = boxes
    befores: list[TrainState] = []
    afters: list[TrainState] = []
    metrics: Metrics = {}
    copies = 0
    parts = ownership.divided(states, groups) if groups else iter([[states.pop()]])
    gradients = ownership.owned_parts(grads, groups or [list(grads[0])])
    for box, (gradient, gradient_copies) in zip(parts, gradients, strict=True):
        part, part_copies = ownership.owned(box)
        copies += gradient_copies + part_copies
        params, opt_state, metrics = optimizer.update(gradient, part.optimizer, part.params, update)
        # Fused kernels don't bump version counters, but caches of these tensors compare them.
        torch.autograd.graph.increment_version([params[name] for name in gradient])
        befores.append(part)
        afters.append(attrs.evolve(part, params=params, optimizer=opt_state))
    return befores, afters, copies, metrics
