"""Models with images: which families are run, what a batch holds of its images, and how a model reads them.

A batch holds images as ragged fields, ``pixels`` and, for some families, ``grids`` or ``pixel_masks``. Families with
positions of several axes (M-RoPE, arXiv 2409.12191) have them as the per-token field ``position_ids``, four numbers
for each token: its place in the row, then time, height and width. A token that the model drew is text, whatever its
id is; an image token of the prompt stands for one feature of the tower.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from verl_fn.backends.hf.config import ModelError
from verl_fn.state import POSITIONS, Batch

PIXELS, GRIDS, PIXEL_MASKS = "pixels", "grids", "pixel_masks"
FIELDS = (PIXELS, GRIDS, PIXEL_MASKS)
AXES = 4


@attrs.frozen
class Family:
    """What the models of a family have in common.

    Attributes:
        tower: the module of the model's body that sees.
        text: the module of the model's body that is the language model.
        fields: the batch's ragged fields, and the arguments of the tower that they are.
        several: the tower takes images of several rows as a table, whose first size is 1 here.
        blocks: the tokens of an image attend to each other in both directions.
    """

    tower: str
    text: str
    fields: Mapping[str, str]
    several: bool = False
    blocks: bool = False

    @property
    def axes(self) -> bool:
        """Whether positions have several axes."""
        return GRIDS in self.fields

    def features(self, config: Any, batch: Batch) -> Int[Tensor, " B"]:
        """Returns how many features the tower makes for each row, and so how many image tokens the row must have."""
        if self.axes:
            return patches_of(batch, merge_size(config))
        return batch.ragged[PIXELS].counts.cpu() * tokens_of_tile(config)

    def arguments(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the arguments of the tower."""
        given = {argument: fields[name] for name, argument in self.fields.items()}
        return {name: t[None] for name, t in given.items()} if self.several else given

    def blank(self, config: Any, device: torch.device) -> dict[str, Tensor]:
        """Returns the fields of one small image without anything on it."""
        vision = config.vision_config
        if self.axes:
            side = vision.spatial_merge_size
            width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            grid = torch.tensor([[1, side, side]], device=device)
            return {PIXELS: torch.zeros(side * side, width, device=device), GRIDS: grid}
        size = vision.image_size
        # transformers drops images of zeros as padding.
        pixels = torch.ones(1, vision.num_channels, size, size, device=device)
        return {PIXELS: pixels, PIXEL_MASKS: torch.ones(1, size, size, dtype=torch.bool, device=device)}


_QWEN = Family("visual", "language_model", {PIXELS: "pixel_values", GRIDS: "image_grid_thw"})
_IDEFICS = Family(
    "vision_model", "text_model", {PIXELS: "pixel_values", PIXEL_MASKS: "pixel_attention_mask"}, several=True
)
_GEMMA = Family("vision_tower", "language_model", {PIXELS: "pixel_values"}, blocks=True)
# By transformers' model type. Each is compared with transformers' own forward of single rows by a test.
FAMILIES: Mapping[str, Family] = {
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "smolvlm": _IDEFICS,
    "idefics3": _IDEFICS,
    "gemma3": _GEMMA,
}


def family_of(config: Any) -> Family | None:
    """Returns the family of a model with images; None for a model of text."""
    return FAMILIES.get(config.model_type) if hasattr(config, "vision_config") else None


def class_of(config: Any, head: str, folder: str | Path) -> Any:
    """Returns transformers' class that makes a model of a config.

    Raises:
        ModelError: it makes none with a value head.
    """
    import transformers

    sees = family_of(config) is not None
    if head == "lm":
        return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    auto: Any = transformers.AutoModelForTokenClassification
    if type(config) not in auto._model_mapping:
        what = "a model with images" if sees else f"a model of the type {config.model_type}"
        raise ModelError(
            f"{folder}: {what} has no value head in transformers; take another model, or an algorithm without a "
            "critic, such as algorithm.name=grpo"
        )
    return auto


def attentions(config: Any, name: str) -> str | dict[str, str]:
    """Returns the implementations of attention for a model whose language model has this one.

    Towers attend within an image, not within a row, so they keep torch's own.

    Example:
        >>> from transformers import Qwen2Config
        >>> attentions(Qwen2Config(), "eager")
        'eager'
    """
    return name if family_of(config) is None else {"": name, "text_config": name, "vision_config": "sdpa"}


def patches_of(batch: Batch, merge: int = 1) -> Int[Tensor, " B"]:
    """Returns how many patches the images of each row have, if ``merge`` x ``merge`` of them count as one."""
    grids = batch.ragged[GRIDS]
    rows = torch.arange(len(batch)).repeat_interleave(grids.counts.cpu())
    return torch.zeros(len(batch), dtype=torch.int64).index_add(0, rows, (grids.values.prod(-1) // merge**2).cpu())


def merge_size(config: Any) -> int:
    """Returns how many patches of each side become one feature."""
    return int(config.vision_config.spatial_merge_size)


def tokens_of_tile(config: Any) -> int:
    """Returns how many features a family with images of one size makes of each."""
    if (fixed := getattr(config, "mm_tokens_per_image", None)) is not None:
        return int(fixed)
    vision = config.vision_config
    return int((vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2)


def image_tokens(config: Any, batch: Batch) -> Bool[Tensor, " T"]:
    """Returns which tokens stand for features of images; a token that the model drew does not."""
    return (batch.tokens == config.image_token_id) & (batch["response_mask"] == 0)


def axis_positions(images: Bool[Tensor, " T"], grids: Int[Tensor, "n 3"], merge: int) -> Int[Tensor, "T 4"]:
    """Returns the positions of one row's tokens: place, time, height and width.

    The tokens of an image have the times, heights and widths of their patches, and the text after it goes on behind
    the largest of them.

    Args:
        images: which tokens stand for features of images.
        grids: the patches of each image, in time, height and width, in the order of the images.
        merge: how many patches of each side become one feature.

    Raises:
        ValueError: the images have more or fewer features than there are tokens for them.

    Source:
        Wang et al. 2024, arXiv 2409.12191; transformers' ``get_rope_index`` of Qwen2.5-VL and Qwen3-VL.

    Example:
        >>> row = torch.tensor([0, 1, 1, 0], dtype=torch.bool)
        >>> axis_positions(row, torch.tensor([[1, 2, 4]]), 2).tolist()
        [[0, 0, 0, 0], [1, 1, 1, 1], [2, 1, 1, 2], [3, 3, 3, 3]]
    """
    parts, place, position = [], 0, 0
    starts = images.nonzero()[:, 0].tolist()
    sizes = (grids.prod(-1) // merge**2).tolist()
    if len(starts) != sum(sizes):
        raise ValueError(f"there are {len(starts)} image tokens, and the images have {sum(sizes)} features")
    for (t, height, width), size in zip(grids.tolist(), sizes, strict=True):
        start = starts.pop(0)
        del starts[: size - 1]
        text = start - place
        parts.append(torch.arange(position, position + text).expand(3, -1))
        position += text
        axes = (range(t), range(height // merge), range(width // merge))
        parts.append(torch.cartesian_prod(*(torch.tensor(axis) for axis in axes)).view(-1, 3).T + position)
        position += max(height, width) // merge
        place = start + size
    parts.append(torch.arange(position, position + len(images) - place).expand(3, -1))
    return torch.cat([torch.arange(len(images))[None], torch.cat(parts, 1)]).T.contiguous()


def beside_tokens(batch: Batch) -> Int[Tensor, " B"] | None:
    """Returns what each row costs beside its tokens in a micro-batch's budget: the patches that a tower computes.

    Only families with grids make patches the entries of ``pixels``; images of one size cost what their tokens do.
    """
    return batch.ragged[PIXELS].counts if GRIDS in batch else None


def check_images(family: Family | None, config: Any, batch: Batch, *, padded: bool) -> None:
    """Checks that each row has the image tokens, features and positions that belong together.

    Args:
        family: of the model; None for a model of text.
        batch: on the CPU.
        padded: whether the model's rows are padded.

    Raises:
        ValueError: they do not, or the model reads no images.
    """
    present = [name for name in FIELDS if name in batch]
    if family is None:
        if present:
            raise ValueError(f"the batch has {present[0]}, and this model reads no images; leave the images out")
        return
    if not present:
        _check_counts(config, batch, torch.zeros(len(batch), dtype=torch.int64))
        return
    if padded:
        raise ValueError("padded rows have no images here; set model.layout to auto or packed")
    if missing := sorted(family.fields.keys() - set(present)):
        raise ValueError(f"the batch has {present[0]} without {missing[0]}; make both with encode")
    if extra := sorted(set(present) - family.fields.keys()):
        raise ValueError(
            f"the batch has {extra[0]}, which is another family's; make its rows with this model's encode"
        )
    _check_counts(config, batch, family.features(config, batch))
    _check_pixels(family, config, batch)
    if family.axes:
        _check_positions(config, batch)


def _check_counts(config: Any, batch: Batch, features: Tensor) -> None:
    tokens = batch.sum_rows(image_tokens(config, batch).long())
    if bool((wrong := tokens != features).any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"row {row} has {int(tokens[row])} image tokens, and its images have {int(features[row])} features; a "
            "row must keep its images whole: make it with encode, and shorten only its text"
        )


def _check_pixels(family: Family, config: Any, batch: Batch) -> None:
    pixels = batch.ragged[PIXELS]
    if not family.axes:
        if family.several and bool((pixels.values == 0).flatten(1).all(1).any()):
            raise ValueError("an image has zeros only, and transformers drops such images as padding; make it gray")
        return
    patches = patches_of(batch)
    if bool((wrong := patches != pixels.counts).any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"row {row} has pixels of {int(pixels.counts[row])} patches, and its grids have {int(patches[row])}"
        )


def _check_positions(config: Any, batch: Batch) -> None:
    if POSITIONS not in batch.per_token:
        raise ValueError(f"the batch has images without {POSITIONS}; make its rows with with_images")
    found = batch[POSITIONS]
    if found.shape != (batch.num_tokens, AXES):
        raise ValueError(
            f"{POSITIONS} has shape {list(found.shape)}; it must be [{batch.num_tokens}, {AXES}]: place in the row, "
            "time, height and width of each token"
        )
    images = image_tokens(config, batch).split(batch.lengths.tolist())
    rows = zip(batch.rows(POSITIONS), images, batch.ragged[GRIDS].rows(), strict=True)
    for row, (own, of_row, grids) in enumerate(rows):
        if not torch.equal(own, axis_positions(of_row, grids, merge_size(config))):
            raise ValueError(
                f"row {row} has {POSITIONS} that are not the positions of its images; make the rows with with_images"
            )


@attrs.frozen(eq=False)
class Seen:
    """The images of a micro-batch on the model's device.

    Attributes:
        fields: the entries of all rows, or of a blank image if the micro-batch has none.
        blank: whether it is so. Its features count zero times: ranks that share a tower run it together.
        images: which tokens stand for features.
        positions: of several axes, if the family has them.
    """

    family: Family
    fields: dict[str, Tensor]
    blank: bool
    images: Bool[Tensor, " T"]
    positions: Int[Tensor, "T 4"] | None

    @classmethod
    def of(cls, family: Family | None, config: Any, batch: Batch) -> Seen | None:
        """Returns the images of a micro-batch; None if no row of the whole batch has any."""
        if family is None or PIXELS not in batch:
            return None
        fields = {name: batch.ragged[name].values for name in family.fields}
        blank = not len(fields[PIXELS])
        if blank:
            fields = family.blank(config, batch.tokens.device)
        positions = batch[POSITIONS] if family.axes else None
        return cls(family, fields, blank, image_tokens(config, batch), positions)

    def features(self, body: Any, dtype: torch.dtype) -> tuple[Float[Tensor, "n H"], list[Float[Tensor, "n H"]]]:
        """Returns what the tower makes of the images: a feature for each image token, and inner layers' features.

        Args:
            body: has transformers' ``get_image_features``.
        """
        outputs = body.get_image_features(**self.family.arguments(self.fields), return_dict=True)
        deep = getattr(outputs, "deepstack_features", None) or ()
        return _flat(outputs.pooler_output).to(dtype), [t.to(dtype) for t in deep]

    def embedded(self, body: nn.Module, tokens: Int[Tensor, " T"]) -> dict[str, Any]:
        """Returns what the language model reads in place of tokens: embeddings with the features of the images.

        Qwen3-VL also adds features of the tower's inner layers to its first layers (DeepStack, arXiv 2406.04334).
        """
        model: Any = body
        embeddings = model.get_input_embeddings()(tokens)
        features, deep = self.features(model, embeddings.dtype)
        if self.blank:
            nothing = 0.0 * sum((t.sum() for t in (features, *deep)), torch.zeros((), device=features.device))
            return {"inputs_embeds": (embeddings + nothing.to(embeddings.dtype))[None]}
        places = self.images.nonzero()[:, 0]
        given: dict[str, Any] = {"inputs_embeds": embeddings.index_copy(0, places, features)[None]}
        if deep:
            given |= {"visual_pos_masks": self.images[None], "deepstack_visual_embeds": deep}
        return given

    @property
    def blocks(self) -> Int[Tensor, " T"] | None:
        """The number of each token's image, -1 for text, if the tokens of an image attend to each other."""
        if not self.family.blocks or self.blank:
            return None
        begins = self.images.clone()
        begins[1:] &= ~self.images[:-1]
        return torch.where(self.images, begins.cumsum(0), -1)


def _flat(features: Any) -> Tensor:
    """Returns features of several images, each a tensor or a row of one, as ``[n, H]``."""
    return torch.cat(list(features)) if isinstance(features, (list, tuple)) else features.flatten(0, -2)
