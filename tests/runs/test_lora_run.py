"""Whole LoRA runs: the KL to a reference that is no second model, exact resume, both drivers, and the exports."""

import random
import shutil

import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from test_train import config, files, model, numbers  # noqa: F401

from verl_fn.cli import main
from verl_fn.config import load, make_plan
from verl_fn.runs import RunError
from verl_fn.runs.continuing import changes
from verl_fn.runs.folder import Run
from verl_fn.runs.loop import train
from verl_fn.runs.prepare import prepare, workers

LORA = ["actor.lora_rank=8", "actor.lora_alpha=32", "algorithm.use_kl_loss=true"]
QUIET = lambda line: None  # noqa: E731


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_resumed_lora_run_is_the_uninterrupted_run(algorithm, model, tmp_path):  # noqa: F811
    """No role for the reference; the first update sees a KL of 0, later ones more; stopped and continued bitwise."""
    steps, more = (
        4,
        [*LORA, "algorithm.ppo_mini_batch_size=8", "algorithm.ppo_epochs=1", "algorithm.use_kl_in_reward=true"],
    )
    if algorithm == "ppo":
        more += ["critic.lora_rank=2", 'critic.target_modules=["q_proj", "v_proj"]', "algorithm.critic_warmup=0"]
    cfg = config(model, tmp_path / "whole", algorithm, *more, f"trainer.total_training_steps={steps}")
    train(cfg, QUIET)
    whole = numbers(tmp_path / "whole")
    assert [row["actor/kl_loss"] for row in whole if row["step"] == 1] == [0.0]
    assert [row["actor/reward_kl_penalty"] for row in whole if row["step"] == 1] == [0.0]
    for row in whole[2:]:
        assert row["actor/kl_loss"] > 0.0 and row["training/rollout_probs_diff_max"] < 1e-4
        assert row["perf/residency_copies/actor"] == 0.0
    roles = {path.name for path in (tmp_path / "whole/checkpoints/step_4").iterdir()}
    assert roles == {"actor", "checkpoint.json"} | ({"critic"} if algorithm == "ppo" else set())
    stop = random.Random(algorithm).randint(1, steps - 1)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed", symlinks=True)
    for step in range(stop + 1, steps + 1):
        shutil.rmtree(tmp_path / "resumed" / "checkpoints" / f"step_{step}")
    train(config(model, tmp_path / "resumed", algorithm, *more, f"trainer.total_training_steps={steps}"), QUIET)
    assert numbers(tmp_path / "resumed") == whole
    ours, theirs = (files(tmp_path / name / "checkpoints" / f"step_{steps}") for name in ("resumed", "whole"))
    assert ours.keys() == theirs.keys() and [name for name in ours if ours[name] != theirs[name]] == []


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):  # noqa: F811
    """A finished LoRA run of supervised fine-tuning."""
    folder = tmp_path_factory.mktemp("run") / "sft"
    train(config(model, folder, "sft", "actor.lora_rank=4", "trainer.total_training_steps=2"), QUIET)
    return folder


@pytest.mark.parametrize("more", [["actor.lora_rank=2"], ["actor.lora_rank=0"], ["actor.lora_alpha=1"]], ids=str)
def test_adapters_of_a_continued_run_cannot_change(run, model, more):  # noqa: F811
    cfg = config(model, run, "sft", "actor.lora_rank=4", "trainer.total_training_steps=3", *more)
    with pytest.raises(
        RunError, match=r"actor\.lora_.* cannot change in a run that is continued .*merged model is in"
    ):
        train(cfg, QUIET)


def test_adapters_come_up_only_where_some_role_has_them(tmp_path):
    def continued(algorithm, *more):
        options = [f"trainer.dir={tmp_path}", f"algorithm.name={algorithm}", "rollout.n=2", *more]
        plan = make_plan(load(overrides=options))
        return Run(plan), plan

    _, before = continued("grpo")
    (tmp_path / "config.toml").write_text(tomli_w.dumps(before.table))
    (tmp_path / "checkpoints/step_1").mkdir(parents=True)
    lines = changes(*continued("grpo", "actor.lora_alpha=32", "critic.lora_rank=3"))
    assert "actor.lora_alpha" in lines[0] and "critic.lora_rank" in lines[1]
    with pytest.raises(
        RunError, match=r"actor.lora_rank .*\(0 -> 4\): the state is without adapters.*actor's model is"
    ):
        changes(*continued("grpo", "actor.lora_rank=4"))
    _, before = continued("grpo", "actor.lora_rank=4")
    (tmp_path / "config.toml").write_text(tomli_w.dumps(before.table))
    with pytest.raises(RunError, match=r"actor.target_modules cannot change .*the state holds the adapters"):
        changes(*continued("grpo", "actor.lora_rank=4", "actor.target_modules=q_proj"))


def test_a_base_that_another_run_may_remove_is_noted(run, model, tmp_path):  # noqa: F811
    def notes(base, lora):
        lines = []
        prepare(config(base, tmp_path / "b", "sft", f"actor.lora_rank={lora}"), lines.append)
        return [line for line in lines if "goes on" in line]

    base = run / "model"
    told = f"note: {base.resolve()}, the base of the adapters, lies in the run {run}, which removes it if it goes on"
    assert notes(base, 2)[0].startswith(told)
    assert notes(model, 2) == notes(base, 0) == []


def test_a_fork_with_other_adapters_is_refused_in_one_line(run, capsys):
    assert main(["fork", str(run), "--step", "1", "actor.lora_rank=2", "--quiet"]) == 1
    assert "with LoRA of rank 4, alpha 16, on all-linear" in capsys.readouterr().err


def test_exports_of_a_run(run, model, tmp_path, capsys):  # noqa: F811
    """The base with the exported adapter is the exported merged model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    assert main(["export", str(run), str(tmp_path / "merged")]) == 0
    assert main(["export", str(run), str(tmp_path / "adapter"), "--adapter"]) == 0
    load = lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()  # noqa: E731
    base, ids = load(model), torch.arange(4, 10)[None]
    with torch.no_grad():
        before, merged = base(input_ids=ids).logits, load(tmp_path / "merged")(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(input_ids=ids).logits
    assert (adapted - merged).abs().max() < 1e-5 and (adapted - before).abs().max() > 1e-3
    for kind in ([], ["--adapter"]):
        out = tmp_path / f"half{len(kind)}"
        assert main(["export", str(run), str(out), *kind, "--dtype", "bfloat16"]) == 0
        tensors = [tensor for file in out.glob("*.safetensors") for tensor in load_file(file).values()]
        assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    capsys.readouterr()
    assert main(["export", str(model), str(tmp_path / "none"), "--adapter"]) == 2
    assert "has no adapters" in capsys.readouterr().err


def test_targets_that_match_nothing_end_a_run_in_one_line(model, tmp_path, capsys):  # noqa: F811
    file = tmp_path / "a.toml"
    file.write_text(f'[model]\npath = "{model}"\n[trainer]\ndir = "{tmp_path / "run"}"\n')
    assert main(["train", str(file), "actor.lora_rank=8", 'actor.target_modules=["wq"]', "data.val_size=8"]) == 1
    assert "target_modules names 'wq'" in capsys.readouterr().err


@pytest.mark.slow
def test_ray_and_ranks_give_the_same_lora_run(warm_ray, model, tmp_path):  # noqa: F811
    """Through handles the reference is the actor's base too: one rank bitwise, two sharded ones up to rounding."""
    pytest.importorskip("ray")
    from verl_fn.driver.ray import connected

    said = []
    # Both runs of Ray's driver on one cluster, since one takes seconds to start.
    with connected(load(overrides=[warm_ray]).ray):
        for name, more in {
            "local": [],
            "ray": ["driver.kind=ray"],
            "two": ["driver.kind=ray", "ray.ranks=2", "actor.strategy=fsdp"],
        }.items():
            train(config(model, tmp_path / name, "grpo", *LORA, *more, "trainer.total_training_steps=2"), said.append)
    sizes = [line for line in said if line.startswith("actor trains")]
    base = sum(t.numel() for t in load_file(model / "model.safetensors").values())
    moments = load_file(tmp_path / "two/checkpoints/step_2/actor/train_state.safetensors")
    added = sum(t.numel() for name, t in moments.items() if name.startswith(".optimizer[1].exp_avg["))
    assert sizes == 3 * [f"actor trains {added:,} of {base + added:,} parameters ({added / (base + added):.2%})"]
    assert numbers(tmp_path / "ray") == numbers(tmp_path / "local")
    for one, other in zip(numbers(tmp_path / "two"), numbers(tmp_path / "local"), strict=True):
        for key, value in one.items():
            assert value == pytest.approx(other[key], rel=1e-3, abs=1e-5), key
    with workers(config(model, tmp_path / "local", "grpo", *LORA)) as w:
        assert list(w.trainers) == ["actor"]
        held = w.trainers["actor"].restore(tmp_path / "two" / "checkpoints" / "step_2" / "actor")
    assert held.step == 8 and held.params.trainable is not None
