"""Every key of verl's own config files and classes, with its default and with another value.

``verl_keys.json`` has the keys and defaults, with their source, and which keys are expected to be translated or
refused if their value is another one; all others have no effect. A key with a new rule joins one of the two lists.
"""

import json
from functools import cache
from pathlib import Path

import pytest

from verl_fn.backends.megatron.fidelity import DECIDED, IMPURE, OF_FOLDER
from verl_fn.backends.vllm.arguments import KEPT
from verl_fn.config import structure, to_table
from verl_fn.config.load import flat
from verl_fn.from_verl import translate
from verl_fn.from_verl.keys import ENGINE_ARGUMENTS, PROVIDER_FIELDS
from verl_fn.from_verl.reading import Settings, _resolved

VERL = json.loads(Path(__file__).with_name("verl_keys.json").read_text())
KINDS = {
    "gae": ({}, False, "fsdp"),
    "grpo": ({"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 2}, False, "fsdp"),
    "megatron": ({}, False, "megatron"),
    "sft": ({}, True, "fsdp"),
    "sft_megatron": ({}, True, "megatron"),
}
# Their values come from another key, or differ only where another key does.
SAME_TABLE = {
    "actor_rollout_ref.rollout.tensor_model_parallel_size", "actor_rollout_ref.rollout.val_kwargs.n",
    "actor_rollout_ref.actor.megatron.sequence_parallel", "critic.megatron.sequence_parallel",
    "engine.fsdp_size", "engine.sequence_parallel",
}  # fmt: skip


# Without these, the keys have no effect here.
VALIDATION = "actor_rollout_ref.rollout.val_kwargs"
DRAWN, HELD_OUT = (
    {f"{VALIDATION}.do_sample": True, f"{VALIDATION}.temperature": 0.5},
    {"data.val_files": ["v.parquet"]},
)
NEEDS = {
    **dict.fromkeys((f"{VALIDATION}.top_k", f"{VALIDATION}.top_p"), DRAWN),
    **dict.fromkeys(("trainer.test_freq", "data.val_max_samples"), HELD_OUT),
}


@cache
def defaults(kind):
    """Returns verl's keys with their defaults, references replaced."""
    if kind.startswith("sft"):
        keys = flat(VERL[kind])
    else:
        keys = flat(VERL["ppo"]) | flat(VERL["ppo_classes"])
        if kind == "megatron":
            keys = {key: value for key, value in keys.items() if key not in VERL["ppo_megatron_without"]}
            keys |= flat(VERL["ppo_megatron"]) | flat(VERL["ppo_megatron_classes"])
    return _resolved({key: value for key, value in keys.items() if value != "???"}, {})


def translated(kind, values):
    base, sft, engine = KINDS[kind]
    base = base | {"trainer.total_training_steps": 8}
    return translate(Settings(values | base, sft, engine), lambda files: 7473)


def another(value):
    match value:
        case bool():
            return not value
        case int():
            return value + 2 if value > 0 else 3
        case float():
            return value / 2 if value else 0.5
        case list():
            return ["other"]
    return "other"


@pytest.mark.parametrize("kind", KINDS)
def test_a_default_of_verl_written_out_is_the_same_as_left_out(kind):
    """A dump of verl's whole config, as Hydra writes it beside each run, is a translation of nothing."""
    whole = translated(kind, defaults(kind))
    assert whole.complete, whole.report()
    assert whole.table == translated(kind, {}).table
    named = whole.report().replace(",", " ").replace(":", " ").split()
    assert not set(defaults(kind)) - set(named) - set(KINDS[kind][0])


@pytest.mark.parametrize("kind", ["gae", "megatron", "sft", "sft_megatron"])
def test_another_value_of_each_key_is_translated_without_effect_or_refused(kind):
    changed = {key: another(value) for key, value in defaults(kind).items()}
    changed.pop("trainer.total_training_steps")
    plain, before = translated(kind, {}), VERL["expected"]["gae"] if kind == "megatron" else {}
    moved, refused = (VERL["expected"][kind][group] for group in ("translated", "refused"))
    others = {key: value for key, value in changed.items() if key not in {*moved, *refused}}
    # Without it, the rows of a micro-batch would count.
    others.pop("data.use_dynamic_bsz", None)
    without = translated(kind, others)
    assert without.complete and without.table == plain.table
    assert {key for keys in without.without_effect.values() for key in keys} == set(others)
    for key in set(refused) - set(before.get("refused", ())):
        lines = translated(kind, {key: changed[key]}).not_possible
        assert len(lines) == 1 and key in lines[0], key
    for key in set(moved) - set(before.get("translated", ())):
        needs = NEEDS.get(key, {})
        translation = translated(kind, needs | {key: changed[key]})
        beside = translated(kind, needs) if needs else plain
        assert translation.complete and any(key in line for line in translation.translated), key
        assert (translation.table != beside.table) is (key not in SAME_TABLE), key


def test_what_backends_and_engines_refuse_is_refused():
    assert set(PROVIDER_FIELDS) == DECIDED | OF_FOLDER | IMPURE.keys() and set(KEPT) == ENGINE_ARGUMENTS
    kept = translated("gae", {"actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.rope_theta": 1})
    assert "hf_overrides.rope_theta: the engine decides it" in kept.not_possible[0]
    for length, complete in ((1024, True), (1023, False), ("x", False)):
        key = "actor_rollout_ref.rollout.engine_kwargs.vllm.max_model_len"
        assert translated("gae", {key: length}).complete is complete
    start = "actor_rollout_ref.actor.megatron.override_transformer_config."
    allowed = {"moe_aux_loss_coeff": 0.1, "attention_backend": "auto", "recompute_modules": ["core_attn"]}
    translation = translated("megatron", {start + name: value for name, value in allowed.items()})
    table = translation.table["actor"]["megatron"]["override_transformer_config"]
    assert translation.complete and table == {"moe_aux_loss_coeff": 0.1}
    for name in PROVIDER_FIELDS:
        lines = translated("megatron", {start + name: 1}).not_possible
        assert len(lines) == 1 and name in lines[0] and "remove it" in lines[0]


ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
PARALLEL = "megatron.tensor_model_parallel_size"
BUDGET = "ppo_max_token_len_per_gpu"


@pytest.mark.parametrize(
    ("kind", "actors", "critics", "values", "ours", "expected"),
    [
        ("gae", "optim.lr", "optim.lr", (1e-3, 1e-4), "optim.lr", (1e-3, 1e-4)),
        ("gae", "optim.clip_grad", "optim.clip_grad", (0.1, 0.3), "optim.clip_grad", (0.1, 0.3)),
        ("gae", "grad_clip", "grad_clip", (0.1, 0.3), "optim.clip_grad", (0.1, 0.3)),
        ("gae", "optim.lr_decay_steps", "optim.lr_decay_steps", (5, 7), "optim.lr_decay_steps", (20, 28)),
        ("gae", "optim.lr_warmup_steps", "optim.lr_warmup_steps", (2, 3), "optim.lr_warmup_steps", (8, 12)),
        ("gae", "optim.lr_warmup_steps_ratio", "optim.lr_warmup_steps_ratio", (0.5, 0.75), "optim.lr_warmup_steps",
         (16, 24)),
        ("gae", "optim.min_lr_ratio", "optim.min_lr_ratio", (0.1, 0.3), "optim.min_lr_ratio", (0.1, 0.3)),
        ("gae", "optim.min_lr", "optim.min_lr", (5e-7, 2.5e-6), "optim.min_lr_ratio", (0.5, 0.25)),
        ("gae", BUDGET, BUDGET, (9001, 9003), BUDGET, (9001, 9003)),
        ("gae", "fsdp_config.fsdp_size", "fsdp.fsdp_size", (2, 4), "fsdp_config.replicate", (4, 2)),
        ("gae", "fsdp_config.fsdp_size", "fsdp.fsdp_size", (8, 16), "fsdp_config.replicate", (1, 1)),
        ("gae", "fsdp_config.dtype", "fsdp.dtype", ("float32", "bfloat16"), "dtype", ("float32", "bfloat16")),
        ("gae", "fsdp_config.dtype", "fsdp.dtype", ("bfloat16", "float32"), "dtype", ("bfloat16", "float32")),
        ("megatron", "megatron.dtype", "megatron.dtype", ("fp32", "bf16"), "dtype", ("float32", "bfloat16")),
        ("megatron", PARALLEL, PARALLEL, (1, 2), "megatron.sequence_parallel", (False, True)),
        ("megatron", PARALLEL, PARALLEL, (2, 1), "megatron.sequence_parallel", (True, False)),
        ("gae", "strategy", "strategy", ("fsdp", "megatron"), "strategy", ("fsdp", "megatron")),
        ("gae", "strategy", "strategy", ("megatron", "fsdp2"), "strategy", ("megatron", "fsdp")),
    ],
)  # fmt: skip
def test_actor_and_critic_have_the_values_of_their_own_keys(kind, actors, critics, values, ours, expected):
    """Eight steps of four updates each, on eight ranks."""
    run = {f"{ACTOR}optim.lr_scheduler_type": "cosine", "critic.optim.lr_scheduler_type": "linear"}
    run |= {"data.train_batch_size": 1024, "trainer.n_gpus_per_node": 8, "critic.optim.lr": 1e-5}
    found = translated(kind, run | {ACTOR + actors: values[0], f"critic.{critics}": values[1]})
    table = flat(to_table(structure(found.table)))
    assert found.complete and tuple(table[f"{role}.{ours}"] for role in ("actor", "critic")) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"top_k": 0}, {"top_k": -1, "val_kwargs.top_k": -1}),
        ({"top_k": 5, "val_kwargs.top_k": 0}, {"top_k": 5, "val_kwargs.top_k": -1}),
        ({"val_kwargs.top_k": 7, "val_kwargs.temperature": 0.5}, {"top_k": -1, "val_kwargs.top_k": 7}),
        ({"val_kwargs.n": 4}, {"val_kwargs.n": 1}),
        ({"val_kwargs.n": 4, "val_kwargs.temperature": 0.5}, {"val_kwargs.n": 4, "n": 1}),
        ({"nnodes": 0}, {"engines": 8, "placement": "colocated", "tensor_parallel_size": 1}),
        ({"nnodes": 1, "n_gpus_per_node": 6}, {"engines": 3, "placement": "apart", "tensor_parallel_size": 2}),
        ({"nnodes": 2, "n_gpus_per_node": 8}, {"engines": 8, "placement": "apart", "tensor_parallel_size": 2}),
        ({"nnodes": 1, "n_gpus_per_node": 1}, {"engines": 1, "placement": "apart", "tensor_parallel_size": 2}),
    ],
)
def test_sampling_and_engines_have_their_own_keys(values, expected):
    run = {"trainer.n_gpus_per_node": 8, f"{ROLLOUT}tensor_model_parallel_size": 2}
    found = translated("gae", run | {ROLLOUT + name: value for name, value in values.items()})
    table = flat(to_table(structure(found.table)))
    assert found.complete and {name: table[f"rollout.{name}"] for name in expected} == expected


@pytest.mark.parametrize("place", ["fsdp_config", "megatron"])
@pytest.mark.parametrize("what", ["param", "optimizer"])
def test_each_offload_of_the_actor_counts_if_the_engine_frees_its_memory(place, what):
    asked = {f"{ACTOR}{place}.{what}_offload": True}
    assert translated("gae", asked).table["rollout"]["offload_trainer"] is True
    kept = translated("gae", {f"{ROLLOUT}free_cache_engine": False, **asked})
    assert kept.complete and "offload_trainer" not in kept.table["rollout"]


@pytest.mark.parametrize(
    ("name", "length", "complete"),
    [
        *(("prompt_length", length, length == 512) for length in (511, 512, 513)),
        *(("response_length", length, length == 100) for length in (99, 100, 101)),
        *(("max_model_len", length, length >= 612) for length in (611, 612, 613)),
    ],
)
def test_lengths_of_the_engine_are_the_ones_of_the_data(name, length, complete):
    lengths = {"data.max_prompt_length": 512, "data.max_response_length": 100}
    assert translated("gae", {**lengths, ROLLOUT + name: length}).complete is complete


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"trainer.save_freq": 5}, {"max_ckpt_to_keep": 1_000_000}),
        ({"trainer.save_freq": -1}, {"max_ckpt_to_keep": 2}),
        ({"trainer.max_actor_ckpt_to_keep": 3, "trainer.save_freq": -1}, {"max_ckpt_to_keep": 3}),
        ({"trainer.resume_mode": "resume_path"}, {"resume_mode": "auto", "resume_from_path": "x"}),
        ({"trainer.resume_mode": "disable"}, {"resume_mode": "disable", "resume_from_path": None}),
        ({"trainer.logger": "tensorboard"}, {"logger": ("tensorboard",)}),
        ({"trainer.logger": ["console", "mlflow", "wandb"]}, {"logger": ("wandb",)}),
    ],
)
def test_checkpoints_and_loggers(values, expected):
    found = translated("gae", {"trainer.resume_from_path": "x", **values})
    trainer = structure(found.table).trainer
    assert found.complete and {name: getattr(trainer, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("metric", "more", "expected"),
    [
        ("acc", (), "acc"),
        ("acc", ("penalty", "kl"), "acc"),
        ("reward", ("penalty", "kl"), "score"),
        ("seq_reward", ("kl",), "score"),
        ("seq_reward", ("penalty",), None),
        ("seq_final_reward", (), "score"),
        ("seq_final_reward", ("kl",), None),
        ("seq_final_reward", ("penalty",), None),
    ],
)
def test_groups_differ_before_penalties(metric, more, expected):
    penalty = "reward.reward_kwargs.overlong_buffer_cfg."
    values = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": metric}
    values |= {f"{penalty}enable": True, f"{penalty}len": 3} if "penalty" in more else {}
    values |= {"algorithm.use_kl_in_reward": "kl" in more}
    found = translated("grpo", values)
    assert found.complete is (expected is not None)
    if expected:
        options = structure(found.table).algorithm.options
        assert options.filter_groups.metric == expected
        penalized = (options.overlong_buffer.len, options.overlong_buffer.penalty_factor)
        assert penalized == (3 * ("penalty" in more), 1.0)


@pytest.mark.parametrize(
    ("most", "drawn", "expected"),
    [(3, 100, 5), (3, 64, 3), (3, 65, 4), (3, 32, 3), (2, 128, 4), (1, None, 1), (0, 128, 10), (-1, 128, 10)],
)
def test_calls_for_samples_are_counted_in_batches_of_prompts(most, drawn, expected):
    start = "algorithm.filter_groups."
    values = {f"{start}enable": True, f"{start}max_num_gen_batches": most, "data.gen_batch_size": drawn}
    found = translated("grpo", {**values, "data.train_batch_size": 64, f"{ACTOR}ppo_mini_batch_size": 64})
    assert structure(found.table).algorithm.options.filter_groups.max_num_gen_batches == expected


@pytest.mark.parametrize(("kind", "enabled", "complete"), [
    ("gae", True, True), ("gae", False, False), ("gae", None, True),
    ("grpo", True, False), ("grpo", False, True), ("grpo", None, True),
])  # fmt: skip
def test_a_critic_that_is_asked_for_is_the_estimators(kind, enabled, complete):
    assert translated(kind, {"critic.enable": enabled}).complete is complete
