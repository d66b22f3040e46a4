"""Publications of several ranks, each of which sends the rows that it holds, and of adapters alone."""

import contextlib
import re
import threading
from types import SimpleNamespace

import attrs
import pytest
import torch
from published import CPU, SECRET, tensors

from verl_fn.backends.weight_sync import Cut, IncompleteWeights, Weights, apart, receive
from verl_fn.backends.weight_sync.channel import SenderFailed
from verl_fn.backends.weight_sync.inlet import Inlet
from verl_fn.backends.weight_sync.outlet import Outlet, send
from verl_fn.state import tree


def halves(number, of=2, spoilt=lambda name, t: t, edges=lambda edges: edges):
    """The rows of ``tensors()`` that one of several ranks holds; those of a scalar lie on the first."""

    def edges_of(rows):
        return tuple(min(rows, -(-rows // of) * i) for i in range(of + 1))

    whole = Weights.of(tensors())
    cuts = {spec.name: edges_of(spec.rows) for spec in whole.specs}
    cut = Cut(number, edges(cuts))

    def read():
        for name, t in tensors().items():
            rows = t.reshape(1) if t.ndim == 0 else t
            yield name, spoilt(name, rows[cuts[name][number] : cuts[name][number + 1]])

    return Weights(whole.specs, read, cut)


def sent_by_ranks(inlet, sources, outlets, version, max_bytes=100):
    """Sends from a thread for each rank; returns what arrived, or the inlet's error."""

    def sending(outlet, source):
        with contextlib.suppress(RuntimeError):
            send([outlet], version, source)

    threads = [threading.Thread(target=sending, args=pair) for pair in zip(outlets, sources, strict=True)]
    for thread in threads:
        thread.start()
    places = {name: torch.zeros_like(t, dtype=torch.float32) for name, t in tensors().items()}
    largest = []

    def publish(source):
        def write(chunk):
            rows = places[chunk.name].view(-1) if places[chunk.name].ndim == 0 else places[chunk.name]
            rows[chunk.start : chunk.start + len(chunk.values)] = chunk.values

        def noted():
            for bucket in source.buckets(max_bytes, checked=True):
                largest.append(sum(chunk.values.nbytes for chunk in bucket))
                yield bucket

        receive(SimpleNamespace(specs=source.specs, buckets=lambda *a, **k: noted()), write, checked=True)

    try:
        inlet.receive(version, publish)
    except IncompleteWeights as error:
        places = str(error)
    for thread in threads:
        thread.join()
    return places, largest


def ranks_of(inlet, count, cls=Outlet, kinds=None):
    return [cls(inlet.address, SECRET, CPU, kinds) for _ in range(count)]


@pytest.mark.parametrize(("of", "kind"), [(2, "group"), (2, "socket"), (3, "memory"), (9, "memory")])
def test_each_rank_sends_what_it_holds(of, kind):
    """Also where ranks have no row of a tensor, over the same connections again, in many buckets and in one."""
    inlet = Inlet("127.0.0.1", SECRET, CPU, torch.float32)
    outlets = ranks_of(inlet, of, kinds=[kind])
    for version, max_bytes in enumerate((1, 300, 2**20)):
        places, largest = sent_by_ranks(inlet, [halves(i, of) for i in range(of)], outlets, version, max_bytes)
        assert tree.equal(places, {name: t.float() for name, t in tensors().items()})
        # A bucket has a row of each rank at least.
        assert max(largest) <= max(max_bytes, of * 48)
    assert len(largest) == 1


class Drops(Outlet):
    """Loses its second bucket that is not empty."""

    count = 0

    def put(self, bucket):
        self.count += bool(bucket)
        return True if self.count == 2 and bucket else super().put(bucket)


class Repeats(Outlet):
    """Sends its second bucket that is not empty twice."""

    count = 0

    def put(self, bucket):
        self.count += bool(bucket)
        if self.count == 2 and bucket:
            super().put(bucket)
        return super().put(bucket)


class Relabels(Outlet):
    """Sends its rows in the place of another rank's."""

    def put(self, bucket):
        def elsewhere(chunk):
            rows = 25 if chunk.name == "embed" else 0
            return attrs.evolve(chunk, start=(chunk.start + rows) % 50 if rows else chunk.start)

        return super().put([elsewhere(chunk) for chunk in bucket])


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (Outlet, Drops, "a bucket was lost or sent twice|ended early"),
        (Drops, Outlet, "a bucket was lost or sent twice|ended early"),
        (Outlet, Repeats, "a bucket was lost or sent twice"),
        (Relabels, Relabels, r"rank 0 sent rows 25 to \d+ of 'embed', and had announced that it sends rows 0 to 25"),
    ],
    ids=["dropped", "dropped by the first", "sent twice", "swapped"],
)
def test_a_piece_that_is_lost_sent_twice_or_swapped_is_refused(first, second, says):
    """The next whole publication over the same inlet arrives."""
    inlet = Inlet("127.0.0.1", SECRET, CPU, torch.float32)
    outlets = [cls(inlet.address, SECRET, CPU) for cls in (first, second)]
    error, _ = sent_by_ranks(inlet, [halves(0), halves(1)], outlets, 1)
    assert re.search(says, error), error
    places, _ = sent_by_ranks(inlet, [halves(0), halves(1)], ranks_of(inlet, 2), 2)
    assert tree.equal(places, {name: t.float() for name, t in tensors().items()})


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        (lambda: [halves(0), halves(0)], r"came from the ranks \[0, 0\], not from each of 0 to 1 once"),
        (
            lambda: [halves(i, edges=lambda edges: edges | {"embed": (0, 25, 49)}) for i in range(2)],
            r"rows \(0, 25, 49\) of 'embed', but it has 50 rows",
        ),
        (
            lambda: [halves(0), halves(1, edges=lambda edges: edges | {"embed": (0, 20, 50)})],
            "ranks disagree about the rows",
        ),
    ],
    ids=["one twice", "rows of nobody", "other edges"],
)
def test_cuts_that_are_not_all_rows_once_are_refused_before_anything_is_sent(sources, says):
    inlet = Inlet("127.0.0.1", SECRET, CPU, torch.float32)
    error, buckets = sent_by_ranks(inlet, sources(), ranks_of(inlet, 2), 1)
    assert re.search(says, error) and not buckets


def test_a_rank_that_fails_half_way_ends_the_publication_of_all():
    inlet = Inlet("127.0.0.1", SECRET, CPU, torch.float32)

    def dies(name, t):
        if name == "bias":
            raise RuntimeError("this rank died")
        return t

    outlets = ranks_of(inlet, 2)
    error, _ = sent_by_ranks(inlet, [halves(0), halves(1, spoilt=dies)], outlets, 1)
    assert re.search("this rank died|closed its connection", error)
    places, _ = sent_by_ranks(inlet, [halves(0), halves(1)], outlets, 2)
    assert tree.equal(places, {name: t.float() for name, t in tensors().items()})


def with_adapters(base, scale, number):
    """The half of a model with an adapter that one of two ranks holds."""
    whole, own = (
        {"w": base * torch.ones(8, 3)},
        {"w.lora_A": scale * torch.ones(1, 3), "w.lora_B": torch.ones(8, 1)},
    )
    edges = {"w": (0, 4, 8), "w.lora_A": (0, 1, 1), "w.lora_B": (0, 4, 8)}

    def mine(t):
        return t[: (len(t) + 1) // 2] if number == 0 else t[(len(t) + 1) // 2 :]

    merged = Weights.of({"w": whole["w"] + own["w.lora_B"] @ own["w.lora_A"]})

    def cut(specs):
        return Cut(number, {spec.name: edges[spec.name] for spec in specs})

    def read():
        return ((name, mine(t)) for name, t in merged.read())

    return Weights(merged.specs, read, cut(merged.specs), apart=apart(whole, own, rows=mine, cut=cut, local=mine))


class Engine:
    """Takes adapters alone where it has their model."""

    def __init__(self):
        self.inlet = Inlet("127.0.0.1", SECRET, CPU, torch.float32)
        self.base, self.tensors, self.sent = None, {}, []

    def publish(self, source):
        base = source.apart.identify()
        chosen = source.apart.changing if base == self.base else source.apart.whole
        self.base = base
        self.sent.append([spec.name for spec in chosen.specs])
        for spec in chosen.specs:
            self.tensors[spec.name] = torch.full(spec.shape, torch.nan)

        def write(chunk):
            self.tensors[chunk.name][chunk.start : chunk.start + len(chunk.values)] = chunk.values

        receive(chosen, write, max_bytes=40, checked=True)


def publish_to(engines, outlets, version, base, scale):
    """Both ranks send to all engines."""
    work = [(send, (outlets[rank], version, with_adapters(base, scale, rank))) for rank in range(2)]
    work += [(engine.inlet.receive, (version, engine.publish)) for engine in engines]
    threads = [threading.Thread(target=call, args=args) for call, args in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for engine in engines:
        want = {"w": base * torch.ones(8, 3), "w.lora_A": scale * torch.ones(1, 3), "w.lora_B": torch.ones(8, 1)}
        assert tree.equal(engine.tensors, want)


def test_adapters_go_alone_to_each_engine_that_has_their_model():
    """Of two engines one is made anew, and takes the model in the same publication; another model goes to both."""
    engines = [Engine(), Engine()]
    outlets = [[Outlet(engine.inlet.address, SECRET, CPU) for engine in engines] for _ in range(2)]
    publish_to(engines, outlets, 1, 1.0, 1.0)
    publish_to(engines, outlets, 2, 1.0, 2.0)
    engines[1] = Engine()
    for mine in outlets:
        mine[1] = Outlet(engines[1].inlet.address, SECRET, CPU)
    publish_to(engines, outlets, 3, 1.0, 3.0)
    publish_to(engines, outlets, 4, 5.0, 3.0)
    own, everything = ["w.lora_A", "w.lora_B"], ["w", "w.lora_A", "w.lora_B"]
    assert engines[0].sent == [everything, own, own, everything]
    assert engines[1].sent == [everything, everything]


def test_engines_that_want_different_forms_are_refused():
    """One takes adapters merged, the other one alone: one reading has not both."""
    inlet, engine = Inlet("127.0.0.1", SECRET, CPU, torch.float32), Engine()
    outlets = [Outlet(i.address, SECRET, CPU) for i in (inlet, engine.inlet)]
    source, errors = Weights.of({"w": torch.ones(2, 3)}), []
    source = attrs.evolve(source, apart=apart({"w": torch.ones(2, 3)}, {"w.lora_A": torch.ones(1, 3)}))

    def receiving(one, publish):
        with pytest.raises(SenderFailed):
            one.receive(1, publish)
        errors.append("refused")

    threads = [
        threading.Thread(target=receiving, args=args)
        for args in ((inlet, lambda given: receive(given, lambda chunk: None)), (engine.inlet, engine.publish))
    ]
    for thread in threads:
        thread.start()
    with pytest.raises(ValueError, match="some engines of one publication take only adapters"):
        send(outlets, 1, source)
    for thread in threads:
        thread.join()
    assert len(errors) == 2
