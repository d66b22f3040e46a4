"""Families of models of every kind: packed or padded rows, and whatever stands after the output layer, are found."""

import contextlib
import functools
import importlib.util
import itertools
import json
import random
import shutil
import sys
from pathlib import Path

import attrs
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from verl_fn.backends.hf import attention, checks
from verl_fn.backends.hf.checks import fit_of
from verl_fn.backends.hf.config import ModelError, dropout_of, read_config
from verl_fn.backends.hf.folder import KERNELS, hollow, model_notices
from verl_fn.backends.hf.skeleton import Fit, Skeleton, compile_layer
from verl_fn.backends.local import Local
from verl_fn.backends.sampler import Sampler
from verl_fn.benchmarks import families, families_page
from verl_fn.benchmarks.families import RIGHT, compare
from verl_fn.benchmarks.families_page import BAR
from verl_fn.benchmarks.tiny_models import tiny_config, tiny_folder
from verl_fn.state import Batch, Key, Sampling, requests_for, split_by_tokens, tree
from verl_fn.state.split import FEE
from verl_fn.steps import adamw, aggregate, cross_entropy, entropy, sgd

ROOT = Path(__file__).parents[3]
# A family of each kind, and what is expected of it.
KINDS = {
    "qwen3": Fit(),
    "cohere": Fit(scale=0.0625),  # a factor of the logits
    "nanochat": Fit(softcap=15.0),
    "gemma2": Fit(softcap=30.0),  # scores have a cap, too
    "gpt_oss": Fit(),  # sinks
    "doge": Fit("padded", "eager", cached=True),  # a mask that the model makes
    "qwen3_5_text": Fit("padded", "sdpa", cached=True),  # linear attention
    "mamba": Fit("padded", "eager", cached=True),
    "modernbert-decoder": Fit(own_head=True),
    "hrm_text": Fit(repeats=True),  # layers that run several times
    "deepseek_v3": Fit(),  # buffers among the weights
    "nemotron_h": Fit("padded", "sdpa", cached=True, longest=16),  # wrong beyond a chunk
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            made[name] = tiny_folder(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


@pytest.mark.parametrize("name", KINDS)
def test_a_family_is_computed_as_transformers_does(folder, name):
    """Log-probs, the gradient of every parameter within rounding, and samples of the embedded engine."""
    result = compare(folder(name))
    assert result["outcome"] == RIGHT and result["logprobs"] <= BAR and result["sampled"] <= BAR, result
    assert hollow(folder(name), "lm", key=Key.from_seed(0)).skeleton.fit == KINDS[name]


@pytest.mark.parametrize("name", ["rwkv", "recurrent_gemma", "olmo_hybrid", "deepseek_v4"])
def test_families_without_a_cache_that_is_right(folder, name):
    assert not hollow(folder(name), "lm", key=Key.from_seed(0)).skeleton.fit.cached


def test_entropies_of_every_kind_of_head(folder):
    """Of plain logits, and of logits that are scaled, capped or made by the model's own code."""
    from transformers import AutoModelForCausalLM

    row = [5, 9, 13, 7, 11]
    batch = Batch.from_rows([row], {"response_mask": [[0.0] + [1.0] * 4]}).with_rows(temperature=torch.tensor([0.7]))
    needs = ["logprobs", "entropy", "sum_pi_squared", "candidate_logprobs", "top_logprobs_3", "top_ids_3"]
    for name in ("qwen3", "cohere", "nanochat", "gemma2", "modernbert-decoder"):
        backend = Local(folder(name), sgd(0.0))
        params = backend.load_pretrained().params
        model = AutoModelForCausalLM.from_pretrained(folder(name), attn_implementation="eager").eval()
        past = model.config.vocab_size
        batch = batch.with_tokens(candidates=torch.tensor([[4, 66, past - 1, past, past + 9]] * 5))
        outputs = dict(backend.forward(params, batch, needs).by_name)
        assert outputs["candidate_logprobs"][1:, 3:].isneginf().all(), name
        outputs["candidate_logprobs"] = outputs["candidate_logprobs"][:, :3]
        with torch.no_grad():
            log_probs = (model(input_ids=torch.tensor([row])).logits[0, :-1].float() / 0.7).log_softmax(-1)
        probs, drawn = log_probs.exp(), torch.tensor(row[1:])
        expected = {
            "logprobs": log_probs.gather(1, drawn[:, None])[:, 0],
            "entropy": -(probs * log_probs).sum(-1),
            "sum_pi_squared": probs.square().sum(-1),
            "candidate_logprobs": log_probs[:, [4, 66, past - 1]],
            "top_logprobs_3": log_probs.topk(3).values,
        }
        for output, values in expected.items():
            assert torch.allclose(outputs[output][1:], values, atol=2e-5), (name, output)
        assert torch.equal(outputs["top_ids_3"][1:], log_probs.topk(3).indices), name


@pytest.mark.parametrize("name", ["nanochat", "modernbert-decoder", "qwen3_5_text", "gemma2"])
def test_transformations_of_the_loss_and_checkpointing_have_the_same_gradient(folder, name):
    rows = [[5, 9, 13, 7, 11, 3, 8], [4, 12, 6]]
    batch = aggregate(Batch.from_rows(rows, {"response_mask": [[0.0] + [1.0] * (len(r) - 1) for r in rows]}))
    loss = cross_entropy() - 0.1 * entropy()
    backend = Local(folder(name), adamw(0.01))
    state = backend.load_pretrained()
    grads, _ = backend.forward_backward(state, batch, loss)
    transformed, _ = torch.func.grad(backend.loss_fn(batch, loss), has_aux=True)(state.params)
    recomputed, _ = Local(folder(name), adamw(0.01), checkpointing=True).forward_backward(state, batch, loss)
    offloaded, _ = Local(folder(name), adamw(0.01), checkpointing="offload").forward_backward(state, batch, loss)
    for key, g in grads.items():
        assert torch.allclose(transformed[key], g, atol=1e-5 * float(g.norm()) + 1e-8), key
        assert torch.allclose(recomputed[key], g, atol=1e-5 * float(g.norm()) + 1e-8), key
        assert torch.equal(offloaded[key], recomputed[key]), key


def test_offloaded_checkpointing_moves_the_input_of_each_layer_and_nothing_else(folder, monkeypatch):
    moved = []
    own = torch.autograd.graph.save_on_cpu

    def counting(pin_memory):
        hooks = own(pin_memory)
        pack = hooks.pack_hook
        hooks.pack_hook = lambda tensor: (moved.append(tuple(tensor.shape)), pack(tensor))[1]
        return hooks

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", counting)
    mask = {"response_mask": [[0.0, 1.0, 1.0, 1.0], [0.0, 1.0]]}
    batch = aggregate(Batch.from_rows([[5, 9, 13, 7], [4, 12]], mask))
    backend = Local(folder("gemma2"), adamw(0.01), checkpointing="offload")
    state = backend.load_pretrained()
    backend.forward_backward(state, batch, cross_entropy())
    config = read_config(folder("gemma2"))
    # torch saves an empty tensor beside them.
    inputs = [shape for shape in moved if shape != (0,)]
    assert inputs == [(1, 6, config.hidden_size)] * config.num_hidden_layers


def test_padded_rows_are_sorted_into_parts_within_the_budget():
    lengths = [3, 17, 5, 16, 4, 9, 1, 8]
    batch = Batch.from_rows([[1] * n for n in lengths])
    split = split_by_tokens(batch, 34, padded=True)
    parts = [part.lengths.tolist() for part in split]
    assert all(len(part) * max(part) <= 34 for part in parts)
    assert split.join([part.tokens for part in split]).tolist() == batch.tokens.tolist()
    assert sorted(map(max, parts), reverse=True)[:2] == [17, 9]
    with pytest.raises(ValueError, match=r"row 1 has 17 tokens with padding, more than the budget of 16"):
        split_by_tokens(batch, 16, padded=True)


@pytest.mark.parametrize("seed", range(20))
def test_padded_rows_are_divided_at_the_least_cost_of_all_divisions(seed):
    """Beside a search over all divisions of the sorted rows."""
    generator = random.Random(seed)
    lengths = sorted((generator.choice([3, 5, generator.randint(1, 20)]) for _ in range(9)), reverse=True)
    budget = lengths[0] + generator.randint(0, 20)

    def costs(cuts):
        parts = [lengths[i:j] for i, j in itertools.pairwise((0, *cuts, len(lengths)))]
        return [len(part) * part[0] for part in parts]

    cuts = itertools.chain.from_iterable(itertools.combinations(range(1, 9), n) for n in range(9))
    fitting = [of_parts for of_parts in map(costs, cuts) if max(of_parts) <= budget]
    best = min(sum(of_parts) + len(of_parts) * budget / FEE for of_parts in fitting)
    found = [
        part.lengths for part in split_by_tokens(Batch.from_rows([[1] * n for n in lengths]), budget, padded=True)
    ]
    sizes = [len(part) * int(part.max()) for part in found]
    assert max(sizes) <= budget and sum(sizes) + len(sizes) * budget / FEE == pytest.approx(best)


def test_rows_do_not_depend_on_their_neighbours_in_any_layout(folder):
    rows = [[5, 9, 13, 7, 11, 3, 8], [4, 12, 6], [9, 8, 7, 6]]
    batch = Batch.from_rows(rows, {"response_mask": [[0.0] + [1.0] * (len(r) - 1) for r in rows]})
    for name, layout in (("qwen3", "packed"), ("qwen3", "padded"), ("qwen3_5_text", "auto"), ("gemma2", "auto")):
        few, many = (Local(folder(name), sgd(0.0), row_layout=layout, max_tokens=budget) for budget in (7, 64))
        params = few.load_pretrained().params
        assert torch.allclose(few.forward(params, batch).logprobs, many.forward(params, batch).logprobs, atol=3e-6)


def test_hidden_states_in_fp32_beside_weights_in_bf16(folder):
    """As Mamba has them."""
    batch = Batch.from_rows([[5, 9, 13, 7, 11]], {"response_mask": [[0.0] + [1.0] * 4]})
    exact, half = (Local(folder("mamba"), sgd(0.0), dtype=dtype) for dtype in ("float32", "bfloat16"))
    params = exact.load_pretrained().params
    gap = half.forward(params, batch).logprobs - exact.forward(params, batch).logprobs
    assert 0 < float(gap.abs().mean()) < 0.05
    sampler = Sampler(folder("mamba"), dtype="bfloat16")
    sampler.publish(0, exact.weights(params))
    assert sampler.generate(requests_for([[5, 9]], Sampling(3), Key.from_seed(0)), version=0)


def test_a_row_that_the_models_code_computes_wrong_is_refused(folder):
    backend = Local(folder("nemotron_h"), sgd(0.0))
    params = backend.load_pretrained().params
    long = Batch.from_rows([[3] * 17], {"response_mask": [[0.0] + [1.0] * 16]})
    with pytest.raises(ValueError, match=r"a row has 17 tokens; .* only up to chunk_size, 16 tokens"):
        backend.forward(params, long)


def test_values_of_buffers_come_from_the_folder(folder, tmp_path):
    """Biases of routers that were trained elsewhere decide which experts a token gets, in the engine too."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder("deepseek_v3"))
    for name, b in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            b.copy_(torch.tensor([0.9, -0.9, 0.5, -0.5]))
    model.save_pretrained(tmp_path)
    result = compare(tmp_path)
    assert max(result["logprobs"], result["gradient"], result["sampled"]) <= BAR
    for pickled in (False, True):
        if pickled:
            torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
            (tmp_path / "model.safetensors").unlink()
        made = hollow(tmp_path, "lm", key=Key.from_seed(0)).skeleton.constants
        assert made and all(b.tolist() == pytest.approx([0.9, -0.9, 0.5, -0.5]) for b in made.values())


def test_dropout_and_noise_are_turned_off(folder, tmp_path):
    """Real checkpoints have dropout, and layers that are recomputed run in training mode."""
    tiny_folder("opt", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"attention_dropout": 0.5, "dropout": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert dropout_of(tmp_path) == {"attention_dropout": 0.5, "dropout": 0.5}
    batch = aggregate(Batch.from_rows([[5, 9, 13, 7]], {"response_mask": [[0.0, 1.0, 1.0, 1.0]]}))
    backend = Local(tmp_path, sgd(0.0), checkpointing=True)
    state = backend.load_pretrained()
    first, again = (backend.forward_backward(state, batch, cross_entropy())[0] for _ in range(2))
    assert tree.equal(first, again)
    assert not dropout_of(folder("qwen3"))


MUTANTS = {
    "a cap of scores that is left out": ("gemma2", lambda fit: attrs.evolve(fit, attention="sdpa")),
    "a cap of logits that is left out": ("nanochat", lambda fit: attrs.evolve(fit, softcap=None)),
    "a factor of logits that is left out": ("cohere", lambda fit: attrs.evolve(fit, scale=1.0)),
    "a head of the model's own that is left out": (
        "modernbert-decoder",
        lambda fit: attrs.evolve(fit, own_head=False),
    ),
    "a mask of the model's own that is left out": ("doge", lambda fit: attrs.evolve(fit, attention="sdpa")),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_law_notices(folder, mutant, monkeypatch):
    name, change = MUTANTS[mutant]
    found = hollow(folder(name), "lm", key=Key.from_seed(0)).skeleton.fit
    monkeypatch.setattr("verl_fn.backends.hf.folder.fit_of", lambda *args: change(found))
    monkeypatch.setattr(families, "ROWS", ([5, 9, 13], [4, 12, 6], [33, 17, 10, 19, 50, 28, 1]))
    assert compare(folder(name))["outcome"] == families.WRONG


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_long_row_alone_takes_another_kernel(kv_heads, monkeypatch):
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, heads, 16, generator=rng, requires_grad=True) for heads in (4, kv_heads, kv_heads))
    packing = attention.Packing.of_table(1, 9, torch.device("cpu"))
    monkeypatch.setattr(attention, "LONG", 9)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    found = attention._fused(q, k, v, packing, 0.3, None, None, None)
    expected = attention._padded(q, k, v, packing, 0.3, None, None, None)
    assert torch.allclose(found, expected, atol=1e-6)
    for one, other in zip(*(torch.autograd.grad(out.sum(), (q, k, v)) for out in (found, expected)), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(("repeats", "width"), [(True, 16), (False, 8)])
def test_a_long_row_keeps_flash_attention_for_kernels_that_repeat_and_narrow_values(repeats, width, monkeypatch):
    """cuDNN's does not repeat, and torch calls no other kernel for values that are narrower than keys."""
    q, k, v = (torch.randn(9, 2, size) for size in (16, 16, width))
    packing = attention.Packing.of_table(1, 9, torch.device("cpu"))
    monkeypatch.setattr(attention, "LONG", 9)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeats)
    monkeypatch.setattr(
        "torch.nn.attention.varlen.varlen_attn", lambda q, *others, **options: torch.full_like(q, 7.0)
    )
    assert (attention._fused(q, k, v, packing, None, None, None, None) == 7.0).all()


def test_the_check_notices_rows_that_see_each_other(folder, monkeypatch):
    """Were packed attention to ignore where rows begin, no family would be packed."""
    whole = attention.Packing.of

    def one_row(batch, device, sequence=None):
        return whole(Batch.from_rows([batch.tokens.tolist()]), device, sequence)

    monkeypatch.setattr(checks.Packing, "of", one_row)
    checks._fits.clear()
    config = tiny_config("qwen3")
    with pytest.raises(ModelError, match="rows are not computed as each one by itself"):
        fit_of(AutoModelForCausalLM, config, "lm", "folder", "packed")


def test_folders_with_the_same_config_are_checked_once(folder, tmp_path, monkeypatch):
    """A run's checkpoints and exports have the config of its model."""
    hollow(folder("qwen3"), "lm", key=Key.from_seed(0))
    monkeypatch.setattr(checks, "_fit", None)
    hollow(shutil.copytree(folder("qwen3"), tmp_path / "copy"), "lm", key=Key.from_seed(0))
    with pytest.raises(ModelError, match="cannot be run"):
        hollow(folder("qwen3"), "value", key=Key.from_seed(0))


def test_a_model_newer_than_transformers_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen9", "auto_map": {"AutoModel": "a.B"}}))
    says = r"model type 'qwen9': transformers [\d.]+ has no such family, and Python code .*auto_map.* is never run"
    with pytest.raises(ModelError, match=says):
        Local(tmp_path, sgd(0.0)).load_pretrained()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen9"}))
    with pytest.raises(ModelError, match=r"qwen9.* has no such family, so the model cannot be built"):
        Sampler(tmp_path)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("qwen3_5_text", "flash-linear-attention and causal-conv1d"),
        ("nemotron_h", "causal-conv1d and mamba-ssm"),
        ("qwen3", ""),
    ],
)
def test_kernels_that_a_gpu_lacks_are_named(folder, name, missing, monkeypatch):
    known = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda m, *a: None if m in KERNELS else known(m, *a))
    notes = [note for note in model_notices(folder(name), "lm", device="cuda") if "much faster" in note]
    assert [missing in note and "pip install" in note for note in notes] == [True] * bool(missing)
    assert not any("much faster" in note for note in model_notices(folder(name), "lm", device="cpu"))


def test_a_checkpoint_in_fp8_is_what_its_scales_make_of_it(tmp_path):
    whole = load_file(tiny_folder("qwen3", tmp_path) / "model.safetensors")
    stored, expected = {}, {}
    for name, t in whole.items():
        if "proj" not in name:
            stored[name] = expected[name] = t
            continue
        scale = t.abs().max() / 448
        stored[name], stored[f"{name}_scale_inv"] = (t / scale).to(torch.float8_e4m3fn), scale.reshape(1, 1)
        expected[name] = stored[name].float() * scale
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    backend = Local(tmp_path, sgd(0.1))
    state = backend.load_pretrained()
    backend.save(state, tmp_path / "saved")
    again = Local(tmp_path / "saved", sgd(0.1)).load_pretrained()
    for params in (state.params, again.params):
        assert all(torch.equal(params[name], t) for name, t in expected.items())


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_other_quantized_checkpoints_are_refused_by_the_name_of_what_they_need(tmp_path, method):
    config = json.loads((tiny_folder("qwen3", tmp_path) / "config.json").read_text())
    quantization = {"quant_method": method, "bits": 4, "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    says = rf"quantized \({method}\).*requires.*; take the checkpoint with whole weights"
    with pytest.raises(ModelError, match=says):
        Local(tmp_path, sgd(0.1)).load_pretrained()


def test_a_family_without_value_heads_is_refused_by_name(tmp_path):
    tiny_folder("olmo2", tmp_path)
    with pytest.raises(ModelError, match="a model of the type olmo2 has no value head in transformers; take another"):
        Local(tmp_path, sgd(0.1), head="value").load_pretrained()


@pytest.mark.parametrize("pretrained", [False, True])
def test_a_value_head_on_a_model_in_bf16(tmp_path, pretrained):
    tiny_folder("qwen2", tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    backend = Local(tmp_path, sgd(0.1), head="value")
    state = backend.load_pretrained() if pretrained else backend.init(Key.from_seed(0))
    assert {t.dtype for t in state.params.values()} == {torch.float32}
    assert backend.forward(
        state.params, Batch.from_rows([[3, 4, 5]], {"response_mask": [[0.0, 1.0, 1.0]]}), ["values"]
    ).values.shape == (3,)


def test_gradients_that_triton_makes_wrong_are_not_taken(folder, monkeypatch):
    hybrid, dense = folder("qwen3_5_text"), folder("qwen3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    known, there = importlib.util.find_spec, {"fla": True, "tilelang": None}
    monkeypatch.setattr("importlib.util.find_spec", lambda m, *a: there[m] if m in there else known(m, *a))
    for version, wrong in (("3.3.1", False), ("3.6.0+git1", True), ("3.7.0rc1", True), ("3.7.1", False)):
        monkeypatch.setattr("importlib.metadata.version", lambda name, version=version: version)
        assert checks.wrong_gradients() == wrong
        notes = model_notices(hybrid, "lm", device="cuda")
        assert any("tilelang" in note for note in notes) == wrong
        assert not any("tilelang" in note for note in model_notices(dense, "lm", device="cuda"))


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next", "olmo_hybrid"])
def test_linear_attention_without_kernels_rounds_only_its_results(name, monkeypatch):
    """In fp32 nothing changes; in bf16 a cache and whole rows agree better than by transformers' own functions."""
    config = tiny_config(name)
    module = sys.modules[AutoModelForCausalLM._model_mapping[type(config)].__module__]
    ids = torch.randint(3, config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def computed(dtype, kernels):
        torch.manual_seed(0)
        with kernels:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype)
        rows, past = model(ids, use_cache=False).logits, model(ids[:, :40], use_cache=True).past_key_values
        steps = [model(ids[:, t : t + 1], past_key_values=past, use_cache=True).logits for t in range(40, 48)]
        return rows.float(), torch.cat(steps, 1).float()

    def own():
        return checks.kernels_for("cpu", AutoModelForCausalLM, config)

    before = computed(torch.float32, contextlib.nullcontext())
    assert all(map(torch.equal, before, computed(torch.float32, own())))
    gaps = [
        float((steps - rows[:, 40:]).abs().mean())
        for rows, steps in (computed(torch.bfloat16, contextlib.nullcontext()), computed(torch.bfloat16, own()))
    ]
    assert gaps[1] < 0.9 * gaps[0]
    # vLLM's kernel for decoding rounds what is written to the state, so the trainer does.
    rule, written = module.torch_chunk_gated_delta_rule, []

    def recorded(*args, beta, **more):
        written.append(beta)
        return rule(*args, beta=beta, **more)

    with monkeypatch.context() as patch:
        patch.setattr(module, "torch_chunk_gated_delta_rule", recorded)
        computed(torch.bfloat16, own())
    assert written and all(torch.equal(beta, beta.bfloat16()) for beta in written)
    # A CPU cannot run flash-linear-attention's kernels. If the module has them, the result is the same.
    kernel = type("FusedRMSNormGated", (), {"__module__": "fla.modules"})
    monkeypatch.setitem(vars(module), "FusedRMSNormGated", kernel)
    assert all(map(torch.equal, before, computed(torch.float32, own())))
    assert module.FusedRMSNormGated is kernel


def test_convolutions_of_linear_attention_round_their_products():
    """They do so as vLLM's kernel does, in whole rows and with a cache; the gradient has no roundings."""
    config, silu = tiny_config("qwen3_5_text"), torch.nn.functional.silu
    with checks.kernels_for("cpu", AutoModelForCausalLM, config):
        module = sys.modules[AutoModelForCausalLM._model_mapping[type(config)].__module__]
        convolved, updated = module.causal_conv1d_fn, module.causal_conv1d_update
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in ((2, 6, 9), (6, 4), (6,)))
    x.requires_grad_()
    for added in (None, bias):
        out = convolved(x, weight, added)
        with torch.no_grad():
            assert torch.equal(convolved(x, weight, added), out)
        products = (torch.nn.functional.pad(x, (3, 0)).unfold(-1, 4, 1) * weight[:, None]).float()
        whole = products.sum(-1) + (0.0 if added is None else added.float()[:, None])
        assert torch.allclose(out, silu(whole).bfloat16(), rtol=2**-8, atol=0)
        state = x.detach()[..., 4:8].clone()
        assert torch.equal(updated(x.detach()[..., 8:], state, weight, added, "silu"), out[..., 8:])
        assert torch.equal(state, x[..., 5:])
        wide = None if added is None else added.float()
        exact = silu(
            torch.nn.functional.conv1d(x.float(), weight.float()[:, None], wide, padding=3, groups=6)[..., :9]
        )
        assert float((exact.bfloat16() == out).float().mean()) < 0.9
        grads = [torch.autograd.grad(y.float().sum(), x)[0] for y in (exact, out)]
        assert torch.allclose(*grads, rtol=2**-5, atol=2**-5)


def test_models_that_another_package_registers_are_not_taken(folder, tmp_path):
    class Mamba(transformers.PretrainedConfig):
        model_type = "mamba"

    transformers.AutoConfig.register("mamba", Mamba, exist_ok=True)
    assert type(read_config(folder("mamba"))) is transformers.MambaConfig
    other = shutil.copytree(folder("mamba"), tmp_path / "other")
    transformers.AutoConfig.register("mamba", Mamba, exist_ok=True)
    assert dropout_of(other) == {} and type(read_config(other)) is transformers.MambaConfig


def test_minimax_m2_rotates_what_its_config_says(folder, tmp_path):
    """Released models name the rotated elements of a head as ``rotary_dim``, a field that transformers 5.9 drops."""
    released = shutil.copytree(folder("minimax_m2"), tmp_path / "released")
    table = json.loads((released / "config.json").read_text())
    half = table["head_dim"] // 2
    (released / "config.json").write_text(json.dumps(table | {"rotary_dim": half}))
    explicit = transformers.AutoConfig.from_pretrained(released)
    explicit.rope_parameters["partial_rotary_factor"] = 0.5
    own = transformers.AutoModelForCausalLM.from_pretrained(released, config=explicit, dtype=torch.float32).eval()
    assert own.model.rotary_emb.inv_freq.shape == (half // 2,)
    rows = [[1, 5, 9, 4, 7], [2, 8, 3]]
    batch = Batch.from_rows(rows, {"response_mask": [[0.0] + [1.0] * (len(row) - 1) for row in rows]})
    local = Local(released, adamw(0.0))
    found = local.forward(local.load_pretrained().params, batch, ("logprobs",)).logprobs
    for row, ours in zip(rows, found.split([len(row) for row in rows]), strict=True):
        expected = own(torch.tensor([row])).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])
        assert torch.allclose(ours[1:], expected[:, 0], atol=1e-5)


def test_layers_of_many_forms_are_all_compiled(monkeypatch):
    """Kinds of layers share their code. One that is not compiled any more keeps other tensors if it is recomputed."""

    class Layer(torch.nn.Module):
        def __init__(self, power):
            super().__init__()
            self.power = power

        def forward(self, hidden):
            return hidden**self.power

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    layers = [Layer(power) for power in range(1, 7)]
    for layer in layers:
        compile_layer(layer)
    x = torch.full((1, 3, 2), 2.0)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for learned in (False, True):
            with torch.set_grad_enabled(learned):
                assert [float(layer(x)[0, 0, 0]) for layer in layers] == [2.0**power for power in range(1, 7)]


def test_a_skeleton_finds_its_layers(folder):
    made = {name: hollow(folder(name), "lm", key=Key.from_seed(0)).skeleton for name in ("qwen3", "mamba", "gpt_oss")}
    assert {name: len(skeleton.layers) for name, skeleton in made.items()} == dict.fromkeys(made, 4)
    assert Skeleton(torch.nn.Linear(1, 1), "lm").fit == Fit()


def test_the_page_of_families_is_made_from_its_results():
    results = families_page.results_of(ROOT / "benchmarks/results")
    assert (ROOT / "docs/families.md").read_text() == families_page.page(results)
    assert sum(r["outcome"] == families.RIGHT for r in results["local"].values()) >= 110
    for name in ("local", "fsdp"):
        assert not any(r["outcome"] == families.WRONG for r in results[name].values())
