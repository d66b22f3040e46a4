"""Prompts with images: their text with the tokens that stand for features, and the pixels that a tower reads.

transformers' own processors need torchvision, for videos. Here a folder's image processor is read in its version for
PIL, whether torchvision is there or not, so a prompt has the same pixels on every machine. The text around the tokens
of an image is transformers' own, family by family.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from verl_fn.backends.hf.config import LOCAL, ModelError, read_config, read_json, refused
from verl_fn.backends.hf.tokenizer import read_tokenizer
from verl_fn.backends.hf.vision import (
    FAMILIES,
    GRIDS,
    PIXEL_MASKS,
    PIXELS,
    Family,
    axis_positions,
    family_of,
    merge_size,
)
from verl_fn.backends.hf.vision import tokens_of_tile as tokens_of
from verl_fn.state import RowImages

MARK = "<image>"
"""Stands for an image in a prompt, whatever the family's own mark is."""

# The folders of transformers that have the image processors of these model types; others have their own.
_MODULES = {"qwen2_5_vl": "qwen2_vl", "qwen3_vl": "qwen2_vl"}
SETTINGS = ("preprocessor_config.json", "processor_config.json")
# The attribute of a tokenizer that has the processor of its folder.
_OWN = "image_prompts"


@attrs.frozen(eq=False)
class Shown:
    """Images as a model reads them.

    Attributes:
        tokens: for each image, the text of its tokens.
        fields: what a batch holds of the images, by the names of its ragged fields.
        features: how many features the images have together, and so how many image tokens the texts have.
    """

    tokens: list[str]
    fields: Mapping[str, Tensor]
    features: int


@attrs.frozen(eq=False)
class Processor:
    """What turns prompts with images into tokens and pixels.

    Attributes:
        image_processor: transformers', in its version for PIL.
        folder: where they come from, for errors.
    """

    tokenizer: Any
    image_processor: Any
    config: Any
    folder: str

    @property
    def family(self) -> Family:
        """What the models of this kind have in common."""
        family = family_of(self.config)
        assert family is not None
        return family

    @property
    def mark(self) -> str:
        """The token that the family's chat template writes for an image."""
        number = getattr(self.config, "boi_token_index", None) or self.config.image_token_id
        return str(self.tokenizer.convert_ids_to_tokens(number))

    @property
    def feature(self) -> str:
        """The token that stands for a feature of an image."""
        return str(self.tokenizer.convert_ids_to_tokens(self.config.image_token_id))

    @property
    def in_text(self) -> str:
        """What stands for an image in a prompt that no template renders."""
        start, end = (getattr(self.config, f"vision_{name}_token_id", None) for name in ("start", "end"))
        if start is None or end is None:
            return self.mark
        return "".join(map(str, self.tokenizer.convert_ids_to_tokens([start, self.config.image_token_id, end])))


def read_processor(folder: str | Path, tokenizer: Any = None) -> Processor:
    """Reads what turns prompts with images into tokens and pixels.

    Raises:
        ModelError: the model reads no images, or the folder's image processor cannot be used.
    """
    config = read_config(folder)
    if family_of(config) is None:
        raise ModelError(
            f"{folder}: models of the type {config.model_type} read no images here; there are {', '.join(FAMILIES)}"
        )
    if not any((Path(folder) / name).is_file() for name in SETTINGS):
        raise ModelError(f"{folder} has no {SETTINGS[0]}: copy the image processor's file into it")
    kind = image_processor_class(config.model_type)
    own = kind.__name__.removesuffix("Pil")
    with refused(f"{folder} has no image processor that can be read"):
        for name in SETTINGS:
            table = read_json(Path(folder) / name) if (Path(folder) / name).is_file() else {}
            asked = table.get("image_processor", table).get("image_processor_type", own)
            if asked.removesuffix("Fast").removesuffix("Pil") != own:
                raise ModelError(f"{folder}/{name} is of {asked}, and the model needs {own}; copy the model's own")
        image_processor = kind.from_pretrained(folder, **LOCAL)
    tokenizer = read_tokenizer(folder) if tokenizer is None else tokenizer
    return Processor(tokenizer, image_processor, config, str(folder))


def image_processor_class(model_type: str) -> Any:
    module = f"transformers.models.{(name := _MODULES.get(model_type, model_type))}.image_processing_pil_{name}"
    found = vars(importlib.import_module(module))
    return next(
        value for name, value in found.items() if name.endswith("ImageProcessorPil") and value.__module__ == module
    )


def processor_of(tokenizer: Any) -> Processor:
    """Returns the processor of the folder that a tokenizer was read from, which is read once.

    Raises:
        ModelError: as ``read_processor``.
    """
    if getattr(tokenizer, _OWN, None) is None:
        setattr(tokenizer, _OWN, read_processor(tokenizer.name_or_path, tokenizer))
    processor: Processor = getattr(tokenizer, _OWN)
    return processor


def encode_text(text: str, images: Sequence[Any], processor: Processor) -> tuple[list[int], RowImages | None]:
    """Returns the token ids of a text, and what a row that begins with it holds of its images, if there are any.

    Args:
        text: has the family's mark once for each image.

    Raises:
        ModelError: there are more or fewer marks than images, or as ``shown`` and ``images_of``.
    """
    if (marks := text.count(processor.mark)) != len(images):
        raise ModelError(f"the text has {marks} marks {processor.mark} for {len(images)} images; write one for each")
    if not images:
        return processor.tokenizer.encode(text, add_special_tokens=False), None
    seen = shown(images, processor)
    text = filled(text, iter(seen.tokens), processor.mark)
    ids: list[int] = processor.tokenizer.encode(text, add_special_tokens=False)
    return ids, images_of(ids, seen, processor)


def filled(text: str, tokens: Iterator[str], mark: str) -> str:
    """Returns a text with the next tokens of images in place of marks.

    Example:
        >>> filled("a<image>b", iter(["[1]", "[2]"]), "<image>")
        'a[1]b'
    """
    first, *rest = text.split(mark)
    return first + "".join(next(tokens) + part for part in rest)


def shown(images: Sequence[Any], processor: Processor) -> Shown:
    """Returns PIL images as the model reads them, at least one.

    Raises:
        ModelError: the image processor fails, or makes other pixels than the model reads.
    """
    process: Callable[..., Any] = processor.image_processor
    sizes = ", ".join(f"{image.width} x {image.height}" for image in images)
    with refused(f"the image processor fails on images of {sizes} pixels"):
        if GRIDS in processor.family.fields:
            return _of_grids(process(images=list(images), return_tensors="pt"), processor)
        if PIXEL_MASKS in processor.family.fields:
            given = {"return_tensors": "pt", "return_row_col_info": True}
            return _of_tiles(process(images=[list(images)], **given), processor)
        return _of_squares(process(images=list(images), return_tensors="pt"), processor)


def images_of(ids: Sequence[int], seen: Shown, processor: Processor) -> RowImages:
    """Returns what a row that begins with these tokens holds of its images.

    Raises:
        ModelError: the tokens have more or fewer places for features than the images have features.
    """
    places = torch.tensor(ids) == processor.config.image_token_id
    if int(places.sum()) != seen.features:
        raise ModelError(
            f"{processor.folder}: the prompt has {int(places.sum())} image tokens, and its images have "
            f"{seen.features} features; the image processor, the tokenizer and config.json are not of one model, or "
            "the text has image tokens of its own"
        )
    if GRIDS not in seen.fields:
        return RowImages(seen.fields, length=len(ids))
    return RowImages(seen.fields, axis_positions(places, seen.fields[GRIDS], merge_size(processor.config)), len(ids))


def _of_grids(made: Any, processor: Processor) -> Shown:
    grids, vision = made["image_grid_thw"], processor.config.vision_config
    merge = merge_size(processor.config)
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    if made["pixel_values"].shape[1] != width or bool((grids[:, 1:] % merge != 0).any()):
        raise ModelError(
            f"{processor.folder}: the image processor makes patches of {made['pixel_values'].shape[1]} numbers in "
            f"grids of {grids[0].tolist()}, and the model reads {width} numbers and merges {merge} x {merge} of "
            "them; copy the model's own preprocessor_config.json"
        )
    sizes = (grids.prod(-1) // merge**2).tolist()
    return Shown([processor.mark * size for size in sizes], {PIXELS: made["pixel_values"], GRIDS: grids}, sum(sizes))


def _of_tiles(made: Any, processor: Processor) -> Shown:
    from transformers.models.idefics3.processing_idefics3 import get_image_prompt_string

    pixels = made["pixel_values"][0]
    _check_size(pixels, processor)
    each, rows, columns = tokens_of(processor.config), made["rows"][0], made["cols"][0]
    tokens = {"fake_token_around_image": "<fake_token_around_image>", "global_img_token": "<global-img>"}
    texts = [
        get_image_prompt_string(r, c, each, image_token=processor.mark, **tokens)
        for r, c in zip(rows, columns, strict=True)
    ]
    features = sum(each * (r * c + 1) for r, c in zip(rows, columns, strict=True))
    return Shown(texts, {PIXELS: pixels, PIXEL_MASKS: made["pixel_attention_mask"][0].bool()}, features)


def _of_squares(made: Any, processor: Processor) -> Shown:
    if bool((torch.as_tensor(made["num_crops"]) > 0).any()):
        raise ModelError(
            f"{processor.folder}: the image processor cuts images into crops (do_pan_and_scan), and the prompt's "
            "text does not show them; set it to false in preprocessor_config.json"
        )
    _check_size(made["pixel_values"], processor)
    tokenizer, config = processor.tokenizer, processor.config
    each = tokens_of(config)
    shown = processor.feature * each
    text = f"\n\n{processor.mark}{shown}{tokenizer.convert_ids_to_tokens(config.eoi_token_index)}\n\n"
    count = len(made["pixel_values"])
    return Shown([text] * count, {PIXELS: made["pixel_values"]}, each * count)


def _check_size(pixels: Tensor, processor: Processor) -> None:
    size = processor.config.vision_config.image_size
    if pixels.shape[-2:] != (size, size):
        found = " x ".join(map(str, pixels.shape[-2:]))
        raise ModelError(
            f"{processor.folder}: the image processor makes images of {found} pixels, and the model reads {size} x "
            f"{size}; copy the model's own preprocessor_config.json"
        )


def parts_of(text: str) -> list[dict[str, str]]:
    """Returns the content of a message as parts, of which each ``<image>`` in its text is one.

    Example:
        >>> parts_of("<image>How many?")
        [{'type': 'image'}, {'type': 'text', 'text': 'How many?'}]
    """
    parts = re.split(f"({re.escape(MARK)})", text)
    return [{"type": "image"} if part == MARK else {"type": "text", "text": part} for part in parts if part]
