"""LoRA on ``local``: the laws, the frozen base, what is merged, written and exported, and what is refused."""

import json

import attrs
import pytest
import torch
from ragged_rows import ragged
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from verl_fn.backends.checkpoint import CheckpointError, export_adapter, export_model
from verl_fn.backends.hf.lora import Lora, LoraError
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.errors import UsageError
from verl_fn.state import Batch, Key, tree
from verl_fn.steps import adamw, chain, clip_by_global_norm, constant, cross_entropy, entropy, ppo_clip, value_clip
from verl_fn.testing import check_backend, tiny_batch

TX = chain(clip_by_global_norm(1.0), adamw(constant(1e-2), weight_decay=0.0))
LORA = Lora(rank=4, alpha=8.0)
KEY = Key.from_seed(3)


def trained(backend, state, steps=3, loss=None):
    for _ in range(steps):
        grads, _ = backend.forward_backward(state, ragged(), loss or cross_entropy())
        state, found = backend.apply_update(state, grads)
        assert found["perf/residency_copies"].value == 0
    return state


@pytest.mark.parametrize("options", [{"checkpointing": True}, {"head": "value"}, {"dtype": "bfloat16"}], ids=str)
def test_laws(options, tiny, tmp_path):
    """In fp32 with a model of one layer, since the check runs it a hundred times; beside it, without checkpointing.

    In bf16 the gradient of so small a model is mostly rounding.
    """
    small = "dtype" not in options
    folder = new_model(tmp_path, chars="abcd", hidden_size=16, num_hidden_layers=1) if small else tiny
    loss = value_clip() if options.get("head") == "value" else ppo_clip() - 0.01 * entropy()
    plain = options | {"checkpointing": False}
    one, other = (Local(folder, TX, max_tokens=32, lora=LORA, **given) for given in (options, plain))
    check_backend(one, other, loss=loss, tolerance=0.05 if "dtype" in options else 1e-5)


def test_only_adapters_are_trained_and_names_are_those_of_the_model(tiny):
    plain, backend = Local(tiny, TX), Local(tiny, TX, lora=LORA)
    full, state = plain.load_pretrained(), backend.load_pretrained()
    layers = [f"model.layers.{i}.{layer}" for i in range(2) for layer in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    )]  # fmt: skip
    adapters = [f"{layer}.lora_{ab}.weight" for layer in layers for ab in "AB"]
    assert list(state.params) == [*full.params, *adapters]
    assert state.params.trained() == adapters == list(state.optimizer[-1].exp_avg)
    assert tree.equal(state.params.base.leaves, full.params.leaves)
    grads, _ = backend.forward_backward(state, ragged(), cross_entropy())
    assert list(grads) == adapters
    again, other = (backend.load_pretrained(key=key).params[adapters[0]] for key in (Key.from_seed(0), KEY))
    assert torch.equal(again, state.params[adapters[0]]) and not torch.equal(again, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_adapters_the_parameters_are_the_base_model(tiny, dtype):
    """The reference policy needs no second copy: it is the frozen leaves, which updates share and never touch."""
    plain, backend = (Local(tiny, TX, dtype=dtype, lora=lora) for lora in (None, LORA))
    want, state = plain.forward(plain.load_pretrained().params, ragged()), backend.load_pretrained()
    reference = state.params.base
    assert tree.equal(backend.forward(state.params, ragged()), want)
    state = trained(backend, state)
    for _ in range(2):
        assert not tree.equal(backend.forward(state.params, ragged()), want)
        assert tree.equal(backend.forward(reference, ragged()), want)
    assert all(t is state.params[name] for name, t in reference.items())


def test_what_shares_adapters_is_copied_for_and_the_base_is_not(tiny):
    backend = Local(tiny, TX, lora=LORA)
    state = trained(backend, backend.load_pretrained())
    held, meant = state.params, tree.snapshot(state.params)
    grads, _ = backend.forward_backward(state, ragged(), cross_entropy())
    new, found = backend.apply_update(state, grads)
    assert found["perf/residency_copies"].value == len(held.trained())
    assert tree.equal(held, meant) and all(new.params[name] is t for name, t in held.base.items())


def in_fp32(params):
    """The same parameters with every leaf in fp32."""
    return attrs.evolve(params, leaves={name: t.float() for name, t in params.items()})


def test_frozen_parameters_lie_in_the_compute_dtype_and_compute_without_a_copy(tiny):
    plain, backend = Local(tiny, TX), Local(tiny, TX, dtype="bfloat16", lora=LORA)
    full, state = plain.load_pretrained().params, backend.load_pretrained()
    base, trained_names = state.params.base, state.params.trained()
    assert sum(t.nbytes for t in base.values()) == sum(t.nbytes for t in full.values()) // 2
    assert {
        t.dtype for t in (*(state.params[name] for name in trained_names), *state.optimizer[-1].exp_avg.values())
    } == {torch.float32}
    assert all(torch.equal(t, full[name].bfloat16()) for name, t in base.items())
    for params in (state.params, base):
        used = backend._compute_tensors(params)
        assert all(used[name].data_ptr() == t.data_ptr() for name, t in base.items())
    assert backend._cast.keys() == set(trained_names)
    backend.place(state, params="cpu")
    assert not backend._cast


@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_narrow_base_computes_what_its_fp32_copy_does(tiny, head):
    """Outputs, gradients, updates and publications, in every bit."""
    loss = value_clip() if head == "value" else ppo_clip() - 0.01 * entropy()
    backend, batch = Local(tiny, TX, head=head, dtype="bfloat16", lora=LORA), tiny_batch()
    narrow = backend.load_pretrained()
    wide = tree.snapshot(attrs.evolve(narrow, params=in_fp32(narrow.params)))
    for _ in range(3):
        assert tree.equal(*(backend.forward(s.params, batch, loss.needs) for s in (narrow, wide)))
        (narrow, of_narrow), (wide, of_wide) = (
            backend.apply_update(s, backend.forward_backward(s, batch, loss)[0]) for s in (narrow, wide)
        )
        assert tree.equal(of_narrow, of_wide) and tree.equal(in_fp32(narrow.params), wide.params)
    published, wanted = (dict(backend.weights(s.params).read()) for s in (narrow, wide))
    specs = backend.weights(narrow.params).specs
    assert [(s.name, s.dtype) for s in specs] == [(name, t.dtype) for name, t in published.items()]
    assert published.keys() == wanted.keys()
    assert all(torch.equal(t.float(), wanted[name]) for name, t in published.items())


def test_a_frozen_parameter_that_is_to_be_trained_is_refused(tiny):
    backend = Local(tiny, TX, dtype="bfloat16", lora=LORA)
    state = backend.load_pretrained()
    params = attrs.evolve(state.params, trainable=None)
    state = attrs.evolve(state, params=params, optimizer=TX.init(params))
    grads, _ = backend.forward_backward(state, ragged(), cross_entropy())
    with pytest.raises(
        ValueError, match=r"is float32 .*, and the parameter is bfloat16 .*; what is trained is float32"
    ):
        backend.apply_update(state, grads)


def test_bf16_copies_of_the_adapters_are_made_anew(tiny, monkeypatch):
    """Going to and fro between policy and reference casts the adapters anew, and nothing else."""
    backend = Local(tiny, TX, dtype="bfloat16", lora=LORA)
    state, counts = backend.load_pretrained(), []
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, tensors: (counts.append(len(to)), copy(to, tensors)))
    for params in (state.params, state.params.base, state.params, state.params):
        backend.forward(params, ragged())
    adapters = len(state.params.trained())
    assert counts == [adapters] * 3


@pytest.mark.parametrize("arch", ["qwen3", "gpt2"])
def test_peft_and_the_merged_folder_say_what_we_say(arch, tmp_path):
    """gpt2 keeps its weights as [in, out]."""
    from peft import AutoPeftModelForCausalLM, PeftModel

    odd = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "n_head": 4, "n_embd": 32, "n_layer": 2}
    fields = {"qwen3": {}, "gpt2": odd}[arch]
    folder = new_model(tmp_path / "model", chars="abcdefgh>", arch=arch, hidden_size=32, **fields)
    backend = Local(folder, TX, lora=LORA)
    state = trained(backend, backend.load_pretrained(), steps=6)
    ours = backend.forward(state.params, ragged()).logprobs
    backend.save(state, tmp_path / "saved")
    export_adapter(tmp_path / "saved", tmp_path / "adapter")
    export_model(tmp_path / "saved", tmp_path / "merged")
    load = lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()  # noqa: E731
    models = {
        "adapter": PeftModel.from_pretrained(load(folder), tmp_path / "adapter").eval(),
        "saved": AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved").eval(),
        "merged": load(tmp_path / "merged"),
    }
    with torch.no_grad():
        for row, mine in zip(ragged().rows(), ours.split(ragged().lengths.tolist()), strict=True):
            logits = {name: model(input_ids=row[None]).logits[0] for name, model in models.items()}
            for name, found in logits.items():
                told = found.log_softmax(-1)[:-1].gather(1, row[1:, None])[:, 0]
                assert (told - mine[1:]).abs().max() < 1e-5, name
                assert (found - logits["adapter"]).abs().max() < 1e-5, name
    base = load(folder)
    with torch.no_grad():
        assert (base(input_ids=row[None]).logits[0] - logits["adapter"]).abs().max() > 1e-2


def test_the_rollout_engine_gets_merged_weights_one_at_a_time(tiny):
    backend = Local(tiny, TX, lora=LORA)
    state = trained(backend, backend.load_pretrained())
    found, name = backend.weights(state.params).read(), "model.layers.0.mlp.up_proj"
    assert iter(found) is found
    merged = dict(found)
    assert list(merged) == list(Local(tiny, TX).load_pretrained().params)
    p = {end: state.params[f"{name}.{end}weight"].double() for end in ("", "lora_A.", "lora_B.")}
    want = p[""] + 8.0 / 4 * p["lora_B."] @ p["lora_A."]
    assert merged[f"{name}.weight"].dtype == torch.float32
    assert (merged[f"{name}.weight"] - want).abs().max() < 1e-6
    assert merged["model.norm.weight"] is state.params["model.norm.weight"]
    assert tree.equal(dict(backend.weights(state.params.base).read()), state.params.base.leaves)


def test_a_state_comes_back_bitwise_and_its_folder_is_the_policy(tiny, tmp_path):
    backend = Local(tiny, TX, lora=LORA)
    state = trained(backend, backend.load_pretrained())
    backend.save(state, tmp_path)
    assert tree.equal(Local(tiny, TX, lora=LORA).restore(tmp_path), state)
    policy = Local(tmp_path, TX)
    gap = policy.forward(policy.load_pretrained().params, ragged()).logprobs
    assert (gap - backend.forward(state.params, ragged()).logprobs).abs().max() < 1e-5
    on_top = Local(tmp_path, TX, lora=Lora(rank=1)).load_pretrained()
    assert tree.equal(on_top.params.base.leaves, policy.load_pretrained().params.leaves)


def rewritten(folder, change):
    """Replaces every tensor of a saved state that ``change`` gives another."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: change(name, t) for name, t in tensors.items()}, file, {"format": "pt"})


def test_a_narrow_base_is_saved_restored_and_exported_bitwise(tiny, tmp_path):
    folder = export_model(tiny, tmp_path / "half", "bfloat16")
    few = attrs.evolve(LORA, targets=("q_proj",))  # most of the weights are frozen and keep their dtype
    backend, wide = (Local(folder, TX, dtype=dtype, lora=few) for dtype in ("bfloat16", "float32"))
    state = trained(backend, backend.load_pretrained())
    base, frozen = load_file(folder / "model.safetensors"), state.params.base
    assert tree.equal(frozen.leaves, {name: base[name] for name in frozen})
    backend.save(state, tmp_path / "saved")
    assert tree.equal(backend.restore(tmp_path / "saved"), state)
    # In fp32 the run goes on with the same values.
    restored = wide.restore(tmp_path / "saved")
    assert tree.equal(restored, attrs.evolve(state, params=in_fp32(state.params)))
    adapted = {f"{layer}.weight" for layer in backend._built().adapters.layers}
    for dtype in (None, "bfloat16"):
        export_model(tmp_path / "saved", tmp_path / str(dtype), dtype)
        written = load_file(tmp_path / str(dtype) / "model.safetensors")
        assert {t.dtype for t in written.values()} == {torch.bfloat16 if dtype else torch.float32}
        assert all(torch.equal(written[name].bfloat16(), t) for name, t in base.items() if name not in adapted)
        published = dict(backend.weights(state.params).read())
        assert all(torch.equal(t, published[name].to(t.dtype)) for name, t in written.items())


def test_a_state_with_an_fp32_base_is_restored_as_its_cast(tiny, tmp_path):
    backend, plain = Local(tiny, TX, dtype="bfloat16", lora=LORA), Local(tiny, TX, lora=LORA)
    state = trained(plain, plain.load_pretrained())
    plain.save(state, tmp_path)
    restored, base = backend.restore(tmp_path), state.params.base
    assert tree.equal(restored.params.base.leaves, {name: t.bfloat16() for name, t in base.items()})
    assert tree.equal(restored.optimizer, state.optimizer)
    assert all(torch.equal(restored.params[name], state.params[name]) for name in state.params.trained())
    # A frozen leaf may have been made by hand in any dtype. Trained ones and their moments have one.
    for dtype in (torch.float16, torch.float64):
        base = {name: t.to(dtype) for name, t in state.params.base.items()}
        made = attrs.evolve(state, params=attrs.evolve(state.params, leaves={**state.params.leaves, **base}))
        plain.save(made, tmp_path / str(dtype))
        for one in (backend, plain):
            again = one.restore(tmp_path / str(dtype))
            assert tree.equal(again.params.base.leaves, {name: t.to(one.dtype) for name, t in base.items()})
            assert tree.equal(*(one.forward(params, ragged()) for params in (again.params, made.params)))
    rewritten(tmp_path, lambda name, t: t.bfloat16() if "lora_A" in name else t)
    with pytest.raises(CheckpointError, match=r"lora_A.* as BF16\(4, 32\), not F32"):
        backend.restore(tmp_path)


@pytest.mark.parametrize("other", [None, Lora(rank=2, alpha=8.0), attrs.evolve(LORA, alpha=16.0)], ids=str)
def test_a_state_with_other_adapters_is_refused(tiny, tmp_path, other):
    backend = Local(tiny, TX, lora=LORA)
    backend.save(backend.load_pretrained(), tmp_path)
    with pytest.raises(LoraError, match=r"with LoRA of rank 4, alpha 8, on all-linear \(14 layers\), and was to be"):
        Local(tiny, TX, lora=other).restore(tmp_path)
    plain = Local(tiny, TX)
    plain.save(plain.load_pretrained(), tmp_path / "plain")
    with pytest.raises(LoraError, match="a training state without LoRA, and was to be restored with LoRA of rank 4"):
        backend.restore(tmp_path / "plain")
    assert not (tmp_path / "plain" / "lora.json").exists()


def test_the_same_adapters_may_be_named_otherwise(tiny, tmp_path):
    """Order, and names in place of all-linear, say nothing of what is computed."""
    backend = Local(tiny, TX, lora=LORA)
    state = trained(backend, backend.load_pretrained(), steps=1)
    backend.save(state, tmp_path)
    names = ("down_proj", "up_proj", "gate_proj", "v_proj", "k_proj", "q_proj", "self_attn.o_proj")
    for targets in (names, names[::-1]):
        assert tree.equal(Local(tiny, TX, lora=attrs.evolve(LORA, targets=targets)).restore(tmp_path), state)
    with pytest.raises(LoraError, match=r"on all-linear \(14 layers\), and was to be .* \(12 layers\)"):
        Local(tiny, TX, lora=attrs.evolve(LORA, targets=names[1:])).restore(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2.5}, "rank of LoRA is 2.5; it must be a whole number"),
        ({"rank": True}, "rank of LoRA is True"),
        ({"rank": "8"}, "rank of LoRA is '8'"),
        ({"rank": 0}, "rank of LoRA is 0"),
        ({"alpha": 0.0}, "alpha of LoRA is 0.0; it must be a positive, finite number"),
        ({"alpha": -1}, "alpha of LoRA is -1"),
        ({"alpha": float("nan")}, "alpha of LoRA is nan"),
        ({"alpha": float("inf")}, "alpha of LoRA is inf"),
        ({"alpha": True}, "alpha of LoRA is True"),
        ({"alpha": "16"}, "alpha of LoRA is '16'"),
        ({"targets": "q_proj"}, r"the string 'q_proj'; give a tuple or list of names, such as \('q_proj',\)"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused_by_their_value(options, message):
    with pytest.raises(LoraError, match=message):
        Lora(**{"rank": 4, **options})


def test_a_value_head_is_trained_with_the_adapters(tiny):
    backend = Local(tiny, TX, head="value", lora=LORA)
    state = backend.load_pretrained()
    assert [name for name in state.params.trained() if "lora" not in name] == ["score.weight", "score.bias"]
    batch = tiny_batch()
    before = tree.snapshot(state.params)
    for _ in range(3):
        grads, _ = backend.forward_backward(state, batch, value_clip())
        state, _ = backend.apply_update(state, grads)
    assert {name for name in before if not torch.equal(before[name], state.params[name])} == set(
        state.params.trained()
    )


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        (("q_proj", "v_proj"), ["self_attn.q_proj", "self_attn.v_proj"]),
        (("layers.1.mlp.up_proj",), ["mlp.up_proj"]),
    ],
)
def test_targets_name_layers_by_their_ends(tiny, targets, told):
    state = Local(tiny, TX, lora=Lora(rank=1, targets=targets)).load_pretrained()
    adapted = {name.split(".", 3)[3].removesuffix(".lora_A.weight") for name in state.params.trained()[::2]}
    assert sorted(adapted) == told


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            ("wq",),
            r"names 'wq': .* there are all-linear, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
        ),
        (("q_proj", "proj"), "names 'proj'"),
        (("embed_tokens",), "names 'embed_tokens'"),
        (("lm_head",), "names 'lm_head'"),
        ((), "target_modules is empty; there are all-linear, q_proj"),
    ],
)
def test_targets_that_match_nothing_are_refused_with_what_there_is(tiny, targets, message):
    with pytest.raises(LoraError, match=message):
        Local(tiny, TX, lora=Lora(rank=1, targets=targets)).load_pretrained()


def test_a_model_without_linear_layers_is_refused():
    from verl_fn.backends.hf.lora import inject

    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(2, 2), "lm_head": torch.nn.Linear(2, 2)})
    with pytest.raises(LoraError, match="somewhere: ModuleDict has no linear layers"):
        inject(model, LORA, model["lm_head"], KEY, "somewhere")


def test_peft_is_asked_for_where_it_is_missing(tiny, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(LoraError, match=r"pip install .* 'verl_fn\[lora\]'"):
        Local(tiny, TX, lora=LORA).load_pretrained()
    assert len(Local(tiny, TX).load_pretrained().params) > 0


def test_what_has_no_adapters_is_not_exported_as_some(tiny, tmp_path):
    with pytest.raises(UsageError, match=r"has no adapters: it is no checkpoint of a run with actor\.lora_rank"):
        export_adapter(tiny, tmp_path / "out")
    backend = Local(tiny, TX, lora=LORA)
    backend.save(backend.load_pretrained(), tmp_path / "saved")
    export_adapter(tmp_path / "saved", tmp_path / "half", "bfloat16")
    tensors = load_file(tmp_path / "half" / "adapter_model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16} and len(tensors) == 28
    with pytest.raises(UsageError, match="not empty"):
        export_adapter(tmp_path / "saved", tmp_path / "half")
    about = tmp_path / "saved" / "lora.json"
    about.write_text(json.dumps({"rank": 4}))
    with pytest.raises(LoraError, match=r"lora\.json cannot be read"):
        export_adapter(tmp_path / "saved", tmp_path / "other")


def test_a_folder_without_a_state_is_told_before_its_adapters(tiny, tmp_path):
    (tmp_path / "empty").mkdir()
    for name, message in (("empty", r"no train_state\.json"), ("nowhere", "there is no folder")):
        with pytest.raises(CheckpointError, match=message):
            Local(tiny, TX, lora=LORA).restore(tmp_path / name)


def test_a_batch_of_one_token_rows_has_gradients_of_zero(tiny):
    """No token to learn from: the adapters' gradients are zeros, not missing."""
    backend = Local(tiny, TX, lora=LORA)
    state = backend.load_pretrained()
    batch = Batch.from_rows([[4, 5]], {"response_mask": [[0.0, 1.0]], "loss_weight": [[0.0, 0.0]]})
    grads, _ = backend.forward_backward(state, batch, cross_entropy())
    assert list(grads) == state.params.trained() and float(grads.global_norm()) == 0.0
