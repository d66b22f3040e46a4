"""The model whose frozen weights adapters were added to: checkpoints refer to its folder and do not hold them.

A checkpoint of adapters refers to the folder only if the state's frozen weights still are what was read from its
files. It keeps the size and the CRC-32 of each file; whoever reads the checkpoint compares them first.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from verl_fn.backends.hf import lora
from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.lora import ABOUT, LoraError
from verl_fn.backends.tensor_file import TENSORS
from verl_fn.checksums import crc_of
from verl_fn.state import Params

# Words of 8 bytes whose print is computed at once. On a CPU they lie in its cache, and torch starts no other thread,
# for which it would wait long on a busy machine.
_WORDS, _CUDA_WORDS = 2**15, 2**24
# Odd numbers without a pattern, from the fractions of the golden ratio and of the square roots of 2 and 3.
_PLACE, _MIX, _LAST = -7046029254386353131, 7640891576956012809, -4942790177534073029

Stamp = tuple[tuple[str, int, int, int], ...]


@attrs.frozen
class Reference:
    """What a checkpoint of adapters says about the weights that it does not hold.

    Attributes:
        base: the model folder that they were read from; relative to the checkpoint, if both were moved together.
        dtype: torch's name for the dtype that the state held them in.
        files: size and CRC-32 of each file of the folder that holds weights.
    """

    base: Path
    dtype: str
    files: Mapping[str, tuple[int, int]]

    @classmethod
    def read(cls, folder: str | Path) -> Reference | None:
        """Returns the reference of the training state in ``folder``; None if the folder holds all of its weights.

        Raises:
            LoraError: it cannot be read.
        """
        about = Path(folder) / ABOUT
        try:
            content = json.loads(about.read_text())
            if "files" not in content:
                return None
            files = {str(name): (int(size), int(crc)) for name, (size, crc) in content["files"].items()}
            base, beside = Path(content["base_model"]), Path(folder, content["beside"])
            return cls(base if base.is_dir() or not beside.is_dir() else beside, str(content["dtype"]), files)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LoraError(f"{about} cannot be read: {error}") from error

    def check(self, checkpoint: str | Path, base: str | Path | None = None) -> Path:
        """Compares the files of a model folder with the files that the adapters were trained on.

        Args:
            checkpoint: the folder with this reference, for errors.
            base: the model folder; by default the one that is referred to.

        Returns:
            The model folder.

        Raises:
            ModelError: a file is missing, or was changed.
        """
        folder = self.base if base is None else Path(base)
        for name, (size, crc) in self.files.items():
            file = folder / name
            if not file.is_file():
                problem = f"{file} does not exist"
            elif file.stat().st_size != size or _checksum(file, _stamp(file)) != crc:
                problem = f"{file} is another file than it was"
            else:
                continue
            raise ModelError(
                f"{checkpoint} holds adapters, and their frozen weights are the ones that {self.base} had, but "
                f"{problem}: bring them back, or to continue a run set model.path to where they are"
            )
        return folder


@attrs.frozen(eq=False)
class FrozenBase:
    """The frozen weights of a state as they were read from a folder.

    Attributes:
        folder: the model folder.
        stamp: its files before they were read.
        prints: a number for each tensor that depends on all of its bits; of shards, only on this rank's.
    """

    folder: Path
    stamp: Stamp
    prints: Mapping[str, tuple[str, int]]

    @classmethod
    def of(cls, folder: Path, stamp: Stamp, weights: Mapping[str, Tensor]) -> FrozenBase:
        """Returns the weights that were read from a folder since ``stamp``."""
        return cls(folder.resolve(), stamp, _prints(weights))

    def holds(self, weights: Mapping[str, Tensor]) -> bool:
        """Returns whether these are the weights in the folder, in one dtype."""
        if not self.stamp or stamp_of(self.folder) != self.stamp:
            return False
        return _prints(weights) == self.prints and len({dtype for dtype, _ in self.prints.values()}) <= 1

    def about(self, checkpoint: Path) -> dict[str, Any]:
        """Returns what a checkpoint in a folder says about these weights; see ``Reference``.

        Raises:
            ModelError: the files are being changed.
        """
        (dtype,) = {dtype for dtype, _ in self.prints.values()}
        files = {name: (size, _checksum(self.folder / name, tuple(rest))) for name, size, *rest in self.stamp}
        if stamp_of(self.folder) != self.stamp:
            raise ModelError(f"files of {self.folder} change while a checkpoint that refers to them is saved")
        return {"beside": os.path.relpath(self.folder, checkpoint.resolve()), "dtype": dtype, "files": files}


def load(auto: Any, folder: str | Path, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns transformers' model with the weights of a folder, and its report on them.

    If the folder is a checkpoint that refers to frozen weights, its adapters are merged into these in fp32, and the
    sum is cast to the dtype that the options name.

    Args:
        auto: transformers' class.
        folder: the model folder.
        options: arguments of ``from_pretrained``.

    Raises:
        LoraError: the folder's description of its adapters, or their file, is damaged.
        ModelError: the folder refers to weights that were changed or moved.
    """
    if (reference := Reference.read(folder)) is None:
        model, report = auto.from_pretrained(folder, output_loading_info=True, **options)
        return model, report
    model, report = load(auto, reference.check(folder), {**options, "dtype": torch.float32})
    adapters, _ = lora.read(Path(folder)) or (lora.Adapters(), "")
    trained = lora.read_adapter(Path(folder))
    if lacking := set(adapters.names()) - trained.keys():
        raise LoraError(f"{Path(folder) / lora.ADAPTERS} lacks {len(lacking)} adapters, such as {min(lacking)}")
    own = dict(model.named_parameters())
    if not any(p.is_meta for p in own.values()):
        held = getattr(torch, reference.dtype)
        frozen = {name: p.detach().to(held) for name, p in own.items() if name not in trained}
        for name, t in adapters.merged(Params({**frozen, **trained})):
            own[name].data.copy_(t)
    missing = [name for name in report["missing_keys"] if name not in trained]
    if (dtype := options.get("dtype", "auto")) != "auto":
        model = model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    # The frozen weights are the ones that were trained on, and what was not of the model then is not now.
    return model, {**report, "missing_keys": missing, "unexpected_keys": []}


def chain_of(folder: str | Path) -> list[Path]:
    """Returns a model folder and the folders that it refers to; the last one holds all of its weights."""
    reference = Reference.read(folder)
    return [Path(folder), *(() if reference is None else chain_of(reference.base))]


def stamp_of(folder: Path) -> Stamp:
    """Returns the files of a model folder that hold weights, with size, time of the last change, and number."""
    files = [path for pattern in ("*.safetensors", "*.bin", ABOUT) for path in folder.glob(pattern)]
    return tuple((path.name, path.stat().st_size, *_stamp(path)) for path in sorted(files) if path.name != TENSORS)


def _stamp(file: Path) -> tuple[int, int]:
    about = file.stat()
    return about.st_mtime_ns, about.st_ino


@functools.lru_cache(maxsize=4096)
def _checksum(file: Path, stamp: tuple[int, ...]) -> int:
    return crc_of(file)


def _prints(weights: Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
    return {name: (str(t.dtype).removeprefix("torch."), print_of(t)) for name, t in weights.items()}


def print_of(t: Tensor) -> int:
    """Returns a number of 64 bits that depends on all bits of a tensor and on their order.

    Example:
        >>> one = torch.tensor([1.0, 2.0])
        >>> [print_of(one) == print_of(other) for other in (one.clone(), one.flip(0), one.bfloat16())]
        [True, False, False]
    """
    data = t.detach().contiguous().reshape(-1).view(torch.uint8)
    data = torch.nn.functional.pad(data, (0, -len(data) % 8)) if len(data) % 8 or data.storage_offset() % 8 else data
    size = _WORDS if t.device.type == "cpu" else _CUDA_WORDS
    places = torch.arange(min(size, len(data) // 8), device=t.device) * _PLACE
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for number, words in enumerate(data.view(torch.int64).split(size)):
        mixed = (words + places[: len(words)] + number * size) * _MIX
        total += ((mixed ^ (mixed >> 31)) * _LAST ^ (mixed >> 17)).sum()
    return int(total)
