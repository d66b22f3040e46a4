"""Translation of verl's configs: command lines as its examples have them, YAML files, and every kind of key."""

import json
import math
import shlex
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w
import torch
from run_configs import TINY

from verl_fn import build
from verl_fn.backends.hf.new_model import new_model
from verl_fn.cli import main
from verl_fn.config import ConfigError, load, make_plan, structure
from verl_fn.config.load import _advice, flat, keys
from verl_fn.from_verl import read_settings, translate
from verl_fn.from_verl.keys import SAME

# Settings of verl's examples/grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh.
GRPO_LORA = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=DATA/train.jsonl
data.val_files=DATA/test.jsonl data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024
data.filter_overlong_prompts=True data.truncation='error' data.shuffle=False actor_rollout_ref.model.path=MODEL
actor_rollout_ref.model.use_shm=True actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32
actor_rollout_ref.actor.optim.lr=3e-6 actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40 actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6
actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.load_format=safetensors
actor_rollout_ref.rollout.layered_summon=True actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40
actor_rollout_ref.ref.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False trainer.critic_warmup=0
trainer.logger=\\[\\'console\\',\\'wandb\\'\\] trainer.project_name='verl_grpo_example_gsm8k'
trainer.experiment_name='qwen2_7b_function_rm' trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20
trainer.test_freq=5 trainer.total_epochs=15"""
# Of examples/ppo_trainer/run_qwen2-7b_seq_balance.sh.
PPO = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae
"data.train_files=['DATA/train.jsonl', 'DATA/train.jsonl']" "data.val_files=['DATA/test.jsonl']"
data.return_raw_chat=True data.train_batch_size=4096 data.max_prompt_length=4096 data.max_response_length=4096
data.filter_overlong_prompts=True data.truncation='error' actor_rollout_ref.model.path=MODEL
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.ppo_mini_batch_size=512
actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000
actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.multi_turn.format=hermes
actor_rollout_ref.rollout.gpu_memory_utilization=0.5 actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24000
critic.optim.lr=1e-5 critic.model.use_remove_padding=True critic.model.path=MODEL
critic.model.enable_gradient_checkpointing=True critic.ppo_max_token_len_per_gpu=98304
critic.model.fsdp_config.param_offload=False critic.model.fsdp_config.optimizer_offload=False
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 'trainer.logger=["console","wandb"]'
trainer.project_name='verl_example_gsm8k' trainer.experiment_name='qwen2-7b' trainer.n_gpus_per_node=8
trainer.val_before_train=False trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15"""
# Of examples/sft/gsm8k/run_qwen3_8b_fsdp.sh.
SFT = """torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer
data.train_files=DATA/train.jsonl data.val_files=DATA/test.jsonl data.micro_batch_size_per_gpu=64
data.messages_key=messages optim.lr=1e-4 engine=fsdp engine.ulysses_sequence_parallel_size=2 model.path=MODEL
model.use_remove_padding=true trainer.default_local_dir=/tmp/sft-ckpt trainer.project_name=gsm8k-sft
trainer.experiment_name=gsm8k-sft-qwen3-8b-instruct 'trainer.logger=["console","wandb"]' trainer.total_epochs=2
model.lora_rank=32 model.lora_alpha=16 model.target_modules=all-linear"""
MEGATRON = """algorithm.adv_estimator=gae model_engine=megatron actor_rollout_ref.model.path=MODEL
actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 critic.megatron.tensor_model_parallel_size=2
critic.megatron.pipeline_model_parallel_size=2 actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2
trainer.total_training_steps=3"""


def translated(line, rows=7473):
    return translate(read_settings(shlex.split(line)), lambda files: rows)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A model with a chat template, and data of 16 rows."""
    folder = tmp_path_factory.mktemp("verl")
    new_model(folder / "model", chars="ab=", hidden_size=32, head_dim=32, chat_template=True)
    row = {"data_source": "openai/gsm8k", "prompt": "a=", "reward_model": {"ground_truth": "b"}}
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 16)
    return folder


@pytest.mark.parametrize("line", [GRPO_LORA, PPO, SFT, MEGATRON], ids=["grpo", "ppo", "sft", "megatron"])
def test_every_key_of_verls_examples_is_known_and_the_config_makes_a_plan(line):
    translation = translated(line)
    assert translation.complete, translation.report()
    cfg = structure(tomllib.loads(tomli_w.dumps(translation.table)))
    assert make_plan(cfg).table
    report = translation.report()
    for word in shlex.split(line):
        key = word.partition("=")[0]
        if "." in key and "=" in word:
            assert key in report, key


def test_a_setting_that_is_the_default_here_is_reported_and_not_in_the_toml():
    same = translated(f"{GRPO_LORA} actor_rollout_ref.actor.ppo_epochs=1 algorithm.gamma=1.0")
    line = "actor_rollout_ref.actor.ppo_epochs -> algorithm.ppo_epochs = 1; the default here"
    assert line in same.translated and "ppo_epochs" not in same.table["algorithm"]
    assert not any("default here" in one for one in same.defaults)


def test_a_model_on_the_hub_has_to_be_downloaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = GRPO_LORA.replace("MODEL", "Qwen/Qwen3-8B")
    (said,) = [one for one in translated(line).translated if "model.path =" in one]
    assert "verl-fn prepare hub:Qwen/Qwen3-8B --out FOLDER downloads it" in said
    (tmp_path / "Qwen/Qwen3-8B").mkdir(parents=True)
    assert not any("downloads it" in one for one in translated(line).translated)


def test_what_grpos_example_becomes():
    cfg = structure(translated(GRPO_LORA).table)
    assert (cfg.algorithm.name, cfg.rollout.n, cfg.algorithm.options.use_kl_loss) == ("grpo", 5, True)
    assert (cfg.actor.strategy, cfg.actor.dtype, cfg.actor.lora_rank, cfg.ray.ranks) == ("fsdp", "bfloat16", 64, 8)
    assert cfg.actor.ppo_max_token_len_per_gpu == 40 * (512 + 1024)
    assert cfg.trainer.total_training_steps == 7473 // 1024 * 15 and cfg.trainer.logger == ("wandb",)
    assert (cfg.trainer.dir, cfg.data.shuffle) == ("checkpoints/verl_grpo_example_gsm8k/qwen2_7b_function_rm", False)
    assert (cfg.trainer.max_ckpt_to_keep, cfg.trainer.save_freq) == (1_000_000, 20), "verl keeps all"


def test_what_the_other_examples_become():
    ppo, sft, megatron = (structure(translated(line).table) for line in (PPO, SFT, MEGATRON))
    assert ppo.data.train_files == ("DATA/train.jsonl", "DATA/train.jsonl") and ppo.critic.path == "MODEL"
    assert (ppo.critic.ppo_max_token_len_per_gpu, ppo.trainer.val_before_train) == (98304, False)
    assert (sft.algorithm.name, sft.actor.optim.lr, sft.actor.lora_alpha, sft.ray.ranks) == ("sft", 1e-4, 16.0, 8)
    assert (sft.actor.fsdp_config.ulysses_sequence_parallel_size, sft.trainer.seed) == (2, 1)
    assert sft.actor.ppo_max_token_len_per_gpu == 8192 and sft.trainer.dir == "/tmp/sft-ckpt"
    assert megatron.actor.strategy == megatron.critic.strategy == "megatron"
    for mode in ("R2", "R3"):
        replays = structure(translated(f"{MEGATRON} actor_rollout_ref.actor.router_replay.mode={mode}").table)
        assert replays.actor.router_replay.mode == mode
    assert megatron.actor.router_replay.mode == "disabled"
    assert megatron.actor.megatron.sequence_parallel and megatron.critic.megatron.pipeline_model_parallel_size == 2


@pytest.mark.parametrize(("warmup", "steps"), [("lr_warmup_steps=10", 10), ("lr_warmup_steps_ratio=0.2", 21)])
def test_warm_ups_in_steps_become_updates(warmup, steps):
    """Three epochs of four minibatches: at the end of step 10 both have made 10 steps of warm-up."""
    epochs = "actor_rollout_ref.actor.ppo_epochs=3"
    translation = translated(f"{GRPO_LORA} {epochs} actor_rollout_ref.actor.optim.{warmup}")
    plan = make_plan(structure(translation.table))
    role = plan.roles["actor"]
    assert role.optim.lr_warmup_steps == steps * 3 * 4
    assert role.optim.lr_warmup_steps / role.total_updates == pytest.approx(steps / (7 * 15))
    assert f"{steps} steps with 12 updates each" in " ".join(translation.report().split())


def test_what_a_batch_has_beyond_whole_mini_batches_is_an_update_of_its_own():
    """1,000 prompts are three mini-batches of 256 and one of 232."""
    words = "data.train_batch_size=1000 actor_rollout_ref.actor.optim.lr_warmup_steps=10"
    role = make_plan(structure(translated(f"{GRPO_LORA} {words}").table)).roles["actor"]
    assert (role.optim.lr_warmup_steps, role.total_updates) == (10 * 4, 7 * 15 * 4)


def test_a_share_of_warm_up_is_one_of_the_schedule():
    """It may be shorter than the run, here 105 steps of four updates."""
    optim = "actor_rollout_ref.actor.optim."
    words = f"{optim}lr_scheduler_type=cosine {optim}lr_decay_steps=50 {optim}lr_warmup_steps_ratio=0.2"
    found = structure(translated(f"{GRPO_LORA} {words}").table).actor.optim
    assert (found.lr_warmup_steps, found.lr_decay_steps) == (10 * 4, 50 * 4)


@pytest.mark.parametrize(
    ("setting", "section", "said"),
    [
        ("data.val_workers=3", "unknown", "did you mean data.num_workers?"),
        ("actor_rollout_ref.rollout.temprature=1", "unknown", "did you mean actor_rollout_ref.rollout.temperature?"),
        ("algorithm.filter_groups.enable=True", "translated", 'algorithm.name = "dapo"'),
        ("algorithm.adv_estimator=remax", "translated", 'algorithm.name = "remax"'),
        ("algorithm.adv_estimator=mine", "not possible here", "there is no estimator mine"),
        ("actor_rollout_ref.rollout.multi_turn.enable=True", "not possible here", "set env.name"),
        ("critic.ppo_epochs=2", "without effect here", "actor and critic share algorithm.ppo_epochs"),
        ("trainer.device=npu", "not possible here", "there is no device npu"),
        ("trainer.balance_batch=True", "without effect here", "rows are dealt to ranks by their tokens"),
        ("critic.optim.lr=2e-5", "without effect here", 'with algorithm.name = "grpo"'),
        ("actor_rollout_ref.rollout.name=sglang", "translated", "in place of sglang"),
        ("actor_rollout_ref.actor.strategy=fsdp2", "translated", 'actor.strategy = "fsdp"'),
        ("actor_rollout_ref.actor.router_replay.mode=R4", "not possible here", "there is no mode R4"),
        ("actor_rollout_ref.actor.router_replay.mode=R3", "not possible here", "fsdp cannot replay"),
        ("actor_rollout_ref.actor.router_replay.mode=R2", "not possible here", "fsdp cannot replay"),
        (
            "actor_rollout_ref.ref.router_replay.mode=R2",
            "without effect here",
            "the reference policy has the actor's",
        ),
    ],
)
def test_each_key_is_reported_in_its_section(setting, section, said):
    translation = translated(f"{GRPO_LORA} {setting}")
    differing = "verl's defaults that differ from the defaults here"
    titles = ["translated", differing, "without effect here", "not possible here"]
    sections, title = {}, ""
    for line in translation.report().splitlines():
        title = line.rstrip(":") if line.rstrip(":") in (*titles, "unknown") else title
        sections[title] = sections.get(title, "") + " " + line.strip()
    key = setting.partition("=")[0]
    assert said in sections[section] and key in sections[section]
    assert not [other for other, text in sections.items() if other != section and f"{key} " in text.replace(":", " ")]
    assert translation.complete == (section in ("translated", "without effect here"))


@pytest.mark.parametrize("path", ["/opt/verl/verl/trainer/main_ppo.py", "verl/recipe/dapo/main_dapo.py"])
def test_a_trainer_may_be_named_by_its_path(path):
    """Also below a checkout that has the package's name."""
    module = read_settings(["python3", path, "trainer.total_epochs=2"]).module
    assert (
        module == {"main_ppo.py": "verl.trainer.main_ppo", "main_dapo.py": "recipe.dapo.main_dapo"}[Path(path).name]
    )


def test_what_belongs_to_a_switch_that_is_refused_is_not_called_off():
    words = (
        "distillation.enabled=True distillation.distillation_loss.topk=16 "
        "distillation.distillation_loss.log_prob_min_clamp=-10.0"
    )
    reasons = translated(f"{GRPO_LORA} {words}").without_effect
    of = ["distillation.distillation_loss.topk", "distillation.distillation_loss.log_prob_min_clamp"]
    assert reasons["distillation.enabled is not possible here"] == of
    off = translated(f"{GRPO_LORA} {words.replace('True', 'False')}").without_effect
    assert off["distillation.enabled is off"] == of


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("algorithm.rollout_correction.rollout_is_threshold=0.5_5.0", "rollout_is_outside", "mask"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "policy_loss", "gspo"),
        ("actor_rollout_ref.actor.clip_ratio_high=0.28", "clip_ratio_high", 0.28),
        ("algorithm.adv_estimator=rloo", "adv_estimator", "rloo"),
        ("algorithm.adv_estimator=rloo_vectorized", "adv_estimator", "rloo"),
        ("trainer.nnodes=3 trainer.n_gpus_per_node=2", "ray.ranks", 6),
        ("trainer.nnodes=3 trainer.n_gpus_per_node=2", "rollout.engines", 6),
    ],
)
def test_keys_that_change_on_the_way(setting, key, value):
    table = translated(f"{GRPO_LORA} algorithm.rollout_correction.rollout_is=token {setting}").table
    assert flat(table)[key if "." in key else f"algorithm.{key}"] == value


def test_dynamic_sampling_becomes_dapo():
    start = "algorithm.filter_groups."
    line = f"{GRPO_LORA} {start}enable=True {start}metric=seq_reward {start}max_num_gen_batches="
    options = structure(translated(f"{line}3").table).algorithm.options
    assert (options.filter_groups.max_num_gen_batches, options.filter_groups.metric) == (3, "score")
    assert (options.clip_ratio_low, options.clip_ratio_high) == (0.2, 0.2)
    assert "0 in verl, without a limit" in translated(f"{line}0").report()
    unset = translated(f"{GRPO_LORA} {start}enable=True")
    assert f"{start}max_num_gen_batches = 10; 0 in verl, without a limit" in unset.defaults
    # A call for samples asks verl's engine for whole batches, and ours for what a batch lacks.
    asked = translated(f"{line}3 data.gen_batch_size=100 data.train_batch_size=64")
    assert asked.table["algorithm"]["filter_groups"]["max_num_gen_batches"] == 5
    assert "3 calls for 100 prompts; a call here asks for at most 64" in " ".join(asked.report().split())
    line = f"{GRPO_LORA} {start}enable=True {start}metric=length"
    assert "groups differ in acc or score" in translated(line).report()
    assert "only with an estimator that compares" in translated(f"{PPO} {start}enable=True").report()


def test_rewards_placements_and_offload():
    cfg = structure(translated(
        f"{GRPO_LORA} custom_reward_function.path=r.py reward.num_workers=4 actor_rollout_ref.rollout.nnodes=2 "
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=4 actor_rollout_ref.rollout.n_gpus_per_node=4 "
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_batched_tokens=99 "
    ).table)  # fmt: skip
    assert cfg.reward.functions == ("r.py:compute_score",) and cfg.reward.num_workers == 4
    assert (cfg.rollout.placement, cfg.rollout.engines, cfg.rollout.tensor_parallel_size) == ("apart", 4, 2)
    assert cfg.actor.fsdp_config.replicate == 2 and cfg.rollout.engine_kwargs == {"max_num_batched_tokens": 99}
    moved = translated(f"{GRPO_LORA} actor_rollout_ref.actor.fsdp_config.optimizer_offload=True")
    assert structure(moved.table).rollout.offload_trainer is True


def test_the_table_of_layouts_in_the_docs_is_what_a_translation_does():
    """The keys on the right are those that a translation sets."""
    page = (Path(__file__).parents[2] / "docs/from_verl.md").read_text()
    section = page.partition("## Keys of GPUs and layouts")[2].partition("\n## ")[0]
    right = {row.split("|")[1].strip(): row.split("|")[2] for row in section.splitlines() if row.startswith("| `")}

    def written(name):
        return next(text for row, text in right.items() if f"{name}`" in row)

    for key, value, ours in (
        ("actor.fsdp_config.param_offload", True, "rollout.offload_trainer"),
        ("actor.fsdp_config.optimizer_offload", True, "rollout.offload_trainer"),
        ("actor.fsdp_config.offload_policy", True, "actor.fsdp_config.offload_policy"),
        ("actor.ulysses_sequence_parallel_size", 2, "actor.fsdp_config.ulysses_sequence_parallel_size"),
        ("actor.fsdp_config.fsdp_size", 4, "actor.fsdp_config.replicate"),
    ):
        before = flat(translated(GRPO_LORA).table)
        after = flat(translated(f"{GRPO_LORA} actor_rollout_ref.{key}={value}").table)
        assert {name for name in after if after[name] != before.get(name)} == {ours}
        text = written(key.rpartition(".")[2])
        assert f"`{ours}`" in text or (ours == key and text.strip().startswith("the same"))


def test_what_adapters_have_has_no_effect_without_a_rank():
    model = "actor_rollout_ref.model."
    words = f"{model}lora_alpha=0 {model}exclude_modules=NONE {model}target_modules=[q_proj]"
    for rank in (f" {model}lora_rank=0", ""):
        unused = translated(f"{' '.join(w for w in GRPO_LORA.split() if 'lora_rank' not in w)} {words}{rank}")
        assert unused.complete and "target_modules" not in unused.table["actor"], unused.report()
        (keys,) = (keys for reason, keys in unused.without_effect.items() if "their rank is 0" in reason)
        assert set(keys) == {model + name for name in ("lora_alpha", "exclude_modules", "target_modules")}
    assert len(translated(f"{GRPO_LORA} {words} {model}lora_rank=8").not_possible) == 2
    # Megatron's table of adapters takes nothing from the other keys.
    assert translated(f"{GRPO_LORA} {model}lora.rank=0 {model}lora.alpha=99").table == translated(GRPO_LORA).table


def test_megatrons_names_of_layers_with_adapters():
    model = "actor_rollout_ref.model."
    words = f"{GRPO_LORA} actor_rollout_ref.actor.strategy=megatron {model}lora.rank=16 {model}lora.target_modules="
    some = translated(f"{words}[linear_proj,linear_fc1]")
    assert some.table["actor"]["target_modules"] == ["o_proj", "gate_proj", "up_proj"]
    assert f"{model}lora.target_modules" not in some.without_effect
    every = translated(f"{words}[linear_fc2,linear_fc1,linear_qkv,linear_proj]")
    assert "target_modules" not in every.table["actor"]
    (problem,) = [line for line in translated(f"{words}[linear_q]").not_possible if "target_modules" in line]
    assert "there is no layer 'linear_q'" in problem


@pytest.mark.parametrize(
    "settings",
    [
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine actor_rollout_ref.actor.optim.warmup_style=null",
        "actor_rollout_ref.model.lora.rank=0 actor_rollout_ref.model.lora.alpha=99",
        "reward.custom_reward_function.path=r.py custom_reward_function.path=null",
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=4 "
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
    ],
)
def test_a_whole_dump_has_older_names_beside_newer_ones(settings):
    """In verl's own dumps the older name is neutral."""
    first, second = settings.split()
    both, alone = translated(f"{GRPO_LORA} {settings}"), translated(f"{GRPO_LORA} {first}")
    assert both.complete and both.table == alone.table
    assert translated(f"{GRPO_LORA} {second} {first}").table == alone.table


def test_a_null_under_one_name_leaves_the_value_of_another():
    words = "reward.reward_model.enable=null reward_model.enable=True reward_model.model.path=RM"
    assert translated(f"{GRPO_LORA} {words}").table["algorithm"]["reward_model"] == "RM"


def test_a_critic_with_updates_of_its_own():
    assert not translated(f"{PPO} critic.ppo_epochs=2").complete
    assert translated(f"{PPO} critic.ppo_epochs=1 critic.ppo_mini_batch_size=512 critic.shuffle=False").complete


def test_epochs_of_files_that_cannot_be_counted():
    translation = translated(GRPO_LORA, rows=None)
    assert "append trainer.total_training_steps=N" in translation.not_possible[0] and not translation.complete
    # No run starts with another number of steps.
    text = translation.toml()
    assert text.startswith("# not possible here: trainer.total_epochs: the run has rows // ")
    with pytest.raises(ConfigError, match="total_training_steps: expected a whole number"):
        structure(tomllib.loads(text))


def test_a_yaml_file_with_references_and_overrides(tmp_path, monkeypatch):
    file = tmp_path / "verl.yaml"
    file.write_text(
        "actor_rollout_ref:\n  actor:\n    _target_: verl.x\n    optim: {lr: 1e-5}\n    ppo_epochs: 2\n"
        "  model: {path: '${oc.env:MODEL,none}'}\n  rollout: {n: 3, name: vllm, temperature: '???'}\n"
        "critic:\n  ppo_epochs: ${oc.select:actor_rollout_ref.actor.ppo_epochs,1}\n"
        "trainer:\n  project_name: p\n  experiment_name: e\n  total_training_steps: 5\n"
        "  default_local_dir: out/${.project_name}/${trainer.experiment_name}\n"
    )
    monkeypatch.setenv("MODEL", "/models/m")
    translation = translate(read_settings([str(file), "trainer.experiment_name=f", "~trainer.nothing"]))
    cfg = structure(translation.table)
    assert translation.complete and translation.without_effect["it names a class of verl"]
    assert (cfg.trainer.dir, cfg.model.path, cfg.rollout.n) == ("out/p/f", "/models/m", 3)
    assert cfg.algorithm.options.ppo_epochs == 2 and cfg.actor.optim.lr == 1e-5
    kept = ["hydra.run.dir=${nothing}", "trainer.experiment_name=e${now:%%}", "data.seed=${oc.select:data.nothing,7}"]
    values = read_settings(kept).values
    assert (values["trainer.experiment_name"], values["data.seed"]) == ("e%", 7)
    for words, said in (
        (["nowhere.yaml"], "cannot be read"),
        (["nonsense"], "neither a setting"),
        (["model.path=$HOME/x"], "shell variable"),
        # None of these may silently become verl's default.
        (["actor_rollout_ref.actor.optim.lr=${LR}"], r"optim.lr has \$\{LR\}, .* write the value itself"),
        (["data.train_files=${oc.env:NOWHERE}/a.parquet"], "train_files has .*oc.env:NOWHERE"),
        (["data.train_batch_size=${oc.eval:4*8}"], "train_batch_size has"),
        (["critic.optim=${actor_rollout_ref.actor.optim}"], "critic.optim has"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_settings(words)


def test_the_command_prints_toml_that_train_accepts(places, tmp_path, capsys):
    line = GRPO_LORA.replace("DATA", str(places)).replace("MODEL", str(places / "model"))
    small = "data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=4 trainer.n_gpus_per_node=2"
    small += " data.max_prompt_length=8 data.max_response_length=8"
    words = shlex.split(f"{line} {small} trainer.default_local_dir={tmp_path}/run")
    assert main(["config", "--from-verl", *words]) == 0
    shown = capsys.readouterr()
    file = tmp_path / "run.toml"
    file.write_text(shown.out)
    assert load(file).trainer.total_training_steps == 16 // 8 * 15
    assert "trainer.total_epochs -> trainer.total_training_steps = 30" in shown.err
    assert "a run needs the package wandb; trainer.logger=[] leaves it out" in " ".join(shown.err.split())
    quick = [override for override in TINY if override.startswith("driver.")]
    # verl's default logger is wandb, which is not installed here.
    assert main(["train", str(file), "--check", *quick, "trainer.logger=[]"]) == 0
    assert "30 steps" in capsys.readouterr().out
    assert main(["config", "--from-verl", *words, "data.trian_files=x"]) == 1
    assert "did you mean data.train_files?" in capsys.readouterr().err
    assert main(["config", "--from-verl", *words, "--check", "--gpus=8"]) == 2
    assert "--check is an option of verl-fn train" in capsys.readouterr().err
    file.write_text("[trainer]\ntotal_training_steps = '?'\n")
    with pytest.raises(ConfigError, match=r"expected a whole number, got '\?'; --from-verl left it open"):
        load(file)


def test_data_sources_without_a_rule_are_in_the_report(tmp_path, capsys):
    """A plan for another machine is refused by them, even without a tokenizer."""
    table, lines, chats = tmp_path / "train.parquet", tmp_path / "val.jsonl", tmp_path / "chats.parquet"
    prompt = [{"role": "user", "content": "q"}]
    row = {"prompt": prompt, "reward_model": {"ground_truth": "5"}}
    known, unknown = (row | {"data_source": name} for name in ("openai/gsm8k", "math_dapo"))
    pq.write_table(pa.Table.from_pylist([known, unknown]), table)
    rows = [row, [row], *(row | {"data_source": name} for name in ("reverse", "taco"))]
    lines.write_text("".join(json.dumps(one) + "\n" for one in rows))
    pq.write_table(pa.Table.from_pylist([{"messages": prompt, "data_source": "chats"}]), chats)
    files = f"data.train_files=['{table}','{chats}'] data.val_files={lines}"
    words = [*files.split(), "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2",
             "trainer.total_training_steps=2", f"actor_rollout_ref.model.path={tmp_path}/m"]  # fmt: skip
    assert main(["config", "--from-verl", *words]) == 0
    shown = capsys.readouterr()
    refused = "without a rule here: the data sources math_dapo, taco, so a run is refused; name a function"
    assert refused in " ".join(shown.err.split())
    assert main(["config", "--from-verl", *words, "custom_reward_function.path=r.py"]) == 0
    assert "without a rule" not in capsys.readouterr().err
    (tmp_path / "run.toml").write_text(shown.out)
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text((new_model(tmp_path / "n", chars="ab") / "config.json").read_text())
    check = ["train", f"{tmp_path}/run.toml", "--check", "--gpus=8", "--gpu-memory=80", "data.train_batch_size=8",
             f"trainer.dir={tmp_path}/run", "data.max_prompt_length=8", "data.max_response_length=8"]  # fmt: skip
    assert main([*check, "algorithm.ppo_mini_batch_size=8"]) == 1
    assert "'math_dapo' has no rule of its own" in capsys.readouterr().err
    known = ["reward.functions=['verl_fn.scores:exact']", "algorithm.ppo_mini_batch_size=8"]
    assert main([*check, *known]) == 0


def test_a_key_of_verls_in_a_config_is_told_the_key_here():
    known = list(keys())
    for verl, ours in SAME.items():
        assert verl in known or f"did you mean {ours}?" in _advice(verl, known), verl


KWARGS = "custom_reward_function.reward_kwargs."


@pytest.mark.parametrize("start", ["", "reward."])
def test_arguments_of_a_reward_function_reach_it(tmp_path, start):
    file = tmp_path / "r.py"
    file.write_text("async def mine(data_source, solution_str, ground_truth, extra_info, *, alpha, beta): ...\n")
    line = f"{GRPO_LORA} {start}custom_reward_function.path={file} {start}custom_reward_function.name=mine"
    given = f"+{start}{KWARGS}alpha=0.5 +{start}{KWARGS}beta.inner=[a,b]"
    for words in (given, f"+{start}{KWARGS[:-1]}={{alpha:0.5,beta:{{inner:[a,b]}}}}"):
        translation = translated(f"{line} {words}")
        assert translation.complete and translation.table["reward"]["arguments"] == {
            "alpha": 0.5, "beta": {"inner": ["a", "b"]}
        }  # fmt: skip
    unknown = translated(f"{line} +{start}{KWARGS}gamma=1")
    assert f"mine in {file} has no parameter gamma" in unknown.not_possible[0]
    elsewhere = translated(f"{line} {start}custom_reward_function.path=no/r.py {given}")
    assert "no/r.py cannot be read" in " ".join(elsewhere.not_possible) and "arguments" in elsewhere.table["reward"]
    null = translated(f"{line} {given} +{start}{KWARGS}alpha=null")
    assert "cannot pass null on" in " ".join(null.not_possible)
    unused = translated(f"{GRPO_LORA} +{start}{KWARGS}alpha=0.5")
    assert unused.complete and "arguments" not in unused.table.get("reward", {})
    modules = translated(f"{GRPO_LORA} custom_reward_function.path=pkg://my.rewards")
    assert modules.table["reward"]["functions"] == ["my.rewards:compute_score"]


@pytest.mark.parametrize(
    "start",
    [
        "reward_model.overlong_buffer.", "+reward_model.reward_kwargs.overlong_buffer_cfg.",
        "reward.reward_kwargs.overlong_buffer_cfg.",
    ],
)  # fmt: skip
@pytest.mark.parametrize("filtering", [True, False])
def test_the_penalty_of_the_manager_dapo(start, filtering):
    line = f"{GRPO_LORA} reward_model.reward_manager=dapo {start}len=128 {start}penalty_factor=0.5 {start}log=False"
    line += f" reward.reward_kwargs.max_resp_len=1024 algorithm.filter_groups.enable={filtering}"
    cfg = structure(translated(f"{line} {start}enable=True").table)
    buffer, groups = cfg.algorithm.options.overlong_buffer, cfg.algorithm.options.filter_groups
    assert (buffer.len, buffer.penalty_factor, groups.enable) == (128, 0.5, filtering)
    nothing = structure(translated(f"{line} {start}enable=True {start}penalty_factor=0").table)
    assert nothing.algorithm.options.overlong_buffer.penalty_factor == 0.0
    off = translated(f"{line} {start}enable=False")
    assert off.complete and "overlong_buffer" not in off.table["algorithm"]
    longer = translated(f"{line.replace('=1024 algorithm', '=2048 algorithm')} {start}enable=True")
    assert "not at 2048" in longer.not_possible[0]
    critic = translated(f"{PPO} {start}enable=True {start}len=128")
    assert "goes with groups, not with gae" in critic.not_possible[0]


def test_tables_of_the_users_keep_their_inner_keys():
    line = f"{GRPO_LORA} +data.apply_chat_template_kwargs.enable_thinking=False data.truncation=left"
    table = translated(f"{line} data.filter_overlong_prompts=False").table
    assert (
        table["data"]["chat_template_kwargs"] == {"enable_thinking": False} and table["data"]["truncation"] == "left"
    )
    sft = translated(f"{SFT} data.apply_chat_template_kwargs.x=[1,a] data.enable_thinking_default=true")
    assert sft.table["data"]["chat_template_kwargs"] == {"x": [1, "a"], "enable_thinking": True}
    optim = "actor_rollout_ref.actor.optim.override_optimizer_config."
    moved = translated(f"{GRPO_LORA} +{optim}eps=1e-15 +{optim}betas=[0.9,0.95] +{optim}foreach=False")
    assert moved.complete and moved.table["actor"]["optim"] == {"lr": 3e-6, "eps": 1e-15, "betas": [0.9, 0.95]}
    for key, said in (
        (f"{optim}amsgrad=True", "the optimizer is AdamW"),
        ("actor_rollout_ref.model.override_config.max_position_embeddings=32768", "change config.json"),
        ("actor_rollout_ref.ref.model.path=other", "the actor's first state"),
        ("algorithm.rollout_correction.rollout_rs=token_k1", "not rejected by their ratio"),
        ("actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent", "set env.name"),
        ("actor_rollout_ref.rollout.response_length=99", "99 is not data.max_response_length = 1024"),
    ):
        translation = translated(f"{GRPO_LORA} +{key}")
        assert said in " ".join(translation.not_possible) and not translation.unknown


# What verl's scripts for models with images add to the ones for text.
GEO3K = (
    "data.image_key=images actor_rollout_ref.model.use_fused_kernels=True actor_rollout_ref.model.lora_rank=0 "
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True "
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_cache_gb=0"
)


@pytest.mark.parametrize("path", ["Qwen/Qwen2.5-VL-7B-Instruct", "/m/tuned/"])
def test_models_with_images(path):
    words = f"{GRPO_LORA} {GEO3K} actor_rollout_ref.model.path={path}"
    translation = translated(f"{words} actor_rollout_ref.actor.freeze_vision_tower=True")
    assert translation.complete, translation.report()
    assert translation.table["actor"]["freeze_vision_tower"] is True
    assert not any("mm_" in name for name in translation.table["rollout"].get("engine_kwargs", {}))
    adapters = translated(
        f"{words} actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.exclude_modules=.*visual.*"
    )
    assert adapters.complete and adapters.table["actor"]["freeze_vision_tower"] is True
    plain = translated(words)
    assert plain.complete and "freeze_vision_tower" not in plain.table["actor"]
    actor = "actor_rollout_ref.actor"
    sharded = translated(
        f"{words} actor_rollout_ref.model.lora_rank=0 {actor}.strategy=megatron "
        f"{actor}.megatron.tensor_model_parallel_size=2"
    )
    assert sharded.complete and sharded.table["actor"]["strategy"] == "megatron"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("data.image_key=pictures", "rename it"),
        ("+data.video_key=clips", "videos are not read"),
        ("+data.mm_processor_kwargs.max_pixels=9", "preprocessor_config.json"),
        ("actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.exclude_modules=.*head.*",
         "name the layers in target_modules"),
    ],
)  # fmt: skip
def test_what_models_with_images_cannot_do(words, said):
    words = f"{GRPO_LORA} actor_rollout_ref.model.lora_rank=0 {words}"
    assert any(said in line for line in translated(words).not_possible)


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ("actor_rollout_ref.actor.clip_ratio_c=3.0 actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv",
         "actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv"),
        ("actor_rollout_ref.actor.clip_ratio_low=null actor_rollout_ref.actor.clip_ratio_high=null "
         "actor_rollout_ref.actor.clip_ratio=0.3",
         "actor_rollout_ref.actor.clip_ratio_low=0.3 actor_rollout_ref.actor.clip_ratio_high=0.3"),
        ("critic.fsdp.dtype=bfloat16", ""),
        ("actor_rollout_ref.rollout.max_num_batched_tokens=8192 trainer.critic_warmup=0", ""),
        ("algorithm.filter_groups.enable=True algorithm.filter_groups.metric=reward",
         "algorithm.filter_groups.enable=True"),
    ],
)  # fmt: skip
def test_defaults_of_verl_are_values(settings, same):
    both = [translated(f"{line} {words}") for line in (GRPO_LORA,) for words in (settings, same)]
    assert both[0].complete and both[0].table == both[1].table
    clip = structure(both[0].table).algorithm.options.clip_ratio_c
    assert clip == 3.0, "verl's default, for dppo too"


def test_a_critic_has_its_own_dtype():
    critic = structure(translated(f"{PPO} critic.fsdp.dtype=float32").table)
    assert (critic.actor.dtype, critic.critic.dtype) == ("bfloat16", "float32")
    megatron = structure(translated(f"{MEGATRON} actor_rollout_ref.actor.fsdp_config.dtype=float32").table)
    assert megatron.actor.dtype == "bfloat16", "a table of another engine does not count"


def test_a_critic_has_its_own_way_of_counting_a_micro_batch():
    rows = "critic.ppo_micro_batch_size_per_gpu=4"
    for more, budget in (("", 98304), ("critic.use_dynamic_bsz=False", 4 * 8192)):
        critic = structure(translated(f"{PPO} {rows} {more}").table).critic
        assert critic.ppo_max_token_len_per_gpu == budget


def test_a_row_on_several_ranks_shares_their_budget():
    """24000 tokens a GPU hold rows of 8192; on four ranks 2048 are enough, and 2000 are not."""
    actor = "actor_rollout_ref.actor."
    line = f"{PPO} {actor}fsdp_config.ulysses_sequence_parallel_size=4 {actor}ppo_max_token_len_per_gpu="
    for enough in (2048, 4000):
        assert structure(translated(f"{line}{enough}").table).actor.ppo_max_token_len_per_gpu == enough
    raised = translated(f"{line}2000")
    assert structure(raised.table).actor.ppo_max_token_len_per_gpu == 2048
    assert "raised to the longest row, of 8192 tokens on 4 ranks" in " ".join(raised.report().split())
    # 2048 tokens each would not hold the last ones.
    for prompt, budget in ((4097, 2049), (4100, 2049), (4101, 2050)):
        table = translated(f"{line}2000 data.max_prompt_length={prompt} data.max_response_length=4096").table
        assert structure(table).actor.ppo_max_token_len_per_gpu == budget


@pytest.mark.parametrize(
    ("words", "ratio"),
    [
        ("min_lr_ratio=0.2", 0.2),
        ("min_lr=2e-7", 0.2),
        ("min_lr=0.0 +actor_rollout_ref.actor.optim.min_lr_ratio=0.2", 0.2),
    ],
)
def test_the_lowest_learning_rate_is_a_share_or_a_rate(words, ratio):
    optim = "actor_rollout_ref.actor.optim."
    line = f"{PPO} {optim}lr_scheduler_type=cosine {optim}lr=1e-6"
    assert structure(translated(f"{line} {optim}{words}").table).actor.optim.min_lr_ratio == pytest.approx(ratio)
    both = translated(f"{line} {optim}min_lr=1e-7 {optim}min_lr_ratio=0.2")
    assert "two lowest learning rates" in both.not_possible[0]


def verls_rate(step, total, warmup, lr, lowest):
    """verl's cosine at a step of its scheduler, which is stepped once in each step that updates the actor."""
    if step < warmup:
        return lr * step / max(1, warmup)
    progress = (step - warmup) / max(1, total - warmup)
    return lr * ((1 + lowest) / 2 + (1 - lowest) / 2 * math.cos(math.pi * progress))


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize("late", [0, 1, 3])
def test_the_schedule_of_an_actor_that_learns_late_is_verls(late, warmup):
    """verl's schedule falls over all 20 steps; an actor that waits for the critic takes only the first ones of them.

    verl's steps count from 1, and the actor learns from step ``critic_warmup`` on.
    """
    optim = "actor_rollout_ref.actor.optim."
    line = f"{PPO} trainer.total_training_steps=20 trainer.critic_warmup={late} {optim}lr_scheduler_type=cosine "
    line += f"{optim}min_lr_ratio=0.1 {optim}lr_warmup_steps={warmup} data.train_batch_size=512"
    role = make_plan(structure(translated(line).table)).roles["actor"]
    schedule = build.optimizer(role.optim, role.total_updates).parts[1].schedule
    learns = sum(late <= step for step in range(1, 21))
    assert role.total_updates == learns
    rates = [schedule(count) for count in range(role.total_updates)]
    assert rates == pytest.approx([verls_rate(step, 20, warmup, 1e-6, 0.1) for step in range(learns)])


@pytest.mark.parametrize(("late", "complete"), [(0, True), (1, True), (2, False)])
def test_an_actor_that_waits_without_a_critic_is_refused(late, complete):
    """verl's actor learns from step ``critic_warmup`` on, whether there is a critic or not."""
    found = translated(f"{GRPO_LORA} trainer.critic_warmup={late}")
    assert found.complete == complete
    waits = "learns from step 2 on, and without a critic there is no such wait; set it to 0"
    assert complete or waits in " ".join(found.not_possible)
    assert translated(f"{PPO} trainer.critic_warmup={late}").complete


def test_megatrons_optimizer_leaves_biases_and_norms_out_of_weight_decay():
    tensors = {"norm.weight": torch.zeros(3), "q.bias": torch.zeros(3), "q.weight": torch.zeros(3, 3)}
    for line, decayed in ((MEGATRON, {"q.weight"}), (PPO, set(tensors))):
        plan = make_plan(structure(translated(line).table))
        for role in ("actor", "critic"):
            adamw = build.optimizer(plan.roles[role].optim, 1).parts[1]
            mask = adamw.weight_decay_mask or (lambda name, tensor: True)
            assert adamw.weight_decay == 0.01 and {name for name, t in tensors.items() if mask(name, t)} == decayed


@pytest.mark.parametrize(
    "words", ["trainer.nnodes=x", "data.train_batch_size=0", "trainer.n_gpus_per_node=", "algorithm.lam=7",
              "actor_rollout_ref.actor.optim.lr=fast", "actor_rollout_ref.rollout.dtype=float16",
              "actor_rollout_ref.rollout.n=1"],
)  # fmt: skip
def test_values_that_cannot_be_used_are_named(words):
    line = PPO if "lam" in words else GRPO_LORA
    translation = translated(f"{line} {words}")
    assert any(words.partition("=")[0] in line for line in translation.not_possible), translation.report()
