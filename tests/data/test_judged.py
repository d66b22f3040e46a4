"""Judged responses: pairs made of tasks, pairs and labels from files, the rows made of them, and each mistake."""

import json
import random
from collections import Counter
from types import SimpleNamespace

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_fn.backends.hf.new_model import char_tokenizer
from verl_fn.config.schema import DataConfig
from verl_fn.data.encoded import longest_rows
from verl_fn.data.examples import pack_examples, pack_labelled, pack_pairs
from verl_fn.data.files import encode_prompts
from verl_fn.data.judged import Judged, TaskPairs, edited
from verl_fn.data.loading import file_data, read_files
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import TASKS, Problem
from verl_fn.state import Key

USER, SAID = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}
OTHER, SYSTEM = {"role": "assistant", "content": "bb"}, {"role": "system", "content": "a"}


def read_pairs(files, **options):
    return read_files(files, "pairs", **options)


def read_labelled(files):
    return read_files(files, "labels")


def write(tmp_path, *rows, name="rows.jsonl"):
    file = tmp_path / name
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("name", TASKS)
def test_made_pairs_prefer_the_right_answer(name):
    task, key = TASKS[name], Key.from_seed(3)
    source = TaskPairs(task)
    pairs = source.train(key, 10, 40)
    assert [pair.prompt for pair in pairs] == [problem.prompt for problem in task.train(key, 10, 40)]
    assert source.train(key, 20, 1) == pairs[10:11]
    for pair in (*pairs, *source.held_out(20)):
        (chosen,), (rejected,) = pair.chosen, pair.rejected
        assert chosen == pair.answer and task.score(pair, rejected) < task.score(pair, chosen)
        assert rejected and len(rejected) <= source.max_answer and set(rejected) <= set(task.alphabet)
    assert not {pair.prompt for pair in pairs} & {pair.prompt for pair in source.held_out(None)}
    assert source.held_out(20) == source.held_out(30)[:20]


def test_every_kind_of_mistake_is_made():
    dice = random.Random(0)
    made = {edited("abcd", "x", dice) for _ in range(300)}
    assert {"xabcd", "xbcd", "bbcd", "bcd", "abc", "bacd", "abdc", "a"} <= made and "" not in made


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_pairs_in_columns_and_in_messages(tmp_path, name):
    strings = {"prompt": "ab>", "chosen": "ba", "rejected": "ab", "data_source": "reverse"}
    judged = read_pairs([write(tmp_path, strings | {"reward_model": {"ground_truth": "ba"}}, name=name)])
    assert judged == (Judged("ab>", "ba", 0, "reverse", chosen=("ba",), rejected=("ab",)),)
    whole = {"chosen": [USER, SAID], "rejected": [USER, OTHER]}
    (split,) = read_pairs([write(tmp_path, whole, name=name)])
    assert (split.prompt, split.chosen, split.rejected) == ((USER,), ((SAID,),), ((OTHER,),))
    assert (split.answer, split.data_source) == ("", "preferences")
    (explicit,) = read_pairs(
        files=[write(tmp_path, {"prompt": [USER], "chosen": [SAID], "rejected": [OTHER]}, name=name)]
    )
    assert (explicit.prompt, explicit.chosen, explicit.rejected) == (split.prompt, split.chosen, split.rejected)
    (named,) = read_pairs(
        files=[write(tmp_path, {"q": "ab", "chosen": "b", "rejected": "a"}, name=name)], prompt_key="q"
    )
    assert named.prompt == "ab"


def test_labels_come_alone_or_from_pairs(tmp_path):
    for yes, no in ((True, False), (1, 0), (1.0, 0.0)):
        rows = [{"prompt": "a", "completion": "b", "label": yes}, {"prompt": "a", "completion": "c", "label": no}]
        good, bad = read_labelled([write(tmp_path, *rows)])
        assert (good.chosen, good.rejected, bad.chosen, bad.rejected) == (("b",), (), (), ("c",))
    (both,) = read_labelled([write(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c"})])
    assert both.responses == [("b", True), ("c", False)]


def pair(**changes):
    return {"prompt": "ab>", "chosen": "ba", "rejected": "ab"} | changes


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (pair(rejected=None), "line 1: rejected is missing, so chosen has no partner"),
        (pair(chosen=None), "line 1: chosen is missing, so rejected has no partner"),
        (pair(chosen=""), "line 1: chosen is empty"),
        (pair(rejected=[]), "line 1: rejected is empty"),
        (pair(rejected=" \n"), "line 1: rejected is empty"),
        (pair(rejected="ba"), "chosen and rejected are equal, so neither is preferred"),
        (pair(prompt=None), "there is no prompt; without it, chosen and rejected must be lists of messages"),
        (pair(chosen=7), "chosen must be a string or a list of messages"),
        (pair(chosen={"role": "assistant", "content": "a"}), "chosen must be a string or a list of messages.*not {"),
        (pair(chosen=[SAID]), "chosen is a list of messages, and the prompt is a string"),
        (pair(prompt=[USER], chosen=[USER, SAID]), "chosen repeats prompt, and rejected does not"),
        (
            pair(prompt="ab", chosen=[SYSTEM, USER, SAID], rejected=[SYSTEM | {"content": "x"}, USER, OTHER]),
            "chosen repeats prompt, and rejected does not; write both alike",
        ),
        (pair(prompt=[USER], chosen=[USER | {"content": "x"}, SAID]), "chosen begins with a message of 'user', not"),
        (pair(prompt=[USER], chosen=[SAID | {"content": ""}]), "message 0 of chosen is a turn .* without content"),
        ({"chosen": [USER, SAID], "rejected": [SAID, OTHER]}, "conversations chosen and rejected begin differently"),
        ({"chosen": [USER, SAID], "rejected": [USER]}, "rejected has no message of the assistant"),
        ({"prompt": "ab>", "chosen": "ba"}, "there is no column 'rejected'"),
        (pair(data_source=3), "data_source must be a string"),
        (pair(reward_model={}), "reward_model has no ground_truth"),
    ],
)  # fmt: skip
def test_what_is_no_pair(row, message, tmp_path):
    with pytest.raises(DataError, match=message):
        read_pairs([write(tmp_path, row)])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b", "label": "yes"}, "label must be true or false, not 'yes'"),
        ({"prompt": "a", "completion": "", "label": True}, "completion is empty"),
        ({"completion": "b", "label": True}, "there is no prompt; data.prompt_key names"),
        ({"prompt": "a", "completion": "b"}, "there is no column 'label'"),
    ],
)
def test_what_is_not_labelled(row, message, tmp_path):
    with pytest.raises(DataError, match=message):
        read_labelled([write(tmp_path, row)])


def test_rows_of_pairs():
    tokenizer = char_tokenizer("ab>")
    pairs = [
        Judged("a>", "", id=7, chosen=("b",), rejected=("ba",)),
        Judged("ab>", "", id=3, chosen=("ba",), rejected=("b",)),
    ]
    batch = pack_pairs(pairs, tokenizer, 2)
    assert tokenizer.batch_decode(batch.rows(), skip_special_tokens=True) == ["a>b", "a>ba", "ab>ba", "ab>b"]
    assert (batch["pair"].tolist(), batch["chosen"].tolist()) == ([7, 7, 3, 3], [1.0, 0.0, 1.0, 0.0])
    assert [row.tolist()[-1] for row in batch.rows()] == [2] * 4
    assert batch.sum_rows(batch["response_mask"]).tolist() == [2, 3, 3, 2]
    with pytest.raises(DataError, match="does not know every character of the response 'x'"):
        pack_pairs([Judged("a>", "", chosen=("x",), rejected=("b",))], tokenizer, 2)


def test_mismatched_rows_have_the_response_to_the_next_prompt():
    tokenizer = char_tokenizer("abcd>")
    problems = [
        Judged("a>", "", 0, chosen=("b",), rejected=("bb",)),
        Judged("b>", "", 1, rejected=("c",)),
        Judged("c>", "", 2, chosen=("d",)),
    ]
    batch = pack_labelled(problems, tokenizer, 2)
    texts = tokenizer.batch_decode(batch.rows(), skip_special_tokens=True)
    assert texts == ["a>b", "a>bb", "b>c", "c>d", "a>c", "a>c", "b>d", "c>b"]
    assert batch["label"].tolist()[:4] == [1.0, 0.0, 0.0, 1.0]
    assert batch["mismatched"].tolist() == [0.0] * 4 + [1.0] * 4


@pytest.mark.parametrize(("long", "short"), [("chosen", "rejected"), ("rejected", "chosen")])
def test_the_longest_rows_are_known_before_training(long, short, tmp_path):
    rows = [pair(), pair(prompt="abab>", chosen="b", rejected="a"), pair(**{long: "bababa", short: "b"})]
    table = DataConfig(train_files=(str(write(tmp_path, *rows)),))
    tokenizer = char_tokenizer("ab>")
    data = file_data(table, tokenizer, learns_from="pairs", end_tokens=2)
    # bos, prompt, response and end token
    assert (data.max_row, data.max_group) == (1 + 3 + 6 + 1, (1 + 3 + 6 + 1) + (1 + 3 + 1 + 1))
    labels = file_data(table, tokenizer, learns_from="labels", end_tokens=2)
    assert labels.max_row == 1 + 5 + 6 + 1


@pytest.mark.parametrize(("learns_from", "longest"), [("answers", (7, 7)), ("pairs", (7, 12)), ("labels", (9, 9))])
def test_only_the_rows_of_a_pair_stay_together(learns_from, longest):
    """A problem has rows of 5 and 7 tokens, with a prompt of 4 tokens and a response of 5 in one of them."""
    assert longest_rows([SimpleNamespace(rows=np.array([[7, 12, 4, 5]]))], learns_from) == longest


def test_held_out_files_may_have_prompts_alone(tmp_path):
    problem = {"data_source": "reverse", "prompt": "ab>", "reward_model": {"ground_truth": "ba"}}
    file = write(tmp_path, problem)
    assert read_files([file], "pairs", held_out=True)[0].answer == "ba"
    with pytest.raises(DataError, match="there is no column 'chosen'"):
        read_files([file], "pairs")


def test_a_turn_before_the_prompt_ends_once():
    tokenizer = char_tokenizer("ab")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    said = [{"role": "assistant", "content": f"b{end}"} for end in ("", "<eos>")]
    prompts = encode_prompts([Problem((USER, one, USER), "") for one in said], tokenizer)
    assert prompts[0] == prompts[1] == [4, 5, 2, 5, 2, 4, 5, 2]


@pytest.mark.parametrize("end", ["", "<eos>", "<eos> ", "<eos>\n"])
def test_text_that_a_template_rendered_has_each_border_token_once(end):
    """Strings of a prompt and of responses, in rows of every kind; white space after an end is the template's."""
    tokenizer = char_tokenizer("ab> \n")
    pair = Judged("<bos>a>", "b" + end, chosen=("b" + end,), rejected=("ba" + end,))
    answer = Problem("<bos>a>", "b" + end)
    want = ["<bos>a>b<eos>", "<bos>a>ba<eos>"]
    for batch in (pack_pairs([pair], tokenizer, 2), pack_examples([answer], tokenizer, 2)):
        assert [tokenizer.decode(row) for row in batch.rows()] == want[: len(batch)]
    labelled = pack_labelled([pair, attrs.evolve(pair, prompt="b>")], tokenizer, 2)
    texts = [tokenizer.decode(row) for row in labelled.rows()]
    assert all(text.count("<bos>") == text.count("<eos>") == 1 for text in texts)


def test_messages_after_the_last_turn_of_a_response_are_counted(tmp_path):
    unused = Counter()
    rows = [
        pair(prompt=[USER], chosen=[SAID], rejected=[OTHER, USER]),
        pair(prompt=[USER], chosen=[SAID], rejected=[OTHER]),
    ]
    file = write(tmp_path, *rows)
    first, _ = read_pairs([file], unused=unused)
    assert first.rejected == ((OTHER, USER),) and unused == {"messages after the last turn that is learned": 1}


def test_a_response_may_repeat_the_end_of_its_prompt(tmp_path):
    """Another one of the same row may repeat all of it."""
    told = {"role": "system", "content": "s"}
    row = pair(prompt=[told, USER], chosen=[told, USER, SAID], rejected=[USER, OTHER])
    (problem,) = read_pairs([write(tmp_path, row)])
    assert (problem.prompt, problem.chosen, problem.rejected) == ((told, USER), ((SAID,),), ((OTHER,),))


def test_a_labelled_completion_that_is_only_its_prompt_is_named(tmp_path):
    with pytest.raises(
        DataError, match="line 1: completion repeats prompt and ends with it; add the assistant's turn"
    ):
        read_labelled([write(tmp_path, {"prompt": [USER], "completion": [USER], "label": True})])
