"""Names of the hub's files and canonical names: they differ for experts.

Canonical names are the names in transformers' models; these stack the experts of a layer. Megatron-Bridge
speaks of one tensor for each expert, as files on the hub do.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping

import attrs
import torch
from torch import Tensor

from verl_fn.backends.hf.config import ModelError

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


@attrs.frozen
class Place:
    """Where the tensor of a hub's name lies among the canonical ones.

    Attributes:
        name: the canonical name.
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


@attrs.frozen(eq=False, slots=False)
class Canonical:
    """The canonical names of a model.

    Attributes:
        shapes: every parameter by canonical name, on the meta device.

    Example:
        >>> shapes = {"a.experts.gate_up_proj": torch.empty(2, 6, 4), "a.experts.down_proj": torch.empty(2, 4, 3)}
        >>> canonical = Canonical(shapes)
        >>> canonical.place("a.experts.1.up_proj.weight")
        Place(name='a.experts.gate_up_proj', expert=1, start=3, end=6)
        >>> down = {f"a.experts.{i}.down_proj.weight": torch.full((4, 3), float(i)) for i in range(2)}
        >>> up = {f"a.experts.{i}.{kind}_proj.weight": torch.zeros(3, 4) for i in range(2) for kind in ("gate", "up")}
        >>> [(name, t[1, 0, 0].item()) for name, t in canonical.joined((down | up).items())]
        [('a.experts.gate_up_proj', 0.0), ('a.experts.down_proj', 1.0)]
    """

    shapes: Mapping[str, Tensor]

    def place(self, hub: str) -> Place:
        """Returns where the tensor of a hub's name lies.

        Raises:
            ModelError: the model has no such tensor.
        """
        if hub in self.shapes:
            return Place(hub)
        if (match := _EXPERT.fullmatch(hub)) is not None:
            prefix, number, kind = match.groups()
            name = f"{prefix}.down_proj" if kind == "down_proj" else f"{prefix}.gate_up_proj"
            if name in self.shapes:
                rows = self.shapes[name].shape[1]
                start, end = {"gate_proj": (0, rows // 2), "up_proj": (rows // 2, rows)}.get(kind, (0, rows))
                return Place(name, int(number), start, end)
        raise ModelError(f"Megatron-Bridge maps a parameter to {hub}, but transformers' model does not have it")

    def names(self, leaf: str) -> set[str]:
        """Returns the canonical names of the tensors that a leaf consists of."""
        return {self.place(hub).name for hub in leaf.split("+")}

    def of(self, hubs: Iterable[str]) -> Canonical:
        """Returns the canonical names of only these tensors."""
        names = {self.place(hub).name for hub in hubs}
        return Canonical({name: t for name, t in self.shapes.items() if name in names})

    def position(self, hubs: Iterable[str]) -> int:
        """Returns the place of the first of these tensors in the order of the canonical names."""
        return min(self._positions[self.place(hub).name] for hub in hubs)

    @functools.cached_property
    def _positions(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.shapes)}

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
        stacked: dict[str, Tensor] = {}
        missing: dict[str, set[tuple[int, int]]] = {}
        done: set[str] = set()
        for hub, t in tensors:
            place = self.place(hub)
            shape = self.shapes[place.name].shape
            if place.name in done:
                raise ModelError(f"Megatron-Bridge gives {hub} twice")
            if place.expert is None:
                done.add(place.name)
                yield place.name, t[: shape[0]]
                continue
            if place.name not in stacked:
                stacked[place.name] = torch.empty(shape, dtype=t.dtype, device=t.device)
                starts = {0} if place.name.endswith("down_proj") else {0, shape[1] // 2}
                missing[place.name] = {(expert, start) for expert in range(shape[0]) for start in starts}
            if (place.expert, place.start) not in missing[place.name]:
                raise ModelError(f"Megatron-Bridge gives {hub} twice")
            place.of(stacked[place.name]).copy_(t)
            missing[place.name].remove((place.expert, place.start))
            if not missing[place.name]:
                done.add(place.name)
                yield place.name, stacked.pop(place.name)
        if lacking := sorted(self.shapes.keys() - done):
            raise ModelError(f"Megatron-Bridge has no parameter for {len(lacking)} tensors, such as {lacking[:3]}")
