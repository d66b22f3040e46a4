"""The tokenizer of a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .folder import ModelError

TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "tekken.json")


def read_tokenizer(folder: str | Path) -> Any:
    """Reads the tokenizer of a model's folder.

    Raises:
        ModelError: the folder has none.
    """
    from transformers import AutoTokenizer

    # Without any of these files transformers makes an empty tokenizer for some architectures.
    if not any(file for pattern in TOKENIZER_FILES for file in Path(folder).glob(pattern)):
        raise ModelError(f"{folder} has no tokenizer that can be read: copy the tokenizer's files into it")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder} has no tokenizer that can be read: {str(error).splitlines()[0]}") from error
