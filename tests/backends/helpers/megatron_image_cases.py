"""What the ranks of test_megatron_images.py do; each function runs on all of them together."""

from unittest import mock

import attrs
import megatron_on_cpu
import torch
import torch.distributed as dist
import transformer_engine_on_cpu
from megatron_cases import DEVICE
from rank_cases import error_of, optimizer
from vision_cases import BUDGET, seen_batch

from verl_fn.backends.hf.vision import Seen
from verl_fn.backends.local import Local
from verl_fn.backends.megatron import Megatron, model
from verl_fn.backends.weight_sync.outlet import send
from verl_fn.state import tree
from verl_fn.steps import adamw, cross_entropy, entropy, ppo_clip, sgd
from verl_fn.testing import check_backend

SHARED = ("checkpointing", "lora", "freeze_vision_tower", "dtype")  # what Local takes too


def megatron(folder, options, **more):
    if DEVICE == "cpu":
        megatron_on_cpu.install()
    return Megatron(folder, more.get("optimizer", sgd(0.1)), device=DEVICE, max_tokens=BUDGET, **options)


def local(folder, options, **more):
    alone = {name: options[name] for name in SHARED if name in options}
    # After Megatron has made a Qwen3-VL, "cuda" was the first GPU on the second rank.
    device = DEVICE if DEVICE == "cpu" else f"cuda:{dist.get_rank()}"
    return Local(folder, more.get("optimizer", sgd(0.1)), device=device, max_tokens=BUDGET, **alone)


def rows_of(folder, rows):
    batch = seen_batch(folder).take(rows)
    return batch.with_tokens(loss_weight=batch["response_mask"] / batch["response_mask"].sum())


def apart(found, wanted):
    """The largest difference of any parameter, relative to its largest element, and which parameter has it."""
    assert found.keys() == wanted.keys()
    worst = {n: float((found[n] - t).abs().max() / t.abs().max().clamp(min=1e-3)) for n, t in wanted.items()}
    return max((error, name) for name, error in worst.items())


def beside_local(folder, options, rows, text=False):
    """The largest differences from one process, and which micro-batches of this rank have no images.

    Adapters' second matrices are zeros at first, so the first ones have gradients from the second step on.
    """
    batch = rows_of(folder, rows)
    if text:
        batch = attrs.evolve(batch.without("position_ids"), ragged={})
    update = {"optimizer": adamw(1e-3)} if "updates_by" in options else {}
    one, many = local(folder, options, **update), megatron(folder, options, **update)
    worst, blank, made = {"logprobs": 0.0, "gradients": (0.0, ""), "weights": (0.0, "")}, [], Seen.of

    def watched(*args):
        found = made(*args)
        blank.append(found is None or found.blank)
        return found

    a, b = one.load_pretrained(), many.load_pretrained()
    assert tree.equal(dict(a.params), dict(many.named(b.params)))
    assert tree.equal(dict(one.weights(a.params).read()), dict(many.weights(b.params).read()))
    for _ in range(2 if "lora" in options else 1):
        with mock.patch.object(Seen, "of", watched):
            outputs = many.forward(b.params, batch).logprobs
        worst["logprobs"] = max(
            worst["logprobs"], float((outputs - one.forward(a.params, batch).logprobs).abs().max())
        )
        (ga, _), (gb, _) = (e.forward_backward(s, batch, cross_entropy()) for e, s in ((one, a), (many, b)))
        trained = sorted(ga)
        worst["gradients"] = max(worst["gradients"], apart(dict(many.named(gb)), dict(ga)))
        (a, _), (b, _) = one.apply_update(a, ga), many.apply_update(b, gb)
        worst["weights"] = max(worst["weights"], apart(dict(many.named(b.params)), dict(a.params)))
    return worst | {"blank": blank, "trained": trained}


def rounded(folder):
    """The errors of log-probs and gradients in bf16, of Megatron and of one process."""
    batch, found = rows_of(folder, range(6)), []
    exact = local(folder, {})
    state = exact.load_pretrained()
    expected = exact.forward(state.params, batch).logprobs
    wanted, _ = exact.forward_backward(state, batch, cross_entropy())
    for made in (megatron, local):
        backend = made(folder, {"dtype": "bfloat16"})
        state = backend.load_pretrained()
        outputs = backend.forward(state.params, batch).logprobs
        grads = dict(backend.named(backend.forward_backward(state, batch, cross_entropy())[0]))
        squares = sum(float((grads[name] - g).square().sum()) for name, g in wanted.items())
        found.append((float((outputs - expected).norm()), squares**0.5))
    return found


def saved(folder, options, out):
    """Whether what Megatron saves is what it restores, and what one process saves and restores, in every bit."""
    batch, states = rows_of(folder, range(6)), []
    one, many = (made(folder, options, optimizer=optimizer()) for made in (local, megatron))
    for backend in (one, many):
        state = backend.load_pretrained()
        states.append(backend.apply_update(state, backend.forward_backward(state, batch, cross_entropy())[0])[0])
    many.save(states[1], out / "many")
    if dist.get_rank() == 0:
        one.save(states[0], out / "one")
    dist.barrier()
    again, other = many.restore(out / "many"), one.restore(out / "many")
    of_one = one.restore(out / "one")
    moved = many.restore(out / "one")
    trained = {name for leaf in moved.params.trained() for name in many._built().canonical.names(leaf)}
    return {
        "again": tree.equal(again, states[1]),
        "by one": tree.equal(dict(many.named(states[1].params)), dict(other.params)),
        "moments": tree.equal(dict(many.named(states[1].optimizer[-1].exp_avg)), dict(other.optimizer[-1].exp_avg)),
        "of one": tree.equal(dict(many.named(moved.params)), dict(of_one.params)),
        "trained": trained == set(of_one.params.trained()),
    }


def laws(folder, options, rows):
    """All laws, and the layout against one process, with images."""
    many, one = (made(folder, options, optimizer=optimizer()) for made in (megatron, local))
    check_backend(many, one, loss=ppo_clip() - 0.01 * entropy(), batch=rows_of(folder, rows))


def in_any_order(folder, options):
    """The largest difference of a row's log-probs if the rows stand in another order, or each is alone."""
    batch, backend = seen_batch(folder), megatron(folder, options)
    params, order, worst = backend.load_pretrained().params, [3, 2, 5, 0, 1, 4], 0.0
    expected = backend.forward(params, batch).logprobs.split(batch.lengths.tolist())
    for rows in (order, *([row] for row in order)):
        found = backend.forward(params, batch.take(rows)).logprobs
        worst = max(worst, float((found - torch.cat([expected[row] for row in rows])).abs().max()))
    return worst


def with_layers_of_transformer_engine(folder, options):
    """``beside_local`` with layers of transformer-engine's classes, of which there is a stand-in."""
    transformer_engine_on_cpu.install()
    kernels = dict.fromkeys(transformer_engine_on_cpu.KERNELS, False)
    # In fp32 the backend takes layers of its own.
    with mock.patch.object(model, "_has_plain_layers", lambda *args: False):
        return beside_local(folder, {"provider": kernels, **options}, range(6))


def refused(folder, options):
    """The error of making the model."""
    return error_of(lambda: megatron(folder, options).load_pretrained(), Exception)


def refused_sections(folder):
    """The error if all angles are the time's."""

    def of_time(config, *args):
        bridge, provider, plain = made(config, *args)
        provider.mrope_section = [sum(provider.mrope_section), 0, 0]
        return bridge, provider, plain

    made = model._provider
    with mock.patch.object(model, "_provider", of_time):
        return refused(folder, {})


def published(folder, options):
    """What this rank's engine gets of a frozen tower: as the only one that lacks it, as one that has it, and both.

    Also whether the tower is named by the same string before and after a step, on ranks that all change, and after
    an edit in place by the last rank.
    """
    backend, batch = megatron(folder, {"freeze_vision_tower": True, **options}), rows_of(folder, range(6))
    state = backend.load_pretrained()
    source = backend.weights(state.params)
    expected, first = dict(source.read()), dist.get_rank() == 0
    got = {}
    for name, lacks in (("none", False), ("first", first), ("others", not first), ("all", True)):
        found = dict((source if lacks else source.kept.changing).read())
        assert all(torch.equal(t, expected[name]) for name, t in found.items())
        got[name] = any(".visual." in name for name in found), any(".visual." not in name for name in found)
        assert found.keys() == {spec.name for spec in (source if lacks else source.kept.changing).specs}
    # A rank without an engine takes part in what the first one reads.
    if first:
        dict(source.kept.changing.read())
    else:
        send([], 1, source)
    named = source.kept.identify()
    state, _ = backend.apply_update(state, backend.forward_backward(state, batch, cross_entropy())[0])
    stepped = backend.weights(state.params).kept.identify()
    if dist.get_rank() == dist.get_world_size() - 1:
        leaf = next(name for name in state.params if "visual" in name)
        state.params[leaf].add_(1.0)
    return got, named == stepped, named == backend.weights(state.params).kept.identify()
