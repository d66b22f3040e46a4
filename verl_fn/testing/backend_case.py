"""A training backend under test, and its laws of states: persistence, donation, zero, restore and threads."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar, cast

import attrs
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from verl_fn.backends.protocol import Handle, NamedTensors, TrainBackend
from verl_fn.state import (
    Batch,
    DonatedError,
    Grads,
    Key,
    Metrics,
    Params,
    Slots,
    TokenOutputs,
    TrainState,
    metrics,
    tree,
)
from verl_fn.steps import Loss, ppo_clip

from .violation import LawViolation, require, require_close, require_equal, save_once, shared_folder, untouched

T = TypeVar("T")
CALLS = 3  # of each thread


@attrs.frozen(eq=False)
class BackendCase:
    """A backend under test and the arguments of its calls. States may be handles; ``read`` resolves them.

    Attributes:
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
        self, state: Handle[TrainState], grads: Handle[Grads], *, donate: bool = True, **settings: Any
    ) -> tuple[Handle[TrainState], Metrics]:
        """Calls ``apply_update``."""
        new, reported = self.backend.apply_update(state, grads, donate=donate, **settings)
        return new, self.get(reported)

    def next(self, state: Handle[TrainState]) -> Handle[TrainState]:
        """Returns the state after an update that does not donate ``state``."""
        return self.update(state, self.gradients(state)[0], donate=False)[0]

    def trained(self, name: str) -> Handle[TrainState]:
        """Returns a state after one update: value heads start as zeros, so new states of critics do not differ."""
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

    def made(self, fn: Callable[..., Any], *values: Any) -> Any:
        """Applies ``fn`` on the workers that hold the values, and returns the result or a handle to it."""
        return self.backend.map(fn, *values, keep=True)

    def added(
        self, state: Handle[TrainState], parts: Iterable[Batch], loss: Loss | None = None
    ) -> tuple[Grads, Metrics]:
        """Returns the sums of the gradients and of the metrics of several batches."""
        results = [self.gradients(state, part, loss) for part in parts]
        total = results[0][0]
        for grads, _ in results[1:]:
            total = self.made(operator.add, total, grads)
        return self.read(total), metrics.merge(*(reported for _, reported in results))

    def require_close(
        self, law: str, what: str, expected: Any, actual: Any, cause: str, floor: float | None = 1.0
    ) -> None:
        """Requires that values agree within the tolerance of the case, as ``violation.require_close`` does."""
        require_close(law, what, expected, actual, cause, tolerance=self.tolerance, floor=floor)

    def require_agreement(
        self,
        law: str,
        what: str,
        expected: tuple[Handle[Grads], Metrics],
        actual: tuple[Handle[Grads], Metrics],
        cause: str,
    ) -> None:
        """Requires that gradients and metrics agree within the tolerance of the case."""
        self.require_close(law, what, metrics.to_floats(expected[1]), metrics.to_floats(actual[1]), cause)
        self.require_close(law, what, expected[0], actual[0], cause, floor=None)


def whole(backend: TrainBackend, value: T) -> T:
    """Returns a value with whole tensors, gathered by ``backend.named``; all ranks call it together."""

    def is_named(part: object) -> bool:
        return isinstance(part, (Params, Grads, Slots))

    def gathered(part: Any) -> Any:
        return attrs.evolve(part, leaves=dict(cast(NamedTensors, backend.named(part)))) if is_named(part) else part

    return pytree.tree_map(gathered, value, is_leaf=is_named)


def scaled(factor: float) -> Callable[[Grads], Grads]:
    """Makes a function that multiplies gradients by ``factor`` and that can be sent to workers."""
    return operator.methodcaller("scale", factor)


def _require_no_copies(law: str, observation: str, reported: Metrics, cause: str) -> None:
    """Requires that an update with donation copied no buffers; ``observation`` ends the error message."""
    copies = reported["perf/residency_copies"].value if "perf/residency_copies" in reported else 0
    require(copies == 0, law, f"{copies:.0f} buffers were copied, {observation}", cause)


def check_persistence(case: BackendCase, first: Handle[TrainState], second: Handle[TrainState]) -> None:
    """Checks that results depend on the state that is passed, and that later calls do not change them."""
    third = case.next(first)
    cached = "a compute copy or a module that still holds the parameters of an earlier call"
    reused = "buffers that are reused while the result of an earlier call exists"
    calls: dict[str, Callable[[Handle[TrainState]], Any]] = {
        "forward": lambda state: case.outputs(state.params),
        "forward_backward": lambda state: case.gradients(state)[0],
    }
    for name, call in calls.items():
        result = call(first)
        expected = tree.snapshot(case.read(result))
        for what, state in {"another state": second, "the state after an update": third}.items():
            other = case.read(call(state))
            require(
                not tree.equal(other, expected),
                "Persistence",
                f"{name} of {what} has the result of the first",
                cached,
            )
            earlier = f"the result of {name}, after another call with {what},"
            require_equal("Persistence", earlier, expected, case.read(result), reused)
            again = case.read(call(first))
            require_equal("Persistence", f"{name} with the first state, after {what},", expected, again, cached)
    _edited(case, first)


def _edited(case: BackendCase, state: Handle[TrainState]) -> None:
    """Checks that calls see an edit in place of all parameters, trained or not."""
    edited = case.made(tree.snapshot, state)
    case.outputs(edited.params)
    before = _identity(case, edited)
    case.get(case.backend.map(_scale, edited))
    seen, now = case.outputs(edited.params), _identity(case, edited)
    # Equal values in other tensors, unknown to any cache.
    expected = case.outputs(case.made(tree.snapshot, edited).params)
    cached = "a copy that is kept for a tensor, or its address, whatever was written to it since"
    require_equal("Persistence", "forward after an edit of the parameters in place", expected, seen, cached)
    require(
        now is None or now != before,
        "Persistence",
        "after an edit of the parameters in place, the weights that engines keep have the identity from before",
        "a checksum that is kept for a tensor, whatever was written to it since",
    )


def _identity(case: BackendCase, state: Handle[TrainState]) -> str | None:
    """Returns what identifies the weights that engines keep: the model without adapters, or a frozen tower."""
    source = case.backend.weights(state.params)
    held = getattr(source, "held", None) or source
    named = [getattr(held, name, None) for name in ("apart", "kept")]
    return " ".join(str(apart.identify()) for apart in named if apart is not None) or None


def _scale(state: TrainState) -> None:
    for t in state.params.values():
        t.mul_(0.5)


def check_donation(case: BackendCase, state: Handle[TrainState]) -> None:
    """Checks that donated values can no longer be used, and that values which share their buffers do not change."""
    spare = case.made(tree.snapshot, state)
    grads, _ = case.gradients(spare)
    with untouched("Donation", "apply_update with donate=False", case.read, state=spare, grads=grads):
        expected, _ = case.update(spare, grads, donate=False)
    shared = {
        "parameters": case.made(operator.attrgetter("params"), spare),
        "optimizer state": case.made(operator.attrgetter("optimizer"), spare),
        "gradients": case.made(Grads, grads),
    }
    before = {name: tree.snapshot(case.read(value)) for name, value in shared.items()}
    new, _ = case.update(spare, grads)
    written = "buffers written although other references to them exist"
    for name, value in shared.items():
        require_equal(
            "Donation", f"after a donation, a reference to its {name}", before[name], case.read(value), written
        )
    uses: dict[str, Callable[[], object]] = {
        "reading the state": lambda: spare.params,
        "reading the gradients": lambda: case.read(grads),
        "forward_backward with the state": lambda: case.gradients(spare),
        "apply_update with the state": lambda: case.update(spare, grads),
    }
    for name, use in uses.items():
        try:
            use()
        except DonatedError:
            continue
        cause = "an update that works in place without donate()"
        raise LawViolation("Donation", f"{name} after its donation raises no DonatedError", cause)
    depends = "an update that depends on donation"
    require_equal("Donation", "the state after a donated update", case.read(expected), case.read(new), depends)
    _in_place(case, state)


def _in_place(case: BackendCase, state: Handle[TrainState]) -> None:
    """Checks that buffers without other references are reused, and that caches notice the update."""
    expected = case.next(state)
    alone = case.made(tree.snapshot, state)
    grads, _ = case.gradients(alone)
    new, reported = case.update(alone, grads)
    references = "the backend keeps references to the state or the gradients of its last call"
    _require_no_copies("Donation", "although the check has no other references to them", reported, references)
    # The donated state comes first: a call with the expected state would replace the cached one.
    outputs = case.outputs(new.params)
    mistaken = "a cache that takes a reused buffer for unchanged parameters"
    require_equal("Donation", "forward after a donated update", case.outputs(expected.params), outputs, mistaken)


def check_zero(case: BackendCase, state: Handle[TrainState]) -> None:
    """Checks that nothing changes without a learning signal, or with gradients that are not finite."""
    batch, backend = case.batch, case.backend
    silent = batch.with_tokens(loss_weight=torch.zeros(batch.num_tokens)).with_rows(
        row_weight=torch.zeros(len(batch))
    )
    cases = {"zero loss_weight and row_weight": (silent, case.loss)}
    if "logprobs" in case.loss.needs and "old_log_probs" in batch:
        cases["zero advantages"] = (batch.with_tokens(advantages=torch.zeros(batch.num_tokens)), ppo_clip())
    for name, (data, loss) in cases.items():
        grads, _ = case.gradients(state, data, loss)
        top = float(case.read(grads).global_norm())
        require(top == 0.0, "Zero", f"with {name} the gradient's norm is {top:.3g}", "a term that is not in the loss")
    fresh = backend.init(case.key.fold_in("zero"))
    nothing = case.made(scaled(0.0), case.gradients(fresh)[0])
    require_equal(
        "Zero",
        "zero gradients with a new optimizer state: the parameter",
        case.read(fresh).params,
        case.read(case.update(fresh, nothing, donate=False)[0]).params,
        "weight decay; give the backend under test an optimizer without",
    )
    grads, _ = case.gradients(state)
    for what, spoil in {"nan": scaled(float("nan")), "infinities in one tensor": _with_infinities}.items():
        for donate in (False, True):
            _skipped(case, state, what, case.made(spoil, grads), donate=donate)


def _skipped(case: BackendCase, state: Handle[TrainState], what: str, broken: Handle[Grads], *, donate: bool) -> None:
    """Checks that an update with gradients that are not finite changes only the step."""
    skipped, reported = case.update(case.made(tree.snapshot, state), broken, donate=donate)
    before = case.read(state)
    require_equal(
        "Zero",
        f"an update with gradients that are not finite ({what}): the state",
        attrs.evolve(before, step=before.step + 1),
        case.read(skipped),
        "an update that is not skipped, or that moves the schedule or the optimizer's count all the same",
    )
    counted = "update_skipped" in reported and reported["update_skipped"].value == 1.0
    require(counted, "Zero", "update_skipped is not 1 after a skipped update", "a skip that is not reported")


def _with_infinities(grads: Grads) -> Grads:
    """Returns the gradients with the last tensor filled with infinities (not nan)."""
    last = list(grads)[-1]
    return Grads({name: g * 0.0 + torch.inf if name == last else g for name, g in grads.items()})


def check_restore(case: BackendCase, state: Handle[TrainState]) -> None:
    """Checks that a restored state equals the saved one, and that the next update is the same."""
    backend = case.backend
    # After a skipped update, the step and the position of the schedule differ.
    broken = case.made(scaled(float("nan")), case.gradients(state)[0])
    state, _ = case.update(state, broken, donate=False)
    with shared_folder() as folder:
        with untouched("Restore", "save", case.read, state=state):
            save_once(backend, state, folder)
        restored = backend.restore(folder)
    lost = "optimizer moments, the schedule's position, the key or the step left out of the file"
    require_equal("Restore", "the restored state", case.read(state), case.read(restored), lost)
    expected, (grads, _) = case.next(state), case.gradients(restored)
    new, reported = case.update(restored, grads)
    require_equal("Restore", "the update after restoring", case.read(expected), case.read(new), lost)
    views = "tensors that are views of a file's memory"
    _require_no_copies("Restore", "although only the restored state references them", reported, views)


def check_threads(case: BackendCase, first: Handle[TrainState], second: Handle[TrainState]) -> None:
    """Checks calls from two threads at once, each with a state of its own, against calls from one thread.

    Only backends of one process promise this: ranks must make their calls in one order."""
    if not isinstance(first, TrainState) or (dist.is_available() and dist.is_initialized()):
        return
    cause = "a model or a cache that the calls share; hold a lock for the length of a call"

    def results(state: Handle[TrainState], start: Barrier) -> list[tuple[TokenOutputs, Grads]]:
        start.wait()
        return [(case.outputs(state.params), case.read(case.gradients(state)[0])) for _ in range(CALLS)]

    # The calls to compare with are made by a thread too: the main one may have another number of OpenMP threads.
    with ThreadPoolExecutor(1) as alone:
        expected = [alone.submit(results, state, Barrier(1)).result() for state in (first, second)]
    with ThreadPoolExecutor(2) as both:
        start = Barrier(2)
        pending = [both.submit(results, state, start) for state in (first, second)]
    for future, wanted in zip(pending, expected, strict=True):
        if (error := future.exception()) is not None:
            raise LawViolation("Purity", f"a call raises while another thread makes one: {error!r}", cause) from error
        what = "forward and forward_backward, called from two threads with two states,"
        require_equal("Purity", what, wanted, future.result(), cause)
