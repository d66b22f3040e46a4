"""What ``check_rollout`` checks, and how it asks an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from verl_fn.backends.protocol import RolloutBackend, Sampling, StaleWeightsError, TrainBackend
from verl_fn.backends.weight_sync import Weights
from verl_fn.state import Key, Params, Sample, requests_for

from .violation import LawViolation, require, require_close


@attrs.frozen(eq=False)
class Case:
    """What is checked, and with what."""

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
        """Random parameters for the model."""
        if self.trainer is None:
            return Params({})
        made: Params = self.trainer.init(self.key.fold_in(name)).params  # type: ignore[assignment]
        return made

    def tensors(self, params: Params) -> dict[str, Tensor]:
        """Copies, so that they can be spoilt."""
        source = Weights.of({}) if self.trainer is None else self.trainer.weights(params)
        whole: dict[str, list[Tensor]] = {}
        shapes = {spec.name: spec.shape for spec in source.specs}
        for bucket in source.buckets():
            for chunk in bucket:
                whole.setdefault(chunk.name, []).append(chunk.values.clone())
        return {name: torch.cat(parts).reshape(shapes[name]) for name, parts in whole.items()}

    def id(self, row: int) -> int:
        """The id of a prompt, which is not its place."""
        return 100 + 7 * row

    def generate(
        self,
        rows: Sequence[int] | None = None,
        *,
        sampling: Sampling | None = None,
        key: Key | None = None,
        version: int | None = None,
    ) -> list[Sample]:
        """Responses to these prompts, which keep their ids."""
        rows = range(len(self.prompts)) if rows is None else rows
        ids = [self.id(i) for i in rows]
        asked = requests_for([self.prompts[i] for i in rows], sampling or self.sampling, key or self.key, ids)
        samples: list[Sample] = self.get(self.engine.generate(asked, version=version))
        return samples

    def publish(self, version: int, tensors: dict[str, Tensor]) -> None:
        """Publish whole tensors and wait for it."""
        self.get(self.engine.publish(version, Weights.of(tensors)))

    def require_stale(self, when: str, version: int | None, cause: str = "a version that is not compared") -> None:
        """A request for this version must be refused."""
        try:
            self.generate(version=version)
        except StaleWeightsError:
            return
        except Exception as error:
            instead = f"raises {type(error).__name__} instead of StaleWeightsError"
        else:
            instead = "raises no StaleWeightsError"
        asked = "no certain version" if version is None else f"version {version}"
        raise LawViolation("Version", f"{when}, a request for {asked} {instead}", cause)

    def require_same(
        self, law: str, what: str, expected: Sequence[Sample], samples: Sequence[Sample], cause: str
    ) -> None:
        """The same draws, and log-probs to the tolerance, in all samples that both have and that had no near ties."""
        before = {(s.request, s.number): s for s in expected}
        pairs = [(before[name], s) for s in samples if (name := (s.request, s.number)) in before]
        require(bool(pairs), law, f"{what} gives none of the samples that it gave before", cause)
        sure = [pair for pair in pairs if pair[0].near_ties == 0 == pair[1].near_ties]
        require(bool(sure), law, f"{what} has near ties in all rows", "near ties that are counted too often")
        alike = [(a, b) for a, b in sure if torch.equal(a.prompt, b.prompt) and torch.equal(a.tokens, b.tokens)]
        other = len(sure) - len(alike)
        require(other == 0, law, f"{what} draws other tokens in {other} of {len(pairs)} rows", cause)
        log_probs = [torch.cat([pair[side].log_probs for pair in alike]) for side in (0, 1)]
        require_close(law, f"{what} gives log-probs which", *log_probs, cause, tolerance=self.tolerance, floor=1.0)
