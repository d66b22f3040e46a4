"""What fails in a publication ends it at both ends, and the next one arrives."""

import os
import threading

import pytest
import torch
from published import CPU, SECRET, tensors

from verl_fn.backends.weight_sync import Cut, IncompleteWeights, Weights, outlet, receive
from verl_fn.backends.weight_sync.channel import SenderFailed
from verl_fn.backends.weight_sync.inlet import Inlet
from verl_fn.backends.weight_sync.outlet import Outlet, send

SECONDS = 60  # after which a call that hangs fails the test


class Call(threading.Thread):
    """A call in a thread of its own, whose result or error ``end`` returns."""

    def __init__(self, function, *args):
        super().__init__(daemon=True)
        self.function, self.args = function, args
        self.start()

    def run(self):
        try:
            self.result = self.function(*self.args)
        except Exception as error:
            self.result = error

    def end(self):
        self.join(SECONDS)
        assert not self.is_alive(), "the call hangs"
        return self.result


def inlet():
    return Inlet("127.0.0.1", SECRET, CPU, torch.float32)


def outlets_to(*inlets, kinds=None):
    return [Outlet(one.address, SECRET, CPU, kinds) for one in inlets]


def take(source):
    receive(source, lambda chunk: None, max_bytes=100, checked=True)


def thirds(number):
    """The row that one of three ranks holds."""
    return Weights(
        Weights.of({"w": torch.ones(3)}).specs, {"w": torch.ones(1)}.items, Cut(number, {"w": (0, 1, 2, 3)})
    )


def published(inlets, outlets, version):
    """Whether a publication arrives everywhere."""
    calls = [Call(one.receive, version, take) for one in inlets]
    calls.append(Call(send, outlets, version, Weights.of(tensors())))
    return [call.end() for call in calls] == [None] * len(calls)


def published_by_ranks(one, outlets, version):
    calls = [Call(one.receive, version, take)]
    calls += [Call(send, [o], version, thirds(rank)) for rank, o in enumerate(outlets)]
    return [call.end() for call in calls] == [None] * 4


def test_senders_connect_again_to_an_inlet_that_was_closed():
    one = inlet()
    outlets = outlets_to(one)
    assert published([one], outlets, 1)
    one.close()
    assert published([one], outlets, 2)


def test_ranks_connect_again_after_one_of_them_has_closed_its_end():
    one = inlet()
    outlets = outlets_to(one, one, one)
    assert published_by_ranks(one, outlets, 1)
    outlets[1].close()
    assert published_by_ranks(one, outlets, 2)


@pytest.mark.parametrize("kind", ["memory", "socket"])
def test_an_engine_that_refuses_leaves_others_undisturbed(kind):
    inlets = [inlet(), inlet()]
    outlets = outlets_to(*inlets, kinds=[kind])

    def refuse(source):
        next(iter(source.buckets(100)))
        raise ValueError("no")

    refusing, taking = Call(inlets[0].receive, 1, refuse), Call(inlets[1].receive, 1, take)
    assert Call(send, outlets, 1, Weights.of(tensors())).end() is None
    assert isinstance(refusing.end(), ValueError) and taking.end() is None
    assert published(inlets, outlets, 2)


def test_all_engines_learn_of_a_failure_also_those_that_wait_for_the_announcement(monkeypatch):
    inlets = [inlet(), inlet()]
    outlets = outlets_to(*inlets)
    receiving = [Call(one.receive, 1, take) for one in inlets]
    with monkeypatch.context() as patch:

        def full(*args):
            raise torch.OutOfMemoryError("CUDA out of memory")

        patch.setattr(outlet, "offered", full)
        error = Call(send, outlets, 1, Weights.of(tensors())).end()
    assert "memory: CUDA out of memory; socket: CUDA out of memory" in str(error)
    for call in receiving:
        assert isinstance(call.end(), SenderFailed) and "CUDA out of memory" in str(call.result)
    assert published(inlets, outlets, 2)


def test_a_kind_of_staging_that_cannot_be_made_is_passed_over(monkeypatch):
    def full(*args):
        raise OSError("no space")

    monkeypatch.setattr(os, "memfd_create", full)
    one = inlet()
    outlets = outlets_to(one)
    assert published([one], outlets, 1) and outlets[0].kind == "socket"


class Fails:
    """A source that fails before it is announced."""

    @property
    def specs(self):
        raise RuntimeError("this rank died")


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("engine", ["first", "last"])
def test_a_rank_that_fails_before_the_announcement_ends_the_publication_for_all(failing, engine):
    """Over connections that are open, whether the engine waits already or only comes later."""
    one = inlet()
    outlets = outlets_to(one, one, one)
    assert published_by_ranks(one, outlets, 1)
    receiving = Call(one.receive, 2, take) if engine == "first" else None
    assert isinstance(Call(send, [outlets[failing]], 2, Fails()).end(), RuntimeError)
    others = [Call(send, [outlets[rank]], 2, thirds(rank)) for rank in range(3) if rank != failing]
    receiving = receiving or Call(one.receive, 2, take)
    assert isinstance(receiving.end(), SenderFailed) and "this rank died" in str(receiving.result)
    assert [call.end() for call in others] == [None, None]
    assert published_by_ranks(one, outlets, 3)


def test_ranks_that_all_fail_do_not_spoil_the_next_publication():
    one = inlet()
    outlets = outlets_to(one, one, one)
    receiving = Call(one.receive, 1, take)
    failing = [Call(send, [of_rank], 1, Fails()) for of_rank in outlets]
    assert isinstance(receiving.end(), SenderFailed)
    receiving = Call(one.receive, 2, take)
    assert all(isinstance(call.end(), RuntimeError) for call in failing)
    calls = [Call(send, [of_rank], 2, thirds(rank)) for rank, of_rank in enumerate(outlets)]
    assert [call.end() for call in (receiving, *calls)] == [None] * 4


def test_a_rank_that_waits_to_connect_while_a_publication_fails_does_not_spoil_the_next():
    one = inlet()
    outlets = outlets_to(one, one, one)

    receiving = Call(one.receive, 1, take)
    assert isinstance(Call(send, outlets[:1], 1, Fails()).end(), RuntimeError)
    assert isinstance(receiving.end(), SenderFailed)
    late = Call(send, outlets[2:], 1, thirds(2))
    calls = [Call(one.receive, 2, take), *(Call(send, [o], 2, thirds(i)) for i, o in enumerate(outlets[:2]))]
    assert late.end() is None
    calls.append(Call(send, outlets[2:], 2, thirds(2)))
    assert [call.end() for call in calls] == [None] * 4


def test_a_sender_that_ends_between_a_message_and_its_bytes_is_noticed(monkeypatch):
    one = inlet()
    outlets = outlets_to(one, kinds=["socket"])

    def gone(staging, number, nbytes):
        outlets[0].open.close()
        raise SenderFailed("gone")

    monkeypatch.setattr(outlet, "transfer", gone)
    receiving = Call(one.receive, 1, take)
    Call(send, outlets, 1, Weights.of(tensors())).end()
    assert isinstance(receiving.end(), IncompleteWeights)


def test_an_address_that_cannot_be_reached_is_named():
    with pytest.raises(RuntimeError, match=r"engine at \('255.255.255.255', 9\) cannot be reached"):
        send([Outlet(("255.255.255.255", 9), SECRET, CPU)], 1, Weights.of(tensors()))
