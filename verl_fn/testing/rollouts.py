"""The promises of a rollout engine: ``check_rollout``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from verl_fn.backends.protocol import RolloutBackend, Sampling, StaleWeightsError, TrainBackend
from verl_fn.state import Batch, Key, Params, concatenate

from .violation import LawViolation, require, require_close, require_equal, seeded, untouched

PROMPTS = ((1, 5), (4,), (5, 4, 6), (1, 5))
PER_TOKEN = ("response_mask", "rollout_log_probs")
PER_ROW = ("group", "prompt_length", "temperature", "finished", "version", "near_ties")
DRAWS = 500


def check_rollout(
    engine: RolloutBackend | Callable[[], RolloutBackend],
    trainer: TrainBackend | None = None,
    *,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    stop_token_ids: Sequence[int] = (2,),
    tolerance: float = 1e-3,
    key: Key | None = None,
) -> None:
    """Check a rollout engine against its protocol.

    * Signature: rows prompt by prompt, with the fields that the protocol names.
    * Version: weights are asked for by version, and stale ones refused; published tensors are read at once and
      neither changed nor kept.
    * Purity: draws depend on the key, the prompt's id and the sample's number, and on nothing else: no global
      generator, no order or size of the batch.
    * Log-probs, with ``trainer``: those of the policy that was published, of the distribution that was drawn from.

    Rows with ``near_ties`` are left out where draws are compared.

    Args:
        engine: an engine, or a function that makes one.
        trainer: a training backend for the same model: it makes the weights and says what log-probs should be.
            Without one, nothing is published and the answers count as scripted.
        prompts: token ids.
        stop_token_ids: all ids that end a response, the model's own included.
        tolerance: how far log-probs may differ, relative to the largest or to 1.
        key: other keys give other draws.

    Raises:
        LawViolation: a promise is broken.

    >>> from verl_fn.backends.mock.train import Mock
    >>> from verl_fn.backends.mock.rollout import MockRollout, sample_table
    >>> from verl_fn.steps import constant, sgd
    >>> check_rollout(MockRollout(sample_table), Mock(8, sgd(constant(0.1))))
    >>> check_rollout(MockRollout({(3,): [4, 5, 2]}), prompts=[(3,)])
    """
    made: RolloutBackend = engine if hasattr(engine, "generate") else engine()  # type: ignore[assignment,operator]
    sampling = Sampling(6, n=3, stop_token_ids=tuple(stop_token_ids))
    case = _Case(made, trainer, [tuple(p) for p in prompts], sampling, tolerance, key or Key.from_seed(0))
    if made.version is None:
        case.require_stale("before anything was published", None)
    first, second = case.weights("first"), case.weights("second")
    given = _published(case, first)
    _repeated(case)
    _spoilt(case, given)
    for sampling in (
        case.sampling,
        attrs.evolve(case.sampling, temperature=0.7),
        attrs.evolve(case.sampling, temperature=1.5, top_k=3),
        attrs.evolve(case.sampling, top_p=0.8),
        attrs.evolve(case.sampling, temperature=0.0),
    ):
        batch = case.generate(sampling=sampling)
        _signature(case, sampling, batch)
        _log_probs(case, sampling, batch, first)
    _independent(case)
    if trainer is not None:
        _random(case)
        _frequencies(case)
    _versions(case, first, second)


@attrs.frozen(eq=False)
class _Case:
    """What is checked, and with what."""

    engine: RolloutBackend
    trainer: TrainBackend | None
    prompts: Sequence[tuple[int, ...]]
    sampling: Sampling
    tolerance: float
    key: Key

    def weights(self, name: str) -> Params:
        return Params({}) if self.trainer is None else self.trainer.init(self.key.fold_in(name)).params

    def tensors(self, params: Params) -> dict[str, Tensor]:
        """Copies, so that they can be spoilt."""
        named = [] if self.trainer is None else self.trainer.named_tensors(params)
        return {name: t.clone() for name, t in named}

    def generate(
        self,
        rows: Sequence[int] | None = None,
        *,
        sampling: Sampling | None = None,
        key: Key | None = None,
        version: int | None = None,
    ) -> Batch:
        """Responses to these prompts, which keep their ids."""
        rows = range(len(self.prompts)) if rows is None else rows
        return self.engine.generate(
            [self.prompts[i] for i in rows], sampling or self.sampling, key or self.key,
            ids=[100 + 7 * i for i in rows], version=version,
        )  # fmt: skip

    def require_stale(self, when: str, version: int | None) -> None:
        try:
            self.generate(version=version)
        except StaleWeightsError:
            return
        asked = "no certain version" if version is None else f"version {version}"
        raise LawViolation(
            "Version", f"{when}, a request for {asked} raises no StaleWeightsError", "a version that is not compared"
        )

    def require_same_rows(self, law: str, what: str, expected: Batch, found: Batch, cause: str) -> None:
        """The same draws, and log-probs to the tolerance, in all rows without near ties."""
        sure = (expected["near_ties"] == 0) & (found["near_ties"] == 0)
        pairs = zip(expected.rows(), found.rows(), strict=True)
        same = torch.tensor([torch.equal(a, b) for a, b in pairs])
        require(bool(sure.any()), law, f"{what} has near ties in all rows", "near ties that are counted too often")
        odd = int((sure & ~same).sum())
        require(odd == 0, law, f"{what} draws other tokens in {odd} of {len(same)} rows", cause)
        alike = same.nonzero()[:, 0]
        require_close(
            law, f"{what} gives log-probs which", expected.take(alike)["rollout_log_probs"],
            found.take(alike)["rollout_log_probs"], cause, tolerance=self.tolerance, floor=1.0,
        )  # fmt: skip


def _published(case: _Case, params: Params) -> dict[str, Tensor]:
    """The tensors that were published as version 3."""
    given = case.tensors(params)
    case.engine.publish(3, given.items())
    require_equal("Version", "a published tensor", case.tensors(params), given, "weights converted in place")
    told = case.engine.version
    require(told == 3, "Version", f"after version 3 was published, the engine says {told}", "a missing assignment")
    case.require_stale("with version 3 published", 4)
    return given


def _repeated(case: _Case) -> None:
    """The same request gives the same, whatever the global generators hold, and leaves them alone."""
    found = []
    for seed in (1, 2):
        with seeded(seed), untouched("Purity", "generate"):
            found.append(case.generate(version=3))
    cause = "a generator that does not come from the key"
    case.require_same_rows("Purity", "the same request again", found[0], found[1], cause)


def _spoilt(case: _Case, given: dict[str, Tensor]) -> None:
    """What is published is read at once."""
    before = case.generate()
    for t in given.values():
        t.zero_()
    what = "the engine, after the tensors that it had been given were overwritten,"
    case.require_same_rows("Version", what, before, case.generate(), "references kept instead of copies")


def _signature(case: _Case, sampling: Sampling, batch: Batch) -> None:
    wanted = {*PER_TOKEN, *PER_ROW, *(["rollout_full_log_probs"] if _cuts(sampling) else [])}
    missing = sorted(name for name in wanted if name not in batch)
    require(not missing, "Signature", f"the batch lacks {missing}", "an engine of an older protocol")
    rows = [prompt for prompt in case.prompts for _ in range(sampling.n)]
    ids = [100 + 7 * i for i in range(len(case.prompts)) for _ in range(sampling.n)]
    starts = [tuple(row[: len(prompt)].tolist()) for row, prompt in zip(batch.rows(), rows, strict=False)]
    require(
        starts == rows and batch["group"].tolist() == ids, "Signature",
        f"with n={sampling.n} the rows or their groups are not those of the prompts in their order",
        "samples ordered one of each prompt after the other, or groups numbered by position",
    )  # fmt: skip
    lengths = batch["prompt_length"]
    require(
        lengths.tolist() == [len(p) for p in rows], "Signature", "prompt_length is not the prompt's", "a miscount"
    )
    mask = (batch.positions >= batch.spread(lengths)).to(batch["response_mask"].dtype)
    require_equal(
        "Signature", "response_mask, against 1 after the prompt,", mask, batch["response_mask"], "an offset"
    )
    outside = torch.where(mask == 0, batch["rollout_log_probs"], 0.0).abs().max()
    highest = batch["rollout_log_probs"].max()
    require(
        bool(outside == 0) and bool(highest <= 1e-5), "Signature",
        f"rollout_log_probs reaches {float(torch.maximum(outside, highest)):.3g}",
        "log-probs of the prompt, or logits that were not normalised",
    )  # fmt: skip
    temperature = sampling.temperature or 1.0
    told = batch["temperature"].float()
    by = float((told - temperature).abs().max())
    require(
        by < 1e-6, "Signature", f"temperature is off by {by:.3g} from {temperature}", "a default that is passed over"
    )
    _ends(case, sampling, batch)


def _ends(case: _Case, sampling: Sampling, batch: Batch) -> None:
    """Responses stop where they must, and ``finished`` says which did so by themselves."""
    for row, start, finished in zip(
        batch.rows(), batch["prompt_length"].tolist(), batch["finished"].tolist(), strict=True
    ):
        response = row[start:].tolist()
        stops = [token in sampling.stop_token_ids for token in response]
        require(
            1 <= len(response) <= sampling.max_tokens and not any(stops[:-1]), "Signature",
            f"a response of {len(response)} tokens goes on past {sampling.max_tokens} tokens or a stop token",
            "an end that is checked too late",
        )  # fmt: skip
        # A script may end where it likes.
        ended = stops[-1] or (case.trainer is None and bool(finished))
        require(
            bool(finished) == ended and (ended or len(response) == sampling.max_tokens), "Signature",
            f"finished is {finished:.0f} for the response {response}", "rows that were cut off taken for finished ones",
        )  # fmt: skip


def _log_probs(case: _Case, sampling: Sampling, batch: Batch, params: Params) -> None:
    if case.trainer is None or sampling.temperature == 0.0:
        return
    cut = _cuts(sampling)
    name = "rollout_full_log_probs" if cut else "rollout_log_probs"
    told = case.trainer.forward(params, batch, ["logprobs"]).logprobs
    require_close(
        "Log-probs", f"{name} at temperature {sampling.temperature}, against the trainer's,", told, batch[name].float(),
        "log-probs of the raw logits instead of those divided by the temperature, or weights that were not updated",
        tolerance=case.tolerance, floor=1.0,
    )  # fmt: skip
    if cut:
        short = float((batch[name] - batch["rollout_log_probs"]).max())
        require(
            short <= case.tolerance, "Log-probs", f"cutting the distribution lowers a log-prob by {short:.3g}",
            "log-probs that are not renormalised after top-k or top-p",
        )  # fmt: skip


def _cuts(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0


def _independent(case: _Case) -> None:
    """Draws don't depend on the batch around a row, nor on anything global."""
    whole, n, size = case.generate(), case.sampling.n, len(case.prompts)
    position = "a seed from the position in the batch instead of (key, id, sample)"
    turned = list(range(size))[::-1]
    rows = [i * n + s for i in turned for s in range(n)]
    case.require_same_rows(
        "Purity", "the same prompts in another order", whole.take(rows), case.generate(turned), position
    )
    alone = concatenate([case.generate([i]) for i in range(size)])
    case.require_same_rows("Purity", "the same prompts one at a time", whole, alone, position)
    fewer = case.generate(sampling=attrs.evolve(case.sampling, n=1))
    case.require_same_rows(
        "Purity", "the first sample alone", whole.take([i * n for i in range(size)]), fewer,
        "a seed that depends on how many samples are drawn",
    )  # fmt: skip


def _random(case: _Case) -> None:
    """The key and the sample's number make a difference."""
    n, whole = case.sampling.n, case.generate()
    other = case.generate(key=case.key.fold_in("another"))
    differ = not torch.equal(whole.tokens, other.tokens)
    require(differ, "Purity", "another key gives the same responses", "a key that is passed over")
    rows = whole.rows()
    repeated = all(torch.equal(rows[i - i % n], rows[i]) for i in range(len(rows)))
    require(not repeated, "Purity", "all samples of a prompt are the same", "a seed without the sample's number")


def _frequencies(case: _Case) -> None:
    """First tokens come as often as their log-probs say, within 5 standard deviations."""
    for sampling in (
        Sampling(1, n=DRAWS),
        Sampling(1, n=DRAWS, temperature=0.5),
        Sampling(1, n=DRAWS, temperature=1.5, top_k=3),
    ):
        batch = case.generate([0], sampling=sampling)
        drawn, probs = batch.tokens[batch.last], batch["rollout_log_probs"][batch.last].double().exp()
        for token in drawn.unique():
            chosen = drawn == token
            share, said = float(chosen.double().mean()), float(probs[chosen].mean())
            sigma = max((said * (1.0 - said) / DRAWS) ** 0.5, 1.0 / DRAWS)
            require(
                abs(share - said) <= 5.0 * sigma, "Log-probs",
                f"a token of probability {said:.3g} was drawn in a share of {share:.3g} of {DRAWS} samples with {sampling}",
                "draws from another distribution than the one whose log-probs are given",
            )  # fmt: skip


def _versions(case: _Case, first: Params, second: Params) -> None:
    """New weights replace the old ones, and sleep forgets them."""
    engine, before = case.engine, case.generate()
    engine.publish(4, case.tensors(second).items())
    case.require_stale("after version 4 replaced version 3", 3)
    batch = case.generate(version=4)
    told = sorted(set(batch["version"].tolist()))
    require(told == [4], "Version", f"samples of version 4 say they are of {told}", "a version that is not passed on")
    _log_probs(case, case.sampling, batch, second)
    engine.sleep()
    case.require_stale("after sleep", 4)
    engine.wake()
    case.require_stale("after wake, before weights were published anew,", 4)
    engine.publish(5, case.tensors(first).items())
    case.require_same_rows(
        "Version", "the engine, with its first weights published anew,", before, case.generate(version=5),
        "caches that outlive the weights that they were made with",
    )  # fmt: skip
