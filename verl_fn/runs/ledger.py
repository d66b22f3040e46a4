"""What becomes of the rows that a step asks the rollout engine for: each is learned from, or dropped for a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from verl_fn.algorithms import Report
from verl_fn.state import END_REASONS, FAILURES, Batch, conversations


def counts_of(batch: Batch) -> Counter[str]:
    """Returns the numbers of rows and of sampled tokens; with an environment, also of conversations.

    Example:
        >>> sorted(counts_of(Batch.from_rows([[1, 2], [3]], {"response_mask": [[0.0, 1.0], [1.0]]})).items())
        [('rows', 2), ('tokens', 2)]
    """
    mask = batch["response_mask"].bool()
    counts = Counter(rows=len(batch), tokens=int(mask.sum()))
    if "conversation" in batch:
        last = batch.take(conversations(batch)[1])
        counts["conversations"] = len(last)
        counts["turns"] = int(last["env_turns"].sum())
        for number, reason in enumerate(END_REASONS):
            counts[f"ended/{reason}"] = int((last["env_end"] == number).sum())
        for reason in FAILURES:
            failed = batch["env_end"] == END_REASONS.index(reason)
            counts[f"rows/{reason}"] = int(failed.sum())
            counts[f"tokens/{reason}"] = int((mask & batch.spread(failed.float()).bool()).sum())
    return counts


def without_failures(counts: Sequence[Counter[str]]) -> Counter[str]:
    """Returns the numbers of rows and of sampled tokens without the conversations whose environment failed.

    Example:
        >>> without_failures([Counter({"rows": 3, "tokens": 9, "rows/env_crashed": 1, "tokens/env_crashed": 2})])
        Counter({'tokens': 7, 'rows': 2})
    """
    whole: Counter[str] = sum(counts, Counter())
    return Counter({k: whole[k] - sum(whole[f"{k}/{reason}"] for reason in FAILURES) for k in ("rows", "tokens")})


def ledger(
    returned: Sequence[Counter[str]],
    learned: Batch,
    step: int,
    asked: int,
    dropped: Mapping[str, Counter[str]] | None = None,
) -> Report:
    """Compares the rows that engine and reward returned with the rows that a step learns from.

    Args:
        returned: the counts of the rows that each call returned.
        learned: the rows that the step learns from.
        step: the version of the weights that learn.
        asked: how many rows the engine was asked for, or conversations.
        dropped: the counts of the rows that the algorithm left out, by reason.

    Returns:
        Rows and sampled tokens that were learned from or dropped, and by how many steps the weights that drew the
        tokens are older than the weights that learn; empty if the step learns from other data than rows of samples.

    Example:
        >>> batch = Batch.from_rows([[5, 6, 7]], {"response_mask": [[0.0, 1.0, 1.0]], "versions": [[-1, 3, 4]]})
        >>> report = ledger([counts_of(batch)], batch, step=4, asked=2)
        >>> report["rollout/rows_dropped/engine"], report["training/rollout_lag/mean"]
        (1, 0.5)
    """
    if not isinstance(learned, Batch) or "versions" not in learned:
        # An algorithm of the user may learn from other data.
        return {}
    whole, used, dropped = sum(returned, Counter()), counts_of(learned), dict(dropped or {})
    rest = whole - used
    for reason in FAILURES if "conversations" in whole else ():
        # Of failed environments' rows, an algorithm of the user may learn from some.
        dropped[reason] = Counter({kind: rest[f"{kind}/{reason}"] for kind in ("rows", "tokens")})
    named = sum(dropped.values(), Counter())
    split = whole["rows"] - whole["conversations"] if "conversations" in whole else 0
    report: Report = {
        "rollout/rows_learned": used["rows"],
        "rollout/rows_dropped/engine": asked - (whole["rows"] - split),
        "rollout/rows_dropped/algorithm": whole["rows"] - used["rows"] - named["rows"],
        "rollout/tokens_learned": used["tokens"],
        "rollout/tokens_dropped/algorithm": whole["tokens"] - used["tokens"] - named["tokens"],
    }
    for name, counts in dropped.items():
        report |= {f"rollout/{kind}_dropped/{name}": counts[kind] for kind in ("rows", "tokens")}
    if "conversations" in whole:
        talks = max(1, whole["conversations"])
        report |= {"rollout/rows_split": split, "env/turns/mean": whole["turns"] / talks}
        report |= {f"env/ended/{reason}": whole[f"ended/{reason}"] / talks for reason in END_REASONS}
    if used["tokens"]:
        lags = (step - learned["versions"])[learned["response_mask"].bool()].double()
        lag = {"mean": lags.mean(), "min": lags.min(), "max": lags.max()}
        report |= {f"training/rollout_lag/{name}": float(value) for name, value in lag.items()}
    return report


def before_update(learned: Batch) -> Report:
    """Returns the share of sampled tokens that are of older weights than the last one of their row.

    Example:
        >>> fields = {"response_mask": [[0.0, 1.0, 1.0], [1.0]], "versions": [[-1, 3, 4], [3]]}
        >>> before_update(Batch.from_rows([[5, 6, 7], [8]], fields))
        {'training/rollout_before_update': 0.3333333333333333}
    """
    if not isinstance(learned, Batch) or "versions" not in learned:
        return {}
    rows = zip(learned.rows("versions"), learned.rows("response_mask"), strict=True)
    drawn = [versions[mask.bool()] for versions, mask in rows]
    older = sum(int((versions < versions[-1]).sum()) for versions in drawn if len(versions))
    return {"training/rollout_before_update": older / max(1, sum(map(len, drawn)))}
