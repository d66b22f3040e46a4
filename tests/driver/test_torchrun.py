"""What goes wrong in one of torchrun's processes: one of them tells, and nothing is lost."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def faulty(python, fault, folder, *more):
    command = [
        python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(Path(__file__).with_name("torchrun_faults.py")), "train", str(ROOT / "recipes/sft_reverse.toml"),
        "actor.strategy=fsdp", f"trainer.dir={folder}", "data.train_batch_size=8", "trainer.total_training_steps=4",
        "trainer.save_freq=-1", "trainer.test_freq=100", "trainer.val_before_train=false", "data.val_size=8",
        "driver.device=cpu", "driver.num_threads=1", *more,
    ]  # fmt: skip
    env = os.environ | {"FAULT": fault, "PYTHON_EXEC": python}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=300).stderr


def test_a_run_that_only_one_process_is_told_to_stop_is_saved_before_any_ends(warm, tmp_path):
    """The first process still writes when the other has long written its part."""
    said = faulty(warm, "slow save, stopped by rank 1", tmp_path)
    assert said.count("stopped after step 2 and saved") == 1, said
    assert (tmp_path / "checkpoints/step_2/checkpoint.json").is_file()


@pytest.mark.parametrize(
    ("fault", "more", "message"),
    [
        ("no data on rank 1", [], "error: /data/train.parquet cannot be read"),
        ("no room on rank 0", [], "No space left on device"),
        ("slow preparation", ["ray.timeout=4"], "longer than ray.timeout; raise ray.timeout if"),
    ],
)
def test_the_cause_is_told_once_and_without_a_traceback_of_gloo(warm, fault, more, message, tmp_path):
    said = faulty(warm, fault, tmp_path, *more)
    ours = said.partition("torch/distributed/elastic")[0]  # then comes torchrun's own report
    assert ours.count("error: ") == 1 and message in ours and "Traceback" not in ours, said
