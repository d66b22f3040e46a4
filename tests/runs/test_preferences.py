"""Runs that learn from preferences: two steps of every loss, resume, evaluation, files, and what cannot be used."""

import json
import shutil

import pytest
from run_configs import tiny_run

from verl_fn.cli import main
from verl_fn.config import ConfigError
from verl_fn.config.algorithms import LOSS_TYPES
from verl_fn.data.rows import DataError
from verl_fn.runs.logs import read_metrics
from verl_fn.runs.loop import train
from verl_fn.runs.prepare import prepare

TIMED = ("timing_s/", "perf/time_per_step", "perf/throughput")


def silent(line):
    pass


def plan(model, folder, name, *more):
    steps = ["trainer.total_training_steps=2", "trainer.val_before_train=false"]
    return tiny_run(model, folder, f"algorithm.name={name}", *steps, *more)


def numbers(folder):
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in read_metrics(folder)]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_takes_steps_and_reports(loss_type, tiny, tmp_path):
    report = train(plan(tiny, tmp_path, "dpo", f"algorithm.loss_type={loss_type}"), silent)
    assert 0 <= report["val-aux/reverse/preference/mean@1"] <= 1 and "val-core/reverse/acc/mean@1" in report
    rows = [row for row in read_metrics(tmp_path) if row["step"] > 0]
    assert len(rows) == 2 and all(row["train/grad_norm"] > 0 for row in rows)
    first = rows[0]
    assert f"{loss_type}/loss" in first and "rewards/chosen" in first
    if loss_type in ("dpo", "kto"):
        # The policy is still its own reference.
        assert first["rewards/chosen"] == pytest.approx(0.0, abs=1e-5)
        assert rows[1]["rewards/chosen"] != 0.0
    assert ("kto/reference_point" in first) == (loss_type == "kto")


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_a_run_goes_on_from_its_checkpoint_bitwise(name, tiny, tmp_path):
    train(plan(tiny, tmp_path / "whole", name), silent)
    train(plan(tiny, tmp_path / "parts", name, "trainer.total_training_steps=1"), silent)
    train(plan(tiny, tmp_path / "parts", name), silent)
    whole, parts = (numbers(tmp_path / folder)[-1] for folder in ("whole", "parts"))
    assert parts == whole


def test_dpo_with_adapters_takes_the_frozen_base_as_reference(tiny, tmp_path):
    dpo = plan(tiny, tmp_path, "dpo", "actor.lora_rank=2")
    assert list(dpo.roles) == ["actor"] and dpo.copies == {"reference": "actor"}
    train(dpo, silent)
    assert numbers(tmp_path)[0]["rewards/chosen"] == pytest.approx(0.0, abs=1e-5)


def test_a_reward_model_is_evaluated_by_pairs_and_has_the_actors_settings(tiny, tmp_path, capsys):
    run = plan(tiny, tmp_path / "run", "reward_model", "actor.optim.lr=3e-3")
    assert (run.roles["actor"].table, run.roles["actor"].head, run.roles["actor"].optim.lr) == (
        "actor",
        "value",
        3e-3,
    )
    report = train(run, silent)
    assert set(report) == {"val/loss", "val-core/reverse/acc/mean@1", "val-aux/reverse/margin/mean@1"}
    assert not (tmp_path / "run/generations.jsonl").exists()
    assert main(["eval", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert f"{report['val-core/reverse/acc/mean@1']:.4f}" in shown


def write(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def pair(**changes):
    return {"prompt": "ab>", "chosen": "ba", "rejected": "ab"} | changes


def test_pairs_from_files_need_no_rule(tiny, tmp_path):
    file = write(tmp_path / "pairs.jsonl", pair(), pair(prompt="cd>", chosen="dc", rejected="c"))
    files = [f"data.train_files={file}", f"data.val_files={file}"]
    for name in ("dpo", "reward_model"):
        report = train(plan(tiny, tmp_path / name, name, *files), silent)
        assert any(metric.endswith("/preferences/margin/mean@1") for metric in report)
        assert not any("reward/mean" in metric for metric in report)


def test_labelled_files_are_for_kto(tiny, tmp_path):
    rows = [
        {"prompt": "ab>", "completion": "ba", "label": True},
        {"prompt": "cd>", "completion": "c", "label": False},
    ]
    files = [f"data.train_files={write(tmp_path / 'labels.jsonl', *rows)}", "algorithm.loss_type=kto"]
    train(plan(tiny, tmp_path / "run", "dpo", *files), silent)
    assert numbers(tmp_path / "run")[0]["rewards/rejected"] is not None
    with pytest.raises(DataError, match="there is no column 'chosen'"):
        train(plan(tiny, tmp_path / "dpo", "dpo", files[0]), silent)
    with pytest.raises(DataError, match=r"set data.train_batch_size to at least 2"):
        train(plan(tiny, tmp_path / "one", "dpo", *files, "data.train_batch_size=1"), silent)


def test_a_pair_must_fit_the_budget(tiny, tmp_path):
    with pytest.raises(ConfigError, match=r"a pair may have 46 tokens .* actor.ppo_max_token_len_per_gpu = 40"):
        train(plan(tiny, tmp_path, "dpo", "actor.ppo_max_token_len_per_gpu=40"), silent)


def test_options_of_other_losses_are_reported(capsys):
    shown = ["config", "algorithm.name=dpo", "algorithm.simpo_gamma=2.0", "algorithm.lam=0.9", "rollout.n=4"]
    assert main(shown) == 0
    notes = capsys.readouterr().err
    assert 'algorithm.simpo_gamma has no effect without algorithm.loss_type = "simpo"' in notes
    assert 'algorithm.lam has no effect with algorithm.name = "dpo"' in notes
    assert 'rollout.n has no effect with algorithm.name = "dpo"' in notes
    assert main(["config", "algorithm.name=reward_model", "critic.optim.lr=1e-3"]) == 0
    assert 'critic.optim.lr has no effect with algorithm.name = "reward_model"' in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model"])
def test_the_limit_of_sampled_answers_counts_only_if_some_are_sampled(name, tiny, tmp_path):
    """The tiny model has 256 positions, and no row of the data has as many."""
    rows = [{"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]}, pair()]
    model = shutil.copytree(tiny, tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    file = write(tmp_path / "rows.jsonl", rows[name != "sft"])
    files = [f"data.train_files={file}", f"data.val_files={file}", "data.max_response_length=256"]
    prepare(plan(model, tmp_path / "run", name, *files), silent)
    judged = [*files, "reward.functions=verl_fn.scores:exact"]
    if name == "reward_model":
        prepare(plan(model, tmp_path / "run", name, *judged), silent)
        return
    with pytest.raises(
        ConfigError, match=r"tokens \(prompt and data.max_response_length\), but .* has only 256 positions"
    ):
        prepare(plan(model, tmp_path / "run", name, *judged), silent)


def test_held_out_prompts_of_a_reward_model_are_refused_before_a_step(tiny, tmp_path):
    asked = {"prompt": "ab>", "data_source": "reverse", "reward_model": {"ground_truth": "ba"}}
    pairs, prompts = (write(tmp_path / f"{i}.jsonl", row) for i, row in enumerate((pair(data_source="x"), asked)))
    files = [f"data.train_files={pairs}", f'data.val_files=["{pairs}", "{prompts}"]']
    with pytest.raises(ConfigError, match=r"1\.jsonl, line 1 has no responses chosen and rejected, and reward_m"):
        prepare(plan(tiny, tmp_path / "run", "reward_model", *files), silent)
    prepare(plan(tiny, tmp_path / "run", "dpo", *files), silent)
    prepare(plan(tiny, tmp_path / "run", "reward_model", *files, "data.val_size=1"), silent)


def test_held_out_rows_without_a_rule_do_not_keep_others_from_being_sampled(tiny, tmp_path):
    judged = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "5"}}
    file = write(tmp_path / "pairs.jsonl", pair(**judged), pair(prompt="cd>", chosen="dc", rejected="c"))
    said = []
    report = train(
        plan(tiny, tmp_path / "run", "dpo", f"data.train_files={file}", f"data.val_files={file}"), said.append
    )
    assert report["val-core/openai/gsm8k/acc/mean@1"] == 0.0 and "val-aux/preferences/margin/mean@1" in report
    assert not any(metric.startswith("val-core/preferences") for metric in report)
    assert any("data.val_files: answers to 1 of 2 held-out problems are sampled" in line for line in said)


def test_a_warm_up_that_the_run_does_not_end_is_noted(tiny, tmp_path):
    for warmup, noted in ((3, False), (4, True)):
        said = []
        prepare(tiny_run(tiny, tmp_path, "algorithm.name=sft", "trainer.total_training_steps=4",
                         f"actor.optim.lr_warmup_steps={warmup}"), said.append)  # fmt: skip
        end = "actor.optim.lr_warmup_steps is 4 updates, and the run has 4: its learning rate ends at 0.75 times"
        assert any(end in line for line in said) == noted
