"""Many rows: encoded by several processes, found in the cache, and never from a cache that is old or damaged."""

import datetime
import fcntl
import json
import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import textwrap
import threading
import time
from pathlib import Path

import attrs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_fn.backends.hf.new_model import CHAT_TEMPLATE, char_tokenizer
from verl_fn.backends.hf.tokenizer import with_chat_arguments
from verl_fn.config.schema import DataConfig
from verl_fn.data import reading
from verl_fn.data.encoded import Encoder
from verl_fn.data.files import problem_rows
from verl_fn.data.loading import file_data, read_files
from verl_fn.data.notices import notices, traits_of
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import Problem
from verl_fn.state import Key

LETTERS = "abcdefgh"


def rows(count, source="s", **columns):
    return [
        {"data_source": source, "prompt": [{"role": "user", "content": LETTERS[: 1 + i % 8]}]}
        | {"reward_model": {"ground_truth": "ab"}, "extra_info": {"index": i}}
        | columns
        for i in range(count)
    ]


def write(file, made):
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(made), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(file)


def tokenizer(letters=LETTERS, template=CHAT_TEMPLATE, arguments=None, date=None, split=False):
    made = with_chat_arguments(char_tokenizer(letters + "\n"), arguments or {}, date)
    made.chat_template, made.split_special_tokens = template, split
    return made


def read(*files, using=None, learns_from="samples", end_tokens=None, val=(), said=None, **table):
    table = DataConfig(**{"train_files": files, "val_files": val, "max_prompt_length": 99} | table)
    say = (lambda line: None) if said is None else said.append
    return file_data(table, using or tokenizer(), say, learns_from=learns_from, end_tokens=end_tokens)


@pytest.fixture
def few(tmp_path, monkeypatch):
    """Takes 20 rows for many, three to a block, with a cache of its own; returns the sizes of encoded parts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(reading, "FEWEST", 20)
    for module in ("rows", "reading"):
        monkeypatch.setattr(f"verl_fn.data.{module}.MANY", 3)
    encoded, in_order = [], reading.in_order

    def counted(function, items):
        for part in in_order(function, items):
            encoded.append(len(part.problems))
            yield part

    monkeypatch.setattr(reading, "in_order", counted)
    return encoded


def kept():
    return sorted(reading.cache_folder().glob("*.rows"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_many_rows_are_the_problems_of_their_files_and_the_second_start_encodes_nothing(tmp_path, few, name):
    file, val = write(tmp_path / name, rows(50)), write(tmp_path / "val.jsonl", rows(5, "v"))
    for encoded in (50, 0):
        few.clear()
        data = read(file, val=(val,))
        assert sum(few) == encoded
        assert tuple(data.training) == read_files([file], "samples")
        unit = "row" if name == "a.parquet" else "line"
        assert [one.place for one in data.training] == [one.place for one in read_files([file], "samples")]
        assert data.training[49].place == f"{file}, {unit} {49 + (unit == 'line')}"
        assert [problem.extra_info for problem in data.training[3:5]] == [{"index": 3}, {"index": 4}]
        assert data.training[-1].extra_info == {"index": 49} and data.held_out(2) == tuple(data.validation)[:2]
        assert (len(data.training), len(data.validation), data.max_prompt) == (50, 5, 10)
        drawn = data.train(Key.from_seed(0), 45, 10)
        assert drawn == attrs.evolve(data, training=read_files([file], "samples")).train(Key.from_seed(0), 45, 10)
    assert len(kept()) == 1 and not list(reading.cache_folder().glob(".*"))


def test_a_prompt_that_is_too_long_is_named_by_file_and_line_also_after_a_move(tmp_path, few):
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        files = [write(tmp_path / folder / f"{name}.jsonl", rows(12, name)) for name in "ab"]
        read(*files)
        assert sum(few) == 24, "the second folder has the same rows"
        with pytest.raises(DataError, match=rf"{folder}/a\.jsonl, line 3: the prompt has 5 tokens, more than 4"):
            read(*files, max_prompt_length=4)
        assert [one.place for one in read(*files).training[11:14]] == [
            f"{files[0]}, line 12",
            f"{files[1]}, line 1",
            f"{files[1]}, line 2",
        ]


def test_everything_that_a_start_says_is_said_by_the_second_one(tmp_path, few):
    made = [row | {"more": 1} for row in rows(20)]
    made[7] |= {"prompt": '{"x":1}', "reward_model": {"ground_truth": ""}, "tools": [{"name": "x"}]}
    made[9]["prompt"][0] |= {"content": "a<eos>", "name": "b"}
    made[11] |= {"prompt": "a b c", "reward_model": {"ground_truth": "a b c d"}}
    file, heard = write(tmp_path / "a.jsonl", made), []
    using = tokenizer(LETTERS + '{"}: 1x')
    for _ in range(2):
        said = []
        data = read(file, using=using, max_prompt_length=8, filter_overlong_prompts=True, said=said)
        table = DataConfig(train_files=(file,), train_batch_size=1)
        said += notices(data.training, data.validation, table, using, answers=True)
        said += [group for group, _ in traits_of(data.training, using).rows_of()]
        heard.append(said)
    assert heard[0] == heard[1] and few.count(0) == 0
    assert heard[0][:2] == [
        "note: data.train_files: columns that are not used: more (20 rows)"
        "; a reward function gets what extra_info holds",
        "data.train_files: left out 3 of 20 prompts, longer than 8 tokens",
    ]
    assert "1 of 17 prompts are JSON" in heard[0][3] and "1 of 17 ground truths are empty" in heard[0][4]
    assert "the responses of 1 of 17 prompts begin with the prompt's own text" in heard[0][5]
    assert f"such as '<eos>' in {file}, line 10;" in heard[0][6] and heard[0][-1].fields == ("user.name",)


def test_another_content_tokenizer_template_argument_or_day_is_encoded_again(tmp_path, few):
    file = tmp_path / "a.jsonl"
    write(file, rows(30))
    first = read(str(file))
    few.clear()
    for other in (
        {"letters": LETTERS + "os<>"},
        {"letters": LETTERS + "os<>", "split": True},
        {"template": CHAT_TEMPLATE + "a"},
        {"arguments": {"a": 1}},
        {"date": "2026-01-01"},
    ):
        for encoded in (30, 0):
            read(str(file), using=tokenizer(**other))
            assert sum(few) == encoded, other
            few.clear()
    # The same size and the same time.
    before = file.stat()
    file.write_text(file.read_text().replace('"ab"', '"cd"'))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size and file.stat().st_mtime_ns == before.st_mtime_ns
    assert {one.answer for one in read(str(file)).training} == {"cd"} and sum(few) == 30
    # Those that were read before are still what they were.
    assert {one.answer for one in first.training} == {"ab"}


def test_settings_that_rows_depend_on_are_a_part_of_the_name(tmp_path, few):
    file = write(tmp_path / "a.jsonl", [row | {"q": "a"} for row in rows(30)])
    assert read(file).training[1].prompt != read(file, prompt_key="q").training[1].prompt == "a"
    few.clear()
    answers = read(file, learns_from="answers", end_tokens=2)
    assert sum(few) == 30 and answers.max_row > read(file).max_row == 0
    # Rows of prompts that are left out are not encoded, so they cannot fail.
    shorter = read(file, learns_from="answers", end_tokens=2, max_prompt_length=5, filter_overlong_prompts=True)
    assert 0 < shorter.max_row < answers.max_row
    # With a higher limit, prompts that were left out before are rows.
    other, options = write(tmp_path / "b.jsonl", rows(30, "b")), {"learns_from": "answers", "end_tokens": 2}
    filtered = [read(other, max_prompt_length=n, filter_overlong_prompts=True, **options).max_row for n in (5, 7)]
    assert filtered[0] < filtered[1]
    # Of problems that are held out beside pairs nothing is learned, and of answers their rows are.
    few.clear()
    pair = write(tmp_path / "pair.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    assert read(pair, val=(file,), learns_from="pairs", end_tokens=2).max_row == 4 and sum(few) == 30


def test_code_of_a_function_of_the_user_is_a_part_of_the_name(tmp_path, few):
    file = write(tmp_path / "a.jsonl", rows(30))
    code, beside = tmp_path / "mine.py", tmp_path / "mine_too.py"
    code.write_text(
        "from .mine_too import answer\n\n\ndef convert(row):\n    return row | {'reward_model': answer}\n"
    )
    beside.write_text("answer = {'ground_truth': 'a'}\n")
    convert = (f"{code}:convert",)
    assert read(file, convert=convert).training[0].answer == "a" and sum(few) == 30
    assert read(file, convert=convert).training[0].answer == "a" and sum(few) == 30
    code.write_text(code.read_text().replace("answer}", "{'ground_truth': 'b'}}"))
    assert read(file, convert=convert).training[0].answer == "b" and sum(few) == 60
    beside.write_text("answer = {'ground_truth': 'c'}\n")
    read(file, convert=convert)
    assert sum(few) == 90


@pytest.mark.parametrize("pattern", reading.CODE)
def test_the_code_that_makes_rows_is_there(pattern):
    assert [*Path(reading.verl_fn.__file__).parent.glob(pattern)]


@pytest.mark.parametrize("damage", ["cut", "byte", "column", "empty", "other"])
def test_a_damaged_file_of_the_cache_is_made_again(tmp_path, few, damage):
    file = write(tmp_path / "a.jsonl", rows(30))
    read(file)
    (stored,) = kept()
    data = stored.read_bytes()
    place = {"byte": 5, "column": -400}.get(damage, 0)
    changed = bytearray(data)
    changed[place] ^= 1
    stored.write_bytes({"cut": data[:-9], "empty": b"", "other": b"x" * 99}.get(damage, bytes(changed)))
    few.clear()
    assert tuple(read(file).training) == read_files([file], "samples") and sum(few) == 30
    assert stored.read_bytes() == data


def test_a_cache_names_no_code_to_run(tmp_path, few):
    class Runs:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    with pytest.raises(reading.Unstorable):
        reading.packed(Problem("a", "b", extra_info={"x": Runs()}))
    with pytest.raises(pickle.UnpicklingError, match="is no class of a row's values"):
        reading.unpacked(pickle.dumps((0, "a", Runs())), 0)
    assert not (tmp_path / "ran").exists()
    value = Problem(({"role": "user", "at": datetime.date(2026, 1, 2), "b": b"x"},), "b", 3, "s", {"x": [1.5, None]})
    assert reading.unpacked(reading.packed(value), 3) == value


def test_values_of_other_classes_stay_in_memory(tmp_path, few):
    code = tmp_path / "odd.py"
    code.write_text(
        "class Odd(str):\n    pass\ndef convert(row):\n    return row | {'data_source': Odd(row['data_source'])}\n"
    )
    file = write(tmp_path / "a.jsonl", rows(30))
    data = read(file, convert=(f"{code}:convert",))
    assert len(data.training) == 30 and type(data.training[0].data_source).__name__ == "Odd" and not kept()


def test_a_cache_that_cannot_be_written_or_made_is_not_needed(tmp_path, few, monkeypatch):
    file = write(tmp_path / "a.jsonl", rows(30))
    (tmp_path / "cache").write_text("a file")
    for _ in range(2):
        assert tuple(read(file).training) == read_files([file], "samples")
    assert sum(few) == 60
    (tmp_path / "cache").unlink()

    def full(descriptor, *args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(reading.fcntl, "flock", full)
        assert tuple(read(file).training) == read_files([file], "samples")
    assert not kept()
    read(file)
    # A folder that another user has filled.
    with monkeypatch.context() as patched:
        patched.setattr(reading.os, "utime", full)
        patched.setattr(reading, "_claimed", full)
        few.clear()
        assert tuple(read(file).training) == read_files([file], "samples") and not few


def test_a_full_disk_leaves_nothing_behind(tmp_path, few, monkeypatch):
    file = write(tmp_path / "a.jsonl", rows(30))
    written = reading.write_stored

    def full(out, parts):
        error = written(out, parts)
        if hasattr(out, "fileno") and not isinstance(out, reading.io.BytesIO):
            raise OSError(28, "No space left on device")
        return error

    monkeypatch.setattr(reading, "write_stored", full)
    assert tuple(read(file).training) == read_files([file], "samples")
    assert not list(reading.cache_folder().iterdir())


def test_data_that_change_while_they_are_read_stay_out_of_the_cache(tmp_path, few, monkeypatch):
    file = tmp_path / "a.jsonl"
    write(file, rows(30))
    written = reading.write_stored

    def late(out, parts):
        error = written(out, parts)
        file.write_text(file.read_text().replace('"ab"', '"cd"'))
        return error

    with monkeypatch.context() as patched:
        patched.setattr(reading, "write_stored", late)
        assert {one.answer for one in read(str(file)).training} == {"ab"}
    assert not list(reading.cache_folder().iterdir())
    assert {one.answer for one in read(str(file)).training} == {"cd"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_errors_name_file_and_row_of_the_first_mistake(tmp_path, few, name):
    made = rows(60)
    made[40] |= {"reward_model": {"ground_truth": None}}
    made[50] |= {"prompt": []}
    file = write(tmp_path / name, made)
    place, bad = ("line 41", "line 31") if name == "a.jsonl" else ("row 40", "row 30")
    with pytest.raises(DataError, match=rf"{name}, {place}: reward_model has no ground_truth"):
        read(file)
    # A row that cannot be encoded is as wrong as one that cannot be read.
    made[40], made[50] = rows(60)[40], rows(60)[50]
    made[30]["prompt"][0]["content"] = "a!"
    for _ in range(2):
        with pytest.raises(DataError, match=rf"{name}, {bad}: the tokenizer does not know .* it lacks '!'"):
            read(write(tmp_path / name, made))
    made[59] |= {"reward_model": {}} if name == "a.jsonl" else {"reward_model": {"ground_truth": None}}
    with pytest.raises(DataError, match=rf"{name}, {bad}: the tokenizer does not know"):
        read(write(tmp_path / name, made))
    assert not list(reading.cache_folder().iterdir())
    for _ in range(2):
        with pytest.raises(DataError, match=r"b\.jsonl, line 8: the prompt has 10 tokens, more than 9"):
            read(write(tmp_path / "b.jsonl", rows(30)), max_prompt_length=9)


BUILD = """
    import os, sys, time
    sys.path.insert(0, {tests!r})
    from data import test_cache
    from verl_fn.data import reading
    reading.FEWEST = 20
    real = reading.write_stored
    def slow(out, parts):
        print("building", os.getpid(), flush=True)
        error = real(out, parts)
        time.sleep({seconds})
        return error
    reading.write_stored = slow
    print(len(test_cache.read({file!r}).training), flush=True)
"""


def started(warm, tmp_path, file, seconds):
    tests = os.path.dirname(os.path.dirname(__file__))
    code = textwrap.dedent(BUILD.format(tests=tests, file=file, seconds=seconds))
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    return subprocess.Popen([warm, "-c", code], env=env, stdout=subprocess.PIPE, text=True)


def test_of_two_processes_one_builds_and_the_other_waits_also_if_the_first_is_killed(warm, tmp_path, few):
    file = write(tmp_path / "a.jsonl", rows(30))
    killed = started(warm, tmp_path, file, 600)
    assert killed.stdout.readline().startswith("building")
    waiting = [started(warm, tmp_path, file, 1) for _ in range(2)]
    (aside,) = reading.cache_folder().glob(".*")
    with aside.open("ab") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    time.sleep(1)
    killed.send_signal(signal.SIGKILL)
    outputs = [process.communicate(timeout=300)[0].split("\n") for process in (killed, *waiting)]
    assert sorted(len(lines) for lines in outputs[1:]) == [2, 3], outputs  # one of them has built
    assert all(lines[-2] == "30" for lines in outputs[1:])
    assert len(kept()) == 1 and not list(reading.cache_folder().glob(".*"))
    few.clear()
    read(file)
    assert not few


def test_files_that_no_run_has_read_for_a_month_are_removed(tmp_path, few):
    old, new = (write(tmp_path / f"{name}.jsonl", rows(30, name)) for name in "ab")
    read(old)
    (file,) = kept()
    os.utime(file, (time.time() - reading.UNUSED + 60,) * 2)
    read(old)
    assert time.time() - file.stat().st_mtime < 60
    os.utime(file, (time.time() - reading.UNUSED - 60,) * 2)
    read(new)
    assert len(kept()) == 1 and kept() != [file]


def test_weights_number_the_problems_of_all_files(tmp_path, few):
    files = [write(tmp_path / f"{name}.jsonl", rows(20, name)) for name in "ab"]
    for _ in range(2):
        said = []
        data = read(*files, weights=(1.0, 3.0), max_prompt_length=8, filter_overlong_prompts=True, said=said)
        assert data.sizes == (16, 16) and [one.id for one in data.training[14:18]] == [18, 19, 20, 21]
        assert said == ["data.train_files: left out 4 of 20 prompts, longer than 8 tokens"] * 2


def test_results_of_processes_are_in_order_and_an_error_ends_them(monkeypatch):
    monkeypatch.setattr(reading.os, "sched_getaffinity", lambda process: range(3))
    threads, children = set(threading.enumerate()), set(multiprocessing.active_children())

    def slow(number):
        time.sleep(0.05 * (number % 3 == 0))
        if number == 11:
            raise DataError("eleven")
        if number == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return number, os.getpid()

    found = list(reading.in_order(slow, range(11)))
    assert [number for number, _ in found] == list(range(11)) and len({process for _, process in found}) == 3
    seen = []
    with pytest.raises(DataError, match="eleven"):
        seen.extend(number for number, _ in reading.in_order(slow, iter(range(12))))
    with pytest.raises(reading.ProcessEnded, match="exit status -9"):
        list(reading.in_order(slow, [1, 13, 2]))

    def items():
        yield 1
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        list(reading.in_order(slow, items()))
    some = reading.in_order(slow, range(11))
    next(some)
    some.close()
    assert set(threading.enumerate()) <= threads and set(multiprocessing.active_children()) <= children


def test_an_item_that_takes_long_holds_up_no_other(monkeypatch, tmp_path):
    monkeypatch.setattr(reading.os, "sched_getaffinity", lambda process: range(2))

    def first_waits_for_the_last(number):
        (tmp_path / str(number)).touch()
        for _ in range(2000 if number == 0 else 0):
            if (tmp_path / "5").exists():
                break
            time.sleep(0.01)
        return number, (tmp_path / "5").exists()

    assert next(reading.in_order(first_waits_for_the_last, range(6))) == (0, True)


def test_processes_end_with_the_one_that_started_them(warm):
    code = """
        import os, time
        from verl_fn.data import reading
        reading.os.sched_getaffinity = lambda process: range(3)
        for _ in reading.in_order(lambda number: number, range(30)):
            print("started", flush=True)
            time.sleep(600)
    """
    with subprocess.Popen([warm, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "started\n"
        process.kill()
        # The processes hold the other end of the pipe.
        assert select.select([process.stdout], [], [], 30)[0] and process.stdout.read() == ""


def test_tokens_that_depend_on_the_clock_are_encoded_at_each_start(tmp_path, few):
    """As those of a tokenizer that was read without a day."""
    file = tmp_path / "a.jsonl"
    write(file, rows(30))
    letters = LETTERS + "0123456789"
    dated = tokenizer(letters, "{{ strftime_now('%d') }}" + CHAT_TEMPLATE)
    for day, counts in ((None, (30, 30)), ("2026-01-01", (30, 0))):
        for encoded in counts:
            read(str(file), using=with_chat_arguments(dated, {}, day))
            assert sum(few) == encoded
            few.clear()


def test_values_of_arguments_of_the_template_are_part_of_the_name(tmp_path, few):
    file, thinks = str(tmp_path / "a.jsonl"), "{% if enable_thinking %}abc{% endif %}"
    write(tmp_path / "a.jsonl", rows(30))
    for value, longest in ((False, 10), (True, 13)):
        for encoded in (30, 0):
            data = read(file, using=tokenizer(template=thinks + CHAT_TEMPLATE, arguments={"enable_thinking": value}))
            assert (data.max_prompt, sum(few)) == (longest, encoded)
            few.clear()


def test_name_of_data_that_is_no_file_is_not_known():
    assert reading.name_of([], Encoder([problem_rows()], (), object()), ()) is None
