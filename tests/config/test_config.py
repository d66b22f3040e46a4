"""Configs: what is accepted, and what each mistake is told."""

import re
import shutil
import tomllib
from pathlib import Path

import attrs
import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_fn.config import Config, ConfigError, describe, keys, load, make_plan, notes, origins, structure, to_table
from verl_fn.config.algorithms import BUILT_IN

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_recipes_load_and_round_trip(recipe):
    cfg = load(recipe)
    assert structure(tomllib.loads(tomli_w.dumps(to_table(cfg)))) == cfg


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.clip_ration=0.3", "unknown key algorithm.clip_ration; did you mean algorithm.clip_ratio?"),
        ("algoritm.clip_ratio=0.3", "unknown key algoritm.clip_ratio; did you mean algorithm.clip_ratio?"),
        ("actor_rollout_ref.actor.optim.lr=0.3", "did you mean actor.optim.lr?"),
        ("actor_rollout_ref.rollout.val_kwargs.n=3", "did you mean rollout.val_kwargs.n?"),
        ("critc.optim.lr=0.3", "did you mean critic.optim.lr?"),
        ("reward.functions=[rewards.py:score]", "is not a list; strings in it need quotes, which the shell removes"),
        ("rollout.top_k=0", "rollout.top_k: must be -1 (keeps all) or at least 1 (got 0)"),
        ("rollout.val_kwargs.top_k=0", "rollout.val_kwargs.top_k: must be -1"),
        ("driver.num_threads=5000", "driver.num_threads: must be <= 4096"),
        ("algorithm.clip_ratio=1e300", "algorithm.clip_ratio: must be <= 1000000.0"),
        ("actor.optim.lr=1e30", "actor.optim.lr: must be <= 1000000.0"),
        ("data.val_size=1000000", "data.val_size is 1000000; a generated task gives at most 20000"),
        ("data.max_response_length=99999999999999999999", "expected a whole number of at most 64 bits"),
        ("lr=0.3", "unknown key lr; did you mean actor.optim.lr?"),
        ("trainer.default_local_dir=x", "did you mean trainer.dir?"),
        ("custom_reward_function.path=x.py", "did you mean reward.functions?"),
        ("actor.fsdp_config.optimizer_offload=true", "did you mean rollout.offload_trainer?"),
        ("data.reward_fn_key=x", "unknown key data.reward_fn_key; verl-fn config lists all keys, and verl-fn config"),
        ("trainer=3", "trainer is a table of keys, not 3"),
        ("actor.optim.lr=fast", "actor.optim.lr: expected a number, got 'fast'"),
        ("actor.optim.lr=true", "actor.optim.lr: expected a number, got True"),
        ("rollout.n=1.5", "rollout.n: expected a whole number, got 1.5"),
        (
            "trainer.test_freq=after_each_epoch",
            "trainer.test_freq: expected a whole number, got 'after_each_epoch'; give the steps of an epoch: the "
            "rows divided by data.train_batch_size",
        ),
        ("rollout.n=0", "rollout.n: must be >= 1: 0"),
        ("driver.kind=slurm", "driver.kind: must be local or ray"),
        ("driver.deterministic=1", "driver.deterministic: expected true or false, got 1"),
        ("actor.optim.betas=[0.9]", "actor.optim.betas"),
        (
            "algorithm.adv_estimator=rloo",
            "algorithm.adv_estimator: must be gae, or an object of yours as FILE.py:NAME or MODULE:NAME (got 'rloo')",
        ),
        (
            "data.chat_template_kwargs.enable_thinking=False",
            "enable_thinking: False is no value of TOML and would be a",
        ),
        ("reward.arguments.alpha=.5", "reward.arguments.alpha: .5 is no value of TOML"),
        ("reward.arguments.inner.none=None", "leave the key out for none"),
        ("reward.arguments.words=[a, b]", """or quote the text: 'reward.arguments.words="[a, b]"'"""),
        ("env.arguments.on={'a': 1}", "env.arguments.on: {'a': 1} is no value of TOML"),
        ("trainer.seed", "'trainer.seed' is not of the form key=value"),
        ("trainer.stop_at=none", "expected a number, got 'none'; to unset the key, write nothing after its ="),
        ("trainer.dir=", "trainer.dir: must not be empty"),
        ("trainer.dir=~nosuchuser/x", "trainer.dir: '~nosuchuser/x' names the home of a user who does not exist"),
        ('data.train_files=["a", "b\\u0000"]', "data.train_files: 'b\\x00' has a null byte"),
        ("trainer.dir=$NOWHERE/x", "trainer.dir: '$NOWHERE/x' has the variable $NOWHERE, and no shell"),
        ("trainer.dir=${oc.env:HOME}/x", "trainer.dir: '${oc.env:HOME}/x' has the variable ${oc.env:HOME}, and no"),
        ("model.path=a/${NOWHERE}", "model.path: 'a/${NOWHERE}' has the variable ${NOWHERE}"),
        ("trainer.experiment_name=\udcff", "trainer.experiment_name: expected Unicode"),
        ("trainer.stop_metric=loss", "trainer.stop_metric: must be acc or reward"),
        ("data.date=20270105", "data.date: must be a day as YYYY-MM-DD (got '20270105')"),
        ("data.date=2027-W01-2", "data.date: must be a day as YYYY-MM-DD (got '2027-W01-2')"),
        ("data.date=2027-02-29", "data.date: must be a day as YYYY-MM-DD (got '2027-02-29')"),
    ],
)
def test_every_mistake_names_its_key(override, message):
    with pytest.raises(ConfigError) as error:
        load(overrides=[override])
    assert message in str(error.value)


def test_a_folder_may_be_named_as_a_shell_variable(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "$HOME").mkdir()
    assert load(overrides=["trainer.dir=$HOME"]).trainer.dir == "$HOME"
    assert load(overrides=['data.train_files=["$HOME#train"]', "trainer.dir=runs/$5off"]).data.train_files


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf[trainer]\r\nseed = 7\r\n")
    assert load(tmp_path / "a.toml").trainer.seed == 7


def test_all_unknown_keys_are_named_at_once(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("[actor_rollout_ref.actor.optim]\nlr = 1\nbetas = [0.9, 0.9]\n[trainer]\nsede = 1\n")
    with pytest.raises(ConfigError) as error:
        load(file, ["data.tsk=count"])
    for key in (
        "actor_rollout_ref.actor.optim.lr",
        "actor_rollout_ref.actor.optim.betas",
        "trainer.sede",
        "data.tsk",
    ):
        assert f"unknown key {key}; did you mean" in str(error.value)


@pytest.mark.parametrize(
    ("text", "overrides", "named"),
    [
        ("[actor.optm]\nlr = 1e-6\n", [], True),
        ("[rollout]\nn = 0\n", [], True),
        ('[rollout]\nname = "vllm"\n', [], True),
        ("trainer = 3\n", [], True),
        ("[rollout]\nn = 0\n", ["rollout.n=-1"], False),
        ("[rollout]\nn = 2\n", ["data.tsk=count"], False),
    ],
)
def test_a_mistake_in_a_file_names_the_file(tmp_path, text, overrides, named):
    file = tmp_path / "a.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(file, overrides)
    assert str(error.value).startswith(f"{file}: ") == named


def test_an_empty_value_unsets_an_optional_key(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('[trainer]\nstop_at = 0.5\ntest_freq = 1\n[critic]\nstrategy = "fsdp"\n')
    cfg = load(file, ["trainer.stop_at=", "critic.strategy="])
    assert (cfg.trainer.stop_at, cfg.critic.strategy) == (None, None)
    optional = [key for key in keys() if f"# {key.rpartition('.')[2]} =" in describe(Config(), {})]
    assert load(file, [f"{key}=" for key in optional]).data.val_size is None and "data.val_size" in optional


def test_an_empty_value_empties_a_table_and_no_list(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("[env]\narguments = {depth = 2}\n")
    cfg = load(file, ["env.arguments=", "data.val_files="])
    assert (cfg.env.arguments, cfg.data.val_files) == ({}, ("",))
    with pytest.raises(ConfigError, match=r"actor.optim.betas: expected 2 values"):
        load(overrides=["actor.optim.betas="])


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_a_number_is_finite(value):
    for key, words in (("actor.optim.lr", value), ("algorithm.gdpo_reward_weights", f"[1.0, {value}]")):
        with pytest.raises(ConfigError, match=f"{key}: expected a finite number"):
            load(overrides=["algorithm.name=grpo", "rollout.n=2", f"{key}={words}"])


@pytest.mark.parametrize("evaluations", [[], ["trainer.test_freq=-1"], ["trainer.test_freq=0"]])
def test_a_goal_needs_evaluations_during_the_run(evaluations):
    with pytest.raises(ConfigError, match=r"trainer.stop_at needs evaluations during the run; set trainer.test_freq"):
        load(overrides=["trainer.stop_at=0.9", *evaluations])


@pytest.mark.parametrize("weights", ["[1.0]", "[1.0, 0.5, 0.25]"])
def test_each_reward_function_has_a_weight_or_none_has(weights):
    functions = 'reward.functions=["a.py:f", "a.py:g"]'
    for allowed in ([], ["reward.weights=[]"], ["reward.weights=[1.0, 0.5]"]):
        assert load(overrides=[functions, *allowed])
    count = weights.count(",") + 1
    with pytest.raises(ConfigError, match=rf"reward\.weights has {count} values for the 2 of reward\.functions"):
        load(overrides=[functions, f"reward.weights={weights}"])


def test_a_goal_for_the_reward_may_be_any_number():
    assert load(overrides=["trainer.stop_at=7", "trainer.stop_metric=reward", "trainer.test_freq=1"])
    with pytest.raises(ConfigError, match=r"trainer.stop_at is 7.0, but acc is a share from 0 to 1"):
        load(overrides=["trainer.stop_at=7", "trainer.test_freq=1"])


GDPO = ["algorithm.name=grpo", "rollout.n=2", "algorithm.adv_estimator=gdpo", 'algorithm.gdpo_reward_keys=["x"]']


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.critic_warmup=99"],
        ["driver.kind=ray", "ray.ranks=4", "rollout.name=vllm", "rollout.engines=4"],
        # On CPUs engines and ranks share no GPUs.
        ["driver.kind=ray", "ray.ranks=4", "rollout.name=vllm", "driver.device=cpu"],
        ["driver.kind=ray", "ray.ranks=4", "rollout.name=vllm", "rollout.placement=apart"],
        [*GDPO, "reward.functions=a.py:f"],
        [*GDPO[:2], "reward.functions=a.py:f", "reward.weights=[2]"],
        ["algorithm.name=sft", "trainer.journal=digests"],
        ["trainer.journal=samples"],
        # A generated task has held-out problems, and an answer is drawn for each.
        [
            "rollout.val_kwargs.temperature=0.5",
            "rollout.val_kwargs.top_k=5",
            "trainer.test_freq=3",
            "data.val_size=9",
        ],
        ["algorithm.name=sft", "reward.functions=a.py:f", "rollout.val_kwargs.temperature=0.5"],
        ["trainer.rollout_data_dir=x"],
        ["reward.url=http://h/v1", "reward.model=j", "reward.timeout=3"],
        ["driver.kind=ray", "ray.separate=critic"],
    ],
)
def test_settings_that_are_meant_are_not_noted(overrides):
    assert notes(None, overrides) == []


@pytest.mark.parametrize(
    ("overrides", "noted"),
    [
        (["algorithm.critic_warmup=100"], "algorithm.critic_warmup = 100 leaves no step to the actor"),
        (
            ["driver.kind=ray", "ray.ranks=4", "rollout.name=vllm"],
            "rollout.engines = 1 leaves 3 of the GPUs of 4 ranks without an engine",
        ),
        (
            ["driver.kind=ray", "ray.ranks=4", "rollout.name=vllm", "rollout.engines=8"],
            "rollout.engines = 8 puts up to 2 engines on each of 4 GPUs",
        ),
        (["actor.optim.lr=0"], "actor.optim.lr is 0: the weights of the actor stay as they are"),
        (["actor.optim.lr=0", "algorithm.use_kl_loss=true"], "the weights of the actor stay as they are"),
        (
            [*GDPO, 'reward.functions=["a.py:f", "a.py:g"]', "reward.weights=[1, 2]"],
            "reward.weights do not count in what gdpo learns from: algorithm.gdpo_reward_weights do",
        ),
        (
            ["algorithm.reward_model=r", "reward.url=http://h/v1", "reward.model=j"],
            "algorithm.reward_model is the only reward of training: reward.url judges held-out answers",
        ),
        (["critic.optim.lr=0.0"], "critic.optim.lr is 0: the weights of the critic stay as they are"),
        (["algorithm.name=sft", "trainer.journal=samples"], "keeps digests alone"),
        (
            [
                "algorithm.name=rejection",
                "rollout.n=2",
                "driver.kind=ray",
                "rollout.placement=apart",
                "driver.max_lag=3",
            ],
            "driver.max_lag = 3 lets rejection learn from answers that weights up to 3 steps older have",
        ),
    ],
)
def test_settings_that_are_hardly_meant_are_noted(overrides, noted):
    found = notes(None, overrides)
    assert len(found) == 1 and noted in found[0]


@pytest.mark.parametrize("algorithm", ["ppo", "sft"])
def test_vllm_needs_processes(algorithm):
    # Supervised training answers held-out problems with the engine.
    overrides = [f"algorithm.name={algorithm}", "rollout.name=vllm", "rollout.dtype=float32"]
    with pytest.raises(ConfigError, match="processes of its own"):
        load(overrides=overrides)


def test_a_group_estimator_needs_groups():
    other = "algorithm.adv_estimator=reinforce_plus_plus"
    for words in (["grpo"], ["rloo"], ["dapo"], ["dapo", other], ["rejection"]):
        with pytest.raises(ConfigError, match=r"rollout\.n is 1"):
            make_plan(load(overrides=[f"algorithm.name={words[0]}", *words[1:]]))
    assert make_plan(load(overrides=["algorithm.name=grpo", other]))


def test_defaults_are_the_ones_of_verl_and_of_the_papers():
    ppo, grpo, dapo, dpo = (BUILT_IN[name]() for name in ("ppo", "grpo", "dapo", "dpo"))
    assert (ppo.clip_ratio, ppo.clip_ratio_low, ppo.clip_ratio_high, ppo.cliprange_value) == (0.2, None, None, 0.5)
    assert (ppo.gamma, ppo.lam, ppo.ppo_epochs, ppo.entropy_coeff, ppo.critic_warmup) == (1.0, 1.0, 1, 0.0, 0)
    assert (grpo.kl_loss_coef, grpo.kl_loss_type, grpo.norm_adv_by_std_in_grpo) == (0.001, "low_var_kl", True)
    assert (dapo.clip_ratio_low, dapo.clip_ratio_high, dapo.filter_groups.enable) == (0.2, 0.28, True)
    assert (dpo.label_smoothing, dpo.desirable_weight, dpo.undesirable_weight) == (0.1, 1.0, 1.0)
    assert (grpo.tau_pos, grpo.tau_neg, grpo.clip_cov_ratio, grpo.clip_cov_lb, grpo.clip_cov_ub) == (
        1,
        1.05,
        2e-4,
        1,
        5,
    )
    assert (grpo.kl_cov_ratio, grpo.ppo_kl_coef, grpo.top_entropy_quantile) == (0.0002, 0.1, 1.0)
    assert (ppo.rollout_is_threshold, ppo.rollout_is_threshold_lower, ppo.rollout_is_outside) == (
        2.0,
        0.0,
        "truncate",
    )
    assert attrs.astuple(ppo.kl_ctrl) == ("fixed", 0.001, 0.1, 10000) and ppo.kl_penalty == "kl"
    assert (ppo.ppo_mini_batch_size, ppo.shuffle, ppo.use_kl_loss, ppo.use_kl_in_reward) == (256, False, False, False)
    assert dapo.filter_groups.max_num_gen_batches == 10 and attrs.astuple(dapo.overlong_buffer) == (0, 1.0)
    assert (dpo.loss_type, dpo.simpo_gamma, BUILT_IN["reward_model"]().center_rewards_coefficient) == (
        "dpo",
        1.0,
        0.0,
    )
    assert {options().loss_agg_mode for name, options in BUILT_IN.items() if name not in ("dpo", "reward_model")} == {
        "token-mean"
    }
    for optim, lr in ((Config().actor.optim, 1e-6), (Config().critic.optim, 1e-5)):
        assert (optim.lr, optim.betas, optim.eps, optim.weight_decay) == (lr, (0.9, 0.999), 1e-8, 0.01)
        assert (optim.clip_grad, optim.lr_warmup_steps, optim.min_lr_ratio) == (1.0, 0, 0.0)


def test_a_run_is_what_its_documentation_says_if_nothing_else_is_set():
    cfg = Config()
    trainer, data, rollout, reward, env = cfg.trainer, cfg.data, cfg.rollout, cfg.reward, cfg.env
    assert (trainer.seed, trainer.total_training_steps, trainer.save_freq, trainer.test_freq) == (0, 100, 50, -1)
    assert (trainer.max_ckpt_to_keep, trainer.max_skipped_steps, trainer.log_val_generations) == (2, 5, 8)
    assert (trainer.val_before_train, trainer.async_save, trainer.resume_mode) == (True, False, "auto")
    assert (data.train_batch_size, data.max_prompt_length, data.max_response_length) == (256, 512, 16)
    assert (data.shuffle, data.filter_overlong_prompts, data.truncation) == (True, False, "error")
    assert (rollout.n, rollout.temperature, rollout.top_k, rollout.top_p, rollout.max_restarts) == (
        1,
        1.0,
        -1,
        1.0,
        3,
    )
    assert attrs.astuple(rollout.val_kwargs) == (1, 0.0, -1, 1.0) and rollout.free_cache_engine
    assert (reward.timeout, reward.retries, reward.concurrency, reward.unreadable_score) == (30.0, 3, 16, 0.0)
    assert (env.max_turns, env.max_turn_length, env.timeout, env.num_workers) == (8, None, 30.0, 1)
    assert (cfg.actor.lora_rank, cfg.actor.lora_alpha, cfg.actor.target_modules) == (0, 16.0, ("all-linear",))
    assert (cfg.ray.timeout, cfg.ray.placement, cfg.driver.max_lag, cfg.driver.deterministic) == (
        600.0,
        "PACK",
        0,
        True,
    )


def test_a_part_of_a_table_keeps_the_other_defaults():
    cfg = load(overrides=["critic.optim.weight_decay=0.5"])
    assert (cfg.critic.optim.lr, cfg.critic.optim.weight_decay) == (1e-5, 0.5)
    assert cfg.actor.optim.lr == 1e-6


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="the first argument is a TOML file, and key=value follows it"):
        load(tmp_path / "model.path=runs")
    with pytest.raises(ConfigError, match=r"nothing\.toml cannot be read"):
        load(tmp_path / "nothing.toml")
    (tmp_path / "run.toml").touch()
    with pytest.raises(ConfigError, match=r"nun\.toml cannot be read: .*; did you mean .*run\.toml\?"):
        load(tmp_path / "nun.toml")
    (tmp_path / "runs").mkdir()
    with pytest.raises(ConfigError, match=r"runs cannot be read: Is a directory$"):
        load(tmp_path / "runs")
    hint = "; a table in braces is complete: write all of its keys inside, or none"
    for text, ends in (
        ("a = = 1", ""),
        ('actor = {strategy = "fsdp"}\nactor.optim.lr = 1e-6\n', hint),
        ('actor = {strategy = "fsdp"}\n[actor.optim]\nlr = 1e-6\n', hint),
        ("[actor]\nlr = 1e-6\n[actor]\n", ""),
    ):
        (tmp_path / "bad.toml").write_text(text)
        with pytest.raises(ConfigError, match=rf"bad\.toml is not TOML: [^;]*{ends}$"):
            load(tmp_path / "bad.toml")


def test_a_file_is_not_blamed_for_what_an_override_says(tmp_path):
    (tmp_path / "a.toml").write_text('trainer.total_training_steps = 1\ndata.train_files = "a.jsonl"\n')
    for override in ("trainer.total_epochs=3", "data.weights=[1, 2]"):
        with pytest.raises(ConfigError, match=f"^(unknown key )?{override.partition('=')[0]}"):
            load(tmp_path / "a.toml", [override])
    with pytest.raises(ConfigError, match=r"a\.toml: trainer\.total_training_steps"):
        (tmp_path / "a.toml").write_text("trainer.total_training_steps = -1\n")
        load(tmp_path / "a.toml", ["trainer.seed=3"])


@pytest.mark.parametrize("name", ["grpo", '"grpo"', "ppo"])
def test_options_that_both_algorithms_have_stay_with_another_name(tmp_path, name):
    (tmp_path / "a.toml").write_text("[algorithm]\nclip_ratio = 0.3\nkl_loss_coef = 0.5\nlam = 0.9\n")
    cfg = load(tmp_path / "a.toml", [f"algorithm.name={name}", "rollout.n=2", "algorithm.entropy_coeff=0.25"])
    options = cfg.algorithm.options
    assert cfg.algorithm.name == name.strip('"')
    assert (options.clip_ratio, options.kl_loss_coef, options.entropy_coeff) == (0.3, 0.5, 0.25)
    assert getattr(options, "lam", 0.9) == 0.9


def test_options_of_an_algorithm_that_an_override_replaces_have_no_effect(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import attrs\nfrom verl_fn.config import opt\n"
        "@attrs.frozen\nclass Options:\n    anchor: float = opt(0.5, 'a pull')\n"
        "@attrs.frozen\nclass Fewer:\n    pull: float = opt(0.5, 'a pull')\n"
        "def own(options: Options):\n    ...\ndef other(options: Fewer):\n    ...\n"
    )
    (tmp_path / "a.toml").write_text('algorithm = {name = "mine.py:own", anchor = 0.25}\n')
    assert load(tmp_path / "a.toml").algorithm.options.anchor == 0.25
    for name in ("grpo", f"{tmp_path}/mine.py:other"):
        assert load(tmp_path / "a.toml", [f"algorithm.name={name}", "rollout.n=2"]).algorithm.name == name
        with pytest.raises(ConfigError, match=r"unknown key algorithm\.anchor"):
            load(tmp_path / "a.toml", [f"algorithm.name={name}", "rollout.n=2", "algorithm.anchor=1.0"])
    (tmp_path / "a.toml").write_text('algorithm = {name = "mine.py:own", anchr = 0.25}\n')
    with pytest.raises(ConfigError, match=r"unknown key algorithm\.anchr"):
        load(tmp_path / "a.toml", ["algorithm.name=grpo", "rollout.n=2"])


def test_every_key_has_documentation():
    import typing

    def walk(cls):
        hints = typing.get_type_hints(cls)
        for f in attrs.fields(cls):
            if attrs.has(hints[f.name]):
                yield from walk(hints[f.name])
            else:
                yield f"{cls.__name__}.{f.name}", f.metadata.get("doc")

    classes = [Config, *BUILT_IN.values()]
    assert [name for cls in classes for name, doc in walk(cls) if not doc and "AlgorithmTable" not in name] == []


@pytest.mark.parametrize(
    ("overrides", "noted"),
    [
        (["algorithm.norm_adv_by_std_in_grpo=false"], 'with algorithm.name = "ppo"'),
        (["algorithm.name=sft", "algorithm.norm_adv_by_std_in_grpo=false"], 'with algorithm.name = "sft"'),
        (["algorithm.name=sft", "algorithm.use_kl_loss=true"], 'with algorithm.name = "sft"'),
        (["algorithm.loss_scale_factor=3"], 'without algorithm.loss_agg_mode = "seq-mean-token-sum-norm"'),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.target_kl=1"], 'algorithm.kl_ctrl.type = "fixed"'),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.horizon=9"], 'algorithm.kl_ctrl.type = "fixed"'),
        (["algorithm.name=grpo", "rollout.n=4", "algorithm.gamma=0.9"], "without algorithm.adv_estimator = gae or"),
        (["algorithm.clip_ratio_low=0.1", "algorithm.clip_ratio_high=0.3", "algorithm.clip_ratio=0.5"], "_low and"),
        (["critic.optim.min_lr_ratio=0.1"], 'critic.optim.lr_scheduler_type = "constant"'),
        (["reward.timeout=3"], "without reward.functions"),
        (["reward.num_workers=3"], "without reward.functions"),
        (["data.filter_overlong_prompts=true"], "without data.train_files"),
        (["trainer.project_name=p"], "without wandb in trainer.logger"),
        (["ray.separate=critic"], 'with driver.kind = "local"'),
        (
            ["algorithm.name=grpo", "rollout.n=4", "driver.kind=ray", "ray.separate=critic"],
            "for critic: this run trains with actor",
        ),
        (
            ["driver.kind=ray", 'ray.separate=["critic", "reference"]'],
            "for reference: this run trains with actor, critic",
        ),
        (["data.train_batch_size=8", "algorithm.ppo_mini_batch_size=64"], "above data.train_batch_size = 8"),
        (["algorithm.adv_estimator_kwargs={power=0.5}"], "algorithm.adv_estimator is no function of yours"),
        (["algorithm.policy_loss_kwargs={x=1}"], "algorithm.policy_loss is no function of yours"),
        (["rollout.val_kwargs.top_p=0.9"], "with rollout.val_kwargs.temperature = 0"),
        (["rollout.max_restarts=1"], 'with driver.kind = "local"'),
        (["data.train_files=a.jsonl", "trainer.test_freq=5"], "without data.val_files"),
        (["algorithm.name=sft", "data.train_files=a.jsonl", "reward.functions=a.py:f"], "no answer is scored"),
        (["algorithm.name=dpo", "data.train_files=a.jsonl", "env.name=a.py:E"], "nothing is sampled"),
        (["algorithm.name=dpo", "trainer.rollout_data_dir=r"], "nothing is sampled in a step"),
        (["algorithm.name=reward_model", "data.val_files=a.jsonl", "reward.functions=a.py:f"], '"reward_model": no'),
    ],
)  # fmt: skip
def test_a_key_without_effect_is_noted(overrides, noted):
    found = notes(None, overrides)
    assert len(found) == 1
    assert (
        re.match(rf"{overrides[-1].partition('=')[0]}(\.\w+)? has no effect", found[0])
        or "use_kl_loss" in overrides[-1]
    )
    assert noted in found[0]


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("kl_loss_coef", 0.001, "algorithm.use_kl_loss"),
        ("rollout_is_threshold", 2.0, "algorithm.rollout_is"),
        ("label_smoothing", 0.1, "with algorithm.name"),
    ],
)
def test_a_default_that_somebody_writes_and_that_has_no_effect_is_noted(key, value, why, tmp_path):
    """The usual values of other trainers are the defaults here."""
    assert f"algorithm.{key} has no effect" in notes(None, [f"algorithm.{key}={value}"])[0]
    (tmp_path / "a.toml").write_text(f"[algorithm]\n{key} = {value}\n")
    (note,) = notes(tmp_path / "a.toml", [])
    assert note.startswith(f"algorithm.{key} has no effect") and why in note


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        ("algorithm.name=kto", "set algorithm.name=dpo algorithm.loss_type=kto"),
        ("algorithm.name=gspo", "set algorithm.name=grpo algorithm.policy_loss=gspo"),
        ("algorithm.name=gkd", "did you mean distill?"),
        ("algorithm.name=gmpo", "set algorithm.name=grpo algorithm.policy_loss=geo_mean"),
        ("algorithm.name=reinforce_plus_plus", "set algorithm.name=grpo algorithm.adv_estimator=reinforce_plus_plus"),
        ("algorithm.loss_type=sigmoid", "did you mean dpo?"),
        ("algorithm.policy_loss=vanilla", "did you mean ppo_clip?"),
        ("algorithm.policy_loss=gmpo", "did you mean geo_mean?"),
        ("algorithm.loss_agg_mode=seq-mean", "did you mean seq-mean-token-mean?"),
        ("algorithm.kl_coef=0.001", "did you mean algorithm.kl_ctrl.kl_coef?"),
    ],
)
def test_names_of_other_trainers_lead_to_what_they_mean(setting, advice):
    name = ["algorithm.name=dpo"] if "loss_type" in setting else []
    with pytest.raises(ConfigError, match=re.escape(advice)):
        load(None, [*name, setting])


def test_keys_with_an_effect_and_keys_that_a_run_writes_at_their_default_are_not_noted(tmp_path):
    judged = ["reward.functions=a.py:f", "env.name=a.py:E", "trainer.test_freq=5", "data.val_size=4"]
    for more in (["algorithm.name=sft", "data.val_files=a.jsonl"], ["algorithm.name=distill"]):
        assert notes(None, [*more, *judged]) == []
    assert notes(None, ["data.train_files=a.jsonl", *judged[:2]]) == []
    off = ["algorithm.use_kl_loss=false", "actor.lora_rank=0", "reward.functions=[]", "trainer.rollout_data_dir="]
    assert notes(None, ["algorithm.name=sft", *off[1:]]) == notes(None, off) == []
    assert notes(None, ["algorithm.clip_ratio=0.5", "algorithm.clip_ratio_high=0.6", "algorithm.gamma=0.9"]) == []
    for recipe in RECIPES:
        assert notes(recipe, []) == []
        dumped = tmp_path / recipe.name
        table = to_table(load(recipe))
        dumped.write_text(tomli_w.dumps(table))
        assert notes(dumped, []) == []
        del table["trainer"]["max_skipped_steps"]  # as in the config of a run of before that key
        dumped.write_text(tomli_w.dumps(table))
        assert notes(dumped, []) == []


JUDGED = ["reward.url=http://localhost:8000/v1", "reward.model=m"]
SETS = "data.task=reasoning_gym:chain_sum,basic_arithmetic"


@pytest.mark.parametrize(
    "overrides",
    [
        ["env.name=a.py:E", "data.chat_template_kwargs.think=true"],
        [SETS, "data.chat_template_kwargs.think=true"],
        ["data.val_files=a.jsonl", "data.chat_template_kwargs.think=true"],
        [SETS, "data.filter_overlong_prompts=true"],
        ["data.val_files=a.jsonl", "data.filter_overlong_prompts=true"],
        [SETS, "data.weights=[1.0, 2.0]", "data.task_options.chain_sum={min_terms=2}"],
        ['data.train_files=["a.jsonl", "b.jsonl"]', "data.weights=[1.0, 2.0]"],
        ["data.val_files=a.jsonl", "data.prompt_key=q", "data.convert=a.py:f", "data.truncation=left"],
        ["data.task=verifiers:x", "env.name=verifiers:x", "data.truncation=left", "data.shuffle=false"],
        [*JUDGED, "reward.timeout=3", "reward.unreadable_score=1", "reward.pattern=(x)"],
        [*JUDGED, "reward.api=pooling", "reward.retries=1", "reward.concurrency=2", "reward.api_key_env=K"],
        ["actor.strategy=fsdp", "ray.timeout=3"],
        ["critic.strategy=fsdp", "ray.timeout=3"],
        ["critic.strategy=megatron", "ray.timeout=3"],
        ["driver.kind=ray", "ray.timeout=3"],
        ["algorithm.policy_loss=geo_mean", "algorithm.use_kl_loss=true", "algorithm.loss_agg_mode=token-sum"],
        ["algorithm.policy_loss=geo_mean", "algorithm.entropy_coeff=0.1", "algorithm.loss_agg_mode=token-sum"],
        ["algorithm.name=grpo", "algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9"],
        ["algorithm.clip_ratio_low=0.1", "algorithm.clip_ratio=0.3"],
        ["algorithm.clip_ratio_high=0.1", "algorithm.clip_ratio=0.3"],
        ["algorithm.rollout_is=token", "algorithm.rollout_is_threshold=3", "algorithm.rollout_is_outside=mask"],
        ["trainer.stop_at=0", "trainer.stop_metric=reward", "trainer.test_freq=1"],
        ['trainer.logger=["tensorboard", "wandb"]', "trainer.project_name=p", "trainer.experiment_name=e"],
        ["data.train_batch_size=8", "algorithm.ppo_mini_batch_size=8", "algorithm.ppo_epochs=2"],
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=9"],
        ["algorithm.name=dapo", "rollout.n=2", "algorithm.overlong_buffer={len=3, penalty_factor=2}"],
        ["rollout.val_kwargs.temperature=0.5", "rollout.val_kwargs.top_p=0.9"],
        ["algorithm.name=distill", "rollout.n=2", "rollout.top_p=0.9"],
    ],
)
def test_each_of_several_settings_gives_a_key_its_effect(overrides):
    assert notes(None, overrides) == []


@pytest.mark.parametrize(
    ("overrides", "noted"),
    [
        (
            ["data.chat_template_kwargs.think=true"],
            "chat_template_kwargs.think has no effect without data.train_files",
        ),
        (["ray.timeout=3"], 'ray.timeout has no effect with driver.kind = "local"'),
        (
            [*JUDGED, "reward.api=pooling", "reward.pattern=(x)"],
            'reward.pattern has no effect without reward.api = "c',
        ),
        (
            [*JUDGED, "reward.api=pooling", "reward.prompt={response}"],
            "reward.prompt has no effect without reward.api",
        ),
        ([*JUDGED, "reward.api=pooling", "reward.unreadable_score=1"], "reward.unreadable_score has no effect"),
        (
            ["data.train_files=a.jsonl", "data.filter_overlong_prompts=true", "data.truncation=left"],
            "data.truncation has no effect with data.filter_overlong_prompts",
        ),
        (["data.task=verifiers:x", "env.name=verifiers:x", "data.prompt_key=q"], "data.prompt_key has no effect"),
        (["algorithm.policy_loss=geo_mean", "algorithm.loss_agg_mode=token-sum"], "averages over responses"),
        (["algorithm.rollout_is=off", "algorithm.rollout_is_threshold=3"], 'with algorithm.rollout_is = "off"'),
        (["algorithm.rollout_is_threshold=3"], "rollout_is_threshold has no effect without algorithm.rollout_is"),
    ],
)
def test_without_any_of_them_the_key_is_noted(overrides, noted):
    (note,) = notes(None, overrides)
    assert noted in note


def test_a_recipes_key_that_an_override_makes_useless_is_not_noted(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('[data]\ntask = "count"\n[algorithm]\nkl_penalty = "k2"\n[model]\npath = "m"\n')
    assert notes(file, ["data.train_files=a.jsonl"]) == [
        "algorithm.kl_penalty has no effect without algorithm.use_kl_in_reward"
    ]
    assert notes(file, ["data.train_files=a.jsonl", "data.task=countdown"])[-1].startswith("data.task has no effect")


def test_names_that_look_like_other_values_are_texts():
    cfg = load(overrides=["model.path=2027-01-05", "trainer.dir=7", "data.train_files=2027-01-05"])
    assert (cfg.model.path, cfg.trainer.dir, cfg.data.train_files) == ("2027-01-05", "7", ("2027-01-05",))
    # The last of several names says which keys hold texts.
    named = load(overrides=["algorithm.name=sft", "algorithm.name=distill", "algorithm.teacher=7"])
    assert named.algorithm.options.teacher == "7"


def test_a_penalty_may_rise_over_a_whole_response():
    words = ["algorithm.name=dapo", "data.max_response_length=8"]
    assert load(overrides=[*words, "algorithm.overlong_buffer.len=8"]).algorithm.options.overlong_buffer.len == 8
    with pytest.raises(ConfigError, match=r"overlong_buffer\.len is 9, more than data\.max_response_length = 8"):
        load(overrides=[*words, "algorithm.overlong_buffer.len=9"])


def test_the_home_folder_is_meant_by_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    cfg = load(overrides=["model.path=~/m", "trainer.dir=~/x", "data.train_files=~/a.jsonl", "critic.path=~/c"])
    assert (cfg.model.path, cfg.trainer.dir, cfg.critic.path) == ("/h/m", "/h/x", "/h/c")
    assert cfg.data.train_files == ("/h/a.jsonl",)
    keys = ("reward.functions", "data.convert", "env.name", "algorithm.policy_loss")
    code = [f"{key}=~/a.py:f" for key in keys]
    made = make_plan(load(overrides=["model.path=m", "data.train_files=a.jsonl", *code]))
    assert (made.reward.functions, made.data.convert) == (("/h/a.py:f",), ("/h/a.py:f",))
    assert (made.env.name, made.options.policy_loss) == ("/h/a.py:f", "/h/a.py:f")
    data = make_plan(load(overrides=["model.path=m", "data.task=verifiers:~/envs/my-env"])).data
    assert data.task == "verifiers:/h/envs/my-env"
    with pytest.raises(ConfigError, match=r"^data\.task: '~nosuchuser/x' names the home of a user"):
        make_plan(load(overrides=["model.path=m", "data.task=verifiers:~nosuchuser/x"]))


def test_an_algorithm_may_lie_in_the_home_folder(tmp_path, monkeypatch):
    shutil.copy(ROOT / "examples/custom_algorithm.py", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    made = make_plan(load(overrides=["algorithm.name=~/custom_algorithm.py:raft", "model.path=m", "rollout.n=2"]))
    assert made.algorithm == f"{tmp_path}/custom_algorithm.py:raft"


def test_a_described_config_is_the_config():
    cfg = load(overrides=['trainer.dir="a  b # \\t"', 'trainer.logger=["wandb", "tensorboard"]'])
    assert structure(tomllib.loads(describe(cfg, {}))) == cfg


def test_a_table_of_the_users_own_keys_comes_from_where_one_of_them_was_set(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('[reward]\nfunctions = "mine.py:score"\n[reward.arguments]\nscale = 2\n[data]\nval_size = 4\n')

    def shown(*overrides):
        lines = describe(load(file, overrides), origins(file, overrides)).splitlines()
        return {line.split()[0]: line.rpartition(" [")[2].rstrip("]") for line in lines if " = " in line}

    of = shown("data.chat_template_kwargs.thinking=true")
    assert (of["arguments"], of["functions"], of["val_size"]) == (str(file),) * 3
    assert of["chat_template_kwargs"] == "command line"
    assert shown("reward.arguments.scale=3")["arguments"] == "command line"
    # Neither a key with the same beginning nor another one of the table is meant.
    assert (of["seed"], of["timeout"], shown()["chat_template_kwargs"]) == ("default",) * 3


def test_a_key_that_begins_like_one_that_is_set_has_its_default():
    """As rollout.n does."""
    lines = describe(Config(), {"rollout.name": "command line"}).splitlines()
    assert [line.split()[0] for line in lines if line.endswith("[command line]")] == ["name"]


def test_a_key_comes_from_where_it_was_set_last(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('[trainer]\nseed = 3\ndir = "x"\n')
    assert origins(file, ["trainer.seed=4"]) == {"trainer.seed": "command line", "trainer.dir": str(file)}


VALUES = st.one_of(
    st.integers(-3, 3), st.floats(allow_nan=False), st.text(max_size=4), st.booleans(), st.lists(st.floats())
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from([*keys(), "nonsense", "actor.nonsense"]), VALUES, max_size=4))
def test_any_values_give_a_config_or_a_config_error(given_values):
    table = {}
    for key, value in given_values.items():
        *path, name = key.split(".")
        inner = table
        for part in path:
            inner = inner.setdefault(part, {})
        inner[name] = value
    try:
        cfg = structure(table)
    except ConfigError:
        return
    assert not any("nonsense" in key for key in given_values)
    assert structure(to_table(cfg)) == cfg


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "needs actor.strategy=megatron; local cannot replay expert routing"),
        (["actor.strategy=fsdp"], "fsdp cannot replay expert routing"),
        (["actor.strategy=megatron", "algorithm.name=sft"], "and sft has no such pass"),
    ],
)
def test_expert_routing_that_cannot_be_replayed_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        load(overrides=["actor.router_replay.mode=R2", *settings])


def test_files_of_code_belong_to_the_config_and_then_to_the_working_directory(tmp_path, monkeypatch):
    code = "def mine(data_source, solution_str, ground_truth):\n    return 0.0\n"
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, names in ((here, ("both.py", "cwd.py")), (there, ("both.py", "toml.py"))):
        folder.mkdir()
        for name in names:
            (folder / name).write_text(code)
    (there / "run.toml").write_text(
        '[reward]\nfunctions = ["both.py:mine", "cwd.py:mine", "toml.py:mine", "m:mine"]\n'
    )
    monkeypatch.chdir(here)
    functions = make_plan(load(there / "run.toml")).reward.functions
    assert functions == (f"{there}/both.py:mine", f"{here}/cwd.py:mine", f"{there}/toml.py:mine", "m:mine")
    written = make_plan(load(there / "run.toml", ['reward.functions=["both.py:mine"]'])).reward.functions
    assert written == (f"{here}/both.py:mine",)
    # What a run's folder has recorded is read alike from everywhere.
    table = make_plan(load(there / "run.toml")).table
    monkeypatch.chdir(there)
    assert make_plan(structure(table)).reward.functions == functions


@pytest.mark.parametrize("table", [
    {"algorithm": {"name": "dapo", "overlong_buffer.len": 77}}, {"trainer.dir": "x"}, {"actor": {"optim.lr": 0.5}},
])  # fmt: skip
def test_a_quoted_key_with_a_dot_is_no_key(table):
    with pytest.raises(
        ConfigError, match=r"unknown key (algorithm\.)?\S*(overlong_buffer\.len|trainer\.dir|optim\.lr)"
    ):
        structure(table)
