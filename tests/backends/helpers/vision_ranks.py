"""What ranks do with models with images; each function runs on all of them together."""

import threading
from unittest import mock

import torch
import torch.distributed as dist
from published import CPU, SECRET
from vision_cases import seen_batch

from verl_fn.backends.fsdp import Fsdp
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.vision import Seen
from verl_fn.backends.local import Local
from verl_fn.backends.sampler import Sampler
from verl_fn.backends.weight_sync.inlet import Inlet
from verl_fn.backends.weight_sync.outlet import Outlet, send
from verl_fn.steps import cross_entropy, sgd

OPTIONS = {
    "full": {},
    "frozen tower": {"freeze_vision_tower": True},
    "adapters": {"lora": Lora(rank=2)},
    "adapters beside a frozen tower": {"lora": Lora(rank=2), "freeze_vision_tower": True},
    "recomputed": {"checkpointing": True, "reshard_after_forward": False},
}


def beside_local(folder, name, rows):
    """The largest differences of log-probs, gradients and weights after an update, and which ranks saw nothing.

    The first rank gets all images if ``rows`` are one row with images and some without.
    """
    options, batch = dict(OPTIONS[name]), seen_batch(folder).take(rows)
    batch = batch.with_tokens(loss_weight=batch["response_mask"] / batch["response_mask"].sum())
    sharded = Fsdp(folder, sgd(0.1), max_tokens=44, **options)
    options.pop("reshard_after_forward", None)
    alone = Local(folder, sgd(0.1), max_tokens=44, **options)
    blank, made = [], Seen.of

    def watched(*args):
        blank.append(made(*args).blank)
        return made(*args)

    found = []
    for backend in (sharded, alone):
        state = backend.load_pretrained()
        with mock.patch.object(Seen, "of", watched if backend is sharded else made):
            outputs = backend.forward(state.params, batch).logprobs
            grads, _ = backend.forward_backward(state, batch, cross_entropy())
        named = dict(backend.named(grads))
        state, _ = backend.apply_update(state, grads)
        found.append((outputs, named, dict(backend.named(state.params))))
    (outputs, grads, after), (expected, wanted, then) = found
    assert grads.keys() == wanted.keys() and after.keys() == then.keys()
    apart = {n: (grads[n] - t).abs().max() / t.abs().max().clamp(min=1e-3) for n, t in wanted.items()}
    return {
        "logprobs": float((outputs - expected).abs().max()),
        "gradients": float(max(apart.values())),
        "weights": max(float((after[n] - then[n]).abs().max()) for n in then),
        "trained": sorted(wanted),
        "blank": blank,
    }


class Engine:
    """An engine of the first rank, to which all ranks send; ``sent`` has the names of each publication."""

    def __init__(self, folder):
        self.sampler, self.inlet, self.sent = Sampler(folder), None, []
        if dist.get_rank() == 0:
            self.inlet = Inlet("127.0.0.1", SECRET, CPU, torch.float32)
        address = [None if self.inlet is None else self.inlet.address]
        dist.broadcast_object_list(address)
        self.outlet = Outlet(address[0], SECRET, CPU)

    def receive(self, version):
        """Waits for a publication, in a thread."""
        write = self.sampler.decoder.write
        names = set()

        def noted(chunk):
            names.add(chunk.name)
            write(chunk)

        with mock.patch.object(self.sampler.decoder, "write", noted):
            self.inlet.receive(version, lambda source: self.sampler.publish(version, source))
        self.sent.append(names)


def publish(engines, version, source):
    """Publishes to all engines; returns whether the last publication has a tower, by engine."""
    threads = [threading.Thread(target=one.receive, args=(version,)) for one in engines if one.inlet is not None]
    for thread in threads:
        thread.start()
    send([engine.outlet for engine in engines], version, source.held or source)
    for thread in threads:
        thread.join()
    assert all(one.sampler.version == version for one in engines if one.inlet is not None)
    return [any("visual." in name for name in one.sent[-1]) for one in engines if one.inlet is not None]


def tower_sent_once(folder, lora):
    """Whether each publication has a tower; the weights of the engines; and what identifies towers."""
    options = {"lora": Lora(rank=2)} if lora else {}
    backend = Fsdp(folder, sgd(0.1), freeze_vision_tower=True, **options)
    state, engines, sent = backend.load_pretrained(), [Engine(folder), Engine(folder)], []
    sent.append(publish(engines, 0, backend.weights(state.params)))
    grads, _ = backend.forward_backward(state, seen_batch(folder), cross_entropy())
    state, _ = backend.apply_update(state, grads)
    sent.append(publish(engines, 1, backend.weights(state.params)))
    # Of two engines one is made anew, and takes the tower in the same publication.
    engines[1] = Engine(folder)
    sent.append(publish(engines, 2, backend.weights(state.params)))
    # Of a shard, only the last rank's part is edited.
    bias = next(t for name, t in state.params.items() if "visual." in name and name.endswith("bias"))
    if dist.get_rank() == dist.get_world_size() - 1:
        bias.to_local().add_(1.0)
    sent.append(publish(engines, 3, backend.weights(state.params)))
    named = dict(backend.weights(state.params).read())
    found = [one.sampler.decoder._weights for one in engines if one.inlet is not None]
    equal = all(tensors.keys() == named.keys() for tensors in found) and all(
        torch.equal(t, named[name].reshape(t.shape)) for tensors in found for name, t in tensors.items()
    )
    return sent, equal


def tower_in_one_process(folder):
    """The names of what an engine of the same process gets, without the text, before and after an update."""
    backend = Fsdp(folder, sgd(0.1), freeze_vision_tower=True)
    state, sampler, sent = backend.load_pretrained(), Sampler(folder), []
    for version in range(2):
        weights = backend.weights(state.params)
        with mock.patch.object(sampler.decoder, "write", side_effect=sampler.decoder.write) as write:
            sampler.publish(version, weights)
        sent.append(any("visual." in call.args[0].name for call in write.call_args_list))
        assert all(torch.equal(t, sampler.decoder._weights[name].reshape(t.shape)) for name, t in weights.read())
        grads, _ = backend.forward_backward(state, seen_batch(folder), cross_entropy())
        state, _ = backend.apply_update(state, grads)
    return sent
