"""The Megatron backend on 2 and 4 processes: the laws, the first step beside one process, and what it refuses.

The processes compute with megatron-core and Megatron-Bridge themselves, on CPUs; see ``megatron_on_cpu.py``.
"""

import subprocess
from types import SimpleNamespace

import pytest
import torch
from megatron_support import EXPERTS, FP32, HELPERS, MARKS, ROOT, call, check_first_step, read_lines
from ranks import RankFailed

from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.megatron import importing
from verl_fn.backends.megatron.model import REPLACED, fused_kernels
from verl_fn.benchmarks import workload
from verl_fn.cli import main
from verl_fn.state import tree

pytestmark = MARKS
LORA = Lora(rank=4, alpha=8.0)


@pytest.fixture
def two(megatron_ranks):
    return megatron_ranks(2)


@pytest.fixture
def four(megatron_ranks):
    return megatron_ranks(4)


# Each run of all laws takes seconds, and the first steps below vary the options one by one. The laws with tp = 2, and
# of models without adapters, are in test_megatron_experts.py. This run frees the buffers before each call, in place
# of an engine that generates between the calls.
def test_laws_on_two_ranks(two, folder):
    call(two, "laws", folder, {"pp": 2, "head": "value", "lora": LORA}, FP32, "FreesBuffers")


@pytest.mark.parametrize(
    ("embeddings", "options"),
    [
        ("tied", {}),
        ("tied", {"tp": 2}),
        ("tied", {"tp": 2, "sp": True}),
        ("tied", {"pp": 2}),
        ("untied", {"tp": 2, "sp": True}),
        ("untied", {"pp": 2}),
        ("untied", {"cp": 2}),
        ("tied", {"pp": 2, "head": "value"}),
        ("untied", {"tp": 2, "sp": True, "head": "value"}),
    ],
    ids=str,
)
def test_the_first_steps_are_those_of_one_process(two, folder, untied, embeddings, options):
    check_first_step(call(two, "first_step", folder if embeddings == "tied" else untied, options, 9)[0])


@pytest.mark.parametrize("options", [{"tp": 2}, {"cp": 2, "deterministic": True}], ids=str)
def test_gradients_of_many_rows_repeat(two, folder, options):
    assert all(same for same, _ in call(two, "repeats", folder, options, 80))


@pytest.mark.parametrize(
    "options", [{"tp": 2}, {"tp": 2, "sp": True, "checkpointing": True}, {"pp": 2, "head": "value"}], ids=str
)
def test_the_first_steps_of_adapters(two, folder, options):
    check_first_step(call(two, "first_step", folder, {"lora": LORA, **options}, 9)[0])


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}], ids=str)
def test_the_base_of_adapters_is_the_reference(two, untied, options):
    for gap, message in call(two, "adapters", untied, {"lora": LORA, **options}):
        assert gap <= 2e-6 and "are frozen in Megatron's model" in message


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2, "head": "value"}, {}], ids=str)
def test_frozen_elements_lie_in_the_compute_dtype(two, untied, options):
    found = call(two, "narrow_base", untied, {"lora": LORA, "dtype": "bfloat16", **options})
    assert found == [{"frozen": {2}, "trained": {4}}] * 2


@pytest.mark.parametrize(
    ("size", "options", "copied"),
    [
        (1, {}, False),
        (1, {"dtype": "bfloat16"}, False),
        (2, {"pp": 2}, False),
        (2, {"tp": 2}, None),
        (2, {}, True),
    ],
    ids=str,
)
def test_frozen_parameters_that_one_rank_owns_are_the_states(megatron_ranks, untied, size, options, copied):
    """Ranks of tensor parallelism all hold norms, and ranks with rows of their own divide every parameter."""
    for found, held in call(megatron_ranks(size), "lent", untied, options):
        for copies, own in found:
            assert (own > copies > 0) if copied is None else (copies == 0) != copied and (own == 0) == copied
        assert held == 0


@pytest.mark.parametrize(("dtype", "start"), [("float32", "load_pretrained"), ("bfloat16", "init")])
def test_adapters_move_between_layouts_and_backends(two, untied, tmp_path, dtype, start):
    """Restored by tp = 2 and saved, and then by pp = 2: the files are those of one process, and so are PEFT's."""
    from rank_cases import KEY, optimizer

    from verl_fn.steps import ppo_clip
    from verl_fn.testing import tiny_batch

    one = Local(untied, optimizer(), max_tokens=24, lora=LORA, dtype=dtype)
    state = getattr(one, start)(key=KEY)
    for _ in range(2):
        state, _ = one.apply_update(state, one.forward_backward(state, tiny_batch(), ppo_clip())[0])
    one.save(state, tmp_path / "one")
    weights = "model.safetensors" if start == "init" else "adapter_model.safetensors"
    digest = tree.digest(dict(state.params))
    options = [{"lora": LORA, "dtype": dtype, **sizes} for sizes in ({"tp": 2}, {"pp": 2})]
    assert call(two, "moves", untied, options[0], tmp_path / "one", tmp_path / "two") == [digest] * 2
    assert call(two, "moves", untied, options[1], tmp_path / "two", tmp_path / "three") == [digest] * 2
    for file in (weights, "train_state.safetensors", "train_state.json", "lora.json"):
        assert (tmp_path / "three" / file).read_bytes() == (tmp_path / "one" / file).read_bytes(), file


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (Lora(3), "tp = 2 does not divide the rank of LoRA, 3"),
        (Lora(4, targets=("q_proj",)), "adapts all or none of them: add model.layers.0.self_attn.k_proj"),
        (Lora(4, targets=("c_attn",)), "'c_attn': no linear layer"),
    ],
    ids=str,
)
def test_adapters_that_do_not_fit_are_refused(two, folder, lora, message):
    assert all(message in error for error in call(two, "refused", folder, {"tp": 2, "lora": lora}))


@pytest.mark.parametrize("options", [{"tp": 2, "pp": 2}, {"cp": 2, "pp": 2, "checkpointing": True}], ids=str)
def test_the_first_steps_of_four_ranks(four, folder, options):
    check_first_step(call(four, "first_step", folder, options, 9)[0])


def test_the_first_step_in_bf16(two, untied):
    worst = call(two, "first_step", untied, {"tp": 2, "dtype": "bfloat16"}, 9)[0]
    assert worst["loss"] <= 1e-3 and worst["grad_norm"] <= 5e-3 and worst["gradient"] <= 0.05, worst


@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_rows_than_ranks(four, folder, rows):
    worst = call(four, "first_step", folder, {}, rows)[0]
    # The gradients of a single row are small beside the rounding of its sums.
    check_first_step(worst | {"gradient": worst["gradient"] / 10})


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_buffers_are_filled_once_for_a_state(two, folder, options):
    assert call(two, "holds", folder, options) == [[1, 1, 2, 3, 4]] * 2


ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES = {
    "qwen2": {"arch": "qwen2"},
    "qwen3": {"arch": "qwen3", "tie_word_embeddings": False, "rope_parameters": ROPE | {"rope_type": "yarn"}},
    "gemma": {"arch": "gemma"},
    "llama": {"arch": "llama", "tie_word_embeddings": False},
    "qwen3_moe": EXPERTS,
}


# Under pp a mapping only has other numbers of layers.
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {"tp": 2, "sp": True}) for name in FAMILIES), ("gemma", {"pp": 2}), ("qwen3_moe", {"pp": 2})],
    ids=str,
)
def test_families_come_out_as_they_went_in(two, tmp_path, name, options):
    folder = new_model(tmp_path / name, chars="abcd", hidden_size=16, **FAMILIES[name])
    for same, worst in call(two, "family", folder, options):
        assert same and worst <= 1e-5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
            "has layers with a sliding window of 4 tokens, and",
        ),
        ({"rope_parameters": ROPE | {"rope_type": "linear"}}, "Megatron-Bridge makes one with other frequencies"),
        (
            {
                "arch": "llama",
                "rope_parameters": ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            },
            "Megatron-Bridge makes one with other frequencies",
        ),
        (
            {"arch": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
            "layers that need transformer-engine",
        ),
    ],
    ids=["window", "linear", "llama3", "layers"],
)
def test_models_of_which_bridge_makes_others_are_refused(two, tmp_path, fields, message):
    folder = new_model(tmp_path, chars="abcd", hidden_size=16, **fields)
    for error in call(two, "refused", folder, {}):
        assert error.startswith("ModelError") and message in error


@pytest.mark.parametrize(
    ("name", "options"), [("untied", {"tp": 2}), ("untied", {"pp": 2}), ("experts", {"ep": 2})], ids=str
)
def test_weights_to_publish(two, request, name, options):
    assert call(two, "published", request.getfixturevalue(name), options) == [True, True]


def test_a_state_moves_between_layouts_and_backends(two, four, untied, tmp_path):
    """Saved under tp = 2, pp = 2, restored by one process, by pp = 2 and by tp = 2, moments included: bitwise."""
    from rank_cases import optimizer

    (digest, *others) = call(four, "trained", untied, {"tp": 2, "pp": 2}, tmp_path / "four")
    assert others == [digest] * 3
    one = Local(untied, optimizer())
    state = one.restore(tmp_path / "four")
    assert tree.digest(dict(state.params)) == digest
    one.save(state, tmp_path / "one")
    assert call(two, "moves", untied, {"pp": 2}, tmp_path / "one", tmp_path / "two") == [digest] * 2
    assert call(two, "moves", untied, {"tp": 2, "sp": True}, tmp_path / "two", tmp_path / "three") == [digest] * 2
    assert tree.equal(one.restore(tmp_path / "three"), state)
    for file in ("model.safetensors", "train_state.safetensors"):
        assert (tmp_path / "three" / file).read_bytes() == (tmp_path / "one" / file).read_bytes()


def test_a_run_goes_through_three_backends(two, untied, tmp_path):
    """One step each on megatron, fsdp, local and megatron again are four steps on one process."""
    from rank_cases import KEY, optimizer

    from verl_fn.steps import ppo_clip
    from verl_fn.testing import tiny_batch

    one, batch = Local(untied, optimizer(), max_tokens=24), tiny_batch()
    state = one.init(KEY)
    one.save(state, tmp_path / "0")

    def step(state):
        return one.apply_update(state, one.forward_backward(state, batch, ppo_clip())[0])[0]

    call(two, "one_step", untied, {"tp": 2}, tmp_path / "0", tmp_path / "1")
    call(two, "one_step", untied, {}, tmp_path / "1", tmp_path / "2", True)
    one.save(step(one.restore(tmp_path / "2")), tmp_path / "3")
    call(two, "one_step", untied, {"pp": 2}, tmp_path / "3", tmp_path / "4")
    found, wanted = one.restore(tmp_path / "4"), step(step(step(step(state))))
    assert found.step == wanted.step == 4
    for name, t in wanted.params.items():
        torch.testing.assert_close(found.params[name], t, rtol=0, atol=1e-5)


def test_a_run_is_that_of_one_process(two, tmp_path):
    """Fine-tuning under torchrun, with evaluations by the sampler and a checkpoint."""
    recipe = str(ROOT / "recipes/sft_reverse.toml")
    arguments = ["train", recipe, "driver.device=cpu", "trainer.total_training_steps=3", "data.train_batch_size=16"]
    layout = ["actor.strategy=megatron", "actor.megatron.tensor_model_parallel_size=2"]
    assert main([*arguments, f"trainer.dir={tmp_path / 'one'}"]) == 0
    assert call(two, "run", [*arguments, *layout, f"trainer.dir={tmp_path / 'two'}"]) == [0, 0]
    losses = [
        [line["train/loss"] for line in read_lines(tmp_path / name) if "train/loss" in line]
        for name in ("one", "two")
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


COMMAND = """
import sys
sys.path.insert(0, sys.argv[1])
from verl_fn.cli import main
sys.exit(main(sys.argv[2:]))
"""


def test_a_run_over_ray_is_that_of_one_process(megatron_python, tiny, tmp_path, capsys):
    """PPO with a critic: one process makes the first and the third step, and ranks of Ray's the second."""
    pytest.importorskip("ray")
    environment = tmp_path / "environment.yaml"
    hook = (HELPERS / "megatron_on_cpu.yaml").read_text()
    environment.write_text(f"{hook}py_executable: {megatron_python}\n")
    arguments = [
        "train", str(ROOT / "recipes/ppo_reverse.toml"), f"model.path={tiny}", "driver.device=cpu",
        "data.train_batch_size=8", "data.val_size=8", "algorithm.ppo_mini_batch_size=8", "algorithm.critic_warmup=0",
        "actor.optim.lr_scheduler_type=constant", "actor.optim.lr_warmup_steps=0", "trainer.test_freq=-1",
    ]  # fmt: skip
    ranks = ["driver.kind=ray", "ray.ranks=2", f"ray.runtime_env={environment}", "actor.strategy=megatron"]
    ranks += ["actor.megatron.tensor_model_parallel_size=2"]
    assert main([*arguments, "trainer.total_training_steps=3", f"trainer.dir={tmp_path / 'one'}"]) == 0
    for steps, more in ((1, []), (2, ranks), (3, [])):
        capsys.readouterr()
        more = [*more, f"trainer.total_training_steps={steps}", f"trainer.dir={tmp_path / 'two'}"]
        if steps == 2:
            # In a process of its own: where tests have connected this one to a Ray, a run takes that one.
            command = [megatron_python, "-c", COMMAND, str(HELPERS), *arguments, *more]
            run = subprocess.run(command, capture_output=True, text=True)
            assert run.returncode == 0, run.stdout + run.stderr
            printed = run.stdout
        else:
            assert main([*arguments, *more]) == 0
            printed = capsys.readouterr().out
        assert all((f"{name} {place}" in printed) == (steps == 2) for name, place in importing.about().items())
    one, two = (
        [line for line in read_lines(tmp_path / name) if "actor/grad_norm" in line] for name in ("one", "two")
    )
    assert [line["step"] for line in two] == [1, 2, 3]
    for name in ("critic/score/mean", "actor/pg_loss", "critic/vf_loss", "actor/grad_norm", "critic/grad_norm"):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("options", [{"tp": 2}, {}], ids=str)
def test_masks_of_weight_decay(two, untied, options):
    for worst, message in call(two, "masks", untied, options):
        assert worst <= 1e-6
        assert "decays only some of model.layers.0.self_attn.q_proj.weight" in message


@pytest.mark.parametrize(
    ("name", "options"),
    [("folder", {"pp": 2}), ("untied", {"tp": 2, "sp": True}), ("experts", {"ep": 2})],
    ids=str,
)
def test_updates_are_those_of_megatrons_own_optimizer(two, request, name, options):
    """Three, with clipping, a schedule, and the decay of matrices alone, which is Megatron's own rule."""
    for weight, norm, change in call(two, "beside_megatrons_optimizer", request.getfixturevalue(name), options):
        assert weight <= 1e-6 and norm <= 1e-6 and change > 1e-3


@pytest.mark.parametrize(
    ("fields", "fused"),
    [
        ({}, {"apply_rope_fusion", "bias_activation_fusion"}),
        ({"position_embedding_type": "yarn"}, {"bias_activation_fusion"}),
        ({"multi_latent_attention": True}, {"bias_activation_fusion"}),
        ({"activation_func": torch.nn.functional.gelu}, {"apply_rope_fusion"}),
        ({"num_moe_experts": 4}, {"apply_rope_fusion"}),
    ],
    ids=["dense", "yarn", "latent attention", "gelu", "experts"],
)
def test_kernels_that_bridge_leaves_out_are_turned_on_where_they_fit(fields, fused):
    dense = {
        "position_embedding_type": "rope", "multi_latent_attention": False, "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "num_moe_experts": None,
        "transformer_layer_spec": SimpleNamespace(__name__=min(REPLACED)),
    }  # fmt: skip
    assert fused_kernels(SimpleNamespace(**{**dense, **fields})) == dict.fromkeys(fused, True)
    other = {"transformer_layer_spec": SimpleNamespace(__name__="of_another_model")}
    assert fused_kernels(SimpleNamespace(**{**dense, **fields, **other})) == {}


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"tp": 2, "sp": True}], ids=str)
def test_the_loop_of_the_benchmark_does_the_same_work(two, tmp_path, sizes):
    folder = workload.write_model(tmp_path / "model", "tiny", "cpu")
    for norms in call(two, "beside_a_loop", folder, sizes):
        assert norms["ours"] > 1e-3 and norms["in_place"] == pytest.approx(norms["ours"], rel=5e-3)


@pytest.mark.parametrize(
    ("entropy", "heated", "chunk"), [(False, False, None), (True, True, 5), (True, False, 16)], ids=str
)
def test_log_probs_of_a_shared_vocabulary(two, entropy, heated, chunk):
    assert max(call(two, "vocabulary_shared", entropy, heated, chunk)) <= 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3}, "tp x pp x cp = 3 does not divide the 4 ranks"),
        ({"ep": 3}, "ep = 3 does not divide the 4 ranks"),
        ({"tp": 4}, "tp = 4 does not divide the model's 2 key-value heads"),
        ({"pp": 4}, "pp = 4 does not divide the model's 2 layers"),
        ({"ep": 2}, "ep = 2, and the model has no experts"),
        ({"sp": True}, "needs tp above 1"),
        ({"cp": 0}, "cp = 0 must be at least 1"),
        ({"provider": {"num_layer": 3}}, "has no field num_layer that override_transformer_config could set"),
        ({"provider": {"bf16": True}}, "bf16 cannot be set; this backend decides it"),
        ({"dtype": "float16"}, "it must be one of float32, bfloat16"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(four, folder, options, message):
    assert all(message in error for error in call(four, "refused", folder, options))


def test_ranks_with_different_batches_are_refused(two, folder):
    for errors in call(two, "other_batches", folder, {}):
        assert all("ranks [1] were given another batch than rank 0" in error for error in errors)


def test_outputs_of_another_head_are_refused(two, folder):
    assert all("a lm model gives" in error for error in call(two, "refused_need", folder, {}, "values"))
    assert all("row 0 of the batch has the token id -" in error for error in call(two, "refused_token", folder, {}))


def test_a_family_that_bridge_does_not_know_is_refused(two, tmp_path):
    folder = new_model(tmp_path, chars="abcd", hidden_size=16, arch="olmo", num_key_value_heads=4)
    for error in call(two, "refused", folder, {}):
        assert error.startswith("ModelError") and "Megatron-Bridge makes no model of it" in error


def test_values_of_other_layouts_are_refused(two, folder, tmp_path):
    for messages in call(two, "other_layouts", folder, tmp_path):
        assert len(messages) == 12 and all("another layout" in message for message in messages)


def test_what_is_private_to_megatron_is_there(two):
    """A new version is tried here first."""
    assert call(two, "private_names") == [[], []]


def test_results_can_be_read_without_megatron(two, shallow):
    """By the driver and by rewards, which may be on machines that have no Megatron."""
    assert call(two, "pickled", shallow, {}) == [False, False]


def test_the_replacement_of_cuda_refuses_to_work_beside_it(two):
    assert all("CUDA works here" in error for error in call(two, "refuses_cuda"))


@pytest.mark.parametrize(
    ("name", "options", "check", "law"),
    [
        ("IgnoresParameters", {}, "persistence", "Persistence"),
        ("Averages", {}, "splits", "Split invariance"),
        ("AliasedGradients", {"tp": 2}, "persistence", "Persistence"),
        ("NormOfOneRank", {"tp": 2}, "updates", "Update"),
        ("DropsMoments", {"tp": 2}, "restore", "Restore"),
        ("StaleMasters", {"tp": 2}, "restore", "Restore"),
    ],
)
def test_broken_backends_are_caught(two, shallow, name, options, check, law):
    assert call(two, "mutant", shallow, name, options, check) == [law] * 2


@pytest.mark.parametrize(("name", "options"), [("TwoResults", {"cp": 2}), ("MeansOfMeans", {})], ids=str)
def test_wrong_gradients_differ_from_those_of_one_process(two, shallow, name, options):
    assert call(two, "first_step", shallow, options, 9, name)[0]["gradient"] > 1e-2


def test_buffers_of_several_buckets(two, shallow):
    """A rank that takes its part of each bucket for the part of the first one does not get out what went in."""
    check_first_step(call(two, "first_step", shallow, {}, 9, "SeveralBuckets")[0])
    with pytest.raises(
        RankFailed, match=r"ModelError: the mappings of 8 parameters, such as model\.embed_tokens\.weight"
    ):
        call(two, "first_step", shallow, {}, 9, "OneBucket")
