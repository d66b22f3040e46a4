"""What a run chooses for its GPU: the engine's share and rows, and layouts of the models that people bring."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest

from verl_fn.cli import main
from verl_fn.config import ConfigError, load, make_plan
from verl_fn.runs import fitting
from verl_fn.runs.fitting import (
    FILLED,
    MOST_SHARE,
    MOST_SLOTS,
    cached_rows,
    fits,
    layouts,
    remedies,
    sized,
    with_engine,
)
from verl_fn.runs.memory import GIB, engine_weights, model_sizes, phases, share

SHAPES = {
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936,
    },
}  # fmt: skip
RUN = [
    "algorithm.name=grpo", "data.train_batch_size=64", "data.max_prompt_length=512", "data.max_response_length=1024",
    "rollout.n=8", "rollout.name=vllm", "rollout.engines=8", "driver.kind=ray", "driver.device=cuda", "ray.ranks=8",
    "actor.strategy=fsdp", "data.train_files=[\"train.parquet\"]",
]  # fmt: skip
RECOMPUTED = ["actor.enable_gradient_checkpointing=true"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes a folder once, since a process keeps what it has computed of it."""
    root = tmp_path_factory.mktemp("models")

    def make(name):
        path = root / name
        path.mkdir(exist_ok=True)
        shape = SHAPES[name] | {"dtype": "bfloat16", "tie_word_embeddings": False, "eos_token_id": 1}
        (path / "config.json").write_text(json.dumps(shape))
        return path

    return make


def plan_of(folder, *more):
    return make_plan(load(overrides=[*RUN, f"model.path={folder}", *more]))


AUTO = {
    "a dense model of the Llama shape": ("qwen3-8b", [], "sampler"),
    "experts": ("qwen3-30b-a3b", [], "vllm"),
    "experts on a CPU": ("qwen3-30b-a3b", ["driver.device=cpu"], "sampler"),
    "experts in one process": (
        "qwen3-30b-a3b", ["driver.kind=local", "ray.ranks=1", "actor.strategy=local", "rollout.engines=1"], "sampler"
    ),
    "several GPUs": (
        "llama-3.1-8b", ["rollout.placement=apart", "rollout.tensor_parallel_size=2", "rollout.engines=4"], "vllm"
    ),
    "adapters alone": ("llama-3.1-8b", ["actor.lora_rank=8", "rollout.adapters=alone"], "vllm"),
}  # fmt: skip


@pytest.mark.parametrize("case", AUTO)
def test_auto_takes_the_faster_engine(folder, case):
    name, settings, engine = AUTO[case]
    plan = with_engine(plan_of(folder(name), "rollout.name=auto", *settings))
    assert plan.rollout.name == plan.table["rollout"]["name"] == engine
    assert (plan.rollout.lora is not None) == (case == "adapters alone")


def test_exact_log_probs_and_random_models_take_the_embedded_engine(folder):
    plan = plan_of(folder("qwen3-30b-a3b"), "rollout.name=auto")
    exact = attrs.evolve(plan, rollout=attrs.evolve(plan.rollout, exact="audit"))
    for one, engine in ((plan, "vllm"), (exact, "sampler"), (attrs.evolve(plan, new_model=object()), "sampler")):
        assert with_engine(one).rollout.name == engine


def test_adapters_help_a_plan_that_has_none(folder):
    plan = sized(plan_of(folder("qwen3-8b"), "actor.lora_rank=8"), 80 * GIB)
    assert fitting.adapters(plan, 8, 80 * GIB) is None
    found = fitting.adapters(sized(plan_of(folder("qwen3-8b")), 80 * GIB), 8, 80 * GIB)
    assert found.settings[0] == "actor.lora_rank=32"


def test_an_engine_that_was_named_stays(folder):
    assert with_engine(plan_of(folder("qwen3-8b"))).rollout.name == "vllm"


def test_adapters_alone_need_vllm():
    with pytest.raises(ConfigError, match=r"driver.kind=ray"):
        load(overrides=["rollout.name=auto", "actor.lora_rank=8", "rollout.adapters=alone"])


def test_a_run_records_the_engine_that_auto_took(tmp_path):
    table = ["data.task=count", "trainer.total_training_steps=1", "algorithm.name=grpo", "rollout.n=2"]
    settings = [*table, f"trainer.dir={tmp_path}/run", "data.train_batch_size=2", "rollout.name=auto"]
    assert main(["train", os.devnull, *settings]) == 0
    assert 'name = "sampler"' in (tmp_path / "run" / "config.toml").read_text()


def test_a_cache_has_room_for_the_rows_of_a_step(folder):
    plan = plan_of(folder("qwen3-8b"), "actor.enable_gradient_checkpointing=true")
    few = sized(plan, 80 * GIB)
    assert (few.rollout.slots, few.rollout.gpu_memory_utilization) == (64, 0.5)
    many = plan_of(folder("qwen3-8b"), "actor.enable_gradient_checkpointing=true", "data.train_batch_size=256")
    large = sized(many, 80 * GIB).rollout
    # 256 rows of 1,536 tokens at 147,456 bytes take 54 GiB beside 15.3 GiB of weights.
    assert (large.slots, large.gpu_memory_utilization) == (256, MOST_SHARE)
    assert cached_rows(sized(many, 80 * GIB), 80 * GIB) >= 256
    assert sized(many, 40 * GIB).rollout.slots < 256
    assert sized(attrs.evolve(many, learns_from="answers"), 80 * GIB).rollout == many.rollout


@pytest.mark.parametrize(("problems", "share_"), [(96, 0.5), (112, 0.55), (144, 0.65), (152, 0.65), (160, 0.7)])
def test_a_share_is_the_smallest_in_twentieths_whose_cache_holds_the_rows(folder, problems, share_):
    """144 rows of 1,536 tokens take 30.4 GiB beside 15.3 GiB of weights and 4 GiB to compute: 62% of 80 GiB."""
    sizes = (f"data.train_batch_size={problems}", "data.max_prompt_length=512", "data.max_response_length=1024")
    rollout = sized(plan_of(folder("qwen3-8b"), *RECOMPUTED, *sizes), 80 * GIB).rollout
    assert (rollout.gpu_memory_utilization, rollout.slots) == (share_, problems)


@pytest.mark.parametrize(("sleeps", "phase", "fit"), [
    (True, fitting.GENERATION, False), (True, fitting.PUBLICATION, False), (True, "the actor's update", True),
    (False, "the actor's update", False),
])  # fmt: skip
def test_a_share_fits_if_all_does_that_happens_while_the_engine_is_awake(folder, monkeypatch, sleeps, phase, fit):
    plan = plan_of(folder("qwen3-8b"), *([] if sleeps else ["rollout.placement=apart"]))
    assert plan.rollout.sleeps is sleeps
    names = (fitting.GENERATION, fitting.PUBLICATION, "the actor's update")
    full = [SimpleNamespace(name=name, nbytes=GIB * (79 if name == phase else 1)) for name in names]
    monkeypatch.setattr(fitting, "phases", lambda plan, gpu: full)
    assert fitting._generates(plan, 80 * GIB) is fit
    monkeypatch.setattr(fitting, "phases", lambda plan, gpu: [SimpleNamespace(name=name, nbytes=1) for name in names])
    assert fitting._generates(plan, 80 * GIB)
    # Its weights of 15.3 GiB need more than a share of 0.15.
    assert not fitting._generates(fitting._with_share(plan, 0.15), 80 * GIB)


def test_a_share_leaves_the_states_where_they_are_if_a_smaller_one_would(folder):
    """Beside 0.7 of the GPU, the states fit and fill it; they would leave it only beside a larger share."""
    plan = sized(plan_of(folder("qwen3-8b"), *RECOMPUTED), 48 * GIB)
    assert plan.rollout.gpu_memory_utilization == 0.65 and fits(plan, 48 * GIB)


def test_what_the_config_says_stays(folder):
    plan = plan_of(folder("qwen3-8b"), "rollout.slots=7", "rollout.gpu_memory_utilization=0.35")
    assert sized(plan, 80 * GIB) == plan
    open_slots = sized(plan_of(folder("qwen3-8b"), "rollout.gpu_memory_utilization=0.35"), 80 * GIB).rollout
    assert (open_slots.slots, open_slots.gpu_memory_utilization) == (64, 0.35)
    assert sized(plan_of(folder("qwen3-8b")), None) == plan_of(folder("qwen3-8b"))


def test_an_engine_whose_weights_need_more_than_half_of_a_gpu(folder):
    plan = plan_of(folder("qwen3-30b-a3b"))
    assert engine_weights(plan) > share(plan, 80 * GIB)
    after = sized(plan, 80 * GIB)
    assert engine_weights(after) < share(after, 80 * GIB) and cached_rows(after, 80 * GIB) >= 64
    apart = sized(plan_of(folder("qwen3-8b"), "rollout.placement=apart"), 80 * GIB)
    assert apart.rollout.gpu_memory_utilization == MOST_SHARE
    # Two GPUs hold half of the weights and half of each row.
    halves = attrs.evolve(apart, rollout=attrs.evolve(apart.rollout, tensor_parallel_size=2))
    row = 1536 * 147456
    for one, gpus in ((apart, 1), (halves, 2)):
        free = share(one, 80 * GIB) - engine_weights(apart) // gpus
        assert cached_rows(one, 80 * GIB) == free // (row // gpus)


def test_rows_of_the_embedded_engine_are_as_many_as_fit(folder):
    one = [
        "rollout.name=sampler", "rollout.engines=1", "ray.ranks=1", "actor.strategy=local", "driver.kind=local",
        "actor.lora_rank=8", "actor.enable_gradient_checkpointing=true", "data.train_batch_size=256",
    ]  # fmt: skip
    for gpu in (60 * GIB, 80 * GIB):
        plan = sized(plan_of(folder("qwen3-8b"), *one), gpu)
        assert 0 < plan.rollout.slots < MOST_SLOTS and fits(plan, gpu)
        # A third more would not fit.
        more = attrs.evolve(plan, rollout=attrs.evolve(plan.rollout, slots=plan.rollout.slots * 4 // 3 + 2))
        assert max(phase.nbytes for phase in phases(more, gpu)) > FILLED * gpu


@pytest.mark.parametrize("name", SHAPES)
def test_a_layout_that_is_proposed_fits(folder, name, tmp_path, monkeypatch, capsys):
    """From config.json alone, on a machine without GPUs."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "run.toml").write_text("")
    run = ["train", str(tmp_path / "run.toml"), *RUN, f"model.path={folder(name)}", f"trainer.dir={tmp_path / 'run'}"]
    check = ["--check", "--gpus", "8", "--gpu-memory", "80"]
    assert main([*run, *check]) == 1
    layouts = capsys.readouterr().out.partition("layouts ")[2].splitlines()[1:-1]
    proposed, by_phase = layouts[::2], layouts[1::2]
    assert len(proposed) == len(by_phase) == 2
    for line, phases_line in zip(proposed, by_phase, strict=True):
        settings = line.partition(": ")[2].partition(" (peak ")[0].split()
        assert main([*run, *settings, *check]) == 0
        out = capsys.readouterr().out
        peak = line.partition("(peak ")[2].split()[0]
        assert out.splitlines()[-1].startswith("fits: ") and f"takes {peak} of 80 GiB" in out and peak in phases_line


RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(("recipe", "gpus"), [("grpo_8b_8gpus", 8), ("grpo_8b_2gpus", 2), ("grpo_8b_lora", 1)])
@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3.1-8b"])
def test_recipes_for_own_models_fit_their_gpus(folder, recipe, gpus, name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("def score(data_source, solution_str, ground_truth): return 0.0\n")
    check = ["--check", "--gpus", str(gpus), "--gpu-memory", "80"]
    assert main(["train", str(RECIPES / f"{recipe}.toml"), f"model.path={folder(name)}", *check]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("fits: ")


def test_all_parameters_on_one_gpu_are_helped_by_what_helps(folder, tmp_path, monkeypatch, capsys):
    """The state of 8 B rests on the CPU, with averages in bf16; or adapters train."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("def score(data_source, solution_str, ground_truth): return 0.0\n")
    run = ["train", str(RECIPES / "grpo_8b_8gpus.toml"), f"model.path={folder('qwen3-8b')}", "ray.ranks=1",
           "rollout.engines=1"]  # fmt: skip
    said = []
    for gib in ("80", "60"):
        assert main([*run, "--check", "--gpus", "1", "--gpu-memory", gib]) == 1
        said.append(capsys.readouterr().out.splitlines()[-1])
    settings = said[0].partition("; set ")[2].partition(" (peak ")[0].split()
    assert settings[:2] == ["actor.fsdp_config.offload_policy=true", "actor.optim.moments_dtype=bfloat16"]
    assert main([*run, *settings, "--check", "--gpus", "1", "--gpu-memory", "80"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "layouts     with the largest budget of tokens, up to all of a step, that fits 95 % of 1 x 80 GiB:" in lines
    )
    assert lines[-1].startswith("fits: the largest phase, the update of the actor, takes 76.0 of 80 GiB")
    # The budget of the recipe needs more than is proposed, and fits.
    assert main([*run, *settings[:2], "--check", "--gpus", "1", "--gpu-memory", "80"]) == 0
    tight = capsys.readouterr().out.splitlines()[-1]
    assert tight.startswith(
        "fits, with less than 5 % to spare: the largest phase, the update of the actor, takes 79.2"
    )
    assert f"; to spare more: set {settings[2]} (peak 76.0 GiB" in tight
    assert "such GPUs are enough, with fsdp" in said[1]
    assert all("; or adapters fit, with actor.lora_rank=32 (peak" in last for last in said)


def test_what_helps_is_what_a_run_can_take(folder, tmp_path, monkeypatch):
    """Layers that stay gathered are freed first; checkpoints fix the dtype of moments."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("def score(data_source, solution_str, ground_truth): return 0.0\n")

    def ways(gpus, gib, *more, begun=False):
        settings = ["driver.device=cuda", f"ray.ranks={gpus}", f"rollout.engines={gpus}", *more]
        plan = make_plan(load(RECIPES / "grpo_8b_8gpus.toml", [f"model.path={folder('qwen3-8b')}", *settings]))
        return [fit.settings for fit in remedies(plan, gpus, gib << 30, begun=begun)]

    free = ("actor.fsdp_config.reshard_after_forward=true",)
    assert ways(8, 48, "actor.fsdp_config.reshard_after_forward=false")[0] == free
    assert any("actor.optim.moments_dtype=bfloat16" in settings for settings in ways(1, 80))
    assert ways(1, 80, begun=True) == []


def test_what_helps_names_the_memory_that_it_takes_from_cpus(folder):
    more = ["ray.ranks=8", "rollout.engines=8", "rollout.gpu_memory_utilization=0.8"]
    settings = ["driver.device=cuda", *more, "algorithm.use_kl_loss=true"]
    plan = make_plan(load(RECIPES / "grpo_8b_8gpus.toml", [f"model.path={folder('qwen3-8b')}", *settings]))
    elements = model_sizes(str(folder("qwen3-8b")), "lm").total
    found = {fit.settings[0]: fit for fit in remedies(plan, 8, 79 * GIB, begun=False)}
    moved = found["rollout.offload_trainer=true"]
    # The actor's state twice, since an update returns a new one, and the reference in bf16.
    assert moved.on_cpu == pytest.approx(26 * elements, rel=1e-6) and "GiB of CPU memory" in str(moved)


def test_fewer_replicas_come_before_states_on_the_cpu(folder):
    """They cost transfers only. What helps keeps as many as fit."""
    plan = sized(plan_of(folder("qwen3-8b"), "actor.fsdp_config.replicate=8", *RECOMPUTED), 80 * GIB)
    assert [fit.settings for fit in remedies(plan, 8, 80 * GIB, begun=False)] == [("actor.fsdp_config.replicate=4",)]
    assert remedies(plan, 8, 40 * GIB, begun=False)[0].settings == ("actor.fsdp_config.replicate=1",)
    # Four copies would fit with states on the CPU.
    four = plan_of(folder("qwen3-8b"), "actor.fsdp_config.replicate=4", *RECOMPUTED)
    for of, gib in ((plan, 40), (four, 52)):
        found = " ".join(map(str, layouts(sized(of, gib * GIB), 8, gib * GIB)))
        assert "replicate=2" in found and "offload" not in found


def test_a_layout_frees_gathered_layers_before_states_rest_on_the_cpu(folder):
    plan = plan_of(folder("qwen3-8b"), "actor.fsdp_config.reshard_after_forward=false", *RECOMPUTED)
    for gib in (48, 36):
        found = " ".join(map(str, layouts(sized(plan, gib * GIB), 8, gib * GIB)))
        assert "actor.fsdp_config.reshard_after_forward=true" in found and "offload" not in found


def test_megatron_splits_what_a_gpu_lacks_memory_for(folder):
    """Experts before layers; a dense model has no experts to split."""
    sizes, megatron = "actor.megatron", [*RECOMPUTED, "actor.strategy=megatron"]
    dense = sized(plan_of(folder("qwen3-8b"), *megatron), 38 * GIB)
    assert f"{sizes}.pipeline_model_parallel_size=4" in layouts(dense, 8, 38 * GIB)[0].settings
    assert [fit.settings for fit in remedies(dense, 8, 38 * GIB, begun=False)] == [
        (f"{sizes}.tensor_model_parallel_size=4",), (f"{sizes}.pipeline_model_parallel_size=4",)
    ]  # fmt: skip
    experts = sized(plan_of(folder("qwen3-30b-a3b"), *megatron), 80 * GIB)
    assert f"{sizes}.expert_model_parallel_size=8" in layouts(experts, 16, 80 * GIB)[0].settings


def test_what_helps_beside_engines_apart_takes_no_gpu_of_theirs(folder):
    apart = ["rollout.placement=apart", "driver.kind=ray", "rollout.engines=2", *RECOMPUTED]
    alone = sized(plan_of(folder("qwen3-8b"), *apart, "ray.ranks=1", "actor.strategy=local"), 200 * GIB)
    assert layouts(alone, 8, 200 * GIB)[0].layout == "one process and engines on 2 GPUs"
    two = sized(plan_of(folder("qwen3-8b"), *apart, "ray.ranks=2", "actor.strategy=fsdp"), 60 * GIB)
    said = " ".join(setting for fit in remedies(two, 8, 60 * GIB, begun=False) for setting in fit.settings)
    assert "ray.ranks=6" in said and "ray.ranks=8" not in said


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
@pytest.mark.parametrize("engines", [["rollout.engines=8"], ["rollout.engines=2", "rollout.tensor_parallel_size=4"]])
def test_layouts_leave_engines_the_gpus_that_they_have_for_themselves(folder, strategy, engines):
    apart = ["rollout.placement=apart", "ray.ranks=8", *engines, f"actor.strategy={strategy}", *RECOMPUTED]
    plan = sized(plan_of(folder("qwen3-8b"), *apart), 80 * GIB)
    found = layouts(plan, 16, 80 * GIB)
    assert found and all(fit.layout == f"{strategy} over 8 ranks and engines on 8 GPUs" for fit in found)


def test_engines_whose_weights_no_gpu_holds_get_several_of_one_half(folder):
    (found, _) = layouts(plan_of(folder("qwen3-30b-a3b")), 16, 48 * GIB)
    assert found.layout == "fsdp over 8 ranks and engines on 8 GPUs"
    assert {"rollout.engines=4", "rollout.tensor_parallel_size=2"} < set(found.settings)
    engines = [settings[-2:] for settings in fitting._apart(plan_of(folder("qwen3-30b-a3b")), 256)]
    assert engines == [(f"rollout.engines={128 >> i}", f"rollout.tensor_parallel_size={1 << i}") for i in range(7)]


def test_a_model_that_fits_nowhere_is_told_what_it_lacks(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "run.toml").write_text("")
    run = ["train", str(tmp_path / "run.toml"), *RUN, f"model.path={folder('qwen3-30b-a3b')}"]
    of_two = ["ray.ranks=2", "rollout.engines=2", "--check", "--gpus", "2", "--gpu-memory", "80"]
    assert main([*run, *of_two]) == 1
    said = capsys.readouterr().out
    nearest = said.partition("layouts     none fits 95 % of 2 x 80 GiB with ")[2].splitlines()[1:]
    # A rank loads its half of the parameters and moments, 12 bytes for each of 30.5 B, before they move to the CPU.
    assert nearest[0].strip().startswith("the least is fsdp over 2 ranks")
    assert nearest[0].endswith("(peak 172.6 GiB, start, and 341 GiB of CPU memory): 96.6 GiB a GPU are missing")
    assert nearest[2].strip().startswith("8 such GPUs are enough: fsdp over ")
    assert "\ndoes not fit: the update of the actor needs " in said and "; 8 such GPUs are enough, with fsdp" in said


def test_the_least_number_of_gpus_is_a_multiple_of_the_machines(folder, monkeypatch):
    """Ranks share all that they can there, as the settings of the layout say."""
    fsdp = "actor.fsdp_config"
    plan = plan_of(folder("qwen3-8b"), f"{fsdp}.replicate=4", f"{fsdp}.reshard_after_forward=false")
    fits = {n: fitting.Fit((f"ray.ranks={n}",), ()) for n in (8, 16, 32, 64)}
    for least, enough in ((16, 16), (20, 32), (64, 64), (65, None)):
        tried = []

        def layouts(plan, gpus, gpu, least=least, tried=tried):
            tried.append(plan.roles["actor"].fsdp_config)
            return [fits[gpus], None] if gpus >= least else []

        monkeypatch.setattr(fitting, "layouts", layouts)
        found = fitting.enough_gpus(plan, 4, GIB)
        assert (found and found[0]) == enough
        assert {(one.replicate, one.reshard_after_forward) for one in tried} == {(1, True)}
        if found is not None:
            shared = (f"{fsdp}.replicate=1", f"{fsdp}.reshard_after_forward=true")
            assert found[1].settings == (*shared, f"ray.ranks={enough}")


@pytest.mark.parametrize(("rows", "least", "of_rank"), [(64, 2, 96), (8, 2, 12), (1, 2, 2)])
def test_the_largest_budget_that_fits_is_found(folder, rows, least, of_rank, monkeypatch):
    """In steps of 1,024 tokens: at least a row's 1,536, and at most the rows that a rank has."""
    small = "actor.ppo_max_token_len_per_gpu=1535"
    plan = plan_of(folder("qwen3-8b"), f"data.train_batch_size={rows}", small)
    asked = []

    def fitting_until(limit):
        def fits(plan, gpu):
            tokens = plan.roles["actor"].ppo_max_token_len_per_gpu
            asked.append((tokens, gpu))
            return tokens <= limit * 1024

        return fits

    for limit in {least - 1, least, least + 1, 3, 7, of_rank - 1, of_rank, of_rank + 5}:
        monkeypatch.setattr(fitting, "fits", fitting_until(limit))
        budget = min(limit, of_rank)
        expected = None if limit < least else (f"actor.ppo_max_token_len_per_gpu={1024 * budget}",)
        assert fitting.largest_budget(plan, 5) == expected, limit
    assert {one[1:] for one in asked} == {(5,)} and max(tokens for tokens, *_ in asked) <= of_rank * 1024


def test_a_budget_that_holds_all_rows_of_a_rank_is_kept(folder, monkeypatch):
    """8 rows of 1,536 tokens; ranks of tensor parallelism have the rows of each other."""
    few, budget = "data.train_batch_size=8", "actor.ppo_max_token_len_per_gpu"
    monkeypatch.setattr(fitting, "fits", lambda plan, gpu: True)
    two = ["actor.strategy=megatron", "actor.megatron.tensor_model_parallel_size=2"]
    for tokens, more, expected in (
        (12288, [], ()),
        (12287, [], (f"{budget}=12288",)),
        (24575, two, (f"{budget}=24576",)),
        (24576, two, ()),
    ):
        plan = plan_of(folder("qwen3-8b"), few, f"{budget}={tokens}", *more)
        assert fitting.largest_budget(plan, 5) == expected
    monkeypatch.setattr(fitting, "fits", lambda plan, gpu: plan.roles["actor"].ppo_max_token_len_per_gpu <= 4096)
    assert fitting.largest_budget(plan, 5) == (f"{budget}=4096",)


def test_ranks_that_share_rows_need_a_part_of_a_row_each(folder, monkeypatch):
    shared = ["actor.fsdp_config.ulysses_sequence_parallel_size=4", "data.max_response_length=7680"]
    plan = plan_of(folder("qwen3-8b"), *shared)
    monkeypatch.setattr(fitting, "fits", lambda plan, gpu: plan.roles["actor"].ppo_max_token_len_per_gpu <= 2048)
    assert fitting.largest_budget(plan, 5) == ("actor.ppo_max_token_len_per_gpu=2048",)


def test_a_better_engine_is_told_if_it_is_much_better(folder, monkeypatch):
    plan = plan_of(folder("qwen3-8b"), "rollout.gpu_memory_utilization=0.5", "rollout.slots=16")
    for share_, cached, said in (
        (0.6, 63, "rollout.gpu_memory_utilization=0.6 fits (0.5 now)"),
        (0.55, 63, "rollout.slots=63 fits (16 now): an engine has 64 rows to draw in a step"),
        (None, 63, "rollout.slots=63 fits (16 now)"),
        (0.9, 64, "rollout.slots=64 fits (16 now)"),
        (0.9, 999, "rollout.slots=64 fits (16 now)"),
        (None, 16, None),
    ):
        monkeypatch.setattr(fitting, "largest_share", lambda plan, gpu, share_=share_: share_)
        monkeypatch.setattr(fitting, "cached_rows", lambda plan, gpu, cached=cached: cached)
        found = list(fitting.better_engine(plan, 5))
        assert len(found) == (said is not None) and (said is None or found[0].startswith(said))
    # A larger share may leave no room for the states beside the engine.
    monkeypatch.setattr(fitting, "largest_share", lambda plan, gpu: 0.9)
    moving = plan_of(folder("qwen3-8b"), "rollout.gpu_memory_utilization=0.5", *RECOMPUTED)
    (said,) = fitting.better_engine(moving, 80 * GIB)
    assert "0.9 fits (0.5 now), and takes 183 GiB more of CPU memory: a larger cache" in said
    embedded = attrs.evolve(plan, rollout=attrs.evolve(plan.rollout, name="sampler"))
    for slots, count in ((17, 1), (16, 0), (None, 0)):
        monkeypatch.setattr(fitting, "largest_slots", lambda plan, gpu, slots=slots: slots)
        assert len(list(fitting.better_engine(embedded, 5))) == count


def test_rows_of_the_embedded_engine_shrink_by_quarters_until_they_fit(folder, monkeypatch):
    plan = plan_of(folder("qwen3-8b"), "rollout.name=sampler", "data.train_batch_size=100", "rollout.n=10")
    for limit, slots in ((10**6, 125), (124, 93), (69, 69), (1, 1), (0, None)):
        monkeypatch.setattr(fitting, "fits", lambda plan, gpu, limit=limit: plan.rollout.slots <= limit)
        assert fitting.largest_slots(plan, 5) == slots
    monkeypatch.setattr(fitting, "fits", lambda *given: True)
    many = attrs.evolve(plan, data=attrs.evolve(plan.data, train_batch_size=10**6))
    assert fitting.largest_slots(many, 5) == MOST_SLOTS


def test_a_share_is_the_largest_in_twentieths_that_fits(folder, monkeypatch):
    plan = plan_of(folder("qwen3-8b"))
    for limit, share_ in ((1.0, 0.9), (0.89, 0.85), (0.05, 0.05), (0.04, None)):
        monkeypatch.setattr(
            fitting, "fits", lambda plan, gpu, limit=limit: plan.rollout.gpu_memory_utilization <= limit
        )
        assert fitting.largest_share(plan, 5) == share_


def test_settings_that_a_layout_changes_nothing_of_are_not_named(folder):
    plan = plan_of(folder("qwen3-8b"))
    kept = ("driver.kind=ray", "ray.ranks=8", "actor.strategy=fsdp")
    after = fitting.with_settings(plan, [*kept, "rollout.n=4"], 80 * GIB)
    fit = fitting._layout(plan, (*kept, "rollout.n=4"), after, 80 * GIB)
    assert (fit.settings, fit.layout, fit.on_cpu) == (("rollout.n=4",), "fsdp over 8 ranks", 0)
    offload = (*kept, "actor.fsdp_config.offload_policy=true")
    fit = fitting._layout(plan, offload, fitting.with_settings(plan, offload, 80 * GIB), 80 * GIB)
    elements = model_sizes(str(folder("qwen3-8b")), "lm").total
    assert fit.on_cpu == pytest.approx(12 * elements, rel=1e-6) and "GiB of CPU memory" in str(fit)
    apart = (
        *kept[:1],
        "ray.ranks=4",
        "rollout.placement=apart",
        "rollout.engines=2",
        "rollout.tensor_parallel_size=2",
    )
    fit = fitting._layout(plan, apart, fitting.with_settings(plan, apart, 80 * GIB), 80 * GIB)
    assert fit.layout == "fsdp over 4 ranks and engines on 4 GPUs"
