"""The engine that ``check_rollout`` checks, and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import attrs
import torch
from torch import Tensor

from verl_fn.backends.protocol import Request, RolloutBackend, Sampling, StaleWeightsError, TrainBackend, WeightSource
from verl_fn.backends.weight_sync import Weights
from verl_fn.state import Key, Params, Sample, requests_for

from .violation import LawViolation, require, require_close


def itself(value: Any) -> Any:
    """Returns the value: the ``get`` of engines in this process."""
    return value


@attrs.frozen(eq=False)
class RolloutCase:
    """A rollout engine under test and the arguments of its calls."""

    engine: RolloutBackend
    trainer: TrainBackend | None
    prompts: Sequence[tuple[int, ...]]
    sampling: Sampling
    tolerance: float
    key: Key
    environment: bool
    ends: tuple[int, ...]
    get: Callable[[Any], Any]

    def weights(self, name: str) -> Params:
        """Makes random parameters for the model; other names give other parameters."""
        if self.trainer is None:
            return Params({})
        made: Params = self.trainer.init(self.key.fold_in(name)).params  # type: ignore[assignment]
        return made

    def tensors(self, params: Params) -> dict[str, Tensor]:
        """Returns copies of the tensors that a publication sends; they can be overwritten."""
        # The trainer of this check is in the same process, so its weights are no handle.
        source = Weights.of({}) if self.trainer is None else cast(WeightSource, self.trainer.weights(params))
        whole: dict[str, list[Tensor]] = {}
        shapes = {spec.name: spec.shape for spec in source.specs}
        for bucket in source.buckets():
            for chunk in bucket:
                whole.setdefault(chunk.name, []).append(chunk.values.clone())
        return {name: torch.cat(parts).reshape(shapes[name]) for name, parts in whole.items()}

    def id(self, row: int) -> int:
        """Returns the id of a prompt: not its position."""
        return 100 + 7 * row

    def generate(
        self,
        rows: Sequence[int] | None = None,
        *,
        sampling: Sampling | None = None,
        key: Key | None = None,
        version: int | None = None,
        ids: Sequence[int] | None = None,
    ) -> list[Sample]:
        """Returns the responses to some of the prompts; without ``ids``, a prompt has the same id in every call."""
        requests = self.requests(rows, sampling or self.sampling, key or self.key, ids)
        samples: list[Sample] = self.get(self.engine.generate(requests, version=version))
        return samples

    def stream(self, version: int | None = None) -> list[Sample]:
        """Returns the responses to all prompts in the order in which the engine's stream gives them."""
        requests = self.requests(None, self.sampling, self.key)
        return [self.get(sample) for sample in self.engine.stream(requests, version=version)]

    def requests(
        self, rows: Sequence[int] | None, sampling: Sampling, key: Key, ids: Sequence[int] | None = None
    ) -> list[Request]:
        """Returns requests for some of the prompts, by default for all."""
        rows = range(len(self.prompts)) if rows is None else rows
        ids = [self.id(i) for i in rows] if ids is None else ids
        return requests_for([self.prompts[i] for i in rows], sampling, key, ids)

    def publish(self, version: int, tensors: dict[str, Tensor]) -> None:
        """Publishes whole tensors and waits until they are there."""
        self.get(self.engine.publish(version, Weights.of(tensors)))

    def require_stale(self, when: str, version: int | None, cause: str = "a version that is not compared") -> None:
        """Requires that a request for this version raises ``StaleWeightsError``, also as a stream."""
        calls: dict[str, Callable[..., object]] = {"a request": self.generate, "a stream": self.stream}
        asked = "any version" if version is None else f"version {version}"
        for name, call in calls.items():
            try:
                call(version=version)
            except StaleWeightsError:
                continue
            except Exception as error:
                instead = f"raises {type(error).__name__} instead of StaleWeightsError"
            else:
                instead = "raises no StaleWeightsError"
            raise LawViolation("Version", f"{when}, {name} for {asked} {instead}", cause)

    def require_same(
        self, law: str, what: str, expected: Sequence[Sample], samples: Sequence[Sample], cause: str
    ) -> None:
        """Requires equal draws and close log-probs for the samples that are in both and have no near ties."""
        before = {(s.request, s.number): s for s in expected}
        pairs = [(before[name], s) for s in samples if (name := (s.request, s.number)) in before]
        require(bool(pairs), law, f"{what} gives none of the samples that it gave before", cause)
        sure = [pair for pair in pairs if pair[0].near_ties == 0 == pair[1].near_ties]
        require(bool(sure), law, f"{what} has near ties in all rows", "near ties that are counted too often")
        alike = [(a, b) for a, b in sure if torch.equal(a.prompt, b.prompt) and torch.equal(a.tokens, b.tokens)]
        other = len(sure) - len(alike)
        require(other == 0, law, f"{what} draws other tokens in {other} of {len(pairs)} rows", cause)
        before_probs, after_probs = (torch.cat([pair[side].log_probs for pair in alike]) for side in (0, 1))
        what = f"{what} gives log-probs which"
        require_close(law, what, before_probs, after_probs, cause, tolerance=self.tolerance, floor=1.0)
