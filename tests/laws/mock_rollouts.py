"""The right rollout engine that the mutants derive from, and requests that they change."""

import attrs

from verl_fn.backends.mock import MockRollout, sample_table


def rollout(cls=MockRollout, script=sample_table, **options):
    return cls(script, **options)


def rekeyed(requests, key):
    """The same requests with other keys, ``key(place, request)``."""
    return [attrs.evolve(request, key=key(i, request)) for i, request in enumerate(requests)]


def resampled(requests, **changes):
    return [attrs.evolve(r, sampling=attrs.evolve(r.sampling, **changes)) for r in requests]
