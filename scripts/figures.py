"""Draws the learning curves of docs/results.md. Run ``python scripts/figures.py`` after the runs of three seeds:

for s in 1 2 3; do
  python scripts/demo.py --seed $s --dir runs/demo_$s
  verl-fn train recipes/grpo_count.toml trainer.seed=$s trainer.dir=runs/grpo_$s
done
"""

from verl_fn.report.plots import reward_curves

SEEDS = (1, 2, 3)


def main() -> None:
    """Draws the figures of docs/results.md."""
    labels = [f"seed {s}" for s in SEEDS]
    reward_curves([f"runs/demo_{s}" for s in SEEDS], "docs/ppo_reverse.png", title="PPO on reverse", labels=labels)
    reward_curves([f"runs/grpo_{s}" for s in SEEDS], "docs/grpo_count.png", title="GRPO on count", labels=labels)


if __name__ == "__main__":
    main()
