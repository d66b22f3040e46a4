"""The laws of a training backend: ``check_backend``. ``backend_case`` has the laws of states."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import attrs
import torch
from torch import Tensor

from verl_fn import steps
from verl_fn.algorithms.workers import get_here
from verl_fn.backends.protocol import Freed, Handle, TrainBackend
from verl_fn.state import PER_ROW, Batch, Grads, Key, Metrics, Params, TokenOutputs, TrainState, tree
from verl_fn.steps import SGD, AdamW, Chain, ClipByGlobalNorm, Loss, Optimizer, Schedule, Term

from . import backend_case
from .backend_case import BackendCase, scaled
from .builders import in_float64, some_splits, tiny_batch
from .violation import (
    LawViolation,
    repeatable,
    require,
    require_close,
    require_equal,
    save_once,
    shared_folder,
    untouched,
)

# Position of the learning-rate schedule in the update that shows the schedule, and tolerance of changes by updates.
LATER, UPDATE_TOLERANCE = 100, 1e-2
T = TypeVar("T")
# The largest tolerance of a backend that computes in float32.
PRECISE = 1e-3
# The change of the loss in a step, relative to its size, and how far a slope may be off. Steps exceed rounding, and
# the loss is nearly linear in them. In bfloat16 the slope along a random direction drowns in rounding.
STEP, TOLERANCE = 3e-4, 0.01
STEP_BF16, TOLERANCE_BF16 = 0.03, 0.2


def check_backend(
    backend: TrainBackend,
    other: TrainBackend | None = None,
    *,
    loss: Loss | None = None,
    batch: Batch | None = None,
    optimizer: Optimizer | None = None,
    tolerance: float = 1e-4,
    key: Key | None = None,
    get: Callable[[Any], Any] = get_here,
) -> None:
    """Checks a training backend against the laws.

    The backend needs an optimizer without weight decay whose learning rate is above 0 from the first update on, and a
    token budget that splits the batch (``tiny_batch()`` has about 50 tokens, and its longest row at most 16).

    * Signature, Purity, Split invariance, Persistence, Donation, Zero and Restore check the backend by itself. In one
      process Purity includes calls from two threads.
    * Outputs: outputs depend on the tokens before them, log-probs on the token too, and none on later ones.
      Logits are divided by the row's ``temperature``.
    * Derivative: the gradient predicts how ``forward``'s outputs change when parameters do. If the backend has
      ``loss_fn``, the ``torch.func`` gradient of that function is the gradient of ``forward_backward``, and so is its
      derivative along that gradient in forward mode.
    * Update, if the optimizer is known: updates equal the updates of ``steps.apply_update``.
    * Layout, with ``other`` for the same model on another backend, layout or number of ranks: outputs,
      gradients, metrics and updates agree, and each backend restores what the other one saved.

    Args:
        backend: the backend under test.
        other: a second backend for the same model.
        loss: the loss that is differentiated, by default ``ppo_clip()``. For a critic, pass ``value_clip()``.
        batch: by default ``tiny_batch()``, whose token ids are below 8.
        optimizer: the optimizer of the backend, by default its attribute ``optimizer``, if it has one.
        tolerance: how far splits and layouts may differ, relative to the largest value of each tensor. For bf16, pass
            about 0.05.
        key: other keys give other states and splits.
        get: returns the value behind a reference, for a backend whose states are handles: ``workers.get``. The check
            reads the values behind handles with the backend's ``map``.

    Raises:
        LawViolation: a law is broken.

    Example:
        >>> from verl_fn.backends.mock import Mock
        >>> from verl_fn.steps import adamw, constant
        >>> check_backend(Mock(8, adamw(constant(0.01), weight_decay=0.0), max_tokens=24))
        >>> check_backend(Mock(8, adamw(constant(0.01), weight_decay=0.1), max_tokens=24))
        Traceback (most recent call last):
        verl_fn.testing.violation.LawViolation: Zero: zero gradients with a new optimizer state: ... ['logits'] ...
    """
    batch = tiny_batch() if batch is None else batch
    case = BackendCase(backend, loss or steps.ppo_clip(), batch, tolerance, key or Key.from_seed(0), get)
    optimizer = getattr(backend, "optimizer", None) if optimizer is None else optimizer
    try:
        _check_laws(case, None if other is None else attrs.evolve(case, backend=other), optimizer)
    except Freed as error:
        cause = "a value that is freed while a handle to it exists"
        raise LawViolation("Persistence", f"the value behind a handle is gone: {error}", cause) from error


def _check_laws(case: BackendCase, other: BackendCase | None, optimizer: Optimizer | None) -> None:
    _purity(case)
    first, second = case.trained("first"), case.trained("second")
    _signature(case, first)
    backend_case.check_persistence(case, first, second)
    backend_case.check_threads(case, first, second)
    check_splits(case, first)
    check_groups(case, first)
    check_outputs(case, first)
    check_gradients(case, first)
    backend_case.check_donation(case, first)
    backend_case.check_zero(case, first)
    if optimizer is not None:
        check_updates(case, first, optimizer)
    backend_case.check_restore(case, first)
    if other is not None:
        check_layouts(case, other, first)


def _signature(case: BackendCase, state: Handle[TrainState]) -> None:
    outputs = case.outputs(state.params)
    names, silent = set(outputs.by_name), case.batch["response_mask"] == 0
    tokens, rows = case.batch.num_tokens, len(case.batch)
    require(
        names == set(case.loss.needs),
        "Signature",
        f"forward gives {sorted(names)}, but {sorted(case.loss.needs)} are needed",
        "an option that is ignored",
    )
    for name, t in outputs.by_name.items():
        require(
            t.shape == ((rows if name in PER_ROW else tokens),) and t.dtype == torch.float32,
            "Signature",
            f"{name} is {t.dtype}{tuple(t.shape)}, but the batch has {tokens} tokens in {rows} rows",
            "compute dtype that was not cast to float32, or targets that were not spread over the batch",
        )
        if name in PER_ROW:
            continue
        top = float(torch.where(silent, t, 0.0).abs().max())
        require(top == 0.0, "Signature", f"{name} reaches {top:.3g} where response_mask is 0", "a missing mask")
    moved = case.read(case.backend.place(state, params="cpu", optimizer="cpu"))
    here = tree.map_tensors(lambda t: t.cpu(), case.read(state))
    require_equal("Signature", "a state placed on the CPU", here, moved, "a place() that drops or casts something")
    named = case.get(case.backend.map(list, case.gradients(state)[0]))
    trained = case.get(case.backend.map(_trained, state))
    require(
        named == trained,
        "Signature",
        f"gradients are named {sorted(set(named) ^ set(trained))[:5]} unlike trained parameters",
        "an executor's own names instead of canonical ones",
    )


def _trained(state: TrainState) -> list[str]:
    return state.params.trained()


def _purity(case: BackendCase) -> None:
    """Checks repeated calls with a new state and batch, since a change in place may happen in the first call only."""
    backend, batch, read = case.backend, case.batch, case.read
    state, again = backend.init(case.key), backend.init(case.key)
    cause = "a global random generator instead of the key"
    require_equal("Purity", "init with the same key", read(state), read(again), cause)
    outputs = repeatable("Purity", "forward", lambda: case.outputs(state.params), read, state=state, batch=batch)
    grads, reported = repeatable(
        "Purity", "forward_backward", lambda: case.gradients(again), read, state=again, batch=batch
    )
    case.require_close(
        "Purity",
        "the loss computed from forward's outputs, against forward_backward's,",
        float(steps.total_loss(case.loss, outputs, batch)[0]),
        reported["loss"].value,
        "parameters that one of the two takes from elsewhere, or outputs in another order",
    )
    repeatable(
        "Purity",
        "apply_update with donate=False",
        lambda: case.update(state, grads, donate=False),
        read,
        state=state,
        grads=grads,
    )


def check_gradients(case: BackendCase, state: Handle[TrainState]) -> None:
    """Checks gradients against differences of ``forward``'s outputs, and against ``loss_fn`` if there is one."""
    _loss_fn(case, state)
    # A smooth loss. Weights of both signs show a backend that takes them for magnitudes.
    probe, batch = _sum_of_outputs(case.loss.needs), _with_signed_weights(case)
    grads, _ = case.gradients(state, batch, probe)
    gradient = {name: g.double() for name, g in case.read(grads).items()}
    params = case.read(state).params
    outputs = case.outputs(state.params, batch)
    scale = _magnitude(outputs, batch)
    norm = _norm(gradient)
    require(
        norm > 0, "Derivative", "the gradient of the sum of all outputs is 0", "a pass that is not differentiated"
    )

    slope = partial(_slope, case, state, grads, batch, probe)
    precise = case.tolerance <= PRECISE
    require_close(
        "Derivative",
        "the change of the loss along its gradient, against the squared norm of the gradient,",
        norm**2,
        slope(pattern=False, step=(STEP if precise else STEP_BF16) * scale / norm**2),
        "a gradient that is scaled, transposed, of the other sign, of a part, or of the magnitudes of weights",
        tolerance=TOLERANCE if precise else TOLERANCE_BF16,
    )
    if not precise:
        return
    directions = {name: _pattern(params[name]).double() for name in gradient}
    expected = float(sum((g * directions[name]).sum() for name, g in gradient.items()))
    size = sum(d.numel() for d in directions.values())
    typical = norm * _norm(directions) / size**0.5
    require_close(
        "Derivative",
        "the change of the loss along another direction, against the gradient in that direction,",
        expected,
        slope(pattern=True, step=STEP * scale / typical),
        "a parameter whose gradient is missing or belongs to another one",
        tolerance=TOLERANCE,
        floor=typical,
    )


def _slope(
    case: BackendCase,
    state: Handle[TrainState],
    grads: Handle[Grads],
    batch: Batch,
    loss: Loss,
    *,
    pattern: bool,
    step: float,
) -> float:
    """Returns the derivative of the loss along a direction, by differences."""

    def value(step: float) -> float:
        moved = case.made(partial(_moved, pattern=pattern, step=step), state, grads)
        outputs = in_float64(case.outputs(moved, batch))
        return float(steps.total_loss(loss, outputs, in_float64(batch))[0])

    def central(step: float) -> float:
        return (value(step) - value(-step)) / (2.0 * step)

    # Richardson extrapolation: the error that grows with the square of the step cancels.
    return (4.0 * central(step) - central(2.0 * step)) / 3.0


def _sum_of_outputs(needs: frozenset[str]) -> Loss:
    """Makes a loss whose values are the sums of the outputs."""

    def sums(names: list[str]) -> object:
        def values(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
            return torch.stack([outputs.by_name[name] for name in names]).sum(0), {}

        return values

    terms: list[Loss] = []
    if tokens := sorted(needs - PER_ROW):
        terms.append(steps.loss(needs=tokens)(sums(tokens)))  # type: ignore[arg-type]
    if rows := sorted(needs & PER_ROW):
        terms.append(steps.loss(needs=rows, level="row")(sums(rows)))  # type: ignore[arg-type]
    return Loss(tuple(term for one in terms for term in one.terms))


def _with_signed_weights(case: BackendCase) -> Batch:
    """Returns the batch with weights of both signs, and without token 0.

    Token 0 is often the padding token, whose embedding has no gradient in models of transformers.
    """
    batch, stream = case.batch, case.key.fold_in("weights").generator()
    weights = torch.randn(batch.num_tokens, generator=stream) / batch.num_tokens
    row_weights = torch.randn(len(batch), generator=stream) / len(batch)
    tokens = batch.tokens.clamp(min=int(batch.tokens[batch.tokens > 0].min()))
    signed = batch.with_tokens(loss_weight=weights * batch["response_mask"]).with_rows(row_weight=row_weights)
    return attrs.evolve(signed, tokens=tokens)


def _magnitude(outputs: TokenOutputs, batch: Batch) -> float:
    """Returns the sum of the magnitudes of all weighted outputs."""
    weights = {True: batch["row_weight"], False: batch["loss_weight"]}
    return float(sum((weights[name in PER_ROW] * t).double().abs().sum() for name, t in outputs.by_name.items()))


def _moved(state: TrainState, grads: Grads, *, pattern: bool, step: float) -> Params:
    """Returns the parameters after a step along the gradient, or along a direction made of the parameters."""
    leaves = {
        name: t + step * (_pattern(t) if pattern else grads[name]) if name in grads else t
        for name, t in state.params.items()
    }
    return attrs.evolve(state.params, leaves=leaves)


def _pattern(t: Tensor) -> Tensor:
    """Returns a direction that looks random but depends only on each element, so that shards have the same one."""
    return (t.abs() + 1e-3) * torch.cos(997.0 * t)


def _loss_fn(case: BackendCase, state: Handle[TrainState]) -> None:
    """Checks the gradients against ``torch.func`` gradients of the loss as a pure function of the parameters."""
    if not hasattr(case.backend, "loss_fn"):
        return
    fn = case.backend.loss_fn(case.batch, case.loss)
    grads, reported = case.gradients(state)
    params = cast(Params, state.params)  # A backend with loss_fn has its parameters in this process.
    with untouched("Purity", "loss_fn", params=params):
        derived, of_fn = torch.func.grad(fn, has_aux=True)(params)
    trained = Grads({name: derived[name] for name in params.trained()})
    cause = "a gradient that is scaled, transposed, of the other sign, or of other parameters than the given ones"
    # loss_fn may compute log-probs by other operations, whose rounding differs more than between splits.
    attrs.evolve(case, tolerance=3 * case.tolerance).require_agreement(
        "Derivative",
        "forward_backward against torch.func.grad of loss_fn:",
        (trained, of_fn),
        (case.read(grads), reported),
        cause,
    )
    along = attrs.evolve(
        params, leaves={n: trained[n] if n in trained else torch.zeros_like(t) for n, t in params.items()}
    )
    slope = torch.func.jvp(lambda point: fn(point)[0], (params,), (along,))[1]
    require_close(
        "Derivative",
        "the derivative of loss_fn along its gradient, in forward mode,",
        float(trained.global_norm()) ** 2,
        float(slope),
        "an autograd function whose jvp is not its derivative",
        tolerance=2 * case.tolerance,
    )


def check_outputs(case: BackendCase, state: Handle[TrainState]) -> None:
    """Checks that the outputs of a token depend on the tokens before it, and log-probs on the token as well."""
    names = case.loss.needs - PER_ROW
    if not names:
        return
    places, changed = _with_other_tokens(case.batch)
    before = case.outputs(state.params, needs=names).by_name
    after = case.outputs(state.params, changed, names).by_name
    for name in sorted(names):
        _depends_on_the_past(case, name, places, before[name], after[name])
    if "logprobs" in names:
        _temperature(case, state, places, changed)
    if "entropy" in names:
        _entropy(case, state)


def _with_other_tokens(batch: Batch) -> tuple[Tensor, Batch]:
    """Replaces a token in the middle of each response.

    Returns:
        The indices of the replaced tokens, and the batch with the new tokens.
    """
    middle = []
    for row in range(len(batch)):
        (targets,) = torch.where((batch["response_mask"] != 0) & (batch.row_ids == row))
        middle.extend(targets[len(targets) // 2 : len(targets) // 2 + 1].tolist())
    places = torch.tensor(middle)
    # Only ids that the batch has are known to be in the vocabulary.
    vocabulary = batch.tokens.unique()
    tokens = batch.tokens.clone()
    tokens[places] = vocabulary[(torch.searchsorted(vocabulary, tokens[places]) + 1) % len(vocabulary)]
    return places, attrs.evolve(batch, tokens=tokens)


def _depends_on_the_past(case: BackendCase, name: str, places: Tensor, before: Tensor, after: Tensor) -> None:
    """Checks an output before and after the tokens at ``places`` were replaced, of which each row has one at most."""
    batch, rows = case.batch, case.batch.row_ids
    changed_at = torch.full((len(batch),), batch.num_tokens).index_copy(0, rows[places], places)[rows]
    index, targets = torch.arange(batch.num_tokens), batch["response_mask"] != 0
    # The log-prob of a token depends on the token itself, and every other output only on the tokens before it.
    first_to_change = changed_at if name == "logprobs" else changed_at + 1
    past = targets & (index < first_to_change)
    case.require_close(
        "Outputs",
        f"after a token was replaced, {name} of the tokens up to it",
        before[past],
        after[past],
        "an output that is off by one token, or a model that sees later tokens",
    )
    at_once = targets & (index == first_to_change)
    require(
        not bool(at_once.any()) or not torch.equal(before[at_once], after[at_once]),
        "Outputs",
        f"after a token was replaced, {name} stays the same at the first token that depends on it",
        "an output that is off by one token",
    )


def _temperature(case: BackendCase, state: Handle[TrainState], places: Tensor, changed: Batch) -> None:
    """Checks that logits are divided by the temperature: log p(a) - log p(b) is then proportional to its inverse."""
    rows = torch.arange(len(case.batch)) % 3
    temperature = torch.tensor([0.5, 1.0, 2.0])[rows]

    def difference(temperature: Tensor) -> Tensor:
        one, other = (
            case.outputs(state.params, batch.with_rows(temperature=temperature), frozenset({"logprobs"})).logprobs
            for batch in (case.batch, changed)
        )
        return (one - other)[places]

    plain = torch.ones(len(case.batch))
    case.require_close(
        "Outputs",
        "log p(a) - log p(b) at the rows' temperatures, times the temperature,",
        difference(plain),
        difference(temperature) * temperature[case.batch.row_ids[places]],
        "logits that are not divided by the row's temperature",
    )
    missing = case.batch.without("temperature")
    case.require_close(
        "Outputs",
        "logprobs of a batch without temperatures",
        case.outputs(state.params, missing.with_rows(temperature=plain), frozenset({"logprobs"})).logprobs,
        case.outputs(state.params, missing, frozenset({"logprobs"})).logprobs,
        "another default temperature than 1",
    )


def _entropy(case: BackendCase, state: Handle[TrainState]) -> None:
    temperatures = (case.batch.with_rows(temperature=torch.full((len(case.batch),), t)) for t in (0.5, 2.0))
    cold, hot = (case.outputs(state.params, one, frozenset({"entropy"})).entropy.sum() for one in temperatures)
    require(
        bool(cold < hot),
        "Outputs",
        f"entropy sums to {float(cold):.4g} at temperature 0.5 and to {float(hot):.4g} at temperature 2",
        "an entropy of logits that are not divided by the row's temperature",
    )


def check_splits(case: BackendCase, state: Handle[TrainState]) -> None:
    """Checks that one call for a batch agrees with the sum of calls for its parts."""
    rows_per_call: list[int] = []
    loss = case.loss

    def counted(term: Term) -> Term:
        def fn(outputs: TokenOutputs, batch: Batch) -> tuple[torch.Tensor, Metrics]:
            rows_per_call.append(len(batch))
            return term.fn(outputs, batch)

        return attrs.evolve(term, fn=fn)

    first, *others = loss.terms
    at_once, reported = case.gradients(state, loss=Loss((counted(first), *others)))
    if rows_per_call == [len(case.batch)]:
        warnings.warn("the backend took the batch as one micro-batch; give it a smaller token budget", stacklevel=4)
    outputs = case.outputs(state.params).by_name
    for name, split in some_splits(case.batch, case.key, loss.together).items():
        case.require_agreement(
            "Split invariance",
            f"one call against {name}:",
            (case.read(at_once), reported),
            case.added(state, split),
            "a denominator for each micro-batch, a gradient that is overwritten or dropped, or rows that see each "
            "other; denominators belong in loss_weight",
        )
        case.require_close(
            "Split invariance",
            f"one call of forward against {name}:",
            outputs,
            split.join_outputs([case.outputs(state.params, part) for part in split]).by_name,
            "results that are not put back into the order of the rows",
            floor=None,
        )


def check_groups(case: BackendCase, state: Handle[TrainState]) -> None:
    """Checks that rows which a loss keeps together are never split, and that ``row_weight`` weights row losses."""
    paired = _squared_sums(min(case.loss.needs))
    cause = (
        "rows of one group in different micro-batches or on different ranks (split_by_tokens and deal take "
        "together=loss.together), or row_weight that is ignored"
    )
    for shift in range(3):
        batch = _with_pairs(case.batch, shift)
        outputs = case.outputs(state.params, batch, paired.needs)
        grads, reported = case.gradients(state, batch, paired)
        case.require_close(
            "Split invariance",
            "a loss of pairs of rows, computed from forward's outputs, against forward_backward's,",
            float(steps.total_loss(paired, outputs, batch)[0]),
            reported["loss"].value,
            cause,
        )
    smallest = some_splits(batch, case.key, "together")["the smallest micro-batches"]
    case.require_agreement(
        "Split invariance",
        "a loss of pairs, one call against one call a pair:",
        (case.read(grads), reported),
        case.added(state, smallest, paired),
        cause,
    )


def _squared_sums(name: str) -> Loss:
    """Makes a row loss of the output ``name`` whose gradient for a row depends on all rows of its group."""

    @steps.loss(needs=[name], level="row", together="together")
    def squared_sums(outputs: TokenOutputs, batch: Batch) -> tuple[torch.Tensor, Metrics]:
        values = outputs.by_name[name]
        rows = values if name in PER_ROW else batch.sum_rows(values)
        _, ids = batch["together"].unique(return_inverse=True)
        sums = rows.new_zeros(len(batch)).index_add(0, ids, rows)
        return sums[ids].square(), {}

    return squared_sums


def _with_pairs(batch: Batch, shift: int) -> Batch:
    """Pairs rows in the field ``together``, such that every pair fits a budget that fits the longest row.

    Raises:
        ValueError: no two rows are together as short as the longest row.
    """
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
    # The ids are not valid indices, and the weights of rows differ.
    paired = steps.aggregate_rows(
        batch.with_rows(together=[1000 - 7 * i for i in ids]), "group-mean", group="together"
    )
    # Weights of both signs show a backend that takes them for magnitudes.
    sign = 1.0 - 2.0 * (paired["together"] % 2)
    return paired.with_rows(row_weight=sign * paired["row_weight"])


def check_updates(case: BackendCase, state: Handle[TrainState], optimizer: Optimizer) -> None:
    """Checks updates against ``steps.apply_update`` with the same optimizer, on whole tensors.

    A small and a large gradient show clipping, and a later position shows the schedule. The last update is given an
    optimizer with other hyperparameters."""
    grads, _ = case.gradients(state)
    norm = float(case.read(grads).global_norm())
    later = case.made(partial(attrs.evolve, scheduler=LATER), state)
    for what, start, factor, given in (
        ("a gradient of norm 0.001", state, 1e-3 / norm, None),
        ("a gradient of norm 1000", state, 1e3 / norm, None),
        (f"position {LATER} of the schedule", later, 1.0, None),
        ("an optimizer given to apply_update", state, 1e3 / norm, _other_settings(optimizer) or optimizer),
    ):
        settings = {} if given is None else {"optimizer": given}
        gradient = case.made(scaled(factor), grads)
        new = _on_cpu(case.read(case.update(start, gradient, donate=False, **settings)[0]))
        old = _on_cpu(case.read(start))
        expected, _ = steps.apply_update(given or optimizer, old, _on_cpu(case.read(gradient)), donate=False)
        cause = (
            "an update that ascends, clips by another norm, or ignores the schedule's position or a setting of the "
            "optimizer"
        )
        require_close(
            "Update",
            f"with {what}, the change of the parameters",
            changes(old.params, expected.params),
            changes(old.params, new.params),
            cause,
            tolerance=UPDATE_TOLERANCE,
            floor=rounding(old.params) / UPDATE_TOLERANCE,
        )
        state_of = f"with {what}, the optimizer's new state"
        require_close("Update", state_of, expected.optimizer, new.optimizer, cause, tolerance=UPDATE_TOLERANCE)


def _other_settings(optimizer: object) -> Optimizer | None:
    """Returns an optimizer that continues the same state with other hyperparameters; None for an unknown one."""
    match optimizer:
        case Chain(parts):
            last = _other_settings(parts[-1])
            clips = (
                attrs.evolve(p, max_norm=3 * p.max_norm) if isinstance(p, ClipByGlobalNorm) else p for p in parts
            )
            return last and Chain((*list(clips)[:-1], last))
        case AdamW(schedule, (beta1, beta2), eps, decay):
            other: Schedule = partial(_doubled, schedule)
            return attrs.evolve(
                optimizer, schedule=other, betas=(beta1 / 2, 0.9 * beta2), eps=10 * eps, weight_decay=decay + 0.1
            )
        case SGD(schedule):
            return attrs.evolve(optimizer, schedule=partial(_doubled, schedule))
    return None


def _doubled(schedule: Schedule, count: int) -> float:
    return 2 * schedule(count)


def changes(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns by how much an update changed each parameter."""
    return {name: new[name].double() - t.double() for name, t in old.items()}


def rounding(params: Params) -> float:
    """Returns how far rounding to float32 moves the largest parameter, with a margin."""
    return 1e-6 * max(float(t.abs().max()) for t in params.values())


def _on_cpu(value: T) -> T:
    return tree.map_tensors(lambda t: t.cpu(), value)


def check_layouts(case: BackendCase, others: BackendCase, state: Handle[TrainState]) -> None:
    """Checks that two backends restore each other's states and compute the same."""
    with shared_folder() as folder:
        there, back = Path(folder) / "there", Path(folder) / "back"
        save_once(case.backend, state, there)
        moved = others.backend.restore(there)
        save_once(others.backend, moved, back)
        returned = case.backend.restore(back)
    cause = "names, an order or a padding of the executor's own in the file"
    ours, theirs = _whole_params(case, state), _whole_params(others, moved)
    require_equal("Layout", "a parameter in the other layout", ours, theirs, cause)
    came_back = "the state, saved by the other backend and restored,"
    require_equal("Layout", came_back, case.read(state), case.read(returned), cause)
    rounding = (
        "a mapping that permutes or transposes wrongly, a rank whose gradient is lost, or a tolerance too tight"
    )
    case.require_close(
        "Layout",
        "forward on the other backend",
        case.outputs(state.params).by_name,
        others.outputs(moved.params).by_name,
        rounding,
        floor=None,
    )
    results, other_results = case.gradients(state), others.gradients(moved)
    case.require_agreement(
        "Layout",
        "forward_backward on the other backend:",
        case.read(results),
        others.read(other_results),
        rounding,
    )
    norm = float(case.read(results[0]).global_norm())
    # Gradients of other norms are clipped, or are not.
    for factor in (1.0, 1e-3 / norm, 1e3 / norm):
        updates = [
            one.update(start, one.made(scaled(factor), grads), donate=False)
            for one, start, (grads, _) in ((case, state, results), (others, moved, other_results))
        ]
        norm_here, norm_there = (reported["grad_norm"].value for _, reported in updates)
        what = "the norm that apply_update reports on the other backend"
        cause = "a norm of only one rank's shards, or of replicated ones twice"
        case.require_close("Layout", what, norm_here, norm_there, cause, floor=None)
        change = changes(ours, _whole_params(case, updates[0][0]))
        other = changes(theirs, _whole_params(others, updates[1][0]))
        gap, size = _norm({name: other[name] - t for name, t in change.items()}), _norm(change)
        # Adam makes large updates of gradients that are only rounding, so single elements are not compared.
        require(
            gap <= (0.1 + 10.0 * case.tolerance) * size,
            "Layout",
            f"the update on the other backend differs by a norm of {gap:.3g}; its own is {size:.3g}",
            "an update that ascends, clips by another norm, or has another learning rate",
        )


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return float(sum(t.square().sum() for t in tensors.values())) ** 0.5


def _whole_params(case: BackendCase, state: Handle[TrainState]) -> dict[str, Tensor]:
    """Returns the whole parameters of a state, on the CPU."""
    return {name: t.cpu() for name, t in dict(case.get(case.backend.named(state.params))).items()}
