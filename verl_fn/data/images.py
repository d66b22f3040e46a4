"""Images of problems: the columns that hold them, and the pictures that image processors take.

A problem holds its images as the bytes of image files. A mark, ``<image>``, says where in the prompt each belongs;
content of messages that is a list of parts becomes text with marks when a row is read.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from verl_fn.backends.hf.processor import MARK, Processor, Shown, filled, images_of, processor_of, shown
from verl_fn.config.options import home
from verl_fn.data.rows import DataError, Row, one_line
from verl_fn.data.tasks import Problem
from verl_fn.state import RowImages

COLUMNS = ("images", "image")
MOST_PIXELS = 2**26
STEREO = "MPO"  # photos of some cameras, whose other frames are the same scene
_KEYS = ("bytes", "path", "image")
_TEXT_PARTS = ("text", "input_text", "output_text")
# Where messages hold what some data sets have in parts of their content.
_ELSEWHERE = {
    **dict.fromkeys(("thinking", "reasoning"), "into the message's reasoning_content"),
    **dict.fromkeys(("tool_use", "tool_call", "function_call"), "into the message's tool_calls"),
    **dict.fromkeys(("tool_result", "function_call_output"), "as a message of the role tool"),
    "refusal": "as a part of the type text",
}
_BEGINS_IN_BASE64 = ("iVBORw0KGgo", "/9j/", "R0lGODdh", "R0lGODlh", "UklGR")  # PNG, JPEG, GIF, WebP
_OF_ADDRESSES = str.maketrans("-_", "+/")  # addresses have an alphabet of their own
_WIDE = ("I", "F")  # Pillow's modes of samples that do not fit into 8 bits


class FromFile(bytes):
    """The content of a file that a row names; the file may have another at the next start, so no cache holds it."""


def images_in(place: str, row: Row) -> tuple[bytes, ...]:
    """Returns the images in the columns ``images`` and ``image`` of a row, as bytes of image files.

    An image is bytes, the path of a file, an address ``data:image/png;base64,...`` that holds it, an object with
    ``bytes``, ``path`` or ``image``, as data sets of the Hugging Face hub have them, or what a function of
    ``data.convert`` may make: a PIL image or an array. None beside images of a list is skipped.

    Args:
        place: the file and row, for errors; paths are relative to the file's folder.

    Raises:
        DataError: one of them is no image, is missing, or is too large.
    """
    found: list[Any] = []
    for column in COLUMNS:
        if (value := row.get(column)) is not None:
            found += value if isinstance(value, list | tuple) else [value]
    named = {f"{place}: image {number}": value for number, value in enumerate(found, 1)}
    if any(value is not None for value in found):
        named = {name: value for name, value in named.items() if value is not None}
    images = {name: _content(name, value, place) for name, value in named.items()}
    for name, content in images.items():
        opened(name, content)
    return tuple(images.values())


def _content(name: str, value: Any, place: str) -> bytes:
    if isinstance(value, Mapping):
        held = [value[key] for key in _KEYS if value.get(key)]
        if not held:
            raise DataError(f"{name} is an object without bytes and path: {sorted(value)}")
        return _content(name, held[0], place)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        return _file(name, value, place)
    if hasattr(value, "__array__") and not isinstance(value, Image.Image):
        try:
            value = Image.fromarray(np.asarray(value))
        except (TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{name} is an array that is no image: {error}; write height x width x 3, uint8"
            ) from error
    if isinstance(value, Image.Image):
        _check(name, value)
        written = io.BytesIO()
        _in_rgb(name, value).save(written, "PNG")
        return written.getvalue()
    raise DataError(f"{name} is a {type(value).__name__}; write the bytes of an image file, or its path")


def _file(name: str, path: str, place: str) -> bytes:
    if path.startswith("data:"):
        written = "".join(path.partition(";base64,")[2].split()).rstrip("=").translate(_OF_ADDRESSES)
        if not written:
            raise DataError(f"{name} is an address {path!r:.40} without ;base64, and what follows it; write both")
        try:
            return base64.b64decode(written + "=" * (-len(written) % 4), validate=True)
        except ValueError as error:
            raise DataError(f"{name} is an address {path!r:.40} whose base64 is damaged: {error}") from error
    if "://" in path:
        raise DataError(f"{name} is the address {path!r:.60}; nothing is downloaded: write bytes, or a file's path")
    file = Path(place.rpartition(", ")[0]).expanduser().parent / home(path)
    try:
        return FromFile(file.read_bytes())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        hint = "; of base64, write data:image/png;base64, in front of it" * path.startswith(_BEGINS_IN_BASE64)
        raise DataError(f"{name}: {file!s:.200} cannot be read: {why}{hint}") from error


def opened(name: str, content: bytes) -> Any:
    """Returns an image, whose pixels are read when they are needed.

    Raises:
        DataError: it is no image, too large or several, or its samples have more than 8 bits.
    """
    try:
        with warnings.catch_warnings():
            # Of large images Pillow warns, and refuses larger ones; there is one limit here.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content))
            frames = 1 if image.format == STEREO else getattr(image, "n_frames", 1)
    except Image.DecompressionBombError as error:
        raise DataError(f"{name} is too large: {one_line(error)}; make it smaller") from error
    # A damaged file makes Pillow raise errors of many classes.
    except Exception as error:
        raise DataError(f"{name} is no image that Pillow can read ({len(content)} bytes)") from error
    if frames > 1:
        raise DataError(
            f"{name} has {frames} frames or pages, and one would be seen; write the ones to see as images"
        )
    _check(name, image)
    return image


def _check(name: str, image: Any) -> None:
    pixels = image.width * image.height
    if pixels == 0:
        raise DataError(f"{name} has no pixels: it is {image.width} x {image.height}")
    if pixels > MOST_PIXELS:
        raise DataError(
            f"{name} is too large: it has {image.width} x {image.height} pixels, more than {MOST_PIXELS:,}; make it "
            "smaller"
        )
    if image.mode.startswith(_WIDE):
        # Pillow would cut them off at 255, which is nearly white.
        raise DataError(
            f"{name} has samples of 16 bits or more, or fractions (Pillow's mode {image.mode}); write 8 bits a sample"
        )


def _in_rgb(name: str, image: Any) -> Any:
    """Returns an image in RGB as it is shown: turned as its EXIF data say, and white where it is transparent.

    Raises:
        DataError: its file is damaged.
    """
    try:
        upright = ImageOps.exif_transpose(image)
        if upright.has_transparency_data:
            upright = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
        return upright.convert("RGB")
    except Exception as error:
        raise DataError(f"{name} is damaged: {one_line(error)}") from error


def pictures(problem: Problem) -> list[Any]:
    """Returns the images of a problem in RGB, upright, on white.

    Raises:
        DataError: the file of one is damaged.
    """
    named = [(f"image {number}", content) for number, content in enumerate(problem.images, 1)]
    return [_in_rgb(name, opened(name, content)) for name, content in named]


def in_text(place: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message whose content is text: parts of text one after the other, and a mark for each image.

    Args:
        place: the file, the row, the column and the number of the message, for errors.
        message: content that is no list of parts stays as it is.

    Raises:
        DataError: a part is neither text nor an image, or is an image that is not in the column ``images``.

    Example:
        >>> in_text("", {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]})
        {'role': 'user', 'content': '<image>?'}
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(_part(place, part) for part in content)}


def _part(place: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    held = {name: inner for name, inner in part.items() if name != "type" and inner} if kind else {}
    if kind in _TEXT_PARTS and held.keys() <= {"text"} and isinstance(text := held.get("text", ""), str):
        return text
    if kind == "image" and not held:
        return MARK
    if kind in _TEXT_PARTS and held.keys() <= {"text"}:
        raise DataError(
            f"{place} has a part of the type {kind} with the text {held['text']!r:.60}; it must be a string"
        )
    if kind in _TEXT_PARTS:
        more = ", ".join(sorted(held.keys() - {"text"}))
        raise DataError(f"{place} has a part of the type {kind} with {more}; nothing but text is read of such a part")
    if kind == "image":
        raise DataError(f"{place} holds its image in {', '.join(sorted(held))}; write it into the column images")
    instead = f"; write it {_ELSEWHERE[str(kind)]}" if str(kind) in _ELSEWHERE else ""
    raise DataError(
        f"{place} has a part {part!r:.60}; parts are of the type text or image, and nothing else is read{instead}"
    )


def check_marks(place: str, column: str, prompt: str | Sequence[Mapping[str, Any]], images: int) -> None:
    """Raises DataError unless a prompt has one mark for each image, and none in a turn of the assistant.

    Example:
        >>> check_marks("a.jsonl, line 1", "prompt", "<image>?", 2)
        Traceback (most recent call last):
        verl_fn.data.rows.DataError: a.jsonl, line 1: prompt has 1 marks <image> for 2 images; write one for each
    """
    said = [("user", prompt)] if isinstance(prompt, str) else [(m["role"], m["content"] or "") for m in prompt]
    if any(role in ("assistant", "tool") and MARK in text for role, text in said):
        raise DataError(
            f"{place}: {column} has the mark {MARK} in a message of the assistant or of a tool; images are read only "
            "in messages of the user and the system"
        )
    if (marks := sum(text.count(MARK) for _, text in said)) != images:
        raise DataError(f"{place}: {column} has {marks} marks {MARK} for {images} images; write one for each")


def seen_by(problem: Problem, tokenizer: Any) -> tuple[Shown, Processor] | None:
    """Returns the images of a problem as its model reads them; None without images.

    Raises:
        ModelError: the model reads no images, or cannot read these.
        DataError: the file of one is damaged.
    """
    if not problem.images:
        return None
    processor = processor_of(tokenizer)
    return shown(pictures(problem), processor), processor


def unplaced(seen: tuple[Shown, Processor] | None) -> RowImages | None:
    """Returns what a conversation needs of a problem's images, before an environment writes its first messages."""
    return None if seen is None else RowImages(seen[0].fields, texts=tuple(seen[0].tokens))


def fill(texts: Sequence[str], seen: tuple[Shown, Processor], problem: Problem) -> list[str]:
    """Returns texts with the tokens of a problem's images in place of the marks that the chat template has written.

    Raises:
        DataError: the texts have more or fewer marks than there are images.
    """
    images, processor = seen
    tokens: Iterator[str] = iter(images.tokens)
    if isinstance(problem.prompt, str):
        texts = [text.replace(MARK, processor.in_text) for text in texts]
    marks = sum(text.count(processor.mark) for text in texts)
    if marks != len(images.tokens):
        raise DataError(
            f"the text of the prompt has {marks} marks {processor.mark} for {len(images.tokens)} images; take a chat "
            "template that writes one for each part of the type image, and no such text in messages"
        )
    return [filled(text, tokens, processor.mark) for text in texts]


def kept(ids: Sequence[int], seen: tuple[Shown, Processor] | None) -> RowImages | None:
    """Returns what a row of these tokens holds of its images.

    Raises:
        ModelError: the tokens do not fit the images.
    """
    return None if seen is None else images_of(ids, *seen)
