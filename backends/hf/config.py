"""Reads the config of a Hugging Face folder, and refuses one whose model a pure step cannot run."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_fn.errors import UserError, did_you_mean

# A model folder's own code is never run, and nothing is downloaded.
LOCAL = {"trust_remote_code": False, "local_files_only": True}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Fields with a rate of dropout. The dropout of transformers' own heads is never run here.
_DROPOUT = re.compile(r"^(?!classifier|summary).*(?:dropout|layerdrop|_pdrop$)")


class ModelError(UserError, ValueError):
    """A folder cannot be loaded, or its model cannot be run."""


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
    """Turns every error inside into a ``ModelError`` that begins with ``what``.

    A damaged file fails anywhere in transformers or tokenizers, with errors of any class.

    Example:
        >>> with refused("m/config.json cannot be read"):
        ...     1 / 0
        Traceback (most recent call last):
        verl_fn.backends.hf.config.ModelError: m/config.json cannot be read: ZeroDivisionError: division by zero
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        # The panics of tokenizers, a package in Rust, derive from BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{what}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Returns the first line of an error's message, after the name of its class where that says something.

    The other lines of transformers' messages are advice on its versions and do not help here.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Some first lines only introduce the second.
    first = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    if type(error) in (OSError, ValueError, RuntimeError, Exception) and first:
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ModelError: the file cannot be read, or is no object.
    """
    with refused(f"{file} cannot be read"):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ModelError(f"{file} cannot be read: it must be a JSON object, not {content!r:.80}")
    return content


def check_same_config(skeleton: Any, folder: str | Path) -> None:
    """Raises ModelError unless the config in ``folder`` describes the same model as a skeleton's."""
    own, other = (_meaningful(config.to_dict()) for config in (skeleton.config, read_config(folder)))
    if differing := sorted(key for key in own.keys() | other.keys() if own.get(key) != other.get(key)):
        raise ModelError(
            f"{folder} holds another model than the one this backend was made for: {differing[:4]} differ"
        )


def _meaningful(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config, and those inside of it, without the fields that only name it, and without a head's fields."""
    named = ("architectures", "transformers_version", "dtype", "use_cache", "auto_map")
    of_a_head = ("id2label", "label2id", "num_labels")
    kept = {k: v for k, v in config.items() if k not in named + of_a_head and not k.startswith("_")}
    return {k: _meaningful(v) if isinstance(v, dict) else v for k, v in kept.items()}


def is_classifier(config: Any) -> bool:
    """Returns whether a config names a model with a head for scores, as critics and reward models have.

    Example:
        >>> from types import SimpleNamespace
        >>> is_classifier(SimpleNamespace(architectures=["Qwen2ForSequenceClassification"]))
        True
    """
    names = config.architectures or ()
    return any(kind in name for name in names for kind in ("TokenClassification", "SequenceClassification"))


def read_config(folder: str | Path) -> Any:
    """Reads the transformers config of a folder.

    Raises:
        ModelError: there is none, it cannot be read, or it sets what a pure step cannot do.
    """
    import transformers

    _check_adapters(folder)
    if not (Path(folder) / "config.json").is_file():
        way = (
            "models are not downloaded, so give a folder of this machine, such as verl-fn prepare hub:OWNER/NAME "
            "--out FOLDER writes"
        )
        if (model := Path(folder) / "model").is_dir():
            way = f"a run's model is in {model}"
        raise ModelError(f"{folder} is not a Hugging Face model folder: it has no config.json; {way}")
    table = read_json(Path(folder) / "config.json")
    only_transformers()
    kind = table.get("model_type")
    if isinstance(kind, str) and kind not in transformers.CONFIG_MAPPING:
        own = " and Python code of a model's folder (auto_map) is never run," if "auto_map" in table else ""
        raise ModelError(
            f"{folder}/config.json has the model type {kind!r}: transformers {transformers.__version__} has no such "
            f"family,{own} so the model cannot be built; take a model of a family in docs/families.md"
        )
    with refused(f"{folder}/config.json cannot be read"):
        config = copy.deepcopy(_parsed(folder, json.dumps(table)))
        _check(config, folder)
        for part, name, _ in _dropout(config):
            setattr(part, name, 0.0)
        _turn_as_released(config)
    return config


def _turn_as_released(config: Any) -> None:
    """Makes MiniMax-M2 rotate the first ``rotary_dim`` elements of a head; transformers 5.9 rotates the whole head.

    Raises:
        ValueError: ``rotary_dim`` is no even number up to the width of a head.

    Source:
        huggingface/transformers#48241.
    """
    turned = getattr(config, "rotary_dim", None)
    if config.model_type != "minimax_m2" or turned is None:
        return
    if turned not in range(2, config.head_dim + 1, 2):
        raise ValueError(f"rotary_dim must be an even number up to head_dim = {config.head_dim}, not {turned!r}")
    config.rope_parameters.setdefault("partial_rotary_factor", turned / config.head_dim)


def _check_adapters(folder: str | Path) -> None:
    """Checks that a folder has no adapters of PEFT; a checkpoint of this project has lora.json and its own ones.

    transformers would load them, and the model that they name, in place of the folder's weights.

    Raises:
        ModelError: it has some.
    """
    file = Path(folder) / "adapter_config.json"
    if file.is_file() and not (Path(folder) / "lora.json").is_file():
        base = read_json(file).get("base_model_name_or_path")
        raise ModelError(
            f"{folder} has adapters of PEFT ({file.name}) for {base}: merge them into that model "
            "(PeftModel.merge_and_unload, then save_pretrained) and give the new folder; if the folder's own weights "
            f"are meant, remove {file.name}"
        )


def fingerprint(config: Any, *more: str) -> str:
    """Returns what a model is made from as a text; folders with the same config have the same one.

    Args:
        config: of the whole model.
        more: what else decides, such as the class and the head.
    """
    # transformers notes the folder in the config.
    table = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
    return json.dumps([*more, table], sort_keys=True, default=str)


@functools.lru_cache(maxsize=32)
def _parsed(folder: str | Path, content: str) -> Any:
    """Returns what transformers makes of a folder's config; callers that change it copy it.

    A run asks for the configs of a few folders some thirty times, and transformers takes milliseconds for each.

    Args:
        content: of its config.json, so that a file that has changed is read again.
    """
    import transformers

    only_transformers()
    return transformers.AutoConfig.from_pretrained(folder, **LOCAL)


def only_transformers() -> None:
    """Takes back the names of model types under which other packages registered configs and models of their own.

    flash-linear-attention does so when it is imported, as transformers does for the first model with its kernels.
    Names of tensors in files are mended, too.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    for name in CONFIG_MAPPING._extra_content.keys() & CONFIG_MAPPING_NAMES.keys():
        del CONFIG_MAPPING._extra_content[name]
    _names_of_published_files()


@functools.cache
def _names_of_published_files() -> None:
    """Lets transformers write the embedding of Nemotron-H under the name that published files have and vLLM reads.

    transformers 5.9 writes ``embedding`` for ``embeddings`` (its pull request 48075). It still reads both.
    """
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    rules = conversion_mapping.get_checkpoint_conversion_mapping("nemotron_h")
    right = WeightRenaming(["embeddings.weight", "embedding.weight"], "embeddings.weight")
    rules = [right if one.source_patterns == ["embedding.weight"] else one for one in rules]
    conversion_mapping.register_checkpoint_conversion_mapping("nemotron_h", rules, overwrite=True)


def compute_dtype(asked: str | None, folder: str | Path, device: str) -> str:
    """Returns the dtype that a model computes in.

    Args:
        asked: the dtype that the config asks for; None for the default: float32 on a CPU, and on a GPU the dtype
            that the folder's weights were made for: bfloat16 for every dtype of 16 bits.

    Example:
        >>> compute_dtype("bfloat16", "any", "cpu"), compute_dtype(None, "any", "cpu")
        ('bfloat16', 'float32')
    """
    if asked is not None:
        return asked
    if device == "cpu":
        return "float32"
    own = str(read_config(folder).get_text_config().dtype)
    return "bfloat16" if own.endswith("float16") else "float32"


def dropout_of(folder: str | Path) -> dict[str, float]:
    """Returns the rates of dropout that a folder's config sets; ``read_config`` turns them off.

    A step with dropout would be no function of its arguments.
    """
    content = json.dumps(read_json(Path(folder) / "config.json"))
    with refused(f"{folder}/config.json cannot be read"):
        return {name: rate for _, name, rate in _dropout(_parsed(folder, content))}


def _dropout(config: Any) -> Iterator[tuple[Any, str, float]]:
    """Yields the part of a config, the field and the rate of each dropout above 0."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "get_text_config"):
            yield from _dropout(value)
        elif isinstance(value, (int, float)) and value > 0 and _DROPOUT.search(name):
            yield config, name, value


def _check(config: Any, folder: str | Path) -> None:
    """Raises an error for settings that a pure step cannot have, or that no model has."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    language_model = config.get_text_config()
    if not hasattr(language_model, "get_text_config"):
        # transformers keeps tables that this architecture does not know as they are.
        raise ModelError(
            f"{folder}/config.json has {language_model!r:.40} as the config of a language model inside "
            f"{config.model_type}; it has none; remove text_config, decoder, generator or text_encoder"
        )
    for name in ("vocab_size", "num_hidden_layers"):
        count = getattr(language_model, name, 1)
        if type(count) is not int or count < 1:
            raise ModelError(f"{folder}/config.json has {count!r} as {name}; it must be a whole number from 1")
    known = ["default", *sorted(ROPE_INIT_FUNCTIONS)]
    if unknown := [kind for kind in map(_kind, _ropes(config)) if kind not in (*known, "None")]:
        raise ModelError(
            f"{folder}/config.json sets rotary embeddings of kind {unknown[0]!r}, unknown to transformers"
            f"{did_you_mean(unknown[0], known)}; it knows {', '.join(known)}"
        )
    if any("dynamic" in _kind(rope) for rope in _ropes(config)):
        raise ModelError(
            f"{folder}/config.json sets rotary embeddings of kind 'dynamic', whose frequencies depend on the rows "
            f"before, which a pure step cannot have; set rope_type to 'default', which is the same up to "
            f"max_position_embeddings"
        )


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Returns the settings of rotary embeddings, for all layers and for each kind of layer."""
    text_config = config.get_text_config()
    ropes = [getattr(text_config, name, None) or {} for name in ("rope_parameters", "rope_scaling")]
    return ropes + [of_kind for rope in ropes for of_kind in rope.values() if isinstance(of_kind, dict)]


def _kind(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type"))


def longest_row(config: Any) -> float:
    """Returns the most tokens of a row for which rotary frequencies do not depend on the other rows."""
    limit = "original_max_position_embeddings"
    return min((r.get(limit, math.inf) for r in _ropes(config) if _kind(r) == "longrope"), default=math.inf)


def head_dim(config: Any) -> int:
    """Returns the size of an attention head, also if the config does not set it."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def kv_heads(config: Any) -> int:
    """Returns how many heads have keys and values of their own."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides transformers' progress bars and its warnings about new heads."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
