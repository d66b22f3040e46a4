"""Small ragged batches with every field that the built-in losses and estimators read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import TypeVar

import attrs
import torch
from torch import Tensor

from verl_fn.state import PER_ROW, Batch, Key, Split, TokenOutputs, groups_of, tree
from verl_fn.steps import aggregate, aggregate_rows

T = TypeVar("T")


def tiny_batch(key: Key | None = None, *, rows: int = 8, vocab_size: int = 8) -> Batch:
    """A batch of a few short rows, as uneven as real ones, weighted for ``token-mean`` and ``row-mean``.

    It has the fields that the batches of runs have. Rows have several turns, with holes in ``response_mask`` where a
    tool spoke; from three rows on, one has no response at all. Groups have one to three rows, and ids that are no
    indices. Temperatures differ. Add what another loss reads with ``tiny_batch().with_tokens(name=...)``.

    Args:
        key: other keys give other batches; by default the key of seed 0.
        rows: how many.
        vocab_size: tokens are 0 to ``vocab_size - 1``.

    Example:
        >>> batch = tiny_batch(rows=3)
        >>> batch.lengths.tolist(), batch.rows("response_mask")[0].tolist()
        ([9, 3, 8], [0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
        >>> batch["score"].shape, batch["group"].tolist()
        (torch.Size([3]), [23, 65, 65])
    """
    key = key or Key.from_seed(0)
    dice = random.Random(key.fold_in("shape").seed())
    prompts, masks = [], []
    for row in range(rows):
        prompts.append(dice.randint(1, 3))
        turns = [1.0] * dice.randint(1, 4)
        if row % 2 == 0:
            turns += [0.0] * dice.randint(1, 2) + [1.0] * dice.randint(1, 4)
        if row % 4 == 3:
            turns += [0.0]
        masks.append([0.0] * prompts[-1] + ([0.0] if row == 1 and rows > 2 else turns))
    stream = key.fold_in("values").generator()
    tokens = [torch.randint(vocab_size, (len(mask),), generator=stream) for mask in masks]
    batch = Batch.from_rows(tokens, {"response_mask": masks})
    mask = batch["response_mask"]

    def normal() -> Tensor:
        return torch.randn(batch.num_tokens, generator=stream) * mask

    log_probs = -0.1 - 2.0 * torch.rand(batch.num_tokens, generator=stream)

    def near() -> Tensor:
        return ((log_probs + 0.3 * normal()).clamp(max=-1e-3)) * mask

    values = normal()
    batch = batch.with_tokens(
        old_log_probs=log_probs * mask,
        rollout_log_probs=near(),
        ref_log_prob=near(),
        values=values,
        advantages=normal(),
        returns=values + normal(),
        token_level_scores=normal(),
        token_level_rewards=normal(),
    ).with_rows(
        group=_groups(rows, dice),
        prompt_length=prompts,
        temperature=torch.tensor([dice.choice([0.7, 1.0, 1.5]) for _ in range(rows)]),
    )
    batch = _with_records(_with_rarer_fields(batch, stream), stream)
    return aggregate_rows(aggregate(batch))


def _with_rarer_fields(batch: Batch, stream: torch.Generator) -> Batch:
    """Adds the fields that only a few estimators and losses read."""
    mask, rows = batch["response_mask"], len(batch)
    # The chance that two draws are equal is at least the square of the drawn token's probability.
    chance = batch["old_log_probs"].exp().square()
    return batch.with_tokens(
        sum_pi_squared=(chance + (1.0 - chance) * torch.rand(batch.num_tokens, generator=stream)) * mask,
        rollout_is_weights=(0.5 + torch.rand(batch.num_tokens, generator=stream)) * mask,
        cov_selected=(torch.rand(batch.num_tokens, generator=stream) < 0.4) * mask,
    ).with_rows(
        **{name: torch.randn(rows, generator=stream) for name in ("reward_baselines", "reward/style", "reward/truth")}
    )


def _with_records(batch: Batch, stream: torch.Generator) -> Batch:
    """Adds what an engine, a reward and an environment write, and few functions read."""
    mask, rows = batch["response_mask"], len(batch)
    acc = torch.randint(2, (rows,), generator=stream).float()
    return batch.with_tokens(
        entropys=torch.rand(batch.num_tokens, generator=stream) * mask,
        versions=torch.where(batch.positions < batch.spread(batch["prompt_length"]), -1, 0),
    ).with_rows(
        score=batch.sum_rows(batch["token_level_scores"]),
        acc=acc,
        pred=torch.randint(5, (rows,), generator=stream),
        finished=torch.randint(2, (rows,), generator=stream).float(),
        version=torch.zeros(rows, dtype=torch.int64),
        near_ties=torch.randint(2, (rows,), generator=stream),
        conversation=torch.arange(rows),
        env_end=torch.zeros(rows, dtype=torch.int64),
        env_score=torch.randn(rows, generator=stream),
        env_acc=acc.clone(),
        env_turns=torch.ones(rows, dtype=torch.int64),
    )


def tiny_pairs(key: Key | None = None, *, pairs: int = 4, vocab_size: int = 8) -> Batch:
    """Returns a ``tiny_batch`` of preference pairs, in no order, with ``row_weight`` for a mean over pairs.

    It has the per-row fields ``pair`` (ids that are no indices) and ``chosen`` (1 for the preferred row, else 0).

    Example:
        >>> batch = tiny_pairs(pairs=2)
        >>> len(batch["pair"].unique()), batch["chosen"].sum().item()
        (2, 2.0)
    """
    key = key or Key.from_seed(0)
    batch = tiny_batch(key, rows=2 * pairs, vocab_size=vocab_size)
    order = torch.randperm(2 * pairs, generator=key.fold_in("pairs").generator())
    batch = batch.with_rows(pair=101 - 3 * (order // 2), chosen=(order % 2).float())
    return aggregate_rows(batch, "group-mean", group="pair")


def tiny_outputs(batch: Batch, needs: Iterable[str] = ("logprobs",), key: Key | None = None) -> TokenOutputs:
    """Makes random outputs of a model for a batch, with 0 where ``response_mask`` is 0.

    Log-probs lie around ``old_log_probs``, so that some ratios are clipped and some are not. ``row_values`` are not 0
    anywhere.

    Example:
        >>> batch = tiny_batch()
        >>> outputs = tiny_outputs(batch, ["logprobs", "entropy"])
        >>> bool(outputs.entropy[batch["response_mask"] == 0].eq(0).all())
        True
    """
    stream = (key or Key.from_seed(0)).fold_in("outputs").generator()
    outputs: dict[str, Tensor] = {}
    for name in sorted(needs):
        if name in PER_ROW:
            outputs[name] = torch.randn(len(batch), generator=stream)
            continue
        if name == "candidate_logprobs":
            outputs[name] = tiny_candidates(batch, key)
            continue
        drawn = torch.randn(batch.num_tokens, generator=stream)
        if name == "logprobs":
            drawn = (batch["old_log_probs"] + 0.4 * drawn).clamp(max=-1e-3)
        elif name != "values":
            drawn = drawn.abs()
        outputs[name] = drawn * batch["response_mask"]
    return TokenOutputs(outputs)


def tiny_candidates(batch: Batch, key: Key | None = None, count: int = 3) -> Tensor:
    """Makes random log-probabilities of ``count`` tokens at each place, with 0 where ``response_mask`` is 0.

    Example:
        >>> float(tiny_candidates(Batch.from_rows([[1]], {"response_mask": [[1.0]]})).exp().sum()) < 1.0
        True
    """
    stream = (key or Key.from_seed(0)).fold_in("candidates").generator()
    drawn = torch.randn(batch.num_tokens, count + 2, generator=stream).log_softmax(-1)[:, :count]
    return drawn * batch["response_mask"][:, None]


def some_splits(batch: Batch, key: Key, together: str | None = None) -> dict[str, Split]:
    """Ways to split a batch, by a name for each: into single rows (or groups), at random twice, and permuted only."""
    units = [torch.tensor(rows) for rows in groups_of(batch, together)]

    def dealt(parts: int, stream: torch.Generator) -> Split:
        order = torch.randperm(len(units), generator=stream).tolist()
        hands = [[units[i] for i in order[start::parts]] for start in range(parts)]
        return Split(batch, tuple(torch.cat(hand) for hand in hands if hand))

    return {
        "one micro-batch in another order": dealt(1, key.fold_in(1).generator()),
        "2 micro-batches": dealt(2, key.fold_in(2).generator()),
        "3 micro-batches": dealt(3, key.fold_in(3).generator()),
        "the smallest micro-batches": dealt(len(units), key.fold_in(4).generator()),
    }


def beside(values: Tensor, field: Tensor) -> Tensor:
    """Returns numbers per token in the shape of a field; a field may have several numbers for each token.

    Example:
        >>> beside(torch.tensor([1, 2]), torch.zeros(2, 3)).tolist()
        [[1, 1, 1], [2, 2, 2]]
    """
    return values.reshape(-1, *[1] * (field.ndim - 1)).expand(field.shape)


def scrambled(batch: Batch, key: Key) -> dict[str, Batch]:
    """Makes batches with other numbers where ``response_mask`` is 0, by their kind; they must not matter.

    Infinities and nan are among them: ``x * response_mask`` does not remove these, ``torch.where`` does.
    """
    stream = key.fold_in("scramble").generator()
    hole = batch["response_mask"] == 0
    unchanged = ("response_mask", "loss_weight")
    chosen = {n: t for n, t in batch.per_token.items() if n not in unchanged and t.dtype.is_floating_point}

    def filled(fill: Callable[[Tensor], Tensor]) -> Batch:
        holes = {n: beside(hole.to(t.device), t) for n, t in chosen.items()}
        return batch.with_tokens(**{n: torch.where(holes[n], fill(t), t) for n, t in chosen.items()})

    return {
        "other numbers": filled(lambda t: torch.randn(t.shape, generator=stream).to(t)),
        "infinities": filled(lambda t: torch.full_like(t, torch.inf)),
        "nan": filled(lambda t: torch.full_like(t, torch.nan)),
    }


def reads(field: str, batch: Batch, fn: Callable[[Batch], object]) -> bool:
    """Returns whether a function fails on a batch without the field.

    Example:
        >>> reads("values", tiny_batch(), lambda batch: batch["values"].sum())
        True
    """
    try:
        fn(batch.without(field))
    except KeyError:
        return True
    return False


def with_longer_prompts(batch: Batch, key: Key, zeros: Iterable[str] = ()) -> tuple[Batch, Tensor]:
    """Puts one to three tokens before each row, under ``response_mask`` 0; they must not matter.

    Args:
        key: other keys give other numbers of tokens and other values.
        zeros: the fields that are 0 for the new tokens, besides ``response_mask`` and ``loss_weight``.

    Returns:
        The longer batch, and the mask of the tokens that ``batch`` has as well.
    """
    stream = key.fold_in("longer prompts").generator()
    counts = torch.randint(1, 4, (len(batch),), generator=stream).tolist()
    zeros = {"response_mask", "loss_weight", *zeros}

    def longer(name: str, row: Tensor, count: int) -> Tensor:
        size = (count, *row.shape[1:])
        if name in zeros or not row.dtype.is_floating_point:
            return torch.cat([row.new_zeros(size), row])
        return torch.cat([torch.randn(size, generator=stream).to(row), row])

    fields = {
        name: [longer(name, row, count) for row, count in zip(batch.rows(name), counts, strict=True)]
        for name in ("tokens", *batch.per_token)
    }
    old = torch.cat([torch.arange(len(row)) >= count for row, count in zip(fields["tokens"], counts, strict=True)])
    rows = dict(batch.per_row)
    if "prompt_length" in rows:
        rows["prompt_length"] = rows["prompt_length"] + torch.tensor(counts)
    return attrs.evolve(Batch.from_rows(fields.pop("tokens"), fields, rows), ragged=batch.ragged), old


def in_float64(value: T) -> T:
    """Returns a batch or outputs with all floating-point fields in float64."""
    return tree.map_tensors(lambda t: t.double() if t.dtype.is_floating_point else t, value)


def _groups(rows: int, dice: random.Random) -> list[int]:
    """A group of one, then groups of two or three, with ids from all over."""
    sizes = [1]
    while sum(sizes) < rows:
        sizes.append(min(dice.randint(2, 3), rows - sum(sizes)))
    ids = dice.sample(range(10, max(100, 10 + 2 * len(sizes))), len(sizes))
    return [name for name, size in zip(ids, sizes, strict=True) for _ in range(size)]
