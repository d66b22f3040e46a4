"""What the ranks of test_megatron_optimizer.py do; each function runs on all of them together."""

import attrs
import megatron_mutants
import megatron_optimizer_mutants as mutants
from megatron_cases import local, megatron, run
from rank_cases import KEY, error_of, loss_for

from verl_fn.algorithms.workers import get_here
from verl_fn.backends.fsdp import Fsdp
from verl_fn.state import Grads, snapshot, tree
from verl_fn.steps import adamw, chain, clip_by_global_norm, cosine, frozen, no_decay, ppo_clip
from verl_fn.testing import LawViolation, tiny_batch
from verl_fn.testing.backend_case import BackendCase, check_donation, check_persistence, check_restore, check_zero
from verl_fn.testing.backends import check_layouts, check_updates

__all__ = ["run"]
THEIRS = {"updates_by": "megatron"}


def laws(folder, options, tolerance, name):
    """The laws of states and updates, and the layout against one process; passes do not depend on who updates."""
    backend = megatron(folder, THEIRS | options, getattr(megatron_mutants, name))
    loss = loss_for(options.get("head", "lm"))
    case = BackendCase(backend, loss, tiny_batch(), tolerance, KEY, get_here)
    first, second = case.trained("first"), case.trained("second")
    check_persistence(case, first, second)
    check_donation(case, first)
    check_zero(case, first)
    check_updates(case, first, backend.optimizer)
    check_restore(case, first)
    check_layouts(case, attrs.evolve(case, backend=local(folder, options)), first)


def beside_ours(folder, options, name="Megatron", placed=None):
    """Three updates of one state by Megatron's optimizer, beside three of another by ours, from the same gradients.

    Returns:
        The largest relative differences of a weight, of a moment and of a norm, the largest change of a weight, and
        how many leaves were copied.
    """
    schedule, batch = cosine(1e-2, 4, 1), tiny_batch(rows=9)
    decayed = adamw(schedule, (0.8, 0.95), 1e-6, 0.5, weight_decay_mask=no_decay("norm", "embed"))
    both = chain(clip_by_global_norm(0.1), decayed)
    cls = getattr(mutants, name, None) or getattr(megatron_mutants, name)
    ours, theirs = (megatron(folder, o | options, cls, optimizer=both) for o in ({}, THEIRS))
    a, b, first = ours.init(KEY), theirs.init(KEY), ours.init(KEY)
    norms, copies = [], 0.0
    for _ in range(3):
        grads, _ = ours.forward_backward(a, batch, loss_for(options.get("head", "lm")))
        a, ua = ours.apply_update(a, snapshot(grads))
        b = theirs.place(b, params=placed, optimizer=placed)
        b, ub = theirs.apply_update(b, grads)
        norms.append(abs(ub["grad_norm"].value / ua["grad_norm"].value - 1))
        copies += ub["perf/residency_copies"].value
        assert ua["lr"].value == ub["lr"].value

    def gap(one, other):
        pairs = [(t.cpu(), other[name].cpu()) for name, t in one.items() if t.numel()]
        return max(float((t - u).norm() / t.norm().clamp(min=1e-20)) for t, u in pairs)

    assert a.optimizer[-1].count == b.optimizer[-1].count == 3
    moments = [gap(getattr(a.optimizer[-1], n), getattr(b.optimizer[-1], n)) for n in ("exp_avg", "exp_avg_sq")]
    return gap(a.params, b.params), max(moments), max(norms), gap(first.params, a.params), copies


def scheduled():
    return chain(clip_by_global_norm(1.0), adamw(cosine(1e-3, 200), weight_decay=0.0))


def one_step(folder, options, source, into):
    """Restores a state, makes one step, by FSDP with ``fsdp``, and saves the next one."""
    options, batch = dict(options), tiny_batch()
    if options.pop("fsdp", False):
        backend = Fsdp(folder, scheduled(), max_tokens=24)
    else:
        backend = megatron(folder, options, optimizer=scheduled())
    state = backend.restore(source)
    state, _ = backend.apply_update(state, backend.forward_backward(state, batch, ppo_clip())[0])
    backend.save(state, into)


def two_states(folder, options):
    """Updates of two states of one backend in turn, beside updates of each by a backend of its own: all bitwise."""
    batch, keys = tiny_batch(), [KEY, KEY.fold_in("other")]
    shared = megatron(folder, THEIRS | options, optimizer=scheduled())

    def step(backend, state, donate=True):
        return backend.apply_update(state, backend.forward_backward(state, batch, ppo_clip())[0], donate=donate)[0]

    states, kept = [shared.init(key) for key in keys], []
    for donate in (False, True, True):
        kept += [] if donate else states
        states = [step(shared, state, donate) for state in states]
    for key, state, first in zip(keys, states, kept, strict=True):
        alone = megatron(folder, THEIRS | options, optimizer=scheduled())
        wanted = alone.init(key)
        assert tree.equal(first, wanted)
        for _ in range(3):
            wanted = step(alone, wanted)
        assert tree.equal(state, wanted)


def huge_gradients(folder):
    """The norm, and the largest change of a weight, of an update by ours and by theirs with very large gradients."""
    found = []
    for options in ({}, THEIRS):
        backend = megatron(folder, options, optimizer=chain(clip_by_global_norm(1.0), adamw(1e-2)))
        state, first = backend.init(KEY), backend.init(KEY)
        grads, _ = backend.forward_backward(state, tiny_batch(), ppo_clip())
        huge = Grads({name: t * 1e22 for name, t in grads.items()})
        state, update = backend.apply_update(state, huge)
        change = max(float((t - first.params[name]).abs().max()) for name, t in state.params.items() if t.numel())
        found.append((update["grad_norm"].value, change))
    return found


def not_updated(folder):
    """A model that is never trained needs no optimizer and half the bytes; and the error of a gradient."""
    half = THEIRS | {"dtype": "bfloat16"}
    trained, backend, batch = megatron(folder, half), megatron(folder, half, optimizer=frozen()), tiny_batch()
    full, state = trained.init(KEY).params, backend.init(KEY)
    assert [{t.element_size() for t in params.values()} for params in (full, state.params)] == [{4}, {2}]
    assert tree.equal(*(b.forward(params, batch) for b, params in ((trained, full), (backend, state.params))))
    return error_of(lambda: backend.forward_backward(state, batch, ppo_clip()))


CHECKS = {
    "persistence": lambda case: check_persistence(case, case.trained("first"), case.trained("second")),
    "updates": lambda case: check_updates(case, case.trained("first"), case.backend.optimizer),
}


def mutant(folder, name, options, check):
    """The law that a broken use of Megatron's optimizer breaks, of the checks of one kind."""
    backend = megatron(folder, THEIRS | options, getattr(mutants, name), optimizer=scheduled())
    try:
        CHECKS[check](BackendCase(backend, ppo_clip(), tiny_batch(), 1e-5, KEY, get_here))
    except LawViolation as violation:
        return violation.law
    return None
