"""``make demo``: PPO with a critic on ``reverse``, from an SFT warm start, through the Ray driver."""

import argparse
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from verl_fn.config import load, make_plan
from verl_fn.report.plots import curve, figure_of, line_style
from verl_fn.runs.logs import read_metrics
from verl_fn.runs.loop import train

METRIC = "val-core/reverse/acc/mean@1"
# The recipe's 400 steps go on to about 0.99.
GOAL = ("trainer.stop_at=0.9", "trainer.test_freq=20")
# Critic and actor learn at the same time, a core each.
OVERLAP = ("ray.separate=critic",)


def say(line: str) -> None:
    """Prints a line at once."""
    print(line, flush=True)


def reward_curves(folders: Sequence[str | Path], out: str | Path, *, title: str = "", labels: Sequence[str]) -> Path:
    """Draws training reward and held-out exact match of runs into the file ``out``, one colour for each run."""
    figure = figure_of(6.4, 3.6)
    axes = figure.add_subplot()
    for i, (folder, name) in enumerate(zip(folders, labels, strict=True)):
        rows = read_metrics(folder)
        reward = curve(rows, "critic/score/mean")
        axes.plot(reward.steps, reward.values, lw=1, alpha=0.5, label=f"{name}: training reward", **line_style(i))
        for metric in sorted({m for row in rows for m in row if m.startswith("val-core/") and "/acc/mean@" in m}):
            exact = curve(rows, metric)
            label = f"{name}: held-out exact match"
            axes.plot(exact.steps, exact.values, lw=1.8, marker="o", ms=4, label=label, **line_style(i))
    axes.set(xlabel="step", ylim=(0, 1.02), title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, loc="lower right", frameon=False)
    figure.savefig(out, dpi=150)
    return Path(out)


def main() -> int:
    """Runs the demo and returns its exit status: 1 if accuracy is outside the expected range."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=Path("runs/demo"))
    args = parser.parse_args()
    start = time.perf_counter()
    if args.dir.exists() and not (args.dir / "warm_start").is_dir():
        parser.error(f"{args.dir} is not the folder of a demo, so it is not removed; choose another --dir")
    shutil.rmtree(args.dir, ignore_errors=True)
    warm_start, seed = args.dir / "warm_start", f"trainer.seed={args.seed}"
    say(f"1/2  supervised warm start on reverse, seed {args.seed}")
    train(make_plan(load("recipes/sft_reverse.toml", [f"trainer.dir={warm_start}", seed])), say)
    say("2/2  PPO with a critic: rollout, reward and training as Ray actors")
    options = [f"trainer.dir={args.dir}", f"model.path={warm_start}/model", "driver.kind=ray", seed, *GOAL, *OVERLAP]
    train(make_plan(load("recipes/ppo_reverse.toml", options)), say)

    accuracies = [row[METRIC] for row in read_metrics(args.dir) if METRIC in row]
    before, after = accuracies[0], accuracies[-1]
    picture = reward_curves([args.dir], args.dir / "reward.png", title="PPO on reverse", labels=["demo"])
    seconds = time.perf_counter() - start
    say(f"{seconds:.0f} s; {args.dir}/ has the config, metrics.jsonl, checkpoints and {picture.name}")
    say(f"held-out exact match: {before:.3f} -> {after:.3f}")
    if not 0.40 <= before <= 0.65 or after < 0.85:
        say("the demo FAILED: it expects a warm start of 0.40 to 0.65 and at least 0.85 after PPO")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
