"""What a config means for a run: roles, layouts, folders, updates and code."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch

from verl_fn import build
from verl_fn.backends.hf.folder import OFFLOAD
from verl_fn.backends.hf.lora import Lora
from verl_fn.config import ConfigError, evaluation_plan, flat, load, make_plan, notes, to_table
from verl_fn.config.plan import with_absolute_paths
from verl_fn.config.schema import CriticOptimConfig, DriverConfig, OptimConfig, RewardConfig, ValConfig
from verl_fn.environments.engine import Limits
from verl_fn.rewards import by_rules, unscored
from verl_fn.rewards.judge import Question, ServedModel
from verl_fn.state import Sampling
from verl_fn.steps import adamw, chain, clip_by_global_norm, constant, cosine, frozen, linear

HERE = Path("/somewhere")


def plan(*overrides):
    return make_plan(load(overrides=["model.path=m", *overrides]), HERE)


def test_a_plan_is_a_function_of_config_and_folder():
    assert plan("trainer.seed=3") == plan("trainer.seed=3") != plan("trainer.seed=4")
    paths = plan("data.train_files=a.jsonl", "critic.path=c", "ray.runtime_env=env.yaml", "reward.functions=r.py:f")
    assert (paths.model, paths.data.train_files) == ("/somewhere/m", ("/somewhere/a.jsonl",))
    assert (paths.roles["critic"].folder, paths.ray.runtime_env) == ("/somewhere/c", "/somewhere/env.yaml")
    assert paths.reward.functions == ("/somewhere/r.py:f",)
    assert paths.table["trainer"]["dir"] == "/somewhere/runs/run"


def test_every_path_of_a_config_is_seen_from_the_same_folder(tmp_path):
    (tmp_path / "python").symlink_to("/bin/sh")
    settings = {
        "trainer.dir": "a", "trainer.resume_from_path": "b", "trainer.rollout_data_dir": "c", "model.path": "d",
        "critic.path": "e", "data.train_files": ["f", "hub:datasets/a/b@c#d/e"], "data.val_files": ["g"],
        "data.convert": ["h.py:x", "some.module:x"], "reward.functions": ["i.py:x"], "env.name": "j.py:X",
        "env.python": "python", "ray.runtime_env": "k", "algorithm.name": "ppo", "algorithm.reward_model": "l",
        "algorithm.policy_loss": "m.py:x",
    }  # fmt: skip
    cfg = load(overrides=[f"{key}={json.dumps(value)}" for key, value in settings.items()])
    found = flat(to_table(with_absolute_paths(cfg, tmp_path)))
    as_they_are = ("hub:", "some.module:", "ppo")

    def expected(value):
        return value if value.startswith(as_they_are) else f"{tmp_path}/{value}"

    for key, value in settings.items():
        wanted = tuple(map(expected, value)) if isinstance(value, list) else expected(value)
        assert found[key] == wanted, key


def test_a_changed_plan_is_the_plan_of_the_changed_config():
    changed = plan().changed("trainer", seed=4, save_freq=7)
    assert changed.trainer.seed == 4 and changed == plan("trainer.seed=4", "trainer.save_freq=7")


@pytest.mark.parametrize("sharded", [[], ["ray.ranks=1"], ["actor.strategy=fsdp"], ["ray.ranks=2"]])
def test_exact_log_probs_need_one_training_rank(sharded):
    exact = ["algorithm.name=grpo", "rollout.n=2", "rollout.exact=strict", *sharded]
    assert plan(*exact).rollout.exact == "strict"
    for shares in ("ray.ranks=2", "actor.fsdp_config.ulysses_sequence_parallel_size=2"):
        with pytest.raises(ConfigError, match="it is for one training rank"):
            plan(*exact, "actor.strategy=fsdp", shares)


def test_roles_follow_the_algorithm_and_its_kl_terms():
    assert list(plan().roles) == ["actor", "critic"]
    assert list(plan("algorithm.name=sft").roles) == ["actor"]
    kl = plan("algorithm.name=grpo", "rollout.n=2", "algorithm.use_kl_in_reward=true")
    assert list(kl.roles) == ["actor", "reference"] and not kl.roles["reference"].trained and not kl.copies
    lora = plan("algorithm.use_kl_loss=true", "actor.lora_rank=2")
    assert list(lora.roles) == ["actor", "critic"] and lora.copies == {"reference": "actor"}
    assert lora.roles["actor"].lora == (2, 16.0, ("all-linear",)) and lora.roles["critic"].lora is None


def test_a_critic_has_the_actors_layout_unless_it_has_its_own():
    sharded = ["actor.strategy=fsdp", "actor.fsdp_config.ulysses_sequence_parallel_size=2"]
    shared = plan(*sharded).roles
    assert [role.strategy for role in shared.values()] == ["fsdp", "fsdp"]
    assert shared["actor"].max_tokens == shared["critic"].max_tokens == 2 * 16384
    own = plan(*sharded, "critic.strategy=local", "critic.ppo_max_token_len_per_gpu=100").roles["critic"]
    assert (own.strategy, own.max_tokens, own.offload) == ("local", 100, False)


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("optim.lr", 0.5, lambda role: role.optim.lr),
        ("optim.clip_grad", 0.5, lambda role: role.optim.clip_grad),
        ("optim.lr_warmup_steps", 3, lambda role: role.optim.lr_warmup_steps),
        ("dtype", "float32", lambda role: role.dtype),
        ("dtype", "bfloat16", lambda role: role.dtype),
        ("enable_gradient_checkpointing", True, lambda role: role.enable_gradient_checkpointing),
        ("enable_activation_offload", True, lambda role: role.enable_activation_offload),
        ("ppo_max_token_len_per_gpu", 77, lambda role: role.max_tokens),
        ("lora_rank", 3, lambda role: role.lora and role.lora[0]),
    ],
)
def test_a_setting_is_that_of_its_own_table(key, value, read):
    before = plan().roles
    for table, other in (("actor", "critic"), ("critic", "actor")):
        roles = plan(f"{table}.{key}={str(value).lower()}").roles
        assert read(roles[table]) == value and read(roles[other]) == read(before[other])


def test_a_critic_of_megatron_cannot_offload_activations():
    """It has no strategy of its own, but the actor's."""
    offload = ["critic.enable_gradient_checkpointing=true", "critic.enable_activation_offload=true"]
    for strategy, ignored in (("megatron", 1), ("fsdp", 0)):
        words = [f"actor.strategy={strategy}", *offload]
        assert sum("critic.enable_activation_offload has no effect" in n for n in notes(None, words)) == ignored
        assert plan(*words).roles["critic"].offload_activations is not bool(ignored)


@pytest.mark.parametrize("table", [OptimConfig, CriticOptimConfig])
def test_an_optimizer_has_all_settings_of_its_table(table):
    settings = {"lr": 0.5, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.9, "clip_grad": 0.7}
    settings |= {"lr_warmup_steps": 3, "min_lr_ratio": 0.2}
    schedules = {"constant": constant(0.5, 3), "linear": linear(0.5, 40, 3, 0.2), "cosine": cosine(0.5, 40, 3, 0.2)}
    for kind, schedule in schedules.items():
        expected = chain(clip_by_global_norm(0.7), adamw(schedule, (0.5, 0.6), 1e-3, 0.9))
        assert build.optimizer(table(**settings, lr_scheduler_type=kind), 40) == expected
    assert build.optimizer(table(moments_dtype="bfloat16"), 40).moments == torch.bfloat16


def test_training_and_evaluation_sample_as_their_tables_say():
    table = {"temperature": 0.3, "top_k": 5, "top_p": 0.7, "n": 2}
    assert build.sampling(ValConfig(**table), 11) == Sampling(11, **table)
    of_training = plan(*(f"rollout.{key}={value}" for key, value in table.items()), "data.max_response_length=11")
    assert build.sampling(of_training.rollout, 11) == Sampling(11, **table)
    assert build.sampling(of_training.rollout.val_kwargs, 11) == Sampling(11, temperature=0.0)


@pytest.fixture
def made(monkeypatch):
    """Puts functions that keep their arguments in the place of classes; returns what they got."""
    kept = {}

    def keep(*places):
        for place in places:
            name = place.rpartition(".")[2]
            monkeypatch.setattr(place, lambda *given, name=name, **more: kept.setdefault(name, (given, more)))
        return kept

    return keep


SHARED = ["actor.dtype=bfloat16", "actor.ppo_max_token_len_per_gpu=96", "driver.deterministic=false"]
EACH = {"head": "lm", "dtype": "bfloat16", "device": "cpu", "deterministic": False, "freeze_vision_tower": False}


@pytest.mark.parametrize(
    ("place", "settings", "more"),
    [
        (
            "local.Local", ["actor.enable_gradient_checkpointing=true", "model.layout=padded"],
            {"max_tokens": 96, "checkpointing": True, "lora": None, "row_layout": "padded", "exact": False},
        ),
        (
            "fsdp.Fsdp",
            ["actor.strategy=fsdp", "actor.fsdp_config.replicate=2", "actor.lora_rank=4", "actor.lora_alpha=3",
             "actor.fsdp_config.ulysses_sequence_parallel_size=4", "actor.fsdp_config.reshard_after_forward=false",
             "actor.fsdp_config.use_torch_compile=true", "actor.fsdp_config.reduce_dtype=bfloat16",
             "actor.enable_gradient_checkpointing=true", "actor.enable_activation_offload=true"],
            {"max_tokens": 4 * 96, "checkpointing": OFFLOAD, "lora": Lora(4, 3.0, ("all-linear",)), "replicate": 2,
             "sp": 4, "reshard_after_forward": False, "compile": True, "reduce_dtype": "bfloat16",
             "row_layout": "auto", "exact": False},
        ),
        (
            "megatron.Megatron",
            ["actor.strategy=megatron", "actor.megatron.tensor_model_parallel_size=2",
             "actor.megatron.pipeline_model_parallel_size=3", "actor.megatron.context_parallel_size=4",
             "actor.megatron.expert_model_parallel_size=5", "actor.megatron.sequence_parallel=true",
             "actor.megatron.override_transformer_config.moe_aux_loss_coeff=0.5"],
            {"max_tokens": 4 * 96, "checkpointing": False, "lora": None, "tp": 2, "pp": 3, "cp": 4, "ep": 5,
             "sp": True, "provider": {"moe_aux_loss_coeff": 0.5}, "router_replay": False,
             "updates_by": "own", "fsdp": False},
        ),
    ],
)  # fmt: skip
def test_a_training_backend_gets_all_settings_of_its_table(place, settings, more, tiny, made):
    role = make_plan(load(overrides=[f"model.path={tiny}", *SHARED, *settings])).roles["actor"]
    driver = load(overrides=SHARED).driver
    name = place.partition(".")[2]
    kept = made(f"verl_fn.backends.{place}")
    build.trainer(role, driver, "cpu")
    given, keywords = kept[name]
    assert given == (str(tiny), build.optimizer(role.optim, role.total_updates))
    if name == "Megatron":
        more |= {"updates_by": role.megatron.optimizer}
    assert keywords == EACH | more
    kept.clear()
    build.trainer(attrs.evolve(role, trained=False, exact=True, head="value"), driver, "cpu")
    given, keywords = kept[name]
    assert given[1] == frozen() and keywords["head"] == "value" and keywords.get("exact", True)


def test_an_engine_gets_all_settings_of_its_table(tiny, made):
    more = ["rollout.dtype=bfloat16", "rollout.slots=7", "data.max_prompt_length=5", "data.max_response_length=6"]
    table = make_plan(load(overrides=[f"model.path={tiny}", *more])).rollout
    table = attrs.evolve(
        table, verify="always", in_flight_weight_updates=True, routed_experts=True, tensor_parallel_size=3,
        lora=(2, 5.0, ("q_proj",)), gpu_memory_utilization=0.25, enforce_eager=not table.enforce_eager,
        engine_kwargs={"a": 1}, placement="apart",
    )  # fmt: skip
    kept = made("verl_fn.backends.sampler.Sampler", "verl_fn.backends.vllm.Vllm")
    both = {"device": "cpu", "dtype": "bfloat16", "slots": 7, "verify": table.verify, "in_flight": True}
    both |= {"routed_experts": True}
    build.rollout(attrs.evolve(table, name="vllm"), "cpu")
    assert kept["Vllm"] == (
        (str(tiny),),
        both | {"max_length": 11, "tensor_parallel_size": 3, "gpu_memory_utilization": 0.25, "lora":
        Lora(2, 5.0, ("q_proj",)), "enforce_eager": table.enforce_eager, "engine_kwargs": {"a": 1}},
    )  # fmt: skip
    for exact in ("off", "strict"):
        kept.clear()
        build.rollout(attrs.evolve(table, name="sampler", exact=exact), "cpu")
        assert kept["Sampler"] == ((str(tiny),), both | {"exact": exact == "strict"})


def test_an_environment_gets_all_settings_of_its_table(tiny, made, monkeypatch):
    settings = ["env.name=m:E", "env.timeout=3", "env.num_workers=2", "env.max_turns=4", "env.variables=['A']"]
    settings += ["env.arguments.a=1", "data.max_prompt_length=5", "data.max_response_length=6"]
    here = make_plan(load(overrides=[f"model.path={tiny}", *settings]))
    kept = made("verl_fn.environments.processes.EnvProcesses", "verl_fn.environments.engine.Conversing",
                "verl_fn.environments.rendering.Renderer")  # fmt: skip
    monkeypatch.setattr("verl_fn.environments.rendering.call_format", lambda tokenizer: "form")
    for limit, reply in ((None, 6), (3, 3)):
        kept.clear()
        table = attrs.evolve(here.env, max_turn_length=limit, python="/usr/bin/python3")
        build.conversing(here.rollout, "cpu", table, "/a", engine=lambda rollout, device: (rollout.folder, device))
        assert kept["EnvProcesses"] == (
            (here.env.name, 3.0, 2, "/a", ("A",)),
            {"python": "/usr/bin/python3", "arguments": {"a": 1}, "calls": "form"},
        )
        given = kept["Conversing"][0]
        assert given[0] == (str(tiny), "cpu") and given[-1] == Limits(4, reply, 5)
        assert given[2] is kept["Renderer"] and given[1] is kept["EnvProcesses"]
    engine = build.conversing(here.rollout, "cpu", attrs.evolve(here.env, name=""), engine=lambda *given: given)
    assert engine == (here.rollout, "cpu")


def test_a_judge_and_reward_functions_get_all_settings_of_their_table(tiny, made, tmp_path):
    kept = made("verl_fn.rewards.judge.Judge", "verl_fn.rewards.functions.RewardFunctions")
    table = RewardConfig(
        url="http://a", model="m", prompt="p {response}", pattern="(x)", unreadable_score=0.5, timeout=3.0,
        retries=2, concurrency=7, api_key_env="K", offline=True,
    )  # fmt: skip
    for api, asked in (("chat", Question("m", "p {response}", "(x)", 0.5)), ("pooling", ServedModel("m"))):
        kept.clear()
        reward = build.reward(attrs.evolve(table, api=api), str(tiny), replies=str(tmp_path))
        (url, question, replies), more = kept["Judge"]
        assert (url, question, replies.offline, replies.file.parent) == ("http://a", asked, True, tmp_path)
        assert more == {"timeout": 3.0, "retries": 2, "concurrency": 7, "api_key_env": "K"}
        assert reward.judge is kept["Judge"]
    kept.clear()
    build.reward(table, str(tiny))
    assert kept["Judge"][0][2].file is None
    functions = RewardConfig(functions=("m:f", "m:g"), weights=(1.0, 2.0), timeout=3.0, num_workers=2, env=("A",),
                             arguments={"a": 1})  # fmt: skip
    build.reward(functions, str(tiny))
    assert kept["RewardFunctions"] == ((("m:f", "m:g"), (1.0, 2.0), 3.0, 2), {"env": ("A",), "arguments": {"a": 1}})
    assert build.reward(RewardConfig(), str(tiny)).judge is by_rules
    assert build.reward(RewardConfig(), str(tiny), env="m:E").judge is unscored


@pytest.mark.parametrize(
    ("cuda", "ranks", "settings", "by_user", "named", "threads"),
    [
        (False, 1, {}, False, "", 8),
        (False, 3, {}, False, "", 2),
        (False, 16, {}, False, "", 1),
        (True, 1, {}, False, "", 2),
        (True, 8, {}, False, "", 1),
        (False, 1, {}, True, "3", 3),
        (False, 1, {}, False, "3", 8),
        (False, 1, {}, True, "0", 8),
        (False, 1, {}, True, "many", 8),
        (True, 1, {"num_threads": 5}, True, "3", 5),
    ],
)
def test_threads_of_a_process(cuda, ranks, settings, by_user, named, threads, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    monkeypatch.setenv("OMP_NUM_THREADS", named)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name in ("TOKENIZERS_PARALLELISM", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    taken = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    build.set_up_process(DriverConfig(deterministic=cuda, **settings), ranks, by_user=by_user)
    assert taken == [threads] and os.environ["TOKENIZERS_PARALLELISM"] == "false"
    assert os.environ["HF_HUB_OFFLINE"] == "0", "what the user has set stays"
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if cuda else None)


def test_the_smallest_gpu_of_a_machine(monkeypatch):
    cuda = DriverConfig(device="cuda")
    for said, bytes_ in (("81559\n40960\n", 40960 * 2**20), ("", None), ("[N/A]\n", None)):
        done = SimpleNamespace(stdout=said)
        monkeypatch.setattr(build.subprocess, "run", lambda *given, done=done, **more: done)
        assert build.smallest_gpu(cuda) == bytes_ and build.smallest_gpu(DriverConfig(device="cpu")) is None

    def fails(*given, **more):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(build.subprocess, "run", fails)
    assert build.smallest_gpu(cuda) is None


def test_all_that_differs_in_the_code_of_another_process_is_named(tmp_path):
    (tmp_path / "mine.py").write_text("a = 1\n")
    references = [f"{tmp_path}/mine.py:a", f"{tmp_path}/gone.py:b", "json:loads"]
    driver = build.code_identity(references)
    assert driver[references[0]] and driver[references[1]] == ""
    (tmp_path / "mine.py").write_text("a = 2\n")
    other = build.code_identity(references)
    elsewhere = other | {"sources": f"{other['sources'].split()[0]} from /elsewhere", "python": "3.0"}
    said = build.code_difference(driver, elsewhere, "engine 1")
    assert said.startswith(
        f"engine 1 does not run the driver's code, but python 3.0 instead of {driver['python']}, {references[0]} "
        f"{other[references[0]]} instead of {driver[references[0]]}\nInstall"
    )
    assert "sources" not in said
    changed = driver | {"sources": "0000 from /elsewhere"}
    assert "sources 0000 from /elsewhere instead of" in build.code_difference(driver, changed, "engine 1")


def test_a_layout_of_megatron():
    sizes = ["actor.megatron.context_parallel_size=2", "actor.megatron.tensor_model_parallel_size=4"]
    roles = plan("actor.strategy=megatron", *sizes).roles
    assert [role.strategy for role in roles.values()] == ["megatron", "megatron"]
    assert {role.megatron.tensor_model_parallel_size for role in roles.values()} == {4}
    assert roles["actor"].sharers == 2 and roles["critic"].max_tokens == 2 * 16384


@pytest.mark.parametrize(
    ("overrides", "actor", "critic"),
    [
        ([], 100, 100),
        (["data.train_batch_size=64", "algorithm.ppo_mini_batch_size=16", "algorithm.ppo_epochs=2"], 800, 800),
        (["data.train_batch_size=10", "algorithm.ppo_mini_batch_size=4"], 300, 300),
        (["algorithm.critic_warmup=20"], 80, 100),
        (["algorithm.critic_warmup=200"], 0, 100),
    ],
)
def test_updates_are_those_that_happen(overrides, actor, critic):
    roles = plan(*overrides).roles
    assert (roles["actor"].total_updates, roles["critic"].total_updates) == (actor, critic)


@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo", "remax"])
def test_updates_of_algorithms_without_a_critic(name):
    settings = ["data.train_batch_size=10", "algorithm.ppo_mini_batch_size=4", "algorithm.ppo_epochs=2"]
    role = plan(f"algorithm.name={name}", "rollout.n=2", *settings).roles["actor"]
    assert role.total_updates == 100 * 3 * 2


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("end", [None, 9])
def test_a_rate_falls_over_the_run_unless_it_has_an_end_of_its_own(kind, end):
    given = [f"actor.optim.lr_decay_steps={end}"] if end else []
    roles = plan("algorithm.use_kl_loss=true", f"actor.optim.lr_scheduler_type={kind}", *given).roles
    falls = {name: role.falls for name, role in roles.items()}
    assert falls == {"actor": kind != "constant" and end is None, "critic": False, "reference": False}


def test_an_evaluation_has_no_optimizer_and_one_process():
    cfg = load(
        overrides=["model.path=m", "driver.kind=ray", "ray.ranks=4", "actor.strategy=fsdp", "actor.lora_rank=4"]
    )
    evaluation = evaluation_plan(cfg, HERE)
    actor = evaluation.roles["actor"]
    assert list(evaluation.roles) == ["actor"] and evaluation.ray.ranks == 1
    assert (actor.trained, actor.strategy, actor.lora) == (False, "local", None)
    # Its weights lie in the engine's dtype, whether it is given or not.
    half = ["model.path=m", "actor.dtype=bfloat16"]
    dtypes = {
        given: evaluation_plan(load(overrides=[*half, f"rollout.dtype={given}"]), HERE).roles["actor"].dtype
        for given in ("float32", "bfloat16")
    }
    assert dtypes == {given: given for given in dtypes}
    assert evaluation_plan(load(overrides=half), HERE).roles["actor"].dtype is None


def test_an_evaluation_draws_from_the_sets_that_training_draws_from():
    sets = ["data.task=reasoning_gym:chain_sum,leg_counting", "data.weights=[1, 3]"]
    files = ['data.train_files=["a.jsonl", "b.jsonl"]', "data.weights=[1, 3]", "data.val_files=c.jsonl"]
    of_sets, of_files = (evaluation_plan(load(overrides=["model.path=m", *w]), HERE).data for w in (sets, files))
    assert of_sets.weights == (1.0, 3.0) and (of_files.train_files, of_files.weights) == ((), ())


def test_only_what_is_trained_has_adapters_and_a_frozen_tower():
    """A reward model and a teacher are other models than the actor."""
    words = ["actor.lora_rank=2", "actor.freeze_vision_tower=true"]
    scored = plan(*words, "algorithm.name=grpo", "rollout.n=2", "algorithm.reward_model=r").roles
    taught = plan(*words, "algorithm.name=distill", "algorithm.teacher=t").roles
    whole = plan(words[1], "algorithm.use_kl_loss=true").roles
    assert {name: bool(role.lora) for name, role in (scored | taught).items()} == {
        "actor": True, "reward_model": False, "teacher": False
    }  # fmt: skip
    towers = {name: role.freeze_vision_tower for name, role in (scored | taught | whole).items()}
    assert [name for name, frozen in towers.items() if frozen] == ["actor"]
    assert (scored["reward_model"].folder, taught["teacher"].folder) == ("/somewhere/r", "/somewhere/t")
    assert (scored["reward_model"].head, taught["teacher"].head) == ("value", "lm")


@pytest.mark.parametrize("strategy", ["local", "fsdp", "megatron"])
def test_settings_of_one_strategy_say_nothing_of_another(strategy):
    own = ["fsdp_config.offload_policy=true", "fsdp_config.ulysses_sequence_parallel_size=2"]
    own += ["megatron.context_parallel_size=4", "enable_gradient_checkpointing=true", "ppo_max_token_len_per_gpu=10"]
    role = plan(f"actor.strategy={strategy}", *(f"actor.{word}" for word in own)).roles["actor"]
    assert (role.sharers, role.max_tokens) == {"local": (1, 10), "fsdp": (2, 20), "megatron": (4, 40)}[strategy]
    assert role.offload == (strategy == "fsdp") and role.recomputes == (strategy != "megatron")
    assert not role.offload_activations


@pytest.mark.parametrize(
    ("words", "shares", "sleeps"),
    [
        (["rollout.name=vllm"], True, True),
        (["rollout.name=vllm", "rollout.free_cache_engine=false"], True, False),
        (["rollout.name=vllm", "rollout.placement=apart"], False, False),
        (["rollout.name=sampler"], False, False),
    ],
)
def test_an_engine_sleeps_where_it_shares_a_gpu_and_frees_its_memory(words, shares, sleeps):
    rollout = plan("driver.kind=ray", *words).rollout
    assert (rollout.shares, rollout.sleeps) == (shares, sleeps)
    assert rollout.longest == 512 + 16


@pytest.mark.parametrize(
    ("words", "least"),
    [
        (["algorithm.name=rloo"], 2),
        (["algorithm.name=dapo", "algorithm.adv_estimator=reinforce_plus_plus"], 2),
        (["algorithm.name=rejection"], 2),
        (["algorithm.name=grpo", "algorithm.adv_estimator=me.py:mine"], 1),
        (["algorithm.name=grpo", "algorithm.adv_estimator=tir_optimal_token_baseline"], 2),
        (["algorithm.name=remax"], 1),
    ],
)
def test_algorithms_that_compare_responses_need_two(words, least):
    assert plan(*words, f"rollout.n={least}")
    if least > 1:
        with pytest.raises(ConfigError, match="compares responses within a group and needs at least 2 a prompt"):
            plan(*words, "rollout.n=1")


OWN = """
import attrs
from verl_fn.algorithms import Algorithm
from verl_fn.config import Outline, Role, given, opt

@attrs.frozen(kw_only=True)
class Options:
    teacher: str = opt("", "folder of the teacher")
    rounds: int = opt(2, "updates a step", when=given("teacher"))

def distill(options: Options) -> Algorithm:
    roles = {"actor": Role(), "teacher": Role(trained=False, path=options.teacher)}
    outline = Outline(roles, updates=lambda role, prompts, steps: options.rounds * steps)
    return Algorithm(init=None, sample=None, learn=None, outline=outline)

def headless(options: Options) -> Algorithm:
    return Algorithm(init=None, sample=None, learn=None, outline=Outline({"policy": Role()}))

def nothing(options: Options):
    return 3
"""


def test_an_algorithm_of_ones_own_names_its_roles_folders_and_updates(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    own = plan(f"algorithm.name={tmp_path}/own.py:distill", "algorithm.teacher=t")
    assert own.roles["teacher"].folder == "/somewhere/t" and not own.roles["teacher"].trained
    assert own.roles["actor"].total_updates == 200 and own.code == (f"{tmp_path}/own.py:distill",)
    with pytest.raises(ConfigError, match="has no role 'actor'"):
        make_plan(load(overrides=["model.path=m", f"algorithm.name={tmp_path}/own.py:headless"]))
    with pytest.raises(ConfigError, match="returned a int, where an Algorithm is expected"):
        make_plan(load(overrides=["model.path=m", f"algorithm.name={tmp_path}/own.py:nothing"]))


def test_code_is_known_by_the_digest_of_its_file(tmp_path, monkeypatch):
    (tmp_path / "module_of_ones_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    references = (f"{tmp_path}/module_of_ones_own.py:distill", "module_of_ones_own:distill")
    nowhere = ("no_such_module:f", "sys:path", f"{tmp_path}/none.py:f")
    found = build.code_identity((*references, *nowhere))
    assert found[references[0]] == found[references[1]] != "" and {found[one] for one in nowhere} == {""}
    (tmp_path / "module_of_ones_own.py").write_text(OWN + "# changed\n")
    assert {build.code_identity(references)[one] for one in references}.isdisjoint(found.values())


def test_an_option_of_ones_own_says_when_it_has_an_effect(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    settings = [f"algorithm.name={tmp_path}/own.py:distill", "algorithm.rounds=3"]
    assert notes(None, settings) == ["algorithm.rounds has no effect without algorithm.teacher"]
    assert notes(None, [*settings, "algorithm.teacher=/t"]) == []


@pytest.mark.parametrize(("mode", "recorded"), [("R2", False), ("R3", True)])
def test_the_actor_alone_replays_expert_routing(mode, recorded):
    settings = [
        "model.path=m",
        "actor.strategy=megatron",
        f"actor.router_replay.mode={mode}",
        "algorithm.use_kl_loss=true",
    ]
    plan, evaluation = (make(load(overrides=settings)) for make in (make_plan, evaluation_plan))
    replays = {name: role.router_replay for name, role in plan.roles.items()}
    assert replays == {"actor": True, "critic": False, "reference": False}
    assert not evaluation.roles["actor"].router_replay
    assert plan.rollout.routed_experts == recorded and not evaluation.rollout.routed_experts


def test_adapters_are_published_alone_by_vllm_where_there_are_any():
    alone = ["rollout.adapters=alone", "rollout.name=vllm", "driver.kind=ray"]
    assert plan(*alone, "actor.lora_rank=8", "actor.lora_alpha=4.0").rollout.lora == (8, 4.0, ("all-linear",))
    assert plan(*alone).rollout.lora is None
    assert plan("actor.lora_rank=8", "rollout.adapters=alone").rollout.lora is None
    assert plan("actor.lora_rank=8", "rollout.name=vllm", "driver.kind=ray").rollout.lora is None
    evaluation = evaluation_plan(load(overrides=["model.path=m", *alone, "actor.lora_rank=8"]))
    assert evaluation.rollout.lora is None
    with pytest.raises(ConfigError, match=r"alone.*works with actor\.strategy local and fsdp"):
        plan(*alone, "actor.lora_rank=8", "actor.strategy=megatron")


@pytest.mark.parametrize("value", [0.28, 0.4])
def test_a_default_of_another_algorithm_is_no_default_here(value):
    """0.28 is DAPO's."""
    words = ["algorithm.name=grpo", "algorithm.policy_loss=reinforce", f"algorithm.clip_ratio_high={value}"]
    assert notes(None, words) == ['algorithm.clip_ratio_high has no effect with algorithm.policy_loss = "reinforce"']


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name them in algorithm.gdpo_reward_keys"),
        (["algorithm.use_kl_in_reward=true"], "algorithm.use_kl_in_reward changes the reward"),
        (["env.name=mine:Env"], "env.name changes the reward"),
        (["algorithm.reward_model=/m"], "algorithm.reward_model changes the reward"),
        (["algorithm.name=dapo", "algorithm.overlong_buffer.len=4"], "algorithm.overlong_buffer.len changes"),
    ],
)
def test_gdpo_refuses_rewards_that_it_does_not_read(words, message):
    keys = ['algorithm.gdpo_reward_keys=["truth"]'] if words else []
    plain = ["algorithm.name=grpo", "rollout.n=2", "algorithm.adv_estimator=gdpo", *keys]
    with pytest.raises(ConfigError, match=message):
        make_plan(load(overrides=[*plain, *words]))
    keys = ['algorithm.gdpo_reward_keys=["truth", "overlong"]', "reward.functions=a:b", "reward.weights=2.0"]
    allowed = [*plain[:3], *keys, *(words if "dapo" in "".join(words) else [])]
    assert make_plan(load(overrides=allowed))
    assert "reward.weights do not count" in " ".join(notes(None, allowed))


@pytest.mark.parametrize("other", ["env.name=mine:Env", "reward.functions=a:b"])
def test_rewards_beside_a_reward_model_are_noted(other):
    words = ["algorithm.name=grpo", "rollout.n=2", "algorithm.reward_model=/m", other]
    assert "is the only reward of training" in " ".join(notes(None, words))
    assert "only reward" not in " ".join(notes(None, words[:3]))
