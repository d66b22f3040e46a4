"""One safetensors file, written and read by several processes at once, each its own ranges of bytes."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import torch
from safetensors import safe_open
from torch import Tensor

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
Rows: TypeAlias = Callable[[int], tuple[int, int]]
RENEWED = 128 * 2**20  # bytes


@attrs.frozen(eq=False)
class Part:
    """What one process writes of a tensor; the parts of all processes together are the whole.

    Attributes:
        elements: a run of the tensor's elements, one-dimensional.
        start: the first one's number.
        shape: of the whole.
    """

    elements: Tensor
    start: int
    shape: torch.Size

    @classmethod
    def whole(cls, t: Tensor) -> Part:
        """All of a tensor."""
        return cls(t.detach().reshape(-1), 0, t.shape)


def start(file: Path, parts: Mapping[str, Part]) -> None:
    """Make the file in its full size, with the header that says where each tensor lies.

    >>> import tempfile
    >>> from safetensors.torch import load_file
    >>> file = Path(tempfile.mkdtemp()) / "a.safetensors"
    >>> w, halves = torch.arange(4.0), {}
    >>> for rank in (0, 1):
    ...     halves[rank] = {"w": Part(w[2 * rank : 2 * rank + 2], 2 * rank, w.shape)}
    >>> start(file, halves[0])
    >>> for rank in (1, 0):
    ...     fill(file, halves[rank])
    >>> load_file(file)
    {'w': tensor([0., 1., 2., 3.])}
    """
    header, _, size = _plan(parts)
    with file.open("wb") as opened:
        opened.write(header)
        opened.truncate(len(header) + size)


def fill(file: Path, parts: Mapping[str, Part]) -> None:
    """Write this process's parts where they belong, down to the disk; ``start`` has been called somewhere."""
    header, places, _ = _plan(parts)
    fd = os.open(file, os.O_WRONLY)
    try:
        for name, part in parts.items():
            # A copy: a tensor that numpy has looked at can never again be told to be ours alone.
            data = memoryview(part.elements.to("cpu", copy=True).view(torch.uint8).numpy())
            at = len(header) + places[name] + part.start * part.elements.element_size()
            while data:
                done = os.pwrite(fd, data, at)
                data, at = data[done:], at + done
        os.fsync(fd)
    finally:
        os.close(fd)


class Slices:
    """Rows of the tensors of one safetensors file, read without the rest of it.

    A file is read through a mapping, whose pages count as memory of this process for as long as it lasts; the mapping
    is therefore made anew whenever ``RENEWED`` bytes were read.

    Raises:
        SafetensorError: the file is damaged.
        OSError: it cannot be opened.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._opened = safe_open(file, "pt")
        self._read = 0

    def names(self) -> list[str]:
        """Returns the names of all tensors."""
        return list(self._opened.keys())

    def about(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Returns safetensors' name for the dtype of a tensor, and its shape."""
        part = self._opened.get_slice(name)
        return part.get_dtype(), tuple(part.get_shape())

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Returns these rows of a tensor; a tensor without dimensions is whole. Copy them before the next call."""
        if self._read > RENEWED:
            self._opened, self._read = safe_open(self._file, "pt"), 0
        part = self._opened.get_slice(name)
        found = part[start:end] if part.get_shape() else part[...]
        self._read += found.nbytes
        return found


def read(file: Path, like: Mapping[str, Tensor], rows: Rows, device: torch.device) -> dict[str, Tensor]:
    """Returns the rows of every tensor that ``rows`` names, by the number of all; one without dimensions is whole.

    Args:
        file: a safetensors file.
        like: the shapes and dtypes of the whole tensors that the file must hold, no more and no fewer. Those on the
            meta device are read, the others must be what the file says.
        rows: the first row that is wanted and the one after the last.
        device: where they go.

    Raises:
        ValueError: names, shapes, dtypes or constants are others.
    """
    tensors: dict[str, Tensor] = {}
    slices = Slices(file)
    _check(file.name, {name: slices.about(name) for name in slices.names()}, like)
    for name, wanted in like.items():
        bounds = rows(wanted.shape[0]) if wanted.dim() else (0, 0)
        # A copy, since the file's own memory is its mapping.
        t = slices.rows(name, *bounds).to(device, copy=True, memory_format=torch.contiguous_format)
        if wanted.is_meta:
            tensors[name] = t
        elif not torch.equal(t.cpu(), (wanted[slice(*bounds)] if wanted.dim() else wanted).cpu()):
            raise ValueError(f"{file.name} holds another {name}, which this model does not change")
    return tensors


def _check(file: str, held: Mapping[str, tuple[str, tuple[int, ...]]], like: Mapping[str, Tensor]) -> None:
    wanted = {name: (NAMES[t.dtype], tuple(t.shape)) for name, t in like.items()}
    if missing := sorted(wanted.keys() - held.keys()):
        raise ValueError(f"{file} lacks {len(missing)} of {len(wanted)} tensors, such as {missing[:3]}")
    if extra := sorted(held.keys() - wanted.keys()):
        raise ValueError(f"{file} has {len(extra)} tensors too many, such as {extra[:3]}")
    for name, (dtype, shape) in wanted.items():
        if held[name] != (dtype, shape):
            raise ValueError(f"{file} has {name} as {held[name][0]}{held[name][1]}, not {dtype}{shape}")


def _plan(parts: Mapping[str, Part]) -> tuple[bytes, dict[str, int], int]:
    """The header, where each tensor starts behind it, and how long they are together."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places: dict[str, int] = {}
    end = 0
    # Wide dtypes first, so that each tensor is aligned: the order that safetensors itself writes.
    for name in sorted(parts, key=lambda name: (-parts[name].elements.element_size(), name)):
        part, places[name] = parts[name], end
        end += part.shape.numel() * part.elements.element_size()
        entries[name] = {
            "dtype": NAMES[part.elements.dtype], "shape": list(part.shape), "data_offsets": [places[name], end],
        }  # fmt: skip
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, places, end


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
