"""Laws of a rollout engine: ``check_rollout``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from verl_fn.backends.protocol import RolloutBackend, Sampling, TrainBackend, UnsupportedSampling
from verl_fn.state import Key, Params, Sample, pack

from . import publications
from .rollout_case import RolloutCase, itself
from .rollout_draws import check_draws, check_routes
from .violation import LawViolation, require, require_close, seeded, untouched

PROMPTS = ((1, 5), (4,), (5, 4, 6), (1, 5))


def check_rollout(
    engine: RolloutBackend | Callable[[], RolloutBackend],
    trainer: TrainBackend | None = None,
    *,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    stop_token_ids: Sequence[int] = (2,),
    environment: bool = False,
    tolerance: float = 1e-3,
    key: Key | None = None,
    get: Callable[[Any], Any] = itself,
) -> None:
    """Checks a rollout engine against its protocol.

    * Signature: samples request by request, with the protocol's fields; a stream gives the same samples, each once.
    * Version: weights are asked for by version, and stale ones refused; published tensors are read at once and
      neither changed nor kept; after a publication that lost, repeated or broke off a bucket, nothing is served.
    * Purity: what ``capabilities`` promises of draws: they are repeated (``repeatable``), and depend on the request's
      key and the sample's number, and on nothing else (``batch_independent``).
    * Log-probs, with ``trainer``: by the policy that was published, for the distribution that was drawn from.
      Responses come as often as these say, and temperature 0 takes the most likely token.
    * In flight, with ``trainer`` and ``versions_per_token``; see ``publications.check_in_flight``.
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
        >>> from verl_fn.backends.mock.train import Mock
        >>> from verl_fn.backends.mock.rollout import MockRollout, sample_table
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
            publications.altered(case, first)
    given = publications.published(case, first)
    if engine.capabilities.repeatable:
        _repeated(case)
        publications.spoilt(case, given)
        _streamed(case)
    for sampling in _samplings(case):
        samples = case.generate(sampling=sampling)
        _signature(case, sampling, samples)
        check_routes(case, samples)
        _log_probs(case, sampling, samples, first)
    if engine.capabilities.batch_independent:
        _independent(case)
    # Environments may give all samples of a stream at its end.
    if engine.capabilities.versions_per_token and trainer is not None and not case.environment:
        publications.check_in_flight(case, first, second)
        case.publish(3, case.tensors(first))
    if trainer is not None:
        check_draws(case)
    _refused(case)
    _versions(case, first, second)
    if trainer is not None:
        publications.broken(
            case, first, lambda version: _log_probs(case, case.sampling, case.generate(version=version), first)
        )


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


def _log_probs(case: RolloutCase, sampling: Sampling, samples: Sequence[Sample], params: Params) -> None:
    if case.trainer is None or sampling.temperature == 0.0:
        return
    batch = pack(samples)
    name = "rollout_full_log_probs" if sampling.cuts else "rollout_log_probs"
    expected = case.trainer.forward(params, batch, ["logprobs"]).logprobs  # type: ignore[union-attr]
    require_close(
        "Log-probs",
        f"{name} at temperature {sampling.temperature}, against the trainer's,",
        expected,
        batch[name].float(),
        "log-probs of logits that are not divided by the temperature, or weights that were not updated",
        tolerance=case.tolerance,
        floor=1.0,
    )
    if sampling.cuts:
        short = float((batch[name] - batch["rollout_log_probs"]).max())
        require(
            short <= case.tolerance,
            "Log-probs",
            f"cutting the distribution lowers a log-prob by {short:.3g}",
            "log-probs that are not renormalised after top-k or top-p",
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
    _log_probs(case, case.sampling, samples, second)
    case.get(engine.sleep())
    case.require_stale("after sleep", 4)
    case.get(engine.wake())
    case.require_stale("after wake, before weights were published again,", 4)
    case.publish(5, case.tensors(first))
    what = "the engine, with its first weights published again,"
    if engine.capabilities.repeatable:
        cause = "caches that outlive the weights that they were made with"
        case.require_same("Version", what, before, case.generate(version=5), cause)
