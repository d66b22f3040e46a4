"""Conversations can be read as they were: in the logs, by eval, in the report and among the responses of training."""

import json

import pyarrow.parquet as pq
import pytest
from test_environment_runs import plan_of, silent

from verl_fn.cli import main
from verl_fn.runs.logs import read_answers
from verl_fn.runs.loop import train
from verl_fn.runs.progress import cut_off


@pytest.mark.filterwarnings("ignore:.* conversations have failed", "ignore:.* no token that the model drew")
def test_conversations_can_be_read_as_they_were(chatty, tmp_path, capsys):
    more = [f"trainer.rollout_data_dir={tmp_path}/texts", "trainer.total_training_steps=1", "trainer.test_freq=1"]
    more.append("rollout.n=8")  # a random model seldom ends two replies
    train(plan_of(chatty, tmp_path / "run", *more), silent)
    held_out = read_answers(tmp_path / "run")
    trained = [json.loads(line) for line in (tmp_path / "texts/1.jsonl").read_text().splitlines()]
    assert len(trained) == 64 and {row["step"] for row in trained} == {1}
    assert [(row["problem"], row["sample"]) for row in trained][:3] == [
        (trained[0]["problem"], 0), (trained[0]["problem"], 1), (trained[0]["problem"], 2)
    ]  # fmt: skip
    longest = max(trained, key=lambda row: len(row["messages"]))
    for row in (*held_out, *trained):
        said, response = row["messages"], row.get("response", row.get("output"))
        assert row["input"].startswith("<bos>") and said[0]["content"] in row["input"]
        assert said[0]["role"] == "user" and {m["role"] for m in said[1:]} <= {"assistant", "user", "tool"}
        replies = [m["content"] for m in said if m["role"] == "assistant"]
        assert "\n".join(replies) == response or row["ended"] in ("env_crashed", "env_timed_out")
        assert (row["ended"] == "done") or row["score"] == 0.0
    assert {"done"} < {row["ended"] for row in trained} and len(longest["messages"]) > 3
    for row in trained:
        assert row["prompt"] in row["input"] and not {"response", "answer"} & set(row) and "gts" in row
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text()
    assert "Training responses" in page and f"ended: {trained[0]['ended']}" in page
    assert '<div class="soft">assistant</div>' in page
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--out", str(tmp_path / "e")]) == 0
    printed = capsys.readouterr().out
    assert "a conversation that ended with" in printed and "\n  user: " in printed and "\n  assistant: " in printed
    stored = pq.read_table(tmp_path / "e/answers.parquet").to_pylist()
    assert json.loads(stored[0]["messages"])[0]["role"] == "user" and stored[0]["ended"]


def test_a_note_tells_of_conversations_that_are_cut_off():
    ended = {"env/ended/done": 0.4, "env/ended/turn_limit": 0.5, "env/ended/length": 0.1}
    assert "60% of the conversations were cut off: 50% at env.max_turns, 10% at" in cut_off(7, ended)
    assert cut_off(7, ended | {"env/ended/turn_limit": 0.3}) == ""
    assert cut_off(7, {"response_length/clip_ratio": 0.9}).startswith("in step 7 90% of the responses were cut off")
    assert cut_off(7, {"response_length/clip_ratio": 0.4}) == cut_off(7, {}) == ""
