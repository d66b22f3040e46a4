"""A rollout engine under test, and laws of publication: weights arrive whole and as they were sent, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import attrs
import torch
from torch import Tensor

from verl_fn.algorithms.workers import get_here
from verl_fn.backends.protocol import (
    BUCKET_BYTES,
    Chunk,
    PublicationFailed,
    Request,
    RolloutBackend,
    Sampling,
    StaleWeightsError,
    TensorSpec,
    TrainBackend,
    WeightSource,
)
from verl_fn.backends.weight_sync import Weights
from verl_fn.state import Key, Params, Sample, pack, requests_for

from .violation import LawViolation, require, require_close, require_equal


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

    def require_log_probs(
        self,
        samples: Sequence[Sample],
        weights: Mapping[int, Params],
        which: str = "",
        sampling: Sampling | None = None,
    ) -> None:
        """Requires the trainer's log-prob for each token, with the weights of its version and the tokens before it.

        Args:
            samples: of one call; of none, nothing is required.
            which: tells the samples from other ones, for the error message.
            sampling: how they were drawn, by default as the case does.
        """
        sampling = sampling or self.sampling
        if self.trainer is None or sampling.temperature == 0.0 or not samples:
            return
        batch = pack(samples)
        name = "rollout_full_log_probs" if sampling.cuts else "rollout_log_probs"
        expected = torch.zeros(batch.num_tokens)
        for version, params in weights.items():
            of_version = self.trainer.forward(params, batch, ["logprobs"]).logprobs  # type: ignore[union-attr]
            expected = torch.where(batch["versions"] == version, of_version, expected)
        require_close(
            "Log-probs",
            f"{name} at temperature {sampling.temperature}{which}, against the trainer's with the weights of each "
            "token's version,",
            expected,
            batch[name].float(),
            "log-probs of logits that are not divided by the temperature, weights that were not updated, keys and "
            "values that older weights computed, or the version of another token",
            tolerance=self.tolerance,
            floor=1.0,
        )
        if sampling.cuts:
            short = float((batch[name] - batch["rollout_log_probs"]).max())
            require(
                short <= self.tolerance,
                "Log-probs",
                f"cutting the distribution lowers a log-prob by {short:.3g}",
                "log-probs that are not renormalised after top-k or top-p",
            )

    def require_refused(self, version: int, params: Params, how: str, cause: str) -> None:
        """Requires that a publication which is spoilt in some way raises an error."""
        try:
            self.get(self.engine.publish(version, Spoilt(Weights.of(self.tensors(params)), how)))
        except Exception:
            return
        raise LawViolation("Version", f"a publication with a bucket {how} raises nothing", cause)


@attrs.frozen
class Spoilt:
    """A source whose buckets are wrong, or whose values change between the sender's checksum and the receiver.

    Attributes:
        inner: the source that is spoilt.
        how: ``altered``, or for the second bucket ``dropped``, ``repeated`` or ``broken off``.
    """

    inner: Weights
    how: str

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return self.inner.specs

    def buckets(self, max_bytes: int = BUCKET_BYTES, *, checked: bool = False) -> Iterator[tuple[Chunk, ...]]:
        """Small buckets."""
        total = sum(spec.nbytes for spec in self.specs)
        for i, bucket in enumerate(self.inner.buckets(max(1, total // 4), checked=checked)):
            if i == 1 and self.how == "broken off":
                raise ConnectionError("the sender is gone")
            for chunk in bucket if self.how == "altered" else ():
                chunk.values.view(-1)[0] += 1
            if i != 1 or self.how != "dropped":
                yield bucket
            if i == 1 and self.how == "repeated":
                yield bucket


def check_first(case: RolloutCase, params: Params) -> None:
    """Checks that the first publication is compared by checksum, since a transport may alter values."""
    cause = "checksums that are not compared at the first publication"
    case.require_refused(2, params, "altered", cause)
    case.require_stale("after a first publication whose values were altered on the way", None, cause)


def check_broken(case: RolloutCase, params: Params) -> None:
    """Checks that a part of a version is never served, and that a whole publication heals the engine."""
    for version, how in ((10, "dropped"), (12, "repeated"), (14, "broken off")):
        cause = "a publication that is not counted, or a version that is set before all of it has come"
        case.require_refused(version, params, how, cause)
        for asked in (None, version, version - 1):
            case.require_stale(f"after a publication with a bucket {how}", asked, cause)
        case.publish(version + 1, case.tensors(params))
        case.require_log_probs(case.generate(version=version + 1), {version + 1: params})


def publish_first(case: RolloutCase, params: Params) -> dict[str, Tensor]:
    """Publishes version 3, checks that the engine has it, and returns the tensors that were published."""
    given = case.tensors(params)
    case.publish(3, given)
    require_equal("Version", "a published tensor", case.tensors(params), given, "weights converted in place")
    observation = f"after version 3 was published, the engine reports version {case.engine.version}"
    require(case.engine.version == 3, "Version", observation, "a missing assignment")
    case.require_stale("with version 3 published", 4)
    return given


def check_copied(case: RolloutCase, given: dict[str, Tensor]) -> None:
    """Checks that the tensors of a publication were read at once."""
    before = case.generate()
    for t in given.values():
        t.zero_()
    what = "the engine, after the tensors that it had been given were overwritten,"
    case.require_same("Version", what, before, case.generate(), "references kept instead of copies")


def check_in_flight(case: RolloutCase, first: Params, second: Params) -> None:
    """Checks responses during which weights arrive.

    They go on with the new weights, and the log-prob of a token is computed by the weights of its version, given the
    tokens before it. After a publication that fails, no response goes on. Newer weights answer a request for
    older ones.

    Args:
        case: an engine with ``versions_per_token``, and a trainer.
        first: weights that are published as version 20, and as 22.
        second: weights that arrive as version 21.
    """
    case = attrs.evolve(case, sampling=attrs.evolve(case.sampling, max_tokens=12))
    _update(case, first, second)
    _older(case, second)
    _failure(case, first, second)


def _update(case: RolloutCase, first: Params, second: Params) -> None:
    """Responses go on with new weights, and each token is drawn by the weights that its version names."""
    case.publish(20, case.tensors(first))
    samples, lazy = _during(case, 20, lambda: case.publish(21, case.tensors(second)))
    names = sorted((s.request, s.number) for s in samples)
    require(
        names == [(case.id(i), number) for i in range(len(case.prompts)) for number in range(case.sampling.n)],
        "Signature",
        f"the requests and numbers of a stream during which weights arrive are {names}",
        "samples that are lost or repeated when weights arrive",
    )
    for s in samples:
        versions = s.versions.tolist()
        require(
            versions == sorted(versions) and set(versions) <= {20, 21},
            "Version",
            f"a response that began with version 20, and got version 21, reports the versions {versions}",
            "a version that is taken when the response ends",
        )
    case.require_log_probs(samples, {20: first, 21: second}, " in which weights arrived")
    mixed = sum(len(set(s.versions.tolist())) == 2 for s in samples)
    # An engine in another process may end all responses before the weights arrive.
    require(
        mixed > 0 or not lazy,
        "Version",
        "weights that were published after the first of several responses are in none of the others",
        "a publication that waits until responses have ended",
    )
    after = case.generate(version=21)
    require(
        {v for s in after for v in s.versions.tolist()} == {21},
        "Version",
        "responses that began after version 21 report another one",
        "rows that keep the version of an earlier call",
    )
    case.require_log_probs(after, {21: second}, " that began after the weights arrived")


def _older(case: RolloutCase, second: Params) -> None:
    """A request that was made before the weights arrived is answered with them, and one for later weights is not."""
    try:
        samples = case.generate(version=20)
    except StaleWeightsError:
        raise LawViolation(
            "Version",
            "a request for version 20 is refused, since version 21 arrived before it",
            "a version that must be equal, although it is only the oldest that may draw",
        ) from None
    case.require_log_probs(samples, {21: second}, " that asked for version 20")
    case.require_stale("with version 21 published", 22)


def _failure(case: RolloutCase, first: Params, second: Params) -> None:
    """Responses end with an error if a publication fails, and whole weights heal the engine."""
    cause = "weights that are used before all of them have come, or older ones that are used instead"
    case.publish(22, case.tensors(first))
    try:
        samples, lazy = _during(case, 22, lambda: case.require_refused(23, second, "broken off", cause))
    except PublicationFailed:
        samples, lazy = [], True
    case.require_log_probs(samples, {22: first}, " that were read although a publication had failed")
    require(not (samples and lazy), "Version", "a stream goes on after a publication that broke off", cause)
    case.require_stale("after a publication that broke off during a call", None, cause)
    case.publish(24, case.tensors(second))
    case.require_log_probs(case.generate(version=24), {24: second}, " of the weights that healed the engine")


def _during(case: RolloutCase, version: int, act: Callable[[], None]) -> tuple[list[Sample], bool]:
    """Acts when the first sample of a stream has been read.

    Returns:
        All samples, and whether they were drawn in this process, no further than they were read.
    """
    stream: Iterator[Sample] = case.engine.stream(case.requests(None, case.sampling, case.key), version=version)
    begun = next(stream)
    act()
    return [begun, *stream], case.get is get_here
