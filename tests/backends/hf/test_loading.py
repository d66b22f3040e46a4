"""What a folder or an option may be: models that cannot be loaded or run are refused, and say why."""

import contextlib
import json

import pytest
import torch
from ragged_rows import OPTIMIZER, edit_config, ragged
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from verl_fn.backends.hf.checks import fit_of, smaller
from verl_fn.backends.hf.folder import ModelError, build, hollow, read_config
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.new_model import new_model, new_tower
from verl_fn.backends.hf.outputs import check_head
from verl_fn.backends.hf.weights import FolderWeights, check_numbers
from verl_fn.backends.local import Local
from verl_fn.backends.serving import longest_of
from verl_fn.benchmarks import loading
from verl_fn.errors import UsageError
from verl_fn.state import Batch, Key, tree
from verl_fn.steps import cross_entropy, value_clip

UP = "model.layers.1.mlp.up_proj.weight"
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
MOE = {"arch": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def load(folder, head="lm", **options):
    return Local(folder, OPTIMIZER, head=head, **options).load_pretrained()


def edit_weights(folder, change):
    file = folder / "model.safetensors"
    found = {name: t.clone() for name, t in change(load_file(file)).items()}
    save_file(found, file, metadata={"format": "pt"})


def test_a_head_is_lm_or_value():
    assert [check_head(head) for head in ("lm", "value")] == ["lm", "value"]
    with pytest.raises(ValueError, match=r"^head is 'critic'; it must be lm or value$"):
        check_head("critic")


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda w: {n: t for n, t in w.items() if n != UP}, rf"1 missing \({UP}\); copy the folder again"),
        (
            lambda w: {n.replace("model.", "backbone."): t for n, t in w.items()},
            r"2[45] missing \(.*, \.\.\.\); 24 not of this model \(backbone\.embed_tokens\.weight, .*, \.\.\.\);",
        ),
        (lambda w: {n: t[1:] if n == UP else t for n, t in w.items()}, rf"1 of another shape \({UP}\);"),
        (
            lambda w: w | {"model.layers.2.mlp.up_proj.weight": w[UP]},
            r"1 not of this model \(model\.layers\.2\.mlp\.up_proj\.weight\)",
        ),
        (lambda w: w | {"v_head.weight": w[UP]}, r"1 not of this model \(v_head\.weight\)"),
    ],
    ids=["missing", "misnamed", "shape", "more", "another head"],
)
def test_a_folder_without_the_models_weights_is_refused_by_their_names(tmp_path, head, change, told):
    folder = new_model(tmp_path / "model", chars="abc", hidden_size=32)
    edit_weights(folder, change)
    with pytest.raises(ModelError, match=rf"model does not hold the weights of Qwen3For\w+: {told}"):
        load(folder, head)


@pytest.mark.parametrize("whole", [True, False])
def test_a_folder_with_adapters_of_peft_is_refused(tmp_path, whole):
    """transformers would load the adapters, and the base model that they name, in place of the folder's."""
    folder = new_model(tmp_path / "model", chars="abc", hidden_size=32)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "me/base"}))
    if not whole:
        (folder / "config.json").unlink()
    for make in (load, lambda folder: hollow(folder, "lm", key=Key.from_seed(0))):
        with pytest.raises(
            ModelError, match=r"has adapters of PEFT \(adapter_config\.json\) for me/base: merge them"
        ):
            make(folder)


@pytest.mark.parametrize("fields", [{"vocab_size": 99}, {"intermediate_size": 99}], ids=str)
def test_weights_of_another_size_are_refused(tmp_path, fields):
    folder = new_model(tmp_path, chars="abc", hidden_size=32)
    edit_config(folder, **fields)
    with pytest.raises(ModelError, match=r"weights"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("model.embed_tokens.weight", 1e38, r"model\.embed_tokens\.weight has the value 1e\+38, and"),
        (UP, float("nan"), "has the value nan"),
        ("model.norm.weight", float("inf"), "has the value inf"),
        ("lm_head.weight", -float("inf"), "has the value -inf"),
        ("model.layers.0.self_attn.q_proj.bias", 1e30, "has the value 1e"),
        ("model.norm.weight", -1e15, None),
    ],
)
def test_weights_that_make_every_step_useless_are_refused(tmp_path, name, value, told):
    """By both readers: of whole models, and of rows of their files."""
    folder = new_model(tmp_path / "model", chars="abc", hidden_size=32, arch="qwen2", tie_word_embeddings=False)

    def change(weights):
        weights[name] = weights[name].clone()
        weights[name].view(-1)[1] = value
        return weights

    edit_weights(folder, change)
    weights = FolderWeights.of(folder, hollow(folder, "lm", key=Key.from_seed(0)))
    rows = torch.empty(weights.shapes[name])
    with contextlib.nullcontext() if told is None else pytest.raises(ModelError, match=told):
        load(folder)
    with contextlib.nullcontext() if told is None else pytest.raises(ModelError, match=told.replace("model: ", "")):
        weights.read(name, 0, len(rows), rows)


def test_a_bias_may_exclude_tokens():
    check_numbers("lm_head.bias", torch.tensor([0.0, -torch.inf]), "model")
    with pytest.raises(ModelError, match="has the value nan"):
        check_numbers("lm_head.bias", torch.tensor([torch.nan, -torch.inf]), "model")


def test_weights_that_cannot_be_put_together_are_refused(tmp_path):
    folder = new_model(tmp_path, chars="abc", hidden_size=32, **MOE)
    one = "model.layers.0.mlp.experts.0.down_proj.weight"
    edit_weights(folder, lambda w: w | {one: w[one][1:]})
    with pytest.raises(ModelError, match="its weights cannot be converted"):
        load(folder)
    edit_weights(folder, lambda w: {n: t for n, t in w.items() if n != one})
    with pytest.raises(ModelError, match=r"1 of another shape \(model\.layers\.0\.mlp\.experts\.down_proj\)"):
        load(folder)


def test_an_output_layer_of_its_own_beside_a_tied_config_is_refused(tmp_path):
    """transformers does not tie weights that are both stored and differ; vLLM and the embedded engine do."""
    folder = new_model(tmp_path / "m", chars="abc", hidden_size=32, tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    for sign in (1, -1):
        weights["lm_head.weight"] = sign * weights["model.embed_tokens.weight"]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        if sign > 0:
            assert "lm_head.weight" not in load(folder).params
    with pytest.raises(
        ModelError,
        match=r"lm_head\.weight with other values than model\.embed_tokens\.weight,.* tie_word_embeddings to false",
    ):
        load(folder)
    edit_config(folder, tie_word_embeddings=False)
    params = load(folder).params
    assert torch.equal(params["lm_head.weight"], -params["model.embed_tokens.weight"])


def test_the_outer_config_of_a_model_with_images_says_whether_weights_are_tied(tmp_path):
    folder = new_model(tmp_path / "m", chars="ab", arch="qwen3_vl", tie_word_embeddings=False)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edit_config(folder, tie_word_embeddings=False, text_config=text | {"tie_word_embeddings": True})
    assert "lm_head.weight" in build(folder, "lm", pretrained=True, key=Key.from_seed(0))[1]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["qwen3", "gpt_neox"])
def test_the_other_heads_weights_are_passed_over(tmp_path, arch, tied):
    """A critic begins at a language model with a head of zeros; a critic's body is a language model where tied."""
    folder = new_model(tmp_path / "lm", chars="abc", arch=arch, hidden_size=32, tie_word_embeddings=tied)
    state = load(folder, "value")
    head = [name for name in state.params if name not in load(folder).params]
    assert len(head) == 2 and not any(state.params[name].any() for name in head)
    Local(folder, OPTIMIZER, head="value").save(state, tmp_path / "critic")
    if tied:
        assert tree.equal(load(tmp_path / "critic").params, load(folder).params)
    else:
        with pytest.raises(ModelError, match=r"1 missing \((lm_head|embed_out)\.weight\)"):
            load(tmp_path / "critic")


@pytest.mark.parametrize("arch", ["qwen3", "mixtral"])
@pytest.mark.parametrize("pickled", [False, True])
def test_a_classifier_of_sequences_keeps_its_head(tmp_path, arch, pickled):
    """Also if transformers has to read it: pickled, or with experts that it joins."""
    folder = new_model(
        tmp_path / "lm", chars="abc", arch=arch, hidden_size=32, **(MIXTRAL if arch == "mixtral" else {})
    )
    for labels in (1, 2):
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=labels)
        torch.nn.init.normal_(model.score.weight)
        model.save_pretrained(tmp_path / f"{labels}")
        if pickled:
            (tmp_path / f"{labels}" / "model.safetensors").unlink()
            torch.save(model.state_dict(), tmp_path / f"{labels}" / "pytorch_model.bin")
        if labels == 1:
            params = load(tmp_path / "1", "value").params
            assert torch.equal(params["score.weight"], model.score.weight) and not params["score.bias"].any()
    with pytest.raises(ModelError, match=r"score\.weight has the shape \[2, 32\], and a value head gives one number"):
        load(tmp_path / "2", "value")


def test_a_model_is_not_overwritten_by_a_new_one(tmp_path):
    (tmp_path / "notes.txt").write_text("stays")
    folder = new_model(tmp_path, chars="abc", arch="llama", hidden_size=32)
    before = (folder / "model.safetensors").read_bytes()
    for make in (
        lambda: new_model(folder, chars="abcd", hidden_size=16),
        lambda: new_tower(folder, folder, hidden_size=16),
    ):
        with pytest.raises(UsageError, match="is not empty; choose another folder"):
            make()
    assert (folder / "model.safetensors").read_bytes() == before and (folder / "notes.txt").exists()


def test_a_critics_own_head_must_be_there_and_of_one_number(tmp_path):
    folder = new_model(tmp_path / "lm", chars="abc", hidden_size=32)
    for labels in (1, 3):
        model = AutoModelForTokenClassification.from_pretrained(folder, num_labels=labels)
        model.save_pretrained(tmp_path / f"{labels}")
    assert load(tmp_path / "1", "value").params["score.weight"].any()
    with pytest.raises(
        ModelError, match=r"score\.(bias|weight) has the shape \[3.*, and a value head gives one number"
    ):
        load(tmp_path / "3", "value")
    edit_weights(tmp_path / "1", lambda w: {n: t for n, t in w.items() if "score" not in n})
    with pytest.raises(ModelError, match=r"2 missing \(score\.bias, score\.weight\)"):
        load(tmp_path / "1", "value")


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": False}, MOE], ids=["tied", "untied", "moe"])
def test_checkpoints_load(tmp_path, head, lora, fields):
    folder = new_model(tmp_path / "model", chars="abcdefgh>", hidden_size=32, **fields)
    backend = Local(folder, OPTIMIZER, head=head, lora=lora)
    zeros, ones = (torch.full((ragged().num_tokens,), x) for x in (0.0, 1.0))
    batch = ragged().with_tokens(values=zeros, returns=ones)
    state = backend.load_pretrained()
    grads, _ = backend.forward_backward(state, batch, cross_entropy() if head == "lm" else value_clip())
    state, _ = backend.apply_update(state, grads)
    backend.save(state, tmp_path / "saved")
    assert tree.equal(backend.restore(tmp_path / "saved"), state)
    assert tree.equal(dict(load(tmp_path / "saved", head).params), dict(backend.weights(state.params).read()))


@pytest.mark.parametrize("setting", ["rope_parameters", "rope_scaling"])
def test_frequencies_that_follow_the_rows_before_are_refused(tmp_path, setting):
    folder = new_model(tmp_path, chars="abc", arch="llama", hidden_size=32)
    config = json.loads((folder / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config))
    edit_config(folder, **{setting: {"rope_type": "dynamic", "factor": 4.0, "rope_theta": theta}})
    with pytest.raises(ModelError, match=r"rotary embeddings of kind 'dynamic'.*set rope_type to 'default'"):
        load(folder)
    edit_config(folder, **{setting: {"rope_type": "longrop", "factor": 4.0, "rope_theta": theta}})
    with pytest.raises(ModelError, match=r"kind 'longrop', unknown to transformers.*mean longrope"):
        load(folder)


@pytest.mark.parametrize("arch", ["llama", "phi3"])
def test_rows_that_would_change_the_frequencies_of_others_are_refused(tmp_path, arch):
    """phi3 has its settings where the hub has them."""
    folder = new_model(
        tmp_path, chars="abcdefgh>", arch=arch, hidden_size=32, head_dim=16, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    if arch == "phi3":
        config = json.loads((folder / "config.json").read_text())
        config.pop("rope_parameters")
        (folder / "config.json").write_text(json.dumps(config))
        edit_config(folder, rope_scaling={"type": "longrope", **factors}, original_max_position_embeddings=9)
    else:
        rope = {"rope_type": "longrope", "original_max_position_embeddings": 9, "factor": 8.0, "rope_theta": 1e4}
        edit_config(folder, rope_parameters=rope | factors)
    assert longest_of(read_config(folder)) == 9, "engines take no longer rows either"
    backend = Local(folder, OPTIMIZER)
    state = backend.load_pretrained()
    alone, beside = (backend.forward(state.params, ragged(lengths=lengths)).logprobs for lengths in ((5,), (5, 9)))
    assert torch.allclose(alone, beside[:5], atol=1e-6)
    with pytest.raises(ValueError, match=r"a row has 10 tokens, more than the 9 of .*original_max_position_emb"):
        backend.forward(state.params, ragged(lengths=(5, 10)))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_is_none_is_refused(tiny, bad):
    backend = Local(tiny, OPTIMIZER)
    batch = Batch.from_rows([[4, 5], [6, 7]], {"response_mask": [[0.0, 1.0]] * 2}, {"temperature": [1.0, bad]})
    with pytest.raises(ValueError, match=rf"row 1: temperature is {bad:g}; it must be positive and finite"):
        backend.forward(load(tiny).params, batch)


def test_a_temperature_is_one_number_a_row(tiny):
    backend, state, batch = Local(tiny, OPTIMIZER), load(tiny), ragged()
    for odd in (
        batch.with_tokens(temperature=torch.ones(batch.num_tokens)),
        batch.with_rows(temperature=torch.ones(len(batch), 1)),
    ):
        with pytest.raises(ValueError, match="temperature must be a per-row field"):
            backend.forward(state.params, odd)


def in_files(folder, count, dtype):
    """The folder with its weights in another dtype and in several files with an index, as large models have them."""
    tensors = {name: t.to(dtype) for name, t in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    places = {}
    for i in range(count):
        part = {name: tensors[name] for name in sorted(tensors)[i::count]}
        save_file(part, folder / f"model-{i}.safetensors", metadata={"format": "pt"})
        places |= dict.fromkeys(part, f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize(
    ("files", "fields", "options"),
    [
        (3, {}, {}), (1, {}, {"replicate": 2}), (3, {}, {"head": "value", "lora": Lora(rank=3)}),
        (1, {"tie_word_embeddings": False}, {"lora": Lora(rank=3)}),
        (3, {"tie_word_embeddings": False}, {"head": "value"}),
    ],
    ids=str,
)  # fmt: skip
def test_each_rank_reads_only_its_rows(four, tmp_path, files, fields, options):
    """Bitwise what one process has, for random weights too, which the first rank alone makes whole."""
    folder = new_model(tmp_path, chars="abcde", hidden_size=16, **fields)
    if files > 1:
        in_files(folder, files, torch.bfloat16)
    tensors = {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
    all_rows, reports = sum(len(t) for t in tensors.values()), four.run("rank_checks.loaded", folder, options)
    assert [same for same, _, _ in reports] == [[True, True]] * 4
    # Three rows of every tensor tell the ranks' folders apart.
    most = all_rows / (2 if "replicate" in options else 4) + 5 * len(tensors)
    assert max(rows for _, rows, _ in reports) <= most < all_rows
    assert [wholes for _, _, wholes in reports] == [1, 0, 0, 0]


def both_names(folder):
    edit_weights(folder, lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"].clone()})


def without_prefix(folder):
    edit_weights(folder, lambda w: {name.removeprefix("model."): t for name, t in w.items()})


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("fields", "change"),
    [(MOE, lambda folder: None), ({}, both_names), ({}, without_prefix), ({}, pickled)],
    ids=["experts", "tied weights twice", "another prefix", "pickled"],
)
def test_folders_that_transformers_converts_are_handed_out_by_the_first_rank(two, tmp_path, fields, change):
    folder = new_model(tmp_path, chars="abcd", hidden_size=32, **fields)
    change(folder)
    reports = two.run("rank_checks.loaded", folder, {})
    assert [same for same, _, _ in reports] == [[True, True]] * 2
    assert [wholes for _, _, wholes in reports] == [2, 0]


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama", "mistral", "phi3", "gpt_neox", "gemma"])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_model_without_weights_is_the_same_model(tmp_path, arch, head):
    folder = new_model(tmp_path, chars="abcd", arch=arch, hidden_size=32)
    lora, key = Lora(rank=2), Key.from_seed(0)
    (skeleton, params), made = (
        build(folder, head, pretrained=False, key=key, lora=lora),
        hollow(folder, head, key=key, lora=lora),
    )
    assert {name: t.shape for name, t in made.shapes.items()} == {name: t.shape for name, t in params.items()}
    assert list(made.shapes) == list(params) and all(p.is_meta for p in made.skeleton.parameters())
    assert made.adapters and all(torch.equal(t, params[name]) for name, t in made.adapters.items())
    for (name, ours), (other, theirs) in zip(made.skeleton.named_buffers(), skeleton.named_buffers(), strict=True):
        assert name == other and not ours.is_meta and torch.equal(ours, theirs)


def test_an_architecture_is_checked_on_a_small_model(tmp_path):
    wide = new_model(tmp_path / "a", chars="abcd", hidden_size=64, num_hidden_layers=6, intermediate_size=512)
    sizes = [config.num_hidden_layers for config in smaller(AutoModelForCausalLM, read_config(wide))]
    assert sizes == [2, 2, 6]


@pytest.mark.parametrize(
    ("arch", "experts", "left"),
    [
        ("qwen3_moe", {"num_experts": 128, "num_experts_per_tok": 8}, 16),
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}, 4),
        ("deepseek_v3", {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}, 16),
    ],
)
def test_a_small_model_has_few_experts(arch, experts, left):
    """Every kind of layer and of group is left, and tokens still differ in their experts."""
    config = AutoConfig.for_model(arch, num_hidden_layers=6, **experts)
    found = [getattr(small, next(iter(experts))) for small in smaller(AutoModelForCausalLM, config)]
    assert found == [left, next(iter(experts.values())), next(iter(experts.values()))]
    assert fit_of(AutoModelForCausalLM, config, "lm", "folder").layout == "packed"


def test_the_benchmark_of_loading(warm, tmp_path, capsys):
    path = tmp_path / "a.json"
    arguments = ["--shape", "tiny", "--ranks", "2", "--json", str(path), "--ways", "load_pretrained"]
    assert loading.main(arguments) == 0 and "held" in capsys.readouterr().out
    (reports,) = json.loads(path.read_text())["results"].values()
    assert len(reports) == 2 and all(report["peak"] >= report["imports"] > 0 < report["shard"] for report in reports)
