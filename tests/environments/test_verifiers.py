"""Environments of verifiers: a stand-in of the package in cheap tests, the package itself in the others.

The package needs other versions of packages than the trainer. So these tests run it with the interpreter that
``VERIFIERS_PYTHON`` names, or with this one where it is installed.
"""

import asyncio
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
from run_configs import TINY
from warm_python import warm_python

from verl_fn.backends.hf.new_model import char_tokenizer
from verl_fn.backends.hf.tokenizer import read_tokenizer
from verl_fn.config import ConfigError, load, make_plan
from verl_fn.data.rows import DataError
from verl_fn.environments import Done, calls
from verl_fn.environments import verifiers as adapter
from verl_fn.environments.engine import environment_data
from verl_fn.environments.processes import EnvError, EnvProcesses, Job, Opening, Scores, Scoring
from verl_fn.environments.rendering import call_format
from verl_fn.environments.verifiers import Rollout, plain, row_of, said
from verl_fn.pool.pool import environment
from verl_fn.rewards.reward import texts_of
from verl_fn.runs.evaluate import has_held_out
from verl_fn.runs.history import fingerprints
from verl_fn.runs.journal import read_samples
from verl_fn.runs.logs import TIMED, read_metrics
from verl_fn.runs.loop import train
from verl_fn.runs.replay import replay
from verl_fn.state import END_REASONS

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "verifiers_stand_in"
TASK = "data.task=verifiers:adder"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 1}}</tool_call>'
PYTHON = os.environ.get("VERIFIERS_PYTHON") or (sys.executable if importlib.util.find_spec("verifiers") else "")
needs_package = pytest.mark.skipif(not PYTHON, reason="verifiers is not installed, and VERIFIERS_PYTHON is not set")


@pytest.fixture(scope="module")
def package_python():
    """A warm Python that has imported the package: each run starts three processes that import it."""
    own = environment(same_interpreter=False)
    with warm_python(Path(__file__).with_name("verifiers_imports.py"), other=PYTHON, environment=own) as python:
        yield python


def silent(line):
    pass


def processes(**arguments):
    return EnvProcesses("verifiers:adder", folder=FOLDER, arguments=arguments)


def test_a_rollout_is_played_turn_by_turn_and_again_after_a_crash(tmp_path):
    run = processes(log=str(tmp_path / "log"))
    rows = [row for part, row in run.problems() if part == "train"]
    job = Job(
        0, 1, {"prompt": "", "answer": "", "id": 0, "data_source": "s", "extra_info": {"verifiers_row": rows[2]}}
    )
    (opened,) = run([job])
    assert isinstance(opened, Opening) and opened.messages == ({"role": "user", "content": "2+1"},)
    assert opened.tools[0] == {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
    }
    called = attrs.evolve(job, replies=(f"Well.{CALL}{CALL}",))
    tool = {"role": "tool", "content": "3"}
    answers = ({**tool, "tool_call_id": "call_0_0"}, {**tool, "tool_call_id": "call_0_1"})
    assert run([called]) == [answers]
    assert run([attrs.evolve(called, replies=(*called.replies, "3"))]) == [Done(1.0, 1.0)]
    again = EnvProcesses("verifiers:adder", folder=FOLDER, arguments={})
    assert again([attrs.evolve(called, replies=(*called.replies, "4"))]) == [Done(0.0, 0.0)]
    assert again([attrs.evolve(called, number=1, replies=(CALL, CALL))]) == [({**tool, "tool_call_id": "call_1_0"},)]
    run([attrs.evolve(job, number=1)])
    run([job])
    assert (tmp_path / "log").read_text() == "cleaned\n" * 2, "the rollout at its end, and the one that was left"


def test_failures_of_a_rollout_are_named_and_prompts_may_come_from_files():
    run = processes()
    assert next(run.problems())[0] == "train", "the others are not read, and are no results of what follows"
    job = Job(0, 1, {"prompt": "1+1", "answer": "2", "id": 0, "data_source": "s", "extra_info": {}})
    (opened,) = run([job])
    assert opened.messages == ({"role": "user", "content": "1+1"},)
    (failed, forgotten) = run(
        [attrs.evolve(job, number=i, replies=(r,)) for i, r in enumerate(("fail", f"forget{CALL}"))]
    )
    assert (
        failed.reason == "env_crashed"
        and "the rollout ended with RuntimeError('the sandbox is gone')" in failed.problem
    )
    assert "earlier messages have changed" in forgotten.problem


def test_a_problem_of_a_file_becomes_a_row():
    problem = SimpleNamespace(prompt="1+1", answer="2", id=7, extra_info={"level": 1})
    asked = [{"role": "user", "content": "1+1"}]
    row = {"prompt": asked, "answer": "2", "info": {"level": 1}, "example_id": 7}
    assert row_of(problem) == row
    problem.prompt = ({"role": "system", "content": "Add."}, *asked)
    assert row_of(problem) == {**row, "prompt": list(problem.prompt)}
    problem.extra_info = {"verifiers_row": {"prompt": asked, "answer": "3"}}
    assert row_of(problem) == {"prompt": asked, "answer": "3"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda prompt, tools: (prompt, []), "the tools have changed during the conversation"),
        (lambda prompt, tools: (prompt[1:], tools), "earlier messages have changed or are missing"),
        (
            lambda prompt, tools: ([{**prompt[0], "content": "?"}, *prompt[1:]], tools),
            "earlier messages have changed",
        ),
        (lambda prompt, tools: (prompt, list(tools)), None),
    ],
)
def test_a_conversation_can_only_be_continued(change, message, monkeypatch):
    """An environment without the package, which asks twice."""

    class Asks:
        async def rollout(self, row, requests, model, sampling):
            prompt, tools = row["prompt"], [{"type": "function", "function": {"name": "add"}}]
            for turn in range(2):
                reply = asyncio.get_running_loop().create_future()
                requests.put_nowait((*(change(prompt, tools) if turn else (prompt, tools)), reply))
                prompt = [*prompt, {"role": "assistant", **await reply}, {"role": "user", "content": "Sure?"}]
            return {"error": None}

    monkeypatch.setattr(adapter, "client", lambda requests: requests)
    rollout = Rollout(Asks(), asyncio.new_event_loop(), together=True)
    problem = SimpleNamespace(prompt="1+1", answer="2", id=7, extra_info={})
    assert rollout.reset(problem) == [{"role": "user", "content": "1+1"}]
    if message is None:
        assert rollout.step("2") == [{"role": "user", "content": "Sure?"}]
        assert rollout.step("2") == Done(0.0) and rollout.state == {"error": None}
    else:
        with pytest.raises(ValueError, match=message):
            rollout.step("2")
    rollout.close()


@pytest.mark.parametrize("arguments", [{"mode": "group"}, {"mode": "inside"}])
def test_a_rubric_scores_the_rollouts_of_a_group_together(arguments, tmp_path):
    run = processes(**arguments, log=str(tmp_path / "log"))
    assert run.scores_groups and not processes().scores_groups
    problem = {"prompt": "1+1", "answer": "2", "id": 0, "data_source": "s", "extra_info": {}}
    jobs = [Job(i, 1, problem) for i in range(4)]
    run(jobs)
    jobs = [attrs.evolve(job, replies=(reply,)) for job, reply in zip(jobs, ("2", "3", "2", "fail"), strict=True)]
    *ended, failed = run(jobs)
    assert ended == [Done(0.0, 0.0)] * 3 and "the sandbox is gone" in failed.problem
    assert (tmp_path / "log").read_text() == "cleaned\n" * 4, "the rubric cleans up after it has scored"
    assert run([Scoring(1, tuple(jobs[:3]))]) == [Scores((Done(0.5, 0.0), Done(0.0, 0.0), Done(0.5, 0.0)))]
    assert (tmp_path / "log").read_text() == "cleaned\n" * 4 + "rubric cleaned\n" * 3


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("adder", {"mode": "other"}, ".*returned a dict and no vf.Environment"),
        ("adder", {"nummer": 3}, ".*unexpected keyword argument 'nummer'"),
        ("no_such", {}, "ModuleNotFoundError: No module named 'no_such'"),
    ],
)
def test_environments_that_cannot_be_used_are_refused(name, arguments, message):
    with pytest.raises(EnvError, match=f"env.name: loading verifiers:{name} raised {message}"):
        EnvProcesses(f"verifiers:{name}", folder=FOLDER, arguments=arguments)


def test_a_missing_package_is_named_with_what_to_do(tmp_path):
    (tmp_path / "verifiers.py").write_text("raise ImportError('no verifiers')\n")
    with pytest.raises(EnvError, match=r"needs verifiers \(no verifiers\); install 'verifiers>=0\.2,<0\.4' for the"):
        EnvProcesses("verifiers:adder", folder=tmp_path)
    (tmp_path / "verifiers.py").write_text("")
    with pytest.raises(EnvError, match=r"has no classic environments, as it had before 0\.4"):
        EnvProcesses("verifiers:adder", folder=tmp_path)


@pytest.mark.parametrize(
    ("reply", "content", "calls"),
    [
        (f"So: {CALL} bye", "So:", 1),
        (f"Both: {CALL} and {CALL}", "Both:", 2),
        (CALL.removesuffix("</tool_call>"), "", 1),
        (f"{CALL}<tool_call>oops</tool_call>", None, 0),
        ('<tool_call>["add"]</tool_call>', None, 0),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', None, 0),
        ('<tool_call>{"arguments": {}}</tool_call>', None, 0),
        ("<tool_call>" + "[" * 100_000, None, 0),
        ("", "", 0),
    ],
)
def test_calls_are_read_from_replies(reply, content, calls):
    message = said(reply, 4)
    assert message["content"] == (reply if content is None else content)
    assert [call["id"] for call in message.get("tool_calls", [])] == [f"call_4_{i}" for i in range(calls)]


def test_arguments_of_calls_are_json():
    for written, arguments in (("{}", "{}"), (json.dumps('{"a": 1}'), '{"a": 1}'), ("[1]", "[1]"), (None, "{}")):
        more = "" if written is None else f', "arguments": {written}'
        (call,) = said(f'<tool_call>{{"name": "add"{more}}}</tool_call>', 0)["tool_calls"]
        assert call == {"id": "call_0_0", "name": "add", "arguments": arguments}


def test_arguments_that_are_written_as_a_string_are_the_string():
    reply = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert calls.calls_of(reply, calls.HERMES, ()) == ("", [("add", '{"a": 1}')])


BARS = str.maketrans("|_", "\N{FULLWIDTH VERTICAL LINE}\N{LOWER ONE EIGHTH BLOCK}")
XML = "<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n1\n</parameter>\n</function>"
WRITTEN = {
    "hermes": "<tool_call>\n{call}\n</tool_call>",
    "qwen3_coder": f"<tool_call>\n{XML}\n</tool_call>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>1</arg_value>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">2</parameter>\n'
    '<parameter name="b">1</parameter>\n</invoke>\n</minimax:tool_call>',
    "deepseek": "<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>add\n```json\n{arguments}\n```"
    "<|tool_call_end|><|tool_calls_end|>".translate(BARS),
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{arguments}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "llama3": '<|python_tag|>{"name": "add", "parameters": {arguments}}',
    "harmony": "<|channel|>analysis<|message|>So<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    "<|constrain|>json<|message|>{arguments}",
}
ARGUMENTS = '{"a": 2, "b": "1"}'


def written(format, name="add", first="a"):
    """A call as models of a format write it."""
    text = WRITTEN[format].replace("{call}", f'{{"name": "add", "arguments": {ARGUMENTS}}}')
    text = text.replace("{arguments}", ARGUMENTS)
    return (
        text.replace("add", name)
        .replace('"a"', f'"{first}"')
        .replace("=a>", f"={first}>")
        .replace(">a<", f">{first}<")
    )


@needs_package
def test_each_format_is_read_by_the_package():
    """Also after reasoning that the prompt opened, several at once, and none of a reply that breaks one off."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    replies = {(format, 1): written(format) for format in WRITTEN}
    replies |= {(format, 0): written(format)[: -len(written(format)) // 3] for format in WRITTEN}
    replies |= {(format, 0, "none"): "It is 3." for format in WRITTEN}
    # The other formats have no reasoning of this kind, or put several calls between one pair of tags.
    tagged = ("hermes", "qwen3_coder", "glm", "minimax")
    replies |= {(format, 2): f"So</think>{written(format) * 2}" for format in tagged}
    script = (
        "import importlib.util, json, sys; spec = importlib.util.spec_from_file_location('calls', sys.argv[1]);"
        "calls = importlib.util.module_from_spec(spec); sys.modules['calls'] = calls; spec.loader.exec_module(calls);"
        "tools, asked = json.load(sys.stdin);"
        "print(json.dumps([calls.calls_of(reply, format, tools) for format, reply in asked]))"
    )
    asked = json.dumps([tools, [(key[0], text) for key, text in replies.items()]])
    command = [PYTHON, "-c", script, calls.__file__]
    answered = json.loads(subprocess.run(command, input=asked, capture_output=True, text=True, check=True).stdout)
    for (key, reply), (content, found) in zip(replies.items(), answered, strict=True):
        assert [name for name, _ in found] == ["add"] * key[1], key
        assert content == (reply, "", "So</think>")[key[1]], key
        assert all(json.loads(text) == json.loads(ARGUMENTS) for _, text in found), key


@pytest.mark.parametrize("format", WRITTEN)
def test_the_template_tells_the_format(format):
    tokenizer = char_tokenizer("ab")
    call = written(format, "probe", "key")
    inner = f"{{% if m.tool_calls %}}{{% raw %}}{call}{{% endraw %}}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    tokenizer.chat_template = f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{inner}{{% endfor %}}"
    assert call_format(tokenizer) == format
    tokenizer.chat_template = tokenizer.chat_template.replace(call, "[CALLS]probe{}")
    assert call_format(tokenizer) == ""


def test_calls_in_an_unknown_format_are_refused():
    """Otherwise no call would ever be read, and every reward be that of a model without tools."""
    for arguments in ({}, {"mode": "inside"}):
        with pytest.raises(EnvError, match=r"writes calls of tools in no format .* not Mistral's \[TOOL_CALLS\]"):
            EnvProcesses("verifiers:adder", folder=FOLDER, arguments=arguments, calls="")
    # Tools of a single problem are known once its conversation begins.
    run = EnvProcesses("verifiers:adder", folder=FOLDER, arguments={"mode": "late"}, calls="")
    rows = [row for part, row in run.problems() if part == "train"]
    problem = {"prompt": "", "answer": "", "id": 0, "data_source": "s", "extra_info": {"verifiers_row": rows[2]}}
    (failed,) = run([Job(0, 1, problem)])
    assert "writes calls of tools in no format that is known here" in failed.problem


def test_images_are_refused():
    with pytest.raises(ValueError, match="other content than text"):
        plain({"role": "tool", "content": [{"type": "image_url", "image_url": {}}]})


def test_the_task_brings_its_environment_and_its_problems(chatty, monkeypatch):
    monkeypatch.chdir(FOLDER)
    lines = []

    def source(*overrides):
        plan = make_plan(load(overrides=[TASK, f"model.path={chatty}", *overrides]))
        assert not has_held_out(plan), "that is known only when its datasets are read"
        assert plan.env.name == f"verifiers:{FOLDER}/adder", "so that a run goes on from any folder"
        assert str(FOLDER / "adder.py") in fingerprints(plan)
        tokenizer = char_tokenizer("0123456789+")
        tokenizer.chat_template = "{{ messages[0].content }}"
        return environment_data(plan.data, plan.env, tokenizer, lines.append)

    data = source("env.arguments={count=5}")
    assert [(p.answer, p.data_source) for p in data.training] == [(str(i), "verifiers/adder") for i in range(1, 6)]
    assert data.training[3].prompt == ({"role": "user", "content": "3+1"},)
    assert len(data.validation) == 1 and not lines
    assert not source("env.arguments={mode='no_eval'}").validation and "no evaluation dataset" in lines[0]
    with pytest.raises(EnvError, match=r"reading the problems of verifiers:.*/adder: raised TypeError: .* JSON"):
        source("env.arguments={mode='odd'}")
    # A rubric compares with the row's own answer.
    (first, *_) = source("env.arguments={mode='numbers'}").training
    assert first.answer == "" and first.extra_info["verifiers_row"]["answer"] == 1
    with pytest.raises(DataError, match=r"row 1 of verifiers/adder has the prompt \(\); it must have messages"):
        source("env.arguments={mode='unasked'}")
    with pytest.raises(DataError, match="has no training dataset"):
        source("env.arguments={count=0}")


def test_settings_that_cannot_be_used_are_errors():
    with pytest.raises(
        ConfigError, match=r"data\.task = verifiers:adder brings its own environment; remove env\.name"
    ):
        load(overrides=[TASK, "env.name=a.py:B"])
    with pytest.raises(ConfigError, match=r"or verifiers:NAME \(got 'verifiers:'\)"):
        load(overrides=["data.task=verifiers:"])


@needs_package
def test_a_tool_environment_of_the_package_trains_resumes_and_replays(package_python, tmp_path, monkeypatch):
    """The tool's answers are in the rows with mask 0, and the rubric scores."""
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("products", ROOT / "examples/products.py")
    products = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(products)
    products.write_start(tmp_path, conversations=256)
    settings = ["trainer.save_freq=-1", "trainer.log_freq=1", "driver.device=cpu"]
    train(
        make_plan(load("recipes/sft_products.toml", [
            *settings, f"data.train_files=['{tmp_path}/conversations.jsonl']", f"model.path={tmp_path}/new_model",
            f"trainer.dir={tmp_path}/sft", "trainer.total_training_steps=20", "data.train_batch_size=32",
        ])),
        silent,
    )  # fmt: skip
    settings += [
        "trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.test_freq=2", "trainer.journal=samples",
        "data.train_batch_size=4", "data.val_size=4", f"model.path={tmp_path}/sft/model", "trainer.stop_at=",
        f"env.python={package_python}", "env.arguments={train=64, held_out=8}",
    ]  # fmt: skip

    def run(folder, *more):
        train(
            make_plan(load("recipes/grpo_products.toml", [*settings, f"trainer.dir={tmp_path}/{folder}", *more])),
            silent,
        )
        return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in read_metrics(tmp_path / folder)]

    whole = run("whole")
    tokenizer = read_tokenizer(f"{tmp_path}/sft/model")
    answered = 0
    for batch in (*read_samples(tmp_path / "whole", 1), *read_samples(tmp_path / "whole", 2)):
        for first, end in itertools.pairwise(batch.cu_seqlens.tolist()):
            tokens, drawn = batch.tokens[first:end], batch["response_mask"][first:end] > 0
            calls = re.findall(r'"a": ([1-9]\d*), "b": ([1-9]\d*)}}</tool_call>', tokenizer.decode(tokens[drawn]))
            _, _, *answers = tokenizer.decode(tokens[~drawn]).splitlines()
            if len(calls) == len(answers) == 1:
                assert int(answers[0]) == int(calls[0][0]) * int(calls[0][1])
                answered += 1
    assert answered, "the tool was called"
    assert all(row["env/ended/env_crashed"] == 0 for row in whole if row["step"])
    assert any("val-core/verifiers/products/acc" in name for name in whole[-1])
    run("parts", "trainer.total_training_steps=1")
    assert run("parts")[-1] == whole[-1]
    assert replay(tmp_path / "whole", 2, say=silent).difference is None


@needs_package
@pytest.mark.filterwarnings("ignore:.* conversations have failed")
def test_a_rubric_of_the_package_scores_groups_in_a_run_that_replays(package_python, chatty, tmp_path):
    """The longest replies of a group have the reward of the rubric's function of groups."""
    settings = [
        *TINY, f"data.task=verifiers:{Path(__file__).parent}/longest", f"model.path={chatty}",
        f"env.python={package_python}",
        "algorithm.name=grpo", "rollout.n=4", "data.max_prompt_length=16", "data.max_response_length=12",
        "trainer.journal=samples", "trainer.total_training_steps=2", "trainer.save_freq=1", "data.val_size=4",
        f"trainer.dir={tmp_path}/run",
    ]  # fmt: skip
    train(make_plan(load(overrides=settings)), silent)
    tokenizer, ends = read_tokenizer(chatty), set()
    for batch in (*read_samples(tmp_path / "run", 1), *read_samples(tmp_path / "run", 2)):
        rows = zip(batch.rows(), batch.rows("response_mask"), strict=True)
        texts = texts_of([tokens[mask > 0] for tokens, mask in rows], tokenizer)
        lengths = torch.tensor([len(text) for text in texts])
        ended = batch["env_end"] == END_REASONS.index("done")
        for group in batch["group"].unique():
            members = (batch["group"] == group) & ended
            if members.any():
                longest = (lengths == lengths[members].max())[members]
                assert torch.equal(batch["env_score"][members] >= 1, longest)
                ends.add(len(longest))
    assert max(ends) > 1, "a group has several conversations that were scored together"
    assert replay(tmp_path / "run", 2, say=silent).difference is None
