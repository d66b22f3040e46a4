"""The check of whether a trainer and a rollout engine compute log-probs that are equal in every bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verl_fn.backends.protocol import Sampling
from verl_fn.state import Batch, Key, pack, requests_for
from verl_fn.steps import aggregate, cross_entropy, exact_gap

from .violation import require

LAW = "Exactness"
# The ways in which a run may draw.
SAMPLINGS = (
    Sampling(24, n=2),
    Sampling(24, n=2, temperature=0.6),
    Sampling(24, n=2, temperature=1.5, top_k=5),
    Sampling(24, n=2, temperature=0.9, top_k=6, top_p=0.8),
)


def check_exact(
    trainer: Any,
    engine: Any,
    prompts: Sequence[Sequence[int]],
    *,
    updates: int = 2,
    samplings: Sequence[Sampling] = SAMPLINGS,
    state: Any = None,
    key: Key | None = None,
    get: Callable[[Any], Any] = lambda value: value,
) -> int:
    """Checks that log-probs of trainer and engine are equal in every bit, before and after updates.

    The trainer computes all rows together, and some of them by themselves; the engine draws them token by token.

    Args:
        trainer: a backend with ``exact``.
        engine: a rollout engine with ``exact``, for the same model folder.
        prompts: token ids; many lengths show more.
        updates: how many updates follow the first comparison.
        samplings: how tokens are drawn.
        state: of the trainer, to begin with; by default the weights of its folder.
        key: of the draws.
        get: returns the value behind a reference.

    Returns:
        How many log-probs were compared.

    Raises:
        LawViolation: a log-prob differs; the message names the first module of the model whose results do.
    """
    key = key or Key.from_seed(0)
    state = trainer.load_pretrained() if state is None else state
    count = 0
    for version in range(updates + 1):
        get(engine.publish(version, trainer.weights(state.params)))
        for number, sampling in enumerate(samplings):
            requests = requests_for(prompts, sampling, key.fold_in(version).fold_in(number))
            batch = pack(get(engine.generate(requests, version=version)))
            alone = batch.take([0, len(batch) - 1])
            for part in (batch, alone):
                _require_equal(trainer, engine, state, part, f"version {version}, {sampling}", get)
            count += int((batch["response_mask"] != 0).sum())
        if version < updates:
            grads, _ = trainer.forward_backward(state, aggregate(batch), cross_entropy())
            state, _ = trainer.apply_update(state, grads)
    return count


def _require_equal(trainer: Any, engine: Any, state: Any, batch: Batch, what: str, get: Callable[[Any], Any]) -> None:
    from verl_fn.backends.hf.activations import first_parting

    log_probs = get(trainer.forward(state.params, batch, ("logprobs",))).logprobs
    count, largest = (metric.value for metric in exact_gap(batch, log_probs).values())
    if count == 0:
        return
    parting = first_parting(trainer.activations(state.params, batch), engine.activations(batch))
    place = "nowhere by teacher forcing" if parting is None else f"first in {parting.name}"
    sampled = int((batch["response_mask"] != 0).sum())
    require(
        False,
        LAW,
        f"{count:.0f} of {sampled} log-probs differ by up to {largest:.3g} nats ({what}), {place}",
        "a kernel that adds in another order if a call has more rows, other weights, or another temperature",
    )
