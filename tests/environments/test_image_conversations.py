"""Conversations whose first message shows images: rows, log-probs, whole runs, and what is refused."""

import io
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from verl_fn.algorithms.experience import conversations_of
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.hf.tokenizer import end_tokens, read_tokenizer
from verl_fn.backends.local import Local
from verl_fn.backends.sampler import Sampler
from verl_fn.config import load, make_plan
from verl_fn.data.images import seen_by, unplaced
from verl_fn.data.tasks import Problem
from verl_fn.environments import Done
from verl_fn.environments.engine import Conversing, Limits
from verl_fn.environments.processes import EnvError
from verl_fn.environments.rendering import Renderer, TemplateArguments
from verl_fn.pool.playing import Failed, checked
from verl_fn.runs.loop import train
from verl_fn.state import Key, Sampling, pack, tree, unpack
from verl_fn.steps import sgd

SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
# Drops earlier replies, so that a conversation goes on in a new row, with its images again.
FORGETFUL = "{% if message['role'] != 'assistant' or loop.last %}"


def png(colour, size=(32, 32)):
    written = io.BytesIO()
    Image.new("RGB", size, colour).save(written, "PNG")
    return written.getvalue()


@pytest.fixture(scope="module", params=["qwen2_5_vl", "smolvlm"])
def model(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("model") / request.param
    return new_model(folder, chars="abcd?<>imge", arch=request.param, chat_template=True, **SIZES)


class Twice:
    """Shows the problem, asks once more, and then ends."""

    def __init__(self, answer="d?"):
        self.answer = answer

    def __call__(self, jobs):
        return [self._result(job) for job in jobs]

    def _result(self, job):
        if not job.replies:
            return tuple(job.problem["prompt"])
        return ({"role": "user", "content": self.answer},) if len(job.replies) == 1 else Done(1.0)


def problems():
    asked = ("<image>ab?", "c?", "a<image>b<image>")
    return [
        Problem(({"role": "user", "content": text},), "a", number, images=(png("red"), png("blue", (48, 16)))[:count])
        for number, (text, count) in enumerate(zip(asked, (1, 0, 2), strict=True))
    ]


def conversing(folder, environment, **changes):
    tokenizer, ends = read_tokenizer(folder), end_tokens(folder)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    sampler = Sampler(folder, slots=4)
    trainer = Local(folder, sgd(0.1))
    state = trainer.load_pretrained()
    sampler.publish(0, trainer.weights(state.params))
    engine = Conversing(sampler, environment, Renderer(tokenizer, ends), tokenizer, ends, Limits(3, 16, 64))
    return engine, trainer, state, tokenizer


@pytest.mark.parametrize("forgetful", [False, True])
def test_log_probs_of_conversations_are_the_trainers(model, forgetful):
    template = read_tokenizer(model).chat_template
    if forgetful:
        begin, end = "{% for message in messages %}", "{% endfor %}"
        template = template.replace(begin, begin + FORGETFUL, 1)
        template = template[: template.rindex(end)] + "{% endif %}" + template[template.rindex(end) :]
    engine, trainer, state, tokenizer = conversing(model, Twice(), chat_template=template)
    sampling = Sampling(max_tokens=64, n=4)
    samples = engine.generate(conversations_of(problems(), tokenizer, sampling, Key.from_seed(2)), version=0)
    assert any(sample.outcome.turns == 2 for sample in samples)
    assert (len(samples) > 12) == forgetful
    batch = pack(samples)
    own = trainer.forward(state.params, batch).logprobs
    drawn = batch["response_mask"] == 1
    assert float((own - batch["rollout_log_probs"])[drawn].abs().max()) <= 1e-4
    counts = {sample.request: sample.images for sample in samples}
    assert [counts[i] is None for i in range(3)] == [False, True, False]
    assert tree.equal(pack(unpack(batch)), batch)
    gray = batch.with_ragged(pixels=[torch.full_like(row, 0.25) for row in batch.rows("pixels")])
    assert not torch.equal(trainer.forward(state.params, gray).logprobs[drawn], own[drawn])


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (Twice("<image>?"), "problem 0 of '': the environment's answer has the mark <image>; images are shown only"),
        (lambda jobs: [({"role": "user", "content": "ab?"},) for _ in jobs], "has 0 marks <image> for 1 images"),
        (lambda jobs: [({"role": "tool", "content": "<image>"},) for _ in jobs], "in a message of the assistant or"),
    ],
)
def test_marks_in_the_wrong_place_are_refused(model, environment, says):
    engine, _, _, tokenizer = conversing(model, environment)
    # A reply of one token, which is never cut off before its end.
    requests = conversations_of(problems()[:1], tokenizer, Sampling(max_tokens=40, n=4), Key.from_seed(1))
    with pytest.raises(EnvError, match=says):
        engine.probe(requests[0])


def test_the_template_of_a_row_with_images_gets_the_arguments_of_its_problem(model):
    tokenizer, (problem, *_) = read_tokenizer(model), problems()
    tokenizer.chat_template += "{{ 'c' if brief }}"
    renderer, images = Renderer(tokenizer, end_tokens(model)), unplaced(seen_by(problem, tokenizer))
    plain, brief = (
        renderer.opening_with_images(problem.prompt, TemplateArguments(kwargs=kwargs), images, "problem 0")[0]
        for kwargs in ({}, {"brief": True})
    )
    assert brief == [*plain, tokenizer.convert_tokens_to_ids("c")]


def test_samples_of_a_prompt_with_images_share_its_tokens(model, monkeypatch):
    """Thousands of tokens of images are made once for a group."""
    tokenizer, (problem, *_) = read_tokenizer(model), problems()
    renderer, images = Renderer(tokenizer, end_tokens(model)), unplaced(seen_by(problem, tokenizer))
    made, encode = [], type(tokenizer).__call__
    monkeypatch.setattr(type(tokenizer), "__call__", lambda *given, **more: made.append(1) or encode(*given, **more))
    first, again = (
        renderer.opening_with_images(problem.prompt, TemplateArguments(), images, f"problem {i}") for i in range(2)
    )
    count = len(made)
    third = renderer.opening_with_images(problem.prompt, TemplateArguments(), images, "problem 2")
    assert first[0] == again[0] == third[0] and len(made) == count
    third[0].clear()
    assert renderer.opening_with_images(problem.prompt, TemplateArguments(), images, "problem 3")[0] == first[0]


def test_an_image_in_a_tools_reply_is_refused():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    with pytest.raises(Failed, match="images are shown only in the first messages, by the mark <image>"):
        checked([{"role": "tool", "content": [image]}])


ENVIRONMENT = """
from verl_fn.environments import Done

class Asks:
    def reset(self, problem):
        return list(problem.prompt)

    def step(self, reply):
        if hasattr(self, "asked"):
            return Done(float(len(reply) % 2))
        self.asked = True
        return [{"role": "user", "content": "b?"}]
"""


def test_a_run_with_an_environment_that_shows_images(tmp_path, model):
    (tmp_path / "asks.py").write_text(ENVIRONMENT)
    prompt = [{"role": "user", "content": "<image>ab?"}]
    rows = [
        {"data_source": "mine", "prompt": prompt, "images": [{"bytes": png((40 * i, 9, 9)), "path": None}],
         "reward_model": {"ground_truth": "a"}} for i in range(4)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    settings = [
        f"model.path={model}", f"data.train_files={tmp_path / 'rows.parquet'}", "trainer.total_training_steps=1",
        f"data.val_files={tmp_path / 'rows.parquet'}", f"env.name={tmp_path / 'asks.py'}:Asks", "env.num_workers=1",
        "data.train_batch_size=2", "data.max_prompt_length=64", "data.max_response_length=24", "env.max_turns=2",
        "env.max_turn_length=6", "algorithm.name=grpo", "rollout.n=4", "driver.device=cpu", "driver.num_threads=1",
        f"trainer.dir={tmp_path / 'run'}", "trainer.val_before_train=false", "algorithm.ppo_mini_batch_size=2",
    ]  # fmt: skip
    said = []
    train(make_plan(load(overrides=settings)), said.append)
    assert SimpleNamespace(lines=said).lines and (tmp_path / "run/model").is_dir()
