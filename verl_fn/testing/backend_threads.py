"""Purity under concurrency, a part of ``check_backend``: calls from two threads do not disturb each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch.distributed as dist

from verl_fn.backends.protocol import Handle
from verl_fn.state import Grads, TokenOutputs, TrainState

from .backend_case import BackendCase
from .violation import LawViolation, require_equal

CALLS = 3


def check_threads(case: BackendCase, first: Handle[TrainState], second: Handle[TrainState]) -> None:
    """Checks calls from two threads at once, each with a state of its own, against calls from one thread.

    Only backends of one process promise this: ranks must make their calls in one order.

    Raises:
        LawViolation: Purity is broken.
    """
    if not isinstance(first, TrainState) or (dist.is_available() and dist.is_initialized()):
        return
    cause = "a model or a cache that the calls share; hold a lock for the length of a call"

    def results(state: Handle[TrainState], start: Barrier) -> list[tuple[TokenOutputs, Grads]]:
        start.wait()
        return [(case.outputs(state.params), case.read(case.gradients(state)[0])) for _ in range(CALLS)]

    # The calls to compare with are made by a thread too: the main one may have another number of OpenMP threads.
    with ThreadPoolExecutor(1) as alone:
        expected = [alone.submit(results, state, Barrier(1)).result() for state in (first, second)]
    with ThreadPoolExecutor(2) as both:
        start = Barrier(2)
        pending = [both.submit(results, state, start) for state in (first, second)]
    for future, wanted in zip(pending, expected, strict=True):
        if (error := future.exception()) is not None:
            raise LawViolation("Purity", f"a call raises while another thread makes one: {error!r}", cause) from error
        what = "forward and forward_backward, called from two threads with two states,"
        require_equal("Purity", what, wanted, future.result(), cause)
