"""A law that cannot fail is no law: every check catches every mutant of its kind, and for the right reason."""

from functools import partial

import mutants
import pytest
import torch

from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.mock import Mock
from verl_fn.steps import Loss, constant, gae, grpo, ppo_clip, reinforce_plus_plus, rloo, sgd
from verl_fn.testing import LawViolation, check_advantage, check_backend, check_loss, check_rollout, tiny_batch


def name_of(case):
    if isinstance(case, partial):
        named = [*case.args, case.keywords.get("script")]
        return next((thing.__name__ for thing in named if thing is not None), "".join(case.keywords))
    if isinstance(case, Loss):
        return case.terms[0].fn.__name__
    return getattr(case, "__name__", None)


def require_caught(check, mutant, law):
    with pytest.raises(LawViolation) as caught:
        check(mutant)
    assert caught.value.law == law, caught.value
    assert "Usual cause: " in str(caught.value)


def trainer():
    return Mock(mutants.VOCAB, sgd(constant(0.1)))


@pytest.mark.parametrize(("make", "law"), mutants.BACKENDS, ids=name_of)
def test_check_backend_catches(make, law):
    require_caught(check_backend, make(), law)


@pytest.mark.parametrize(("make", "loss"), mutants.OTHER_OUTPUTS, ids=name_of)
def test_check_backend_catches_other_outputs(make, loss):
    require_caught(partial(check_backend, loss=loss), make(), "Outputs")


@pytest.mark.parametrize(("make", "right"), mutants.LAYOUTS, ids=name_of)
def test_check_backend_catches_the_other(make, right):
    require_caught(partial(check_backend, right()), make(), "Layout")


def test_check_backend_catches_a_stale_copy_of_a_model(tmp_path):
    folder = new_model(tmp_path, chars="abcd", hidden_size=16, num_hidden_layers=1)
    stale = mutants.StaleLocal(folder, mutants.optimizer(), dtype="bfloat16", max_tokens=24)
    require_caught(partial(check_backend, tolerance=0.05), stale, "Persistence")


def test_check_backend_catches_stale_checksums(tmp_path):
    folder = new_model(tmp_path, chars="abcd", hidden_size=16, num_hidden_layers=1)
    stale = mutants.StaleChecksums(folder, mutants.optimizer(), lora=Lora(rank=1), max_tokens=24)
    require_caught(check_backend, stale, "Persistence")


def test_check_backend_catches_stale_checksums_of_a_tower(tmp_path):
    sizes = {"hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    folder, options = new_model(tmp_path, chars="abcd", arch="smolvlm", **sizes), {"max_tokens": 24}
    check_backend(Local(folder, mutants.optimizer(), freeze_vision_tower=True, **options))
    stale = mutants.StaleTower(folder, mutants.optimizer(), freeze_vision_tower=True, **options)
    require_caught(check_backend, stale, "Persistence")


def test_check_backend_warns_where_nothing_is_split():
    with pytest.warns(UserWarning, match="smaller token budget"):
        check_backend(mutants.mock(max_tokens=1000))


def test_check_backend_passes_the_original():
    check_backend(mutants.mock(), mutants.mock(max_tokens=16))


@pytest.mark.parametrize(("mutant", "law"), mutants.LOSSES, ids=name_of)
def test_check_loss_catches(mutant, law):
    require_caught(check_loss, mutant, law)


def test_check_loss_passes_the_original():
    check_loss(ppo_clip())


def test_check_loss_wants_a_loss():
    with pytest.raises(TypeError, match="needs="):
        check_loss(lambda outputs, batch: (outputs.logprobs, {}))


@pytest.mark.parametrize(("mutant", "law"), mutants.ADVANTAGES, ids=name_of)
def test_check_advantage_catches(mutant, law):
    require_caught(check_advantage, mutant, law)


@pytest.mark.parametrize("change", [lambda image: image * 0.0, lambda image: image[:0]], ids=["values", "rows"])
def test_check_advantage_catches_another_ragged_field(change):
    batch = tiny_batch().with_ragged(images=[torch.full((row % 3, 2), 1.0) for row in range(8)])
    check_advantage(grpo, batch)

    def estimator(batch):
        images = [change(image) for image in batch.rows("images")]
        return grpo(batch).with_ragged(images=images)

    require_caught(partial(check_advantage, batch=batch), estimator, "Signature")


@pytest.mark.parametrize("estimator", [gae, grpo, rloo, reinforce_plus_plus], ids=name_of)
def test_check_advantage_passes_the_original(estimator):
    check_advantage(estimator)


@pytest.mark.parametrize(("make", "law"), mutants.ROLLOUTS, ids=name_of)
def test_check_rollout_catches(make, law):
    require_caught(lambda engine: check_rollout(engine, trainer()), make(), law)


def test_check_rollout_passes_the_original():
    check_rollout(mutants.rollout, trainer())
