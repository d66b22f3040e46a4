"""The files beside a model's weights that the folders of its checkpoints hold too: its config and its tokenizer.

They are read once, when a model is made from its folder, and then written from memory. So a save works whatever
happens to that folder, and a setting that transformers reads but would refuse to write is copied as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config import read_json, refused
from .lora import ABOUT
from .tokenizer import END

CONFIG = "config.json"
# What the tokenizers of transformers read, chat templates, and the settings of generation and processors.
_SUFFIXES = frozenset(
    (".json", ".txt", ".model", ".jinja", ".bpe", ".codes", ".spm", ".tiktoken", ".tokenizer", ".vocab")
)
_TEMPLATES = "additional_chat_templates"
# These speak of weights, or of a training that led to them.
_LEFT = frozenset((CONFIG, ABOUT, "train_state.json", "trainer_state.json", "adapter_config.json", "made_from.json"))


def is_carried(name: str) -> bool:
    """Returns whether a file of a model folder goes into the folders of its checkpoints.

    Example:
        >>> [is_carried(n) for n in ("tekken.json", "model.safetensors", "model.safetensors.index.json")]
        [True, False, False]
    """
    return Path(name).suffix in _SUFFIXES and name not in _LEFT and not name.endswith(".index.json")


def carried(folder: str | Path, model: Any) -> dict[str, bytes]:
    """Returns the contents of the files, by path in the folder.

    Args:
        folder: the model folder.
        model: transformers' model that was made from it.

    Raises:
        ModelError: a file cannot be read.
    """
    folder = Path(folder)
    with refused(f"{folder} cannot be read"):
        files = [path for path in folder.iterdir() if is_carried(path.name) and path.is_file()]
        files += (folder / _TEMPLATES).glob("*.jinja")
        contents = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}
        config = saved_config(model, read_json(folder / CONFIG))
    return contents | {CONFIG: json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"}


def saved_config(model: Any, read: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what ``config.json`` says of a model.

    Args:
        model: transformers' model.
        read: the content of the ``config.json`` that it was made from.
    """
    config = json.loads(model.config.to_json_string()) | {
        "architectures": [type(model).__name__],
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    # Code is not copied and never run. An architecture's default end token may be another than the tokenizer's.
    config.pop("auto_map", None)
    inner = read.get("text_config")
    if END not in read and not (isinstance(inner, Mapping) and END in inner):
        config.pop(END, None)
    return config


def write(contents: Mapping[str, bytes], folder: Path) -> None:
    """Writes files into a folder."""
    if any(name.startswith(_TEMPLATES) for name in contents):
        (folder / _TEMPLATES).mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
