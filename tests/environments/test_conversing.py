"""Conversations token by token: what the model drew stays as it is, and every conversation ends for a reason."""

import contextlib
import importlib
import json
import threading
import time
import warnings
from types import SimpleNamespace

import attrs
import pytest
import torch

from verl_fn.algorithms import Workers
from verl_fn.algorithms.experience import requests_of, without_failures
from verl_fn.algorithms.policy import estimator
from verl_fn.backends.hf.folder import build
from verl_fn.backends.hf.new_model import CHAT_TEMPLATE, TOOLS, char_tokenizer
from verl_fn.backends.hf.tokenizer import read_tokenizer
from verl_fn.backends.mock import MockRollout, Response
from verl_fn.backends.protocol import Capabilities, Through
from verl_fn.backends.sampler import Sampler
from verl_fn.backends.weight_sync import Weights
from verl_fn.config import GRPO, RLOO
from verl_fn.config.algorithms import GROUP_ESTIMATORS, TOKEN_BASELINES
from verl_fn.data.tasks import Problem
from verl_fn.environments import Done
from verl_fn.environments.engine import Conversing, Limits
from verl_fn.environments.processes import EnvError, Failure, Opening
from verl_fn.environments.rendering import Conversation, Renderer, TemplateArguments, TokenRow
from verl_fn.errors import ArgumentError
from verl_fn.rewards import Reward, unscored
from verl_fn.runs.steps import counts_of, ledger
from verl_fn.state import Batch, Key, Sampling, pack, requests_for, tree, unpack
from verl_fn.testing import check_rollout

END, NEWLINE = 2, "\n"
TOKENIZER = char_tokenizer("abcdefgh?" + NEWLINE)
TOKENIZER.chat_template = CHAT_TEMPLATE
# Drops earlier replies, as templates do with reasoning.
FORGETFUL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] != 'assistant' %}{{ m['content'] + '\n' }}"
    "{% elif loop.last %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def user(content):
    return ({"role": "user", "content": content},)


def script(**results):
    """An environment: the last reply, or the prompt, says what it returns; otherwise a question mark."""

    def answer(jobs):
        return [results.get(job.replies[-1] if job.replies else job.problem["prompt"], user("?")) for job in jobs]

    return answer


def play(
    environment, replies, prompts=("ab",), *, n=1, template=CHAT_TEMPLATE, turns=3, reply=8, room=40, through=Through,
    made=None, temperature=1.0,
):  # fmt: skip
    """Returns the samples; ``replies`` maps a row's text so far, without its end tokens, to the reply's tokens."""
    tokenizer = char_tokenizer("abcdefgh?" + NEWLINE)
    tokenizer.chat_template = template

    def draw(turn):
        asked.append(turn)
        said = replies.get(tokenizer.decode(turn.prompt, skip_special_tokens=True), [*ids("c"), END])
        return attrs.evolve(unfinished, tokens=said) if END not in said else said

    asked, unfinished = [], Response([0], finished=False)
    engine = MockRollout(draw)
    engine.publish(3, Weights.of({}))
    renderer = Renderer(tokenizer, [END])
    limits = Limits(turns, reply, 10)
    conversing = Conversing(through(engine), environment, renderer, tokenizer, [END], limits)
    if made is not None:
        made(conversing)
    problems = [
        prompt if isinstance(prompt, Problem) else Problem(prompt, "", id=7 + i) for i, prompt in enumerate(prompts)
    ]
    w = Workers({}, conversing, None, tokenizer, Sampling(room, n=n, temperature=temperature), converses=True)
    requests = requests_of(problems, w, w.sampling, Key.from_seed(0))
    return conversing.generate(requests, version=3), asked, problems


def test_a_conversation_by_hand():
    """The tokens of the messages have mask 0, and a special token that was drawn is in the row and in the reply."""
    odd = [*ids("c"), 1, *ids("d"), END]
    results = script(**{"ab": user("ab"), "c<bos>d": user("ef"), "g": Done(0.5, 1.0)})
    (sample,), asked, _ = play(results, {"ab\n": odd, "ab\ncdef\n": [*ids("g"), END]})
    assert sample.prompt.tolist() == [1, *ids("ab\n")]
    assert sample.tokens.tolist() == [*odd, *ids("ef\n"), *ids("g"), END]
    assert sample.mask.tolist() == [1.0] * 4 + [0.0] * 3 + [1.0] * 2
    assert sample.versions.tolist() == [3] * 9 and sample.finish_reason == "stop"
    assert [turn.prompt for turn in asked] == [(1, *ids("ab\n")), (1, *ids("ab\n"), *odd, *ids("ef\n"))]
    outcome = sample.outcome
    assert (outcome.reason, outcome.score, outcome.acc, outcome.turns) == ("done", 0.5, 1.0, 2)
    said = [(one["role"], one["content"]) for one in json.loads(outcome.messages)]
    assert said == [("user", "ab"), ("assistant", "c<bos>d"), ("user", "ef"), ("assistant", "g")]


@pytest.mark.parametrize(("temperature", "of_log_probs"), [(0.0, 1.0), (0.5, 0.5)])
def test_a_greedy_conversation_has_log_probs_of_temperature_1(temperature, of_log_probs):
    (sample,), (turn,), _ = play(script(ab=user("ab"), c=Done(1.0)), {}, temperature=temperature)
    assert turn.sampling.temperature == temperature and sample.temperature == of_log_probs


def test_first_messages_may_have_as_many_tokens_as_a_prompt():
    for letters in (8, 9):
        long = pytest.raises(EnvError, match=r"have 11 tokens, more than 10; raise data.max_prompt_length")
        with long if letters == 9 else contextlib.nullcontext():
            (sample,), _, _ = play(script(ab=user("a" * letters), c=Done(1.0)), {})
            assert len(sample.prompt) == 10


def test_a_reply_may_fill_the_room_that_is_left():
    """Of the 40 tokens after the prompt, 4 are used when the second reply begins; env.max_turn_length is larger."""
    long = [*ids("a" * 35), END]
    (sample,), asked, _ = play(script(ab=user("ab"), c=user("d")), {"ab\ncd\n": long}, reply=100)
    assert [turn.sampling.max_tokens for turn in asked] == [40, 36]
    assert sample.tokens[-36:].tolist() == long and sample.outcome.turns == 2


def test_a_row_without_room_for_a_token_of_a_reply_ends_its_conversation():
    """After the environment's message the row has 9 tokens, of which 4 are the prompt."""
    for room, turns in ((5, 1), (6, 2)):
        (sample,), asked, _ = play(script(ab=user("ab"), c=user("ef")), {"ab\ncef\n": [END]}, room=room)
        assert len(asked) == sample.outcome.turns == turns and sample.outcome.reason == "length"


def test_a_template_that_rewrites_replies_makes_rows():
    results = script(ab=user("ab"), g=Done(1.0, 1.0))
    samples, _, problems = play(results, {"ab\n?\n": [*ids("g"), END]}, n=2, template=FORGETFUL)
    assert [(s.number, s.outcome.conversation) for s in samples] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert [s.prompt.tolist() for s in samples[:2]] == [[1, *ids("ab\n")], [1, *ids("ab\n?\n")]]
    assert [s.tokens.tolist() for s in samples[:2]] == [[*ids("c"), END], [*ids("g"), END]]
    batch = Reward(unscored, TOKENIZER, [END])(pack(samples), problems)
    assert batch["score"].tolist() == [1.0] * 4
    assert batch["token_level_scores"].tolist() == [0, 0, 0, 0, 0, 1.0, *[0] * 7, 1.0] * 2
    report = ledger([counts_of(batch)], batch, step=3, asked=2)
    assert report["rollout/rows_split"] == 2 and report["rollout/rows_dropped/engine"] == 0
    assert report["rollout/rows_learned"] == 4 and report["env/turns/mean"] == 2.0


@pytest.mark.parametrize("rows", [1, 2])
def test_the_template_and_the_environment_get_the_fields_of_each_problem(rows):
    """Also for the environment's later messages, whether they stay in the row or begin another one."""
    fields = {"answer": "gold", "data_source": "mine", "extra_info": {"level": 3}}
    brief = Problem("ab", id=4, chat_template_kwargs={"brief": True}, **fields)
    plain = Problem("ab", id=9, **fields)
    # A letter before each message of the user, which only the first problem's arguments ask for.
    template = FORGETFUL if rows == 2 else FORGETFUL.replace("elif loop.last", "else")
    template = template.replace("{{ m['content']", "{{ 'h' if brief }}{{ m['content']", 1)
    jobs = []

    def environment(due):
        jobs.extend(due)
        return [(user("ab"), user("ef"), Done(1.0))[len(job.replies)] for job in due]

    samples, asked, _ = play(environment, {}, (brief, plain), template=template)
    second = "ab\nc<eos>ef\n" if rows == 1 else "ab\nef\n"
    texts = [text for text in ("ab\n", second) for _ in range(2)]
    told = [text.replace("ab", "hab").replace("ef", "hef") for text in texts]
    said = [TOKENIZER.decode(turn.prompt).removeprefix("<bos>") for turn in asked]
    assert said == [told[0], texts[1], told[2], texts[3]] and len(samples) == 2 * rows
    names = ("prompt", "answer", "id", "data_source", "extra_info", "chat_template_kwargs")
    wanted = {one.id: {name: getattr(one, name) for name in names} for one in (brief, plain)}
    assert [job.problem for job in jobs] == [wanted[4], wanted[9]] * 3


def test_only_the_last_row_of_a_conversation_that_is_cut_off_has_no_end():
    samples, _, _ = play(script(ab=user("ab")), {"ab\n?\n": ids("gggg")}, template=FORGETFUL, reply=4)
    assert [(s.finish_reason, s.outcome.reason) for s in samples] == [("stop", "length"), ("length", "length")]


@pytest.mark.parametrize(
    ("reason", "results", "options"),
    [
        ("turn_limit", {}, {"turns": 2}),
        ("length", {}, {"room": 5}),
        ("length", {}, {"reply": 2}),
        ("length", {"c": user("abcdefgh" * 9)}, {}),
        ("env_timed_out", {"c": Failure("env_timed_out", "took longer")}, {}),
        ("env_crashed", {"ab": Failure("env_crashed", "raised")}, {}),
    ],
)
def test_every_conversation_ends_for_a_reason_and_the_ledger_closes(reason, results, options):
    """The other conversation is ended by the environment."""
    results = script(**({"ab": user("ab"), "ba": user("ba"), "g": Done(1.0, 1.0)} | results))
    replies = {"ba\n": [*ids("g"), END]} | ({"ab\n": ids("cc")} if options.get("reply") else {})
    failed = reason.startswith("env")
    with (
        pytest.warns(UserWarning, match="1 of 2 conversations have failed, problem 7")
        if failed
        else contextlib.nullcontext()
    ):
        samples, _, problems = play(results, replies, ("ab", "ba"), **({"reply": 8} | options))
    assert [s.outcome.reason for s in samples] == [reason, "done"]
    assert [s.outcome.score for s in samples] == [0.0, 1.0]
    assert reason != "turn_limit" or samples[0].outcome.turns == 2
    assert (samples[0].finish_reason == "length") == (reason == "length")
    assert all(len(s.prompt) + len(s.tokens) <= 4 + options.get("room", 40) for s in samples)
    again = unpack(pack(samples))
    assert [s.outcome for s in again] == [s.outcome for s in samples]
    with (
        pytest.warns(UserWarning, match="no token that the model drew")
        if reason == "env_crashed"
        else contextlib.nullcontext()
    ):
        batch = Reward(unscored, TOKENIZER, [END])(pack(samples), problems)
    learned = without_failures(batch)
    report = ledger([counts_of(batch)], learned, step=3, asked=2)
    assert len(learned) == 2 - failed and report[f"env/ended/{reason}"] == 0.5
    for kind, total in (("rows", 2), ("tokens", int(batch["response_mask"].sum()))):
        parts = {
            name: report[f"rollout/{kind}_dropped/{name}"] for name in ("algorithm", "env_timed_out", "env_crashed")
        }
        assert report[f"rollout/{kind}_learned"] + sum(parts.values()) == total
        assert {name for name, count in parts.items() if count} <= {reason}
    assert report["rollout/rows_dropped/engine"] == report["rollout/rows_split"] == 0


def test_tokens_of_the_environment_have_a_version_also_while_a_publication_replaces_the_weights():
    """A failed conversation would otherwise count as one of the first weights."""

    class Publishing(Through):
        version = None

    results = script(ab=user("ab"), ba=Failure("env_crashed", "raised"), c=Done(1.0, 1.0))
    with pytest.warns(UserWarning, match="1 of 2"):
        samples, _, _ = play(results, {"ab\n": [*ids("d"), END]}, ("ab", "ba"), through=Publishing)
    assert [sample.versions.unique().tolist() for sample in samples] == [[3], [3]]


def test_an_engine_that_fails_does_not_wait_for_an_environment_that_hangs():
    class Environment:
        def __init__(self):
            self.cancelled, self.ended = threading.Event(), []

        def __call__(self, jobs):
            if jobs[0].replies:
                self.ended.append(self.cancelled.wait(5))
            return [user("?") for _ in jobs]

    class Later:
        def __init__(self, cancelled, seen):
            self.cancelled, self.seen = cancelled, seen

        def __call__(self, jobs):
            if not jobs[0].replies:
                return [user("?")]
            self.seen.append(self.cancelled.is_set())
            return [Done(1.0, 1.0)]

    class Dying(Through):
        def grow(self, more, *, version):
            while not (requests := more([])):
                time.sleep(0.01)
            more(self.inner.generate(requests, version=version))
            raise RuntimeError("the engine died")

    environment = Environment()
    with pytest.raises(RuntimeError, match="the engine died"):
        play(environment, {}, through=Dying)
    assert environment.ended == [True]
    # The conversations after it are not cancelled.
    seen = []
    play(Later(environment.cancelled, seen), {})
    assert seen == [False]


@pytest.mark.parametrize("in_flight", [False, True])
def test_weights_that_would_wait_for_conversations_are_refused_unless_they_go_in_flight(in_flight):
    """Otherwise an environment that waits for the publication would never answer."""
    refused = []

    def environment(jobs):
        if jobs[0].replies:
            try:
                engines[0].publish(4, Weights.of({}))
            except EnvError as error:
                refused.append(str(error))
        return [Done(1.0, 1.0) if job.replies else user("ab") for job in jobs]

    class Flying(Through):
        capabilities = Capabilities(versions_per_token=in_flight)

    engines = []
    play(environment, {}, through=Flying, made=engines.append)
    assert len(refused) == (not in_flight) and engines[0].version == (4 if in_flight else 3)
    assert all("set rollout.in_flight_weight_updates=true" in sentence for sentence in refused)
    engines[0].publish(5, Weights.of({}))
    assert engines[0].version == 5


def test_an_empty_reply_is_a_reply():
    results = {"": Done(0.25, 0.0), "ab": user("ab")}
    (sample,), _, _ = play(script(**results), {"ab\n": [END]})
    assert sample.tokens.tolist() == [END] and sample.outcome.score == 0.25


def test_reward_functions_judge_a_whole_conversation_and_add_to_its_reward():
    results = script(ab=user("ab"), g=Done(1.0, 1.0))
    samples, _, problems = play(results, {"ab\n?\n": [*ids("g"), END]}, template=FORGETFUL)
    texts = []

    def judge(answers):
        texts.extend(answer.text for answer in answers)
        return [{"score": 0.5, "pred": "", "acc": 0.0} for _ in answers]

    batch = Reward(judge, TOKENIZER, [END])(pack(samples), problems)
    assert texts == ["c\ng"] and batch["score"].tolist() == [1.5, 1.5] and batch["acc"].tolist() == [1.0, 1.0]
    assert batch["reward/acc"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", [*(n for n in GROUP_ESTIMATORS if n not in (*TOKEN_BASELINES, "gdpo")), "as rloo"])
def test_a_conversation_counts_once_in_its_group_however_many_rows_it_has(name, monkeypatch):
    """Each row has the advantage that its conversation has as one row, also with a penalty on one of its rows."""
    score, penalty = {"score": [1.0, 0.0, 0.25]}, 0.5
    whole = Batch.from_rows([[5] * 3, [5], [5]], {"response_mask": [[1.0] * 3, [1.0], [1.0]]}, {"group": [7] * 3})
    rows = Batch.from_rows([[5]] * 5, {"response_mask": [[1.0]] * 5}, {"group": [7] * 5})
    rows = rows.with_rows(conversation=[0, 0, 0, 1, 2], score=[1.0, 1.0, 1.0, 0.0, 0.25])
    one = torch.tensor([0.0, -penalty, 1.0, 0.0, 0.25])
    several = torch.tensor([1.0, 1.0 - penalty, 1.0, 0.0, 0.25])
    algorithm = importlib.import_module("verl_fn.algorithms.policy_optimization")
    monkeypatch.setattr(algorithm, "policy_optimization", lambda options, advantages: advantages)
    estimate = algorithm.rloo(RLOO()) if name == "as rloo" else estimator(GRPO(adv_estimator=name))
    expected = estimate(whole.with_tokens(token_level_rewards=one).with_rows(**score))
    for fields in ({}, {"token_level_scores": rows["score"]}):
        found = estimate(rows.with_tokens(token_level_rewards=several, **fields))
        for name in ("advantages", "returns"):
            torch.testing.assert_close(found[name], expected[name])


def test_draws_depend_on_problem_number_and_turn_alone(chatty):
    """A real engine gives the same rows to all conversations at once, in another order, and one by one."""
    tokenizer, sampler = read_tokenizer(chatty), Sampler(chatty)
    sampler.publish(0, Weights.of(build(chatty, "lm", pretrained=True, key=Key.from_seed(0))[1]))

    def environment(jobs):
        return [user(str(len("".join(job.replies)))) for job in jobs]

    conversing = Conversing(sampler, environment, Renderer(tokenizer, [END]), tokenizer, [END], Limits(3, 6, 9))
    w = Workers({}, conversing, None, tokenizer, Sampling(40, n=2), converses=True)
    asked = requests_of([Problem("", "", id=i) for i in range(12)], w, w.sampling, Key.from_seed(1))
    prefill, computed = sampler.decoder.prefill, []
    sampler.decoder.prefill = lambda rows, slots: computed.append(len(rows)) or prefill(rows, slots)
    whole = {(s.request, s.number): s for s in conversing.generate(asked)}
    assert computed[0] == 1, "all conversations begin with the same message, which is computed once"
    assert len({s.outcome.turns for s in whole.values()}) > 1
    for request in asked[:4]:
        reversed_ones = conversing.generate([asked[-1], request])
        for sample in [*conversing.generate([request]), *reversed_ones]:
            other = whole[sample.request, sample.number]
            for name in ("prompt", "tokens", "log_probs", "mask", "versions"):
                assert torch.allclose(getattr(sample, name).float(), getattr(other, name).float(), atol=1e-5)
            assert sample.outcome == other.outcome


class OneByOne(MockRollout):
    """Takes requests while it draws others, of which it draws the newest one."""

    def grow(self, more, *, version=None):
        open_, samples = [], []
        while (asked := more(samples)) is not None:
            open_ += asked
            samples = self.generate([open_.pop()], version=version) if open_ else []


def test_conversations_go_on_while_the_engine_draws_the_replies_of_others():
    results = {"ab": user("ab"), "ba": user("ba"), "g": Done(1.0, 1.0), "c": user("?")}
    samples = []
    for kind in (MockRollout, OneByOne):
        engine = kind(lambda turn: [*ids("g" if len(turn.prompt) > 6 else "c"), END])
        engine.publish(3, Weights.of({}))
        conversing = Conversing(
            engine, script(**results), Renderer(TOKENIZER, [END]), TOKENIZER, [END], Limits(3, 8, 10)
        )
        w = Workers({}, conversing, None, TOKENIZER, Sampling(40, n=2), converses=True)
        problems = [Problem(prompt, "", id=i) for i, prompt in enumerate(("ab", "ba"))]
        samples.append(conversing.generate(requests_of(problems, w, w.sampling, Key.from_seed(0)), version=3))
    assert tree.equal(pack(samples[0]), pack(samples[1])) and len(samples[0]) == 4
    assert all(sample.outcome.turns == 2 for sample in samples[0])


def test_texts_are_continued_as_whole_conversations_are_rendered():
    """Of a long conversation only the end is made into tokens, and these are those of the whole."""
    renderer, said = Renderer(TOKENIZER, [END]), list(user("ab"))
    for reply, answer in (("cd", "ef"), ("", "g?"), ("h", "a")):
        said.append({"role": "assistant", "content": reply})
        whole = renderer._by_tokens(said, user(answer))
        assert [END, *renderer.continuation(said, user(answer))] == whole == renderer._by_text(said, user(answer))
        said += user(answer)


# As the templates of GLM-4.5 and 4.6: no turn ends, and each begins with a token that ends a reply.
TURNS_BEGIN = (
    "{% set begins = {'user': '<|user|>', 'tool': '<|observation|>', 'assistant': '<|assistant|>'} %}"
    "{% for m in messages %}{{ begins[m.role] + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("by_text", [True, False])
def test_a_reply_may_end_with_the_token_that_begins_the_next_turn(by_text):
    tokenizer, begins = char_tokenizer("abcd"), ["<|user|>", "<|observation|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": [*begins, "<|assistant|>"]})
    tokenizer.chat_template = TURNS_BEGIN
    drawn, other = tokenizer.convert_tokens_to_ids(begins)
    renderer, said = Renderer(tokenizer, [drawn, other]), [*user("a"), {"role": "assistant", "content": "b"}]
    assert renderer._from_end
    renderer._from_end = by_text
    assert tokenizer.decode(renderer.continuation(said, user("c"), drawn=drawn)) == "c<|assistant|>"
    # The model has asked for a tool, and the user answers.
    assert renderer.continuation(said, user("c"), drawn=other) is None
    answer = [{"role": "tool", "content": "d"}]
    assert tokenizer.decode(renderer.continuation(said, answer, drawn=other)) == "d<|assistant|>"


def test_reasoning_that_a_template_always_leaves_out_begins_a_new_row():
    """As R1's template: it shows the model no reasoning of earlier turns, so no row goes on behind one."""
    tokenizer = char_tokenizer("abcd<think>/\n")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}"
        "{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
    )
    renderer = Renderer(tokenizer, [tokenizer.eos_token_id])
    for reply, goes_on in (
        ("<think>dd</think>b", False),
        ("dd</think>b", False),
        ("<think>\n</think>b", True),
        ("b", True),
    ):
        said = [*user("add"), {"role": "assistant", "content": reply}]
        assert (renderer.continuation(said, user("c")) is not None) == goes_on
    tokenizer.chat_template = tokenizer.chat_template.replace(".split('</think>')[-1]", "")
    for reply in ("b<think>q</think>b", "<think>a<think>d</think>b"):  # the template shows it, the tokenizer has no q
        said = [*user("a"), {"role": "assistant", "content": reply}]
        assert Renderer(tokenizer, [tokenizer.eos_token_id]).continuation(said, user("c")) is not None


def test_each_conversation_has_a_seed_of_its_own_for_all_its_turns():
    seen = []

    def environment(jobs):
        seen.append({job.number: job.seed for job in jobs})
        return [Done(1.0, 1.0) if len(job.replies) > 1 else user("ab") for job in jobs]

    for _ in range(2):
        _, asked, _ = play(environment, {}, ("ab", "ba"), n=2)
        assert len({turn.key.seed() for turn in asked}) == len(asked) == 8, "each reply has its own draws"
    assert len(set(seen[0].values())) == 4 and seen == [seen[0]] * 6


def test_a_row_keeps_near_ties_experts_and_uncut_log_probs_of_all_its_replies():
    def sample(size, ties, *experts):
        zeros = torch.zeros(size)
        routed = torch.tensor(experts).reshape(-1, 1, 1)
        return SimpleNamespace(tokens=zeros, log_probs=zeros, full_log_probs=None, mask=zeros, versions=zeros,
                               near_ties=ties, routed_experts=routed)  # fmt: skip

    row = TokenRow([4])
    row.draw(sample(2, 1, 10, 11, 99))
    row.write([5], version=0)
    # What the engine computes again of the first three tokens, it may send to other experts.
    row.draw(sample(1, 2, 20, 21, 22, 23, 99))
    row.parts[0] = (row.parts[0][0], torch.tensor([-0.5, -0.25]), torch.tensor([-1.0, -2.0]), *row.parts[0][3:])
    (request,) = requests_for([[4]], Sampling(8, top_k=2), Key.from_seed(0))
    whole = Conversation(0, attrs.evolve(request, problem={}), 0, 0, rows=[row], reason="done").samples(0)[0]
    assert whole.log_probs.tolist() == [-0.5, -0.25, 0.0, 0.0] and whole.full_log_probs.tolist() == [
        -1.0,
        -2.0,
        0.0,
        0.0,
    ]
    assert row.near_ties == 3 and row.routes().flatten().tolist() == [10, 11, 22, 23, 23]
    (uncut,) = requests_for([[4]], Sampling(8), Key.from_seed(0))
    plain = Conversation(0, attrs.evolve(uncut, problem={}), 0, 0, rows=[row], reason="done").samples(0)[0]
    assert plain.full_log_probs is None


def test_requests_without_a_problem_obey_the_laws_of_engines():
    def engine():
        inner = MockRollout(lambda turn: [3 + turn.key.seed() % 5, *turn.prompt, END, 7])
        return Conversing(inner, script(), Renderer(TOKENIZER, [END]), TOKENIZER, [END], Limits(2, 4, 4))

    check_rollout(engine, prompts=[(3, 4), (5,), (1, 6, 1), (3, 4)])


def test_requests_without_a_problem_are_passed_on():
    engine = MockRollout({(5,): [6, 2]})
    engine.publish(0, Weights.of({}))
    conversing = Conversing(engine, script(), Renderer(TOKENIZER, [END]), TOKENIZER, [END], Limits(2, 4, 4))
    requests = requests_for([[5]], Sampling(4), Key.from_seed(0))
    assert tree.equal(pack(conversing.generate(requests)), pack(engine.generate(requests)))
    with pytest.raises(ArgumentError, match="ask separately"):
        conversing.generate([*requests, attrs.evolve(requests[0], id=1, problem={})])


def test_all_failed_is_an_error():
    with pytest.raises(EnvError, match=r"2 of 2 conversations have failed, problem 7 .*: the environment raised"):
        play(script(ab=Failure("env_crashed", "raised KeyError")), {}, n=2)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the tokenizer has no chat template; take a model folder with"),
        (CHAT_TEMPLATE.replace("eos_token", "''"), "does not end a turn of the assistant with '<eos>'"),
        ("{{ raise_exception('no') }}", "messages of the roles user cannot be rendered"),
    ],
)
def test_a_template_that_cannot_be_rendered_turn_by_turn_is_refused_at_the_start(template, message):
    with pytest.raises(EnvError, match=message):
        play(script(), {}, template=template)


TOOL = {"type": "function", "function": {"name": "feed"}}


def test_the_template_shows_tools_to_the_model_in_every_turn():
    results = script(ab=Opening(user("ab"), (TOOL,)), cd=user("ef"), g=Done(1.0, 1.0))
    replies = {"feed\nab\n": [*ids("cd"), END], "feed\nab\ncdef\n": [*ids("g"), END]}
    (sample,), asked, _ = play(results, replies, room=60)
    assert sample.prompt.tolist() == [1, *ids("feed\nab\n")] and sample.outcome.score == 1.0
    assert asked[1].prompt == (1, *ids("feed\nab\n"), *ids("cd"), END, *ids("ef\n"))
    with pytest.raises(EnvError, match="the chat template does not show them to the model"):
        play(results, replies, template=CHAT_TEMPLATE.replace(TOOLS, ""))
    # None is shown but the first, or but the last.
    several = script(ab=Opening(user("ab"), (TOOL, {"type": "function", "function": {"name": "fed"}})))
    for shown, lacking in (("[:1]", "fed"), ("[-1:]", "feed")):
        with pytest.raises(EnvError, match=f"the chat template does not show them to the model, such as '{lacking}'"):
            play(several, {}, template=CHAT_TEMPLATE.replace("tools or []", f"(tools or []){shown}"))


SAYS_USER = CHAT_TEMPLATE.replace("messages %}", "messages if message.role in ('user', 'assistant') %}")


@pytest.mark.parametrize("first", [True, False])
def test_messages_that_the_template_leaves_out_are_errors(first):
    hidden = {"role": "system" if first else "tool", "content": "cd"}
    results = script(ab=(hidden, *user("ab")) if first else user("ab"), c=(hidden,), g=Done(1.0, 1.0))
    replies = {"cd\nab\n": [*ids("g"), END]} if first else {"ab\nccd\n": [*ids("g"), END]}
    (sample,), _, _ = play(results, replies)
    assert sample.outcome.score == 1.0
    with pytest.raises(EnvError, match=f"problem 7 .*leaves out content of message {0 if first else 2}, of the role"):
        play(results, replies, template=SAYS_USER)


def test_calls_of_first_messages_that_the_template_leaves_out_are_errors():
    call = {"type": "function", "function": {"name": "feed", "arguments": {"a": "b"}}}
    said = {"role": "assistant", "content": "a", "tool_calls": [call]}
    with pytest.raises(EnvError, match=r"problem 7 .*leaves out tool_calls of message 1"):
        play(script(ab=(*user("ab"), said, *user("b"))), {})


def test_fields_of_an_environments_messages_that_the_model_does_not_see_are_named_once():
    reply = {"role": "tool", "content": "d", "tool_call_id": "7", "reward": 0.5, "name": "f", "more": None}
    results = script(ab=user("ab"), c=(reply,), d=(reply,), g=Done(1.0, 1.0))
    replies = {"ab\n": [*ids("c"), END], "ab\ncd\n": [*ids("d"), END], "ab\ncd\ndd\n": [*ids("g"), END]}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        play(results, replies, n=2)
    said = [str(one.message).partition(": ")[2] for one in heard]
    start, end = "the chat template does not show", "of the environment's messages of the role tool, so the model"
    assert said == [f"{start} {name} {end} does not see it" for name in ("name", "reward")]
    seen = CHAT_TEMPLATE + "{{ '' if messages[-1].reward and messages[-1].name else 'c' }}"
    nothing = script(ab=user("ab"), c=(reply | {"reward": False, "name": ""},), d=(reply,), g=Done(1.0, 1.0))
    for found, template, names in ((results, seen, []), (nothing, CHAT_TEMPLATE, ["name", "reward"])):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            play(found, replies, template=template)
        assert [str(one.message).partition("show ")[2].split()[0] for one in heard] == names
    shown = CHAT_TEMPLATE + "{{ 'c' if messages[-1].reward or messages[-1].name else '' }}"
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        play(script(ab=user("ab"), c=(reply | {"reward": False, "name": ""},), g=Done(1.0, 1.0)),
             {"ab\n": [*ids("c"), END], "ab\ncd\n": [*ids("g"), END]}, template=shown)  # fmt: skip
    assert not heard


def test_special_tokens_of_an_environment_are_noted_once():
    results = script(ab=user("ab"), c=user("a<eos>b"), d=user("<eos>"), g=Done(1.0, 1.0))
    replies = {"ab\n": [*ids("c"), END], "ab\ncab\n": [*ids("d"), END], "ab\ncab\nd\n": [*ids("g"), END]}
    with pytest.warns(UserWarning, match="the environment's message has the special token '<eos>'") as heard:
        play(results, replies, n=2)
    assert len([one for one in heard if "special token" in str(one.message)]) == 1


@pytest.mark.parametrize(
    ("messages", "message"),
    [(user("xyz"), "problem 7 .* does not know every character"), (user("a" * 20), "21 tokens|22 tokens")],
)
def test_first_messages_that_cannot_be_used_are_errors(messages, message):
    with pytest.raises(EnvError, match=message):
        play(script(ab=messages), {})


def test_tools_are_looked_for_in_conversations_that_begin_in_another_way():
    """The template shows them below a system message."""
    tokenizer = char_tokenizer("abx" + NEWLINE)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'x' if tools and m.role == 'system' }}{{ m.content }}"
        "{{ eos_token if m.role == 'assistant' }}{{ '\n' }}{% endfor %}"
    )
    renderer, arguments = Renderer(tokenizer, [END]), TemplateArguments(({"name": "add"},))
    told, asked = {"role": "system", "content": "b"}, {"role": "user", "content": "a"}
    for _ in range(2):
        assert tokenizer.decode(renderer.opening([told, asked], arguments)) == "xb\na\n"
        assert tokenizer.decode(renderer.opening([asked, asked])) == "a\na\n"
        with pytest.raises(EnvError, match="does not show them to the model, such as 'add'"):
            renderer.opening([asked, asked], arguments)


def test_a_template_gets_the_arguments_of_the_problem_in_every_turn():
    tokenizer = char_tokenizer("abx" + NEWLINE)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("else '", "else ('x' if mark else '') + '")
    renderer, asked = Renderer(tokenizer, [END]), list(user("a"))
    said, marked = [*asked, {"role": "assistant", "content": "b"}], TemplateArguments(kwargs={"mark": True})
    assert tokenizer.decode(renderer.opening(asked, marked)) == "<bos>ax\n"
    assert tokenizer.decode(renderer.continuation(said, user("b"), marked)) == "bx\n"
    assert tokenizer.decode(renderer.continuation(said, user("b"))) == "b\n"


def test_messages_that_only_some_arguments_or_tools_leave_out_are_errors():
    """What the template shows of one problem says nothing about a problem with other arguments."""
    tokenizer = char_tokenizer("abx" + NEWLINE)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("message['content'] or", "'x' if hide else message['content'] or")
    renderer, asked = Renderer(tokenizer, [END]), user("a")
    hidden, tool = TemplateArguments(kwargs={"hide": True}), TemplateArguments(({"function": {"name": "xx"}},))
    for _ in range(2):
        renderer.check_seen((), asked, TemplateArguments(), "problem 3")
        renderer.check_seen((), asked, tool, "problem 3")
        with pytest.raises(EnvError, match=r"problem 3: .*leaves out content of message 0, of the role user"):
            renderer.check_seen((), asked, hidden, "problem 3")
    for function in ({"name": "axe"}, {"function": {"name": "axe"}}):
        with pytest.raises(EnvError, match=r"problem 3: .* name of a tool 'axe': it lacks 'e'"):
            renderer.check_seen((), asked, TemplateArguments((function,)), "problem 3")
    tokenizer.chat_template = tokenizer.chat_template.replace("if hide", "if tools")
    renderer = Renderer(tokenizer, [END])
    renderer.check_seen((), asked, hidden, "problem 3")
    with pytest.raises(EnvError, match="leaves out content of message 0, of the role user"):
        renderer.check_seen((), asked, tool, "problem 3")
    tokenizer.chat_template = CHAT_TEMPLATE.replace("tools or []", "([] if hide else tools or [])")
    renderer = Renderer(tokenizer, [END])
    assert tokenizer.decode(renderer.opening(asked, tool)) == "<bos>xx\na\n"
    with pytest.raises(EnvError, match="does not show them to the model, such as 'xx'"):
        renderer.opening(asked, attrs.evolve(tool, kwargs={"hide": True}))


def test_a_template_may_leave_out_what_was_said_long_ago():
    """It shows the last two messages, so that each reply begins a row."""
    template = (
        "{% for m in messages[-2:] %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
    )
    results = script(ab=user("ab"), c=user("d"), g=Done(1.0, 1.0))
    samples, asked, _ = play(results, {"ab\n": [*ids("c"), END], "cd\n": [*ids("g"), END]}, template=template)
    assert [TOKENIZER.decode(turn.prompt) for turn in asked] == ["ab\n", "c<eos>d\n"]
    assert [sample.outcome.reason for sample in samples] == ["done", "done"]


@pytest.mark.parametrize(("of_user", "of_reply"), [("", "x"), ("<eos>", "x"), ("x", "<eos>"), ("", "<eos>")])
def test_a_reply_may_end_with_any_of_several_end_tokens(of_user, of_reply):
    """Also where messages of the user end with another one."""
    tokenizer = char_tokenizer("abx" + NEWLINE)
    ending = f"{{{{ '{of_reply}' if m.role == 'assistant' else '{of_user}\\n' }}}}"
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.content }}}}{ending}{{% endfor %}}"
    renderer = Renderer(tokenizer, [tokenizer.convert_tokens_to_ids("x"), END])
    said = [*user("a"), {"role": "assistant", "content": "b"}]
    for messages in (user("b"), (*user("b"), *user("a"))):
        later = "".join(f"{one['content']}{of_user}\n" for one in messages)
        assert tokenizer.decode(renderer.continuation(said, messages)) == later
