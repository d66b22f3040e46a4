"""A training state as a folder that is also a Hugging Face model folder.

``model.safetensors``, ``config.json`` and the tokenizer are what ``from_pretrained`` wants;
``train_state.safetensors`` and ``train_state.json`` hold the rest, under canonical names.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from verl_fn.state import Params, TrainState
from verl_fn.state.serial import flatten, unflatten

from .model import quiet

TENSORS, SCALARS = "train_state.safetensors", "train_state.json"
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template.*", "*.model")


class CheckpointError(ValueError):
    """A folder that does not hold a whole training state."""


def save_state(state: TrainState, model: Any, folder: str | Path, *, tokenizer_from: str | Path) -> None:
    """Write ``state`` into ``folder``. ``model`` is the transformers model that its names belong to."""
    folder = Path(folder)
    with disk_errors(folder):
        _save(state, model, folder, Path(tokenizer_from))


def _save(state: TrainState, model: Any, folder: Path, tokenizer_from: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: t.detach().cpu().contiguous() for name, t in state.params.items()}
    persistent = model.state_dict(keep_vars=True)
    weights |= {name: b.cpu() for name, b in model.named_buffers() if name in persistent}
    with quiet():
        model.save_pretrained(folder, state_dict=weights)
    for pattern in _TOKENIZER_FILES:
        for file in tokenizer_from.glob(pattern):
            if not (folder / file.name).exists():
                shutil.copy(file, folder / file.name)
    tensors, scalars = flatten(_rest(state))
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, folder / TENSORS)
    (folder / SCALARS).write_text(json.dumps(scalars, indent=1))


def restore_state(folder: str | Path, like: TrainState) -> TrainState:
    """The state in ``folder``; ``like`` holds its parameters already, and the structure of the rest.

    Raises:
        CheckpointError: a file is missing or damaged, or belongs to another model or optimizer.
    """
    folder = Path(folder)
    try:
        tensors = load_file(folder / TENSORS)
        scalars = json.loads((folder / SCALARS).read_text())
        rest = unflatten(_rest(like), tensors, scalars)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder} does not hold this training state: {error}") from error
    return attrs.evolve(rest, params=like.params)


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """What safetensors says of a disk as the ``OSError`` that it was."""
    try:
        yield
    except SafetensorError as error:
        if (found := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(folder)) from error


def _rest(state: TrainState) -> TrainState:
    """All but what ``model.safetensors`` holds."""
    return attrs.evolve(state, params=Params({}))
