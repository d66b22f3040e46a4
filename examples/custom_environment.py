"""An environment, a reward and an algorithm of your own, in one file.

A random model learns to write as many letters as its prompt asks for, in two replies: after the first one, the
environment says how many are missing.

    verl-fn train recipes/letters.toml
"""

from typing import Any

import attrs

from verl_fn.config import opt
from verl_fn.environments import Done


class Letters:
    """Counts the letters ``a`` of two replies."""

    def reset(self, problem):
        self.missing = self.wanted = len(problem.answer)
        self.asked_again = False
        return [{"role": "user", "content": problem.prompt}]

    def step(self, reply):
        self.missing -= reply.count("a") if set(reply) <= {"a"} else 0
        if self.missing > 0 and not self.asked_again:
            self.asked_again = True
            return [{"role": "user", "content": f"{self.missing}>"}]
        return Done(max(0.0, 1.0 - abs(self.missing) / self.wanted))


def brevity(data_source, solution_str, ground_truth, extra_info=None):
    """A reward beside the environment's: a hundredth less for every character of the replies."""
    return -0.01 * len(solution_str)


@attrs.frozen(kw_only=True)
class Reinforce:
    """Options of the algorithm: the keys of the [algorithm] table."""

    baseline: bool = opt(True, "subtract the mean reward of the conversations about the same problem")


def group_baseline(batch, baseline=True):
    """The estimator: the reward of a conversation, minus the mean of its group."""
    from verl_fn.steps import dr_grpo

    if baseline:
        return dr_grpo(batch)
    return batch.with_tokens(advantages=batch.spread(batch["score"]) * batch["response_mask"])


def reinforce(options: Reinforce) -> Any:
    """Makes the algorithm from its options: one update a step."""
    # Imported here, since the processes of environment and reward import this file too, and need no torch.
    from verl_fn import steps
    from verl_fn.algorithms import Algorithm
    from verl_fn.config import Outline

    @steps.loss(needs=["logprobs"])
    def policy_gradient(outputs, batch):
        return -batch["advantages"] * outputs.logprobs, {}

    def learn(state, experience, w):
        batch = steps.aggregate(group_baseline(experience.batch, options.baseline), "token-mean")
        grads, metrics = w.trainers["actor"].forward_backward(state.actor, batch, policy_gradient)
        actor, more = w.trainers["actor"].apply_update(state.actor, grads)
        report = w.get(metrics) | w.get(more) | {"critic/score/mean": batch["score"].mean()}
        return attrs.evolve(state, actor=actor, step=state.step + 1), report

    return Algorithm(learn=learn, outline=Outline(min_n=2))
