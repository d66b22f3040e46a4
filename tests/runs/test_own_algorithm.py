"""An algorithm of the user on the command line: its options, its numbers, resume after a kill, fork and replay."""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import attrs
import pytest
from run_configs import TINY

from verl_fn.algorithms import AlgorithmError
from verl_fn.algorithms.own import check_fields
from verl_fn.cli import main
from verl_fn.config import ConfigError, load, make_plan
from verl_fn.config.names import load_object
from verl_fn.pool.worker import LoadError, find
from verl_fn.rewards import RewardError
from verl_fn.runs import RunError
from verl_fn.runs.check_run import check_run, rehearse
from verl_fn.runs.checkpoints import checkpoints
from verl_fn.runs.checks import check_code
from verl_fn.runs.logs import read_metrics
from verl_fn.runs.loop import train
from verl_fn.runs.memory import GIB
from verl_fn.runs.replay import replay

ROOT = Path(__file__).parents[2]
RAFT = f"algorithm.name={ROOT}/examples/custom_algorithm.py:raft"
TIMED = ("timing_s/", "perf/time_per_step", "perf/throughput")


def silent(line):
    pass


def overrides(model, folder, *more):
    mini = "algorithm.ppo_mini_batch_size=4"
    shared = [one for one in TINY if one != mini]
    return [*shared, RAFT, "rollout.n=2", f"model.path={model}", f"trainer.dir={folder}", *more]


def numbers(folder):
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in read_metrics(folder)]


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_example_gives_the_same_numbers_by_itself_and_by_the_command_line(tmp_path):
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples/custom_algorithm.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    scores = example.main(steps=3)
    arguments = [f"trainer.dir={tmp_path}", "trainer.total_training_steps=3", "data.val_size=8", "driver.device=cpu"]
    recipe = ROOT / "recipes/raft_count.toml"
    assert main(["train", str(recipe), *arguments, RAFT, "--quiet"]) == 0
    assert [row["critic/score/mean"] for row in read_metrics(tmp_path) if row["step"] > 0] == scores


def test_a_killed_run_goes_on_bitwise_and_replays(warm, tiny, tmp_path):
    steps = ["trainer.total_training_steps=6", "trainer.journal=digests"]
    train(make_plan(load(overrides=overrides(tiny, tmp_path / "whole", *steps))), silent)
    recipe = tmp_path / "empty.toml"
    recipe.write_text("")
    arguments = ["train", str(recipe), *overrides(tiny, tmp_path / "killed", *steps)]
    child = subprocess.Popen([warm, "-m", "verl_fn.cli", *arguments], stdout=subprocess.PIPE)
    while len(checkpoints(tmp_path / "killed")) < 2 and child.poll() is None:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()  # until the process that the warm Python has forked is gone too
    assert main(arguments) == 0
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    ours, theirs = (files(tmp_path / name / "checkpoints/step_6") for name in ("killed", "whole"))
    assert ours == theirs
    shutil.rmtree(tmp_path / "killed/checkpoints/step_6")
    replayed = replay(tmp_path / "killed", 6, say=silent)
    assert replayed.difference is None and replayed.compared["state leaves"] > 10


REMEMBERS = """
import attrs, torch
from verl_fn.algorithms import Algorithm
from verl_fn.algorithms.experience import sample_and_score
from verl_fn.state import Key, Node, node
from verl_fn.steps import aggregate, cross_entropy

@attrs.frozen(kw_only=True)
class Options:
    pass

@node
class State(Node):
    actor: object
    key: Key
    step: int
    baseline: float
    recent: torch.Tensor
    last: torch.Tensor

def make(options: Options):
    def init(states, key):
        return State(states["actor"], key, step=0, baseline=0, recent=torch.zeros(2), last=torch.zeros(1))

    def sample(state, problems, w):
        return sample_and_score(state.actor, problems, w, state.key.fold_in(state.step), state.step)

    def learn(state, experience, w):
        batch = aggregate(experience.batch, "token-mean")
        grads, metrics = w.trainers["actor"].forward_backward(state.actor, batch, cross_entropy())
        actor, more = w.trainers["actor"].apply_update(state.actor, grads)
        recent = torch.cat([state.recent[1:], torch.tensor([state.step + 0.25])])
        report = {"baseline": state.baseline, "oldest": recent[0]}
        # The last field is a part of the memory of the field before.
        return State(actor, state.key, state.step + 1, state.step + 0.5, recent, recent[1:]), report

    return Algorithm(init=init, sample=sample, learn=learn)
"""


def test_the_algorithm_with_a_reference_on_the_page_trains_and_its_state_must_be_a_node(tiny, tmp_path):
    page = (ROOT / "docs/your_own.md").read_text()
    code = page[page.index("from typing import Any\n\nimport attrs\n\nfrom verl_fn import Algorithm") :].partition(
        "```"
    )[0]
    options = "@attrs.frozen(kw_only=True)\nclass Options:\n    pass\n\n\ndef mine(options: Options)"
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(code.replace("def mine(options: Options)", options))
    bad.write_text(good.read_text().replace("@node\nclass State(Node)", "@attrs.frozen\nclass State"))
    lora = ["actor.lora_rank=2", "trainer.total_training_steps=2"]
    train(make_plan(load(overrides=overrides(tiny, tmp_path / "run", f"algorithm.name={good}:mine", *lora))), silent)
    assert len(read_metrics(tmp_path / "run")) >= 2
    plan = make_plan(load(overrides=overrides(tiny, tmp_path / "no", f"algorithm.name={bad}:mine")))
    for refuses in (check_run, lambda plan: train(plan, silent)):
        with pytest.raises(AlgorithmError, match=r"write @node above class State\(Node\)"):
            refuses(plan)
    for wrong, said in (
        (("@node\nclass State(Node)", "@attrs.frozen\nclass State(Node)"), r"write @node above class State\(Node\)"),
        (("@node\nclass State(Node)", "class State(Node)"), r"has no fields yet: write @node, .*class State\(Node\)"),
        (
            (', "reference": Role(trained=False, copy_of="actor")', ""),
            "there is no role 'reference', but actor; in a",
        ),
    ):
        name = f"bad_{len(said)}.py"
        (tmp_path / name).write_text(good.read_text().replace(*wrong))
        own = make_plan(load(overrides=overrides(tiny, tmp_path / "no", f"algorithm.name={tmp_path / name}:mine")))
        with pytest.raises((AlgorithmError, TypeError), match=said):
            check_run(own)


def test_numbers_and_tensors_of_its_state_are_in_the_checkpoint(tiny, tmp_path):
    """A number that begins as 0, and a tensor outside the training states."""
    file = tmp_path / "remembers.py"
    file.write_text(REMEMBERS)
    for name, stops in (("whole", [4]), ("continued", [2, 4])):
        for steps in stops:
            more = [f"algorithm.name={file}:make", f"trainer.total_training_steps={steps}"]
            train(make_plan(load(overrides=[*overrides(tiny, tmp_path / name), *more])), silent)
    assert numbers(tmp_path / "continued") == numbers(tmp_path / "whole")
    last = numbers(tmp_path / "continued")[-1]
    assert (last["actor/baseline"], last["actor/oldest"]) == (2.5, 2.25)


TWICE = """
import attrs
from verl_fn import Algorithm
from verl_fn.config import Outline
from verl_fn.steps import aggregate, cross_entropy

@attrs.frozen(kw_only=True)
class Options:
    counted: bool = False

def make(options: Options):
    def learn(state, experience, w):
        batch, actor = aggregate(experience.batch, "token-mean"), w.trainers["actor"]
        new = state.actor
        for _ in range(2):
            grads, metrics = actor.forward_backward(new, batch, cross_entropy())
            new, more = actor.apply_update(new, grads)
        return attrs.evolve(state, actor=new, step=state.step + 1), w.get(metrics) | w.get(more)

    twice = {"updates": lambda role, prompts, steps: 2 * steps} if options.counted else {}
    return Algorithm(learn=learn, outline=Outline(**twice))
"""


@pytest.mark.parametrize("schedule", ["linear", "constant"])
@pytest.mark.parametrize("counted", [False, True])
def test_updates_that_the_outline_does_not_count_are_named_if_the_rate_falls(schedule, counted, tiny, tmp_path):
    (tmp_path / "twice.py").write_text(TWICE)
    own = [f"algorithm.name={tmp_path}/twice.py:make", f"actor.optim.lr_scheduler_type={schedule}"]
    words = [*overrides(tiny, tmp_path / "run"), *own, *["algorithm.counted=true"] * counted]
    said = []
    train(make_plan(load(overrides=words)), said.append)
    named = [line for line in said if "updates up to step" in line]
    assert len(named) == (schedule == "linear" and not counted), said
    assert all("had 2 updates up to step 1, and" in n and "steps: 2 * steps)" in n for n in named)
    last = read_metrics(tmp_path / "run")[-1]
    if schedule == "linear":
        assert (last["actor/lr"] == 0.0) is not counted


def test_an_outline_that_counts_from_a_step_on_gives_the_run_its_whole_decay(tiny, tmp_path):
    (tmp_path / "twice.py").write_text(TWICE)
    own = [f"algorithm.name={tmp_path}/twice.py:make", "actor.optim.lr_scheduler_type=linear", "actor.optim.lr=1e-3"]
    words, said = [*overrides(tiny, tmp_path / "run"), *own], []
    for more in (["trainer.total_training_steps=2"], ["trainer.total_training_steps=5", "algorithm.counted=true"]):
        said.clear()
        train(make_plan(load(overrides=[*words, *more])), said.append)
    assert not [line for line in said if "updates up to step" in line]
    assert read_metrics(tmp_path / "run")[-1]["actor/lr"] == pytest.approx(1e-3 / 10)


def test_the_refreshed_reference_on_the_page_is_saved_and_replayed(tiny, tmp_path):
    page = (ROOT / "docs/your_own.md").read_text()
    code = page[page.index("from typing import Any\n\nimport attrs\n\nfrom verl_fn import Algorithm") :]
    refreshing = code[code.index("def refreshed") :].partition("```")[0].replace("% 20", "% 2")
    options = "@attrs.frozen(kw_only=True)\nclass Options:\n    pass\n\n\ndef mine(options: Options)"
    code = code.partition("```")[0].replace("def mine(options: Options)", f"{refreshing}\n\n{options}")
    (tmp_path / "own.py").write_text(code.replace("learn=learn,", "learn=learn_and_refresh,"))
    more = [f"algorithm.name={tmp_path}/own.py:mine", "trainer.save_freq=2", "actor.optim.lr=0.1"]
    train(make_plan(load(overrides=overrides(tiny, tmp_path / "run", *more))), silent)
    far = {row["step"]: row["actor/kl_loss"] for row in read_metrics(tmp_path / "run") if row["step"]}
    assert far[1] == far[3] == 0.0 < far[2]
    assert replay(tmp_path / "run", 3, say=silent).difference is None


def test_the_algorithm_with_two_updates_on_the_page_trains_and_counts_them(tiny, tmp_path):
    page = (ROOT / "docs/your_own.md").read_text()
    code = page[page.index("import attrs\n\nfrom verl_fn import Algorithm, Outline, aggregate") :]
    options = "@attrs.frozen\nclass Options:\n    pass\n\n\ndef halving(options: Options)"
    (tmp_path / "own.py").write_text(code.partition("```")[0].replace("def halving(options: Options)", options))
    own = [f"algorithm.name={tmp_path}/own.py:halving", "actor.optim.lr_scheduler_type=linear"]
    said = []
    train(make_plan(load(overrides=[*overrides(tiny, tmp_path / "run"), *own])), said.append)
    assert not [line for line in said if "updates up to step" in line]
    last = read_metrics(tmp_path / "run")[-1]
    # The mean of the last two of six updates: 1/3 and 1/6 of the rate.
    assert last["actor/lr"] == pytest.approx(1e-3 / 4) and last["actor/pg_clipfrac"] >= 0.0


def test_its_options_are_the_algorithm_table(tiny, tmp_path, capsys):
    cfg = load(overrides=overrides(tiny, tmp_path, "algorithm.only_best=false"))
    assert cfg.algorithm.options.only_best is False
    with pytest.raises(ConfigError, match=r"unknown key algorithm.only_bst; did you mean algorithm.only_best\?"):
        load(overrides=overrides(tiny, tmp_path, "algorithm.only_bst=false"))
    with pytest.raises(ConfigError, match=r"algorithm.only_best: expected true or false, got 3"):
        load(overrides=overrides(tiny, tmp_path, "algorithm.only_best=3"))
    with pytest.raises(ConfigError, match=r"rollout.n is 1: .*:raft compares responses .* needs at least 2"):
        make_plan(load(overrides=overrides(tiny, tmp_path, "rollout.n=1")))
    assert main(["config", *overrides(tiny, tmp_path)]) == 0
    assert "only_best = true" in capsys.readouterr().out
    assert main(["list", RAFT.partition("=")[2]]) == 0
    assert "learn from the best answers alone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "has no 'mine'"),
        ("def mine(options): ...", "must be a function whose first parameter is annotated with an attrs class"),
        ("mine = 3", "must be a function whose first parameter is annotated"),
        ("1/0", "cannot be imported: ZeroDivisionError: division by zero (at {folder}/own.py:1)"),
        ("\ndef mine(:", "cannot be imported: SyntaxError: invalid syntax (own.py, line 2) (at {folder}/own.py:2)"),
    ],
)
def test_what_is_no_algorithm_is_refused(source, message, tmp_path):
    (tmp_path / "own.py").write_text(source)
    with pytest.raises(ConfigError) as error:
        load(overrides=[f"algorithm.name={tmp_path}/own.py:mine"])
    assert message.format(folder=tmp_path) in str(error.value) and "algorithm.name" in str(error.value)


OWN_PARTS = """
import torch
from verl_fn.steps import loss

@loss(needs=["logprobs"])
def reinforce(outputs, batch):
    return -batch["advantages"] * outputs.logprobs, {}

@loss(needs=["logprobs"], level="row", together="group")
def by_group(outputs, batch):
    return -batch.sum_rows(outputs.logprobs), {}

def alone(batch):
    return batch["token_level_rewards"], batch["token_level_rewards"]

def half(batch):
    return batch.with_tokens(advantages=batch["token_level_rewards"])

def signs(batch):
    rows = batch.sum_rows(batch["token_level_rewards"]) - 0.25
    return batch.with_tokens(advantages=batch.spread(rows.sign()) * batch["response_mask"])
"""


def test_a_loss_and_an_estimator_of_ones_own(tiny, tmp_path):
    (tmp_path / "parts.py").write_text(OWN_PARTS)
    more = [
        "algorithm.name=grpo", "rollout.n=2", f"model.path={tiny}", "trainer.val_before_train=false",
        f"algorithm.policy_loss={tmp_path}/parts.py:reinforce", f"algorithm.adv_estimator={tmp_path}/parts.py:signs",
    ]  # fmt: skip
    train(make_plan(load(overrides=[*TINY, *more, f"trainer.dir={tmp_path}/run"])), silent)
    rows = [row for row in read_metrics(tmp_path / "run") if row["step"] > 0]
    assert len(rows) == 3 and all("actor/pg_clipfrac" not in row for row in rows)
    assert {abs(row["critic/advantages/max"]) for row in rows} == {1.0}
    for name, message in (
        ("signs", "signs is a function, where a Loss is expected"),
        ("by_group", "keeps rows together by 'group'"),
    ):
        wrong = [*TINY, *more, f"algorithm.policy_loss={tmp_path}/parts.py:{name}", f"trainer.dir={tmp_path}/wrong"]
        with pytest.raises(ConfigError, match=rf"algorithm.policy_loss: .*{message}"):
            train(make_plan(load(overrides=wrong)), silent)
    for name, message in (("alone", "returns a tuple; an estimator returns"), ("half", "does not write returns")):
        # A critic learns from returns.
        wrong = [
            *TINY,
            *more,
            f"algorithm.name={'ppo' if name == 'half' else 'grpo'}",
            f"algorithm.adv_estimator={tmp_path}/parts.py:{name}",
            f"trainer.dir={tmp_path}/{name}",
        ]
        with pytest.raises(ConfigError, match=rf"algorithm.adv_estimator: .*{message}"):
            train(make_plan(load(overrides=wrong)), silent)


READERS = """
from verl_fn.steps import loss

seen = []

def reader(name="advantages"):
    @loss(needs=["logprobs"])
    def read(outputs, batch):
        seen.append({*batch.per_token, *batch.per_row})
        return -batch["advantages"] * outputs.logprobs * (batch[name] != -1e9), {}
    return read

def estimate(batch, name="token_level_rewards"):
    seen.append({*batch.per_token, *batch.per_row})
    return batch.with_tokens(advantages=batch["token_level_rewards"], returns=batch[name])
"""


def fields_of_run(tiny, folder, *more):
    """The fields that a loss and an estimator of one's own find: as the check supposes, and in a run."""
    (folder / "readers.py").write_text(READERS)
    file = folder / "readers.py"
    own = [f"algorithm.policy_loss={file}:reader", f"algorithm.adv_estimator={file}:estimate"]
    plan = make_plan(load(overrides=[*overrides_of_parts(tiny, folder), *own, *more]))
    seen = load_object(f"{file}:seen", "a test")
    seen.clear()
    check_fields(plan.options)
    supposed = [set(fields) for fields in seen]
    seen.clear()
    train(plan, silent)
    # Once a loss is tried without them, to see whether it reads ratios.
    return supposed, [fields for fields in seen if "old_log_probs" in fields]


def overrides_of_parts(tiny, folder):
    one = ["trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.test_freq=0", "rollout.n=2"]
    return [*TINY, "algorithm.ppo_mini_batch_size=8", *one, f"model.path={tiny}", f"trainer.dir={folder}/run"]


@pytest.mark.parametrize("more", [["algorithm.name=grpo"], ["algorithm.name=grpo", "algorithm.use_kl_loss=true"], []])
def test_the_fields_that_a_check_supposes_are_in_a_run(more, tiny, tmp_path):
    supposed, seen = fields_of_run(tiny, tmp_path, *more)
    of_rewards_and_environments = {
        "env_end",
        "env_score",
        "env_acc",
        "env_turns",
        "acc",
        "pred",
        "row_weight",
        "conversation",
    }
    for weighted, fields in zip((True, False), supposed, strict=True):
        in_run = set.intersection(*(found for found in seen if ("loss_weight" in found) is weighted))
        assert fields - in_run <= of_rewards_and_environments


@pytest.mark.parametrize(
    ("part", "name", "said"),
    [
        ("policy_loss", "ref_log_prob", "algorithm.use_kl_loss or use_kl_in_reward writes it"),
        ("policy_loss", "values", "algorithm.name=ppo"),
        ("policy_loss", "old_logprobs", r"did you mean old_log_probs\?"),
        ("adv_estimator", "advantages", "gets a batch without it"),
        ("adv_estimator", "rewards_at_token_level", None),
        ("policy_loss", "ref_log_prob", None),
    ],
)
def test_a_field_that_a_run_lacks_is_named_before_it(part, name, said, tiny, tmp_path):
    (tmp_path / "readers.py").write_text(READERS)
    function = "reader" if part == "policy_loss" else "estimate"
    own = [f"algorithm.{part}={tmp_path}/readers.py:{function}", f'algorithm.{part}_kwargs={{name = "{name}"}}']
    kl = "algorithm.use_kl_loss=" + str(said is None).lower()
    plan = make_plan(load(overrides=[*overrides_of_parts(tiny, tmp_path), "algorithm.name=grpo", kl, *own]))
    if said is None:
        # A reward may write such a field; and with the option, the field is there.
        check_code(plan)
        return
    with pytest.raises(
        ConfigError, match=rf"algorithm.{part}: .*{function}: the batch has no field '{name}'; .*{said}"
    ):
        check_code(plan)


@pytest.mark.parametrize(
    ("functions", "name", "said"),
    [
        (True, "reward/style", None),
        (True, "reward/stile", r"did you mean reward/style\?"),
        (True, "reward/length", None),
        (False, "reward/style", "it has acc, "),
    ],
)
def test_a_reward_that_no_function_gives_is_named_before_a_run(functions, name, said, tiny, tmp_path, capsys):
    (tmp_path / "readers.py").write_text(READERS.replace("returns=batch[name]", "returns=batch.spread(batch[name])"))
    (tmp_path / "rewards.py").write_text("def judge(**row): return {'score': 1.0, 'acc': 1.0, 'style': 2.0}\n")
    own = [
        f"algorithm.adv_estimator={tmp_path}/readers.py:estimate",
        f'algorithm.adv_estimator_kwargs={{name="{name}"}}',
    ]
    own += [f"reward.functions={tmp_path}/rewards.py:judge"] * functions
    (tmp_path / "empty.toml").write_text("")
    args = ["train", str(tmp_path / "empty.toml"), *overrides_of_parts(tiny, tmp_path), "algorithm.name=grpo", *own]
    assert main([*args, "--check"]) == (0 if said is None else 2)
    if said is not None:
        assert re.search(rf"adv_estimator: .*: the batch has no field '{name}'.*{said}", capsys.readouterr().err)


def test_a_run_that_fails_says_how_until_it_continues(tiny, tmp_path):
    flag = tmp_path / "flag"
    (tmp_path / "fails.py").write_text(
        "from pathlib import Path\n"
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    assert not Path({str(flag)!r}).exists(), 'out of luck'\n"
        "    return 1.0\n"
    )
    reward = f"reward.functions=['{tmp_path}/fails.py:score']"
    words = [*TINY, "algorithm.name=grpo", "rollout.n=2", reward, f"model.path={tiny}", f"trainer.dir={tmp_path}/run"]
    failure = tmp_path / "run/failure.txt"
    train(make_plan(load(overrides=[*words, "trainer.total_training_steps=1"])), silent)
    assert not failure.exists()
    flag.touch()
    with pytest.raises(Exception, match="out of luck"):
        train(make_plan(load(overrides=words)), silent)
    assert re.fullmatch("ended after step 1 with an error: .*out of luck.*\n", failure.read_text())
    flag.unlink()
    train(make_plan(load(overrides=words)), silent)
    assert not failure.exists()


def test_a_check_lets_reward_functions_judge_ground_truths_and_odd_answers(tiny, tmp_path):
    file = tmp_path / "rewards.py"
    parts = []
    digits = "sum(int(c) for c in solution_str if c.isdigit())"
    lines = {"fine": "1.0", "misspelled": "extra_info['slaa']", "empty": "1.0 / len(solution_str)", "digits": digits}
    for name, line in lines.items():
        parts.append(f"def {name}(data_source, solution_str, ground_truth, extra_info=None):\n    return {line}")
    file.write_text("\n".join(parts))
    failures = {"misspelled": "raised KeyError: 'slaa'", "empty": "ZeroDivisionError", "digits": "invalid literal"}
    for name, said in ({"fine": ""} | failures).items():
        reward = f"reward.functions=['{file}:{name}']"
        plan = make_plan(load(overrides=[*overrides(tiny, tmp_path / "run"), reward]))
        with pytest.raises(RewardError, match=f"{file}:{name} .*{said}") if said else contextlib.nullcontext():
            check_run(plan)


def test_a_loss_with_a_metric_that_does_not_add_up_is_refused_before_the_run(tiny, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from verl_fn.steps import loss\n@loss(needs=['entropy'])\n"
        "def mine(outputs, batch):\n    return -outputs.entropy, {'h': outputs.entropy.mean()}\n"
    )
    own = ["algorithm.name=grpo", "rollout.n=2", f"algorithm.policy_loss={file}:mine"]
    plan = make_plan(load(overrides=[*TINY, *own, f"model.path={tiny}", f"trainer.dir={tmp_path}/run"]))
    with pytest.raises(ConfigError, match=r"policy_loss: the loss mine .* returns a Tensor as the metric 'h'"):
        check_run(plan)


def test_a_check_ends_with_the_part_that_failed_on_a_made_up_batch(tiny, tmp_path, capsys):
    """Its last line, too, and what weighs no token of a loss of rows is not shown as an option."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from verl_fn.steps import loss\ndef mine(scale=1.0):\n"
        "    @loss(needs=['logprobs'], level='row')\n    def by_row(outputs, batch):\n"
        "        return scale * batch.sum_rows(outputs.logprobs), {}\n    return by_row\n"
    )
    own = ["algorithm.name=grpo", "rollout.n=2", f"algorithm.policy_loss={file}:mine", "driver.device=cpu",
           "algorithm.loss_agg_mode=seq-mean-token-sum", f"model.path={tiny}"]  # fmt: skip
    for scale, but in (("2.0", ""), ("'a'", ", but algorithm.policy_loss failed on a made-up batch (see the note)")):
        kwargs = f"algorithm.policy_loss_kwargs={{scale = {scale}}}"
        plan = make_plan(load(overrides=[*TINY, *own, kwargs, f"trainer.dir={tmp_path}/run"]))
        said = check_run(plan).text
        assert said.splitlines()[-1] == f"the run can start{but}; memory is counted on GPUs only"
        assert "loss_agg_mode" not in said and "loss_agg_mode has no effect" in capsys.readouterr().out


def notes_of(plan, capsys):
    capsys.readouterr()
    check_run(plan)
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]


NEEDS = """
from verl_fn.steps import loss
@loss(needs=["candidate_logprobs"])
def likeliest(outputs, batch):
    return outputs.logprobs, {}
"""


def own_step(change, tiny, folder, *more):
    file = folder / "own.py"
    file.write_text(TWICE.replace(*change) + NEEDS)
    own = [f"algorithm.name={file}:make", "actor.optim.lr_scheduler_type=linear", *more]
    return make_plan(load(overrides=[*overrides(tiny, folder / "run"), *own]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("apply_update(new, grads)", "apply_update(new)"), r"TypeError: .*grads' \(at .*own.py:"),
        (("w.get(metrics) | w.get(more)", "None"), "learn .* returns None as its report"),
        (("experience.batch,", "experience.batch.with_tokens(x=experience.batch['advantage']),"),
         r"no field 'advantage'.*own\.py:"),
        (('"token-mean"', '"token-means"'), "ValueError: .*token-means"),
        (("actor=new, step", "step"), "learn .* a state whose actor cannot be used: .* was donated to"),
        (("actor=new, step", "actor=(new, more), step"), "AttributeError: 'tuple' object"),
        (("new = state.actor", "new = {}['actor']"), "KeyError: 'actor'"),
        (("new = state.actor", "import no_such_module"), "ModuleNotFoundError"),
    ],
    ids=str,
)  # fmt: skip
def test_a_check_fails_as_a_step_on_mocks_does(change, said, tiny, tmp_path, capsys):
    with pytest.raises(RunError, match=f"(?s)a step of {tmp_path}/own.py:make on mocks fails: .*{said}"):
        check_run(own_step(change, tiny, tmp_path))
    assert not (tmp_path / "run").exists()
    argv = [*overrides(tiny, tmp_path / "run"), f"algorithm.name={tmp_path}/own.py:make"]
    assert main(["train", str(empty_config(tmp_path)), "--check", *argv]) == 1
    assert "error: a step of" in capsys.readouterr().err


def empty_config(folder):
    (folder / "empty.toml").write_text("")
    return folder / "empty.toml"


@pytest.mark.parametrize(
    ("change", "how", "noted"),
    [
        (("", ""), "went well", "the actor had 2 updates up to step 1, and the algorithm's outline counts 1"),
        (("counted: bool = False", "counted: bool = True"), "went well", None),
        (("cross_entropy())", "likeliest)"), "says nothing, .*: .*candidate_logprobs", None),
        (("new = state.actor", "new = state.actor; actor.forward(new.params, batch, ['top_ids_4'])"),
         "says nothing, .*: .*top_ids_4", None),
        (("new = state.actor", "new = state.actor; experience.batch['reward/format']"), "says nothing, ", None),
        (("new = state.actor", "new = state.actor; new.params['model.norm.weight']"), "says nothing, ", None),
        (("new = state.actor", "new = state.actor; raise AssertionError('not compiled with CUDA')"),
         "says nothing, .*: AssertionError: not compiled", None),
        (("new = state.actor", "new = state.actor; assert len(experience.batch) == 16"), "went well",
         "the actor had 2 updates"),
    ],
    ids=str,
)  # fmt: skip
def test_a_check_does_not_fail_for_what_only_mocks_lack(change, how, noted, tiny, tmp_path, capsys):
    plan = own_step(change, tiny, tmp_path, "data.train_batch_size=8")
    text = check_run(plan).text
    assert re.search(f"on mocks    one step of {tmp_path}/own.py:make {how}", text), text
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert len(found) == (noted is not None), found
    assert noted is None or noted in found[0]


def test_a_package_that_only_another_machine_has_fails_no_step_on_mocks(tiny, tmp_path):
    plan = own_step(("new = state.actor", "import no_such_module"), tiny, tmp_path, "driver.device=auto")
    assert "own.py:make says nothing, since mocks differ from models: ModuleNotFound" in check_run(plan, GIB, 1).text


def test_a_check_takes_no_step_of_a_built_in_algorithm(tiny, tmp_path):
    more = ["algorithm.name=grpo", "rollout.n=2", f"model.path={tiny}", f"trainer.dir={tmp_path}/run"]
    assert "on mocks" not in check_run(make_plan(load(overrides=[*TINY, *more]))).text


def test_a_check_takes_no_step_of_what_mocks_lack(tiny, tmp_path):
    """An environment, a frozen base below adapters, or log-probs that equal the engine's."""
    plan = make_plan(load(overrides=overrides(tiny, tmp_path)))
    for lacking in (
        {"env": attrs.evolve(plan.env, name="mine.py:Env")},
        {"copies": {"reference": "actor"}},
        {"rollout": attrs.evolve(plan.rollout, exact="audit")},
    ):
        assert rehearse(attrs.evolve(plan, **lacking), None) == ("", "")
    with pytest.raises(RunError, match="on mocks fails"):
        rehearse(plan, None)


def test_a_check_names_options_without_defaults(tiny, tmp_path):
    file = tmp_path / "own.py"
    code = TWICE.replace("    counted: bool = False", "    threshold: float\n    counted: bool = False")
    file.write_text(code)
    own = [*overrides(tiny, tmp_path / "run"), f"algorithm.name={file}:make", "algorithm.threshold=0.5"]
    assert "options     threshold 0.5\n" in check_run(make_plan(load(overrides=own))).text


@pytest.mark.parametrize("lora", [0, 2])
def test_a_check_takes_a_step_with_a_reference(lora, tiny, tmp_path, capsys):
    page = (ROOT / "docs/your_own.md").read_text()
    start = page.index("from typing import Any\n\nimport attrs\n\nfrom verl_fn import Algorithm")
    options = "@attrs.frozen\nclass Options:\n    pass\n\n\ndef mine(options: Options)"
    (tmp_path / "own.py").write_text(page[start:].partition("```")[0].replace("def mine(options: Options)", options))
    own = [f"algorithm.name={tmp_path}/own.py:mine", f"actor.lora_rank={lora}"]
    assert notes_of(make_plan(load(overrides=[*overrides(tiny, tmp_path / "run"), *own])), capsys) == []


def test_a_name_that_is_not_in_a_file_gets_the_names_that_are(tmp_path):
    (tmp_path / "parts.py").write_text("import math\ndef score(s, t):\n    return 1.0\ndef _hidden():\n    pass\n")
    with pytest.raises(ConfigError, match=r"has no 'median'; it has score$"):
        load_object(f"{tmp_path}/parts.py:median", "algorithm.adv_estimator")
    with pytest.raises(LoadError, match=r"has no function 'median'; it has score$"):
        find("parts.py:median", str(tmp_path))


LOSSES = """
import functools
from verl_fn.steps import loss, ppo_clip
from typing import Callable

@loss(needs=["logprobs"])
def cispo_mine(outputs, batch):
    return -outputs.logprobs, {}

def soft(weight=1.0):
    return weight * cispo_mine

clipped: object = ppo_clip()
softer = functools.partial(soft, weight=0.5)
limit = 3
"""


def test_losses_are_among_the_names_that_are_in_a_file(tmp_path):
    """They are objects, whose class is none of the file; what the file imports is not listed."""
    file = tmp_path / "parts.py"
    file.write_text(LOSSES)
    with pytest.raises(ConfigError, match=r"has no 'cispo'; did you mean cispo_mine\?$"):
        load_object(f"{file}:cispo", "algorithm.policy_loss")
    with pytest.raises(ConfigError, match=r"has no 'nope'; it has cispo_mine, soft, clipped, softer$"):
        load_object(f"{file}:nope", "--losses")


def test_a_loss_is_described_and_what_is_neither_loss_nor_algorithm_is_named(tmp_path, capsys):
    file = tmp_path / "parts.py"
    file.write_text(LOSSES.replace("    return -outputs", "    'Weighs tokens.'\n    return -outputs") + OWN_PARTS)
    assert main(["list", f"{file}:cispo_mine"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{file}:cispo_mine: a loss, for algorithm.policy_loss",
        f"  cispo_mine ({file}:6): Weighs tokens.",
        "    reads logprobs and returns one value for each token",
    ]
    assert main(["list", f"{file}:clipped"]) == 0
    assert "  ppo_clip (" in capsys.readouterr().out
    file.write_text(file.read_text() + "\ndef bounded(bound=2.0, name='x'):\n    return bound * ppo_clip()\n")
    assert main(["list", f"{file}:bounded"]) == 0
    options = ["  algorithm.policy_loss_kwargs.bound = 2.0", "  algorithm.policy_loss_kwargs.name = 'x'"]
    assert capsys.readouterr().out.splitlines()[-2:] == options
    more = "\ndef two(a, b): pass\n\ndef pulled(beta, gap=1.0): pass\n"
    file.write_text(file.read_text() + "\ndef gained(batch, gain=2.0):\n    return batch\n" + more)
    for name, kind, last in (
        ("signs", "(batch), for algorithm.adv_estimator if it returns a batch; it has no options", 0),
        ("gained", "(batch, gain), for algorithm.adv_estimator if it returns a batch; its options:", 1),
    ):
        assert main(["list", f"{file}:{name}"]) == 0
        described = [f"{file}:{name}: a function of {kind}", "  algorithm.adv_estimator_kwargs.gain = 2.0"]
        assert capsys.readouterr().out.splitlines() == described[: 1 + last]
    assert main(["list", f"{file}:pulled"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  algorithm.adv_estimator_kwargs.gap = 1.0",
        "for algorithm.policy_loss if it makes a loss; algorithm.policy_loss_kwargs.beta must be set",
    ]
    for name, kind in (("two", r"a function of \(a, b\)"), ("limit", "a int")):
        assert main(["list", f"{file}:{name}"]) == 2
        said = capsys.readouterr().err
        assert re.search(rf"{file}:{name} is {kind}, and list describes algorithms, losses and estimators: ", said), (
            said
        )
        assert "algorithm.name" not in said
    assert main(["list", f"{file}:nope"]) == 2
    assert "algorithm.name" not in capsys.readouterr().err
