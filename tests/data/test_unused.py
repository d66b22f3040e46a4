"""What a user wrote: columns and fields that are used, reported as unused, or refused."""

import json
import sys
from collections import Counter

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from run_configs import tiny_run

from verl_fn.backends.hf.new_model import CHAT_TEMPLATE, char_tokenizer
from verl_fn.config import ConfigError
from verl_fn.config.schema import DataConfig
from verl_fn.data.columns import MARKS, learned_turns, prompt_of
from verl_fn.data.examples import encode_examples
from verl_fn.data.files import FileData
from verl_fn.data.loading import file_data, read_files
from verl_fn.data.notices import notices, of_template
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import Problem
from verl_fn.runs.checks import _check_tools
from verl_fn.runs.prepare import _notices, prepare

USER, SAID, OTHER = (
    {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("assistant", "c"))
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
LAYOUTS = {
    "samples": {"data_source": "x", "prompt": [USER], "reward_model": {"ground_truth": "b"}},
    "answers": {"messages": [USER, SAID]},
    "pairs": {"prompt": [USER], "chosen": [SAID], "rejected": [OTHER]},
    "labels": {"prompt": [USER], "completion": [SAID], "label": True},
}


def jsonl(folder, *rows):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def parquet(folder, *rows):
    pq.write_table(pa.Table.from_pylist(list(rows)), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def saved(folder, *rows):
    import datasets

    datasets.Dataset.from_list(list(rows)).save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


WRITERS = [jsonl, parquet, saved]


def notes(files, learns="answers", **more):
    """What is said of files that are read for training."""
    tokenizer, said = char_tokenizer("abc\n"), []
    tokenizer.chat_template = CHAT_TEMPLATE
    table = DataConfig(train_files=(files,), val_files=(files,), train_batch_size=1, **more)
    file_data(table, tokenizer, said.append, learns_from=learns)
    return said


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("learns", LAYOUTS)
def test_columns_that_nothing_uses_are_named_once_with_their_rows(write, learns, tmp_path):
    row = LAYOUTS[learns]
    row = row | {"weight": 1.0, "turn_weights": [1, 1], "images": None}
    file = write(tmp_path, *(row | {"prompt_id": name} for name in ("7", None, "8")))
    said = [line for line in notes(file, learns) if "columns" in line]
    hint = "; a reward function gets what extra_info holds" if learns == "samples" else ""
    assert said == [
        f"note: data.{key}_files: columns that are not used: prompt_id (2 rows), turn_weights (3 rows), "
        f"weight (3 rows){hint}"
        for key in ("val", "train")
    ]


@pytest.mark.parametrize("write", WRITERS)
def test_a_column_without_a_value_is_no_column_that_is_not_used(write, tmp_path):
    said = notes(write(tmp_path, *[LAYOUTS["samples"] | {"prompt_id": None}] * 2), "samples")
    assert not [line for line in said if "columns" in line]


@pytest.mark.parametrize("write", WRITERS)
def test_fields_beside_a_ground_truth_are_named_with_their_rows(write, tmp_path):
    row = LAYOUTS["samples"]
    fields = ({"ground_truth": "b", "style": "rule", "rubric": text} for text in ("be kind", None, "be brief"))
    file = write(tmp_path, *(row | {"reward_model": one} for one in fields))
    said = [line for line in notes(file, "samples") if "columns" in line]
    assert said == [f"note: data.{key}_files: columns that are not used: reward_model.rubric (2 rows); "
                    "a reward function gets what extra_info holds" for key in ("val", "train")]  # fmt: skip


@pytest.mark.parametrize("write", WRITERS)
def test_an_ability_that_extra_info_replaces_is_named_with_its_rows(write, tmp_path):
    both = (("math", "algebra"), ("math", "math"), (None, "math"), ("math", None))
    rows = [LAYOUTS["samples"] | {"ability": top, "extra_info": {"ability": inner}} for top, inner in both]
    said = [line for line in notes(write(tmp_path, *rows), "samples") if "ability" in line]
    assert len(said) == 2 and all("ability, beside another one in extra_info (2 rows)" in line for line in said)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("learns", LAYOUTS)
@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("images", [{"bytes": "x", "path": None}], "image 1(: .*x cannot be read| is no image)"),
        ("video_path", "a.mp4", "the column video_path has images"),
        ("screenshot", "a.png", "the column screenshot has images"),
        ("system_message", "be brief", "the column system_message is not used, so the model would not see it"),
        ("available_tools", TOOLS, "the column available_tools is not used.*write JSON schemas in the column tools"),
        ("system", "be brief", "the column system is not used, so the model would not see it; write a first message"),
        ("input", "3 apples", "the column input is not used, and the prompt has nothing of it"),
        ("context", ["x y", "z"], "the column context is not used"),
        ("weight", 0.5, "the column weight has 0.5, and rows have no weights of their own"),
        ("is_train", False, "the column is_train has False, and rows have no weights of their own"),
        (
            "turn_weights",
            [1, 0],
            'the column turn_weights has .1, 0.*; write "weight": 0 into messages of the assistant',
        ),
        ("assistant_mask", [0, 1], "the column assistant_mask has .0, 1., and rows have no weights of their own"),
        ("tools", "nothing", "tools must be a list of JSON schemas, not 'nothing'"),
        ("tools", [3], "tools must be a list of JSON schemas"),
        ("tools", "{}", "tools must be a list of JSON schemas, not {}"),
        ("tools", "false", "tools must be a list of JSON schemas, not False"),
    ],
)
def test_columns_that_change_what_is_learned_are_refused(write, learns, column, value, message, tmp_path):
    if column == "images":
        value = [{"bytes": b"x" if write is not jsonl else "x", "path": None}]
    file = write(tmp_path, LAYOUTS[learns] | {column: None}, LAYOUTS[learns] | {column: value})
    with pytest.raises(DataError, match=rf"(line 2|row 1): {message}"):
        read_files([file], learns)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("learns", LAYOUTS)
def test_numbers_about_images_are_no_images(write, learns, tmp_path):
    unused, about = Counter(), {
        "num_images": 2, "image_id": 7, "has_video": True, "image_ratio": 0.5, "image_sizes": [640, 480],
        "image_index": "2", "has_audio": "false", "image_size": {"w": 3},
    }  # fmt: skip
    assert len(read_files([write(tmp_path, LAYOUTS[learns] | about)], learns, unused=unused)) == 1
    assert unused == dict.fromkeys(about, 1)
    with pytest.raises(DataError, match="the column audio has images, videos or sounds"):
        read_files([write(tmp_path, LAYOUTS[learns] | {"audio": {"array": [0.5] * 99, "sampling_rate": 9}})], learns)
    messages = {"messages": [USER | {"image_index": 3}, SAID]}
    assert read_files([write(tmp_path, messages)], "answers")[0].messages[0]["image_index"] == 3


@pytest.mark.parametrize(
    ("learns", "other", "column"),
    [
        ("answers", {"prompt": "a", "completion": "b"}, "completion"),
        ("samples", LAYOUTS["answers"], "messages"),
        ("pairs", LAYOUTS["labels"], "completion"),
        ("labels", LAYOUTS["pairs"], "chosen"),
    ],
)
def test_rows_of_another_kind_are_told_by_their_column(learns, other, column, tmp_path):
    file = jsonl(tmp_path, LAYOUTS[learns], other)
    with pytest.raises(DataError, match=rf"line 2: there is no .*; a row with {column} is for another algorithm"):
        read_files([file], learns)


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize(
    ("learns", "row"),
    [
        ("samples", {"promt": "a"}),
        ("samples", {"data_source": "s", "promt": "a", "completion": "c"}),
        ("answers", {"mesages": [USER, SAID]}),
        ("answers", {"messages": None}),
        ("labels", {"prompt": [USER], "completion": [SAID]}),
        ("labels", {"prompt": [USER], "completion": None, "label": True}),
        ("pairs", {"prompt": [USER], "chosen": [SAID]}),
    ],
)
def test_a_row_that_lacks_a_column_is_no_row_of_another_kind(write, learns, row, tmp_path):
    rows = [LAYOUTS[learns], row]
    if write is parquet and "promt" not in row:
        rows = [dict.fromkeys(rows[0] | row) | one for one in rows]
    with pytest.raises(DataError) as error:
        read_files([write(tmp_path, *(rows if "promt" not in row or write is jsonl else [row]))], learns)
    assert "another kind" not in str(error.value)


def test_what_data_convert_makes_is_no_row_of_another_kind(tmp_path):
    made = {"messages": None, "completion": "b", "prompt": "a"}, {"promt": "a"}
    for one in made:
        with pytest.raises(DataError) as error:
            file = jsonl(tmp_path, LAYOUTS["answers"], {"completion": "b"})
            read_files([file], "answers", convert=[lambda row, one=one: None if "messages" in row else one])
        assert "another kind" not in str(error.value)


def test_a_wrong_value_says_nothing_of_kinds(tmp_path):
    wrong = {"messages": [SAID]}, LAYOUTS["answers"] | {"messages": "a"}
    for rows in ((LAYOUTS["answers"], wrong[0]), wrong):
        with pytest.raises(DataError) as error:
            read_files([jsonl(tmp_path, *rows)], "answers")
        assert "another kind" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "What does the <video> tag do in HTML?",
        "What is `<image>` in SVG?",
        "Does React know `<image>` and `<audio>`? It is not JSX.",
        "Which element of HTML is newer, <picture> or <video>?",
        "<video> is an HTML element. Since when?",
        "What is the difference between <video> and <audio> in HTML5?",
        "Is the tag <audio> allowed in a mail?",
        "Correct `<svg><image></svg>`.",
        "Correct this:\n```\n<svg>\n  <image>\n</svg>\n```",
        "Read <image>https://a.b/c.png</image> in this feed.",
    ],
)
@pytest.mark.parametrize("learns", ["samples", "answers", "pairs", "labels"])
def test_elements_of_texts_about_html_and_xml_are_no_marks_of_images(learns, text, tmp_path):
    unused = Counter()
    for content in (text, [USER | {"content": text}]):
        named = LAYOUTS[learns] | ({"messages": [*content, SAID]} if learns == "answers" else {"prompt": content})
        if isinstance(content, str):
            named = {"prompt": text, "completion": "b"} if learns == "answers" else named
            named |= {name: "b" for name in ("chosen", "completion") if name in named}
            named |= {"rejected": "c"} if "rejected" in named else {}
        (read,) = read_files([jsonl(tmp_path, named)], learns, unused=unused)
        assert text in str(read.prompt if isinstance(read.prompt, str) else read.prompt[0]["content"])
    assert not unused


@pytest.mark.parametrize(
    "text",
    [
        "<image>Find x.",
        "<image>\nWrite the HTML of this page, with <div> and <img>.",
        "Here is a page.\n<image>\nWrite its HTML.",
        "Compare <image> and <image>.",
        "<video>\nis there a dog?",
        "Think in <think></think> tags.\n<image>",
        "<|image_pad|> Which element of HTML?",
        "What is `<|image_pad|>`?",
        "<start_of_image> as HTML",
        "Please look at the image below.\n<image>\nWhat is it?<br>A. cat<br>B. dog",
        "Convert the screenshot <image> to HTML.",
        "Given this page <image>, write the HTML and CSS.",
        "What is in the picture (<image>)? Answer in XML.",
        "Question: which is it? <image><br>A cat",
        "Look: <image> tag the animals in it.",
        "Is <image> vs the next one larger?",
        "Caption '<image>' in ten words.",
        "It`s here: <image>\nIt`s a cat.",
        "`a` <image> b",
    ],
)
def test_marks_of_images_that_no_row_has_are_refused(text, tmp_path):
    for prompt in (text, [USER | {"content": text}]):
        with pytest.raises(DataError, match=r"line 1: .*has the mark <.*of an image, video or sound.*backticks"):
            read_files([jsonl(tmp_path, LAYOUTS["samples"] | {"prompt": prompt})], "samples")


def test_many_marks_are_looked_at_once():
    with pytest.raises(DataError, match="has the mark <audio>"):
        prompt_of("here", "x <video> tag\n" * 40_000 + "`" * 100_001 + " <audio> y" * 40_000, "prompt")


@pytest.mark.parametrize(
    ("learns", "row"),
    [
        ("answers", {"prompt": "a", "completion": "See <image>."}),
        ("pairs", {"prompt": "a", "chosen": "<video>", "rejected": "c"}),
        ("labels", {"prompt": "a", "completion": "<audio> it is", "label": False}),
    ],
)
def test_a_response_as_text_may_name_an_element_as_one_of_messages_may(learns, row, tmp_path):
    assert len(read_files([jsonl(tmp_path, row)], learns)) == 1


def test_a_text_that_the_prompt_has_may_be_a_column_too(tmp_path):
    row = LAYOUTS["samples"] | {"prompt": [USER | {"content": "Read: b  c\nAnd answer."}]}
    for value in ("b c", ["x", "b c"], {"title": "t", "text": ["b c And"]}, "", None):
        assert len(read_files([jsonl(tmp_path, row | {"context": value})], "samples")) == 1
    for value in ("d e", {"title": "b", "text": "not in the prompt"}):
        with pytest.raises(DataError, match="the prompt has nothing of it"):
            read_files([jsonl(tmp_path, row | {"context": value, "extra_info": {"context": value}})], "samples")


def test_fields_that_the_template_does_not_show_are_named_with_their_rows(tmp_path):
    call = {"id": "7", "type": "function", "function": {"name": "f", "arguments": {}}}
    rows = [
        {"messages": [USER | {"name": "x"}, SAID | {"weight": 1}]},
        {"messages": [USER, {"role": "assistant", "content": "b", "tool_calls": [call]},
                      {"role": "tool", "content": "c", "tool_call_id": "7"}, SAID]},
    ]  # fmt: skip
    tokenizer = char_tokenizer("abc\n")
    tokenizer.chat_template = CHAT_TEMPLATE + "{# tool_calls #}"
    problems = read_files([jsonl(tmp_path, *rows)], "answers")
    assert list(of_template([problems], DataConfig(), tokenizer)) == [
        "the chat template does not show these fields of messages, so the model does not see them: "
        "assistant.tool_calls (1 rows), assistant.tool_calls.id (1 rows), tool.tool_call_id (1 rows), "
        "user.name (1 rows)"
    ]
    # In a prompt of which nothing is learned, a mark has no effect.
    prompts = [Problem((USER, SAID | {"weight": 0}, USER), "b")]
    assert next(of_template([prompts], DataConfig(), tokenizer)).endswith("see them: assistant.weight (1 rows)")


def test_a_field_that_the_template_reads_of_another_role_or_of_a_tool_is_named():
    prompts = [Problem((USER | {"name": "x"}, SAID, {"role": "tool", "content": "c", "name": "f"}), "b")] * 20
    named = "{% if message.role == 'tool' %}{{ message.name }}{% endif %}"
    every = (
        "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}{% for message in messages %}{{ message.content }}"
    )
    tokenizer = char_tokenizer("abc\n")
    for template, unread in {
        every + "{% endfor %}": "tool.name (20 rows), user.name (20 rows)",
        every + named + "{% endfor %}": "user.name (20 rows)",
        every + "{{ message['name'] }}{% endfor %}": "",
        every + "{{ message.get('name') }}{% endfor %}": "",
        every + "{{ message | tojson }}{% endfor %}": "",
        every + "{% for key, value in message.items() %}{{ value }}{% endfor %}{% endfor %}": "",
        every + "{{ message.values() | join }}{% endfor %}": "",
        every + "{% if 'name' in message %}b{% endif %}{% endfor %}": "",
        every + named + "{% if message.role != 'tool' and loop.last %}{{ message.name }}{% endif %}{% endfor %}": (
            "user.name (20 rows)"
        ),
    }.items():
        tokenizer.chat_template = template
        said = [line.rpartition("see them: ")[2] for line in of_template([prompts], DataConfig(), tokenizer)]
        assert said == [unread] * bool(unread), template
    # Something of a turn may be shown only until another one follows.
    turns = [attrs.evolve(prompts[0], prompt=(USER, SAID | {"name": "x"}, USER))]
    assert list(of_template([turns], DataConfig(), tokenizer)) == []


@pytest.mark.parametrize(
    ("message", "shown", "unread"),
    [
        (USER | {"name": "x", "title": "x"}, "message.name or message.title", ["user.title (1 rows)"]),
        ({"role": "functions.f", "content": "a", "name": "f"}, "message.name", []),
    ],
    ids=["one of two fields with the same text", "of a role with a dot"],
)
def test_a_field_that_the_template_reads_is_not_named(message, shown, unread):
    tokenizer = char_tokenizer("abc\n")
    tokenizer.chat_template = (
        f"{{% for message in messages %}}{{{{ message.content }}}}{{{{ {shown} }}}}{{% endfor %}}"
    )
    said = of_template([[Problem((message,), "b")]], DataConfig(), tokenizer)
    assert [line.rpartition("see them: ")[2] for line in said if "see them: " in line] == unread


def test_a_text_for_false_is_named():
    tokenizer = char_tokenizer("abc")
    tokenizer.chat_template = CHAT_TEMPLATE + "{# thinking tools #}"
    rows = [
        Problem((USER,), "b", chat_template_kwargs={"thinking": value}) for value in (False, "low", "False", None)
    ]
    for problems, table in (((), DataConfig(chat_template_kwargs={"thinking": "False"})), (rows, DataConfig())):
        assert list(of_template([problems], table, tokenizer)) == [
            "chat_template_kwargs.thinking is the text 'False', and templates take it for true; write false"
        ]
    assert not list(of_template([rows[:2]], DataConfig(chat_template_kwargs={"thinking": False}), tokenizer))
    (line,) = of_template([()], DataConfig(chat_template_kwargs={"other": "False"}), tokenizer)
    assert line.startswith("chat_template_kwargs.other has no effect")


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_objects_may_be_strings_of_json(write, tmp_path):
    row = {"data_source": "x", "prompt": [USER], "reward_model": {"ground_truth": 7.0, "note": "n"}}
    row |= {"extra_info": {"n": [1]}, "chat_template_kwargs": {"a": False}, "tools": TOOLS, "ability": "sums"}
    objects = ("reward_model", "extra_info", "chat_template_kwargs", "tools")
    unused = Counter()
    texts = row | {name: json.dumps(row[name]) for name in objects}
    (problem,) = read_files([write(tmp_path, texts)], "samples", unused=unused)
    assert problem.answer == "7" and problem.tools == tuple(TOOLS)
    assert problem.extra_info == {"ability": "sums", "n": [1]} and problem.chat_template_kwargs == {"a": False}
    assert unused == {"reward_model.note": 1}
    (none,) = read_files([write(tmp_path, texts | {"tools": "null", "extra_info": "null"})], "samples")
    assert none.tools == () and none.extra_info == {"ability": "sums"}


def test_parts_of_text_are_text_also_without_images(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": parts[:1]}]}
    (problem,) = read_files([jsonl(tmp_path, row)], "answers")
    assert [message["content"] for message in problem.messages] == ["ab", "a"]


CALLING = (
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments if quiet else c.function.arguments | tojson }}{% endfor %}"
    "{{ '<eos>' if m.role == 'assistant' else '' }}{% endfor %}"
)


def rendered(folder, message, **more):
    tokenizer = char_tokenizer('abcf{}\\"1: ,')
    tokenizer.chat_template = CALLING
    problems = read_files([jsonl(folder, {"messages": [USER, message, USER, SAID]} | more)], "answers")
    return tokenizer.decode(encode_examples(problems, tokenizer, tokenizer.eos_token_id)[0][0])


@pytest.mark.parametrize(
    "calls",
    ["{", '{"function": {}}', {"function": {"name": "f"}}, ["f"], [None], [{"id": "7"}], True,
     [{"function": {"name": "f", "arguments": [1]}}], [{"function": "f"}], [{"function": {"name": 3}}]],
)  # fmt: skip
def test_tool_calls_that_are_no_calls_are_named(calls, tmp_path):
    with pytest.raises(DataError, match="line 1: message 1 of messages: tool_calls must be a list of objects"):
        rendered(tmp_path, SAID | {"tool_calls": calls})


def test_arguments_of_calls_are_never_learned_in_quotes(tmp_path):
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    for calls in ([call], json.dumps([call])):
        assert rendered(tmp_path, SAID | {"tool_calls": calls}) == 'abf{"a": 1}<eos>ab<eos>'
    text = SAID | {"tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
    with pytest.raises(DataError, match="writes the arguments of a call in message 1 as a string in quotes"):
        rendered(tmp_path, text)
    # A template may take care of strings.
    assert rendered(tmp_path, text, chat_template_kwargs={"quiet": True}) == 'abf{"a": 1}<eos>ab<eos>'


@pytest.mark.parametrize("name", ["function_call", "tools", "functions"])
def test_what_belongs_elsewhere_is_not_dropped(name, tmp_path):
    for place, message in ((0, USER), (1, SAID)):
        rows = [USER, SAID]
        rows[place] = message | {name: [{"name": "f"}]}
        tokenizer = char_tokenizer("abc\n")
        # It names the field, and shows none of a message.
        tokenizer.chat_template = CHAT_TEMPLATE + f"{{# {name} #}}"
        problems = read_files([jsonl(tmp_path, {"messages": rows})], "answers")
        with pytest.raises(DataError, match=rf"leaves out {name} of message {place}.*belongs into"):
            encode_examples(problems, tokenizer, tokenizer.eos_token_id)


def test_roles_that_a_template_does_not_know_are_named(tmp_path):
    gpt = {"role": "gpt", "content": "c"}
    rows = [{"messages": [USER, gpt, USER, SAID]}, {"messages": [USER, SAID]}]
    tokenizer = char_tokenizer("abc\n")
    tokenizer.chat_template = CHAT_TEMPLATE
    problems = read_files([jsonl(tmp_path, *rows)], "answers")
    said = list(of_template([problems], DataConfig(), tokenizer))
    assert len(said) == 1 and said[0].startswith(
        "messages have roles that the chat template does not name: gpt (1 rows)"
    )
    tokenizer.chat_template = CHAT_TEMPLATE + "{# 'gpt' #}"
    assert not list(of_template([problems], DataConfig(), tokenizer))
    with pytest.raises(DataError, match="no message of the assistant to learn from; its roles are user, gpt"):
        read_files([jsonl(tmp_path, {"messages": [USER, gpt]})], "answers")


def test_a_turn_that_is_a_tool_call_is_not_said_to_be_empty(tmp_path):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    problems = read_files([jsonl(tmp_path, {"messages": [USER, call]})], "answers")
    assert not list(notices(problems, (), DataConfig(train_batch_size=1), char_tokenizer("a"), answers=True))


def test_prompts_that_end_with_the_assistant_are_noticed():
    problems = [Problem((USER, SAID), "a", 0), Problem((USER,), "a", 1)]
    said = list(notices(problems, (), DataConfig(train_batch_size=1), char_tokenizer("a"), answers=False))
    assert len(said) == 1 and said[0].startswith("data.train_files: 1 of 2 prompts end with a turn of the assistant")


def test_ground_truths_that_are_right_by_no_rule_are_named(tiny, tmp_path):
    asked = (("b>", "12"), ("a>", "five"))
    rows = [{"data_source": "my/gsm8k", "prompt": q, "reward_model": {"ground_truth": a}} for q, a in asked]
    files = [f"data.{key}_files={jsonl(tmp_path, *rows)}" for key in ("train", "val")]
    judged = [*files, "reward.functions=verl_fn.scores:exact"]
    few = [*files, "data.val_size=1"]
    (tmp_path / "sft").mkdir()
    taught = jsonl(tmp_path / "sft", {"data_source": "my/gsm8k", "prompt": "a>", "completion": "ab"})
    learned = [f"data.train_files={taught}", f"data.val_files={taught}", "algorithm.name=sft"]
    for more, keys in ((files, ["train", "val"]), (few, ["train"]), (judged, []), (learned, [])):
        said = []
        prepare(tiny_run(tiny, tmp_path / "run", *more), said.append)
        found = [line for line in said if "by the rule of their data source" in line]
        assert [line.partition("data.")[2].partition("_files")[0] for line in found] == keys, more
        assert all("right for 1 of the first 2 ground truths" in line and "'#### ANSWER'" in line for line in found)


@pytest.mark.parametrize("key", ["train_files", "val_files"])
def test_an_empty_name_of_a_file_is_named(key):
    # As of a variable of the shell that is not set.
    with pytest.raises(DataError, match=rf"data.{key} has an empty name of a file; 'data.{key}=\[\]' names none"):
        file_data(DataConfig(**{key: ("",)}), char_tokenizer("a"))


def test_an_empty_name_of_a_file_is_not_the_current_folder(tmp_path):
    with pytest.raises(DataError, match=r"data.train_files has an empty name of a file"):
        prepare(tiny_run("", tmp_path / "run", "data.train_files="), lambda line: None)


def test_prompts_of_json_are_noticed():
    problems = [Problem('{"a": 1}', "a", 0), Problem("[1", "a", 1), Problem("a", "a", 2)]
    said = list(notices(problems, (), DataConfig(train_batch_size=1), char_tokenizer("a"), answers=False))
    assert said == ["data.train_files: 1 of 3 prompts are JSON, which the model sees as text"]


@pytest.mark.parametrize(
    "value", [[{"name": "Bob", "role": "user", "content": "a"}], {"id": {"n": 1}, "messages": [USER]}]
)
def test_json_of_messages_is_no_prompt(value, tmp_path):
    with pytest.raises(DataError, match="prompt is a string that holds messages as JSON"):
        read_files([jsonl(tmp_path, {"prompt": json.dumps(value), "completion": "b"})], "answers")


@pytest.mark.parametrize(
    "value",
    [
        {"role": "engineer", "content": "C++"},
        {"from": "Rome", "to": "Oslo", "value": 3},
        {"content": "a"},
        [{"value": 1}],
        {"role": "user", "name": "Bob"},
        {"messages": 3, "role": "admin"},
        {"users": [{"name": "Ann", "role": "user"}], "content": "page"},
        [{"role": "nurse", "content": "a"}, {"role": "user", "content": "b"}],
    ],
)
def test_other_json_is_text_of_a_prompt_or_a_completion(value, tmp_path):
    (one,) = read_files([jsonl(tmp_path, {"prompt": json.dumps(value), "completion": json.dumps(value)})], "answers")
    assert json.loads(one.prompt) == json.loads(one.answer) == value


@pytest.mark.parametrize(
    "text",
    [
        '[INST] Fix this body: {"role": "user", "content": "hi"} [/INST]',
        '[Task] Write the JSON of a chat request such as {"messages": [{"role": "user", "content": "a"}]}.',
    ],
)
def test_json_of_messages_within_a_text_is_text(text):
    assert prompt_of("here", text, "prompt") == text


@pytest.mark.parametrize(
    "value",
    [
        [USER, SAID],
        {"messages": [USER]},
        [{"from": "human", "value": "a"}],
        [{"content": "use {x}, {y}", "role": "User"}, SAID],
        [{"role": "ipython", "content": "a"}],
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ],
)
def test_messages_as_json_or_as_python_writes_them_are_no_completion(value, tmp_path):
    for written in (json.dumps(value), str(value), json.dumps(value)[:-1]):
        with pytest.raises(DataError, match="completion is a string that holds messages as JSON"):
            read_files([jsonl(tmp_path, {"prompt": [USER], "completion": written})], "answers")


@pytest.mark.parametrize("prompt", ["a", [USER]])
def test_a_completion_may_begin_with_its_prompt(prompt, tmp_path):
    for completion in ([SAID], [USER, SAID]):
        (one,) = read_files([jsonl(tmp_path, {"prompt": prompt, "completion": completion})], "answers")
        assert one.messages == (USER, SAID)
    asked = {"role": "user", "content": "b"}
    more = [asked, SAID]
    (one,) = read_files([jsonl(tmp_path, {"prompt": prompt, "completion": more})], "answers")
    assert one.messages == (USER, asked, SAID)
    row = {"prompt": [USER, SAID], "completion": [USER, SAID]}
    (one,) = read_files([jsonl(tmp_path, row)], "answers")
    assert [m["content"] for m in one.messages] == ["a", "b", "a", "b"]


SYSTEM = {"role": "system", "content": "s"}


def test_a_completion_may_begin_with_the_end_of_its_prompt(tmp_path):
    (one,) = read_files([jsonl(tmp_path, {"prompt": [SYSTEM, USER], "completion": [USER, SAID]})], "answers")
    assert one.messages == (SYSTEM, USER, SAID)
    again = [USER, SAID, USER]
    (one,) = read_files([jsonl(tmp_path, {"prompt": again, "completion": [*again, OTHER]})], "answers")
    assert one.messages == (USER, SAID | {"weight": 0}, USER, OTHER)
    for rest in ([], [SAID | {"weight": 0}], [USER]):
        with pytest.raises(DataError, match="line 1: completion repeats prompt, and nothing behind it is learned"):
            read_files([jsonl(tmp_path, {"prompt": again, "completion": [*again, *rest]})], "answers")


@pytest.mark.parametrize("prompt", ["a", [SYSTEM, USER], [USER]])
def test_judged_responses_may_begin_with_their_prompt(prompt, tmp_path):
    begun = [SYSTEM, USER] if prompt == "a" else [USER]
    whole = (SYSTEM, USER) if SYSTEM in (*begun, *prompt) else (USER,)
    pair = {"prompt": prompt, "chosen": [*begun, SAID], "rejected": [*begun, OTHER]}
    (one,) = read_files([jsonl(tmp_path, pair)], "pairs")
    assert (one.prompt, one.chosen, one.rejected) == (whole, ((SAID,),), ((OTHER,),))
    (one,) = read_files([jsonl(tmp_path, {"prompt": prompt, "completion": [*begun, SAID], "label": 1})], "labels")
    assert (one.prompt, one.chosen) == (whole, ((SAID,),))


@pytest.mark.parametrize("content", ["<image>a", [{"type": "image"}, {"type": "text", "text": "a"}]])
def test_a_completion_may_repeat_a_prompt_with_images(content, tmp_path):
    asked = USER | {"content": content}
    row = {"prompt": [SYSTEM, asked], "images": ["a.png"]}
    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    for completion in ([SYSTEM, asked, SAID], [asked, SAID], [SAID]):
        (one,) = read_files([jsonl(tmp_path, row | {"completion": completion})], "answers")
        assert one.messages == (SYSTEM, USER | {"content": "<image>a"}, SAID)
    for completion in ([OTHER, asked, SAID], [asked, SAID, asked, SAID]):
        with pytest.raises(DataError, match=r"of completion.* has .* image|of completion has parts"):
            read_files([jsonl(tmp_path, row | {"completion": completion})], "answers")


@pytest.mark.parametrize("mark", [0, 0.0, False])
@pytest.mark.parametrize("name", MARKS)
def test_marks_exclude_turns(name, mark, tmp_path):
    row = {"messages": [USER, SAID | {name: mark}, USER, OTHER | {name: True}, USER, SAID | {name: mark}]}
    (problem,) = read_files([jsonl(tmp_path, row)], "answers")
    assert learned_turns(problem.messages) == [3] and problem.messages[-1] == OTHER | {name: True}
    pair = {"prompt": [USER], "chosen": [SAID | {name: mark}, USER, OTHER], "rejected": [OTHER]}
    (problem,) = read_files([jsonl(tmp_path, pair)], "pairs")
    assert learned_turns(problem.chosen[0]) == [2]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (SAID | {"weight": 0.5}, "message 1 of messages has weight 0.5; write 1 or true"),
        (SAID | {"loss": "no"}, "message 1 of messages has loss 'no'"),
        (SAID | {"train_detail": [1]}, "message 1 of messages has the field train_detail, which is not understood"),
        (SAID | {"masked": True}, "has the field masked, which is not understood"),
        (SAID | {"is_learnable": False}, "has the field is_learnable, which is not understood"),
        (SAID | {"ignore": True}, "has the field ignore, which is not understood"),
        (USER | {"train": True}, "is marked with train True, and only what the assistant says is learned"),
    ],
)
def test_marks_that_cannot_be_followed(message, error, tmp_path):
    with pytest.raises(DataError, match=error):
        read_files([jsonl(tmp_path, {"messages": [USER, message, SAID]})], "answers")
    with pytest.raises(DataError, match="has no turn of the assistant that is not marked"):
        read_files([jsonl(tmp_path, {"messages": [USER, SAID | {"weight": 0}]})], "answers")


@pytest.mark.parametrize("write", WRITERS)
def test_tools_are_read_from_every_kind_of_file(write, tmp_path):
    for learns, row in LAYOUTS.items():
        for tools in (TOOLS, json.dumps(TOOLS), [json.dumps(tool) for tool in TOOLS]):
            (problem,) = read_files([write(tmp_path, row | {"tools": tools})], learns)
            assert problem.tools == tuple(TOOLS)


def test_messages_beside_a_prompt(tmp_path):
    def read(learns="answers", **row):
        (problem,) = read_files([jsonl(tmp_path, row)], learns)
        return problem

    for prompt in ("a", [USER]):
        problem = read(prompt=prompt, prompt_id="7", messages=[USER, SAID], reward_model={"ground_truth": "z"})
        assert (problem.messages, problem.answer) == ((USER, SAID), "z")
    with pytest.raises(DataError, match="messages does not begin with prompt, so it is not clear what is learned"):
        read(prompt="b", messages=[USER, SAID])
    for prompt in ("a", [USER]):
        pair = read("pairs", prompt=prompt, chosen=[USER, SAID], rejected=[USER, OTHER], messages=[USER, SAID])
        assert (pair.prompt, pair.chosen, pair.rejected) == ((USER,), ((SAID,),), ((OTHER,),))
    with pytest.raises(DataError, match="chosen repeats prompt, and rejected does not"):
        read("pairs", prompt="a", chosen=[USER, SAID], rejected=[OTHER])


def test_nulls_and_empty_calls_of_messages_are_absent_in_every_kind_of_file(tmp_path):
    nulls = [USER | {"tool_calls": None, "name": None}, SAID | {"tool_calls": [], "function": {"a": None}}]
    for write in WRITERS:
        (problem,) = read_files([write(tmp_path, {"messages": nulls})], "answers")
        assert problem.messages == (USER, SAID | {"function": {}})


def test_tools_of_rows_beside_an_environment_are_refused(tiny, tmp_path):
    row = LAYOUTS["samples"] | {"prompt": "ab>", "data_source": "reverse", "tools": TOOLS}
    (tmp_path / "env.py").write_text("def make():\n    pass\n")
    file = jsonl(tmp_path, row)
    plan = tiny_run(tiny, tmp_path / "run", f"data.train_files={file}", f"env.name={tmp_path}/env.py:make")
    rows = read_files([file], "samples")
    for training, held_out, count in ((rows, (), 1), ((), rows, 1), (rows, rows, 2)):
        with pytest.raises(ConfigError, match=rf"env\.name: {count} rows have tools in the column tools"):
            _check_tools(plan, FileData(training, held_out, True), char_tokenizer("ab>"))


@pytest.mark.parametrize(
    ("extra", "more", "told"),
    [
        ({"tools_kwargs": {"calc": {"create_kwargs": {"x": 1}}}, "need_tools_kwargs": True}, [], 1),
        ({"tools_kwargs": {"calc": {"create_kwargs": None}}}, [], 0),
        ({"tools_kwargs": None}, [], 0),
        ({"interaction_kwargs": {"name": "gsm8k"}}, [], 1),
        ({"index": 1}, [], 0),
        ({"tools_kwargs": {"calc": {"create_kwargs": {"x": 1}}}}, ["env.name={folder}/env.py:make"], 0),
    ],
)
def test_arguments_of_tools_that_no_environment_reads_are_told(extra, more, told, tiny, tmp_path):
    (tmp_path / "env.py").write_text("def make():\n    pass\n")
    file = jsonl(tmp_path, LAYOUTS["samples"] | {"prompt": "ab>", "data_source": "reverse", "extra_info": extra})
    source = FileData(read_files([file], "samples"), (), True)
    plan = tiny_run(
        tiny, tmp_path / "run", f"data.train_files={file}", *(one.format(folder=tmp_path) for one in more)
    )
    said = [line for line in _notices(source, plan, char_tokenizer("ab>"), answers=False) if "tools_kwargs" in line]
    assert len(said) == told and all(
        line.startswith("1 of 1 problems have tools_kwargs or interaction_kwargs in extra_info") for line in said
    )


def test_digits_that_a_float_does_not_keep_are_named_with_their_rows(tmp_path):
    numbers = ('{"x": [0.12345678901234567890]}', '{"x": 1e400}', '{"x": [0.1, 123456789012345678901, 2.50]}')
    row = json.dumps(LAYOUTS["samples"] | {"extra_info": 0, "more": "0.12345678901234567890"})
    file = tmp_path / "a.jsonl"
    file.write_text("".join(row.replace('"extra_info": 0', f'"extra_info": {one}') + "\n" for one in numbers))
    said = [line for line in notes(str(file), "samples") if "digits" in line]
    assert len(said) == 2 and "digits of numbers that a float does not keep (a string keeps them) (2 rows)" in said[0]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            {"prompt": np.array([USER], dtype=object)},
            r"prompt, .*array\(.* is of numpy; make a number, a string or a list",
        ),
        (
            {"extra_info": {"difficulty": np.float64(0.5), "seed": np.int64(5)}},
            r"extra_info, .*np.int64\(5\) is of numpy",
        ),
        ({"reward_model": {"ground_truth": np.int64(5)}}, r"reward_model, .*np.int64\(5\) is of numpy"),
        ({"prompt": [USER | {1: "x"}]}, "prompt, .*the key 1 is no string"),
        ({"extra_info": {"a": ({1: 2},)}}, "extra_info, .*the key 1 is no string"),
        ({"prompt": "a\ud800"}, "prompt, .*surrogates not allowed"),
        ({"reward_model": {"ground_truth": "\ud800"}}, "reward_model, .*surrogates not allowed"),
    ],
)
def test_a_function_of_convert_makes_what_a_file_may_have(tmp_path, made, says):
    file = jsonl(tmp_path, LAYOUTS["samples"])
    with pytest.raises(DataError, match=f"line 1: {says}"):
        read_files([file], "samples", convert=[lambda row: row | made])
    # Of columns that are not used, nothing is asked.
    assert len(read_files([file], "samples", convert=[lambda row: row | {"other": np.zeros(2)}])) == 1


def test_a_function_of_convert_that_ends_the_process_is_named(tmp_path):
    with pytest.raises(DataError, match=r"exit of data.convert failed: SystemExit"):
        read_files([jsonl(tmp_path, LAYOUTS["samples"])], "samples", convert=[sys.exit])


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize("learns", LAYOUTS)
def test_tools_beside_a_string_that_does_not_name_them_are_not_dropped(write, learns, tmp_path):
    texts = {"samples": {}, "answers": {"completion": "b"}, "pairs": {"chosen": "b", "rejected": "c"}}
    row = texts.get(learns, {"completion": "b", "label": True}) | {"tools": json.dumps(TOOLS)}
    row |= LAYOUTS["samples"] if learns == "samples" else {}
    made, end = char_tokenizer("abcdef()"), None if learns == "samples" else 2
    for prompt in ("fa", "a_f", "a"):
        table = DataConfig(train_files=(write(tmp_path, row | {"prompt": prompt}),))
        with pytest.raises(DataError, match=r" (line 1|row 0): the prompt is a string .* name the row's tool 'f'"):
            file_data(table, made, learns_from=learns, end_tokens=end)
    table = DataConfig(train_files=(write(tmp_path, row | {"prompt": "f(a)"}),))
    assert len(file_data(table, made, learns_from=learns, end_tokens=end).training) == 1


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize("learns", LAYOUTS)
def test_the_column_enable_thinking_reaches_the_template(write, learns, tmp_path):
    row, unused = LAYOUTS[learns], Counter()
    rows = [row | {"enable_thinking": value} for value in (False, None, True)]
    found = [p.chat_template_kwargs for p in read_files([write(tmp_path, *rows)], learns, unused=unused)]
    assert found == [{"enable_thinking": False}, {}, {"enable_thinking": True}] and not +unused
    missing = read_files([write(tmp_path, row | {"enable_thinking": float("nan")})], learns)
    assert missing[0].chat_template_kwargs == {}
    (null,) = read_files([write(tmp_path, rows[0] | {"chat_template_kwargs": {"enable_thinking": None}})], learns)
    assert null.chat_template_kwargs == {"enable_thinking": False}
    both = {"enable_thinking": True, "chat_template_kwargs": rows[0]}
    for more, says in (({"enable_thinking": "no"}, "must be true or false, not 'no'"), (both, "is .*, and chat_")):
        with pytest.raises(DataError, match=rf" (line 1|row 0): (the column )?enable_thinking {says}"):
            read_files([write(tmp_path, row | more)], learns)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("learns", LAYOUTS)
def test_a_null_among_arguments_of_the_template_is_no_argument(write, learns, tmp_path):
    """A Parquet file has all keys of a column in each row; a null would replace the run's argument."""
    given = {"quiet": False, "level": 0, "tone": {"kind": "a"}}
    nulls = {"quiet": None, "level": None, "tone": {"kind": None}}
    rows = [LAYOUTS[learns] | {"chat_template_kwargs": kwargs} for kwargs in (given, given | {"quiet": None}, nulls)]
    found = [problem.chat_template_kwargs for problem in read_files([write(tmp_path, *rows)], learns)]
    assert found == [given, {"level": 0, "tone": {"kind": "a"}}, {"tone": {}}]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("learns", LAYOUTS)
def test_nan_in_a_column_is_nothing(write, learns, tmp_path):
    nothing = float("nan")
    names = ("weight", "system", "context", "video", "score", "tools", "extra_info", "enable_thinking", "images")
    file = write(tmp_path, LAYOUTS[learns] | dict.fromkeys(names, nothing))
    (problem,) = read_files([file], learns)
    assert problem == read_files([write(tmp_path, LAYOUTS[learns])], learns)[0]
    with pytest.raises(DataError, match=r"not nan"):
        name = {"samples": "data_source", "answers": "messages", "labels": "label"}.get(learns, "chosen")
        read_files([write(tmp_path, LAYOUTS[learns] | {name: nothing})], learns)
    with pytest.raises(DataError, match=r"weight has 0\.5"):
        read_files([write(tmp_path, LAYOUTS[learns] | {"weight": 0.5, "score": nothing})], learns)


def test_a_part_of_text_with_more_than_text_is_named_by_what_it_has(tmp_path):
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    with pytest.raises(
        DataError, match=r"message 0 of messages has a part of the type text with cache_control; noth"
    ):
        read_files([jsonl(tmp_path, {"messages": [{"role": "user", "content": [part]}, SAID]})], "answers")


def content(folder, *parts):
    rows = {"messages": [{"role": "user", "content": list(parts)}, SAID]}
    return read_files([jsonl(folder, rows)], "answers")[0].messages[0]["content"]


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (
            {"type": "text", "text": {"value": "a", "annotations": []}},
            r"the text {'value': 'a'.*; it must be a string$",
        ),
        ({"type": "text", "text": 5}, "a part of the type text with the text 5; it must be a string$"),
        ({"type": "thinking", "thinking": "a"}, "write it into the message's reasoning_content"),
        ({"type": "tool_use", "name": "f", "input": {}}, "write it into the message's tool_calls"),
        ({"type": "tool_result", "content": "a"}, "write it as a message of the role tool"),
        ({"type": ["text"], "text": "a"}, "nothing else is read$"),
        ({"text": "a"}, "nothing else is read$"),
        ("a", "nothing else is read$"),
    ],
)
def test_parts_that_are_not_read_are_named_with_the_place_for_what_they_hold(part, says, tmp_path):
    with pytest.raises(DataError, match=rf"message 0 of messages .*{says}"):
        content(tmp_path, part)


def test_texts_of_parts_may_be_of_the_types_that_responses_have(tmp_path):
    parts = [{"type": kind, "text": "a"} for kind in ("text", "input_text")]
    assert content(tmp_path, *parts, {"type": "output_text", "text": "b", "annotations": []}) == "aab"


@pytest.mark.parametrize("weights", [(), (1.0, 1.0, 1.0)])
def test_each_file_has_the_rows_that_its_own_columns_say(weights, tmp_path):
    texts = {"prompt": "a", "completion": "b"}
    files = []
    for name, row in {"talk": LAYOUTS["answers"], "texts": texts, "verl": LAYOUTS["samples"]}.items():
        (tmp_path / name).mkdir()
        files.append(jsonl(tmp_path / name, row))
    table = DataConfig(train_files=tuple(files), val_files=tuple(files[::-1]), weights=weights)
    made = char_tokenizer("abc\n")
    made.chat_template = CHAT_TEMPLATE
    data = file_data(table, made, learns_from="answers", end_tokens=2)
    assert [one.answer for one in (*data.training, *data.validation)] == ["b"] * 6
    with pytest.raises(DataError, match=r"verl/rows\.jsonl, line 1: there is no column 'chosen'"):
        (tmp_path / "pairs").mkdir()
        file_data(DataConfig(train_files=(jsonl(tmp_path / "pairs", LAYOUTS["pairs"]), files[2])), made,
                  learns_from="pairs", end_tokens=2)  # fmt: skip
    pairs = (str(tmp_path / "pairs/rows.jsonl"), files[2])
    data = file_data(DataConfig(val_files=pairs), made, learns_from="pairs", end_tokens=2)
    assert [hasattr(one, "chosen") for one in data.validation] == [True, False]
