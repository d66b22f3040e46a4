"""Gathers whole tensors of Megatron's parameters, many with one exchange between ranks.

Each element of the model belongs to one rank. So the ranks add up buckets, in which each has written the elements
that it owns, at the same places on all ranks. Then every rank has the parts of all ranks of tensor and expert
parallelism and of all stages, and Megatron-Bridge's mappings make whole tensors of them without exchanging anything.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from verl_fn.backends.agreement import gathered
from verl_fn.backends.megatron.layout import Layout
from verl_fn.backends.megatron.shards import Piece
from verl_fn.backends.protocol import BUCKET_BYTES
from verl_fn.state.guards import with_attributes


@attrs.frozen
class Part:
    """A part of a parameter, held by the ranks of one place in tensor and expert parallelism.

    Attributes:
        stage: the pipeline stage.
        tp: the place in tensor parallelism; 0 where all of its ranks hold the same.
        ep: the place in expert parallelism; 0 outside of experts.
        shape: of the part.
        names: the hub's names of its tensors.
    """

    stage: int
    tp: int
    ep: int
    shape: torch.Size
    names: tuple[str, ...]


@attrs.frozen(eq=False)
class Parts:
    """The parts of each parameter on all ranks.

    Attributes:
        pieces: this rank's piece of each, None where another stage has the parameter.
        own: this rank's part of each.
        every: the parts of each, of the first stage that has it.
    """

    layout: Layout
    pieces: list[Piece | None]
    own: list[Part | None]
    every: list[list[Part]]

    @classmethod
    def of(cls, layout: Layout, pieces: Sequence[Piece | None], names: Sequence[tuple[str, ...]]) -> Parts:
        """Compares the parts of all ranks; all ranks call it together.

        Args:
            pieces: this rank's piece of each parameter, None where another stage has it.
            names: the hub's names of its tensors on this rank.
        """
        own = [None if piece is None else _part(layout, piece, names[i]) for i, piece in enumerate(pieces)]
        by_rank, every = gathered(own), []
        for number in range(len(own)):
            distinct = {part for of_rank in by_rank if (part := of_rank[number]) is not None}
            first = min(part.stage for part in distinct)
            every.append(sorted((p for p in distinct if p.stage == first), key=lambda p: (p.ep, p.tp)))
        return cls(layout, list(pieces), own, every)

    def buckets(self, numbers: Sequence[int], nbytes: int = BUCKET_BYTES) -> Iterator[list[int]]:
        """Yields the numbers of parameters that are gathered together: at least one, and at most ``nbytes``."""
        bucket: list[int] = []
        room = nbytes
        for number in numbers:
            size = 4 * sum(part.shape.numel() for part in self.every[number])
            if bucket and size > room:
                yield bucket
                bucket, room = [], nbytes
            bucket.append(number)
            room -= size
        if bucket:
            yield bucket

    def exchanged(
        self, numbers: Sequence[int], leaves: Sequence[Tensor | None]
    ) -> tuple[int, dict[int, dict[Part, Tensor]]]:
        """Returns the parts of some parameters, as views of one bucket, and its address; all ranks call it together.

        Bits are added up, since adding zeros would turn -0.0 into 0.0.

        Args:
            numbers: of the parameters.
            leaves: the elements that this rank owns of each; None for parameters that the value does not have here.
        """
        device = next(piece.param.device for piece in self.pieces if piece is not None)
        parts = [(number, part) for number in numbers for part in self.every[number]]
        sizes = [part.shape.numel() for _, part in parts]
        flat = torch.zeros(sum(sizes), device=device)
        by_number: dict[int, dict[Part, Tensor]] = {number: {} for number in numbers}
        for (number, part), view in zip(parts, flat.split(sizes), strict=True):
            by_number[number][part] = view.view(part.shape)
        for number, leaf in zip(numbers, leaves, strict=True):
            piece, own = self.pieces[number], self.own[number]
            if piece is not None and leaf is not None and own in by_number[number]:
                by_number[number][own].view(-1)[piece.start : piece.stop].copy_(leaf)
        if self.layout.size > 1:
            dist.all_reduce(flat.view(torch.int32))
        return flat.untyped_storage().data_ptr(), by_number


def _part(layout: Layout, piece: Piece, names: tuple[str, ...]) -> Part:
    shared = layout.sizes.tp > 1 and not piece.of_expert and not piece.replicated
    ep = layout.groups.ep.rank() if piece.of_expert else 0
    return Part(layout.groups.pp.rank(), layout.tp_rank if shared else 0, ep, piece.param.shape, names)


def converted(mapping: Any, module: Any, parts: Mapping[Part, Tensor], tp: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a parameter by hub's name, as a mapping makes them of all parts.

    Args:
        module: Megatron's module that has the parameter, None where it is on another stage.
        parts: the parts of all ranks.
        tp: the number of ranks of tensor parallelism.
    """
    for ep in sorted({part.ep for part in parts}):
        of_rank = [part for part in parts if part.ep == ep]
        shards = [parts[part] for part in of_rank] * (1 if len(of_rank) > 1 else tp)
        names = names_of(mapping.hf_param)
        with _without_exchange(_gathering(mapping, module, shards)):
            tensors = mapping.megatron_to_hf(shards[0], module)
        for name, t in tensors.items():
            yield of_rank[0].names[names.index(name)], t


def names_of(hub: str | Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of a parameter's tensors, of which a mapping has one or several."""
    return (hub,) if isinstance(hub, str) else tuple(hub.values())


# Of Bridge's class of mappings, shared by all threads.
_EXCHANGE = threading.RLock()


Gather = Callable[[Tensor], list[Tensor]]


def _gathering(mapping: Any, module: Any, shards: list[Tensor]) -> Gather:
    """Returns what gathers a tensor of a mapping that is given the first of ``shards``: what ranks would send it.

    Most mappings send the parameter itself; some send parts of it, one after the other.
    """
    sent: list[list[Tensor]] = []
    numbers = itertools.count()

    def gather(t: Tensor) -> list[Tensor]:
        if t is shards[0]:
            return shards
        if not sent:
            sent.extend(_sent(mapping, module, shard, len(shards)) for shard in shards)
        number = next(numbers)
        return [of_rank[number] for of_rank in sent]

    return gather


def _sent(mapping: Any, module: Any, shard: Tensor, ranks: int) -> list[Tensor]:
    """Returns what a mapping that is given this shard sends to the other ranks, in order."""
    sent: list[Tensor] = []

    def keep(t: Tensor) -> list[Tensor]:
        sent.append(t)
        return [t] * ranks

    with _without_exchange(keep):
        mapping.megatron_to_hf(shard, module)
    return sent


@contextlib.contextmanager
def _without_exchange(gather: Gather) -> Iterator[None]:
    """Makes Bridge's mappings call ``gather`` instead of asking other ranks."""
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    without = with_attributes(
        MegatronParamMapping,
        broadcast_from_pp_rank=lambda mapping, tensor, cache_key=None: tensor,
        gather_from_tp_ranks=lambda mapping, tensor: gather(tensor),
        gather_from_ep_ranks=lambda mapping, tensor, module, name: {str(name): tensor},
    )
    with _EXCHANGE, without:
        yield
