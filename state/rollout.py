"""The inputs and outputs of a rollout engine: requests with their images, samples, and the batch made of samples."""

from __future__ import annotations

import operator
import typing
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs
import torch
from jaxtyping import Int
from torch import Tensor

from verl_fn.errors import ArgumentError

from .batch import Batch, refuse_text
from .node import Key

FinishReason: TypeAlias = Literal["stop", "length"]

EndReason: TypeAlias = Literal["done", "turn_limit", "length", "env_timed_out", "env_crashed"]
END_REASONS: tuple[EndReason, ...] = typing.get_args(EndReason)
"""Why a conversation ended: by the environment, at its limit of turns or of tokens, or by a failure."""
FAILURES: tuple[EndReason, ...] = ("env_timed_out", "env_crashed")
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


def _token_ids(prompt: Any) -> tuple[int, ...]:
    """Converts a sequence of token ids to a tuple.

    Raises:
        ArgumentError: it is a string, a tokenizer's output or no sequence of integers.
    """
    refuse_text("a prompt is a sequence of token ids", prompt)
    return _integers("a prompt", prompt)


def _stops(tokens: Iterable[int]) -> tuple[int, ...]:
    return _integers("stop_token_ids", tokens)


def _integers(what: str, tokens: Iterable[int]) -> tuple[int, ...]:
    """Converts token ids, also numpy's and torch's, to a tuple of Python's integers."""
    try:
        return tuple(operator.index(token) for token in tokens)
    except TypeError as error:
        raise ArgumentError(f"{what} is a sequence of integers, token ids, not {tokens!r:.80}") from error


def _check_whole(_: Sampling, field: attrs.Attribute[int], value: Any) -> None:
    try:
        operator.index(value)
    except TypeError as error:
        raise ArgumentError(f"{field.name} of Sampling is {value!r}; give it a whole number") from error


@attrs.frozen
class Sampling:
    """How responses are drawn.

    Attributes:
        max_tokens: the length limit of a response, its end token included.
        temperature: the logits are divided by it; 0 takes the most likely token.
        top_k: samples from the k most likely tokens; -1 samples from all.
        top_p: samples from the smallest set of most likely tokens whose probabilities sum to at least this.
        n: the number of responses for each prompt.
        stop_token_ids: tokens that end a response, in addition to the model's own; they are part of the response.

    Raises:
        ArgumentError: ``max_tokens``, ``top_k``, ``n`` or an id in ``stop_token_ids`` is no whole number.
        ValueError: a setting is out of its range.

    Example:
        >>> Sampling(max_tokens=64, temperature=0.7, n=8)
        Sampling(max_tokens=64, temperature=0.7, top_k=-1, top_p=1.0, n=8, stop_token_ids=())
    """

    max_tokens: int = attrs.field(validator=[_check_whole, attrs.validators.ge(1)])
    temperature: float = attrs.field(default=1.0, validator=attrs.validators.ge(0.0))
    top_k: int = attrs.field(default=-1, validator=_check_whole)
    top_p: float = attrs.field(default=1.0, validator=[attrs.validators.gt(0.0), attrs.validators.le(1.0)])
    n: int = attrs.field(default=1, validator=[_check_whole, attrs.validators.ge(1)])
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_stops)

    @property
    def cuts(self) -> bool:
        """Whether top-k or top-p removes tokens from the distribution.

        The log-probabilities before and after the cut then differ, and a sample has both.

        Example:
            >>> Sampling(8).cuts, Sampling(8, top_k=5).cuts, Sampling(8, top_k=5, temperature=0.0).cuts
            (False, True, False)
        """
        return self.temperature > 0.0 and (self.top_k > 0 or self.top_p < 1.0)


@attrs.frozen
class Request:
    """One prompt and how its ``sampling.n`` responses are drawn.

    Attributes:
        id: identifies the prompt; its samples have the same id.
        prompt: token ids. Empty if an environment begins the conversation.
        sampling: how responses are drawn; of a conversation, ``max_tokens`` limits all that follows the prompt.
        key: the key of this request; sample i draws from ``key.fold_in(i)``.
        problem: what an environment begins the conversation with, as values of JSON.
        images: the images of the prompt, if it has any.

    Raises:
        ArgumentError: the prompt is not a sequence of integers.
    """

    id: int
    prompt: tuple[int, ...] = attrs.field(converter=_token_ids)
    sampling: Sampling
    key: Key
    problem: Mapping[str, Any] | None = None
    images: RowImages | None = None


def requests_for(
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    key: Key,
    ids: Sequence[int] | None = None,
    images: Sequence[RowImages | None] | None = None,
) -> list[Request]:
    """Makes one request for each prompt, with a key derived from the prompt's id.

    Args:
        key: the requests' keys are derived from it.
        ids: identify the prompts; by default 0, 1, 2 and so on.
        images: of each prompt; by default no prompt has any.

    Raises:
        ArgumentError: a prompt is not a sequence of integers, or the key is not a ``Key``.
        ValueError: the numbers of prompts and ids differ, or two prompts have the same id.

    Example:
        >>> [r.id for r in requests_for([[1], [1, 2]], Sampling(8), Key.from_seed(0))]
        [0, 1]
    """
    refuse_text("prompts is a sequence of prompts, each a sequence of token ids", prompts)
    if not isinstance(key, Key):
        raise ArgumentError(f"key is a Key, such as Key.from_seed(0), not a {type(key).__name__}")
    ids = range(len(prompts)) if ids is None else [operator.index(i) for i in ids]
    if len(ids) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts with {len(ids)} ids: there must be one id per prompt")
    check_ids(ids)
    seen = [None] * len(prompts) if images is None else images
    return [
        Request(i, prompt, sampling, key.fold_in(i), images=one)
        for i, prompt, one in zip(ids, prompts, seen, strict=True)
    ]


def check_ids(ids: Sequence[int]) -> None:
    """Raises ValueError for requests of the same id, since their samples would be taken for one group.

    Example:
        >>> check_ids([3, 3])
        Traceback (most recent call last):
        ValueError: the id 3 is given to 2 prompts; give each its own, and Sampling(n=...) for several responses
    """
    repeated = [(i, count) for i, count in Counter(ids).items() if count > 1]
    if repeated:
        i, count = repeated[0]
        raise ValueError(
            f"the id {i} is given to {count} prompts; give each its own, and Sampling(n=...) for several responses"
        )


@attrs.frozen
class Outcome:
    """What became of a conversation with an environment.

    Attributes:
        conversation: its number among the conversations of the request. A conversation whose chat template rewrites
            earlier messages has several rows, one after the other.
        reason: why it ended.
        score: the environment's reward; 0 unless the environment ended it.
        acc: how right it was, from 0 to 1; 0 unless the environment ended it.
        turns: the model's replies.
        messages: all that were said, as JSON, for people to read; empty after ``unpack``, since batches lack it.
    """

    conversation: int
    reason: EndReason
    score: float
    acc: float
    turns: int
    messages: str = attrs.field(default="", eq=False, repr=False)


@attrs.frozen(eq=False)
class Sample:
    """One response.

    Attributes:
        request: the id of its request.
        number: its number among the samples of the request, from 0.
        prompt: the token ids of the prompt.
        tokens: the token ids of the response, at least one.
        log_probs: the log-probability of each token under the distribution that it was drawn from; 0 where ``mask``
            is 0.
        full_log_probs: the log-probabilities before top-k and top-p; None if neither was used.
        mask: 1 for tokens that the model drew, 0 for tokens that an environment wrote.
        versions: for each token, the version of the weights that drew it.
        finish_reason: ``stop`` if the response ended by itself, ``length`` if it was cut off.
        temperature: the trainer divides logits by it; 1 for greedy responses.
        near_ties: the number of draws so close to a boundary that rounding could change them.
        outcome: of the conversation that this is a row of; None without an environment.
        routed_experts: the experts of each token, of the prompt's too, in each layer with experts, ``[T, L, k]``;
            None if the engine does not give them. No engine computes the last token; it repeats the experts of the
            token before it: no other token sees it, so nothing depends on them.
        images: of the prompt, if it has any.
    """

    request: int
    number: int
    prompt: Tensor
    tokens: Tensor
    log_probs: Tensor
    full_log_probs: Tensor | None
    mask: Tensor
    versions: Tensor
    finish_reason: FinishReason
    temperature: float = 1.0
    near_ties: int = 0
    outcome: Outcome | None = None
    routed_experts: Tensor | None = None
    images: RowImages | None = None


def pack(samples: Sequence[Sample]) -> Batch:
    """Returns the batch with one row for each sample, in order.

    Per-token fields are ``response_mask``, ``rollout_log_probs``, ``versions`` (-1 on the prompt) and, where any
    sample has them, ``rollout_full_log_probs`` and ``routed_experts``. Per-row fields are ``group`` (the request's
    id), ``prompt_length``, ``temperature``, ``finished`` (1 if the response ended by itself), ``version`` (the oldest
    of the row) and ``near_ties``. Rows of conversations also have ``conversation``, ``env_end`` (the place of the
    reason in ``END_REASONS``), ``env_score``, ``env_acc`` and ``env_turns``. Images are as ``with_images`` has them.

    Raises:
        ValueError: there are no samples, one has no tokens, or only some of them are of conversations or have
            ``routed_experts``.

    Example:
        >>> one = Sample(7, 0, torch.tensor([5]), torch.tensor([6, 2]), torch.tensor([-0.5, -0.1]), None,
        ...              torch.ones(2), torch.tensor([3, 4]), "stop")
        >>> batch = pack([one])
        >>> batch.tokens.tolist(), batch["response_mask"].tolist(), batch["versions"].tolist()
        ([5, 6, 2], [0.0, 1.0, 1.0], [-1, 3, 4])
    """
    if not samples:
        raise ValueError("there are no samples to pack")
    if empty := [s for s in samples if not len(s.tokens)]:
        raise ValueError(f"sample {empty[0].number} of request {empty[0].request} has no tokens")
    batch = Batch.from_rows([torch.cat([s.prompt, s.tokens]) for s in samples])
    prompt_length = torch.tensor([len(s.prompt) for s in samples])
    of_response = batch.positions >= batch.spread(prompt_length)

    def after(parts: Sequence[Tensor], before: float = 0.0) -> Tensor:
        """Returns a per-token field: ``parts`` for the responses and ``before`` for the prompts."""
        flat = torch.cat(list(parts))
        field = flat.new_full((batch.num_tokens,), before)
        field[of_response] = flat
        return field

    fields = {
        "response_mask": after([s.mask for s in samples]).float(),
        "rollout_log_probs": after([s.log_probs for s in samples]),
        "versions": after([s.versions for s in samples], -1),
    }
    if any(s.full_log_probs is not None for s in samples):
        full = [s.log_probs if s.full_log_probs is None else s.full_log_probs for s in samples]
        fields["rollout_full_log_probs"] = after(full)
    if any(s.routed_experts is not None for s in samples):
        fields["routed_experts"] = torch.cat(_routes(samples))
    batch = with_images(batch.with_tokens(**fields), [s.images for s in samples])
    batch = batch.with_rows(
        group=torch.tensor([s.request for s in samples]),
        prompt_length=prompt_length,
        temperature=torch.tensor([s.temperature for s in samples]),
        finished=torch.tensor([float(s.finish_reason == "stop") for s in samples]),
        version=_oldest(batch, of_response),
        near_ties=torch.tensor([s.near_ties for s in samples]),
    )
    outcomes = [s.outcome for s in samples if s.outcome is not None]
    if len(outcomes) not in (0, len(samples)):
        raise ValueError(f"{len(outcomes)} of {len(samples)} samples are of conversations; pack them by themselves")
    return batch.with_rows(**_outcome_fields(outcomes)) if outcomes else batch


def _routes(samples: Sequence[Sample]) -> list[Tensor]:
    """Returns the experts of each sample's tokens; a row that no model computed gets the first ones.

    Raises:
        ValueError: a sample with drawn tokens lacks them.
    """
    like = next(s.routed_experts for s in samples if s.routed_experts is not None)
    first = torch.arange(like.shape[-1], dtype=like.dtype).expand(1, *like.shape[1:])
    routes = []
    for s in samples:
        if s.routed_experts is None and bool(s.mask.any()):
            raise ValueError(
                f"sample {s.number} of request {s.request} has no routed_experts, and others have; pack the samples "
                "of one engine together"
            )
        length = len(s.prompt) + len(s.tokens)
        routes.append(first.expand(length, -1, -1) if s.routed_experts is None else s.routed_experts)
    return routes


def _outcome_fields(outcomes: Sequence[Outcome]) -> dict[str, Tensor]:
    return {
        "conversation": torch.tensor([o.conversation for o in outcomes]),
        "env_end": torch.tensor([END_REASONS.index(o.reason) for o in outcomes]),
        "env_score": torch.tensor([o.score for o in outcomes], dtype=torch.float32),
        "env_acc": torch.tensor([o.acc for o in outcomes], dtype=torch.float32),
        "env_turns": torch.tensor([o.turns for o in outcomes]),
    }


def _outcomes(batch: Batch) -> list[Outcome | None]:
    """Returns the outcome of each row's conversation; None for each row without."""
    if "conversation" not in batch:
        return [None] * len(batch)
    names = ("conversation", "env_end", "env_score", "env_acc", "env_turns")
    columns = zip(*(batch[name].tolist() for name in names), strict=True)
    return [Outcome(number, END_REASONS[end], score, acc, turns) for number, end, score, acc, turns in columns]


def conversations(batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns for each row the number of its conversation in the batch, and for each conversation its last row.

    Without the field ``conversation``, each row is one.

    Example:
        >>> rows = {"group": [4, 4, 9, 9], "conversation": [0, 0, 0, 1]}
        >>> [t.tolist() for t in conversations(Batch.from_rows([[1]] * 4, per_row=rows))]
        [[0, 0, 1, 2], [1, 2, 3]]
    """
    rows = torch.arange(len(batch))
    if "conversation" not in batch:
        return rows, rows
    names = torch.stack([batch["group"], batch["conversation"]], 1)
    begins = torch.ones(len(batch), dtype=torch.bool)
    begins[1:] = (names[1:] != names[:-1]).any(1)
    return begins.cumsum(0) - 1, torch.cat([rows[begins][1:] - 1, rows[-1:]])


def unpack(batch: Batch) -> list[Sample]:
    """Returns the samples of a batch made by ``pack``. Samples of a request are numbered in the order of the batch.

    Example:
        >>> one = Sample(7, 0, torch.tensor([5]), torch.tensor([6, 2]), torch.tensor([-0.5, -0.1]), None,
        ...              torch.ones(2), torch.tensor([3, 4]), "stop")
        >>> again = unpack(pack([one]))[0]
        >>> again.tokens.tolist(), again.finish_reason, again.versions.tolist()
        ([6, 2], 'stop', [3, 4])
    """
    starts = batch["prompt_length"].tolist()
    names = ("tokens", "rollout_log_probs", "response_mask", "versions")
    full, routes = (
        batch.rows(name) if name in batch else [None] * len(batch)
        for name in ("rollout_full_log_probs", "routed_experts")
    )
    parts = zip(*(batch.rows(name) for name in names), full, routes, strict=True)
    rows = [batch[name].tolist() for name in ("group", "finished", "temperature", "near_ties")]
    counts: Counter[int] = Counter()
    samples = []
    for start, part, (group, finished, temperature, near_ties), outcome, seen in zip(
        starts, parts, zip(*rows, strict=True), _outcomes(batch), images_of_rows(batch, starts), strict=True
    ):
        tokens, log_probs, mask, versions, uncut, routed = part
        samples.append(
            Sample(
                request=group,
                number=counts[group],
                prompt=tokens[:start],
                tokens=tokens[start:],
                log_probs=log_probs[start:],
                full_log_probs=None if uncut is None else uncut[start:],
                mask=mask[start:],
                versions=versions[start:],
                finish_reason="stop" if finished else "length",
                temperature=temperature,
                near_ties=near_ties,
                outcome=outcome,
                routed_experts=routed,
                images=seen,
            )
        )
        counts[group] += 1
    return samples


def _oldest(batch: Batch, of_response: Tensor) -> Tensor:
    """Returns the oldest version that drew a token of each row, or of all its response if the model drew none."""
    drawn = batch["response_mask"].bool()
    undrawn = batch.sum_rows(batch["response_mask"]) == 0
    counted = torch.where(batch.spread(undrawn), of_response, drawn)
    versions = torch.where(counted, batch["versions"].long(), torch.iinfo(torch.int64).max)
    return batch.reduce_rows(versions, "amin")
