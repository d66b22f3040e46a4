"""Optimizers as data, in optax's shape: frozen classes with readable settings and pure functions ``init`` and ``update``.

Two of them are equal if they are of one class and have equal settings, so they can be compared between ranks,
translated for another library, and printed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from verl_fn.state import Grads, Metrics, Params, tree

Reduce: TypeAlias = Callable[[Tensor], Tensor]


def whole(t: Tensor) -> Tensor:
    """Returns its argument: what there is to add up where one process holds all."""
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
    reduce: Reduce = whole

    @classmethod
    def of(cls, norm: Tensor, position: int, reduce: Reduce | None = None) -> Update:
        """Returns the plain update of gradients with this norm, skipped where it is not finite."""
        # Torch's kernels want these in fp32 whatever they update.
        one, skip = torch.ones_like(norm, dtype=torch.float32), (~torch.isfinite(norm)).float()
        return cls(norm, one, skip, position, reduce or whole)


class GradTransform:
    """Base of transformations of gradients, which come before the optimizer in a ``chain``.

    A subclass is a frozen attrs class. Its state is a tree of nodes, dictionaries and tuples, without state ``()``;
    tensors of the parameters' shapes lie in ``Slots``. After an update that is skipped the state is as it was, so
    ``update`` returns a new state and writes to no tensor of the old one.

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

    Attributes:
        by_leaf: as of an ``Optimizer``.
    """

    @property
    def by_leaf(self) -> bool:
        return False

    def init(self, params: Params) -> Any:
        """Returns the state before the first update."""
        return ()

    def update(self, grads: Grads, state: Any, params: Params, update: Update) -> tuple[Grads, Any, Update]:
        """Returns the transformed gradients, the next state, and what the following parts know of the update.

        A clip that follows reads ``update.norm``; a transformation that changes the norm may evolve it.
        """
        raise NotImplementedError


class Optimizer:
    """Base of optimizers, frozen attrs classes.

    ``update`` owns its arguments: it runs torch's fused kernels on their storages and returns nodes around them, which
    is why callers go through ``apply_update``, where donation or a copy decides whose storages those are.

    Attributes:
        by_leaf: whether a leaf's update is a function of that leaf, its gradient and slots, and ``update`` alone.
            ``apply_update`` may then update groups of leaves one after the other.
    """

    @property
    def by_leaf(self) -> bool:
        return False

    def init(self, params: Params) -> Any:
        """Returns the optimizer's state before the first update."""
        raise NotImplementedError

    def update(self, grads: Grads, state: Any, params: Params, update: Update) -> tuple[Params, Any, Metrics]:
        """Returns the next parameters, the next state and metrics."""
        raise NotImplementedError


@attrs.frozen
class Stateless(GradTransform):
    """A transformation made of a function; ``stateless`` makes it."""

    fn: Callable[[Grads, Update], tuple[Grads, Update]]

    def update(self, grads: Grads, state: Any, params: Params, update: Update) -> tuple[Grads, Any, Update]:
        grads, update = self.fn(grads, update)
        return grads, state, update


def stateless(fn: Callable[[Grads, Update], tuple[Grads, Update]]) -> Stateless:
    """Makes a transformation of a function ``(grads, update) -> (grads, update)``.

    Example:
        Each parameter's gradient divided by its own norm, whether it lies here as a whole or in shards.

        >>> from verl_fn.steps import sgd
        >>> def normalized(grads, update):
        ...     norms = {name: update.reduce(g.square().sum()).sqrt() for name, g in grads.items()}
        ...     return Grads({name: g / norms[name] for name, g in grads.items()}), update
        >>> params, grads = Params({"w": torch.zeros(2)}), Grads({"w": torch.tensor([3.0, 4.0])})
        >>> tx = chain(stateless(normalized), sgd(1.0))
        >>> new, _, _ = tx.update(grads, tx.init(params), params, Update.of(torch.tensor(5.0), position=0))
        >>> new["w"]
        tensor([-0.6000, -0.8000])
    """
    return Stateless(fn)


@attrs.frozen
class ClipByGlobalNorm(GradTransform):
    """What ``clip_by_global_norm`` makes."""

    max_norm: float

    @property
    def by_leaf(self) -> bool:
        return True

    def update(self, grads: Grads, state: Any, params: Params, update: Update) -> tuple[Grads, Any, Update]:
        norm = update.norm / update.divisor
        factor = ((norm + 1e-6) / self.max_norm).clamp(min=1.0).float()
        return grads, state, attrs.evolve(update, divisor=update.divisor * factor)


def clip_by_global_norm(max_norm: float) -> ClipByGlobalNorm:
    """Scales gradients down to ``max_norm`` where their global norm is larger.

    Source: Pascanu et al. 2013 (arXiv 1211.5063).
    """
    return ClipByGlobalNorm(max_norm)


@attrs.frozen
class Chain(Optimizer):
    """What ``chain`` makes; its state is a tuple with the state of every part."""

    parts: tuple[GradTransform | Optimizer, ...]

    @property
    def by_leaf(self) -> bool:
        return all(part.by_leaf for part in self.parts)

    def init(self, params: Params) -> tuple[Any, ...]:
        return tuple(part.init(params) for part in self.parts)

    def update(self, grads: Grads, state: tuple[Any, ...], params: Params, update: Update) -> Any:
        *transforms, last = self.parts
        states = []
        for transform, held in zip(transforms, state, strict=False):
            grads, new, update = transform.update(grads, held, params, update)
            states.append(new)
        params, new, metrics = last.update(_apart(grads, states), state[-1], params, update)
        return params, (*states, new), metrics


def _apart(grads: Grads, states: list[Any]) -> Grads:
    """The gradients, those that a state holds too as copies: fused kernels scale gradients where they lie."""
    held = {id(t) for t in tree.leaves(states) if isinstance(t, Tensor)}
    return Grads({name: g.clone() if id(g) in held else g for name, g in grads.items()}) if held else grads


def chain(*parts: GradTransform | Optimizer) -> Chain:
    """Chains transformations of gradients and, last, one optimizer, which may be a chain itself.

    Raises:
        TypeError: a part is neither, or the last one is no optimizer or not the only one.
        ValueError: the optimizer is ``frozen()``, which takes no gradients.

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
        raise ValueError("frozen() takes no gradients, so nothing can be chained before it; use frozen() alone")
    return Chain(parts)


@attrs.frozen
class Frozen(Optimizer):
    """What ``frozen`` makes."""

    def init(self, params: Params) -> dict[str, Any]:
        return {}

    def update(self, grads: Grads, state: Any, params: Params, update: Update) -> tuple[Params, Any, Metrics]:
        raise ValueError("this state was made with the optimizer frozen(); it is not to be updated")


def frozen() -> Frozen:
    """Makes the optimizer of a model that is never updated, such as a reference policy."""
    return Frozen()
