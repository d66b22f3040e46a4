"""Processes that stay: each is a rank of one process group and runs the functions that it is sent."""

import contextlib
import importlib
import multiprocessing.connection
import multiprocessing.spawn
import os
import signal
import socket
import traceback
from datetime import timedelta
from pathlib import Path


def _rank(rank, size, port, pipe, folder, device, group):
    import faulthandler
    import sys

    faulthandler.enable()
    sys.path.insert(0, folder)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # On a GPU a backend's own option decides.
    torch.use_deterministic_algorithms(group and device == "cpu")
    if device == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.cuda.set_device(rank)
    if group:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=60))
    while (call := pipe.recv()) is not None:
        module, name, args = call
        try:
            reply = True, getattr(importlib.import_module(module), name)(*args)
        except BaseException as error:
            reply = False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        pipe.send((os.getpid(), *reply))
    if group:
        dist.destroy_process_group()


class RankFailed(AssertionError):
    """A function failed on some rank; the message has the first one's traceback."""


class Ranks:
    """``size`` ranks on this machine, over gloo on CPUs, over NCCL with a GPU each; without ``group``, in none.

    ``python`` starts them; by default the one that multiprocessing takes. If a rank dies, the call fails, and the
    next one starts new ranks.
    """

    def __init__(self, size, device="cpu", group=True, python=None):
        self.size, self.options, self.python = size, (device, group), python
        self.pipes, self.processes, self.stopped = [], [], []
        self._start()

    def _start(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        device, group = self.options
        context = multiprocessing.get_context("spawn")
        before = multiprocessing.spawn.get_executable()
        multiprocessing.spawn.set_executable(self.python or before)
        try:
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                here = str(Path(__file__).parent)
                process = context.Process(
                    target=_rank, args=(rank, self.size, port, theirs, here, device, group), daemon=group
                )
                process.start()
                # Without this end here, a read of ours says when the rank has died.
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)
        finally:
            multiprocessing.spawn.set_executable(before)

    def run(self, function, *args):
        """Calls a function of ``rank_cases.py``, or of a named module, on every rank; returns the results by rank.

        Raises:
            RankFailed: it raised somewhere, or a rank died.
        """
        module, _, name = function.rpartition(".")
        if not self.processes:
            self._start()
        while self.stopped:
            os.kill(self.stopped.pop(), signal.SIGCONT)
        try:
            for pipe in self.pipes:
                pipe.send((module or "rank_cases", name, args))
            replies = [pipe.recv() for pipe in self.pipes]
        except (EOFError, OSError) as error:
            raise RankFailed(f"{self._end()} in {function}; its stack is in the output above") from error
        # Threads of gloo wake up a hundred times a second each, also where nothing is to be done.
        for pid, _, _ in replies:
            os.kill(pid, signal.SIGSTOP)
            self.stopped.append(pid)
        for rank, (_, fine, result) in enumerate(replies):
            if not fine:
                raise RankFailed(f"rank {rank}: {result}")
        return [result for _, _, result in replies]

    def _end(self):
        """Ends the ranks, of which one has died, and says how that one did."""
        multiprocessing.connection.wait([process.sentinel for process in self.processes])
        died = [f"rank {r} ended with {p.exitcode}" for r, p in enumerate(self.processes) if not p.is_alive()]
        self.kill()
        self.pipes, self.processes, self.stopped = [], [], []
        return " and ".join(died)

    def kill(self):
        """Ends the ranks at once, also those that wait for each other."""
        for process in self.processes:
            process.kill()


@contextlib.contextmanager
def ranks_by_size(python):
    """Yields a function that starts so many ranks, or returns the ones that it has started before."""
    kept = {}

    def of(size):
        if size not in kept:
            kept[size] = Ranks(size, python=python)
        return kept[size]

    yield of
    for one in kept.values():
        one.kill()
