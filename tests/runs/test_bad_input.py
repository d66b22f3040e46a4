"""Each mistake of a user is one clear line that names the place and what to do, and loses nothing."""

import json
import shutil
import sys
import types
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest
import torch
from run_configs import TINY, tiny_run

from verl_fn import steps
from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.new_model import char_tokenizer, new_model
from verl_fn.cli import main
from verl_fn.cli.commands import model_of
from verl_fn.config import ConfigError, load, make_plan
from verl_fn.data.notices import traits_of
from verl_fn.data.tasks import Problem
from verl_fn.runs import RunError
from verl_fn.runs.check_run import check_run
from verl_fn.runs.checkpoints import checkpoints
from verl_fn.runs.checks import _with_rules
from verl_fn.runs.logs import loggers, read_metrics
from verl_fn.runs.loop import train
from verl_fn.runs.prepare import make_model_folder

SILENT = lambda line: None  # noqa: E731


@pytest.fixture
def refused(capsys, tmp_path):
    """Runs a command that must fail; gives its one line."""

    def run(*args, status=1):
        assert main([str(a) for a in args]) == status
        found = capsys.readouterr().err
        assert found.startswith("error: ") and found.count("\n") == 1 and "Traceback" not in found
        return found

    return run


def start(model, folder, *more):
    return ["train", "recipes/sft_reverse.toml", *TINY, "trainer.stop_at=1.0", f"model.path={model}",
            f"trainer.dir={folder}", *more]  # fmt: skip


def test_model_folders_that_cannot_be_used(refused, tiny, tmp_path):
    said = refused(*start(tmp_path / "org/name", tmp_path / "run"), status=2)
    assert "model.path: there is no folder" in said and "prepare hub:" in said
    bare = shutil.copytree(tiny, tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer that can be read" in refused(*start(bare, tmp_path / "run"))
    odd = shutil.copytree(tiny, tmp_path / "odd")
    (odd / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    assert "config.json has the model type 'abacus': transformers" in refused(*start(odd, tmp_path / "run"))


@pytest.mark.parametrize("check", [(), ("--check",)], ids=["run", "check"])
@pytest.mark.parametrize("below", ["", "/deeper"])
@pytest.mark.parametrize(("key", "name"), [("trainer.dir", "sft"), ("trainer.rollout_data_dir", "ppo")])
def test_a_file_in_the_place_of_the_folder(refused, tiny, tmp_path, check, below, key, name):
    file = tmp_path / "file"
    file.write_text("kept")
    train, _, *rest = start(tiny, tmp_path / "run")
    said = refused(train, f"recipes/{name}_reverse.toml", *rest, f"{key}={file}{below}", *check, status=2)
    assert f"{key}: {file} is a file; choose a folder" in said and file.read_text() == "kept"


def test_a_file_in_the_place_of_the_model(refused, tiny, tmp_path):
    file = tiny / "config.json"
    said = refused(*start(file, tmp_path / "run"), status=2)
    assert f"model.path: {file} is a file; set the folder of a model" in said


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ('reward.functions=["{}:score"]', "reward.functions"),
        ("algorithm.policy_loss={}:mine", "algorithm.policy_loss"),
        ("env.name={}:Mine", "env.name"),
    ],
)
def test_files_of_code_that_do_not_exist(refused, tiny, tmp_path, setting, key):
    lost = tmp_path / "lost.py"
    command = start(tiny, tmp_path / "run", setting.format(lost), "--check")
    command[1] = "recipes/grpo_count.toml"
    assert f"{key}: there is no file {lost}" in refused(*command, status=2)


def test_a_tokenizer_of_another_model(refused, tiny, tmp_path):
    other = shutil.copytree(tiny, tmp_path / "other")
    char_tokenizer("abcdefgh>ijklmnopq").save_pretrained(other)
    found = refused(*start(other, tmp_path / "run"))
    assert "the tokenizer has 22 tokens" in found and "only 13" in found
    tokenizer = char_tokenizer("abcdefgh>")
    assert tokenizer.add_tokens(["<call>"])
    tokenizer.save_pretrained(other)
    assert "the tokenizer has 14 tokens" in refused(*start(other, tmp_path / "run"))


def test_rows_that_do_not_fit(refused, tiny, tmp_path):
    found = refused(*start(tiny, tmp_path / "a", "actor.ppo_max_token_len_per_gpu=10"), status=2)
    assert "actor.ppo_max_token_len_per_gpu = 10; raise that budget" in found
    found = refused(*start(tiny, tmp_path / "a", "data.max_response_length=1000"), status=2)
    assert "only 256 positions" in found


def write_rows(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def row(prompt="ab>", answer="ba", source="mine"):
    return {"data_source": source, "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": answer}}


def test_data_files_that_cannot_be_used(refused, tiny, tmp_path):
    run = lambda file, *more: refused(*start(tiny, tmp_path / "run", f"data.train_files={file}", *more))  # noqa: E731
    assert "nowhere.parquet" in run(tmp_path / "nowhere.parquet")
    assert "empty.jsonl" in run(write_rows(tmp_path / "empty.jsonl", []))
    assert "data_source" in run(write_rows(tmp_path / "lacking.jsonl", [{"prompt": "ab>"}]))
    long = write_rows(tmp_path / "long.jsonl", [row(), row("abcdefgh" * 5 + ">")])
    found = run(long, "data.max_prompt_length=20")
    assert "data.max_prompt_length" in found and "data.filter_overlong_prompts" in found
    chat = write_rows(tmp_path / "chat.jsonl", [row([{"role": "user", "content": "ab>"}])])
    assert "chat template" in run(chat)
    strange = write_rows(tmp_path / "strange.jsonl", [row("xyz>")])
    assert "'xyz>'" in run(strange)


def test_held_out_rows_without_a_rule_end_the_run_before_its_first_step(refused, tiny, tmp_path):
    train = write_rows(tmp_path / "train.jsonl", [row(source="reverse")])
    val = write_rows(tmp_path / "val.jsonl", [row(source="reverse"), row()])
    for name in ("sft", "ppo"):
        args = [f"data.train_files={train}", f"data.val_files={val}", "trainer.val_before_train=false"]
        assert "'mine' has no rule" in refused(*start(tiny, tmp_path / name, *args, f"algorithm.name={name}"))
        assert not (tmp_path / name / "metrics.jsonl").exists()


def test_what_is_wrong_with_the_data_is_said_before_a_model_is_asked_for(refused, tmp_path):
    args = [*start("", tmp_path / "run"), f"data.train_files={tmp_path}/a.jsonl"]
    assert "a.jsonl" in refused(*args)
    write_rows(tmp_path / "a.jsonl", [{"prompt": "ab>"}])
    assert "data_source" in refused(*args)
    write_rows(tmp_path / "a.jsonl", [row()])
    assert "data from files needs model.path" in refused(*args, status=2)


LENGTH = """
def length(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) + 1.0
def judged(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 5.0, "acc": solution_str == ground_truth}
"""


def test_a_reward_that_judges_nothing_has_no_accuracy(refused, tiny, tmp_path, capsys):
    """A length is no accuracy, so a run does not end by it unless it is asked to."""
    (tmp_path / "mine.py").write_text(LENGTH)
    args = start(tiny, tmp_path / "a", "trainer.test_freq=1", "trainer.stop_at=0.9", "trainer.total_training_steps=1")
    length = f"reward.functions={tmp_path}/mine.py:length"
    said = refused(*args, length, status=2)
    assert "trainer.stop_at is compared with acc" in said and "trainer.stop_metric=reward" in said
    assert main([*args, length, "trainer.stop_metric=reward"]) == 0
    assert "before training: held-out reward" in capsys.readouterr().out
    of_answers = {"val/loss", "val-aux/reverse/nll/mean@1", "val-aux/reverse/token_acc/mean@1"}
    names = {name for name in read_metrics(tmp_path / "a")[0] if name.startswith("val")}
    ends = {"val-aux/reverse/response_length/clip_ratio"}
    assert names == {"val-core/reverse/reward/mean@1"} | ends | of_answers
    more = [f"trainer.dir={tmp_path}/b", f"reward.functions={tmp_path}/mine.py:judged"]
    assert main([*args, *more]) == 0
    assert {"val-core/reverse/acc/mean@1", "val-aux/reverse/reward/mean@1"} < read_metrics(tmp_path / "b")[0].keys()
    assert read_metrics(tmp_path / "b")[-1]["step"] == 1


def test_a_source_without_a_rule(refused, tiny, tmp_path):
    file = write_rows(tmp_path / "mine.jsonl", [row()])
    args = start(tiny, tmp_path / "run", f"data.train_files={file}", f"data.val_files={file}")
    found = refused(*args)
    assert "mine" in found and "reward.functions" in found


def test_a_prompt_that_the_rule_of_its_source_cannot_read(refused, tmp_path):
    """The rules of generated tasks read each prompt, so the first one does not stand for the others."""
    model = new_model(tmp_path / "model", chars="0123456789,+-*>", hidden_size=32)
    fits, other = (row(prompt, "2*3", "countdown") for prompt in ("2,3,6>", "2+3>"))
    train, val = (write_rows(tmp_path / f"{len(rows)}.jsonl", rows) for rows in ([fits, other], [fits]))
    args = [f"data.train_files={train}", f"data.val_files={val}", "algorithm.name=ppo"]
    found = refused(*start(model, tmp_path / "run", *args))
    assert "its data source failed on problem 1 of 'countdown'" in found and "reward.functions" in found


REWARDS = """
def raises(data_source, solution_str, ground_truth, extra_info=None):
    return 1 / 0
def nan(data_source, solution_str, ground_truth, extra_info=None):
    return float("nan")
def hangs(data_source, solution_str, ground_truth, extra_info=None):
    import re
    re.match(r"(a+)+$", "a" * 60 + "b")
def few(data_sources, solution_strs, ground_truths, extra_infos=None):
    return [1.0]
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", "ZeroDivisionError"),
        ("nan", "nan"),
        ("hangs", "reward.timeout"),
        ("few", "1 result"),
        ("missing", "missing"),
    ],
)
def test_rewards_that_fail(refused, tiny, tmp_path, name, says):
    (tmp_path / "mine.py").write_text(REWARDS)
    args = start(tiny, tmp_path / "run", f"reward.functions={tmp_path}/mine.py:{name}", "reward.timeout=1.0")
    found = refused(*args)
    assert "mine.py" in found and name in found and says in found
    if name in ("raises", "nan", "hangs"):
        assert "reverse" in found


def test_gradients_that_are_never_finite_end_the_run(tiny, tmp_path, monkeypatch):
    """Updates are skipped and counted; after the set number of steps the run ends and keeps its checkpoints."""
    settings = ["trainer.total_training_steps=9", "trainer.max_skipped_steps=3"]
    # An evaluation computes the loss as well.
    unseen = ["trainer.val_before_train=false", "trainer.test_freq=0"]
    cfg = tiny_run(tiny, tmp_path, "algorithm.name=sft", *settings, *unseen)
    right = steps.cross_entropy
    calls = []

    def breaks():
        calls.append(0)
        return float("nan") * right() if len(calls) > 2 else right()

    monkeypatch.setattr(steps, "cross_entropy", breaks)
    with pytest.raises(RunError, match="gradients of the actor were not finite in any update of the last 3 steps"):
        train(cfg, SILENT)
    rows = read_metrics(tmp_path)
    assert [row["train/update_skipped"] for row in rows if row["step"]] == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert checkpoints(tmp_path)[0].name == "step_4"


def test_a_logger_that_is_not_installed(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"and it is not installed: .* wandb, or leave it out of trainer.logger"):
        train(tiny_run(tiny, tmp_path, "algorithm.name=sft", "trainer.logger=wandb"), SILENT)


def test_loggers_get_what_the_file_gets(tiny, tmp_path, monkeypatch):
    logged, made = {}, {}
    run = types.SimpleNamespace(log=lambda report, step: logged.update({step: report}), finish=lambda: None)
    fake = types.SimpleNamespace(init=lambda **kwargs: made.update(kwargs) or run, __spec__=True)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    more = ["algorithm.name=sft", 'trainer.logger=["console", "wandb", "tensorboard"]', "trainer.project_name=p"]
    train(tiny_run(tiny, tmp_path / "a", *more), SILENT)
    rows = read_metrics(tmp_path / "a")
    assert (made["project"], made["name"], made["config"]["algorithm"]["name"]) == ("p", "a", "sft")
    assert [logged[row["step"]] for row in rows] == [{k: v for k, v in row.items() if k != "step"} for row in rows]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "a" / "tensorboard"))
    events.Reload()
    found = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert found == [(row["step"], float(torch.tensor(row["train/loss"]))) for row in rows[1:]]


def test_tensorboard_keeps_the_steps_before_a_continuation_and_drops_later_ones(tiny, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = tiny_run(tiny, tmp_path, 'trainer.logger=["tensorboard"]').trainer
    for start, numbers in ((0, (1, 2, 3)), (2, (3,))):
        with loggers(trainer, {}, tmp_path, start) as (log,):
            for step in numbers:
                log(step, {"loss": float(10 * start + step)})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 23.0)]


def test_commands_that_are_given_the_wrong_thing(refused, tiny, tmp_path):
    assert "is not a run's folder" in refused("replay", tmp_path, "--step", 1)
    assert "is not a run's folder" in refused("fork", tmp_path, "--step", 1)
    refused("report", tmp_path)
    assert "has no config.toml, checkpoint.json or config.json" in refused("export", tmp_path, tmp_path / "out")
    assert "is not empty" in refused("new-model", tiny, status=2)
    assert "there is no task 'nothing'" in refused("new-model", tmp_path / "m", "--task", "nothing", status=2)
    assert "transformers makes no abacus" in refused("new-model", tmp_path / "m", "--arch", "abacus", status=2)
    assert "is not a folder" in refused(
        *start(tiny, tmp_path / "run", f"trainer.resume_from_path={tmp_path}/x"), status=2
    )
    assert "data.task" in refused("eval", tiny, "data.task=nothing", status=2)
    refused("prepare", "gsm8k", tmp_path / "nowhere", "--out", tmp_path / "o")
    assert "temperature 0" in refused("eval", tiny, "data.task=reverse", "rollout.val_kwargs.n=2", status=2)


def test_unused_keys_are_told(tiny, tmp_path, capsys):
    assert main(["config", "recipes/grpo_count.toml", "algorithm.lam=0.9"]) == 0
    assert 'note: algorithm.lam has no effect with algorithm.name = "grpo"' in capsys.readouterr().err


def test_new_model_and_export_and_eval(tmp_path, capsys):
    model, out = tmp_path / "m", tmp_path / "out"
    assert main(["new-model", str(model), "--task", "count", "--arch", "llama", "hidden_size=32", "--seed", "3"]) == 0
    assert json.loads((model / "config.json").read_text())["hidden_size"] == 32
    assert main(["export", str(model), str(out), "--dtype", "bfloat16"]) == 0
    from transformers import AutoModelForCausalLM

    ours, theirs = (AutoModelForCausalLM.from_pretrained(f, dtype="auto") for f in (out, model))
    assert ours.dtype == torch.bfloat16
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b.to(torch.bfloat16))
    more = ["data.val_size=8", "rollout.val_kwargs.n=4", "rollout.val_kwargs.temperature=1.0", "driver.num_threads=1"]
    found = tmp_path / "found"
    assert main(["eval", str(model), str(out), "data.task=count", "--out", str(found), *more]) == 0
    shown = capsys.readouterr().out
    answers = pq.read_table(found / "answers.parquet").to_pylist()
    assert len(answers) == 2 * 8 * 4, "all of them, not only those that a run would log"
    assert len({(a["model"], a["problem"], a["sample"]) for a in answers}) == len(answers)
    assert len({a["prompt"] for a in answers}) == 8
    reports = json.loads((found / "metrics.json").read_text())
    assert [report["model"] for report in reports] == ["m", "out"] and reports[1]["path"] == str(out)
    names = {f"val-core/count/acc/{name}" for name in ("mean@4", "best@4/mean", "maj@4/mean")}
    assert names | {f"val-aux/count/acc/pass@{k}" for k in (1, 2, 4)} < reports[0]["metrics"].keys()
    assert (found / "metrics.png").read_bytes().startswith(b"\x89PNG")
    table = shown[shown.index("\ncount\n") :].splitlines()
    assert table[2].split()[:2] == ["model", "acc/mean@4"]
    assert [line.split()[0] for line in table[3:5]] == ["m", "out"]
    assert float(table[3].split()[1]) == round(reports[0]["metrics"]["val-core/count/acc/mean@4"], 4)


def test_models_that_cannot_be_evaluated_together(refused, tiny, tmp_path, capsys):
    assert "is named twice" in refused("eval", tiny, tiny, status=2)
    with pytest.raises(SystemExit):
        main(["eval", "data.val_size=4"])
    assert "eval needs a model" in capsys.readouterr().err


def test_sizes_of_a_random_model_that_do_not_go_together(refused, tmp_path):
    new = lambda *more: refused("new-model", tmp_path / "m", *more, status=2)  # noqa: E731
    assert "hidden_size must be a whole number of at least 1, not -4" in new("hidden_size=-4")
    assert "num_attention_heads must be a whole number of at least 1, not 0" in new("num_attention_heads=0")
    assert "3 does not divide num_attention_heads = 4" in new("num_key_value_heads=3")
    assert "3 does not divide hidden_size = 64" in new("num_attention_heads=3", "num_key_value_heads=3")
    with pytest.raises(ModelError, match="it must be even"):
        new_model(tmp_path / "m", chars="ab", hidden_size=4)
    assert len(new("intermediate_size=-3")) < 300
    assert "qwen3 has no field num_layers, so it would have no effect; did you mean num_hidden_layers?" in new(
        "num_layers=3"
    )
    assert "--chars is empty" in new("--chars", "")
    assert not (tmp_path / "m").exists()
    train = lambda key: refused(*start("", tmp_path / "run", key), status=2)  # noqa: E731
    assert "transformers makes no nope language model" in train("model.new.arch=nope")
    assert "4 does not divide hidden_size = 1" in train("model.new.hidden_size=1")


def test_places_that_cannot_be_written(refused, tiny, tmp_path):
    (tmp_path / "file").write_text("")
    assert "file is a file; choose a folder" in refused("new-model", tmp_path / "file", status=2)
    assert "file is a file; choose a folder" in refused("export", tiny, tmp_path / "file", status=2)
    assert "/proc/zz" in refused("new-model", "/proc/zz", status=2)
    assert "--out" in refused(
        "eval", tiny, "data.task=reverse", "data.val_size=4", "--out", tmp_path / "file", status=2
    )
    run = tmp_path / "run"
    train(tiny_run(tiny, run, "algorithm.name=sft", "trainer.total_training_steps=1"), SILENT)
    assert "/proc/x.html" in refused("report", run, "--out", "/proc/x.html")


def test_a_full_disk_while_the_random_model_is_written(refused, tmp_path, monkeypatch):
    import transformers
    from safetensors import SafetensorError

    full = SafetensorError("I/O error: No space left on device (os error 28)")
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", Mock(side_effect=full))
    found = refused(*start("", tmp_path / "run"), status=2)
    assert str(tmp_path / "run") in found and "No space left" in found
    assert not list((tmp_path / "run").glob("*new_model*"))


def test_a_random_model_with_a_damaged_note_is_made_anew(tmp_path):
    plan = tiny_run("", tmp_path)
    make_model_folder(plan)
    folder = tmp_path / "new_model"
    for damaged in ("", '{"arch"', "[]", "\x00"):
        (folder / "made_from.json").write_text(damaged)
        (folder / "config.json").unlink()
        make_model_folder(plan)
        assert (folder / "config.json").is_file()


def test_a_random_model_is_not_written_through_a_link(tmp_path):
    for name in ("run", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "run/new_model").mkdir()
    (tmp_path / "run/new_model/.unfinished").symlink_to(tmp_path / "elsewhere")
    make_model_folder(tiny_run("", tmp_path / "run"))
    assert not list((tmp_path / "elsewhere").iterdir()) and (tmp_path / "run/new_model/config.json").is_file()


def test_weights_that_are_not_finite(refused, tiny, tmp_path):
    from safetensors.torch import load_file, save_file

    odd = shutil.copytree(tiny, tmp_path / "odd")
    weights = {name: torch.full_like(t, float("nan")) for name, t in load_file(odd / "model.safetensors").items()}
    save_file(weights, odd / "model.safetensors", metadata={"format": "pt"})
    found = refused(*start(odd, tmp_path / "run"))
    assert "has the value nan" in found and "copy the file again, or correct the weight" in found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(refused, tiny, tmp_path):
    assert "driver.device is cuda" in refused(*start(tiny, tmp_path / "run", "driver.device=cuda"), status=2)


def test_what_fits_is_known_before_the_first_step(refused, tiny, tmp_path):
    run = lambda *more: refused(*start(tiny, tmp_path / "run", *more), status=2)  # noqa: E731
    assert "up to 10 tokens, more than data.max_prompt_length = 9" in run("data.max_prompt_length=9")
    assert "19 tokens (prompt, answer and end token)" in run("actor.ppo_max_token_len_per_gpu=18")
    long = write_rows(tmp_path / "long.jsonl", [row(answer="a" * 300, source="reverse")])
    files = [f"data.train_files={long}", f"data.val_files={long}"]
    assert "305 tokens (prompt, answer and end token), but" in run(*files)
    assert "has only 256 positions" in run(*files)
    assert "trainer.stop_at needs held-out problems; set data.val_files" in run(f"data.train_files={long}")


def test_a_run_whose_newest_checkpoint_was_removed_is_still_a_model(tiny, tmp_path, capsys):
    run = tmp_path / "run"
    train(tiny_run(tiny, run, "algorithm.name=sft"), SILENT)
    shutil.rmtree(run / "checkpoints" / "step_3")
    assert main(["eval", str(run)]) == 0
    said = capsys.readouterr().out
    assert f"evaluating {run / 'checkpoints' / 'step_2' / 'actor'} on 8 held-out problems of reverse, greedy" in said
    assert "(reward 0" in said
    assert main(["export", str(run), str(tmp_path / "out")]) == 0


def test_a_model_in_a_runs_folder_is_asked_the_runs_problems(tmp_path, capsys):
    run = tmp_path / "run"
    made = make_plan(load(overrides=[*TINY, "algorithm.name=sft", f"trainer.dir={run}", "data.task=count"]))
    train(made, SILENT)
    actor, newest = (run / "checkpoints" / f"step_{step}" / "actor" for step in (2, 3))
    for model, read in (
        (run, newest),
        (run / "model", newest),
        (actor, actor),
        (run / "new_model", run / "new_model"),
    ):
        assert main(["eval", str(model)]) == 0
        assert f"evaluating {read} on 8 held-out problems of count" in capsys.readouterr().out
    step = ["--step", "1"]
    commands = (["report", actor], ["fork", actor.parent, *step], ["replay", run / "model", *step])
    for words in (*commands, ["eval", run / "checkpoints"], ["export", run / "checkpoints", tmp_path / "out"]):
        assert main([*map(str, words)]) == 1
        assert f"did you mean {run}?" in capsys.readouterr().err
    copy = shutil.copytree(actor, tmp_path / "copy")
    assert main(["eval", str(copy)]) == 2
    assert "no run says which problems" in capsys.readouterr().err


def test_a_runs_folder_lies_in_no_other_runs(tiny, tmp_path, capsys):
    run = tmp_path / "run"
    train(tiny_run(tiny, run, "algorithm.name=sft"), SILENT)
    with pytest.raises(ModelError, match=rf"{run} is not a .* model folder: .*; a run's model is in {run}/model"):
        check_run(tiny_run(run, tmp_path / "next"))
    (tmp_path / "link").symlink_to(run)
    for inside in ("run/checkpoints/step_3/x", "run/model/x", "run/x/y", "link/x", "run/checkpoints"):
        plan = tiny_run(tiny, tmp_path / inside, "algorithm.name=sft")
        for begin in (check_run, train):
            with pytest.raises(ConfigError, match=rf"trainer\.dir: .* lies in .* of another run, {run}, "):
                begin(plan, SILENT)
    # A run that has begun there may go on, and a folder with some config of the user's is no run's.
    shutil.copytree(run, run / "before", symlinks=True)
    assert "this run has finished" in check_run(tiny_run(tiny, run / "before", "algorithm.name=sft")).text
    (tmp_path / "config.toml").write_text("")
    train(tiny_run(tiny, tmp_path / "beside", "algorithm.name=sft", "trainer.total_training_steps=1"), SILENT)


def test_an_evaluation_asks_the_held_out_files_alone(tiny, tmp_path, capsys):
    """Training files may be gone, and their answers need not be what the model can say."""
    held = write_rows(tmp_path / "held.jsonl", [row(), row("b>")])
    args = [f"data.train_files={tmp_path}/gone.jsonl", f"data.val_files={held}", "rollout.val_kwargs.temperature=1"]
    (tmp_path / "run.toml").write_text(f"[data]\ntrain_files = '{tmp_path}/gone.jsonl'\n")
    assert main(["eval", str(tiny), "--config", str(tmp_path / "run.toml")]) == 2
    assert capsys.readouterr().err.rstrip().endswith("there are no held-out problems: set data.val_files")
    rewards = tmp_path / "one.py"
    rewards.write_text("def one(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    assert main(["eval", str(tiny), *args, f"reward.functions={rewards}:one"]) == 0
    assert "on all problems of held.jsonl, 1 at temperature 1" in capsys.readouterr().out


def test_of_each_data_source_one_problem_shows_whether_its_rule_can_score():
    """Of a generated task all, since its rule reads each prompt."""
    given = [("mine", "x"), ("count", "1>"), ("mine", "y"), ("openai/gsm8k", "z"), ("count", "2>"), ("mine", "v")]
    problems = [Problem(prompt, "1", id=i, data_source=source) for i, (source, prompt) in enumerate(given)]
    assert _with_rules(traits_of(problems, char_tokenizer("abc"))) == [0, 1, 3, 4]


def test_what_a_path_to_a_model_stands_for(tmp_path, monkeypatch):
    run, apart = tmp_path / "run", tmp_path / "checkpoints/step_1"
    for checkpoint in (run / "checkpoints/step_2", run / "checkpoints/step_10", apart):
        (checkpoint / "actor").mkdir(parents=True)
        (checkpoint / "checkpoint.json").touch()
        (checkpoint / "actor/config.json").touch()
    for name in ("config.toml", "metrics.jsonl"):
        (run / name).touch()
    newest = run / "checkpoints/step_10/actor"
    assert model_of(str(run)) == (newest, run), "without its link"
    (run / "model").symlink_to("checkpoints/step_2/actor")
    assert model_of(str(run)) == model_of(str(run / "model")) == (run / "checkpoints/step_2/actor", run)
    assert model_of(str(newest.parent)) == model_of(str(newest)) == (newest, run)
    assert model_of(str(apart)) == model_of(str(apart / "actor")) == (apart / "actor", None), "of no run"
    for inside, path in ((newest.parent.parent, "step_10"), (newest.parent, "."), (newest, ".")):
        monkeypatch.chdir(inside)
        model, found = model_of(path)
        assert (model.resolve(), found) == (newest, run), "a relative path"
    shutil.rmtree(run / "checkpoints/step_2")
    assert model_of(str(run)) == (newest, run), "the link points nowhere"
    shutil.rmtree(run / "checkpoints")
    for path, said in ((run, "has no checkpoint yet"), (tmp_path, "has no config.toml"), (newest, "is no folder")):
        with pytest.raises(RunError, match=said):
            model_of(str(path))
