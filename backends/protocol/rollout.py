"""What a rollout engine promises."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import attrs
from torch import Tensor

from verl_fn.state import Batch, Key


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


class StaleWeightsError(RuntimeError):
    """The engine's weights are not of the version that a request asked for."""


class RolloutBackend(Protocol):
    """Token ids in, token ids and log-probs out."""

    version: int | None

    def publish(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take over these weights. The tensors are read before the call returns and not kept."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        key: Key,
        *,
        ids: Sequence[int] | None = None,
        version: int | None = None,
    ) -> Batch:
        """Responses to ``prompts``, as a batch of ``len(prompts) * sampling.n`` rows, prompt by prompt.

        The draws of a row are a function of (key, the prompt's id, number of the sample, position): neither
        the order nor the size of a batch changes them.

        Args:
            ids: names the prompts for the key; by default 0, 1, 2 and so on.
            version: the weights asked for; another version is an error. None takes what is there.

        Returns:
            A batch with the per-token fields ``response_mask`` (1 on sampled tokens), ``rollout_log_probs``
            (of the distribution sampled from, 0 elsewhere) and, where top-k or top-p cut it,
            ``rollout_full_log_probs``; and the per-row fields ``group`` (the prompt's id), ``prompt_length``,
            ``temperature`` (what the trainer divides by; 1 for greedy rows), ``finished`` (1 where the
            response ended by itself), ``version``, and ``near_ties`` (draws so close to a boundary that
            rounding could change them).

        Raises:
            StaleWeightsError: the engine holds another version than ``version``, or none.
        """
        ...

    def sleep(self) -> None:
        """Give back the memory for caches and weights."""
        ...

    def wake(self) -> None:
        """Be ready again; weights must be published anew."""
        ...
