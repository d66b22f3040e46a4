"""``verl-fn levels``: tiny models pass, planted faults fail, and what is no fault of the model blocks."""

import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import attrs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from megatron_support import HELPERS, MARKS
from safetensors.torch import load_file, save_file
from vision_cases import seeing
from warm_python import warm_python

from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.megatron import importing
from verl_fn.benchmarks.together import RanksFailed
from verl_fn.cli import main
from verl_fn.data.prepare import ALPHABET
from verl_fn.data.tasks import TASKS
from verl_fn.levels import command, parity, provenance, training, verdict
from verl_fn.levels import levels as levels_module
from verl_fn.levels.command import run_logged
from verl_fn.levels.levels import LEVELS
from verl_fn.levels.report import LevelsReport, untested
from verl_fn.levels.subject import Request, model_folder
from verl_fn.levels.verdict import Check, Deliverable, Outcome, Verdict, of_level, trap_in
from verl_fn.levels.worker import PARTS, read_outcome
from verl_fn.state import Key
from verl_fn.steps import sgd

pytestmark = MARKS


SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "vocab_size": 67, "tie_word_embeddings": False,
}  # fmt: skip
MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip

WHOLE = ("llama", "qwen2", "qwen3", "qwen3_moe")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Writes the config of a small model of a family."""

    def of(arch):
        sizes = SIZES | {"qwen3_moe": MOE, "seed_oss": {"attention_bias": False}}.get(arch, {})
        made = transformers.AutoConfig.for_model(arch, **sizes).to_dict()
        file = tmp_path_factory.mktemp(arch) / "config.json"
        file.write_text(json.dumps(made))
        return file

    return of


@pytest.fixture(scope="module")
def models(config, tmp_path_factory):
    """Makes small models of a family once, as the command makes them."""
    made = {}

    def of(arch):
        if arch not in made:
            out = tmp_path_factory.mktemp(arch)
            made[arch] = model_folder(str(config(arch)), out, tiny=False, device="cpu", engine="sampler")[0]
        return made[arch]

    return of


@pytest.fixture
def run(megatron_ranks, models, tmp_path):
    """Runs parts of a level on a rank that stays, and returns the level's verdict."""

    def level(number, arch="llama", fault=None, done=(), folder=None, **options):
        """Takes the outcomes of the parts that are ``done``, and their folders, which lie here already."""
        folder = str(folder or models(arch))
        request = Request((number,), "config.json", folder, True, "cpu", str(tmp_path), **options)
        about, outcomes = LEVELS[number], dict(done)
        for part in about.parts(request):
            if part not in outcomes:
                arguments = json.dumps(attrs.asdict(request)), part, str(tmp_path / part), fault
                outcomes[part] = Outcome.of(megatron_ranks(1).run("levels_cases.part", *arguments)[0])
        return of_level(f"Level {number}", about.required(request), outcomes)

    return level


@pytest.fixture(scope="module")
def sound(megatron_ranks, models, tmp_path_factory):
    """Runs a part of a level without a fault once; returns its folder and its outcome."""
    out, made = tmp_path_factory.mktemp("sound"), {}

    def of(part):
        if part not in made:
            request = Request((int(part[6]),), "config.json", str(models("llama")), True, "cpu", str(out))
            arguments = json.dumps(attrs.asdict(request)), part, str(out / part), None
            made[part] = out / part, Outcome.of(megatron_ranks(1).run("levels_cases.part", *arguments)[0])
        return made[part]

    return of


# For each planted fault: the level and its part, and what the reason says.
FAILS = {
    "frozen_adapters": (0, "all adapters changed: 28 of 28 did not"),
    "one_frozen_adapter": (
        0,
        "all adapters changed: 1 of 28 did not, such as model.layers.0.self_attn.o_proj.lora_A",
    ),
    "changed_base": (0, "the base is bitwise unchanged: 2 changed, such as model.layers.0.mlp.down_proj.weight"),
    "changed_norms": (0, "the base is bitwise unchanged: 1 changed, such as model.norm.weight"),
    "frozen_critic": (0, "the critic changed: "),
    # A head of zeros gives the layers below it no gradient.
    "frozen_value_head": (0, "the critic changed: 22 of 22 did not, such as "),
    "nan_gradients": (0, "metrics are finite: actor/"),
    "nan_in_one_gradient_of_the_critic": (0, "metrics are finite: critic/"),
    "stale_weights": (0, "engine and trainer agree: "),
    "other_weights": (0, "engine and trainer agree: "),
    "without_reference": (0, "every role ran: reference did not"),
    "without_verification": (0, "published weights were verified: "),
    "one_step_only": (0, "published weights were verified: "),
    "dropped_mapping": (0, "has no mapping for 2 parameters, such as ['decoder.layers.0.mlp.linear_fc2.weight"),
    "swapped_gate_and_up": (0, "gradients equal transformers': model.layers."),
    "swapped_norms": (0, "gradients equal transformers': model.layers."),
    "wrong_rotary_base": (0, "rotary embedding"),
    "wrong_activation": (0, "activation"),
    "wrong_layers": (0, ""),
    "provider_that_raises": (0, "rope_theta"),
    "wrong_on_one_rank": (2, "above its bar: sft grad_norm"),
    "frozen_parameter": (3, "all parameters changed: 1 of "),
    "router_without_gradient": (4, "all routers changed: "),
    "no_replay": (4, "routers replayed recorded experts: 0 calls"),
}
# On the process that continues a run.
NOT_RESUMED = {
    "resume_without_schedule": "the resumed run equals the uninterrupted one in every bit: ",
    "resume_without_moments": "the resumed run equals the uninterrupted one in every bit: ",
    "resume_in_half_precision": "the resumed run equals the uninterrupted one in every bit: ",
    "resume_with_other_data": "so do the metrics of its last step: ",
    "adapter_of_other_scale": "PEFT loads the adapter: ",
    "merged_without_adapters": "transformers loads the merged model: ",
}
BLOCKS = {
    "missing_modelopt": "a package is missing: modelopt; install modelopt",
    "full_disk": "the disk is full; move HF_HOME",
    "engine_that_does_not_start": "level_0 ended before Megatron-Bridge made the model: RuntimeError: Engine core",
    "reward_that_does_not_load": "level_0 ended before Megatron-Bridge made the model: ImportError",
    "rocr_beside_cuda": "ROCR_VISIBLE_DEVICES is set beside CUDA_VISIBLE_DEVICES; unset",
    "bridge_of_another_version": "this backend was tested with 0.1",
}


# These faults of level 0 are seen beside transformers, and the others in the run.
OF_THE_MODEL = {
    "dropped_mapping", "swapped_gate_and_up", "swapped_norms", "wrong_rotary_base", "wrong_activation",
    "wrong_layers", "provider_that_raises",
}  # fmt: skip


@pytest.fixture
def level_0(run, sound):
    """Runs the part of level 0 that sees a fault, beside the other part without it."""
    parts = ["level_0_model", "level_0"]

    def of(fault):
        other = parts[fault in OF_THE_MODEL]
        return run(0, fault=fault, done={other: sound(other)[1]})

    return of


@pytest.mark.parametrize("fault", FAILS)
def test_planted_faults_fail(run, level_0, fault):
    level, reason = FAILS[fault]
    found = run(level, "qwen3_moe" if level == 4 else "llama", fault) if level else level_0(fault)
    assert found.verdict == Verdict.FAIL and reason in found.reason, found.reason


@pytest.mark.parametrize("level", [0, 2, 3])
def test_levels_pass_without_a_fault(run, sound, monkeypatch, level):
    """With one layout of level 2 and none of level 3; tests below make the other levels pass."""
    monkeypatch.setattr(parity, "DENSE", parity.DENSE[2:3])
    monkeypatch.setattr(parity, "SHARDED", ())
    done = {part: sound(part)[1] for part in ("level_0_model", "level_0")} if level == 0 else {}
    found = run(level, fault="few_layouts", done=done)
    assert found.verdict == Verdict.PASS, found.reason


@pytest.fixture
def resume(run, sound, tmp_path):
    """Continues a copy of the stopped run, and returns the verdict of level 1."""
    folder, outcome = sound("level_1")
    shutil.copytree(folder, tmp_path / "level_1", symlinks=True)
    return lambda fault: run(1, fault=fault, done={"level_1": outcome})


def test_a_run_that_is_resumed_elsewhere_passes(resume):
    found = resume(None)
    assert found.verdict == Verdict.PASS, found.reason


@pytest.mark.parametrize("fault", NOT_RESUMED)
def test_faults_of_a_resumed_run_fail(resume, fault):
    found = resume(fault)
    assert found.verdict == Verdict.FAIL and NOT_RESUMED[fault] in found.reason, found.reason


@pytest.mark.parametrize("fault", BLOCKS)
def test_what_is_no_fault_of_the_model_blocks(level_0, fault):
    found = level_0(fault)
    assert found.verdict == Verdict.BLOCKED and BLOCKS[fault] in found.reason, found.reason


@pytest.fixture
def levels(megatron_python, monkeypatch, capsys, tmp_path):
    """Runs the command, whose processes have imported Megatron already; returns the status and the report."""
    monkeypatch.setattr(sys, "executable", megatron_python)

    def command(*words):
        status = main(["levels", *map(str, words), "--out", str(tmp_path / "out")])
        report = json.loads((tmp_path / "out/report.json").read_text())
        return status, report, {one["name"].partition(":")[0]: one for one in report["deliverables"]}

    return command


@pytest.mark.slow
@pytest.mark.parametrize("arch", WHOLE)
def test_levels_pass(levels, config, arch, tmp_path):
    asked = [0, 1, 2, 3, *([4] if arch == "qwen3_moe" else [])]
    status, report, of = levels(*asked, "--model", config(arch), "--device", "cpu")
    found = {number: (of[f"Level {number}"]["verdict"], of[f"Level {number}"]["reason"]) for number in asked}
    assert {verdict for verdict, _ in found.values()} == {"Pass"} and (status, report["result"]) == (0, "Pass"), found
    assert of["Level 5"]["verdict"] == "Not requested" and of["Log capture"]["verdict"] == "Pass"
    for name in ("report.txt", "report.md", "report.html", "pull_request.md"):
        assert "Pass" in (tmp_path / "out" / name).read_text()


def test_a_command_that_is_ended_leaves_a_report_and_no_weights_of_levels_that_passed(
    levels, config, tmp_path, monkeypatch
):
    out = tmp_path / "out"

    inner = command._level

    def one(level, request, folder, env, blocked):
        if blocked:
            return inner(level, request, folder, env, blocked)
        if level == 1:
            raise SystemExit(124)
        part = out / "level_0/run"
        part.mkdir(parents=True)
        (part / "model.safetensors").write_bytes(bytes(9))
        (out / "level_0/log.txt").write_text("held")
        return Deliverable("Level 0: smoke", Verdict.PASS, "held", {"level_0": Outcome()})

    monkeypatch.setattr(command, "_level", one)
    with pytest.raises(SystemExit, match="124"):
        levels(0, 1, "--model", config("llama"), "--device", "cpu")
    report = json.loads((out / "report.json").read_text())
    of = {one["name"].partition(":")[0]: (one["verdict"], one["reason"]) for one in report["deliverables"]}
    assert (report["result"], of["Level 0"]) == ("Blocked", ("Pass", "held"))
    assert of["Level 1"] == ("Blocked", "the command ended before it") and of["Level 2"][0] == "Not requested"
    assert [file.name for file in (out / "level_0").rglob("*.*")] == ["log.txt"]


def test_level_5_compares_with_a_baseline(levels, config, tmp_path):
    wider = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "head_dim": 16, "vocab_size": 4096}
    wider.write_text(json.dumps(json.loads(config("llama").read_text()) | sizes))
    words = ["--model", wider, "--device", "cpu", "--steps", "8", "--margin", "0.02"]
    status, report, of = levels(5, *words)
    assert (status, of["Level 5"]["verdict"]) == (0, "Pass"), of["Level 5"]["reason"]
    assert set(report["curves"]) == {"megatron", "baseline"}
    page = (tmp_path / "out/report.html").read_text()
    assert page.count("<svg") > 5 and "converge" not in report["sentence"]
    # The same samples, learned from by two backends.
    curves = [training.held_out(rows_of(tmp_path / "out" / name / "run")) for name in ("level_5", "level_5_baseline")]
    assert [step for step, _ in curves[0]] == [step for step, _ in curves[1]] and curves[0][0] == curves[1][0]


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


STEADY = [{"step": 0, "val-aux/count/reward/mean@1": 0.5}] + [
    {"step": i, "actor/grad_norm": 1.0 + i, "actor/entropy": 2.0 - 0.1 * i, "actor/ppo_kl": 0.001, "loss": 0.1}
    for i in (1, 2, 3)
]
UNSTEADY = {
    "no gradient": ({"actor/grad_norm": 0.0}, training.GRADIENTS),
    "a constant gradient": ({"actor/grad_norm": 2.0}, training.GRADIENTS),
    "a constant entropy": ({"actor/entropy": 1.0}, training.ENTROPY),
    "no entropy": ({"actor/entropy": 0.0}, training.ENTROPY),
    "more entropy than there is": ({"actor/entropy": 9.0}, training.ENTROPY),
    "a policy that jumps": ({"actor/ppo_kl": -3.0}, training.KL),
    "a loss that is not finite": ({"loss": None}, "metrics are finite"),
    "skipped updates": ({"actor/update_skipped": 0.5}, "metrics are finite"),
}


@pytest.mark.parametrize("fault", UNSTEADY)
def test_runs_that_do_not_learn_fail_level_5(fault):
    change, name = UNSTEADY[fault]
    assert all(check.held for check in training.trends(STEADY, 67))
    found = training.trends([row | change if row["step"] else row for row in STEADY], 67)
    assert {check.name for check in found if not check.held} == {name}


def test_steps_whose_answers_are_all_as_good_need_no_gradient():
    """Their advantages are 0. A step with advantages and no gradient stays a fault, and no advantages at all."""
    none = {"critic/advantages/max": 0.0, "critic/advantages/min": 0.0}
    still = {"step": 4, "actor/grad_norm": 0.0, "actor/entropy": 1.0, "actor/ppo_kl": 0.0}
    held = lambda rows: {check.name: check.held for check in training.trends(rows, 67)}[training.GRADIENTS]  # noqa: E731
    assert held([*STEADY, still | none])
    assert not held([*STEADY, still]) and not held([*STEADY, still | none | {"critic/advantages/min": -0.1}])
    assert not held([row | none for row in STEADY])


@pytest.mark.parametrize("ours, theirs, verdict", [(0.3, 0.3, None), (0.02, 0.3, False), (0.02, 0.02, "blocked")])
def test_a_run_as_flat_as_its_baseline_says_nothing(models, tmp_path, monkeypatch, ours, theirs, verdict):
    request = Request((5,), "config.json", str(models("llama")), True, "cpu", str(tmp_path), margin=0.05)
    curves = iter((ours, theirs))
    monkeypatch.setattr(training, "train", lambda plan, say: None)
    monkeypatch.setattr(
        training,
        "read_metrics",
        lambda run: [
            *STEADY,
            {
                "step": 4,
                "actor/grad_norm": 9.0,
                "actor/entropy": 1.0,
                "val-aux/count/reward/mean@1": 0.5 + next(curves),
            },
        ],
    )
    monkeypatch.setattr(training, "parameters", lambda folder: {"a": torch.tensor(float(folder.name == "actor"))})
    (tmp_path / "run/checkpoints/step_4").mkdir(parents=True)
    if verdict == "blocked":
        with pytest.raises(training.SaysNothing, match=r"neither .* gained 0\.05 .* step 4: 0\.520"):
            training.compare(request, tmp_path / "run", tmp_path / "baseline", print)
    else:
        checks = training.compare(request, tmp_path / "run", tmp_path / "baseline", print)
        assert [check.name for check in checks if not check.held] == (
            [] if verdict is None else [training.SIGNAL, training.BASELINE]
        )


def test_pretrained_weights_are_rewarded_for_what_they_write_from_the_start(models, tmp_path):
    request = Request((5,), "model", str(models("llama")), False, "cpu", str(tmp_path))
    plan = training.plan_of_learning(request, tmp_path, "local")
    assert plan.reward.functions == ("verl_fn.scores:even_share",) and plan.roles["actor"].optim.lr == 2e-5
    assert training.after_warm_up(request, tmp_path) is request


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """Files with verl's columns, as GSM8K's."""
    folder = tmp_path_factory.mktemp("sums")
    for split, count in (("train", 64), ("test", 8)):
        rows = [
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"{i % 7} + {i % 5}"}],
                "reward_model": {"style": "rule", "ground_truth": str(i % 7 + i % 5)},
            }
            for i in range(count)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    return str(folder)


@pytest.mark.parametrize("level", [0, 5])
def test_data_and_a_reward_model_of_ones_own(run, models, sums, level, tmp_path):
    judge = Local(models("llama"), sgd(0.1), head="value")
    state = judge.init(Key.from_seed(3))
    for spread, becomes, reason in ((0.0, "Blocked", "gave every response the reward 0"), (1.0, "Pass", "held")):
        leaves = {
            name: spread * torch.randn(t.shape) if name.startswith("score") else t for name, t in state.params.items()
        }
        judge.save(attrs.evolve(state, params=attrs.evolve(state.params, leaves=leaves)), tmp_path / "judge")
        options = {"data": sums, "reward_model": str(tmp_path / "judge"), "steps": 3, "margin": -100.0}
        found = run(level, **options)
        assert found.verdict == becomes and reason in found.reason, found.reason
        for part in LEVELS[level].parts(Request((level,), "", "", True, "cpu", "")):
            shutil.rmtree(tmp_path / part)


def test_layouts_that_the_model_cannot_have_block(models, tmp_path, monkeypatch):
    """The others are compared."""
    cause = "LayoutError: tp = 2 does not divide the model's 9 attention heads"

    def of_layout(folder, text, device, role):
        if "tp=2" in text:
            raise RanksFailed("", cause)
        errors = {"gradient": 0.0, "update_from_reference": 0.0}
        one = {"loss": 1.0, "second_loss": 1.0, "grad_norm": 1.0, "scale": 1.0, "errors": errors, "worst": "a"}
        return folder, [one] * 2

    monkeypatch.setattr(parity, "_run", of_layout)
    monkeypatch.setattr(parity.first_step, "prepare", lambda *args: None)
    request, layouts = Request((2,), "", str(models("llama")), True, "cpu", ""), parity.DENSE[2:]
    outcome = parity.compare_layouts(request, layouts, "cpu", tmp_path, lambda line: None)
    found = of_level("Level 2", [parity.name_of(text) for text in layouts], {"level_2": outcome})
    assert found.verdict == Verdict.BLOCKED and f"{layouts[0]} does not fit the model: {cause}" in found.reason
    assert [(check.name, check.held) for check in found.checks] == [(parity.name_of(layouts[1]), True)]


@pytest.mark.parametrize("level", [2, 3])
def test_layouts_that_need_more_gpus_have_a_process_on_cpus(level, models):
    few, enough = (Request((level,), "", str(models("llama")), True, "cuda", "", gpus=gpus) for gpus in (1, 8))
    assert LEVELS[level].parts(few) == [f"level_{level}", f"level_{level}_on_cpu"]
    assert LEVELS[level].parts(enough) == [f"level_{level}"] and set(LEVELS[level].parts(few)) <= PARTS.keys()


def test_the_layouts_of_megatron_fsdp_that_need_more_gpus_run_on_cpus(megatron_ranks, models, tmp_path):
    request = Request((3,), "config.json", str(models("llama")), True, "cuda", str(tmp_path))
    arguments = json.dumps(attrs.asdict(request)), "level_3_on_cpu", str(tmp_path / "level_3_on_cpu"), None
    outcome = Outcome.of(megatron_ranks(1).run("levels_cases.part", *arguments)[0])
    assert [check.name for check in outcome.checks] == [parity.name_of("megatron:dp=2,fsdp=true")], outcome
    assert all(check.held for check in outcome.checks)


def test_random_weights_learn_nothing_from_the_answers_of_data(run, sums):
    found = run(5, data=sums, steps=3)
    assert found.verdict == Verdict.BLOCKED and "the rule of the data gave every response" in found.reason


def test_random_weights_of_a_wider_model_learn_at_a_smaller_rate(models, tmp_path, monkeypatch):
    request = Request((5,), "config.json", str(models("llama")), True, "cpu", str(tmp_path))
    rates = []
    for width in (training.WIDTH, 16):  # the model is 32 wide
        monkeypatch.setattr(training, "WIDTH", width)
        rates.append(training.plan_of_learning(request, tmp_path, "local").roles["actor"].optim.lr)
    assert rates == pytest.approx([training.RATE * training.OF_REWARDS, training.RATE * training.OF_REWARDS / 2])
    # Without a warm-up they learn at its rate.
    data = training.plan_of_learning(attrs.evolve(request, data=str(tmp_path)), tmp_path, "local")
    assert data.roles["actor"].optim.lr == training.RATE / 2


@pytest.mark.parametrize("error", [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 18.00 MiB. GPU 1 has a total capacity of "
    "139.80 GiB of which 10.31 MiB is free. Process 9605 has 36.24 GiB memory in use.",
    "ValueError: Free memory on device cuda:0 (60.1/139.8 GiB) on startup is less than desired",
    "AssertionError: Error in memory profiling. Initial free memory 129.99 GiB, current free memory 138.44 GiB.",
])  # fmt: skip
def test_a_full_gpu_is_a_trap(error):
    assert trap_in(error).startswith("the memory of a GPU is full; end what else runs")


@pytest.mark.parametrize(("module", "package"), [
    ("modelopt.torch", "modelopt"), ("megatron.energon", "megatron.energon"), ("megatron.bridge.models.new", None),
])  # fmt: skip
def test_a_missing_package_is_a_trap_and_a_missing_module_of_bridge_is_not(module, package):
    trap = trap_in(f"ModuleNotFoundError: No module named '{module}'")
    assert trap.startswith(f"a package is missing: {package}; install {package} in") if package else trap == ""


def test_a_model_that_fills_a_gpu_by_itself_is_no_trap():
    assert not trap_in("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 900.00 GiB. GPU 0 has a total "
                       "capacity of 79.10 GiB of which 78.50 GiB is free.")  # fmt: skip


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--device", "cuda"], "a GPU is too few: 1 are needed and 0 are visible"),
        (["--device", "cpu", "--ray", "127.0.0.1:1"], "no Ray cluster answers"),
        (["--device", "cpu", "--data", "no/such/folder"], "level_0 ended before Megatron-Bridge made the model"),
        (["--device", "cpu", "--reward-model", "no/such/folder"], "level_0 ended before Megatron-Bridge made the"),
    ],
    ids=str,
)
def test_an_environment_that_cannot_test_the_model_blocks(levels, config, words, reason):
    status, report, of = levels(0, "--model", config("llama"), *words)
    assert (status, report["result"]) == (3, "Blocked") and reason in of["Level 0"]["reason"], of["Level 0"]
    assert report["sentence"].startswith("this is no evidence against the provider")


def test_a_local_build_of_a_tested_version_is_tested():
    name, (tested, *_) = next(iter(importing.TESTED.items()))
    assert not [*untested({name: tested}), *untested({name: f"{tested}+cu12"}), *untested({"torch": "0"})]
    for other in ("0.0.1", "0.0.1+cu12"):
        (line,) = untested({name: other})
        assert line.startswith(f"this project was tested with {name} {tested}") and line.endswith(f"not with {other}")


def test_without_a_number_level_0_is_tested(levels, config):
    _, report, of = levels("--model", config("llama"), "--device", "cuda")
    requested = [name for name, one in of.items() if name.startswith("Level") and one["verdict"] != "Not requested"]
    assert requested == ["Level 0"] and report["result"] == "Blocked"


@pytest.mark.parametrize(
    ("content", "reason"),
    [({"vocab_size": 5}, "has a vocabulary of 5"), ({"model_type": "no_such"}, "has the model type 'no_such'")],
    ids=["vocabulary", "family"],
)
def test_a_config_of_which_no_model_can_be_made_blocks(levels, config, tmp_path, content, reason):
    """Whatever the name of the file."""
    read = json.loads(Path(config("llama")).read_text())
    (file := tmp_path / "other.json").write_text(json.dumps(read | content))
    status, _, of = levels(0, 4, "--model", file, "--device", "cpu")
    assert status == 3 and reason in of["Level 0"]["reason"] and reason in of["Level 4"]["reason"]


def half(folder, **changed):
    """A tiny folder of weights in bf16, with other characters of its tokenizer if they are given."""
    new_model(folder, arch="llama", head_dim=32, **({"chars": TASKS["count"].alphabet} | changed))
    file, config = folder / "model.safetensors", folder / "config.json"
    save_file({name: t.bfloat16() for name, t in load_file(file).items()}, file, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))
    return folder


def test_weights_in_bf16_are_tested_in_fp32(tmp_path):
    """On a GPU a run would take the folder's dtype, and rounding in bf16 is above the bars."""
    folder = str(half(tmp_path / "half"))
    request = Request(levels=(0,), model=folder, folder=folder, dummy=False, device="cpu", out=str(tmp_path))
    plan = training.plan_of(request, tmp_path / "run")
    assert plan.rollout.dtype == plan.roles["actor"].dtype == plan.roles["critic"].dtype == "float32"


def test_vllm_starts_without_compiling_and_beside_other_runs(models, tmp_path):
    """A start is most of a level's time, and the steps of a level are few."""
    folder = str(models("llama"))
    request = Request((0,), folder, folder, False, "cuda", str(tmp_path), engine="vllm", ray="local")
    engine = training.plan_of(request, tmp_path / "run").rollout
    assert engine.enforce_eager and engine.engine_kwargs["kv_cache_memory_bytes"] == 4 * 2**30


def test_questions_that_the_tokenizer_cannot_write_block(run, tmp_path):
    found = run(0, folder=half(tmp_path / "half", chars="ab"))
    assert found.verdict == Verdict.BLOCKED and "do not suit the model's tokenizer" in found.reason, found


def test_bars_of_a_first_step_grow_with_the_layers():
    wanted = [{"loss": 1.0, "second_loss": 1.0, "grad_norm": 1.0, "scale": 1.0}] * 2
    errors = {"gradient": 5e-5, "update_from_reference": 0.0}
    found = [{**wanted[0], "errors": dict(errors), "worst": "a"}] * 2
    assert [parity.check_of("fsdp:2", found, wanted, layers).held for layers in (1, 2, 9, 10, 30)] == [
        False, False, False, True, True,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A model that answers questions about pictures."""
    return seeing(tmp_path_factory.mktemp("pictures"), "qwen3_vl", chars=ALPHABET, num_hidden_layers=3)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (None, ""),
        ("tower_without_gradient", "all of the tower changed: 45 of 45 did not"),
        ("features_in_another_order", "engine and trainer agree: "),
    ],
)
def test_images(run, pictures, fault, reason):
    found = run(4, fault=fault, folder=pictures, features=("vlm",))
    assert (found.verdict, reason in found.reason) == (Verdict.FAIL if fault else Verdict.PASS, True), found.reason


@pytest.mark.parametrize("feature", ["vlm", "mtp", "qat"])
def test_features_whose_code_does_not_run_are_blocked(run, feature):
    found = run(4, features=(feature,))
    assert found.verdict == Verdict.BLOCKED and found.checks == [], found


def checkout(folder):
    """A checkout of Megatron-Bridge: what is installed, with another copy of Llama's bridge."""
    installed = Path(importlib.metadata.distribution("megatron-bridge").locate_file("megatron/bridge"))
    own = folder / "src/megatron/bridge"
    (own / "models/mine").mkdir(parents=True)
    for file in installed.iterdir():
        if file.name not in ("__init__.py", "models", "__pycache__"):
            (own / file.name).symlink_to(file)
    for file in (installed / "models").iterdir():
        if file.name not in ("__init__.py", "__pycache__"):
            (own / "models" / file.name).symlink_to(file)
    shutil.copy(installed / "__init__.py", own)
    text = (installed / "models/__init__.py").read_text()
    (own / "models/__init__.py").write_text(text + "\nfrom megatron.bridge.models.mine import bridge\n")
    llama = (installed / "models/llama/llama_bridge.py").read_text()
    mine = llama.replace("LlamaForCausalLM", "SeedOssForCausalLM").replace("LlamaBridge", "SeedOssBridge")
    mine = mine.replace('model_type="llama"', 'model_type="seed_oss"')
    key, value = 'k="model.layers.*.self_attn.k_proj.weight"', 'v="model.layers.*.self_attn.v_proj.weight"'
    assert mine.count(key) == mine.count(value) == 1
    # The mistake stands in the same file, so that one process that has imported it serves both tests.
    wrong = mine.replace(key, key.replace("k_proj", MISTAKE["k"])).replace(
        value, value.replace("v_proj", MISTAKE["v"])
    )
    (own / "models/mine/__init__.py").write_text("")
    (own / "models/mine/bridge.py").write_text("import os\n" + wrong)
    return folder


MISTAKE = {
    "k": '" + ("v_proj" if "MISTAKE" in os.environ else "k_proj") + "',
    "v": '" + ("k_proj" if "MISTAKE" in os.environ else "v_proj") + "',
}


@contextlib.contextmanager
def python_beside(folder, warm, imports, more=""):
    """Yields a Python that has a checkout on its path, and has run ``more``; ``imports`` is a file to write.

    The warm Python of all tests has read its own PYTHONPATH, and has imported no Megatron.
    """
    own = {name: provenance.environment(str(folder), "cpu")[name] for name in ("PYTHONPATH", importing.UNTESTED)}
    path = own["PYTHONPATH"].split(os.pathsep)
    imports.write_text(f"import os, runpy, sys\nos.environ.update({own})\nsys.path[:0] = {path}\n{more}")
    with warm_python(imports, python=warm, environment=os.environ | own) as python:
        yield python


@pytest.fixture(scope="module")
def bridge(warm, tmp_path_factory):
    """A checkout with a provider of its own, and a Python that has imported it."""
    folder = checkout(tmp_path_factory.mktemp("bridge"))
    imports = tmp_path_factory.mktemp("imports") / "imports.py"
    more = f"runpy.run_path({str(HELPERS / 'megatron_imports.py')!r})\n"
    with python_beside(folder, warm, imports, more) as python:
        yield SimpleNamespace(folder=folder, python=python)


@pytest.mark.parametrize("mistake", [False, True])
def test_a_provider_in_a_checkout(levels, bridge, config, monkeypatch, mistake):
    monkeypatch.setattr(sys, "executable", bridge.python)
    if mistake:
        monkeypatch.setenv("MISTAKE", "1")
    words = ["--model", config("seed_oss"), "--device", "cpu", "--skip-bridge-tests", "run by hand"]
    status, _report, of = levels(0, "--bridge", bridge.folder, *words)
    assert (
        of["Local Bridge import in verl_fn"]["verdict"] == "Pass"
        and of["Bridge-side checks"]["reason"] == "run by hand"
    )
    place = str(bridge.folder / "src/megatron/bridge/__init__.py")
    assert of["Level 0"]["outcomes"]["level_0"]["imports"]["megatron.bridge"] == place
    if mistake:
        reason = of["Level 0"]["reason"]
        assert (status, of["Level 0"]["verdict"]) == (1, "Fail") and "gradients equal transformers'" in reason, reason
        worst = reason.partition("gradients equal transformers': ")[2].partition(" ")[0]
        assert "k_proj" in worst or "v_proj" in worst, reason
    else:
        assert (status, of["Level 0"]["verdict"]) == (0, "Pass"), of["Level 0"]["reason"]


def test_an_import_from_elsewhere_blocks(levels, config, warm, monkeypatch, tmp_path):
    """Without its ``__init__.py`` a checkout's package gives way to the installed one."""
    (tmp_path / "mine/src/megatron/bridge").mkdir(parents=True)
    words = ["--bridge", tmp_path / "mine", "--model", config("llama"), "--device", "cpu"]
    with python_beside(tmp_path / "mine", warm, tmp_path / "imports.py") as python:
        monkeypatch.setattr(sys, "executable", python)
        status, _report, of = levels(0, *words)
    assert (status, of["Level 0"]["verdict"]) == (3, "Blocked")
    assert "nothing that passes or fails is evidence about the checkout" in of["Level 0"]["reason"]


def test_one_rank_that_imports_another_package_blocks(tmp_path):
    (tmp_path / "src/megatron/bridge").mkdir(parents=True)
    modules = ("megatron.bridge", "megatron.core")
    imports = {
        f"rank {rank} {name}": f"{tmp_path}/src/{name.replace('.', '/')}/x.py"
        for rank in range(3)
        for name in modules
    }
    assert not command._elsewhere(imports, str(tmp_path))
    imports["rank 2 megatron.bridge"] = "/installed/megatron/bridge/__init__.py"
    assert command._elsewhere(imports, str(tmp_path)).startswith(
        "rank 2: megatron.bridge is imported from /installed"
    )


def test_the_ratio_is_1_in_every_step(tmp_path):
    for gap in (0.0, 1e-3, -1e-3):
        rows = [{"step": step, "actor/ppo_kl": kl, "actor/pg_clipfrac": 0.0} for step, kl in ((1, 0.0), (2, gap))]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert levels_module._ratio(tmp_path).held == (gap == 0.0)


def test_a_process_that_failed_outweighs_one_that_is_blocked():
    outcomes = {"one": Outcome(blocked="no GPU"), "two": Outcome(failed="a wrong shape")}
    found = of_level("Level 1", [], outcomes)
    assert (found.verdict, found.reason) == (Verdict.FAIL, "a wrong shape")


def test_a_package_that_a_checkout_needs_is_named(levels, config, tmp_path):
    package = tmp_path / "mine/src/megatron/bridge"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import modelopt\n")
    status, _report, of = levels(0, "--bridge", tmp_path / "mine", "--model", config("llama"), "--device", "cpu")
    assert status == 3 and "a package is missing: modelopt" in of["Level 0"]["reason"], of["Level 0"]["reason"]


def test_traps_are_seen_before_anything_starts(tmp_path, monkeypatch):
    assert verdict.preflight(tmp_path, "cpu", 1, {}) == []
    both = {"ROCR_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"}
    assert "ROCR_VISIBLE_DEVICES" in verdict.preflight(tmp_path, "cpu", 1, both)[0]
    assert "are lost with this machine's memory" in verdict.preflight(Path("/dev/shm/logs"), "cpu", 1, {})[0]
    assert "Slurm job 7" in verdict.preflight(Path("/tmp/logs"), "cpu", 1, {"SLURM_JOB_ID": "7"})[0]
    small = SimpleNamespace(free=1000)
    full = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda place: small if "cache" in str(place) else full(place))
    (tmp_path / "cache").mkdir()
    for variable in ("HF_HOME", "HF_HUB_CACHE"):
        found = verdict.preflight(tmp_path, "cpu", 1, {variable: str(tmp_path / "cache")})
        assert len(found) == 1 and found[0].startswith("the disk is full: ") and "HF_HOME" in found[0]
    found = verdict.preflight(tmp_path / "cache", "cpu", 1, {"HF_HOME": str(tmp_path / "cache")})
    assert len(found) == 1, "a folder is named once"
    assert len(verdict.preflight(tmp_path / "cache", "cpu", 1, {})) == 1


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        ("print('level_0: nothing yet')", Verdict.BLOCKED),
        ("print('level_0: Megatron-Bridge makes the model')", Verdict.FAIL),
        ("print('megatron-core 1 (/a), megatron-bridge 1 (/b)')", Verdict.FAIL),
        ("raise OSError(28, 'No space left on device')", Verdict.BLOCKED),
    ],
)
def test_processes_that_are_killed_are_told_apart(tmp_path, code, verdict):
    kill = f"import os, sys; {code}; sys.stdout.flush(); os.kill(os.getpid(), {int(signal.SIGKILL)})"
    log = tmp_path / "level_0/log.txt"
    status = run_logged([sys.executable, "-S", "-c", kill], log, os.environ, tmp_path)
    assert of_level("Level 0", ["one"], {"level_0": read_outcome(log.parent, status)}).verdict == verdict


def test_a_report_says_what_was_not_shown(models, tmp_path):
    request = Request((0, 5), "m", str(models("qwen3_moe")), True, "cpu", str(tmp_path))
    held, missed = Check("a", True, "1 | 2"), Check("b", False, "3 of 2")
    passed = of_level("Level 0: smoke", ["a"], {"level_0": Outcome((held,))})
    failed = of_level("Level 5: learning", ["a", "b"], {"level_5": Outcome((held, missed))})
    asked = Deliverable("Level 1: save and resume", Verdict.NOT_REQUESTED, "")
    report = LevelsReport.of(request, [passed, asked, failed], "verl-fn levels 0 5", {}, {})
    text = report.text()
    assert text.startswith("Result: Fail - Level 5: learning: b: 3 of 2\n")
    order = ["Result:", "Requested coverage:", "Model:", "Deliverables:", "Evidence:", "Limitations:", "Follow-ups:"]
    assert [line.partition(" ")[0] for line in text.splitlines() if line[0] != "-"] == [o.split()[0] for o in order]
    assert "level 1 was not requested" in text and "weights are random" in text
    assert "every rank had all experts (ep=1)" in text
    assert "1 \\| 2" in report.markdown() and "<td>missed</td>" in report.page()
    assert "**verl_fn levels: Fail**" in report.pull_request()
    nothing = LevelsReport.of(request, [asked], "verl-fn levels 1", {}, {})
    assert nothing.result == Verdict.BLOCKED
