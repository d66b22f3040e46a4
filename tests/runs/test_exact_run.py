"""Whole runs with ``rollout.exact``: equal bits in each step, one pass less, a failure with its place, refusals."""

import shutil

import attrs
import pytest
import torch
from test_train import config, model, numbers  # noqa: F401

from verl_fn.algorithms.experience import NotExact
from verl_fn.backends.local import Local
from verl_fn.backends.sampler import Sampler
from verl_fn.config import ConfigError
from verl_fn.runs.checks import check_all_weights
from verl_fn.runs.loop import train

QUIET = lambda line: None  # noqa: E731
TOTAL = "trainer.total_training_steps"
STEPS = f"{TOTAL}=3"
SAME = ("actor/grad_norm", "actor/pg_loss", "critic/score/mean", "rollout_corr/kl", "rollout/tokens_differing")


@pytest.mark.parametrize(
    "more",
    [
        ("grpo", "actor.lora_rank=4", "rollout.temperature=0.7", "rollout.top_k=5"),
        ("ppo", "actor.enable_gradient_checkpointing=true", "model.layout=padded"),
        ("grpo", "actor.strategy=fsdp"),
    ],
    ids=str,
)
def test_strict_learns_as_audit_does_without_a_pass(more, model, tmp_path, monkeypatch):  # noqa: F811
    # PPO's first step does not update the actor.
    steps = 3 if more[0] == "ppo" else 2
    runs, passes = {}, {}
    own = Local._forward
    for mode in ("audit", "strict"):
        counted = []

        def forward(self, *args, counted=counted):
            counted.append(self.head)
            return own(self, *args)

        monkeypatch.setattr(Local, "_forward", forward)
        train(config(model, tmp_path / mode, *more, f"rollout.exact={mode}", f"{TOTAL}={steps}"), QUIET)
        runs[mode], passes[mode] = numbers(tmp_path / mode)[1:], counted.count("lm")
    for audit, strict in zip(runs["audit"], runs["strict"], strict=True):
        assert audit["rollout/tokens_differing"] == audit["rollout_corr/kl"] == 0.0
        assert audit["rollout/log_prob_diff_max"] == audit["training/rollout_probs_diff_max"] == 0.0
        assert {name: audit.get(name) for name in SAME} == {name: strict.get(name) for name in SAME}
        assert strict["actor/entropy"] > 0.0
    if "actor.strategy=fsdp" not in more:
        # Without an update, the pass is made.
        assert passes["audit"] - passes["strict"] == 2


def test_a_resumed_strict_run_is_the_uninterrupted_run(model, tmp_path):  # noqa: F811
    train(config(model, tmp_path / "whole", "grpo", "rollout.exact=strict", STEPS), QUIET)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed", symlinks=True)
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"resumed/checkpoints/step_{step}")
    train(config(model, tmp_path / "resumed", "grpo", "rollout.exact=strict", STEPS), QUIET)
    assert numbers(tmp_path / "resumed") == numbers(tmp_path / "whole")


@pytest.mark.parametrize("estimator", ["grpo", "optimal_token_baseline"])
def test_strict_ends_at_the_first_difference_and_names_its_place(estimator, model, tmp_path, monkeypatch):  # noqa: F811
    """With an estimator that needs the actor's pass all rows are compared, else the first minibatch."""
    own = Sampler.publish

    def publish(self, version, weights):
        own(self, version, weights)
        with torch.inference_mode():
            self.decoder._weights["model.layers.1.self_attn.k_proj.weight"] += 1e-3 * (version == 1)

    monkeypatch.setattr(Sampler, "publish", publish)
    more = ["rollout.exact=strict", f"algorithm.adv_estimator={estimator}", "algorithm.entropy_coeff=0"]
    with pytest.raises(NotExact, match=r"differ, by up to .* nats: they part in model\.layers\.1\.self_attn\.k_proj"):
        train(config(model, tmp_path / "run", "grpo", *more, STEPS), QUIET)
    assert [row["step"] for row in numbers(tmp_path / "run")] == [0, 1]
    monkeypatch.undo()
    monkeypatch.setattr(Sampler, "publish", publish)
    train(config(model, tmp_path / "audit", "grpo", *more[1:], "rollout.exact=audit", STEPS), QUIET)
    differing = [row["rollout/tokens_differing"] for row in numbers(tmp_path / "audit")[1:]]
    assert differing[0] == differing[2] == 0.0 < differing[1]


def test_an_estimator_that_needs_the_actors_pass_has_all_rows_compared(model, tmp_path, monkeypatch):  # noqa: F811
    """Also rows of a minibatch after the first one, whose log-probs nothing else compares."""
    own = Sampler.generate

    def generate(self, *args, **kwargs):
        *samples, last = own(self, *args, **kwargs)
        return [*samples, attrs.evolve(last, log_probs=last.log_probs - 1e-3)]

    monkeypatch.setattr(Sampler, "generate", generate)
    more = ["rollout.exact=strict", "algorithm.ppo_mini_batch_size=2", "algorithm.shuffle=false", STEPS]
    train(config(model, tmp_path / "first", "grpo", *more, "algorithm.entropy_coeff=0"), QUIET)
    with pytest.raises(NotExact, match=r"log-probs of \d+ of \d+ tokens differ"):
        train(config(model, tmp_path / "all", "grpo", *more, "algorithm.adv_estimator=optimal_token_baseline"), QUIET)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("driver.max_lag=1 driver.kind=ray rollout.placement=apart", "driver.max_lag older weights"),
        ("rollout.name=vllm driver.kind=ray", "vllm has kernels of its own"),
        ("actor.strategy=megatron", "megatron has kernels of its own"),
        ("actor.strategy=fsdp actor.fsdp_config.use_torch_compile=true", "compiled layers"),
        ("actor.strategy=fsdp driver.kind=ray ray.ranks=2", "one training rank"),
        ("actor.dtype=bfloat16", "one dtype"),
        ("algorithm.name=rejection", "rejection does not compare"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(setting, reason, model, tmp_path):  # noqa: F811
    with pytest.raises(ConfigError, match=rf'rollout.exact = "strict" cannot be: .*{reason}'):
        config(model, tmp_path, "grpo", "rollout.exact=strict", *setting.split())


def test_a_family_without_exact_kernels_is_refused_before_the_run(tmp_path):
    from verl_fn.backends.hf.exact import ExactError
    from verl_fn.backends.hf.new_model import new_model

    folder = new_model(tmp_path / "model", chars="abc", arch="gpt2", hidden_size=32)
    with pytest.raises(ExactError, match="the model type is gpt2; set rollout"):
        check_all_weights(config(folder, tmp_path / "run", "grpo", "rollout.exact=audit"))


def test_off_replaces_nothing(model):  # noqa: F811
    from verl_fn.steps import adamw

    trainer, engine = Local(model, adamw(1e-3)), Sampler(model)
    trainer.load_pretrained()
    skeleton = trainer._built()
    assert skeleton.head_kernels is None
    assert not any("forward" in vars(m) for m in skeleton.model.modules() if isinstance(m, torch.nn.Linear))
    assert type(engine.decoder).__name__ == "LlamaDecoder"
