"""Laws of draws, a part of ``check_rollout``: draws follow the given log-probs, and experts are the recorded ones."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from verl_fn.backends.protocol import Sampling
from verl_fn.state import Sample

from .rollout_case import RolloutCase
from .violation import require

DRAWS = 500
# Enough to draw a token that should have been cut.
CUT_DRAWS = 100
COPIES = 6
# Two computations of the same token may pick different experts if rounding decides.
ROUNDED = 0.1


def check_draws(case: RolloutCase) -> None:
    """Checks what draws depend on, how often each response comes, and what top-k, top-p and temperature 0 leave.

    Raises:
        LawViolation: Purity, Log-probs or Capabilities is broken.
    """
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
    """Checks that responses come as often as their log-probs say, within 5 standard deviations.

    Responses have two tokens, since one draw for all positions has the right distribution at each of them.
    """
    log_probs: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for s in samples:
        log_probs[tuple(s.tokens.tolist())].append(float(s.log_probs.double().sum()))
    for response, sums in log_probs.items():
        share, probability = len(sums) / len(samples), math.exp(sum(sums) / len(sums))
        sigma = max((probability * (1.0 - probability) / len(samples)) ** 0.5, 1.0 / len(samples))
        require(
            abs(share - probability) <= 5.0 * sigma,
            "Log-probs",
            f"the tokens {list(response)} of probability {probability:.3g} were drawn in a share of {share:.3g} "
            f"of {len(samples)} samples, with {sampling}",
            "draws from another distribution than the one whose log-probs are given, or one draw for all tokens",
        )


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
