"""Lengths of encoded problems that were counted before: a file in the user's cache for each data and tokenizer.

A start of a run encodes all its data to know that it fits. The next start with the same data, tokenizer and template
reads the lengths.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_fn.atomic import replaced
from verl_fn.backends.hf import chat
from verl_fn.data.tasks import Problem

FEWEST = 10_000  # fewer problems are encoded in a few seconds


def counted(
    kind: str, problems: Sequence[Problem], tokenizer: Any, count: Callable[[], Sequence[int]]
) -> Sequence[int]:
    """Returns what ``count`` does, from the cache if the same was counted before.

    What cannot be read is counted again, and a cache that cannot be written stays empty. Several processes may count
    the same at once: each writes a file of its own, and renames it when it is whole.

    Args:
        kind: what is counted, with every setting that it depends on beside problems and tokenizer.
        problems: decide on the result, with the tokenizer and its chat template.
        tokenizer: the model's tokenizer; without a fast one nothing is cached.
        count: counts.

    Example:
        >>> counted("prompts", [Problem("ab", "")], None, lambda: [2])
        [2]
    """
    if len(problems) < FEWEST or not getattr(tokenizer, "is_fast", False):
        return count()
    file = cache_folder() / f"{digest(kind, problems, tokenizer)}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):
        return np.load(file, allow_pickle=False).tolist()
    lengths = count()
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replaced(file, shared=True) as aside, aside.open("xb") as out:
            np.save(out, np.asarray(lengths, dtype=np.int64))
    return lengths


def cache_folder() -> Path:
    """Returns the folder of the cache, below ``XDG_CACHE_HOME``."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "verl_fn" / "lengths"


def digest(kind: str, problems: Sequence[Problem], tokenizer: Any) -> str:
    """Returns a name for all that lengths depend on: problems, tokenizer, template, its arguments, and versions."""
    hashed = hashlib.blake2b(digest_size=20)
    arguments = sorted(getattr(tokenizer, chat.ARGUMENTS, {}).items(), key=lambda item: item[0])
    special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
    parts = (
        kind,
        tokenizer.backend_tokenizer.to_str(),
        chat.template_text(tokenizer),
        repr(arguments),
        repr(special),
    )
    versions = [importlib.metadata.version(package) for package in ("transformers", "tokenizers")]
    for part in (*parts, *versions, _code()):
        hashed.update(part.encode() + b"\0")
    for one in problems:
        shown = (one.prompt, one.answer, one.tools, one.chat_template_kwargs)
        learned = (getattr(one, "messages", None), getattr(one, "responses", None))
        hashed.update(json.dumps((shown, learned), default=repr).encode() + b"\0")
    return hashed.hexdigest()


@functools.cache
def _code() -> str:
    """Returns a digest of the modules that make tokens of problems."""
    own = (Path(__file__).with_name(f"{name}.py") for name in ("columns", "examples", "files", "rendering"))
    files = (Path(chat.__file__), Path(chat.__file__).with_name("tokenizer.py"), *own)
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files)).hexdigest()
