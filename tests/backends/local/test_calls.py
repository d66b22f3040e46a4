"""A call of a backend depends on its arguments alone: not on other threads, nor on the caller's settings of torch."""

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest
import torch
from peft import LoraConfig

from verl_fn.backends import base
from verl_fn.backends.hf.ulysses import LayoutError
from verl_fn.backends.local import Local
from verl_fn.backends.mock import Mock
from verl_fn.backends.sampler import Sampler
from verl_fn.errors import ArgumentError
from verl_fn.state import (
    Batch,
    Key,
    NotDifferentiable,
    Request,
    Sampling,
    TokenOutputs,
    is_donated,
    requests_for,
    tree,
)
from verl_fn.state.guards import expect
from verl_fn.steps import adamw, entropy, loss, ppo_clip, sgd, value_clip
from verl_fn.testing import tiny_batch

LOSS = ppo_clip() - 0.01 * entropy()


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SURROUNDINGS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "default dtype": lambda: default_dtype(torch.float64),
    "default device": lambda: torch.device("meta"),
}


def local(tiny, **options):
    return Local(tiny, adamw(0.01), max_tokens=24, **options)


BACKENDS = {
    "local": local,
    "checkpointing": lambda tiny: local(tiny, checkpointing=True),
    "bf16": lambda tiny: local(tiny, dtype="bfloat16"),
    "mock": lambda tiny: Mock(8, adamw(0.01), max_tokens=24),
}


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("name", BACKENDS)
def test_the_callers_settings_change_nothing(tiny, tmp_path, name, surroundings):
    """Not one bit, from the making of a state to its third step; values made inside can be used outside."""
    backend, batch = BACKENDS[name](tiny), tiny_batch()

    def steps(around):
        with around():
            state = backend.init(Key.from_seed(0))
            first, _ = backend.forward_backward(state, batch, LOSS)
            state, _ = backend.apply_update(state, first)
        second, reported = backend.forward_backward(state, batch, LOSS)
        with around():
            outputs = backend.forward(state.params, batch, ["logprobs", "entropy"])
            kept, _ = backend.apply_update(state, second, donate=False)
            backend.save(state, tmp_path / "state")
            saved = backend.restore(tmp_path / "state")
            placed = backend.place(saved, params="cpu", optimizer="cpu")
        again, _ = backend.forward_backward(placed, batch, LOSS)
        return outputs, second, reported, kept, saved, again

    expected, found = steps(contextlib.nullcontext), steps(SURROUNDINGS[surroundings])
    assert tree.first_difference(found, expected) is None


@pytest.mark.parametrize("theirs", [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("asked", [True, False])
def test_deterministic_kernels_do_not_fill_what_they_allocate(tiny, asked, theirs):
    """And the caller finds its own settings again, also after an error."""
    of_torch = torch.utils.deterministic

    def settings():
        return torch.are_deterministic_algorithms_enabled(), of_torch.fill_uninitialized_memory

    @loss(needs=["logprobs"])
    def look(outputs, batch):
        seen.append(settings())
        raise ZeroDivisionError

    before, seen, backend = settings(), [], local(tiny, deterministic=asked)
    state = backend.init(Key.from_seed(0))
    torch.use_deterministic_algorithms(theirs[0])
    of_torch.fill_uninitialized_memory = theirs[1]
    try:
        with pytest.raises(ZeroDivisionError):
            backend.forward_backward(state, tiny_batch(), look)
        assert seen == [(True, False) if asked else theirs] and settings() == theirs
    finally:
        torch.use_deterministic_algorithms(before[0])
        of_torch.fill_uninitialized_memory = before[1]


def test_the_loss_as_a_function_does_not_depend_on_autocast(tiny):
    """The backward pass of a transformation is the caller's, after the function has returned."""
    for backend in (local(tiny), Mock(8, adamw(0.01))):
        params, batch = backend.init(Key.from_seed(0)).params, tiny_batch()
        expected = backend.loss_fn(batch, LOSS)(params)
        with torch.autocast("cpu", torch.bfloat16):
            assert tree.equal(backend.loss_fn(batch, LOSS)(params), expected)


def test_values_that_were_made_in_inference_mode_can_be_computed_with(tiny):
    backend, batch = local(tiny), tiny_batch()
    state = backend.init(Key.from_seed(0))
    expected = backend.forward_backward(state, batch, LOSS)
    with torch.inference_mode():
        state, batch = tree.map_tensors(torch.clone, (state, batch))
    assert tree.equal(backend.forward_backward(state, batch, LOSS), expected)


def at_once(*calls):
    """The results of these calls, each four times in a thread of its own."""
    begin = threading.Barrier(len(calls))

    def repeated(call):
        begin.wait(30)
        return [call() for _ in range(4)]

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(repeated, calls))


@pytest.mark.parametrize("name", BACKENDS)
def test_threads_share_a_backend(tiny, name):
    """Two states, and both steps with each."""
    backend, batch = BACKENDS[name](tiny), tiny_batch()
    states = [backend.init(Key.from_seed(seed)) for seed in (0, 1)]
    calls = [lambda s=s: backend.forward_backward(s, batch, LOSS) for s in states]
    calls += [lambda s=s: backend.forward(s.params, batch) for s in states]
    expected = [call() for call in calls]
    for want, found in zip(expected, at_once(*calls), strict=True):
        assert all(tree.equal(result, want) for result in found)


def test_threads_make_the_states_of_their_keys(tiny):
    backends = [local(tiny), local(tiny, head="value")]
    expected = [backend.init(Key.from_seed(3)) for backend in backends]
    found = at_once(*(lambda b=b: b.init(Key.from_seed(3)) for b in (local(tiny), local(tiny, head="value"))))
    for want, states in zip(expected, found, strict=True):
        assert all(tree.equal(state, want) for state in states)


def test_threads_share_a_sampler(tiny):
    params = local(tiny).init(Key.from_seed(0)).params
    sampler = Sampler(tiny, slots=3)
    sampler.publish(0, local(tiny).weights(params))
    calls = [
        lambda seed=seed: [
            s.tokens.tolist()
            for s in sampler.generate(requests_for([[1, 4], [1, 5, 6]], Sampling(12, n=2), Key.from_seed(seed)))
        ]
        for seed in (0, 1)
    ]
    expected = [call() for call in calls]
    for want, found in zip(expected, at_once(*calls), strict=True):
        assert found == [want] * 4


def test_a_call_beside_another_is_refused_where_ranks_need_an_order():
    backend = BACKENDS["mock"](None)
    backend.several_ranks, busy = True, backend._one_call
    began, end = threading.Event(), threading.Event()

    def other():
        with busy():
            began.set()
            assert end.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert began.wait(30)
    errors = []
    for _ in range(2):
        with pytest.raises(LayoutError, match="another thread") as caught, busy():
            pass
        errors.append(caught.value)
    # An error of its own for each call: a shared one would collect the tracebacks of all threads.
    assert errors[0] is not errors[1]
    end.set()
    thread.join(30)
    with busy(), busy():
        pass


@pytest.mark.parametrize("name", ["local", "mock"])
def test_arguments_of_other_kinds_are_named(tiny, name):
    backend, batch = BACKENDS[name](tiny), tiny_batch()
    state = backend.init(Key.from_seed(0))
    grads = backend.forward_backward(state, batch, LOSS)
    wrong = {
        "forward takes a Params, not a TrainState: pass state.params": lambda: backend.forward(state, batch),
        "forward takes a Batch, not a list": lambda: backend.forward(state.params, [[1, 2]]),
        "forward_backward takes a TrainState, not a Params: pass the whole state": lambda: backend.forward_backward(
            state.params, batch, LOSS
        ),
        "Local takes an Optimizer, not a type": lambda: Local(tiny, torch.optim.AdamW),
        r"Local takes a Lora, not a int: write lora=Lora\(rank\)": lambda: local(tiny, lora=8),
        r"Local takes a Lora, not a dict: write lora=Lora\(rank=8": lambda: local(tiny, lora={"rank": 8}),
        r"Local takes a Lora, not a LoraConfig: write lora=": lambda: local(tiny, lora=LoraConfig(r=8)),
        "key is a Key, such as .*, not a int": lambda: requests_for([[1]], Sampling(1), 0),
        "a loss is a Loss, not a function": lambda: backend.forward_backward(state, batch, ppo_clip),
        "apply_update takes .*Grads.*, not a dict": lambda: backend.apply_update(state, {}),
        "apply_update takes .*Grads.*, not a tuple": lambda: backend.apply_update(state, grads),
        "apply_update takes a TrainState, not a Params": lambda: backend.apply_update(state.params, grads[0]),
    }
    for message, call in wrong.items():
        with pytest.raises(ArgumentError, match=message):
            call()
    assert not is_donated(state) and not is_donated(grads[0])


@pytest.mark.parametrize("name", ["local", "mock"])
@pytest.mark.parametrize("token", [-100, -1, "the first that is too large", 10**6])
def test_tokens_that_the_model_does_not_know_are_named(tiny, name, token):
    backend, batch = BACKENDS[name](tiny), tiny_batch()
    if isinstance(token, str):
        token = backend.vocab_size if name == "mock" else json.loads((tiny / "config.json").read_text())["vocab_size"]
    tokens = batch.tokens.clone()
    tokens[int(batch.cu_seqlens[1])] = token
    state, batch = backend.init(Key.from_seed(0)), attrs.evolve(batch, tokens=tokens)
    for call in (
        lambda: backend.forward(state.params, batch),
        lambda: backend.forward_backward(state, batch, LOSS),
    ):
        with pytest.raises(ValueError, match=rf"row 1 of the batch has the token id {token}, and the model's"):
            call()


def test_a_class_that_derives_from_the_kind_is_accepted():
    class Annotated(Batch):
        pass

    expect("forward", Batch, Annotated.from_rows([[1]]))


@pytest.mark.parametrize("prompt", ["12", [1, 2], {"input_ids": [1]}])
def test_the_sampler_takes_requests(tiny, prompt):
    sampler = Sampler(tiny)
    sampler.publish(0, local(tiny).weights(local(tiny).init(Key.from_seed(0)).params))
    with pytest.raises(ArgumentError, match=r"generate takes requests, .*requests_for"):
        sampler.generate([prompt])
    twice = [Request(3, (1, 4), Sampling(2), Key.from_seed(0))] * 2
    with pytest.raises(ValueError, match="the id 3 is given to 2 prompts"):
        sampler.generate(twice)


@pytest.mark.parametrize(
    ("name", "term"), [("local", LOSS), ("value", value_clip()), ("mock", LOSS)], ids=["local", "value", "mock"]
)
def test_what_has_no_derivative_says_so(tiny, name, term):
    backend = local(tiny, head="value") if name == "value" else BACKENDS[name](tiny)
    batch, state = tiny_batch(), backend.init(Key.from_seed(0))
    grads, _ = backend.forward_backward(state, batch, term)
    need = sorted(term.needs)[0]

    def by_params(call):
        return torch.func.grad(lambda params: call(attrs.evolve(state, params=params)).sum())(state.params)

    calls = {
        "forward": lambda s: backend.forward(s.params, batch, [need]).by_name[need],
        "forward_backward": lambda s: backend.forward_backward(s, batch, term)[1]["loss"].total,
        "apply_update": lambda s: next(iter(backend.apply_update(s, grads, donate=False)[0].params.values())),
    }
    for function, call in calls.items():
        with pytest.raises(NotDifferentiable, match=f"{function} has no derivative"):
            by_params(call)

    def by_advantages(values):
        changed = batch.with_tokens(advantages=values)
        return backend.forward_backward(state, changed, term)[1]["loss"].total

    with pytest.raises(NotDifferentiable, match="forward_backward has no derivative"):
        torch.func.grad(by_advantages)(batch["advantages"])


def test_a_forward_pass_can_be_a_constant_of_a_derivative(tiny):
    backend, batch = local(tiny), tiny_batch()
    state = backend.init(Key.from_seed(0))
    logprobs = backend.forward(state.params, batch).logprobs
    derived = torch.func.grad(lambda x: (x * backend.forward(state.params, batch).logprobs).sum())(
        torch.ones(batch.num_tokens)
    )
    assert torch.equal(derived, logprobs)


@pytest.mark.filterwarnings("ignore:the gradient of the loss constant")
@pytest.mark.parametrize("name", ["local", "mock"])
def test_fields_of_a_batch_are_constants(tiny, name):
    """A graph behind a field is neither used, nor freed by the first micro-batch."""
    backend, batch = BACKENDS[name](tiny), tiny_batch()
    state, source = backend.init(Key.from_seed(0)), batch["advantages"].clone().requires_grad_()
    tracked = batch.with_tokens(advantages=source * 1.0)

    @loss(needs=["logprobs"])
    def constant(outputs, batch):
        return batch["advantages"], {}

    for term in (LOSS, constant, LOSS + constant):
        expected, found = (backend.forward_backward(state, b, term) for b in (batch, tracked))
        assert tree.equal(found, expected) and source.grad is None
    zeros, reported = backend.forward_backward(state, tracked, constant)
    assert float(zeros.global_norm()) == 0.0 and reported["loss"].value != 0.0


@pytest.mark.parametrize("name", ["local", "mock"])
def test_metrics_keep_no_graph(tiny, name):
    @loss(needs=["logprobs"])
    def careless(outputs, batch):
        values, found = ppo_clip()(outputs, batch)
        return values, {"mine": attrs.evolve(found["actor/pg_loss"], total=outputs.logprobs.sum())}

    backend = BACKENDS[name](tiny)
    _, reported = backend.forward_backward(backend.init(Key.from_seed(0)), tiny_batch(), careless)
    assert not reported["mine"].total.requires_grad


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_edit_in_place_is_seen(tiny, dtype):
    """By the copies of trained and of frozen leaves alike."""
    backend, batch = local(tiny, dtype=dtype), tiny_batch()
    for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
        for trainable in (None, frozenset({"model.embed_tokens.weight"})):
            state = backend.init(Key.from_seed(0))
            params = attrs.evolve(state.params, trainable=trainable)
            before = backend.forward(params, batch)
            params[name].mul_(3.0)
            after = backend.forward(params, batch)
            fresh = local(tiny, dtype=dtype).forward(params, batch)
            assert tree.equal(after, fresh) and not tree.equal(after, before)


def test_gradients_that_had_to_be_moved_are_spent_too(tiny, monkeypatch):
    """As those of a GPU are for a state on the CPU. The refusal of an update spends nothing."""
    backend, batch = local(tiny), tiny_batch()
    expected = backend.init(Key.from_seed(0))
    expected, _ = backend.apply_update(expected, backend.forward_backward(expected, batch, LOSS)[0])
    monkeypatch.setattr(base, "beside", lambda state, grads, move: tree.snapshot(grads))
    for donate in (False, True):
        state = backend.init(Key.from_seed(0))
        grads, _ = backend.forward_backward(state, batch, LOSS)
        where = {name: t.data_ptr() for name, t in state.params.items()}
        new, reported = backend.apply_update(state, grads, donate=donate)
        assert tree.equal(new, expected) and reported["perf/residency_copies"].value == 0
        assert is_donated(grads) == is_donated(state) == donate
        assert ({name: t.data_ptr() for name, t in new.params.items()} == where) == donate
    other = Local(tiny, sgd(0.1), max_tokens=24)
    grads, _ = backend.forward_backward(new, batch, LOSS)
    with pytest.raises(ValueError, match="sgd did not make"):
        other.apply_update(new, grads)
    assert not is_donated(new) and not is_donated(grads)


def test_a_storage_that_is_held_keeps_its_values_in_an_update(tiny):
    backend, batch = local(tiny), tiny_batch()
    state = backend.init(Key.from_seed(0))
    grads, _ = backend.forward_backward(state, batch, LOSS)
    held = state.params["model.norm.weight"].untyped_storage()
    before = bytes(held)
    _, reported = backend.apply_update(state, grads)
    assert reported["perf/residency_copies"].value == 1 and bytes(held) == before


def test_outputs_are_in_one_order(tiny):
    """Whatever the order of the needs, which is a set's."""
    batch = tiny_batch()
    for backend in (local(tiny), Mock(8, adamw(0.01))):
        params = backend.init(Key.from_seed(0)).params
        one, other = (backend.forward(params, batch, n) for n in (["logprobs", "entropy"], ["entropy", "logprobs"]))
        assert list(one.by_name) == list(other.by_name) == ["entropy", "logprobs"]
    made = TokenOutputs({"values": batch["values"], "entropy": batch["values"]})
    assert tree.digest(made) == tree.digest(TokenOutputs(dict(reversed(made.by_name.items()))))
