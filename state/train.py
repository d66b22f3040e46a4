"""The training state as one value: parameters, optimizer state, schedule position, key and step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from .node import Key, Named, Node, child, named, node

# Of tensors with so many elements, the squares of each row of so many elements are added in fp32.
LARGE, ROW = 2**15, 1024


@named
class Buffers(Named):
    """Tensors that a model computes with and no gradient changes, such as experts' biases, by canonical name.

    They are in fp32, and whole on every rank.
    """

    leaves: Mapping[str, Tensor] = attrs.field(factory=dict)


@named
class Params(Named):
    """Parameters: a mapping from canonical (Hugging Face) name to master tensor.

    A tied weight is one leaf, under the first of its names. A backend makes trained leaves in fp32, and leaves that
    it never trains in the dtype that computes with them.

    Attributes:
        leaves: the tensors by name.
        trainable: the names of the leaves that are trained, or None for all.
        buffers: what the model computes with beside its parameters.

    Example:
        >>> params = Params({"a": torch.ones(1), "b": torch.ones(1)}, trainable=frozenset({"a"}))
        >>> params.trained(), list(params.base)
        (['a'], ['b'])
    """

    leaves: Mapping[str, Tensor]
    trainable: frozenset[str] | None = None
    buffers: Buffers = child(factory=Buffers)

    def trained(self) -> list[str]:
        """Returns the names of the trained leaves, in order."""
        trainable = self.trainable
        return list(self.leaves) if trainable is None else [name for name in self.leaves if name in trainable]

    def written(self) -> list[str]:
        """Returns the names of the trained leaves: an update may write only to these."""
        return self.trained()

    @property
    def base(self) -> Params:
        """The leaves that are not trained, without a copy.

        No update changes them, so with LoRA they are the model before training.

        Raises:
            ValueError: all leaves are trained.
        """
        trained = set(self.trained())
        if len(trained) == len(self.leaves):
            raise ValueError("all of these parameters are trained, so they have no frozen base; it comes with LoRA")
        leaves = {name: t for name, t in self.leaves.items() if name not in trained}
        return Params(leaves, frozenset(), self.buffers)


@named
class Slots(Named):
    """The optimizer's tensors of one kind, such as momentum: a mapping from the parameter's canonical name."""

    leaves: Mapping[str, Tensor]


@named
class Grads(Named):
    """Gradients in fp32: a mapping from the parameter's canonical name.

    Example:
        >>> g = Grads({"w": torch.tensor([3.0, 4.0])})
        >>> float((g + g).global_norm()), float(g.scale(0.5)["w"][0])
        (10.0, 1.5)
    """

    leaves: Mapping[str, Tensor]

    def __add__(self, other: Grads) -> Grads:
        if self.leaves.keys() != other.leaves.keys():
            different = sorted(self.leaves.keys() ^ other.leaves.keys())
            raise ValueError(f"gradients to add have different names: {different[:5]}")
        return Grads({name: g + other.leaves[name] for name, g in self.leaves.items()})

    def scale(self, factor: float | Tensor) -> Grads:
        """Returns every gradient times ``factor``."""
        return Grads({name: g * factor for name, g in self.leaves.items()})

    def global_norm(self) -> Tensor:
        """Returns the L2 norm over all leaves, a scalar tensor."""
        return sum_of_squares(self.leaves.values()).sqrt()


@node
class TrainState(Node):
    """The complete state of training. ``apply_update`` returns the next one; ``attrs.evolve`` replaces fields.

    Attributes:
        optimizer: the optimizer's state, a tree that its ``init`` made.
        scheduler: the number of updates applied so far: the position in the learning-rate schedule.
        rng: the key of all randomness in training; the key of a step is ``rng.fold_in(step)``.
        step: the number of updates attempted so far. A skipped update counts here but not in ``scheduler``.

    Example:
        >>> from verl_fn.state import tree
        >>> from verl_fn.steps import adamw
        >>> params, tx = Params({"w": torch.zeros(2)}), adamw(1e-3)
        >>> state = TrainState(params, tx.init(params), scheduler=0, rng=Key.from_seed(0), step=0)
        >>> later = attrs.evolve(state, step=7)
        >>> state.step, later.step, tree.equal(state.params, later.params)
        (0, 7, True)
    """

    params: Params
    optimizer: Any
    scheduler: int
    rng: Key
    step: int

    @property
    def buffers(self) -> Buffers:
        """The model's buffers, which are a part of ``params``."""
        return self.params.buffers


def sum_of_squares(tensors: Iterable[Tensor], reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Returns the sum of the squares of all elements, a scalar tensor.

    Args:
        tensors: the tensors, or this process's shards of them.
        reduce: adds a scalar over the processes that hold the other shards.

    Example:
        >>> float(sum_of_squares([torch.tensor([3.0]), torch.tensor([4.0])]))
        25.0
    """
    tensors = list(tensors)
    whole_on_cpu = all(t.is_cpu and type(t) in (Tensor, nn.Parameter) for t in tensors)
    total = _by_rows(tensors) if whole_on_cpu else _by_tensors(tensors)
    return total if reduce is None else reduce(total)


def _by_tensors(tensors: list[Tensor]) -> Tensor:
    # In fp32 the squares would overflow for gradients that clipping could still scale down.
    return torch.stack(torch._foreach_norm(tensors, dtype=torch.float64)).square().sum()


def _by_rows(tensors: list[Tensor]) -> Tensor:
    """Adds the squares of short rows of large tensors in fp32, and all others in float64.

    On a CPU this is as fast as a sum in fp32, but that one would lose a digit for every few million elements.
    """
    small: list[Tensor] = [torch.zeros((), device="cpu")]
    rows: list[Tensor] = []
    for t in tensors:
        if t.dtype != torch.float32 or t.numel() < LARGE:
            small.append(t)
            continue
        flat = t.reshape(-1)
        whole = len(flat) // ROW * ROW
        rows.append(torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1))
        if whole < len(flat):
            small.append(flat[whole:])
    total = _by_tensors(small) + (torch.cat(rows).double().square().sum() if rows else 0.0)
    # In fp32 the squares of large numbers overflow, and squares of tiny numbers keep few digits or become 0.
    return total if not rows or 1e-30 < float(total) < math.inf else _by_tensors(tensors)
