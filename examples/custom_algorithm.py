"""A reinforcement learning algorithm of your own: options, a loss, an estimator, and how a step learns.

RAFT (Dong et al. 2023, arXiv 2304.06767) samples several answers to each prompt and imitates the best one. Here a
random model of 0.1 M parameters learns to write as many letters as its prompt asks for. As a plain Python program:

    .venv/bin/python examples/custom_algorithm.py

From the command line, as a run with checkpoints, resume, replay and a report; the numbers are the same:

    .venv/bin/verl-fn train recipes/raft_count.toml
"""

import tempfile

import attrs
import torch

from verl_fn.algorithms import Algorithm, Workers
from verl_fn.config import Outline, opt
from verl_fn.state import Key
from verl_fn.steps import aggregate, loss, token_mean


@attrs.frozen(kw_only=True)
class Raft:
    """Options of RAFT: the keys of the [algorithm] table."""

    only_best: bool = opt(True, "learn from the best answers alone; otherwise from all that beat the worst one")


@loss(needs=["logprobs"])
def imitate(outputs, batch):
    """The loss: makes tokens with an advantage more likely."""
    return -batch["advantages"] * outputs.logprobs, {"raft/share_learnt": token_mean(batch, batch["advantages"])}


def best_of_group(batch, only_best=True):
    """The estimator: 1 for the best answer to each prompt, 0 for all others, and 0 if all are equally good."""
    mask = batch["response_mask"].bool()
    score = batch.sum_rows(torch.where(mask, batch["token_level_rewards"], 0.0))
    same = batch["group"][:, None] == batch["group"]
    best = torch.where(same, score, -torch.inf).amax(1)
    worst = torch.where(same, score, torch.inf).amin(1)
    chosen = (score > worst) & ((score == best) | (not only_best))
    return batch.with_tokens(advantages=torch.where(mask, batch.spread(chosen.to(score.dtype)), 0.0))


def raft(options: Raft) -> Algorithm:
    """The algorithm: samples answers to each prompt, and learns from the best ones in one update."""

    def learn(state, experience, w):
        batch = aggregate(best_of_group(experience.batch, options.only_best), "token-mean")
        grads, metrics = w.trainers["actor"].forward_backward(state.actor, batch, imitate)
        actor, more = w.trainers["actor"].apply_update(state.actor, grads)
        report = w.get(metrics) | w.get(more) | {"critic/score/mean": batch["score"].mean()}
        return attrs.evolve(state, actor=actor, step=state.step + 1), report

    return Algorithm(learn=learn, outline=Outline(min_n=2))


def main(steps=40, prompts=16, answers=16, seed=0):
    """Trains without config or command line, and returns the mean reward of every step."""
    from verl_fn.backends.hf.new_model import char_tokenizer, new_model
    from verl_fn.backends.local import Local
    from verl_fn.backends.protocol import Sampling
    from verl_fn.backends.sampler import Sampler
    from verl_fn.data.tasks import TASKS
    from verl_fn.rewards import Reward, by_rules
    from verl_fn.steps import adamw, chain, clip_by_global_norm

    task, algorithm, key = TASKS["count"], raft(Raft()), Key.from_seed(seed)
    tokenizer = char_tokenizer(task.alphabet)
    with tempfile.TemporaryDirectory() as folder:
        new_model(folder, chars=task.alphabet, head_dim=32, seed=seed)
        actor = Local(folder, chain(clip_by_global_norm(1.0), adamw(3e-3, betas=(0.9, 0.95))))
        workers = Workers(
            trainers={"actor": actor},
            rollout=Sampler(folder, slots=256),
            reward=Reward(by_rules, tokenizer),
            tokenizer=tokenizer,
            sampling=Sampling(max_tokens=12, n=answers),
        )
        state, scores = algorithm.init({"actor": actor.load_pretrained(key=key.fold_in("actor"))}, key), []
        for i in range(steps):
            problems = task.train(key.fold_in("data"), i * prompts, prompts)
            state, report = algorithm.step(state, problems, workers)
            scores.append(float(report["critic/score/mean"]))
            learnt = report["raft/share_learnt"].value
            print(f"step {i:2}  learnt from {learnt:4.0%}  reward {scores[-1]:.3f}  {'#' * int(80 * scores[-1])}")
    return scores


if __name__ == "__main__":
    main()
