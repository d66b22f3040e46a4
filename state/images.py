"""The images of rows: what a prompt holds of them, and what a batch does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from jaxtyping import Int
from torch import Tensor

from .batch import Batch

POSITIONS = "position_ids"


@attrs.frozen(eq=False)
class RowImages:
    """What the prompt of a row holds of its images.

    Attributes:
        fields: the entries of the batch's ragged fields, such as ``pixels``, by name.
        positions: of the prompt's tokens, if they have several axes: place, time, height and width.
        length: how many tokens the prompt has; None stands for all that an engine is asked to continue.
        texts: for a conversation that an environment begins, what its text has for each image.
    """

    fields: Mapping[str, Tensor]
    positions: Int[Tensor, "P 4"] | None = None
    length: int | None = None
    texts: tuple[str, ...] = ()


def with_images(batch: Batch, images: Sequence[RowImages | None]) -> Batch:
    """Returns a batch with the images of its rows, whose prompts they lie in.

    Text after a prompt has one position behind the largest of the prompt on every axis, and so on.

    Args:
        batch: the rows.
        images: of each row; None for a row without.

    Raises:
        ValueError: images of two rows are of different families.

    Example:
        >>> seen = RowImages({"pixels": torch.zeros(2, 3)}, torch.tensor([[0, 0, 0, 0], [1, 0, 1, 1]]))
        >>> batch = with_images(Batch.from_rows([[7, 7, 5, 6], [4]]), [seen, None])
        >>> batch.ragged["pixels"].counts.tolist(), batch["position_ids"].tolist()
        ([2, 0], [[0, 0, 0, 0], [1, 0, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3], [0, 0, 0, 0]])
    """
    present = [one for one in images if one is not None and one.fields]
    if not present:
        return batch
    names = present[0].fields.keys()
    if any(one.fields.keys() != names for one in present):
        raise ValueError("rows have images of different families; encode all of them for one model")
    shown = [None if one is None or not one.fields else one.fields for one in images]
    ragged = {name: [torch.zeros(0) if one is None else one[name] for one in shown] for name in names}
    batch = batch.with_ragged(**ragged)
    if all(one.positions is None for one in present):
        return batch
    lengths = zip(images, batch.lengths.tolist(), strict=True)
    return batch.with_tokens(**{POSITIONS: torch.cat([_positions(one, length) for one, length in lengths])})


def _positions(images: RowImages | None, length: int) -> Int[Tensor, "T 4"]:
    if images is None or images.positions is None:
        return torch.arange(length)[:, None].expand(-1, 4)
    prompt = images.positions[:length]
    after = torch.arange(length - len(prompt))[:, None]
    begin = torch.tensor([len(prompt), *[int(prompt[:, 1:].max()) + 1] * 3])
    return torch.cat([prompt, begin + after])


def images_of_rows(batch: Batch, prompts: Sequence[int]) -> list[RowImages | None]:
    """Returns the images of each row, as ``with_images`` was given them.

    Args:
        batch: the rows.
        prompts: the number of tokens of each prompt.
    """
    if not batch.ragged:
        return [None] * len(batch)
    positions = batch.rows(POSITIONS) if POSITIONS in batch else [None] * len(batch)
    fields = {name: batch.rows(name) for name in batch.ragged}
    found: list[RowImages | None] = []
    for row, (of_row, length) in enumerate(zip(positions, prompts, strict=True)):
        own = {name: rows[row] for name, rows in fields.items()}
        none = not any(len(entries) for entries in own.values())
        found.append(None if none else RowImages(own, None if of_row is None else of_row[:length], length))
    return found
