"""What ranks do with models with images; each function runs on all of them together."""

from unittest import mock

from vision_cases import seen_batch

from verl_fn.backends.fsdp import Fsdp
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.vision import Seen
from verl_fn.backends.local import Local
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
