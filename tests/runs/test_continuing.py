"""A run that goes on: where it begins, what has changed since, and what an evaluation that fails may cost."""

import importlib
import json
import shutil
from pathlib import Path

import pytest
from run_configs import tiny_run

from verl_fn.atomic import crc_of
from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.new_model import new_model
from verl_fn.cli import main
from verl_fn.config import ConfigError
from verl_fn.data.tasks import TASKS
from verl_fn.rewards.reward import RewardError
from verl_fn.runs import RunError, continuing, history
from verl_fn.runs.check_run import check_run
from verl_fn.runs.checkpoints import checkpoints, saved_step
from verl_fn.runs.continuing import changes
from verl_fn.runs.folder import Run
from verl_fn.runs.logs import EVALUATED, TIMED, read_answers, read_metrics
from verl_fn.runs.loop import train
from verl_fn.runs.replay import fork_plan, replay

SILENT = lambda line: None  # noqa: E731
loop = importlib.import_module("verl_fn.runs.loop")
SFT = ("algorithm.name=sft", "trainer.total_training_steps=2")


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """A finished run of two steps from a file, saved after each."""
    folder = tmp_path_factory.mktemp("run")
    rows = [{"data_source": "reverse", "prompt": f"{a}b>", "reward_model": {"ground_truth": f"b{a}"}} for a in "abcd"]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train(plan(tiny, folder), SILENT)
    return folder


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy", symlinks=True)


def plan(tiny, folder, *more):
    data = [f"data.{name}_files={folder / 'data.jsonl'}" for name in ("train", "val")]
    return tiny_run(tiny, folder / "a", *SFT, *data, "data.train_batch_size=4", *more)


def said(tiny, folder, *more):
    lines = []
    train(plan(tiny, folder, *more), lines.append)
    return lines


def numbers(folder):
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in read_metrics(folder)]


def test_a_finished_run_says_so_before_it_loads_anything(tiny, copy, monkeypatch):
    for name in ("prepare", "workers"):
        monkeypatch.setattr(loop, name, lambda *args: pytest.fail("there is nothing to prepare"))
    lines = said(tiny, copy, "data.train_batch_size=2")
    assert lines[0] == "this run has finished, after 2 steps; nothing was done or changed"
    assert "not used: data.train_batch_size: 4 -> 2" in lines
    assert lines[-1] == f"for a run with these settings, choose another trainer.dir than {copy / 'a'}"
    checked = check_run(plan(tiny, copy, "data.train_batch_size=2")).text.splitlines()
    assert checked[0] == "this run has finished, after 2 steps; nothing would be done" and checked[1:] == lines[1:]


@pytest.mark.parametrize(
    ("more", "noted"),
    [
        (["lr_scheduler_type=constant"], False),
        (["lr_scheduler_type=linear"], True),
        (["lr_scheduler_type=cosine", "lr_decay_steps=9"], False),
    ],
)
def test_more_steps_change_rates_that_fall(more, noted, tiny, copy):
    longer = plan(tiny, copy, "trainer.total_training_steps=5", *(f"actor.optim.{one}" for one in more))
    said = changes(Run(longer, SILENT), longer)
    sentence = "the learning rate of actor.optim falls from now on over all 5 updates of a run of 5 steps"
    assert any(line.startswith(sentence) for line in said) == noted


def test_rates_fall_to_the_end_of_a_run_whose_steps_get_other_numbers_of_updates(tiny, tmp_path):
    """Steps 1 and 2 have two updates each, later ones one, and the steps of the last fork four."""
    linear = [f"{role}.optim.lr_scheduler_type=linear" for role in ("actor", "critic")]

    def rates(folder):
        rows = [row for row in read_metrics(folder) if row["step"] > 2]
        assert all(row["actor/lr"] == row["critic/lr"] for row in rows)
        return [row["actor/lr"] * 1e3 for row in rows]

    def one(steps, lines=None):
        size, last = "algorithm.ppo_mini_batch_size=8", f"trainer.total_training_steps={steps}"
        train(tiny_run(tiny, tmp_path / "a", *linear, size, last), SILENT if lines is None else lines.append)

    train(tiny_run(tiny, tmp_path / "a", *linear, "trainer.total_training_steps=2"), SILENT)
    one(4, lines := [])
    told = "falls from now on over all 6 updates of a run of 4 steps"
    assert [line for line in lines if "updates" in line] == [
        f"the learning rate of {role}.optim {told}; {role}.optim.lr_decay_steps would fix its end"
        for role in ("actor", "critic")
    ]
    assert rates(tmp_path / "a") == pytest.approx([2 / 6, 1 / 6])
    assert replay(tmp_path / "a", 4, say=SILENT).difference is None
    whole = numbers(tmp_path / "a")
    shutil.rmtree(tmp_path / "a/checkpoints/step_4")
    one(4)
    assert numbers(tmp_path / "a") == whole
    train(fork_plan(tmp_path / "a", 3, [f"trainer.dir={tmp_path}/b", "algorithm.ppo_mini_batch_size=2"]), SILENT)
    assert rates(tmp_path / "b") == pytest.approx([2 / 6, (4 + 3 + 2 + 1) / 4 / 9])


def test_another_algorithm_or_model_in_the_folder_of_a_run(tiny, copy, tmp_path):
    with pytest.raises(RunError, match=r"was trained with sft, and the config asks for grpo: choose another"):
        train(tiny_run(tiny, copy / "a", "algorithm.name=grpo", "rollout.n=2"), SILENT)
    longer, lines = "trainer.total_training_steps=3", []
    moved = shutil.copytree(tiny, tmp_path / "moved")
    train(plan(tiny, copy, f"model.path={moved}", longer), lines.append)
    assert any("with the weights of the checkpoint, although model.path is another one" in line for line in lines)
    deeper = new_model(tmp_path / "deeper", chars=TASKS["reverse"].alphabet, num_hidden_layers=3)
    with pytest.raises(RunError, match=r"'hidden_size'.* differ. The tables model and data decide on the model"):
        train(plan(tiny, copy, f"model.path={deeper}", "trainer.total_training_steps=4"), SILENT)


def test_settings_that_ask_for_other_models_are_named_with_a_way(tiny, copy, tmp_path):
    grpo = lambda folder, *more: tiny_run(tiny, folder, "algorithm.name=grpo", "rollout.n=2", *more)  # noqa: E731
    train(grpo(tmp_path / "g", "trainer.total_training_steps=1"), SILENT)
    longer = grpo(tmp_path / "g", "trainer.total_training_steps=2", "algorithm.use_kl_loss=true")
    refused = r"the config asks for actor, reference \(algorithm.use_kl_loss: False -> True\)\. .* with model.path="
    with pytest.raises(RunError, match=rf"{refused}\S+/step_1/actor \(it is then the reference, too\), in another"):
        train(longer, SILENT)
    origin = copy / "a/checkpoints/step_2"
    with pytest.raises(
        RunError, match=rf"is of sft with .* asks for grpo .* with model.path={origin}/actor, in anoth"
    ):
        train(grpo(tmp_path / "fork", f"trainer.resume_from_path={origin}"), SILENT)


def test_an_evaluation_that_fails_costs_nothing(tiny, copy, run, monkeypatch):
    """The checkpoint of its step is written before; the same command repeats the evaluation and ends alike."""
    shutil.rmtree(copy / "a")
    validate = loop.validate

    def fails(state, *args):
        if state.step == 2:
            raise MemoryError("no room for so many answers")
        return validate(state, *args)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(loop, "validate", fails)
        train(plan(tiny, copy), SILENT)
    assert checkpoints(copy / "a")[0].name == "step_2"
    assert "train/loss" in read_metrics(copy / "a")[-1]
    assert not any(name.startswith(EVALUATED) for name in read_metrics(copy / "a")[-1])
    evaluation = train(plan(tiny, copy), SILENT)
    assert numbers(copy / "a") == numbers(run / "a")
    assert read_answers(copy / "a") == read_answers(run / "a")
    assert evaluation.items() <= read_metrics(run / "a")[-1].items()


def test_a_kill_between_answers_and_metrics_leaves_no_answer_twice(tiny, copy, run):
    file = copy / "a/metrics.jsonl"
    rows = read_metrics(copy / "a")
    rows[-1] = {name: value for name, value in rows[-1].items() if not name.startswith(EVALUATED)}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train(plan(tiny, copy), SILENT)
    assert numbers(copy / "a") == numbers(run / "a")
    assert read_answers(copy / "a") == read_answers(run / "a")


def test_the_link_to_the_model_follows_the_checkpoint_that_a_run_goes_on_from(tiny, copy):
    """A newer one was damaged and removed; until the next save the link must not point at nothing."""
    folder = copy / "a"
    (origin, before) = checkpoints(folder)[:2]
    shutil.rmtree(origin)
    assert not (folder / "model").exists()
    Run(plan(tiny, copy), SILENT).start(1, origin=before)
    assert (folder / "model").resolve() == before / "actor"


def test_what_was_kept_of_steps_that_are_done_again_is_removed(tiny, copy):
    folder = copy / "a"
    names = ("answers/step_{}.parquet", "samples/step_{}.safetensors")
    files = {step: {folder / name.format(step) for name in names} for step in (1, 2)}
    for file in files[1] | files[2]:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    Run(plan(tiny, copy), SILENT).start(1, origin=checkpoints(folder)[1])
    assert all(file.exists() for file in files[1]) and not any(file.exists() for file in files[2])


def test_changed_data_is_reported(tiny, copy, monkeypatch):
    more = "trainer.total_training_steps=3"
    with (copy / "data.jsonl").open("a") as file:
        file.write((copy / "data.jsonl").read_text().splitlines()[0] + "\n")
    # The copied run was made from the file of the original, which is another path.
    first = said(tiny, copy, more)
    assert not any("another content" in line for line in first)
    with (copy / "data.jsonl").open("a") as file:
        file.write((copy / "data.jsonl").read_text().splitlines()[0] + "\n")
    read = []
    monkeypatch.setattr(history, "crc_of", lambda file: read.append(file) or crc_of(file))
    second = said(tiny, copy, "trainer.total_training_steps=4")
    assert f"continuing with another content of {copy / 'data.jsonl'}" in second
    # Data may be large, so a start reads each file for its checksum once.
    assert copy / "data.jsonl" in read and len(read) == len(set(read))
    assert not any("nothing to compare" in line for line in (*first, *second))
    (copy / "a/inputs.json").write_text('{"a": ')
    third = said(tiny, copy, "trainer.total_training_steps=5")
    assert any("a/inputs.json has nothing to compare data, code and versions with" in line for line in third)


def test_the_day_of_a_template_is_that_of_the_run(tiny, copy, monkeypatch):
    """A run that is continued and replayed on other days has the prompts of its first day, and says so."""
    model = shutil.copytree(tiny, copy / "dated")
    day = "{{ 'abcdefgh'[strftime_now('%d') | int] }}"
    said = "{% for m in messages %}{{ m.content }}{{ '>' if m.role == 'user' else eos_token }}{% endfor %}"
    (model / "chat_template.jinja").write_text(day + said)
    rows = [json.loads(line) for line in (copy / "data.jsonl").read_text().splitlines()]
    rows = [row | {"prompt": [{"role": "user", "content": row["prompt"][0]}]} for row in rows]
    (copy / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def losses(folder):
        return [row["train/loss"] for row in read_metrics(folder) if row["step"]]

    def of_day(day, folder, *more):
        monkeypatch.setattr(continuing, "run_day", lambda: f"2026-01-0{day}")
        lines = []
        options = (f"model.path={model}", f"trainer.dir={copy / folder}", "trainer.save_freq=1", *more)
        train(plan(tiny, copy, *options), lines.append)
        return lines, losses(copy / folder)

    first, _ = of_day(1, "b", "trainer.total_training_steps=1")
    second, continued = of_day(2, "b")
    assert continued == of_day(4, "c", "data.date=2026-01-01")[1]
    assert continued[:1] != of_day(2, "d", "trainer.total_training_steps=1")[1]
    line = "note: the chat template can ask for the date: it gets 2026-01-01 in this run, on all days (data.date)"
    assert line in first and line in second and not any("another setting" in one for one in second[:3])
    assert replay(copy / "b", 2, say=SILENT).difference is None
    forked = fork_plan(copy / "b", 1, ["trainer.total_training_steps=2"])
    train(forked, SILENT)
    assert losses(Path(forked.trainer.dir)) == continued
    (model / "chat_template.jinja").write_text("{{ ['a', 'b'] | random }}")
    with pytest.raises(ModelError, match="draws random text with 'random'"):
        of_day(3, "f")


def test_the_config_of_a_copied_run_is_not_that_of_the_run_it_was_copied_from(run, copy, capsys):
    """A run that was moved would start once more in the folder that it left."""
    config, longer = str(copy / "a/config.toml"), "trainer.total_training_steps=3"
    assert main(["train", config, longer]) == 2
    assert f"its trainer.dir is {run / 'a'}. Add trainer.dir={copy / 'a'} to continue" in capsys.readouterr().err
    (copy / "a/next.toml").write_text(Path(config).read_text())
    assert main(["train", str(copy / "a/next.toml"), "--check"]) == 0, "a file of one's own"
    assert main(["train", config, longer, f"trainer.dir={copy / 'a'}"]) == 0
    assert main(["train", config, longer, f"trainer.dir={copy / 'b'}"]) == 0
    assert [len(read_metrics(folder)) for folder in (run / "a", copy / "a", copy / "b")] == [3, 4, 4]


def test_a_new_run_does_not_overwrite_the_responses_of_another(tiny, tmp_path):
    def one(name, texts, *more):
        more = ["trainer.total_training_steps=2", f"trainer.rollout_data_dir={tmp_path / texts}", *more]
        return tiny_run(tiny, tmp_path / name, *more)

    train(one("a", "texts"), SILENT)
    written = (tmp_path / "texts/2.jsonl").read_bytes()
    train(one("a", "texts", "trainer.total_training_steps=3"), SILENT)
    for start in (one("b", "texts"), fork_plan(tmp_path / "a", 2)):
        with pytest.raises(ConfigError, match=rf"texts has the responses of the run {tmp_path / 'a'}, and this run"):
            train(start, SILENT)
    shutil.copytree(tmp_path / "a", tmp_path / "copy", symlinks=True)
    with pytest.raises(ConfigError, match="texts has the responses of the run"):
        train(one("copy", "texts", "trainer.total_training_steps=4"), SILENT)
    assert (tmp_path / "texts/2.jsonl").read_bytes() == written and (tmp_path / "texts/3.jsonl").is_file()
    more = [f"trainer.rollout_data_dir={tmp_path / 'more'}", "trainer.total_training_steps=3"]
    train(fork_plan(tmp_path / "a", 2, more), SILENT)
    shutil.rmtree(tmp_path / "a")  # the copy is now a run that was moved
    train(one("copy", "texts", "trainer.total_training_steps=4"), SILENT)
    assert (tmp_path / "texts/4.jsonl").is_file()
    for name in ("inside", "copied"):  # a folder of a run's own goes with it
        train(one(name, f"{name}/texts", "trainer.total_training_steps=3"), SILENT)
        if name == "inside":
            shutil.copytree(tmp_path / "inside", tmp_path / "copied", symlinks=True)
            shutil.rmtree(tmp_path / "copied/checkpoints/step_3")
    assert [file.name for file in (tmp_path / "more").glob("*.jsonl")] == ["3.jsonl"]


@pytest.mark.parametrize("at", ["step 2/", "evaluation"])
def test_a_reward_that_fails_costs_no_step(at, tiny, tmp_path):
    flag, lines = tmp_path / "fails", []
    (tmp_path / "r.py").write_text(
        "import os\n\ndef score(solution_str, extra_info, **more):\n"
        f"    assert not os.path.exists({str(flag)!r})\n    return float(len(solution_str))\n"
    )
    more = ["algorithm.name=grpo", "rollout.n=2", f"reward.functions={tmp_path}/r.py:score", "trainer.save_freq=-1"]
    more += ["trainer.log_freq=1", "trainer.total_training_steps=4", "trainer.test_freq=3"]
    start = tiny_run(tiny, tmp_path / "a", *more)
    calls = iter(range(9))

    def say(line):
        lines.append(line)
        if line.startswith("step 2/") and at != "evaluation":
            flag.write_text("")

    with pytest.MonkeyPatch.context() as patch:
        validate = loop.validate

        def failing(*args, **named):
            if at == "evaluation" and next(calls) == 1:
                flag.write_text("")
            return validate(*args, **named)

        patch.setattr(loop, "validate", failing)
        with pytest.raises(RewardError):
            train(start, say)
    step = 3 if at == "evaluation" else 2
    assert f"saved after step {step}" in lines
    flag.unlink()
    train(start, (lines := []).append)
    assert any(f"after step {step}, from" in line for line in lines) and not any("done again" in one for one in lines)


def test_a_run_without_its_config_is_not_continued_blindly(tiny, copy):
    more = ("trainer.total_training_steps=3", "trainer.seed=5")
    text = (copy / "a/config.toml").read_text()
    (copy / "a/config.toml").unlink()
    with pytest.raises(RunError, match=r"no config.toml. Without it nobody knows .*trainer.resume_from_path="):
        train(plan(tiny, copy, *more), SILENT)
    (copy / "a/config.toml").write_text(text.replace("seed = 0", "sede = 0"))
    with pytest.raises(RunError, match=r"unknown key trainer.sede.*; change the file. Without it"):
        train(plan(tiny, copy, *more), SILENT)


def test_saves_and_evaluations_count_from_the_beginning_of_the_run(tiny, copy):
    """The run was continued after step 2, between two multiples."""
    every = ("trainer.save_freq=3", "trainer.test_freq=3", "trainer.max_ckpt_to_keep=9")
    said(tiny, copy, "trainer.total_training_steps=5", *every)
    assert [saved_step(one) for one in checkpoints(copy / "a")][:3] == [5, 3, 2]
    evaluated = [row["step"] for row in read_metrics(copy / "a") if any(name.startswith(EVALUATED) for name in row)]
    assert evaluated == [0, 2, 3, 5]


@pytest.mark.parametrize(
    ("kept", "lost"), [(3, None), (2, "step 2 is"), (1, "steps 1 to 2 are"), (0, "steps 1 to 2 are")]
)
def test_lost_lines_of_the_log_are_reported(tiny, copy, kept, lost):
    file = copy / "a/metrics.jsonl"
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines()[:kept]))
    if not kept:
        file.unlink()
    lines = said(tiny, copy, "trainer.total_training_steps=3")
    told = [line.partition("has lost lines: ")[2] for line in lines if "has lost lines" in line]
    assert told == ([] if lost is None else [f"{lost} in the checkpoint step_2, but not in the log"])
    assert read_metrics(copy / "a")[-1]["step"] == 3


def test_nothing_is_said_of_a_run_that_is_refused(tiny, copy):
    lines = []
    with pytest.raises(RunError, match="was trained with sft, and the config asks for ppo"):
        train(plan(tiny, copy, "algorithm.name=ppo", "trainer.total_training_steps=3"), lines.append)
    assert not any("continuing" in line for line in lines)


def test_what_is_no_checkpoint_is_told_apart(tiny, run, tmp_path):
    newest = run / "a/checkpoints/step_2"
    for path, advice in (
        (run / "a", f"name one of its run, such as {newest}"),
        (run / "a/checkpoints", f"name one of its run, such as {newest}"),
        (newest / "actor", f"it is a model in one: name {newest}"),
        (tiny, f"it is a model: set model.path={tiny}"),
        (tmp_path, "it has no checkpoint.json"),
    ):
        with pytest.raises(ConfigError) as error:
            train(tiny_run(tiny, tmp_path / "fork", *SFT, f"trainer.resume_from_path={path}"), SILENT)
        assert f"{path} is not a checkpoint; {advice}" in str(error.value)


def test_a_damaged_checkpoint_is_not_forked(tiny, copy, tmp_path):
    (copy / "a/checkpoints/step_2/actor/config.json").unlink()
    more = ("trainer.total_training_steps=3", f"trainer.resume_from_path={copy}/a/checkpoints/step_2")
    with pytest.raises(RunError, match=r"config.json is missing; .*step_1 is whole: fork from that step instead"):
        train(tiny_run(tiny, tmp_path / "fork", "algorithm.name=sft", *more), SILENT)


def test_a_checkpoint_that_was_copied_elsewhere_is_still_one(tiny, run, tmp_path, monkeypatch):
    """Its folder has no run around it, and may have any name."""
    shutil.copytree(run / "a/checkpoints/step_2", tmp_path / "kept")
    more = ("trainer.total_training_steps=3", f"trainer.resume_from_path={tmp_path}/kept")
    lines = []
    train(tiny_run(tiny, tmp_path / "fork", "algorithm.name=sft", *more), lines.append)
    assert any("after step 2" in line for line in lines)
    assert [row["step"] for row in read_metrics(tmp_path / "fork")] == [3]


def test_nothing_is_written_through_links(tiny, copy, tmp_path):
    """Somebody who may write into the folder must not choose which files this user overwrites."""
    target = tmp_path / "precious"
    target.write_text("precious")
    (copy / "a/.config.toml.writing").symlink_to(target)
    train(plan(tiny, copy, "trainer.total_training_steps=3"), SILENT)
    assert target.read_text() == "precious" and "[trainer]" in (copy / "a/config.toml").read_text()
    (copy / "a/.lock").unlink()
    (copy / "a/.lock").symlink_to(target)
    with pytest.raises(RunError, match=r"\.lock is a symbolic link; remove it"):
        train(plan(tiny, copy, "trainer.total_training_steps=4"), SILENT)
    assert target.read_text() == "precious"
