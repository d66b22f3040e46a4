"""Data and rewards that are allowed but hardly meant: one sentence each, once."""

import json

import attrs
import pytest
from run_configs import TINY, tiny_run

from verl_fn.backends.hf.tokenizer import read_tokenizer
from verl_fn.cli import main
from verl_fn.config import load, make_plan
from verl_fn.runs import RunError
from verl_fn.runs.folder import Run
from verl_fn.runs.loop import _end_if_skipping, train
from verl_fn.runs.progress import equal_rewards, without_advantages, without_gradient


def test_rewards_that_teach_nothing():
    def report(low, high, advantages):
        names = ("critic/score/min", "critic/score/max", "critic/advantages/min", "critic/advantages/max")
        return dict(zip(names, (low, high, -advantages, advantages), strict=True))

    for described in (equal_rewards, without_advantages):
        assert described(1, report(0.0, 1.0, 1.0)) == "" and described(1, {"train/loss": 1.0}) == ""
    assert equal_rewards(4, report(0.5, 0.5, 0.3)) == "all rewards of step 4 are 0.5"
    assert equal_rewards(4, {"critic/score/min": 0.5, "critic/score/max": 0.5}) == "", (
        "nothing is learned from rewards"
    )
    assert without_advantages(4, report(0.5, 0.5, 0.3)) == equal_rewards(4, report(0.5, 0.5, 0.0)) == ""
    assert "the policy learns nothing from it" in without_advantages(4, report(0.5, 0.5, 0.0))
    for low, high, rounded in ((1e20, 2e20, True), (-3e6, 0.0, True), (1000.0, 1000.0001, True), (0.1, 1.0, False)):
        said = without_advantages(4, report(low, high, 0.0))
        assert "they differ between prompts only" in said and ("rounded away" in said) == rounded


def test_a_gradient_of_0_is_told_unless_equal_rewards_are_the_reason():
    none = {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0}
    equal = none | {"critic/score/min": 1.0, "critic/score/max": 1.0}
    for more, told in (({}, True), (none, True), (equal, False), (equal | {"critic/advantages/max": 0.5}, True)):
        assert bool(without_gradient(3, {"actor/grad_norm": 0.0} | more)) is told
        assert without_gradient(3, {"actor/grad_norm": 0.1} | more) == ""
    assert without_gradient(3, {"train/grad_norm": 0.0}) and not without_gradient(3, {"critic/grad_norm": 0.0})


def test_a_run_says_each_of_them_once(tiny, tmp_path, capsys):
    rows = [{"data_source": "mine", "prompt": "ab>", "reward_model": {"ground_truth": "ba"}}] * 2
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text("def same(data_source, solution_str, ground_truth, extra_info): return 1\n")
    more = [f"data.train_files={tmp_path}/a.jsonl", f"reward.functions={tmp_path}/mine.py:same"]
    more += ["algorithm.name=grpo", "rollout.n=2", f"trainer.dir={tmp_path}/run"]
    lines = []
    train(tiny_run(tiny, tmp_path / "run", *more), lines.append)
    notes = [line for line in lines if line.startswith("note: ")]
    assert [line.split()[1] for line in notes] == ["data.train_files:", "data.train_batch_size", "all", "in"]
    assert "all rewards of step 1 are 1, and all advantages are 0" in notes[2]
    (tmp_path / "empty.toml").write_text("")
    args = [*TINY, *more, f"model.path={tiny}", f"trainer.dir={tmp_path}/other"]
    assert main(["train", str(tmp_path / "empty.toml"), *args, "--check"]) == 0
    assert "note: data.train_files: 1 of 2 prompts repeat an earlier one" in capsys.readouterr().out


def test_a_run_says_that_its_batch_is_not_full(tiny, tmp_path):
    """Only one of the two problems has responses of different rewards, and one call is allowed."""
    rows = [
        {"data_source": "mine", "prompt": text, "reward_model": {"ground_truth": text}} for text in ("ab>", "ba>")
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(
        "def longer(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(map(ord, solution_str)) if ground_truth == 'ab>' else 1\n"
    )
    more = [f"data.train_files={tmp_path}/a.jsonl", f"reward.functions={tmp_path}/mine.py:longer", "rollout.n=8"]
    more += ["algorithm.name=dapo", "algorithm.filter_groups.max_num_gen_batches=1", "data.train_batch_size=2"]
    lines = []
    train(tiny_run(tiny, tmp_path / "run", *more, "algorithm.ppo_mini_batch_size=2"), lines.append)
    notes = [line for line in lines if "the batch lacks 1 of data.train_batch_size groups" in line]
    assert len(notes) == 1 and "50.0% of the groups" in notes[0]


LEAVES_OUT = """
import attrs
from verl_fn import Algorithm, cross_entropy

@attrs.frozen(kw_only=True)
class Options:
    pass

def make(options: Options):
    def learn(state, experience, workers):
        batch = experience.batch.with_tokens(loss_weight=0.0 * experience.batch["response_mask"])
        grads, metrics = workers.trainers["actor"].forward_backward(state.actor, batch, cross_entropy())
        actor, more = workers.trainers["actor"].apply_update(state.actor, grads)
        return attrs.evolve(state, actor=actor, step=state.step + 1), workers.get(metrics) | workers.get(more)

    return Algorithm(learn=learn)
"""


def test_a_run_notes_its_first_step_without_a_gradient(tiny, tmp_path):
    (tmp_path / "own.py").write_text(LEAVES_OUT)
    lines = []
    own = [f"algorithm.name={tmp_path}/own.py:make", "rollout.n=2", "trainer.total_training_steps=2"]
    train(tiny_run(tiny, tmp_path / "run", *own), lines.append)
    assert [line.partition(":")[0] for line in lines if "learns nothing" in line] == ["note"]
    (said,) = (line for line in lines if "the gradient of step 1 is 0, so the model learns nothing from it" in line)
    assert "learn left out" in said


@pytest.mark.parametrize("more", [["--check"], []])
def test_code_that_is_refused_gets_no_note(more, tiny, tmp_path, capsys):
    (tmp_path / "empty.toml").write_text("")
    own = ["algorithm.name=grpo", "rollout.n=2", f"algorithm.policy_loss={tmp_path}/bad.py:nothere"]
    args = [*TINY, *own, f"model.path={tiny}", f"trainer.dir={tmp_path}/run", *more]
    for code, said in (("", "has no"), ("def nothere(): return 1", "nothere")):
        (tmp_path / "bad.py").write_text(code)
        assert main(["train", str(tmp_path / "empty.toml"), *args]) == 2
        out, err = capsys.readouterr()
        assert "note: " not in out and said in err


def test_repeated_characters_count_once(tmp_path):
    assert main(["new-model", str(tmp_path / "m"), "--chars", "abcbaa", "hidden_size=32"]) == 0
    tokenizer = read_tokenizer(tmp_path / "m")
    assert tokenizer.encode("cab") == [6, 4, 5] and len(tokenizer) == 7


def test_only_steps_in_a_row_without_any_update_end_a_run(tmp_path):
    plan = make_plan(load(overrides=["model.path=m", f"trainer.dir={tmp_path}", "trainer.max_skipped_steps=2"]))
    run, skipped = Run(plan, lambda line: None), {}
    for step, share in enumerate((1.0, 0.5, 1.0, 0.0, 1.0), 1):
        _end_if_skipping(skipped, {"actor/update_skipped": share, "critic/update_skipped": 0.0}, step, plan, run)
    with pytest.raises(RunError, match=r"gradients of the actor .* in any update of the last 2 steps, up to step 6"):
        _end_if_skipping(skipped, {"actor/update_skipped": 1.0}, 6, plan, run)
    once = attrs.evolve(plan, trainer=attrs.evolve(plan.trainer, max_skipped_steps=1))
    # A role is told by its name, and the one model of fine-tuning as the actor.
    for family, role in (("critic", "critic"), ("train", "actor")):
        with pytest.raises(RunError, match=f"gradients of the {role} "):
            _end_if_skipping({}, {f"{family}/update_skipped": 1.0}, 1, once, run)
