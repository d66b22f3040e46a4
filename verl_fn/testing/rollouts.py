"""Laws of a rollout engine: ``check_rollout``, and ``check_exact`` for one whose log-probs equal the trainer's bits.

``rollout_case`` has the laws of publication.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from verl_fn.algorithms.workers import get_here
from verl_fn.backends.protocol import RolloutBackend, Sampling, TrainBackend, UnsupportedSampling
from verl_fn.state import Batch, Key, Params, Sample, pack, requests_for
from verl_fn.steps import aggregate, cross_entropy, exact_gap

from .rollout_case import RolloutCase, check_broken, check_copied, check_first, check_in_flight, publish_first
from .violation import LawViolation, require, seeded, untouched

PROMPTS = ((1, 5), (4,), (5, 4, 6), (1, 5))
DRAWS = 500
# Enough to draw a token that should have been cut.
CUT_DRAWS = 100
COPIES = 6
# Two computations of the same token may pick different experts if rounding decides.
ROUNDED = 0.1

# The ways in which a run may draw.
SAMPLINGS = (
    Sampling(24, n=2),
    Sampling(24, n=2, temperature=0.6),
    Sampling(24, n=2, temperature=1.5, top_k=5),
    Sampling(24, n=2, temperature=0.9, top_k=6, top_p=0.8),
)


def check_rollout(
    engine: RolloutBackend | Callable[[], RolloutBackend],
    trainer: TrainBackend | None = None,
    *,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    stop_token_ids: Sequence[int] = (2,),
    environment: bool = False,
    tolerance: float = 1e-3,
    key: Key | None = None,
    get: Callable[[Any], Any] = get_here,
) -> None:
    """Checks a rollout engine against its protocol.

    * Signature: samples request by request, with the protocol's fields; a stream gives the same samples, each once.
    * Version: weights are asked for by version, and stale ones refused; published tensors are read at once and
      neither changed nor kept; after a publication that lost, repeated or broke off a bucket, nothing is served.
    * Purity: what ``capabilities`` promises of draws: they are repeated (``repeatable``), and depend on the request's
      key and the sample's number, and on nothing else (``batch_independent``).
    * Log-probs, with ``trainer``: by the policy that was published, for the distribution that was drawn from.
      Responses come as often as these say, and temperature 0 takes the most likely token.
    * In flight, with ``trainer`` and ``versions_per_token``; see ``rollout_case.check_in_flight``.
    * Capabilities: a way of sampling that is promised is obeyed, and one that is not promised is refused. Experts of
      tokens are there if promised (``routed_experts``), and depend only on the tokens up to each.

    Samples with ``near_ties`` are left out when draws are compared.

    Args:
        engine: an engine, or a function that makes one.
        trainer: a training backend for the same model: it makes the weights and says what log-probs should be.
            Without one, nothing is published and the answers count as scripted.
        prompts: token ids.
        stop_token_ids: all ids that end a response, the model's own included.
        environment: whether one may write tokens (their mask is 0) and drop or branch samples.
        tolerance: how far log-probs may differ, relative to the largest or to 1.
        key: other keys give other draws.
        get: fetches the value behind a reference, for engines in other processes.

    Raises:
        LawViolation: a promise is broken.

    Example:
        >>> from verl_fn.backends.mock import Mock
        >>> from verl_fn.backends.mock import MockRollout, sample_table
        >>> from verl_fn.steps import constant, sgd
        >>> check_rollout(MockRollout(sample_table), Mock(8, sgd(constant(0.1))))
        >>> check_rollout(MockRollout({(3,): [4, 5, 2]}), prompts=[(3,)])
    """
    made: RolloutBackend = engine if hasattr(engine, "generate") else engine()  # type: ignore[assignment]
    stops = tuple(stop_token_ids) if made.capabilities.stop_token_ids else ()
    sampling = Sampling(6, n=3, stop_token_ids=stops)
    ends, key = tuple(stop_token_ids), key or Key.from_seed(0)
    case = RolloutCase(made, trainer, [tuple(p) for p in prompts], sampling, tolerance, key, environment, ends, get)
    _check_laws(case)


def _check_laws(case: RolloutCase) -> None:
    engine, trainer = case.engine, case.trainer
    first, second = case.weights("first"), case.weights("second")
    if engine.version is None:
        case.require_stale("before anything was published", None)
        if trainer is not None:
            check_first(case, first)
    given = publish_first(case, first)
    if engine.capabilities.repeatable:
        _repeated(case)
        check_copied(case, given)
        _streamed(case)
    for sampling in _samplings(case):
        samples = case.generate(sampling=sampling)
        _signature(case, sampling, samples)
        check_routes(case, samples)
        case.require_log_probs(samples, {3: first}, sampling=sampling)
    if engine.capabilities.batch_independent:
        _independent(case)
    # Environments may give all samples of a stream at its end.
    if engine.capabilities.versions_per_token and trainer is not None and not case.environment:
        check_in_flight(case, first, second)
        case.publish(3, case.tensors(first))
    if trainer is not None:
        check_draws(case)
    _refused(case)
    _versions(case, first, second)
    if trainer is not None:
        check_broken(case, first)


def _samplings(case: RolloutCase) -> list[Sampling]:
    """The ways of sampling that the engine promises."""
    plain, able = case.sampling, case.engine.capabilities
    samplings = [plain, attrs.evolve(plain, temperature=0.7), attrs.evolve(plain, temperature=0.0)]
    if able.top_k:
        samplings.append(attrs.evolve(plain, temperature=1.5, top_k=3))
    if able.top_p:
        samplings.append(attrs.evolve(plain, top_p=0.8))
    return samplings


def _repeated(case: RolloutCase) -> None:
    """The same request gives the same, whatever the global generators hold, and does not touch them."""
    results = []
    for seed in (1, 2):
        with seeded(seed), untouched("Purity", "generate"):
            results.append(case.generate(version=3))
    first, second = results
    cause = "a generator that does not come from the key, or a promise (repeatable) that cannot be kept"
    case.require_same("Purity", "the same request again", first, second, cause)


def _streamed(case: RolloutCase) -> None:
    """A stream gives the samples of ``generate``, each once, in any order."""
    whole, streamed = case.generate(), case.stream()
    names = sorted((s.request, s.number) for s in streamed)
    require(
        names == sorted((s.request, s.number) for s in whole),
        "Signature",
        f"the stream's requests and numbers are {names}",
        "samples that are lost or repeated, or numbered in the order in which they end",
    )
    cause = "a key that depends on when a sample is drawn"
    case.require_same("Purity", "the stream of the same requests", whole, streamed, cause)


def _signature(case: RolloutCase, sampling: Sampling, samples: Sequence[Sample]) -> None:
    ids = [case.id(i) for i in range(len(case.prompts))]
    names = [(s.request, s.number) for s in samples]
    places = [(ids.index(request), number) for request, number in names if request in ids]
    exact = [(i, number) for i in range(len(ids)) for number in range(sampling.n)]
    ordered = len(places) == len(names) and places == sorted(set(places))
    require(
        places == exact if not case.environment else ordered and {i for i, _ in places} == set(range(len(ids))),
        "Signature",
        f"with n={sampling.n} the samples' requests and numbers are {names}",
        "samples ordered one of each prompt after the other, or requests named by position",
    )
    prompts = dict(zip(ids, case.prompts, strict=True))
    for s in samples:
        require(
            tuple(s.prompt.tolist()) == prompts[s.request],
            "Signature",
            f"a sample of request {s.request} has the prompt {s.prompt.tolist()}",
            "samples of another prompt",
        )
        fields = (s.log_probs, s.mask, s.versions, *([] if s.full_log_probs is None else [s.full_log_probs]))
        require(
            all(t.shape == s.tokens.shape for t in fields) and (s.full_log_probs is not None) == sampling.cuts,
            "Signature",
            f"a sample of {len(s.tokens)} tokens has fields of other lengths, or lacks full_log_probs",
            "fields that hold the prompt too, or an engine that forgets the distribution before the cut",
        )
        _fields(case, sampling, s)
        _ends(case, sampling, s)


def _fields(case: RolloutCase, sampling: Sampling, sample: Sample) -> None:
    """Masks, log-probs, versions and the temperature of one sample."""
    drawn = sample.mask.bool()
    require(
        bool(drawn.any()) and (case.environment or bool(drawn.all())),
        "Signature",
        f"the mask is {sample.mask.tolist()}",
        "an offset, or tokens that the model did not draw",
    )
    outside = float(sample.log_probs[~drawn].abs().sum())
    highest = float(sample.log_probs.max())
    require(
        outside == 0 and highest <= 1e-5,
        "Signature",
        f"log_probs reaches {max(outside, highest):.3g}",
        "log-probs of tokens that were not drawn, or logits that were not normalised",
    )
    temperature = sampling.temperature or 1.0
    by = abs(sample.temperature - temperature)
    require(by < 1e-6, "Signature", f"temperature is off by {by:.3g} from {temperature}", "a default that is ignored")
    versions = sorted(set(sample.versions[drawn].tolist()))
    expected = case.engine.version
    observation = f"samples of version {expected} report the versions {versions}"
    require(versions == [expected], "Version", observation, "a version that is not passed on")


def _ends(case: RolloutCase, sampling: Sampling, sample: Sample) -> None:
    """Responses stop when they must, and ``finish_reason`` says which did so by themselves."""
    response = sample.tokens[sample.mask.bool()].tolist()
    finished = sample.finish_reason == "stop"
    stops = [token in case.ends for token in response]
    require(
        1 <= len(response) <= sampling.max_tokens and not any(stops[:-1]),
        "Signature",
        f"a response of {len(response)} tokens goes on past {sampling.max_tokens} tokens or a stop token",
        "an end that is checked too late",
    )
    # A script or an environment may end when it likes.
    free = case.trainer is None or case.environment
    ended = stops[-1] or (free and finished)
    require(
        finished == ended and (ended or free or len(response) == sampling.max_tokens),
        "Signature",
        f"finish_reason is {sample.finish_reason} for the response {response}",
        "rows that were cut off taken for finished ones",
    )


def _independent(case: RolloutCase) -> None:
    """Draws don't depend on the batch around a row, nor on anything global."""
    whole, size = case.generate(), len(case.prompts)
    position = "a seed from the position in the batch instead of (request's key, sample)"
    turned = list(range(size))[::-1]
    case.require_same("Purity", "the same prompts in another order", whole, case.generate(turned), position)
    alone = [sample for i in range(size) for sample in case.generate([i])]
    case.require_same("Purity", "the same prompts one at a time", whole, alone, position)
    fewer = case.generate(sampling=attrs.evolve(case.sampling, n=1))
    cause = "a seed that depends on how many samples are drawn"
    case.require_same("Purity", "the first sample alone", whole, fewer, cause)


def _refused(case: RolloutCase) -> None:
    """A way of sampling that is not promised is refused, not ignored."""
    able, plain = case.engine.capabilities, case.sampling
    for name, promised, sampling in (
        ("top_k", able.top_k, attrs.evolve(plain, top_k=2)),
        ("top_p", able.top_p, attrs.evolve(plain, top_p=0.5)),
        ("stop_token_ids", able.stop_token_ids, attrs.evolve(plain, stop_token_ids=case.ends or (2,))),
    ):
        if promised:
            continue
        try:
            case.generate(sampling=sampling)
        except UnsupportedSampling:
            continue
        raise LawViolation(
            "Capabilities",
            f"{name} is not among the engine's capabilities, and a request that uses it is answered",
            "a field of Sampling that is ignored; call check_sampling first",
        )


def _versions(case: RolloutCase, first: Params, second: Params) -> None:
    """New weights replace the old ones, and sleep forgets them."""
    engine, before = case.engine, case.generate()
    case.publish(4, case.tensors(second))
    if not engine.capabilities.versions_per_token:
        case.require_stale("after version 4 replaced version 3", 3)
    samples = case.generate(version=4)
    _signature(case, case.sampling, samples)
    versions = sorted({v for s in samples for v in s.versions.tolist()})
    observation = f"samples of version 4 report the versions {versions}"
    require(versions == [4], "Version", observation, "a version that is not passed on")
    case.require_log_probs(samples, {4: second})
    case.get(engine.sleep())
    case.require_stale("after sleep", 4)
    case.get(engine.wake())
    case.require_stale("after wake, before weights were published again,", 4)
    case.publish(5, case.tensors(first))
    what = "the engine, with its first weights published again,"
    if engine.capabilities.repeatable:
        cause = "caches that outlive the weights that they were made with"
        case.require_same("Version", what, before, case.generate(version=5), cause)


def check_draws(case: RolloutCase) -> None:
    """Checks what draws depend on, how often each response comes, and what top-k, top-p and temperature 0 leave."""
    _keyed(case)
    plain = Sampling(2)
    drawn = _draw(case, plain, DRAWS)
    _frequencies(plain, drawn)
    others = [attrs.evolve(plain, temperature=0.5)]
    if case.engine.capabilities.top_k:
        others.append(attrs.evolve(plain, temperature=1.5, top_k=3))
    for sampling in others:
        _frequencies(sampling, _draw(case, sampling, DRAWS))
    _greedy(case, drawn)
    _cuts(case)


def _keyed(case: RolloutCase) -> None:
    """Checks that the request's key and the sample's number make a difference."""
    whole, other = (
        [s.tokens.tolist() for s in case.generate(key=key)] for key in (None, case.key.fold_in("another"))
    )
    require(whole != other, "Purity", "another key gives the same responses", "a key that is ignored")
    first = {s.request: s.tokens.tolist() for s in reversed(case.generate())}
    repeated = all(first[s.request] == s.tokens.tolist() for s in case.generate())
    require(not repeated, "Purity", "all samples of a prompt are the same", "a seed without the sample's number")
    responses = defaultdict(list)
    for s in case.generate([0] * COPIES, ids=range(COPIES)):
        responses[s.request].append(tuple(s.tokens.tolist()))
    require(
        len(set(map(tuple, responses.values()))) > 1,
        "Purity",
        f"{COPIES} requests with the same prompt and other keys get the same responses",
        "responses that are cached by prompt, or a seed from the prompt instead of the request's key",
    )


def _draw(case: RolloutCase, sampling: Sampling, number: int = CUT_DRAWS) -> list[Sample]:
    """Draws many responses to the first prompt."""
    return case.generate([0], sampling=attrs.evolve(sampling, n=number))


def _frequencies(sampling: Sampling, samples: Sequence[Sample]) -> None:
    """Checks that responses come as often as their log-probs say.

    A share as far from its probability as 5 standard deviations, or for a rare response as unlikely (Chernoff's
    bound), is an error. Responses have two tokens, since one draw for all positions has the right distribution at
    each of them.
    """
    log_probs: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for s in samples:
        log_probs[tuple(s.tokens.tolist())].append(float(s.log_probs.double().sum()))
    for response, sums in log_probs.items():
        share, probability = len(sums) / len(samples), math.exp(sum(sums) / len(sums))
        require(
            len(samples) * _divergence(share, probability) <= 5.0**2 / 2,
            "Log-probs",
            f"the tokens {list(response)} of probability {probability:.3g} were drawn in a share of {share:.3g} "
            f"of {len(samples)} samples, with {sampling}",
            "draws from another distribution than the one whose log-probs are given, or one draw for all tokens",
        )


def _divergence(share: float, probability: float) -> float:
    """Returns the KL divergence of two draws with these probabilities, in nats."""
    pairs = ((share, probability), (1.0 - share, 1.0 - probability))
    return sum(p * math.log(p / max(q, 1e-12)) for p, q in pairs if p > 0.0)


def _greedy(case: RolloutCase, drawn: Sequence[Sample]) -> None:
    """Checks that temperature 0 takes the most likely of the tokens that were drawn at temperature 1."""
    cause = "temperature 0 that samples, or that takes another token than the most likely one"
    samples = [s for s in case.generate(sampling=attrs.evolve(case.sampling, temperature=0.0)) if not s.near_ties]
    answers = {s.request: s.tokens.tolist() for s in samples}
    same = all(answers[s.request] == s.tokens.tolist() for s in samples)
    require(same, "Log-probs", "at temperature 0 the samples of a prompt differ", cause)
    if case.id(0) not in answers:
        return
    taken = answers[case.id(0)][0]
    log_probs = {token: choices[0].log_prob for token, choices in _by_context(drawn)[()].items()}
    likeliest = max(log_probs, key=log_probs.__getitem__)
    require(
        log_probs.get(taken, -math.inf) >= log_probs[likeliest] - case.tolerance,
        "Log-probs",
        f"at temperature 0 the engine takes token {taken}, and token {likeliest} is more likely",
        cause,
    )


@attrs.frozen
class _Choice:
    """The log-probs of a token that was drawn, after and before top-k and top-p."""

    log_prob: float
    full: float


def _by_context(samples: Sequence[Sample]) -> dict[tuple[int, ...], dict[int, list[_Choice]]]:
    """Returns what was drawn: by the tokens before it in the response, and by token."""
    drawn: dict[tuple[int, ...], dict[int, list[_Choice]]] = defaultdict(lambda: defaultdict(list))
    for s in samples:
        tokens, log_probs = s.tokens.tolist(), s.log_probs.tolist()
        full = log_probs if s.full_log_probs is None else s.full_log_probs.tolist()
        for i, token in enumerate(tokens):
            drawn[tuple(tokens[:i])][token].append(_Choice(log_probs[i], full[i]))
    return drawn


def _cuts(case: RolloutCase) -> None:
    """Checks that top-k and top-p leave out what they must, each and both together, at every position."""
    able, plain = case.engine.capabilities, Sampling(2)
    if able.top_k:
        _cut(case, attrs.evolve(plain, top_k=2))
    if able.top_p:
        _cut(case, attrs.evolve(plain, top_p=0.5))
    if able.top_k and able.top_p:
        _cut(case, attrs.evolve(plain, temperature=1.5, top_k=4, top_p=0.5))
        _cut(case, attrs.evolve(plain, temperature=1.5, top_k=2, top_p=0.99))


def _cut(case: RolloutCase, sampling: Sampling) -> None:
    """Checks the tokens that were drawn after the same tokens, for each place."""
    drawn = _by_context(_draw(case, sampling))
    with_top_k = _by_context(_draw(case, attrs.evolve(sampling, top_p=1.0))) if sampling.top_k > 0 else {}
    how = f"with top_k={sampling.top_k} and top_p={sampling.top_p}"
    for before, choices in drawn.items():
        require(
            sampling.top_k < 0 or len(choices) <= sampling.top_k,
            "Capabilities",
            f"{how} the engine drew {len(choices)} different tokens at one place",
            "capabilities that promise top_k although it is ignored",
        )
        left = _left(choices)
        require(
            max(left) - min(left) <= 2.0 * case.tolerance,
            "Log-probs",
            f"{how} the log-probs say that the tokens which are left have a probability of {min(left):.3g} and of "
            f"{max(left):.3g} together",
            "log-probs that are not renormalised after top-k or top-p",
        )
        if sampling.top_p < 1.0 and (sampling.top_k < 0 or before in with_top_k):
            # Top-k comes first, and top-p is a share of the probability that it leaves.
            of_top_k = 1.0 if sampling.top_k < 0 else min(_left(with_top_k[before]))
            _nucleus(case, how, choices, sampling.top_p * of_top_k)


def _left(choices: dict[int, list[_Choice]]) -> list[float]:
    """Returns the probability that all tokens which were not cut have together, as each draw's log-probs give it."""
    return [math.exp(c.full - c.log_prob) for of_token in choices.values() for c in of_token]


def _nucleus(case: RolloutCase, how: str, choices: dict[int, list[_Choice]], target: float) -> None:
    """Checks that the tokens which are left are the fewest likely ones whose probability reaches ``target``."""
    probs = sorted(math.exp(of_token[0].full) for of_token in choices.values())
    likelier, left = sum(probs[1:]), min(_left(choices))
    require(
        likelier < target + 2.0 * case.tolerance,
        "Capabilities",
        f"{how} the engine drew a token below others of probability {likelier:.3g} together",
        "capabilities that promise top_p although it is ignored",
    )
    require(
        left >= target - 2.0 * case.tolerance,
        "Capabilities",
        f"{how} the tokens that are left have a probability of only {left:.3g} together",
        "a top_p that drops the token which reaches it, or another number than the request's",
    )


def check_routes(case: RolloutCase, samples: Sequence[Sample]) -> None:
    """Checks the experts of the tokens of a call's samples."""
    promised = case.engine.capabilities.routed_experts
    for sample in samples:
        routed = sample.routed_experts
        require(
            (routed is not None) == promised,
            "Capabilities",
            f"routed_experts are {'' if promised else 'not '}promised, and a sample has {_shape(routed)}",
            "a capability that was not set, or an engine that was made without the option",
        )
        if routed is not None:
            _whole_routes(sample, routed)
    if promised:
        _causal_routes(samples)


def _whole_routes(sample: Sample, routed: Tensor) -> None:
    """Every token has as many different experts in every layer."""
    length = len(sample.prompt) + len(sample.tokens)
    require(
        routed.ndim == 3 and len(routed) == length and not routed.dtype.is_floating_point,
        "Capabilities",
        f"routed_experts of a row of {length} tokens is {_shape(routed)}",
        "experts of only the response, or none for the last token, whose experts repeat the ones before",
    )
    ordered = routed.long().sort(-1).values
    different = bool((ordered.diff(dim=-1) > 0).all())
    require(different, "Capabilities", "a token goes to one expert twice", "zeros for layers without experts")
    require(
        torch.equal(routed[-1], routed[-2]),
        "Capabilities",
        "the last token has other experts than the one before, although no engine computes it",
        "experts that are shifted by a token, or memory that was never written",
    )


def _causal_routes(samples: Sequence[Sample]) -> None:
    """Tokens with the same tokens before them have the same experts."""
    first: dict[int, Sample] = {}
    compared, other = 0, 0
    for sample in samples:
        before = first.setdefault(sample.request, sample)
        rows = [torch.cat([s.prompt, s.tokens]) for s in (before, sample)]
        size = min(len(row) for row in rows) - 1
        same = int((rows[0][:size] == rows[1][:size]).long().cumprod(0).sum())
        assert before.routed_experts is not None and sample.routed_experts is not None
        differs = (before.routed_experts[:same] != sample.routed_experts[:same]).flatten(1).any(1)
        compared, other = compared + same, other + int(differs.sum())
    require(
        other <= ROUNDED * compared,
        "Capabilities",
        f"{other} of {compared} tokens have other experts in another sample that begins with the same tokens",
        "experts that are shifted by a token, or experts of another row",
    )


def _shape(routed: Tensor | None) -> str:
    return "none" if routed is None else f"{routed.dtype}{list(routed.shape)}"


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
    from verl_fn.backends.hf.exact import first_parting

    log_probs = get(trainer.forward(state.params, batch, ("logprobs",))).logprobs
    count, largest = (metric.value for metric in exact_gap(batch, log_probs).values())
    if count == 0:
        return
    parting = first_parting(trainer.activations(state.params, batch), engine.activations(batch))
    place = "nowhere by teacher forcing" if parting is None else f"first in {parting.name}"
    sampled = int((batch["response_mask"] != 0).sum())
    raise LawViolation(
        "Exactness",
        f"{count:.0f} of {sampled} log-probs differ by up to {largest:.3g} nats ({what}), {place}",
        "a kernel that adds in another order if a call has more rows, other weights, or another temperature",
    )
