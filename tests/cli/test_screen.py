"""What reaches the terminal: nothing that it obeys, and no traceback unless it is asked for."""

import importlib
import io
import sys
import types
from importlib.machinery import ModuleSpec

import pytest
from run_configs import TINY, tiny_run

from verl_fn.cli import main
from verl_fn.cli.commands import COMMANDS
from verl_fn.errors import UserError, printable
from verl_fn.runs import RunError
from verl_fn.runs.loop import train

SILENT = lambda line: None  # noqa: E731
loop = importlib.import_module("verl_fn.runs.loop")


class ClosedAt(io.StringIO):
    """An output whose reader goes away when a line has these words."""

    def __init__(self, words):
        super().__init__()
        self.words = words

    def write(self, content):
        if self.words in content:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(content)


def test_a_closed_pipe_is_not_a_full_disk(tiny, tmp_path, monkeypatch, capsys):
    """The run ends where nobody reads it any more, and says nothing of disks."""
    monkeypatch.setattr(sys, "stdout", ClosedAt("step 3/3"))
    args = [*TINY, "trainer.val_before_train=false", "trainer.test_freq=-1", f"model.path={tiny}"]
    assert (
        main(["train", "recipes/sft_reverse.toml", *args, "trainer.stop_at=", f"trainer.dir={tmp_path}/run"]) == 141
    )
    said = capsys.readouterr().err
    assert said == "error: nobody reads the output any more; the same command continues from the last checkpoint\n"
    assert (tmp_path / "run/checkpoints/step_3").is_dir()
    monkeypatch.setattr(sys, "stdout", ClosedAt("[trainer]"))
    assert (main(["config"]), capsys.readouterr().err) == (141, "")
    monkeypatch.setattr(sys, "stdout", ClosedAt("steps"))
    options = [*args, "trainer.stop_at=", f"trainer.dir={tmp_path}/other", "--check"]
    assert (main(["train", "recipes/sft_reverse.toml", *options]), capsys.readouterr().err) == (141, "")


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset"), OSError(5, "Input/output error", "/x")])
def test_an_error_of_a_step_stays_what_it_is(tiny, tmp_path, monkeypatch, error):
    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(loop, "advance", fails)
    with pytest.raises(type(error)) as raised:
        train(tiny_run(tiny, tmp_path, "algorithm.name=sft", "trainer.val_before_train=false"), SILENT)
    assert raised.value is error


@pytest.mark.parametrize("where", ["init", "log"])
def test_a_logger_that_loses_its_connection_is_named(tiny, tmp_path, monkeypatch, where):
    def fails(*args, **kwargs):
        raise ConnectionError("no route")

    run = types.SimpleNamespace(log=fails, finish=lambda: None)
    init = fails if where == "init" else lambda **kwargs: run
    fake = types.SimpleNamespace(init=init, __spec__=ModuleSpec("wandb", None))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(RunError, match="the logger wandb failed: ConnectionError: no route; repair it or take"):
        train(tiny_run(tiny, tmp_path, "algorithm.name=sft", "trainer.logger=wandb"), SILENT)


def test_debug_shows_the_traceback(capsys):
    assert main(["train", "nowhere.toml"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert main(["train", "nowhere.toml", "--debug"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" in said and "read_table" in said and said.endswith("No such file or directory\n")


def test_a_terminal_gets_nothing_to_obey(monkeypatch, capsys):
    hostile = "\x1b[2J\x1b]0;title\x07\x9b31m\u202eabc\r\ud800 \t\u00fc"
    shown = printable(hostile)
    assert shown == "\\x1b[2J\\x1b]0;title\\x07\\x9b31m\\u202eabc\\r\\ud800 \t\u00fc"
    assert printable("\u00fc", "ascii") == "\\xfc"

    def fails(args):
        raise UserError(hostile)

    monkeypatch.setitem(COMMANDS, "list", fails)
    assert main(["list", "--debug"]) == 1
    said = capsys.readouterr()
    assert "\x1b" not in said.err + said.out and shown in said.err
