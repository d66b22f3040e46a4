"""What a training rank on this machine reads of a batch: all of it as a copy, or its own rows from shared memory.

Each rank is a Ray actor. It gets a batch whose fields lie in the object store, takes the rows that are dealt to it,
and compares the whole batch with the other ranks' by its checksum. Both ways take turns, on new batches.

With ``--driver`` it measures the driver's side: the memory of the process that estimates advantages, splits a batch
into minibatches with their weights, and hands each to the ranks, as a GRPO step does.
"""

from __future__ import annotations

import itertools
import resource
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from verl_fn.backends.agreement import of_batch
from verl_fn.state import Batch, Key, deal
from verl_fn.steps import aggregate, minibatches

from . import measure

FIELDS = 8


class Rank:
    """A process that reads its share of batches."""

    def __init__(self, rank: int, size: int) -> None:
        torch.set_num_threads(1)
        self.rank, self.size = rank, size

    def read(self, shared: bool, value: Any) -> dict[str, float]:
        """Milliseconds of the processor for each part, and by how many MB the process has grown at its peak."""
        from verl_fn.driver.serialization import Array, opened

        marks = [time.process_time()]
        batch = opened(value, shared=shared)
        marks.append(time.process_time())
        own_rows = [row for part in deal(batch, self.size, batch.num_tokens)[self.rank] for row in part]
        batch.take(own_rows)
        marks.append(time.process_time())
        of_batch(batch)
        marks.append(time.process_time())
        parts = [1e3 * (end - start) for start, end in itertools.pairwise(marks)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        names = ("arrive_ms", "take_ms", "compare_ms")
        leaves = zip(pytree.tree_leaves(value), pytree.tree_leaves(batch), strict=True)
        arrays = [(array.tensor(), t) for array, t in leaves if isinstance(array, Array)]
        copied = sum(t.nbytes for stored, t in arrays if t.data_ptr() != stored.data_ptr()) / 1e6
        return dict(zip(names, parts, strict=True)) | {"copied_mb": copied, "peak_mb": peak}


def compare(ranks: int, rows: int, length: int, rounds: int) -> dict[str, dict[str, float]]:
    """The medians of both ways over all ranks and rounds."""
    import ray

    from verl_fn.config.schema import RayConfig
    from verl_fn.driver.ray import connected
    from verl_fn.driver.serialization import packed

    results: dict[str, list[dict[str, float]]] = {"copied": [], "shared": []}
    with connected(RayConfig()):
        # Separate processes for the two ways, since each has its own peak.
        actor = ray.remote(num_cpus=0)(Rank)
        actors = {way: [actor.remote(rank, ranks) for rank in range(ranks)] for way in results}
        for i in range(rounds + 1):
            value = ray.put(packed(batch_of(rows, length, i)))
            for way in sorted(results, reverse=bool(i % 2)):
                read = ray.get([one.read.remote(way == "shared", value) for one in actors[way]])
                # In the first round both map the shared memory and grow.
                results[way] += read if i else []
            del value
    return {
        way: {name: statistics.median(result[name] for result in of_way) for name in of_way[0]}
        for way, of_way in results.items()
    }


def driver_memory(ranks: int, rows: int, n: int, length: int) -> dict[str, float]:
    """The peak memory of this process through a step on a batch, and how many times the batch's bytes that is.

    Args:
        ranks: training ranks, which read their rows.
        rows: problems.
        n: responses of each problem.
        length: tokens of each response.
    """
    import ray

    from verl_fn.algorithms.policy import estimator
    from verl_fn.config.algorithms import GRPO
    from verl_fn.config.schema import RayConfig
    from verl_fn.driver.cluster import Cluster
    from verl_fn.driver.ray import connected

    with connected(RayConfig()):
        cluster, actor = Cluster(60.0), ray.remote(num_cpus=0)(Rank)
        actors = [actor.remote(rank, ranks) for rank in range(ranks)]
        # The first use of each part imports what it needs.
        for problems in (2, rows):
            before = float(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
            batch = batch_of(problems * n, length, 0)
            batch = batch.with_tokens(
                response_mask=torch.ones_like(batch["field_0"]), token_level_rewards=batch["field_1"]
            )
            batch = batch.without("field_0").without("field_1")
            batch = batch.with_rows(score=torch.rand(len(batch)), group=torch.arange(problems).repeat_interleave(n))
            nbytes = sum(leaf.nbytes for leaf in pytree.tree_leaves(batch)) / 1e6
            batch = estimator(GRPO())(batch)
            for part in minibatches(batch, -(-problems // 4) * n, shuffle=Key.from_seed(0)):
                reference = cluster.stored(aggregate(part))
                ray.get([one.read.remote(True, reference) for one in actors])
                del part, reference
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
            del batch
        return {"batch_mb": nbytes, "before_mb": before, "peak_mb": peak, "times": (peak - before) / nbytes}


def batch_of(rows: int, length: int, seed: int) -> Batch:
    """A batch of rows of one length, with as many per-token fields as a PPO step has."""
    stream = torch.Generator().manual_seed(seed)
    tokens = torch.randint(100, (rows * length,), generator=stream)
    positions = torch.arange(length).repeat(rows)
    starts = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    fields = {f"field_{i}": torch.randn(rows * length, generator=stream) for i in range(FIELDS)}
    return Batch(tokens, positions, starts, fields)


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench batches``: a line for each way."""
    parser = measure.parser("batches", __doc__)
    parser.add_argument("--ranks", type=measure.count, default=2)
    parser.add_argument("--rows", type=measure.count, default=1024)
    parser.add_argument("--length", type=measure.count, default=2048)
    parser.add_argument("--rounds", type=measure.count, default=5)
    parser.add_argument("--driver", action="store_true", help="the memory of the driver")
    parser.add_argument("--n", type=measure.count, default=8, help="responses of each row, for --driver")
    args = parser.parse_args(argv)
    if args.driver:
        memory = driver_memory(args.ranks, args.rows, args.n, args.length)
        measure.write(args.json, "batches", args.device, {"results": {"driver": memory}})
        print("driver: " + ", ".join(f"{name} {value:.1f}" for name, value in memory.items()))
        return 0
    results = compare(args.ranks, args.rows, args.length, args.rounds)
    measure.write(args.json, "batches", args.device, {"results": results})
    for way, r in results.items():
        print(f"{way}: " + ", ".join(f"{name} {value:.0f}" for name, value in r.items()))
    return 0
