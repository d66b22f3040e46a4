"""Compare what losses do to one and the same state: gradients are values, and so are updates.

From one state and one batch, the clipped surrogate is compared with the same plus a KL term, and with another
aggregation. Nothing is reset between them, since nothing changes:

    .venv/bin/python examples/compare_updates.py
"""

import tempfile

import torch

from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.state import Key, tree
from verl_fn.steps import adamw, aggregate, constant, cross_entropy, kl_to_reference, ppo_clip
from verl_fn.testing import tiny_batch


def differences(ours, theirs):
    """Name -> (cosine, L2 distance relative to ours), of two mappings from names to tensors; the largest first."""
    found = {}
    for name in ours:
        a, b = ours[name].flatten().double(), theirs[name].flatten().double()
        found[name] = (float(torch.cosine_similarity(a, b, dim=0)), float((a - b).norm() / a.norm()))
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def change(before, after):
    """What an update did to each parameter."""
    return {name: after.params[name] - before.params[name] for name in before.params}


def case(folder):
    """A backend, a state some updates away from its reference, and a batch that knows both policies."""
    backend = Local(folder, adamw(constant(1e-3)))
    reference, batch = backend.init(Key.from_seed(0)), tiny_batch(rows=32)
    state = reference
    for _ in range(3):
        grads, _ = backend.forward_backward(state, batch, cross_entropy())
        state, _ = backend.apply_update(state, grads, donate=False)  # the reference is still wanted
    old, ref = (backend.forward(s.params, batch).logprobs for s in (state, reference))
    return backend, state, batch.with_tokens(old_log_probs=old, ref_log_prob=ref)


def main(rows=8):
    """Print the tables, and return them by the name of the variant."""
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
        of_grads = differences(grads[base], grads[name])
        of_updates = differences(change(state, states[base]), change(state, states[name]))
        tables[name] = {leaf: (*of_grads[leaf], *of_updates[leaf]) for leaf in of_grads}
        print(f"\n{name}, against {base}\n{'':48}{'gradient':>18}{'update':>20}")
        print(f"{'parameter':48}{'cosine':>8}{'rel. L2':>10}{'cosine':>10}{'rel. L2':>10}")
        for leaf, (cosine, distance, cosine_after, distance_after) in list(tables[name].items())[:rows]:
            print(f"{leaf:48}{cosine:8.4f}{distance:10.4f}{cosine_after:10.4f}{distance_after:10.4f}")
    print(f"\nthe state is still that of step {state.step}, bitwise")
    return tables


if __name__ == "__main__":
    main()
