"""Model folders that are damaged in hundreds of ways: each is refused by an error for its user, or works."""

import copy
import json
import random
import shutil
import traceback

import pytest
from run_configs import tiny_run

from verl_fn.backends.hf.new_model import new_model
from verl_fn.errors import UserError
from verl_fn.runs.folder import Run
from verl_fn.runs.prepare import prepare, workers
from verl_fn.runs.state import initial_state
from verl_fn.state import Key, Sampling, requests_for

TABLES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
TEMPLATE = "chat_template.jinja"
FILES = (*TABLES, TEMPLATE, "model.safetensors")
VALUES = (
    None,
    True,
    -1,
    0,
    1,
    2.5,
    10**9,
    10**12,
    -(10**9),
    float("nan"),
    "",
    "a",
    "\u0000",
    [],
    {},
    [None],
    {"a": 1},
)
TEXTS = (
    b"",
    b"[]",
    b"null",
    b'"a"',
    b"{}",
    b"\xff\xfe\x00",
    b"\x00" * 64,
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"\xef\xbb\xbf{}",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
)
TEMPLATES = (
    "{{ raise_exception('no') }}",
    "{% if %}",
    "{% for m in messages %}",
    "{{ 1 / 0 }}",
    "{{ messages[9].content }}",
    "",
    "{{ messages.__class__.__mro__ }}",
    "{{ range(10 ** 9) | list }}",
    "{% include 'config.json' %}",
    "{{ 'a' * 10 ** 15 }}",
    "{{ messages | first | tojson }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% set x = namespace(n=0) %}{{ messages[0].n + x }}",
    "xyz{{ 5 }}",
    "{{ messages | batch(0) | list }}",
    "{{ ([[]] * 3)[0].append(1) }}",
    "{{ strftime_now(5) }}",
    "{{ '%d' % 'a' }}",
)


def start(model, run, data):
    """Does all that a run does with a model folder, up to its first save."""
    more = ["algorithm.name=sft", f"data.train_files={data}", "data.train_batch_size=2", "data.max_response_length=2"]
    plan = tiny_run(model, run, *more)
    problems = prepare(plan, lambda line: None).train(Key.from_seed(0), 0, 2)
    with workers(plan) as w:
        state = initial_state(plan, w)
        Run(plan).save(state, w)
        w.rollout.publish(0, w.trainers["actor"].weights(state.role("actor").params))
        prompts = [[1] for _ in problems]
        w.rollout.generate(requests_for(prompts, Sampling(2), Key.from_seed(0)), version=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return new_model(
        tmp_path_factory.mktemp("model"),
        chars="ab",
        hidden_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        chat_template=True,
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    prompt = [{"role": "user", "content": "ab"}]
    row = {"data_source": "mine", "prompt": prompt, "reward_model": {"ground_truth": "ba"}}
    file.write_text(f"{json.dumps(row)}\n" * 2)
    return file


def paths(value, path=()):
    """The places of all values in a JSON value, without those deep in a vocabulary."""
    for key, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield (*path, key)
        if len(path) < 3:
            yield from paths(inner, (*path, key))


def edited(table, path, change):
    """The table with one value changed."""
    table = copy.deepcopy(table)
    *above, last = path
    inner = table
    for key in above:
        inner = inner[key]
    change(inner, last)
    return json.dumps(table).encode()


def put(value):
    return lambda inner, key: inner.__setitem__(key, value)


def damages(model, rng):
    """Yields names of files, each with a damaged content and what was done."""
    whole = {name: (model / name).read_bytes() for name in FILES}
    for name in TABLES:
        table = json.loads(whole[name])
        places = sorted(paths(table), key=str)
        for path in rng.sample(places, min(len(places), 8)):
            yield name, edited(table, path, lambda inner, key: inner.pop(key)), f"without {path}"
            yield (
                name,
                edited(table, path, lambda inner, key: inner.__setitem__(key, {key: inner[key]})),
                f"deep {path}",
            )
        for path in rng.choices(places, k=16):
            value = rng.choice(VALUES)
            yield name, edited(table, path, put(value)), f"{path} = {value!r}"
    for name, content in whole.items():
        yield name, None, "deleted"
        for text in rng.sample(TEXTS, 4):
            yield name, text, f"{text[:12]!r}"
        for end in rng.sample(range(1, len(content)), 2):
            yield name, content[:end], f"cut at {end}"
        at = rng.randrange(len(content))
        yield (
            name,
            content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :],
            f"flipped at {at}",
        )
        other = rng.choice([o for o in FILES if o != name])
        yield name, whole[other], f"swapped with {other}"
    for template in TEMPLATES:
        yield TEMPLATE, template.encode(), template
    # The numbers that decide how large a model is.
    table = json.loads(whole["config.json"])
    for key in sorted(key for key in table if key.endswith(("size", "heads", "layers", "dim", "embeddings"))):
        for value in (-1, 0):
            yield "config.json", edited(table, (key,), put(value)), f"{key} = {value}"
    # Where transformers looks for a language model inside the model.
    for key, value in (("text_config", {}), ("text_config", []), ("decoder", {"a": 1}), ("generator", 3)):
        yield "config.json", json.dumps(table | {key: value}).encode(), f"added {key} = {value}"


def test_an_undamaged_folder_works(model, data, tmp_path):
    start(model, tmp_path / "run", data)


def test_every_damaged_folder_is_refused_or_works(model, data, tmp_path):
    works, refused, wrong = [], [], []
    for number, (name, content, what) in enumerate(damages(model, random.Random(0))):
        folder = shutil.copytree(model, tmp_path / str(number))
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        try:
            start(folder, tmp_path / f"run_{number}", data)
            works.append((name, what))
        except UserError as error:
            refused.append((name, what, str(error)))
        except Exception:
            wrong.append(f"{name}, {what}: {traceback.format_exc(limit=-6)}")
    assert not wrong, f"{len(wrong)} of {number + 1}:\n" + "\n".join(wrong)
    assert len(refused) > 150 and len(works) > 30
    assert [message for _, _, message in refused if len(message) > 1000] == []
