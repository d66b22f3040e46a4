"""The bytes of each phase: by hand for a small model, against measured peaks, and what is refused."""

import functools
import json
import re
import shutil
from pathlib import Path

import attrs
import pytest
from run_configs import TINY, tiny_run
from transformers import AutoConfig

from verl_fn.backends.hf.config import read_config
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.new_model import new_model
from verl_fn.benchmarks import workload
from verl_fn.cli import main
from verl_fn.config import ConfigError, load, make_plan
from verl_fn.runs import check_run
from verl_fn.runs.checkpoints import checkpoint_bytes
from verl_fn.runs.loop import train
from verl_fn.runs.memory import (
    CONTEXT,
    GIB,
    advice,
    check_memory,
    host_memory,
    model_sizes,
    offloads,
    phases,
    share,
)
from verl_fn.runs.state import offloaded_roles

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
VLLM = ["driver.kind=ray", "driver.device=cuda", "rollout.name=vllm", "rollout.dtype=bfloat16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the config of a shape alone: no weights are read, and each model is counted once."""

    @functools.cache
    def make(shape):
        made = tmp_path_factory.mktemp(shape)
        config = AutoConfig.for_model("qwen2", architectures=["Qwen2ForCausalLM"], **workload.SHAPES[shape])
        config.save_pretrained(made)
        return made

    return make


def plan_of(folder, *more):
    half = ["actor.dtype=bfloat16", "critic.dtype=bfloat16"]
    return make_plan(load(overrides=[f"model.path={folder}", *half, *VLLM, *more]))


def parts(plan, ranks=1, gpu=None, **options):
    plan = attrs.evolve(plan, ray=attrs.evolve(plan.ray, ranks=ranks))
    return {phase.name: {part.name: part.nbytes for part in phase.parts} for phase in phases(plan, gpu, **options)}


def test_a_small_model_by_hand(tmp_path):
    # qwen2, tied: an embedding of 50 x 64, and in each of 2 layers queries 64 x 64 + 64, keys and values
    # 2 x (64 x 32 + 32), output 64 x 64, an MLP of 3 x 64 x 192 and two norms of 64; a last norm of 64.
    shape = workload.SHAPES["tiny"] | {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    AutoConfig.for_model("qwen2", architectures=["Qwen2ForCausalLM"], **shape).save_pretrained(tmp_path)
    n = 50 * 64 + 2 * (64 * 64 + 64 + 2 * (64 * 32 + 32) + 64 * 64 + 3 * 64 * 192 + 2 * 64) + 64
    sizes = model_sizes(tmp_path, "lm")
    assert (sizes.total, sizes.trained) == (n, n)
    more = ["algorithm.name=grpo", "rollout.n=4", "data.train_batch_size=8", "algorithm.ppo_mini_batch_size=2"]
    limits = ["data.max_prompt_length=6", "data.max_response_length=10", "rollout.gpu_memory_utilization=0.25"]
    plan = plan_of(tmp_path, *more, *limits)
    gpu, sizes = 4 * GIB, parts(plan_of(tmp_path, *more, *limits), gpu=4 * GIB)
    assert list(sizes) == ["start", "update_weights", "gen", "old_log_prob", "update_actor"]
    state = {"actor parameters": 4 * n, "actor moments": 8 * n, "actor bfloat16 copy": 2 * n}
    always = {"CUDA itself": 2 * CONTEXT}
    layer = 2 * (4 * 64 + 2 * 64 + 2 * 32 + 3 * 192)
    assert sizes["start"] == {"actor parameters": 4 * n, "actor moments": 8 * n} | always
    assert sizes["update_weights"] == state | {"engine weights": 2 * n} | always
    cache = {"engine cache and computation": gpu // 4 - 2 * n}
    assert sizes["gen"] == state | {"engine weights": 2 * n} | cache | always
    # 8 prompts x 4 answers x 16 tokens; the update keeps both layers. Logits are of all tokens.
    activations = {"activations of 512 tokens": 512 * (layer + 50 * 2)}
    assert sizes["old_log_prob"] == state | activations | always
    activations = {"activations of 512 tokens": 512 * (2 * layer + 50 * 2)}
    assert sizes["update_actor"] == state | {"actor gradients": 4 * n} | activations | always
    awake = parts(attrs.evolve(plan, rollout=attrs.evolve(plan.rollout, free_cache_engine=False)), gpu=gpu)
    engine = {"engine weights": 2 * n} | cache
    assert awake["update_actor"] == sizes["update_actor"] | engine
    assert awake["update_weights"] == awake["gen"] == sizes["gen"]
    moved = parts(plan, gpu=gpu, offload=True)
    assert moved["gen"] == engine | always and moved["update_actor"] == sizes["update_actor"]


def test_the_memory_of_a_machine_by_hand(folder):
    model = folder("0.5b")
    n = model_sizes(model, "lm").total

    def held(ranks, *more, saved=0):
        plan = plan_of(model, "algorithm.name=grpo", "rollout.n=8", *more)
        return {part.name: part.nbytes for part in host_memory(plan, 80 * GIB, ranks, saved).parts}

    assert held(1) == {}
    turns = ["rollout.offload_trainer=true", "algorithm.use_kl_loss=true"]
    # A reference that is never updated lies there once, in bf16.
    assert held(1, *turns) == {"actor state twice": 2 * 12 * n, "reference state": 2 * n}
    sharded = [*turns, "actor.strategy=fsdp", "ray.ranks=4", "trainer.async_save=true"]
    each = 4 * (n // 4) + 8 * (n // 4)
    found = held(2, *sharded, saved=12 * n)
    assert found == {
        "actor state twice": 2 * 2 * each,
        "reference state": 2 * 2 * (n // 4),
        "copy for the disk": 6 * n,
    }
    resting = ["actor.strategy=fsdp", "ray.ranks=2", "actor.fsdp_config.offload_policy=true"]
    assert held(2, *resting) == {"actor state": 2 * 12 * (n // 2)}
    # 24 layers; the inputs of two stay on the GPU. 16,384 tokens of width 896 in bf16.
    recomputed = ["actor.enable_gradient_checkpointing=true", "actor.enable_activation_offload=true"]
    assert held(1, *recomputed) == {"actor inputs of layers": 22 * 16384 * 896 * 2}
    # Of two roles the larger one counts, since they are updated one after the other.
    critics = ["algorithm.name=ppo", *(setting.replace("actor", "critic") for setting in recomputed)]
    fewer = [*critics, "actor.ppo_max_token_len_per_gpu=8192"]
    assert held(1, *recomputed, *fewer) == {"critic inputs of layers": 22 * 16384 * 896 * 2}


def test_a_check_notes_that_a_machine_has_less_memory_than_the_plan_moves_there(folder, monkeypatch, capsys):
    plan = plan_of(folder("0.5b"), "rollout.offload_trainer=true", "trainer.async_save=true")
    for free, gpus, noted in ((0, None, True), (2**50, None, False), (0, 1, False)):
        monkeypatch.setattr(check_run, "free_memory", lambda free=free: free)
        (line,) = check_run.host_lines(plan, 80 * GIB, gpus)
        assert line.startswith("host        moved to the memory of a machine with 1 of the ranks, in GiB: copy for")
        said = capsys.readouterr().out
        assert said.startswith("note: the run moves ") is noted
        assert not noted or "0.00 are free; rollout.offload_trainer=false; or trainer.async_save=false" in said
    monkeypatch.setattr(check_run, "free_memory", lambda: 0)
    # The ranks of another cluster do not lie in this machine's memory.
    elsewhere = plan_of(folder("0.5b"), "rollout.offload_trainer=true", "ray.address=10.0.0.1:6379")
    assert list(check_run.host_lines(elsewhere, 80 * GIB, None)) and not capsys.readouterr().out
    sharded = plan_of(folder("0.5b"), "rollout.offload_trainer=true", "actor.strategy=fsdp", "ray.ranks=16")
    (line,) = check_run.host_lines(sharded, 80 * GIB, 8)
    assert line.startswith("host        moved to the memory of a machine with 8 of the ranks, in GiB: ")


def test_a_changed_config_is_counted_anew(folder, tmp_path):
    model = shutil.copytree(folder("tiny"), tmp_path / "tiny")
    before, config = model_sizes(model, "lm").total, json.loads((model / "config.json").read_text())
    config |= {"num_hidden_layers": config["num_hidden_layers"] + 1, "layer_types": None}
    (model / "config.json").write_text(json.dumps(config))
    assert model_sizes(model, "lm").total > before


@pytest.mark.parametrize("strategy", ["local", "megatron"])
@pytest.mark.parametrize("shape", ["0.5b", "1.5b"])
def test_measured_peaks(shape, strategy, folder):
    """Those of an H200, where one process trains on Megatron, whose buffer is as large as the gradients of others."""
    name = f"throughput_megatron_h200_{shape}_fused.json"
    measured = json.loads((RESULTS / name).read_text())["results"][shape]["ours"]
    more = ["rollout.n=8", "algorithm.name=grpo", "rollout.placement=apart", "driver.kind=ray"]
    # Log-probs were measured before the first update, which makes that buffer.
    peaks = {"update_actor": "update"} | ({"old_log_prob": "logprobs"} if strategy == "local" else {})
    counted = {part.name: part for part in phases(plan_of(folder(shape), *more, f"actor.strategy={strategy}"))}
    for phase, what in peaks.items():
        part = counted[phase]
        others = sum(p.nbytes for p in part.parts if p.name == "CUDA itself")
        peak = measured[what]["peak_gib"] * GIB
        assert part.nbytes - others == pytest.approx(peak, rel=0.06), part.describe()


@pytest.mark.parametrize(("file", "sizes"), [("one", {}), ("tp2", {"tensor": 2}), ("pp2", {"pipeline": 2})])
def test_measured_peaks_of_ranks_that_share_a_model(file, sizes, folder):
    """Ranks of tensor parallelism keep a part of the activations; the first of two stages has two micro-batches."""
    measured = json.loads((RESULTS / f"residency_megatron_h200_1.5b_{file}.json").read_text())
    split = [f"actor.megatron.{name}_model_parallel_size={n}" for name, n in sizes.items()]
    more = [*MEGATRON, *split, f"ray.ranks={measured['ranks']}", "rollout.placement=apart", "driver.kind=ray"]
    (part,) = (phase for phase in phases(plan_of(folder("1.5b"), *more)) if phase.name == "update_actor")
    others = sum(p.nbytes for p in part.parts if p.name == "CUDA itself")
    assert part.nbytes - others == pytest.approx(measured["peak_gib"]["ours"] * GIB, rel=0.06), part.describe()


def test_sequence_parallelism_also_splits_what_lies_between_norms(folder):
    def activations(*more):
        plan = plan_of(folder("0.5b"), *MEGATRON, "actor.megatron.tensor_model_parallel_size=2", "ray.ranks=2", *more)
        update = parts(plan, 2, 140 * GIB)["update_actor"]
        return next(n for name, n in update.items() if name.startswith("activations of 16,384"))

    # 24 layers and 16,384 tokens in bf16: half of the inputs and outputs of two norms.
    assert activations() - activations("actor.megatron.sequence_parallel=true") == 24 * 16384 * 2 * 2 * 896
    kept = functools.partial(model_sizes(folder("0.5b"), "lm").kept, 16384, 2, checkpointing=True, tp=2)
    # Half of the input of each layer, too.
    assert kept() - kept(sp=True) == 16384 * 2 * (24 * 448 + 2 * 896)


def test_shards_and_the_roles_that_share_a_gpu(folder):
    model = folder("0.5b")
    n = model_sizes(model, "lm").total
    plan = plan_of(model, "actor.strategy=fsdp", "ray.ranks=4", "actor.fsdp_config.replicate=2")
    sizes = parts(plan, 4)
    assert sizes["update_actor"]["actor parameters"] == 4 * n // 2
    # Of the layers, two are gathered at a time, and the embedding with the last norm.
    ends = 151936 * 896 + 896
    assert sizes["update_actor"]["actor gathered layers"] == 2 * (ends + 2 * (n - ends) // 24)
    assert {"critic moments", "actor moments"} <= sizes["update_actor"].keys()
    apart = parts(plan_of(model, "ray.separate=critic"))
    assert list(apart) == ["start", "update_weights", "gen", "old_log_prob", "update_actor"]
    assert "critic moments" not in apart["update_actor"]
    offloaded = parts(plan_of(model, "actor.strategy=fsdp", "actor.fsdp_config.offload_policy=true"))
    assert "actor moments" not in offloaded["update_actor"] and "actor parameters" in offloaded["update_actor"]
    assert "actor parameters" not in offloaded["gen"]
    # A state that lies on the CPU was loaded on the GPU first, one role after the other.
    assert offloaded["start"].keys() == {"critic parameters", "critic moments", "CUDA itself"}


def test_gathered_gradients_add_up_over_micro_batches(folder):
    """If layers stay gathered, and an update has several micro-batches."""
    model, whole = folder("0.5b"), "actor gathered gradients"
    n = model_sizes(model, "lm").total + 151936 * 896 + 896  # the embedding and the last norm are summed in a buffer
    kept = ["actor.strategy=fsdp", "ray.ranks=4", "actor.fsdp_config.reshard_after_forward=false", "rollout.n=8",
            "algorithm.name=grpo", "data.train_batch_size=64", "data.max_prompt_length=128",
            "data.max_response_length=512", "algorithm.ppo_mini_batch_size=64"]  # fmt: skip
    assert parts(plan_of(model, *kept), 4)["update_actor"][whole] == 4 * n
    assert whole not in parts(plan_of(model, *kept), 4)["old_log_prob"]
    in_bf16 = parts(plan_of(model, *kept, "actor.fsdp_config.reduce_dtype=bfloat16"), 4)["update_actor"]
    assert in_bf16[whole] == 2 * n
    # 12 prompts have 24 rows of 640 tokens for each rank, one micro-batch.
    for summed_at_once in ("actor.fsdp_config.reshard_after_forward=true", "algorithm.ppo_mini_batch_size=12"):
        assert whole not in parts(plan_of(model, *kept, summed_at_once), 4)["update_actor"]
    more = parts(plan_of(model, *kept, "algorithm.ppo_mini_batch_size=13"), 4)["update_actor"]
    assert more[whole] == 4 * n
    # Where two ranks share rows, each has twice as many rows, and half of a budget of twice as many tokens.
    sharing = [*kept, "actor.fsdp_config.ulysses_sequence_parallel_size=2", "actor.ppo_max_token_len_per_gpu=8192"]
    for prompts, summed in ((6, False), (7, True)):
        found = parts(plan_of(model, *sharing, f"algorithm.ppo_mini_batch_size={prompts}"), 4)["update_actor"]
        assert (whole in found) is summed
    # A mini-batch has no more prompts than the batch.
    few = parts(plan_of(model, *kept, "data.train_batch_size=12", "algorithm.ppo_mini_batch_size=256"), 4)
    assert whole not in few["update_actor"]
    lora = plan_of(model, *kept, "actor.lora_rank=8")
    assert parts(lora, 4)["update_actor"][whole] == 4 * model_sizes(model, "lm", Lora(8, 16.0)).trained


def test_ranks_that_share_rows_have_the_tokens_of_as_many_rows(folder):
    few = ["data.train_batch_size=4", "data.max_prompt_length=100", "data.max_response_length=28"]
    for shared in (1, 2, 4):
        plan = plan_of(folder("0.5b"), *few, "actor.strategy=fsdp", "ray.ranks=4",
                       f"actor.fsdp_config.ulysses_sequence_parallel_size={shared}")  # fmt: skip
        assert "activations of 128 tokens" in parts(plan, 4)["update_actor"]
        # The budget of fine-tuning is one of each rank.
        tuned = attrs.evolve(plan, algorithm="sft")
        assert "activations of 16,384 tokens" in parts(tuned, 4)["update_actor"]


def test_a_role_is_loaded_beside_the_states_of_those_before_it(folder):
    n = model_sizes(folder("0.5b"), "lm").total
    start = parts(plan_of(folder("0.5b")))["start"]
    # The critic's head has one output and a bias, and the embedding stays.
    critic = {"critic parameters": 4 * (n + 897), "critic moments": 8 * (n + 897)}
    actor = {"actor parameters": 4 * n, "actor moments": 8 * n, "actor bfloat16 copy": 2 * n}
    assert start == actor | critic | {"CUDA itself": 2 * CONTEXT}


def test_a_rank_whose_gpu_has_more_engines_than_others_is_counted(folder):
    model = folder("0.5b")
    n = model_sizes(model, "lm").total
    for engines, shared in ((1, 1), (2, 1), (3, 2), (4, 2)):
        sizes = parts(plan_of(model, f"rollout.engines={engines}"), 2)["gen"]
        assert sizes["engine weights"] == shared * 2 * n and sizes["CUDA itself"] == (1 + shared) * CONTEXT


def test_a_reward_model_has_a_phase_of_its_own(folder):
    roles = f"algorithm.reward_model={folder('0.5b')}"
    by_name = parts(plan_of(folder("0.5b"), "algorithm.name=ppo", roles), gpu=140 * GIB)
    assert {"values", "reward"} <= set(by_name)


def test_the_cache_of_the_embedded_engine(folder):
    model, more = folder("0.5b"), ["rollout.name=sampler", "rollout.slots=32", "data.max_prompt_length=100"]
    sizes = parts(plan_of(model, *more, "data.max_response_length=28"))
    assert sizes["gen"]["engine cache and logits"] == 32 * 128 * 2 * 2 * 24 * 128 + 32 * 151936 * 2
    assert sizes["update_actor"]["engine cache and logits"] == sizes["gen"]["engine cache and logits"]
    assert model_sizes(model, "lm").cache(1, 2) == 2 * 2 * 24 * 128
    # A step of 3 prompts with 2 responses fills 6 of the slots.
    few = parts(plan_of(model, *more, "data.max_response_length=28", "data.train_batch_size=3", "rollout.n=2"))
    assert few["gen"]["engine cache and logits"] == 6 * 128 * 2 * 2 * 24 * 128 + 6 * 151936 * 2


def test_an_engine_that_is_never_filled_takes_no_memory(folder):
    """The embedded one, in runs that sample nothing; vLLM makes room for its weights in any case."""
    files = ["data.train_files=a.jsonl", "data.val_files=b.jsonl", "rollout.name=sampler"]
    for settings, used in (
        (["algorithm.name=grpo", "rollout.n=2", "data.val_files=[]"], True),
        (["algorithm.name=sft"], True),
        (["algorithm.name=sft", "data.val_files=[]"], False),
        (["algorithm.name=dpo", "data.val_files=[]"], False),
        (["algorithm.name=sft", "data.val_files=[]", "rollout.name=vllm"], True),
        (["algorithm.name=reward_model"], False),
    ):
        counted = parts(plan_of(folder("0.5b"), *files, *settings), gpu=80 * GIB)
        assert any("engine weights" in of for of in counted.values()) is used, settings


def test_held_out_answers_without_a_judge_take_no_memory(tmp_path, capsys, monkeypatch):
    new_model(tmp_path / "model", chars="ab", chat_template=True)
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    data = [f"data.{name}_files={tmp_path}/data.jsonl" for name in ("train", "val")]
    (tmp_path / "sft.toml").write_text("")
    run = [*TINY, *data, "algorithm.name=sft", "data.train_batch_size=1", "driver.device=cuda"]
    run += [f"model.path={tmp_path}/model", f"trainer.dir={tmp_path}/run", "--check", "--gpu-memory", "16"]
    (tmp_path / "judge.py").write_text("def judge(**answer):\n    return 1.0\n")
    for judged in ([], [f"reward.functions={tmp_path}/judge.py:judge"]):
        assert main(["train", str(tmp_path / "sft.toml"), *run, *judged, "--gpus", "1"]) == 0
        counted = [line for line in capsys.readouterr().out.splitlines() if "CUDA itself" in line]
        assert len(counted) == 4 and all(("engine weights" in line) is bool(judged) for line in counted)
    used = []
    monkeypatch.setattr("verl_fn.runs.loop.check_memory", lambda plan, gpu: used.append(plan.rollout.used) or "")
    train(make_plan(load(overrides=[*run[:-3], "driver.device=cpu"])), lambda line: None)
    assert used == [False]
    (tmp_path / "bare").mkdir()
    shutil.copy(tmp_path / "model/config.json", tmp_path / "bare")
    for more, noted in (([], True), (["data.val_files=[]"], False), (["algorithm.name=reward_model"], False)):
        words = [*run, f"model.path={tmp_path}/bare", *more, "--gpus", "1"]
        assert main(["train", str(tmp_path / "sft.toml"), *words]) == 0
        assert ("The run takes it only if held-out answers are judged" in capsys.readouterr().out) is noted


def test_a_smaller_dtype_is_advised_to_an_engine_that_has_not_got_it(folder):
    for dtype, lower in (
        ("float32", "rollout.dtype=bfloat16"),
        ("bfloat16", "driver.kind=ray rollout.placement=apart"),
    ):
        (part,) = (
            p for p in phases(plan_of(folder("0.5b"), f"rollout.dtype={dtype}"))[2].parts if "weights" in p.name
        )
        assert part.lower == lower


def test_states_move_to_the_cpu_where_they_do_not_fit(folder):
    model = folder("1.5b")
    needed = phases(plan_of(model, "rollout.gpu_memory_utilization=0.8"), 140 * GIB, offload=False)[2].nbytes
    plan = plan_of(model, "rollout.gpu_memory_utilization=0.8")
    assert needed > 140 * GIB and offloads(plan, 140 * GIB)
    assert not offloads(plan, None) and not offloads(plan_of(model), 140 * GIB)
    assert offloads(plan_of(model, "rollout.offload_trainer=true"), 140 * GIB)
    never = plan_of(model, "rollout.gpu_memory_utilization=0.8", "rollout.offload_trainer=false")
    assert not offloads(never, 140 * GIB)
    with pytest.raises(ConfigError, match=r"the generation needs at least 152\.10 GiB, and the GPU has 139\.80"):
        check_memory(never, int(139.8 * GIB))
    # Beside an engine that never sleeps, states would have to fit in the update too.
    awake = plan_of(model, "rollout.free_cache_engine=false", "rollout.offload_trainer=true")
    assert not offloads(awake, 140 * GIB)


def test_roles_that_lie_on_the_cpu(folder):
    plan = plan_of(folder("1.5b"), "rollout.offload_trainer=true", "ray.separate=critic")
    assert offloaded_roles(plan, 140 * GIB) == {"actor"}
    assert offloaded_roles(plan, None) == frozenset()


def test_a_run_that_cannot_fit_is_refused_and_one_that_may_not_is_told(folder):
    model = folder("1.5b")
    awake = plan_of(model, "rollout.free_cache_engine=false", "rollout.gpu_memory_utilization=0.8")
    with pytest.raises(ConfigError, match=r"rollout\.free_cache_engine=true"):
        check_memory(awake, int(139.8 * GIB))
    note = check_memory(plan_of(model), 70 * GIB)
    assert note.startswith("the update of the actor may need 79.54 GiB, and the GPU has 70.00")
    assert "lower actor.ppo_max_token_len_per_gpu (16,384 now)" in note
    assert check_memory(plan_of(model), 90 * GIB) == "" == check_memory(plan_of(model), None)
    small = plan_of(model, "rollout.gpu_memory_utilization=0.01")
    assert share(small, 100 * GIB) == GIB
    with pytest.raises(ConfigError, match=r"0.01 is 1.00 GiB of this GPU.*weights alone take 2.88; raise it"):
        check_memory(small, 100 * GIB)


def test_advice_follows_the_largest_parts(folder):
    update = phases(plan_of(folder("1.5b"), "algorithm.name=grpo", "rollout.n=8"), 140 * GIB)[-1]
    settings = advice(update).split("; or ")
    assert settings[0].startswith("lower actor.ppo_max_token_len_per_gpu (16,384 now) or set actor.enable_gradient")
    assert settings[1] == "more ranks (actor.strategy=fsdp, ray.ranks)"


def test_a_check_counts_and_refuses(tiny, tmp_path, capsys):
    recipe = tmp_path / "empty.toml"
    recipe.write_text("")
    run = [f"model.path={tiny}", f"trainer.dir={tmp_path}/run", *VLLM, "--check", "--gpus", "1"]
    assert main(["train", str(recipe), *TINY, "driver.device=cuda", *run, "--gpu-memory", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("memory"))
    assert lines[start] == "memory      by phase, in GiB, on a GPU of 16.00 GiB; the largest is the generation"
    assert [line.split(":")[0].strip() for line in lines[start + 1 : start + 8]] == [
        "start", "publication", "generation", "log-probs", "update of the actor", "values", "update of the critic",
    ]  # fmt: skip
    assert "engine cache and computation 8.00" in lines[start + 3]
    assert lines[start + 8].strip() == "the engine sleeps while the ranks compute (rollout.free_cache_engine)"
    assert lines[-1] == "fits: the largest phase, the generation, takes 10.0 of 16 GiB"
    full = "rollout.gpu_memory_utilization=0.95"
    assert main(["train", str(recipe), *TINY, "driver.device=cuda", *run, "--gpu-memory", "16", full]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("does not fit: the generation needs 17.2 of 16 GiB; set ")
    assert "rollout.gpu_memory_utilization=0.8 (peak" in out.splitlines()[-1]
    assert re.search(r"\nhost        moved to .* with 1 of the ranks, in GiB: actor state twice 0.00, critic", out)
    both = ["rollout.gpu_memory_utilization=0.9", "rollout.engines=2", "--gpu-memory", "16"]
    assert main(["train", str(recipe), *TINY, "driver.device=cuda", *run, *both]) == 1
    assert "\ndoes not fit: the generation needs 31.8 of 16 GiB; set " in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("size", ["0", "-3", "nan", "inf", "much"])
def test_a_size_that_no_gpu_has(size, capsys):
    with pytest.raises(SystemExit):
        main(["train", "x.toml", "--check", f"--gpu-memory={size}"])
    assert "--gpu-memory" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--gpus", "8"], ["--gpus", "0", "--gpu-memory", "80"], ["--gpus", "x"]])
def test_a_machine_that_is_not_described(words, capsys):
    for more in (["--check", *words], ["--gpu-memory", "80"], ["--gpus", "2", "--gpu-memory", "80"]):
        with pytest.raises(SystemExit):
            main(["train", "x.toml", *more])
        assert "--gpu" in capsys.readouterr().err


def test_a_check_of_a_run_on_the_cpu_counts_no_gpu(tiny, tmp_path, monkeypatch):
    """It shows the dtype that the CPU computes in, which is float32 even for a model of bfloat16."""
    from verl_fn.runs.check_run import check_run

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = json.loads((tiny / "config.json").read_text()) | {"dtype": "bfloat16"}
    half = shutil.copytree(tiny, tmp_path / "half")
    (half / "config.json").write_text(json.dumps(config))
    for device in ("cpu", "auto"):
        said = check_run(tiny_run(half, tmp_path, f"driver.device={device}", "algorithm.name=sft")).text
        assert said.endswith("\nthe run can start; memory is counted on GPUs only")
        assert "float32" in said and not any(word in said for word in ("memory  ", "fits", "layouts", "bfloat16"))


GPUS = ["--gpus", "8", "--gpu-memory", "80"]


@pytest.fixture
def page():
    """The config, the plan and its output in the documentation."""
    text = (Path(__file__).parents[2] / "docs/gpus.md").read_text().partition("### Planning from a machine")[2]
    return re.findall(r"^```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.fixture
def qwen3(page, tmp_path, monkeypatch):
    """Prints the documentation's plan for GPUs that are not here, from config.json alone."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").mkdir()
    (tmp_path / "qwen3-8b/config.json").write_text(page[0])
    (tmp_path / "plan.toml").write_text(page[1])
    return lambda *more: main(["train", "plan.toml", "--check", *more])


def test_the_plan_in_the_documentation(qwen3, page, tmp_path, capsys):
    assert page[2].strip() == "verl-fn train plan.toml --check --gpus 8 --gpu-memory 80"
    assert qwen3(*GPUS) == 1
    assert capsys.readouterr().out.replace(str(tmp_path), "/home/me") == page[3]


def test_a_plan_for_a_machine_with_gpus_from_a_config_json(qwen3, capsys):
    assert qwen3(*GPUS) == 1
    out = capsys.readouterr().out
    assert "has no weights: they are not checked" in out and "has no tokenizer: data, chat template" in out
    assert "8,190,735,360 parameters" in out and "8 x vllm, bfloat16" in out and "; bfloat16; 100 updates" in out
    budget, recompute = "actor.ppo_max_token_len_per_gpu=12288", "actor.enable_gradient_checkpointing=true"
    last = out.splitlines()[-1]
    assert last.startswith(f"does not fit: the update of the actor needs 90.3 of 80 GiB; set {budget} (peak 72.9 GiB")
    assert f", or {recompute} (peak 53.4 GiB" in last
    # What the plan proposes fits, and little more does not.
    for settings in ([budget], [recompute], [recompute, "actor.ppo_max_token_len_per_gpu=98304"]):
        assert qwen3(*GPUS, *settings) == 0
        assert capsys.readouterr().out.splitlines()[-1].startswith("fits: the largest phase, the ")
    assert qwen3(*GPUS, "actor.ppo_max_token_len_per_gpu=14336") == 1
    assert "does not fit" in capsys.readouterr().out


def test_a_plan_says_what_is_not_there(qwen3, capsys, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # tests share a cluster
    assert qwen3(*GPUS, "ray.ranks=16") == 2
    assert "ask for 16 GPUs, and --gpus is 8; set ray.ranks=8, or give --gpus more" in capsys.readouterr().err
    assert qwen3(*GPUS, "ray.ranks=16", "rollout.engines=16") == 2
    assert "--gpus is 8; set ray.ranks=8 and rollout.engines=8, or give" in capsys.readouterr().err
    assert qwen3(*GPUS, "driver.device=cpu") == 2
    assert "--gpus plans for GPUs" in capsys.readouterr().err
    assert qwen3(*GPUS, "data.max_response_length=20000") == 2
    assert "more than actor.ppo_max_token_len_per_gpu" in capsys.readouterr().err
    assert qwen3("--gpu-memory", "80") == 2
    assert "add --gpus, their number" in capsys.readouterr().err
    # For this machine, a folder needs its weights, and the config its GPUs.
    assert qwen3("driver.device=cuda") == 2
    assert "torch finds no GPU here; set driver.device=cpu or auto, or plan for another machine by" in (
        capsys.readouterr().err
    )


def test_a_plan_without_a_tokenizer_makes_the_algorithm(qwen3, capsys, tmp_path):
    (tmp_path / "mine.py").write_text("def mine(batch):\n    return batch\n")
    for key in ("adv_estimator", "loss_agg_mode"):
        assert qwen3(*GPUS, f"algorithm.{key}=mine.py:other") == 2
        assert re.search(rf"error: algorithm.{key}: .*mine\.py has no 'other'", capsys.readouterr().err)


def test_a_plan_that_fits_nowhere(qwen3, capsys):
    one = ["ray.ranks=1", "rollout.engines=1", "actor.strategy=local", "--gpus", "1", "--gpu-memory", "80"]
    assert qwen3(*one) == 1
    said = capsys.readouterr().out
    assert (
        "layouts     none fits 95 % of 1 x 80 GiB" in said and "of this config; the last line says what helps" in said
    )
    assert re.search(
        r"\ndoes not fit: the update of the actor needs \d+\.\d of 80 GiB; set .*offload_policy=true .*moments_",
        said,
    )


def test_what_is_proposed_for_an_engine_whose_weights_do_not_fit_its_share_gives_it_more(qwen3, capsys):
    recompute = "actor.enable_gradient_checkpointing=true"
    assert qwen3(*GPUS, recompute, "rollout.gpu_memory_utilization=0.1") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    found = re.fullmatch(
        r"does not fit: the engine's weights take 15\.3 GiB, and rollout\.gpu_memory_utilization gives it 8\.0; "
        r"set (rollout\.gpu_memory_utilization=0\.\d+) \(peak [^()]*\)",
        last,
    )
    assert qwen3(*GPUS, recompute, found[1]) == 0


def test_a_plan_says_how_many_rows_a_small_cache_holds(qwen3, capsys):
    recomputed = "actor.enable_gradient_checkpointing=true"
    # 8.19 B weights and 147,456 bytes of cache a token, in bf16.
    few = int((0.25 * 80 * 2**30 - 2 * 8_190_735_360) // (1536 * 147_456))
    for utilization, rows in (("0.25", few), ("0.5", None)):
        assert qwen3(*GPUS, recomputed, f"rollout.gpu_memory_utilization={utilization}") == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cache ")]
        assert [line.split()[1] for line in lines] == ([] if rows is None else [str(rows)])


def test_a_plan_proposes_the_engines_share_and_rows(qwen3, capsys):
    more = ["actor.enable_gradient_checkpointing=true", "rollout.slots=8"]
    assert qwen3(*GPUS, *more, "rollout.gpu_memory_utilization=0.25") == 0
    out = capsys.readouterr().out
    share = next(line for line in out.splitlines() if line.startswith("engine  ")).split()[1]
    assert share.startswith("rollout.gpu_memory_utilization=0.")
    assert qwen3(*GPUS, *more, share) == 0
    out = capsys.readouterr().out
    assert "\nfits: " in out and "rollout.slots=64 fits (8 now): an engine has 64 rows to draw in a step" in out


def test_frozen_weights_count_in_the_dtype_that_computes(folder):
    """On `local`, and if one rank owns them on `megatron`, they are their own copy; adapters have another one."""
    model, lora = folder("0.5b"), Lora(8)
    sizes = model_sizes(model, "lm", lora)
    frozen, own = sizes.total - sizes.trained, sizes.trained
    more = ["algorithm.name=grpo", "rollout.n=8", "actor.lora_rank=8"]
    counted = {
        strategy: parts(plan_of(model, *more, f"actor.strategy={strategy}"), 1, 140 * GIB)["update_actor"]
        for strategy in ("local", "fsdp", "megatron")
    }
    for strategy, of in counted.items():
        assert of["actor parameters"] == 2 * frozen + 4 * own, strategy
        assert of["actor moments"] == 8 * own
    copies = [of.get("actor bfloat16 copy") for of in counted.values()]
    assert copies == [2 * own, None, 2 * own]
    for ranks, split, copied in (
        (2, "tensor_model_parallel_size=2", own // 2),
        (2, "pipeline_model_parallel_size=2", own // 2 + 151936 * 896 + 896),  # a tied embedding
        (2, "context_parallel_size=2", sizes.total),
        (4, "tensor_model_parallel_size=2", sizes.total // 2),
    ):
        plan = plan_of(model, *more, "actor.strategy=megatron", f"actor.megatron.{split}", f"ray.ranks={ranks}")
        of = parts(plan, ranks, 140 * GIB)["update_actor"]
        assert abs(of["actor bfloat16 copy"] - 2 * copied) < 16, split
    wide = parts(plan_of(model, *more, "actor.dtype=float32"), 1, 140 * GIB)["update_actor"]
    assert wide["actor parameters"] == 4 * sizes.total and "actor float32 copy" not in wide


@pytest.mark.parametrize("strategy", ["local", "fsdp", "megatron"])
def test_a_reference_counts_in_the_dtype_that_computes(folder, strategy):
    model, more = folder("0.5b"), ["algorithm.name=grpo", "rollout.n=8", "algorithm.use_kl_loss=true"]
    counted = parts(plan_of(model, *more, f"actor.strategy={strategy}"), 1, 140 * GIB)["update_actor"]
    n = model_sizes(model, "lm").total
    assert counted["actor parameters"] == 4 * n and counted["reference parameters"] == 2 * n
    assert "reference bfloat16 copy" not in counted


MEGATRON = ["actor.strategy=megatron", "algorithm.name=grpo", "rollout.n=8"]


def test_a_model_of_megatron_by_hand(folder):
    """Of the 24 layers a stage has half, and of their matrices a rank has half; the tied embedding is on both."""
    model, sizes = folder("0.5b"), "actor.megatron"
    two = [f"{sizes}.tensor_model_parallel_size=2", f"{sizes}.pipeline_model_parallel_size=2", "ray.ranks=8"]
    n, hidden, ends = model_sizes(model, "lm").total, 896, 151936 * 896
    held = (n - ends - hidden) // 4 + (ends + hidden) // 2
    whole = (n - ends - hidden) // 2 + ends + hidden
    plan = plan_of(model, *MEGATRON, *two)
    by_phase = parts(plan, 8, 140 * GIB)
    update = by_phase["update_actor"]
    state = {"actor parameters": 4 * (whole * 2 // 8), "actor moments": 8 * (whole * 2 // 8)}
    assert update.items() >= state.items() and "actor gradients" not in update
    # Gradients are copied when the activations are gone, and count where these are smaller.
    small = ["actor.ppo_max_token_len_per_gpu=640", "actor.enable_gradient_checkpointing=true"]
    few = parts(plan_of(model, *MEGATRON, *two, *small), 8, 140 * GIB)["update_actor"]
    assert few["actor gradients"] == state["actor parameters"] and not any("activations" in name for name in few)
    assert update["actor bfloat16 copy"] == 2 * held and update["actor gradient buffer"] == 4 * held
    # The buffers are given back before the engine wakes, and the state lies on the CPU where it is told to.
    generation = by_phase["gen"]
    assert generation.items() >= state.items() and not generation.keys() & {"actor bfloat16 copy"}
    away = parts(attrs.evolve(plan, rollout=attrs.evolve(plan.rollout, offload_trainer=True)), 8, 140 * GIB)
    assert not any(name.startswith("actor") for name in away["gen"])
    assert away["update_actor"] == update
    awake = parts(attrs.evolve(plan, rollout=attrs.evolve(plan.rollout, free_cache_engine=False)), 8, 140 * GIB)
    assert awake["gen"]["actor bfloat16 copy"] == 2 * held


def test_stages_of_megatron_each_have_one_of_two_untied_ends(folder, tmp_path):
    model = shutil.copytree(folder("tiny"), tmp_path / "tiny")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    ends, n = 2 * config["vocab_size"] * config["hidden_size"] + config["hidden_size"], model_sizes(model, "lm").total
    for settings, held in (
        (["actor.megatron.pipeline_model_parallel_size=2"], (n - ends) // 2 + ends // 2),
        (["actor.megatron.tensor_model_parallel_size=2"], (n - ends) // 2 + ends // 2),
        ([], n),
    ):
        sizes = parts(plan_of(model, *MEGATRON, *settings, "ray.ranks=2"), 2, 140 * GIB)["update_actor"]
        assert sizes["actor bfloat16 copy"] == 2 * held and sizes["actor parameters"] == 4 * (n // 2)


def test_ranks_of_tensor_parallelism_each_have_a_whole_tower(tmp_path):
    model = new_model(tmp_path / "m", chars="ab", arch="qwen3_vl")
    tower = model_sizes(model, "lm").tower
    held = [
        parts(plan_of(model, *MEGATRON, f"actor.megatron.tensor_model_parallel_size={tp}", f"ray.ranks={tp}"), tp,
              140 * GIB)["update_actor"]["actor gradient buffer"] // 4
        for tp in (1, 2)
    ]  # fmt: skip
    total = model_sizes(model, "lm").total
    assert 0 < tower < total == held[0] and held[1] == pytest.approx((total - tower) // 2 + tower, abs=2)


@pytest.mark.parametrize("strategy", ["local", "fsdp", "megatron"])
def test_a_frozen_tower_has_no_moments(strategy, tmp_path):
    model = new_model(tmp_path / "m", chars="ab", arch="qwen3_vl")
    frozen = model_sizes(model, "lm").total - model_sizes(model, "lm", freeze_tower=True).trained
    settings = [f"actor.strategy={strategy}", "algorithm.name=grpo", "rollout.n=8"]
    plans = [plan_of(model, *settings, f"actor.freeze_vision_tower={value}") for value in ("false", "true")]
    trained, without = (parts(plan, 1, 140 * GIB)["update_actor"]["actor moments"] for plan in plans)
    assert frozen > 0 and trained - without == 8 * frozen
    # The weights of the tower are saved in bf16 then.
    assert checkpoint_bytes(plans[0]) - checkpoint_bytes(plans[1]) == (8 + 4 - 2) * frozen


def test_moments_in_bf16_take_half_the_memory_and_the_disk(folder):
    plans = [plan_of(folder("0.5b"), f"actor.optim.moments_dtype={dtype}") for dtype in ("float32", "bfloat16")]
    wide, narrow = (parts(plan, 1, 140 * GIB)["update_actor"]["actor moments"] for plan in plans)
    assert wide == 2 * narrow
    assert checkpoint_bytes(plans[0]) - checkpoint_bytes(plans[1]) == wide - narrow


def test_offloaded_inputs_of_layers_are_not_on_the_gpu(folder):
    recomputed, offloaded = "actor.enable_gradient_checkpointing=true", "actor.enable_activation_offload=true"
    config = read_config(folder("0.5b"))

    def activations(*more):
        phases = parts(plan_of(folder("0.5b"), *more, "ray.ranks=1"), 1, 140 * GIB)
        (found,) = (n for name, n in phases["update_actor"].items() if name.startswith("activations of 16,384"))
        return found

    inputs = 2 * 16384 * config.hidden_size  # bf16
    assert activations(recomputed) - activations(recomputed, offloaded) == (config.num_hidden_layers - 2) * inputs
    assert activations(offloaded) == activations() > activations(recomputed)


def test_a_model_of_megatron_that_is_not_trained_has_no_gradients(folder):
    plan = plan_of(folder("0.5b"), *MEGATRON, "algorithm.use_kl_loss=true", "ray.ranks=2")
    sizes = parts(plan, 2, 140 * GIB)["update_actor"]
    assert {"reference bfloat16 copy", "actor gradient buffer"} <= sizes.keys()
    assert "reference gradient buffer" not in sizes


def test_megatron_fsdp_divides_the_copy_too(folder):
    model = folder("0.5b")
    n, ends = model_sizes(model, "lm").total, 151936 * 896 + 896
    plan = plan_of(model, *MEGATRON, "ray.ranks=4", "actor.megatron.use_megatron_fsdp=true")
    sizes = parts(plan, 4, 140 * GIB)["update_actor"]
    assert sizes["actor bfloat16 copy"] == 2 * (n // 4 + ends) and sizes["actor gradient buffer"] == 4 * (n // 4)
    assert sizes["actor gathered layers"] == 2 * (2 * (n - ends) // 24)


def test_experts_of_megatron_by_hand(tmp_path):
    """Ranks that share experts have a part of them each, and all of the rest."""
    model = new_model(tmp_path / "m", chars="ab", arch="qwen3_moe")
    sizes, config = model_sizes(model, "lm"), read_config(model)
    rest, ends = sizes.total - sizes.experts - sizes.ends, sizes.ends
    inner = config.num_experts_per_tok * config.moe_intermediate_size
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    assert sizes.layer(3, 2) == 6 * (4 * config.hidden_size + heads + 3 * inner) and sizes.experts > 0
    two = ["actor.megatron.expert_model_parallel_size=2", "ray.ranks=2", "algorithm.use_kl_loss=true"]
    update = parts(plan_of(model, *MEGATRON, *two), 2, 140 * GIB)["update_actor"]
    assert update["actor gradient buffer"] == 4 * (rest + sizes.experts // 2 + ends)
    # One rank owns each frozen expert, and the other weights lie on both.
    assert update["reference bfloat16 copy"] == 2 * (rest + ends)


def test_what_makes_the_state_of_a_role_smaller(folder):
    ranks = "more ranks (ray.ranks)"
    for settings, said in (
        ([], "more ranks (actor.strategy=fsdp, ray.ranks)"),
        (["actor.strategy=fsdp"], f"{ranks} or actor.fsdp_config.offload_policy=true"),
        (["actor.strategy=fsdp", "actor.fsdp_config.offload_policy=true"], ranks),
        (["actor.strategy=megatron"], f"{ranks} or a larger actor.megatron.tensor_model_parallel_size"),
    ):
        plan = plan_of(folder("tiny"), *settings, "algorithm.name=grpo", "rollout.n=8")
        counted = phases(plan, GIB)[-1].parts
        assert {part.lower for part in counted if part.name == "actor parameters"} == {said}


def test_phases_without_logits_and_runs_without_log_probs(folder):
    model, few = (
        folder("0.5b"),
        ["data.train_batch_size=1", "data.max_prompt_length=6", "data.max_response_length=10"],
    )
    counted = parts(plan_of(model, *few, "algorithm.ppo_mini_batch_size=1"))
    of = {name: counted[name]["activations of 16 tokens"] for name in ("old_log_prob", "values")}
    assert of["old_log_prob"] - of["values"] == 16 * 151936 * 2, "a value head has none"
    assert list(parts(plan_of(model, "algorithm.name=sft"))) == ["start", "update_weights", "gen", "update_actor"]
