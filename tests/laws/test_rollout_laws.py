"""Every rollout engine that runs in this process."""

import mutants
import pytest
from hypothesis import given
from properties import KEYS, examples

from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.mock.rollout import MockRollout, sample_table
from verl_fn.backends.mock.train import Mock
from verl_fn.backends.protocol import Sampling, StaleWeightsError
from verl_fn.backends.sampler import Sampler
from verl_fn.state import Key
from verl_fn.steps import constant, sgd
from verl_fn.testing import check_rollout

PROMPTS = [(3, 4), (5,), (1, 6, 1), (3, 4)]


@given(key=KEYS)
@examples(4)
def test_mock_that_samples_a_table(key):
    trainer = Mock(mutants.VOCAB, sgd(constant(0.1)))
    check_rollout(MockRollout(sample_table), trainer, key=key)


@pytest.mark.parametrize(
    "script",
    [
        {(3, 4): [5, 2], (5,): [4] * 9, (1, 6, 1): [2]},
        lambda request: [3 + request.key.seed() % 5, *request.prompt, 2, 7],
        lambda request: [4, 5, request.sample],
    ],
    ids=["mapping", "by key", "by sample"],
)
def test_mock_with_a_script(script):
    check_rollout(lambda: MockRollout(script), prompts=PROMPTS)


def test_mock_refuses_a_prompt_that_its_script_lacks():
    engine = MockRollout({(1,): [2]})
    with pytest.raises(StaleWeightsError, match="none"):
        engine.generate([[1]], Sampling(4), Key.from_seed(0))
    engine.publish(0, [])
    with pytest.raises(KeyError, match="no answer"):
        engine.generate([[3]], Sampling(4), Key.from_seed(0))


@pytest.mark.parametrize(
    ("options", "dtype", "tolerance"),
    [({}, "float32", 1e-5), ({"slots": 3}, "float32", 1e-5), ({"dtype": "bfloat16"}, "bfloat16", 0.1)],
    ids=["all at a time", "three at a time", "bf16"],
)
def test_sampler(tmp_path, options, dtype, tolerance):
    # Larger weights than a new model has, so that its distributions are far from uniform.
    folder = new_model(tmp_path, chars="abcd", hidden_size=16, initializer_range=0.3)
    trainer = Local(folder, sgd(constant(0.1)), compute_dtype=dtype)
    check_rollout(lambda: Sampler(folder, **options), trainer, tolerance=tolerance)
