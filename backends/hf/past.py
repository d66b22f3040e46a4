"""Rows that a model of any family goes on from, in transformers' own cache.

All rows end at the last column of the cache, so a mask of the columns before a row's first token is all that a model
needs to know of the others. Layers with a state in place of keys and values (linear attention, Mamba) keep it in the
same cache. Rows may begin and end at any time.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from verl_fn.backends.hf.config import ModelError
from verl_fn.state import Batch

if TYPE_CHECKING:
    from .skeleton import Skeleton

# The most tokens that are read at a time.
TOKENS = 16384
# So many columns before all rows are kept until they are removed together.
SLACK = 64
KEYS, STATES = ("keys", "values"), ("conv_states", "recurrent_states")

Content = dict[tuple[int, str], Tensor]
"""The tensors of a cache by layer and name: keys and values ``[B, heads, columns, width]``, states ``[B, ...]``."""


class Past:
    """What rows have read, by slot. ``read`` and ``step`` are called in ``skeleton.run``, without gradients."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._config = skeleton.config
        takes = inspect.signature(skeleton.body.forward).parameters
        self._name = "past_key_values" if "past_key_values" in takes else "cache_params"
        self._takes_positions = "position_ids" in takes
        self._cache: Any = None
        self._columns = 0

    def read(self, skeleton: Skeleton, rows: Batch, slots: Int[Tensor, " B"]) -> Float[Tensor, "B H"]:
        """Reads whole rows into slots, and returns the last hidden state of each.

        Rows of the same length are read together: a state would take padding in as well.

        Raises:
            ModelError: the model's cache has layers of another kind.
            ValueError: a row is too long to be computed right.
        """
        by_length: dict[int, list[int]] = {}
        for number, length in enumerate(rows.lengths.tolist()):
            by_length.setdefault(length, []).append(number)
        tokens, last = list(rows.rows()), [torch.empty(0)] * len(rows)
        # The longest ones first, so that the cache grows once.
        for length, numbers in sorted(by_length.items(), reverse=True):
            skeleton.check_longest(length)
            for part in torch.tensor(numbers).split(max(1, TOKENS // length)):
                ids = torch.stack([tokens[i] for i in part.tolist()])
                cache = _new_cache(self._config)
                hidden = self._run(skeleton, ids, torch.arange(length, device=ids.device).expand_as(ids), None, cache)
                self._put(cache, slots[part].tolist(), length, int(slots.max()) + 1)
                for i, one in zip(part.tolist(), hidden, strict=True):
                    last[i] = one
        return torch.stack(last)

    def step(
        self, skeleton: Skeleton, tokens: Int[Tensor, " n"], positions: Int[Tensor, " n"], longest: int
    ) -> Float[Tensor, "n H"]:
        """Appends a token to each of the first n slots, forgets the other slots, and returns the new hidden states.

        Args:
            tokens: one for each slot.
            positions: how many tokens each of these slots has.
            longest: no slot has more tokens.

        Raises:
            ValueError: a row is too long to be computed right.
        """
        skeleton.check_longest(longest)
        content = self._resize(len(tokens), longest if self._columns > longest + SLACK else self._columns)
        columns = torch.arange(self._columns + 1, device=tokens.device)
        # Without attention there are no columns, and a model takes a mask to be of the new tokens.
        has_columns = any(name in KEYS for _, name in content)
        mask = (columns >= (self._columns - positions)[:, None]).long() if has_columns else None
        hidden = self._run(skeleton, tokens[:, None], positions[:, None], mask, self._cache)
        self._columns += 1
        return hidden

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies slots into others."""
        content = self._resize(max(self._rows, max(targets) + 1), self._columns)
        for t in content.values():
            t[list(targets)] = t[list(sources)]

    @property
    def _rows(self) -> int:
        return max((len(t) for t in _content(self._cache).values()), default=0)

    def _run(
        self, skeleton: Skeleton, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any
    ) -> Float[Tensor, "B H"]:
        given: dict[str, Any] = {self._name: cache, "attention_mask": mask, "use_cache": True}
        given |= {"position_ids": positions} if self._takes_positions else {}
        hidden: Tensor = skeleton.body(input_ids=ids, **given).last_hidden_state
        return hidden[:, -1]

    def _put(self, cache: Any, slots: list[int], length: int, rows: int) -> None:
        """Writes what rows of one length have read into slots; ``rows`` are going to have one."""
        new = _content(cache)
        if self._cache is None:
            self._cache = cache
            self._resize(0, length)
        content = self._resize(max(self._rows, rows), max(self._columns, length))
        for (layer, name), t in content.items():
            t[slots] = _resized(new[layer, name], len(slots), _columns(self._cache, layer, name, self._columns))

    def _resize(self, rows: int, columns: int) -> Content:
        """Sets the numbers of rows and columns, and returns the tensors; rows still end at the last column."""
        for layer, name in _content(self._cache):
            held = self._cache.layers[layer]
            # One at a time, so that a single tensor is there twice.
            setattr(held, name, _resized(getattr(held, name), rows, _columns(self._cache, layer, name, columns)))
        for layer in self._cache.layers:
            if getattr(layer, "is_sliding", False):
                layer.cumulative_length = columns
        self._columns = columns
        return _content(self._cache)


def _new_cache(config: Any) -> Any:
    from transformers.cache_utils import (
        DynamicCache,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionLayer,
    )

    cache = DynamicCache(config=config)
    known = DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer
    if others := {type(layer).__name__ for layer in cache.layers} - {kind.__name__ for kind in known}:
        raise ModelError(f"{config.model_type} has a cache of its own ({', '.join(sorted(others))})")
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            layer.lazy_initialization = functools.partial(_begin, layer, layer.lazy_initialization)
    return cache


def _begin(layer: Any, begin: Callable[..., None], *keys_and_values: Tensor, **states: Tensor) -> None:
    """Makes a layer's tensors: states are in float32, since they are rounded at every token."""
    begin(*keys_and_values, **states)
    if "recurrent_states" in states:
        layer.recurrent_states = layer.recurrent_states.float()


def _content(cache: Any) -> Content:
    """Returns the tensors that have been written."""
    found = {(i, name): getattr(layer, name, None) for i, layer in enumerate(cache.layers) for name in KEYS + STATES}
    return {key: t for key, t in found.items() if isinstance(t, Tensor) and t.ndim > 1}


def _columns(cache: Any, layer: int, name: str, columns: int) -> int | None:
    """Returns how many columns a tensor keeps: None for a state, and in a window one less than its width."""
    if name in STATES:
        return None
    held = cache.layers[layer]
    return min(columns, held.sliding_window - 1 if getattr(held, "is_sliding", False) else columns)


def _resized(t: Tensor, rows: int, columns: int | None) -> Tensor:
    """Returns a tensor with rows added or removed at the end, and columns at the start; what is added is 0."""
    # A part of a tensor would keep the memory of the whole.
    t = t[:rows].clone() if rows < len(t) else t
    if columns is not None:
        t = t[:, :, max(0, t.shape[2] - columns) :]
        t = pad(t, (0, 0, columns - t.shape[2], 0)) if columns > t.shape[2] else t
    return t if len(t) == rows else torch.cat([t, t.new_zeros(rows - len(t), *t.shape[1:])])
