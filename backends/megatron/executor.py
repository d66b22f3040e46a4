"""What a backend makes once: the model, its names, and the elements of it that this rank owns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from verl_fn.backends.agreement import agreed
from verl_fn.backends.hf.folder import Hollow, hollow
from verl_fn.backends.megatron.conversion import Task, tasks_of
from verl_fn.backends.megatron.layout import Layout
from verl_fn.backends.megatron.masks import for_leaves
from verl_fn.backends.megatron.model import Built, How, build
from verl_fn.backends.megatron.names import Canonical
from verl_fn.backends.megatron.shards import Piece, Resident, pieces_of
from verl_fn.state import Key
from verl_fn.steps import Optimizer

__all__ = ["Executor", "How"]


@attrs.frozen(eq=False)
class Executor:
    """Megatron's model of a folder on this rank, and what a backend needs to use it.

    Attributes:
        hollow: transformers' model without weights, for names, shapes and the files of a checkpoint.
        built: Megatron's model.
        canonical: the canonical names.
        tasks: of all parameters.
        pieces: this rank's, by leaf.
        resident: which values Megatron's buffers hold.
        optimizer: for these leaves.
    """

    hollow: Hollow
    built: Built
    canonical: Canonical
    tasks: list[Task]
    pieces: dict[str, Piece]
    resident: Resident
    optimizer: Any

    @classmethod
    def of(cls, folder: Path, optimizer: Optimizer, layout: Layout, how: How) -> Executor:
        """Makes the model of a folder; all ranks call it together.

        Raises:
            ModelError: Megatron-Bridge does not know this family, or a field of its provider does not exist.
            LayoutError: the model cannot be shared in this way.
        """
        with agreed():
            empty = hollow(folder, how.head, key=Key.from_seed(0))
            built = build(folder, layout, how)
        canonical = Canonical(empty.shapes)
        with layout.active():
            tasks = tasks_of(built.bridge, built.config, built.model, how.head, canonical)
            by_param = pieces_of(built.ddp, layout)
        pieces = {task.leaf: by_param[task.param] for task in tasks if task.param is not None}
        with agreed():
            own_optimizer = for_leaves(optimizer, pieces, canonical)
        resident = Resident(built.ddp, pieces, layout, built.tied)
        return cls(empty, built, canonical, tasks, pieces, resident, own_optimizer)
