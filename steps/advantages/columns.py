"""What estimators share: checks, whitening, response tokens as a table, and statistics of rows over groups."""

from __future__ import annotations

import warnings

import attrs
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from verl_fn.errors import UserError
from verl_fn.state import Batch, conversations
from verl_fn.steps.aggregate import last_of_rows


class AdvantageError(UserError, ValueError):
    """Raised for a batch from which no finite advantages can be estimated; the message names the rows."""


def whiten_masked(values: Float[Tensor, " T"], mask: Tensor) -> Float[Tensor, " T"]:
    """Shifts and scales the values where ``mask`` is set to mean 0 and variance 1 (unbiased); the others become 0.

    Mean and variance are computed in float64, and equal values become exactly 0. The result depends on the whole
    batch, so whiten before the batch is split.

    Args:
        mask: which values to whiten. If it is set for fewer than two, the result is 0 everywhere.

    Raises:
        AdvantageError: a value where ``mask`` is set is nan or infinite.

    Example:
        >>> whiten_masked(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        tensor([-0.7071,  0.7071,  0.0000])
    """
    values, mask = real(values), mask.bool()
    chosen = values[mask].double()
    if not bool(chosen.isfinite().all()):
        places = (mask & ~values.isfinite()).nonzero().flatten().tolist()
        raise AdvantageError(f"whiten_masked: the values of tokens {short_list(places)} are nan or infinite")
    white = torch.zeros_like(values)
    if len(chosen) > 1:
        # Distances from one of the values, so that the mean of equal values is exactly that value.
        distance = chosen - chosen[0]
        centred = distance - distance.mean()
        variance = centred.square().sum() / (len(chosen) - 1)
        white[mask] = (centred * torch.rsqrt(variance + 1e-8)).to(values.dtype)
    return white


def real(values: Tensor) -> Tensor:
    """Returns the values as floating-point numbers, since estimates from integers are not integers.

    Example:
        >>> real(torch.tensor([1, 2])).dtype, real(torch.zeros(1, dtype=torch.float64)).dtype
        (torch.float32, torch.float64)
    """
    return values if values.is_floating_point() else values.float()


def check_inputs(function: str, batch: Batch, *fields: str) -> None:
    """Checks what an estimator reads at response tokens, and of rows that have one: ``fields`` and the rewards.

    A reward on a token with ``response_mask`` 0, as when a tool's output ends a response, is ignored with a warning.

    Args:
        function: the estimator's name, for the error.
        fields: per-token or per-row fields besides ``token_level_rewards``.

    Raises:
        AdvantageError: a value is nan or infinite; it would spread over the group or the batch.
    """
    mask = batch["response_mask"].bool()
    for field in ("token_level_rewards", *fields):
        bad = ~batch[field].isfinite()
        bad = mask & (batch.spread(bad) if field in batch.per_row else bad)
        if bool(bad.any()):
            advice = (
                "let the reward function return a number for each response, or name other rewards in reward_keys"
                if field.startswith("reward/")
                else "find what wrote it: a reward, a critic, or log-probabilities, as in a KL penalty that is part "
                "of the rewards"
            )
            raise AdvantageError(f"{function}: {field} is nan or infinite in {rows_with(batch, bad)}; {advice}")
    if bool(batch["token_level_rewards"][~mask].any()):
        warnings.warn(
            "rewards on tokens with response_mask 0 are ignored; write a row's reward on its last token with "
            "response_mask 1 (verl_fn.steps.aggregate.last_of_rows)",
            stacklevel=3,
        )


def written(function: str, batch: Batch, advantages: Tensor, returns: Tensor) -> Batch:
    """Writes advantages and returns of response tokens in the dtype of the rewards, and 0 to the other tokens.

    Raises:
        AdvantageError: they are finite in float64 but not in that dtype.
    """
    mask, dtype = batch["response_mask"].bool(), real(batch["token_level_rewards"]).dtype
    fields = {
        name: torch.where(mask, values, 0.0).to(dtype)
        for name, values in (("advantages", advantages), ("returns", returns))
    }
    for name, values in fields.items():
        bad = ~values.isfinite()
        if bool(bad.any()):
            raise AdvantageError(f"{function}: {name} overflow {dtype} in {rows_with(batch, bad)}; scale the rewards")
    return batch.with_tokens(**fields)


def rows_with(batch: Batch, tokens: Tensor) -> str:
    """Names the rows in which a mask of tokens is set.

    Example:
        >>> rows_with(Batch.from_rows([[1], [2, 3]]), torch.tensor([False, True, True]))
        'row 1 of 2'
    """
    rows = batch.row_ids[tokens].unique().tolist()
    return f"row{'s' * (len(rows) > 1)} {short_list(rows)} of {len(batch)}"


def short_list(numbers: list[int]) -> str:
    """Joins the first five of the numbers.

    Example:
        >>> short_list([4, 7]), short_list(list(range(9)))
        ('4, 7', '0, 1, 2, 3, 4 and 4 more')
    """
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return ", ".join(map(str, numbers[:5])) + more


def columns(batch: Batch, values: Tensor) -> Tensor:
    """Returns the values of each row's response tokens as a right-aligned table, ``[T] -> [B, longest response]``.

    All rows end in the last column, so a recursion from the end is a loop over columns.
    """
    cells = _cells(batch)
    table = torch.zeros(cells.shape, dtype=values.dtype, device=values.device)
    table[cells] = values[batch["response_mask"].bool()]
    return table


def uncolumn(batch: Batch, table: Tensor) -> Tensor:
    """Returns the values of a table made by ``columns`` per token, and 0 for tokens that are not in it."""
    flat = torch.zeros(batch.num_tokens, dtype=table.dtype, device=table.device)
    flat[batch["response_mask"].bool()] = table[_cells(batch)]
    return flat


def _cells(batch: Batch) -> Tensor:
    """Returns a mask of the table: the cells of response tokens, the last ones of each row."""
    counts = batch.sum_rows(batch["response_mask"].bool().long())
    width = int(counts.max()) if len(counts) else 0
    return torch.arange(width, device=counts.device) >= width - counts[:, None]


@attrs.frozen(eq=False)
class Groups:
    """The groups of a batch's rows. Only rows with a response token count: the loss sees no others.

    Statistics are given for each row, ``[B]``, and describe its group.

    Attributes:
        of: the index of each row's group.
        counts: whether a row counts.
        compared: whether another row of its group counts too. Rows that have none get no advantage.
        size: the number of rows of a row's group that count.
    """

    of: Int[Tensor, " B"]
    counts: Bool[Tensor, " B"]
    size: Int[Tensor, " B"] = attrs.field(init=False)
    compared: Bool[Tensor, " B"] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "size", self.sum(torch.ones_like(self.of)))
        object.__setattr__(self, "compared", self.counts & (self.size > 1))

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of the values."""
        sums = torch.zeros(len(self.of), dtype=values.dtype, device=values.device)
        return sums.index_add(0, self.of, torch.where(self.counts, values, 0))[self.of]

    def max(self, values: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Returns the largest value, and minus infinity in a group without a row that counts."""
        low = torch.full((len(self.of),), -torch.inf, dtype=values.dtype, device=values.device)
        return low.scatter_reduce(0, self.of, torch.where(self.counts, values, -torch.inf), "amax")[self.of]

    def mean(self, values: Float[Tensor, " B"], weights: Tensor | None = None) -> Float[Tensor, " B"]:
        """Returns the mean of the values, weighted if ``weights`` are given; 0 if all weights are 0.

        Example:
            >>> groups = Groups(torch.tensor([0, 0, 1]), torch.tensor([True] * 3))
            >>> groups.mean(torch.tensor([1.0, 4.0, 9.0]), torch.tensor([2.0, 1.0, 1.0])).tolist()
            [2.0, 2.0, 9.0]
        """
        weights = torch.ones_like(values) if weights is None else weights
        total = self.sum(weights)
        # Distances from the largest value, so that the mean of equal values is exactly that value for all weights.
        top = torch.where(total > 0, self.max(values), 0.0)
        return top + self.sum(weights * (values - top)) / torch.where(total > 0, total, 1.0)

    def deviation(self, values: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Returns the unbiased standard deviation of the values; 0 in a group of one."""
        spread = (values - self.mean(values)).square()
        return (self.sum(spread) / (self.size - 1).clamp(min=1)).sqrt()


def grouped_scores(function: str, batch: Batch, *fields: str) -> tuple[Float[Tensor, " B"], Groups]:
    """Returns each row's total reward and the groups, after the checks of ``check_inputs``.

    Rewards are summed in float64, so that the mean of equal rewards is exactly that reward.
    """
    check_inputs(function, batch, *fields)
    rewards = torch.where(batch["response_mask"].bool(), batch["token_level_rewards"].double(), 0.0)
    return batch.sum_rows(rewards), groups_of(batch)


def groups_of(batch: Batch) -> Groups:
    """Returns the groups that the per-row field ``group`` names."""
    _, of = batch["group"].unique(return_inverse=True)
    return Groups(of, batch.sum_rows(batch["response_mask"].bool().long()) > 0)


def relative_scores(scores: Float[Tensor, " B"], groups: Groups, epsilon: float | None = None) -> Tensor:
    """Returns each row's score minus the mean of its group, and 0 for a row that is compared with no other, ``[B]``.

    Args:
        scores: one per row.
        groups: the rows' groups.
        epsilon: if it is given, the result is divided by the standard deviation of the group plus this number.
    """
    centred = torch.where(groups.compared, scores - groups.mean(scores), 0.0)
    return centred if epsilon is None else centred / (groups.deviation(scores) + epsilon)


def outcome(function: str, batch: Batch, row_advantages: Float[Tensor, " B"]) -> Batch:
    """Writes each row's advantage to all of its response tokens, as advantages and as returns."""
    spread = batch.spread(row_advantages)
    return written(function, batch, spread, spread)


def penalize_overlong(batch: Batch, max_tokens: int, buffer: int, factor: float = 1.0) -> Batch:
    """Subtracts a penalty from the rewards of responses that are nearly as long as allowed.

    The penalty is 0 up to ``max_tokens - buffer`` response tokens, and rises linearly from there to ``factor`` at
    ``max_tokens``. It lies on the last response token. ``score``, the result of the reward, stays as it is. The rows
    of a conversation are one response, and each of them gets its penalty, as each has its score.

    Args:
        batch: has ``response_mask``, ``token_level_scores`` and ``token_level_rewards``.
        max_tokens: the longest response allowed.
        buffer: the number of tokens over which the penalty rises.
        factor: the largest penalty.

    Returns:
        The batch with both token fields changed and the penalty of each row, at most 0, as ``reward/overlong``.

    Raises:
        ValueError: the buffer has no token, or more than ``max_tokens``.

    Example:
        >>> rows = {name: [[0.0, 0.0, 1.0], [1.0]] for name in ("token_level_scores", "token_level_rewards")}
        >>> batch = Batch.from_rows([[5, 6, 7], [5]], rows | {"response_mask": [[1.0, 1.0, 1.0], [1.0]]})
        >>> penalize_overlong(batch, max_tokens=4, buffer=2)["token_level_rewards"].tolist()
        [0.0, 0.0, 0.5, 1.0]

    Source: Yu et al. 2025 (arXiv 2503.14476), equation 13.
    """
    if not 1 <= buffer <= max_tokens:
        raise ValueError(
            f"the buffer has {buffer} tokens; it must have at least 1, and at most max_tokens = {max_tokens}"
        )
    mask = (batch["response_mask"] != 0).to(batch["token_level_rewards"].dtype)
    conversation, last = conversations(batch)
    lengths = mask.new_zeros(len(last)).index_add(0, conversation, batch.sum_rows(mask))[conversation]
    excess = lengths - (max_tokens - buffer)
    penalty = -factor * (excess / buffer).clamp(0.0, 1.0)
    on_last = batch.spread(penalty) * last_of_rows(batch, batch["response_mask"])
    changed = {name: batch[name] + on_last for name in ("token_level_scores", "token_level_rewards")}
    return batch.with_tokens(**changed).with_rows(**{"reward/overlong": penalty})
