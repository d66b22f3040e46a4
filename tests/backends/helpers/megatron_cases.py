"""What the ranks of test_megatron.py and test_megatron_experts.py do; each function runs on all of them together."""

import os
import pickle
import warnings
from argparse import Namespace
from unittest import mock

import attrs
import megatron_mutants
import megatron_on_cpu
import torch
import torch.distributed as dist
import transformer_engine_on_cpu
from rank_cases import KEY, error_of, loss_for, optimizer, steps_of_one_process
from transformers import AutoModelForCausalLM

from verl_fn.algorithms.workers import get_here
from verl_fn.backends.fsdp import Fsdp
from verl_fn.backends.hf.logprobs import Shard, logprobs_and_entropy, sum_pi_squared
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.local import Local
from verl_fn.backends.megatron import Megatron
from verl_fn.backends.sampler import Sampler
from verl_fn.benchmarks import families, residency
from verl_fn.cli import main
from verl_fn.state import Batch, Grads, Params, Sampling, pack, requests_for, snapshot, tree
from verl_fn.steps import (
    adamw,
    aggregate,
    chain,
    clip_by_global_norm,
    cosine,
    loss,
    no_decay,
    ppo_clip,
    sgd,
    stateless,
)
from verl_fn.testing import LawViolation, check_backend, tiny_batch
from verl_fn.testing.backend_case import BackendCase, check_persistence, check_restore
from verl_fn.testing.backends import check_splits, check_updates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHARED = ("head", "dtype", "checkpointing", "lora")  # what Local takes too


def megatron(folder, options, cls=Megatron, **more):
    if DEVICE == "cpu":
        megatron_on_cpu.install()
    return cls(folder, more.pop("optimizer", None) or optimizer(), max_tokens=24, device=DEVICE, **options, **more)


def local(folder, options):
    alone = {name: options[name] for name in SHARED if name in options}
    return Local(folder, optimizer(), max_tokens=24, device=DEVICE, **alone)


def laws(folder, options, tolerance, name="Megatron"):
    """All laws, and the layout against one process."""
    backend = megatron(folder, options, getattr(megatron_mutants, name))
    # Two micro-batches where one rank has all rows.
    backend.max_tokens = 32 if backend.layout.shares == 1 else 24
    loss = loss_for(options.get("head", "lm"))
    check_backend(backend, local(folder, options), loss=loss, tolerance=tolerance)


def replay_splits(folder, options, tolerance):
    """Splits of a batch whose tokens go to random experts."""
    batch = tiny_batch()
    drawn = torch.rand(batch.num_tokens, 2, 4, generator=torch.Generator().manual_seed(0)).topk(2).indices
    batch = batch.with_tokens(routed_experts=drawn.to(torch.uint8))
    case = BackendCase(
        megatron(folder, {"router_replay": True, **options}), ppo_clip(), batch, tolerance, KEY, get_here
    )
    check_splits(case, case.trained("first"))


def first_step(folder, options, rows, name="Megatron"):
    """Parameters, outputs, loss, norm, gradients and updates beside ``Local``: the worst relative errors.

    Both matrices of an adapter change from the third step on.
    """
    loss, batch = loss_for(options.get("head", "lm")), tiny_batch(rows=rows)
    alone = {name: options[name] for name in ("head", "dtype", "lora") if name in options}
    steps = steps_of_one_process(folder, rows, {"device": DEVICE, **alone})
    many = megatron(folder, options, getattr(megatron_mutants, name))
    worst: dict = dict.fromkeys(("outputs", "loss", "grad_norm", "gradient", "update", "copies"), 0.0)
    state = many.init(KEY)
    assert tree.equal(dict(steps[0].before), dict(many.named(state.params)))
    for one in steps:
        outputs = many.forward(state.params, batch, loss.needs)
        for name, t in one.outputs.by_name.items():
            worst["outputs"] = max(worst["outputs"], float((t - outputs.by_name[name]).abs().max()))
        grads, told = many.forward_backward(state, batch, loss)
        worst["loss"] = max(worst["loss"], abs(one.loss - told["loss"].value))
        ours, whole = dict(many.named(grads)), float(one.grads.global_norm())
        for name, g in one.grads.items():
            error = float((ours[name] - g).norm()) / max(float(g.norm()), 1e-3 * whole)
            if error > worst["gradient"]:
                worst |= {"gradient": error, "parameter": name, "size": float(g.norm()) / whole}
        # Both apply the reference's gradients, so that a wrong optimizer cannot hide behind them.
        given = Grads(many.from_named({name: g.clone() for name, g in one.grads.items()}))
        state, told = many.apply_update(state, given)
        worst["grad_norm"] = max(worst["grad_norm"], abs(one.grad_norm / told["grad_norm"].value - 1))
        worst["copies"] = max(worst["copies"], told["perf/residency_copies"].value)
        ours = dict(many.named(state.params))
        for name, p in one.after.items():
            step = float((p - one.before[name]).norm())
            worst["update"] = max(worst["update"], float((ours[name] - p).norm()) / max(step, 1e-9) if step else 0.0)
    return worst


def first_step_beside_transformer_engine(folder, options, rows):
    """Transformer-engine may be installed where it has no GPU."""
    from megatron.core.transformer.moe import moe_utils

    def te_general_gemm(*args, **named):
        raise RuntimeError("No CUDA GPUs are available")

    with mock.patch.object(moe_utils, "te_general_gemm", te_general_gemm):
        return first_step(folder, options, rows)


def repeats(folder, options, rows):
    """Whether two gradients of many rows are the same bitwise, and the most bytes that they take on the GPU."""
    if DEVICE == "cpu":
        megatron_on_cpu.install()
    batch = tiny_batch(rows=rows)
    backend = Megatron(folder, optimizer(), max_tokens=batch.num_tokens, device=DEVICE, **options)
    state = backend.init(KEY)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    first, again = (dict(backend.forward_backward(state, batch, ppo_clip())[0]) for _ in range(2))
    assert 0 < sum(float(t.norm()) for t in first.values()) < float("inf")
    same = all(torch.equal(t, again[name]) for name, t in first.items())
    return same, torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0


def holds(folder, options):
    """How often Megatron's buffers are filled: once for a state, however many calls, and again for another."""
    backend, batch = megatron(folder, options), tiny_batch()
    first, second = backend.init(KEY), backend.init(KEY.fold_in("other"))
    resident, counts = backend._built().resident, []
    for state in (first, first, second, first):
        backend.forward(state.params, batch)
        backend.forward_backward(state, batch, ppo_clip())
        counts.append(resident.loads)
    with torch.no_grad():
        for t in first.params.values():
            t.add_(1.0)
    backend.forward(first.params, batch)
    return [*counts, resident.loads]


def close_experts(backend, params, seed):
    """Parameters whose experts' logits differ by about as much as rounding moves them."""
    whole, generator = dict(backend.named(params)), torch.Generator().manual_seed(seed)
    for name, t in whole.items():
        if name.endswith("mlp.gate.weight"):
            noise = 1e-7 * torch.randn(t.shape, generator=generator)
            whole[name] = t.mean(0, keepdim=True).expand_as(t) + noise.to(t.device)
    return attrs.evolve(params, leaves=backend.from_named(whole))


def replayed(folder, options, name="Megatron"):
    """A recording by one layout, replayed by another one in other micro-batches, where routers decide otherwise.

    Returns:
        The largest changes of a log-probability with and without replay, and the error of the gradient beside the
        first layout's.
    """
    needs, loss, batch = ("logprobs", "routed_experts"), ppo_clip(), tiny_batch(rows=9)
    one = megatron(folder, {"router_replay": True})
    two = megatron(folder, {"router_replay": True, **options}, getattr(megatron_mutants, name))
    two.max_tokens = 40
    state, other = one.init(KEY), two.init(KEY)
    recorded = one.forward(close_experts(one, state.params, 0), batch, needs)
    known = batch.with_tokens(old_log_probs=recorded.logprobs, routed_experts=recorded.routed_experts)
    known = known.take(torch.randperm(len(batch), generator=KEY.generator()))
    state, other = (
        attrs.evolve(s, params=close_experts(backend, s.params, 1)) for backend, s in ((one, state), (two, other))
    )
    outputs = two.forward(other.params, known, needs)
    assert torch.equal(outputs.routed_experts, known["routed_experts"])
    free = two.forward(other.params, known.without("routed_experts"), needs)
    assert not torch.equal(free.routed_experts, known["routed_experts"])
    changes = [float((found.logprobs - known["old_log_probs"]).abs().max()) for found in (outputs, free)]
    wanted, found = (
        dict(backend.named(backend.forward_backward(s, known, loss)[0]))
        for backend, s in ((one, state), (two, other))
    )
    scale = max(float(g.norm()) for g in wanted.values())
    return *changes, max(float((found[name] - g).norm()) / scale for name, g in wanted.items())


def replayed_from_engine(folder, options):
    """What the engine routed, replayed by a layout whose routers decide otherwise.

    Returns:
        The largest differences from the engine's log-probs, with and without replay and with wrong recordings, and
        the largest distance of a ratio of the first update from 1.
    """
    engine = Sampler(folder, slots=5, routed_experts=True)
    many = megatron(folder, {"router_replay": True, **options})
    other = many.init(KEY)
    engine.publish(0, many.weights(close_experts(many, other.params, 0)))
    prompts = [[1, *range(4, 5 + i)] for i in range(4)]
    batch = pack(engine.generate(requests_for(prompts, Sampling(6, n=2), KEY)))
    other = attrs.evolve(other, params=close_experts(many, other.params, 1))
    drawn, routed = batch["response_mask"].bool(), batch["routed_experts"]

    def error(batch):
        found = many.forward(other.params, batch).logprobs
        return float((found - batch["rollout_log_probs"])[drawn].abs().max())

    ends, spread = batch.cu_seqlens[1:] - 1, routed.clone()
    spread[ends] = (spread[ends] + 1) % 4
    wrong = {
        "free": batch.without("routed_experts"),
        "shifted": batch.with_tokens(routed_experts=routed.roll(1, 0)),
        "permuted": batch.with_tokens(routed_experts=routed.flip(1)),
        "last": batch.with_tokens(routed_experts=spread),
    }
    known = batch.with_tokens(
        old_log_probs=batch["rollout_log_probs"], advantages=torch.ones(len(drawn)), loss_weight=drawn.float()
    )
    _, metrics = many.forward_backward(other, aggregate(known, "token-mean"), ppo_clip())
    return error(batch), {name: error(b) for name, b in wrong.items()}, abs(metrics["actor/ppo_kl"].value)


def replay_refused(folder, dense):
    """What cannot be recorded or replayed."""
    backend, plain, batch = megatron(folder, {"router_replay": True}), megatron(folder, {}), tiny_batch()
    state, ones = backend.init(KEY), torch.ones(batch.num_tokens, 2, 2, dtype=torch.uint8)
    wrong = [batch, *(batch.with_tokens(routed_experts=t) for t in (ones[:, :1], ones + 9, ones))]
    fused = {"router_replay": True, "provider": {"moe_router_fusion": True}}
    return [
        *(error_of(lambda b=b: backend.forward_backward(state, b, ppo_clip())) for b in wrong),
        error_of(lambda: plain.forward(state.params, batch, ["routed_experts"])),
        error_of(lambda: megatron(dense, {"router_replay": True}).init(KEY)),
        error_of(lambda: megatron(folder, fused).init(KEY)),
    ]


def published(folder, options):
    """The source of weights lists what it gives, and gives what ``named`` does."""
    backend = megatron(folder, options)
    state = backend.load_pretrained()
    source, wanted = backend.weights(state.params), dict(backend.named(state.params))
    given = [chunk for bucket in source.buckets(max_bytes=2048) for chunk in bucket]
    assert [spec.name for spec in source.specs] == list(dict.fromkeys(chunk.name for chunk in given))
    for spec in source.specs:
        rows = torch.cat([chunk.values for chunk in given if chunk.name == spec.name])
        assert tuple(rows.shape) == spec.shape and torch.equal(rows, wanted[spec.name])
    one = Local(folder, optimizer(), lora=options.get("lora")).load_pretrained()
    return tree.equal(dict(one.params), {name: t.cpu() for name, t in wanted.items()})


def adapters(folder, options):
    """The base is the reference, before and after updates, which leave it as it is; weights are published merged."""
    plain, backend, batch = local(folder, {}), megatron(folder, options), tiny_batch()
    expected, state = plain.forward(plain.init(KEY).params, batch).logprobs, backend.init(KEY)
    reference, gaps = state.params.base, []
    for _ in range(3):
        gaps.append(float((backend.forward(reference, batch).logprobs - expected).abs().max()))
        grads, _ = backend.forward_backward(state, batch, ppo_clip())
        assert list(grads) == state.params.trained() and not grads.keys() & reference.keys()
        state, _ = backend.apply_update(state, grads)
    assert all(t is state.params[name] for name, t in reference.items())
    moved = backend.forward(state.params, batch).logprobs
    assert float((moved - expected).abs().max()) > 1e-3
    one, whole = local(folder, options), Params(dict(backend.named(state.params)))
    assert tree.equal(dict(one.weights(whole).read()), dict(backend.weights(state.params).read()))
    all_trained = attrs.evolve(state, params=attrs.evolve(state.params, trainable=None))
    return max(gaps), error_of(lambda: backend.forward_backward(all_trained, batch, ppo_clip()))


def narrow_base(folder, options):
    """The bytes of an element of frozen and of trained leaves; steps with them are those with an fp32 base."""
    backend, batch = megatron(folder, options), tiny_batch()
    loss, narrow = loss_for(options.get("head", "lm")), backend.load_pretrained()
    wide = snapshot(attrs.evolve(narrow, params=tree.map_tensors(torch.Tensor.float, narrow.params)))
    for _ in range(2):
        outputs = [backend.forward(state.params, batch, loss.needs) for state in (narrow, wide)]
        steps = [backend.forward_backward(state, batch, loss) for state in (narrow, wide)]
        assert tree.equal(*outputs) and tree.equal(*(grads for grads, _ in steps))
        narrow, wide = (backend.apply_update(s, g)[0] for s, (g, _) in zip((narrow, wide), steps, strict=True))
    params = narrow.params
    assert tree.equal(tree.map_tensors(torch.Tensor.float, params), wide.params)
    half = attrs.evolve(narrow, params=tree.map_tensors(torch.Tensor.bfloat16, params))
    assert "is bfloat16, and what is trained is float32" in error_of(lambda: backend.save(half, folder))
    # The base of a value model lacks its head.
    for given in (params, *([] if "head" in options else [params.base])):
        source = backend.weights(given)
        published = dict(source.read())
        assert [(s.name, s.dtype) for s in source.specs] == [(name, t.dtype) for name, t in published.items()]
    one = local(folder, options)
    whole = attrs.evolve(one.load_pretrained().params, leaves=dict(backend.named(params)))
    assert tree.equal(dict(one.weights(whole).read()), dict(backend.weights(params).read()))
    names = {"frozen": list(params.base), "trained": params.trained()}
    return {kind: {params[name].element_size() for name in of} for kind, of in names.items()}


def lent(folder, options):
    """Frozen elements that the model holds a copy of, with two states in turn, whose outputs are each its own.

    Returns:
        The number of elements that are copied and that are the state's own, and the number after memory was freed.
    """
    backend, batch, found = megatron(folder, {"lora": Lora(rank=4, alpha=8.0), **options}), tiny_batch(), []
    states = [backend.init(KEY), backend.init(KEY.fold_in("other"))]
    wanted = [backend.forward(state.params, batch).logprobs for state in states]
    before = [snapshot(state.params) for state in states]
    pieces = backend._built().pieces
    for state, logprobs in zip(2 * states, 2 * wanted, strict=True):
        assert torch.equal(backend.forward(state.params, batch).logprobs, logprobs)
        own = {t.untyped_storage().data_ptr() for t in state.params.base.values()}
        held = [pieces[name].param for name in state.params.base]
        found.append([sum(p.numel() for p in held if (p.data_ptr() in own) == shared) for shared in (False, True)])
    # States of another device or dtype are copied, and written to by nobody.
    wide = attrs.evolve(states[0].params, leaves={n: t.double().float() for n, t in states[0].params.items()})
    assert torch.equal(backend.forward(wide, batch).logprobs, wanted[0])
    backend.free_buffers()
    assert all(tree.equal(state.params, kept) for state, kept in zip(states, before, strict=True))
    return found, sum(p.untyped_storage().nbytes() > 8 for p in held)


def moves(folder, options, source, into):
    """Restores a state of another backend or layout, saves it again; a digest of it in whole tensors."""
    backend = megatron(folder, options)
    state = backend.restore(source)
    backend.save(state, into, later=True)
    backend.saved()
    return tree.digest({name: t.cpu() for name, t in backend.named(state.params)})


def trained(folder, options, into):
    """Saves a state with moments."""
    backend, batch = megatron(folder, options), tiny_batch()
    state = backend.init(KEY)
    state, _ = backend.apply_update(state, backend.forward_backward(state, batch, ppo_clip())[0])
    backend.save(state, into)
    return tree.digest({name: t.cpu() for name, t in backend.named(state.params)})


def one_step(folder, options, source, into, sharded=False):
    """Restores a state, makes one step, by Megatron or by FSDP, and saves the next one."""
    backend = Fsdp(folder, optimizer(), max_tokens=24) if sharded else megatron(folder, options)
    batch = tiny_batch()
    state = backend.restore(source)
    state, _ = backend.apply_update(state, backend.forward_backward(state, batch, ppo_clip())[0])
    backend.save(state, into)


def refused(folder, options):
    return error_of(lambda: megatron(folder, options).init(KEY))


def refused_token(folder, options):
    backend, batch = megatron(folder, options), tiny_batch()
    batch = attrs.evolve(batch, tokens=batch.tokens - 100)
    return error_of(lambda: backend.forward(backend.init(KEY).params, batch))


def other_batches(folder, options):
    """The same rows on each rank, with other positions or advantages."""
    backend, batch, rank = megatron(folder, options), tiny_batch(), dist.get_rank()
    moved = attrs.evolve(batch, positions=batch.positions + rank)
    others, state = batch.with_tokens(advantages=batch["advantages"] + rank), backend.init(KEY)
    return [
        error_of(lambda: backend.forward(state.params, moved)),
        error_of(lambda: backend.forward_backward(state, others, ppo_clip())),
    ]


def refused_need(folder, options, need):
    backend = megatron(folder, options)
    params = backend.init(KEY).params
    return error_of(lambda: backend.forward(params, tiny_batch(), ["logprobs", need]))


def other_layouts(folder, into):
    """States of another layout and of another backend, wherever a state goes in."""
    batch, plain = tiny_batch(), Local(folder, optimizer())
    here, there = megatron(folder, {}), megatron(folder, {"tp": 2})
    mine, found = here.init(KEY), []
    grads, _ = here.forward_backward(mine, batch, ppo_clip())
    for state in (there.init(KEY), plain.init(KEY)):
        found += [
            error_of(lambda s=state: here.forward(s.params, batch)),
            error_of(lambda s=state: here.forward_backward(s, batch, ppo_clip())),
            error_of(lambda s=state: here.apply_update(s, grads)),
            error_of(lambda s=state: here.apply_update(mine, Grads(dict(s.params)))),
            error_of(lambda s=state: here.save(s, into)),
            error_of(lambda s=state: here.named(s.params)),
        ]
    here.apply_update(mine, grads)
    return found


def masks(folder, options):
    """Weight decay of some parameters beside ``Local``; and a mask that would divide a parameter of Megatron."""
    batch, makes = tiny_batch(), [no_decay("norm", "embed"), lambda name, t: t.ndim > 1]
    worst = 0.0
    for mask in makes:
        decayed = chain(adamw(1e-2, weight_decay=0.5, weight_decay_mask=mask))
        one, many = Local(folder, decayed, device=DEVICE), megatron(folder, options, optimizer=decayed)
        a, b = one.init(KEY), many.init(KEY)
        grads, _ = one.forward_backward(a, batch, ppo_clip())
        given = Grads(many.from_named(grads))
        new = one.apply_update(a, grads)[0].params
        ours = dict(many.named(many.apply_update(b, given)[0].params))
        worst = max(worst, *(float((ours[name] - t).abs().max()) for name, t in new.items()))
    divides = chain(adamw(1e-2, weight_decay_mask=no_decay("q_proj")))
    return worst, error_of(lambda: megatron(folder, options, optimizer=divides).init(KEY))


@loss(needs=["logprobs"])
def nothing(outputs, batch):
    return 0.0 * outputs.logprobs, {}


def losses_of_routers(folder, options, coefficients=(0.1, 0.05)):
    """The gradient of losses that routers add, beside the gradient of the same losses of transformers' model.

    Rows are equal, so that the losses are the same for each micro-batch of whole rows.

    Returns:
        The largest error of a parameter's gradient, relative to the largest gradient, and the largest gradient.
    """
    added = dict(zip(("moe_aux_loss_coeff", "moe_z_loss_coeff"), coefficients, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backend = megatron(folder, {**options, "provider": {"moe_router_load_balancing_type": "aux_loss", **added}})
        state = backend.load_pretrained()
    backend.max_tokens = 32 // backend.layout.shares
    rows = torch.randint(8, (8,), generator=KEY.generator()).repeat(4, 1)
    batch = Batch.from_rows(list(rows), {"response_mask": [[0.0] + [1.0] * 7] * 4})
    found = dict(backend.named(backend.forward_backward(state, aggregate(batch, "token-mean"), nothing)[0]))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    inputs: list = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_pre_hook(lambda m, args: inputs.append((m.weight, args[0])))
    model(input_ids=rows)
    total = torch.zeros(())
    for weight, hidden in inputs:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ weight.T
        probs, experts = logits.softmax(-1), logits.shape[-1]
        share = torch.nn.functional.one_hot(probs.topk(2).indices, experts).sum(1).float().mean(0) / 2
        total = total + coefficients[0] * experts * (share * probs.mean(0)).sum()
        total = total + coefficients[1] * logits.logsumexp(-1).square().mean()
    total.backward()
    wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    scale = max(float(g.norm()) for g in wanted.values())
    return max(float((found[n] - g).norm()) for n, g in wanted.items()) / scale, scale


def norms_by_parameter(folder, options):
    """An optimizer that divides each gradient by its own norm.

    Returns:
        The largest relative error of a norm beside the norm of the whole tensors, and the error of a sum without the
        parameter's name.
    """
    norms: dict = {}

    def normalized(grads, update):
        norms.update({name: update.reduce(g.square().sum(), name).sqrt() for name, g in grads.items()})
        return Grads({name: g / norms[name] for name, g in grads.items()}), update

    def unnamed(grads, update):
        update.reduce(torch.ones(()))
        return grads, update

    backend, batch = megatron(folder, options, optimizer=chain(stateless(normalized), sgd(0.1))), tiny_batch()
    state = backend.init(KEY)
    grads, _ = backend.forward_backward(state, batch, ppo_clip())
    whole, place, worst = dict(backend.named(grads)), backend._built().canonical.place, 0.0
    backend.apply_update(state, grads)
    for leaf, norm in norms.items():
        of_leaf = [place(hub).of(whole[place(hub).name]) for hub in leaf.split("+")]
        wanted = float(torch.stack([t.double().square().sum() for t in of_leaf]).sum().sqrt())
        worst = max(worst, abs(float(norm) - wanted) / max(wanted, 1e-6))
    backend = megatron(folder, options, optimizer=chain(stateless(unnamed), sgd(0.1)))
    state = backend.init(KEY)
    grads, _ = backend.forward_backward(state, batch, ppo_clip())
    if options.get("ep", 1) > 1:
        return worst, error_of(lambda: backend.apply_update(state, grads))
    backend.apply_update(state, grads)
    return worst, None


def beside_megatrons_optimizer(folder, options):
    """Updates beside those of Megatron's own distributed optimizer, from the same gradients in the same buffers.

    Returns:
        The largest difference of a weight, the largest relative one of a norm, and the largest change of a weight.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    schedule, batch = cosine(1e-2, 4, 1), tiny_batch()
    decayed = adamw(schedule, (0.8, 0.95), 1e-6, 0.5, weight_decay_mask=lambda name, t: t.ndim > 1)
    backend = megatron(folder, options, optimizer=chain(clip_by_global_norm(0.1), decayed))
    state, model = backend.init(KEY), backend._built()
    config = OptimizerConfig(
        lr=1e-2, weight_decay=0.5, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6, clip_grad=0.1,
        params_dtype=torch.float32, use_distributed_optimizer=True,
    )  # fmt: skip

    weight, norm, change = 0.0, 0.0, 0.0
    with backend.layout.active():
        theirs = get_megatron_optimizer(config, [model.built.ddp])
        for count in range(3):
            grads, _ = backend.forward_backward(state, batch, ppo_clip())
            for group in theirs.param_groups:
                # As Megatron's scheduler does, which knows the decay of matrices alone as ``wd_mult``.
                group["lr"], group["weight_decay"] = schedule(count), 0.5 * group["wd_mult"]
            _, their_norm, _ = theirs.step()
            before = {name: t.clone() for name, t in state.params.items()}
            state, metrics = backend.apply_update(state, grads)
            norm = max(norm, abs(metrics["grad_norm"].value / float(their_norm) - 1))
            for name, t in state.params.items():
                if t.numel():
                    weight = max(weight, float((t - model.pieces[name].weight).abs().max()))
                    change = max(change, float((t - before[name]).abs().max()))
    return weight, norm, change


def vocabulary_shared(entropy, heated, chunk):
    """Log-probs and entropies of a shared vocabulary beside those of a whole one, with all gradients."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(13, 8, generator=generator), torch.randn(22, 8, generator=generator)
    targets = torch.randint(0, 22, (13,), generator=generator)
    heat = torch.rand(13, generator=generator) + 0.5 if heated else None
    d = torch.randn(2, 13, generator=generator)
    each = 22 // ranks
    own = weight[rank * each : (rank + 1) * each].clone().requires_grad_()
    here, there, whole = (t.clone().requires_grad_() for t in (hidden, hidden, weight))
    wanted = logprobs_and_entropy(there, whole, None, targets, heat, entropy=entropy)
    shard = Shard(rank * each, dist.group.WORLD)
    found = logprobs_and_entropy(here, own, None, targets, heat, entropy=entropy, chunk=chunk, shard=shard)
    for outputs in (wanted, found):
        sum((t * w).sum() for t, w in zip(outputs, d, strict=True) if t is not None).backward()
    dist.all_reduce(here.grad)
    pairs = [(here.grad, there.grad), (own.grad, whole.grad[rank * each : (rank + 1) * each])]
    pairs += [(a, b) for a, b in zip(found, wanted, strict=True) if a is not None]
    squares = sum_pi_squared(hidden, own.detach(), None, heat, chunk=chunk, shard=shard)
    pairs.append((squares, sum_pi_squared(hidden, weight, None, heat)))
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


# What the backend uses of both libraries, and what is not documented as public.
PRIVATE = {
    "megatron.bridge.AutoBridge": ("_model_bridge",),
    "megatron.bridge.models.conversion.model_bridge.MegatronModelBridge": ("build_conversion_tasks",),
    "megatron.bridge.models.conversion.param_mapping.MegatronParamMapping": (
        "broadcast_from_pp_rank",
        "gather_from_ep_ranks",
        "gather_from_tp_ranks",
    ),
    "megatron.core.distributed.DistributedDataParallel": ("start_param_sync", "zero_grad_buffer"),
    "megatron.core.distributed.fsdp.src.megatron_fsdp.MegatronFSDP": (
        "_replace_param_with_raw_if_needed",
        "all_gather_and_wait_parameters_ready",
        "synchronize_param_gather",
    ),
    "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer.DataParallelBuffer": (
        "_get_item_slice_in_shard",
        "get_item",
    ),
    "megatron.core.optimizer.DistributedOptimizer": ("_get_model_param_range_map",),
    "megatron.core.transformer.moe.router_replay.RouterReplay": (
        "clear_indices",
        "clear_router_replay_action",
        "get_recorded_indices",
        "set_router_replay_action",
        "set_target_indices",
    ),
}


def private_names():
    """The names of megatron that are missing, of those that this backend uses without being promised them."""
    found = []
    for path, names in PRIVATE.items():
        module, _, name = path.rpartition(".")
        owner = getattr(__import__(module, fromlist=[name]), name)
        found += [f"{path}.{name}" for name in names if not hasattr(owner, name)]
    return found


def pickled(folder, options):
    """Whether the bytes of what a call returns name Megatron."""
    backend = megatron(folder, options)
    return b"megatron" in pickle.dumps(backend.forward(backend.init(KEY).params, tiny_batch()))


def refuses_cuda():
    """The replacement of CUDA where CUDA works."""
    kept = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    try:
        return error_of(megatron_on_cpu.install.__wrapped__, RuntimeError)
    finally:
        torch.cuda.is_available = kept


def run(arguments):
    """The exit status of a run under torchrun, whose processes are these ranks."""
    megatron_on_cpu.install()
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    try:
        return main(arguments)
    except SystemExit as end:  # of a process that followed the first one
        return end.code


CHECKS = {
    "persistence": lambda case: check_persistence(case, case.trained("first"), case.trained("second")),
    "splits": lambda case: check_splits(case, case.trained("first")),
    "updates": lambda case: check_updates(case, case.trained("first"), case.backend.optimizer),
    "restore": lambda case: check_restore(case, case.trained("first")),
}


def mutant(folder, name, options, check):
    """The law that a broken backend breaks, of the checks of one kind."""
    backend = megatron(folder, options, getattr(megatron_mutants, name))
    try:
        CHECKS[check](BackendCase(backend, ppo_clip(), tiny_batch(), 1e-5, KEY, get_here))
    except LawViolation as violation:
        return violation.law
    return None


def family(folder, options):
    """Outputs beside ``Local``, and whether the weights that come out are those that went in, bitwise.

    New models have norms of 1 and biases of 0, so outputs are those of weights that all differ from these.
    """
    batch, needs = tiny_batch(), ("logprobs", "entropy", "sum_pi_squared")
    one, many = local(folder, {}), megatron(folder, options)
    a, b = one.load_pretrained(), many.load_pretrained()
    same, generator = tree.equal(dict(a.params), dict(many.named(b.params))), KEY.generator()
    moved = {name: t + 0.2 * torch.randn(t.shape, generator=generator) for name, t in a.params.items()}
    ours, theirs = Params(moved), attrs.evolve(b.params, leaves=many.from_named(moved))
    outputs = one.forward(ours, batch, needs), many.forward(theirs, batch, needs)
    return same, max(float((t - outputs[1].by_name[n]).abs().max()) for n, t in outputs[0].by_name.items())


def of_transformer_engine(folder, options):
    """Megatron with layers of transformer-engine's classes, of which there is a stand-in."""
    transformer_engine_on_cpu.install()
    kernels = dict.fromkeys(transformer_engine_on_cpu.KERNELS, False)
    return Megatron(folder, sgd(0.0), device="cpu", provider=kernels, **options)


def with_layers_of_transformer_engine(folder, options, batch):
    """What that computes."""
    cuts = max(256, batch.num_tokens) if options.get("pp", 1) == 1 else 20
    return families.computed(of_transformer_engine(folder, {"max_tokens": cuts, **options}), batch)


def routes_in_a_table(folder, options, batch):
    """What routers record and replay for rows in one table, beside the same rows one by one.

    Returns:
        How many experts of a recording differ, the largest difference of a log-probability if random experts are
        replayed, and the largest change of one by the replay.
    """
    backend = of_transformer_engine(folder, {"max_tokens": 256, "router_replay": True, **options})
    params = backend.load_pretrained().params
    needs = ("logprobs", "routed_experts")

    def one_by_one(batch):
        outputs = [backend.forward(params, batch.take([i]), needs).by_name for i in range(len(batch))]
        return [torch.cat([found[name] for found in outputs]) for name in needs]

    free, (_, recorded) = backend.forward(params, batch, needs), one_by_one(batch)
    experts = backend._built().routers.experts
    drawn = torch.rand(*recorded.shape[:-1], experts, generator=KEY.generator()).topk(recorded.shape[-1]).indices
    batch = batch.with_tokens(routed_experts=drawn.to(recorded.dtype))
    replayed, (expected, again) = backend.forward(params, batch, needs), one_by_one(batch)
    assert all(torch.equal(found, batch["routed_experts"]) for found in (replayed.routed_experts, again))
    changes = [(replayed.logprobs - other).abs().max() for other in (expected, free.logprobs)]
    return int((free.routed_experts != recorded).sum()), *map(float, changes)


def refused_with_transformer_engine(folder, options):
    return error_of(lambda: of_transformer_engine(folder, options).init(KEY))


def beside_a_loop(folder, sizes):
    """The gradient norms of the benchmark's loop in place and of the backend, which both update twice and more."""
    megatron_on_cpu.install()
    args = Namespace(
        backend="megatron", shape="tiny", device=DEVICE, rounds=1, rows=2, sizes=sizes.items(), provider=()
    )
    result = residency.compare(args, str(folder))
    assert result["ranks"] == dist.get_world_size() and result["tokens_a_second_a_gpu"]["ours"] > 0
    return result["grad_norm"]
