"""Records what passes through the rollout engine and the reward while an algorithm draws experience.

An algorithm samples as it likes. So its engine and its reward are wrapped, and the wrappers record each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from verl_fn.algorithms import Experience, Workers
from verl_fn.backends.protocol import Ref, Request, RolloutBackend, Sample
from verl_fn.backends.through import Through
from verl_fn.data.tasks import Problem


@attrs.frozen(eq=False)
class Drawn:
    """The experience of one step, and what the engine and the reward gave while it was drawn.

    Attributes:
        experience: the result of ``sample``.
        problems: how many training problems ``sample`` took.
        asked: how many responses the engine was asked for.
        samples: what the engine gave, for each call in order.
        scored: what the reward gave, for each call in order.
        judged: the problems of each call of the reward; empty for experience that waited in a checkpoint.
    """

    experience: Experience
    problems: int
    asked: int
    samples: tuple[Any, ...]
    scored: tuple[Any, ...]
    judged: tuple[Sequence[Any], ...] = ()


def draw(sample: Callable[[Workers], Experience], problems: int, w: Workers) -> Drawn:
    """Returns the experience that ``sample`` draws on these workers, with a record of it.

    Args:
        sample: the algorithm's ``sample``, with its state and its problems bound.
        problems: how many problems these are; those that ``sample`` asks for with ``w.more`` are added.
        w: the workers.
    """
    recorder = _Recorder(w, problems)
    listening = _Listening(w.rollout, recorder)
    experience = sample(attrs.evolve(w, rollout=listening, reward=recorder.reward, more=recorder.more))
    samples, scored, judged = map(tuple, (recorder.samples, recorder.scored, recorder.judged))
    return Drawn(experience, recorder.problems, recorder.asked, samples, scored, judged)


class _Recorder:
    """Remembers the samples and scores of each call, and counts problems and the responses that were asked for."""

    def __init__(self, w: Workers, problems: int) -> None:
        self._reward, self._more = w.reward, w.more
        self.problems = problems
        self.asked = 0
        self.samples: list[Any] = []
        self.scored: list[Any] = []
        self.judged: list[Sequence[Any]] = []

    def reward(self, batch: Any, problems: Sequence[Any]) -> Any:
        self.scored.append(self._reward(batch, problems))
        self.judged.append(problems)
        return self.scored[-1]

    def more(self, count: int) -> Sequence[Problem]:
        problems = self._more(count)
        self.problems += len(problems)
        return problems


class _Listening(Through):
    """A rollout engine that reports to a recorder what it is asked for and what it gives."""

    def __init__(self, inner: RolloutBackend, recorder: _Recorder) -> None:
        super().__init__(inner)
        self._recorder = recorder

    def generate(self, requests: Sequence[Request], *, version: int | None = None) -> Ref[list[Sample]]:
        self._recorder.asked += sum(request.sampling.n for request in requests)
        self._recorder.samples.append(super().generate(requests, version=version))
        return self._recorder.samples[-1]

    def stream(self, requests: Sequence[Request], *, version: int | None = None) -> Iterator[Ref[Sample]]:
        self._recorder.asked += sum(request.sampling.n for request in requests)
        samples: list[Ref[Sample]] = []
        self._recorder.samples.append(samples)
        for sample in super().stream(requests, version=version):
            samples.append(sample)
            yield sample
