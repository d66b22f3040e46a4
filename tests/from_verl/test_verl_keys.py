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
