"""How long a start waits for many rows of data, the first time and again, and how much memory it takes.

Rows are made up: questions of 25 to 80 words with an answer, as in GSM8K, as JSONL, rendered by a chat template and
encoded by a BPE tokenizer that is trained on them. Each start is a process of its own with the same cache folder.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import measure

# Rows, and the most seconds of the first and the second start.
BARS = {1_000_000: (60.0, 5.0)}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STEP = 512


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench large-data``: seconds and memory of two starts; exit status 1 if a bar is missed."""
    parser = measure.parser("large-data", (__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=measure.count, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--start", nargs=2, metavar=("FILE", "TOKENIZER"), help="one start only, in this process")
    args = parser.parse_args(argv)
    if args.start:
        print(json.dumps(start(*args.start)))
        return 0
    results: dict[str, Any] = {}
    held = True
    with tempfile.TemporaryDirectory() as folder:
        for rows in args.rows:
            file, tokenizer = make(Path(folder), rows)
            seen = [in_process(file, tokenizer, Path(folder) / f"cache_{rows}") for _ in range(2)]
            results[str(rows)] = {"file_mb": file.stat().st_size / 1e6, "first": seen[0], "second": seen[1]}
            for name, one, bar in zip(("first", "second"), seen, BARS.get(rows, (None, None)), strict=True):
                verdict = "" if bar is None else f"   {bar} s: {'held' if one['wall_s'] <= bar else 'MISSED'}"
                held &= bar is None or one["wall_s"] <= bar
                print(
                    f"{rows:>9} rows, {name:6} start {one['wall_s']:7.2f} s, {one['cpu_s']:7.2f} s of CPU, "
                    f"{one['peak_gb']:.2f} GB at most, {one['step_s']:.3f} s for a step's {STEP} problems{verdict}"
                )
            file.unlink()
    measure.write(args.json, "large-data", "cpu", {"results": results})
    return 0 if held else 1


def make(folder: Path, rows: int) -> tuple[Path, Path]:
    """Writes rows and a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(4_000)]
    file = folder / f"{rows}.jsonl"
    with file.open("w") as out:
        for _ in range(rows):
            question = " ".join(rng.choices(words, k=rng.randint(25, 80))) + f" {rng.randint(0, 9999)}?"
            answer = str(rng.randint(0, 99))
            row = {"prompt": [{"role": "user", "content": question}], "reward_model": {"ground_truth": answer}}
            out.write(json.dumps(row | {"data_source": "openai/gsm8k"}) + "\n")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    bpe.train_from_iterator([" ".join(words)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    return file, folder / "tokenizer"


def in_process(file: Path, tokenizer: Path, cache: Path) -> dict[str, float]:
    """Returns what ``start`` returns in a new process."""
    command = [sys.executable, "-m", "verl_fn.cli", "bench", "large-data", "--start", str(file), str(tokenizer)]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def start(file: str, folder: str) -> dict[str, float]:
    """Reads data as the start of a run does; returns seconds, memory of this process in GB, and the load."""
    from verl_fn.backends.hf.tokenizer import read_tokenizer
    from verl_fn.config.schema import DataConfig
    from verl_fn.data.loading import file_data
    from verl_fn.data.notices import notices, of_template
    from verl_fn.state import Key

    tokenizer = read_tokenizer(folder, {}, "2026-01-01")
    table = DataConfig(train_files=(file,), max_prompt_length=1024)
    before, cpu = time.perf_counter(), _cpu()
    data = file_data(table, tokenizer)
    for _ in notices(data.training, data.validation, table, tokenizer, answers=False):
        pass
    for _ in of_template([data.training], table, tokenizer):
        pass
    wall, spent = time.perf_counter() - before, _cpu() - cpu
    before = time.perf_counter()
    data.train(Key.from_seed(0), 0, STEP)
    step = time.perf_counter() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    # On a machine with other work, the seconds of CPU say more than the wall time.
    return {"wall_s": wall, "cpu_s": spent, "peak_gb": peak, "step_s": step, "load": os.getloadavg()[0]}


def _cpu() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
