"""The Megatron backend on GPUs, a rank each, with transformer-engine where it is installed."""

import importlib.util

import pytest
import torch
from ranks import Ranks
from vision_cases import seeing

from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.new_model import new_model

GPUS = torch.cuda.device_count()
INSTALLED = all(importlib.util.find_spec(name) for name in ("megatron", "megatron.bridge"))
pytestmark = [
    pytest.mark.skipif(not INSTALLED, reason="megatron-core and megatron-bridge are not installed"),
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def ranks():
    """Starts the ranks of each size once."""
    started = {}

    def of(size):
        if size > GPUS:
            pytest.skip(f"needs {size} CUDA devices")
        if size not in started:
            started[size] = Ranks(size, "cuda")
        return started[size]

    yield of
    for one in started.values():
        one.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Heads of 16 numbers, which fused attention takes."""
    return new_model(tmp_path_factory.mktemp("model"), chars="abcd", hidden_size=64)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return new_model(
        tmp_path_factory.mktemp("model"), chars="abcd", hidden_size=64, arch="qwen3_moe", num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip


LAYOUTS = [
    (1, {}),
    (1, {"checkpointing": True}),
    (1, {"head": "value"}),
    (2, {}),
    (2, {"tp": 2}),
    (2, {"tp": 2, "sp": True}),
    (2, {"pp": 2}),
    (2, {"cp": 2}),
]
LORA = {"lora": Lora(rank=4, alpha=8.0)}
ADAPTERS = [(1, LORA), *((2, LORA | more) for more in ({"tp": 2, "sp": True}, {"pp": 2}, {"cp": 2}))]
EXPERTS = [(1, {}), *((2, more) for more in ({"ep": 2}, {"ep": 2, "checkpointing": True}, {"tp": 2, "sp": True}))]


@pytest.mark.parametrize(("size", "options"), LAYOUTS, ids=str)
def test_the_first_steps_in_fp32(ranks, folder, size, options):
    worst = ranks(size).run("megatron_cases.first_step", folder, options, 9)[0]
    assert worst["outputs"] <= 1e-5 and worst["loss"] <= 1e-5 and worst["grad_norm"] <= 1e-5, worst
    assert worst["gradient"] <= 1e-4 and worst["update"] <= 1e-3 and worst["copies"] == 0, worst


@pytest.mark.parametrize(("size", "options"), LAYOUTS, ids=str)
def test_the_first_steps_in_bf16(ranks, folder, size, options):
    worst = ranks(size).run("megatron_cases.first_step", folder, options | {"dtype": "bfloat16"}, 9)[0]
    assert worst["loss"] <= 1e-3 and worst["grad_norm"] <= 5e-3 and worst["gradient"] <= 0.1, worst


@pytest.mark.parametrize(("size", "options"), ADAPTERS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_steps_of_adapters(ranks, folder, dtype, size, options):
    worst = ranks(size).run("megatron_cases.first_step", folder, options | {"dtype": dtype}, 9)[0]
    bars = (1e-5, 1e-5, 1e-4) if dtype == "float32" else (1e-3, 5e-3, 0.1)
    for name, bar in zip(("loss", "grad_norm", "gradient"), bars, strict=True):
        assert worst[name] <= bar, worst


@pytest.mark.parametrize(("size", "options"), EXPERTS, ids=str)
def test_the_first_steps_with_experts_in_fp32(ranks, experts, size, options):
    """A router's gradient, a difference between experts, is a few thousandths of the whole, and less exact."""
    worst = ranks(size).run("megatron_cases.first_step", experts, options, 9)[0]
    assert worst["outputs"] <= 1e-5 and worst["loss"] <= 1e-5 and worst["grad_norm"] <= 1e-5, worst
    assert worst["gradient"] <= (1e-3 if worst["parameter"].endswith("mlp.gate.weight") else 1e-4), worst
    assert worst["update"] <= 1e-3 and worst["copies"] == 0, worst


@pytest.mark.parametrize(("size", "options"), EXPERTS, ids=str)
def test_the_first_steps_with_experts_in_bf16(ranks, experts, size, options):
    """A token that rounding sends to another expert changes the loss more than the rounding of its numbers."""
    worst = ranks(size).run("megatron_cases.first_step", experts, options | {"dtype": "bfloat16"}, 9)[0]
    assert worst["loss"] <= 1e-2 and worst["copies"] == 0, worst


@pytest.mark.parametrize(("size", "options"), [*EXPERTS, (2, {"pp": 2}), (2, {"cp": 2})], ids=str)
def test_replayed_routes_are_those_of_the_recording(ranks, experts, size, options):
    for change, free, gradient in ranks(size).run("megatron_cases.replayed", experts, options):
        assert change <= 1e-5 and gradient <= 1e-4 and free > 1e-4


@pytest.mark.parametrize("size", [1, 2])
def test_replay_in_bf16(ranks, experts, size):
    """Splits of a batch whose tokens go to random experts, with transformer-engine's kernels."""
    options = {"ep": size, "dtype": "bfloat16"}
    ranks(size).run("megatron_cases.replay_splits", experts, options, 0.05)


REPEATABLE = [(1, {}), (1, {"checkpointing": True}), *((2, more) for more in ({"tp": 2}, {"pp": 2}, {"cp": 2}))]


@pytest.mark.parametrize(("size", "options"), REPEATABLE, ids=str)
def test_the_first_steps_of_repeatable_backends(ranks, folder, size, options):
    options = options | {"dtype": "bfloat16", "deterministic": True}
    worst = ranks(size).run("megatron_cases.first_step", folder, options, 9)[0]
    assert worst["loss"] <= 1e-3 and worst["grad_norm"] <= 5e-3 and worst["gradient"] <= 0.1, worst


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("size", "options"), REPEATABLE, ids=str)
def test_gradients_of_many_rows(ranks, folder, size, options, deterministic):
    """Some 13,000 tokens at once, for which transformer-engine's own repeatable attention would need terabytes."""
    options = options | {"dtype": "bfloat16", "deterministic": deterministic}
    for same, peak in ranks(size).run("megatron_cases.repeats", folder, options, 2000):
        assert (same or not deterministic) and peak < 8 * 2**30


@pytest.mark.parametrize(("size", "options"), EXPERTS, ids=str)
def test_gradients_of_experts_repeat(ranks, experts, size, options):
    options = options | {"dtype": "bfloat16", "deterministic": True}
    assert all(same for same, _ in ranks(size).run("megatron_cases.repeats", experts, options, 200))


FROZEN = {"freeze_vision_tower": True}
SEEING = [
    (1, {}),
    (1, {"checkpointing": True}),
    (1, LORA | FROZEN),
    (2, {"tp": 2}),
    (2, {"tp": 2, "sp": True, "checkpointing": True} | FROZEN),
]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def with_images(request, tmp_path_factory):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    return seeing(tmp_path_factory.mktemp("model"), request.param, **sizes)


@pytest.mark.parametrize(("size", "options"), SEEING, ids=str)
def test_images_in_fp32(ranks, with_images, size, options):
    """Weights come in and go out bitwise, too."""
    worst = ranks(size).run("megatron_image_cases.beside_local", with_images, options, list(range(6)))[0]
    assert worst["logprobs"] <= 1e-5 and worst["gradients"][0] <= 1e-4 and worst["weights"][0] <= 1e-4, worst


def test_images_in_bf16(ranks, with_images):
    """Errors beside fp32 are of the same size as one process has."""
    ours, theirs = ranks(1).run("megatron_image_cases.rounded", with_images)[0]
    assert all(0 < error <= 1.5 * other for error, other in zip(ours, theirs, strict=True)), (ours, theirs)


def test_laws_in_bf16(ranks, folder):
    ranks(1).run("megatron_cases.laws", folder, {"dtype": "bfloat16", "deterministic": True}, 0.05)


OWN = [(1, {}), (1, {"head": "value"}), *((2, more) for more in ({}, {"tp": 2, "sp": True}, {"pp": 2}))]


@pytest.mark.parametrize("placed", [None, "cpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("size", "options"), OWN, ids=str)
def test_updates_of_megatrons_own_optimizer_are_ours(ranks, folder, size, options, dtype, placed):
    """Three, from the same gradients; of states on the GPU and of ones that lie on the CPU."""
    options = options | {"dtype": dtype}
    reports = ranks(size).run("megatron_optimizer_cases.beside_ours", folder, options, "Megatron", placed)
    for weight, moment, norm, change, _ in reports:
        assert weight <= 1e-5 and moment <= 1e-4 and norm <= 1e-5 and change > 1e-3


@pytest.mark.parametrize(
    ("size", "options", "tolerance"),
    [(1, {}, 1e-4), (2, {"tp": 2, "sp": True}, 1e-4), (1, {"dtype": "bfloat16", "deterministic": True}, 0.05)],
    ids=str,
)
def test_laws_with_megatrons_own_optimizer(ranks, folder, size, options, tolerance):
    """Transformer-engine's Adam, also with the hyperparameters of one update."""
    ranks(size).run("megatron_optimizer_cases.laws", folder, options, tolerance, "Megatron")


SHARDED = [(1, {}), *((2, more) for more in ({}, {"checkpointing": True}, {"head": "value"}, {"cp": 2}))]


@pytest.mark.parametrize(("size", "options"), SHARDED, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_steps_with_megatron_fsdp(ranks, folder, dtype, size, options):
    options = options | {"dtype": dtype, "fsdp": True}
    worst = ranks(size).run("megatron_fsdp_cases.first_step", folder, options, 9)[0]
    bars = (1e-5, 1e-5, 1e-4) if dtype == "float32" else (1e-3, 5e-3, 0.1)
    for name, bar in zip(("loss", "grad_norm", "gradient"), bars, strict=True):
        assert worst[name] <= bar, worst


def test_laws_with_megatron_fsdp(ranks, folder):
    options = {"dtype": "bfloat16", "deterministic": True, "fsdp": True}
    ranks(1).run("megatron_fsdp_cases.laws", folder, options, 0.05)


@pytest.mark.parametrize(("size", "options"), [(1, {}), (1, {"dtype": "bfloat16"}), (2, {"tp": 2})], ids=str)
def test_a_state_on_the_cpu_leaves_nothing_on_the_gpu(ranks, folder, size, options):
    """State and buffers are freed, and the state that comes back is the same, bitwise."""
    for freed, expected, same in ranks(size).run("megatron_offload_cases.memory", folder, options):
        assert same and freed >= 0.99 * expected


def test_nothing_is_held_between_calls_and_no_bit_changes(ranks, folder):
    options = {"dtype": "bfloat16", "deterministic": True}
    for sizes, same in ranks(1).run("megatron_offload_cases.freed", folder, options):
        assert all(same) and [*sizes[2::4], *sizes[3::4]] == [[0, 0]] * 4
