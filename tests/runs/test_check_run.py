"""``verl-fn train --check``: what a run would do and need, without doing it."""

import importlib.util
import json
import logging
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
from judge_server import serving
from run_configs import TINY, tiny_run
from safetensors.torch import load_file, save_file

from verl_fn import build
from verl_fn.backends.hf.config import ModelError, read_config
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.new_model import TOOLS, WIDTHS, new_model
from verl_fn.backends.hf.tokenizer import read_tokenizer
from verl_fn.backends.local import Local
from verl_fn.backends.vllm.arguments import check_served
from verl_fn.benchmarks.tiny_models import tiny_folder
from verl_fn.cli import main
from verl_fn.config import ConfigError, load, make_plan
from verl_fn.data.files import DataError
from verl_fn.data.tasks import Problem
from verl_fn.environments.processes import EnvError
from verl_fn.errors import UserError
from verl_fn.runs.check_run import check_run, unplanned
from verl_fn.runs.checks import TRIES, RowLengths, check_cluster, check_conversations, check_lengths
from verl_fn.runs.continuing import _other_rates
from verl_fn.runs.logs import read_metrics
from verl_fn.runs.loop import train
from verl_fn.runs.memory import model_sizes
from verl_fn.runs.prepare import prepare
from verl_fn.steps import adamw

SILENT = lambda line: None  # noqa: E731
check_run_module, prepare_module = (
    importlib.import_module(f"verl_fn.runs.{name}") for name in ("check_run", "prepare")
)


def test_the_counts_are_those_of_the_states(tiny):
    for head in ("lm", "value"):
        for lora in (None, Lora(rank=2), Lora(rank=3, targets=("q_proj", "v_proj"))):
            state = Local(tiny, adamw(1e-3), head=head, lora=lora).load_pretrained()
            total = sum(p.numel() for p in state.params.values())
            trained = sum(state.params[name].numel() for name in state.params.trained())
            sizes = model_sizes(tiny, head, lora)
            assert (sizes.total, sizes.trained) == (total, trained), (head, lora)


def test_a_frozen_tower_is_not_counted_as_trained(tmp_path):
    model = new_model(tmp_path / "m", chars="ab", arch="qwen3_vl")
    for lora in (None, Lora(rank=2)):
        for frozen in (False, True):
            backend = Local(model, adamw(1e-3), lora=lora, freeze_vision_tower=frozen)
            state = backend.load_pretrained()
            total = sum(p.numel() for p in state.params.values())
            trained = sum(state.params[name].numel() for name in state.params.trained())
            sizes = model_sizes(model, "lm", lora, freeze_tower=frozen)
            assert (sizes.total, sizes.trained) == (total, trained), (lora, frozen)


def test_the_folder_of_a_model_is_not_a_runs(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "model")
    plan = tiny_run(tmp_path / "model", tmp_path / "model")
    for start in (check_run, train):
        with pytest.raises(ConfigError, match=r"trainer\.dir: .*/model is the folder of a model; choose another"):
            start(plan, SILENT)


def test_a_task_whose_characters_the_tokenizer_lacks_is_refused_by_the_check_too(tmp_path):
    new_model(tmp_path / "model", chars="0123456789")
    plan = tiny_run(tmp_path / "model", tmp_path / "run", "data.task=count")
    for start in (check_run, train):
        with pytest.raises(DataError, match=r"problem \d+ of 'count': the tokenizer does not know every character"):
            start(plan, SILENT)
    # Answers of count begin with the letter a.
    new_model(tmp_path / "imitating", chars="bcdefghi123456789>")
    plan = tiny_run(tmp_path / "imitating", tmp_path / "run", "data.task=count", "algorithm.name=sft")
    for start in (check_run, train):
        with pytest.raises(DataError, match=r"tokenizer does not know every character of the answer .* lacks 'a'"):
            start(plan, SILENT)


def test_a_check_prints_the_plan_and_makes_no_run(tiny, tmp_path, capsys):
    recipe = tmp_path / "empty.toml"
    recipe.write_text("")
    more = [
        "algorithm.use_kl_loss=true",
        "algorithm.ppo_epochs=2",
        "rollout.n=3",
        "algorithm.norm_adv_by_std_in_grpo=false",
    ]
    run = tmp_path / "run"
    assert main(["train", str(recipe), *TINY, *more, f"model.path={tiny}", f"trainer.dir={run}", "--check"]) == 0
    out = capsys.readouterr().out
    assert "note: algorithm.norm_adv_by_std_in_grpo has no effect" in out
    assert "8 prompts, 24 rows of at most 18 tokens" in out
    for role, updates in (("actor", "12 updates in 3 steps"), ("critic", "12 updates"), ("reference", "not updated")):
        line = next(line for line in out.splitlines() if line.startswith(role))
        assert updates in line and "parameters" in line
    assert "moments" in out and not run.exists()


TURNS = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "ef"},
]


@pytest.mark.parametrize(
    ("algorithm", "row", "lines"),
    [
        (
            "sft",
            {"messages": TURNS},
            [
                "first row   read    '<bos>ab\\n'",
                "first row   trained 'c<eos>'",
                "first row   read    'd\\n'",
                "first row   trained 'ef<eos>'",
            ],
        ),
        (
            "dpo",
            {"prompt": "a>", "chosen": "b", "rejected": "c" * 900},
            [
                "chosen      read    '<bos>a>'",
                "chosen      trained 'b<eos>'",
                "rejected    read    '<bos>a>'",
                f"rejected    trained '{'c' * 199} ... {'c' * 194}<eos>'",
            ],
        ),
        (
            "grpo",
            {"prompt": TURNS[:1], "data_source": "count", "reward_model": {"ground_truth": "c"}},
            ["first row   read    '<bos>ab\\n'"],
        ),
    ],
    ids=["a conversation", "a pair", "a prompt"],
)
def test_the_first_row_is_shown_as_the_model_reads_it(algorithm, row, lines, tmp_path):
    new_model(tmp_path / "m", chars="abcdef>\n", chat_template=True)
    (file := tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    more = [
        f"algorithm.name={algorithm}",
        f"data.train_files={file}",
        "data.val_files=[]",
        "data.train_batch_size=1",
        "rollout.n=2",
    ]
    plan = tiny_run(tmp_path / "m", tmp_path / "run", *more, "data.max_prompt_length=16")
    text = check_run(plan).text.splitlines()
    first = next(i for i, line in enumerate(text) if line.startswith(lines[0][:9]))
    assert text[first : first + len(lines) + 1][:-1] == lines and text[first + len(lines)].startswith("disk")


def test_a_check_refuses_what_the_run_would_refuse(tiny, tmp_path, capsys):
    recipe = tmp_path / "empty.toml"
    recipe.write_text("")
    wrong = ["actor.ppo_max_token_len_per_gpu=5", f"model.path={tiny}", f"trainer.dir={tmp_path}/run", "--check"]
    assert main(["train", str(recipe), *TINY, *wrong]) == 2
    assert "more than actor.ppo_max_token_len_per_gpu = 5" in capsys.readouterr().err


def test_a_pair_of_padded_rows_fits_the_budget_or_is_refused(tiny, tmp_path):
    """A short response is padded to the length of the other one."""
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "ab>", "chosen": "c", "rejected": "abcdefgh" * 3}) + "\n")
    more = ["algorithm.name=dpo", f"data.train_files={file}", "data.max_prompt_length=8", "data.train_batch_size=1"]

    def lines(budget, layout):
        budget = f"actor.ppo_max_token_len_per_gpu={budget}"
        return check_run(tiny_run(tiny, tmp_path, *more, budget, f"model.layout={layout}")).text

    # bos, prompt, response and end token: 6 and 29 tokens.
    assert lines(35, "packed") and lines(35, "auto") and lines(58, "padded")
    assert "1 prompts, 2 rows of at most 29 tokens" in lines(35, "packed")
    with pytest.raises(ConfigError, match=r"a pair may have 58 tokens \(its longer row twice\), more than .* = 57"):
        lines(57, "padded")
    with pytest.raises(ConfigError, match="a pair may have 35 tokens"):
        lines(34, "auto")


def test_a_check_names_the_parts_of_a_run(tiny, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from verl_fn.steps import dr_grpo, entropy, reinforce\n"
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
        "def loss(weight):\n    return reinforce() - weight * entropy()\n"
        "def estimator(batch):\n    return dr_grpo(batch)\n"
    )
    more = ["algorithm.name=grpo", "rollout.n=2", f"algorithm.policy_loss={file}:loss", "actor.optim.lr=0.25"]
    more += ["algorithm.policy_loss_kwargs.weight=0.5", f"algorithm.adv_estimator={file}:estimator"]
    plain = check_run(tiny_run(tiny, tmp_path, *more)).text.splitlines()
    assert plain[0].startswith("algorithm   grpo on the task reverse: 3 steps")
    assert plain[1] == (
        f"options     policy_loss {file}:loss; policy_loss_kwargs {{'weight': 0.5}}; ppo_mini_batch_size 4; "
        f"adv_estimator {file}:estimator"
    )
    assert plain[2] == "reward      the rule of each data source"
    assert any("updates in 3 steps, lr 0.25" in line for line in plain)
    falling = [f"reward.functions=['{file}:score']", "actor.optim.lr_scheduler_type=cosine"]
    lines = check_run(tiny_run(tiny, tmp_path, *more, *falling)).text.splitlines()
    assert lines[2] == f"reward      {file}:score" and any("lr 0.25 cosine" in line for line in lines)


def test_a_check_says_where_the_engines_are(tiny, tmp_path):
    for placement, words in (("colocated", "colocated with"), ("apart", "apart from")):
        more = ["driver.kind=ray", "rollout.engines=2", f"rollout.placement={placement}"]
        lines = check_run(tiny_run(tiny, tmp_path, *more)).text.splitlines()
        line = next(line for line in lines if line.startswith("rollout     2 x sampler"))
        assert f"{words} the training processes" in line


def test_a_check_says_that_sampling_runs_ahead(tiny, tmp_path):
    more = ["driver.kind=ray", "rollout.placement=apart", "driver.max_lag=2"]
    lines = check_run(tiny_run(tiny, tmp_path, *more)).text.splitlines()
    ahead = [line for line in lines if line.startswith("overlap")]
    assert ahead == ["overlap     sampling runs up to 2 steps ahead of learning; correction: token"]
    assert "overlap" not in check_run(tiny_run(tiny, tmp_path)).text


MINE = """
from verl_fn.environments import Done


def score(data_source, solution_str, ground_truth):
    return 0.0


def whole(batch):
    return batch


class Guess:
    tools = [{"type": "function", "function": {"name": "guess"}}]

    def reset(self, problem):
        return [{"role": "user", "content": problem.prompt}]

    def step(self, reply):
        raise NotImplementedError


class Broken(Guess):
    tools = ()

    def reset(self, problem):
        raise ValueError("no problem of mine")


class Fine(Guess):
    tools = ()


class Called(Guess):
    def step(self, reply):
        return Done(float(reply == "guess"))


class Once(Broken):
    failed = False

    def reset(self, problem):
        if Once.failed:
            return [{"role": "user", "content": problem.prompt}]
        Once.failed = True
        return super().reset(problem)

    def step(self, reply):
        return Done(0.0)
"""
BROKEN = {
    "pass": "raised ValueError: no problem of mine",
    "__init__ = lambda self: 1 / 0": "raised ZeroDivisionError",
    "reset = lambda self, problem: 3": "returned 3",
    "reset = lambda self, problem: __import__('os')._exit(3)": "ended its process with exit code 3",
    "reset = lambda self, problem: Done(1.0)": "returned Done",
}
# They begin, and fail at a reply.
BROKEN_STEPS = {
    "pass": "raised NotImplementedError.*the reply was empty, and step must answer whatever a model writes",
    "step = lambda self, reply: reply": "returned ''",
    "step = lambda self, reply: Done(float(reply.split()[0]))": "raised IndexError",
}
GRPO = ("algorithm.name=grpo", "rollout.n=2", "reward.functions=['{}:score']")


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["reward.functions=['{}:nope']"], r"reward.functions: .*mine\.py has no function 'nope'"),
        (["reward.functions=['{}:whole']"], "cannot be called with the keywords data_source"),
        ([*GRPO, "reward.env=['NO_SUCH_KEY']"], "reward.env names NO_SUCH_KEY, which is not set"),
        ([*GRPO, "algorithm.adv_estimator={}:nope"], r"algorithm.adv_estimator: .*mine\.py has no 'nope'"),
        ([*GRPO, "algorithm.policy_loss={}:nope"], r"algorithm.policy_loss: .*mine\.py has no 'nope'"),
        ([*GRPO, "algorithm.policy_loss={}:score"], "where a Loss is expected"),
        (["env.name={}:Nope"], r"env.name: .*mine\.py has no class 'Nope'"),
        (["env.name={}:Guess", "env.arguments.range=9"], r"cannot be made with env.arguments \(range\)"),
        (["env.name={}:Guess"], "the environment has tools, and the chat template does not show them"),
        (["trainer.logger=['wandb']"], "trainer.logger asks for wandb, and it is not installed"),
        (["trainer.resume_from_path={}"], "mine.py is not a folder"),
        (["driver.kind=ray", "ray.runtime_env={}"], "ray.runtime_env: .*mine.py is not YAML"),
        (
            [
                "driver.kind=ray",
                "ray.ranks=2",
                "actor.strategy=fsdp",
                "model.layout=padded",
                "actor.fsdp_config.ulysses_sequence_parallel_size=2",
            ],
            "actor.fsdp_config.ulysses_sequence_parallel_size: rows of .* are padded, and ranks cannot share",
        ),
        (["driver.kind=ray", "ray.address=10.0.0.1"], "ray.address is '10.0.0.1'; it must be auto, or host:port"),
        (["driver.kind=ray", "rollout.name=vllm", "rollout.engine_kwargs.max_seq=9"], "max_seq is no argument of"),
        (["driver.kind=ray", "rollout.name=vllm"], "has heads of width 8, and on a CPU vLLM serves widths of 32, 64"),
    ],
    ids=lambda case: case if isinstance(case, str) else None,
)
def test_a_check_refuses_what_only_processes_of_the_run_would_find(tiny, tmp_path, mine, settings, message):
    model = tiny
    if any("env.name" in setting for setting in settings):
        model = new_model(tmp_path / "model", chars="abcdefghsu>\n", hidden_size=32, chat_template=True)
        _show_no_tools(model)
    more = ["data.max_prompt_length=64", *(setting.format(mine) for setting in settings)]
    plan = tiny_run(model, tmp_path / "run", *more)
    with pytest.raises(UserError, match=message):
        check_run(plan)
    assert not (tmp_path / "run").exists()


def _show_no_tools(model):
    template = model / "chat_template.jinja"
    assert TOOLS in template.read_text()
    template.write_text(template.read_text().replace(TOOLS, ""))


def test_a_tiny_model_of_the_command_line_is_shown_the_tools_of_an_environment(tmp_path, capsys):
    (tmp_path / "own.py").write_text(MINE)
    model = tmp_path / "model"
    assert main(["new-model", str(model), "--chars", "abcdefgh>us", "--chat-template", "hidden_size=32"]) == 0
    for arch in ("qwen3", "qwen3_vl"):
        own = new_model(tmp_path / arch, chars="abcdefgh>us", arch=arch, chat_template=True)
        tools = [{"type": "function", "function": {"name": "guess"}}, {"name": "add"}]
        asked = [{"role": "user", "content": "b"}]
        assert read_tokenizer(own).apply_chat_template(asked, tools=tools, tokenize=False) == "<bos>guess\nadd\nb\n"
    more = ["algorithm.name=grpo", "rollout.n=2", "data.max_prompt_length=64", "trainer.total_training_steps=1"]
    argv = [*TINY, *more, f"env.name={tmp_path}/own.py:Called", f"model.path={model}", f"trainer.dir={tmp_path}/run"]
    (tmp_path / "empty.toml").write_text("")
    command = ["train", str(tmp_path / "empty.toml"), *argv]
    assert main([*command, "--check"]) == 0, capsys.readouterr()
    assert main(command) == 0, capsys.readouterr()
    assert read_metrics(tmp_path / "run")[-1]["step"] == 1


@pytest.mark.parametrize(("wrong", "reason"), list(BROKEN.items()))
def test_a_check_ends_as_the_run_does_if_no_conversation_begins(tmp_path, wrong, reason):
    """A run ends with its first evaluation or step; a check probes some of their conversations."""
    (tmp_path / "own.py").write_text(f"{MINE}\n\nclass Wrong(Broken):\n    {wrong}\n")
    model = new_model(tmp_path / "model", chars="abcdefgh>\n", hidden_size=32, chat_template=True)
    more = ["algorithm.name=grpo", "rollout.n=2", "data.max_prompt_length=64", "env.timeout=5"]
    plan = tiny_run(model, tmp_path / "run", *more, f"env.name={tmp_path}/own.py:Wrong")
    with pytest.raises(EnvError, match=f"env.name: all 8 training conversations fail, .*{reason}"):
        check_run(plan)
    with pytest.raises(EnvError, match=reason):
        train(plan, SILENT)


@pytest.mark.parametrize(("wrong", "reason"), list(BROKEN_STEPS.items()))
def test_an_environment_that_answers_no_reply_is_refused(tmp_path, wrong, reason, capsys):
    """By a run as by a check, though conversations that are cut off never reach such a step."""
    (tmp_path / "own.py").write_text(f"{MINE}\n\nclass Wrong(Fine):\n    {wrong}\n")
    (tmp_path / "run.toml").write_text("")
    model = new_model(tmp_path / "model", chars="abcdefgh>\n", hidden_size=32, chat_template=True)
    more = [f"model.path={model}", f"trainer.dir={tmp_path}/run", f"env.name={tmp_path}/own.py:Wrong"]
    for check in (["--check"], []):
        assert main(["train", str(tmp_path / "run.toml"), *TINY, *more, "data.max_prompt_length=64", *check]) == 1
        assert re.search(f"error: env.name: all 8 training conversations fail, .*{reason}", capsys.readouterr().err)


def test_a_check_tells_of_a_conversation_that_does_not_begin(tmp_path, mine, capsys):
    model = new_model(tmp_path / "model", chars="abcdefgh>\n", hidden_size=32, chat_template=True)
    check_run(tiny_run(model, tmp_path / "run", f"env.name={mine}:Once", "data.max_prompt_length=64"))
    assert "note: of the training problems, " in (said := capsys.readouterr().out)
    assert "the environment raised ValueError: no problem of mine" in said


@pytest.mark.parametrize("count", [1, TRIES - 1, TRIES])
def test_only_held_out_conversations_that_were_all_tried_end_a_run(tmp_path, count):
    (tmp_path / "own.py").write_text(
        f"{MINE}\n\nclass Picky(Called):\n    tools = ()\n\n    def reset(self, problem):\n"
        "        assert problem.answer != 'held out', 'no held-out problem of mine'\n"
        "        return super().reset(problem)\n"
    )
    model = new_model(tmp_path / "model", chars="abcdefgh>\n", hidden_size=32, chat_template=True)
    plan = tiny_run(model, tmp_path / "run", f"env.name={tmp_path}/own.py:Picky", "data.max_prompt_length=64")
    held_out = [Problem("ab", "held out", id=i) for i in range(count)]
    source = SimpleNamespace(train=lambda *_: [Problem("ab", "ba")], held_out=lambda most: held_out[:most])
    if count < TRIES:
        with pytest.raises(EnvError, match=f"env.name: all {count} held-out conversations fail, .* of mine"):
            list(check_conversations(plan, source))
    else:
        (note,) = check_conversations(plan, source)
        assert note.startswith("of the held-out problems, ") and "no held-out problem of mine" in note


@pytest.mark.parametrize("api", ["chat", "pooling"])
def test_a_check_asks_a_judge_once_and_notes_that_it_gives_no_score(tiny, tmp_path, api, capsys):
    scored = "Score: 1" if api == "chat" else (200, json.dumps({"data": [{"data": [[0.5]]}]}))
    with serving() as server:
        more = [
            "algorithm.name=grpo",
            "rollout.n=2",
            f"reward.url={server.url}",
            "reward.model=m",
            "reward.retries=3",
        ]
        plan = tiny_run(tiny, tmp_path / "run", *more, f"reward.api={api}")
        for reply, says in (((404, "no model m"), "refuses requests with status 404"), ((503, ""), "in 1 attempts")):
            server.reply = lambda body, reply=reply: reply
            assert "the run can start" in check_run(plan).text
            assert (
                f"note: reward.url: the judge at {server.url}" in (said := capsys.readouterr().out) and says in said
            )
        server.reply = lambda body: scored
        check_run(plan)
        assert "reward.url" not in capsys.readouterr().out and len(server.seen) == 3
    assert not (tmp_path / "run").exists()


def test_a_check_tries_the_score_of_a_group(tmp_path):
    """Of conversations that end only after some replies."""
    group = "@staticmethod\n    def score_group(group):\n        return [one.nothing for one in group]"
    turns = (
        "count = 0\n    def step(self, reply):\n        self.count += 1\n"
        "        return Done(0.0) if self.count > 2 else [{'role': 'user', 'content': 'a'}]"
    )
    (tmp_path / "own.py").write_text(f"{MINE}\n\nclass Wrong(Fine):\n    {turns}\n    {group}\n")
    model = new_model(tmp_path / "model", chars="abcdefgh>\n", hidden_size=32, chat_template=True)
    more = ["algorithm.name=grpo", "rollout.n=2", "data.max_prompt_length=64", "data.max_response_length=32"]
    plan = tiny_run(model, tmp_path / "run", *more, f"env.name={tmp_path}/own.py:Wrong")
    with pytest.raises(EnvError, match=r"in scoring its group the environment raised AttributeError: .*nothing"):
        check_run(plan)


def test_a_check_makes_adapters_and_the_layers_that_compute_again(tiny, tmp_path, monkeypatch):
    """As the run's trainers do, which would fail after the start of all processes."""
    lora = ["actor.lora_rank=2", "actor.target_modules=['no_such_layer']"]
    with pytest.raises(UserError, match="no_such_layer"):
        check_run(tiny_run(tiny, tmp_path / "run", "algorithm.name=sft", *lora))
    monkeypatch.setattr("transformers.Qwen3ForCausalLM.supports_gradient_checkpointing", False)
    again = tiny_run(tiny, tmp_path / "run", "algorithm.name=sft", "actor.enable_gradient_checkpointing=true")
    with pytest.raises(ModelError, match="cannot compute its layers again"):
        check_run(again)


def test_a_folder_that_is_not_there_may_be_a_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, says in (
        ("Qwen/Qwen3-8B", "verl-fn prepare hub:Qwen/Qwen3-8B --out models/Qwen3-8B first"),
        ("models/own", "verl-fn prepare hub:OWNER/NAME --out FOLDER first"),
        ("a/b/c", "verl-fn prepare hub:OWNER/NAME --out FOLDER first"),
        ("model", "verl-fn prepare hub:OWNER/NAME --out FOLDER first"),
    ):
        with pytest.raises(ConfigError, match=f"model.path: there is no folder .*{says}"):
            check_run(tiny_run(folder, tmp_path / "run", "driver.device=auto"), 2**36, 1)


def test_a_check_reads_the_names_of_weights(tiny, tmp_path):
    def refusal(change):
        folder = shutil.copytree(tiny, tmp_path / "damaged", dirs_exist_ok=True)
        tensors = load_file(folder / "model.safetensors")
        change(folder, tensors)
        with pytest.raises(ModelError) as error:
            check_run(tiny_run(folder, tmp_path / "run", "algorithm.name=sft"))
        return str(error.value)

    def lacks(folder, tensors):
        del tensors["model.norm.weight"]
        save_file(tensors, folder / "model.safetensors")

    assert "1 missing (model.norm.weight)" in refusal(lacks)
    assert "has no weights (model.safetensors or its shards)" in refusal(
        lambda folder, _: (folder / "model.safetensors").unlink()
    )


def test_a_run_that_continues_needs_no_weights_in_its_model_folder(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "model")
    more = ["algorithm.name=sft", "trainer.total_training_steps=1", "trainer.test_freq=-1", "data.val_size=1"]
    train(tiny_run(folder, tmp_path / "run", *more), SILENT)
    (folder / "model.safetensors").unlink()
    assert "this run has finished, after 1 steps" in check_run(tiny_run(folder, tmp_path / "run", *more)).text
    elsewhere = check_run(tiny_run(folder, tmp_path / "run", *more, "driver.device=auto"), 2**36, 1)
    assert elsewhere.fits and "this run has finished" not in elsewhere.text
    longer = tiny_run(folder, tmp_path / "run", *more, "trainer.total_training_steps=2")
    assert "2 steps" in check_run(longer).text


def test_a_check_counts_the_gpus_of_this_machine(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("verl_fn.build.gpu_memory", lambda device: None)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # tests share a cluster
    more = ["driver.kind=ray", "ray.ranks=16", "actor.strategy=fsdp", "driver.device=auto"]
    with pytest.raises(ConfigError, match=r"ray.ranks = 16 ask for 16 GPUs, and the cluster has 8; set ray.ranks=8"):
        check_run(tiny_run(tiny, tmp_path / "run", *more))
    # A cluster that runs knows its GPUs.
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    check_cluster(tiny_run(tiny, tmp_path / "run", *more, "driver.device=cuda"))
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    # Ranks on the CPU need none, and another cluster may have more.
    for other in ("driver.device=cpu", "ray.address=10.0.0.1:6379"):
        assert (
            "16 training processes"
            in check_run(tiny_run(tiny, tmp_path / "run", *more, "driver.device=auto", other)).text
        )


def test_a_folder_with_only_a_config_is_planned_for_another_machine(tiny, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(tiny / "config.json", folder)
    with pytest.raises(ModelError, match=r"has no tokenizer .*\(--check --gpus N --gpu-memory GIB\), config.json"):
        check_run(tiny_run(folder, tmp_path / "run"))
    short = ["driver.device=auto", "data.max_prompt_length=64"]
    assert check_run(tiny_run(folder, tmp_path / "run", *short), 2**36, 1).fits


def test_a_model_that_was_trained_in_bf16_and_computes_in_fp32_is_noted(tiny, tmp_path):
    """Its fp32 weights have taken updates that bf16 has rounded away."""
    trained, loaded = (shutil.copytree(tiny, tmp_path / name) for name in ("trained", "loaded"))
    config = json.loads((tiny / "config.json").read_text()) | {"dtype": "bfloat16"}
    for folder in (trained, loaded):
        (folder / "config.json").write_text(json.dumps(config))
    file = loaded / "model.safetensors"
    save_file({name: t.bfloat16() for name, t in load_file(file).items()}, file, metadata={"format": "pt"})

    def noted(folder, *more):
        said = []
        prepare(tiny_run(folder, tmp_path / "run", "algorithm.name=grpo", "rollout.n=2", *more), said.append)
        return [line for line in said if "was trained in bfloat16 and computes in float32 here" in line]

    assert len(noted(trained)) == 1 and str(trained) in noted(trained)[0]
    assert not noted(trained, "actor.dtype=bfloat16") and not noted(loaded) and not noted(tiny)


def test_a_check_shows_the_dtype_that_the_device_takes(tiny, tmp_path):
    """By default float32 on a CPU, and on a GPU, which need not be here, the dtype of the weights in the folder."""
    half = shutil.copytree(tiny, tmp_path / "half")
    config = json.loads((tiny / "config.json").read_text())
    (half / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))

    def dtypes(folder, *more):
        plan = tiny_run(folder, tmp_path / "run", "algorithm.name=grpo", "rollout.n=2", *more)
        said = check_run(plan, 2**36, 1 if "driver.device=cuda" in more else None).text.splitlines()
        rollout, actor = (next(line for line in said if line.startswith(name)) for name in ("rollout", "actor"))
        return rollout.split(", ")[1], actor.split("; ")[2]

    assert dtypes(half) == ("float32", "float32")
    assert dtypes(half, "driver.device=cuda") == ("bfloat16", "bfloat16")
    assert dtypes(tiny, "driver.device=cuda") == ("float32", "float32")
    asked = ["driver.device=cuda", "actor.dtype=float32", "rollout.dtype=bfloat16"]
    assert dtypes(half, *asked) == ("bfloat16", "float32")


def test_random_models_are_served_by_every_engine(tmp_path):
    """Those of a config and of the command, and what vLLM serves on a CPU is known."""
    attention = pytest.importorskip("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend
    assert list(WIDTHS) == attention.get_supported_head_sizes()
    vllm = ["driver.kind=ray", "rollout.name=vllm", "algorithm.name=grpo", "rollout.n=2", f"trainer.dir={tmp_path}"]
    plan = make_plan(load(overrides=[*vllm, "driver.device=cpu"]))
    assert "vllm, float32" in check_run(plan).text
    assert main(["new-model", str(tmp_path / "made"), "num_attention_heads=8"]) == 0
    check_served(tmp_path / "made", "cpu")
    assert read_config(tmp_path / "made").head_dim == 32
    with pytest.raises(ModelError, match=r"set rollout\.name=sampler, or take a model with such heads"):
        check_served(new_model(tmp_path / "narrow", chars="ab"), "cpu")


@pytest.mark.parametrize("name", ["gemma3n_text", "jetmoe"])
def test_a_family_that_vllm_computes_otherwise_is_refused(name, tmp_path):
    with pytest.raises(ModelError, match=rf"vLLM computes other log-probs for {name} .*; set rollout\.name=sampler"):
        check_served(tiny_folder(name, tmp_path), "cuda")


def test_a_check_of_heads_keeps_vllm_quiet(tmp_path, monkeypatch):
    """vLLM reads its level of logging when it is imported, and says what it has found in lines of INFO."""
    pytest.importorskip("vllm")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    check_served(new_model(tmp_path / "model", chars="ab", head_dim=32), "cpu")
    assert os.environ["VLLM_LOGGING_LEVEL"] == "WARNING"


def test_torch_does_not_warn_of_a_compiler_without_a_gpu_where_vllm_computes_on_the_cpu(caplog):
    logger = logging.getLogger("torch.utils.cpp_extension")
    logger.addHandler(caplog.handler)
    logger.warning("No CUDA runtime is found, using CUDA_HOME='%s'", "/usr/local")
    logger.warning("the compiler is too old")
    logger.removeHandler(caplog.handler)
    assert set(caplog.messages) == {"the compiler is too old"}


@pytest.mark.parametrize("cuda", [False, True])
def test_vllm_does_not_warn_of_triton_where_there_is_no_gpu(cuda, caplog, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    said = ("Triton is installed, but `triton.backends` could not be imported.", "An unexpected error occurred: %s")
    logger = logging.getLogger("vllm.triton_utils.importing")
    logger.addHandler(caplog.handler)
    for one in said:
        logger.warning(one, *["it"] * one.count("%s"))
    logger.removeHandler(caplog.handler)
    assert set(caplog.messages) == {"An unexpected error occurred: it", *(said[:1] if cuda else ())}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_check_for_vllm_on_a_cpu_prints_no_warnings_of_its_triton():
    package = importlib.util.find_spec("vllm")
    if package is None:
        pytest.skip("needs vLLM")
    source = Path(package.submodule_search_locations[0], "triton_utils/importing.py").read_text()
    (text,) = (line.strip().strip('"') for line in source.splitlines() if "doesn't include CPU backend" in line)
    of_vllm = logging.getLogger("vllm.triton_utils.importing")
    for message, shown in ((text, False), ("another warning", True)):
        record = of_vllm.makeRecord(of_vllm.name, logging.WARNING, "", 0, message, (), None)
        assert bool(of_vllm.filter(record)) == shown


def test_many_shards_are_named_by_the_first_one_and_their_number(tiny, tmp_path):
    row = {"data_source": "count", "prompt": "ab>", "reward_model": {"ground_truth": "c"}}
    for i in range(5):
        (tmp_path / f"{i}.jsonl").write_text(json.dumps(row) + "\n")

    def named(count):
        files = [str(tmp_path / f"{i}.jsonl") for i in range(count)]
        plan = tiny_run(tiny, tmp_path / "run", f"data.train_files={files}", "reward.functions=verl_fn.scores:exact")
        return check_run(plan).text.splitlines()[0].partition(" on ")[2].partition(": ")[0]

    assert [named(3), named(5)] == ["0.jsonl, 1.jsonl, 2.jsonl", "0.jsonl and 4 more"]


def test_trainer_and_engine_are_made_in_the_dtype_of_the_device(tiny, tmp_path, monkeypatch):
    plan = tiny_run(tiny, tmp_path, "algorithm.name=sft")
    monkeypatch.setattr("verl_fn.backends.hf.config.compute_dtype", lambda asked, folder, device: "bfloat16")
    assert build.trainer(plan.roles["actor"], plan.driver, "cpu").dtype == torch.bfloat16
    assert build.rollout(plan.rollout, "cpu").dtype == torch.bfloat16


@pytest.mark.parametrize("key", ["trainer.dir", "trainer.rollout_data_dir"])
def test_a_check_refuses_a_folder_that_cannot_be_written(tiny, tmp_path, key):
    """Of /proc everybody may read, and nobody may make files, not even root, whatever its permissions say."""
    with pytest.raises(ConfigError, match=rf"{key}: /proc/\S+ cannot be written \("):
        check_run(tiny_run(tiny, tmp_path / "runs/run", f"{key}=/proc/self/runs/run"))
    check_run(tiny_run(tiny, tmp_path / "runs/run"))
    unused = "algorithm.name=sft", "trainer.rollout_data_dir=/proc/self/runs/run"
    check_run(tiny_run(tiny, tmp_path / "runs/run", *unused))
    assert not (tmp_path / "runs").exists()


def test_a_run_refuses_a_folder_of_responses_that_cannot_be_written(tiny, tmp_path):
    plan = tiny_run(tiny, tmp_path / "run", "trainer.rollout_data_dir=/proc/self/responses")
    with pytest.raises(ConfigError, match=r"trainer.rollout_data_dir: /proc/\S+ cannot be written"):
        train(plan)


def test_a_role_with_more_updates_than_planned_is_told(tiny, tmp_path):
    """Only of a rate that falls, since the others have no end to reach early."""
    plan = tiny_run(tiny, tmp_path, "actor.optim.lr_scheduler_type=linear", "trainer.total_training_steps=9")
    role = plan.roles["actor"]
    assert unplanned(role, plan, 6, 6, 3) == "" == unplanned(plan.roles["critic"], plan, 7, 6, 3)
    said = unplanned(role, plan, 7, 6, 3)
    assert said.startswith("the actor had 7 updates up to step 3, and the algorithm's outline counts 6: ")
    assert f"falls over {role.total_updates} updates, and so reaches its end before step 9" in said
    assert said.endswith("Outline(updates=lambda role, prompts, steps: 3 * steps)")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], ["; local; float32; ", "micro-batches of at most 16,384 tokens"]),
        (
            ["actor.strategy=fsdp", "actor.fsdp_config.replicate=2",
             "actor.fsdp_config.ulysses_sequence_parallel_size=2", "actor.fsdp_config.offload_policy=true"],
            ["; fsdp over 4 of 8 ranks, sequence parallel 2; ", "at most 32,768 tokens; parameters and moments stay"],
        ),
        (["actor.strategy=fsdp"], ["; fsdp over 8 of 8 ranks; ", "at most 16,384 tokens"]),
        (
            ["actor.strategy=megatron", "actor.megatron.tensor_model_parallel_size=2",
             "actor.megatron.context_parallel_size=4"],
            ["; megatron over 8 ranks: tensor 2, pipeline 1, context 4, expert 1; ", "at most 65,536 tokens"],
        ),
        (
            ["actor.strategy=megatron", "actor.megatron.use_megatron_fsdp=true"],
            ["; Megatron-FSDP over 8 ranks: tensor 1, ", "tokens"],
        ),
    ],
)  # fmt: skip
def test_a_check_says_how_a_role_is_laid_out(settings, words, tiny, tmp_path):
    plan = tiny_run(tiny, tmp_path, "algorithm.use_kl_loss=true", *settings)
    size = 8 if settings else 1
    first, second = check_run_module._role_lines(plan.roles["actor"], plan, size)
    assert words[0] in first and words[1] in second
    assert second.endswith("passes" if "offload_policy" in str(settings) else "tokens")
    assert "updates in 3 steps, lr 0.001" in first
    of_reference, parts = check_run_module._role_lines(plan.roles["reference"], plan, size)
    assert of_reference.endswith("; not updated") and ", 0 trained; " in of_reference
    assert "parameters" in parts and "moments 0" not in parts and "gradients" not in parts


@pytest.mark.parametrize(
    ("algorithm", "rows"), [("grpo", 24), ("sft", 8), ("dpo", 16), ("dpo algorithm.loss_type=kto", 16)]
)
def test_a_check_counts_the_rows_of_a_step(algorithm, rows, tiny, tmp_path):
    plan = tiny_run(tiny, tmp_path, *f"algorithm.name={algorithm} rollout.n=3".split())
    lines = list(check_run_module._run_lines(plan, 11))
    assert f"a step      8 prompts, {rows} rows of at most 11 tokens" in lines
    assert "driver      local, cpu, 1 training process" in lines


def test_a_check_counts_the_steps_that_sampling_runs_ahead(tiny, tmp_path):
    more = ["driver.kind=ray", "ray.ranks=2", "actor.strategy=fsdp", "rollout.placement=apart", "driver.max_lag=1"]
    plan = tiny_run(tiny, tmp_path, *more)
    text = "\n".join(check_run_module._run_lines(plan, 11))
    assert "sampling runs up to 1 step ahead of learning" in text and "in the middle of responses" not in text
    assert "driver      ray, cpu, 2 training processes" in text
    flying = attrs.evolve(plan, rollout=attrs.evolve(plan.rollout, in_flight_weight_updates=True))
    assert "in the middle of responses" in "\n".join(check_run_module._run_lines(flying, 11))
    adapters = tiny_run(tiny, tmp_path, "algorithm.use_kl_loss=true", "actor.lora_rank=2")
    assert list(check_run_module._run_lines(adapters, 11))[-1] == (
        "reference   the frozen base of actor, no model of its own"
    )


def test_a_cache_is_told_if_it_holds_fewer_rows_than_an_engine_gets(tiny, tmp_path, monkeypatch):
    plan = tiny_run(tiny, tmp_path)
    vllm = attrs.evolve(plan, rollout=attrs.evolve(plan.rollout, name="vllm"))
    monkeypatch.setattr(check_run_module.fitting, "rows_of_engine", lambda plan: 8)
    for cached, told in ((7, True), (8, False)):
        monkeypatch.setattr(check_run_module.fitting, "cached_rows", lambda plan, gpu, cached=cached: cached)
        lines = list(check_run_module._cached_rows(vllm, 1, 11))
        assert bool(lines) is told
        assert not told or (
            lines[0].startswith("cache       7 of the longest rows, of 11 tokens") and "gets 8 a" in lines[0]
        )
    monkeypatch.setattr(check_run_module.fitting, "cached_rows", None)  # is not asked about another engine
    assert list(check_run_module._cached_rows(plan, 1, 11)) == []


def test_what_helps_a_plan_is_told_from_the_smallest_change_on():
    ways = check_run_module._help
    assert ways(["a=1", "b=2"], ["two"], (4, "four"), None) == "set a=1, or b=2"
    assert ways(["a=1"], [], (4, "four"), "less") == "set a=1; or adapters fit, with less"
    assert ways([], ["two", "three"], None, None) == "take the layout two"
    assert ways([], [], (4, "four"), "less") == "4 such GPUs are enough, with four; or adapters fit, with less"
    assert ways([], [], None, "less") == "adapters fit, with less"
    assert ways([], [], None, None).startswith("no layout that was tried fits; take larger GPUs")


def test_settings_of_models_that_are_hardly_meant_are_told(tiny, tmp_path):
    """A warm-up as long as the run, and bf16 on a CPU; of each role its own."""
    total = tiny_run(tiny, tmp_path).roles["critic"].total_updates
    for warmup, count in ((total, 1), (total - 1, 0)):
        told = list(prepare_module._of_models(tiny_run(tiny, tmp_path, f"critic.optim.lr_warmup_steps={warmup}")))
        assert len(told) == count
    told = list(prepare_module._of_models(tiny_run(tiny, tmp_path, f"critic.optim.lr_warmup_steps={2 * total}")))
    assert told[0].startswith(f"critic.optim.lr_warmup_steps is {2 * total} updates, and the run has {total}: its")
    assert told[0].endswith(f"ends at {(total - 1) / (2 * total):.2g} times critic.optim.lr")
    told = list(prepare_module._of_models(tiny_run(tiny, tmp_path, "critic.dtype=bfloat16")))
    assert told == ["critic.dtype is bfloat16 on a CPU: slower there than float32, and less exact"]


def test_a_frozen_model_with_another_chat_template_is_told_once(tmp_path):
    for name in ("actor", "teacher"):
        new_model(tmp_path / name, chars="ab", chat_template=True)
    settings = ["algorithm.name=distill", f"algorithm.teacher={tmp_path}/teacher"]
    plan, tokenizer = tiny_run(tmp_path / "actor", tmp_path / "run", *settings), read_tokenizer(tmp_path / "actor")
    asked = [Problem([{"role": role, "content": "ab"}], "b", id=i) for i, role in enumerate(("user", "system"))]
    told = lambda *known: list(prepare_module._of_other_templates(known, plan, tokenizer))  # noqa: E731
    template = tmp_path / "teacher/chat_template.jinja"
    text = template.read_text()
    assert told(asked, asked) == told() == told([Problem("ab", "b")]) == []
    template.write_text(text.replace("{%", "b{%", 1))
    (line,) = told(asked, asked)
    assert line.startswith(f"algorithm.teacher: the chat template in {tmp_path}/teacher writes ")
    assert told([Problem("ab", "b")]) == []
    # One that refuses a role writes it otherwise, too; held-out prompts count as well.
    refuses = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    template.write_text(refuses + text)
    assert told(asked[:1], []) == [] and len(told(asked[:1], asked[1:])) == 1


def test_another_number_of_steps_is_another_decay_of_each_rate_that_falls(tiny, tmp_path):
    before = tiny_run(tiny, tmp_path, "trainer.total_training_steps=2")
    for settings, named in (
        ([], []),
        (["actor"], ["actor"]),
        (["actor", "critic"], ["actor", "critic"]),
        (["actor", "critic", "actor.optim.lr_decay_steps=5"], ["critic"]),
    ):
        falling = [f"{one}.optim.lr_scheduler_type=linear" if "." not in one else one for one in settings]
        plan = tiny_run(tiny, tmp_path, *falling)
        assert _other_rates(plan, plan) == []
        totals = {name: plan.roles[name].total_updates for name in named}
        assert _other_rates(before, plan) == [
            f"the learning rate of {name}.optim falls from now on over all {total} updates of a run of 3 steps; "
            f"{name}.optim.lr_decay_steps would fix its end"
            for name, total in totals.items()
        ]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["reward.url=http://a:1/v1", "reward.model=judge"], "reward      judge at http://a:1/v1"),
        (["reward.functions=['m.py:f', 'm.py:g']"], "reward      HERE/m.py:f, HERE/m.py:g"),
        (["env.name=m.py:E"], "reward      the environment's"),
        ([], "reward      the rule of each data source"),
        (["algorithm.name=sft"], None),
    ],
)
def test_a_check_says_who_rewards(settings, line, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = tiny_run(tiny, tmp_path, *settings)
    lines = [one for one in check_run_module._parts_lines(plan) if one.startswith("reward ")]
    assert lines == ([] if line is None else [line.replace("HERE", str(tmp_path))])
    talks = attrs.evolve(plan, env=attrs.evolve(plan.env, name="m:E", max_turns=3, max_turn_length=5))
    for limit, tokens in ((5, 5), (None, plan.data.max_response_length)):
        changed = attrs.evolve(talks, env=attrs.evolve(talks.env, max_turn_length=limit))
        assert f"environment m:E: up to 3 replies of at most {tokens} tokens each" in list(
            check_run_module._parts_lines(changed)
        )


def test_a_budget_that_ranks_share_is_named_for_each_of_them(tiny, tmp_path):
    rows = RowLengths(9, 9, 40, 9, "a pair: two rows")
    for shared, words in ((1, ""), (2, " on 2 ranks together"), (4, " on 4 ranks together")):
        settings = ["actor.strategy=fsdp", "actor.ppo_max_token_len_per_gpu=9"] if shared > 1 else []
        settings += [f"actor.fsdp_config.ulysses_sequence_parallel_size={shared}"] if shared > 1 else []
        settings += ["actor.ppo_max_token_len_per_gpu=9", "algorithm.name=grpo", "rollout.n=2"]
        with pytest.raises(ConfigError) as refused:
            check_lengths(tiny_run(tiny, tmp_path, *settings), rows)
        said = "a pair may have 40 tokens (two rows), more than actor.ppo_max_token_len_per_gpu = 9"
        assert str(refused.value) == f"{said}{words}; raise that budget"
        fits = attrs.evolve(rows, together=9 * shared)
        check_lengths(tiny_run(tiny, tmp_path, *settings), fits)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["driver.device=cuda"], "torch finds no GPU here"),
        (["reward.functions=no.py:f"], "there is no file"),
        (["critic.path=no/model"], "there is no folder"),
        (["data.train_files=no.jsonl"], r"no\.jsonl"),
        (["ray.runtime_env=no.yaml"], r"no\.yaml"),
    ],
)
def test_what_is_missing_is_known_before_processes_start(settings, said, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # tests share a cluster
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("verl_fn.driver.ray.ray_started", lambda plan: pytest.fail("they start"))
    with pytest.raises(UserError, match=said):
        prepare_module.started(tiny_run(tiny, tmp_path, "driver.kind=ray", *settings))
    with prepare_module.started(tiny_run(tiny, tmp_path, *settings[:0])) as begun:
        assert begun is None, "one process"
