"""The laws of a training backend: ``check_backend``."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

from verl_fn.algorithms.workers import get_here
from verl_fn.backends.protocol import Freed, TrainBackend
from verl_fn.state import (
    PER_ROW,
    Batch,
    DonatedError,
    Grads,
    Key,
    Metrics,
    Params,
    TokenOutputs,
    TrainState,
    metrics,
    snapshot,
    tree,
)
from verl_fn.steps import Loss, Term, aggregate_rows, ppo_clip, total_loss
from verl_fn.steps import loss as as_loss

from .builders import some_splits, tiny_batch
from .violation import (
    LawViolation,
    repeatable,
    require,
    require_close,
    require_equal,
    same,
    shared_folder,
    untouched,
    whole,
)


def check_backend(
    backend: TrainBackend,
    other: TrainBackend | None = None,
    *,
    loss: Loss | None = None,
    batch: Batch | None = None,
    tolerance: float = 1e-4,
    key: Key | None = None,
    get: Callable[[Any], Any] = get_here,
) -> None:
    """Check a training backend against the laws.

    Make it with an optimizer without weight decay, whose learning rate is above 0 from the first update on, and
    with a token budget that splits the batch (``tiny_batch()`` has some 50 tokens, its longest row at most 16).

    * Signature, Purity, Split invariance, Persistence, Donation, Zero, Restore: the backend by itself.
    * Derivative, where the backend has ``loss_fn``: its ``torch.func`` gradient is that of ``forward_backward``, and so is
      its derivative along that gradient in forward mode.
    * Layout, with ``other``: the same model on another backend, layout or number of ranks. Outputs, gradients
      and metrics agree, and each restores what the other saved.

    Args:
        loss: what is differentiated; by default ``ppo_clip()``. A critic wants ``value_clip()``.
        batch: by default ``tiny_batch()``, whose token ids are below 8.
        tolerance: how far splits and layouts may differ, relative to the largest value of each tensor. bf16 wants
            about 0.05.
        key: other keys give other states and splits.
        get: fetches what calls return, for a backend that returns references and whose states are handles, which
            are looked at through its ``map``: ``workers.get``.

    Raises:
        LawViolation: a law is broken.

    Example:
        >>> from verl_fn.backends.mock.train import Mock
        >>> from verl_fn.steps import adamw, constant
        >>> check_backend(Mock(8, adamw(constant(0.01), weight_decay=0.0), max_tokens=24))
        >>> check_backend(Mock(8, adamw(constant(0.01), weight_decay=0.1), max_tokens=24))
        Traceback (most recent call last):
        verl_fn.testing.violation.LawViolation: Zero: zero gradients from fresh optimizer state: ... differs at ['logits'] ...
    """
    batch = tiny_batch() if batch is None else batch
    case = _Case(backend, loss or ppo_clip(), batch, tolerance, key or Key.from_seed(0), get)
    try:
        _purity(case)
        first, second = case.trained("first"), case.trained("second")
        _signature(case, first)
        _persistence(case, first, second)
        _splits(case, first)
        _groups(case, first)
        _derivative(case, first)
        _donation(case, first)
        _zero(case, first)
        _restore(case, first)
        if other is not None:
            _layout(case, attrs.evolve(case, backend=other), first)
    except Freed as error:
        cause = "a value that is dropped while a handle to it is held"
        raise LawViolation("Persistence", f"a handle stands for nothing: {error}", cause) from error


@attrs.frozen(eq=False)
class _Case:
    """What is checked, and with what. States and gradients may be handles, which ``read`` sees through."""

    backend: TrainBackend
    loss: Loss
    batch: Batch
    tolerance: float
    key: Key
    get: Callable[[Any], Any]

    def gradients(
        self, state: TrainState, batch: Batch | None = None, loss: Loss | None = None
    ) -> tuple[Grads, Metrics]:
        grads, found = self.backend.forward_backward(state, self.batch if batch is None else batch, loss or self.loss)
        return grads, self.get(found)

    def outputs(
        self, params: Params, batch: Batch | None = None, needs: frozenset[str] | None = None
    ) -> TokenOutputs:
        batch = self.batch if batch is None else batch
        return self.get(self.backend.forward(params, batch, self.loss.needs if needs is None else needs))

    def update(self, state: TrainState, grads: Grads, *, donate: bool = True) -> tuple[TrainState, Metrics]:
        new, found = self.backend.apply_update(state, grads, donate=donate)
        return new, self.get(found)

    def next(self, state: TrainState) -> TrainState:
        """The state after an update that leaves ``state`` alone."""
        return self.update(state, self.gradients(state)[0], donate=False)[0]

    def trained(self, name: str) -> TrainState:
        """A state whose optimizer has seen something. Heads of value models start as zeros, where all look alike."""
        fresh = self.backend.init(self.key.fold_in(name))
        state = self.next(fresh)
        if same(self.read(state).params, self.read(fresh).params):
            raise ValueError(
                "the first update changed nothing; give the optimizer a learning rate above 0 from the start"
            )
        return state

    def read(self, value: Any) -> Any:
        """What a value or a handle holds, with whole tensors."""
        if isinstance(value, tuple):
            return tuple(map(self.read, value))
        if isinstance(value, (Batch, TokenOutputs, dict)):
            return value  # never a handle
        return self.get(self.backend.map(whole, value))

    def copy(self, value: Any) -> Any:
        """What a value holds now, whatever becomes of it."""
        return snapshot(self.read(value))

    def made(self, fn: Callable[..., Any], *values: Any) -> Any:
        """A value made of others where they lie."""
        return self.backend.map(fn, *values, keep=True)


def _signature(case: _Case, state: TrainState) -> None:
    found = case.outputs(state.params)
    names, silent = set(found.by_name), case.batch["response_mask"] == 0
    tokens, rows = case.batch.num_tokens, len(case.batch)
    require(
        names == set(case.loss.needs), "Signature",
        f"forward gives {sorted(names)} where {sorted(case.loss.needs)} are needed", "an option that is passed over",
    )  # fmt: skip
    for name, t in found.by_name.items():
        require(
            t.shape == ((rows if name in PER_ROW else tokens),) and t.dtype == torch.float32, "Signature",
            f"{name} is {t.dtype}{tuple(t.shape)} where the batch has {tokens} tokens in {rows} rows",
            "compute dtype that was not cast to float32, or targets that were not spread over the batch",
        )  # fmt: skip
        if name in PER_ROW:
            continue
        top = float(torch.where(silent, t, 0.0).abs().max())
        require(top == 0.0, "Signature", f"{name} reaches {top:.3g} where response_mask is 0", "a missing mask")
    moved = case.read(case.backend.place(state, params="cpu", optimizer="cpu"))
    here = tree.map_tensors(lambda t: t.cpu(), case.read(state))
    require_equal("Signature", "a state placed on the CPU", here, moved, "a place() that drops or casts something")
    found_names = case.get(case.backend.map(list, case.gradients(state)[0]))
    trained = case.get(case.backend.map(_trained, state))
    require(
        found_names == trained, "Signature",
        f"gradients are named {sorted(set(found_names) ^ set(trained))[:5]} unlike trained parameters",
        "an executor's own names instead of canonical ones",
    )  # fmt: skip


def _trained(state: TrainState) -> list[str]:
    return state.params.trained()


def _purity(case: _Case) -> None:
    """On a state and a batch that were never used: an argument changed in place may be changed only once."""
    backend, batch, read = case.backend, case.batch, case.read
    state, again = backend.init(case.key), backend.init(case.key)
    cause = "a global random generator instead of the key"
    require_equal("Purity", "init with the same key", read(state), read(again), cause)
    told = repeatable("Purity", "forward", lambda: case.outputs(state.params), read, state=state, batch=batch)
    grads, found = repeatable(
        "Purity", "forward_backward", lambda: case.gradients(again), read, state=again, batch=batch
    )
    require_close(
        "Purity", "the loss of what forward gives, against forward_backward's,",
        float(total_loss(case.loss, told, batch)[0]), found["loss"].value,
        "parameters that one of the two takes from elsewhere, or outputs in another order",
        tolerance=case.tolerance, floor=1.0,
    )  # fmt: skip
    repeatable(
        "Purity", "apply_update with donate=False", lambda: case.update(state, grads, donate=False), read,
        state=state, grads=grads,
    )  # fmt: skip


def _splits(case: _Case, state: TrainState) -> None:
    budgets: list[int] = []
    loss = case.loss

    def counted(term: Term) -> Term:
        def fn(outputs: TokenOutputs, batch: Batch) -> tuple[torch.Tensor, Metrics]:
            budgets.append(len(batch))
            return term.fn(outputs, batch)

        return attrs.evolve(term, fn=fn)

    first, *others = loss.terms
    at_once, found = case.gradients(state, loss=Loss((counted(first), *others)))
    if budgets == [len(case.batch)]:
        warnings.warn("the backend took the batch as one micro-batch; give it a smaller token budget", stacklevel=3)
    for name, split in some_splits(case.batch, case.key, loss.together).items():
        told = [case.gradients(state, part) for part in split]
        added = told[0][0]
        for grads, _ in told[1:]:
            added = case.made(operator.add, added, grads)
        cause = (
            "a denominator for each micro-batch, a gradient that is overwritten or dropped, or rows that see each "
            "other; denominators belong in loss_weight"
        )
        found_parts = (case.read(added), _merged(told))
        _agree(case, "Split invariance", f"one call against {name}:", (case.read(at_once), found), found_parts, cause)
        outputs = [case.outputs(state.params, part) for part in split]
        joined = split.join_outputs(outputs).by_name
        require_close(
            "Split invariance", f"one call of forward against {name}:", case.outputs(state.params).by_name, joined,
            "results that are not put back into the order of the rows", tolerance=case.tolerance,
        )  # fmt: skip


def _groups(case: _Case, state: TrainState) -> None:
    """Rows that a loss keeps together are never split, and row losses are weighted by ``row_weight``."""
    paired = _squared_sums(min(case.loss.needs))
    cause = (
        "rows of one group in different micro-batches or on different ranks (split_by_tokens and deal take "
        "together=loss.together), or row_weight that is passed over"
    )
    for shift in range(3):
        batch = _with_pairs(case.batch, shift)
        outputs = case.outputs(state.params, batch, paired.needs)
        grads, found = case.gradients(state, batch, paired)
        require_close(
            "Split invariance", "a loss of pairs of rows, of what forward gives, against forward_backward's,",
            float(total_loss(paired, outputs, batch)[0]), found["loss"].value, cause,
            tolerance=case.tolerance, floor=1.0,
        )  # fmt: skip
    smallest = some_splits(batch, case.key, "together")["the smallest micro-batches"]
    told = [case.gradients(state, part, paired) for part in smallest]
    added = told[0][0]
    for part, _ in told[1:]:
        added = case.made(operator.add, added, part)
    _agree(
        case, "Split invariance", "a loss of pairs, one call against one call a pair:",
        (case.read(grads), found), (case.read(added), _merged(told)), cause,
    )  # fmt: skip


def _derivative(case: _Case, state: TrainState) -> None:
    """The gradients are those of the loss as a pure function of the parameters."""
    if not hasattr(case.backend, "loss_fn"):
        return
    fn = case.backend.loss_fn(case.batch, case.loss)
    grads, reported = case.gradients(state)
    with untouched("Purity", "loss_fn", params=state.params):
        derived, found = torch.func.grad(fn, has_aux=True)(state.params)
    trained = Grads({name: derived[name] for name in state.params.trained()})
    cause = "a gradient that is scaled, transposed, of the other sign, or of other parameters than those given"
    _agree(
        case, "Derivative", "forward_backward against torch.func.grad of loss_fn:",
        (trained, found), (case.read(grads), reported), cause,
    )  # fmt: skip
    along = attrs.evolve(
        state.params, leaves={n: trained[n] if n in trained else torch.zeros_like(t) for n, t in state.params.items()}
    )
    _, slope = torch.func.jvp(lambda params: fn(params)[0], (state.params,), (along,))
    require_close(
        "Derivative", "the derivative of loss_fn along its gradient, in forward mode,",
        float(trained.global_norm()) ** 2, float(slope), "an autograd function whose jvp is not its derivative",
        tolerance=2 * case.tolerance,
    )  # fmt: skip


def _squared_sums(name: str) -> Loss:
    """A row loss whose gradient for a row depends on all rows of its group."""

    @as_loss(needs=[name], level="row", together="together")
    def squared_sums(outputs: TokenOutputs, batch: Batch) -> tuple[torch.Tensor, Metrics]:
        values = outputs.by_name[name]
        rows = values if name in PER_ROW else batch.sum_rows(values)
        _, ids = batch["together"].unique(return_inverse=True)
        sums = rows.new_zeros(len(batch)).index_add(0, ids, rows)
        return sums[ids].square(), {}

    return squared_sums


def _with_pairs(batch: Batch, shift: int) -> Batch:
    """The batch with rows paired in the field ``together``, no pair longer than the longest row: it fits any budget."""
    lengths = batch.lengths.tolist()
    ids, alone = list(range(len(batch))), sorted(range(len(batch)), key=lambda row: (lengths[row], row))
    alone = alone[shift:] + alone[:shift]
    while alone:
        first = alone.pop(0)
        fits = [row for row in alone if lengths[first] + lengths[row] <= max(lengths)]
        if fits:
            ids[fits[-1]] = ids[first]
            alone.remove(fits[-1])
    if len(set(ids)) == len(batch):
        raise ValueError("no two rows of the batch are together as short as its longest row; add two short rows")
    # Ids that are no indices, and weights that differ.
    paired = batch.with_rows(together=[1000 - 7 * i for i in ids])
    return aggregate_rows(paired, "group-mean", group="together")


def _persistence(case: _Case, first: TrainState, second: TrainState) -> None:
    third = case.next(first)
    cached = "a compute copy or a module that still holds the parameters of an earlier call"
    reused = "buffers that are reused while the value of an earlier call is alive"
    calls: dict[str, Callable[[TrainState], Any]] = {
        "forward": lambda state: case.outputs(state.params),
        "forward_backward": lambda state: case.gradients(state)[0],
    }
    for name, call in calls.items():
        kept = call(first)
        meant = case.copy(kept)
        for what, state in {"another state": second, "the state after an update": third}.items():
            found = case.read(call(state))
            require(not same(found, meant), "Persistence", f"{name} gives {what} the result of the first", cached)
            before = f"what {name} gave before it was called with {what}"
            require_equal("Persistence", before, meant, case.read(kept), reused)
            again = case.read(call(first))
            require_equal("Persistence", f"{name} with the first state, after {what},", meant, again, cached)


def _donation(case: _Case, state: TrainState) -> None:
    spare = case.made(snapshot, state)
    grads, _ = case.gradients(spare)
    with untouched("Donation", "apply_update with donate=False", case.read, state=spare, grads=grads):
        expected, _ = case.update(spare, grads, donate=False)
    shared = {
        "parameters": case.made(operator.attrgetter("params"), spare),
        "optimizer state": case.made(operator.attrgetter("optimizer"), spare),
        "gradients": case.made(tree.leaves, grads),
    }
    meant = {name: case.copy(value) for name, value in shared.items()}
    new, _ = case.update(spare, grads)
    written = "buffers written without asking who else holds them"
    for name, value in shared.items():
        require_equal(
            "Donation", f"after a donation, a reference to its {name}", meant[name], case.read(value), written
        )
    spent: dict[str, Callable[[], object]] = {
        "reading the state": lambda: spare.params,
        "reading the gradients": lambda: case.read(grads),
        "forward_backward with the state": lambda: case.gradients(spare),
        "apply_update with the state": lambda: case.update(spare, grads),
    }
    for name, use in spent.items():
        _require_donated(name, use)
    depends = "an update that depends on donation"
    require_equal("Donation", "the state after a donated update", case.read(expected), case.read(new), depends)
    _in_place(case, state)


def _require_donated(name: str, use: Callable[[], object]) -> None:
    try:
        use()
    except DonatedError:
        return
    raise LawViolation(
        "Donation",
        f"{name} after its donation raises no DonatedError",
        "an update that works in place without donate()",
    )


def _in_place(case: _Case, state: TrainState) -> None:
    """Where nothing else holds the state, its buffers are reused, and no cache mistakes the new state for the old."""
    expected = case.next(state)
    alone = case.made(snapshot, state)
    grads, _ = case.gradients(alone)
    new, found = case.update(alone, grads)
    holders = "the backend keeps references to the state or the gradients of its last call"
    _require_no_copies("Donation", "nothing else", found, holders)
    # In this order: a look at the expected state would make a cache forget the old one.
    told = case.outputs(new.params)
    mistaken = "a cache that takes a reused buffer for unchanged parameters"
    require_equal("Donation", "forward after a donated update", case.outputs(expected.params), told, mistaken)


def _require_no_copies(law: str, holder: str, found: Metrics, cause: str) -> None:
    copies = found["perf/residency_copies"].value if "perf/residency_copies" in found else 0
    require(copies == 0, law, f"{copies:.0f} buffers were copied though {holder} seemed to hold them", cause)


def _zero(case: _Case, state: TrainState) -> None:
    batch, backend = case.batch, case.backend
    silent = batch.with_tokens(loss_weight=torch.zeros(batch.num_tokens)).with_rows(
        row_weight=torch.zeros(len(batch))
    )
    still = {"zero loss_weight and row_weight": (silent, case.loss)}
    if "logprobs" in case.loss.needs and "old_log_probs" in batch:
        still["zero advantages"] = (batch.with_tokens(advantages=torch.zeros(batch.num_tokens)), ppo_clip())
    for name, (data, loss) in still.items():
        grads, _ = case.gradients(state, data, loss)
        top = float(case.read(grads).global_norm())
        require(top == 0.0, "Zero", f"with {name} the gradient's norm is {top:.3g}", "a term that the loss lacks")
    fresh = backend.init(case.key.fold_in("zero"))
    nothing = case.made(_scaled(0.0), case.gradients(fresh)[0])
    require_equal(
        "Zero", "zero gradients from fresh optimizer state: the parameter", case.read(fresh).params,
        case.read(case.update(fresh, nothing, donate=False)[0]).params,
        "weight decay; give the backend under test an optimizer without",
    )  # fmt: skip
    for donate in (False, True):
        broken = case.made(_scaled(float("nan")), case.gradients(state)[0])
        skipped, found = case.update(case.made(snapshot, state), broken, donate=donate)
        before = case.read(state)
        require_equal(
            "Zero", "an update with gradients that are not finite: the state", attrs.evolve(before, step=before.step + 1),
            case.read(skipped),
            "an update that is not skipped, or that moves the schedule or the optimizer's count all the same",
        )  # fmt: skip
        told = "update_skipped" in found and found["update_skipped"].value == 1.0
        require(told, "Zero", "the metric update_skipped is not 1 after a skipped update", "a skip that is not told")


def _scaled(factor: float) -> Callable[[Grads], Grads]:
    return operator.methodcaller("scale", factor)


def _restore(case: _Case, state: TrainState) -> None:
    backend = case.backend
    # A skipped update sets step and schedule apart.
    broken = case.made(_scaled(float("nan")), case.gradients(state)[0])
    state, _ = case.update(state, broken, donate=False)
    with shared_folder() as folder:
        with untouched("Restore", "save", case.read, state=state):
            backend.save(state, folder)
        found = backend.restore(folder)
    lost = "optimizer moments, the schedule's position, the key or the step left out of the file"
    require_equal("Restore", "the restored state", case.read(state), case.read(found), lost)
    expected, (grads, _) = case.next(state), case.gradients(found)
    new, told = case.update(found, grads)
    require_equal("Restore", "the update after restoring", case.read(expected), case.read(new), lost)
    _require_no_copies("Restore", "nothing but the restored state", told, "tensors that are views of a file's memory")


def _layout(case: _Case, others: _Case, state: TrainState) -> None:
    with shared_folder() as folder:
        there, back = Path(folder) / "there", Path(folder) / "back"
        case.backend.save(state, there)
        moved = others.backend.restore(there)
        others.backend.save(moved, back)
        returned = case.backend.restore(back)
    cause = "names, an order or a padding of the executor's own in the file"
    named = [
        {name: t.cpu() for name, t in dict(one.get(one.backend.named(held.params))).items()}
        for one, held in ((case, state), (others, moved))
    ]
    require_equal("Layout", "a parameter in the other layout", named[0], named[1], cause)
    came_back = "the state, saved by the other backend and restored,"
    require_equal("Layout", came_back, case.read(state), case.read(returned), cause)
    rounding = (
        "a mapping that permutes or transposes wrongly, a rank whose gradient is lost, or a tolerance too tight"
    )
    require_close(
        "Layout", "forward on the other backend", case.outputs(state.params).by_name,
        others.outputs(moved.params).by_name, rounding, tolerance=case.tolerance,
    )  # fmt: skip
    mine, theirs = case.gradients(state), others.gradients(moved)
    _agree(case, "Layout", "forward_backward on the other backend:", case.read(mine), others.read(theirs), rounding)
    norms = [
        one.update(held, grads, donate=False)[1]["grad_norm"].value
        for one, held, (grads, _) in ((case, state, mine), (others, moved, theirs))
    ]
    require_close(
        "Layout", "the norm that apply_update finds on the other backend", norms[0], norms[1],
        "a norm of one rank's shards alone, or of replicated ones twice", tolerance=case.tolerance,
    )  # fmt: skip


def _agree(
    case: _Case, law: str, what: str, expected: tuple[Grads, Metrics], found: tuple[Grads, Metrics], cause: str
) -> None:
    """Gradients and metrics, to the tolerance."""
    mine, theirs = metrics.to_floats(expected[1]), metrics.to_floats(found[1])
    require_close(law, what, mine, theirs, cause, tolerance=case.tolerance, floor=1.0)
    require_close(law, what, expected[0], found[0], cause, tolerance=case.tolerance)


def _merged(told: list[tuple[Grads, Metrics]]) -> Metrics:
    return metrics.merge(*(found for _, found in told))
