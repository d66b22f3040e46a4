"""Loads the parameters of a model folder as shards: each rank reads its own rows, or the first rank sends them.

Where the folder's files name and shape tensors as the model does, all ranks read at once, each its own rows
(``FolderWeights``). For any other folder, and for random weights (one sequence of draws), the first rank makes
the whole model and sends it block by block, so the others never hold more than a block beside their shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from verl_fn.backends.agreement import agreed, gathered, require_same
from verl_fn.backends.fsdp.sharding import Layout
from verl_fn.backends.fsdp.torch_private import sharded
from verl_fn.backends.hf.folder import Checkpointing, Hollow, build, hollow
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.weights import FolderWeights
from verl_fn.backends.tensor_file import Slices
from verl_fn.state import Key

BLOCK = 64 * 2**20  # bytes that are sent at once
_SAMPLE = 2**16  # bytes that are hashed at either end of a file


@attrs.frozen
class Recipe:
    """How a backend makes models of folders: see ``hf.folder.build``."""

    head: str
    checkpointing: Checkpointing
    lora: Lora | None
    row_layout: str = "auto"
    frozen: torch.dtype = torch.float32
    device: str | torch.device = "cpu"
    trained: bool = True
    freeze_tower: bool = False

    def hollow(self, folder: str | Path, key: Key) -> Hollow:
        """Returns the model without its weights."""
        return hollow(
            folder, self.head, key=key, checkpointing=self.checkpointing, lora=self.lora,
            row_layout=self.row_layout, frozen=self.frozen, device=self.device,
            trained=self.trained, freeze_tower=self.freeze_tower,
        )  # fmt: skip

    def whole(self, folder: str | Path, key: Key, *, pretrained: bool) -> dict[str, Tensor]:
        """Returns all weights but the adapters', in fp32."""
        return build(folder, self.head, pretrained=pretrained, key=key, row_layout=self.row_layout)[1]


def read(
    folder: str | Path, recipe: Recipe, key: Key, model: Hollow, layout: Layout, device: torch.device
) -> dict[str, Tensor]:
    """Returns this rank's shards of the weights in ``folder``; all ranks call it together.

    Raises:
        ModelError: the folder does not hold the weights of this model.
        LayoutError: ranks read different weights.
    """
    weights = FolderWeights.of(folder, model)
    readable = gathered(weights is not None)
    if any(readable) and not all(readable):
        with agreed():
            if weights is None:
                # This raises an error that names what is wrong with this rank's folder.
                recipe.whole(folder, key, pretrained=True)
    require_same({"weights": _stamp(Path(folder)) if weights is None else weights.digest.encode()})
    if weights is None:
        return _sent_by_first(lambda: recipe.whole(folder, key, pretrained=True), model, layout, device)
    readable_weights = weights
    opened: dict[Path, Slices] = {}

    def rows(name: str, into: Tensor) -> None:
        start, end = layout.bounds(readable_weights.shapes[name][0])
        readable_weights.read(name, start, end, into, opened)

    with agreed():
        return _filled(model, layout, device, rows)


def draw(
    folder: str | Path, recipe: Recipe, key: Key, model: Hollow, layout: Layout, device: torch.device
) -> dict[str, Tensor]:
    """Returns this rank's shards of random weights, the same for every layout; all ranks call it together."""
    return _sent_by_first(lambda: recipe.whole(folder, key, pretrained=False), model, layout, device)


def _sent_by_first(
    make: Callable[[], dict[str, Tensor]], model: Hollow, layout: Layout, device: torch.device
) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    with agreed():
        if layout.rank == 0:
            whole = make()

    def rows(name: str, into: Tensor) -> None:
        shape = model.shapes[name].shape
        start, end = layout.bounds(shape[0])
        full = whole.pop(name, None)
        for first, last in _blocks(shape):
            block = torch.empty(last - first, *shape[1:], dtype=into.dtype)
            if full is not None:
                block.copy_(full[first:last])
            if layout.size > 1:
                dist.broadcast(block, 0)
            low, high = max(first, start), min(last, end)
            if low < high:
                into[low - start : high - start] = block[low - first : high - first]

    return _filled(model, layout, device, rows)


def _filled(
    model: Hollow, layout: Layout, device: torch.device, rows: Callable[[str, Tensor], None]
) -> dict[str, Tensor]:
    shards: dict[str, Tensor] = {}
    for name, t in model.shapes.items():
        if name in model.adapters:
            shards[name] = layout.shard(model.adapters[name], device)
        else:
            start, end = layout.bounds(t.shape[0])
            local = torch.empty(end - start, *t.shape[1:], dtype=t.dtype)
            rows(name, local)
            shards[name] = sharded(local.to(device), layout.spec(t.shape, t.dtype))
    return shards


def _blocks(shape: torch.Size) -> Iterator[tuple[int, int]]:
    """Yields runs of rows of at most ``BLOCK`` bytes, one row at least."""
    each = max(1, BLOCK // max(1, 4 * shape[1:].numel()))
    for first in range(0, shape[0], each):
        yield first, min(first + each, shape[0])


def _stamp(folder: Path) -> bytes:
    """Returns a hash of the sizes and both ends of all files that may hold weights."""
    stamp = hashlib.blake2b(digest_size=8)
    for file in sorted(p for pattern in ("*.safetensors", "*.bin") for p in folder.glob(pattern)):
        size = file.stat().st_size
        stamp.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            stamp.update(opened.read(_SAMPLE))
            opened.seek(max(0, size - _SAMPLE))
            stamp.update(opened.read(_SAMPLE))
    return stamp.digest()
