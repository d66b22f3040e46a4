"""Checks before a run: what they compare, at which border, and of which parts of a plan they speak."""

import importlib
import json
import shutil
from types import SimpleNamespace

import attrs
import pytest
from run_configs import tiny_run

from verl_fn.backends.hf.config import read_config
from verl_fn.config import ConfigError
from verl_fn.data.examples import COMPLETION
from verl_fn.data.judged import Judged
from verl_fn.data.tasks import Problem
from verl_fn.runs import checks
from verl_fn.runs.check_run import check_run
from verl_fn.runs.checks import RowLengths, check_code, check_lengths, check_model_folders, check_parts, sampled
from verl_fn.runs.prepare import prepare

SILENT = lambda line: None  # noqa: E731
GRPO = ("algorithm.name=grpo", "rollout.n=2")
check_run_module = importlib.import_module("verl_fn.runs.check_run")


def test_a_row_may_fill_all_positions_of_a_model(tiny, tmp_path):
    most = read_config(tiny).max_position_embeddings
    for name, kind in (("grpo", "sampled"), ("sft", "trained")):
        plan, rows = (
            tiny_run(tiny, tmp_path, f"algorithm.name={name}", "rollout.n=2"),
            RowLengths(1, 1, 1, 1, "a row: x"),
        )
        check_lengths(plan, attrs.evolve(rows, **{kind: most}))
        with pytest.raises(ConfigError, match=f"may have {most + 1} tokens .* only {most} positions"):
            check_lengths(plan, attrs.evolve(rows, **{kind: most + 1}))


def test_a_missing_model_is_named_by_its_key(tiny, tmp_path):
    for settings, key in (
        (["critic.path=/no/c"], r"critic\.path: there is no folder /no/c\."),
        (["model.path=/no/m"], r"model\.path: there is no folder /no/m\."),
    ):
        with pytest.raises(ConfigError, match=key):
            check_model_folders(tiny_run(tiny, tmp_path, "algorithm.name=ppo", *settings))


def test_held_out_problems_that_are_answered(tiny, tmp_path):
    """All but responses to learn from whose answers no rule scores."""
    rule = "openai/gsm8k"
    judged = [
        Judged("a", truth, 0, source, chosen=("b",)) for truth, source in (("5", rule), ("", rule), ("5", "own"))
    ]
    problems = [Problem("a", "", data_source="own"), *judged, Problem("a", "b", data_source=COMPLETION)]
    plan = tiny_run(tiny, tmp_path, *GRPO)
    assert sampled(plan, problems) == problems[:2]
    assert sampled(tiny_run(tiny, tmp_path, *GRPO, "reward.functions=m.py:f"), problems) == problems
    scores = tiny_run(tiny, tmp_path, "algorithm.name=reward_model", "reward.functions=m.py:f")
    assert sampled(scores, problems) == []


def test_a_cluster_elsewhere_may_have_what_this_machine_lacks(tiny, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(checks, "_check_vllm", asked.append)
    monkeypatch.setattr(checks, "check_cluster", lambda plan: None)
    monkeypatch.setattr(checks, "check_loggers", lambda trainer: None)
    here = tiny_run(tiny, tmp_path, *GRPO, "driver.kind=ray", "reward.functions=no/such.py:f")
    here = attrs.evolve(here, rollout=attrs.evolve(here.rollout, name="vllm"))
    there = attrs.evolve(here, ray=attrs.evolve(here.ray, address="10.0.0.1:6379"))
    for plan, gpus, count in ((here, None, 1), (there, None, 0), (here, 8, 0)):
        asked.clear()
        check_parts(plan, None, (), gpus)
        assert len(asked) == count
    with pytest.raises(ConfigError, match=r"reward\.functions: there is no file .*no/such\.py"):
        check_code(here)
    assert check_code(there) == check_code(here, here=False) == []


def test_probabilities_of_several_tokens_are_neither_more_than_tokens_nor_of_megatron():
    def plan(top_k, strategy="local"):
        roles = {name: SimpleNamespace(strategy=strategy) for name in ("actor", "teacher")}
        return SimpleNamespace(options=SimpleNamespace(top_k=top_k), roles=roles)

    checks._check_top_k(plan(13), 13)
    checks._check_top_k(plan(0, "megatron"), 13)
    with pytest.raises(ConfigError, match="top_k is 14, but the tokenizer has only 13 tokens"):
        checks._check_top_k(plan(14), 13)
    with pytest.raises(ConfigError, match="megatron does not give; set actor"):
        checks._check_top_k(plan(1, "megatron"), 13)


def row(truth, **extra):
    asked = {"data_source": "openai/gsm8k", "prompt": "abcde"[: len(truth)] + ">"}
    return asked | {"reward_model": {"ground_truth": truth}, "extra_info": extra}


def test_ground_truths_that_no_response_can_equal_and_tools_without_an_environment_are_told(tiny, tmp_path):
    files = []
    for name, rows in (
        ("train", [row("1,000"), row("72", tools_kwargs={"add": {"n": 1}}), row("5")]),
        ("val", [row("#### 7"), row("1,0")]),
    ):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        files.append(f"data.{name}_files={tmp_path}/{name}.jsonl")

    def told(*more):
        said = []
        prepare(tiny_run(tiny, tmp_path / "run", *files, *more), said.append)
        return [line for line in said if "no response is right" in line or "calls no tools" in line]

    by_rule = "by the rule of their data source, no response is right for"
    trained, held_out, tools = told(*GRPO)
    assert tools.startswith(
        "note: 1 of 5 problems have tools_kwargs or interaction_kwargs in extra_info, and without"
    )
    assert trained.startswith(f"note: data.train_files: {by_rule} 1 of the first 3 ground truths; ")
    assert held_out.startswith(f"note: data.val_files: {by_rule} 2 of the first 2 ground truths; ")
    assert "train.jsonl, line 1: '1,000', and the rule reads the answer in '#### ANSWER'" in trained
    assert len(told(*GRPO, "reward.functions=verl_fn.scores:exact")) == 1, "the tools"
    assert len(told(*GRPO, "data.val_size=1")) == 3


def test_end_tokens_that_a_folder_names_twice_are_told(tiny, tmp_path):
    folder, said = shutil.copytree(tiny, tmp_path / "m"), []
    prepare(tiny_run(folder, tmp_path / "run", *GRPO), said.append)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 4}))
    prepare(tiny_run(folder, tmp_path / "run", *GRPO), said.append)
    assert len([line for line in said if line.startswith(f"note: the tokenizer of {folder} ends texts with ")]) == 1


def test_a_check_looks_at_the_disk_of_this_machine_and_tells_of_changes(tiny, tmp_path, monkeypatch, capsys):
    def full(plan):
        raise ConfigError("the disk is full")

    monkeypatch.setattr(check_run_module, "check_disk", full)
    monkeypatch.setattr(check_run_module, "changes", lambda run, plan: ["the rate is another one"])
    with pytest.raises(ConfigError, match="the disk is full"):
        check_run(tiny_run(tiny, tmp_path / "run", *GRPO))
    assert "the rate is another one\n" in capsys.readouterr().out
    assert check_run(tiny_run(tiny, tmp_path / "run", *GRPO, "driver.device=auto"), 2**36, 1).fits
    assert "the rate" not in capsys.readouterr().out
    monkeypatch.setattr(check_run_module, "finished", lambda plan, origin: SimpleNamespace(step=3))
    monkeypatch.setattr(check_run_module, "unused_settings", lambda run, plan: ["a key has no effect"])
    done = "this run has finished, after 3 steps; nothing would be done\na key has no effect"
    assert check_run(tiny_run(tiny, tmp_path / "run", *GRPO)).text == done
