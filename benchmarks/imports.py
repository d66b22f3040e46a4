"""How long a user waits for ``import verl_fn`` and for ``verl-fn --help``, in fresh processes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from . import measure

COMMANDS = {
    "import verl_fn": ([sys.executable, "-c", "import verl_fn"], 0.3),
    "verl-fn --help": ([sys.executable, "-m", "verl_fn.cli", "--help"], 0.5),
}


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench imports``: seconds, interpreter start included; exit status 1 where a bar is missed."""
    parser = measure.parser("imports", __doc__)
    parser.add_argument("--rounds", type=measure.count, default=15)
    args = parser.parse_args(argv)
    results = {}
    for name, (command, bar) in COMMANDS.items():
        seconds = []
        for _ in range(args.rounds):
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - start)
        results[name] = {"median_s": statistics.median(seconds), "max_s": max(seconds), "bar_s": bar}
        verdict = "held" if statistics.median(seconds) < bar else "MISSED"
        print(f"{name:16}{results[name]['median_s']:8.3f} s   {bar} s: {verdict}")
    measure.write(args.json, "imports", "cpu", {"results": results})
    return 0 if all(r["median_s"] < r["bar_s"] for r in results.values()) else 1
