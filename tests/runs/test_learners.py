"""Runs with a reward model as the reward of PPO and GRPO, distillation, and rejection sampling."""

import json
import shutil

import pytest
import torch
from run_configs import tiny_run
from transformers import AutoModelForSequenceClassification

from verl_fn.algorithms.experience import with_model_score
from verl_fn.algorithms.imitation import best_of_groups
from verl_fn.backends.hf.new_model import CHAT_TEMPLATE, char_tokenizer, new_model
from verl_fn.backends.hf.tokenizer import read_tokenizer
from verl_fn.backends.local import Local
from verl_fn.cli import main
from verl_fn.config import ConfigError, evaluation_plan, load
from verl_fn.data.examples import pack_pairs
from verl_fn.data.judged import TaskPairs
from verl_fn.data.tasks import TASKS
from verl_fn.errors import UserError
from verl_fn.runs.evaluate import evaluate_model
from verl_fn.runs.logs import read_metrics
from verl_fn.runs.loop import train
from verl_fn.runs.prepare import prepare
from verl_fn.state import Batch, Key
from verl_fn.steps import frozen


def silent(line):
    pass


def plan(model, folder, name, *more):
    steps = ["trainer.total_training_steps=2", "trainer.val_before_train=false"]
    return tiny_run(model, folder, f"algorithm.name={name}", *steps, *more)


def rows(folder):
    return [row for row in read_metrics(folder) if row["step"] > 0]


@pytest.fixture(scope="module")
def judge(tiny, tmp_path_factory):
    """A reward model of two steps."""
    folder = tmp_path_factory.mktemp("judge")
    train(plan(tiny, folder, "reward_model", "actor.optim.lr=1e-2"), silent)
    return (folder / "model").resolve()


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_a_reward_model_is_the_only_reward(name, judge, tiny, tmp_path):
    run = plan(tiny, tmp_path, name, f"algorithm.reward_model={judge}", "rollout.n=2", "algorithm.use_kl_loss=true")
    assert not run.roles["reward_model"].trained and not run.needs_reward
    report = train(run, silent)
    assert "val-core/reverse/acc/mean@1" in report
    for row in rows(tmp_path):
        assert row["critic/score/mean"] == pytest.approx(row["critic/rewards/mean"], rel=1e-5)
        assert "training/acc" not in row and row["critic/score/max"] not in (0.0, 1.0)
        assert row["rollout/rows_learned"] == row["rollout/rows_asked"] == 16


def test_a_model_with_a_value_head_is_no_policy_and_no_teacher(judge, tiny, tmp_path):
    """A critic of a model with tied embeddings has all the weights of a language model."""
    refused = "has a value head, as critics and reward models have, and grpo needs a language model"
    with pytest.raises(ConfigError, match=f"model.path: {judge} {refused}"):
        train(plan(judge, tmp_path / "a", "grpo", "rollout.n=2"), silent)
    given = [f"model.path={judge}", "algorithm.name=grpo", "rollout.n=2", "driver.device=cpu"]
    with pytest.raises(ConfigError, match=f"model.path: {judge} {refused}"):
        evaluate_model(evaluation_plan(load(overrides=given)), silent)
    with pytest.raises(ConfigError, match=f"algorithm.teacher: {judge} has a value head"):
        train(plan(tiny, tmp_path / "b", "distill", f"algorithm.teacher={judge}"), silent)
    other = shutil.copytree(judge, tmp_path / "other")
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace("ForTokenClassification", "ForSequenceClassification"))
    with pytest.raises(ConfigError, match=f"model.path: {other} {refused}"):
        train(plan(other, tmp_path / "c", "grpo", "rollout.n=2"), silent)


@pytest.mark.parametrize("name", ["grpo", "distill"])
def test_responses_that_no_reward_function_scores_are_kept_as_text(name, judge, tiny, tmp_path):
    other = {"grpo": f"algorithm.reward_model={judge}", "distill": f"algorithm.teacher={tiny}"}[name]
    more = ["trainer.total_training_steps=1", f"trainer.rollout_data_dir={tmp_path}/texts", "rollout.n=2"]
    train(plan(tiny, tmp_path / "run", name, other, *more), silent)
    kept = [json.loads(line) for line in (tmp_path / "texts/1.jsonl").read_text().splitlines()]
    assert len(kept) == rows(tmp_path / "run")[0]["rollout/rows_asked"] and all(row["score"] is None for row in kept)
    for row in kept:
        assert row["prompt"].removesuffix(">") == row["gts"][::-1] and row["prompt"] in row["input"]
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "report.html")]) == 0
    assert "Training responses" in (tmp_path / "report.html").read_text()


def test_the_score_is_the_reward_models_of_the_whole_row(judge):
    tokenizer = read_tokenizer(judge)
    backend = Local(judge, frozen(), head="value")
    params = backend.load_pretrained().params
    batch = pack_pairs(TaskPairs(TASKS["reverse"]).held_out(3), tokenizer, tokenizer.eos_token_id)
    scored = with_model_score(batch, backend.forward(params, batch, ("row_values",)))
    values = [backend.forward(params, batch.take([i]), ("row_values",)).row_values.item() for i in range(len(batch))]
    torch.testing.assert_close(scored["score"], torch.tensor(values))
    assert len(set(values)) == len(values)
    torch.testing.assert_close(scored.sum_rows(scored["token_level_scores"]), scored["score"])
    assert torch.equal(scored["token_level_rewards"][scored.last], scored["score"])
    # Rows that end with a token that the model did not draw: the score lies on the last one that it drew.
    drawn = batch["response_mask"].index_fill(0, batch.last, 0.0)
    scored = with_model_score(batch.with_tokens(response_mask=drawn), backend.forward(params, batch, ("row_values",)))
    assert not bool(scored["token_level_rewards"][batch.last].any())
    torch.testing.assert_close(scored.sum_rows(scored["token_level_rewards"]), scored["score"])


def test_a_reward_model_in_a_resumed_run(judge, tiny, tmp_path):
    more = [f"algorithm.reward_model={judge}", "rollout.n=2"]
    train(plan(tiny, tmp_path / "whole", "grpo", *more), silent)
    train(plan(tiny, tmp_path / "parts", "grpo", *more, "trainer.total_training_steps=1"), silent)
    train(plan(tiny, tmp_path / "parts", "grpo", *more), silent)
    whole, parts = (rows(tmp_path / name)[-1] for name in ("whole", "parts"))
    assert parts["critic/score/mean"] == whole["critic/score/mean"]
    assert parts["actor/grad_norm"] == whole["actor/grad_norm"]


def test_a_classifier_of_sequences_is_a_reward_model(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "judge")
    model = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1)
    torch.nn.init.ones_(model.score.weight)
    model.save_pretrained(folder)
    train(plan(tiny, tmp_path / "run", "grpo", f"algorithm.reward_model={folder}", "rollout.n=2"), silent)
    assert all(row["critic/score/max"] not in (0.0, 1.0) for row in rows(tmp_path / "run"))


def test_models_that_cannot_be_the_reward_or_the_teacher(judge, tiny, tmp_path):
    for critic in ([], [f"critic.path={tiny}"]):
        with pytest.raises(UserError, match=r"algorithm.reward_model: .* has no value head, so it gives no scores"):
            train(plan(tiny, tmp_path / "a", "ppo", f"algorithm.reward_model={tiny}", *critic), silent)
    with pytest.raises(ConfigError, match=r"algorithm.reward_model: there is no folder .*nowhere"):
        train(plan(tiny, tmp_path / "b", "ppo", f"algorithm.reward_model={tmp_path}/nowhere"), silent)
    with pytest.raises(ConfigError, match=r"algorithm.teacher is empty; set it to the model folder of the teacher"):
        train(plan(tiny, tmp_path / "c", "distill"), silent)
    with pytest.raises(ConfigError, match=r"algorithm.teacher: there is no folder .*nowhere"):
        train(plan(tiny, tmp_path / "d", "distill", f"algorithm.teacher={tmp_path}/nowhere"), silent)
    other = shutil.copytree(tiny, tmp_path / "other")
    char_tokenizer("hgfedcba>").save_pretrained(other)
    with pytest.raises(UserError, match=r"algorithm.teacher: the tokenizer in .*other is not the actor's"):
        train(plan(tiny, tmp_path / "e", "distill", f"algorithm.teacher={other}"), silent)


OWN = "{% for m in messages %}{{ m.content }}{% endfor %}>\n"


@pytest.mark.parametrize(
    ("template", "prompt", "told"),
    [
        (OWN, [{"role": "user", "content": "ab"}], True),
        ("{{ raise_exception('no') }}", [{"role": "user", "content": "ab"}], True),
        (OWN, "ab>", False),
        (CHAT_TEMPLATE + "{# written otherwise #}", [{"role": "user", "content": "ab"}], False),
        (None, [{"role": "user", "content": "ab"}], False),
    ],
)
def test_a_teacher_with_a_chat_template_of_its_own_is_told(template, prompt, told, tmp_path):
    actor, teacher = (
        new_model(tmp_path / name, chars="abcdefgh>\n", hidden_size=16, num_hidden_layers=1, chat_template=True)
        for name in ("actor", "teacher")
    )
    (teacher / "chat_template.jinja").unlink()
    if template:
        (teacher / "chat_template.jinja").write_text(template)
    row = {"data_source": "reverse", "prompt": prompt, "reward_model": {"ground_truth": "ba"}}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    said, more = [], [f"algorithm.teacher={teacher}", f"data.train_files={tmp_path}/a.jsonl"]
    prepare(plan(actor, tmp_path / "run", "distill", *more), said.append)
    assert sum("algorithm.teacher: the chat template in" in line for line in said) == told


@pytest.mark.parametrize("kl", ["reverse", "forward"])
def test_distillation_comes_nearer_to_its_teacher(kl, tiny, tmp_path):
    teacher = new_model(tmp_path / "teacher", chars="abcdefgh>", hidden_size=16, seed=5, num_hidden_layers=1)
    more = ["data.train_batch_size=32", "actor.optim.lr=3e-3", "trainer.total_training_steps=12"]
    run = plan(tiny, tmp_path / "run", "distill", f"algorithm.teacher={teacher}", f"algorithm.kl={kl}", *more)
    assert run.roles["teacher"].folder == str(teacher) and not run.roles["teacher"].trained
    train(run, silent)
    found = [row["distill/reverse_kl"] for row in rows(tmp_path / "run")]
    assert sum(found[-3:]) < 0.7 * sum(found[:3])


def test_distillation_on_the_likeliest_tokens_comes_nearer_to_its_teacher(tiny, tmp_path):
    teacher = new_model(tmp_path / "teacher", chars="abcdefgh>", hidden_size=16, seed=5, num_hidden_layers=1)
    more = [
        "data.train_batch_size=8",
        "actor.optim.lr=3e-3",
        "trainer.total_training_steps=6",
        "algorithm.kl=forward",
    ]
    more += [f"algorithm.teacher={teacher}", "algorithm.top_k=4"]
    train(plan(tiny, tmp_path / "run", "distill", *more), silent)
    found = [row["distill/forward_kl"] for row in rows(tmp_path / "run")]
    assert found[-1] < 0.7 * found[0] and 0.0 < rows(tmp_path / "run")[0]["distill/teacher_mass"] < 1.0
    with pytest.raises(ConfigError, match=r"algorithm\.top_k is 99, but the tokenizer has only 13 tokens"):
        train(plan(tiny, tmp_path / "more", "distill", *more, "algorithm.top_k=99"), silent)


def test_a_student_that_is_its_teacher_stays_as_it_is(tiny, tmp_path):
    train(plan(tiny, tmp_path, "distill", f"algorithm.teacher={tiny}"), silent)
    first = rows(tmp_path)[0]
    assert first["distill/reverse_kl"] == pytest.approx(0.0, abs=1e-6)
    assert first["actor/grad_norm"] == pytest.approx(0.0, abs=1e-5)


def test_rejection_learns_from_the_best_rows_and_its_ledger_closes(tiny, tmp_path):
    train(plan(tiny, tmp_path / "all", "rejection", "rollout.n=3"), silent)
    for row in rows(tmp_path / "all"):
        assert row["rejection/rows_kept"] == row["rollout/rows_learned"] == 8
        assert row["rollout/rows_asked"] == 24 and row["rollout/rows_dropped/algorithm"] == 16
        assert row["actor/grad_norm"] > 0
    train(plan(tiny, tmp_path / "none", "rejection", "rollout.n=2", "algorithm.min_score=1.0"), silent)
    for row in rows(tmp_path / "none"):
        assert row["rejection/rows_kept"] == row["rollout/rows_learned"] == 0
        assert row["rollout/rows_dropped/algorithm"] == 16 and "actor/grad_norm" not in row
    with pytest.raises(ConfigError, match="rejection compares responses within a group and needs at least 2"):
        plan(tiny, tmp_path / "one", "rejection", "rollout.n=1")


def test_distillation_on_drawn_tokens_needs_draws_of_the_newest_weights(tiny, tmp_path):
    apart = ["driver.kind=ray", "rollout.placement=apart", "driver.max_lag=1", f"algorithm.teacher={tiny}"]
    with pytest.raises(ConfigError, match=r"driver.max_lag = 1 lets older weights draw .* set algorithm.top_k=64"):
        plan(tiny, tmp_path, "distill", *apart)
    assert plan(tiny, tmp_path, "distill", *apart, "algorithm.top_k=4").driver.max_lag == 1


def test_the_best_of_a_group_has_a_response():
    fields = {"group": [1, 1, 5, 5], "score": [3.0, 2.0, 0.0, -1.0]}
    batch = Batch.from_rows([[1], [2], [3], [4]], {"response_mask": [[0.0], [1.0], [1.0], [1.0]]}, fields)
    assert best_of_groups(batch).tokens.tolist() == [2, 3]
    assert best_of_groups(batch, 0.5).tokens.tolist() == [2]
    assert len(best_of_groups(batch, 9.0)) == 0


def test_keys_draw_other_pairs():
    source = TaskPairs(TASKS["reverse"])
    assert source.train(Key.from_seed(0), 0, 4) != source.train(Key.from_seed(1), 0, 4)
