"""Data sets of the package `datasets`: entries, rows as those of files, columns that are converted, and errors."""

import importlib.util
import json
import shutil
import sys
import warnings
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from run_configs import tiny_run

from verl_fn.config import ConfigError, load
from verl_fn.data import rows as data_rows
from verl_fn.data.columns import learned_turns
from verl_fn.data.converters import gsm8k, math, sharegpt
from verl_fn.data.entries import entry_columns
from verl_fn.data.hub import HubError, open_set, prepare_hub, recorded
from verl_fn.data.loading import converters, read_files
from verl_fn.data.rows import DataError
from verl_fn.runs.history import changed_inputs, fingerprints

INSTALLED = importlib.util.find_spec("datasets") is not None
needs_datasets = pytest.mark.skipif(
    not INSTALLED, reason="datasets is not installed: pip install 'verl_fn[datasets]'"
)
COMMIT = "c" * 40
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
---
"""


def question(n):
    return {"question": f"{n}+0?", "answer": f"It is {n}.\n#### {n},000"}


def problem(n):
    return {"problem": f"Half of {n}?", "solution": rf"It is $\boxed{{\frac{{{n}}}{{2}}}}$.", "level": "Level 1"}


def row(n):
    truth = {"ground_truth": n / 10, "style": None if n % 2 else "rule"}
    return {
        "data_source": "s",
        "prompt": [{"role": "user", "content": f"{n}?"}],
        "reward_model": truth,
        "ability": "a",
    }


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """No connection, and empty caches."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    if INSTALLED:
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "arrow"))


@pytest.fixture
def snapshot(tmp_path):
    """A set of the hub, with a card and two splits, in the cache as the hub's library keeps it."""
    folder = tmp_path / "hub/datasets--me--sums/snapshots" / COMMIT
    (folder / "main").mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    for split, numbers in (("train", range(5)), ("test", (7,))):
        pq.write_table(pa.Table.from_pylist([question(n) for n in numbers]), folder / f"main/{split}-0.parquet")
    (tmp_path / "hub/datasets--me--sums/refs").mkdir()
    (tmp_path / "hub/datasets--me--sums/refs/main").write_text(COMMIT)
    return folder


def saved(folder, rows):
    """Writes rows as ``save_to_disk`` does."""
    import datasets

    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(str(folder))
    return str(folder)


@needs_datasets
def test_a_set_of_the_hub_is_read_offline_at_its_commit(snapshot):
    entry = f"hub:datasets/me/sums@{COMMIT}#main/train"
    problems = read_files([entry], "samples", convert=[gsm8k])
    assert [p.answer for p in problems] == [f"{n}000" for n in range(5)] and problems[2].id == 2
    assert problems[1].prompt[0]["content"].startswith("1+0? Let's think step by step")
    (held_out,) = read_files([entry.replace("train", "test")], "samples", convert=[math, gsm8k])
    assert held_out.answer == "7000" and held_out.data_source == "openai/gsm8k"
    # The same files without the hub, and a part of a split as the package writes it.
    assert read_files([f"{snapshot}#main/train"], "samples", convert=[gsm8k]) == problems
    assert read_files([f"{snapshot}#train[1:3]"], "samples", convert=[gsm8k])[0].answer == "1000"


@needs_datasets
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "train.jsonl", "z.parquet", "main/train-0.parquet"])
def test_a_folder_that_prepare_wrote_has_the_rows_of_its_files_alone(name, snapshot, tmp_path):
    """The package takes a file whose name says no split for rows of ``train``."""
    shutil.rmtree(snapshot / "main")
    (snapshot / "README.md").unlink()
    (snapshot / name).parent.mkdir(exist_ok=True)
    rows = [row(n) for n in range(3)]
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), snapshot / name)
    else:
        (snapshot / name).write_text("".join(json.dumps(one) + "\n" for one in rows))
    prepare_hub("hub:datasets/me/sums", tmp_path / "out")
    problems = read_files([f"{tmp_path}/out#train"], "samples")
    assert [p.prompt[0]["content"] for p in problems] == ["0?", "1?", "2?"]
    assert recorded(tmp_path / "out") == f"hub:datasets/me/sums@{COMMIT}"


@needs_datasets
def test_rows_of_a_saved_set_are_those_of_a_file(tmp_path, tiny):
    rows = [row(n) for n in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    entry = saved(tmp_path / "set", rows)
    assert read_files([entry], "samples") == read_files([tmp_path / "rows.parquet"], "samples")
    assert read_files([entry, entry], "samples")[5].id == 5
    pairs = [{"prompt": "a", "chosen": "b", "rejected": str(n)} for n in range(3)]
    entries = [saved(tmp_path / "pairs", pairs)]
    assert [p.rejected for p in read_files(entries, "pairs")] == [("0",), ("1",), ("2",)]
    assert len(read_files(entries, "labels")[0].responses) == 2
    plan = tiny_run(tiny, tmp_path / "run", f"data.train_files={entry}")
    before = fingerprints(plan)
    assert str(entry) in before
    saved(tmp_path / "set", rows[:3])
    assert fingerprints(plan) != before, "a continued run reports other rows"


@needs_datasets
def test_what_cannot_be_read_says_why(snapshot, tmp_path):
    import datasets

    hub = "hub:datasets/me/sums"
    folder = saved(tmp_path / "set", [row(1)])
    datasets.DatasetDict(train=datasets.Dataset.from_list([row(1)])).save_to_disk(str(tmp_path / "dict"))
    datasets.Dataset.from_list([row(1)]).select([]).save_to_disk(str(tmp_path / "empty"), num_shards=1)
    (tmp_path / "none").mkdir()
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), tmp_path / "none/train.parquet")
    for entry, said in (
        (f"{hub}@{COMMIT}", "names no split; write hub:datasets/me/sums@.*#CONFIG/SPLIT"),
        (f"{hub}@{COMMIT}#none/train", r"cannot be read: ValueError: .*Available: \['main'\]"),
        (f"{hub}@{COMMIT}#main/dev", r"cannot be read: ValueError: .*'train', 'test'"),
        (f"hub:org/model@{COMMIT}#train", "names a model"),
        (f"{folder}#train", "without #train"),
        (str(tmp_path / "dict"), "has the splits train; name the folder of one: .*dict/SPLIT"),
        (f"{snapshot}#train[5:]", "corresponds to no data"),
        (f"{tmp_path}/none#train", "ArrowInvalid: BatchSize must be"),
        (str(tmp_path / "empty"), "has no rows"),
    ):
        with pytest.raises(DataError, match=said):
            open_set(entry)
    with pytest.raises(HubError, match="sums@main is no commit, and the hub cannot be asked"):
        open_set(f"{hub}#main/train")
    with pytest.raises(HubError, match=r"other@c* is not in the hub's cache, or not all"):
        open_set(f"hub:datasets/me/other@{COMMIT}#train")
    (snapshot.parents[1] / "trees").mkdir()
    listing = {name: {"size": 1, "blob_id": "0" * 40} for name in ("main/train-0.parquet", "main/train-1.parquet")}
    (snapshot.parents[1] / f"trees/{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": listing}))
    with pytest.raises(HubError, match="or not all of it"):
        open_set(f"{hub}@{COMMIT}#train")
    with pytest.raises(DataError, match=r"set, row 0: there is no column 'question'; its columns are data_source"):
        read_files([folder], "samples", prompt_key="question")
    with pytest.raises(DataError, match="there is no column 'data_source'; its columns are question, answer"):
        read_files([f"{snapshot}#train"], "samples")
    (tmp_path / "set" / "data-00000-of-00001.arrow").write_bytes(b"not Arrow")
    with pytest.raises(DataError, match="set cannot be read"):
        open_set(folder)


@needs_datasets
def test_a_revision_is_resolved_once_and_written_into_the_config(snapshot, monkeypatch):
    import huggingface_hub

    class Info:
        sha = COMMIT

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *args, **kwargs: Info)
    with pytest.raises(DataError, match=f"a run needs the commit; it is now hub:datasets/me/sums@{COMMIT}#train"):
        open_set("hub:datasets/me/sums@v1#train")
    with pytest.raises(DataError, match=f"it is now hub:datasets/me/sums@{COMMIT}#main/train"):
        open_set("hub:datasets/me/sums@v1#main/train")


def test_without_the_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for entry in (f"hub:datasets/me/sums@{COMMIT}#train", f"{tmp_path}#train"):
        with pytest.raises(DataError, match=r"package datasets.*pip install .* 'verl_fn\[datasets\]'"):
            read_files([entry], "samples")


def test_a_file_more_or_less_is_another_data_set(tiny, tmp_path):
    (tmp_path / "set").mkdir()
    plan = tiny_run(tiny, tmp_path / "run", f"data.train_files={tmp_path}/set#train")
    prints = []
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "set" / name).write_text("{}")
        prints.append(fingerprints(plan))
    (tmp_path / "set" / "a.jsonl").unlink()
    for others in (prints[0], fingerprints(plan)):
        assert changed_inputs(prints[1], others) == [f"another content of {tmp_path}/set#train"]
    assert changed_inputs(prints[1], prints[1]) == []


def test_a_set_without_its_folder_is_no_file(tmp_path):
    with pytest.raises(DataError, match=r"there is no folder .*nothing"):
        open_set(f"{tmp_path}/nothing#train")


def test_a_file_with_a_number_sign_is_a_file(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a#1.jsonl").write_text(json.dumps(row(1)))
    assert read_files([tmp_path / "a#1.jsonl"], "samples")[0].answer == "0.1"


def test_columns_of_files_are_converted(tmp_path):
    lines = [question(1), problem(3) | {"level": None}, row(5)]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    problems = read_files([tmp_path / "mixed.jsonl"], "samples", convert=[gsm8k, math])
    assert [p.answer for p in problems] == ["1000", r"\frac{3}{2}", "0.5"]
    assert [p.data_source for p in problems] == ["openai/gsm8k", "DigitalLearningGmbH/MATH-lighteval", "s"]
    assert problems[1].extra_info == {"ability": "math", "level": None, "solution": lines[1]["solution"]}
    pairs = [{"q": "a", "good": "b", "bad": "c"}]
    pq.write_table(pa.Table.from_pylist(pairs), tmp_path / "pairs.parquet")
    renamed = [lambda row: {"prompt": row["q"], "chosen": row["good"], "rejected": row["bad"]}]
    for learns_from in ("pairs", "labels"):
        assert read_files([tmp_path / "pairs.parquet"], learns_from, convert=renamed)[0].chosen == ("b",)
    with pytest.raises(DataError, match=r"there is no column 'reward_model'; its columns are prompt, data_source"):
        read_files([tmp_path / "pairs.parquet"], "samples", convert=[lambda row: {"prompt": "", "data_source": ""}])


def test_the_first_function_that_returns_a_row_makes_it(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"q": "a", "bad": "c"}))

    def pairs(row):
        return {"prompt": row["q"], "chosen": "b", "rejected": row["bad"]}

    def others(row):
        return row | {"prompt": "d", "chosen": "e", "rejected": "f"}

    for convert, prompt in (([lambda row: None, pairs, others], "a"), ([others, pairs], "d")):
        assert read_files([tmp_path / "a.jsonl"], "pairs", convert=convert)[0].prompt == prompt


@pytest.mark.parametrize(
    "line, said",
    [
        ({"question": "2?", "answer": "two"}, "line 1: gsm8k of .* failed: ValueError: the answer has no number"),
        ({"problem": "2?", "solution": "two"}, r"line 1: math of .* failed: ValueError: the solution has no \\box"),
        ({"problem": 2, "solution": "two"}, "must be strings"),
        ({"x": 1}, "line 1: wrong of data.convert returned 1; return a dict"),
    ],
)  # fmt: skip
def test_errors_of_conversion_name_the_row(tmp_path, line, said):
    def wrong(row):
        return row["x"]

    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    with pytest.raises(DataError, match=said):
        read_files([tmp_path / "a.jsonl"], "samples", convert=[gsm8k, math, wrong])


def test_functions_of_the_config(tmp_path, tiny):
    (tmp_path / "mine.py").write_text("number = 3\ndef double(row):\n    return row\n")
    plan = tiny_run(tiny, tmp_path / "run", f"data.convert={tmp_path}/mine.py:double", "data.train_files=x.jsonl")
    assert converters(plan.data)[0]({"a": 1}) == {"a": 1}
    assert str(tmp_path / "mine.py") in fingerprints(plan)
    with pytest.raises(ConfigError, match=r"data\.convert: .*mine\.py:number is 3; name a function"):
        converters(load(overrides=[f"data.convert={tmp_path}/mine.py:number"]).data)
    with pytest.raises(ConfigError, match=r"data\.convert has 'gsm8k'; it must be a function as FILE\.py:NAME"):
        load(overrides=["data.convert=gsm8k"])
    entry = f"hub:datasets/me/sums@{COMMIT}#main/train"
    plan = tiny_run(tiny, tmp_path / "run", f"data.train_files=['{entry}', 'sets/a#train']")
    assert plan.data.train_files[0] == entry and plan.data.train_files[1].endswith("/sets/a#train")


def test_conversations_of_sharegpt(tmp_path):
    tools = [{"name": "add", "parameters": {"type": "object"}}]
    call = {"name": "add", "arguments": {"a": 2}}
    turns = [
        {"from": "human", "value": "2+3?"}, {"from": "Function_Call", "value": json.dumps(call)},
        {"from": "observation", "value": "5"}, {"from": "gpt", "value": "5", "weight": 0},
        {"role": "user", "content": "Sure?"}, {"from": "GPT", "value": "Yes"},
    ]  # fmt: skip
    rows = [{"conversations": turns, "system": "Add.", "tools": json.dumps(tools)}]
    rows.append({"conversations": json.dumps([{"from": "system", "value": "Add."}, *turns]), "system": "Add."})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_files([tmp_path / "a.jsonl"], "answers", convert=[sharegpt])
    assert first.messages == second.messages and first.tools == tuple(tools)
    roles = ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert [message["role"] for message in first.messages] == roles
    assert first.messages[2]["tool_calls"] == [{"type": "function", "function": call}]
    assert learned_turns(first.messages) == [2, 6]
    assert sharegpt({"text": "a"}) is None
    (unlearned,) = sharegpt({"conversations": [turns[1] | {"weight": 0}]})["messages"]
    assert unlearned == {**first.messages[2], "weight": 0}
    unusable = ({"from": "narrator", "value": "a"}, "narrator"), (turns[1] | {"value": "add"}, "no object of JSON")
    for turn, said in unusable:
        with pytest.raises(ValueError, match=said):
            sharegpt({"conversations": [turn]})
    # The error about such rows names the function.
    with pytest.raises(DataError, match=r"or messages, or prompt and completion .*converters:sharegpt"):
        read_files([tmp_path / "a.jsonl"], "answers")


def said_of(folder, convert, *rows, learns="samples"):
    """The problems of converted rows, and what is counted as not used."""
    unused = Counter()
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_files([folder / "a.jsonl"], learns, convert=[convert], unused=unused), unused


def test_columns_beside_those_of_a_converter_are_used_or_named(tmp_path):
    tools = [{"name": "add", "parameters": {"type": "object"}}]
    asked, solved = {"question": "2+3?", "answer": "#### 5"}, {"problem": "2+3?", "solution": r"\boxed{5}"}
    for convert, row in ((gsm8k, asked), (math, solved)):
        (problem,), unused = said_of(tmp_path, convert, row | {"tools": tools, "enable_thinking": False})
        assert problem.tools == tuple(tools) and problem.chat_template_kwargs == {"enable_thinking": False}
        assert unused == {} and "tools" not in problem.extra_info
        for name, value in (("system", "Add."), ("video", "a.mp4"), ("images", ["gone.png"])):
            with pytest.raises(DataError, match=f"line 1: (the column {name} (has|is not used)|image 1: )"):
                said_of(tmp_path, convert, row | {name: value})
    (problem,), unused = said_of(tmp_path, gsm8k, asked | {"id": 7, "split": "train", "messages": [{"role": "user"}]})
    assert unused == {} and problem.extra_info.keys() == {"ability", "answer", "question"}
    about = {"weight": 0.5, "train": False, "image_id": "a7", "num_images": 2, "video": None, "images": [],
             "context": "sums", "answer": "0.5"}  # fmt: skip
    (problem,), unused = said_of(tmp_path, math, solved | about)
    assert unused == {} and problem.extra_info.items() >= about.items()


def test_a_solution_without_a_box_names_the_column_of_the_answer(tmp_path):
    for more, hint in (({"answer": "5"}, "; the row has a column answer, and a function of your own can"), ({}, "$")):
        with pytest.raises(DataError, match=rf"the solution has no .*: 'two'{hint}"):
            said_of(tmp_path, math, {"problem": "1+1?", "solution": "two"} | more)


def test_messages_beside_conversations_are_not_replaced(tmp_path):
    turns = [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "5"}]
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    rows = [{"messages": one, "conversations": turns} for one in (messages, None, [], "", "5", ["5"])]
    rows += [{"messages": messages, "conversations": None}]
    problems, unused = said_of(tmp_path, sharegpt, *rows, learns="answers")
    assert [problem.answer for problem in problems] == ["2", *5 * ["5"], "2"] and unused == {"conversations": 1}
    ((problem,), _) = said_of(tmp_path, sharegpt, rows[0] | {"system": "Add."}, learns="answers")
    assert problem.messages[0] == {"role": "system", "content": "Add."} and problem.answer == "5"


def test_turns_with_names_of_two_layouts(tmp_path):
    for nothing in (None, "", " "):
        names = dict.fromkeys(("from", "value", "role", "content"), nothing)
        turns = [names | {"from": "human", "value": "2+3?"}, names | {"role": "assistant", "content": "5"}]
        (problem,), _ = said_of(tmp_path, sharegpt, {"conversations": turns}, learns="answers")
        assert [message["content"] for message in problem.messages] == ["2+3?", "5"]
    for content, said in (("5", "5"), ("5\n", "5\n"), ("", "5")):
        read = sharegpt({"conversations": [turns[0], {"from": "gpt", "value": said, "content": content}]})
        assert read["messages"][1]["content"] == said
    assert sharegpt({"conversations": [turns[0], {"from": "gpt", "value": ""}]})["messages"][1]["content"] == ""
    with pytest.raises(ValueError, match="a turn has the value '5' and the content '6'; give one of them"):
        sharegpt({"conversations": [turns[0], {"from": "gpt", "value": "5", "content": "6"}]})


def test_the_columns_of_converted_rows_are_found_by_one_row(tmp_path, monkeypatch):
    rows = [{"question": "2+3?", "answer": "#### 5", "image": None}] * 200
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    made = []
    arrow_rows = data_rows.arrow_rows
    monkeypatch.setattr(data_rows, "arrow_rows", lambda batch: (made.append(len(batch)), arrow_rows(batch))[1])
    assert "reward_model" in entry_columns(tmp_path / "a.parquet", [gsm8k]) and made == [1]
    # Images of many rows would not fit into memory.
    assert len(read_files([tmp_path / "a.parquet"], "samples", convert=[gsm8k])) == 200
    assert max(made) == data_rows.FEW


def test_a_function_that_changes_its_row_and_returns_none_is_named(tmp_path):
    def changes(row):
        row["prompt"] = row.pop("q")

    def leaves(row):
        return None

    def takes(row):
        return {"data_source": "s", "prompt": row["q"], "reward_model": {"ground_truth": "5"}}

    (tmp_path / "a.jsonl").write_text('{"q": "2+3?", "x": null}')
    assert read_files([tmp_path / "a.jsonl"], "samples", convert=[leaves, takes])[0].prompt == "2+3?"
    said = "line 1: changes of data.convert changed 'q', 'prompt' in its row and returned None.*return the row"
    with pytest.raises(DataError, match=said):
        read_files([tmp_path / "a.jsonl"], "samples", convert=[changes, takes])

    def changes_inside(row):
        row["x"]["y"] = 1

    (tmp_path / "a.jsonl").write_text('{"q": "2+3?", "x": {"y": 0}}')
    with pytest.raises(DataError, match=r"changes_inside of .* changed 'x' in its row"):
        read_files([tmp_path / "a.jsonl"], "samples", convert=[changes_inside, takes])


@needs_datasets
def test_values_that_the_package_keeps_as_json_are_what_the_file_has(tmp_path):
    """It does so for a field whose values are of several types."""
    values = (1, "x", {"a": [None]})
    rows = [
        {"data_source": "s", "prompt": "a", "reward_model": {"ground_truth": value}, "extra_info": {"of": [value]}}
        for value in values
    ]
    (tmp_path / "set").mkdir()
    (tmp_path / "set/train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    problems = read_files([f"{tmp_path}/set#train"], "samples")
    open_set(f"{tmp_path}/set#train").data.to_parquet(tmp_path / "rows.parquet")
    for found in (problems, read_files([tmp_path / "rows.parquet"], "samples")):
        assert [p.answer for p in found] == ["1", "x", '{"a": [null]}']
        assert [p.extra_info for p in found] == [{"of": [value]} for value in values]


@needs_datasets
def test_files_of_another_kind_that_the_package_leaves_out_are_named(tmp_path):
    pq.write_table(pa.Table.from_pylist([row(1)]), tmp_path / "train-0.parquet")
    (tmp_path / "train-1.jsonl").write_text(json.dumps(row(2)) + "\n")
    with pytest.warns(
        UserWarning, match=r"leaves 1 others out, such as train-(1\.jsonl|0\.parquet); to read them, name"
    ):
        assert len(read_files([f"{tmp_path}#train"], "samples")) == 1
    # A card may choose the files.
    card = "---\nconfigs:\n- config_name: default\n  data_files: train-0.parquet\n---\n"
    (tmp_path / "README.md").write_text(card)
    with warnings.catch_warnings(action="error"):
        assert len(read_files([f"{tmp_path}#train"], "samples")) == 1
