"""Data from files: what is read, what each mistake is told, how prompts are encoded, and the stream of problems."""

import datetime
import json
from collections import Counter

import attrs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from verl_fn.algorithms.experience import requests_of
from verl_fn.algorithms.workers import Workers
from verl_fn.backends.hf.new_model import char_tokenizer, new_model
from verl_fn.backends.protocol import Sampling
from verl_fn.config import ConfigError, load, make_plan
from verl_fn.data.examples import pack_examples
from verl_fn.data.files import FileData, encode_prompts, prompt_lengths
from verl_fn.data.loading import file_data, read_files
from verl_fn.data.rendering import token_counts, token_ids
from verl_fn.data.rows import DataError, arrow_rows, count_rows, read_rows
from verl_fn.data.tasks import TASKS, Problem, text_of
from verl_fn.state import Key

# Pads of another length for each role, so that a role that is lost or mixed up shows in the tokens.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '!' if m.role == 'user' else '!!' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def row(prompt="ab", answer="ba", **more):
    return {"data_source": "mine", "prompt": prompt, "reward_model": {"ground_truth": answer}} | more


def messages(*contents):
    return [{"role": "user", "content": content} for content in contents]


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    return path


def parquet(path, *rows):
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def chat_tokenizer(chars="abcd!>"):
    tokenizer = char_tokenizer(chars)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize(("write", "name"), [(parquet, "a.parquet"), (jsonl, "a.jsonl"), (jsonl, "a.json")])
def test_a_row_becomes_a_problem(tmp_path, write, name):
    extra = {"split": "train", "index": 7}
    file = write(
        tmp_path / name, row(messages("ab"), ability="math", extra_info=extra), row(messages("c", "d"), "dc")
    )
    first, second = read_files([file], "samples")
    assert first.prompt == ({"role": "user", "content": "ab"},)
    assert (first.answer, first.data_source, first.id) == ("ba", "mine", 0)
    assert first.extra_info == {"split": "train", "index": 7, "ability": "math"}
    assert second.prompt == ({"role": "user", "content": "c"}, {"role": "user", "content": "d"})
    assert (second.answer, second.id, second.extra_info) == ("dc", 1, {})


def test_rows_are_numbered_over_all_files(tmp_path):
    files = [parquet(tmp_path / "a.parquet", row("a"), row("b")), jsonl(tmp_path / "b.jsonl", row("c"))]
    assert [(p.id, p.prompt) for p in read_files(files, "samples")] == [(0, "a"), (1, "b"), (2, "c")]
    assert [(p.id, p.prompt) for p in read_files(files[::-1], "samples")] == [(0, "c"), (1, "a"), (2, "b")]


def test_a_file_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    jsonl(tmp_path / "a.jsonl", row("a"))
    assert read_files(["~/a.jsonl"], "samples")[0].prompt == "a"


def test_prompts_may_have_another_column(tmp_path):
    file = parquet(tmp_path / "a.parquet", row("a", question="b"))
    assert read_files([file], "samples", prompt_key="question")[0].prompt == "b"


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("042", "042"),
        ("", ""),
        (42, "42"),
        (True, "true"),
        ([3, 5], "[3, 5]"),
        ({"name": "ü", "target": 9}, '{"name": "ü", "target": 9}'),
    ],
    ids=str,
)
def test_ground_truths_that_are_no_text_are_json(tmp_path, truth, answer):
    for file in (parquet(tmp_path / "a.parquet", row("a", truth)), jsonl(tmp_path / "a.jsonl", row("a", truth))):
        assert read_files([file], "samples")[0].answer == answer


def test_keys_that_only_other_rows_have_are_none_in_extra_info_and_left_out_of_messages(tmp_path):
    rows = [
        row([{"role": "user", "content": "a", "name": "x"}], extra_info={"index": 1, "tools": [{"a": 1}, {"b": 2}]}),
        row([{"role": "user", "content": "b"}], extra_info={"hint": "h"}),
    ]
    first, second = read_files([parquet(tmp_path / "a.parquet", *rows)], "samples")
    assert first.extra_info == {"index": 1, "tools": [{"a": 1, "b": None}, {"a": None, "b": 2}], "hint": None}
    assert first.prompt == ({"role": "user", "content": "a", "name": "x"},)
    assert second.extra_info == {"hint": "h", "index": None, "tools": None}
    assert second.prompt == ({"role": "user", "content": "b"},)


def test_null_stays_null_in_extra_info_and_is_left_out_of_messages(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": {"limit": None}}}
    prompt = [*messages("a"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    extra = {"hint": None, "deep": {"x": None}}
    for write, name in ((jsonl, "a.jsonl"), (parquet, "a.parquet")):
        (problem,) = read_files([write(tmp_path / name, row(prompt, extra_info=extra))], "samples")
        assert problem.extra_info == extra
        assert problem.prompt[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize("write", [parquet, jsonl])
def test_tool_calls_need_no_content(tmp_path, write):
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    asks = {"role": "assistant", "content": None, "tool_calls": [call]}
    without = {"role": "assistant", "tool_calls": [call]}
    answers = {"role": "tool", "content": "b"}
    name = "a.parquet" if write is parquet else "a.jsonl"
    for message in (asks, without):
        (problem,) = read_files([write(tmp_path / name, row([*messages("a"), message, answers]))], "samples")
        assert problem.prompt == (*messages("a"), asks, answers)
    assert text_of(problem.prompt).startswith("user: a\nassistant: [{'type': 'function'")
    for bad in ({"role": "assistant", "content": None}, asks | {"role": "user"}, asks | {"tool_calls": []}):
        with pytest.raises(DataError, match="prompt must be a string or a list of messages"):
            read_files([write(tmp_path / name, row([*messages("a"), bad]))], "samples")


def test_extra_info_is_what_json_has(tmp_path):
    file = parquet(tmp_path / "a.parquet", row(extra_info={"day": datetime.date(2024, 2, 29)}))
    with pytest.raises(DataError, match=r"a\.parquet, row 0: extra_info cannot be JSON \(.*date.*\); write strings"):
        read_files([file], "samples")


@pytest.mark.parametrize("deep", [False, True])
def test_keys_that_are_no_strings_are_refused_where_json_would_rename_them(tmp_path, deep):
    map_type = pa.map_(pa.int64(), pa.string())
    value, kind = ([{"a": [(1, "x")]}], pa.struct([("a", map_type)])) if deep else ([[(1, "x")]], map_type)
    table = pa.Table.from_pylist([row()]).append_column("extra_info", pa.array(value, kind))
    pq.write_table(table, tmp_path / "a.parquet")
    message = r"a\.parquet, row 0: extra_info cannot be JSON \(the key 1 is no string\); write strings"
    with pytest.raises(DataError, match=message):
        read_files([tmp_path / "a.parquet"], "samples")


def test_class_labels_are_their_names(tmp_path):
    """As the package datasets writes their numbers and describes them in the file."""
    label = {"_type": "ClassLabel", "names": ["no", "yes"]}
    truth = {"style": {"_type": "Value", "dtype": "string"}, "ground_truth": label}
    features = {
        "prompt": label, "reward_model": truth, "data_source": {"_type": "Value", "dtype": "string"},
        "extra_info": {"many": {"_type": "List", "feature": label}, "old": [label], "feature": {"names": label},
                       "lists": {"_type": "Sequence", "feature": {"one": label}}},
    }  # fmt: skip
    extra = {"many": [0, 1, -1], "old": [1], "feature": {"names": 0}, "lists": {"one": [1, None]}}
    rows = [row(0, {"style": "rule", "ground_truth": 1}, extra_info=extra)]
    rows[0]["reward_model"] = {"style": "rule", "ground_truth": 1}
    table = pa.Table.from_pylist(rows)
    described = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(described), tmp_path / "a.parquet")
    (problem,) = read_files([tmp_path / "a.parquet"], "samples")
    assert (problem.prompt, problem.answer) == ("no", "yes")
    assert problem.extra_info == {
        "many": ["no", "yes", None], "old": ["yes"], "feature": {"names": "no"}, "lists": {"one": ["yes", None]}
    }  # fmt: skip


def test_values_that_are_no_class_labels_stay_whatever_the_file_describes(tmp_path):
    """A column that was replaced keeps its description; a label of a response is 1 or 0."""
    label = {"_type": "ClassLabel", "names": ["no", "yes"]}
    features = {"prompt": label, "label": label, "extra_info": {"a": label, "b": label, "c": label, "d": label}}
    extra = {"a": "x", "b": 7, "c": 1.0, "d": True, "e": 1}
    table = pa.Table.from_pylist([{"prompt": "1+1", "response": "2", "label": 1, "extra_info": extra}])
    described = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    assert arrow_rows(described) == table.to_pylist()


def test_ability_does_not_replace_what_extra_info_has(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", row(ability="math", extra_info={"ability": "algebra"}))
    assert read_files([file], "samples")[0].extra_info == {"ability": "algebra"}


def test_lines_end_at_newlines_alone(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "\ufeff" + json.dumps(row("a\u2028b"), ensure_ascii=False) + "\r\n\n" + json.dumps(row("c")), encoding="utf-8"
    )
    assert [p.prompt for p in read_files([tmp_path / "a.jsonl"], "samples")] == ["a\u2028b", "c"]


def test_rows_are_counted_as_they_are_read(tmp_path):
    """Blank lines are none; the number of steps of verl's epochs is made of the count."""
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    lines.write_text('\n{"a": 1}\n  \n{"a": 2}\n\n')
    pq.write_table(pa.table({"a": [3, 4, 5]}), table)
    assert len([*read_rows(lines, ["a"]), *read_rows(table, ["a"])]) == count_rows([lines, table]) == 5
    assert count_rows([lines, tmp_path / "b.jsonl"]) is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", None, r"a\.parquet: there is no such file"),
        ("a.jsonl.gz", b"\x1f", r"a\.jsonl\.gz: the name .* must end in .*; decompress others"),
        ("a.csv", b"a,b", r"a\.csv: the name of a data file must end in \.parquet, \.jsonl, \.json"),
        ("a.parquet", b"not parquet at all", r"a\.parquet cannot be read as parquet \(at row 0\): "),
        ("a.parquet", b"", r"a\.parquet cannot be read as parquet \(at row 0\): "),
        ("a.jsonl", b"", r"a\.jsonl has no rows"),
        ("a.jsonl", b"\n \n", r"a\.jsonl has no rows"),
        (
            "a.jsonl",
            json.dumps(row()).encode() + b"\n\n{oops",
            r"a\.jsonl, line 3 is not JSON, one object a line",
        ),
        ("a.json", b"{\n", r"a\.json, line 1 is not JSON, one object a line: .* jq -c \. F"),
        ("a.json", b"[\n", r"a\.json, line 1 is not JSON, one object a line: .* jq -c '\.\[\]' F"),
        (
            "a.json",
            json.dumps([row()]).encode(),
            r"json, line 1 is not a JSON object, one a line: .* jq -c '\.\[\]' F",
        ),
        ("a.jsonl", b"[" * 100000, r"a\.jsonl, line 1 is not JSON"),
        ("a.jsonl", b'{"a": "\xff"}', r"a\.jsonl has text that is not UTF-8"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_files([tmp_path / name], "samples")


@pytest.mark.parametrize("key", ["train_files", "val_files"])
def test_a_missing_file_is_named_with_its_key(tmp_path, key):
    there = parquet(tmp_path / "there.parquet", row())
    files = {"train_files": [there], "val_files": [there]} | {key: [tmp_path / "absent.parquet"]}
    with pytest.raises(DataError, match=rf"data\.{key}: .*absent\.parquet: there is no such file"):
        file_data(config(files["train_files"], files["val_files"]), chat_tokenizer())


def test_a_parquet_file_without_rows_is_refused(tmp_path):
    pq.write_table(pa.Table.from_pylist([row()]).slice(0, 0), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet has no rows"):
        read_files([tmp_path / "a.parquet"], "samples")


def test_a_parquet_file_that_is_damaged_inside_is_refused(tmp_path):
    file = parquet(tmp_path / "a.parquet", *[row("ab" * i) for i in range(1, 100)])
    content = file.read_bytes()
    file.write_bytes(content[:4] + bytes(60) + content[64:])
    with pytest.raises(DataError, match=r"a\.parquet"):
        read_files([file], "samples")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": None, "prompts": "a"}, r"no column 'prompt' \(did you mean 'prompts'\?\); its columns are"),
        ({"prompt": None, "text": "a"}, r"no column 'prompt'; its columns are .*text.*data\.prompt_key names the"),
        ({"data_source": None}, r"no column 'data_source'; its columns are prompt, reward_model"),
        ({"reward_model": None}, r"no column 'reward_model'; its columns are data_source, prompt"),
    ],
)
def test_columns_that_are_not_there(tmp_path, change, message):
    bad = {name: value for name, value in (row() | change).items() if value is not None}
    with pytest.raises(DataError, match=r"a\.parquet: there is " + message):
        read_files([parquet(tmp_path / "a.parquet", bad)], "samples")
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: there is " + message):
        read_files([jsonl(tmp_path / "a.jsonl", row(), bad)], "samples")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(None), "prompt must be a string or a list of messages"),
        (row(""), "prompt is empty"),
        (row([]), "prompt is empty"),
        (row(["ab"]), "prompt must be a string or a list of messages"),
        (row([{"role": "user"}]), "prompt must be a string or a list of messages"),
        (row([{"role": "user", "content": [{"type": "image"}]}]), "message 0 of prompt has parts of the type image"),
        (
            row([{"role": "user", "content": [{"type": "document", "text": "a"}]}]),
            "message 0 of prompt has a part .*parts are of the type text or image",
        ),
        (row("<image>Find x."), "prompt has the mark <image> of an image"),
        (row([{"role": "user", "content": "a", "images": ["b"]}]), "message 0 of prompt has the field images"),
        (row('[{"role": "user", "content": "a"}]'), "prompt is a string that holds messages as JSON"),
        (row('{"t": [], "messages": [{"role": "user", "content": "a"}]}'), "prompt is a string that holds messages"),
        (row("ab", None), "reward_model has no ground_truth"),
        (row(reward_model={"style": "rule"}), "reward_model has no ground_truth"),
        (row(reward_model="rule"), "reward_model must be an object with a ground_truth, not 'rule'"),
        (
            row([{"role": "user", "content": "a"}, {"role": "system", "content": None}]),
            "prompt must be .* not {'role': 'system', 'content': None",
        ),
        (row(data_source=None), "data_source must be a string, not None"),
        (row(extra_info="[]"), "extra_info must map names to values"),
        (row(chat_template_kwargs="off"), "chat_template_kwargs must map names to values"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path, bad, message):
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: {message}"):
        read_files([jsonl(tmp_path / "a.jsonl", row(), bad)], "samples")
    with pytest.raises(DataError, match=rf"a\.parquet, row 0: {message}"):
        read_files([parquet(tmp_path / "a.parquet", bad)], "samples")


def test_a_row_is_named_by_its_place_in_its_own_file(tmp_path):
    files = [parquet(tmp_path / "a.parquet", row(), row()), parquet(tmp_path / "b.parquet", row(), row("ab", None))]
    with pytest.raises(DataError, match=r"b\.parquet, row 1: reward_model has no ground_truth"):
        read_files(files, "samples")


def test_a_text_comes_after_bos_and_messages_through_the_template():
    tokenizer = chat_tokenizer()
    chat = ({"role": "system", "content": "a"}, {"role": "user", "content": "cb"})
    texts = [tokenizer.decode(ids) for ids in encode_prompts([Problem("ab", ""), Problem(chat, "")], tokenizer)]
    assert texts == [f"{tokenizer.bos_token}ab", "!!a!cb>"]


def test_messages_need_a_template():
    with pytest.raises(DataError, match=r"problem 3 of 'mine'.*use string prompts, or .* with chat_template\.jinja"):
        encode_prompts([Problem("ab", ""), Problem(tuple(messages("a")), "", 3, "mine")], char_tokenizer("ab"))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (TEMPLATE, "no tools here"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].content.x.y }}", "undefined|no attribute"),
        ("{{ messages[0].content + 1 }}", "str"),
        ({"rag": TEMPLATE}, "no default"),
    ],
    ids=["raised", "syntax", "undefined", "type", "named"],
)
def test_a_template_that_fails_names_the_problem(template, message):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    bad = Problem(({"role": "tool", "content": "a"},), "", 5, "mine")
    with pytest.raises(DataError, match=rf"problem 5 of 'mine': the tokenizer's chat template failed.*({message})"):
        encode_prompts([bad], tokenizer)


def test_characters_that_the_tokenizer_does_not_know_are_refused():
    for prompt in ("axb", tuple(messages("axb"))):
        with pytest.raises(DataError, match=r"every character of the prompt .*axb"):
            encode_prompts([Problem(prompt, "")], chat_tokenizer())


def test_a_tokenizer_whose_unk_is_its_bos_is_taken():
    tokenizer = char_tokenizer("ab")
    tokenizer.unk_token = tokenizer.bos_token
    assert encode_prompts([Problem("ab", "")], tokenizer) == [[1, 4, 5]]


def test_a_prompt_may_be_as_long_as_the_limit_and_no_longer():
    problems = [Problem("abc", "", 0, "mine"), Problem("abcd", "", 1, "mine")]
    assert [len(ids) for ids in encode_prompts(problems, chat_tokenizer(), 5)] == [4, 5]
    with pytest.raises(DataError) as error:
        encode_prompts(problems, chat_tokenizer(), 4)
    for part in ("problem 1 of 'mine'", "5 tokens", "4;", "data.max_prompt_length", "data.filter_overlong_prompts"):
        assert part in str(error.value)


def config(train, val=(), **data):
    files = {"train_files": [str(f) for f in train], "val_files": [str(f) for f in val]}
    overrides = files | {"train_batch_size": 1} | data
    return load(overrides=["model.path=m", *(f"data.{k}={json.dumps(v)}" for k, v in overrides.items())]).data


def test_a_prompt_that_is_too_long_is_refused_at_once(tmp_path):
    short, long = jsonl(tmp_path / "short.jsonl", row("ab")), jsonl(tmp_path / "long.jsonl", row("ab"), row("abcdab"))
    for cfg in (config([long], max_prompt_length=5), config([short], [long], max_prompt_length=5)):
        with pytest.raises(DataError, match=r"\.jsonl, line 2: the prompt has 7 tokens, more than 5"):
            file_data(cfg, chat_tokenizer())
    # Rows that are learned from are not cut, so that this is no advice.
    for learned, advice in (
        ({}, ", or cut them by data.truncation"),
        ({"learns_from": "answers", "end_tokens": 2}, ""),
    ):
        with pytest.raises(DataError, match=f"set data.filter_overlong_prompts to leave such prompts out{advice}$"):
            file_data(config([long], max_prompt_length=5), chat_tokenizer(), **learned)
    data = file_data(config([long], [short], max_prompt_length=7), chat_tokenizer())
    assert [p.prompt for p in data.training] == ["ab", "abcdab"]
    assert [p.prompt for p in data.held_out(100)] == ["ab"]


def test_the_filter_leaves_out_what_is_too_long_and_says_so(tmp_path):
    train = jsonl(tmp_path / "a.jsonl", row("abcdab"), row("abcd"), row(messages("abcd")), row(messages("a")))
    val = jsonl(tmp_path / "b.jsonl", row("abcdab"), row("ab"))
    said = []
    data = file_data(
        config([train], [val], max_prompt_length=5, filter_overlong_prompts=True), chat_tokenizer(), said.append
    )
    assert [p.id for p in data.training] == [1, 3]
    assert [p.id for p in data.held_out(1)] == [1]
    assert said == [
        "data.train_files: left out 2 of 4 prompts, longer than 5 tokens",
        "data.val_files: left out 1 of 2 prompts, longer than 5 tokens",
    ]
    with pytest.raises(DataError, match=r"data\.train_files: all 4 prompts are longer than 2 tokens"):
        file_data(config([train], [val], max_prompt_length=2, filter_overlong_prompts=True), chat_tokenizer())


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_long_prompts_are_cut_as_verl_cuts_them(tmp_path, side):
    """verl keeps the last, the first, or half of the most tokens from each side, the larger half from the end."""
    tokenizer = chat_tokenizer()
    file, said = jsonl(tmp_path / "a.jsonl", row("ab"), row("abcdabcd")), []
    cfg = config([file], max_prompt_length=5, truncation=side)
    data = file_data(cfg, tokenizer, said.append)
    assert len(data.training) == 2 and data.max_prompt == 5
    assert said == ["data.train_files: 1 of 2 prompts are cut to 5 tokens (data.truncation)"]
    whole = encode_prompts(data.training, tokenizer)[1]
    ids = {"left": whole[-5:], "right": whole[:5], "middle": whole[:2] + whole[-3:]}[side]
    workers = Workers({}, None, None, tokenizer, Sampling(4), max_prompt_length=5, truncation=side, end_tokens=(2,))
    requests = requests_of(data.training, workers, workers.sampling, Key.from_seed(0))
    assert [list(request.prompt) for request in requests] == [encode_prompts(data.training[:1], tokenizer)[0], ids]
    # A filter leaves nothing to cut, and what is not sampled from is not cut.
    filtered = file_data(attrs.evolve(cfg, filter_overlong_prompts=True), tokenizer)
    assert [problem.prompt for problem in filtered.training] == ["ab"]
    for other in ("algorithm.name=sft", "env.name=e.py:E"):
        with pytest.raises(ConfigError, match=f"data.truncation is {side}, .* are not cut"):
            make_plan(load(overrides=["model.path=m", f"data.truncation={side}", other]))


def test_nothing_is_said_where_nothing_is_left_out(tmp_path):
    said = []
    file = jsonl(tmp_path / "a.jsonl", row("ab"))
    for on in (True, False):
        data = file_data(config([file], filter_overlong_prompts=on, shuffle=on), chat_tokenizer(), said.append)
        assert (len(data.training), data.held_out(8), data.shuffle) == (1, (), on)
    assert said == []


def stream(n, shuffle=True):
    return FileData(tuple(Problem(f"p{i}", f"a{i}", i) for i in range(n)), (), shuffle)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 7), seed=st.integers(0, 3), shuffle=st.booleans(),
    start=st.integers(0, 30), cuts=st.lists(st.integers(0, 9), max_size=5),
)  # fmt: skip
def test_a_stream_in_pieces_is_the_stream(n, seed, shuffle, start, cuts):
    data, key = stream(n, shuffle), Key.from_seed(seed)
    pieces, at = [], start
    for count in cuts:
        pieces += data.train(key, at, count)
        at += count
    assert tuple(pieces) == data.train(key, start, sum(cuts))
    assert tuple(pieces) == data.train(key, 0, at)[start:]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(n=st.integers(1, 9), seed=st.integers(0, 100), epoch=st.integers(0, 5), shuffle=st.booleans())
def test_an_epoch_has_every_problem_once(n, seed, epoch, shuffle):
    found = stream(n, shuffle).train(Key.from_seed(seed), epoch * n, n)
    assert Counter((p.prompt, p.answer) for p in found) == {(f"p{i}", f"a{i}"): 1 for i in range(n)}
    assert [p.id for p in found] == list(range(epoch * n, epoch * n + n))


def test_orders_differ_between_keys_and_epochs():
    data = stream(50)
    orders = {
        tuple(p.prompt for p in data.train(Key.from_seed(seed), epoch * 50, 50))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_without_shuffling_the_order_is_the_files():
    found = stream(3, shuffle=False).train(Key.from_seed(1), 2, 5)
    assert [(p.id, p.prompt) for p in found] == [(2, "p2"), (3, "p0"), (4, "p1"), (5, "p2"), (6, "p0")]


def test_as_many_held_out_problems_as_asked_for(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", row("a"), row("b"), row("c"))
    data = file_data(config([file], [file]), chat_tokenizer())
    assert [len(data.held_out(count)) for count in (None, 2, 9)] == [3, 2, 3]


def test_a_task_gives_what_it_has_at_once():
    assert len(TASKS["reverse"].held_out(None)) == 512
    assert TASKS["countdown"].held_out(10**9) == TASKS["countdown"].held_out(None)


def test_answers_that_are_trained_on_are_encoded_up_front(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", row("ab", "dc"), row("abc", ""), row("a", "abcdabcd"))
    data = file_data(config([file]), chat_tokenizer(), end_tokens=2)
    rows = pack_examples(data.training, chat_tokenizer(), 2)
    assert data.max_row == max(rows.lengths) == 2 + 8 + 1
    odd = jsonl(tmp_path / "odd.jsonl", row("ab"), row("ab", "xyz"))
    assert file_data(config([odd]), chat_tokenizer()).max_row == 0
    with pytest.raises(DataError, match=r"odd\.jsonl, line 2: the tokenizer does not know every .* answer 'xyz'"):
        file_data(config([odd]), chat_tokenizer(), end_tokens=2)
    with pytest.raises(DataError, match="every character of the answer 'xyz'"):
        pack_examples([Problem("ab", "xyz")], chat_tokenizer(), 2)


@pytest.mark.parametrize(
    ("bad", "column"),
    [
        (row("a\ud800"), "prompt"),
        (row(messages("a", "\udfff")), "prompt"),
        (row("a", "\ud800"), "reward_model"),
    ],
    ids=["prompt", "message", "answer"],
)
def test_half_of_a_surrogate_pair_is_refused(tmp_path, bad, column):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(row("\U0001f600")) + "\n" + json.dumps(bad) + "\n")
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: {column} has '.ud[8f]..', half of a character"):
        read_files([file], "samples")


def test_a_tiny_model_with_a_template_takes_messages(tmp_path):
    folder = new_model(tmp_path / "m", chars="ab>", hidden_size=32, chat_template=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = encode_prompts([Problem(tuple(messages("ab", "b>")), "")], tokenizer)[0]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab\nb>\n"


def test_data_may_be_held_out_problems_alone():
    held = (Problem("a>", "a"),)
    assert FileData((), held, shuffle=True).held_out(9) == held


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer that changes the text before it encodes it."""

    def __call__(self, text, **options):
        return super().__call__(text.upper() if isinstance(text, str) else list(map(str.upper, text)), **options)


@pytest.mark.parametrize("kind", ["plain", "cut", "padded", "special as text", "own call", "unknown", "bos"])
def test_tokens_are_those_of_the_tokenizers_own_call(kind):
    bpe = Tokenizer(models.BPE(unk_token="<unk>" if kind == "unknown" else None, fuse_unk=False))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Without bytes beyond ASCII, some characters are unknown.
    letters = pre_tokenizers.ByteLevel.alphabet() if kind != "unknown" else list("abcCAB12345! >ĠĊ")
    special = ["<|end|>", "<s>", "<unk>"]
    bpe.train_from_iterator(
        ["ab abc abcab CAB 12 345"] * 9,
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=letters, show_progress=False),
    )
    if kind == "cut":
        bpe.enable_truncation(2)
    if kind == "padded":
        bpe.enable_padding(length=50)
    made = (Shouting if kind == "own call" else PreTrainedTokenizerFast)(
        tokenizer_object=bpe,
        eos_token="<|end|>",
        **({"bos_token": "<s>"} if kind == "bos" else {}),
        **({"unk_token": "<unk>"} if kind == "unknown" else {}),
        split_special_tokens=kind == "special as text",
    )
    made.chat_template = TEMPLATE
    texts = ["", "ab", "abcab 12<|end|>ab", "  CAB\n\n345 ", "été 日本 \U0001f600", "<|end|>", "abc" * 40]
    assert token_ids(texts, made) == [made(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert token_counts(texts, made) == [len(made(text, add_special_tokens=False)["input_ids"]) for text in texts]
    asked = [Problem(text or "a", "") for text in texts] + [Problem(tuple(messages(text)), "") for text in texts]
    asked = [one for one in asked if kind != "unknown" or str(one.prompt).isascii()]
    assert prompt_lengths(asked, made) == [len(encode_prompts([one], made)[0]) for one in asked]


def test_a_character_that_only_the_template_has_is_not_blamed_on_the_prompt(tmp_path):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "#" + TEMPLATE
    (problem,) = read_files([jsonl(tmp_path / "a.jsonl", row(messages("ab")))], "samples")
    with pytest.raises(DataError, match=r"prompt .*'ab'.*: it lacks one that the chat template adds to the messages"):
        encode_prompts([problem], tokenizer)
