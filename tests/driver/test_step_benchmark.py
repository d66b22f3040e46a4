"""The benchmark of a whole step: our run on a tiny model, and what is made of the lines that trainers write."""

import json
import sys
import time
from pathlib import Path

import attrs
import pytest

from verl_fn.benchmarks import peer_verl_trainer, step, step_parts, step_work
from verl_fn.benchmarks.step_run import RunFailed, below, watch
from verl_fn.benchmarks.step_work import Work
from verl_fn.driver.processes import runs

# A line of verl 0.9.1's file.
VERL_LINE = {
    "step": 2,
    "data": {"perf/total_num_tokens": 900, "timing_s/gen": 4.0, "timing_s/update_actor": 2.0, "timing_s/step": 7.0,
             "timing_s/agent_loop/generate_sequences/max": 3.5,
             "timing_per_token_ms/gen": 0.1, "actor/lr": 1e-6},
}  # fmt: skip
WRITER = """
import pathlib, subprocess, sys, time
file = pathlib.Path(sys.argv[1])
subprocess.Popen(["sleep", "1000"], start_new_session=True)
for i in range(int(sys.argv[2])):
    time.sleep(0.2)
    with file.open("a") as lines:
        print('{"step": %d}' % i, file=lines)
print("the end of the log", flush=True)
time.sleep(float(sys.argv[3]))
"""


def work(folder: Path) -> Work:
    return Work(folder / "model", folder / "data", "cuda", prompts=2, n=2, prompt=8, response=8)


def one(seconds, tokens=100, **phases):
    return {"seconds": seconds, "tokens": tokens, "phases": phases, "reported": seconds}


def test_our_run_is_measured(warm, warm_ray, tmp_path, monkeypatch):
    command = step.our_command
    monkeypatch.setattr(step, "our_command", lambda *args: [warm, *command(*args)[1:], warm_ray])
    path = tmp_path / "step.json"
    sizes = ["--prompts", "2", "--n", "2", "--prompt", "8", "--response", "8", "--steps", "3"]
    options = ["--shape", "tiny", "--rollout", "sampler", "--runs", "ours", "--logs", str(tmp_path), *sizes]
    # Without verl there is no ratio to hold.
    assert step.main(["--device", "cpu", *options, "--json", str(path)]) == 1
    result = json.loads(path.read_text())
    assert result["failed"] == {} and [s["tokens"] > 32 for s in result["runs"]["ours"][0]] == [True] * 3
    ours = result["engines"]["ours"]
    assert {"gen", "reward", "old_log_prob", "update_actor", "update_weights", "other"} <= ours["phases"].keys()
    assert ours["warm"] and sum(ours["shares"].values()) == pytest.approx(1.0)
    assert "step 3/3" in (tmp_path / "1_ours.log").read_text() or ours["steps"] == 1


def test_a_line_of_verl_is_read():
    read = step.step_of(peer_verl_trainer.metrics(VERL_LINE), {"seconds": 7.5})
    assert read == {"seconds": 7.5, "tokens": 900, "phases": {"gen": 4.0, "update_actor": 2.0}, "reported": 7.0}


def test_warm_up_steps_do_not_count_and_runs_are_pooled():
    runs = [[one(90.0), one(80.0), one(2.0, gen=1.0), one(4.0, gen=1.0)], [one(70.0), one(60.0), one(4.0, gen=3.0)]]
    made = step.summary(runs)
    assert (made["seconds"], made["tokens_a_second"], made["steps"], made["warm"]) == (4.0, 25.0, 3, True)
    assert made["phases"] == {"gen": 1.0, "other": 1.0} and made["until_first_step"] == [90.0, 70.0]
    assert not step.summary([[one(5.0)]])["warm"]


def test_the_bars_are_the_ratio_and_our_other_phases():
    fast, slow = step.summary([[one(1.0, gen=0.97)] * 3]), step.summary([[one(2.0, gen=2.0)] * 3])
    held = step.verdict({"ours": fast, "verl": slow}, 2.0)
    assert held == {"bar": 2.0, "large_phases": [], "ratio": 2.0, "held": True}
    assert not step.verdict({"ours": fast, "verl": slow}, 2.1)["held"]
    waiting = step.summary([[one(1.0, gen=0.9, reward=0.1)] * 3])
    found = step.verdict({"ours": waiting, "verl": slow}, 2.0)
    assert found == {"bar": 2.0, "large_phases": ["reward"], "ratio": 2.0, "held": False}
    for engines in ({"ours": slow, "verl": fast}, {"ours": fast}):
        assert not step.verdict(engines, 1.0)["held"]


@pytest.mark.parametrize("sizes", [{}, {"gpus": 2, "checkpointing": True}])
def test_both_trainers_get_the_same_sizes(tmp_path, sizes):
    asked = attrs.evolve(work(tmp_path), **sizes)
    ours = step.our_command(asked, 5, tmp_path)
    theirs = peer_verl_trainer.command(asked, 5, tmp_path)
    for mine, other in {
        "ray.ranks": "trainer.n_gpus_per_node",
        "actor.enable_gradient_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
        "actor.ppo_max_token_len_per_gpu": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        "rollout.gpu_memory_utilization": "actor_rollout_ref.rollout.gpu_memory_utilization",
        "rollout.slots": "actor_rollout_ref.rollout.max_num_seqs",
        "data.train_batch_size": "data.train_batch_size",
        "actor.optim.lr": "actor_rollout_ref.actor.optim.lr",
    }.items():
        values = [next(s.partition("=")[2] for s in words if s.startswith(f"{name}="))
                  for words, name in ((ours, mine), (theirs, other))]  # fmt: skip
        assert values[0].lower() == values[1].lower(), mine


@pytest.mark.parametrize("after", ["0", "1000"])
def test_a_run_is_watched_until_its_last_step_and_its_processes_end(tmp_path, after):
    before = below()
    file, log = tmp_path / "lines", tmp_path / "log"
    command = [sys.executable, "-c", WRITER, str(file), "3", after]
    lines = watch(command, {}, file, log, 3, 60.0)
    assert [line["row"]["step"] for line in lines] == [0, 1, 2]
    assert all(0.1 < line["seconds"] < 30 for line in lines)
    assert [pid for pid in below() if pid not in before and runs(pid)] == []


def test_a_run_that_ends_early_fails_with_its_log(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path / "lines"), "1", "0"]
    with pytest.raises(RunFailed, match=r"ended with status 0, with 1 of 2 steps\n.*the end of the log"):
        watch(command, {}, tmp_path / "lines", tmp_path / "log", 2, 60.0)


def test_a_run_that_is_too_slow_keeps_its_steps_or_fails(tmp_path):
    file = tmp_path / "lines"
    began = time.monotonic()
    assert len(watch([sys.executable, "-c", WRITER, str(file), "1", "1000"], {}, file, tmp_path / "log", 2, 4.0)) == 1
    with pytest.raises(RunFailed, match="was ended after 1 seconds, with 0 of 1 steps"):
        watch(["sleep", "1000"], {}, tmp_path / "none", tmp_path / "log", 1, 1.0)
    assert time.monotonic() - began < 60


def test_parts_make_up_steps(tmp_path, monkeypatch):
    rows = {"generation": [{"gen": 2.0}, {"gen": 3.0}], "training": [{"old_log_prob": 1.0, "update_actor": 4.0}] * 2}

    def watched(command, environment, file, log, rounds, seconds):
        assert step_parts.work_of(json.loads(command[4])) == work(tmp_path)
        return [{"row": row} for row in rows[command[3]][:rounds]]

    monkeypatch.setattr(step_parts, "watch", watched)
    steps = step_parts.run_parts(work(tmp_path), 2, tmp_path, tmp_path / "2_parts.log", 100.0, {})
    assert [(s["seconds"], s["tokens"]) for s in steps] == [(7.0, 64), (8.0, 64)]
    ours = step.summary([[one(4.0, tokens=64)]])
    assert step.verdict({"ours": ours, "parts": step.summary([steps])}, 1.0)["ratio_to_parts"] == 2.0


def test_the_tokenizer_has_all_tokens_of_the_model_and_those_that_verl_asks_for(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(step_work.write_model(tmp_path, "tiny", "cpu"))
    assert len(tokenizer) == json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    assert [len(tokenizer.encode(text)) for text in (step_work.NEWLINE, step_work.END)] == [1, 1]
    message = json.loads(step_work.write_prompts(tmp_path / "prompts", 1, 12).read_text())["prompt"]
    assert len(tokenizer.apply_chat_template(message, return_dict=False)) == 12
