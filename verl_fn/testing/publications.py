"""Laws of publication, a part of ``check_rollout``: weights arrive whole and as they were sent, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from verl_fn.backends.protocol import BUCKET_BYTES, Chunk, PublicationFailed, StaleWeightsError, TensorSpec
from verl_fn.backends.weight_sync import Weights
from verl_fn.state import Params, Sample, pack

from .rollout_case import RolloutCase, itself
from .violation import LawViolation, require, require_close, require_equal


def altered(case: RolloutCase, params: Params) -> None:
    """The first publication is compared by checksum, so that a transport that alters values is noticed."""
    cause = "checksums that are not compared at the first publication"
    try:
        case.get(case.engine.publish(2, _Altered(Weights.of(case.tensors(params)))))
    except Exception:
        case.require_stale("after a first publication whose values were altered on the way", None, cause)
        return
    raise LawViolation("Version", "a first publication whose values were altered on the way raises nothing", cause)


def published(case: RolloutCase, params: Params) -> dict[str, Tensor]:
    """The tensors that were published as version 3."""
    given = case.tensors(params)
    case.publish(3, given)
    require_equal("Version", "a published tensor", case.tensors(params), given, "weights converted in place")
    version = case.engine.version
    require(
        version == 3,
        "Version",
        f"after version 3 was published, the engine reports version {version}",
        "a missing assignment",
    )
    case.require_stale("with version 3 published", 4)
    return given


def spoilt(case: RolloutCase, given: dict[str, Tensor]) -> None:
    """What is published is read at once."""
    before = case.generate()
    for t in given.values():
        t.zero_()
    what = "the engine, after the tensors that it had been given were overwritten,"
    case.require_same("Version", what, before, case.generate(), "references kept instead of copies")


@attrs.frozen
class _Altered:
    """A source whose values change between the sender's checksum and the receiver."""

    inner: Weights

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return self.inner.specs

    def buckets(self, max_bytes: int = BUCKET_BYTES, *, checked: bool = False) -> Iterator[tuple[Chunk, ...]]:
        """The buckets, one number of each altered."""
        for bucket in self.inner.buckets(max_bytes, checked=checked):
            for chunk in bucket:
                chunk.values.view(-1)[0] += 1
            yield bucket


@attrs.frozen
class Broken:
    """A source that gives its buckets wrongly.

    Attributes:
        how: ``dropped``, ``repeated`` or ``broken off``.
    """

    inner: Weights
    how: str

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return self.inner.specs

    def buckets(self, max_bytes: int = BUCKET_BYTES, *, checked: bool = False) -> Iterator[tuple[Chunk, ...]]:
        """Small buckets, the second of which is spoilt."""
        total = sum(spec.nbytes for spec in self.specs)
        for i, bucket in enumerate(self.inner.buckets(max(1, total // 4), checked=checked)):
            if i == 1 and self.how == "broken off":
                raise ConnectionError("the sender is gone")
            if i != 1 or self.how != "dropped":
                yield bucket
            if i == 1 and self.how == "repeated":
                yield bucket


def broken(case: RolloutCase, params: Params, healed: Callable[[int], None]) -> None:
    """Part of a version is never served, and a whole publication heals the engine.

    Args:
        healed: checks what a version draws.
    """
    for number, how in enumerate(("dropped", "repeated", "broken off")):
        version = 10 + 2 * number
        source = Broken(Weights.of(case.tensors(params)), how)
        cause = "a publication that is not counted, or a version that is set before all of it has come"
        try:
            case.get(case.engine.publish(version, source))
        except Exception:
            pass
        else:
            raise LawViolation("Version", f"a publication with a bucket {how} raises nothing", cause)
        for asked in (None, version, version - 1):
            case.require_stale(f"after a publication with a bucket {how}", asked, cause)
        case.publish(version + 1, case.tensors(params))
        healed(version + 1)


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
    _log_probs(case, samples, {20: first, 21: second}, "in which weights arrived,")
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
    _log_probs(case, after, {21: second}, "that began after the weights arrived,")


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
    _log_probs(case, samples, {21: second}, "that asked for version 20,")
    case.require_stale("with version 21 published", 22)


def _failure(case: RolloutCase, first: Params, second: Params) -> None:
    """Responses end with an error if a publication fails, and whole weights heal the engine."""
    cause = "weights that are used before all of them have come, or older ones that are used instead"

    def broken() -> None:
        try:
            case.get(case.engine.publish(23, Broken(Weights.of(case.tensors(second)), "broken off")))
        except Exception:
            return
        raise LawViolation("Version", "a publication that broke off raises nothing", cause)

    case.publish(22, case.tensors(first))
    try:
        samples, lazy = _during(case, 22, broken)
    except PublicationFailed:
        samples, lazy = [], True
    _log_probs(case, samples, {22: first}, "that were read although a publication had failed,")
    require(not (samples and lazy), "Version", "a stream goes on after a publication that broke off", cause)
    case.require_stale("after a publication that broke off during a call", None, cause)
    case.publish(24, case.tensors(second))
    _log_probs(case, case.generate(version=24), {24: second}, "of the weights that healed the engine,")


def _during(case: RolloutCase, version: int, act: Callable[[], None]) -> tuple[list[Sample], bool]:
    """Acts when the first sample of a stream has been read.

    Returns:
        All samples, and whether they were drawn in this process, no further than they were read.
    """
    stream: Iterator[Sample] = case.engine.stream(case.requests(None, case.sampling, case.key), version=version)
    begun = next(stream)
    act()
    return [begun, *stream], case.get is itself


def _log_probs(case: RolloutCase, samples: Sequence[Sample], weights: Mapping[int, Params], which: str) -> None:
    """Compares each token's log-prob with the one by the weights of its version, given the tokens before it."""
    if not samples:
        return
    batch, trainer = pack(samples), case.trainer
    assert trainer is not None
    expected = torch.zeros_like(batch["rollout_log_probs"])
    for version, params in weights.items():
        of_version = trainer.forward(params, batch, ["logprobs"]).logprobs  # type: ignore[union-attr]
        expected = torch.where(batch["versions"] == version, of_version, expected)
    require_close(
        "Log-probs",
        f"the log-probs of responses {which} against the trainer's with the weights of each token's version",
        expected,
        batch["rollout_log_probs"],
        "keys and values that older weights computed, or the version of another token",
        tolerance=case.tolerance,
        floor=1.0,
    )
