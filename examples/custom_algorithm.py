"""A reinforcement learning algorithm of your own, from plain functions over values.

RAFT (Dong et al. 2023, arXiv 2304.06767): draw several answers to each prompt and learn to say the best one. Here
a random model of 0.1 M parameters learns to write as many letters as its prompt says:

    .venv/bin/python examples/custom_algorithm.py
"""

import tempfile

import torch

from verl_fn.backends.hf.new_model import char_tokenizer, new_model
from verl_fn.backends.local import Local
from verl_fn.backends.protocol import Sampling
from verl_fn.backends.sampler import Sampler
from verl_fn.data.tasks import TASKS
from verl_fn.state import Key, pack, requests_for
from verl_fn.steps import adamw, aggregate, chain, clip_by_global_norm, constant, loss, token_mean

TASK = TASKS["count"]
TOKENIZER = char_tokenizer(TASK.alphabet)


@loss(needs=["logprobs"])
def imitate(outputs, batch):
    """The loss: make tokens with an advantage likelier."""
    return -batch["advantages"] * outputs.logprobs, {"share_learnt": token_mean(batch, batch["advantages"])}


def best_of_group(batch):
    """The estimator: 1 for the best answer to each prompt, 0 for the others and where all are equally good."""
    score = batch.sum_rows(batch["token_level_rewards"] * batch["response_mask"])
    same = batch["group"][:, None] == batch["group"]
    best = torch.where(same, score, -torch.inf).amax(1)
    worst = torch.where(same, score, torch.inf).amin(1)
    chosen = (score == best) & (score > worst)
    advantages = batch.spread(chosen.float()) * batch["response_mask"]
    return batch.with_tokens(advantages=advantages, returns=advantages)


def reward(batch, problems):
    """Judge each answer's text; an answer that was cut off gets 0. The score goes to the row's last token."""
    by_id = {problem.id: problem for problem in problems}
    answers = [row[start:] for row, start in zip(batch.rows(), batch["prompt_length"], strict=True)]
    texts = TOKENIZER.batch_decode(answers, skip_special_tokens=True)
    scores = [TASK.score(by_id[name], text) for name, text in zip(batch["group"].tolist(), texts, strict=True)]
    score = torch.tensor(scores) * batch["finished"]
    rewards = torch.zeros(batch.num_tokens).index_copy(0, batch.last, score)
    return batch.with_rows(score=score).with_tokens(token_level_rewards=rewards)


def step(state, problems, backend, engine, sampling, key):
    """One step of the algorithm: sample, judge, compare, update. ``state`` is donated: use the one returned."""
    engine.publish(state.step, backend.weights(state.params))
    prompts = [TOKENIZER.encode(problem.prompt) for problem in problems]
    ids = [problem.id for problem in problems]
    requests = requests_for(prompts, sampling, key.fold_in(state.step), ids)
    batch = pack(engine.generate(requests, version=state.step))
    batch = aggregate(best_of_group(reward(batch, problems)), "token-mean")
    grads, metrics = backend.forward_backward(state, batch, imitate)
    state, _ = backend.apply_update(state, grads)
    return state, float(batch["score"].mean()), metrics


def main(steps=40, prompts=16, answers=16, seed=0):
    """Train, and return the mean reward of every step."""
    with tempfile.TemporaryDirectory() as folder:
        new_model(folder, chars=TASK.alphabet, seed=seed)
        backend = Local(folder, chain(clip_by_global_norm(1.0), adamw(constant(3e-3), betas=(0.9, 0.95))))
        engine, sampling = Sampler(folder, slots=256), Sampling(max_tokens=12, n=answers)
        key, state, scores = Key.from_seed(seed), backend.load_pretrained(), []
        for i in range(steps):
            problems = TASK.train(key, i * prompts, prompts)
            state, score, metrics = step(state, problems, backend, engine, sampling, key)
            scores.append(score)
            learnt = metrics["share_learnt"].value
            print(f"step {i:2}  learnt from {learnt:4.0%}  reward {score:.3f}  {'#' * int(80 * score)}")
    return scores


if __name__ == "__main__":
    main()
