"""Losses on held-out rows of algorithms that learn from given answers, against the model's own log-probabilities."""

import json
from types import SimpleNamespace

import pytest
import torch
from run_configs import tiny_run
from transformers import AutoModelForCausalLM

from verl_fn.algorithms import sft
from verl_fn.algorithms.judged import DPOState, dpo, pair_report
from verl_fn.backends.hf.new_model import char_tokenizer, new_model
from verl_fn.config import DPO, SFT, ConfigError, evaluation_plan, load
from verl_fn.data.judged import Judged
from verl_fn.data.tasks import Problem
from verl_fn.errors import ArgumentError
from verl_fn.runs.evaluate import evaluate_model, evaluation_line
from verl_fn.runs.logs import read_metrics
from verl_fn.runs.loop import train
from verl_fn.state import Key, Sampling, TokenOutputs


def role(logprob, asked=None):
    """A model that gives each token the same log-probability."""

    def forward(params, batch, needs):
        if asked is not None:
            asked.append((needs, len(batch)))
        return TokenOutputs({"logprobs": torch.full((batch.num_tokens,), logprob)})

    return SimpleNamespace(forward=forward)


def parts(actor, **more):
    trainers = {"actor": actor, "reference": role(-3.0)}
    return SimpleNamespace(
        trainers=trainers, tokenizer=char_tokenizer("ab"), end_tokens=(2,), get=lambda value: value, **more
    )


STATE = DPOState(SimpleNamespace(params=None), SimpleNamespace(params=None), Key.from_seed(0), 0)
PAIR = Judged("a", "", 2, "pairs", chosen=("bbb",), rejected=("b",))


def test_a_labelled_response_has_gained_if_it_is_above_the_reference_point():
    """Each token gains 2 nats, so responses of 2 and 4 tokens gain 4 and 8, and the reference point is 6 or 7."""
    for good, right in (("b", 0.0), ("bbb", 1.0)):
        other = "bbb" if good == "b" else "b"
        known = [Judged("a", "", 0, "s", chosen=(good,)), Judged("aa", "", 1, "s", rejected=(other,))]
        report = dpo(DPO(loss_type="kto")).evaluate(STATE, [*known, PAIR], parts(role(-1.0)))
        assert report["val-aux/s/label_acc/mean@1"] == right
        assert report["val-aux/pairs/preference/mean@1"] == 1.0 and report["val-aux/pairs/margin/mean@1"] == 4.0


def test_held_out_rows_that_a_loss_cannot_compare_are_left_out():
    unjudged = Problem("a", "", 0, "s")
    several = Judged("a", "", 1, "s", chosen=("b", "bb"), rejected=("a",))
    good, bad = Judged("a", "", 0, "s", chosen=("b",)), Judged("aa", "", 1, "s", rejected=("bb",))
    for kind, right in (("dpo", [PAIR]), ("simpo", [PAIR]), ("kto", [good, bad])):
        algorithm, w = dpo(DPO(loss_type=kind)), parts(role(-1.0))
        others = [unjudged] if kind == "kto" else [unjudged, several, good]
        report = algorithm.evaluate(STATE, right, w)
        assert "val/loss" in report and algorithm.evaluate(STATE, [*others, *right], w) == report
        # The reference point of a labelled response needs another prompt.
        assert algorithm.evaluate(STATE, [*others, good], w) == {}
    with pytest.raises(ArgumentError, match="learns from judged responses, and a problem has none"):
        dpo(DPO()).sample(STATE, [PAIR, unjudged], w)


def test_pairs_are_judged_by_their_own_data_source():
    sources = ("right", "wrong", "right")
    pairs = [Judged("a", "", i, source, chosen=("b",), rejected=("bb",)) for i, source in enumerate(sources)]
    report = pair_report(pairs, torch.tensor([5.0, 1.0, 0.0, 3.0, 4.0, 2.0]), "val-core", "acc/mean@1")
    assert report == {
        "val-core/right/acc/mean@1": 1.0, "val-aux/right/margin/mean@1": 3.0,
        "val-core/wrong/acc/mean@1": 0.0, "val-aux/wrong/margin/mean@1": -3.0,
    }  # fmt: skip


def test_the_likeliest_tokens_are_asked_for_where_the_model_gives_them():
    for gives in (False, True):
        w = parts(role(-2.0, asked := []), gives_likeliest=gives, sampling=Sampling(8))
        report = sft(SFT()).evaluate(STATE, [Problem("a", "b", 0, "s"), Problem("a", "bb", 1, "s")], w)
        assert asked == [(("logprobs", *["top_ids_1"] * gives), 2)]
        assert report == {"val/loss": 2.0, "val-aux/s/nll/mean@1": 2.0}


def talk(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chatty") / "model"
    return new_model(folder, chars="abcd\n", hidden_size=16, num_hidden_layers=1, chat_template=True)


def write(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(model, folder, name, training, held_out, *more):
    """The rows of metrics of a run of one step."""
    folder.mkdir()
    given = (("train", training), ("val", held_out))
    files = [f"data.{key}_files={write(folder / f'{key}.jsonl', *rows)}" for key, rows in given]
    steps = ["trainer.total_training_steps=1", "trainer.val_before_train=true", "data.train_batch_size=2"]
    train(tiny_run(model, folder / "run", f"algorithm.name={name}", *steps, *files, *more), lambda line: None)
    return read_metrics(folder / "run")


def scores(model, *rows):
    """The log-probability and the likeliest token of each learned token, of rows as (prompt, answer) in ids."""
    net, results = AutoModelForCausalLM.from_pretrained(model).double(), []
    for prompt, answer in rows:
        logits = net(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].detach().log_softmax(-1)
        results.append(
            (logits.gather(1, torch.tensor(answer)[:, None])[:, 0], logits.argmax(1) == torch.tensor(answer))
        )
    return results


A, B, C, D, NL, BOS, END = 4, 5, 6, 7, 8, 1, 2


def test_sft_reports_the_loss_and_the_accuracy_of_held_out_answers(chatty, tmp_path):
    held_out = [{"messages": talk("a", "bc")}, {"messages": talk("b", "d"), "data_source": "mine"}]
    before, after = run(chatty, tmp_path / "files", "sft", [{"messages": talk("a", "b")}] * 2, held_out)
    (first, hit), (second, other) = scores(chatty, ([BOS, A, NL], [B, C, END]), ([BOS, B, NL], [D, END]))
    assert before["val-aux/messages/nll/mean@1"] == pytest.approx(float(-first.mean()), rel=1e-5)
    assert before["val-aux/mine/nll/mean@1"] == pytest.approx(float(-second.mean()), rel=1e-5)
    assert before["val-aux/messages/token_acc/mean@1"] == pytest.approx(float(hit.double().mean()))
    assert before["val-aux/mine/token_acc/mean@1"] == pytest.approx(float(other.double().mean()))
    assert before["val/loss"] == pytest.approx(float(-torch.cat([first, second]).mean()), rel=1e-5)
    assert after["val/loss"] != before["val/loss"] and not any(
        "acc/mean" in key for key in before if "token" not in key
    )
    assert evaluation_line(before) == f"held-out loss {before['val/loss']:.3f}"


def test_sft_reports_the_loss_of_held_out_answers_to_prompts_of_text(chatty, tmp_path):
    rows = [{"prompt": "a", "completion": "bc"}]
    before, after = run(chatty, tmp_path / "text", "sft", rows * 2, rows)
    assert after["val/loss"] < before["val/loss"] and not any("acc/mean" in k for k in before if "token" not in k)


def test_preferences_report_their_loss_on_held_out_rows(chatty, tmp_path):
    pair = {"prompt": talk("a"), "chosen": "b", "rejected": "cd"}
    labelled = [
        {"prompt": talk("a"), "completion": text, "label": good} for text, good in (("b", True), ("cd", False))
    ]
    ln2 = pytest.approx(0.6931472, rel=1e-5)
    before, after = run(chatty, tmp_path / "dpo", "dpo", [pair] * 2, [pair])
    assert before["val/loss"] == ln2 and after["val/loss"] < 0.69
    assert after["val-aux/preferences/preference/mean@1"] == 1.0
    before, after = run(chatty, tmp_path / "kto", "dpo", labelled, labelled, "algorithm.loss_type=kto")
    # The policy is its own reference at first: a good response has not gained more than the reference point of 0.
    assert before["val/loss"] == pytest.approx(0.5) and before["val-aux/preferences/label_acc/mean@1"] == 0.5
    assert after["val/loss"] != before["val/loss"]
    (good, _), (bad, _) = scores(chatty, ([BOS, A, NL], [B, END]), ([BOS, A, NL], [C, D, END]))
    before, _ = run(chatty, tmp_path / "simpo", "dpo", [pair] * 2, [pair], "algorithm.loss_type=simpo")
    gap = 2.0 * (good.mean() - bad.mean()) - 1.0
    assert before["val/loss"] == pytest.approx(float(-torch.nn.functional.logsigmoid(gap)), rel=1e-5)
    margin = float(good.mean() - bad.mean())
    assert before["val-aux/preferences/margin/mean@1"] == pytest.approx(margin, rel=1e-4)
    before, after = run(chatty, tmp_path / "scores", "reward_model", [pair] * 2, [pair])
    margin = before["val-aux/preferences/margin/mean@1"]
    assert before["val/loss"] == pytest.approx(float(-torch.nn.functional.logsigmoid(torch.tensor(margin))), rel=1e-4)


PAIR_ROW = {"prompt": talk("a"), "chosen": "b", "rejected": "cd"}


@pytest.mark.parametrize("metric", ["acc", "reward"])
@pytest.mark.parametrize(("name", "row"), [("sft", {"messages": talk("a", "bc")}), ("dpo", PAIR_ROW)])
def test_a_goal_is_refused_at_the_start_where_nothing_judges_answers(chatty, tmp_path, name, row, metric):
    goal = ["trainer.stop_at=0.5", "trainer.test_freq=1", f"trainer.stop_metric={metric}"]
    refused = (
        f"the {metric} of held-out answers, and nothing judges answers in this run; set reward.functions, or leave"
    )
    with pytest.raises(ConfigError, match=refused):
        run(chatty, tmp_path / "a", name, [row] * 2, [row], *goal)
    assert not read_metrics(tmp_path / "a/run")
    # An evaluation has no next step that it could be the last one before.
    settings = [f"model.path={chatty}", "algorithm.name=sft", "driver.device=cpu", f"trainer.dir={tmp_path}/x", *goal]
    answers = write(tmp_path / "answers.jsonl", {"prompt": "a", "completion": "bc"})
    plan = evaluation_plan(load(overrides=[*settings, f"data.val_files={answers}"]))
    assert "val/loss" in evaluate_model(plan, lambda line: None)[0]


def test_the_goal_of_a_reward_model_is_the_accuracy_of_its_pairs(chatty, tmp_path):
    goal = ["trainer.stop_at=0.0", "trainer.test_freq=1"]
    (row,) = run(chatty, tmp_path / "a", "reward_model", [PAIR_ROW] * 2, [PAIR_ROW], *goal)
    assert row["val-core/preferences/acc/mean@1"] in (0.0, 1.0)
    refused = "compared with reward, and this run's held-out rows have only acc; set trainer.stop_metric=acc"
    with pytest.raises(ConfigError, match=refused):
        run(chatty, tmp_path / "b", "reward_model", [PAIR_ROW] * 2, [PAIR_ROW], *goal, "trainer.stop_metric=reward")


def test_a_model_is_evaluated_by_what_can_be_known_without_a_run(chatty, tmp_path):
    """Its own loss on given answers; not a comparison with a model that is not there."""
    rows = [{"prompt": "a", "completion": "bc"}, {"prompt": talk("a"), "chosen": "b", "rejected": "cd"}]
    for name, row in zip(("answers", "pairs"), rows, strict=True):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")

    def evaluate(name, *more):
        settings = [
            f"algorithm.name={name}",
            f"model.path={chatty}",
            "driver.device=cpu",
            f"trainer.dir={tmp_path}/x",
        ]
        return evaluate_model(evaluation_plan(load(overrides=[*settings, *more])), lambda line: None)

    report, answers = evaluate("sft", f"data.val_files={tmp_path}/answers.jsonl")
    ((logprobs, _),) = scores(chatty, ([BOS, A], [B, C, END]))
    assert report["val/loss"] == pytest.approx(float(-logprobs.mean()), rel=1e-5) and answers == []
    unknown = "no ground truth to judge answers by, and only a run has the reference that dpo compares them with"
    with pytest.raises(ConfigError, match=unknown):
        evaluate("dpo", f"data.val_files={tmp_path}/pairs.jsonl")
    plan = tiny_run(chatty, tmp_path / "x", "algorithm.name=sft", f"data.train_files={tmp_path}/answers.jsonl")
    with pytest.raises(ConfigError, match=r"there are no held-out problems: set data\.val_files"):
        evaluate_model(plan, lambda line: None)
