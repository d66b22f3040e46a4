"""Learning on drawn squares and digits, which needs eyes: fine-tuning and then GRPO, with images and with black ones.

    python -m verl_fn.benchmarks.squares --seeds 1 2 3 --out benchmarks/results/squares.json

Each run is a command, with the recipes as they are. The blind baseline has the same rows with images of zeros, so it
learns only how answers are distributed; the best that it could do is the share of rows whose answer is the most
frequent one of their question. Runs that exist are continued.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_fn.benchmarks.measure import machine
from verl_fn.data.prepare import SIDE, png

ACCURACY = "val-core/squares/acc/mean@1"
CHARS = " 0123456789?HWabcdeghilmnoqrstuwy"
SPLITS = ("train", "test")


def verl_fn(*words: str) -> None:
    """Runs a command of the project."""
    subprocess.run([sys.executable, "-m", "verl_fn.cli", *words], check=True)


def blinded(data: Path, out: Path) -> None:
    """Writes the rows of a folder with images of zeros."""
    black = png(np.zeros((SIDE, SIDE, 3), np.uint8))
    out.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        rows = pq.read_table(data / f"{split}.parquet").to_pylist()
        table = pa.Table.from_pylist([row | {"images": [{"bytes": black, "path": None}]} for row in rows])
        pq.write_table(table, out / f"{split}.parquet")


def chance(data: Path) -> float:
    """Returns the accuracy on held-out rows of the most frequent answer to each question among the training rows."""
    train, test = (pq.read_table(data / f"{split}.parquet").to_pylist() for split in SPLITS)
    answers: dict[str, Counter[str]] = {}
    for row in train:
        answers.setdefault(row["extra_info"]["question"], Counter())[row["extra_info"]["answer"]] += 1
    best = {question: counts.most_common(1)[0][0] for question, counts in answers.items()}
    return float(np.mean([row["extra_info"]["answer"] == best[row["extra_info"]["question"]] for row in test]))


def curve(run: Path) -> list[tuple[int, float]]:
    """Returns the steps and held-out accuracies of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], round(row[ACCURACY], 4)) for row in rows if ACCURACY in row]


def learned(seed: int, data: Path, work: Path) -> dict[str, Any]:
    """Fine-tunes a model of this seed and trains it by GRPO; returns both curves."""
    model = work / "model"
    if not model.exists():
        fields = ("--arch", "qwen3_vl", "--chat-template", "--chars", CHARS, "initializer_range=0.1")
        verl_fn("new-model", str(model), "--seed", str(seed), *fields)
    given = [
        f"data.{name}_files={data / split}.parquet" for name, split in zip(("train", "val"), SPLITS, strict=True)
    ]
    given += [f"trainer.seed={seed}"]
    sft, grpo = work / "sft", work / "grpo"
    verl_fn("train", "recipes/sft_squares.toml", *given, f"model.path={model}", f"trainer.dir={sft}")
    verl_fn("train", "recipes/grpo_squares.toml", *given, f"model.path={sft / 'model'}", f"trainer.dir={grpo}")
    return {"sft": curve(sft), "grpo": curve(grpo)}


def main() -> None:
    """Runs all seeds and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--kinds", nargs="+", default=["with images", "blind"], choices=["with images", "blind"])
    parser.add_argument("--work", type=Path, default=Path("runs/squares_seeds"), help="the folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/squares.json"))
    args = parser.parse_args()
    data = args.work / "data"
    if not data.exists():
        verl_fn("prepare", "squares", "--out", str(data))
        blinded(data, args.work / "black")
    found: dict[str, Any] = {"machine": machine("cpu"), "chance": chance(data)}
    for kind in args.kinds:
        rows = data if kind == "with images" else args.work / "black"
        found[kind] = {str(s): learned(s, rows, args.work / f"{kind.split()[0]}_{s}") for s in args.seeds}
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({k: {s: runs["grpo"][-1] for s, runs in found[k].items()} for k in args.kinds}))


if __name__ == "__main__":
    main()
