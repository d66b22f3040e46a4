"""What the ranks of test_fsdp.py do; each function runs on all of them together."""

import functools
from unittest import mock

import attrs
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from verl_fn.backends.fsdp import Fsdp, sharding, torch_private
from verl_fn.backends.fsdp.sharding import whole_of
from verl_fn.backends.fsdp.torch_private import local_of, sharded
from verl_fn.backends.local import Local
from verl_fn.benchmarks.tiny_models import tiny_folder
from verl_fn.state import Grads, Key, Params, Slots, TokenOutputs, snapshot, tree
from verl_fn.steps import (
    adamw,
    bradley_terry,
    chain,
    clip_by_global_norm,
    constant,
    distill_top_k,
    entropy,
    frozen,
    loss,
    ppo_clip,
    value_clip,
)  # fmt: skip
from verl_fn.testing import check_backend, compare_backends, tiny_batch, tiny_pairs

KEY = Key.from_seed(0)
SHARED = (
    "head",
    "dtype",
    "checkpointing",
    "lora",
    "row_layout",
    "device",
    "deterministic",
)  # what Local takes too


def optimizer():
    return chain(clip_by_global_norm(1.0), adamw(constant(1e-3), weight_decay=0.0))


def error_of(call, kind=ValueError):
    """The class and the message of the error that a call raises on this rank, or None."""
    try:
        call()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return None


def loss_for(head):
    return value_clip() if head == "value" else ppo_clip() - 0.01 * entropy()


def laws(folder, options, tolerance):
    """All laws, and the layout against one process."""
    common = {name: options[name] for name in SHARED if name in options}
    # At least two micro-batches on each rank, and not many, since each pass takes ranks several milliseconds.
    alone = dist.get_world_size() == options.get("sp", 1)
    backend = Fsdp(folder, optimizer(), max_tokens=32 if alone else 24, **options)
    other = Local(folder, optimizer(), max_tokens=24, **common)
    check_backend(backend, other, loss=loss_for(options.get("head", "lm")), tolerance=tolerance)


def families(names, out, shared=()):
    """The first step of models of several families beside ``Local``, and an error of sequence parallelism.

    For the ``shared`` ones the two ranks also share the sequence.
    """
    worst = {}
    for name in names:
        folder = out / name
        if dist.get_rank() == 0:
            tiny_folder(name, folder)
        dist.barrier()
        # Later steps are those of any model.
        worst[name] = first_step(folder, {}, 6, 1)
        if name in shared:
            worst[f"{name}, shared"] = first_step(folder, {"sp": 2}, 6, 1)
    return worst, error_of(lambda: Fsdp(folder, optimizer(), sp=2).load_pretrained())


@attrs.frozen(eq=False)
class Step:
    """A step of one process: the parameters before it, and after its update, and what its calls gave."""

    before: Params
    outputs: TokenOutputs
    loss: float
    grads: Grads
    grad_norm: float
    after: Params


STEPS: dict[str, list[Step]] = {}


def steps_of_one_process(folder, rows, options, count=None):
    """The first steps of ``Local``, computed once for all layouts that are compared with them.

    By default they are two; LoRA's factors need three to move all.
    """
    count = count or (3 if "lora" in options else 2)
    key = repr((str(folder), rows, count, sorted(options.items())))
    if key not in STEPS:
        loss, batch = loss_for(options.get("head", "lm")), tiny_batch(rows=rows)
        backend = Local(folder, optimizer(), max_tokens=24, **options)
        state, steps = backend.init(KEY), []
        for _ in range(count):
            before, outputs = snapshot(state.params), backend.forward(state.params, batch, loss.needs)
            grads, told = backend.forward_backward(state, batch, loss)
            given = snapshot(grads)
            state, updated = backend.apply_update(state, grads)
            norm = updated["grad_norm"].value
            steps.append(Step(before, outputs, told["loss"].value, given, norm, snapshot(state.params)))
        STEPS[key] = steps
    return STEPS[key]


def first_step(folder, options, rows, count=None):
    """Loss, norm, gradients and updates of the first ``count`` steps beside ``Local``: relative errors."""
    loss, batch = loss_for(options.get("head", "lm")), tiny_batch(rows=rows)
    alone = {name: options[name] for name in ("head", "lora") if name in options}
    backend = Fsdp(folder, optimizer(), max_tokens=24, **options)
    worst = {"loss": 0.0, "grad_norm": 0.0, "gradient": 0.0, "update": 0.0}
    state = backend.init(KEY)
    for one in steps_of_one_process(folder, rows, alone, count):
        grads, told = backend.forward_backward(state, batch, loss)
        worst["loss"] = max(worst["loss"], abs(one.loss - told["loss"].value))
        found = whole_of(grads)
        for name, g in one.grads.items():
            scale = max(float(g.norm()), 1e-3 * float(one.grads.global_norm()))
            worst["gradient"] = max(worst["gradient"], float((found[name] - g).norm()) / scale)
        # Both apply the reference's gradients, so that a wrong optimizer cannot hide behind them.
        shards = Grads({name: backend.layout.shard(g.clone(), backend.device) for name, g in one.grads.items()})
        state, told = backend.apply_update(state, shards)
        worst["grad_norm"] = max(worst["grad_norm"], abs(one.grad_norm / told["grad_norm"].value - 1))
        assert told["perf/residency_copies"].value == 0
        ours = whole_of(state.params)
        for name, p in one.after.items():
            step = p - one.before[name]
            gap = float((ours[name] - p).norm()) / max(float(step.norm()), 1e-9)
            worst["update"] = max(worst["update"], gap if float(step.norm()) else 0.0)
    return worst


def summed_in_bf16(folder):
    """The dtypes of gradients that were summed over ranks in bf16, and how far they are from sums in fp32."""
    batch, found = tiny_batch(rows=6), []
    for dtype in ("float32", "bfloat16"):
        backend = Fsdp(folder, optimizer(), max_tokens=24, reduce_dtype=dtype)
        # FSDP sets dtypes itself in the first pass.
        first, grads = (backend.forward_backward(backend.init(KEY), batch, ppo_clip())[0] for _ in range(2))
        assert tree.equal(first, grads)
        found.append(whole_of(grads))
    wide, narrow = found
    gaps = [float((narrow[name] - g).norm()) for name, g in wide.items()]
    return {g.dtype for g in narrow.values()}, sum(n**2 for n in gaps) ** 0.5 / float(wide.global_norm())


def moments_in_bf16(folder, out):
    """Shards are rounded as the whole is; a state that ranks saved is restored by one process."""
    tx = chain(clip_by_global_norm(1.0), adamw(constant(1e-3), weight_decay=0.1, moments=torch.bfloat16))
    one, many = (cls(folder, tx, max_tokens=24) for cls in (Local, Fsdp))
    a, b, batch = one.init(KEY), many.init(KEY), tiny_batch(rows=6)
    for _ in range(3):
        ga, _ = one.forward_backward(a, batch, ppo_clip())
        # The norm is summed in another order on shards, so that a clip by it would differ in the last bit.
        ga = ga.scale(0.5 / float(ga.global_norm()))
        shards = Grads({name: many.layout.shard(g, many.device) for name, g in ga.items()})
        (a, _), (b, _) = one.apply_update(a, ga), many.apply_update(b, shards)
    for moment in ("exp_avg", "exp_avg_sq"):
        ours, theirs = getattr(b.optimizer[-1], moment), getattr(a.optimizer[-1], moment)
        assert {t.dtype for t in ours.values()} == {torch.bfloat16}
        assert tree.equal(dict(whole_of(ours)), dict(theirs)), moment
    assert tree.equal(dict(whole_of(b.params)), dict(a.params))
    many.save(b, out)
    assert tree.equal(one.restore(out), a)
    again = many.restore(out)
    assert {t.dtype for t in again.optimizer[-1].exp_avg.values()} == {torch.bfloat16}
    many.forward_backward(again, batch, ppo_clip())


def compiled(folder, options, rows):
    """The same with compiled layers: captured as they would be, and run without making kernels of their own."""
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")):
        return first_step(folder, options | {"compile": True}, rows)


def compiled_once(folder, options):
    """After micro-batches of two sizes, all others find their code made; how far off their gradients are."""
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")):
        backend = Fsdp(folder, optimizer(), max_tokens=24, compile=True, **options)
        state, size = backend.init(KEY), dist.get_world_size() // options.get("sp", 1)
        first, second, others = (tiny_batch(rows=count * size) for count in (2, 3, 6))
        for batch, stance in ((first, "default"), (second, "default"), (others, "fail_on_recompile")):
            with torch.compiler.set_stance(stance):
                backend.forward(state.params, batch)
                grads, _ = backend.forward_backward(state, batch, ppo_clip())
    plain = Fsdp(folder, optimizer(), max_tokens=24, **options)
    wanted = whole_of(plain.forward_backward(plain.init(KEY), others, ppo_clip())[0])
    found, scale = whole_of(grads), 1e-3 * float(wanted.global_norm())
    return max(float((found[name] - g).norm()) / max(float(g.norm()), scale) for name, g in wanted.items())


def holds(folder):
    """Values keep their meaning while others are computed with; a reference that shares leaves is copied for."""
    backend, batch = Fsdp(folder, optimizer(), max_tokens=24), tiny_batch()
    first, second = backend.init(KEY), backend.init(KEY.fold_in("other"))
    grads, _ = backend.forward_backward(first, batch, ppo_clip())
    kept = snapshot(grads)
    other, _ = backend.forward_backward(second, batch, ppo_clip())
    again, _ = backend.forward_backward(first, batch, ppo_clip())
    assert tree.equal(grads, kept) and tree.equal(again, kept) and not tree.equal(other, kept)
    reference = first.params
    meant = snapshot(reference)
    told = backend.forward(reference, batch)
    new, found = backend.apply_update(first, grads)
    assert found["perf/residency_copies"].value == len(reference)
    assert tree.equal(reference, meant) and not tree.equal(new.params, meant)
    assert tree.equal(backend.forward(reference, batch), told)
    doubled = (again + again).scale(0.5)
    assert abs(float(doubled.global_norm()) / float(kept.global_norm()) - 1) < 1e-6
    return float(kept.global_norm())


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("broken on purpose")


def after_failure(folder, where, options):
    """A call that fails on its way leaves nothing behind, and its model is not made anew."""
    backend, batch = Fsdp(folder, optimizer(), max_tokens=24, **options), tiny_batch()
    state = backend.init(KEY)
    expected = snapshot(backend.forward_backward(state, batch, ppo_clip())[0])
    told = backend.forward(state.params, batch)
    skeleton, layers, calls = backend._built(), backend._built().model.base_model.layers, []

    def broken(module, args, output):
        calls.append(module)
        if len(calls) < (2 if where.startswith("later") else 1):
            return output
        if where.endswith("forward"):
            raise RuntimeError("broken on purpose")
        return _Broken.apply(output)

    def broken_loss(outputs, batch):
        if where == "loss forward":
            raise RuntimeError("broken on purpose")
        values, found = ppo_clip()(outputs, batch)
        return (_Broken.apply(values) if where == "loss backward" else values), found

    hook, used = None, ppo_clip()
    if where.startswith("loss"):
        used = loss(needs=["logprobs"])(broken_loss)
    else:
        hook = layers[0].mlp.register_forward_hook(broken)
    try:
        backend.forward_backward(state, batch, used)
    except RuntimeError as error:
        assert "broken on purpose" in str(error)
    else:
        raise AssertionError("nothing broke")
    if hook is not None:
        hook.remove()
    assert backend._built() is skeleton, "the model was made anew"
    assert tree.equal(backend.forward(state.params, batch), told)
    again, _ = backend.forward_backward(state, batch, ppo_clip())
    assert float(again.global_norm()) > 0
    same = tree.equal(again, expected)
    _, found = backend.apply_update(state, again)
    return same and found["perf/residency_copies"].value == 0


def trained_in_turn(folder, options):
    """What a call trains does not depend on what the first one trained."""
    alone = {name: options[name] for name in SHARED if name in options}
    one, many = (cls(folder, optimizer(), max_tokens=24, **o) for cls, o in ((Local, alone), (Fsdp, options)))
    batch, found = tiny_batch(), []
    for names in (frozenset({"model.norm.weight"}), None, frozenset({"model.embed_tokens.weight"})):
        grads = []
        for backend in (one, many):
            state = backend.init(KEY)
            state = attrs.evolve(state, params=attrs.evolve(state.params, trainable=names))
            grads.append(whole_of(backend.forward_backward(state, batch, ppo_clip())[0]))
        found.append(max(float((grads[1][n] - g).norm() / (g.norm() + 1e-9)) for n, g in grads[0].items()))
    return max(found)


def few_rows(folder, options, rows):
    """Fewer rows than ranks: some have nothing of their own and take part all the same."""
    backend, one = Fsdp(folder, optimizer(), max_tokens=24, **options), Local(folder, optimizer(), max_tokens=24)
    batch = tiny_batch().take(torch.arange(rows))
    a, b = one.init(KEY), backend.init(KEY)
    (ga, ma), (gb, mb) = one.forward_backward(a, batch, ppo_clip()), backend.forward_backward(b, batch, ppo_clip())
    gb = whole_of(gb)
    gap = max(float((gb[n] - g).abs().max()) for n, g in ga.items())
    mine, theirs = backend.forward(b.params, batch), one.forward(a.params, batch)
    out = float((mine.by_name["logprobs"] - theirs.by_name["logprobs"]).abs().max())
    told = max(abs(v.value - mb[n].value) for n, v in ma.items())
    return max(gap, out, told)


def other_batches(folder):
    """Other rows on each rank, and the same rows with other advantages, are an error on all ranks."""
    backend, batch, rank = Fsdp(folder, optimizer(), max_tokens=24), tiny_batch(), dist.get_rank()
    state, others = backend.init(KEY), batch.with_tokens(advantages=batch["advantages"] + rank)
    return [
        error_of(lambda own=own: backend.forward_backward(state, own, ppo_clip()))
        for own in (tiny_batch(KEY.fold_in(rank)), others)
    ]


def refused(folder, options):
    try:
        Fsdp(folder, optimizer(), **options).init(KEY)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def refused_token(folder):
    backend, batch = Fsdp(folder, optimizer()), tiny_batch()
    batch = attrs.evolve(batch, tokens=batch.tokens - 100)
    return error_of(lambda: backend.forward(backend.init(KEY).params, batch))


def save(folder, into, options, start="init", later=False):
    """A trained state, written, perhaps while the next update overwrites it; its digests by the whole."""
    backend, batch = Fsdp(folder, optimizer(), max_tokens=24, **options), tiny_batch()
    state = getattr(backend, start)(key=KEY)
    for _ in range(2):
        grads, _ = backend.forward_backward(state, batch, loss_for(backend.head))
        state, _ = backend.apply_update(state, grads)
    digest = tree.digest(whole_of(state))
    grads, _ = backend.forward_backward(state, batch, loss_for(backend.head))
    backend.save(state, into, later=later)
    backend.apply_update(state, grads)
    backend.saved()
    return digest


def restore(folder, source, options):
    backend = Fsdp(folder, optimizer(), max_tokens=24, **options)
    return tree.digest(whole_of(backend.restore(source)))


def adapters_off(folder, options):
    """The reference is the actor's base, from the first call on; updates share it and copy nothing."""
    common = {name: options[name] for name in SHARED if name in options}
    plain, backend = Local(folder, optimizer(), **common | {"lora": None}), Fsdp(folder, optimizer(), **options)
    want, state, batch = plain.forward(plain.init(KEY).params, tiny_batch()), backend.init(KEY), tiny_batch()
    reference, gaps = state.params.base, []
    for _ in range(3):
        told = backend.forward(reference, batch).by_name["logprobs"]
        gaps.append(float((told - want.by_name["logprobs"]).abs().max()))
        grads, _ = backend.forward_backward(state, batch, ppo_clip())
        assert list(grads) == state.params.trained() and all(g.dtype == torch.float32 for g in grads.values())
        state, found = backend.apply_update(state, grads)
        assert found["perf/residency_copies"].value == 0
    assert all(t._local_tensor is state.params[name]._local_tensor for name, t in reference.items())
    moved = backend.forward(state.params, batch).by_name["logprobs"]
    assert float((moved - want.by_name["logprobs"]).abs().max()) > 1e-3
    whole, merged = whole_of(state.params), dict(backend.weights(state.params).read())
    for name, t in Local(folder, optimizer(), lora=options["lora"]).weights(whole).read():
        assert torch.equal(t, merged[name])
    return max(gaps)


def narrow_base(folder, options):
    """The bytes of an element of frozen and of trained shards; steps with them are those with an fp32 base."""
    backend, batch = Fsdp(folder, optimizer(), max_tokens=24, **options), tiny_batch()
    loss, narrow = loss_for(options.get("head", "lm")), backend.load_pretrained()
    leaves = {name: sharded(local_of(t).float(), _of_dtype(t, torch.float32)) for name, t in narrow.params.items()}
    wide = snapshot(attrs.evolve(narrow, params=attrs.evolve(narrow.params, leaves=leaves)))
    for _ in range(2):
        outputs = [backend.forward(state.params, batch, loss.needs) for state in (narrow, wide)]
        steps = [backend.forward_backward(state, batch, loss) for state in (narrow, wide)]
        assert tree.equal(*outputs) and tree.equal(*(whole_of(grads) for grads, _ in steps))
        narrow, wide = (backend.apply_update(s, g)[0] for s, (g, _) in zip((narrow, wide), steps, strict=True))
    params = narrow.params
    shards = {name: local_of(t) for name, t in params.items()}
    names = {"frozen": list(params.base), "trained": params.trained()}
    assert all(torch.equal(whole_of(t).float(), whole_of(wide.params[name])) for name, t in params.items())
    sent = [chunk for bucket in backend.weights(params).held.buckets() for chunk in bucket]
    dtypes = {spec.name: spec.dtype for spec in backend.weights(params).specs}
    assert all(chunk.values.dtype == dtypes[chunk.name] for chunk in sent)
    half = {name: sharded(shards[name].bfloat16(), _of_dtype(t, torch.bfloat16)) for name, t in params.items()}
    halved = attrs.evolve(narrow, params=attrs.evolve(params, leaves=half))
    assert "is bfloat16, and what is trained is float32" in error_of(lambda: backend.save(halved, folder))
    # Another backend of these ranks would train the base in its compute dtype.
    more = attrs.evolve(narrow, params=attrs.evolve(params, trainable=None))
    bytes_each = {
        kind: sum(shards[name].nbytes for name in of) / sum(shards[name].numel() for name in of)
        for kind, of in names.items()
    }
    return bytes_each, error_of(lambda: backend.forward_backward(more, batch, loss))


def never_trained(folder, into):
    """A reference in bf16 has half the bytes, and says and restores the same."""
    half = {"dtype": "bfloat16", "max_tokens": 24}
    trained, backend, batch = Fsdp(folder, optimizer(), **half), Fsdp(folder, frozen(), **half), tiny_batch()
    full, state = trained.load_pretrained().params, backend.load_pretrained()
    outputs = [b.forward(params, batch) for b, params in ((trained, full), (backend, state.params))]
    backend.save(state, into)
    again = backend.restore(into)
    assert tree.equal(*outputs) and tree.equal(*(whole_of(s.params) for s in (state, again)))
    sizes = [sum(local_of(t).nbytes for t in params.values()) for params in (full, state.params)]
    return sizes, error_of(lambda: backend.forward_backward(again, batch, ppo_clip()))


def compared(folder):
    """First steps of the ranks together beside one process, which each rank has, in both orders."""
    one, many, batch = (
        Local(folder, optimizer(), max_tokens=24), Fsdp(folder, optimizer(), max_tokens=24), tiny_batch()
    )  # fmt: skip
    found = [compare_backends(a, b, batch, ppo_clip()) for a, b in ((one, many), (many, one))]
    return [(first.loss, first.grad_norm, first.gradients[first.worst]) for first in found]


def _of_dtype(t, dtype):
    spec = torch_private.spec_of(t)
    return torch_private.spec(spec.mesh, spec.placements, t.shape, dtype)


# The private names that backends/fsdp/torch_private.py uses, by the class that has them.
PRIVATE = {
    "DTensor": ("_local_tensor", "_spec"),
    "FSDPState": ("_fsdp_param_group", "_training_state", "_state_ctx", "_comm_ctx"),
    "FSDPStateContext": ("iter_forward_root", "post_backward_final_callback_queued", "is_last_backward"),
    "FSDPCommContext": (
        "device_handle", "post_forward_order", "all_gather_state", "reduce_scatter_state",
        "all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream",
    ),
    "FSDPParamGroup": (
        "fsdp_params", "reshard", "_training_state", "_orig_dtype", "_reduce_dtype", "_all_gather_result",
        "_post_forward_indices", "_post_reduce_event", "_reshard_after_forward_event", "_all_reduce_state",
        "_partial_reduce_output",
    ),
    "FSDPParam": (
        "_module_info", "_setattr_on_modules", "reset_sharded_param", "sharded_param", "_sharded_param_data",
        "unsharded_accumulated_grad", "_unsharded_param",
    ),
    "ParamModuleInfo": ("module", "param_name", "shared_modules", "shared_param_names"),
}  # fmt: skip


def private_names(folder):
    """The private names that an object of its kind lacks after a pass."""
    backend = Fsdp(folder, optimizer(), max_tokens=24)
    state = backend.init(KEY)
    backend.forward_backward(state, tiny_batch(), ppo_clip())
    fsdp = backend._built()._get_fsdp_state()
    group = fsdp._fsdp_param_group
    place = group.fsdp_params[0]
    objects = {
        "DTensor": next(iter(state.params.values())),
        "FSDPState": fsdp,
        "FSDPStateContext": fsdp._state_ctx,
        "FSDPCommContext": fsdp._comm_ctx,
        "FSDPParamGroup": group,
        "FSDPParam": place,
        "ParamModuleInfo": place._module_info,
    }
    assert all(type(value).__name__ == kind for kind, value in objects.items())
    assert objects.keys() == PRIVATE.keys()
    return [f"{kind}.{name}" for kind, names in PRIVATE.items() for name in names if not hasattr(objects[kind], name)]


def levels(folder, options, rows, loss_name):
    """Gradients, metrics and outputs of a loss of rows, alone and added to one of tokens, beside ``Local``."""
    used = {"pairs": bradley_terry(), "both": bradley_terry() + 0.5 * value_clip()}[loss_name]
    one = Local(folder, optimizer(), head="value", max_tokens=30)
    many = Fsdp(folder, optimizer(), head="value", max_tokens=30, **options)
    batch, states = tiny_pairs(pairs=rows // 2), []
    for backend in (one, many):
        state = backend.init(KEY)
        # A head of zeros would give every row the same value.
        leaves = {n: t + 0.5 if n == "score.weight" else t for n, t in state.params.items()}
        states.append(attrs.evolve(state, params=attrs.evolve(state.params, leaves=leaves)))
    (ga, ma), (gb, mb) = (b.forward_backward(s, batch, used) for b, s in zip((one, many), states, strict=True))
    whole = dict(many.named(gb))
    # A shift of all values cancels in pairs, so the gradient of a bias is rounding alone.
    gaps = [
        float((whole[n] - g).norm()) / max(float(g.norm()), 1e-3 * float(ga.global_norm())) for n, g in ga.items()
    ]
    gaps += [abs(v.value - mb[n].value) for n, v in ma.items()]
    needs = ("values", "row_values")
    mine, theirs = (b.forward(s.params, batch, needs) for b, s in zip((one, many), states, strict=True))
    assert mine.row_values.unique().numel() > 1 and mine.row_values.shape == theirs.row_values.shape == (rows,)
    return max(*gaps, *(float((mine.by_name[n] - theirs.by_name[n]).abs().max()) for n in needs))


def refused_groups(folder):
    """A group longer than the budget, and a field that the batch lacks."""
    backend, says = Fsdp(folder, optimizer(), head="value", max_tokens=30), []
    state, batch = backend.init(KEY), tiny_pairs(pairs=5)
    for given in (batch.with_rows(pair=[0] * 5 + [1] * 5), batch.without("pair")):
        try:
            backend.forward_backward(state, given, bradley_terry())
        except ValueError as error:
            says.append(str(error))
    return says


def named(folder, options):
    """``named`` of parameters, gradients and moments beside ``Local``; everything bitwise but what was reduced."""
    one, many = (cls(folder, optimizer(), max_tokens=24, **o) for cls, o in ((Local, {}), (Fsdp, options)))
    a, b = one.init(KEY), many.init(KEY)
    params = dict(many.named(b.params))
    assert list(params) == list(a.params) and all(torch.equal(t, params[n]) for n, t in a.params.items())
    assert not any(hasattr(t, "full_tensor") for t in params.values())
    for limit in ({"SMALL_BYTES": 0}, {"SMALL_BYTES": 600}, {"SMALL_COUNT": 2}):
        with mock.patch.multiple(sharding, **limit):
            assert tree.equal(dict(many.named(b.params)), params), limit
    with mock.patch.object(dist, "all_gather_into_tensor", side_effect=dist.all_gather_into_tensor) as gather:
        dict(many.named(b.params))
    assert gather.call_count == 1, "small tensors are gathered at once"
    batch = tiny_batch()
    (ga, _), (gb, _) = one.forward_backward(a, batch, ppo_clip()), many.forward_backward(b, batch, ppo_clip())
    gap = max(float((t - ga[n]).abs().max()) for n, t in many.named(gb))
    (a, _), (b, _) = one.apply_update(a, ga), many.apply_update(b, gb)
    slots = [[s for s in tree_leaves(x.optimizer, is_leaf=lambda s: isinstance(s, Slots)) if isinstance(s, Slots)]
             for x in (a, b)]  # fmt: skip
    assert len(slots[0]) == len(slots[1]) > 0
    for mine, theirs in zip(*slots, strict=True):
        gap = max(gap, *(float((t - mine[n]).abs().max()) for n, t in many.named(theirs)))
    return gap


def without_reset(folder):
    """Whether a call that fails leaves nothing behind although FSDP is not brought back to rest."""
    with mock.patch.object(torch_private, "reset", lambda root: None):
        try:
            return after_failure(folder, "loss forward", {})
        except (AssertionError, RuntimeError):
            return False


def several_tokens(folder, options):
    """Outputs of several tokens at each place, and the gradients of a loss of them, beside ``Local``."""
    batch = tiny_batch(rows=5)
    one, many = Local(folder, optimizer(), max_tokens=24), Fsdp(folder, optimizer(), max_tokens=24, **options)
    a, b = one.init(KEY), many.init(KEY)
    found, expected = (backend.forward(state.params, batch, ("top_logprobs_3", "top_ids_3"))
                       for backend, state in ((many, b), (one, a)))  # fmt: skip
    assert torch.equal(found.top_ids_3, expected.top_ids_3) and found.top_ids_3.dtype == torch.int64
    torch.testing.assert_close(found.top_logprobs_3, expected.top_logprobs_3)
    batch = batch.with_tokens(
        candidates=expected.top_ids_3, teacher_candidate_log_probs=2.0 * expected.top_logprobs_3 - 1.0
    )
    (ga, ma), (gb, mb) = (backend.forward_backward(state, batch, distill_top_k("forward"))
                          for backend, state in ((one, a), (many, b)))  # fmt: skip
    assert abs(ma["loss"].value - mb["loss"].value) < 1e-5
    gb = whole_of(gb)
    for name, g in ga.items():
        torch.testing.assert_close(gb[name], g, rtol=1e-4, atol=1e-6)
