"""The weights of a folder, read from its files without transformers' model.

That is faster, and needs no memory for the whole model. ``FolderWeights.of`` returns None for files that transformers
has to convert: one tensor for each expert, names with another prefix, tied weights that are stored twice, pickled or
quantized files.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError
from torch import Tensor

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.skeleton import Hollow
from verl_fn.backends.tensor_file import Slices, files_of

# What transformers calls the output layers of language models and of classifiers.
HEADS = frozenset({"lm_head", "embed_out", "output_projection", "score", "classifier"})

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
LARGEST_WEIGHT = 1e18
THREADS = 4  # that read


def check_numbers(name: str, weight: Tensor, place: str | Path) -> None:
    """Raises ModelError unless float32 holds the squares of weights, since norms and moments are made of squares.

    A bias may have -inf, by which an output layer excludes tokens.

    Args:
        weight: some or all of its rows.
        place: the folder or file that they come from, for the error.

    Example:
        >>> check_numbers("norm.weight", torch.tensor([1.0, 1e38]), "model")
        Traceback (most recent call last):
        verl_fn.backends.hf.config.ModelError: model: norm.weight has the value 1e+38, and weights beyond 1e+18 make
        every step useless; copy the file again, or correct the weight
    """
    # A norm says the same, in ten times the time. Both are nan if a weight is.
    low, high = map(float, torch.aminmax(weight)) if weight.numel() else (0.0, 0.0)
    if max(-low, high) <= LARGEST_WEIGHT:
        return
    excludes = (weight == -torch.inf) & name.endswith("bias")
    wrong = ~(weight.abs() <= LARGEST_WEIGHT) & ~excludes
    if wrong.any():
        raise ModelError(
            f"{place}: {name} has the value {float(weight[wrong][0]):g}, and weights beyond {LARGEST_WEIGHT:g} make "
            "every step useless; copy the file again, or correct the weight"
        )


@attrs.frozen(eq=False)
class FolderWeights:
    """The weights of a folder; any rows can be read without the others.

    Attributes:
        shapes: the shape of every parameter of the model by canonical name.
        files: the file that holds each; parameters that no file holds are zeros.
        digest: a hash of all headers and of some elements of every tensor; it differs between folders.
    """

    shapes: dict[str, torch.Size]
    files: dict[str, Path]
    digest: str
    # Files that earlier calls of a thread opened.
    _opened: threading.local = attrs.field(init=False, factory=threading.local)

    @classmethod
    def of(cls, folder: str | Path, model: Hollow) -> FolderWeights | None:
        """Returns the weights of ``folder`` if they can be read without conversion, else None.

        It raises no errors: ``folder.build`` reports weights that are missing, damaged or of another shape.
        """
        if getattr(model.skeleton.config, "quantization_config", None) or model.skeleton.constants:
            return None
        try:
            places = files_of(Path(folder))
            if not places or not _needs_no_conversion(places, model):
                return None
            shapes = {name: t.shape for name, t in model.shapes.items() if name not in model.adapters}
            files = {name: places[name] for name in shapes if name in places}
            digest = _digest(files, shapes)
        except (OSError, ValueError, KeyError, SafetensorError):
            return None
        return None if digest is None else cls(shapes, files, digest)

    def read(self, name: str, start: int, end: int, into: Tensor) -> Tensor:
        """Copies rows ``start`` to ``end`` of a parameter into a tensor, whatever dtype the file has.

        Args:
            into: has room for these rows.

        Returns:
            ``into``.

        Raises:
            ModelError: a number is none that a model can have; see ``check_numbers``.
        """
        if name not in self.files:
            return into.zero_()
        file = self.files[name]
        files: dict[Path, Slices] = self._opened.__dict__.setdefault("files", {})
        if file not in files:
            files[file] = Slices(file)
        into.copy_(files[file].rows(name, start, end))
        check_numbers(name, into, file)
        return into

    def whole(self, model: Hollow, device: str | torch.device) -> dict[str, Tensor]:
        """Returns all parameters on a device, in the dtypes of a state; adapters come last.

        Several threads read, each through files of its own.

        Raises:
            ModelError: as ``read``.
        """

        def one(name: str) -> Tensor:
            t = model.shapes[name]
            return self.read(name, 0, t.shape[0], torch.empty(t.shape, dtype=t.dtype)).to(device)

        names = [name for name in model.shapes if name not in model.adapters]
        with ThreadPoolExecutor(THREADS, "verl_fn weights") as pool:
            leaves = dict(zip(names, pool.map(one, names), strict=True))
        return leaves | {name: t.to(device) for name, t in model.adapters.items()}


def _needs_no_conversion(places: dict[str, Path], model: Hollow) -> bool:
    """Returns whether transformers would read the tensors of these names without renaming or converting any."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    skeleton = model.skeleton
    own = skeleton.output_name
    wanted = {name for name in model.shapes if name not in model.adapters}
    heads = HEADS - {own}
    if any(name not in wanted and name.partition(".")[0] not in heads for name in places):
        return False
    if any(name not in places and not (model.new_head and name.startswith(f"{own}.")) for name in wanted):
        return False
    transforms = get_model_conversion_mapping(skeleton.model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    known: dict[str, Any] = skeleton.model.state_dict()
    prefix = skeleton.model.base_model_prefix
    return all(
        rename_source_key(name, renamings, converters, prefix, known) == (name, None)
        for name in places
        if name in wanted
    )


def _digest(files: dict[str, Path], shapes: dict[str, torch.Size]) -> str | None:
    """Returns the digest, or None where a tensor has another shape or no floating-point dtype."""
    digest = hashlib.blake2b(digest_size=8)
    opened = functools.cache(Slices)
    for name, file in sorted(files.items()):
        dtype, shape = opened(file).about(name)
        if dtype not in FLOATS or shape != tuple(shapes[name]) or not shape:
            return None
        digest.update(f"{name}{dtype}{shape}".encode())
        for row in sorted({0, shape[0] // 3, shape[0] - 1}):
            part = opened(file).rows(name, row, row + 1).reshape(-1)[:64]
            digest.update(part.clone().view(torch.uint8).numpy().data)
    return digest.hexdigest()
