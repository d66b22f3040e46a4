"""What travels between processes: values as they were, and routes of experts that stay in the object store."""

import pytest
import ray
import torch

from verl_fn.driver import serialization
from verl_fn.driver.serialization import Distant, Samples, opened, packed
from verl_fn.state import TokenOutputs, pack, tree, unpack, version_of
from verl_fn.testing import tiny_batch

ROUTES = torch.arange(60, dtype=torch.uint8).reshape(10, 3, 2)


@pytest.fixture(autouse=True)
def every_tensor_travels_as_an_array(ray_cluster, monkeypatch):
    monkeypatch.setattr(serialization, "SMALL_BYTES", 1)


@pytest.fixture
def distant():
    """The result of a call, as the driver fetches it."""
    ref = ray.put(packed(TokenOutputs({"logprobs": torch.zeros(10), "routed_experts": ROUTES})))
    return opened(ray.get(ref), ref=ref).by_name["routed_experts"]


def test_a_value_arrives_as_it_was_sent():
    batch = tiny_batch(rows=5).with_ragged(images=[[], [[0.5, 0.5]], [], [], []])
    there = opened(ray.get(ray.put(packed({"batch": batch, "number": 3}))))
    assert there["number"] == 3 and tree.equal(there["batch"], batch)


def test_what_a_receiver_writes_to_its_copy_is_in_nothing_else():
    ref = ray.put(packed(ROUTES))
    opened(ray.get(ref)).zero_()
    assert torch.equal(opened(ray.get(ref)), ROUTES)
    assert torch.equal(opened(ray.get(ref), shared=True), ROUTES)


def samples(routed):
    batch = tiny_batch(rows=3)
    batch = batch.with_rows(near_ties=[0, 1, 2], finished=[1.0, 0.0, 1.0], temperature=[1.0] * 3, group=[5, 5, 7])
    batch = batch.with_rows(prompt_length=[1] * 3).with_tokens(versions=torch.ones(batch.num_tokens))
    routes = {"routed_experts": ROUTES[torch.arange(batch.num_tokens) % 10]} if routed else {}
    return unpack(batch.with_tokens(rollout_log_probs=torch.zeros(batch.num_tokens), **routes))


@pytest.mark.parametrize("routed", [False, True])
def test_samples_travel_as_one_batch_and_leave_their_routes_where_they_are(routed):
    sent = samples(routed)
    ref = ray.put(packed(sent))
    assert isinstance(ray.get(ref), Samples)
    arrived = opened(ray.get(ref), ref=ref)
    again = pack(arrived)
    assert [one.request for one in arrived] == [5, 5, 7]
    if routed:
        assert isinstance(again["routed_experts"], Distant) and len(again["routed_experts"].stored) == 1
        again = again.with_tokens(routed_experts=again["routed_experts"].whole())
    assert tree.equal(again, pack(sent))


def test_routes_of_experts_are_not_fetched_until_they_are_used(distant, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Distant, "whole", None)
        part = distant[torch.tensor([3, 1, 1])]
        first, second = distant.split([4, 6])
        joined = torch.cat([second, part, first[1:3]])
        assert all(isinstance(one, Distant) for one in (part, first, second, joined, part.detach()))
        assert (len(joined.stored), joined.shape[1:], joined.dtype) == (1, (3, 2), torch.uint8)
    expected = torch.cat([ROUTES[4:], ROUTES[[3, 1, 1]], ROUTES[1:3]])
    assert torch.equal(joined.whole(), expected)
    assert torch.equal(joined + 1, expected + 1) and tree.digest(joined) == tree.digest(expected)


def test_routes_are_used_as_a_tensor_is_along_every_axis(distant):
    for use in (
        lambda t: t[:, 1:],
        lambda t: t[2:9:3],
        lambda t: t[torch.tensor([4, 2]), torch.tensor([0, 1])],
        lambda t: torch.cat(t.split([1, 2], dim=1)[::-1], dim=1),
        lambda t: torch.cat([t, t], dim=2),
        lambda t: torch.cat([t, ROUTES[:1]]),
        lambda t: t.sum((1, 2)),
    ):
        assert torch.equal(torch.as_tensor(opened(use(distant))), use(ROUTES))


def test_only_large_tensors_travel_as_arrays(monkeypatch):
    monkeypatch.setattr(serialization, "SMALL_BYTES", 60)
    small, large = packed([ROUTES[:9], ROUTES])
    assert isinstance(small, torch.Tensor) and isinstance(large, serialization.Array)


def test_routes_of_two_answers_are_joined(distant):
    ref = ray.put(packed(TokenOutputs({"routed_experts": ROUTES + 100})))
    other = opened(ray.get(ref), ref=ref).by_name["routed_experts"]
    mixed = torch.cat([other[2:5], distant, other[:1]])[torch.tensor([13, 0, 5])]
    assert torch.equal(mixed.whole(), torch.stack([ROUTES[0] + 100, ROUTES[2] + 100, ROUTES[2]]))
    of_the_second_alone = torch.cat([other, distant])[torch.tensor([11, 19])]
    assert torch.equal(of_the_second_alone.whole(), ROUTES[[1, 9]])


def test_routes_in_a_batch_arrive_as_a_tensor(distant):
    """The driver selects rows and sends them; who receives them has an ordinary tensor."""
    batch = tiny_batch(rows=1)
    batch = batch.with_tokens(routed_experts=distant[torch.arange(batch.num_tokens) % 10])
    minibatch = batch.take([0, 0])
    assert isinstance(minibatch["routed_experts"], Distant) and version_of(minibatch["routed_experts"]) == 0
    there = opened(ray.get(ray.put(packed(minibatch))), shared=True)["routed_experts"]
    assert type(there) is torch.Tensor
    assert torch.equal(there, ROUTES[torch.arange(batch.num_tokens) % 10].repeat(2, 1, 1))


def test_small_tensors_leave_the_gpu_too(monkeypatch):
    """A driver on a node without GPUs could not unpack them."""
    monkeypatch.setattr(serialization, "SMALL_BYTES", 60)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: torch.full(t.shape, 7.0))
    sent = packed([torch.zeros(2), torch.zeros(1000)])
    assert sent[0].tolist() == [7.0, 7.0] and sent[1].tensor().unique().tolist() == [7.0]
