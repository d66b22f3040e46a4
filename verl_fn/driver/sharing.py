"""How several engines share the requests of a call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from verl_fn.state import Request, Sample


def shares(requests: Sequence[Request], engines: int) -> list[list[Request]]:
    """Divides requests among engines, so that all have about as many tokens to compute.

    The rule depends only on the requests: the longest request first, each goes to the engine with the fewest tokens
    so far. A request counts its prompt once and the longest responses that it allows. Engines without any request are
    left out.

    Example:
        >>> from verl_fn.state import Key, Sampling, requests_for
        >>> asked = requests_for([[1] * 9, [1] * 4, [1] * 5, [1] * 2], Sampling(1), Key.from_seed(0))
        >>> [[r.id for r in share] for share in shares(asked, 2)]
        [[0, 3], [1, 2]]
    """
    lengths = [len(r.prompt) + r.sampling.n * r.sampling.max_tokens for r in requests]
    loads, engine_of = [0] * engines, [0] * len(requests)
    for i in sorted(range(len(requests)), key=lambda i: -lengths[i]):
        engine = loads.index(min(loads))
        loads[engine] += lengths[i]
        engine_of[i] = engine
    divided = [[r for r, engine in zip(requests, engine_of, strict=True) if engine == e] for e in range(engines)]
    return [share for share in divided if share]


def in_order(ids: Sequence[int], *parts: Iterable[Sample]) -> list[Sample]:
    """Returns the samples of all engines in the order of the requests with these ids.

    The samples of a request keep their order.
    """
    places = {request: place for place, request in enumerate(ids)}
    return sorted((sample for part in parts for sample in part), key=lambda sample: places[sample.request])
