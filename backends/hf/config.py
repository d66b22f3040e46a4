"""The config of a Hugging Face folder, refused where a pure step cannot run its model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_fn.errors import UserError

if TYPE_CHECKING:
    from verl_fn.backends.hf.skeleton import Skeleton


class ModelError(UserError, ValueError):
    """A folder that cannot be loaded or a model that cannot be run, with what to do."""


def check_same_config(mine: Skeleton, folder: str | Path) -> None:
    """Whether the config in ``folder`` is that of a skeleton, but for what names it.

    Raises:
        ModelError: it is another, or there is none.
    """
    ours, theirs = (_meaningful(config.to_dict()) for config in (mine.config, read_config(folder)))
    if odd := sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k)):
        raise ModelError(f"{folder} holds another model than the one this backend was made for: {odd[:4]} differ")


def _meaningful(config: dict[str, Any]) -> dict[str, Any]:
    """A config less what names it and what belongs to a head."""
    names = ("architectures", "transformers_version", "dtype", "use_cache", "id2label", "label2id", "num_labels")
    return {k: v for k, v in config.items() if k not in names and not k.startswith("_")}


def read_config(folder: str | Path) -> Any:
    """The transformers config of a folder.

    Raises:
        ModelError: there is none, it cannot be read, or it asks for what a pure step cannot have.
    """
    import transformers

    if not (Path(folder) / "config.json").is_file():
        raise ModelError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        # transformers' advice on its own versions, on further lines, does not help here.
        raise ModelError(f"{folder}/config.json cannot be read: {str(error).splitlines()[0]}") from error
    # Dropout of heads that transformers would put on top is never run here.
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
    if odd := kinds - {"full_attention", "sliding_attention"}:
        raise ModelError(f"{folder} has layers of kind {sorted(odd)}, which would mix packed rows")
    return config


def _ropes(config: Any) -> list[dict[str, Any]]:
    """What a config says of rotary embeddings: of all layers, or of each kind of layers."""
    text = config.get_text_config()
    found = [getattr(text, name, None) or {} for name in ("rope_parameters", "rope_scaling")]
    return found + [kind for rope in found for kind in rope.values() if isinstance(kind, dict)]


def _kind(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type"))


def longest_row(config: Any) -> float:
    """The most tokens of a row for which rotary frequencies do not depend on the rows beside it."""
    limit = "original_max_position_embeddings"
    return min((r.get(limit, math.inf) for r in _ropes(config) if _kind(r) == "longrope"), default=math.inf)


class quiet:
    """Hold back transformers' progress bars and its warnings on newly made heads."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self.level = logging.get_verbosity()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *exc: object) -> None:
        from transformers.utils import logging

        logging.set_verbosity(self.level)
        logging.enable_progress_bar()
