"""Sets of Reasoning Gym: named in the config, drawn from keys, scored by their own scorer."""

import importlib.util
import string
import sys
from collections import Counter
from pathlib import Path

import pytest

from verl_fn import scores
from verl_fn.backends.hf.new_model import CHAT_TEMPLATE, char_tokenizer, new_model
from verl_fn.cli import main
from verl_fn.config import ConfigError, load, make_plan
from verl_fn.data.loading import generated
from verl_fn.data.rows import DataError
from verl_fn.runs.logs import read_metrics
from verl_fn.scores import reasoning_gym, reasoning_question
from verl_fn.state import Key

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)
CHARS = "".join(set(string.printable) - set("\r\v\f\n"))
RECIPE = str(Path(__file__).parents[2] / "recipes/grpo_count.toml")
TASK = "data.task=reasoning_gym:chain_sum,leg_counting"


@pytest.fixture(scope="module")
def tokenizer():
    made = char_tokenizer("\n" + CHARS)
    made.chat_template = CHAT_TEMPLATE
    return made


def source(tokenizer, *overrides):
    return generated(load(overrides=overrides).data, tokenizer, "samples")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.task=reasoning_gim:chain_sum"], r"data\.task: must be .*reasoning_gym:SET"),
        (["data.task=reasoning_gym:"], "different names of sets"),
        (["data.task=reasoning_gym:a,a"], "different names of sets"),
        ([TASK, "data.weights=[1.0]"], "data.weights has 1 values for the 2 sources of data.task"),
        ([TASK, "data.weights=[1.0, 0.0]"], "must be > 0"),
        ([TASK, "data.task_options.sum.x=1"], r"data\.task_options\.sum is .* \(chain_sum, leg_counting\)"),
        ([TASK, "data.task_options.chain_sum=1"], r"data\.task_options\.chain_sum is 1, but must be a table"),
    ],
)
def test_wrong_names_weights_and_options_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(overrides=overrides)


def test_the_scorer_is_the_reward_unless_something_else_scores():
    def functions(*overrides):
        return make_plan(load(overrides=["model.path=m", TASK, *overrides])).reward.functions

    assert functions() == ("verl_fn.scores:reasoning_gym",)
    assert functions("reward.functions=['verl_fn.scores:tagged']") == ("verl_fn.scores:tagged",)
    assert functions("env.name=a.py:B") == functions("data.train_files=['a.jsonl']") == ()


def test_a_missing_package_is_named_with_the_way_to_install_it(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        DataError, match=r"data\.task: reasoning_gym:never needs .*pip install .* 'verl_fn\[reasoning-gym\]'"
    ):
        source(tokenizer, "data.task=reasoning_gym:never")


def test_algorithms_that_learn_from_given_answers_and_random_models_are_refused(tokenizer, tmp_path, capsys):
    with pytest.raises(DataError, match="algorithm learns from given pairs"):
        generated(load(overrides=[TASK]).data, tokenizer, "pairs")
    assert main(["train", RECIPE, TASK, f"trainer.dir={tmp_path}", "driver.device=cpu"]) == 2
    assert "needs model.path" in capsys.readouterr().err


@needs_package
def test_questions_are_functions_of_key_and_number_and_some_are_held_out(tokenizer):
    sets = source(tokenizer, TASK, "data.weights=[3, 1]", "data.task_options.chain_sum.max_digits=1")
    one, other = Key.from_seed(1), Key.from_seed(2)
    problems = sets.train(one, 0, 200)
    assert problems[150:160] == source(tokenizer, TASK, "data.weights=[3, 1]",
                                       "data.task_options.chain_sum.max_digits=1").train(one, 150, 10)  # fmt: skip
    assert problems[:20] != sets.train(other, 0, 20) and [p.id for p in problems] == list(range(200))
    assert 120 < Counter(p.data_source for p in problems)["reasoning_gym/chain_sum"] < 180
    held_out = sets.held_out(64)
    texts = {p.prompt[0]["content"] for p in held_out}
    assert len(texts) == 64 and held_out[:10] == sets.held_out(10)
    assert not texts & {p.prompt[0]["content"] for key in (one, other) for p in sets.train(key, 0, 500)}


@needs_package
def test_options_change_the_questions_and_wrong_ones_are_refused(tokenizer):
    easy = "data.task_options.chain_sum.max_terms=2"
    problems = source(tokenizer, "data.task=reasoning_gym:chain_sum", easy).train(Key.from_seed(0), 0, 50)
    assert all(problem.extra_info["question"].count("+") + problem.extra_info["question"].count(" - ") == 1
               for problem in problems)  # fmt: skip
    for option, message in (("max_term=2", "max_term"), ("max_terms=1", "max_terms must be")):
        with pytest.raises(
            DataError, match=rf"no question of chain_sum with data\.task_options\.chain_sum = .*{message}"
        ):
            source(tokenizer, "data.task=reasoning_gym:chain_sum", f"data.task_options.chain_sum.{option}")
    with pytest.raises(DataError, match="no question of no_such_set"):
        source(tokenizer, "data.task=reasoning_gym:no_such_set")


@needs_package
def test_long_prompts_are_drawn_again_and_impossible_ones_are_refused(tokenizer):
    task = ("data.task=reasoning_gym:chain_sum", "data.filter_overlong_prompts=true")
    problems = source(tokenizer, *task, "data.max_prompt_length=130").train(Key.from_seed(0), 0, 20)
    assert max(len(problem.prompt[0]["content"]) for problem in problems) <= 128
    with pytest.raises(DataError, match="of 1000 questions of chain_sum none can be a training problem"):
        source(tokenizer, *task, "data.max_prompt_length=20")
    bare = char_tokenizer(CHARS)
    with pytest.raises(DataError, match="no chat template"):
        source(bare, "data.task=reasoning_gym:chain_sum")


@needs_package
def test_the_sets_own_scorer_scores(tokenizer, monkeypatch):
    problem = source(tokenizer, TASK).held_out(1)[0]

    def score(text, **changes):
        return reasoning_gym(problem.data_source, text, problem.answer, {**problem.extra_info, **changes})

    right = {"score": 1.0, "acc": 1.0, "pred": problem.answer, "scorer_failed": 0.0}
    assert score(f"<answer>1</answer> no: <answer> {problem.answer}\n</answer>") == right == score(problem.answer)
    assert score("<answer></answer>")["score"] == score("x")["acc"] == 0.0
    with pytest.raises(ValueError, match="makes another question"):
        score("1", question="other")
    with pytest.raises(ValueError, match="'sums' is not a set"):
        reasoning_gym("sums", "5", "5")
    from reasoning_gym.factory import DATASETS

    def fails(self, answer, entry):
        raise SyntaxError(answer)

    monkeypatch.setattr(DATASETS[problem.data_source.removeprefix("reasoning_gym/")][0], "score_answer", fails)
    assert score("(") == {"score": 0.0, "acc": 0.0, "pred": "(", "scorer_failed": 1.0}


@needs_package
@pytest.mark.parametrize("name", ["spell_backward", "letter_jumble", "gsm_symbolic", "acre", "chain_sum"])
def test_a_set_that_is_shared_by_seeds_makes_and_scores_as_one_of_its_own(name):
    from reasoning_gym import create_dataset

    for seed in (5, 2**30, 0, 5):
        alone, (shared, entry) = create_dataset(name, seed=seed, size=1), scores._made(name, seed, "{}")
        assert repr(entry) == repr(alone[0]) and (shared.seed, shared.config) == (seed, alone.config)
        for answer in (str(entry["answer"]), str(entry["answer"])[::-1], "x", ""):
            assert repr(shared.score_answer(answer, entry)) == repr(alone.score_answer(answer, entry))


@needs_package
def test_the_words_of_a_set_are_read_once_for_each_of_its_options(monkeypatch):
    from reasoning_gym.algorithmic import spell_backward

    files, read = [], spell_backward.read_data_file
    monkeypatch.setattr(spell_backward, "read_data_file", lambda name: (files.append(name), read(name))[1])
    scores._same_for_every_seed.cache_clear()
    for options in ({}, {"max_word_len": 4}):
        words = {reasoning_question("spell_backward", seed, options)["answer"] for seed in range(40, 60)}
        assert len(words) > 10 and (max(map(len, words)) <= 4) == bool(options)
    assert len(files) == 4, "twice for each, to see that another seed makes no other set"


@needs_package
def test_a_run_samples_and_scores_questions(tmp_path):
    model = new_model(tmp_path / "model", chars=CHARS, hidden_size=32, num_hidden_layers=1, chat_template=True)
    settings = ["rollout.n=2", "data.train_batch_size=2", "trainer.total_training_steps=2"]
    settings += [
        "data.val_size=2",
        "data.max_response_length=4",
        "data.max_prompt_length=240",
        "data.filter_overlong_prompts=true",
        "driver.device=cpu",
        f"trainer.dir={tmp_path / 'run'}",
    ]
    assert main(["train", RECIPE, TASK, f"model.path={model}", *settings, "--quiet"]) == 0
    rows = read_metrics(tmp_path / "run")
    assert all(row["reward/scorer_failed/mean"] == 0.0 for row in rows if row["step"])
    assert any(name.startswith("val-core/reasoning_gym/") for name in rows[0])
    assert "reasoning-gym" in (tmp_path / "run" / "inputs.json").read_text()
