"""What training is: parameters, optimizer state, schedule position, key and step, as one value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch
from torch import Tensor

from .key import Key
from .node import Named, Node, named, node


@named
class Params(Named):
    """Canonical (Hugging Face) name -> master tensor; a tied weight has one leaf, under its first name.

    Attributes:
        leaves: the tensors.
        trainable: names of the leaves that are trained, or None for all.

    >>> params = Params({"a": torch.ones(1), "b": torch.ones(1)}, trainable=frozenset({"a"}))
    >>> params.trained(), list(params.base)
    (['a'], ['b'])
    """

    leaves: dict[str, Tensor]
    trainable: frozenset[str] | None = None

    def trained(self) -> list[str]:
        """The names of trainable leaves, in order."""
        return [name for name in self.leaves if self.trainable is None or name in self.trainable]

    def written(self) -> list[str]:
        return self.trained()

    @property
    def base(self) -> Params:
        """The leaves that are not trained, shared: with LoRA the model before training, as no update changes them.

        Raises:
            ValueError: all leaves are trained.
        """
        trained = set(self.trained())
        if len(trained) == len(self.leaves):
            raise ValueError("all of these parameters are trained, so they have no frozen base; it comes with LoRA")
        return Params({name: t for name, t in self.leaves.items() if name not in trained}, frozenset())


@named
class Slots(Named):
    """Canonical name -> what an optimizer keeps for that parameter (running averages)."""

    leaves: dict[str, Tensor]


@named
class Buffers(Named):
    """Canonical name -> what a model changes by itself while it runs (expert bias, FP8 ranges)."""

    leaves: dict[str, Tensor] = attrs.field(factory=dict)


@named
class Grads(Named):
    """Canonical name -> gradient, fp32. Gradients add up, scale, compare and save like any value.

    >>> g = Grads({"w": torch.tensor([3.0, 4.0])})
    >>> float((g + g).global_norm()), float(g.scale(0.5)["w"][0])
    (10.0, 1.5)
    """

    leaves: dict[str, Tensor]

    def __add__(self, other: Grads) -> Grads:
        if self.leaves.keys() != other.leaves.keys():
            odd = sorted(self.leaves.keys() ^ other.leaves.keys())
            raise ValueError(f"gradients to add have different names: {odd[:5]}")
        return Grads({name: g + other.leaves[name] for name, g in self.leaves.items()})

    def scale(self, factor: float | Tensor) -> Grads:
        """Every gradient times ``factor``."""
        return Grads({name: g * factor for name, g in self.leaves.items()})

    def global_norm(self) -> Tensor:
        """The L2 norm over all leaves, a scalar tensor."""
        return sum_of_squares(self.leaves.values()).sqrt()


@node
class TrainState(Node):
    """All that training is. ``attrs.evolve`` replaces fields; ``apply_update`` makes the next one.

    Attributes:
        params: the parameters.
        optimizer: the optimizer's tree, as its ``init`` made it.
        scheduler: updates applied so far, the position of the learning-rate schedule.
        rng: the key for whatever in training is random; derive a step's with ``rng.fold_in(step)``.
        step: updates attempted so far; a skipped update counts here and not in ``scheduler``.
        buffers: what the model changes by itself.
    """

    params: Params
    optimizer: Any
    scheduler: int
    rng: Key
    step: int
    buffers: Buffers = attrs.field(factory=Buffers)


def sum_of_squares(tensors: Iterable[Tensor], reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """The sum of all squares, a scalar; ``reduce`` adds up over what other processes hold.

    >>> float(sum_of_squares([torch.tensor([3.0]), torch.tensor([4.0])]))
    25.0
    """
    tensors = list(tensors)
    norms = torch._foreach_norm(tensors) if tensors else [torch.zeros(())]
    # In double: the squares of gradients that clipping could still handle overflow in fp32.
    total = torch.stack(norms).double().square().sum()
    return total if reduce is None else reduce(total)
