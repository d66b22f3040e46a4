"""The examples do what they say, on small settings."""

import importlib.util
from pathlib import Path

import pytest

from verl_fn.cli import main
from verl_fn.data.examples import TaskDialogues
from verl_fn.data.tasks import TASKS, Problem
from verl_fn.environments import Done
from verl_fn.runs.logs import read_metrics
from verl_fn.state import Key
from verl_fn.testing import check_advantage, check_loss

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_custom_algorithm_learns():
    scores = load("custom_algorithm").main(steps=12)
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.03


def test_the_parts_of_the_custom_algorithm_obey_the_laws():
    example = load("custom_algorithm")
    check_loss(example.imitate)
    check_advantage(example.best_of_group)


@pytest.mark.parametrize(("name", "cls"), [("calculator", "Calculator"), ("guess_number", "GuessNumber")])
def test_dialogues_to_imitate_are_what_the_environment_says(name, cls):
    """And end where it ends the conversation, right ones with a reward of 1."""
    environment, task = getattr(load(name), cls), TASKS[name]
    rewards = []
    for problem in TaskDialogues(task).train(Key.from_seed(0), 0, 50):
        plain = task.train(Key.from_seed(0), problem.id, 1)[0]
        one = environment()
        heard, messages = one.reset(plain), list(problem.messages)
        while heard:
            assert [messages.pop(0)] == heard
            heard = one.step(messages.pop(0)["content"])
            if isinstance(heard, Done):
                rewards.append(heard.reward)
                heard = None
        assert messages == [] and (rewards[-1] == 1.0) == (problem.answer == plain.answer)
    assert {0.0, 1.0} == set(rewards)


def test_halving_finds_every_number_and_counting_up_does_not():
    won = {False: set(), True: set()}
    for problem in TaskDialogues(TASKS["guess_number"]).train(Key.from_seed(0), 0, 100):
        plain = TASKS["guess_number"].train(Key.from_seed(0), problem.id, 1)[0]
        won[problem.id % 4 == 0].add((plain.answer, problem.answer == plain.answer))
    assert won[True] == {(str(i), True) for i in range(1, 8)}
    assert won[False] == {(str(i), i <= 3) for i in range(1, 8)}


def test_calls_and_guesses_that_cannot_be_read():
    calculator, game = load("calculator").Calculator(), load("guess_number").GuessNumber()
    for reply in ("44", "", "8", "x"):
        game.reset(Problem("aaaa>", "4"))
        assert game.step(reply) == Done(0.0)
    calculator.reset(Problem("3*4", "12"))
    assert calculator.step("=3+4")[0]["content"] == calculator.step('={"a": 3')[0]["content"] == "?"
    assert calculator.step("") == Done(0.0) and calculator.step("12") == Done(1.0)


def test_an_environment_a_reward_and_an_algorithm_in_one_file_learn(tmp_path, monkeypatch):
    assert len((EXAMPLES / "custom_environment.py").read_text().splitlines()) < 100
    monkeypatch.chdir(EXAMPLES.parent)
    settings = [f"trainer.dir={tmp_path}", "trainer.total_training_steps=12", "driver.device=cpu", "data.val_size=8"]
    settings += ["data.train_batch_size=6"]
    assert main(["train", "recipes/letters.toml", *settings, "--quiet"]) == 0
    rows = [row for row in read_metrics(tmp_path) if row["step"]]
    scores = [row["critic/score/mean"] for row in rows]
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.03
    assert all(row["env/turns/mean"] > 1.0 and row["rollout/rows_asked"] == 96 for row in rows)


def test_updates_compare_and_nothing_is_mutated():
    tables = load("compare_updates").main(rows=2)
    kl, rows = tables["with 0.1 * KL"], tables["seq-mean-token-mean"]
    assert set(kl) == set(rows) and len(kl) > 10
    for name, (cosine, distance, cosine_after, distance_after) in kl.items():
        assert 0.9 < cosine <= 1.0001 and 0.0 < distance < rows[name][1], name
        assert cosine_after > 0.9 and distance_after > 0.0, name
    for table in tables.values():
        distances = [entry[1] for entry in table.values()]
        assert distances == sorted(distances, reverse=True)


def test_the_example_of_tests_passes():
    assert pytest.main(["-q", "-p", "no:cacheprovider", str(EXAMPLES / "test_custom_loss.py")]) == 0


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_gradients_by_row_and_the_predicted_change():
    scale, gap, predicted, actual = load("gradients_by_row").main().values()
    assert 1.0 < scale < 1000.0 and gap < 1e-6
    assert predicted < 0.0 and abs(actual - predicted) < 0.2 * abs(predicted)
