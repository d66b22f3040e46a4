"""Tensors as bytes: one safetensors file that several processes write and read at once, and checksums."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import torch
from safetensors import safe_open
from torch import Tensor

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
FLOATING = {name for dtype, name in NAMES.items() if dtype.is_floating_point}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TENSORS = "train_state.safetensors"  # of a training state, beside the weights of its model
Rows: TypeAlias = Callable[[int], tuple[int, int]]
RENEWED = 128 * 2**20  # bytes
BLOCK = 4 * 2**20  # bytes that are written at once
# Layout of a checksum: bytes of a word, words of a row and of a slice, and an odd multiplier that mixes bits.
WORD, WIDTH, SLICE = 8, 1024, 2**18
MULTIPLIER = 6364136223846793005


@attrs.frozen(eq=False)
class Span:
    """The part of a tensor that one process writes; the parts of all processes together are the whole tensor.

    Attributes:
        elements: consecutive elements of the tensor, one-dimensional.
        start: the number of the first of them.
        shape: of the whole tensor.
    """

    elements: Tensor
    start: int
    shape: torch.Size

    @classmethod
    def whole(cls, t: Tensor) -> Span:
        """Returns a whole tensor as one part."""
        return cls(t.detach().reshape(-1), 0, t.shape)

    def on_cpu(self) -> Span:
        """Returns a copy that nothing else holds. Zeros, as the moments of a new state, take no memory."""
        if not self.elements.view(torch.uint8).any():
            return attrs.evolve(self, elements=self.elements.new_zeros(1, device="cpu").expand(len(self.elements)))
        return attrs.evolve(self, elements=self.elements.to("cpu", copy=True))


def start(file: Path, parts: Mapping[str, Span]) -> None:
    """Makes the file in its full size, with the header that lists where each tensor lies.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import load_file
        >>> file = Path(tempfile.mkdtemp()) / "a.safetensors"
        >>> w, halves = torch.arange(4.0), {}
        >>> for rank in (0, 1):
        ...     halves[rank] = {"w": Span(w[2 * rank : 2 * rank + 2], 2 * rank, w.shape)}
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


def fill(file: Path, parts: Mapping[str, Span]) -> None:
    """Writes this process's parts into a file that ``start`` made, and waits until they are on the disk."""
    header, places, _ = _plan(parts)
    # New memory for each tensor would take longer than writing it.
    buffer = torch.empty(BLOCK, dtype=torch.uint8, device="cpu")
    fd = os.open(file, os.O_WRONLY)
    try:
        for name, part in parts.items():
            width = part.elements.element_size()
            at = len(header) + places[name] + part.start * width
            for block in part.elements.split(BLOCK // width):
                # A copy, since `.numpy()` adds a reference to the storage, so that donation would copy the tensor.
                copied = buffer.view(block.dtype)[: block.numel()].copy_(block)
                bits, to = copied.view(torch.uint8), at
                at += len(bits)
                # What was not written since ``start`` reads as zeros.
                data = bits.numpy().data if bits.any() else memoryview(b"")
                while data:
                    done = os.pwrite(fd, data, to)
                    data, to = data[done:], to + done
        os.fsync(fd)
    finally:
        os.close(fd)


class Slices:
    """Reads rows of the tensors of one safetensors file.

    A file is read through a mapping, whose pages count as memory of this process while it exists, so the file is
    mapped again whenever ``RENEWED`` bytes were read.

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
        rows = part[start:end] if part.get_shape() else part[...]
        self._read += rows.nbytes
        return rows


def files_of(folder: Path) -> dict[str, Path]:
    """Returns the safetensors file of each tensor of a model folder; empty if the folder has no such files."""
    if (folder / SINGLE).is_file():
        return dict.fromkeys(Slices(folder / SINGLE).names(), folder / SINGLE)
    if not (folder / INDEX).is_file():
        return {}
    names: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return {name: folder / file for name, file in names.items()}


def read(
    file: Path, like: Mapping[str, Tensor], rows: Rows, device: torch.device, cast: Collection[str] = ()
) -> dict[str, Tensor]:
    """Reads some rows of every tensor; a tensor without dimensions is read whole.

    Args:
        like: the whole tensors that the file must hold, no more and no fewer, by shape and dtype.
        rows: returns the first row to read and the one after the last, given the number of all rows.
        cast: names of tensors that the file may hold in any dtype of floating point.

    Raises:
        ValueError: the file has other names, shapes or dtypes.
    """
    tensors: dict[str, Tensor] = {}
    slices = Slices(file)
    _check(file.name, {name: slices.about(name) for name in slices.names()}, like, cast)
    for name, wanted in like.items():
        bounds = rows(wanted.shape[0]) if wanted.dim() else (0, 0)
        # A copy, since the file's own memory is its mapping.
        part = slices.rows(name, *bounds)
        tensors[name] = part.to(device, wanted.dtype, copy=True, memory_format=torch.contiguous_format)
    return tensors


def _check(
    file: str, saved: Mapping[str, tuple[str, tuple[int, ...]]], like: Mapping[str, Tensor], cast: Collection[str]
) -> None:
    wanted = {name: (NAMES[t.dtype], tuple(t.shape)) for name, t in like.items()}
    if missing := sorted(wanted.keys() - saved.keys()):
        raise ValueError(f"{file} lacks {len(missing)} of {len(wanted)} tensors, such as {missing[:3]}")
    if extra := sorted(saved.keys() - wanted.keys()):
        raise ValueError(f"{file} has {len(extra)} tensors too many, such as {extra[:3]}")
    for name, (dtype, shape) in wanted.items():
        dtypes = FLOATING if name in cast else {dtype}
        if saved[name][0] not in dtypes or saved[name][1] != shape:
            raise ValueError(f"{file} has {name} as {saved[name][0]}{saved[name][1]}, not {dtype}{shape}")


def _plan(parts: Mapping[str, Span]) -> tuple[bytes, dict[str, int], int]:
    """Returns the header, where each tensor starts after it, and the size of all tensors together."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places: dict[str, int] = {}
    end = 0
    # Wide dtypes first, so that each tensor is aligned: the order that safetensors itself writes.
    for name in sorted(parts, key=lambda name: (-parts[name].elements.element_size(), name)):
        part, places[name] = parts[name], end
        end += part.shape.numel() * part.elements.element_size()
        dtype, offsets = NAMES[part.elements.dtype], [places[name], end]
        entries[name] = {"dtype": dtype, "shape": list(part.shape), "data_offsets": offsets}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header, places, end


def checksum(values: Tensor, dtype: torch.dtype | None = None) -> int:
    """Returns a 64-bit hash of a tensor's bytes; it also changes if rows or elements are swapped.

    Args:
        dtype: hash the tensor as if it were converted; None for its own dtype.

    Example:
        >>> a = torch.arange(6.0)
        >>> checksum(a) == checksum(a.clone()), checksum(a) == checksum(a.flip(0))
        (True, False)
        >>> checksum(a, torch.bfloat16) == checksum(a.bfloat16())
        True
    """
    flat = values.detach().reshape(-1)
    dtype = dtype or flat.dtype
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    # Slice by slice, since converting and mixing copy the elements.
    for part in flat.split(SLICE * WORD // dtype.itemsize):
        data = part.to(dtype).contiguous().view(torch.uint8)
        if data.storage_offset() % WORD:
            data = data.clone()  # words have to be aligned
        end = len(data) // WORD * WORD
        total = total * MULTIPLIER + _of_slice(data[:end].view(torch.int64)) + _weighted(data[end:].long())
    return int(total)


def _of_slice(words: Tensor) -> Tensor:
    # Sums overflow, and an even weight loses the highest bits of a word: they go into the lower ones too.
    mixed = (words >> 32).mul_(MULTIPLIER).add_(words)
    rows = mixed[: len(mixed) // WIDTH * WIDTH].view(-1, WIDTH)
    return _weighted(rows.sum(0)) + 31 * _weighted(rows.sum(1)) + 961 * _weighted(mixed[rows.numel() :])


def _weighted(numbers: Tensor) -> Tensor:
    places = torch.arange(1, len(numbers) + 1, device=numbers.device)
    return (numbers * (places * 2654435761 + 12345)).sum()
