"""What goes into a rollout engine and what comes out of it: requests, samples, and the batch of samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, TypeAlias

import attrs
import torch
from torch import Tensor

from .batch import Batch
from .key import Key

FinishReason: TypeAlias = Literal["stop", "length"]


@attrs.frozen
class Sampling:
    """How responses are drawn.

    Attributes:
        max_tokens: longest response, the end token included.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: keep the k likeliest tokens; -1 keeps all.
        top_p: keep the smallest set of likeliest tokens with at least this probability.
        n: responses for each prompt.
        stop_token_ids: tokens that end a response and belong to it, beside the model's own end tokens.
    """

    max_tokens: int = attrs.field(validator=attrs.validators.ge(1))
    temperature: float = attrs.field(default=1.0, validator=attrs.validators.ge(0.0))
    top_k: int = -1
    top_p: float = attrs.field(default=1.0, validator=[attrs.validators.gt(0.0), attrs.validators.le(1.0)])
    n: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    stop_token_ids: tuple[int, ...] = ()

    @property
    def cuts(self) -> bool:
        """Whether top-k or top-p leaves tokens out, so that two distributions have to be told apart.

        >>> Sampling(8).cuts, Sampling(8, top_k=5).cuts, Sampling(8, top_k=5, temperature=0.0).cuts
        (False, True, False)
        """
        return self.temperature > 0.0 and (self.top_k > 0 or self.top_p < 1.0)


@attrs.frozen
class Request:
    """One prompt, and how its ``sampling.n`` responses are drawn.

    Attributes:
        id: names the prompt; samples carry it.
        prompt: token ids.
        sampling: how responses are drawn.
        key: of this request alone; sample i draws from ``key.fold_in(i)``.
    """

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling
    key: Key


def requests_for(
    prompts: Sequence[Sequence[int]], sampling: Sampling, key: Key, ids: Sequence[int] | None = None
) -> list[Request]:
    """One request a prompt, each with a key derived from its id.

    Args:
        ids: names of the prompts; by default 0, 1, 2 and so on.

    Raises:
        ValueError: there are not as many ids as prompts.

    >>> [r.id for r in requests_for([[1], [1, 2]], Sampling(8), Key.from_seed(0))]
    [0, 1]
    """
    ids = range(len(prompts)) if ids is None else [int(i) for i in ids]
    if len(ids) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts with {len(ids)} ids: there must be one id a prompt")
    return [
        Request(i, tuple(int(token) for token in prompt), sampling, key.fold_in(i))
        for i, prompt in zip(ids, prompts, strict=True)
    ]


@attrs.frozen(eq=False)
class Sample:
    """One response.

    Attributes:
        request: the id of its request.
        number: which of the request's samples it is, from 0.
        prompt: token ids before it.
        tokens: the response's token ids, at least one.
        log_probs: of each token, under the distribution that it was drawn from; 0 where ``mask`` is 0.
        full_log_probs: the same before top-k and top-p; None where nothing was cut.
        mask: 1 on tokens that the model drew, 0 on tokens that an environment wrote.
        versions: of the weights that drew each token.
        finish_reason: ``stop`` where it ended by itself, ``length`` where it was cut off.
        temperature: what the trainer divides logits by; 1 for greedy responses.
        near_ties: draws so close to a boundary that rounding could change them.
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


def pack(samples: Sequence[Sample]) -> Batch:
    """Returns the batch of these samples, a row each, in their order.

    Per-token fields are ``response_mask``, ``rollout_log_probs``, ``versions`` (-1 on the prompt) and, where any
    sample was cut, ``rollout_full_log_probs``. Per-row fields are ``group`` (the request's id), ``prompt_length``,
    ``temperature``, ``finished`` (1 where the response ended by itself), ``version`` (the oldest of the row's) and
    ``near_ties``.

    Raises:
        ValueError: there are no samples.

    >>> one = Sample(7, 0, torch.tensor([5]), torch.tensor([6, 2]), torch.tensor([-0.5, -0.1]), None,
    ...              torch.ones(2), torch.tensor([3, 4]), "stop")
    >>> batch = pack([one])
    >>> batch.tokens.tolist(), batch["response_mask"].tolist(), batch["versions"].tolist()
    ([5, 6, 2], [0.0, 1.0, 1.0], [-1, 3, 4])
    """
    if not samples:
        raise ValueError("there are no samples to pack")
    prompts = [s.prompt for s in samples]

    def after(parts: Sequence[Tensor], before: float = 0.0) -> Tensor:
        """A per-token field with ``before`` on the prompts."""
        pairs = [(part.new_full((len(p),), before), part) for p, part in zip(prompts, parts, strict=True)]
        return torch.cat([t for pair in pairs for t in pair])

    rows = [torch.cat([s.prompt, s.tokens]) for s in samples]
    fields = {
        "response_mask": after([s.mask.float() for s in samples]),
        "rollout_log_probs": after([s.log_probs for s in samples]),
        "versions": after([s.versions for s in samples], -1),
    }
    if any(s.full_log_probs is not None for s in samples):
        full = [s.log_probs if s.full_log_probs is None else s.full_log_probs for s in samples]
        fields["rollout_full_log_probs"] = after(full)
    return (
        Batch.from_rows(rows)
        .with_tokens(**fields)
        .with_rows(
            group=torch.tensor([s.request for s in samples]),
            prompt_length=torch.tensor([len(p) for p in prompts]),
            temperature=torch.tensor([s.temperature for s in samples]),
            finished=torch.tensor([float(s.finish_reason == "stop") for s in samples]),
            version=torch.tensor([_oldest(s) for s in samples]),
            near_ties=torch.tensor([s.near_ties for s in samples]),
        )
    )


def unpack(batch: Batch) -> list[Sample]:
    """Returns the samples that ``pack`` made ``batch`` of; those of a request are numbered in the batch's order.

    >>> one = Sample(7, 0, torch.tensor([5]), torch.tensor([6, 2]), torch.tensor([-0.5, -0.1]), None,
    ...              torch.ones(2), torch.tensor([3, 4]), "stop")
    >>> again = unpack(pack([one]))[0]
    >>> again.tokens.tolist(), again.finish_reason, again.versions.tolist()
    ([6, 2], 'stop', [3, 4])
    """
    starts = batch["prompt_length"].tolist()
    names = ("tokens", "rollout_log_probs", "response_mask", "versions")
    full = batch.rows("rollout_full_log_probs") if "rollout_full_log_probs" in batch else [None] * len(batch)
    parts = zip(*(batch.rows(name) for name in names), full, strict=True)
    rows = [batch[name].tolist() for name in ("group", "finished", "temperature", "near_ties")]
    seen: Counter[int] = Counter()
    samples = []
    for start, (tokens, log_probs, mask, versions, uncut), (group, finished, temperature, near_ties) in zip(
        starts, parts, zip(*rows, strict=True), strict=True
    ):
        samples.append(
            Sample(
                group, seen[group], tokens[:start], tokens[start:], log_probs[start:],
                None if uncut is None else uncut[start:], mask[start:], versions[start:],
                "stop" if finished else "length", temperature, near_ties,
            )
        )  # fmt: skip
        seen[group] += 1
    return samples


def _oldest(sample: Sample) -> int:
    """The oldest version that drew a token of this sample; of all tokens where it drew none."""
    drawn = sample.versions[sample.mask.bool()]
    return int((drawn if len(drawn) else sample.versions).min())
