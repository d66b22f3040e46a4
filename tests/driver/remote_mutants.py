"""Backends for ranks and ways to speak to ranks, right ones and broken ones with the laws that they break."""

import operator
import time

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from verl_fn.backends.fsdp import Fsdp
from verl_fn.backends.mock import Mock, MockRollout, sample_table
from verl_fn.backends.protocol import Capabilities
from verl_fn.driver.remote import RemoteTrain
from verl_fn.state import Grads
from verl_fn.steps import adamw, chain, clip_by_global_norm, constant


def optimizer():
    return chain(clip_by_global_norm(1.0), adamw(constant(1e-3), weight_decay=0.0))


def fsdp(device, folder, cls=Fsdp):
    return cls(folder, optimizer(), max_tokens=24, device=device, deterministic=device == "cuda")


class OneWriter(Mock):
    """Every rank has the whole state, and one of them writes it."""

    def save(self, state, folder):
        if dist.get_rank() == 0:
            super().save(state, folder)
        dist.barrier()


def mock(device):
    return OneWriter(8, optimizer(), max_tokens=24)


def table_engine(in_flight):
    """A rollout engine that samples the published table."""
    return MockRollout(sample_table, Capabilities(versions_per_token=in_flight))


def nap():
    time.sleep(1.0)


def fail_in_turn(allowed):
    """Fails on the first rank, and on the others when a file says that they may."""
    while dist.get_rank() > 0 and not allowed.exists():
        time.sleep(0.01)
    raise ValueError(f"on rank {dist.get_rank()}")


def forbid_gathering(forbidden):
    """Lets no rank gather a sharded tensor."""

    def refused(self):
        raise AssertionError("a tensor was gathered")

    DTensor.full_tensor, DTensor.kept = (
        (refused, DTensor.full_tensor) if forbidden else (DTensor.kept, DTensor.full_tensor)
    )


def rank_after_failures():
    dist.barrier()
    return dist.get_rank()


def without_first(grads):
    return Grads(dict(list(grads.items())[1:]))


class DropsARank(Fsdp):
    """The last rank's rows count for nothing."""

    def forward_backward(self, state, batch, loss):
        silent = 0.0 * loss
        last = self.layout.rank == self.layout.size - 1
        return super().forward_backward(state, batch, silent if last else loss)


class NotMarked(RemoteTrain):
    """Donates on the ranks and leaves the handles as they were."""

    def apply_update(self, state, grads, *, donate=True, **settings):
        new, found = super().apply_update(state, grads, donate=donate, **settings)
        state.fate = grads.fate = None
        return new, found


class OneNumber(RemoteTrain):
    """All gradients go by the number of the first ones."""

    number = None

    def forward_backward(self, state, batch, loss):
        grads, found = super().forward_backward(state, batch, loss)
        self.number = self.number or grads
        self.group.run("map", lambda value: value, self.number.id, grads.open())
        return self.number, found


class OldResults(RemoteTrain):
    """Gives what the call before gave."""

    last = None

    def forward(self, params, batch, needs=("logprobs",)):
        found = super().forward(params, batch, needs)
        self.last, told = found, self.last or found
        return told


class FreesWhatLives(RemoteTrain):
    """Drops a state when its parameters have been looked at."""

    def map(self, fn, *values, keep=False):
        found = super().map(fn, *values, keep=keep)
        if isinstance(fn, operator.attrgetter):
            self.group.dropped.append(values[0].id)
        return found


SPEAKERS = [
    (NotMarked, {"Donation"}),
    (OneNumber, {"Purity", "Persistence"}),
    (OldResults, {"Purity", "Persistence"}),
    (FreesWhatLives, {"Persistence"}),
]


def meet(own, other):
    """A component that is made only while the other one is made."""
    own.touch()
    for _ in range(600):
        if other.exists():
            return own.name
        time.sleep(0.1)
    raise TimeoutError(f"nobody made {other.name}")
