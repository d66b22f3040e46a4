"""Requests, samples and the batch of samples."""

import collections

import attrs
import numpy as np
import pytest
import torch

from verl_fn.errors import ArgumentError
from verl_fn.state import END_REASONS, Key, Outcome, Request, Sample, Sampling, pack, requests_for, unpack
from verl_fn.state.rollout import RowImages

FIELDS = ("prompt", "tokens", "log_probs", "full_log_probs", "mask", "versions")


def sample(**changes):
    plain = Sample(
        request=7,
        number=0,
        prompt=torch.tensor([1, 5]),
        tokens=torch.tensor([6, 8, 8, 2]),
        log_probs=torch.tensor([-0.5, 0.0, 0.0, -0.1]),
        full_log_probs=None,
        mask=torch.tensor([1.0, 0.0, 0.0, 1.0]),
        versions=torch.tensor([3, 4, 4, 4]),
        finish_reason="stop",
        temperature=0.5,
        near_ties=1,
    )
    return attrs.evolve(plain, **changes)


def test_a_row_by_hand():
    """A tool wrote the two middle tokens; new weights came after the first one."""
    batch = pack([sample()])
    assert batch.tokens.tolist() == [1, 5, 6, 8, 8, 2]
    assert batch["response_mask"].tolist() == [0, 0, 1, 0, 0, 1]
    assert torch.equal(batch["rollout_log_probs"], torch.tensor([0.0, 0.0, -0.5, 0.0, 0.0, -0.1]))
    assert batch["versions"].tolist() == [-1, -1, 3, 4, 4, 4]
    assert {name: t.tolist() for name, t in batch.per_row.items()} == {
        "group": [7], "prompt_length": [2], "temperature": [0.5], "finished": [1.0], "version": [3], "near_ties": [1],
    }  # fmt: skip
    assert "rollout_full_log_probs" not in batch


def test_samples_that_were_cut_stand_beside_samples_that_were_not():
    cut = sample(full_log_probs=torch.tensor([-0.7, 0.0, 0.0, -0.2]), finish_reason="length", number=1)
    batch = pack([sample(), cut])
    expected = [0.0, 0.0, -0.5, 0.0, 0.0, -0.1, 0.0, 0.0, -0.7, 0.0, 0.0, -0.2]
    assert torch.equal(batch["rollout_full_log_probs"], torch.tensor(expected))
    assert batch["finished"].tolist() == [1.0, 0.0]


def test_unpack_is_the_way_back():
    cut = torch.tensor([-0.7, 0.0, 0.0, -0.2])
    samples = [
        sample(full_log_probs=cut),
        sample(full_log_probs=cut, request=3, prompt=torch.tensor([4])),
        sample(full_log_probs=cut, number=1, finish_reason="length", near_ties=0),
    ]
    for before, after in zip(samples, unpack(pack(samples)), strict=True):
        assert all(torch.equal(getattr(before, name), getattr(after, name)) for name in FIELDS)
        for name in ("request", "number", "finish_reason", "temperature", "near_ties"):
            assert getattr(before, name) == getattr(after, name)


def test_what_became_of_conversations_and_the_way_back():
    outcomes = [Outcome(0, "done", 0.5, 1.0, 2), Outcome(3, "turn_limit", 0.25, 0.75, 4)]
    batch = pack([sample(number=i, outcome=one) for i, one in enumerate(outcomes)])
    names = ("conversation", "env_end", "env_score", "env_acc", "env_turns")
    assert {name: batch[name].tolist() for name in names} == {
        "conversation": [0, 3], "env_end": [END_REASONS.index("done"), END_REASONS.index("turn_limit")],
        "env_score": [0.5, 0.25], "env_acc": [1.0, 0.75], "env_turns": [2, 4],
    }  # fmt: skip
    assert [s.outcome for s in unpack(batch)] == outcomes


def test_experts_of_tokens():
    """A row that no model computed has the first experts of every layer."""
    routed = torch.arange(24, dtype=torch.uint8).view(6, 2, 2)
    silent = sample(number=1, mask=torch.zeros(4))
    batch = pack([sample(routed_experts=routed), silent])
    assert torch.equal(batch["routed_experts"][:6], routed) and batch["routed_experts"].dtype == torch.uint8
    assert batch["routed_experts"][6:].tolist() == [[[0, 1], [0, 1]]] * 6
    assert torch.equal(unpack(batch)[0].routed_experts, routed) and unpack(pack([silent]))[0].routed_experts is None
    with pytest.raises(ValueError, match="sample 2 of request 7 has no routed_experts, and others have"):
        pack([sample(routed_experts=routed), sample(number=2)])


def test_the_oldest_version_of_a_row_is_of_drawn_tokens_if_there_are_any():
    versions, drawn = torch.tensor([2, 5, 4, 6]), torch.tensor([0.0, 1.0, 1.0, 0.0])
    rows = [sample(number=i, versions=versions, mask=mask) for i, mask in enumerate((drawn, torch.zeros(4)))]
    assert pack(rows)["version"].tolist() == [4, 2]


def test_samples_that_cannot_be_packed_are_named():
    none, outcome = torch.zeros(0), Outcome(0, "done", 0.5, 1.0, 2)
    pixels = [RowImages({name: torch.ones(1, 3)}) for name in ("pixels", "patches")]
    for samples, message in (
        ([], "no samples"),
        ([sample(), sample(number=3, tokens=none.long(), log_probs=none, mask=none, versions=none.long())],
         "sample 3 of request 7 has no tokens"),
        ([sample(outcome=outcome), sample(number=1)], "1 of 2 samples are of conversations; pack them by themselves"),
        ([sample(images=pixels[0]), sample(), sample(images=pixels[1])], "images of different families"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            pack(samples)


def test_keys_follow_ids():
    key, sampling = Key.from_seed(0), Sampling(4, n=2)
    first, second = requests_for([[1], [2, 3]], sampling, key, ids=[8, 5])
    assert (first.id, first.prompt, first.key.bits) == (8, (1,), key.fold_in(8).bits)
    assert (second.id, second.prompt, second.key.bits) == (5, (2, 3), key.fold_in(5).bits)
    for ids in ([1], [1, 2, 3]):
        with pytest.raises(ValueError, match=f"2 prompts with {len(ids)} ids"):
            requests_for([[1], [2]], sampling, key, ids=ids)
    with pytest.raises(ArgumentError, match=r"key is a Key, such as Key.from_seed\(0\), not a int"):
        requests_for([[1]], sampling, 3)
    with pytest.raises(TypeError):
        requests_for([[1]], sampling, key, ids=[1.5])


class Encoding(collections.UserDict):
    """As a tokenizer returns it."""


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("12", "not the string '12'; tokenize it first"),
        (b"12", "tokenize it first"),
        (Encoding(input_ids=[1, 2]), r"not a Encoding with \['input_ids'\]; pass its input_ids"),
        ({"input_ids": [1, 2]}, "pass its input_ids"),
        ([1.5, 2.0], "a sequence of integers"),
        (np.array([1.0]), "a sequence of integers"),
        (torch.tensor([1.0]), "a sequence of integers"),
        (["1"], "a sequence of integers"),
        ([[1, 2]], "a sequence of integers"),
        (7, "a sequence of integers"),
    ],
    ids=str,
)
def test_prompts_are_token_ids(prompt, message):
    with pytest.raises(ArgumentError, match=message):
        requests_for([prompt], Sampling(8), Key.from_seed(0))
    with pytest.raises(ArgumentError, match=message):
        Request(0, prompt, Sampling(8), Key.from_seed(0))


@pytest.mark.parametrize("prompt", [[1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2]), range(1, 3)], ids=str)
def test_sequences_of_integers_are_prompts(prompt):
    assert requests_for([prompt], Sampling(8), Key.from_seed(0))[0].prompt == (1, 2)


def test_one_string_is_not_a_list_of_prompts():
    with pytest.raises(ArgumentError, match=r"prompts is .*, not the string '12'; tokenize it first"):
        requests_for("12", Sampling(8), Key.from_seed(0))
    with pytest.raises(
        ArgumentError, match=r"prompts is .*, not a Encoding with \['input_ids'\]; pass its input_ids"
    ):
        requests_for(Encoding(input_ids=[[1, 2]]), Sampling(8), Key.from_seed(0))


def test_two_prompts_of_one_id_are_refused():
    with pytest.raises(ValueError, match=r"the id 3 is given to 2 prompts; .*Sampling\(n=\.\.\.\)"):
        requests_for([[1], [2]], Sampling(8), Key.from_seed(0), ids=[3, 3])


def test_counts_of_a_sampling_are_whole_numbers():
    assert Sampling(np.int64(4), top_k=np.int64(2), n=np.int32(3)) == Sampling(4, top_k=2, n=3)
    for name, wrong in (("max_tokens", 4.0), ("n", 2.0), ("top_k", 2.5), ("n", "2"), ("max_tokens", None)):
        with pytest.raises(ArgumentError, match=f"{name} of Sampling is {wrong!r}; give it a whole number"):
            Sampling(**{"max_tokens": 8, name: wrong})


def test_stop_tokens_can_be_a_list():
    given = [2, 3], (2, 3), np.array([2, 3]), torch.tensor([2, 3])
    assert len({Sampling(8, stop_token_ids=ids) for ids in given}) == 1
    for wrong in ((None,), 2, [2.5], ["</s>"]):
        with pytest.raises(ArgumentError, match="stop_token_ids is a sequence of integers"):
            Sampling(8, stop_token_ids=wrong)
