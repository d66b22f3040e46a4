"""The command ``verl-fn levels`` around its processes: what it asks them for, and what it leaves behind."""

from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
from megatron_support import MARKS

from verl_fn.backends.hf.config import ModelError
from verl_fn.cli.main import parse
from verl_fn.errors import UsageError
from verl_fn.levels import command, provenance, verdict
from verl_fn.levels.subject import Request
from verl_fn.levels.verdict import Check, Deliverable, Outcome, Verdict

pytestmark = MARKS


def arguments(*words):
    return parse(["levels", "--model", "m", *map(str, words)])


def test_a_system_without_stat_names_no_kind_of_file_system(tmp_path, monkeypatch):
    assert verdict._file_system(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert verdict._file_system(tmp_path) == ""


@pytest.mark.parametrize("name", ["TMPDIR", "SLURM_TMPDIR"])
def test_logs_in_a_folder_of_a_slurm_job_are_told_to_be_lost(name, monkeypatch):
    monkeypatch.setattr(verdict, "_file_system", lambda folder: "ext4")
    job = {"SLURM_JOB_ID": "7", name: "/local/job7"}
    assert "are lost when Slurm job 7 ends" in verdict.goes_away(Path("/local/job7/levels"), job)
    assert not verdict.goes_away(Path("/local/job77/levels"), job)
    assert not verdict.goes_away(Path("/local/job7/levels"), {name: "/local/job7"}), "no job"
    # A variable that is set to nothing names no folder.
    monkeypatch.chdir("/usr")
    assert not verdict.goes_away(Path("/usr/levels"), {"SLURM_JOB_ID": "7", name: ""})


@pytest.mark.parametrize(
    ("words", "engine", "ray"),
    [
        (["--device", "cpu"], "sampler", ""),
        (["--device", "cpu", "--gpus", 2], "sampler", ""),
        (["--device", "cpu", "--engine", "vllm"], "vllm", "local"),
        (["--device", "cpu", "--ray", "here:1"], "sampler", "here:1"),
        (["--gpus", 1], "vllm", "local"),
        (["--engine", "sampler"], "sampler", ""),
        (["--engine", "sampler", "--gpus", 2], "sampler", "local"),
    ],
)
def test_what_is_asked_for_is_what_the_levels_get(words, engine, ray, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        command, "model_folder", lambda model, out, *, tiny, **how: (out.joinpath(model, *how.values()), tiny)
    )
    given = ["--tiny", "--data", "d", "--reward-model", "r", "--seed", 3, "--steps", 4, "--margin", 0.5]
    request, blocked = command._request(arguments(*words, *given), (1, 4), tmp_path)
    args = arguments(*words)
    assert (request.engine, request.ray, blocked) == (engine, ray, [])
    assert request.folder == str(tmp_path / "m" / args.device / engine) and request.dummy
    assert (request.data, request.reward_model, request.bridge) == (str(tmp_path / "d"), str(tmp_path / "r"), "")
    assert (request.levels, request.gpus, request.seed, request.steps, request.margin) == (
        (1, 4), args.gpus, 3, 4, 0.5,
    )  # fmt: skip

    def refuses(*args, **more):
        raise ModelError("too odd")

    monkeypatch.setattr(command, "model_folder", refuses)
    _, blocked = command._request(args, (0,), tmp_path)
    assert blocked == ["there is no model to test: too odd"]


@pytest.mark.parametrize("words", [["--steps", "1"], ["--steps", "2"]])
def test_a_run_of_levels_has_two_steps_and_a_folder_of_its_own(words, tmp_path):
    """One step would compare nothing."""
    args = arguments(*words, "--bridge", tmp_path, "--out", tmp_path / "out")
    with pytest.raises(UsageError, match=r"--steps must be at least 2" if words[1] == "1" else "is no checkout"):
        command.run(args)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("status", "out", "err", "reasons"),
    [
        (0, "fine\n", "", []),
        (1, "BLOCKED node a has no Bridge\nwell\nBLOCKED node b\n", "x", ["node a has no Bridge", "node b"]),
        (0, "BLOCKED node a\n", "", ["node a"]),
        (1, "", "first\nthe last words\n", ["Ray: the last words"]),
        (1, "", "", ["Ray: it printed nothing"]),
    ],
)
def test_why_workers_of_ray_cannot_be_used(status, out, err, reasons, tmp_path, monkeypatch):
    done = SimpleNamespace(stdout=out, stderr=err, returncode=status)
    monkeypatch.setattr(command.subprocess, "run", lambda *args, **more: done)
    request = Request((0,), "m", "m", True, "cpu", str(tmp_path), ray="local")
    assert command._of_workers(request, {}) == reasons
    assert (tmp_path / "ray.log").read_text() == out + err


@pytest.mark.parametrize(
    ("status", "log", "becomes", "reason"),
    [
        (0, "...\n=== 3 passed ===\n", Verdict.PASS, "other.py: 3 passed"),
        (1, "E   assert 0\n=== 1 failed, 2 passed ===\n", Verdict.FAIL, "1 failed, 2 passed; see "),
        (2, "E   ModuleNotFoundError: No module named 'nemo'\n1 error\n", Verdict.BLOCKED, "No module named 'nemo'"),
        (1, "E   ModuleNotFoundError: No module named 'nemo'\n2 failed\n", Verdict.FAIL, "2 failed; see "),
        (1, "", Verdict.FAIL, "other.py: ; see "),
    ],
)
def test_tests_of_a_checkout(status, log, becomes, reason, tmp_path, monkeypatch):
    """The ones that it has, and the ones that are named."""
    first = command.BRIDGE_TESTS[0]
    (tmp_path / first).parent.mkdir(parents=True)
    for name in (first, "other.py"):
        (tmp_path / name).touch()
    ran = []

    def logged(words, file, env, folder):
        ran.append((list(words[-2:]), env, folder))
        file.write_text(log)
        return status

    monkeypatch.setattr(command, "run_logged", logged)
    args = arguments("--bridge", tmp_path, "--bridge-tests", "other.py::test_one")
    found = command._bridge_tests(args, tmp_path, {"PYTHONSAFEPATH": "1", "A": "b"}, [])
    assert found.verdict == becomes and reason.replace("other.py", "other.py::test_one") in found.reason
    assert ran == [([first, "other.py::test_one"], {"PYTHONSAFEPATH": "", "A": "b"}, tmp_path)]
    absent = arguments("--bridge", tmp_path, "--bridge-tests", "other.py", "no.py::test_two")
    found = command._bridge_tests(absent, tmp_path, {}, [])
    assert (found.verdict, found.reason) == (
        Verdict.BLOCKED, f"{tmp_path} has no no.py::test_two of --bridge-tests",
    )  # fmt: skip
    (tmp_path / first).unlink()
    found = command._bridge_tests(arguments("--bridge", tmp_path), tmp_path, {}, [])
    assert (found.verdict, found.reason) == (Verdict.BLOCKED, f"{tmp_path} has no {first}")
    for words, blocked, said in (
        (["--bridge", tmp_path], ["no GPU"], "nothing was run"),
        ([], [], "no checkout was named"),
        (["--bridge", tmp_path, "--skip-bridge-tests", "by hand"], [], "by hand"),
    ):
        found = command._bridge_tests(arguments(*words), tmp_path, {}, blocked)
        assert found.verdict == Verdict.SKIPPED and found.reason.startswith(said)
    assert len(ran) == 1


def test_a_part_on_cpus_has_their_environment_and_imports_from_elsewhere_block(tmp_path, monkeypatch):
    ran = []

    def logged(words, log, env, folder):
        ran.append((words[-1], env.get("CUDA_VISIBLE_DEVICES"), log, folder))
        return 7

    outcomes = iter([Outcome((Check("a", True, "1"),)), Outcome(blocked="no room")])
    monkeypatch.setattr(command, "run_logged", logged)
    monkeypatch.setattr(command, "read_outcome", lambda folder, status: next(outcomes))
    parts = SimpleNamespace(
        title="t", proves="p", parts=lambda request: ["one", "two_on_cpu"], required=lambda request: ["a"]
    )
    monkeypatch.setitem(command.LEVELS, 2, parts)
    request = Request((2,), "m", "m", True, "cuda", str(tmp_path))
    found = command._level(2, request, tmp_path, {"CUDA_VISIBLE_DEVICES": "3"}, [])
    assert [one[:2] for one in ran] == [("one", "3"), ("two_on_cpu", "")]
    assert [one[2] for one in ran] == [tmp_path / name / "log.txt" for name in ("one", "two_on_cpu")]
    assert (found.name, found.verdict, found.reason) == ("Level 2: t", Verdict.BLOCKED, "no room")
    assert command._level(2, request, tmp_path, {}, ["no GPU"]).reason == "no GPU"
    assert command._level(3, request, tmp_path, {}, ["no GPU"]).verdict == Verdict.NOT_REQUESTED
    # What a process imported from elsewhere is no evidence, whatever it found.
    (tmp_path / "src/megatron/bridge").mkdir(parents=True)
    elsewhere = {"rank 0 megatron.bridge": "/installed/x.py", "rank 0 megatron.core": "/installed/y.py"}
    outcomes = iter([Outcome((Check("a", False, "1"),), imports=elsewhere), Outcome((Check("a", True, "1"),))])
    found = command._level(2, attrs.evolve(request, bridge=str(tmp_path)), tmp_path, {}, [])
    assert found.verdict == Verdict.BLOCKED and found.reason.startswith("rank 0: megatron.bridge is imported from")


def test_weights_of_a_level_that_did_not_pass_stay_and_empty_logs_are_told(tmp_path):
    outcomes = {"one": Outcome(), "two": Outcome()}
    for part in outcomes:
        (tmp_path / part / "run").mkdir(parents=True)
        (tmp_path / part / "run/model.safetensors").touch()
        (tmp_path / part / "log.txt").write_text(part)
    weights = lambda: len(list(tmp_path.rglob("*.safetensors")))  # noqa: E731
    failed, passed = (Deliverable("L", became, "", outcomes) for became in (Verdict.FAIL, Verdict.PASS))
    command._drop_weights(tmp_path, failed)
    assert weights() == 2
    command._drop_weights(tmp_path, passed)
    assert weights() == 0
    logs = [str(tmp_path / part / "log.txt") for part in outcomes]
    found = command._capture(tmp_path, [passed])
    assert (found.verdict, found.reason) == (Verdict.PASS, ", ".join(logs))
    (tmp_path / "two/log.txt").write_text("")
    assert command._capture(tmp_path, [passed]).reason == f"two left no log in {tmp_path}"
    (tmp_path / "one/log.txt").unlink()
    found = command._capture(tmp_path, [passed])
    assert (found.verdict, found.reason) == (Verdict.FAIL, f"one, two left no log in {tmp_path}")
    assert command._capture(tmp_path, []).verdict == Verdict.SKIPPED


def test_where_the_tested_packages_came_from(tmp_path, monkeypatch):
    (tmp_path / "src/megatron/bridge").mkdir(parents=True)
    files = {"megatron.bridge": f"{tmp_path}/lib/bridge/x.py", "megatron.core": f"{tmp_path}/lib/core/y.py"}
    probed = {"files": files}
    imported = lambda *given: attrs.astuple(command._imported(*given), recurse=False)[1:3]  # noqa: E731
    assert imported("", {}, ["no GPU"]) == (Verdict.BLOCKED, "no GPU")
    assert imported("", {"error": "x"}, []) == (Verdict.BLOCKED, "nothing was imported")
    assert imported("", probed, []) == (
        Verdict.SKIPPED, f"no --bridge; the installed one was tested: {tmp_path}/lib/bridge/x.py",
    )  # fmt: skip
    assert imported(str(tmp_path), probed, [])[0] == Verdict.BLOCKED
    own = {"files": {"megatron.bridge": f"{tmp_path}/src/megatron/bridge/x.py"}}
    assert imported(str(tmp_path), own, []) == (Verdict.PASS, own["files"]["megatron.bridge"])
    monkeypatch.setattr(provenance, "repository", lambda folder: f"at {folder}")
    us = {"verl_fn": f"at {provenance.ROOT}"}
    installed, core = (
        {"Megatron-Bridge": f"no checkout, {tmp_path}/lib/bridge"},
        {"Megatron-LM": f"at {tmp_path}/lib/core"},
    )
    checkout = {"Megatron-Bridge": f"at {tmp_path}"}
    assert command._repositories("", {}) == us and command._repositories("", probed) == installed | core | us
    assert command._repositories(str(tmp_path), probed) == checkout | core | us
    assert command._repositories(str(tmp_path), {}) == checkout | us
