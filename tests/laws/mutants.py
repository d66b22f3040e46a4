"""Broken backends, losses, estimators and rollout engines: each check must catch every one of its kind.

Every list pairs a mutant with the law that it breaks, so that a check which fails for the wrong reason is found
out too.
"""

import weakref
from functools import partial

import attrs
import torch

from verl_fn.backends.local import Local
from verl_fn.backends.mock import Mock
from verl_fn.backends.mock_rollout import MockRollout, Response, sample_table
from verl_fn.state import (
    Grads,
    Key,
    Moments,
    Sum,
    Weighted,
    concatenate,
    donate,
    snapshot,
    split_by_tokens,
    tree,
)
from verl_fn.steps import (
    adamw,
    constant,
    gae,
    grpo,
    loss,
    ppo_clip,
    reinforce_plus_plus,
    rloo,
    token_mean,
    whiten_masked,
)

VOCAB = 8


def optimizer(weight_decay=0.0):
    return adamw(constant(0.01), weight_decay=weight_decay)


def mock(cls=Mock, *, max_tokens=24, weight_decay=0.0):
    return cls(VOCAB, optimizer(weight_decay), max_tokens=max_tokens)


# Backends


class IgnoresParameters(Mock):
    """Computes with the first parameters it ever saw."""

    seen = None

    def _first(self, params):
        self.seen = self.seen or snapshot(params)
        return self.seen

    def forward(self, params, batch, needs=("logprobs",)):
        return super().forward(self._first(params), batch, needs)

    def forward_backward(self, state, batch, loss):
        return super().forward_backward(attrs.evolve(state, params=self._first(state.params)), batch, loss)


class CachesByTensor(Mock):
    """Keeps a compute copy, and makes it anew only for other tensor objects: blind to updates in place."""

    of = None

    def _copy(self, params):
        if self.of is None or self.of() is not params["logits"]:
            self.of, self.copy = weakref.ref(params["logits"]), snapshot(params)
        return self.copy

    def forward(self, params, batch, needs=("logprobs",)):
        return super().forward(self._copy(params), batch, needs)

    def forward_backward(self, state, batch, loss):
        return super().forward_backward(attrs.evolve(state, params=self._copy(state.params)), batch, loss)


class CachesByStep(Mock):
    """Keeps a compute copy for as long as the step is the same."""

    of = None

    def forward_backward(self, state, batch, loss):
        if self.of != state.step:
            self.of, self.copy = state.step, snapshot(state.params)
        return super().forward_backward(attrs.evolve(state, params=self.copy), batch, loss)


class StaleLocal(Local):
    """Never refreshes its bf16 copy."""

    def _compute_tensors(self, params):
        return dict(self._cast) if self._cast else super()._compute_tensors(params)


class WritesToBatch(Mock):
    """Changes a field in place, and after the first time there is nothing left to change."""

    def forward_backward(self, state, batch, loss):
        batch["advantages"].clamp_(-0.5, 0.5)
        return super().forward_backward(state, batch, loss)


class WritesToParameters(Mock):
    def forward(self, params, batch, needs=("logprobs",)):
        params["logits"].clamp_(-1.0, 1.0)
        return super().forward(params, batch, needs)


class DrawsFromGlobalGenerator(Mock):
    """Dropout."""

    def forward_backward(self, state, batch, loss):
        grads, found = super().forward_backward(state, batch, loss)
        return tree.map_tensors(lambda g: g * (torch.rand(g.shape) > 0.1), grads), found


class InitFromGlobalGenerator(Mock):
    def init(self, key):
        state = super().init(key)
        return attrs.evolve(state, params=tree.map_tensors(torch.randn_like, state.params))


class MeanPerMicroBatch(Mock):
    """Divides by the weights of each micro-batch and then by the number of micro-batches."""

    def forward_backward(self, state, batch, loss):
        parts = list(split_by_tokens(batch, self.max_tokens))
        told = []
        for part in parts:
            weight = part["loss_weight"]
            mean = part.with_tokens(loss_weight=weight / weight.sum().clamp(min=1e-6))
            told.append(super().forward_backward(state, mean, loss))
        grads = sum((g for g, _ in told[1:]), told[0][0]).scale(1.0 / len(parts))
        return grads, super().forward_backward(state, batch, loss)[1]


class MeanOfMetrics(Mock):
    """Reports the mean over micro-batches of each one's metric."""

    def forward_backward(self, state, batch, loss):
        grads, found = super().forward_backward(state, batch, loss)
        parts = [
            super(MeanOfMetrics, self).forward_backward(state, part, loss)[1]
            for part in split_by_tokens(batch, self.max_tokens)
        ]
        means = [part["actor/ppo_kl"].value for part in parts]
        return grads, found | {"actor/ppo_kl": Weighted(sum(means) / len(means), 1.0)}


class DropsAMicroBatch(Mock):
    """The last micro-batch's gradient (or the last rank's) never arrives."""

    def forward_backward(self, state, batch, loss):
        parts = list(split_by_tokens(batch, self.max_tokens))
        found = super().forward_backward(state, batch, loss)[1]
        return super().forward_backward(state, concatenate(parts[:-1] or parts), loss)[0], found


class ForgetsTheOrder(Mock):
    """Gives the outputs in the order of its micro-batches."""

    def forward(self, params, batch, needs=("logprobs",)):
        rows = torch.cat(split_by_tokens(batch, self.max_tokens).rows)
        return super().forward(params, batch.take(rows), needs)


class ReusesGradients(Mock):
    """Returns the same buffers at every call."""

    kept = None

    def forward_backward(self, state, batch, loss):
        grads, found = super().forward_backward(state, batch, loss)
        self.kept = self.kept or dict(snapshot(grads))
        for name, g in grads.items():
            self.kept[name].copy_(g)
        return Grads(dict(self.kept)), found


class ReusesOutputs(Mock):
    kept = None

    def forward(self, params, batch, needs=("logprobs",)):
        outputs = super().forward(params, batch, needs)
        if self.kept is None or len(self.kept.logprobs) != len(outputs.logprobs):
            self.kept = outputs
        self.kept.logprobs.copy_(outputs.logprobs)
        return self.kept


class KeepsAReference(Mock):
    """Holds on to the parameters of its last call, so that no donation finds them alone."""

    def forward_backward(self, state, batch, loss):
        self.last = state.params
        return super().forward_backward(state, batch, loss)


class NeverDonates(Mock):
    """Correct, but the old value stays usable, and twice the memory is used."""

    def apply_update(self, state, grads, *, donate=True):
        return super().apply_update(state, grads, donate=False)


class AlwaysDonates(Mock):
    def apply_update(self, state, grads, *, donate=True):
        return super().apply_update(state, grads)


class WritesThroughReferences(Mock):
    """Spends the old value, but updates its buffers without asking who else holds them."""

    def apply_update(self, state, grads, *, donate=True):
        if not donate:
            return super().apply_update(state, grads, donate=False)
        new, found = super().apply_update(state, grads, donate=False)
        kept = attrs.evolve(state)
        _spend(state, grads)
        params, slots = tree.map(_overwritten, (kept.params, kept.optimizer), (new.params, new.optimizer))
        return attrs.evolve(new, params=params, optimizer=slots), found


def _spend(*values):
    for value in values:
        donate(value, "apply_update")


def _overwritten(old, new):
    return old.copy_(new) if isinstance(old, torch.Tensor) else new


class AdvancesScheduleOnSkip(Mock):
    def apply_update(self, state, grads, *, donate=True):
        new, found = super().apply_update(state, grads, donate=donate)
        if found["update_skipped"].value:
            new = attrs.evolve(new, scheduler=new.scheduler + 1)
        return new, found


class NeverSkips(Mock):
    """Takes what is not finite for zero."""

    def apply_update(self, state, grads, *, donate=True):
        if not donate:
            grads = tree.map_tensors(torch.nan_to_num, grads)
        return super().apply_update(state, grads, donate=donate)


class KeepsQuietAboutSkips(Mock):
    def apply_update(self, state, grads, *, donate=True):
        new, found = super().apply_update(state, grads, donate=donate)
        return new, found | {"update_skipped": Sum(0)}


class DecaysInTheGradient(Mock):
    """Adds a pull to zero that no loss asked for."""

    def forward_backward(self, state, batch, loss):
        grads, found = super().forward_backward(state, batch, loss)
        pull = float(batch["loss_weight"].sum())
        return grads + Grads({name: 0.1 * pull * t for name, t in state.params.items()}), found


class ForgetsMoments(Mock):
    def restore(self, folder):
        state = super().restore(folder)
        return attrs.evolve(state, optimizer=self.optimizer.init(state.params))


class ForgetsSchedule(Mock):
    def restore(self, folder):
        return attrs.evolve(super().restore(folder), scheduler=0)


class ForgetsKey(Mock):
    def restore(self, folder):
        return attrs.evolve(super().restore(folder), rng=Key.from_seed(0))


class SpoilsWhatItSaves(Mock):
    def save(self, state, folder):
        super().save(state, folder)
        state.params["logits"].mul_(0.5)


class DropsMomentsOnPlace(Mock):
    def place(self, state, *, params=None, optimizer=None):
        return attrs.evolve(state, optimizer=self.optimizer.init(state.params))


class SpeaksOfPrompts(Mock):
    def forward(self, params, batch, needs=("logprobs",)):
        outputs = super().forward(params, batch, needs)
        return tree.map_tensors(lambda t: torch.where(batch["response_mask"] == 0, -1.0, t), outputs)


class RenamesGradients(Mock):
    """Names as a wrapped module has them."""

    def forward_backward(self, state, batch, loss):
        grads, found = super().forward_backward(state, batch, loss)
        return Grads({f"module.{name}": g for name, g in grads.items()}), found

    def apply_update(self, state, grads, *, donate=True):
        own = Grads({name.removeprefix("module."): g for name, g in grads.items()})
        return super().apply_update(state, own, donate=donate)


BACKENDS = [
    (partial(mock, IgnoresParameters), "Persistence"),
    (partial(mock, CachesByTensor), "Donation"),
    (partial(mock, CachesByStep), "Persistence"),
    (partial(mock, WritesToBatch), "Purity"),
    (partial(mock, WritesToParameters), "Purity"),
    (partial(mock, DrawsFromGlobalGenerator), "Purity"),
    (partial(mock, InitFromGlobalGenerator), "Purity"),
    (partial(mock, MeanPerMicroBatch), "Split invariance"),
    (partial(mock, MeanOfMetrics), "Split invariance"),
    (partial(mock, DropsAMicroBatch), "Split invariance"),
    (partial(mock, ForgetsTheOrder), "Purity"),
    (partial(mock, ReusesGradients), "Persistence"),
    (partial(mock, ReusesOutputs), "Persistence"),
    (partial(mock, KeepsAReference), "Donation"),
    (partial(mock, NeverDonates), "Donation"),
    (partial(mock, AlwaysDonates), "Donation"),
    (partial(mock, WritesThroughReferences), "Donation"),
    (partial(mock, AdvancesScheduleOnSkip), "Zero"),
    (partial(mock, NeverSkips), "Zero"),
    (partial(mock, KeepsQuietAboutSkips), "Zero"),
    (partial(mock, DecaysInTheGradient), "Zero"),
    (partial(mock, weight_decay=0.1), "Zero"),
    (partial(mock, ForgetsMoments), "Restore"),
    (partial(mock, ForgetsSchedule), "Restore"),
    (partial(mock, ForgetsKey), "Restore"),
    (partial(mock, SpoilsWhatItSaves), "Restore"),
    (partial(mock, DropsMomentsOnPlace), "Signature"),
    (partial(mock, SpeaksOfPrompts), "Signature"),
    (partial(mock, RenamesGradients), "Signature"),
]


# The other backend, for Layout


class TransposesTheTable(Mock):
    """Keeps its table the other way round, and maps it only when it saves: a round trip does not show it."""

    def save(self, state, folder):
        super().save(_transposed(state), folder)

    def restore(self, folder):
        return _transposed(super().restore(folder))


def _transposed(state):
    return tree.map_tensors(lambda t: t.t().contiguous(), state)


class IgnoresTemperature(Mock):
    def forward(self, params, batch, needs=("logprobs",)):
        return super().forward(params, batch.without("temperature"), needs)

    def forward_backward(self, state, batch, loss):
        return super().forward_backward(state, batch.without("temperature"), loss)


LAYOUTS = [
    partial(mock, TransposesTheTable),
    partial(mock, IgnoresTemperature),
    partial(mock, DropsAMicroBatch),
    partial(mock, MeanPerMicroBatch),
    partial(mock, ForgetsMoments),
    partial(mock, ForgetsSchedule),
]


# Losses


@loss(needs=["logprobs"])
def divides_by_tokens(outputs, batch):
    return -batch["advantages"] * outputs.logprobs / batch["response_mask"].sum(), {}


@loss(needs=["logprobs"])
def whitens_inside(outputs, batch):
    return -whiten_masked(batch["advantages"], batch["response_mask"]) * outputs.logprobs, {}


@loss(needs=["logprobs"])
def sums_across_rows(outputs, batch):
    """A running ratio that does not start anew with each row."""
    ratio = (outputs.logprobs - batch["old_log_probs"]).cumsum(0).clamp(-20.0, 20.0).exp()
    return -batch["advantages"] * ratio, {}


@loss(needs=["logprobs"])
def mean_as_metric(outputs, batch):
    per_token, found = ppo_clip()(outputs, batch)
    return per_token, found | {"actor/mean": Weighted(per_token.detach().mean(), 1.0)}


@loss(needs=["logprobs"])
def number_as_metric(outputs, batch):
    per_token, found = ppo_clip()(outputs, batch)
    return per_token, found | {"actor/mean": per_token.mean().item()}


@loss(needs=["logprobs"])
def keeps_the_graph(outputs, batch):
    per_token, found = ppo_clip()(outputs, batch)
    return per_token, found | {"actor/sum": Sum(per_token.sum())}


@loss(needs=["logprobs"])
def counts_prompts(outputs, batch):
    per_token, found = ppo_clip()(outputs, batch)
    ratio = outputs.logprobs - batch["old_log_probs"]
    return per_token, found | {"actor/std": Moments.of(ratio, torch.ones_like(ratio), stat="std")}


@loss(needs=["logprobs"])
def counts_calls(outputs, batch):
    per_token, found = ppo_clip()(outputs, batch)
    return per_token, found | {"actor/parts": Sum(1)}


@loss(needs=["logprobs"])
def one_a_row(outputs, batch):
    return -batch.sum_rows(batch["advantages"] * outputs.logprobs), {}


@loss(needs=["logprobs"])
def reads_undeclared(outputs, batch):
    return ppo_clip()(outputs, batch)[0] - 0.01 * outputs.entropy, {}


@loss(needs=["logprobs"])
def reads_if_there(outputs, batch):
    """Changes with what another term of a sum happens to need."""
    bonus = getattr(outputs, "entropy", 0.0)
    return ppo_clip()(outputs, batch)[0] - 0.01 * bonus, {}


@loss(needs=["logprobs"])
def clamps_in_place(outputs, batch):
    batch["advantages"].clamp_(-0.5, 0.5)
    return ppo_clip()(outputs, batch)


@loss(needs=["logprobs"])
def writes_to_outputs(outputs, batch):
    outputs.logprobs.detach().clamp_(min=-0.5)
    return ppo_clip()(outputs, batch)


@loss(needs=["logprobs"])
def drops_out(outputs, batch):
    per_token, found = ppo_clip()(outputs, batch)
    return per_token * (torch.rand(len(per_token)) > 0.1), found


def keeps_a_baseline():
    seen = []

    @loss(needs=["logprobs"])
    def with_baseline(outputs, batch):
        seen.append(float(batch["advantages"].mean()))
        baseline = sum(seen) / len(seen) + len(seen)
        return -(batch["advantages"] - baseline) * outputs.logprobs, {"mean": token_mean(batch, outputs.logprobs)}

    return with_baseline


@loss(needs=["logprobs"])
def does_not_clamp(outputs, batch):
    return -batch["advantages"] * (outputs.logprobs - batch["old_log_probs"]).exp(), {}


@loss(needs=["logprobs"])
def pulls_without_advantage(outputs, batch):
    return -(batch["advantages"] + 0.01) * outputs.logprobs, {}


@loss(needs=["logprobs"])
def not_finite_without_response(outputs, batch):
    """Divides by the length of a response, which may be 0."""
    length = batch.spread(batch.sum_rows(batch["response_mask"]))
    return -batch["advantages"] * outputs.logprobs / length, {}


@loss(needs=["logprobs"])
def detaches(outputs, batch):
    return -batch["advantages"] * outputs.logprobs.detach(), {}


LOSSES = [
    (divides_by_tokens, "Split invariance"),
    (whitens_inside, "Split invariance"),
    (sums_across_rows, "Split invariance"),
    (mean_as_metric, "Split invariance"),
    (counts_calls, "Split invariance"),
    (number_as_metric, "Signature"),
    (keeps_the_graph, "Signature"),
    (one_a_row, "Signature"),
    (detaches, "Signature"),
    (counts_prompts, "Zero"),
    (pulls_without_advantage, "Zero"),
    (reads_undeclared, "Purity"),
    (reads_if_there, "Purity"),
    (clamps_in_place, "Purity"),
    (writes_to_outputs, "Purity"),
    (drops_out, "Purity"),
    (keeps_a_baseline(), "Purity"),
    (does_not_clamp, "Finite"),
    (not_finite_without_response, "Finite"),
]


# Estimators


def writes_to_rewards(batch):
    batch["token_level_rewards"].clamp_(-0.5, 0.5)
    return grpo(batch)


def explores(batch):
    new = grpo(batch)
    return new.with_tokens(
        advantages=new["advantages"] + 0.1 * torch.randn(batch.num_tokens) * batch["response_mask"]
    )


def running_baseline():
    seen = []

    def estimator(batch):
        seen.append(float(batch["token_level_rewards"].mean()) + len(seen))
        new = rloo(batch)
        return new.with_tokens(advantages=(new["advantages"] - sum(seen) / len(seen)) * batch["response_mask"])

    return estimator


def neighbours_as_groups(batch):
    """Takes every two rows for a group."""
    pairs = torch.arange(len(batch)) // 2
    return grpo(batch.with_rows(group=pairs), norm_adv_by_std=False).with_rows(group=batch["group"])


def ids_as_numbers(batch):
    new = grpo(batch)
    return new.with_tokens(advantages=new["advantages"] * batch.spread(batch["group"] / 50))


def first_row_as_baseline(batch):
    new = rloo(batch)
    baseline = batch.rows("token_level_rewards")[0].sum()
    return new.with_tokens(advantages=(new["advantages"] - baseline) * batch["response_mask"])


def forgets_the_mask(batch):
    new = reinforce_plus_plus(batch)
    everywhere = batch.spread(batch.sum_rows(batch["token_level_rewards"]))
    return new.with_tokens(advantages=everywhere)


def sums_over_holes(batch):
    """Counts rewards where a tool spoke."""
    score = batch.spread(batch.sum_rows(batch["token_level_rewards"])) * batch["response_mask"]
    return batch.with_tokens(advantages=score, returns=score)


def whitens_over_prompts(batch):
    new = gae(batch, whiten=False)
    a = new["advantages"]
    return new.with_tokens(advantages=(a - batch["values"].mean()) * batch["response_mask"])


def one_advantage_a_row(batch):
    return rloo(batch).without("advantages").with_rows(advantages=batch.sum_rows(batch["token_level_rewards"]))


def in_double(batch):
    new = gae(batch)
    return new.with_tokens(advantages=new["advantages"].double())


def forgets_returns(batch):
    return rloo(batch).without("returns")


def overwrites_rewards(batch):
    return rloo(batch).with_tokens(token_level_rewards=2 * batch["token_level_rewards"])


def adds_a_bonus(batch):
    new = rloo(batch)
    return new.with_tokens(advantages=new["advantages"] + 0.1 * batch["response_mask"])


def divides_by_spread(batch):
    """Not finite for a group of one."""
    score = batch.sum_rows(batch["token_level_rewards"] * batch["response_mask"])
    std = torch.stack([score[batch["group"] == g].std() for g in batch["group"]])
    spread = torch.where(batch["response_mask"].bool(), batch.spread(score / std), 0.0)
    return batch.with_tokens(advantages=spread, returns=spread)


ADVANTAGES = [
    (writes_to_rewards, "Purity"),
    (explores, "Purity"),
    (running_baseline(), "Purity"),
    (neighbours_as_groups, "Rows"),
    (ids_as_numbers, "Rows"),
    (first_row_as_baseline, "Rows"),
    (forgets_the_mask, "Zero"),
    (sums_over_holes, "Zero"),
    (whitens_over_prompts, "Zero"),
    (adds_a_bonus, "Zero"),
    (one_advantage_a_row, "Signature"),
    (in_double, "Signature"),
    (forgets_returns, "Signature"),
    (overwrites_rewards, "Signature"),
    (divides_by_spread, "Signature"),
]


# Rollout engines


def rollout(cls=MockRollout, script=sample_table):
    return cls(script)


class SeedsFromPosition(MockRollout):
    """Row i of a batch draws the numbers of row i, whichever prompt it holds."""

    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        batch = super().generate(prompts, sampling, key, version=version)
        names = torch.tensor(range(len(prompts)) if ids is None else ids)
        return batch.with_rows(group=names.repeat_interleave(sampling.n))


class SeedsFromCount(MockRollout):
    """Other draws where more samples are asked for."""

    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        return super().generate(prompts, sampling, key.fold_in(sampling.n), ids=ids, version=version)


class SeedsFromGlobalGenerator(MockRollout):
    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        key = Key.from_seed(int(torch.randint(2**31, ())))
        return super().generate(prompts, sampling, key, ids=ids, version=version)


class IgnoresKey(MockRollout):
    def _key(self, key, name, sample):
        return super()._key(Key.from_seed(0), name, sample)


class OneDrawAPrompt(MockRollout):
    def _key(self, key, name, sample):
        return super()._key(key, name, 0)


class ServesStaleWeights(MockRollout):
    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        return super().generate(prompts, sampling, key, ids=ids)


class SleepsLightly(MockRollout):
    """Goes on with the weights it had."""

    def sleep(self):
        pass


class KeepsFirstWeights(MockRollout):
    def publish(self, version, named_tensors):
        super().publish(version, self._weights.items() or named_tensors)


class KeepsReferences(MockRollout):
    def publish(self, version, named_tensors):
        super().publish(version, [])
        self._weights = dict(named_tensors)


class WritesToPublished(MockRollout):
    def publish(self, version, named_tensors):
        super().publish(version, [(name, t.div_(1.5)) for name, t in named_tensors])


class SaysAnotherVersion(MockRollout):
    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        batch = super().generate(prompts, sampling, key, ids=ids, version=version)
        return batch.with_rows(version=torch.full((len(batch),), 3))


class InterleavesSamples(MockRollout):
    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        batch = super().generate(prompts, sampling, key, ids=ids, version=version)
        return batch.take(torch.arange(len(batch)).view(-1, sampling.n).t().flatten())


class NumbersGroupsByPosition(MockRollout):
    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        batch = super().generate(prompts, sampling, key, ids=ids, version=version)
        return batch.with_rows(group=torch.arange(len(prompts)).repeat_interleave(sampling.n))


class NeverFinishes(MockRollout):
    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        batch = super().generate(prompts, sampling, key, ids=ids, version=version)
        return batch.with_rows(finished=torch.zeros(len(batch)))


class AlwaysFinishes(MockRollout):
    """Nobody would notice truncation."""

    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        batch = super().generate(prompts, sampling, key, ids=ids, version=version)
        return batch.with_rows(finished=torch.ones(len(batch)))


class RunsOn(MockRollout):
    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        longer = attrs.evolve(sampling, max_tokens=sampling.max_tokens + 1, stop_token_ids=())
        return super().generate(prompts, longer, key, ids=ids, version=version)


class RunsPastStops(MockRollout):
    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        on = attrs.evolve(sampling, stop_token_ids=())
        return super().generate(prompts, on, key, ids=ids, version=version)


class SpeaksOfPrompt(MockRollout):
    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        batch = super().generate(prompts, sampling, key, ids=ids, version=version)
        return batch.with_tokens(rollout_log_probs=batch["rollout_log_probs"] + batch["response_mask"] - 1.0)


class ForgetsTemperature(MockRollout):
    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        batch = super().generate(prompts, sampling, key, ids=ids, version=version)
        return batch.with_rows(temperature=torch.ones(len(batch)))


def _said(request, tokens, temperature, **cuts):
    """The log-probs of ``tokens`` at another temperature."""
    table = (request.weights["logits"].double() / temperature).log_softmax(-1)
    return table[[request.prompt[-1], *tokens[:-1]], list(tokens)].tolist()


def raw_log_probs(request):
    """Log-probs before the temperature."""
    answer = sample_table(request)
    raw = _said(request, answer.tokens, 1.0)
    return Response(answer.tokens, raw, raw, answer.finished)


def draws_colder(request):
    """The right log-probs of the wrong draws."""
    temperature = request.sampling.temperature
    answer = sample_table(
        attrs.evolve(request, sampling=attrs.evolve(request.sampling, temperature=0.5 * temperature))
    )
    if not temperature:
        return answer
    full = _said(request, answer.tokens, temperature)
    return Response(answer.tokens, full, full, answer.finished)


def does_not_renormalise(request):
    answer = sample_table(request)
    return Response(answer.tokens, answer.full_log_probs, answer.full_log_probs, answer.finished)


ROLLOUTS = [
    (partial(rollout, SeedsFromPosition), "Purity"),
    (partial(rollout, SeedsFromCount), "Purity"),
    (partial(rollout, SeedsFromGlobalGenerator), "Purity"),
    (partial(rollout, IgnoresKey), "Purity"),
    (partial(rollout, OneDrawAPrompt), "Purity"),
    (partial(rollout, ServesStaleWeights), "Version"),
    (partial(rollout, SleepsLightly), "Version"),
    (partial(rollout, KeepsFirstWeights), "Log-probs"),
    (partial(rollout, KeepsReferences), "Version"),
    (partial(rollout, WritesToPublished), "Version"),
    (partial(rollout, SaysAnotherVersion), "Version"),
    (partial(rollout, InterleavesSamples), "Signature"),
    (partial(rollout, NumbersGroupsByPosition), "Signature"),
    (partial(rollout, NeverFinishes), "Signature"),
    (partial(rollout, AlwaysFinishes), "Signature"),
    (partial(rollout, RunsOn), "Signature"),
    (partial(rollout, RunsPastStops), "Signature"),
    (partial(rollout, SpeaksOfPrompt), "Signature"),
    (partial(rollout, ForgetsTemperature), "Signature"),
    (partial(rollout, script=raw_log_probs), "Log-probs"),
    (partial(rollout, script=draws_colder), "Log-probs"),
    (partial(rollout, script=does_not_renormalise), "Log-probs"),
]
