"""``local`` against plain transformers, over architectures, dtypes and layouts."""

import functools

import attrs
import pytest
import torch
from ragged_rows import OPTIMIZER, edit_config, ragged
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from verl_fn.backends.hf.folder import ModelError
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.sampler import Sampler
from verl_fn.errors import ArgumentError
from verl_fn.state import Batch, Key, Slots, metrics, snapshot, tree
from verl_fn.steps import (
    GradTransform,
    adamw,
    aggregate,
    bradley_terry,
    chain,
    clip_by_global_norm,
    constant,
    cross_entropy,
    entropy,
    frozen,
    loss,
    ppo_clip,
    value_clip,
)
from verl_fn.testing import tiny_batch, tiny_pairs

ARCHITECTURES = {
    "qwen2": {}, "qwen3": {}, "llama": {}, "gpt_neox": {}, "olmo2": {}, "phi": {}, "granite": None,
    "mistral": {"sliding_window": 4},
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "n_head": 4, "n_embd": 32, "n_layer": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}  # fmt: skip


def plain_logprobs(model, batch, temperature=1.0):
    """Row by row, no packing."""
    found = []
    for row in batch.rows():
        logits = model(input_ids=row[None], use_cache=False).logits[0] / temperature
        lp = logits.log_softmax(-1)[:-1].gather(1, row[1:, None])[:, 0]
        found.append(torch.cat([torch.zeros(1), lp]))
    return torch.cat(found)


def test_each_row_has_its_own_temperature(tiny):
    """Also where that of some rows is 1."""
    backend, batch, heat = Local(tiny, frozen()), ragged(), [1.0, 0.5, 1.0, 2.0, 0.7, 1.0]
    params = backend.load_pretrained().params
    found = backend.forward(params, batch.with_rows(temperature=heat)).logprobs
    model = AutoModelForCausalLM.from_pretrained(tiny)
    expected = torch.cat([plain_logprobs(model, batch.take([row]), one) for row, one in enumerate(heat)])
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("arch", [a for a, o in ARCHITECTURES.items() if o is not None])
def test_packed_rows_equal_rows_alone(arch, tmp_path):
    """Log-probs and every gradient agree with transformers' own, one row at a time."""
    folder = new_model(tmp_path, chars="abcdefgh>", arch=arch, hidden_size=32, **ARCHITECTURES[arch])
    backend, batch = Local(folder, OPTIMIZER, max_tokens=24), ragged()
    state = backend.load_pretrained()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    want = plain_logprobs(model, batch)
    assert (backend.forward(state.params, batch).logprobs - want).abs().max() < 2e-5
    grads, found = backend.forward_backward(state, batch, cross_entropy())
    loss = -(batch["loss_weight"] * want).sum()
    loss.backward()
    assert found["loss"].value == pytest.approx(loss.item(), abs=1e-5)
    theirs = {name: p.grad for name, p in model.named_parameters()}
    assert list(grads) == list(theirs)
    for name, g in grads.items():
        assert torch.allclose(g, theirs[name], atol=2e-5), name


@pytest.mark.parametrize("max_tokens", [17, 30, 1000])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_micro_batches_and_checkpointing_change_nothing(tiny, max_tokens, checkpointing):
    batch, loss = ragged(), cross_entropy() - 0.1 * entropy()
    reference = Local(tiny, OPTIMIZER)
    state = reference.load_pretrained()
    want, want_metrics = reference.forward_backward(state, batch, loss)
    backend = Local(tiny, OPTIMIZER, max_tokens=max_tokens, checkpointing=checkpointing)
    got, metrics = backend.forward_backward(state, batch, loss)
    assert (got + want.scale(-1.0)).global_norm() < 1e-6 * want.global_norm()
    for name in want_metrics:
        assert metrics[name].value == pytest.approx(want_metrics[name].value, rel=1e-6)


def test_temperature_is_a_field_of_a_row(tiny):
    backend, batch = Local(tiny, OPTIMIZER), ragged()
    state = backend.load_pretrained()
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    warm = batch.with_rows(temperature=torch.full((len(batch),), 0.7))
    assert (backend.forward(state.params, warm).logprobs - plain_logprobs(model, batch, 0.7)).abs().max() < 2e-5


def test_outputs_are_given_where_asked_for_alone(tiny):
    backend, batch = Local(tiny, OPTIMIZER), ragged()
    state = backend.load_pretrained()
    every = backend.forward(state.params, batch).logprobs
    holes = batch["response_mask"].clone()
    holes[::3] = 0.0
    some = backend.forward(state.params, batch.with_tokens(response_mask=holes)).logprobs
    assert torch.equal(some == 0, (holes == 0) | (every == 0))
    assert torch.allclose(some, every * holes, atol=1e-6)


def test_value_head(tiny):
    """A new critic says 0 everywhere; once trained, it says what transformers' own class says a token earlier."""
    backend, batch = Local(tiny, OPTIMIZER, head="value"), ragged()
    state = backend.load_pretrained()
    assert not backend.forward(state.params, batch, ["values"]).values.any()
    from verl_fn.steps import value_clip

    told = batch.with_tokens(values=torch.zeros(batch.num_tokens), returns=torch.ones(batch.num_tokens))
    for _ in range(3):
        grads, _ = backend.forward_backward(state, told, value_clip())
        state, _ = backend.apply_update(state, grads)
    values = backend.forward(state.params, batch, ["values"]).values
    model = AutoModelForTokenClassification.from_pretrained(tiny, num_labels=1, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(state.params[name])
        rows = [model(input_ids=row[None]).logits[0, :-1, 0] for row in batch.rows()]
    want = torch.cat([torch.cat([torch.zeros(1), row]) for row in rows])
    assert values.abs().max() > 1e-3
    assert (values - want).abs().max() < 1e-5


def test_bf16_computes_in_bf16_and_keeps_fp32(tiny):
    batch = ragged()
    exact, half = Local(tiny, OPTIMIZER), Local(tiny, OPTIMIZER, dtype="bfloat16")
    state = exact.load_pretrained()
    want, _ = exact.forward_backward(state, batch, cross_entropy())
    got, _ = half.forward_backward(state, batch, cross_entropy())
    assert all(g.dtype == torch.float32 for g in got.values())
    gap = float((got + want.scale(-1.0)).global_norm() / want.global_norm())
    assert 1e-4 < gap < 3e-2
    state, _ = half.apply_update(state, got)
    assert all(t.dtype == torch.float32 for t in (*state.params.values(), *state.optimizer[-1].exp_avg.values()))


def test_bf16_copies_follow_the_parameters(tiny):
    """Log-probs after an update are those of the new parameters, and the old state's come back with it."""
    backend, batch = Local(tiny, OPTIMIZER, dtype="bfloat16"), ragged()
    old = backend.load_pretrained()
    before = backend.forward(old.params, batch).logprobs
    grads, _ = backend.forward_backward(old, batch, cross_entropy())
    new, _ = backend.apply_update(old, grads, donate=False)
    after = backend.forward(new.params, batch).logprobs
    assert (after - before).abs().max() > 1e-3
    assert torch.equal(backend.forward(old.params, batch).logprobs, before)


def test_a_saved_state_is_a_hugging_face_folder(tiny, tmp_path):
    backend, batch = Local(tiny, OPTIMIZER), ragged()
    state = backend.load_pretrained()
    for _ in range(2):
        grads, _ = backend.forward_backward(state, batch, cross_entropy())
        state, _ = backend.apply_update(state, grads)
    backend.save(state, tmp_path)
    assert tree.first_difference(backend.restore(tmp_path), state) is None
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, p in model.named_parameters():
        assert torch.equal(p, state.params[name])
    fresh = Local(tmp_path, OPTIMIZER).load_pretrained()
    assert tree.equal(fresh.params, state.params)


def test_place_moves_and_changes_no_value(tiny):
    backend = Local(tiny, OPTIMIZER)
    state = backend.load_pretrained()
    assert tree.equal(backend.place(state, params="cpu", optimizer="cpu"), state)


def test_a_model_that_is_never_trained_lies_in_the_compute_dtype(tiny, tmp_path):
    """A reference has a third of the bytes of masters and their copies, and says the same in every bit."""
    trained, backend = (Local(tiny, tx, dtype="bfloat16") for tx in (OPTIMIZER, frozen()))
    wide = Local(tiny, frozen())
    full, state = trained.load_pretrained(), backend.load_pretrained()
    assert tree.equal(state.params.leaves, {name: t.bfloat16() for name, t in full.params.items()})
    assert tree.equal(*(b.forward(s.params, ragged()) for b, s in ((trained, full), (backend, state))))
    assert not backend._cast and tree.equal(state.params.base.leaves, state.params.leaves)
    backend.save(state, tmp_path / "half")
    wide.save(wide.load_pretrained(), tmp_path / "full")
    assert all(tree.equal(backend.restore(tmp_path / name).params, state.params) for name in ("half", "full"))
    with pytest.raises(ValueError, match=r"trains no parameter.* made with the optimizer frozen\(\)"):
        backend.forward_backward(state, ragged(), cross_entropy())


def test_an_update_takes_the_optimizer_that_it_is_given(tiny):
    own, given = (
        chain(clip_by_global_norm(1.0), adamw(1e-3)),
        chain(clip_by_global_norm(0.1), adamw(5e-4, (0.5, 0.9))),
    )
    backend, other, batch = Local(tiny, own), Local(tiny, given), ragged()
    state = backend.load_pretrained()
    grads, _ = backend.forward_backward(state, batch, cross_entropy())
    with pytest.raises(ArgumentError, match="apply_update"):
        backend.apply_update(state, grads, optimizer=1e-3)
    with pytest.raises(ValueError, match="adamw did not make"):
        backend.apply_update(state, grads, optimizer=adamw(1e-3))
    wanted, _ = other.apply_update(snapshot(state), snapshot(grads))
    state, metrics = backend.apply_update(state, grads, optimizer=given)
    assert tree.equal(state, wanted) and metrics["lr"].value == 5e-4
    state, metrics = backend.apply_update(state, backend.forward_backward(state, batch, cross_entropy())[0])
    assert metrics["lr"].value == 1e-3 and state.scheduler == 2


def test_moments_of_a_transformation_stay_wide_beside_narrow_ones(tiny, tmp_path):
    @attrs.frozen
    class Averaged(GradTransform):
        """Its state has a name of AdamW's, and fp32."""

        def init(self, params):
            return {"exp_avg": Slots({name: torch.zeros_like(params[name]) for name in params.trained()})}

        def update(self, grads, state, params, update):
            return grads, {"exp_avg": Slots({name: g.clone() for name, g in grads.items()})}, update

    backend = Local(tiny, chain(Averaged(), adamw(0.1, moments=torch.bfloat16)))
    state, batch = backend.load_pretrained(), ragged()
    state, _ = backend.apply_update(state, backend.forward_backward(state, batch, cross_entropy())[0])
    backend.save(state, tmp_path / "state")
    assert tree.equal(backend.restore(tmp_path / "state"), state)


def test_an_actor_that_is_reset_to_a_reference_in_bf16_is_told_to_be_cast(tiny, tmp_path):
    """The masters of a frozen model lie in the dtype that computes."""
    actor, reference = (Local(tiny, tx, dtype="bfloat16") for tx in (OPTIMIZER, frozen()))
    state, batch = actor.load_pretrained(), ragged()
    params = attrs.evolve(reference.load_pretrained().params, trainable=state.params.trainable)
    narrow = attrs.evolve(state, params=params)
    with pytest.raises(
        ValueError, match=r"parameter is bfloat16 .*; what is trained is float32, so make .* \.float\(\)"
    ):
        actor.apply_update(narrow, actor.forward_backward(narrow, batch, cross_entropy())[0])
    half = attrs.evolve(state, optimizer=tree.map_tensors(torch.Tensor.bfloat16, state.optimizer))
    for odd, place in ((narrow, r"params\['model.embed_tokens.weight'\]"), (half, r"optimizer\S+exp_avg\S+")):
        with pytest.raises(ValueError, match=rf"^state.{place} is bfloat16, and what is trained is float32: a check"):
            actor.save(odd, tmp_path / "odd")
    narrow_moments = Local(tiny, adamw(0.1, moments=torch.bfloat16))
    made = narrow_moments.load_pretrained()
    odd = attrs.evolve(made, optimizer=tree.map_tensors(torch.Tensor.float, made.optimizer))
    with pytest.raises(ValueError, match=r"exp_avg\S+ is float32, and the optimizer's moments are bfloat16: a check"):
        narrow_moments.save(odd, tmp_path / "odd")
    assert not (tmp_path / "odd").exists()
    wide = attrs.evolve(state, params=tree.map_tensors(torch.Tensor.float, params))
    wide, _ = actor.apply_update(wide, actor.forward_backward(wide, batch, cross_entropy())[0])
    actor.save(wide, tmp_path / "wide")
    assert wide.step == 1 and tree.equal(actor.restore(tmp_path / "wide"), wide)


@pytest.mark.parametrize("kind", [Local, Sampler], ids=lambda kind: kind.__name__)
def test_a_dtype_is_a_name_or_a_dtype_of_torch(tiny, kind):
    make = functools.partial(kind, tiny, *([frozen()] if kind is Local else []))
    for given in ("bfloat16", torch.bfloat16):
        assert make(dtype=given).dtype == torch.bfloat16
    for given, shown in ((torch.float16, "torch.float16"), ("bf16", "'bf16'")):
        with pytest.raises(ValueError, match=rf"^dtype is {shown}; it must be one of float32, bfloat16$"):
            make(dtype=given)


def test_init_is_a_function_of_the_key(tiny):
    backend = Local(tiny, frozen())
    one, same, other = (backend.init(Key.from_seed(s)) for s in (1, 1, 2))
    assert tree.equal(one, same)
    assert not torch.equal(
        one.params["model.norm.weight"] * 0 + 1, one.params["model.layers.0.mlp.up_proj.weight"][0]
    )
    assert not tree.equal(one.params, other.params)


def test_what_cannot_be_run_is_refused_with_its_name(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        Local(tmp_path / "nowhere", OPTIMIZER).load_pretrained()
    own = new_model(tmp_path / "c", chars="abcd", arch="bloom", hidden_size=32)
    with pytest.raises(ModelError, match="packed rows: the model does not let its attention be chosen"):
        Local(own, OPTIMIZER, row_layout="packed").load_pretrained()
    encoder = new_model(tmp_path / "d", chars="abcd", arch="bert", hidden_size=32)
    with pytest.raises(ModelError, match="BertLMHeadModel is not causal"):
        Local(encoder, OPTIMIZER).load_pretrained()
    with pytest.raises(ModelError, match=r"model\.layout is 'dense'; it must be one of auto, packed, padded"):
        Local(own, OPTIMIZER, row_layout="dense").load_pretrained()


def test_a_chosen_set_of_trained_parameters_is_not_lost_in_a_checkpoint(tiny, tmp_path):
    backend = Local(tiny, OPTIMIZER)
    state = backend.load_pretrained()
    chosen = attrs.evolve(state, params=attrs.evolve(state.params, trainable=frozenset({"model.norm.weight"})))
    with pytest.raises(ValueError, match="another set of trainable parameters"):
        backend.save(chosen, tmp_path / "chosen")
    assert not (tmp_path / "chosen").exists()
    backend.save(attrs.evolve(chosen, params=attrs.evolve(chosen.params, trainable=None)), tmp_path / "all")
    assert tree.equal(backend.restore(tmp_path / "all"), state)


def test_moments_of_a_chosen_set_are_not_saved_for_another_set(tiny, tmp_path):
    backend = Local(tiny, adamw(0.01))
    state = backend.load_pretrained()
    params = attrs.evolve(state.params, trainable=frozenset({"model.norm.weight"}))
    chosen = attrs.evolve(state, params=params, optimizer=backend.optimizer.init(params))
    with pytest.raises(ValueError, match="whose moments are zeros"):
        backend.save(chosen, tmp_path / "chosen")
    whole = attrs.evolve(chosen, params=attrs.evolve(params, trainable=state.params.trainable))
    with pytest.raises(ValueError, match=r"lacks tensors that .* make new moments with attrs\.evolve"):
        backend.save(whole, tmp_path / "chosen")
    assert not (tmp_path / "chosen").exists()
    zeros = attrs.evolve(whole, optimizer=backend.optimizer.init(whole.params))
    backend.save(zeros, tmp_path / "zeros")
    assert tree.equal(backend.restore(tmp_path / "zeros"), zeros)


def test_a_reference_with_the_parameters_of_an_actor_is_saved_with_its_own_set(tiny, tmp_path):
    backend = Local(tiny, frozen())
    reference, actor = backend.load_pretrained(), Local(tiny, OPTIMIZER).init(Key.from_seed(1))
    with pytest.raises(ValueError, match=r"trainable=reference\.params\.trainable"):
        backend.save(attrs.evolve(reference, params=actor.params), tmp_path / "taken")
    refreshed = attrs.evolve(reference, params=attrs.evolve(actor.params, trainable=reference.params.trainable))
    backend.save(refreshed, tmp_path / "refreshed")
    assert tree.equal(backend.restore(tmp_path / "refreshed"), refreshed)


def test_batches_that_cannot_be_run_are_refused(tiny):
    backend = Local(tiny, OPTIMIZER, max_tokens=8)
    state = backend.load_pretrained()
    with pytest.raises(ValueError, match=r"row 5 has 17 tokens, more than the budget of 8"):
        backend.forward_backward(state, ragged(), cross_entropy())
    short = Batch.from_rows([[4, 5, 6]], {"response_mask": [[1.0, 1.0, 1.0]]})
    with pytest.raises(ValueError, match="row 0: response_mask is set on its first token"):
        backend.forward(state.params, short)
    with pytest.raises(ValueError, match="no loss_weight"):
        backend.forward_backward(state, short, cross_entropy())
    with pytest.raises(ValueError, match=r"a lm model gives .* not \['values'\]"):
        backend.forward(state.params, short, ["values"])


def test_the_chance_of_equal_draws_comes_from_forward_alone(tiny):
    """It is at least the square of the token's own probability, and 1 where the distribution has one token."""
    backend, batch = Local(tiny, OPTIMIZER), ragged()
    state = backend.load_pretrained()
    outputs = backend.forward(state.params, batch, ["logprobs", "entropy", "sum_pi_squared"])
    mask, chance = batch["response_mask"] != 0, outputs.sum_pi_squared
    assert not chance[~mask].any() and bool((chance <= 1.0 + 1e-6).all())
    assert bool((chance >= outputs.logprobs.exp().square() - 1e-6)[mask].all())
    # By Jensen's inequality, exp(-entropy) is no more than the mean probability of a draw.
    assert bool((chance >= (-outputs.entropy).exp() - 1e-6)[mask].all())
    reads = loss(needs=["sum_pi_squared"])(lambda outputs, batch: (outputs.sum_pi_squared, {}))
    with pytest.raises(ValueError, match=r"a loss cannot need \['sum_pi_squared'\]: it has no gradient"):
        backend.forward_backward(state, aggregate(batch), reads)


def test_states_keep_their_meaning_when_another_folder_is_read(tiny, tmp_path):
    """Another model's folder is refused by the name of what differs; the same model's is read."""
    backend, batch = Local(tiny, OPTIMIZER), ragged()
    state = backend.load_pretrained()
    before = backend.forward(state.params, batch).logprobs
    backend.save(state, tmp_path / "same")
    assert tree.equal(backend.load_pretrained(tmp_path / "same").params, state.params)
    edit_config(tmp_path / "same", rms_norm_eps=1e-2)
    with pytest.raises(ModelError, match=r"another model .*rms_norm_eps"):
        backend.load_pretrained(tmp_path / "same")
    assert torch.equal(backend.forward(state.params, batch).logprobs, before)


def test_a_frozen_leaf_that_is_written_through_another_value_is_cast_anew(tiny):
    """What is frozen in one value may be trained in another that shares its tensors."""
    backend = Local(tiny, adamw(constant(0.05)), dtype="bfloat16", max_tokens=24)
    state, batch, norm = backend.init(Key.from_seed(0)), tiny_batch(), frozenset({"model.norm.weight"})
    grads, _ = backend.forward_backward(state, batch, ppo_clip())
    shared = attrs.evolve(state.params, trainable=norm)
    before = backend.forward(shared, batch)
    del shared
    state, _ = backend.apply_update(state, grads)
    after = backend.forward(attrs.evolve(state.params, trainable=norm), batch)
    fresh = Local(tiny, adamw(constant(0.05)), dtype="bfloat16", max_tokens=24)
    assert tree.equal(after, fresh.forward(state.params, batch)) and not tree.equal(after, before)
    nothing = attrs.evolve(state.params, trainable=frozenset())
    assert tree.equal(backend.forward(nothing, batch), backend.forward(attrs.evolve(nothing), batch))


def test_parameters_of_another_model_are_named(tiny):
    backend = Local(tiny, adamw(constant(0.05)), max_tokens=24)
    params = backend.init(Key.from_seed(0)).params
    some = attrs.evolve(params, leaves={n: t for n, t in params.items() if n != "model.norm.weight"})
    with pytest.raises(ValueError, match=r"are not this model's: \['model.norm.weight'\]"):
        backend.forward(some, tiny_batch())
    flat = attrs.evolve(params, leaves={name: t.reshape(-1) for name, t in params.items()})
    for call in (lambda: backend.forward(flat, tiny_batch()), lambda: Local(tiny, OPTIMIZER).weights(flat)):
        with pytest.raises(ValueError, match=r"of another layout or model \(model.* was given to a local backend"):
            call()


@pytest.mark.parametrize("options", [{}, {"checkpointing": True}, {"head": "value"}], ids=str)
def test_the_loss_is_a_function_that_torch_func_transforms(tiny, options):
    """The gradient is forward_backward's, forward mode agrees with it, and rows' gradients add up to it."""
    backend = Local(tiny, OPTIMIZER, max_tokens=24, **options)
    batch = tiny_pairs()
    loss = cross_entropy() if "head" not in options else value_clip() + 0.1 * bradley_terry()
    state, _ = backend.apply_update(*trained(backend, batch, loss))
    fn = backend.loss_fn(batch, loss)
    grads, reported = backend.forward_backward(state, batch, loss)
    derived, found = torch.func.grad(fn, has_aux=True)(state.params)
    assert metrics.to_floats(found) == pytest.approx(metrics.to_floats(reported), rel=1e-5)
    _, slope = torch.func.jvp(lambda params: fn(params)[0], (state.params,), (derived,))
    assert float(slope) == pytest.approx(float(grads.global_norm()) ** 2, rel=1e-4)
    half = backend.loss_fn(batch.with_tokens(loss_weight=batch["loss_weight"] / 2), loss)
    _, pull = torch.func.vjp(lambda params: fn(params)[0] + half(params)[0], state.params)
    for name, g in grads.items():
        torch.testing.assert_close(derived[name], g, rtol=1e-4, atol=1e-6)
        if "head" not in options:
            torch.testing.assert_close(pull(torch.tensor(2.0))[0][name], 3.0 * g, rtol=1e-4, atol=1e-6)


def trained(backend, batch, loss):
    state = backend.init(Key.from_seed(0))
    return state, backend.forward_backward(state, batch, loss)[0]


def test_row_values_are_read_after_each_rows_last_token(tiny):
    """What a longer row's values say of its next token is what a row that ends there says of itself."""
    backend = Local(tiny, OPTIMIZER, head="value", max_tokens=24)
    batch = tiny_batch()
    state, _ = backend.apply_update(*trained(backend, batch, value_clip()))
    longer = Batch.from_rows(
        [[*row.tolist(), 3] for row in batch.rows()],
        {"response_mask": [[0.0] * len(row) + [1.0] for row in batch.rows()]},
    )
    ends = backend.forward(state.params, batch, ["row_values", "values"])
    assert ends.row_values.shape == (len(batch),) and ends.row_values.abs().min() > 0
    torch.testing.assert_close(ends.row_values, backend.forward(state.params, longer, ["values"]).values[longer.last])
