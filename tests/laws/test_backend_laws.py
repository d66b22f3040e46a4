"""Every training backend that runs in this process."""

import mutants
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import KEYS, examples

from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.mock import Mock
from verl_fn.steps import (
    adamw,
    bradley_terry,
    chain,
    clip_by_global_norm,
    constant,
    cross_entropy,
    entropy,
    ppo_clip,
    sgd,
    value_clip,
)
from verl_fn.testing import check_backend, tiny_batch, tiny_pairs

pytestmark = pytest.mark.filterwarnings("error:the backend took the batch as one")

FP32, BF16, BF16_AGAINST_FP32 = 1e-5, 0.02, 0.1


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models of one layer, since a check runs them a hundred times, and one of two."""

    def make(**options):
        return new_model(tmp_path_factory.mktemp("model"), chars="abcd", hidden_size=16, **options)

    return {
        "tied": make(num_hidden_layers=1),
        "untied": make(num_hidden_layers=1, tie_word_embeddings=False),
        "two layers": make(num_hidden_layers=2),
    }


def local(folder, *, max_tokens=32, **options):
    return Local(folder, mutants.optimizer(), max_tokens=max_tokens, **options)


@given(key=KEYS, rows=st.integers(5, 12))
@examples(3)
def test_mock(key, rows):
    every = ppo_clip() + 0.5 * value_clip() - 0.01 * entropy()
    check_backend(mutants.mock(max_tokens=16), mutants.mock(), loss=every, batch=tiny_batch(key, rows=rows), key=key)


@pytest.mark.parametrize(
    "tx", [sgd(constant(0.1), momentum=0.9), chain(clip_by_global_norm(0.1), mutants.optimizer())]
)
def test_mock_with_other_optimizers(tx):
    check_backend(Mock(mutants.VOCAB, tx, max_tokens=24))


@pytest.mark.parametrize(("model", "checkpointing"), [("tied", False), ("untied", True), ("two layers", True)])
def test_local_in_fp32(folders, model, checkpointing):
    """With and without checkpointing on either side."""
    folder = folders[model]
    one = local(folder, checkpointing=checkpointing)
    other = local(folder, max_tokens=20, checkpointing=not checkpointing)
    check_backend(one, other, loss=ppo_clip() - 0.01 * entropy(), tolerance=FP32)


def test_padded_rows(folders):
    """Beside packed ones, and with another division into micro-batches."""
    one = local(folders["two layers"], row_layout="padded", checkpointing=True, max_tokens=20)
    check_backend(one, local(folders["two layers"]), loss=ppo_clip() - 0.01 * entropy(), tolerance=FP32)


def test_local_in_bf16(folders):
    """With checkpointing on one side."""
    folder = folders["untied"]
    one = local(folder, checkpointing=True, dtype="bfloat16")
    other = local(folder, max_tokens=20, dtype="bfloat16")
    # No clip: ratios near its bounds could fall on either side.
    check_backend(one, other, loss=cross_entropy() - 0.01 * entropy(), tolerance=BF16)


def test_moments_in_bf16(folders):
    """With another division into micro-batches some averages are rounded the other way."""
    tx = chain(clip_by_global_norm(1.0), adamw(constant(1e-3), weight_decay=0.0, moments=torch.bfloat16))
    one, other = (Local(folders["tied"], tx, max_tokens=tokens) for tokens in (32, 20))
    check_backend(one, other, loss=ppo_clip() - 0.01 * entropy(), tolerance=BF16)


def test_bf16_is_fp32_with_less_precision(folders):
    half = local(folders["tied"], dtype="bfloat16")
    check_backend(half, local(folders["tied"]), loss=cross_entropy(), tolerance=BF16_AGAINST_FP32)


@pytest.mark.parametrize("options", [{"checkpointing": True}, {"dtype": "bfloat16"}], ids=str)
def test_local_with_a_value_head(folders, options):
    """In fp32 without checkpointing, see the loss of pairs below."""
    tolerance = BF16 if "dtype" in options else FP32
    one = local(folders["tied"], head="value", **options)
    other = local(folders["tied"], head="value", max_tokens=20, **options)
    check_backend(one, other, loss=value_clip(), tolerance=tolerance)


def test_pairs_stay_together_in_small_micro_batches(folders):
    """A loss of pairs and one of tokens: each pair fits the budget, and all pairs do not."""
    both, batch = bradley_terry() + 0.5 * value_clip(), tiny_pairs()
    check_backend(mutants.mock(max_tokens=30), mutants.mock(max_tokens=40), loss=both, batch=batch)
    one, other = (local(folders["tied"], head="value", max_tokens=n) for n in (30, 40))
    check_backend(one, other, loss=both, batch=batch, tolerance=FP32)


@given(key=KEYS, rows=st.integers(5, 9))
@examples(2)
def test_local_on_other_batches(folders, key, rows):
    check_backend(local(folders["tied"], max_tokens=24), batch=tiny_batch(key, rows=rows), tolerance=FP32, key=key)
