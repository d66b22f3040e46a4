"""Copies a trained model: as a Hugging Face folder, or only its adapters in PEFT's format."""

from __future__ import annotations

from pathlib import Path

from verl_fn.backends.checkpoint.state_folder import TENSORS
from verl_fn.backends.hf import lora
from verl_fn.backends.hf.folder import ModelError, quiet, read_config
from verl_fn.errors import UsageError


def check_empty(folder: Path) -> None:
    """Raises an error unless ``folder`` is empty or does not exist.

    Raises:
        UsageError: it is a file, or a folder that is not empty.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; choose a folder")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty; choose another folder")


def export_model(source: str | Path, out: str | Path, dtype: str | None = None) -> Path:
    """Copies a model and its tokenizer into ``out``, cast to ``dtype`` if given.

    Raises:
        UsageError: ``out`` is not empty.
        ModelError: transformers cannot load ``source``.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = Path(out)
    check_empty(out)
    read_config(source)
    out.mkdir(parents=True, exist_ok=True)
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype or "auto")
            # Checkpoints have the layout that models compute with (experts stacked), so reading one records no
            # conversion; None makes transformers write the layout that files of this architecture have.
            model._weight_conversions = getattr(model, "_weight_conversions", None) or None
            model.save_pretrained(out)
        AutoTokenizer.from_pretrained(source).save_pretrained(out)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"{source} cannot be copied to {out}: {error}") from error
    return out


def export_adapter(source: str | Path, out: str | Path, dtype: str | None = None) -> Path:
    """Writes the adapters of a checkpoint's model into ``out`` in PEFT's format, cast to ``dtype`` if given.

    ``peft.PeftModel.from_pretrained(model, out)`` adds them to the model that the run began with.

    Raises:
        UsageError: ``out`` is not empty, or ``source`` has no adapters.
        LoraError: PEFT is not installed, or the checkpoint is damaged.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    out = Path(out)
    check_empty(out)
    saved = lora.read(Path(source))
    if saved is None:
        raise UsageError(
            f"{source} has no adapters: it is no checkpoint of a run with actor.lora_rank above 0; "
            f"leave out --adapter to copy the model"
        )
    adapters, base = saved
    try:
        with safe_open(Path(source) / TENSORS, "pt") as file:
            tensors = {name: file.get_tensor(f".params['{name}']") for name in adapters.names()}
        if dtype is not None:
            tensors = {name: t.to(getattr(torch, dtype)) for name, t in tensors.items()}
        lora.write_adapter(tensors, adapters, base, out)
    except (OSError, SafetensorError) as error:
        raise lora.LoraError(f"the adapters of {source} cannot be written to {out}: {error}") from error
    return out
