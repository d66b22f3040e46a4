"""A training state as a folder that is also a Hugging Face model folder, written and read by all ranks at once.

``model.safetensors``, ``config.json`` and the tokenizer are what ``from_pretrained`` wants;
``train_state.safetensors`` and ``train_state.json`` hold the rest, under canonical names. Experts lie stacked, as they
are computed with; ``verl-fn export`` writes them as the hub has them. Which ranks wrote it cannot be seen: the same
state gives the same bytes. Files are written aside and renamed when all are whole, ``train_state.json`` last: a folder
without it holds no state, whatever else a kill left there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils import _pytree as pytree

from verl_fn.backends.agreement import Gather, agreed, alone
from verl_fn.backends.checkpoint import tensor_file
from verl_fn.backends.checkpoint.tensor_file import Part, Rows, sync
from verl_fn.backends.hf.folder import quiet
from verl_fn.backends.hf.lora import ABOUT
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.errors import UserError
from verl_fn.state import tree
from verl_fn.state.serial import Scalar, flatten, unflatten

MODEL, TENSORS, SCALARS = "model.safetensors", "train_state.safetensors", "train_state.json"
_ASIDE = ".writing"
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template.*", "*.model")

T = TypeVar("T")


class CheckpointError(UserError, ValueError):
    """A folder that does not hold a whole training state."""


def save_state(
    folder: str | Path,
    model: Mapping[str, Part],
    rest: Mapping[str, Part],
    scalars: Mapping[str, Scalar],
    describe: Callable[[Path], None] = lambda folder: None,
    *,
    gather: Gather = alone,
    rank: int = 0,
) -> None:
    """Write a state into ``folder``; every rank of ``gather`` calls it, with its own parts.

    Args:
        model: what ``model.safetensors`` shall hold: tensors under the names that transformers knows.
        rest: the other tensors, under any names.
        describe: writes what belongs beside the weights, on the first rank.
        gather: the values of all ranks, by rank.

    Raises:
        OSError: some rank cannot write; all of them raise it, and what the folder held stays. Where it is
            only the giving of names that fails, ``restore`` refuses the folder.
    """
    folder, aside = Path(folder), Path(folder) / _ASIDE
    files = {MODEL: model, TENSORS: rest}
    try:
        with agreed(gather):
            if rank == 0:
                # A killed save has left its own.
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
                describe(aside)
                for name, parts in files.items():
                    tensor_file.start(aside / name, parts)
                (aside / SCALARS).write_text(json.dumps(scalars, indent=1))
        with agreed(gather):
            for name, parts in files.items():
                tensor_file.fill(aside / name, parts)
        with agreed(gather):
            if rank == 0:
                _publish(aside, folder)
    finally:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)


def _publish(aside: Path, folder: Path) -> None:
    """Give the files their names; for as long as they are a mixture, there is no ``train_state.json``."""
    names = sorted(file.name for file in aside.iterdir() if file.name != SCALARS)
    for name in (*names, SCALARS):
        sync(aside / name)
    for name in (SCALARS, ABOUT):
        (folder / name).unlink(missing_ok=True)
        sync(folder)
    for name in names:
        (aside / name).replace(folder / name)
    sync(folder)
    (aside / SCALARS).replace(folder / SCALARS)
    sync(folder)
    # Before the other ranks go on.
    aside.rmdir()


def read_state(
    folder: str | Path,
    model: Mapping[str, Tensor],
    rest: T,
    *,
    rows: Rows = lambda count: (0, count),
    device: str | torch.device = "cpu",
    gather: Gather = alone,
) -> tuple[dict[str, Tensor], T]:
    """The tensors of ``model.safetensors`` and the rest of the state in ``folder``, bitwise.

    Args:
        model: what the model's file must hold; tensors on the meta device are read, others must be the same there.
        rest: the structure of the rest, with whole tensors on the meta device.
        rows: the rows of a tensor that this rank wants, by the number of all.
        device: where they go.
        gather: the values of all ranks, by rank.

    Raises:
        CheckpointError: the save was not finished, or a file is missing or damaged, or belongs to another model or
            optimizer; where some rank finds so, all of them raise it.
    """
    folder, device = Path(folder), torch.device(device)
    with agreed(gather):
        check_finished(folder)
        try:
            weights = tensor_file.read(folder / MODEL, model, rows, device)
            tensors = tensor_file.read(folder / TENSORS, flatten(rest)[0], rows, device)
            scalars = json.loads((folder / SCALARS).read_text())
            hollow = unflatten(tree.map_tensors(lambda t: None, rest), {}, scalars)
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"{folder} does not hold this training state: {error}") from error
    fill = lambda path, leaf: tensors.get(pytree.keystr(path), leaf)  # noqa: E731
    return weights, pytree.tree_map_with_path(fill, hollow)


def check_finished(folder: str | Path) -> None:
    """Whether a save of a training state into ``folder`` has come to its end.

    Raises:
        CheckpointError: it has not, or none was ever begun.
    """
    if not (Path(folder) / SCALARS).is_file():
        raise CheckpointError(
            f"{folder} does not hold this training state: it has no {SCALARS}, so its save was not finished, or it is "
            f"a model alone"
        )


def about(folder: str | Path) -> bytes:
    """What tells the training state in ``folder`` from others; nothing where there is none."""
    file = Path(folder) / SCALARS
    return file.read_bytes() if file.is_file() else b""


def describe_model(folder: Path, skeleton: Skeleton, made_from: Path) -> None:
    """Write a model's config and a note of its adapters, and copy the tokenizer of the folder it was made from."""
    with quiet():
        # With no weights, it writes all that belongs beside them.
        skeleton.model.save_pretrained(folder, state_dict={})
    skeleton.adapters.write(folder, made_from)
    for pattern in _TOKENIZER_FILES:
        for file in made_from.glob(pattern):
            if not (folder / file.name).exists():
                shutil.copy(file, folder / file.name)


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """What safetensors says of a disk as the ``OSError`` that it was."""
    try:
        yield
    except SafetensorError as error:
        if (found := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(folder)) from error
