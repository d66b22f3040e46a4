"""Compares the effects of several losses on one state; gradients and updates are values.

On one state and one batch, the clipped surrogate loss is compared with the same loss plus a KL term, and with another
aggregation. Nothing needs to be reset in between, since the state does not change:

    .venv/bin/python examples/compare_updates.py
"""

import tempfile

import torch

from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.state import Key, tree
from verl_fn.steps import adamw, aggregate, cross_entropy, kl_to_reference, ppo_clip
from verl_fn.testing import tiny_batch


def differences(ours, theirs):
    """Returns the cosine and relative L2 distance of two mappings of tensors by name, the largest distance first."""
    pairs = {}
    for name in ours:
        a, b = ours[name].flatten().double(), theirs[name].flatten().double()
        pairs[name] = (float(torch.cosine_similarity(a, b, dim=0)), float((a - b).norm() / a.norm()))
    return dict(sorted(pairs.items(), key=lambda item: -item[1][1]))


def change(before, after):
    """Returns the change of each parameter by an update."""
    return {name: after.params[name] - before.params[name] for name in before.params}


def case(folder):
    """Returns a backend, a state a few updates after its reference, and a batch with the log-probs of both."""
    backend = Local(folder, adamw(1e-3))
    reference, batch = backend.init(Key.from_seed(0)), tiny_batch(rows=32)
    state = reference
    for _ in range(3):
        grads, _ = backend.forward_backward(state, batch, cross_entropy())
        state, _ = backend.apply_update(state, grads, donate=False)  # the reference is needed below
    old, ref = (backend.forward(s.params, batch).logprobs for s in (state, reference))
    return backend, state, batch.with_tokens(old_log_probs=old, ref_log_prob=ref)


def main(rows=8):
    """Prints the tables, and returns them by the name of the variant."""
    with tempfile.TemporaryDirectory() as folder:
        backend, state, batch = case(new_model(folder, chars="abcdefgh", hidden_size=32))
        variants = {
            "ppo_clip, token-mean": (ppo_clip(), aggregate(batch, "token-mean")),
            "with 0.1 * KL": (ppo_clip() + 0.1 * kl_to_reference(), aggregate(batch, "token-mean")),
            "seq-mean-token-mean": (ppo_clip(), aggregate(batch, "seq-mean-token-mean")),
        }
        before = tree.digest(state)
        grads = {name: backend.forward_backward(state, data, loss)[0] for name, (loss, data) in variants.items()}
        states = {name: backend.apply_update(state, g, donate=False)[0] for name, g in grads.items()}
        assert tree.digest(state) == before, "an update changed the state that it came from"

    base, *others = variants
    tables = {}
    for name in others:
        by_gradient = differences(grads[base], grads[name])
        by_update = differences(change(state, states[base]), change(state, states[name]))
        tables[name] = {leaf: (*by_gradient[leaf], *by_update[leaf]) for leaf in by_gradient}
        print(f"\n{name}, against {base}\n{'':48}{'gradient':>18}{'update':>20}")
        print(f"{'parameter':48}{'cosine':>8}{'rel. L2':>10}{'cosine':>10}{'rel. L2':>10}")
        for leaf, (cosine, distance, cosine_after, distance_after) in list(tables[name].items())[:rows]:
            print(f"{leaf:48}{cosine:8.4f}{distance:10.4f}{cosine_after:10.4f}{distance_after:10.4f}")
    print(f"\nthe state of step {state.step} did not change, bitwise")
    return tables


if __name__ == "__main__":
    main()
