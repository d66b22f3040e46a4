"""One GPU's memory by turns: an engine sleeps while ranks on its GPU compute, and wakes before it is called.

The engine wakes in stages, its weights for a publication and its cache for requests, so that the memory of the cache
is free while weights arrive. Before each stage the ranks end their calls and give back the memory that torch keeps,
and that of buffers that are no values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from verl_fn.algorithms.workers import Workers
from verl_fn.backends.protocol import (
    Handle,
    HoldsBuffers,
    Ref,
    Request,
    RolloutBackend,
    Sample,
    TrainBackend,
    WeightSource,
)
from verl_fn.backends.through import Through
from verl_fn.state import Batch, Grads, Key, Metrics, Params, TokenOutputs, TrainState
from verl_fn.steps import Loss

PARTS = ("weights", "cache")


def by_turns(w: Workers, roles: Collection[str], settle: Callable[[], None]) -> Workers:
    """Returns workers whose engine sleeps while any of ``roles`` computes; it sleeps from now on.

    An algorithm needs no change: each call of a trainer puts the engine to sleep, and each call of the engine wakes
    what it needs. Weights are kept on the CPU, unless ``rollout.sleep(2)`` was called before. The calls ``map``,
    ``named``, ``weights`` and ``save`` read a few tensors at a time and leave the engine as it is.

    Args:
        w: the workers.
        roles: the roles whose ranks share the engine's GPUs.
        settle: blocks until these ranks have ended every call.

    Example:
        >>> from verl_fn.backends.mock import Mock, MockRollout
        >>> from verl_fn.steps import sgd
        >>> from verl_fn.state import Key, Sampling, requests_for
        >>> trainer = Mock(4, sgd(lambda count: 0.1))
        >>> state = trainer.init(Key.from_seed(0))
        >>> engine = MockRollout({(1,): [2, 3]})
        >>> w = by_turns(Workers({"actor": trainer}, engine, None, None, Sampling(4)), ["actor"], lambda: None)
        >>> w.rollout.publish(0, w.trainers["actor"].weights(state.params))
        >>> len(w.rollout.generate(requests_for([[1]], w.sampling, Key.from_seed(0)), version=0))
        1
    """
    members = {name: trainer for name, trainer in w.trainers.items() if name in roles}
    turns = Turns(w.rollout, tuple(members.values()), w.get, settle)
    turns.to_trainer(level=2)
    trainers = {name: _Trainer(trainer, turns) if name in roles else trainer for name, trainer in w.trainers.items()}
    return attrs.evolve(w, rollout=_Engine(w.rollout, turns), trainers=trainers)


class Turns:
    """Who uses the GPU.

    Args:
        engine: the rollout engine, awake.
        trainers: the backends on its GPUs.
        wait: blocks until references are available.
        settle: blocks until the ranks have ended every call.

    Attributes:
        awake: the parts of the engine that are awake.
    """

    def __init__(
        self,
        engine: RolloutBackend,
        trainers: Sequence[TrainBackend],
        wait: Callable[[Any], Any],
        settle: Callable[[], None],
    ) -> None:
        self._engine, self._trainers, self._wait, self._settle = engine, trainers, wait, settle
        self.awake = set(PARTS)

    def to_engine(self, parts: Iterable[str]) -> None:
        """Wakes parts of the engine: ``weights`` or ``cache``."""
        for part in PARTS:
            if part in parts and part not in self.awake:
                self._settle()
                self._wait([trainer.map(release, trainer) for trainer in self._trainers])
                self._wait(self._engine.wake([part]))
                self.awake.add(part)

    def to_trainer(self, level: int = 1) -> None:
        """Puts the engine to sleep, after the calls that it was given."""
        if self.awake:
            self._wait(self._engine.sleep(level))
            self.awake.clear()


def release(backend: object) -> None:
    """Gives memory that holds no values back to the GPU: a backend's buffers, and what torch keeps for later."""
    if isinstance(backend, HoldsBuffers):
        backend.free_buffers()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Engine(Through):
    """The engine, which wakes before each call."""

    def __init__(self, inner: RolloutBackend, turns: Turns) -> None:
        super().__init__(inner)
        self._turns = turns

    def publish(self, version: int, weights: Handle[WeightSource]) -> Ref[None]:
        self._turns.to_engine(["weights"])
        return super().publish(version, weights)

    def generate(self, requests: Sequence[Request], *, version: int | None = None) -> Ref[list[Sample]]:
        self._turns.to_engine(PARTS)
        return super().generate(requests, version=version)

    def stream(self, requests: Sequence[Request], *, version: int | None = None) -> Iterator[Sample]:
        self._turns.to_engine(PARTS)
        return super().stream(requests, version=version)

    def sleep(self, level: int = 2) -> None:
        self._turns.to_trainer(level)

    def wake(self, tags: Sequence[str] = ()) -> None:
        self._turns.to_engine(tags or PARTS)


@attrs.frozen(eq=False)
class _Trainer:
    """A training backend, for whose computation the engine sleeps; see ``TrainBackend``."""

    inner: TrainBackend
    turns: Turns

    def init(self, key: Key) -> Handle[TrainState]:
        return self._alone().init(key)

    def load_pretrained(self, folder: str | Path, key: Key) -> Handle[TrainState]:
        return self._alone().load_pretrained(folder, key)

    def forward(self, params: Handle[Params], batch: Batch, needs: Iterable[str]) -> Ref[TokenOutputs]:
        return self._alone().forward(params, batch, needs)

    def forward_backward(
        self, state: Handle[TrainState], batch: Batch, loss: Loss
    ) -> tuple[Handle[Grads], Ref[Metrics]]:
        return self._alone().forward_backward(state, batch, loss)

    def apply_update(
        self, state: Handle[TrainState], grads: Handle[Grads], *, donate: bool = True
    ) -> tuple[Handle[TrainState], Ref[Metrics]]:
        return self._alone().apply_update(state, grads, donate=donate)

    def place(
        self, state: Handle[TrainState], *, params: str | None = None, optimizer: str | None = None
    ) -> Handle[TrainState]:
        return self._alone().place(state, params=params, optimizer=optimizer)

    def restore(self, folder: str | Path) -> Handle[TrainState]:
        return self._alone().restore(folder)

    def save(self, state: Handle[TrainState], folder: str | Path) -> None:
        self.inner.save(state, folder)

    def named(self, value: Any) -> Any:
        return self.inner.named(value)

    def weights(self, params: Handle[Params]) -> Handle[WeightSource]:
        return self.inner.weights(params)

    def map(self, fn: Callable[..., Any], *values: Any, keep: Any = False) -> Any:
        # The backend stands for that of the process in which ``fn`` runs.
        return self.inner.map(fn, *(self.inner if value is self else value for value in values), keep=keep)

    def _alone(self) -> TrainBackend:
        self.turns.to_trainer()
        return self.inner
