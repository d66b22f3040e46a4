"""Functions that run in a process of their own, which has one vLLM engine of a model with images."""

import contextlib
import functools
import os
import tempfile
from pathlib import Path
from unittest import mock

import attrs
import pytest
import torch
import vllm_update_cases
import vllm_worker_cases
from vision_cases import cut_into_tiles, encoded, name_tokens, seeing

from verl_fn.backends.hf.vision import Seen
from verl_fn.backends.local import Local
from verl_fn.backends.sampler import Sampler
from verl_fn.backends.vllm import EngineError, Vllm, arguments
from verl_fn.backends.vllm import engine as vllm_engine
from verl_fn.state import Key, Sampling, pack, requests_for
from verl_fn.steps import sgd

KEY = Key.from_seed(4)


@functools.cache
def folder():
    # vLLM's attention on CPUs wants heads of at least 32.
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    made = seeing(Path(tempfile.mkdtemp()), os.environ["ARCH"], **sizes, vocab_size=40)
    if os.environ["ARCH"] == "gemma3":
        name_tokens(made)
    return cut_into_tiles(made) if os.environ["ARCH"] == "idefics3" else made


@functools.cache
def trainer():
    return Local(folder(), sgd(0.1))


@functools.cache
def engine():
    return Vllm(folder(), device="cpu", dtype="float32", slots=8, max_length=128, in_flight=True)


def asked(n=3, tokens=6):
    """Requests for prompts with none, one and two images; one image is shown twice."""
    prompts = encoded(folder())[0]
    prompts.append(prompts[0])
    ids, images = [ids for ids, _ in prompts], [images for _, images in prompts]
    return requests_for(ids, Sampling(max_tokens=tokens, n=n), KEY, images=images)


def gap(params, batch):
    """How far the log-probs of rows are from the trainer's, with its weights at each version."""
    worst = 0.0
    for version, own in params.items():
        drawn = batch["versions"] == version
        assert bool(drawn.any())
        difference = trainer().forward(own, batch).logprobs - batch["rollout_log_probs"]
        worst = max(worst, float(difference[drawn].abs().max()))
    return worst


def weights(seed):
    return trainer().init(Key.from_seed(seed)).params if seed else trainer().load_pretrained().params


def publications():
    """Log-probs and draws after each of two publications; the second one has another tower."""
    sampler, worst = Sampler(folder()), 0.0
    for version, seed in enumerate((0, 9)):
        params = weights(seed)
        for one in (engine(), sampler):
            one.publish(version, trainer().weights(params))
        batch, other = (pack(one.generate(asked(), version=version)) for one in (engine(), sampler))
        assert torch.equal(batch.tokens, other.tokens)
        worst = max(worst, gap({version: params}, batch))
        if not seed:
            gray = batch.with_ragged(pixels=[torch.full_like(row, 0.25) for row in batch.rows("pixels")])
            assert gap({version: params}, gray) > 0.1
    return worst


def in_flight():
    """Log-probs of rows that go on with other weights, of the tower too."""
    old, new = weights(0), weights(9)
    engine().publish(3, trainer().weights(old))
    # So slow that none ends before the weights arrive.
    engine()._engine.call(vllm_worker_cases.before_steps, vllm_worker_cases.wait, 0.05)
    stream = engine().stream(asked(n=1, tokens=24))
    samples = [next(stream)]
    engine().publish(4, trainer().weights(new))
    samples += stream
    engine()._engine.call(vllm_worker_cases.before_steps, None)
    return gap({3: old, 4: new}, pack(samples))


def frozen_tower():
    """Whether each publication has a tower, and the worst gap after it, with a tower that is frozen.

    The tower is sent again after the engine has dropped its weights, and after an edit.
    """
    frozen, sent, worst = Local(folder(), sgd(0.1), freeze_vision_tower=True), [], 0.0
    params = weights(0)
    tower = frozen.load_pretrained().params
    tower = {name: params[name] for name in tower.keys() - set(tower.trained())}

    def publish(version):
        names = []
        engine().publish(version, vllm_update_cases.Noted(frozen.weights(params), names))
        sent.append(any(name in tower for name in names))
        assert any(name not in tower for name in names)
        return gap({version: params}, pack(engine().generate(asked(), version=version)))

    worst = max(worst, publish(6))
    for version, seed in ((7, 9), (8, 11)):
        other = weights(seed)
        params = attrs.evolve(params, leaves={name: tower.get(name, t) for name, t in other.items()})
        worst = max(worst, publish(version))
    engine().sleep(2)
    engine().wake()
    worst = max(worst, publish(9))
    with torch.no_grad():
        for t in tower.values():
            t.mul_(-1.5)
    worst = max(worst, publish(10), publish(11))
    return sent, worst


def another_prompt():
    """vLLM answers a prompt that has another token than the request's."""
    engine().publish(5, trainer().weights(weights(0)))
    request = asked(n=1)[0]
    whole = vllm_engine.prompt_with_images

    def altered(request, config):
        return whole(attrs.evolve(request, prompt=(*request.prompt, request.prompt[-1])), config)

    error = pytest.raises(EngineError, match="vLLM used another prompt for row 0: it has")
    with mock.patch.object(vllm_engine, "prompt_with_images", altered), error:
        engine().generate([request])
    assert len(engine().generate([request])) == 1


def without_blocks():
    """The worst gap for a family whose image tokens attend to each other, if the trainer hides later ones as well.

    vLLM on a CPU hides them, so this compares everything but the mask.
    """
    with contextlib.ExitStack() as patched:
        for module in (arguments, vllm_engine):
            patched.enter_context(mock.patch.object(module, "reads_images", lambda config, device: True))
        made = engine()
    with mock.patch.object(Seen, "blocks", None):
        worst = 0.0
        for version, seed in enumerate((0, 9)):
            params = weights(seed)
            made.publish(version, trainer().weights(params))
            worst = max(worst, gap({version: params}, pack(made.generate(asked(), version=version))))
    return worst
