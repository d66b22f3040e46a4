"""What the commands of the command line print and refuse, with stubs in the place of what takes long."""

import json
import os
import re
import shutil
import sys

import pytest

from verl_fn.cli import commands, main
from verl_fn.cli.commands import COMMANDS
from verl_fn.config import ConfigError
from verl_fn.errors import OutputClosed
from verl_fn.runs.loop import Interrupted

CUT_OFF = {"val-aux/reverse/response_length/clip_ratio": 1.0}


@pytest.fixture
def trained(monkeypatch):
    """Puts a function that says a line in the place of a run; returns what it got."""
    given = []

    def stub(plan, show, **more):
        given.append(more)
        show("a line of the run")
        if plan.trainer.seed == 7:
            raise Interrupted("interrupted")

    monkeypatch.setattr("verl_fn.runs.loop.train", stub)
    return given


def test_a_quiet_run_prints_errors_only(trained, tmp_path, capsys):
    (file := tmp_path / "run.toml").write_text("[algorithm]\nname = 'grpo'\nlam = 0.9\n[rollout]\nn = 2\n")
    for more, lines in (([], 3), (["--quiet"], 0)):
        assert main(["train", str(file), f"trainer.dir={tmp_path}/run", *more]) == 0
        said = capsys.readouterr()
        shown = said.out.splitlines()
        assert len(shown) == lines and said.err == ""
        assert not lines or [line.partition(":")[0] for line in shown[1:]] == ["note", "a line of the run"]
        assert trained[-1]["live"] is False and trained[-1]["began"] > 0
    assert main(["train", str(file), f"trainer.dir={tmp_path}/run", "--quiet", "trainer.seed=7"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


@pytest.mark.parametrize(
    ("words", "runs"),
    [(["train", "x.toml", "--quiet"], True), (["fork", "r", "--step", "1"], True),
     (["fork", "r", "--step", "1", "--check"], False), (["doctor"], False)],
)  # fmt: skip
def test_a_run_that_nobody_reads_any_more_says_how_it_goes_on(words, runs, monkeypatch, capsys):
    def closed(args):
        raise OutputClosed

    monkeypatch.setitem(COMMANDS, words[0], closed)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    assert main(words) == 141
    assert capsys.readouterr().err.startswith("error: nobody reads the output any more; the same") is runs


@pytest.mark.parametrize(("end", "status"), [(None, 5), (SystemExit(3), 3), (SystemExit("no"), 1)])
def test_a_process_of_torchrun_ends_with_the_status_of_its_command(end, status, monkeypatch):
    entry, left = sys.modules["verl_fn.cli.main"], []

    def ends():
        if end is not None:
            raise end
        return 5

    monkeypatch.setattr(entry, "main", ends)
    monkeypatch.setattr(entry, "_rest_early", lambda: None)
    monkeypatch.setattr(os, "_exit", left.append)
    entry.run_rank()
    assert left == [status]


def test_data_sources_that_need_a_rule(tmp_path):
    """Only of problems whose answers a rule would score."""
    files = {}
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"data_source": f"own {name}", "prompt": "q"}) + "\n")
        files[f"{name}_files"] = [str(tmp_path / f"{name}.jsonl")]
    one = {"train_files": files["train_files"][0]}
    for table, lacking in (
        ({"data": files}, ["own train", "own val"]),
        ({"data": one}, ["own train"]),
        ({"data": files | {"val_size": 3}}, ["own train"]),
        ({"data": files, "algorithm": {"reward_model": "m"}}, ["own val"]),
        ({"data": files | {"convert": ["m.py:f"]}}, []),
        ({"data": files, "env": {}}, []),
        ({"data": files, "reward": {"url": "http://a"}}, []),
        ({"data": files, "reward": {"functions": ["m.py:f"]}}, []),
        ({}, []),
    ):
        assert commands._without_rule(table) == lacking, table


def test_a_report_of_a_log_that_was_altered_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("verl_fn.runs.logs.altered", lambda run: [f"{run} was altered"])
    monkeypatch.setattr("verl_fn.report.page.report", lambda runs, out, curves: out)
    monkeypatch.setattr("verl_fn.report.page.headline", lambda run, label: f"about {label}")
    assert main(["report", "r/a", "r/b", "--out", str(tmp_path / "x.html")]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == ["note: r/a was altered", "note: r/b was altered"]
    assert said.out.splitlines()[:2] == ["about a", "about b"]


def test_an_evaluation_notes_that_answers_were_cut_off(tiny, monkeypatch, capsys):
    shares = iter([CUT_OFF, dict.fromkeys(CUT_OFF, 0.25)])
    monkeypatch.setattr("verl_fn.runs.evaluate.evaluate_model", lambda plan, say: (next(shares), []))
    for noted in (True, False):
        assert main(["eval", str(tiny), "data.task=reverse"]) == 0
        assert ("note: in the evaluation 100% of the responses were cut off" in capsys.readouterr().out) is noted
    with pytest.raises(ConfigError, match=r"there are no held-out problems: set data\.val_files"):
        commands._plan(None, ["model.path=m", "data.train_files=a.jsonl"])


def test_a_model_that_fails_does_not_cost_the_evaluations_before_it(tiny, tmp_path, monkeypatch, capsys):
    copies = [shutil.copytree(tiny, tmp_path / name) for name in "abc"]

    def stub(plan, say):
        if plan.model.endswith("c"):
            raise ConfigError("no chat template")
        return {"val-core/reverse/acc/mean@1": 0.5}, []

    monkeypatch.setattr("verl_fn.runs.evaluate.evaluate_model", stub)
    assert main(["eval", *map(str, copies), "data.task=reverse", "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert "error: no chat template\n" in printed.err and printed.out.count("0.5") == 2
    assert "2 of 3 models were evaluated: a, b" in printed.out
    written = json.loads((tmp_path / "out/metrics.json").read_text())
    assert [(one["model"], one["path"]) for one in written] == [(f.name, str(f)) for f in copies[:2]]


def test_an_evaluation_shows_conversations_with_their_calls_of_tools(capsys):
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}]
    answer = {"prompt": "a", "response": "", "answer": "b", "score": 0.5, "messages": said, "ended": "done"}
    commands._show({"m": {}}, [answer], 1)
    assert capsys.readouterr().out.splitlines() == [
        "a conversation that ended with done (reward 0.5; expected 'b'):", "  user: 'a'",
        "  assistant: \"[{'name': 'add'}]\"",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--chars", ""], "--chars is empty; name the characters"),
        (["text_model=t"], "text_model is not a field of a model's config"),
        (["chars=ab", "seed=3"], "chars is not a field"),
        (["--text-model", "t", "--chars", "ab"], "--text-model brings its tokenizer and template"),
        (["--text-model", "t", "--chat-template"], "--text-model brings its tokenizer and template"),
    ],
)
def test_settings_that_a_random_model_does_not_take(words, said, tmp_path, capsys):
    assert main(["new-model", str(tmp_path / "m"), *words]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "m").exists()


def test_the_roles_of_an_algorithm_are_listed(capsys):
    assert main(["list", "ppo"]) == 0
    roles = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  role ")]
    assert roles[:2] == ["role actor: lm head, trained", "role critic: value head, trained"]
    assert main(["list", "dpo"]) == 0
    assert "  role reference: lm head, not trained, a frozen copy of actor\n" in capsys.readouterr().out


def test_an_option_that_must_be_set_is_listed(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "import attrs\n\n@attrs.frozen\nclass Options:\n    strength: float\n    steps: int = 3\n"
        "    names: list = attrs.field(factory=list)\n"
        "    twice: int = attrs.field()\n    @twice.default\n    def _(self):\n        return 2 * self.steps\n\n"
        "def mine(options: Options):\n    pass\n"
    )
    assert main(["list", f"{file}:mine"]) == 0
    said = capsys.readouterr().out
    assert "its roles are known once strength is set" in said and "  role " not in said
    for line in (
        r"# strength = +# +\[must be set\]",
        r"steps = 3 +# +\[default\]",
        r"names = \[\] +#",
        r"# twice = +#",
    ):
        assert re.search(f"^{line}", said, re.M), line


def test_a_function_is_described_by_its_parameters(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "def best(batch, *, k=2):\n    return batch\n\ndef soft(weight=0.5):\n    pass\n\n"
        "def nothing():\n    pass\n\ndef two(a, b):\n    pass\n\ndef many(*batches):\n    pass\n"
    )
    for name, key, option in (("best", "adv_estimator", "k = 2"), ("soft", "policy_loss", "weight = 0.5")):
        assert main(["list", f"{file}:{name}"]) == 0
        said = capsys.readouterr().out
        assert f"for algorithm.{key} if it " in said and f"  algorithm.{key}_kwargs.{option}\n" in said
    for name in ("nothing", "two", "many"):
        assert main(["list", f"{file}:{name}"]) == 2
        assert f"{name} is a function of " in capsys.readouterr().err


def test_the_results_of_an_evaluation_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("verl_fn.report.plots.evaluation_plot", lambda reports, out: out)
    monkeypatch.setattr("verl_fn.data.prepare.write_answers", lambda out, answers: out)
    for answers, more in (([], ""), ([{}], "answers.parquet, ")):
        commands._write(tmp_path, {"a": "/m/a"}, {"a": {"x": 0.5}}, answers)
        assert capsys.readouterr().out == f"wrote metrics.json, {more}metrics.png to {tmp_path}\n"
    (one,) = json.loads((tmp_path / "metrics.json").read_text())
    assert one == {"model": "a", "path": "/m/a", "metrics": {"x": 0.5}}
