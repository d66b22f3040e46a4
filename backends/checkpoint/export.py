"""Copies a trained model: as a Hugging Face folder, or only its adapters in PEFT's format."""

from __future__ import annotations

from pathlib import Path

from verl_fn.backends.checkpoint.state_folder import TENSORS
from verl_fn.backends.hf import carried, lora
from verl_fn.backends.hf.config import LOCAL, ModelError, quiet, read_config, refused
from verl_fn.backends.hf.tokenizer import GENERATION, read_tokenizer
from verl_fn.backends.whole_folder import check_empty, written_whole
from verl_fn.errors import UsageError

__all__ = ["check_empty", "export_adapter", "export_model"]


def export_model(source: str | Path, out: str | Path, dtype: str | None = None) -> Path:
    """Copies a model and its tokenizer into ``out``, cast to ``dtype`` if given; a failure leaves ``out`` as it was.

    Raises:
        UsageError: ``out`` is not empty.
        ModelError: ``source`` has no tokenizer, lacks weights, or cannot be loaded or copied.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    out = Path(out)
    check_empty(out)
    read_config(source)
    read_tokenizer(source)
    with refused(f"{source} cannot be copied to {out}"), written_whole(out) as aside, quiet():
        model, loaded = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype or "auto",
            # transformers refuses some settings of generation; those of the source are copied as they are.
            generation_config=GenerationConfig(),
            output_loading_info=True,
            **LOCAL,
        )
        if missing := sorted(loaded["missing_keys"]):
            # transformers has drawn them at random.
            raise ModelError(f"{source} lacks {len(missing)} weights of the model, such as {missing[0]}")
        # Checkpoints have the layout that models compute with (experts stacked), so reading one records no
        # conversion; None makes transformers write the layout that files of this architecture have.
        model._weight_conversions = getattr(model, "_weight_conversions", None) or None
        model.save_pretrained(aside)
        (aside / GENERATION).unlink()
        carried.write(carried.carried(source, model), aside)
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
        with written_whole(out) as aside:
            lora.write_adapter(tensors, adapters, base, aside)
    except (OSError, SafetensorError) as error:
        raise lora.LoraError(f"the adapters of {source} cannot be written to {out}: {error}") from error
    return out
