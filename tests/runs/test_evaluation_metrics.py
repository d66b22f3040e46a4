"""The metrics of several answers to each problem, and their rows."""

import itertools
import json
from types import SimpleNamespace

import attrs
import pytest
import torch
from run_configs import tiny_run

from verl_fn.backends.hf.new_model import char_tokenizer
from verl_fn.config import load, make_plan
from verl_fn.data.tasks import Problem
from verl_fn.driver.ranks import local_workers
from verl_fn.runs import loop
from verl_fn.runs.continuing import goal_reached
from verl_fn.runs.evaluate import (
    evaluate_model,
    evaluation_line,
    evaluation_of,
    has_held_out,
    held_out_value,
    pass_at,
    spread,
    validate,
)
from verl_fn.runs.logs import last_evaluation, read_answers
from verl_fn.runs.prepare import prepare
from verl_fn.runs.state import initial_state
from verl_fn.state import END_REASONS, Batch


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_all_choices_with_a_right_answer(k):
    acc = torch.tensor([[0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 0.5, 1, 0], [1, 1, 1, 1, 1]])
    choices = [max(choice) >= 1 for row in acc.tolist() for choice in itertools.combinations(row, k)]
    assert pass_at(acc, k) == pytest.approx(sum(choices) / len(choices), abs=1e-12)


def test_pass_at_k_is_unbiased():
    """Its mean over all draws of five answers is the probability for k answers; 1 - (1 - c / n)^k is lower."""
    p, n, k = 0.3, 5, 2
    draws = list(itertools.product([0.0, 1.0], repeat=n))
    weights = [p ** sum(draw) * (1 - p) ** (n - sum(draw)) for draw in draws]
    mean = sum(w * pass_at(torch.tensor([draw]), k) for w, draw in zip(weights, draws, strict=True))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    naive = sum(w * (1 - (1 - sum(draw) / n) ** k) for w, draw in zip(weights, draws, strict=True))
    assert naive < mean - 0.01


def scored(n, acc, **fields):
    rows = len(acc)
    per_row = {"score": acc, "acc": acc, "pred": torch.arange(rows), "finished": [1.0] * rows} | fields
    return Batch.from_rows([[4, 5, 2]] * rows, {"response_mask": [[0.0, 1.0, 1.0]] * rows}, per_row)


def test_each_source_has_its_own_metrics_and_every_answer_its_row():
    problems = [Problem("a", "b", id=7, data_source="x"), Problem("b", "b", id=8, data_source="y/z")]
    batch = scored(3, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0], **{"reward/length": torch.arange(6.0)})
    report, answers = evaluation_of(batch, problems, char_tokenizer("ab"), [2])
    assert report["val-aux/x/acc/pass@1"] == pytest.approx(1 / 3)
    assert report["val-aux/x/acc/pass@2"] == pytest.approx(2 / 3)
    assert report["val-aux/y/z/acc/pass@2"] == 0.0 and "val-aux/x/acc/pass@4" not in report
    assert [(a["problem"], a["sample"]) for a in answers] == [(7, 0), (7, 1), (7, 2), (8, 0), (8, 1), (8, 2)]
    assert [a["reward/length"] for a in answers] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert {a["response"] for a in answers} == {"b"}


def test_named_rewards_and_ends_of_conversations_are_reported_by_source():
    problems = [Problem("a", "b", id=7, data_source="x"), Problem("b", "b", id=8, data_source="y")]
    style, other = [1.0, 0.0, 0.5, 0.5], [float("nan"), 3.0, 2.0, 4.0]
    ends = {"env_end": [1, 1, 0, 1], "env_turns": [2, 4, 1, 1]}
    batch = scored(2, [1.0, 0.0, 0.0, 0.0], **{"reward/style": style, "reward/reward": other}, **ends)
    report, _ = evaluation_of(batch, problems, char_tokenizer("ab"), [2])
    assert (report["val-aux/x/style/mean@2"], report["val-aux/x/style/best@2/mean"]) == (0.5, 1.0)
    assert report["val-aux/y/style/mean@2"] == 0.5 and "val-aux/x/style/count" not in report
    assert (report["val-aux/x/reward/mean@2"], report["val-aux/y/reward/reward/mean@2"]) == (0.5, 3.0)
    assert held_out_value(report, "reward") == 0.25, "of the scores, not of a number with that name"
    for source, turns, first, second in (("x", 3.0, 0.0, 1.0), ("y", 1.0, 0.5, 0.5)):
        assert report[f"val-aux/{source}/env/turns/mean"] == turns
        assert [report[f"val-aux/{source}/env/ended/{reason}"] for reason in END_REASONS[:2]] == [first, second]
    batch = batch.with_rows(**{"reward/style": [*style[:3], float("nan")]})
    both = [attrs.evolve(problem, data_source="z") for problem in problems]
    report, _ = evaluation_of(batch, both, char_tokenizer("ab"), [2])
    assert (report["val-aux/z/style/mean@2"], report["val-aux/z/style/count"]) == (0.5, 1.0)


def test_an_answer_of_several_rows_has_the_input_of_the_first_and_the_score_of_the_last():
    """The input of a later row holds the reply of an earlier one."""
    problems = [Problem("a", "b", id=7, data_source="x"), Problem("b", "b", id=8, data_source="x")]
    tokens, replies = [[1, 4, 5], [1, 4, 5, 6], [1, 5, 6]], [[0, 0, 1], [0, 0, 0, 1], [0, 0, 1]]
    names = {"group": [7, 7, 8], "conversation": [0, 0, 0]}
    values = {"score": [0.0, 1.0, 0.5], "pred": [0, 1, 2], "finished": [0.0, 1.0, 1.0]}
    batch = Batch.from_rows(tokens, {"response_mask": replies}, names | values)
    _, answers = evaluation_of(batch, problems, char_tokenizer("abc"), [2])
    assert [(a["problem"], a["input"], a["response"], a["score"], a["ended"]) for a in answers] == [
        (7, "<bos>a", "b\nc", 1.0, "stop"), (8, "<bos>b", "c", 0.5, "stop"),
    ]  # fmt: skip
    # Each row of a conversation has the messages up to it.
    said = [SimpleNamespace(outcome=SimpleNamespace(messages=messages)) for messages in ('["a"]', '["a", "b"]', "")]
    _, answers = evaluation_of(batch, problems, char_tokenizer("abc"), [2], said)
    assert answers[0]["messages"] == ["a", "b"] and "messages" not in answers[1]


def test_a_response_names_the_row_of_its_problem_and_has_short_numbers(tiny, tmp_path):
    files = {name: [f"{letter}b>" for letter in name] for name in ("abcd", "efgh")}
    for name, prompts in files.items():
        rows = ({"data_source": "x", "prompt": p, "reward_model": {"ground_truth": "ba"}} for p in prompts)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.py").write_text("def tenth(data_source, solution_str, ground_truth, extra_info): return 0.1\n")
    paths = f'["{tmp_path}/abcd.jsonl", "{tmp_path}/efgh.jsonl"]'
    more = [f"data.train_files={paths}", f"data.val_files={paths}", f"reward.functions={tmp_path}/mine.py:tenth"]
    more += ["trainer.total_training_steps=2", f"trainer.rollout_data_dir={tmp_path}/texts", "trainer.save_freq=2"]
    loop.train(tiny_run(tiny, tmp_path / "run", *more), lambda line: None)
    trained = [json.loads(line) for n in (1, 2) for line in (tmp_path / f"texts/{n}.jsonl").read_text().splitlines()]
    assert {row["problem"] for row in trained} == set(range(16)), "two epochs of eight rows"
    for row in (*trained, *read_answers(tmp_path / "run")):
        file, _, number = row["row"].rpartition(", line ")
        assert files[file.removesuffix(".jsonl")][int(number) - 1] == row["prompt"]
        assert row["score"] == 0.1


def test_problems_count_in_the_accuracy_if_all_their_answers_have_one():
    problems = [Problem("a", "b", id=i, data_source="x") for i in (0, 1)]
    batch = scored(2, [1.0, float("nan"), 0.0, 1.0], score=[1.0, 1.0, 0.0, 1.0])
    report, answers = evaluation_of(batch, problems, char_tokenizer("ab"), [2])
    assert report["val-core/x/acc/mean@2"] == 0.5 and report["val-aux/x/acc/count"] == 1.0
    assert report["val-aux/x/reward/mean@2"] == 0.75 and [a["acc"] for a in answers] == [1.0, None, 0.0, 1.0]


def test_without_acc_or_with_one_answer_there_is_no_pass_at_k():
    problems = [Problem("a", "b", data_source="x")]
    alone, _ = evaluation_of(scored(1, [1.0]), problems, char_tokenizer("ab"), [2])
    unknown, answers = evaluation_of(scored(2, [1.0, 0.0]).without("acc"), problems, char_tokenizer("ab"), [2])
    assert not [name for name in (*alone, *unknown) if "pass@" in name]
    assert [answer["acc"] for answer in answers] == [None, None]


def test_the_best_and_the_majority_are_those_of_each_problem():
    """Among equally frequent answers the first counts."""
    values, preds = (
        torch.tensor([[0.2, 0.8, 0.4, 0.0], [1.0, 0.0, 0.0, 0.0], [0.6, 0.0, 0.0, 0.0]]),
        torch.tensor([[5, 7, 5, 7], [9, 3, 3, 4], [7, 5, 7, 5]]),
    )
    report = spread("x", values, preds)
    expected = {"x/mean@4": 0.25, "x/best@4/mean": 0.8, "x/maj@4/mean": 0.8 / 3}
    assert report == pytest.approx(expected)
    assert spread("x", values[:, :1], preds[:, :1]) == pytest.approx({"x/mean@1": 0.6})


def test_answers_without_an_accuracy_have_a_majority_of_rewards_and_each_source_its_share_that_is_cut_off():
    problems = [Problem("a", "b", data_source=name) for name in "xy"]
    scores = {"score": [1.0, 3.0, 3.0, 0.0, 0.0, 0.0], "pred": [5, 7, 7, 1, 1, 1], "finished": [0.0] + [1.0] * 5}
    report, _ = evaluation_of(scored(3, [0.0] * 6, **scores).without("acc"), problems, char_tokenizer("ab"), [2])
    assert [report[f"val-core/x/reward/{kind}"] for kind in ("maj@3/mean", "best@3/mean")] == [3.0, 3.0]
    shares = [report[f"val-aux/{name}/response_length/clip_ratio"] for name in "xy"]
    assert shares == pytest.approx([1 / 3, 0.0])


def test_the_line_of_an_evaluation_has_the_metric_of_the_goal_and_leaves_out_values_that_are_not_known():
    """A log has null in place of a value that is not finite."""
    report = {"val-core/x/acc/mean@1": 0.5, "val-aux/x/reward/mean@1": 2.0, "val-core/y/acc/mean@1": None}
    assert [evaluation_line(report, metric) for metric in ("acc", "reward")] == [
        "held-out acc 0.500", "held-out reward 2.000",
    ]  # fmt: skip
    assert held_out_value(report, "acc") == 0.5 and held_out_value({"val-core/y/acc/mean@1": None}, "acc") is None
    assert (evaluation_line({"critic/score/mean": 1.0}), evaluation_line({"val/loss": 0.25})) == (
        "",
        "held-out loss 0.250",
    )


def test_numbers_of_reward_functions_are_no_data_sources():
    """An environment with a function that returns acc has both; several functions have theirs below their names."""
    problems = [Problem("a", "b", data_source="x")]
    batch = scored(1, [1.0], **{"reward/acc": [0.0], "reward/style/reward": [7.0], "reward/style/acc": [0.5]})
    report, _ = evaluation_of(batch, problems, char_tokenizer("ab"), [2])
    assert report["val-aux/x/reward/acc/mean@1"] == 0.0 and report["val-aux/x/style/acc/mean@1"] == 0.5
    assert evaluation_line(report) == "held-out acc 1.000" and held_out_value(report, "reward") == 1.0
    report, _ = evaluation_of(batch.without("acc"), problems, char_tokenizer("ab"), [2])
    assert evaluation_line(report) == "held-out reward 1.000" and held_out_value(report, "acc") is None


def test_what_a_plan_says_of_held_out_problems():
    for settings, has in (
        ([], True), (["data.train_files=a"], False), (["data.train_files=a", "data.val_files=b"], True),
        (["data.task=verifiers:x"], False), (["data.task=verifiers:x", "data.val_files=b.jsonl"], True),
    ):  # fmt: skip
        assert has_held_out(make_plan(load(overrides=["model.path=m", "algorithm.name=sft", *settings]))) is has


def test_a_goal_is_reached_by_the_value_itself():
    plan = make_plan(load(overrides=["model.path=m", "trainer.stop_at=0.5", "trainer.test_freq=1"]))
    for value, reached in ((0.5, True), (0.499, False), (0.6, True)):
        assert goal_reached(plan, {"val-core/x/acc/mean@1": value, "val-aux/x/reward/mean@1": 1 - value}) == reached
    # A reward is an auxiliary metric where answers have an accuracy.
    paid = attrs.evolve(plan, trainer=attrs.evolve(plan.trainer, stop_metric="reward"))
    for family, reached in (("val-aux", True), ("val-core", True), ("own", False)):
        assert goal_reached(paid, {"val-core/x/acc/mean@1": 0.0, f"{family}/x/reward/mean@1": 0.5}) == reached


def test_an_evaluation_in_a_log_has_all_of_its_metrics(tmp_path):
    """A run whose goal is a reward has it among the auxiliary ones if answers have an accuracy."""
    held_out = {"val-core/x/acc/mean@1": 0.0, "val-aux/x/reward/mean@1": 0.5}
    rows = (
        {"step": 1, **held_out, "critic/score/mean": 0.25},
        {"step": 2, "val-aux/x/reward/mean@1": 0.0},
        {"step": 3},
    )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert last_evaluation(tmp_path, 1) == held_out
    goal = ["trainer.stop_at=0.5", "trainer.stop_metric=reward", "trainer.test_freq=1"]
    plan = make_plan(load(overrides=["model.path=m", *goal]))
    assert [goal_reached(plan, last_evaluation(tmp_path, step)) for step in (1, 2, 3)] == [True, False, False]
    assert last_evaluation(tmp_path, 3) == last_evaluation(None, 1) == {}


def test_a_log_has_the_first_answer_to_each_of_some_problems(monkeypatch):
    truths = ["a", "b" * 3000 + "c" * 3000, "d", "e"]
    answers = [{"problem": i, "sample": j, "answer": truth} for i, truth in enumerate(truths) for j in range(2)]
    logged, kept, cut = [], [], ["a", f"{'b' * 2000} ... {'c' * 2000}", "d"]
    monkeypatch.setattr(loop, "validate", lambda *_: ({}, answers))
    run = SimpleNamespace(
        keep_answers=lambda step, given: kept.extend(given), append=lambda name, *rows: logged.extend(rows)
    )
    plan = make_plan(load(overrides=["model.path=m", "trainer.log_val_generations=3"]))
    loop._Loop._evaluate(SimpleNamespace(plan=plan, run=run, w=None, held_out=()), SimpleNamespace(step=5))
    assert logged == [{"step": 5, "problem": i, "sample": 0, "answer": cut[i]} for i in range(3)] and kept == answers


def test_a_model_gives_the_answers_that_it_gave_in_its_run(tiny, tmp_path):
    plan = tiny_run(
        tiny, tmp_path / "run", "algorithm.name=grpo", "rollout.n=2", "rollout.val_kwargs.temperature=1.0"
    )
    silent = lambda line: None  # noqa: E731
    with local_workers(plan) as w:
        of_run = validate(initial_state(plan, w), prepare(plan, silent).held_out(8), w, plan)
    assert evaluate_model(plan, silent) == of_run and len({answer["response"] for answer in of_run[1]}) > 1
