"""Saves and restores states under canonical names, as every backend does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from verl_fn.backends import checkpoint
from verl_fn.backends.agreement import gathered, readable_weights
from verl_fn.backends.hf.folder import Hollow
from verl_fn.backends.hf.lora import ADAPTERS, FrozenBase, Reference, in_peft
from verl_fn.backends.megatron.executor import Executor
from verl_fn.backends.tensor_file import Span
from verl_fn.state import Key, Named, Params, TrainState
from verl_fn.state.node import FrozenDict, rebuild
from verl_fn.state.tree import flatten


def save(
    state: TrainState,
    folder: Path,
    model: Executor,
    made_from: Path,
    dtype: torch.dtype,
    base: FrozenBase | None,
    *,
    later: bool,
) -> checkpoint.Writing:
    """Begins to write a state into ``folder``; all ranks call it together.

    Whole tensors are gathered one after the other, and each is kept and written by one rank, in turn.

    Args:
        base: the frozen weights, if the checkpoint refers to them.
        later: see ``begin_save``.
    """
    layout, skeleton = model.layout, model.hollow.skeleton
    number = 0

    def parts(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Span]:
        nonlocal number
        of_rank = {}
        for name, t in tensors:
            elements = t.detach().reshape(-1)
            if number % layout.size != layout.rank:
                elements = elements[:0]
            of_rank[name] = Span(elements.to("cpu", copy=True), 0, t.shape)
            number += 1
        return of_rank

    skeleton.check_buffers(state.buffers)
    others, scalars = flatten(attrs.evolve(state, params=Params({}), optimizer=_hollow(state.optimizer)))
    rest = parts(iter(others.items()))
    for path, value in named_parts(state.optimizer):
        rest |= parts((f".optimizer{path}[{name!r}]", t) for name, t in model.named(value))
    if base is None:
        file, weights = checkpoint.MODEL, parts(model.merged(state.params)) | parts(iter(state.buffers.items()))
        # What the merged model cannot restore: the adapters, and the weights that they were added to.
        unmerged = skeleton.adapters.unmerged(model.blank)
        if unmerged.leaves:
            kept = {leaf: t for leaf, t in state.params.items() if unmerged.keys() >= model.canonical.names(leaf)}
            rest |= parts((f".params[{name!r}]", t) for name, t in model.named(kept))
    else:
        trained = {leaf: state.params[leaf] for leaf in state.params.trained()}
        file, weights = ADAPTERS, parts((in_peft(name), t) for name, t in model.named(trained))

    def describe(folder: Path) -> None:
        checkpoint.describe_model(folder, skeleton, made_from, dtype, base)

    return checkpoint.begin_save(
        folder, weights, rest, scalars, describe, file=file, gather=gathered, rank=layout.rank, later=later
    )


def restore(
    folder: Path,
    model: Executor,
    optimizer: Any,
    on_base: Callable[[Reference, Path, Mapping[str, Tensor]], Params],
) -> TrainState:
    """Returns the state that ``save`` of any backend wrote; all ranks call it together.

    Args:
        optimizer: for canonical names.
        on_base: adds the frozen weights that a checkpoint refers to to the trained ones.

    Raises:
        CheckpointError: on all ranks, if a file is missing, damaged, or of another model or optimizer.
    """
    skeleton, blank, adapters = model.hollow.skeleton, model.blank, model.adapters
    trained, reference = blank.trained(), Reference.read(folder)
    rest = TrainState(Params({}), optimizer.init(blank), 0, Key.from_seed(0), 0)
    if reference is not None:
        weights = {in_peft(name): blank[name] for name in trained}
        read, read_rest, hollow = checkpoint.open_state(folder, weights, rest, file=ADAPTERS, gather=gathered)
        own = model.read(lambda name, start, end: read(in_peft(name), start, end), trained)
        params = on_base(reference, folder, own)
    else:
        rest = attrs.evolve(rest, params=adapters.unmerged(blank))
        like = skeleton.new_buffers(next(iter(model.pieces.values())).param.device)
        weights = {**adapters.merged_like(blank), **{name: b.to("meta") for name, b in like.items()}}
        frozen = blank.keys() - set(trained)
        read, read_rest, hollow = checkpoint.open_state(folder, weights, rest, gather=gathered, frozen=frozen)

        def rows(name: str, start: int, end: int) -> Tensor:
            if name in rest.params:
                return read_rest(f".params[{name!r}]", start, end)
            return read(name, start, end)

        params = Params(model.read(rows, blank.keys()), model.trainable, checkpoint.read_buffers(folder, like))
    return attrs.evolve(hollow, params=params, optimizer=_moments(hollow.optimizer, read_rest, model))


def _moments(optimizer: Any, read: checkpoint.Read, model: Executor) -> Any:
    """Returns an optimizer's state, with what this rank owns of the tensors."""

    def fill(path: Any, part: Any) -> Any:
        if not isinstance(part, Named):
            return part

        def rows(name: str, start: int, end: int) -> Tensor:
            return read(f".optimizer{pytree.keystr(path)}[{name!r}]", start, end)

        return rebuild(type(part), {"leaves": FrozenDict(model.read(rows, part.keys()))})

    return pytree.tree_map_with_path(fill, optimizer, is_leaf=lambda part: isinstance(part, Named))


def readable(folder: str | Path, model: Hollow) -> checkpoint.Read | None:
    """Returns a function that reads rows of a folder's weights, or None where transformers has to convert them.

    Adapters come from ``model``, since no folder has them.

    All ranks call it together.

    Raises:
        ModelError: some ranks can read them, and others cannot.
        LayoutError: ranks read different weights.
    """
    weights = readable_weights(folder, model)
    if weights is None:
        return None

    def rows(name: str, start: int, end: int) -> Tensor:
        if name in model.adapters:
            return model.adapters[name][start:end]
        into = torch.empty(end - start, *weights.shapes[name][1:])
        return weights.read(name, start, end, into)

    return rows


def named_parts(tree: Any) -> Iterator[tuple[str, Named]]:
    """Yields the mappings by name in a tree, by path."""
    for path, part in pytree.tree_flatten_with_path(tree, is_leaf=lambda part: isinstance(part, Named))[0]:
        if isinstance(part, Named):
            yield pytree.keystr(path), part


def _hollow(tree: Any) -> Any:
    """Returns a tree with empty mappings by name."""
    return pytree.tree_map_only(
        Named,
        lambda part: rebuild(type(part), {"leaves": FrozenDict()}),
        tree,
        is_leaf=lambda part: isinstance(part, Named),
    )
