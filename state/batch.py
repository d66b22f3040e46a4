"""Packed batches: rows of different lengths laid end to end, with no padding anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from jaxtyping import Int
from torch import Tensor

from .node import Node, node

CORE = ("tokens", "positions", "cu_seqlens")


@node
class Batch(Node):
    """Rows of tokens, packed, with per-token and per-row fields by name.

    A field at position t speaks of token t: ``old_log_probs[t]`` is the log-probability of ``tokens[t]``
    given the tokens before it in its row. Nothing is ever shifted across rows.

    Attributes:
        tokens: token ids, ``[T]``.
        positions: position of each token in its row, ``[T]``.
        cu_seqlens: where each row starts, and the end, ``[B + 1]``.
        per_token: fields ``[T, ...]``.
        per_row: fields ``[B, ...]``.

    >>> batch = Batch.from_rows([[5, 6, 7], [8]], per_row={"score": [1.0, 0.0]})
    >>> batch.tokens.tolist(), batch.positions.tolist(), batch.lengths.tolist()
    ([5, 6, 7, 8], [0, 1, 2, 0], [3, 1])
    >>> batch.with_tokens(loss_weight=torch.ones(4))["loss_weight"].shape
    torch.Size([4])
    """

    tokens: Int[Tensor, " T"]
    positions: Int[Tensor, " T"]
    cu_seqlens: Int[Tensor, " B1"]
    per_token: dict[str, Tensor] = attrs.field(factory=dict)
    per_row: dict[str, Tensor] = attrs.field(factory=dict)

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Sequence[int] | Tensor],
        per_token: Mapping[str, Sequence[Any]] | None = None,
        per_row: Mapping[str, Any] | None = None,
    ) -> Batch:
        """Pack rows. ``per_token`` maps a name to one sequence a row, ``per_row`` to one value a row.

        Raises:
            ValueError: an empty row, or a field whose lengths are not those of the rows.
        """
        packed = [torch.as_tensor(row, dtype=torch.int64) for row in rows]
        lengths = torch.tensor([len(row) for row in packed], dtype=torch.int64)
        if not len(packed) or bool((lengths == 0).any()):
            raise ValueError("a batch needs at least one row, and every row at least one token")
        cu_seqlens = torch.zeros(len(packed) + 1, dtype=torch.int32)
        cu_seqlens[1:] = lengths.cumsum(0)
        made = cls(torch.cat(packed), torch.cat([torch.arange(n) for n in lengths.tolist()]), cu_seqlens)
        fields = {}
        for name, values in (per_token or {}).items():
            parts = [torch.as_tensor(v) for v in values]
            if [len(p) for p in parts] != lengths.tolist():
                raise ValueError(f"per-token field {name!r} has rows of other lengths than the tokens")
            fields[name] = torch.cat(parts)
        return made.with_tokens(**fields).with_rows(**(per_row or {}))

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        return self.cu_seqlens.diff().long()

    @property
    def row_ids(self) -> Int[Tensor, " T"]:
        """The row that each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self), device=self.tokens.device), self.lengths)

    @property
    def last(self) -> Int[Tensor, " B"]:
        """The index of each row's last token."""
        return self.cu_seqlens[1:].long() - 1

    def __contains__(self, name: str) -> bool:
        return name in self.per_token or name in self.per_row or name in CORE

    def __getitem__(self, name: str) -> Tensor:
        if name in self.per_token:
            return self.per_token[name]
        if name in self.per_row:
            return self.per_row[name]
        if name in CORE:
            return getattr(self, name)
        raise KeyError(f"the batch has no field {name!r}; it has {sorted((*CORE, *self.per_token, *self.per_row))}")

    def with_tokens(self, **fields: Any) -> Batch:
        """This batch with per-token fields added or replaced."""
        return self._with("per_token", self.num_tokens, fields)

    def with_rows(self, **fields: Any) -> Batch:
        """This batch with per-row fields added or replaced."""
        return self._with("per_row", len(self), fields)

    def without(self, *names: str) -> Batch:
        """This batch less some fields; names that it lacks are passed over."""
        keep = lambda fields: {n: t for n, t in fields.items() if n not in names}  # noqa: E731
        return attrs.evolve(self, per_token=keep(self.per_token), per_row=keep(self.per_row))

    def _with(self, where: str, size: int, fields: Mapping[str, Any]) -> Batch:
        merged = dict(getattr(self, where))
        elsewhere = self.per_row if where == "per_token" else self.per_token
        for name, value in fields.items():
            tensor = torch.as_tensor(value)
            if tensor.ndim == 0 or len(tensor) != size:
                raise ValueError(
                    f"{where} field {name!r} has shape {tuple(tensor.shape)}; its first size must be {size}"
                )
            if name in elsewhere or name in CORE:
                raise ValueError(f"{name!r} is already a field of another kind in this batch")
            merged[name] = tensor
        return attrs.evolve(self, **{where: merged})

    def rows(self, name: str = "tokens") -> list[Tensor]:
        """A per-token field as one tensor a row (views)."""
        if name in self.per_row:
            raise KeyError(f"{name!r} is a per-row field; read it with batch[{name!r}]")
        return list(self[name].split(self.lengths.tolist()))

    def take(self, rows: Sequence[int] | Tensor) -> Batch:
        """These rows, by index in this order (a row may come twice) or by a mask.

        >>> Batch.from_rows([[1, 2], [3]]).take([1, 0]).tokens.tolist()
        [3, 1, 2]
        """
        chosen = torch.as_tensor(rows, device=self.cu_seqlens.device)
        index = chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen.long()
        lengths = self.lengths[index]
        cu_seqlens = self.cu_seqlens.new_zeros(len(index) + 1)
        cu_seqlens[1:] = lengths.cumsum(0)
        start = torch.repeat_interleave(self.cu_seqlens[:-1].long()[index] - cu_seqlens[:-1].long(), lengths)
        where = start + torch.arange(int(cu_seqlens[-1]), device=start.device)
        return Batch(
            self.tokens[where],
            self.positions[where],
            cu_seqlens,
            {name: t[where] for name, t in self.per_token.items()},
            {name: t[index] for name, t in self.per_row.items()},
        )

    def padded(self, name: str = "tokens", fill: float = 0) -> Tensor:
        """A per-token field as ``[B, longest]``, for people; the engine itself never pads.

        >>> Batch.from_rows([[1, 2], [3]]).padded(fill=-1).tolist()
        [[1, 2], [3, -1]]
        """
        return torch.nn.utils.rnn.pad_sequence(self.rows(name), batch_first=True, padding_value=fill)

    def sum_rows(self, values: Tensor) -> Tensor:
        """Add a per-token tensor up over each row, ``[T] -> [B]``."""
        return torch.zeros(len(self), dtype=values.dtype, device=values.device).index_add(0, self.row_ids, values)

    def spread(self, values: Tensor) -> Tensor:
        """Give each token its row's value, ``[B] -> [T]``."""
        return values[self.row_ids]

    def to(self, device: str | torch.device) -> Batch:
        """This batch on ``device``."""
        move = lambda t: t.to(device, non_blocking=True)  # noqa: E731
        return Batch(
            move(self.tokens),
            move(self.positions),
            move(self.cu_seqlens),
            {n: move(t) for n, t in self.per_token.items()},
            {n: move(t) for n, t in self.per_row.items()},
        )


def concatenate(batches: Sequence[Batch]) -> Batch:
    """One batch with the rows of all, which must have the same fields.

    >>> concatenate([Batch.from_rows([[1, 2]]), Batch.from_rows([[3]])]).cu_seqlens.tolist()
    [0, 2, 3]
    """
    first = batches[0]
    for other in batches[1:]:
        odd = (set(first.per_token) ^ set(other.per_token)) | (set(first.per_row) ^ set(other.per_row))
        if odd:
            raise ValueError(f"batches to concatenate differ in their fields: {sorted(odd)}")
    cu_seqlens = first.cu_seqlens.new_zeros(sum(len(b) for b in batches) + 1)
    cu_seqlens[1:] = torch.cat([b.lengths for b in batches]).cumsum(0)
    return Batch(
        torch.cat([b.tokens for b in batches]),
        torch.cat([b.positions for b in batches]),
        cu_seqlens,
        {name: torch.cat([b.per_token[name] for b in batches]) for name in first.per_token},
        {name: torch.cat([b.per_row[name] for b in batches]) for name in first.per_row},
    )
