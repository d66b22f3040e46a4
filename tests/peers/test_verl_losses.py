"""Our losses give verl's values and gradients on random ragged batches."""

import attrs
import pytest
import torch
from padded import BATCHES, TOLERANCE, gap, outputs, pad, ragged, unpad

from verl_fn.state import Key, TokenOutputs
from verl_fn.steps import (
    aggregate,
    aggregate_rows,
    cispo,
    clip_cov,
    dppo_kl,
    dppo_tv,
    dro,
    geo_mean,
    gspo,
    kl_cov,
    kl_penalty,
    ppo_clip,
    reinforce,
    sapo,
    select_clip_cov,
    select_kl_cov,
    total_loss,
    value_clip,
)
from verl_fn.steps.aggregate import MODES
from verl_fn.steps.kl import ALIASES, ESTIMATORS
from verl_fn.testing.builders import in_float64

algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed: make test-peers")


@attrs.frozen
class Case:
    """Our loss, verl's name, its options there, the weights, and how tokens are selected."""

    loss: object
    name: str
    options: dict = attrs.field(factory=dict)
    mode: str = "token-mean"
    select: object = None


RANGE = {"clip_ratio": 0.2, "clip_ratio_low": 0.1, "clip_ratio_high": 0.28}
# With a share of 1, all candidates are drawn, whatever verl's generator does.
ALL = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 1.0}
LOSSES = {
    "ppo_clip": Case(ppo_clip(**RANGE, clip_ratio_c=1.5), "vanilla", RANGE | {"clip_ratio_c": 1.5}),
    "gspo": Case(gspo(**RANGE), "gspo", RANGE),
    "gspo, seq-mean-token-mean": Case(gspo(**RANGE), "gspo", RANGE, "seq-mean-token-mean"),
    "sapo": Case(sapo(1.0, 1.5), "sapo", {"tau_pos": 1.0, "tau_neg": 1.5}, "seq-mean-token-mean"),
    "cispo": Case(cispo(**RANGE), "cispo", RANGE),
    "gpg": Case(reinforce(), "gpg"),
    "reinforce": Case(reinforce(), "reinforce", mode="seq-mean-token-sum"),
    "dro": Case(dro(0.7), "dro", {"policy_loss": {"dro_beta": 0.7}}),
    "dppo_tv": Case(dppo_tv(**RANGE, clip_ratio_c=1.5), "dppo_tv", RANGE | {"clip_ratio_c": 1.5}),
    "dppo_kl": Case(
        dppo_kl(0.05, 0.02, 0.08, 1.5),
        "dppo_kl",
        {"clip_ratio": 0.05, "clip_ratio_low": 0.02, "clip_ratio_high": 0.08, "clip_ratio_c": 1.5},
    ),
    "geo_mean": Case(geo_mean(**RANGE), "geo_mean", RANGE),
    "clip_cov": Case(
        clip_cov(**RANGE),
        "clip_cov",
        RANGE | {"policy_loss": ALL},
        select=lambda batch, logprobs: select_clip_cov(batch, logprobs, Key.from_seed(0), **ALL, **RANGE),
    ),
    "kl_cov": Case(
        kl_cov(0.3),
        "kl_cov",
        {"policy_loss": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.3}},
        select=lambda batch, logprobs: select_kl_cov(batch, logprobs, kl_cov_ratio=0.2),
    ),
}


def verl_loss(case, batch, table):
    from verl.workers.config.actor import ActorConfig, PolicyLossConfig

    options = dict(case.options)
    mode = PolicyLossConfig(**options.pop("policy_loss", {}))
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, policy_loss=mode, **options)
    reinforce_of = algos.compute_policy_loss_reinforce
    function = reinforce_of if case.name == "reinforce" else algos.get_policy_loss_fn(case.name)
    fields = (
        pad(batch, batch["old_log_probs"]),
        table,
        *(pad(batch, batch[n]) for n in ("advantages", "response_mask")),
    )
    return function(*fields, loss_agg_mode=case.mode, config=config)


@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses_are_verls(name, measured):
    case = LOSSES[name]
    worst, metrics = {"value": 0.0, "gradient": 0.0}, 0.0
    for number in range(BATCHES):
        batch = in_float64(aggregate_rows(aggregate(ragged(number), case.mode)))
        logprobs = outputs(batch, number).logprobs
        if case.select is not None:
            batch = case.select(batch, logprobs)
        x, table = logprobs.clone().requires_grad_(), pad(batch, logprobs).requires_grad_()
        ours, reported = total_loss(case.loss, TokenOutputs({"logprobs": x}), batch)
        theirs, expected = verl_loss(case, batch, table)
        (ours_dx,), (theirs_dx,) = torch.autograd.grad(ours, [x]), torch.autograd.grad(theirs, [table])
        worst["value"] = max(worst["value"], gap(ours.detach(), theirs.detach()))
        worst["gradient"] = max(worst["gradient"], gap(ours_dx, unpad(batch, theirs_dx), batch["response_mask"]))
        # Where verl's mean has nothing but zeros to report, ours has no such metric.
        same = [n for n in expected if n in reported]
        metrics = max([metrics, *(abs(reported[n].value - expected[n]) for n in same)])
    measured.setdefault("policy losses", {})[name] = worst | {"metrics": metrics}
    assert max(*worst.values(), metrics) < TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_is_verls(mode, measured):
    worst = 0.0
    for number in range(BATCHES):
        batch = ragged(number)
        weighted = aggregate(batch, mode, loss_scale_factor=8.0)
        mask, values = pad(batch, batch["response_mask"]), batch["advantages"]
        theirs = algos.agg_loss(pad(batch, values), mask, mode, loss_scale_factor=8.0)
        worst = max(worst, gap((weighted["loss_weight"].double() * values).sum(), theirs))
    measured.setdefault("aggregation", {})[mode] = {"value": worst}
    assert worst < TOLERANCE


@pytest.mark.parametrize("kind", [name + plus for name in (*ESTIMATORS, *ALIASES) for plus in ("", "+")])
def test_kl_is_verls(kind, measured):
    worst = {"value": 0.0, "gradient": 0.0}
    for number in range(BATCHES):
        batch = ragged(number)
        x, y = (outputs(batch, number).logprobs.clone().requires_grad_() for _ in range(2))
        ours, theirs = kl_penalty(x, batch["ref_log_prob"], kind), algos.kl_penalty(y, batch["ref_log_prob"], kind)
        worst["value"] = max(worst["value"], gap(ours.detach(), theirs.detach()))
        pair = (torch.autograd.grad(values.sum(), [leaf])[0] for values, leaf in ((ours, x), (theirs, y)))
        worst["gradient"] = max(worst["gradient"], gap(*pair))
    measured.setdefault("KL", {})[kind] = worst
    assert max(worst.values()) < TOLERANCE


def test_the_value_loss_is_verls(measured):
    worst = {"value": 0.0, "gradient": 0.0}
    for number in range(BATCHES):
        batch = in_float64(aggregate(ragged(number)))
        values = outputs(batch, number).values
        x, table = values.clone().requires_grad_(), pad(batch, values).requires_grad_()
        ours, _ = total_loss(value_clip(0.5), TokenOutputs({"values": x}), batch)
        fields = (pad(batch, batch[name]) for name in ("returns", "values", "response_mask"))
        theirs, _ = algos.compute_value_loss(table, *fields, cliprange_value=0.5)
        (ours_dx,), (theirs_dx,) = torch.autograd.grad(ours, [x]), torch.autograd.grad(theirs, [table])
        worst["value"] = max(worst["value"], gap(ours.detach(), theirs.detach()))
        worst["gradient"] = max(worst["gradient"], gap(ours_dx, unpad(batch, theirs_dx), batch["response_mask"]))
    measured.setdefault("value loss", {})["value_clip"] = worst
    assert max(worst.values()) < TOLERANCE
