"""Names of the hub's files and canonical names, which differ for experts; and optimizers' masks, which speak of them.

Canonical names are the names in transformers' models; these stack the experts of a layer. Megatron-Bridge speaks of
the names in files on the hub, most of which have one tensor for each expert. transformers knows how to convert them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.ulysses import LayoutError
from verl_fn.state import Named
from verl_fn.steps import Chain

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# The tensor of one expert, where the hub's files have one for all experts of a layer.
_OF_STACK = re.compile(r"(.*)\[(\d+)\]")


@attrs.frozen
class Place:
    """Where the tensor of a hub's name lies among the canonical ones.

    Attributes:
        expert: the number of the expert, or None for a whole tensor.
        start: the first of the expert's rows.
        end: the one after its last row.
    """

    name: str
    expert: int | None = None
    start: int = 0
    end: int = 0

    def of(self, whole: Tensor) -> Tensor:
        """Returns the tensor of the hub's name."""
        return whole if self.expert is None else whole[self.expert, self.start : self.end]


@attrs.frozen(eq=False)
class Canonical:
    """The canonical names of a model.

    Attributes:
        shapes: every parameter by canonical name, on the meta device.
        conversions: transformers' conversions of the names in files; see ``Skeleton.conversions``.
        constants: buffers that the model's files contain, such as the biases of routers.

    Example:
        >>> from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        >>> shapes = {"mlp.experts.gate_up_proj": torch.empty(2, 6, 4), "mlp.experts.down_proj": torch.empty(2, 4, 3)}
        >>> canonical = Canonical(shapes, get_checkpoint_conversion_mapping("qwen3_moe"))
        >>> canonical.place("mlp.experts.1.up_proj.weight")
        Place(name='mlp.experts.gate_up_proj', expert=1, start=3, end=6)
        >>> canonical.place("mlp.experts.down_proj[1]")
        Place(name='mlp.experts.down_proj', expert=1, start=0, end=4)
        >>> down = {f"mlp.experts.{i}.down_proj.weight": torch.full((4, 3), float(i)) for i in range(2)}
        >>> kinds = [f"{i}.{kind}" for i in range(2) for kind in ("gate", "up")]
        >>> up = {f"mlp.experts.{kind}_proj.weight": torch.zeros(3, 4) for kind in kinds}
        >>> [(name, t[1, 0, 0].item()) for name, t in canonical.joined((down | up).items())]
        [('mlp.experts.gate_up_proj', 0.0), ('mlp.experts.down_proj', 1.0)]
    """

    shapes: Mapping[str, Tensor]
    conversions: Sequence[Any] = ()
    constants: Mapping[str, Tensor] = attrs.field(factory=dict)
    _places: dict[str, Place] = attrs.field(factory=dict, init=False)

    def place(self, hub: str) -> Place:
        """Returns where the tensor of a hub's name lies.

        Raises:
            ModelError: the model has no such tensor.
        """
        if hub not in self._places:
            self._places[hub] = self._found(hub)
        return self._places[hub]

    def _found(self, hub: str) -> Place:
        of_stack = _OF_STACK.fullmatch(hub)
        name = hub if of_stack is None else of_stack[1]
        converted, part, parts = (name, 0, 1) if name in self else self._converted(name)
        if converted not in self:
            raise ModelError(f"Megatron-Bridge maps a parameter to {hub}, but transformers' model does not have it")
        of_expert = None if converted == name else _EXPERT.search(name)
        number = of_stack[2] if of_stack is not None else of_expert and of_expert[1]
        if number is None:
            return Place(converted)
        rows = self.shapes[converted].shape[1] // parts
        return Place(converted, int(number), part * rows, (part + 1) * rows)

    def __contains__(self, name: str) -> bool:
        return name in self.shapes or name in self.constants

    def _converted(self, name: str) -> tuple[str, int, int]:
        """Returns the canonical name, and which part of an expert's rows a tensor has, of how many."""
        for conversion in self.conversions:
            name, pattern = conversion.rename_source_key(name)
            if pattern is not None and hasattr(conversion, "operations"):
                return name, conversion.source_patterns.index(pattern), len(conversion.source_patterns)
        return name, 0, 1

    def names(self, leaf: str) -> set[str]:
        """Returns the canonical names of the tensors that a leaf consists of."""
        return {self.place(hub).name for hub in leaf.split("+")}

    def of(self, hubs: Iterable[str]) -> Canonical:
        """Returns the canonical names of only these tensors."""
        names = {self.place(hub).name for hub in hubs}
        return attrs.evolve(self, shapes={name: t for name, t in self.shapes.items() if name in names})

    def joined(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields all tensors by canonical name, in the order of ``shapes``; rows that pad a vocabulary are dropped.

        Args:
            tensors: by hub's name. Tensors that come before their turn are kept until then.

        Raises:
            ModelError: parts of some tensors did not come, or one came twice.
        """
        waiting: dict[str, Tensor] = {}
        order = iter(self.shapes)
        following = next(order, None)
        for name, t in self._complete(tensors):
            waiting[name] = t
            while following in waiting:
                yield following, waiting.pop(following)
                following = next(order, None)

    def _complete(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields tensors by canonical name, each as soon as all of its parts have come."""
        come: set[Place] = set()
        stacked: dict[str, Tensor] = {}
        missing: dict[str, int] = {}
        for hub, t in tensors:
            if (place := self.place(hub)) in come:
                raise ModelError(f"Megatron-Bridge gives {hub} twice")
            come.add(place)
            shape = self.shapes[place.name].shape
            if place.expert is None:
                yield place.name, t[: shape[0]]
                continue
            if place.name not in stacked:
                stacked[place.name] = torch.empty(shape, dtype=t.dtype, device=t.device)
                missing[place.name] = shape[0] * shape[1]
            place.of(stacked[place.name]).copy_(t)
            missing[place.name] -= place.end - place.start
            if not missing[place.name]:
                yield place.name, stacked.pop(place.name)
        if lacking := sorted(self.shapes.keys() - {place.name for place in come} | stacked.keys()):
            raise ModelError(f"Megatron-Bridge has no parameter for {len(lacking)} tensors, such as {lacking[:3]}")


def for_leaves(optimizer: Any, leaves: Iterable[str], canonical: Canonical) -> Any:
    """Returns the same optimizer with masks that list leaves.

    Args:
        optimizer: from ``verl_fn.steps``; its masks take canonical names and whole tensors.
        leaves: the names of this rank's leaves.

    Raises:
        LayoutError: a mask treats two tensors of one leaf differently.

    Example:
        >>> from verl_fn.steps import adamw, no_decay
        >>> canonical = Canonical({"q.weight": torch.empty(1), "k.weight": torch.empty(1)})
        >>> decayed = adamw(1e-3, weight_decay_mask=no_decay("bias"))
        >>> for_leaves(decayed, ["q.weight+k.weight"], canonical).weight_decay_mask
        ByName(decays={'q.weight+k.weight': True})
        >>> for_leaves(adamw(1e-3, weight_decay_mask=no_decay("q")), ["q.weight+k.weight"], canonical)
        Traceback (most recent call last):
        verl_fn.backends.hf.ulysses.LayoutError: weight_decay_mask decays only some of q.weight, k.weight, which ...
    """
    if isinstance(optimizer, Chain):
        return attrs.evolve(optimizer, parts=tuple(for_leaves(part, leaves, canonical) for part in optimizer.parts))
    mask = getattr(optimizer, "weight_decay_mask", None)
    if mask is None:
        return optimizer
    decays: dict[str, bool] = {}
    for leaf in leaves:
        names = [canonical.place(hub).name for hub in leaf.split("+")]
        answers = {bool(mask(name, canonical.shapes[name])) for name in names}
        if len(answers) > 1:
            raise LayoutError(
                f"weight_decay_mask decays only some of {', '.join(names)}, which Megatron holds as one parameter; "
                "let it treat them alike"
            )
        decays[leaf] = answers.pop()
    return attrs.evolve(optimizer, weight_decay_mask=decays)


def check_slots(optimizer: Any) -> None:
    """Raises LayoutError for an optimizer's tensors outside of ``Slots``: they belong to no parameter.

    Example:
        >>> check_slots({"momentum": torch.zeros(8)})
        Traceback (most recent call last):
        verl_fn.backends.hf.ulysses.LayoutError: the optimizer's state has a tensor of shape [8] outside of Slots: ...
    """
    for part in pytree.tree_leaves(optimizer, is_leaf=lambda part: isinstance(part, Named)):
        if isinstance(part, torch.Tensor):
            raise LayoutError(
                f"the optimizer's state has a tensor of shape {list(part.shape)} outside of Slots: put tensors of "
                "the parameters' shapes into Slots under their names, so that they are divided as the parameters are"
            )
