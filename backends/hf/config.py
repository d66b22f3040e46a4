"""Reads the config of a Hugging Face folder, and refuses one whose model a pure step cannot run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_fn.errors import UserError

if TYPE_CHECKING:
    from verl_fn.backends.hf.skeleton import Skeleton


class ModelError(UserError, ValueError):
    """A folder cannot be loaded, or its model cannot be run."""


def check_same_config(skeleton: Skeleton, folder: str | Path) -> None:
    """Raises an error unless the config in ``folder`` describes the same model as a skeleton's.

    Raises:
        ModelError: it describes another, or there is none.
    """
    own, other = (_meaningful(config.to_dict()) for config in (skeleton.config, read_config(folder)))
    if differing := sorted(key for key in own.keys() | other.keys() if own.get(key) != other.get(key)):
        raise ModelError(
            f"{folder} holds another model than the one this backend was made for: {differing[:4]} differ"
        )


def _meaningful(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config without the fields that only name it, and those of a head."""
    names = ("architectures", "transformers_version", "dtype", "use_cache", "id2label", "label2id", "num_labels")
    return {k: v for k, v in config.items() if k not in names and not k.startswith("_")}


def read_config(folder: str | Path) -> Any:
    """Reads the transformers config of a folder.

    Raises:
        ModelError: there is none, it cannot be read, or it sets what a pure step cannot do.
    """
    import transformers

    if not (Path(folder) / "config.json").is_file():
        raise ModelError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        # The other lines of the message are advice on versions of transformers, which does not help here.
        raise ModelError(f"{folder}/config.json cannot be read: {str(error).splitlines()[0]}") from error
    # The dropout of transformers' own heads is never run here.
    dropout = {
        name: rate
        for name, rate in config.to_dict().items()
        if isinstance(rate, (int, float)) and rate > 0 and ("dropout" in name or name.endswith("_pdrop"))
        if not name.startswith(("classifier", "summary"))
    }
    if dropout:
        raise ModelError(f"{folder}/config.json sets {dropout}: a pure step has no dropout; set it to 0.0")
    if any("dynamic" in _kind(rope) for rope in _ropes(config)):
        raise ModelError(
            f"{folder}/config.json sets rotary embeddings of kind 'dynamic', whose frequencies depend on the rows "
            f"before, which a pure step cannot have; set rope_type to 'default', which is the same up to "
            f"max_position_embeddings"
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    if mixing := kinds - {"full_attention", "sliding_attention"}:
        raise ModelError(f"{folder} has layers of kind {sorted(mixing)}, which would mix packed rows")
    return config


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Returns the settings of rotary embeddings: those of all layers, and those of each kind of layer."""
    text_config = config.get_text_config()
    ropes = [getattr(text_config, name, None) or {} for name in ("rope_parameters", "rope_scaling")]
    return ropes + [of_kind for rope in ropes for of_kind in rope.values() if isinstance(of_kind, dict)]


def _kind(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type"))


def longest_row(config: Any) -> float:
    """Returns the most tokens of a row for which rotary frequencies do not depend on the other rows."""
    limit = "original_max_position_embeddings"
    return min((r.get(limit, math.inf) for r in _ropes(config) if _kind(r) == "longrope"), default=math.inf)


class quiet:
    """Hides transformers' progress bars and its warnings about new heads."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self.level = logging.get_verbosity()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *exc: object) -> None:
        from transformers.utils import logging

        logging.set_verbosity(self.level)
        logging.enable_progress_bar()
