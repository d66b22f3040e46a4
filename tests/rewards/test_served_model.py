"""A reward model that is served at an address: what it is sent, how it replies, and vLLM as the server."""

import importlib.util
import json
import os
import socket
import subprocess
import time
import urllib.request

import pytest
import torch
from judge_server import serving
from run_configs import tiny_run

from verl_fn.backends.hf.new_model import char_tokenizer, new_model
from verl_fn.backends.local import Local
from verl_fn.config import ConfigError, load, notes
from verl_fn.data.tasks import Problem
from verl_fn.rewards import Reward, RewardError
from verl_fn.rewards.judge import Judge, Replies, ServedModel
from verl_fn.runs.logs import read_metrics
from verl_fn.runs.loop import train
from verl_fn.runs.replay import replay
from verl_fn.state import Batch, Key
from verl_fn.steps import frozen

GRPO = ["algorithm.name=grpo", "rollout.n=2", "data.train_batch_size=2", "trainer.test_freq=-1", "data.val_size=2"]


def silent(line):
    pass


@pytest.fixture
def server():
    with serving() as server:
        server.reply = lambda body: (200, pooled([0.0], [sum(body["input"]) / 7]))
        yield server


def pooled(*scores):
    return json.dumps({"object": "list", "data": [{"index": 0, "data": list(scores)}]})


def judge(url, folder=None, **options):
    return Judge(url, ServedModel("rm"), Replies(folder), **{"timeout": 5.0, "retries": 1, **options})


def ragged(rows=9, longest=20, vocab=13):
    """Random rows with responses of one token to nearly the whole row."""
    generator = torch.Generator().manual_seed(1)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    tokens = [[draw(4, vocab) for _ in range(draw(2, longest))] for _ in range(rows)]
    masks = [[float(t >= len(row) // 2) for t in range(len(row))] for row in tokens]
    return Batch.from_rows(tokens, {"response_mask": masks}, {"finished": [0.0] * rows})


def scored(batch, judge):
    problems = [Problem("?", "", id=i) for i in range(len(batch))]
    return Reward(judge, char_tokenizer("abcdefgh>"))(batch, problems)


def test_the_model_gets_the_tokens_of_whole_rows(server, tmp_path):
    batch = ragged()
    result = scored(batch, judge(server.url, tmp_path))
    assert sorted(server.seen) == sorted(row.tolist() for row in batch.rows())
    assert server.headers[0]["path"] == "/v1/pooling"
    torch.testing.assert_close(result["score"], batch.sum_rows(batch.tokens.float()) / 7)
    assert torch.equal(scored(batch, judge(server.url, tmp_path))["score"], result["score"])
    assert len(server.seen) == len(batch), "replies are kept, with all digits"


@pytest.mark.parametrize(
    "reply, said",
    [
        ((200, pooled(0.1, 0.2)), r"had no one number, .* in data\[0\]\.data"),
        ((200, pooled(float("nan"))), "had no one number"),
        ((200, '{"data": [{"data": [[0.1, 0.2]]}]}'), "had no one number"),
        ((200, '{"data": []}'), "had no one number"),
        ((200, '{"data": [{"data": [1e300]}]}'), "had no one number"),
        ((200, "no JSON"), "had no one number"),
        ((404, "no model rm"), r"refuses requests with status 404: .*no model rm.* reward\.model"),
        ((503, "busy"), "no reply in 2 attempts .*status 503"),
    ],
)
def test_what_is_no_score_ends_the_run(server, reply, said):
    server.reply = lambda body: reply
    with pytest.raises(RewardError, match=said):
        scored(ragged(1), judge(server.url))


def test_a_run_is_replayed_without_the_server(tiny, tmp_path, server):
    address = [f"reward.url={server.url}", "reward.api=pooling", "reward.model=rm"]
    plan = tiny_run(tiny, tmp_path / "run", *GRPO, *address, "trainer.total_training_steps=1")
    report = train(plan, silent)
    assert "val-core/reverse/reward/mean@1" in report and read_metrics(tmp_path / "run")[-1]["critic/score/mean"] > 0
    server.close()
    assert replay(tmp_path / "run", 1, say=silent).difference is None


def test_settings_of_the_other_kind_have_no_effect():
    url = ["reward.url=http://localhost:1", "reward.model=rm"]
    said = " ".join(notes(None, [*url, "reward.api=pooling", "reward.pattern=(1)"]))
    assert 'reward.pattern has no effect without reward.api = "chat"' in said
    assert not list(notes(None, [*url, "reward.pattern=(1)"]))
    with pytest.raises(ConfigError, match=r"reward\.api"):
        load(overrides=["reward.api=classify"])


@pytest.fixture(scope="module")
def value_model(tmp_path_factory):
    """A model with a random value head and bias, as ``algorithm.name=reward_model`` saves one."""
    base = tmp_path_factory.mktemp("base")
    # Heads of 32 are the smallest that vLLM computes on a CPU.
    new_model(
        base, arch="qwen3", num_attention_heads=2, num_key_value_heads=1, chars="abcdefgh>", initializer_range=0.2
    )
    backend = Local(base, frozen(), head="value")
    state = backend.init(Key.from_seed(5))
    generator = torch.Generator().manual_seed(2)
    for name, values in state.params.items():
        if name.startswith("score"):
            values.copy_(torch.randn(values.shape, generator=generator))
    folder = tmp_path_factory.mktemp("served") / "model"
    backend.save(state, folder)
    return backend, state, folder


@pytest.fixture(scope="module")
def vllm(value_model, vllm_python):
    """The address of vLLM's server of the value model, in a process of its own."""
    _, _, folder = value_model
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = (
        f"--port {port} --runner pooling --skip-tokenizer-init --dtype float32 --enforce-eager --max-model-len 64"
    )
    # To compile takes longer than all that is computed here.
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    command = [vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    with (folder.parent / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, *settings.split(), "--served-model-name", "rm"],
            env=os.environ | variables | {"HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=log,
        )
    try:
        for _ in range(600):
            time.sleep(1)
            assert process.poll() is None, (folder.parent / "log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                continue
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_gives_the_scores_of_the_training_ranks(value_model, vllm, tiny, tmp_path):
    backend, state, _ = value_model
    batch = ragged(24, 60)
    wanted = backend.forward(state.params, batch, ("row_values",)).row_values
    result = scored(batch, judge(vllm, timeout=120.0))
    assert wanted.std() > 0.1
    torch.testing.assert_close(result["score"], wanted.to(result["score"].dtype), atol=1e-4, rtol=0)
    address = [f"reward.url={vllm}", "reward.api=pooling", "reward.model=rm", "reward.timeout=120"]
    more = ["trainer.test_freq=-1", "trainer.total_training_steps=2", "trainer.val_before_train=false"]
    train(tiny_run(tiny, tmp_path / "run", "algorithm.name=ppo", *address, *more), silent)
    assert [row["reward/judge_unreadable/mean"] for row in read_metrics(tmp_path / "run")[-2:]] == [0.0, 0.0]
