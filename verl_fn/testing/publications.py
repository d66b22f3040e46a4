"""Laws of publication, a part of ``check_rollout``: weights arrive whole and as they were sent, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
from torch import Tensor

from verl_fn.backends.protocol import BUCKET_BYTES, Chunk, TensorSpec
from verl_fn.backends.weight_sync import Weights
from verl_fn.state import Params

from .rollout_case import Case
from .violation import LawViolation, require, require_equal


def altered(case: Case, params: Params) -> None:
    """The first publication is compared by checksum, so that a transport that alters values is noticed."""
    cause = "checksums that are not compared at the first publication"
    try:
        case.get(case.engine.publish(2, _Altered(Weights.of(case.tensors(params)))))
    except Exception:
        case.require_stale("after a first publication whose values were altered on the way", None, cause)
        return
    raise LawViolation("Version", "a first publication whose values were altered on the way raises nothing", cause)


def published(case: Case, params: Params) -> dict[str, Tensor]:
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


def spoilt(case: Case, given: dict[str, Tensor]) -> None:
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


def broken(case: Case, params: Params, healed: Callable[[int], None]) -> None:
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
