"""A training backend and a rollout engine without a model, for unit tests of algorithms.

``Mock`` has a table of logits and one of values: it does all that a real backend does, in milliseconds, and fails on
demand; tests of the laws themselves use it too. ``MockRollout`` has scripted responses.
"""

from __future__ import annotations

import functools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import torch
from safetensors.torch import load_file
from torch import Tensor

from verl_fn.backends.base import Base, one_at_a_time
from verl_fn.backends.checkpoint import MODEL, Writing, begin_save, read_state
from verl_fn.backends.draws import Draws
from verl_fn.backends.hf.outputs import check_targets, temperatures_of
from verl_fn.backends.protocol import (
    Capabilities,
    Chunk,
    Handle,
    PublicationFailed,
    Sampling,
    StaleWeightsError,
    WeightSource,
    check_sampling,
    here,
    serves,
)
from verl_fn.backends.tensor_file import Span
from verl_fn.backends.weight_sync import receive
from verl_fn.state import (
    PER_ROW,
    Batch,
    Grads,
    Key,
    Metrics,
    Params,
    Request,
    Sample,
    Sum,
    TokenOutputs,
    TrainState,
    isolated,
    metrics,
    split_by_tokens,
    tree,
)
from verl_fn.state.guards import expect, expect_tokens
from verl_fn.state.tree import flatten
from verl_fn.steps import Loss, Optimizer, total_loss
from verl_fn.steps.losses.contract import check_fields

NEEDS = frozenset({"logprobs", "entropy", "values", "row_values"})
CONSTANT_NEEDS = frozenset({"sum_pi_squared"})
METHODS = (
    "init",
    "load_pretrained",
    "forward",
    "forward_backward",
    "apply_update",
    "place",
    "save",
    "restore",
    "weights",
)


class Mock(Base):
    """Trains a policy that depends on one token before, and a value for each token.

    The parameters are ``logits [V, V]`` of the next token given the one before it, and ``values [V]``. The methods
    agree with ``Local``'s.

    Args:
        vocab_size: tokens are 0 to ``vocab_size - 1``.
        optimizer: from ``verl_fn.steps``.
        max_tokens: the most tokens of a micro-batch.
        failures: errors by method and call: ``(method, n)`` names the n-th call of a method, counted from 1, which
            raises the error before it does anything.

    Raises:
        ValueError: ``failures`` names an unknown method.

    Example:
        >>> from verl_fn.steps import adamw, aggregate, cross_entropy
        >>> backend = Mock(4, adamw(0.1), failures={("apply_update", 2): RuntimeError("boom")})
        >>> state = backend.init(Key.from_seed(0))
        >>> batch = aggregate(Batch.from_rows([[1, 3, 2]], {"response_mask": [[0.0, 1.0, 1.0]]}))
        >>> grads, before = backend.forward_backward(state, batch, cross_entropy())
        >>> state, _ = backend.apply_update(state, grads)
        >>> grads, after = backend.forward_backward(state, batch, cross_entropy())
        >>> after["loss"].value < before["loss"].value
        True
        >>> backend.apply_update(state, grads)
        Traceback (most recent call last):
        RuntimeError: boom
    """

    def __init__(
        self,
        vocab_size: int,
        optimizer: Optimizer,
        *,
        max_tokens: int = 16384,
        failures: Mapping[tuple[str, int], Exception] | None = None,
    ) -> None:
        super().__init__(optimizer)
        self.vocab_size = vocab_size
        self.max_tokens = max_tokens
        self.failures = dict(failures or {})
        if unknown := {method for method, _ in self.failures} - set(METHODS):
            raise ValueError(f"failures name {sorted(unknown)}; the methods are {', '.join(METHODS)}")
        self.calls: Counter[str] = Counter()
        self._counting = threading.Lock()
        # Calls are counted as they come in, also of methods that a subclass replaces.
        for method in METHODS:
            setattr(self, method, functools.partial(self._called, method))

    def _called(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Counts a call of a method, and makes it unless it is to fail."""
        with self._counting:
            self.calls[method] += 1
            call = (method, self.calls[method])
        if call in self.failures:
            raise self.failures[call]
        return getattr(type(self), method)(self, *args, **kwargs)

    def _params(self, folder: str | Path, key: Key, *, pretrained: bool) -> Params:
        """Returns the tables that ``save`` wrote, or normally distributed ones."""
        if pretrained:
            return Params(_tables(folder))
        stream, v = key.generator(), self.vocab_size
        return Params({"logits": torch.randn(v, v, generator=stream), "values": torch.randn(v, generator=stream)})

    def _saving(self, state: TrainState, folder: Path, later: bool) -> Writing:
        """Writes under the file names of ``Local``."""
        rest, scalars = flatten(attrs.evolve(state, params=Params({})))
        model, others = ({name: Span.whole(t) for name, t in tensors.items()} for tensors in (state.params, rest))
        return begin_save(folder, model, others, scalars, later=later)

    @one_at_a_time
    def restore(self, folder: str | Path) -> TrainState:
        """Returns the state that ``save`` wrote, bitwise."""
        params = tree.map_tensors(lambda t: t.to("meta"), Params(_tables(folder)))
        blank = TrainState(Params({}), self.optimizer.init(params), 0, Key.from_seed(0), 0)
        tables, rest = read_state(folder, params, blank)
        return attrs.evolve(rest, params=Params(tables))

    # The two steps

    def _wanted(self, needs: Iterable[str], *, forward: bool = False) -> frozenset[str]:
        known, wanted = NEEDS | CONSTANT_NEEDS if forward else NEEDS, frozenset(needs)
        if unknown := sorted(wanted - known):
            raise ValueError(f"a mock gives {sorted(known)}, not {unknown}")
        return wanted

    def _forward(self, params: Params, batch: Batch, wanted: frozenset[str]) -> TokenOutputs:
        expect_tokens(batch, self.vocab_size)
        split = split_by_tokens(batch, self.max_tokens)
        return split.join_outputs([_outputs(params, part, wanted) for part in split])

    def _forward_backward(
        self, state: TrainState, batch: Batch, loss: Loss, wanted: frozenset[str]
    ) -> tuple[Grads, Metrics]:
        expect_tokens(batch, self.vocab_size)
        params = tree.map_tensors(Tensor.detach, state.params)
        leaves = {name: params[name].requires_grad_() for name in params.trained()}
        reported: Metrics = {}
        for part in split_by_tokens(batch, self.max_tokens, loss.together):
            total, of_part = total_loss(loss, _outputs(params, part, wanted), part)
            if total.requires_grad:
                total.backward()
            of_part = {"loss": Sum(total.double()), **of_part}
            reported = metrics.merge(reported, tree.map_tensors(Tensor.detach, of_part))
        grads = {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in leaves.items()}
        return Grads(grads), reported

    def loss_fn(self, batch: Batch, loss: Loss) -> Callable[[Params], tuple[Tensor, Metrics]]:
        """Returns the loss as a pure function of parameters, for ``torch.func``."""
        expect("loss_fn", Batch, batch)
        # Weights may be traced, so their values are not checked.
        check_fields(loss, batch)
        wanted = self._wanted(loss.needs)

        @isolated(gradients=None)
        def fn(params: Params) -> tuple[Tensor, Metrics]:
            total, reported = total_loss(loss, _outputs(params, batch, wanted), batch)
            return total, tree.map(torch.as_tensor, {"loss": Sum(total.detach().double()), **reported})

        return fn


def _outputs(params: Params, batch: Batch, needs: Iterable[str]) -> TokenOutputs:
    """Returns what the tables hold for a micro-batch."""
    targets, values = check_targets(batch), params["values"]
    before = batch.tokens[targets - 1]
    logits = params["logits"].index_select(0, before)
    if (heat := temperatures_of(batch)) is not None:
        logits = logits / heat[targets, None]
    log_probs = logits.log_softmax(-1)
    at_targets = {
        "logprobs": lambda: log_probs.gather(1, batch.tokens[targets, None])[:, 0],
        "entropy": lambda: -(log_probs.exp() * log_probs).sum(-1),
        "values": lambda: values.index_select(0, before),
        "sum_pi_squared": lambda: log_probs.exp().square().sum(-1),
    }
    zeros = torch.zeros(batch.num_tokens)
    return TokenOutputs(
        {
            name: values.index_select(0, batch.tokens[batch.last])
            if name in PER_ROW
            else zeros.index_copy(0, targets, at_targets[name]())
            for name in needs
        }
    )


def _tables(folder: str | Path) -> dict[str, Tensor]:
    # Copies, since tensors of one file share its memory, and an update could not reuse that.
    return {name: t.clone() for name, t in load_file(Path(folder) / MODEL).items()}


@attrs.frozen
class Turn:
    """A sample that a script has to answer.

    Attributes:
        sample: the number of the sample, from 0 to ``sampling.n - 1``.
        sampling: how the sample is to be drawn.
        weights: the weights that were published last.
    """

    prompt: tuple[int, ...]
    sample: int
    sampling: Sampling
    key: Key
    weights: Mapping[str, Tensor]


@attrs.frozen
class Response:
    """The answer of a script; a plain sequence of token ids means a finished answer whose tokens were certain.

    Attributes:
        tokens: token ids, at least one; ids after a stop token or ``max_tokens`` are dropped.
        log_probs: the log-probability of each token under the distribution it was drawn from; by default 0.
        full_log_probs: the same before top-k and top-p; by default ``log_probs``.
        finished: whether the answer ended with its last token.
    """

    tokens: Sequence[int] = attrs.field(validator=attrs.validators.min_len(1))
    log_probs: Sequence[float] | None = None
    full_log_probs: Sequence[float] | None = None
    finished: bool = True


Answer: TypeAlias = "Response | Sequence[int]"
Script: TypeAlias = "Mapping[tuple[int, ...], Answer] | Callable[[Turn], Answer]"


class MockRollout:
    """Answers requests from a script, and checks versions as a real engine does.

    Args:
        script: answers by prompt, or a function of a ``Turn``.
        capabilities: what this engine claims to support; requests for anything else are refused. With
            ``versions_per_token``, rows of a stream that are not read yet are in their middle when weights arrive.

    Example:
        >>> engine = MockRollout({(5, 6): [7, 8, 2]})
        >>> from verl_fn.backends.weight_sync import Weights
        >>> from verl_fn.state import requests_for
        >>> engine.publish(0, Weights.of({}))
        >>> asked = requests_for([[5, 6]], Sampling(max_tokens=8, n=2), Key.from_seed(0))
        >>> [(s.tokens.tolist(), s.finish_reason) for s in engine.generate(asked, version=0)]
        [([7, 8, 2], 'stop'), ([7, 8, 2], 'stop')]
        >>> engine.generate(asked, version=1)
        Traceback (most recent call last):
        verl_fn.backends.protocol.StaleWeightsError: version 1 was asked for, but this engine holds version 0
    """

    def __init__(self, script: Script, capabilities: Capabilities | None = None) -> None:
        self.script = script
        self.capabilities = capabilities or Capabilities()
        self.version: int | None = None
        self._weights: dict[str, Tensor] = {}
        # Of weights that arrive in flight, another thread may draw.
        self._lock = threading.RLock()

    def publish(self, version: int, weights: Handle[WeightSource]) -> None:
        """Copies these weights; see ``RolloutBackend``."""
        source = here(weights)
        places = {spec.name: torch.empty(spec.shape, dtype=spec.dtype) for spec in source.specs}

        def write(chunk: Chunk) -> None:
            rows = places[chunk.name].view(1) if places[chunk.name].ndim == 0 else places[chunk.name]
            rows[chunk.start : chunk.start + len(chunk.values)] = chunk.values.cpu()

        with self._lock:
            self.version = None
            receive(source, write, checked=True)
            self._weights = places
            self.version = version

    def generate(self, requests: Sequence[Request], *, version: int | None = None) -> list[Sample]:
        """Returns the script's answers, ordered as ``RolloutBackend.generate`` does.

        Raises:
            StaleWeightsError: the engine holds another version than ``version``, or none.
            UnsupportedSampling: a request needs more than ``capabilities``.
            ValueError: there is not one log-prob for each token.
            KeyError: a mapping lacks a prompt.
        """
        with self._lock:
            if not serves(self.version, version, self.capabilities):
                asked = "weights were asked for" if version is None else f"version {version} was asked for"
                holds = "none" if self.version is None else f"version {self.version}"
                raise StaleWeightsError(f"{asked}, but this engine holds {holds}")
            check_sampling(requests, self.capabilities)
            return [self._sample(request, number) for request in requests for number in range(request.sampling.n)]

    def stream(self, requests: Sequence[Request], *, version: int | None = None) -> Iterator[Sample]:
        """Returns an iterator over the same samples, the last request's first; see ``RolloutBackend``.

        Raises:
            StaleWeightsError: as ``generate``.
            PublicationFailed: in the iterator, after a publication that failed.
        """
        samples = reversed(self.generate(requests, version=version))
        return self._in_flight(requests, samples) if self.capabilities.versions_per_token else samples

    def sleep(self, level: int = 2) -> None:
        """Drops the weights at level 2."""
        if level > 1:
            self.version, self._weights = None, {}

    def wake(self, tags: Sequence[str] = ()) -> None:
        """Does nothing; the engine is always ready for ``publish``."""

    def _key(self, request: Request, number: int) -> Key:
        return request.key.fold_in(number)

    def _in_flight(self, requests: Sequence[Request], samples: Iterator[Sample]) -> Iterator[Sample]:
        """Yields samples; samples of older weights than the engine's go on from their middle with the new ones."""
        by_id = {request.id: request for request in requests}
        for sample in samples:
            with self._lock:
                whole = self._continued(by_id[sample.request], sample)
            yield whole

    def _continued(self, request: Request, sample: Sample) -> Sample:
        if self.version is None:
            raise PublicationFailed("a publication failed during this stream")
        done, sampling = len(sample.tokens) // 2, request.sampling
        if self.version == int(sample.versions[-1]) or not done:
            return sample
        longer = attrs.evolve(
            request,
            prompt=(*request.prompt, *sample.tokens[:done].tolist()),
            sampling=attrs.evolve(sampling, max_tokens=sampling.max_tokens - done),
            key=request.key.fold_in("in flight"),
        )
        rest = self._sample(longer, sample.number)
        fields = ["tokens", "log_probs", "mask", "versions"]
        fields += [] if sample.full_log_probs is None else ["full_log_probs"]
        joined: dict[str, Any] = {
            name: torch.cat([getattr(sample, name)[:done], getattr(rest, name)]) for name in fields
        }
        return attrs.evolve(sample, finish_reason=rest.finish_reason, **joined)

    def _sample(self, request: Request, number: int) -> Sample:
        sampling = request.sampling
        turn = Turn(request.prompt, number, sampling, self._key(request, number), self._weights)
        answer = _cut(self._answer(turn), sampling)
        assert self.version is not None
        return Sample(
            request=request.id,
            number=number,
            prompt=torch.tensor(request.prompt),
            tokens=torch.tensor(answer.tokens),
            log_probs=torch.tensor(answer.log_probs),
            full_log_probs=torch.tensor(answer.full_log_probs) if sampling.cuts else None,
            mask=torch.ones(len(answer.tokens)),
            versions=torch.full((len(answer.tokens),), self.version),
            finish_reason="stop" if answer.finished else "length",
            temperature=sampling.temperature or 1.0,
        )

    def _answer(self, turn: Turn) -> Response:
        if callable(self.script):
            answer = self.script(turn)
        elif turn.prompt in self.script:
            answer = self.script[turn.prompt]
        else:
            raise KeyError(f"the script has no answer to the prompt {turn.prompt}")
        return answer if isinstance(answer, Response) else Response(answer)


def sample_table(turn: Turn) -> Response:
    """Draws an answer from the published table ``logits`` of a ``Mock``, so that algorithms can learn.

    Example:
        >>> engine = MockRollout(sample_table)
        >>> from verl_fn.backends.weight_sync import Weights
        >>> from verl_fn.state import requests_for
        >>> engine.publish(0, Weights.of({"logits": torch.tensor([[0.0, 50.0], [50.0, 0.0]])}))
        >>> engine.generate(requests_for([[0]], Sampling(max_tokens=3), Key.from_seed(0)))[0].tokens.tolist()
        [1, 0, 1]
    """
    sampling, table = turn.sampling, turn.weights["logits"]
    draws, dice = Draws(sampling, len(table), noise=0.0), random.Random(turn.key.seed())
    tokens: list[int] = []
    last = turn.prompt[-1]
    while len(tokens) < sampling.max_tokens:
        u = torch.tensor([[1.0 - dice.random()]], dtype=torch.float64)
        last = int(draws.draw(table[last, None].clone(), u))
        tokens.append(last)
        if last in sampling.stop_token_ids:
            break
    _, log_probs, full, _ = draws.results()
    return Response(tokens, log_probs.tolist(), full.tolist(), finished=last in sampling.stop_token_ids)


def _cut(answer: Response, sampling: Sampling) -> Response:
    """Returns the answer up to its first stop token and ``max_tokens``, with all log-probs."""
    tokens = answer.tokens
    log_probs = [0.0] * len(tokens) if answer.log_probs is None else answer.log_probs
    if len(log_probs) != len(tokens):
        raise ValueError(f"a response of {len(tokens)} tokens has {len(log_probs)} log-probs")
    full = log_probs if answer.full_log_probs is None else answer.full_log_probs
    stops = [i + 1 for i, token in enumerate(tokens) if token in sampling.stop_token_ids]
    end = min([len(tokens), sampling.max_tokens, *stops])
    finished = end in stops or (answer.finished and end == len(tokens))
    return Response(tokens[:end], log_probs[:end], full[:end], finished)
