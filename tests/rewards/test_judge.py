"""A judge that is asked by its address: a real server, which also misbehaves."""

import time

import pytest
from judge_server import completion, serving

from verl_fn.config import ConfigError, load, notes
from verl_fn.config.options import PATTERN, PROMPT
from verl_fn.config.schema import RewardConfig
from verl_fn.data.tasks import Problem
from verl_fn.rewards import RewardError
from verl_fn.rewards import judge as judge_module
from verl_fn.rewards.judge import Judge, Question, Replies
from verl_fn.rewards.reward import Answer

KEY = "sk-very-secret"


@pytest.fixture
def server():
    with serving() as server:
        yield server


def answers(*texts):
    return [Answer(Problem(f"q{i}", "4", id=i, data_source="mine"), text) for i, text in enumerate(texts)]


def ask(server, folder=None, *, offline=False, default=0.0, prompt="{prompt} {ground_truth} R={response}",
        model="judge-1", **options):  # fmt: skip
    question = Question(model, prompt, PATTERN, default)
    return Judge(f"{server.url}/", question, Replies(folder, offline=offline), **{"timeout": 5.0, **options})


def scores(judge, *texts):
    return [result["score"] for result in judge(answers(*texts))]


def test_scores_are_those_of_the_replies(server, monkeypatch):
    # As a file of keys ends.
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\n")
    judge = ask(server, api_key_env="JUDGE_KEY", concurrency=2)
    results = judge(answers("abc", "", "ab", *"x" * 9))
    assert [r["score"] for r in results[:3]] == [3.0, 0.0, 2.0]
    assert results[0] == {"score": 3.0, "pred": "abc", "judge_unreadable": 0.0}
    assert "q0 4 R=abc" in server.seen and len(server.seen) == 12 and server.most_at_once <= 2
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert server.headers[0]["path"] == "/v1/chat/completions"
    assert judge(answers("\udc80"))[0]["score"] == 1.0


def test_equal_questions_are_asked_once_and_never_again(server, tmp_path):
    judge = ask(server, tmp_path, prompt="R={response}")
    assert scores(judge, "ab", "ab", "abc") == [2.0, 2.0, 3.0] and len(server.seen) == 2
    again = ask(server, tmp_path, prompt="R={response}")
    assert scores(again, "abc", "ab") == [3.0, 2.0] and len(server.seen) == 2
    assert scores(again, "abcd") == [4.0] and len(server.seen) == 3
    server.close()
    assert scores(ask(server, tmp_path, prompt="R={response}", offline=True), "abcd", "ab") == [4.0, 2.0]


def test_replies_that_are_kept_are_those_of_one_model_to_one_question_wherever_it_is_served(server, tmp_path):
    server.reply = lambda body: f"Score: {len(body['model'])}"
    assert scores(ask(server, tmp_path, model="ab"), "r") == [2.0]
    assert scores(ask(server, tmp_path, model="abc"), "r") == [3.0] and len(server.seen) == 2
    assert scores(ask(server, tmp_path, model="abc", prompt="Grade R={response}"), "r") == [3.0]
    assert len(server.seen) == 3
    with serving() as elsewhere:
        for model, score in (("ab", 2.0), ("abc", 3.0)):
            assert scores(ask(elsewhere, tmp_path, model=model), "r") == [score] and not elsewhere.seen
            assert scores(ask(server, tmp_path, model=model, offline=True), "r") == [score]


def test_without_the_network_a_missing_reply_is_an_error(server, tmp_path):
    scores(ask(server, tmp_path), "ab")
    before = (tmp_path / "judge.jsonl").read_bytes()
    with pytest.raises(RewardError, match=r"no reply .*judge.jsonl to 1 of 2 questions.*problem 1 of 'mine'"):
        scores(ask(server, tmp_path, offline=True), "ab", "other")
    assert len(server.seen) == 1 and (tmp_path / "judge.jsonl").read_bytes() == before
    # A line that a run is writing is not cut.
    (tmp_path / "judge.jsonl").write_bytes(torn := before + b'{"question": "a')
    assert scores(ask(server, tmp_path, offline=True), "ab") == [2.0]
    assert (tmp_path / "judge.jsonl").read_bytes() == torn


def test_a_response_cannot_insert_other_parts(server):
    scores(ask(server), "{ground_truth}{prompt}")
    assert server.seen == ["q0 4 R={ground_truth}{prompt}"]


def test_a_question_is_asked_of_the_named_model_without_chance():
    body = Question("judge-1", "R={response}", PATTERN).body(*answers("ab"))
    assert body == {"model": "judge-1", "temperature": 0.0, "messages": [{"role": "user", "content": "R=ab"}]}


@pytest.mark.parametrize("reply", ["I like it.", "", "Score: high", "Score: 9" + "9" * 400, (200, completion(None))])
def test_a_reply_without_a_score_is_counted(server, reply):
    server.reply = lambda body: "Score: 1" if "good" in body["messages"][0]["content"] else reply
    judge = ask(server, default=-0.5)
    with pytest.warns(UserWarning, match=r"1 of 2 replies .* no score by reward.pattern.*unreadable_score = -0.5"):
        results = judge(answers("good", "bad"))
    assert [(r["score"], r["judge_unreadable"]) for r in results] == [(1.0, 0.0), (-0.5, 1.0)]


def test_a_score_of_0_is_read(server):
    server.reply = lambda body: "Score: 0"
    assert scores(ask(server, default=-0.5), "a", "b") == [0.0, 0.0]


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: .5", 0.5), ("Score (0-1): 0.8", 0.8), ("**Score:** -0.25.", -0.25), ("score=1", 1.0),
        ("Score (2)", 2.0),
        ("Score: 1\nScore:\n\n**0**", 0.0), ("Score (out of 1) - 0.5", 0.5),
    ],
)  # fmt: skip
def test_scores_are_read_as_judges_write_them(reply, score):
    assert Question("m", PROMPT, PATTERN).score(reply) == score


def test_a_pattern_whose_group_may_be_missing():
    question = Question("m", "{response}", r"Score:( [0-9]+)?")
    assert [question.score(reply) for reply in ("Score: 1", "Score: 1, or Score:", "Score:")] == [1.0, None, None]


def test_after_a_refusal_no_other_question_is_tried_again(server, monkeypatch):
    monkeypatch.setattr(judge_module, "FIRST_PAUSE", 8.0)
    server.reply = lambda body: (400, "too long") if "bad" in body["messages"][0]["content"] else (503, "overloaded")
    with pytest.raises(RewardError, match="status 400: 'too long'"):
        scores(ask(server, retries=3), "bad", "a", "b")
    assert len(server.seen) <= 3


def test_what_passes_is_tried_again(server):
    broken = iter([(500, "busy"), (429, "slow down"), (200, "<html>"), (200, '{"error": "x"}')])
    server.reply = lambda body: next(broken, "Score: 0.5")
    assert scores(ask(server, retries=4), "a") == [0.5] and len(server.seen) == 5


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((503, "overloaded"), r"had status 503: 'overloaded'"),
        ((200, "<html>no</html>"), r"had no choices\[0\].message.content.*<html>no</html>"),
        ((200, completion([1, 2])), r"had no choices\[0\].message.content"),
        (None, r"took longer than 0.2 s \(reward.timeout\)"),
    ],
)
def test_what_does_not_pass_ends_with_a_named_error(server, reply, message):
    server.reply = lambda body: reply
    with pytest.raises(
        RewardError, match=rf"127.0.0.1.* gave no reply in 2 attempts .*{message}.*problem 0 of 'mine'"
    ):
        scores(ask(server, retries=1, timeout=0.2 if reply is None else 5.0), "a")
    assert len(server.seen) == 2


def test_a_reply_that_comes_drop_by_drop_is_late(server):
    def drip(stream):
        while not server.closing.is_set():
            stream.write(b" ")
            stream.flush()
            time.sleep(0.02)

    server.reply = lambda body: (200, drip)
    with pytest.raises(RewardError, match=r"took longer than 0.2 s"):
        scores(ask(server, retries=0, timeout=0.2), "a")


def test_a_refused_connection_and_a_refused_request_are_named(server, monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server.reply = lambda body: (401, f"Incorrect API key provided: {KEY}")
    with pytest.raises(RewardError, match=r"refuses requests with status 401: .*reward.api_key_env") as caught:
        scores(ask(server, tmp_path, api_key_env="JUDGE_KEY"), "a")
    assert KEY not in str(caught.value) and "[key]" in str(caught.value) and len(server.seen) == 1
    server.reply = lambda body: f"{KEY} Score: 1"
    assert scores(ask(server, tmp_path, api_key_env="JUDGE_KEY"), "a") == [1.0]
    assert KEY not in (tmp_path / "judge.jsonl").read_text()
    server.close()
    with pytest.raises(RewardError, match=r"gave no reply in 2 attempts .*ConnectError"):
        scores(ask(server, retries=1), "b")
    for odd in (f"{KEY}\nx", f"{KEY}\u00e9"):
        monkeypatch.setenv("JUDGE_KEY", odd)
        with pytest.raises(RewardError, match=r"the key in JUDGE_KEY has characters that no key has"):
            ask(server, api_key_env="JUDGE_KEY")
    kept = ask(server, tmp_path, api_key_env="NO_SUCH_KEY", offline=True)
    assert scores(kept, "a") == [1.0], "a replay asks nobody, so it needs no key"
    with pytest.raises(RewardError, match=r"reward.api_key_env names NO_SUCH_KEY, which is not set"):
        ask(server, api_key_env="NO_SUCH_KEY")


def test_replies_before_a_failure_are_kept(server, tmp_path):
    server.reply = lambda body: (400, "too long") if "bad" in body["messages"][0]["content"] else "Score: 1"
    with pytest.raises(RewardError, match="status 400: 'too long'"):
        scores(ask(server, tmp_path, concurrency=1), "a", "b", "bad")
    server.reply = lambda body: "Score: 1"
    asked = len(server.seen)
    assert scores(ask(server, tmp_path), "a", "b", "bad") == [1.0] * 3
    assert len(server.seen) == asked + 1


def test_a_damaged_file_of_replies_is_named_and_a_torn_line_is_asked_again(server, tmp_path):
    file = tmp_path / "judge.jsonl"
    scores(ask(server, tmp_path, concurrency=1), "a", "b")
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    assert scores(ask(server, tmp_path), "a", "b") == [1.0, 1.0] and len(server.seen) == 3
    assert file.read_bytes() == whole
    file.write_bytes(b'{"question": 3}\n' + whole)
    with pytest.raises(RewardError, match=r"judge.jsonl, line 1, is damaged; remove the line"):
        ask(server, tmp_path)


def test_no_folder_keeps_replies_in_memory(server, tmp_path):
    judge = ask(server, tmp_path / "none")
    assert scores(judge, "a") == scores(judge, "a") == [1.0] and len(server.seen) == 1
    assert not (tmp_path / "none").exists()


def test_settings_are_checked():
    secrets = ("me:secret@host/v1", "secret@host", ":secret@host", "host?key=secret", "host#secret")
    wrong = {
        "reward.url=localhost:8000": "must be an address such as http://localhost:8000/v1",
        **{f"reward.url=http://{place}": "must have no user, password or query" for place in secrets},
        "reward.prompt=grade": r"must contain \{response\}",
        "reward.pattern=(": "is no regular expression",
        "reward.pattern=Score": "must have a group around the number",
        "reward.prompt={question}: {response}": r"\{question\} stands for nothing; write \{prompt\}",
        "reward.url=http://h/v1": "reward.model is empty",
    }
    for override, message in wrong.items():
        with pytest.raises(ConfigError, match=message):
            load(overrides=[override])
    with pytest.raises(ConfigError, match=r"reward.url and reward.functions are both set"):
        load(overrides=["reward.url=http://h/v1", "reward.model=m", "reward.functions=a:b"])
    assert RewardConfig(url="http://h/v1", model="m").by_user and not RewardConfig().by_user
    assert "reward.model has no effect without reward.url" in " ".join(notes(None, ["reward.model=m"]))
    assert Question("m", PROMPT, PATTERN).score("**Score**: 0.75") == 0.75
