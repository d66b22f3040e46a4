"""Runs whose reward is a judge: after a resume and in a replay nobody is asked again."""

import pytest
from judge_server import serving
from run_configs import tiny_run

from verl_fn.rewards import RewardError
from verl_fn.runs.logs import TIMED, read_metrics
from verl_fn.runs.loop import train
from verl_fn.runs.replay import replay

SILENT = lambda line: None  # noqa: E731


@pytest.fixture
def server():
    with serving() as server:
        yield server


def plan(tiny, folder, server, steps):
    judge = ["reward.prompt=R={response}", f"reward.url={server.url}", "reward.model=m", "data.val_size=2"]
    more = ["algorithm.name=grpo", "rollout.n=2", "data.train_batch_size=2", "trainer.test_freq=-1"]
    return tiny_run(tiny, folder, *more, *judge, f"trainer.total_training_steps={steps}")


def rows(folder):
    return [{k: v for k, v in row.items() if not k.startswith((*TIMED, "val-"))} for row in read_metrics(folder)]


def test_a_run_is_resumed_and_replayed_without_asking_again(tiny, tmp_path, server):
    report = train(plan(tiny, tmp_path / "whole", server, 2), SILENT)
    assert "val-core/reverse/reward/mean@1" in report and "val-core/reverse/acc/mean@1" not in report
    assert all(row["reward/judge_unreadable/mean"] == 0.0 for row in rows(tmp_path / "whole")[1:])
    assert any(row["critic/score/mean"] > 0 for row in rows(tmp_path / "whole")[1:])
    train(plan(tiny, tmp_path / "parts", server, 1), SILENT)
    train(plan(tiny, tmp_path / "parts", server, 2), SILENT)
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    asked = len(server.seen)
    assert len(set(server.seen)) < asked <= 2 * len(set(server.seen)), "each question once in each of two runs"
    server.close()
    assert replay(tmp_path / "parts", 2, say=SILENT).difference is None
    (tmp_path / "parts/judge.jsonl").unlink()
    with pytest.raises(RewardError, match=r"no reply of the judge in .*reward.offline forbids"):
        replay(tmp_path / "parts", 2, say=SILENT)
