"""What ``verl-fn levels`` concludes: verdicts, sentences of the report, and what it says of the source trees."""

import json
import subprocess
from types import SimpleNamespace

import attrs
import pytest
from megatron_support import MARKS
from ray.exceptions import RayTaskError

from verl_fn.backends.hf.config import read_config
from verl_fn.backends.hf.new_model import new_model
from verl_fn.benchmarks.tiny_models import tiny_config
from verl_fn.errors import UsageError
from verl_fn.levels import parity, provenance, training, verdict, worker
from verl_fn.levels.provenance import SHOWN
from verl_fn.levels.report import CHECKS, MOST_KEY_LINES, LevelsReport, follow_ups, key_lines, limitations, sentence
from verl_fn.levels.subject import Request, model_folder
from verl_fn.levels.verdict import Check, Deliverable, Outcome, SaysNothing, Verdict, of_level, preflight

pytestmark = MARKS
ASKED = Request(
    (0, 5), "m", "", False, "cuda", "out", engine="vllm", ray="local", data="d", reward_model="r", bridge="b"
)
HELD, MISSED = Check("a", True, "1 of 2"), Check("b", False, "3 of 2")


def level(number, became, reason="", outcomes=()):
    return Deliverable(f"Level {number}: title", became, reason, dict(outcomes))


def test_a_level_passes_only_if_all_was_checked_and_held():
    for outcomes, required, became, reason in (
        ([Outcome((HELD,))], ["a"], Verdict.PASS, "1 checks held"),
        ([Outcome()], [], Verdict.FAIL, "not checked: anything"),
        ([Outcome((HELD,))], ["a", "b"], Verdict.FAIL, "not checked: b"),
        ([Outcome((HELD, MISSED)), Outcome(failed="ended")], ["a"], Verdict.FAIL, "b: 3 of 2; ended"),
        ([Outcome((MISSED,)), Outcome(blocked="no GPU")], ["a"], Verdict.FAIL, "b: 3 of 2"),
        ([Outcome((HELD,)), Outcome(blocked="no GPU")], ["a"], Verdict.BLOCKED, "no GPU"),
    ):
        found = of_level("L", required, {str(i): outcome for i, outcome in enumerate(outcomes)})
        assert (found.verdict, found.reason) == (became, reason)


def test_too_few_gpus_are_seen_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert preflight(tmp_path, "cuda", 2, {}) == [] == preflight(tmp_path, "cpu", 3, {})
    (said,) = preflight(tmp_path, "cuda", 3, {})
    assert ": 3 are needed and 2 are visible; " in said


@pytest.mark.parametrize(
    ("became", "words"),
    [
        ((Verdict.PASS, Verdict.PASS), "level 0, 5 passed with the checkout; level 5 is a learning signal"),
        ((Verdict.PASS, Verdict.NOT_REQUESTED), "level 0 passed with the checkout"),
        ((Verdict.PASS, Verdict.FAIL), "Level 5: title: why"),
        ((Verdict.PASS, Verdict.BLOCKED), "this is no evidence against the provider; Level 5: title: why"),
    ],
)
def test_a_run_of_levels_in_one_sentence(became, words):
    levels = [level(0, became[0]), level(5, became[1], "why")]
    assert sentence(verdict.overall(became), levels, ASKED) == words
    installed = attrs.evolve(ASKED, bridge="")
    assert sentence(Verdict.PASS, levels[:1], installed) == "level 0 passed with the installed Megatron-Bridge"
    assert sentence(Verdict.BLOCKED, [], ASKED).endswith("; no level was run to its end")


def test_what_is_left_to_do():
    one = level(1, Verdict.FAIL, "b: 3 of 2")
    blocked = [level(0, Verdict.BLOCKED, "no GPU"), Deliverable(CHECKS, Verdict.BLOCKED, "no nemo")]
    fine = [level(2, Verdict.PASS), Deliverable(CHECKS, Verdict.SKIPPED, ""), Deliverable("x", Verdict.FAIL, "why")]
    assert list(follow_ups([one, *blocked, *fine])) == [
        "Level 1: title: run level 0 by itself: if it passes, the model is built right and the mistake is in what is "
        "saved or loaded",
        "Level 0: title: remove what blocks it and run it again",
        f"{CHECKS}: run them in Bridge's own environment, and say so with --skip-bridge-tests",
        "x: why",
    ]


def test_what_was_not_shown_is_said_once(tmp_path):
    of = lambda request, *found: list(limitations(request, found, tmp_path))  # noqa: E731
    every = attrs.evolve(ASKED, levels=tuple(range(6)))
    assert of(every) == []
    assert [line for line in of(attrs.evolve(every, levels=(0, 1, 2, 3, 4))) if "5" in line] == [
        "no claim that the model learns: level 5 was not requested"
    ]
    assert [line[:7] for line in of(ASKED)] == [f"level {n}" for n in (1, 2, 3, 4)]
    for change, said in (
        ({"dummy": True}, "weights are random"), ({"bridge": ""}, "no checkout"),
        ({"device": "cpu"}, "ranks were CPUs"),
        ({"engine": "sampler"}, "the embedded engine"), ({"data": ""}, "questions are the project's"),
        ({"reward_model": ""}, "a rule gave"), ({"ray": ""}, "processes were started on this machine"),
    ):  # fmt: skip
        (line,) = of(attrs.evolve(every, **change))
        assert line.startswith(said)
    (tmp_path / "one").mkdir()
    (tmp_path / "one/log.txt").write_text("resource_tracker: leaked\n")
    found = {"one": Outcome(limitations=("half of it",))}
    for became, noise in ((Verdict.PASS, ["one/log.txt has warnings"]), (Verdict.FAIL, [])):
        lines = of(every, level(0, became, "", found))
        assert [line[:24] for line in lines] == ["half of it", *noise]


def test_of_a_long_log_the_first_and_the_last_lines_are_evidence(tmp_path):
    (tmp_path / "one").mkdir()
    lines = [f"step {n}/9 loss" for n in range(1, 10)]
    (tmp_path / "one/log.txt").write_text("\n".join(["noise", *lines]))
    found = list(key_lines(tmp_path, [level(0, Verdict.PASS, "", {"one": Outcome(), "gone": Outcome()})]))
    half = MOST_KEY_LINES // 2
    assert found == [f"one/log.txt:{n + 1}: step {n}/9 loss" for n in (*range(1, half + 1), *range(10 - half, 10))]
    (tmp_path / "one/log.txt").write_text("\n".join(lines[:MOST_KEY_LINES]))
    assert len(list(key_lines(tmp_path, [level(0, Verdict.PASS, "", {"one": Outcome()})]))) == MOST_KEY_LINES


def test_a_report_passes_only_if_a_level_did(tmp_path):
    checks = Deliverable(CHECKS, Verdict.PASS, "3 passed")
    request = attrs.evolve(ASKED, out=str(tmp_path), features=("moe",), dummy=True)
    probed = {"versions": {"torch": "2", "ray": "3"}}
    alone = LevelsReport.of(request, [checks, level(0, Verdict.NOT_REQUESTED)], "c", {}, {})
    assert (alone.result, alone.follow_ups, alone.curves) == (Verdict.BLOCKED, ("none",), {})
    assert LevelsReport.of(request, [checks, level(0, Verdict.FAIL)], "c", {}, {}).result == Verdict.FAIL
    (tmp_path / "level_5_baseline/run").mkdir(parents=True)
    (tmp_path / "level_5_baseline/run/metrics.jsonl").write_text("")
    report = LevelsReport.of(request, [checks, level(0, Verdict.PASS)], "c", {"x": "abc (/x)"}, probed)
    assert report.result == Verdict.PASS and list(report.curves) == ["baseline"]
    assert "Curves" not in report.page(), "a run that ended in its first step has none"
    assert (report.requested, report.model) == ("Level 0, 5 (moe) on cuda, engine vllm", "m (random weights)")
    assert report.evidence == (
        ("x repo", "abc (/x)"), ("Versions", "torch 2, ray 3"), ("Command", "c"),
    )  # fmt: skip
    short = report.pull_request()
    assert (
        "* Level 0: title: **Pass**" in short
        and CHECKS not in short
        and "* x repo: abc" in short
        and "* `c`" in short
    )
    assert "* Not shown: weights are random" in short and "not requested" in short


def test_changed_files_of_a_checkout_are_named(tmp_path):
    assert parity._named(["a", "b", "c"]) == "a, b, c changed"
    assert parity._named(["a", "b", "c", "d"]) == "a, b, c and 1 more changed"
    # A folder that a checkout ignores belongs to none.
    git = lambda *words: subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True)  # noqa: E731
    git("init", "-q")
    for name in ("own", "ignored"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("")
    (tmp_path / ".gitignore").write_text("ignored\n")
    git("add", "own", ".gitignore")
    git("-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "c")
    own = tmp_path / "own"
    assert provenance.repository(own).endswith(f" ({own}), no dirty files")
    (own / "a.py").write_text("1")
    (tmp_path / "other").write_text("")
    for count, end in ((1, ""), (SHOWN, f", ?? f{SHOWN - 2}"), (SHOWN + 2, f", ?? f{SHOWN - 2} and 2 more")):
        for n in range(count - 1):
            (own / f"f{n}").write_text("")
        commit, _, changed = provenance.repository(own).partition(f" ({own}), ")
        assert commit and changed.startswith("M a.py") and changed.endswith(end)
    assert provenance.repository(tmp_path / "ignored") == f"no checkout, {tmp_path}/ignored"


def test_processes_of_a_checkout_find_it_first(tmp_path, monkeypatch):
    (tmp_path / "src/megatron/bridge").mkdir(parents=True)
    (tmp_path / "3rdparty/Megatron-LM").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert provenance.search_path(str(tmp_path)) == [tmp_path / "src"], "a submodule that was not fetched"
    (tmp_path / "3rdparty/Megatron-LM/megatron/core").mkdir(parents=True)
    first = [tmp_path / "src", tmp_path / "3rdparty/Megatron-LM"]
    assert provenance.search_path(str(tmp_path)) == first and provenance.search_path("") == []
    found = provenance.environment(str(tmp_path), "cuda")
    assert found["PYTHONPATH"].split(":") == [*map(str, first), str(provenance.ROOT), "/mine"]
    assert (found["PYTHONSAFEPATH"], found["NVIDIA_TF32_OVERRIDE"], found["TRITON_F32_DEFAULT"]) == ("1", "0", "ieee")
    found = provenance.environment("", "cpu")
    assert (found["CUDA_VISIBLE_DEVICES"], found["OMP_NUM_THREADS"], found["PYTHONPATH"]) == ("", "1", "/mine")
    elsewhere = {"megatron.bridge": f"{first[0]}/x.py", "megatron.core": "/lib/y.py"}
    assert provenance.misplaced(elsewhere, str(tmp_path)).startswith("megatron.core is imported from /lib/y.py")
    assert provenance.misplaced(elsewhere | {"megatron.core": f"{first[1]}/y.py"}, str(tmp_path)) == ""


def test_a_folder_with_weights_is_tested_as_it_is(tmp_path):
    folder = new_model(tmp_path / "m", chars="ab", hidden_size=16)
    assert model_folder(str(folder), tmp_path / "out", tiny=False, device="cpu", engine="sampler") == (folder, False)
    with pytest.raises(UsageError, match=r"--tiny goes with a config, and .* has weights; name .*config\.json"):
        model_folder(str(folder), tmp_path / "out", tiny=True, device="cpu", engine="sampler")
    with pytest.raises(UsageError, match="there is no such folder or config"):
        model_folder(str(tmp_path / "no"), tmp_path / "out", tiny=False, device="cpu", engine="sampler")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arch", ["qwen3", "gpt2", "glm4_moe"])
def test_a_tiny_model_has_heads_that_the_engine_takes(arch, tmp_path):
    """The kernels of vLLM want at least 16 numbers in a head on a GPU in fp32, and 32 on a CPU."""
    (tmp_path / "config.json").write_text(tiny_config(arch, tie_word_embeddings=True).to_json_string(use_diff=False))
    for engine, width in (("sampler", 8), ("vllm", 64)):
        folder, made = model_folder(str(tmp_path), tmp_path / engine, tiny=True, device="cpu", engine=engine)
        config = read_config(folder)
        heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        assert made and heads == width and config.tie_word_embeddings and config.num_hidden_layers == 4


def test_metrics_of_a_run_are_judged_one_by_one():
    fine = {"step": 1, "a": 0.5, "actor/update_skipped": 0.0}
    assert training.finite([fine]) == Check(training.FINITE, True, "3 numbers")
    for bad in ({"a": None}, {"a": float("nan")}, {"actor/update_skipped": 0.5}):
        found = training.finite([fine, {"step": 2, **bad}])
        assert not found.held and found.found == f"{next(iter(bad))} of step 2"
    assert not training.finite([]).held
    lag = "training/rollout_lag/max"
    for lags, verify, held in (
        ([0, 0], "always", True), ([0], "always", False), ([0, 1], "always", False), ([0, 0], "never", False),
    ):  # fmt: skip
        assert training._verified([{"step": 0}, *({lag: one} for one in lags)], verify).held is held
    for steps, held in (([0, 1, 2], True), ([0, 1], False), ([0, 1, 1, 2], False), ([0, 1, 3], False), ([0], False)):
        assert training._completed([{"step": step} for step in steps], 2).held is held
    gap = "rollout_corr/k3_kl"
    for gaps, held in (
        ([5e-9, 1e-9], True),
        ([1e-9, 6e-9], False),
        ([6e-9, 1e-9], False),
        ([-1e-9], True),
        ([], False),
    ):
        assert training.agreement([{"step": 1, gap: one} for one in gaps] + [{"step": 2, gap: None}]).held is held
    phases = {phase: 0.0 for several in training.PHASES.values() for phase in several}
    assert training._ran([phases]).held and not training._ran([]).held
    assert training._ran([phases | {"timing_s/values": None}]).found == "critic did not"


def test_gains_are_from_the_first_to_the_last_evaluation():
    score = "val-core/count/acc/mean@1"
    rows = lambda *values: [{"step": i, score: value} for i, value in enumerate(values)]  # noqa: E731
    for ours, theirs, held in (
        ((0.1, 0.9, 0.3), (0.1, 0.49), [True, True]), ((0.1, 0.15), (0.1, 0.19), [False, True]),
        ((0.1, 0.3), (0.1, 0.6), [True, False]), ((0.1,), (0.1, 0.2), [False, False]),
    ):  # fmt: skip
        assert [check.held for check in training.gains(rows(*ours), rows(*theirs), 0.2 - 1e-9)] == held, ours


def test_an_error_is_evidence_only_once_the_provider_was_asked():
    silent, asked = worker.Progress("level_0"), worker.Progress("level_0", provider=True)
    wrong = ValueError("a  wrong\nshape")
    assert worker.outcome_of(wrong, asked) == Outcome(failed="ValueError: a wrong shape")
    of_a_worker = RayTaskError("run", "its traceback", wrong).as_instanceof_cause()
    assert worker.outcome_of(of_a_worker, asked) == worker.outcome_of(wrong, asked)
    assert worker.outcome_of(wrong, silent).blocked == (
        "level_0 ended before Megatron-Bridge made the model: ValueError: a wrong shape"
    )
    assert worker.outcome_of(SaysNothing("nothing to learn"), asked) == Outcome(blocked="nothing to learn")
    full = worker.outcome_of(OSError(28, "No space left on device"), asked)
    assert full.blocked.startswith("the disk is full; ") and "(OSError: [Errno 28] No space" in full.blocked
    for line, reached in (
        ("megatron-core 1 (/a), megatron-bridge 2 (/b)", True),
        ("megatron-core 1", False),
        ("megatron-bridge 2 (/b)", False),
    ):
        progress = worker.Progress("x")
        progress.say(line)
        progress.say("later")
        assert progress.provider is reached


def test_workers_of_a_cluster_that_cannot_be_used_are_told(monkeypatch, capsys):
    monkeypatch.setattr(training, "plan_of", lambda request, folder: SimpleNamespace(ray=None))
    nodes = {"a": {"files": {}}, "b": {"error": "Traceback\nImportError: no Bridge"}}
    monkeypatch.setattr("verl_fn.driver.ray.on_nodes", lambda ray, probe: nodes)
    assert worker.probe_nodes(attrs.evolve(ASKED, bridge="")) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("BLOCKED ")] == [
        "BLOCKED a worker of b cannot import Megatron-Bridge: ImportError: no Bridge (ImportError: no Bridge)"
    ]
    del nodes["b"]
    assert worker.probe_nodes(attrs.evolve(ASKED, bridge="")) == 0


def test_a_request_is_read_as_it_was_written(tmp_path):
    request = attrs.evolve(ASKED, features=("moe", "vlm"), margin=0.5)
    request.write(tmp_path / "r.json")
    assert (
        Request.read(tmp_path / "r.json") == request
        and json.loads((tmp_path / "r.json").read_text())["margin"] == 0.5
    )
    assert (request.alone().ray, request.alone().engine, request.alone().data) == ("", "sampler", "d")
