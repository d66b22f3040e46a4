"""Packed batches: rows of any length without padding, fields with any entries per row, and a model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from jaxtyping import Int
from torch import Tensor

from verl_fn.errors import ArgumentError, did_you_mean

from . import tree
from .node import FrozenDict, Node, mapping, node

CORE = ("tokens", "positions", "cu_seqlens")
# What writes a field that a run's batches do not always have.
WRITTEN_BY = {
    "ref_log_prob": "algorithm.use_kl_loss or use_kl_in_reward writes it, and with_reference in a step of your own",
    "values": "a critic writes it: algorithm.name=ppo",
    "advantages": "an advantage estimator, such as steps.grpo, writes it, and gets a batch without it",
    "returns": "an advantage estimator, such as steps.grpo, writes it, and gets a batch without it",
    "old_log_probs": "annotate writes it in built-in algorithms; a sampled batch has the engine's rollout_log_probs",
    "token_level_rewards": "the reward writes it, with score",
    "loss_weight": "steps.aggregate writes it into a whole update batch",
    "row_weight": "steps.aggregate_rows writes it into a whole update batch",
}
# Outputs with one value per row; all others are per token.
PER_ROW = frozenset({"row_values"})
# Prefixes of the names of the likeliest tokens' outputs; the number of tokens follows.
TOP = ("top_logprobs_", "top_ids_")


class MissingField(KeyError):
    """A batch has no field of the name ``name``."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(name, known)
        self.name = name

    def __str__(self) -> str:
        name, known = self.args
        origin = f"; {WRITTEN_BY[name]};" if name in WRITTEN_BY else did_you_mean(name, known) or ";"
        return f"the batch has no field {name!r}{origin} it has {', '.join(known)}"


@node
class Batch(Node):
    """Rows of tokens, packed, with per-token and per-row fields by name.

    The value of a per-token field at index t belongs to token t: ``old_log_probs[t]`` is the log-probability of
    ``tokens[t]`` given the tokens before it in its row. Fields are never shifted by one token.

    Attributes:
        tokens: token ids, ``[T]``.
        positions: position of each token in its row, ``[T]``.
        cu_seqlens: the index of each row's first token, followed by T, ``[B + 1]``.
        per_token: fields of shape ``[T, ...]`` by name.
        per_row: fields of shape ``[B, ...]`` by name.
        ragged: fields with any number of entries per row, such as images, by name.

    Example:
        >>> batch = Batch.from_rows([[5, 6, 7], [8]], per_row={"score": [1.0, 0.0]})
        >>> batch.tokens.tolist(), batch.positions.tolist(), batch.lengths.tolist()
        ([5, 6, 7, 8], [0, 1, 2, 0], [3, 1])
        >>> batch.with_tokens(loss_weight=torch.ones(4))["loss_weight"].shape
        torch.Size([4])
    """

    tokens: Int[Tensor, " T"]
    positions: Int[Tensor, " T"]
    cu_seqlens: Int[Tensor, " B1"]
    per_token: Mapping[str, Tensor] = mapping(factory=dict)
    per_row: Mapping[str, Tensor] = mapping(factory=dict)
    ragged: Mapping[str, Ragged] = mapping(factory=dict)

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Sequence[int] | Tensor],
        per_token: Mapping[str, Sequence[Any]] | None = None,
        per_row: Mapping[str, Any] | None = None,
    ) -> Batch:
        """Packs rows of tokens into a batch.

        Args:
            rows: the token ids of each row.
            per_token: for each per-token field, one sequence of values per row.
            per_row: for each per-row field, one value per row.

        Raises:
            ArgumentError: a string or a tokenizer's output is given in place of token ids.
            ValueError: there are no rows, a row is empty or holds anything but integers, or a field holds anything
                but numbers or differs in its lengths from the rows.
        """
        refuse_text("rows is a sequence of rows of token ids", rows)
        packed = [_token_ids(row, number) for number, row in enumerate(rows)]
        lengths = torch.tensor([len(row) for row in packed], dtype=torch.int64)
        if not len(packed) or bool((lengths == 0).any()):
            raise ValueError("a batch needs at least one row, and every row at least one token")
        cu_seqlens = offsets_of(lengths, torch.zeros(0, dtype=torch.int32))
        tokens = torch.cat(packed)
        starts = torch.repeat_interleave(cu_seqlens[:-1].long(), lengths)
        batch = cls(tokens, torch.arange(len(tokens)) - starts, cu_seqlens)
        fields = {}
        for name, values in (per_token or {}).items():
            parts = [_numbers(f"per-token field {name!r}", row_values) for row_values in values]
            if any(part.ndim == 0 for part in parts):
                raise ValueError(f"per-token field {name!r} is flat; give it one sequence of values per row")
            sizes = [len(part) for part in parts]
            if sizes != lengths.tolist():
                raise ValueError(
                    f"per-token field {name!r} has rows of other lengths than the tokens: {sizes} instead of "
                    f"{lengths.tolist()}"
                )
            fields[name] = torch.cat(parts)
        return batch.with_tokens(**fields).with_rows(**(per_row or {}))

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all rows, T."""
        return len(self.tokens)

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """The number of tokens of each row."""
        return self.cu_seqlens.diff().long()

    @property
    def row_ids(self) -> Int[Tensor, " T"]:
        """The index of the row that each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self), device=self.tokens.device), self.lengths)

    @property
    def last(self) -> Int[Tensor, " B"]:
        """The index of each row's last token."""
        return self.cu_seqlens[1:].long() - 1

    def __contains__(self, name: str) -> bool:
        return name in self.per_token or name in self.per_row or name in self.ragged or name in CORE

    def __getitem__(self, name: str) -> Tensor:
        """Returns a field; of a ragged one, the entries of all rows; ``rows(name)`` returns them by row."""
        if name in self.per_token:
            return self.per_token[name]
        if name in self.per_row:
            return self.per_row[name]
        if name in self.ragged:
            return self.ragged[name].values
        if name in CORE:
            return getattr(self, name)
        raise MissingField(name, sorted((*CORE, *self.per_token, *self.per_row, *self.ragged)))

    def with_tokens(self, **fields: Any) -> Batch:
        """Returns this batch with per-token fields added or replaced."""
        merged = self._merged("per_token", self.num_tokens, fields)
        return attrs.evolve(self, per_token=merged)

    def with_rows(self, **fields: Any) -> Batch:
        """Returns this batch with per-row fields added or replaced."""
        merged = self._merged("per_row", len(self), fields)
        return attrs.evolve(self, per_row=merged)

    def with_ragged(self, **fields: Sequence[Any] | Ragged) -> Batch:
        """Returns this batch with fields added or replaced that have any number of entries per row.

        Args:
            fields: for each field one sequence of entries per row, or a ``Ragged``.

        Raises:
            ValueError: a field has another number of rows than the batch, or its entries are not alike.

        Example:
            >>> batch = Batch.from_rows([[1, 2], [3]]).with_ragged(images=[[], [[0.5, 0.5], [1.0, 1.0]]])
            >>> batch.take([1, 0]).ragged["images"].counts.tolist()
            [2, 0]
        """
        merged = dict(self.ragged)
        for name, entries in fields.items():
            field = entries if isinstance(entries, Ragged) else Ragged.of(entries)
            if len(field) != len(self):
                raise ValueError(f"ragged field {name!r} has {len(field)} rows; the batch has {len(self)}")
            self._check_free(name, "ragged")
            merged[name] = field
        return attrs.evolve(self, ragged=merged)

    def without(self, *names: str) -> Batch:
        """Returns this batch without the fields of these names; names that it does not have are ignored."""
        return attrs.evolve(
            self,
            per_token={name: t for name, t in self.per_token.items() if name not in names},
            per_row={name: t for name, t in self.per_row.items() if name not in names},
            ragged={name: field for name, field in self.ragged.items() if name not in names},
        )

    def _merged(self, kind: str, size: int, fields: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the fields of one kind, with ``fields`` of this first size added."""
        merged = dict(getattr(self, kind))
        present = (*self.per_token.items(), *self.per_row.items())
        held = {id(t) for name, t in present if name not in fields}
        for name, value in fields.items():
            # Copied, since the caller may write to a numpy array; tensors are values and are kept as they are.
            tensor = value if isinstance(value, Tensor) else _numbers(f"{kind} field {name!r}", value, torch.tensor)
            if tensor.ndim == 0 or len(tensor) != size:
                raise ValueError(
                    f"{kind} field {name!r} has shape {tuple(tensor.shape)}; its first size must be {size}"
                )
            self._check_free(name, kind)
            # No tensor has two names, so that an edit of one field in place changes no other.
            merged[name] = tensor.clone() if id(tensor) in held else tensor
            held.add(id(tensor))
        return merged

    def _check_free(self, name: str, kind: str) -> None:
        others = (getattr(self, other) for other in ("per_token", "per_row", "ragged") if other != kind)
        if name in CORE or any(name in fields for fields in others):
            raise ValueError(f"{name!r} is already a field of another kind in this batch")

    def rows(self, name: str = "tokens") -> list[Tensor]:
        """Returns a per-token or ragged field as one tensor per row; the tensors are views.

        Raises:
            KeyError: ``name`` is a per-row field, or no field of this batch.
        """
        if name in self.ragged:
            return self.ragged[name].rows()
        if name in self.per_row:
            raise KeyError(f"{name!r} is a per-row field; read it with batch[{name!r}]")
        return list(self[name].split(self.lengths.tolist()))

    def take(self, rows: Sequence[int] | Tensor) -> Batch:
        """Returns the batch of some of the rows.

        Args:
            rows: indices, whose order the result has and which may repeat, or a mask.

        Raises:
            ValueError: a mask has another length than the batch.

        Example:
            >>> Batch.from_rows([[1, 2], [3]]).take([1, 0]).tokens.tolist()
            [3, 1, 2]
        """
        chosen = torch.as_tensor(rows, device=self.cu_seqlens.device)
        if chosen.dtype == torch.bool and chosen.shape != (len(self),):
            raise ValueError(f"a mask of shape {tuple(chosen.shape)} does not fit the batch's {len(self)} rows")
        index = chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen.long()
        cu_seqlens, token = entries_of(self.cu_seqlens, index)
        return Batch(
            self.tokens[token],
            self.positions[token],
            cu_seqlens,
            {name: t[token] for name, t in self.per_token.items()},
            {name: t[index] for name, t in self.per_row.items()},
            {name: field.take(index) for name, field in self.ragged.items()},
        )

    def padded(self, name: str = "tokens", fill: float = 0) -> Tensor:
        """Returns a per-token field as a table ``[B, longest row]``, to look at; the engine itself never pads.

        Args:
            name: a per-token field.
            fill: the value after the end of shorter rows.

        Example:
            >>> Batch.from_rows([[1, 2], [3]]).padded(fill=-1).tolist()
            [[1, 2], [3, -1]]
        """
        return torch.nn.utils.rnn.pad_sequence(self.rows(name), batch_first=True, padding_value=fill)

    def sum_rows(self, values: Tensor) -> Tensor:
        """Sums a per-token tensor over each row, ``[T] -> [B]``."""
        return torch.zeros(len(self), dtype=values.dtype, device=values.device).index_add(0, self.row_ids, values)

    def reduce_rows(self, values: Tensor, reduction: str) -> Tensor:
        """Returns the smallest (``amin``) or largest (``amax``) value of each row of a per-token tensor.

        Raises:
            ValueError: there are more or fewer values than tokens.

        Example:
            >>> Batch.from_rows([[1, 2], [3]]).reduce_rows(torch.tensor([4, 6, 5]), "amax").tolist()
            [6, 5]
        """
        if values.shape != (self.num_tokens,):
            raise ValueError(
                f"reduce_rows takes one value for each of the batch's {self.num_tokens} tokens, not the shape "
                f"{tuple(values.shape)}"
            )
        return values.new_zeros(len(self)).scatter_reduce(0, self.row_ids, values, reduction, include_self=False)

    def spread(self, values: Tensor) -> Tensor:
        """Returns, for each token, the value of its row, ``[B] -> [T]``.

        Raises:
            ValueError: there are more or fewer values than rows.
        """
        if values.shape[:1] != (len(self),):
            raise ValueError(
                f"spread takes one value for each of the batch's {len(self)} rows, not the shape "
                f"{tuple(values.shape)}; a per-token tensor needs no spreading"
            )
        return values[self.row_ids]

    def detached(self) -> Batch:
        """Returns this batch with fields that are constants for autograd."""
        return tree.map_tensors(Tensor.detach, self)

    def to(self, device: str | torch.device) -> Batch:
        """Returns this batch on ``device``."""
        # The host could read a tensor on the CPU before an asynchronous copy has filled it.
        asynchronous = torch.device(device).type != "cpu"
        return tree.map_tensors(lambda t: t.to(device, non_blocking=asynchronous), self)


def _token_ids(row: Sequence[int] | Tensor, number: int) -> Tensor:
    refuse_text(f"row {number} is a sequence of token ids", row)
    tokens = _numbers(f"row {number}", row)
    if tokens.ndim != 1:
        raise ValueError(f"row {number} has the shape {tuple(tokens.shape)}; rows is a sequence of rows of token ids")
    if len(tokens) and (tokens.is_floating_point() or tokens.is_complex()):
        raise ValueError(f"row {number} holds numbers of {tokens.dtype}; token ids are integers")
    return tokens.long()


def _numbers(what: str, values: Any, make: Callable[[Any], Tensor] = torch.as_tensor) -> Tensor:
    """Returns values as a tensor.

    Raises:
        ValueError: they are no numbers, or rows of them differ in length.
    """
    try:
        return make(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{what} cannot be made a tensor of {values!r:.60} ({error}); give it numbers, also in place of strings "
            "such as uids"
        ) from error


def refuse_text(what: str, value: Any) -> None:
    """Raises ArgumentError for a string, or a tokenizer's output, in place of token ids.

    Example:
        >>> refuse_text("a prompt is a sequence of token ids", {"input_ids": [1, 2]})
        Traceback (most recent call last):
        verl_fn.errors.ArgumentError: a prompt is a sequence of token ids, not a dict with ['input_ids']; pass its ...
    """
    if isinstance(value, (str, bytes)):
        raise ArgumentError(f"{what}, not the string {value[:40]!r}; tokenize it first")
    if isinstance(value, Mapping):
        raise ArgumentError(f"{what}, not a {type(value).__name__} with {sorted(value)}; pass its input_ids")


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Returns one batch with the rows of all ``batches``, in order.

    Raises:
        ValueError: the batches do not all have the same fields.

    Example:
        >>> concatenate([Batch.from_rows([[1, 2]]), Batch.from_rows([[3]])]).cu_seqlens.tolist()
        [0, 2, 3]
    """
    first = batches[0]
    for other in batches[1:]:
        different = [
            name
            for kind in ("per_token", "per_row", "ragged")
            for name in set(getattr(first, kind)) ^ set(getattr(other, kind))
        ]
        if different:
            raise ValueError(f"batches to concatenate differ in their fields: {sorted(set(different))}")
    return Batch(
        torch.cat([b.tokens for b in batches]),
        torch.cat([b.positions for b in batches]),
        offsets_of(torch.cat([b.lengths for b in batches]), first.cu_seqlens),
        {name: torch.cat([b.per_token[name] for b in batches]) for name in first.per_token},
        {name: torch.cat([b.per_row[name] for b in batches]) for name in first.per_row},
        {name: joined_fields([b.ragged[name] for b in batches]) for name in first.ragged},
    )


@node
class Ragged(Node):
    """The entries of all rows, concatenated; a row may have none.

    Attributes:
        values: the entries, ``[N, ...]``.
        offsets: the index of each row's first entry, followed by N, ``[B + 1]``.

    Example:
        >>> images = Ragged.of([torch.zeros(2, 3, 8, 8), [], torch.ones(1, 3, 8, 8)])
        >>> images.counts.tolist(), images.values.shape
        ([2, 0, 1], torch.Size([3, 3, 8, 8]))
    """

    values: Tensor
    offsets: Int[Tensor, " B1"]

    @classmethod
    def of(cls, rows: Sequence[Any]) -> Ragged:
        """Makes a field of the entries of each row: a tensor, an array, or a list of tensors or numbers.

        Raises:
            ValueError: there are no rows, or the entries of two rows have different shapes or dtypes.
        """
        parts = [_entries(row) for row in rows]
        if not parts:
            raise ValueError("a ragged field needs at least one row")
        like = next((part for part in parts if len(part)), parts[0])
        for number, part in enumerate(parts):
            if len(part) and (part.shape[1:] != like.shape[1:] or part.dtype != like.dtype):
                raise ValueError(
                    f"row {number} has entries of shape {list(part.shape[1:])} and {part.dtype}, another row entries "
                    f"of shape {list(like.shape[1:])} and {like.dtype}; all entries of a field must be alike"
                )
        counts = torch.tensor([len(part) for part in parts])
        # A row without entries need not know their shape.
        values = torch.cat([part if len(part) else like[:0] for part in parts])
        return cls(values, offsets_of(counts, torch.zeros(0, dtype=torch.int64)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> Int[Tensor, " B"]:
        """The number of entries of each row."""
        return self.offsets.diff().long()

    def rows(self) -> list[Tensor]:
        """Returns the entries of each row, as views."""
        return list(self.values.split(self.counts.tolist()))

    def take(self, rows: Int[Tensor, " b"]) -> Ragged:
        """Returns the entries of the rows with these indices."""
        offsets, entries = entries_of(self.offsets, rows)
        return Ragged(self.values[entries], offsets)


def _entries(row: Any) -> Tensor:
    if isinstance(row, Tensor):
        return row
    of_tensors = isinstance(row, (list, tuple)) and len(row) > 0 and all(isinstance(x, Tensor) for x in row)
    return torch.stack(list(row)) if of_tensors else _numbers("a ragged field", row, torch.tensor)


def joined_fields(parts: Sequence[Ragged]) -> Ragged:
    """Returns the entries of the rows of all parts, in order."""
    counts = torch.cat([part.counts for part in parts])
    return Ragged(torch.cat([part.values for part in parts]), offsets_of(counts, parts[0].offsets))


def offsets_of(counts: Int[Tensor, " B"], like: Tensor) -> Int[Tensor, " B1"]:
    """Returns the index of each row's first entry, followed by the number of all entries, in the dtype of ``like``.

    Example:
        >>> offsets_of(torch.tensor([2, 0, 1]), torch.zeros(1, dtype=torch.int32)).tolist()
        [0, 2, 2, 3]
    """
    offsets = like.new_zeros(len(counts) + 1)
    offsets[1:] = counts.cumsum(0)
    return offsets


def entries_of(offsets: Int[Tensor, " B1"], rows: Int[Tensor, " b"]) -> tuple[Int[Tensor, " b1"], Int[Tensor, " n"]]:
    """Returns the offsets of the chosen rows among themselves, and the indices of their entries.

    Example:
        >>> [t.tolist() for t in entries_of(torch.tensor([0, 2, 2, 3]), torch.tensor([2, 0]))]
        [[0, 1, 3], [2, 0, 1]]
    """
    counts = offsets.diff().long()[rows]
    chosen = offsets_of(counts, offsets)
    start = torch.repeat_interleave(offsets[:-1].long()[rows] - chosen[:-1].long(), counts)
    return chosen, start + torch.arange(int(chosen[-1]), device=start.device)


def top_count(name: str) -> int | None:
    """Returns the number at the end of an output of the likeliest tokens; None for any other name.

    Example:
        >>> top_count("top_ids_8"), top_count("logprobs"), top_count("top_ids_0")
        (8, None, None)
    """
    number = next((name.removeprefix(prefix) for prefix in TOP if name.startswith(prefix)), "")
    return int(number) if number.isdecimal() and int(number) > 0 else None


def _in_order(by_name: Mapping[str, Tensor]) -> FrozenDict[str, Tensor]:
    return FrozenDict(sorted(by_name.items()))


@node
class TokenOutputs(Node):
    """The requested outputs of a model, by name: per token, ``[T]`` or ``[T, K]``, or one value per row, ``[B]``.

    * ``logprobs[t]``: the log-probability of token t at the row's sampling temperature, in nats.
    * ``entropy[t]``: the entropy of the distribution that token t was drawn from, in nats.
    * ``sum_pi_squared[t]``: the sum of squared probabilities of that distribution, the chance that two draws are
      equal; it has no gradient, so only ``forward`` gives it.
    * ``candidate_logprobs[t, k]``: the log-probability that token t is ``candidates[t, k]``, a field of the batch;
      -inf for an id past the end of the vocabulary.
    * ``top_logprobs_K[t, k]`` and ``top_ids_K[t, k]``, with a number in place of K: the log-probabilities and ids of
      the K likeliest tokens in place of token t, from the likeliest on; as constants, so only ``forward`` gives them.
    * ``values[t]``: the value of the state before token t.
    * ``row_values[b]``: the value of the state after the last token of row b; a reward model's score of the row.
    * ``routed_experts[t]``: the experts that token t goes to, ``[L, k]``: their numbers in each layer with experts. A
      backend gives it that can replay it (see the page on Megatron), for every token.

    Other outputs per token are zero where ``response_mask`` is zero.

    Example:
        >>> import torch
        >>> outputs = TokenOutputs({"logprobs": torch.zeros(3)})
        >>> outputs.logprobs.shape
        torch.Size([3])
        >>> outputs.entropy
        Traceback (most recent call last):
        AttributeError: these outputs have no 'entropy', only ['logprobs']; a loss names what it reads in its needs
    """

    # In the order of the names: the needs of a loss are a set, whose order differs between processes.
    by_name: Mapping[str, Tensor] = mapping(converter=_in_order)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "by_name":
            return super().__getattr__(name)
        if name in self.by_name:
            return self.by_name[name]
        raise AttributeError(
            f"these outputs have no {name!r}, only {sorted(self.by_name)}; a loss names what it reads in its needs",
            name=name,
            obj=self,
        )


def output_width(name: str, batch: Batch) -> int | None:
    """Returns how many numbers an output has for each token; None for outputs that are vectors.

    Example:
        >>> from verl_fn.state import Batch
        >>> output_width("top_ids_8", Batch.from_rows([[1]])), output_width("logprobs", Batch.from_rows([[1]]))
        (8, None)
    """
    return batch["candidates"].shape[1] if name == "candidate_logprobs" else top_count(name)
