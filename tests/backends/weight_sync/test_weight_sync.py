"""Publications between processes: every transport, and what is left when one end fails."""

import multiprocessing
import socket
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from types import SimpleNamespace

import attrs
import pytest
import torch
from made_tensors import made
from published import CPU, SECRET, tensors

from verl_fn.backends.weight_sync import IncompleteWeights, Weights, channel, keeping, receive
from verl_fn.backends.weight_sync.channel import ALIGNMENT, SLOTS, SenderFailed
from verl_fn.backends.weight_sync.inlet import Inlet
from verl_fn.backends.weight_sync.outlet import Outlet, part_bytes, send
from verl_fn.state import Params


def serve(pipe, publications):
    """An engine's process: takes publications and says what came."""
    inlet = Inlet("127.0.0.1", SECRET, CPU, torch.float32)
    pipe.send(inlet.address)
    for version, max_bytes in publications:
        places = {}

        def publish(source, max_bytes=max_bytes, places=places):
            for spec in source.specs:
                places[spec.name] = torch.zeros(spec.shape, dtype=spec.dtype)
                if spec.name == "poison":
                    raise ValueError("no such parameter")

            def write(chunk):
                rows = places[chunk.name].view(1) if places[chunk.name].ndim == 0 else places[chunk.name]
                rows[chunk.start : chunk.start + len(chunk.values)] = chunk.values

            receive(source, write, max_bytes=max_bytes, checked=True)

        try:
            inlet.receive(version, publish)
            pipe.send({name: t.float().numpy() for name, t in places.items()})
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


@pytest.fixture
def engine(warm):
    made = []

    def start(*publications):
        mine, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, publications))
        process.start()
        made.append(process)
        return mine, mine.recv()

    yield start
    for process in made:
        process.join(30)
        process.kill()


def arrived(pipe, expected):
    got = pipe.recv()
    assert not isinstance(got, str), got
    assert got.keys() == expected.keys()
    assert all(torch.equal(torch.from_numpy(got[name].copy()), t.float()) for name, t in expected.items())


def test_every_transport_to_another_process(engine):
    """Also with other weights over the same staging area, in many buckets and in one, and without any bytes."""
    sizes = [(1, 100), (2, 100), (3, 2**20), (4, 100)]
    pipe, address = engine(*sizes, *sizes, *sizes)
    for kind in ("memory", "group", "socket"):
        outlet = Outlet(address, SECRET, CPU, [kind])
        for version, _ in sizes:
            weights = tensors(version) if version < 4 else {"rows without columns": torch.zeros(3, 0)}
            send([outlet], version, Weights.of(weights))
            arrived(pipe, weights)
        assert outlet.kind == kind
        outlet.close()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_slots_together_take_one_bucket(engine, dtype):
    """Tensors are converted into the slots, which are full: nothing else is as large, checksums included."""
    size, count = 2**24, []
    weights = {"a": torch.arange(6e6).view(6000, 1000).to(dtype)}
    pipe, address = engine((1, size))

    class Counted(Outlet):
        def put(self, bucket):
            count.append(len(bucket))
            return super().put(bucket)

    outlet = Counted(address, SECRET, CPU)
    tensors_made = made(lambda: send([outlet], 1, Weights.of(weights)))
    arrived(pipe, weights)
    slots = [outlet._staging.slot(i).nbytes for i in range(SLOTS)]
    # Places in a slot are aligned.
    assert 0.9 * size < sum(slots) <= size + 4 * SLOTS * ALIGNMENT
    assert len(count) == -(-6000 // (part_bytes(size) // 4000))
    assert all(numel * of.itemsize < size // 4 or of == torch.uint8 for numel, of in tensors_made)


def test_what_fails_leaves_both_ends_ready(engine):
    """The engine refuses, the sender fails half way, the version is another one: then all is well again."""
    pipe, address = engine((1, 100), (2, 100), (3, 100), (4, 100))
    outlet = Outlet(address, SECRET, CPU)
    send([outlet], 1, Weights.of({"poison": torch.ones(2)}))
    assert "no such parameter" in pipe.recv()

    def half():
        yield from list(tensors().items())[:2]
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        send([outlet], 2, Weights(Weights.of(tensors()).specs, half))
    assert "SenderFailed" in pipe.recv()
    send([outlet], 9, Weights.of(tensors()))
    assert "version 9 were sent where version 3 was announced" in pipe.recv()
    send([outlet], 4, Weights.of(tensors()))
    arrived(pipe, tensors())
    assert outlet.kind == "memory"


def test_a_sender_that_ends_is_noticed():
    inlet = Inlet("127.0.0.1", SECRET, CPU, torch.float32)

    class Gone(Outlet):
        def put(self, bucket):
            self._connection.close()
            self._connection = None
            return False

    sending = threading.Thread(target=send, args=([Gone(inlet.address, SECRET, CPU)], 1, Weights.of(tensors())))
    sending.start()
    with pytest.raises(SenderFailed, match="closed its connection"):
        inlet.receive(1, lambda source: receive(source, lambda chunk: None))
    sending.join()


def test_strangers_are_sent_away(monkeypatch):
    """One without the secret, one who says nothing and goes, and one who says nothing and stays."""
    monkeypatch.setattr("verl_fn.backends.weight_sync.inlet.SECONDS_TO_ANSWER", 1)
    inlet = Inlet("127.0.0.1", SECRET, CPU, torch.float32)

    def knock_and_send():
        with pytest.raises(AuthenticationError):
            Client(inlet.address, authkey=b"another secret")
        socket.create_connection(inlet.address).close()
        with socket.create_connection(inlet.address):
            send([Outlet(inlet.address, SECRET, CPU)], 1, Weights.of(tensors()))

    sending = threading.Thread(target=knock_and_send)
    sending.start()
    names = []
    inlet.receive(1, lambda source: receive(source, lambda chunk: names.append(chunk.name)))
    sending.join()
    assert names == [name for name, t in tensors().items() if t.numel()]


@pytest.mark.parametrize("how", ["dropped", "repeated", "altered"])
def test_a_transport_that_loses_repeats_or_alters_a_bucket_is_caught(how):
    inlet = Inlet("127.0.0.1", SECRET, CPU, torch.float32)

    class Broken(Outlet):
        count = 0

        def put(self, bucket):
            self.count += 1
            if self.count == 2 and how == "dropped":
                return True
            if self.count == 2 and how == "altered":
                for chunk in bucket:
                    chunk.values.add_(1)
            if self.count == 2 and how == "repeated":
                super().put(bucket)
            return super().put(bucket)

    sending = threading.Thread(target=send, args=([Broken(inlet.address, SECRET, CPU)], 1, Weights.of(tensors())))
    sending.start()
    with pytest.raises(IncompleteWeights):
        inlet.receive(1, lambda source: receive(source, lambda chunk: None, max_bytes=100, checked=True))
    sending.join()


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ({"w": torch.ones(4, 2, dtype=torch.bfloat16)}, r"'w' was announced as torch.float32 rows .* torch.bfloat16"),
        ({"w": torch.ones(4, 1)}, r"'w' was announced as .* rows of shape \(2,\), .* of \(1,\)"),
        ({"w": torch.ones(5, 2)}, "rows 0 to 5 of 'w' arrived after 0 of its 4 rows"),
        ({"w": torch.ones(4, 2), "v": torch.ones(1)}, "'v' arrived, but it was not announced"),
        ({"w": torch.ones(3, 2)}, "ended early: 'w' has 3 of 4 rows"),
    ],
)  # fmt: skip
def test_what_was_announced_otherwise_is_refused_before_it_is_written(sent, says):
    announced, written = Weights.of({"w": torch.ones(4, 2)}).specs, []
    source = SimpleNamespace(specs=announced, buckets=Weights.of(sent).buckets)
    with pytest.raises(IncompleteWeights, match=says):
        receive(source, written.append)
    assert {chunk.name for chunk in written} <= {"w"}
    assert all(chunk.values.shape[1:] == (2,) and chunk.values.dtype == torch.float32 for chunk in written)


def test_a_sender_that_answers_too_late_connects_again(monkeypatch):
    """As after a pause of its process, in which the engine has given up waiting."""
    monkeypatch.setattr("verl_fn.backends.weight_sync.inlet.SECONDS_TO_ANSWER", 1)
    inlet, answers = Inlet("127.0.0.1", SECRET, CPU, torch.float32), []
    answer = channel.answer_challenge

    def late(connection, secret):
        if threading.current_thread() is sending:
            answers.append(secret)
            if len(answers) == 1:
                time.sleep(1.5)
        answer(connection, secret)

    monkeypatch.setattr(channel, "answer_challenge", late)
    sending = threading.Thread(target=send, args=([Outlet(inlet.address, SECRET, CPU)], 1, Weights.of(tensors())))
    sending.start()
    names = []
    inlet.receive(1, lambda source: receive(source, lambda chunk: names.append(chunk.name)))
    sending.join()
    assert names == [name for name, t in tensors().items() if t.numel()] and len(answers) == 2


def test_the_part_that_an_engine_chose_is_what_its_workers_get():
    """An engine passes on what arrives, which is a part here, to workers that know of no part."""
    whole, text = tensors(), {"text": torch.arange(3.0)}
    source = keeping(Weights.of, Params(whole | text), whole)
    chosen, taken = attrs.evolve(source.kept.changing, kept=source.kept), {}
    worker = Inlet("127.0.0.1", SECRET, CPU, torch.float32)
    sent = threading.Thread(target=send, args=([Outlet(worker.address, SECRET, CPU)], 1, chosen), daemon=True)
    sent.start()
    worker.receive(1, lambda arriving: receive(arriving, lambda c: taken.update({c.name: c.values.tolist()})))
    sent.join(60)
    assert taken == {"text": [0.0, 1.0, 2.0]}
