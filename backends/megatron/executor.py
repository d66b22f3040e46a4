"""What a backend makes once: the model, its names, and the elements of it that this rank owns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from verl_fn.backends.agreement import agreed, gathered
from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.folder import Hollow, hollow
from verl_fn.backends.hf.lora import Adapters
from verl_fn.backends.hf.ulysses import LayoutError
from verl_fn.backends.hf.vision import Family
from verl_fn.backends.megatron import conversion
from verl_fn.backends.megatron.conversion import Task, tasks_of
from verl_fn.backends.megatron.distributed_optimizer import Distributed
from verl_fn.backends.megatron.fidelity import check_head, check_same_model, take_epsilons
from verl_fn.backends.megatron.gathering import Parts
from verl_fn.backends.megatron.layout import Layout
from verl_fn.backends.megatron.model import Built, How, build
from verl_fn.backends.megatron.names import Canonical, for_leaves
from verl_fn.backends.megatron.routing import Routers, Routing
from verl_fn.backends.megatron.shards import Piece, Resident, check_leaves, pieces_of, sharded_pieces
from verl_fn.state import Buffers, Key, Params
from verl_fn.steps import Frozen, Optimizer


@attrs.frozen(eq=False)
class Executor:
    """Megatron's model of a folder on this rank, and what a backend needs to use it.

    Attributes:
        hollow: transformers' model without weights, for names, shapes and the files of a checkpoint.
        of_buffers: the tasks of all buffers.
        parts: of all parameters, on all ranks.
        resident: which values Megatron's buffers hold.
        optimizer: for these leaves.
        zeros: what a value without adapters has in their place, by leaf.
        routers: that record and replay the experts of tokens; None if the model's own routers decide.
        padded: rows are padded to one length, since some layer would mix rows that lie end to end.
    """

    layout: Layout
    hollow: Hollow
    built: Built
    canonical: Canonical
    tasks: list[Task]
    of_buffers: list[Task]
    parts: Parts
    pieces: dict[str, Piece]
    resident: Resident
    optimizer: Any
    zeros: dict[str, Tensor]
    routers: Routers | None
    padded: bool

    @classmethod
    def of(cls, folder: Path, optimizer: Optimizer, layout: Layout, how: How) -> Executor:
        """Makes the model of a folder; all ranks call it together.

        Raises:
            ModelError: there is no CUDA device, Megatron-Bridge does not know this family or makes another model of
                it, or a field of its provider does not exist.
            LayoutError: the model cannot be shared in this way.
            LoraError: the model cannot have such adapters.
        """
        with agreed():
            check_cuda()
            trains = not isinstance(optimizer, Frozen)
            empty = hollow(
                folder, how.head, key=Key.from_seed(0), lora=how.lora, frozen=how.dtype, trained=trains,
                freeze_tower=how.freeze_tower,
            )  # fmt: skip
            check_head(empty.skeleton, folder)
            adapters = empty.skeleton.adapters
            built = build(folder, layout, how, empty.skeleton)
            theirs = empty.skeleton.model if built.sight is None else empty.skeleton.language_model
            check_same_model(built.model, theirs, folder)
        padded = not all(gathered(built.keeps_rows_apart))
        if padded and layout.sizes.cp > 1:
            raise LayoutError(f"{folder}: some layers need padded rows, and ranks cannot share them; set cp to 1")
        # The ones that only rename come first.
        conversions = sorted(empty.skeleton.conversions, key=lambda one: hasattr(one, "operations"))
        canonical = Canonical(empty.shapes, conversions, empty.skeleton.constants)
        with layout.active():
            tasks, of_buffers = tasks_of(built.bridge, built.config, built.model, how.head, canonical, adapters)
            with agreed():
                take_epsilons(tasks, canonical, empty.skeleton.model, folder)
            by_param = (sharded_pieces if how.fsdp else pieces_of)(built.ddp, layout)
        check_mapped(canonical, tasks, folder)
        pieces = {
            task.leaf: attrs.evolve(by_param[task.param], shift=task.shift)
            for task in tasks
            if task.param is not None
        }
        with agreed():
            own_optimizer = for_leaves(optimizer, pieces, canonical)
        resident = Resident(built.ddp, pieces, layout, built.tied)
        if how.updates_by == "megatron" and trains:
            own_optimizer = Distributed.of(own_optimizer, resident, how.dtype)
        zeros = {
            leaf: torch.zeros(piece.stop - piece.start, device=how.device)
            for leaf, piece in pieces.items()
            if leaf in empty.adapters
        }
        routers = Routers.of(built.model) if how.router_replay else None
        # A model that is not trained needs none.
        resident.gradients.free()
        own = [None if task.param is None else pieces[task.leaf] for task in tasks]
        parts = Parts.of(layout, own, [task.hub for task in tasks])
        return cls(
            layout, empty, built, canonical, tasks, of_buffers, parts, pieces, resident, own_optimizer, zeros,
            routers, padded,
        )  # fmt: skip

    def optimizer_for(self, optimizer: Optimizer) -> Any:
        """Returns the optimizer of one update for these leaves, by the way that this model's updates are computed."""
        with agreed():
            own = for_leaves(optimizer, self.pieces, self.canonical)
            return self.optimizer.with_settings_of(own) if isinstance(self.optimizer, Distributed) else own

    @property
    def adapters(self) -> Adapters:
        """The adapters; without LoRA there are none."""
        return self.hollow.skeleton.adapters

    @property
    def trainable(self) -> frozenset[str] | None:
        """The names of the trained leaves, or None for all."""
        names, skeleton = self.hollow.skeleton.trainable, self.hollow.skeleton
        if names is None or not skeleton.frozen_names:
            return names
        return frozenset(task.leaf for task in self.tasks if self.canonical.names(task.leaf) <= names)

    def trained_names(self, params: Params) -> frozenset[str] | None:
        """Returns the canonical names of what is trained of these parameters, or None for all."""
        if params.trainable is None:
            return None
        return frozenset(name for leaf in params.trainable for name in self.canonical.names(leaf))

    @property
    def sees(self) -> tuple[Family, Any] | None:
        """The family and the config of a model with images; None for a model of text."""
        skeleton = self.hollow.skeleton
        return None if self.built.sight is None or skeleton.family is None else (skeleton.family, skeleton.config)

    def check(self, *values: Mapping[str, Tensor]) -> None:
        """Raises LayoutError on all ranks for values of another layout: on some, they may look like this one's."""
        every = self.pieces.keys()
        expected = [every, every - self.zeros.keys(), [n for n in every if self.pieces[n].trained]]
        with agreed():
            for value in values:
                check_leaves(value, self.pieces, expected)

    def check_trained(self, params: Params) -> None:
        """Raises an error on all ranks for parameters of which others are trained than the model has gradients of.

        Raises:
            LayoutError: there are such, or the parameters are of another layout.
        """
        self.check(params)
        with agreed():
            frozen = [name for name in params.trained() if not self.pieces[name].trained]
            if frozen:
                raise LayoutError(
                    f"{len(frozen)} trainable parameters, such as {frozen[0]}, are frozen in Megatron's model, which "
                    "trains adapters; leave params.trainable as the backend made it"
                )

    def holding(self, params: Params) -> AbstractContextManager[None]:
        """Holds these parameters in Megatron's buffers for one pass, with zeros for adapters that they lack."""
        leaves = params.leaves
        return self.resident.held({**leaves, **self.zeros} if self.zeros.keys().isdisjoint(leaves) else leaves)

    def hold_buffers(self, buffers: Buffers) -> None:
        """Copies these buffers to Megatron's; they are small, so each call does.

        Raises:
            ValueError: they are not this model's.
        """
        self.hollow.skeleton.check_buffers(buffers)
        for task in self.of_buffers:
            conversion.fill(task, self.canonical, buffers)

    def gradients(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Returns copies of the elements that this rank owns of Megatron's gradients."""
        views = {name: self.pieces[name].gradient for name in names}
        copies = {name: torch.empty_like(view) for name, view in views.items()}
        if filled := [name for name, view in views.items() if view.numel()]:
            torch._foreach_copy_([copies[name] for name in filled], [views[name] for name in filled])
        return copies

    def routing(self, record: bool = False) -> AbstractContextManager[Routing | None]:
        """Returns a context for one call, with what its routers record or replay; None if Megatron's own decide."""
        return contextlib.nullcontext() if self.routers is None else self.routers.in_use(record=record)

    @property
    def blank(self) -> Params:
        """Whole parameters by canonical name, on the meta device."""
        return Params(self.canonical.shapes, self.hollow.skeleton.trainable)

    def divided(
        self, read: Callable[[str], Tensor], names: Collection[str], together: bool = False
    ) -> dict[str, Tensor]:
        """Returns the elements that this rank owns of the whole tensors of these names; all ranks call it together.

        Args:
            read: returns a whole tensor by hub's name, on the CPU.
            together: whether all ranks have to read the same tensors in the same order.

        Raises:
            ValueError: there are no such parameters, or a parameter of Megatron consists of others, too.
        """
        wanted, covered, tasks = set(names), set[str](), []
        for task in self.tasks:
            parts = {self.canonical.place(hub).name for hub in task.hub_anywhere}
            if parts <= wanted:
                tasks.append(task)
                covered |= parts
        if differing := wanted - covered:
            raise ValueError(
                f"{len(differing)} tensors, such as {min(differing)}, are not whole parameters of this model"
            )
        with self.layout.active():
            return conversion.divided(tasks, self.pieces, read, self.canonical, together)

    def read(self, rows: Callable[[str, int, int], Tensor], names: Collection[str]) -> dict[str, Tensor]:
        """Returns the same as ``divided``, of tensors whose rows a function reads.

        Args:
            rows: takes a canonical name, the first row and the one after the last.
            names: of the tensors.
        """
        return self.divided(conversion.in_rows(self.canonical, rows), names)

    def named(self, leaves: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields whole tensors by canonical name; all ranks go through them together."""
        tensors = conversion.named(self.tasks, self.parts, self.canonical, leaves)
        while True:
            # Between two tensors, the caller may use another backend.
            with self.layout.active():
                item = next(tensors, None)
            if item is None:
                return
            yield item

    def merged(self, params: Params) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of the model without adapters, with the adapters added; all ranks go through them."""
        own = {name: t for name, t in params.items() if name in self.zeros}
        rest = {name: t for name, t in params.items() if name not in self.zeros}
        halves = dict(self.named(own)) if self.adapters.layers else {}
        for name, t in self.named(rest):
            yield from self.adapters.merged(Params({name: t, **halves}))


def check_mapped(canonical: Canonical, tasks: list[Task], folder: Path) -> None:
    """Checks that Megatron-Bridge maps every parameter of transformers' model.

    Raises:
        ModelError: it lacks some: the model that Bridge makes does not have them, or ties them to others.
    """
    mapped = {canonical.place(hub).name for task in tasks for hub in task.hub_anywhere}
    if lacking := sorted(canonical.shapes.keys() - mapped):
        raise ModelError(
            f"{folder}: Megatron-Bridge maps nothing to {len(lacking)} parameters of transformers' model, such as "
            f"{lacking[0]}; correct the bridge or its provider, or set actor.strategy=fsdp"
        )


def check_cuda() -> None:
    """Raises ModelError unless there is a CUDA device for megatron-core."""
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise ModelError(
            "Megatron computes on CUDA devices, and torch finds none here; on CPUs it runs only from a checkout "
            "(docs/megatron.md, On CPUs)"
        ) from error
