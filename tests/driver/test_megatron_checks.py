"""Layouts of Megatron are checked before anything starts."""

import importlib.util

import pytest
from run_configs import tiny_run

from verl_fn import build
from verl_fn.backends import megatron as backend
from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.hf.ulysses import LayoutError
from verl_fn.backends.megatron.importing import about
from verl_fn.config import ConfigError, load, make_plan
from verl_fn.runs.check_run import check_run
from verl_fn.runs.checks import check_all_weights, check_ranks

INSTALLED = all(importlib.util.find_spec(name) for name in ("megatron", "megatron.bridge"))
SIZES = "actor.megatron"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("model"), chars="abcd", hidden_size=16)


def checked(model, ranks, *overrides):
    over = ["driver.kind=ray", f"ray.ranks={ranks}", "actor.strategy=megatron"]
    check_ranks(make_plan(load(overrides=[f"model.path={model}", *over, *overrides])))


@pytest.mark.skipif(not INSTALLED, reason="megatron-core and megatron-bridge are not installed")
@pytest.mark.parametrize(
    ("ranks", "overrides", "message"),
    [
        (4, [f"{SIZES}.tensor_model_parallel_size=3"], "tp x pp x cp = 3 does not divide the 4 ranks"),
        (4, [f"{SIZES}.tensor_model_parallel_size=4"], "tp = 4 does not divide the model's 2 key-value heads"),
        (3, [f"{SIZES}.pipeline_model_parallel_size=3"], "pp = 3 does not divide the model's 2 layers"),
        (2, [f"{SIZES}.expert_model_parallel_size=2"], "the model has no experts"),
        (
            4,
            [f"{SIZES}.pipeline_model_parallel_size=2", f"{SIZES}.expert_model_parallel_size=4"],
            "ep = 4 does not divide the 2 ranks of a pipeline stage",
        ),
        (2, ["actor.router_replay.mode=R2"], "actor.router_replay.mode needs a model with experts, and .* has none"),
        (
            2,
            ["actor.lora_rank=3", f"{SIZES}.tensor_model_parallel_size=2"],
            "actor.lora_rank = 3 must be a multiple of actor.megatron.tensor_model_parallel_size = 2",
        ),
        (
            2,
            [f"{SIZES}.use_megatron_fsdp=true", f"{SIZES}.pipeline_model_parallel_size=2"],
            "no pipeline parallelism",
        ),
        (2, [f"{SIZES}.use_megatron_fsdp=true", "actor.lora_rank=4"], "was not tried with adapters"),
    ],
)
def test_what_does_not_fit_is_refused(model, ranks, overrides, message):
    with pytest.raises(ConfigError, match=message):
        checked(model, ranks, *overrides)


@pytest.mark.skipif(not INSTALLED, reason="megatron-core and megatron-bridge are not installed")
@pytest.mark.skipif(not INSTALLED, reason="megatron-core and megatron-bridge are not installed")
def test_what_models_with_images_cannot_do_is_refused_before_a_run(tmp_path):
    folder = new_model(tmp_path / "m", chars="abcd", arch="qwen2_5_vl")

    def plan(*more):
        settings = ["driver.kind=ray", "ray.ranks=2", "actor.strategy=megatron", "algorithm.name=grpo", "rollout.n=2"]
        return make_plan(load(overrides=[f"model.path={folder}", *settings, *more]))

    check_all_weights(plan())
    check_all_weights(plan("actor.lora_rank=4", "actor.freeze_vision_tower=true"))
    with pytest.raises(ModelError, match=r"no adapters for its tower.*freeze_vision_tower=true"):
        check_all_weights(plan("actor.lora_rank=4"))
    with pytest.raises(LayoutError, match="set pp to 1"):
        check_all_weights(plan(f"{SIZES}.pipeline_model_parallel_size=2"))


def test_what_fits_is_accepted(model):
    checked(model, 4, f"{SIZES}.tensor_model_parallel_size=2", f"{SIZES}.sequence_parallel=true", "actor.lora_rank=4")


@pytest.mark.skipif(not INSTALLED, reason="megatron-core and megatron-bridge are not installed")
@pytest.mark.parametrize("strategy", ["megatron", "fsdp"])
def test_versions_and_folders_are_logged_where_they_are_used(model, strategy, capsys):
    plan = make_plan(load(overrides=[f"model.path={model}", f"actor.strategy={strategy}"]))
    build.log_libraries(tuple(plan.roles.values()))
    expected = [f"{name} {place}" for name, place in about().items()] if strategy == "megatron" else []
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.skipif(INSTALLED, reason="megatron-core and megatron-bridge are installed")
def test_a_missing_package_is_named(model):
    with pytest.raises(
        ConfigError, match=r"actor.strategy is megatron: .*(there is no package megatron|Python 3.12)"
    ):
        checked(model, 1)


@pytest.mark.skipif(not INSTALLED, reason="megatron-core and megatron-bridge are not installed")
def test_a_check_names_megatron_fsdp(tiny, tmp_path):
    report = check_run(tiny_run(tiny, tmp_path, "actor.strategy=megatron", f"{SIZES}.use_megatron_fsdp=true"))
    assert "Megatron-FSDP over 1 ranks" in report.text


@pytest.mark.skipif(not INSTALLED, reason="megatron-core and megatron-bridge are not installed")
def test_a_check_says_that_megatrons_optimizer_computes_updates(tiny, tmp_path):
    for optimizer in ("verl_fn", "megatron"):
        report = check_run(tiny_run(tiny, tmp_path, "actor.strategy=megatron", f"{SIZES}.optimizer={optimizer}"))
        lines = {line.split()[0]: line for line in report.text.splitlines()}
        for role in ("actor", "critic"):
            assert ("by Megatron's own distributed optimizer" in lines[role]) == (optimizer == "megatron")


@pytest.mark.skipif(not INSTALLED, reason="megatron-core and megatron-bridge are not installed")
def test_who_computes_updates_reaches_the_backend(model, monkeypatch):
    made = {}
    monkeypatch.setattr(backend, "Megatron", lambda *args, **options: made.update(options))
    plan = make_plan(
        load(overrides=[f"model.path={model}", "actor.strategy=megatron", f"{SIZES}.optimizer=megatron"])
    )
    build.trainer(plan.roles["actor"], plan.driver, "cpu")
    assert made["updates_by"] == "megatron"


def test_other_optimizers_are_refused():
    with pytest.raises(ConfigError, match=r"actor\.megatron\.optimizer"):
        load(overrides=[f"{SIZES}.optimizer=apex"])
