"""Draws the learning curves of docs/results.md. Run ``python scripts/figures.py`` after the runs of three seeds:

for s in 1 2 3; do
  python scripts/demo.py --seed $s --dir runs/demo_$s
  verl-fn train recipes/grpo_count.toml trainer.seed=$s trainer.dir=runs/grpo_$s
done

The curves of SmolLM2 and of the squares are drawn from benchmarks/results, and only they with ``python
scripts/figures.py smollm2 exact squares``.
"""

import json
import sys
from pathlib import Path

from demo import reward_curves

from verl_fn.report.plots import figure_of

SEEDS = (1, 2, 3)
RESULTS = Path("benchmarks/results")
SETS = ("chain_sum", "gcd", "spell_backward")


def held_out(file: str, metric: str) -> tuple[list[int], list[float]]:
    """The steps and values of a metric of held-out problems."""
    rows = [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]
    evaluated = [row for row in rows if metric in row]
    return [row["step"] for row in evaluated], [row[metric] for row in evaluated]


def draw(out: str, title: str, curves: dict[str, tuple[list[int], list[float]]]) -> None:
    """Draws curves between 0 and 1, dashed if their name says that they are a score, blind, or off."""
    figure = figure_of(6.4, 3.6)
    axes = figure.add_subplot()
    for i, (name, (steps, values)) in enumerate(curves.items()):
        dashed = name.endswith(("score", "blind", "off"))
        axes.plot(steps, values, "--" if dashed else "-", color=f"C{i % len(SETS)}", marker="o", ms=3.5, label=name)
    axes.set(xlabel="step", ylim=(0, 1.02), title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)
    figure.savefig(out, dpi=150)


def smollm2() -> None:
    """Draws what SmolLM2-135M-Instruct learned."""
    accuracy = "val-core/arithmetic/acc/mean@1"
    seeds = {f"seed {s}": held_out(f"grpo_smollm2_vllm_entropy_seed{s}.jsonl", accuracy) for s in SEEDS}
    draw("docs/grpo_smollm2.png", "GRPO on arithmetic from SmolLM2: held-out accuracy", seeds)
    file = "grpo_reasoning_gym_seed1.jsonl"
    scores = {f"{n}: score": held_out(file, f"val-aux/reasoning_gym/{n}/reward/mean@1") for n in SETS}
    right = {f"{n}: accuracy": held_out(file, f"val-core/reasoning_gym/{n}/acc/mean@1") for n in SETS}
    draw("docs/grpo_reasoning_gym.png", "GRPO on Reasoning Gym from SmolLM2, held-out", scores | right)


def exact() -> None:
    """Draws what SmolLM2-135M-Instruct learned with log-probs that are equal in every bit, and without."""
    curves = {
        f"seed {s}, {kind}": held_out(f"grpo_smollm2_{kind}_seed{s}.jsonl", "val-core/arithmetic/acc/mean@1")
        for kind in ("strict", "off")
        for s in SEEDS
    }
    draw("docs/exact_smollm2.png", "rollout.exact, GRPO on arithmetic from SmolLM2: held-out accuracy", curves)


def squares() -> None:
    """Draws what the tiny model with images learned, and the blind baseline; GRPO follows the fine-tuning."""
    found = json.loads((RESULTS / "squares.json").read_text())
    curves = {}
    for kind in ("with images", "blind"):
        for seed, runs in found[kind].items():
            first = runs["sft"][-1][0]
            points = [*runs["sft"], *([first + step, value] for step, value in runs["grpo"][1:])]
            curves[f"seed {seed}, {kind}"] = ([step for step, _ in points], [value for _, value in points])
    draw("docs/squares.png", "Squares and digits: held-out accuracy", curves)
    tuned, after = (held_out(f"{a}_smolvlm_h200.jsonl", "val-core/squares/acc/mean@1") for a in ("sft", "grpo"))
    from_there = [tuned[0][-1] + step for step in after[0]], after[1]
    curves = {"fine-tuned": tuned, "then GRPO": from_there}
    draw("docs/squares_smolvlm.png", "Squares and digits, SmolLM2 with a tower: held-out accuracy", curves)


def main() -> None:
    """Draws the figures of docs/results.md and docs/images.md."""
    named = {"smollm2": smollm2, "exact": exact, "squares": squares}
    for name in sys.argv[1:] or named:
        named[name]()
    if sys.argv[1:]:
        return
    labels = [f"seed {s}" for s in SEEDS]
    reward_curves([f"runs/demo_{s}" for s in SEEDS], "docs/ppo_reverse.png", title="PPO on reverse", labels=labels)
    reward_curves([f"runs/grpo_{s}" for s in SEEDS], "docs/grpo_count.png", title="GRPO on count", labels=labels)


if __name__ == "__main__":
    main()
