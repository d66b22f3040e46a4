"""A rollout engine that says what it is told to: scripted responses, for unit tests of algorithms."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import attrs
import torch
from torch import Tensor

from verl_fn.backends.protocol import Sampling, StaleWeightsError
from verl_fn.state import Batch, Key


@attrs.frozen
class Request:
    """One response that is wanted.

    Attributes:
        prompt: token ids.
        sample: the number of the sample, from 0 to ``sampling.n - 1``.
        sampling: how it is to be drawn.
        key: of this (key, prompt's id, sample), and of nothing else.
        weights: what was published last.
    """

    prompt: tuple[int, ...]
    sample: int
    sampling: Sampling
    key: Key
    weights: Mapping[str, Tensor]


@attrs.frozen
class Response:
    """What a script answers; a plain sequence of token ids stands for one that is certain and finished.

    Attributes:
        tokens: token ids, at least one; what goes past a stop token or ``max_tokens`` is cut off.
        log_probs: of each token, under the distribution it was drawn from; by default 0, a certainty.
        full_log_probs: the same before top-k and top-p; by default ``log_probs``.
        finished: whether it ended by itself.
    """

    tokens: Sequence[int] = attrs.field(validator=attrs.validators.min_len(1))
    log_probs: Sequence[float] | None = None
    full_log_probs: Sequence[float] | None = None
    finished: bool = True


Answer: TypeAlias = "Response | Sequence[int]"
Script: TypeAlias = "Mapping[tuple[int, ...], Answer] | Callable[[Request], Answer]"


class MockRollout:
    """The protocol of a rollout engine around a script. Versions are checked as a real engine checks them.

    Args:
        script: prompt -> answer, or a function of a ``Request``.

    >>> engine = MockRollout({(5, 6): [7, 8, 2]})
    >>> engine.publish(0, [])
    >>> batch = engine.generate([[5, 6]], Sampling(max_tokens=8, n=2), Key.from_seed(0), version=0)
    >>> batch.rows()[1].tolist(), batch.rows("response_mask")[1].tolist(), batch["finished"].tolist()
    ([5, 6, 7, 8, 2], [0.0, 0.0, 1.0, 1.0, 1.0], [1.0, 1.0])
    >>> engine.generate([[5, 6]], Sampling(max_tokens=8), Key.from_seed(0), version=1)
    Traceback (most recent call last):
    verl_fn.backends.protocol.rollout.StaleWeightsError: version 1 was asked for, but this engine holds version 0
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.version: int | None = None
        self._weights: dict[str, Tensor] = {}

    def publish(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take over a copy of these weights."""
        self._weights = {name: t.detach().clone() for name, t in named_tensors}
        self.version = version

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        key: Key,
        *,
        ids: Sequence[int] | None = None,
        version: int | None = None,
    ) -> Batch:
        """The script's answers, as ``RolloutBackend.generate`` describes them.

        Raises:
            StaleWeightsError: the engine holds another version than ``version``, or none.
            ValueError: ``ids`` are not one a prompt, or log-probs not one a token.
            KeyError: a mapping lacks a prompt.
        """
        if self.version is None or version not in (None, self.version):
            asked = "weights were asked for" if version is None else f"version {version} was asked for"
            holds = "none" if self.version is None else f"version {self.version}"
            raise StaleWeightsError(f"{asked}, but this engine holds {holds}")
        ids = range(len(prompts)) if ids is None else ids
        requests = [
            (name, Request(tuple(prompt), sample, sampling, self._key(key, name, sample), self._weights))
            for name, prompt in zip(ids, prompts, strict=True)
            for sample in range(sampling.n)
        ]
        answers = [_cut(self._answer(request), sampling) for _, request in requests]
        rows = list(zip([request.prompt for _, request in requests], answers, strict=True))
        per_token = {
            "response_mask": [[0.0] * len(p) + [1.0] * len(a.tokens) for p, a in rows],
            "rollout_log_probs": [[0.0] * len(p) + _log_probs(a) for p, a in rows],
        }
        if sampling.temperature > 0.0 and (sampling.top_k > 0 or sampling.top_p < 1.0):
            per_token["rollout_full_log_probs"] = [[0.0] * len(p) + _full_log_probs(a) for p, a in rows]
        size = len(rows)
        return Batch.from_rows(
            [(*p, *a.tokens) for p, a in rows],
            per_token,
            {
                "group": [name for name, _ in requests],
                "prompt_length": [len(p) for p, _ in rows],
                "temperature": torch.full((size,), sampling.temperature or 1.0),
                "finished": [float(a.finished) for a in answers],
                "version": [self.version] * size,
                "near_ties": [0] * size,
            },
        )

    def sleep(self) -> None:
        """Forget the weights."""
        self.version, self._weights = None, {}

    def wake(self) -> None:
        """Be ready for the next ``publish``."""

    def _key(self, key: Key, name: int, sample: int) -> Key:
        return key.fold_in(int(name)).fold_in(sample)

    def _answer(self, request: Request) -> Response:
        if callable(self.script):
            answer = self.script(request)
        elif request.prompt in self.script:
            answer = self.script[request.prompt]
        else:
            raise KeyError(f"the script has no answer to the prompt {request.prompt}")
        return answer if isinstance(answer, Response) else Response(answer)


def sample_table(request: Request) -> Response:
    """A script that draws from the published table ``logits`` of a ``Mock``, so that algorithms really learn.

    >>> engine = MockRollout(sample_table)
    >>> engine.publish(0, [("logits", torch.tensor([[0.0, 50.0], [50.0, 0.0]]))])
    >>> engine.generate([[0]], Sampling(max_tokens=3), Key.from_seed(0)).tokens.tolist()
    [0, 1, 0, 1]
    """
    sampling, table = request.sampling, request.weights["logits"].double()
    greedy = sampling.temperature == 0.0
    full = (table / (sampling.temperature or 1.0)).log_softmax(-1)
    cut = _truncate(full, sampling)
    dice = random.Random(request.key.seed())
    tokens: list[int] = []
    last = request.prompt[-1]
    while len(tokens) < sampling.max_tokens:
        # The first token whose cumulative probability passes the draw; never one of probability 0.
        heap = cut[last].exp().cumsum(0)
        last = int(full[last].argmax()) if greedy else int((heap <= dice.random() * heap[-1]).sum())
        tokens.append(last)
        if last in sampling.stop_token_ids:
            break
    before = [request.prompt[-1], *tokens[:-1]]
    return Response(
        tokens,
        (full if greedy else cut)[before, tokens].tolist(),
        full[before, tokens].tolist(),
        finished=last in sampling.stop_token_ids,
    )


def _truncate(log_probs: Tensor, sampling: Sampling) -> Tensor:
    """Top-k, then top-p, of every row of a table; what is cut gets -inf and the rest is renormalised."""
    if sampling.top_k > 0:
        least = log_probs.topk(min(sampling.top_k, log_probs.shape[-1])).values[:, -1:]
        log_probs = log_probs.masked_fill(log_probs < least, -torch.inf).log_softmax(-1)
    if sampling.top_p < 1.0:
        ordered, order = log_probs.sort(descending=True, stable=True)
        probs = ordered.exp()
        beyond = torch.empty_like(probs, dtype=torch.bool).scatter_(
            1, order, probs.cumsum(-1) - probs >= sampling.top_p
        )
        log_probs = log_probs.masked_fill(beyond, -torch.inf).log_softmax(-1)
    return log_probs


def _cut(answer: Response, sampling: Sampling) -> Response:
    """The answer up to its first stop token and ``max_tokens``."""
    stops = [i + 1 for i, token in enumerate(answer.tokens) if token in sampling.stop_token_ids]
    end = min([len(answer.tokens), sampling.max_tokens, *stops])
    return Response(
        answer.tokens[:end],
        _log_probs(answer)[:end],
        _full_log_probs(answer)[:end],
        finished=end in stops or (answer.finished and end == len(answer.tokens)),
    )


def _log_probs(answer: Response) -> list[float]:
    found = [0.0] * len(answer.tokens) if answer.log_probs is None else list(answer.log_probs)
    if len(found) != len(answer.tokens):
        raise ValueError(f"a response of {len(answer.tokens)} tokens has {len(found)} log-probs")
    return found


def _full_log_probs(answer: Response) -> list[float]:
    return _log_probs(answer) if answer.full_log_probs is None else list(answer.full_log_probs)
