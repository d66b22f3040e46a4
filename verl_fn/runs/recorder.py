"""Records what passes through the rollout engine and the reward while an algorithm draws experience.

An algorithm samples as it likes. So it gets workers that record each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from verl_fn.algorithms import Experience, Workers
from verl_fn.backends.protocol import Ref, Request, Sample, Through
from verl_fn.data.tasks import Problem
from verl_fn.errors import ArgumentError
from verl_fn.state import Batch


@attrs.frozen(eq=False)
class Drawn:
    """The experience of one step, and what the engine and the reward gave while it was drawn.

    Attributes:
        experience: the result of ``sample``.
        problems: how many training problems ``sample`` took.
        asked: how many responses the engine was asked for.
        samples: what the engine gave, for each call in order; ``Workers.get`` fetches it.
        scored: what the reward gave, for each call in order.
        judged: the problems of each call of the reward; empty for experience that waited in a checkpoint.
    """

    experience: Experience
    problems: int
    asked: int
    samples: tuple[Ref[list[Sample]], ...]
    scored: tuple[Batch, ...]
    judged: tuple[Sequence[Any], ...] = ()


@attrs.frozen(eq=False)
class Waiting:
    """Experience that a later step learns from, and that may still be drawn.

    Attributes:
        problems: how many training problems it takes.
        asked: how many responses the engine was asked for until ``sample`` first waited for some.
        drawn: the experience, for ``Workers.get``.
    """

    problems: int
    asked: int
    drawn: Ref[Drawn]


def draw(sample: Callable[[Workers], Experience], problems: int, w: Workers) -> Drawn:
    """Returns the experience that ``sample`` draws on these workers, with a record of it.

    Args:
        sample: the algorithm's ``sample``, with its state and its problems bound.
        problems: how many problems these are; those that ``sample`` asks for with ``w.more`` are added.
        w: the workers.
    """
    return _Recorder(w, problems).draw(sample)


def ask(sample: Callable[[Workers], Experience], problems: int, w: Workers) -> Waiting:
    """Begins to draw as ``draw`` does, and returns when ``sample`` waits for samples or has ended.

    Raises:
        ArgumentError: where the result is fetched, if ``sample`` takes more problems after it has seen samples: later
            steps have theirs by then.
    """
    recorder = _Recorder(w, problems, ahead=True)
    drawn = w.beside(lambda: recorder.draw(sample))
    return Waiting(*(recorder.first or (recorder.problems, recorder.asked)), drawn)


class _Recorder(Through):
    """The engine as ``sample`` sees it, which remembers what it gave; so do the reward and the source of problems."""

    def __init__(self, w: Workers, problems: int, *, ahead: bool = False) -> None:
        super().__init__(w.rollout)
        self._w, self._ahead = w, ahead
        self.problems = problems
        self.asked = 0
        # Problems and responses until the first wait for samples.
        self.first: tuple[int, int] | None = None
        self._samples: list[Any] = []
        self._scored: list[Batch] = []
        self._judged: list[Sequence[Any]] = []

    def draw(self, sample: Callable[[Workers], Experience]) -> Drawn:
        w = attrs.evolve(self._w, rollout=self, reward=self._reward, more=self._more, get=self._get)
        experience = sample(w)
        samples, scored, judged = map(tuple, (self._samples, self._scored, self._judged))
        return Drawn(experience, self.problems, self.asked, samples, scored, judged)

    def generate(self, requests: Sequence[Request], *, version: int | None = None) -> Ref[list[Sample]]:
        self.asked += sum(request.sampling.n for request in requests)
        self._samples.append(super().generate(requests, version=version))
        return self._samples[-1]

    def stream(self, requests: Sequence[Request], *, version: int | None = None) -> Iterator[Sample]:
        self.asked += sum(request.sampling.n for request in requests)
        samples: list[Sample] = []
        self._samples.append(samples)
        for sample in super().stream(requests, version=version):
            samples.append(sample)
            yield sample

    def _get(self, value: Any) -> Any:
        if self.asked and self.first is None:
            self.first = self.problems, self.asked
        return self._w.get(value)

    def _reward(self, batch: Batch, problems: Sequence[Any]) -> Batch:
        self._scored.append(self._w.reward(batch, problems))
        self._judged.append(problems)
        return self._scored[-1]

    def _more(self, count: int) -> Sequence[Problem]:
        if self._ahead and self.first is not None:
            raise ArgumentError(
                "this algorithm takes more problems when it has seen samples (workers.more), and with driver.max_lag "
                "the next steps have theirs by then; set driver.max_lag=0"
            )
        problems = self._w.more(count)
        self.problems += len(problems)
        return problems
