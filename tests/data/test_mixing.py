"""Several training files with weights: shares, epochs of each file, and entering the stream anywhere."""

import json
from collections import Counter

import attrs
import pytest

from verl_fn.backends.hf.new_model import char_tokenizer
from verl_fn.config import ConfigError, evaluation_plan, load, make_plan, notes
from verl_fn.data.files import BLOCK, FileData, turns
from verl_fn.data.loading import file_data
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import Problem
from verl_fn.state import Key

KEY = Key.from_seed(5)


def mixed(sizes=(3, 50), weights=(0.5, 1.5), shuffle=True):
    problems = [
        Problem(f"{file}.{row}", "", data_source=str(file)) for file, n in enumerate(sizes) for row in range(n)
    ]
    return FileData(tuple(problems), (), shuffle, sizes=sizes, weights=weights)


def test_a_stream_is_the_same_wherever_it_is_entered():
    whole = turns(KEY, 0, 2 * BLOCK + 20, (1.0, 2.0, 0.5))
    for start, count in ((0, 1), (BLOCK - 1, 2), (BLOCK, 1), (2 * BLOCK + 7, 9)):
        assert turns(KEY, start, count, (1.0, 2.0, 0.5)) == whole[start : start + count]
    data = mixed()
    assert data.train(KEY, 5000, 40) == data.train(KEY, 4990, 60)[10:50]
    assert [problem.id for problem in data.train(KEY, 7, 3)] == [7, 8, 9] and data.train(KEY, 0, 0) == ()
    assert data.train(KEY, 0, 40) != data.train(Key.from_seed(6), 0, 40)


def test_shares_are_the_weights_and_no_number_is_left_out():
    drawn = turns(KEY, 0, BLOCK, (1.0, 3.0))
    assert abs(Counter(file for file, _ in drawn)[0] / BLOCK - 0.25) < 0.03
    for file in (0, 1):
        numbers = [number for of, number in drawn if of == file]
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_file_has_epochs_of_its_own(shuffle):
    prompts = [problem.prompt for problem in mixed(shuffle=shuffle).train(KEY, 0, 200)]
    small, large = ([prompt for prompt in prompts if prompt.startswith(file)] for file in "01")
    epochs = [small[i : i + 3] for i in range(0, len(small) - 2, 3)]
    assert all(set(epoch) == {"0.0", "0.1", "0.2"} for epoch in epochs)
    assert set(large[:50]) == set(large[50:100]) == {f"1.{row}" for row in range(50)}
    assert (len({tuple(epoch) for epoch in epochs}) > 1) == shuffle == (large[:50] != large[50:100])


def test_files_of_one_size_have_orders_of_their_own():
    prompts = [problem.prompt.split(".") for problem in mixed((20, 20), (1.0, 1.0)).train(KEY, 0, 30)]
    first, second = ([row for of, row in prompts if of == file] for file in "01")
    assert first[:8] != second[:8]


def write(file, source, lengths):
    row = {"data_source": source, "reward_model": {"ground_truth": "a"}}
    file.write_text("".join(json.dumps(row | {"prompt": "a" * n}) + "\n" for n in lengths))
    return str(file)


def test_weights_of_files_count_the_rows_that_are_left(tmp_path):
    files = [
        write(tmp_path / "one.jsonl", "one", [1, 9, 2]),
        write(tmp_path / "two.jsonl", "two", [*range(1, 6), 9, 9]),
    ]
    settings = ["data.weights=[1, 1]", "data.filter_overlong_prompts=true", "data.max_prompt_length=7"]
    table = load(overrides=[*settings, f"data.train_files={json.dumps(files)}"]).data
    said = []
    data = file_data(table, char_tokenizer("a"), said.append)
    assert data.sizes == (2, 5) and [problem.id for problem in data.training] == [0, 2, 3, 4, 5, 6, 7]
    left_out = [f"data.train_files: left out {some} prompts, longer than 7 tokens" for some in ("1 of 3", "2 of 7")]
    assert said == left_out
    prompts = {p.prompt for p in data.train(KEY, 0, 20) if p.data_source == "one"}
    assert prompts == {"a", "aa"}
    write(tmp_path / "one.jsonl", "one", [9, 9])
    with pytest.raises(DataError, match="all 2 prompts are longer than 7 tokens"):
        file_data(table, char_tokenizer("a"), said.append)
    write(tmp_path / "one.jsonl", "one", [1, 1])
    with pytest.raises(DataError, match=r"two\.jsonl, line 4: the prompt has 5 tokens, more than 4"):
        file_data(attrs.evolve(table, filter_overlong_prompts=False, max_prompt_length=4), char_tokenizer("a"))


@pytest.mark.parametrize("long", ["filter_overlong_prompts=true", "truncation=left", "truncation=right"])
def test_each_row_is_drawn_in_the_share_of_its_own_file(tmp_path, long):
    """Whether long prompts are left out or cut; ``one`` begins with a long one, and ``two`` ends with one."""
    lengths = {"one": [9, 1, 2], "two": [3, 4, 8, 5, 9]}
    files = [write(tmp_path / f"{name}.jsonl", name, of) for name, of in lengths.items()]
    settings = ["data.weights=[1, 2]", f"data.{long}", "data.max_prompt_length=7", "data.shuffle=false"]
    data = file_data(
        load(overrides=[*settings, f"data.train_files={json.dumps(files)}"]).data, char_tokenizer("a"), [].append
    )
    kept = {name: [n for n in of if n <= 7 or "truncation" in long] for name, of in lengths.items()}
    assert data.sizes == tuple(len(of) for of in kept.values()) and len(data.training) == sum(data.sizes)
    drawn = data.train(KEY, 0, 60)
    for name, of in kept.items():
        found = [len(problem.prompt) for problem in drawn if problem.data_source == name]
        assert found == (of * 60)[: len(found)] and len(found) > 2 * len(of)
    of_files = [problem.data_source == "two" for problem in drawn]
    assert of_files == [file == 1 for file, _ in turns(KEY.fold_in("files"), 0, 60, (1.0, 2.0))]


def test_as_many_weights_as_files_are_needed_and_an_evaluation_needs_neither():
    files = 'data.train_files=["a.jsonl", "b.jsonl"]'
    with pytest.raises(ConfigError, match=r"data\.weights has 3 values for the 2 sources of data\.train_files"):
        load(overrides=[files, "data.weights=[1, 1, 1]"])
    cfg = load(overrides=[files, "data.weights=[1, 2]", "model.path=m", "data.val_files=['v.jsonl']"])
    assert make_plan(cfg).data.weights == (1.0, 2.0) and evaluation_plan(cfg).data.weights == ()
    assert not any("data.weights" in note for note in notes(None, [files, "data.weights=[1, 2]"]))


def test_weights_of_sets_do_not_count_for_the_held_out_problems_of_a_file(tmp_path):
    sets = ["data.task=reasoning_gym:chain_sum,leg_counting", "data.weights=[3, 1]"]
    cfg = load(overrides=[*sets, "model.path=m", f"data.val_files={write(tmp_path / 'v.jsonl', 'v', [1, 2])}"])
    data = file_data(evaluation_plan(cfg).data, char_tokenizer("a"), print)
    assert len(data.validation) == 2 and not data.training and data.weights == data.sizes == ()
