"""Rows that are read when a step needs them: their order is a function of key and place, and nothing else."""

import importlib.util
import itertools
import json
import random
import shutil

import pyarrow as pa
import pytest
from run_configs import tiny_run

from verl_fn.backends.hf.new_model import char_tokenizer
from verl_fn.config import ConfigError, load
from verl_fn.data.files import permuted
from verl_fn.data.hub import Table
from verl_fn.data.loading import file_data
from verl_fn.data.rows import DataError
from verl_fn.runs.logs import TIMED, read_metrics
from verl_fn.runs.loop import train
from verl_fn.runs.prepare import check_has_goal
from verl_fn.state import Key

KEY = Key.from_seed(3)


class Stored:
    """What the package datasets gives for a data set in Arrow's format, and which rows of it were read."""

    def __init__(self, rows):
        self.table, self.read = pa.Table.from_pylist(rows), []
        self.column_names = self.table.column_names

    def __len__(self):
        return len(self.table)

    def __getitem__(self, numbers):
        self.read += numbers
        return self.table.take(pa.array(numbers, pa.int64()))


def rows(source, lengths):
    answer = {"reward_model": {"ground_truth": "a"}}
    return [
        {"data_source": source, "prompt": "a" * n, "extra_info": {"row": i}} | answer for i, n in enumerate(lengths)
    ]


@pytest.fixture
def opened(monkeypatch):
    """Opens stored rows by the name of their data set, without the package datasets."""
    stored = {}
    monkeypatch.setattr("verl_fn.data.loading.is_set", lambda name: name in stored)
    monkeypatch.setattr("verl_fn.data.loading.open_set", lambda name: Table(name, stored[name]))
    return stored


def source(stored, *settings, learns_from="samples", **kwargs):
    files = f"data.train_files={json.dumps(list(stored))}"
    table = load(overrides=[files, "data.stream=true", "data.max_prompt_length=9", *settings]).data
    return file_data(table, char_tokenizer("a"), learns_from=learns_from, **kwargs)


def drawn(problems):
    return [(problem.data_source, problem.extra_info["row"]) for problem in problems]


SETTINGS = {
    "shuffled": [],
    "in order": ["data.shuffle=false"],
    "weighted": ["data.weights=[3, 1]"],
    "without long rows": ["data.filter_overlong_prompts=true", "data.max_prompt_length=3"],
    "both": ["data.filter_overlong_prompts=true", "data.max_prompt_length=3", "data.weights=[3, 1]"],
}


def check_resumption(make):
    """Checks that a source that was just made gives the rows that one gives which has been drawn from since."""
    one = make()
    whole = one.train(KEY, 0, 60)
    for start, count in ((0, 1), (1, 7), (9, 2), (33, 27), (59, 1), (60, 0)):
        for again in (make(), one):
            problems = again.train(KEY, start, count)
            assert problems == whole[start : start + count]
            assert drawn(problems) == drawn(whole[start : start + count])


class Buffered:
    """A mutant: it shuffles in a buffer that it keeps from call to call."""

    def __init__(self, data, size):
        self.data, self.size, self.buffer = data, size, []

    def train(self, key, start, count):
        self.buffer += self.data.train(key, start, count)
        dice = random.Random(key.fold_in(start).seed())
        taken = [self.buffer.pop(dice.randrange(len(self.buffer))) for _ in range(count)]
        self.buffer = self.buffer[-self.size :]
        return tuple(taken)


def test_the_law_catches_a_shuffle_buffer(opened):
    opened["one"] = Stored(rows("one", [1] * 30))
    with pytest.raises(AssertionError):
        check_resumption(lambda: Buffered(source(opened, "data.shuffle=false"), 8))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_stream_continues_anywhere_with_the_rows_that_it_would_have_had(opened, settings):
    """The law of resumption: a run that begins at any problem sees what an undisturbed one sees."""
    opened |= {"one": Stored(rows("one", [1, 5, 2])), "two": Stored(rows("two", [1, 2, 1, 6, 1, 1, 2]))}
    data = source(opened, *settings)
    whole = data.train(KEY, 0, 60)
    assert [problem.id for problem in whole] == list(range(60))
    check_resumption(lambda: source(opened, *settings))
    shuffled = "data.shuffle=false" not in settings
    assert (drawn(data.train(Key.from_seed(4), 0, 60)) != drawn(whole)) == shuffled


def test_every_epoch_has_every_row_once_in_another_order(opened):
    opened |= {"one": Stored(rows("one", [1] * 30)), "two": Stored(rows("two", [1] * 7))}
    epochs = [drawn(source(opened).train(KEY, 37 * epoch, 37)) for epoch in range(3)]
    assert all(len(set(epoch)) == 37 for epoch in epochs) and epochs[0] != epochs[1] != epochs[2]
    weighted = drawn(source(opened, "data.weights=[1, 1]").train(KEY, 0, 400))
    small = [row for name, row in weighted if name == "two"]
    assert 150 < len(small) < 250 and all(len(set(small[i : i + 7])) == 7 for i in range(0, 140, 7))


def test_only_the_rows_of_a_step_are_read(opened):
    opened["large"] = large = Stored(rows("large", [1] * 5000))
    data = source(opened)
    assert sorted(large.read) == list(range(64)), "the first rows are checked when the run starts"
    large.read.clear()
    problems = data.train(KEY, 123456, 8)
    assert len(large.read) == 8 and [row for _, row in drawn(problems)] == large.read


def test_unused_columns_are_counted_in_all_rows_that_are_read(opened):
    made = [row | {"more": None if i < 100 else i, "seen": i} for i, row in enumerate(rows("one", [1] * 140))]
    opened["one"], said = Stored(made), []
    data = source(opened, "data.shuffle=false", say=said.append)
    note = "note: data.train_files, the first {} rows that were read: columns that are not used: {}"
    note += "; a reward function gets what extra_info holds"
    assert said == [note.format(64, "seen (64 rows)")]
    data.train(KEY, 0, 100)
    assert len(said) == 1
    data.train(KEY, 100, 40)
    assert said[1:] == [note.format(204, "more (40 rows), seen (204 rows)")]
    data.train(KEY, 0, 140)
    assert len(said) == 2


def test_long_rows_are_replaced_by_others_of_their_data_set(opened, monkeypatch):
    monkeypatch.setattr("verl_fn.data.loading.MAX_FAILED_DRAWS", 20)
    opened |= {"one": Stored(rows("one", [1, 8, 8, 8])), "two": Stored(rows("two", [2, 8]))}
    limits = ["data.filter_overlong_prompts=true", "data.max_prompt_length=3", "data.weights=[1, 1]"]
    problems = source(opened, *limits).train(KEY, 0, 100)
    assert set(drawn(problems)) == {("one", 0), ("two", 0)}
    assert 30 < sum(name == "one" for name, _ in drawn(problems)) < 70
    opened["two"] = Stored(rows("two", [8, 8]))
    with pytest.raises(DataError, match=r"two: 20 rows in succession are too long; raise data\.max_prompt"):
        source(opened, *limits).train(KEY, 0, 20)
    with pytest.raises(DataError, match="one, row 1: the prompt has 9 tokens, more than 3"):
        source(opened, "data.max_prompt_length=3")
    # Cut prompts fit.
    cut = source(opened, "data.max_prompt_length=3", "data.truncation=left", "data.weights=[1, 1]")
    assert {row for _, row in drawn(cut.train(KEY, 0, 40))} >= {0, 1}


def test_rows_of_a_part_of_a_table_are_rows_of_the_part():
    stored = Stored(rows("one", [1] * 4))
    (block,) = Table("one", stored).take([3, 1, 2]).take([0, 2]).blocks()
    assert list(block.numbers) == stored.read == [3, 2]
    with pytest.raises(DataError, match=r"^one: rows from 9 on cannot be read: ArrowIndexError"):
        next(Table("one", stored, (9, 1)).blocks())


def test_responses_of_the_data_have_a_limit(opened):
    answers = [{"data_source": "s", "prompt": "a", "reward_model": {"ground_truth": "a" * n}} for n in (1, 9)]
    opened["answers"] = Stored(answers)
    limits = ["data.max_prompt_length=2", "data.max_response_length=4"]
    with pytest.raises(DataError, match=r"answers, row 1: prompt and response have 12 tokens, and .* allows 6"):
        source(opened, *limits, learns_from="answers", end_tokens=2)
    data = source(opened, *limits, "data.filter_overlong_prompts=true", learns_from="answers", end_tokens=2)
    assert {problem.answer for problem in data.train(KEY, 0, 20)} == {"a"} and data.max_row == data.max_group / 2 == 6
    # Prompts that are learned from are not cut, so that this is no advice.
    with pytest.raises(DataError, match=r"the prompt has 2 tokens, more than 1; .* such prompts out$"):
        source(opened, "data.max_prompt_length=1", learns_from="answers", end_tokens=2)
    # A prompt has a limit of its own, however short its response is.
    opened["answers"] = Stored([*answers[:1], answers[0] | {"prompt": "aa"}])
    data = source(opened, *limits, "data.filter_overlong_prompts=true", learns_from="answers", end_tokens=2)
    assert {problem.prompt for problem in data.train(KEY, 0, 20)} == {"a"}
    pairs = [{"prompt": "a", "chosen": "a" * n, "rejected": "aa"} for n in (1, 9)]
    opened["answers"] = Stored(pairs)
    data = source(opened, *limits, "data.filter_overlong_prompts=true", learns_from="pairs", end_tokens=2)
    assert {problem.chosen for problem in data.train(KEY, 0, 20)} == {("a",)}
    opened["answers"] = Stored([pairs[0], {"prompt": "a", "chosen": "aa", "rejected": "a" * 9}])
    data = source(opened, *limits, "data.filter_overlong_prompts=true", learns_from="pairs", end_tokens=2)
    assert {problem.rejected for problem in data.train(KEY, 0, 20)} == {("aa",)}, "either response may be too long"
    # A response that is as long as a row may be, behind the longest prompt of another row.
    assert source(opened, *limits[:1], learns_from="labels", end_tokens=2).max_row == 2 + 16 + 2


def test_a_goal_needs_held_out_problems(opened, tiny, tmp_path):
    opened["one"] = Stored(rows("one", [1] * 5))
    plan = tiny_run(tiny, tmp_path / "run", "trainer.stop_at=0.5")
    with pytest.raises(ConfigError, match=r"trainer\.stop_at needs held-out problems"):
        check_has_goal(plan, source(opened))


def test_files_are_not_streamed(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"data\.stream: .*a\.jsonl is a file, .* leave data\.stream out"):
        source([str(tmp_path / "a.jsonl")])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 100, 257])
def test_a_permutation_has_every_number_once(size):
    assert sorted(permuted(KEY, size, place) for place in range(size)) == list(range(size))


def test_permutations_look_random():
    """Numbers stay in place, and follow their neighbours, about as often as by chance: once each."""
    kept, followed = 0, 0
    for number in range(30):
        order = [permuted(KEY.fold_in(number), 64, place) for place in range(64)]
        kept += sum(place == to for place, to in enumerate(order))
        followed += sum(b - a == 1 for a, b in itertools.pairwise(order))
    assert 12 <= kept <= 54 and 12 <= followed <= 54
    assert permuted(KEY, 10**12, 5) < 10**12


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")
def test_a_run_that_goes_on_equals_an_undisturbed_one(tiny, tmp_path):
    import datasets

    lines = [
        {"data_source": "reverse", "prompt": f"{a}{b}>", "reward_model": {"ground_truth": b + a}}
        for a in "abcd"
        for b in "efgh"
    ]
    datasets.Dataset.from_list(lines).save_to_disk(str(tmp_path / "set"))

    def run():
        settings = ["algorithm.name=sft", "data.stream=true", "data.train_batch_size=6", "data.max_prompt_length=9"]
        plan = tiny_run(tiny, tmp_path / "run", f"data.train_files={tmp_path}/set", *settings)
        train(plan, lambda line: None)
        numbers = [
            {k: v for k, v in row.items() if not k.startswith(TIMED)} for row in read_metrics(tmp_path / "run")
        ]
        weights = {f.name: f.read_bytes() for f in (tmp_path / "run/checkpoints/step_3").rglob("*.safetensors")}
        return numbers, weights

    undisturbed = run()
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"run/checkpoints/step_{step}")
    assert run() == undisturbed and len(undisturbed[0]) >= 3 and undisturbed[1]
