"""Sentences about a step that is allowed, but teaches nothing or the wrong thing."""

from __future__ import annotations

from verl_fn.algorithms import Report


def without_signal(step: int, report: Report) -> str:
    """Returns a sentence about a step whose rewards are all equal, or whose advantages are all 0; or nothing.

    Example:
        >>> names = ("critic/score/min", "critic/score/max", "critic/advantages/min", "critic/advantages/max")
        >>> without_signal(3, dict.fromkeys(names, 0.0))
        'all rewards of step 3 are 0, and all advantages are 0: the policy learns nothing from it'
        >>> without_signal(3, dict(zip(names, (0.0, 1.0, -1.0, 1.0))))
        ''
    """
    names = ("critic/score/min", "critic/score/max", "critic/advantages/min", "critic/advantages/max")
    if any(name not in report for name in names):
        return ""
    lowest, highest, *advantages = (report[name] for name in names)
    idle = advantages == [0.0, 0.0]
    if lowest == highest:
        also = ", and all advantages are 0: the policy learns nothing from it" if idle else ""
        return f"all rewards of step {step} are {lowest:g}{also}"
    if idle:
        return (
            f"all advantages of step {step} are 0, although rewards go from {lowest:g} to {highest:g}: they differ "
            "between prompts only, or are so large that their differences are rounded away"
        )
    return ""


# KL(engine || trainer) per token, in nats. For the same weights in bf16 it is about 0.002 (SmolLM2 on an H200).
GAP = 0.02


def wide_gap(step: int, report: Report) -> str:
    """Returns a sentence about a step whose samples came from another distribution than the trainer's; or nothing.

    Example:
        >>> wide_gap(3, {"rollout_corr/k3_kl": 0.5})[:76]
        "in step 3 the engine's log-probs differ from the trainer's: KL 0.5 per token"
        >>> wide_gap(3, {"rollout_corr/k3_kl": 1e-4})
        ''
    """
    kl = report.get("rollout_corr/k3_kl", 0.0)
    if kl <= GAP:
        return ""
    return (
        f"in step {step} the engine's log-probs differ from the trainer's: KL {kl:.2g} per token. Likely causes: "
        "rollout.dtype differs from actor.dtype; the model's kernels round differently in the engine; or samples "
        "are older than the weights (driver.max_lag). algorithm.rollout_is corrects for the difference"
    )


MOST = 0.5


def cut_off(step: int, report: Report) -> str:
    """Returns a sentence about a step in which most responses or conversations were cut off; or nothing.

    Example:
        >>> cut_off(3, {"response_length/clip_ratio": 0.75})[:64]
        'in step 3 75% of the responses were cut off at data.max_response'
        >>> cut_off(3, {"env/ended/turn_limit": 0.5, "env/ended/length": 0.25})[:56]
        'in step 3 75% of the conversations were cut off: 50% at '
        >>> cut_off(3, {"response_length/clip_ratio": 0.25})
        ''
    """
    turns, length = (report.get(f"env/ended/{reason}") for reason in ("turn_limit", "length"))
    if turns is not None and length is not None:
        if turns + length <= MOST:
            return ""
        return (
            f"in step {step} {turns + length:.0%} of the conversations were cut off: {turns:.0%} at env.max_turns, "
            f"{length:.0%} at env.max_turn_length or data.max_response_length. Their reward is 0; raise these keys, "
            "or look at some in generations.jsonl (trainer.rollout_data_dir writes the answers of training)"
        )
    share = report.get("response_length/clip_ratio", 0.0)
    if share <= MOST:
        return ""
    return (
        f"in step {step} {share:.0%} of the responses were cut off at data.max_response_length; raise it, or let the "
        "model end earlier"
    )
