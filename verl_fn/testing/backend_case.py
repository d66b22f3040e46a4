"""What ``check_backend`` checks, and comparisons of gradients and metrics."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar, cast

import attrs
from torch.utils import _pytree as pytree

from verl_fn.backends.protocol import Handle, NamedTensors, TrainBackend
from verl_fn.state import Batch, Grads, Key, Metrics, Params, Slots, TokenOutputs, TrainState, metrics, snapshot, tree
from verl_fn.steps import Loss

from .violation import require, require_close

T = TypeVar("T")


@attrs.frozen(eq=False)
class BackendCase:
    """A backend under test and the arguments of its calls. States may be handles; ``read`` resolves them.

    Attributes:
        backend: the backend under test.
        loss: the loss that is differentiated.
        batch: the batch that is passed to the backend.
        tolerance: the largest relative difference between splits or layouts.
        key: the states and splits are drawn from it.
        get: returns the value behind a reference.
    """

    backend: TrainBackend
    loss: Loss
    batch: Batch
    tolerance: float
    key: Key
    get: Callable[[Any], Any]

    def gradients(
        self, state: Handle[TrainState], batch: Batch | None = None, loss: Loss | None = None
    ) -> tuple[Handle[Grads], Metrics]:
        """Calls ``forward_backward``; by default with the batch and the loss of the case."""
        grads, reported = self.backend.forward_backward(
            state, self.batch if batch is None else batch, loss or self.loss
        )
        return grads, self.get(reported)

    def outputs(
        self, params: Handle[Params], batch: Batch | None = None, needs: frozenset[str] | None = None
    ) -> TokenOutputs:
        """Calls ``forward``; by default with the batch of the case and the outputs that its loss needs."""
        batch = self.batch if batch is None else batch
        return self.get(self.backend.forward(params, batch, self.loss.needs if needs is None else needs))

    def update(
        self, state: Handle[TrainState], grads: Handle[Grads], *, donate: bool = True
    ) -> tuple[Handle[TrainState], Metrics]:
        """Calls ``apply_update``."""
        new, reported = self.backend.apply_update(state, grads, donate=donate)
        return new, self.get(reported)

    def next(self, state: Handle[TrainState]) -> Handle[TrainState]:
        """Returns the state after an update that does not donate ``state``."""
        return self.update(state, self.gradients(state)[0], donate=False)[0]

    def trained(self, name: str) -> Handle[TrainState]:
        """Returns a state after one update: value heads start as zeros, so new states of a critic would not differ.

        Args:
            name: other names give other states.
        """
        fresh = self.backend.init(self.key.fold_in(name))
        state = self.next(fresh)
        if tree.equal(self.read(state).params, self.read(fresh).params):
            raise ValueError(
                "the first update changed nothing; give the optimizer a learning rate above 0 from the start"
            )
        return state

    def read(self, value: Any) -> Any:
        """Returns the value itself or the value behind a handle, with whole tensors."""
        if isinstance(value, tuple):
            return tuple(map(self.read, value))
        if isinstance(value, (Batch, TokenOutputs, dict)):
            return value  # These are never handles.
        return self.get(self.backend.map(whole, self.backend, value))

    def copy(self, value: Any) -> Any:
        """Returns a copy of the value, or of the value behind a handle."""
        return snapshot(self.read(value))

    def made(self, fn: Callable[..., Any], *values: Any) -> Any:
        """Applies ``fn`` on the workers that hold the values, and returns the result or a handle to it."""
        return self.backend.map(fn, *values, keep=True)


def whole(backend: TrainBackend, value: T) -> T:
    """Returns a value with whole tensors, gathered by ``backend.named``; all ranks call it together."""

    def is_named(part: object) -> bool:
        return isinstance(part, (Params, Grads, Slots))

    def gathered(part: Any) -> Any:
        return attrs.evolve(part, leaves=dict(cast(NamedTensors, backend.named(part)))) if is_named(part) else part

    return pytree.tree_map(gathered, value, is_leaf=is_named)


def require_no_copies(law: str, observation: str, reported: Metrics, cause: str) -> None:
    """Requires that an update with donation copied no buffers.

    Args:
        law: the name of the law.
        observation: why none should be copied; it ends the error message.
        reported: the metrics of the update.
        cause: what usually causes copies.

    Raises:
        LawViolation: the update copied buffers.
    """
    copies = reported["perf/residency_copies"].value if "perf/residency_copies" in reported else 0
    require(copies == 0, law, f"{copies:.0f} buffers were copied, {observation}", cause)


def scaled(factor: float) -> Callable[[Grads], Grads]:
    """Makes a function that multiplies gradients by ``factor`` and that can be sent to workers."""
    return operator.methodcaller("scale", factor)


def require_agreement(
    case: BackendCase,
    law: str,
    what: str,
    expected: tuple[Handle[Grads], Metrics],
    actual: tuple[Handle[Grads], Metrics],
    cause: str,
) -> None:
    """Requires that gradients and metrics agree within the tolerance of the case.

    Raises:
        LawViolation: they do not.
    """
    expected_metrics, actual_metrics = metrics.to_floats(expected[1]), metrics.to_floats(actual[1])
    require_close(law, what, expected_metrics, actual_metrics, cause, tolerance=case.tolerance, floor=1.0)
    require_close(law, what, expected[0], actual[0], cause, tolerance=case.tolerance)


def merged(results: list[tuple[Handle[Grads], Metrics]]) -> Metrics:
    """Adds the metrics of several calls of ``gradients``."""
    return metrics.merge(*(reported for _, reported in results))
