"""Two ranks behind one handle: the laws, what is alive, and what calls that fail leave behind."""

import contextlib
import errno
import operator
from types import SimpleNamespace

import pytest
import ray
import remote_mutants
import torch
from ray_ranks import start_ranks

from verl_fn.backends.fsdp.sharding import whole_of
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.protocol import Freed, StaleWeightsError
from verl_fn.backends.sampler import Sampler
from verl_fn.backends.weight_sync import Weights
from verl_fn.driver.group import Group
from verl_fn.driver.remote import RemoteRollout, RemoteTrain
from verl_fn.runs.journal import state_digests
from verl_fn.state import DonatedError, Key, Sampling, requests_for, snapshot, tree
from verl_fn.steps import constant, entropy, ppo_clip, sgd
from verl_fn.testing import LawViolation, Mock, check_backend, check_rollout, tiny_batch

FP32 = 1e-5
LOSS = ppo_clip() - 0.01 * entropy()


@pytest.fixture(scope="module")
def fsdp(two, model):
    return two.backend("fsdp", remote_mutants.fsdp, model)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    """A model of one layer, for checks that run it a hundred times."""
    return new_model(tmp_path_factory.mktemp("model"), chars="abcd", hidden_size=16, num_hidden_layers=1)


def check(backend, two, other=None):
    check_backend(backend, other, loss=LOSS, tolerance=FP32, get=two.get, optimizer=remote_mutants.optimizer())


def test_laws_of_two_sharded_ranks(two, shallow):
    backend = two.backend("shallow", remote_mutants.fsdp, shallow)
    check(backend, two, Local(shallow, remote_mutants.optimizer(), max_tokens=24))


def test_publications_that_a_later_one_replaces_free_their_weights(two, fsdp, model):
    """Also if no update is donated, and though an engine that is restarted would need the last one."""
    two.cluster.build(("engines", "restarted", Sampler, str(model)))
    group = Group("engines", two.cluster.groups["engines"].members[:1])
    engine = RemoteRollout(two.cluster, group, "restarted", max_restarts=1)
    state, alive = fsdp.load_pretrained(model, Key.from_seed(0)), []
    for version in range(1, 4):
        grads, _ = fsdp.forward_backward(state, tiny_batch(), LOSS)
        state, _ = fsdp.apply_update(state, grads, donate=False)
        del grads
        two.get(engine.publish(version, fsdp.weights(state.params)))
        two.get(fsdp.map(len, ""))  # the ranks drop values with their next call
        alive.append([len(values) for values in held(two.group)])
    two.cluster.before_update.clear()
    assert alive[0] == alive[1] == alive[2], alive


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_laws_of_two_gpus(ray_cluster, model):
    one = Local(model, remote_mutants.optimizer(), max_tokens=24, device="cuda", deterministic=True)
    ranks = start_ranks(2, device="cuda")
    try:
        check_backend(
            ranks.backend("fsdp", remote_mutants.fsdp, model), one, loss=LOSS, tolerance=1e-4, get=ranks.get
        )
    finally:
        ranks.cluster.stop()


def test_a_function_on_the_ranks_gets_the_backend_of_its_process(two, fsdp, model):
    """Digests by canonical name are the same for shards behind handles as for whole tensors."""
    local = Local(model, remote_mutants.optimizer(), max_tokens=24)
    of_shards = two.get(fsdp.map(state_digests, fsdp, fsdp.init(Key.from_seed(3))))
    assert of_shards == state_digests(local, local.init(Key.from_seed(3)))
    assert any(path.startswith(".optimizer") and path.endswith("weight']") for path in of_shards)


def test_laws_of_a_mock_through_handles(two):
    check_backend(two.backend("mock", remote_mutants.mock), get=two.get)


@pytest.mark.parametrize(("cls", "laws"), remote_mutants.SPEAKERS, ids=lambda x: getattr(x, "__name__", ""))
def test_broken_handles_are_caught(two, cls, laws):
    backend = two.backend("mock", remote_mutants.mock, cls=cls)
    with pytest.raises(LawViolation) as caught:
        check_backend(backend, get=two.get)
    assert caught.value.law in laws, caught.value
    with contextlib.suppress(DonatedError, Freed):
        two.cluster.finish(two.group)  # what a broken handle still asked for is no error of the next test


def test_a_rank_whose_gradient_is_dropped_is_caught(two, shallow):
    backend = two.backend("broken", remote_mutants.fsdp, shallow, remote_mutants.DropsARank)
    with pytest.raises(LawViolation) as caught:
        check(backend, two)
    assert caught.value.law in ("Purity", "Split invariance"), caught.value


def read(two, backend, value):
    return two.get(backend.map(whole_of, value))


def test_a_rank_reads_its_rows_from_shared_memory(two, fsdp):
    """A function that could write to it gets a copy; a batch that the driver wrote to is stored again."""
    batch, state = tiny_batch(rows=64), fsdp.init(Key.from_seed(0))
    before = two.get(fsdp.forward(state.params, batch))

    def overwrite(batch):
        batch.tokens.zero_()

    two.get(fsdp.map(overwrite, batch))
    assert two.cluster.stored(batch) == two.cluster.stored(batch)
    assert tree.equal(two.get(fsdp.forward(state.params, batch)), before)
    expected = fsdp.forward(state.params, tree.map_tensors(torch.clone, batch).take(range(63, -1, -1)))
    reference = two.cluster.stored(batch)
    for t in tree.leaves(batch):
        t.copy_(t.clone())
    assert two.cluster.stored(batch) != reference
    assert not tree.equal(two.get(expected), before)


def test_values_keep_their_meaning(two, fsdp):
    """Two live states in turn, and gradients held across later calls."""
    batch = tiny_batch()
    first, second = fsdp.init(Key.from_seed(0)), fsdp.init(Key.from_seed(1))
    grads, _ = fsdp.forward_backward(first, batch, LOSS)
    meant = read(two, fsdp, grads)
    other, _ = fsdp.forward_backward(second, batch, LOSS)
    again, _ = fsdp.forward_backward(first, batch, LOSS)
    assert tree.equal(read(two, fsdp, grads), meant)
    assert tree.equal(read(two, fsdp, again), meant)
    assert not tree.equal(read(two, fsdp, other), meant)
    doubled = fsdp.map(operator.add, grads, again, keep=True)
    assert tree.equal(read(two, fsdp, doubled), meant.scale(2.0))


def test_a_reference_keeps_its_meaning_when_the_actor_is_donated(two, fsdp):
    batch = tiny_batch()
    actor = fsdp.init(Key.from_seed(0))
    reference = fsdp.map(operator.attrgetter("params"), actor, keep=True)
    meant = read(two, fsdp, reference)
    told = two.get(fsdp.forward(reference, batch))
    grads, _ = fsdp.forward_backward(actor, batch, LOSS)
    new, found = fsdp.apply_update(actor, grads)
    assert two.get(found)["perf/residency_copies"].value == len(meant)
    assert tree.equal(read(two, fsdp, reference), meant)
    assert tree.equal(two.get(fsdp.forward(reference, batch)), told)
    assert not tree.equal(read(two, fsdp, fsdp.map(operator.attrgetter("params"), new, keep=True)), meant)
    for use in (
        lambda: actor.params,
        lambda: fsdp.forward_backward(actor, batch, LOSS),
        lambda: fsdp.save(actor, ""),
    ):
        with pytest.raises(DonatedError, match="remote TrainState was donated to apply_update"):
            use()
    with pytest.raises(DonatedError, match="remote Grads"):
        fsdp.map(snapshot, grads)


def test_parameters_in_hand_outlive_the_donation(two, fsdp):
    """As a local value's do: copied first, also the second time; in nobody's hand nothing is copied."""
    batch, copies = tiny_batch(), []
    state = fsdp.init(Key.from_seed(0))
    params = state.params
    same, told = state.params, two.get(fsdp.forward(params, batch))
    for _ in range(2):
        grads, _ = fsdp.forward_backward(state, batch, LOSS)
        state, found = fsdp.apply_update(state, grads)
        copies.append(two.get(found)["perf/residency_copies"].value)
    assert copies == [len(read(two, fsdp, params)), 0]
    assert tree.equal(two.get(fsdp.forward(params, batch)), told)
    gone = {params.id, same.id}
    del params, same
    two.get(fsdp.forward(state.params, batch))
    assert not any(gone & numbers for numbers in held(two.group))


def test_a_handle_of_other_ranks_is_told(two, fsdp):
    elsewhere = RemoteTrain(two.cluster, Group("reference", two.group.members), "reference")
    state = fsdp.init(Key.from_seed(0))
    for use in (
        lambda: elsewhere.forward(state.params, tiny_batch()),
        lambda: elsewhere.weights(state.params),
        lambda: elsewhere.map(snapshot, state),
    ):
        with pytest.raises(Freed, match="lies on the ranks of trainer, and reference is on those of reference: save"):
            use()


def test_what_a_handle_cannot_do_says_what_can(two, fsdp):
    state = fsdp.init(Key.from_seed(0))
    for value in (state, state.params, {"actor": state}):
        with pytest.raises(TypeError, match=r"backend\.map\(snapshot, value, keep=True\)"):
            snapshot(value)
    with pytest.raises(TypeError, match="not those inside lists"):
        fsdp.map(len, [state])
    kept = fsdp.map(snapshot, state, keep=True)
    meant = read(two, fsdp, kept)
    grads, _ = fsdp.forward_backward(state, tiny_batch(), LOSS)
    two.get(fsdp.apply_update(state, grads)[1])
    assert tree.equal(read(two, fsdp, kept), meant)


def test_a_refused_update_says_that_its_inputs_went_with_it(two, fsdp):
    state, batch = fsdp.init(Key.from_seed(0)), tiny_batch()
    grads, _ = fsdp.forward_backward(state, batch, LOSS)
    short = fsdp.map(remote_mutants.without_first, grads, keep=True)
    _, found = fsdp.apply_update(state, short)
    with pytest.raises(ValueError, match="gradients"):
        two.get(found)
    with pytest.raises(DonatedError, match=r"also if that has failed.*restore a checkpoint if it failed"):
        fsdp.forward(state.params, batch)


def held(group):
    return [set(ray.get(m.host.__ray_call__.remote(lambda actor: list(actor.values)))) for m in group.members]


def test_what_nobody_holds_goes_from_every_rank(two, fsdp):
    """Also where the next call never reaches the ranks, since its arguments failed."""
    states = [fsdp.init(Key.from_seed(i)) for i in range(3)]
    kept, gone = states.pop(), {state.id for state in states}
    del states

    @ray.remote(num_cpus=0)
    def failing():
        raise ValueError("no batch today")

    with pytest.raises(ValueError, match="no batch today"):
        two.get(fsdp.forward(kept.params, failing.remote(), ["logprobs"]))
    for numbers in held(two.group):
        assert kept.id in numbers
        assert not numbers & gone


def test_an_error_on_every_rank_leaves_them_working(two, fsdp):
    state, batch = fsdp.init(Key.from_seed(0)), tiny_batch()
    grads, found = fsdp.forward_backward(state, batch.without("loss_weight"), LOSS)
    with pytest.raises(ValueError, match="no loss_weight"):
        two.get(found)
    with pytest.raises(Freed, match="the call that should have made it failed"):
        read(two, fsdp, grads)
    assert two.get(fsdp.forward_backward(state, batch, LOSS)[1])["loss"].value


def test_an_error_of_the_disk_keeps_its_number(two, fsdp, model, tmp_path):
    """A run's message names the reason of the system, and not Ray's traceback."""
    (tmp_path / "file").touch()
    state = fsdp.load_pretrained(model, Key.from_seed(0))
    with pytest.raises(NotADirectoryError) as failed:
        fsdp.save(state, tmp_path / "file" / "step_1")
    assert failed.value.errno == errno.ENOTDIR and failed.value.strerror == "Not a directory"


def test_weights_go_to_an_engine_and_its_version_is_known_afterwards(two, fsdp, model):
    """Whole tensors from all ranks, by reference; a publishing that fails leaves no version."""
    engine = two.engines("alone", Sampler, str(model), count=1)
    state = fsdp.load_pretrained(model, Key.from_seed(0))
    for version in (2, 3):
        two.get(engine.publish(version, fsdp.weights(state.params)))
        assert version == 2 or engine.version == 3
        # An engine that is not restarted needs no weights again, so an update has nothing to copy.
        grads, _ = fsdp.forward_backward(state, tiny_batch(), LOSS)
        state, found = fsdp.apply_update(state, grads)
        assert two.get(found)["perf/residency_copies"].value == 0
    local = Local(model, remote_mutants.optimizer()).load_pretrained()
    failing = engine.publish(4, Weights.of(dict(list(local.params.items())[1:])))
    with pytest.raises(ValueError, match="were not published"):
        two.get(failing)
    assert engine.version is None
    two.get(engine.publish(5, Weights.of(local.params)))
    assert engine.version == 5


def test_several_engines_draw_what_one_draws(two, fsdp, model):
    """Each rank sends what it holds to all engines; requests are dealt, and samples come in order."""
    engines = two.engines("sampler", Sampler, str(model))
    state = fsdp.load_pretrained(model, Key.from_seed(0))
    requests = requests_for([[1, 4], [1, 5, 6], [1, 7]], Sampling(8, n=2), Key.from_seed(1), [5, 3, 8])
    one = Sampler(model)
    local = Local(model, remote_mutants.optimizer())
    for version, params in ((1, state.params), (2, fsdp.init(Key.from_seed(2)).params)):
        two.get(fsdp.map(remote_mutants.forbid_gathering, True))
        two.get(engines.publish(version, fsdp.weights(params)))
        two.get(fsdp.map(remote_mutants.forbid_gathering, False))
        assert engines.version == version
        whole = local.load_pretrained() if version == 1 else local.init(Key.from_seed(2))
        one.publish(version, local.weights(whole.params))
        theirs = two.get(engines.generate(requests, version=version))
        for mine, other in zip(one.generate(requests, version=version), theirs, strict=True):
            assert (mine.request, mine.number) == (other.request, other.number)
            assert mine.tokens.tolist() == other.tokens.tolist()
    assert sorted(len(share) for share in engines._shares(requests)) == [1, 2]
    assert [len(share) for share in engines._shares([])] == [0]
    two.get(engines.sleep())
    with pytest.raises(StaleWeightsError):
        two.get(engines.generate(requests, version=2))


@pytest.mark.parametrize("in_flight", [False, True])
def test_laws_of_several_engines(two, in_flight):
    """Those of one engine: no draw depends on the other requests, nor so on the engine that makes it."""
    engines = two.engines("mock", remote_mutants.table_engine, in_flight)
    check_rollout(engines, Mock(8, sgd(constant(0.1))), get=two.get)


def test_a_stream_may_end_before_ray_reports_it(two, monkeypatch):
    samples = [SimpleNamespace(request=1, number=number) for number in range(2)]

    class Stream:
        items, ended = [ray.put(sample) for sample in samples], False

        def next_ready(self):
            return True

        def __next__(self):
            if self.items:
                return self.items.pop(0)
            self.ended = True
            raise StopIteration

        def is_finished(self):
            return self.ended

    monkeypatch.setattr(two.cluster, "wait_for", lambda *args, **options: None)
    call = SimpleNamespace(results={0: Stream()}, done=lambda: True)
    assert list(two.cluster.stream(call)) == samples


def test_parts_are_built_side_by_side(two, tmp_path):
    """Each waits for the other to begin."""
    names = [(tmp_path / "a", tmp_path / "b"), (tmp_path / "b", tmp_path / "a")]
    groups = ("trainer", "engines")
    made = [(group, "met", remote_mutants.meet, *name) for group, name in zip(groups, names, strict=True)]
    two.cluster.build(*made)


def test_an_error_that_comes_late_is_raised_once(two, fsdp, tmp_path):
    """Where the second rank fails long after the first, its error is not that of the next call."""
    ref = fsdp.map(remote_mutants.fail_in_turn, tmp_path / "allowed")
    for _ in range(2):
        with pytest.raises(ValueError, match="on rank 0"):
            two.get(ref)
    (tmp_path / "allowed").touch()
    assert two.get(fsdp.map(remote_mutants.rank_after_failures)) == 0


def test_offloaded_states_train_the_same(two, fsdp):
    batch = tiny_batch()
    told = []
    for device in (None, "cpu"):
        state = fsdp.place(fsdp.init(Key.from_seed(0)), params=device, optimizer=device)
        grads, _ = fsdp.forward_backward(state, batch, LOSS)
        told.append(read(two, fsdp, fsdp.apply_update(state, grads)[0]))
    assert tree.equal(*told)
