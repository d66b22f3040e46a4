"""Conversations of several turns against the same tokens in single turns.

``verl-fn bench turns`` has a model of random weights talk to an environment that answers at once. The engine, the
environment's process and the chat template are the same as in a run. Then the same engine is asked for each reply by
itself: the prompt is the conversation so far, and the key is the same, so the same tokens are drawn. All these
requests are made in one call, so that no reply waits for another one. As many rows are decoded at a time as there are
conversations, the prefix cache is on, and weights are published before each call and so empty it, as a training
step does. The calls take turns.

Random weights hardly ever end a reply, so each ends at its limit as if the model had ended it. All replies have the
same length, or, with ``--shortest``, lengths between two limits. Then a conversation has to draw its replies one
after the other while single turns fill every free slot, so the bar holds only for equal lengths. A third figure asks
for the replies of one turn of all conversations in a call: it is as long as the longest reply.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import attrs
import torch

from verl_fn import build
from verl_fn.backends.hf.config import read_config
from verl_fn.backends.local import Local
from verl_fn.backends.protocol import Through
from verl_fn.backends.serving import Growing
from verl_fn.config import load
from verl_fn.config.plan import RolloutPlan, make_plan
from verl_fn.config.schema import EnvConfig
from verl_fn.environments.engine import Conversing
from verl_fn.state import Key, Request, Sample, Sampling
from verl_fn.steps import frozen

from . import measure, workload

BAR = 0.85
PROMPT_WORDS, MESSAGE_WORDS, ROOM = 128, 16, 32
SPECIALS, ROLES = ("<pad>", "<bos>", "<eos>", "<unk>"), ("system", "user", "assistant", "tool")
TEMPLATE = (
    "{% for message in messages %}{{ bos_token + message['role'] + ' ' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ bos_token + 'assistant ' }}{% endif %}"
)


def words(size: int) -> Any:
    """Returns a tokenizer with ``size`` tokens, each a word: encoding the text of any reply gives as many tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = (*SPECIALS, *ROLES, *(f"w{i}" for i in range(words_of(size))))
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, bos, eos, unk = SPECIALS
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk)
    made.chat_template = TEMPLATE
    return made


def words_of(size: int) -> int:
    """Returns how many of ``size`` tokens are words of a text; the others are special tokens and roles."""
    return size - len(SPECIALS) - len(ROLES)


class Ending(Through):
    """Ends replies at their limits as if the model had ended them, and keeps the requests of the last conversations.

    Args:
        inner: the engine.
        shortest: the shortest limit of a reply, or 0 for the one that is asked for.
    """

    def __init__(self, inner: Any, shortest: int) -> None:
        super().__init__(inner)
        self._shortest = shortest
        self.asked: list[Request] = []

    def generate(self, requests: Sequence[Request], *, version: int | None = None) -> list[Sample]:
        """Returns the samples; see ``RolloutBackend``."""
        return _ended(self.inner.generate(self._limited(requests), version=version))

    def _limited(self, requests: Sequence[Request]) -> list[Request]:
        limited = [self._with_limit(request) for request in requests]
        self.asked += limited
        return limited

    def _with_limit(self, request: Request) -> Request:
        longest = request.sampling.max_tokens
        if not self._shortest:
            return request
        limit = self._shortest + request.key.seed() % (longest + 1 - self._shortest)
        return attrs.evolve(request, sampling=attrs.evolve(request.sampling, max_tokens=limit))


class GrowingEnding(Ending):
    """The same for an engine that takes requests while it draws others."""

    def grow(self, more: Any, *, version: int | None = None) -> None:
        """Answers requests as they arrive; see ``Growing``."""

        def limited(samples: list[Sample]) -> Any:
            requests = more(_ended(samples))
            return self._limited(requests) if requests else requests

        self.inner.grow(limited, version=version)  # type: ignore[attr-defined]


def _ended(samples: Any) -> list[Sample]:
    return [attrs.evolve(sample, finish_reason="stop") for sample in samples]


class Bench:
    """An engine with an environment, and what it is asked.

    Args:
        folder: receives the model.
        args: the options.
    """

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        workload.write_model(folder, args.shape, args.device)
        vocab = read_config(folder).vocab_size
        words(vocab).save_pretrained(folder)
        self.conversing = cast(Conversing, build.conversing(*_plan(folder, args)))
        inner = self.conversing.inner
        kind = GrowingEnding if isinstance(inner, Growing) else Ending
        self.engine = self.conversing.inner = kind(inner, args.shortest)
        trainer = Local(folder, frozen(), device=args.device)
        self.weights = trainer.weights(trainer.load_pretrained(folder, Key.from_seed(0)).params)
        sampling = Sampling(args.turns * (args.reply + ROOM))
        self.requests = [
            Request(i, (), sampling, Key.from_seed(i), problem=_problem(i, vocab)) for i in range(args.conversations)
        ]
        self.replies: set[int] = set()
        self.tokens = 0

    def publish(self) -> None:
        """Publishes the weights again."""
        self.engine.publish(0, self.weights)

    def converse(self) -> None:
        """Has all conversations."""
        self.engine.asked = []
        samples = self.conversing.generate(self.requests, version=0)
        self.replies = {sample.outcome.turns for sample in samples if sample.outcome}
        self.tokens = sum(int(sample.mask.sum()) for sample in samples)

    def at_once(self) -> None:
        """Asks for all replies in one call."""
        self._ask(self._by_turn())

    def by_turn(self) -> None:
        """Asks for the replies of one turn of all conversations in a call."""
        for turn in itertools.groupby(self._by_turn(), key=lambda request: request.id // len(self.requests)):
            self._ask(list(turn[1]))

    def _by_turn(self) -> list[Request]:
        """Returns the requests of the last conversations, the first turn of all of them first."""
        turns: Counter[int] = Counter()
        numbered = []
        for request in self.engine.asked:
            numbered.append(attrs.evolve(request, id=request.id + turns[request.id] * len(self.requests)))
            turns[request.id] += 1
        return sorted(numbered, key=lambda request: request.id)

    def _ask(self, requests: list[Request]) -> None:
        engine: Any = self.engine.inner
        if len({request.sampling for request in requests}) == 1 or not isinstance(engine, Growing):
            engine.generate(requests, version=0)
            return
        # ``generate`` would draw the requests of each length by themselves.
        left, waiting = [requests], len(requests)

        def more(samples: list[Sample]) -> list[Request] | None:
            nonlocal waiting
            waiting -= len(samples)
            return left.pop() if left else [] if waiting else None

        engine.grow(more, version=0)


def _plan(folder: Path, args: argparse.Namespace) -> tuple[RolloutPlan, str, EnvConfig]:
    """The arguments of ``build.conversing``."""
    message = " ".join(["w1"] * MESSAGE_WORDS)
    settings = {
        "model.path": folder,
        "driver.kind": "ray",
        "rollout.name": args.engine,
        "rollout.slots": args.conversations,
        "env.name": f"{Path(__file__).with_name('answering.py')}:Answering",
        "env.arguments": f'{{ turns = {args.turns}, message = "{message}" }}',
        "env.max_turns": args.turns,
        "env.max_turn_length": args.reply,
        "data.max_prompt_length": PROMPT_WORDS + ROOM,
        "data.max_response_length": args.turns * (args.reply + ROOM),
    }
    plan = make_plan(load(overrides=[f"{key}={value}" for key, value in settings.items()]))
    return plan.rollout, args.device, plan.env


def _problem(number: int, vocab: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    text = " ".join(f"w{i}" for i in torch.randint(words_of(vocab), (PROMPT_WORDS,), generator=generator).tolist())
    return {"prompt": text, "answer": "", "id": number, "data_source": "", "extra_info": {}}


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of each way to ask, and the ratios of conversations to the others."""
    with tempfile.TemporaryDirectory() as made:
        bench = Bench(Path(made), args)
        ways = {"conversations": bench.converse, "at_once": bench.at_once, "by_turn": bench.by_turn}
        seconds = measure.interleave(ways, args.rounds, args.device, dict.fromkeys(ways, bench.publish))
        tokens = bench.tokens
        if bench.replies != {args.turns}:
            raise RuntimeError(f"conversations had {sorted(bench.replies)} replies, not {args.turns}")
    rates = {name: [tokens / s for s in of] for name, of in seconds.items()}
    ratios = {name: measure.ratio(rates["conversations"], rates[name]) for name in ("at_once", "by_turn")}
    return {"tokens": tokens, "tokens_a_second": rates, "ratio": ratios}


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench turns``: tokens a second of each; exit status 1 where the bar is missed on a GPU."""
    parser = measure.parser("turns", __doc__)
    parser.add_argument("--shape", choices=tuple(workload.SHAPES), default="0.5b")
    parser.add_argument("--conversations", type=measure.count, default=256)
    parser.add_argument("--turns", type=measure.count, default=4)
    parser.add_argument("--reply", type=measure.count, default=256, help="tokens of a reply")
    parser.add_argument(
        "--shortest", type=int, default=0, help="tokens of the shortest reply; by default the longest"
    )
    parser.add_argument("--rounds", type=measure.count, default=5)
    parser.add_argument("--engine", choices=("sampler", "vllm"), default="vllm")
    args = parser.parse_args(argv)
    about = {name: getattr(args, name) for name in ("shape", "conversations", "turns", "reply", "shortest", "engine")}
    result = about | compare(args)
    rates = {name: statistics.median(of) for name, of in result["tokens_a_second"].items()}
    ratio, by_turn = (result["ratio"][name]["median"] for name in ("at_once", "by_turn"))
    bar = None if args.shortest else BAR
    held = bar is None or ratio >= bar
    print(
        f"{args.conversations} conversations of {args.turns} turns: {rates['conversations']:,.0f} tok/s, {ratio:.3f} "
        f"of single turns in one call ({rates['at_once']:,.0f} tok/s{'' if bar is None else f', bar {bar}'}), "
        f"{by_turn:.3f} of single turns in a call a turn ({rates['by_turn']:,.0f} tok/s)"
    )
    measure.write(args.json, "turns", args.device, {"bar": bar, **result})
    print("no bar" if bar is None else "held" if held else "MISSED")
    return 0 if args.device == "cpu" or held else 1
