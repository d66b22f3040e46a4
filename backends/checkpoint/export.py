"""Copies a trained model: as a Hugging Face folder, or only its adapters in PEFT's format.

What was written is read again and compared with what there was, by name and by bit, before it moves to its folder.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_fn.atomic import check_empty, replaced_folder
from verl_fn.backends.checkpoint.state_folder import MODEL
from verl_fn.backends.hf import lora
from verl_fn.backends.hf.config import LOCAL, ModelError, quiet, read_config, refused
from verl_fn.backends.hf.folder import carried, write_carried
from verl_fn.backends.hf.frozen_base import Reference, load
from verl_fn.backends.hf.tokenizer import GENERATION, read_tokenizer
from verl_fn.backends.tensor_file import TENSORS
from verl_fn.errors import UsageError

__all__ = ["check_empty", "export_adapter", "export_model"]

_PARAM = ".params['"
# What transformers calls the output layers of classifiers.
_VALUE_HEADS = ("score", "classifier")


def export_model(source: str | Path, out: str | Path, dtype: str | None = None) -> Path:
    """Copies a model and its tokenizer into ``out``, cast to ``dtype`` if given; a failure leaves ``out`` as it was.

    The model keeps its head: a critic or a reward model stays one.

    Raises:
        UsageError: ``out`` is not empty.
        ModelError: ``source`` has no tokenizer, lacks weights or has others than its model, or cannot be loaded or
            copied, or the copy is not the model.
    """
    out = Path(out)
    check_empty(out)
    config = read_config(source)
    read_tokenizer(source)
    with refused(f"{source} cannot be copied to {out}"), replaced_folder(out) as aside, quiet():
        model = _loaded(source, config, dtype or "auto")
        # Where config.json names a narrower dtype than the weights have, "as it is" is the dtype of the weights.
        if dtype is None and (held := _dtype_of(Path(source))) is not None and held.itemsize > model.dtype.itemsize:
            model = _loaded(source, config, held)
        # Checkpoints have the layout that models compute with (experts stacked), so reading one records no
        # conversion; None makes transformers write the layout that files of this architecture have.
        model._weight_conversions = getattr(model, "_weight_conversions", None) or None
        model.save_pretrained(aside)
        with contextlib.suppress(FileNotFoundError):  # only models that generate have such settings
            (aside / GENERATION).unlink()
        write_carried(carried(source, model), aside)
        written = _loaded(aside, read_config(aside), "auto")
        _compare(model.state_dict(), written.state_dict())
    return out


def _loaded(folder: str | Path, config: Any, dtype: Any) -> Any:
    """Returns transformers' model of a folder, of the class that its config names.

    Raises:
        ModelError: the folder lacks weights of the model, or has others.
    """
    import transformers

    name = next(iter(config.architectures or ()), "")
    # transformers refuses some settings of generation; the source's settings are copied as they are.
    options = {"config": config, "dtype": dtype, "generation_config": transformers.GenerationConfig(), **LOCAL}
    model, loaded = load(getattr(transformers, name, None) or transformers.AutoModelForCausalLM, folder, options)
    # transformers has drawn the missing ones at random, and left the others out.
    for problem, names in (
        ("lacks {} weights of the model", loaded["missing_keys"]),
        (f"has {{}} weights that {type(model).__name__} has not", loaded["unexpected_keys"]),
    ):
        if names:
            raise ModelError(f"{folder} {problem.format(len(names))}, such as {min(names)}")
    return model


def _dtype_of(folder: Path) -> Any:
    """Returns the dtype of most numbers in the files of a model's weights; None for files that are no safetensors."""
    from safetensors import safe_open

    counts: Counter[Any] = Counter()
    for path in folder.glob("*.safetensors"):
        if path.name != TENSORS:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    rows = file.get_slice(name)
                    counts[rows.get_dtype()] += math.prod(rows.get_shape())
    kinds = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    return next((kinds[name] for name, _ in counts.most_common() if name in kinds), None)


def _compare(expected: Mapping[str, Tensor], written: Mapping[str, Tensor]) -> None:
    """Raises an error unless the written tensors are the given ones, bit for bit.

    Raises:
        ModelError: some are missing, added, or differ.
    """
    differing = [
        *(name for name in expected if name not in written),
        *(name for name in written if name not in expected),
        *(name for name, t in expected.items() if name in written and not _same(t, written[name])),
    ]
    if differing:
        raise ModelError(
            f"{len(differing)} tensors are lost, added or changed in what was written, such as {differing[0]}, by an "
            "error of the program or of the disk; nothing is exported"
        )


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(t.detach().contiguous().flatten().view(torch.uint8) for t in (one, other)))


def export_adapter(source: str | Path, out: str | Path, dtype: str | None = None) -> Path:
    """Writes the adapters of a checkpoint's model into ``out`` in PEFT's format, cast to ``dtype`` if given.

    ``peft.PeftModel.from_pretrained(model, out)`` adds them to the model that the run began with. The value head of a
    critic or a reward model is trained beside its adapters, so it is written with them.

    Raises:
        UsageError: ``out`` is not empty, or ``source`` has no adapters.
        LoraError: PEFT is not installed, or the checkpoint is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    source, out = Path(source), Path(out)
    check_empty(out)
    saved = lora.read(source)
    if saved is None:
        raise UsageError(
            f"{source} has no adapters: it is no checkpoint of a run with actor.lora_rank above 0; "
            f"leave out --adapter to copy the model"
        )
    adapters, base = saved
    try:
        tensors, head = _trained(source, adapters)
        if dtype is not None:
            tensors = {name: t.to(getattr(torch, dtype)) for name, t in tensors.items()}
        with replaced_folder(out) as aside:
            lora.write_adapter(tensors, adapters, base, aside, head)
            prefix = "base_model.model."
            written = load_file(aside / lora.ADAPTERS)
            _compare(tensors, {name.removeprefix(prefix): t for name, t in written.items()})
    except (OSError, SafetensorError) as error:
        raise lora.LoraError(f"the adapters of {source} cannot be written to {out}: {error}") from error
    return out


def _trained(source: Path, adapters: lora.Adapters) -> tuple[dict[str, Tensor], str]:
    """Returns what a LoRA run trained: the adapters, and a value head; and the name of that head, or nothing.

    Raises:
        LoraError: the training state lacks adapters that it says it has, or has others.
    """
    if Reference.read(source) is not None:
        place, saved = source / lora.ADAPTERS, lora.read_adapter(source)
        heads = {name: t for name, t in saved.items() if not _is_adapter(name)}
    else:
        place, end = source / TENSORS, "']"
        found = _tensors(place, lambda name: name.startswith(_PARAM) and _is_adapter(name.removesuffix(end)))
        saved = {name.removeprefix(_PARAM).removesuffix(end): t for name, t in found.items()}
        heads = _tensors(source / MODEL, lambda name: name.partition(".")[0] in _VALUE_HEADS)
    held = {name for name in saved if _is_adapter(name)}
    if differing := sorted(held.symmetric_difference(adapters.names())):
        raise lora.LoraError(
            f"{place} does not hold the adapters that {lora.ABOUT} lists: {len(differing)} differ, such as "
            f"{differing[0]}; one of the files is of another checkpoint"
        )
    return {name: saved[name] for name in adapters.names()} | heads, next(iter(heads), "").partition(".")[0]


def _is_adapter(name: str) -> bool:
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def _tensors(file: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys() if wanted(name)}  # noqa: SIM118
