"""The protocols of training backends and rollout engines; algorithms use nothing else of either.

Handles stand for values that stay in other processes. Weights to publish are a source: it lists its tensors, then
yields them bucket by bucket. ``Through`` is a base for engines that change some calls of another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Generic, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, cast, overload, runtime_checkable

import attrs
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from verl_fn.state import (
    Batch,
    Grads,
    Key,
    Metrics,
    Params,
    Request,
    Sample,
    Sampling,
    Slots,
    TokenOutputs,
    TrainState,
)
from verl_fn.steps import Loss, Optimizer

__all__ = [
    "BUCKET_BYTES", "Capabilities", "Chunk", "Freed", "Handle", "HoldsBuffers", "PublicationFailed", "Ref",
    "Reference", "Remote", "Request", "RolloutBackend", "Sample", "Sampling", "StaleWeightsError", "TensorSpec",
    "Through", "TrainBackend", "UnsupportedSampling", "WeightSource", "check_sampling", "here", "serves",
    "whole_leaves",
]  # fmt: skip

T = TypeVar("T")
P = ParamSpec("P")
BUCKET_BYTES = 256 * 2**20


NamedTensors: TypeAlias = Mapping[str, Tensor] | Iterator[tuple[str, Tensor]]


class Freed(LookupError):
    """A handle refers to a value that its worker does not hold."""


class Remote(Generic[T]):
    """Refers to a value that stays with the workers that made it, such as a training state or gradients.

    Each driver derives a class of its own. A handle can be passed to the backend that made it, and the fields that
    are handles too can be read.
    """

    __slots__ = ()

    @property
    def params(self: Remote[TrainState]) -> Remote[Params]:
        """The parameters of a training state."""
        raise NotImplementedError

    @property
    def base(self: Remote[Params]) -> Remote[Params]:
        """The parameters that are not trained."""
        raise NotImplementedError


class Reference(Generic[T]):
    """Refers to the result of a call, such as outputs or metrics; ``get`` of the workers waits for it and returns it.

    Each driver derives a class of its own.
    """

    __slots__ = ()


Handle: TypeAlias = T | Remote[T]
"""A value that a training backend made: the value itself in one process, a ``Remote`` where it stays with workers.

An algorithm passes handles on and reads ``state.params``; both kinds allow that. A backend accepts only the kind that
it returns itself; Python's types cannot express that."""

Ref: TypeAlias = T | Reference[T]
"""The result of a call: the value itself in one process, a ``Reference`` where the call runs in another one."""


def here(value: Handle[T]) -> T:
    """Returns a value that lies in this process, for backends that have no other values.

    Raises:
        TypeError: it is a handle to a value of another process.

    Example:
        >>> here(3)
        3
        >>> here(Remote())
        Traceback (most recent call last):
        TypeError: a Remote stands for a value of other processes; pass it to the backend that made it
    """
    if isinstance(value, Remote):
        name = type(value).__name__
        raise TypeError(f"a {name} stands for a value of other processes; pass it to the backend that made it")
    return value


@attrs.frozen
class TensorSpec:
    """The name, shape and dtype of a tensor to publish.

    Example:
        >>> TensorSpec("w", (2, 3), torch.float32).nbytes
        24
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """The number of rows; a scalar has one."""
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@attrs.frozen(eq=False)
class Chunk:
    """Consecutive rows of one tensor.

    Attributes:
        start: the number of the first of these rows; a scalar has one row.
        values: the rows.
        checksum: a hash of ``values``, in the receiver's dtype, where the receiver asked for it.
    """

    name: str
    start: int
    values: Tensor
    checksum: int | None = None


class WeightSource(Protocol):
    """Weights to send to a rollout engine.

    They do not change before the last bucket was taken: values in this process never change, and a process that
    sends weights to another runs no other call meanwhile.
    """

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors in the order in which they are sent: each once, tied ones under one name."""
        ...

    def buckets(self, max_bytes: int = BUCKET_BYTES, *, checked: bool = False) -> Iterator[tuple[Chunk, ...]]:
        """Yields all tensors, in buckets of at most ``max_bytes`` or of one row.

        A tensor is cut only if a sender's rows of it exceed the sender's part of a bucket. The tensors of a bucket
        may be overwritten by the next one, so copy what you keep.

        Args:
            max_bytes: the most bytes of a bucket.
            checked: give every chunk its checksum.
        """
        ...


@attrs.frozen
class Capabilities:
    """What an engine promises beyond the protocol; ``verl_fn.testing.check_rollout`` tests each promise.

    Attributes:
        repeatable: a request drawn again gives the same tokens.
        batch_independent: neither the order nor the number of the other requests changes a response, except at draws
            that ``near_ties`` counts.
        versions_per_token: new weights may arrive during a response, and it goes on with them. Each token has the
            version that drew it, and the log-prob of those weights given the tokens before it. Without this, all
            tokens of a response have one version.
        top_k: the field of ``Sampling`` is obeyed; otherwise a request that sets it is refused.
        top_p: as ``top_k``.
        stop_token_ids: as ``top_k``.
        routed_experts: samples have the experts of their tokens.
    """

    repeatable: bool = True
    batch_independent: bool = True
    versions_per_token: bool = False
    top_k: bool = True
    top_p: bool = True
    stop_token_ids: bool = True
    routed_experts: bool = False


class StaleWeightsError(RuntimeError):
    """The engine's weights are incomplete, or not of the version that a request asked for."""


class PublicationFailed(StaleWeightsError):
    """A publication in flight has failed, so there are no weights to answer requests with until another succeeds."""


class UnsupportedSampling(ValueError):
    """A request asks for a way of sampling that the engine's ``capabilities`` exclude."""


class RolloutBackend(Protocol):
    """Answers prompts of token ids with responses of token ids and their log-probabilities."""

    @property
    def version(self) -> int | None:
        """The version of the weights that requests are answered with; None where there are none."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What the engine promises beyond this protocol."""
        ...

    def publish(self, version: int, weights: Handle[WeightSource]) -> Ref[None]:
        """Replaces the engine's weights.

        Weights with other names or shapes than the model's are refused before any weight is overwritten. After a
        later failure, the engine answers no request until a publication succeeds.

        An engine with ``versions_per_token`` lets requests wait between two tokens meanwhile; they go on with the
        new weights; after a failure they end with ``PublicationFailed``. So another thread may publish during a call.

        Raises:
            ValueError: the names or shapes are not the model's.
            IncompleteWeights: a part is missing, arrived twice, or has other values than were sent.
        """
        ...

    def generate(self, requests: Sequence[Request], *, version: int | None = None) -> Ref[list[Sample]]:
        """Returns the samples of all requests, ordered by request and by number.

        Sample i of a request draws from ``request.key.fold_in(i)``.

        Args:
            requests: prompts, with their way of sampling.
            version: the version that the weights must have; with ``versions_per_token``, the oldest that they may
                have. None accepts any.

        Raises:
            StaleWeightsError: the engine holds another version than ``version``, or none.
            UnsupportedSampling: a request uses a field of ``Sampling`` that ``capabilities`` excludes.
        """
        ...

    def stream(self, requests: Sequence[Request], *, version: int | None = None) -> Iterator[Sample]:
        """Returns an iterator over the samples that ``generate`` would return, in the order in which they end.

        Another call of the engine may interrupt a stream that was not read to its end. Its next sample then raises
        ``StaleWeightsError``.

        Args:
            requests: as for ``generate``. Their ids differ, since only the id tells whose sample it is.
            version: as for ``generate``.

        Raises:
            StaleWeightsError: as ``generate``, at the latest where the first sample is read.
            UnsupportedSampling: as ``generate``, at the latest where the first sample is read.
        """
        ...

    def sleep(self, level: int = 2) -> Ref[None]:
        """Frees the memory of caches at level 1, of caches and weights at level 2."""
        ...

    def wake(self, tags: Sequence[str] = ()) -> Ref[None]:
        """Gets ready for requests after ``sleep``; after level 2, weights must be published again.

        Args:
            tags: which of ``weights`` and ``cache`` to allocate; by default both.
        """
        ...


def serves(held: int | None, version: int | None, capabilities: Capabilities) -> bool:
    """Returns whether an engine may answer a request.

    Args:
        held: the version of the engine's weights; None where there are none.
        version: the version that the request asks for; None for any.
        capabilities: the engine's. With ``versions_per_token``, newer weights than the ones asked for will do.

    Example:
        >>> plain, in_flight = Capabilities(), Capabilities(versions_per_token=True)
        >>> serves(4, 3, plain), serves(4, 3, in_flight), serves(4, 5, in_flight), serves(None, None, in_flight)
        (False, True, False, False)
    """
    if held is None or version is None:
        return held is not None
    return held >= version if capabilities.versions_per_token else held == version


def check_sampling(requests: Sequence[Request], capabilities: Capabilities) -> None:
    """Raises an error for requests that an engine does not support.

    Raises:
        UnsupportedSampling: a request uses a field of ``Sampling`` that ``capabilities`` exclude.

    Example:
        >>> from verl_fn.state import Key, Sampling, requests_for
        >>> asked = requests_for([[1]], Sampling(8, top_k=5), Key.from_seed(0))
        >>> check_sampling(asked, Capabilities(top_k=False))
        Traceback (most recent call last):
        verl_fn.backends.protocol.UnsupportedSampling: request 0 sets top_k=5, and this
        engine does not support top_k
    """
    for request in requests:
        s = request.sampling
        used = {"top_k": s.top_k > 0, "top_p": s.top_p < 1.0, "stop_token_ids": bool(s.stop_token_ids)}
        for name in used:
            if used[name] and not getattr(capabilities, name):
                raise UnsupportedSampling(
                    f"request {request.id} sets {name}={getattr(s, name)}, and this engine does not support {name}"
                )


class Through:
    """A rollout engine that passes every call on to another one; see ``RolloutBackend``.

    Args:
        inner: the engine that answers.
    """

    def __init__(self, inner: RolloutBackend) -> None:
        self.inner = inner

    @property
    def version(self) -> int | None:
        """The version of the engine's weights."""
        return self.inner.version

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do."""
        return self.inner.capabilities

    def publish(self, version: int, weights: Handle[WeightSource]) -> Ref[None]:
        """Gives weights to the engine."""
        return self.inner.publish(version, weights)

    def generate(self, requests: Sequence[Request], *, version: int | None = None) -> Ref[list[Sample]]:
        """Asks the engine for samples."""
        return self.inner.generate(requests, version=version)

    def stream(self, requests: Sequence[Request], *, version: int | None = None) -> Iterator[Sample]:
        """Asks the engine for samples as they end."""
        return self.inner.stream(requests, version=version)

    def sleep(self, level: int = 2) -> Ref[None]:
        """Has the engine free memory."""
        return self.inner.sleep(level)

    def wake(self, tags: Sequence[str] = ()) -> Ref[None]:
        """Has the engine allocate memory again."""
        return self.inner.wake(tags)


class TrainBackend(Protocol):
    """Pure functions of training states. ``verl_fn.testing`` checks the laws that they obey."""

    def init(self, key: Key) -> Handle[TrainState]:
        """Returns a state with random parameters drawn from ``key``."""
        ...

    def load_pretrained(self, folder: str | Path | None = None, key: Key | None = None) -> Handle[TrainState]:
        """Returns a fresh state with the weights of a Hugging Face folder, by default of the backend's own."""
        ...

    def forward(self, params: Handle[Params], batch: Batch, needs: Iterable[str]) -> Ref[TokenOutputs]:
        """Returns the outputs that ``needs`` names, without gradients.

        They are given for every token with ``response_mask``, or for every row.
        """
        ...

    def forward_backward(
        self, state: Handle[TrainState], batch: Batch, loss: Loss
    ) -> tuple[Handle[Grads], Ref[Metrics]]:
        """Returns the gradients of the loss's weighted sum over the batch, and metrics with the sum as ``loss``."""
        ...

    def apply_update(
        self,
        state: Handle[TrainState],
        grads: Handle[Grads],
        *,
        donate: bool = True,
        optimizer: Optimizer | None = None,
    ) -> tuple[Handle[TrainState], Ref[Metrics]]:
        """Returns the next state and metrics; ``state`` and ``grads`` are donated unless ``donate`` is False.

        Args:
            optimizer: computes this update in place of the backend's own, to change hyperparameters from call to
                call. It must continue the state's optimizer tree. The next call has the backend's own again.
        """
        ...

    def place(
        self, state: Handle[TrainState], *, params: str | None = None, optimizer: str | None = None
    ) -> Handle[TrainState]:
        """Returns the same state with the parameters or the optimizer tree on another device."""
        ...

    def save(self, state: Handle[TrainState], folder: str | Path, *, later: bool = False) -> None:
        """Writes the state into ``folder``; the folder is then also a Hugging Face model folder.

        If the save may end later, it returns when the state is copied, and the folder is whole after ``saved``.
        """
        ...

    def saved(self) -> None:
        """Waits until a save that was to end later is whole."""
        ...

    def restore(self, folder: str | Path) -> Handle[TrainState]:
        """Returns the state that ``save`` wrote, bitwise."""
        ...

    def named(self, value: Handle[Params] | Handle[Grads] | Handle[Slots]) -> Ref[NamedTensors]:
        """Returns whole tensors by canonical name, to compare, edit or export them.

        A sharded tensor is gathered when it is read, and all ranks read together. ``dict(named)`` holds all tensors
        at once.
        """
        ...

    def weights(self, params: Handle[Params]) -> Handle[WeightSource]:
        """Returns the parameters for ``RolloutBackend.publish``, adapters merged in."""
        ...

    @overload
    def map(self, fn: Callable[P, T], *values: object, keep: Literal[True]) -> Handle[T]: ...
    @overload
    def map(self, fn: Callable[P, T], *values: object, keep: Literal[False] = False) -> Ref[T]: ...
    def map(self, fn: Callable[P, T], *values: object, keep: bool = False) -> Handle[T] | Ref[T]:
        """Applies ``fn`` to values where they lie, on every shard: to compare, edit, add or hash them.

        Args:
            fn: takes the values, or each rank's shards of them.
            values: values of this backend, or any others. In place of this backend, ``fn`` gets the backend of its
                own process.
            keep: leave the result with the workers, as the values are, and return a handle to it.
        """
        ...


@runtime_checkable
class HoldsBuffers(Protocol):
    """A training backend with memory on its device that is no value of anybody, such as copies that compute."""

    def free_buffers(self) -> None:
        """Frees this memory; a later call allocates what it needs, and no result changes."""
        ...


def whole_leaves(backend: TrainBackend, value: object) -> Iterator[tuple[str, object]]:
    """Yields the leaves of a training state, or of a part of one, by path; tensors are whole, one after the other.

    Sharded tensors are gathered through ``backend.named``, so all ranks go through them together. It is for functions
    that run where the value lies: ``backend.map(fn, backend, value)``.

    Example:
        >>> from verl_fn.steps import sgd
        >>> from verl_fn.testing import Mock
        >>> backend = Mock(2, sgd(lambda count: 0.1))
        >>> [path for path, leaf in whole_leaves(backend, backend.init(Key.from_seed(0)))][:3]
        [".params['logits']", ".params['values']", '.scheduler']
    """

    def is_named(part: object) -> bool:
        return isinstance(part, (Params, Grads, Slots))

    for path, part in pytree.tree_flatten_with_path(value, is_leaf=is_named)[0]:
        place = pytree.keystr(path)
        if not isinstance(part, (Params, Grads, Slots)):
            yield place, part
            continue
        named = cast(NamedTensors, backend.named(part))
        for name, t in named.items() if isinstance(named, Mapping) else named:
            yield f"{place}[{name!r}]", t
        if isinstance(part, Params):
            yield from ((f"{place}.buffers[{name!r}]", b) for name, b in part.buffers.items())
