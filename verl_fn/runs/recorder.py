"""Records what passes through the rollout engine and the reward while an algorithm draws experience.

An algorithm decides itself how it samples. So this is seen from outside: engine and reward are wrapped, and pass
everything through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from verl_fn.algorithms import Experience, Workers
from verl_fn.backends.protocol import Ref, Request, RolloutBackend, Sample
from verl_fn.backends.through import Through


@attrs.frozen(eq=False)
class Drawn:
    """The experience of one step, and what the engine and the reward gave while it was drawn.

    Attributes:
        experience: the result of ``sample``.
        problems: how many training problems ``sample`` was given.
        asked: how many responses the engine was asked for.
        samples: what the engine gave; None if it was not asked.
        scored: what the reward gave; None if it was not asked.
    """

    experience: Experience
    problems: int
    asked: int
    samples: Any
    scored: Any


def draw(sample: Callable[[Workers], Experience], problems: int, w: Workers) -> Drawn:
    """Returns the experience that ``sample`` draws on these workers, with a record of it.

    Args:
        sample: the algorithm's ``sample``, with its state and its problems bound.
        problems: how many problems these are.
        w: the workers.
    """
    recorder = _Recorder(w)
    experience = sample(attrs.evolve(w, rollout=_Listening(w.rollout, recorder), reward=recorder.reward))
    return Drawn(experience, problems, recorder.asked, recorder.samples, recorder.scored)


class _Recorder:
    """Remembers the last samples and scores, and counts the responses that were asked for."""

    def __init__(self, w: Workers) -> None:
        self._reward = w.reward
        self.asked = 0
        self.samples: Any = None
        self.scored: Any = None

    def reward(self, batch: Any, problems: Sequence[Any]) -> Any:
        self.scored = self._reward(batch, problems)
        return self.scored


class _Listening(Through):
    """A rollout engine that reports to a recorder what it is asked for and what it gives."""

    def __init__(self, inner: RolloutBackend, recorder: _Recorder) -> None:
        super().__init__(inner)
        self._recorder = recorder

    def generate(self, requests: Sequence[Request], *, version: int | None = None) -> Ref[list[Sample]]:
        self._recorder.asked += sum(request.sampling.n for request in requests)
        self._recorder.samples = super().generate(requests, version=version)
        return self._recorder.samples

    def stream(self, requests: Sequence[Request], *, version: int | None = None) -> Iterator[Ref[Sample]]:
        self._recorder.asked += sum(request.sampling.n for request in requests)
        self._recorder.samples = []
        for sample in super().stream(requests, version=version):
            self._recorder.samples.append(sample)
            yield sample
