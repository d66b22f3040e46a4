"""What a user wrote: columns and fields that are used, reported as unused, or refused."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_fn.backends.hf.new_model import CHAT_TEMPLATE, char_tokenizer
from verl_fn.config.schema import DataConfig
from verl_fn.data.loading import file_data, read_files
from verl_fn.data.rows import DataError

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
    row = row | {"weight": 1.0, "images": None}
    file = write(tmp_path, *(row | {"prompt_id": name} for name in ("7", None, "8")))
    said = [line for line in notes(file, learns) if "columns" in line]
    assert said == [
        f"note: data.{key}_files: columns that are not used: prompt_id (2 rows), weight (3 rows)"
        for key in ("val", "train")
    ]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("learns", LAYOUTS)
@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("images", [{"bytes": "x", "path": None}], "the column images has images, videos or sounds"),
        ("video_path", "a.mp4", "the column video_path has images"),
        ("system", "be brief", "the column system is not used, so the model would not see it; write a first message"),
        ("weight", 0.5, "the column weight has 0.5, and rows have no weights of their own"),
        ("tools", "nothing", "tools is a string that is not JSON"),
        ("tools", [3], "tools must be a list of JSON schemas"),
    ],
)
def test_columns_that_change_what_is_learned_are_refused(write, learns, column, value, message, tmp_path):
    if column == "images":
        value = [{"bytes": b"x" if write is not jsonl else "x", "path": None}]
    file = write(tmp_path, LAYOUTS[learns] | {column: None}, LAYOUTS[learns] | {column: value})
    with pytest.raises(DataError, match=rf"(line 2|row 1): {message}"):
        read_files([file], learns)
