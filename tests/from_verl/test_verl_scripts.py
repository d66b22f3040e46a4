"""Launch scripts of verl: how bash is read, and that what verl's examples mean there is what they mean here.

``benchmarks/results/from_verl.json`` has what each of verl's examples means in verl; ``benchmarks/from_verl.py`` made
it from the scripts. With VERL_EXAMPLES, verl's folder of examples, the scripts themselves are read again.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verl_fn.benchmarks import from_verl
from verl_fn.config import ConfigError
from verl_fn.from_verl import read_settings, translate
from verl_fn.from_verl.reading import Settings, launch_of

RESULTS = Path(__file__).parents[2] / "benchmarks/results/from_verl.json"


def table_of(file):
    """What each script means; a home folder is written as ~."""
    return json.loads(file.read_text().replace('"~/', f'"{Path.home()}/'))["table"]


TABLE = table_of(RESULTS)
TRANSLATED = {name: entry["values"] for name, entry in TABLE.items() if not entry["exit"]}
# Of the algorithms' folders, the scripts for text models on FSDP and Megatron that are refused: for their master
# weights in bf16, a router's bias, a teacher, and old log-probs of the engine.
REFUSED = {
    "grpo_trainer/run_gpt_oss_20b_fsdp.sh", "grpo_trainer/run_hy_v3_megatron.sh",
    "grpo_trainer/run_qwen3_next_80b_a3b_fsdp.sh", "on_policy_distillation_trainer/run_qwen3_8b_fsdp.sh",
    "on_policy_distillation_trainer/run_qwen3_8b_megatron.sh", "rollout_correction/run_qwen2_5_7b_fsdp.sh",
    "rollout_correction/run_qwen2_5_7b_fsdp_multi_rs.sh",
}  # fmt: skip

# Scripts for models with images.
SEEING = {
    "grpo_trainer/run_glm4_1v_9b_fsdp.sh", "grpo_trainer/run_qwen2_5_vl_7b_fsdp.sh",
    "grpo_trainer/run_qwen2_5_vl_7b_megatron.sh", "grpo_trainer/run_qwen3_5_27b_fsdp.sh",
    "grpo_trainer/run_qwen3_5_2b_openr1_fsdp.sh", "grpo_trainer/run_qwen3_5_2b_video_fsdp.sh",
    "grpo_trainer/run_qwen3_5_35b_fsdp.sh", "grpo_trainer/run_qwen3_vl_235b_a22b_megatron.sh",
    "grpo_trainer/run_qwen3_vl_30b_a3b_megatron.sh", "grpo_trainer/run_qwen3_vl_8b_fsdp.sh",
    "grpo_trainer/run_qwen3_vl_8b_megatron.sh", "profile/run_qwen2_5_vl_7b_torch_memory.sh",
    "sft/vlm/run_qwen3_vl_2b_fsdp.sh", "tuning/lora/run_qwen2_5_vl_7b_fsdp.sh",
}  # fmt: skip


def settings_of(values):
    """Returns settings of verl that mean these values, as verl names them today."""
    values = dict(values)
    name, engine = values.pop("algorithm.name"), values.pop("actor.strategy")
    sft, arr = name == "sft", "actor_rollout_ref."
    names = {key: spelled[-1] for key, spelled, _ in from_verl.PLAIN}
    if sft:
        names |= {key: spelled[-1] for key, (spelled, _) in from_verl.SFT_PLAIN.items()}
    optim = "optim." if sft else f"{arr}actor.optim."
    batch, mini = values["data.train_batch_size"], values.get("algorithm.ppo_mini_batch_size", 256)
    updates = 1 if sft else values["algorithm.ppo_epochs"] * -(-batch // min(batch, mini))
    penalty = "reward.reward_kwargs.overlong_buffer_cfg."
    names |= {
        "trainer.total_training_steps": "trainer.total_training_steps", "ray.ranks": "trainer.n_gpus_per_node",
        "actor.optim.lr_warmup_steps": optim + "lr_warmup_steps", "actor.optim.min_lr_ratio": optim + "min_lr_ratio",
        "actor.optim.lr_scheduler_type": optim + "lr_scheduler_type",
        "actor.ppo_max_token_len_per_gpu": "data.max_token_len_per_gpu" if sft else
        f"{arr}actor.ppo_max_token_len_per_gpu",
        "critic.ppo_max_token_len_per_gpu": "critic.ppo_max_token_len_per_gpu",
        "algorithm.policy_loss": f"{arr}actor.policy_loss.loss_mode",
        **{f"algorithm.clip_ratio_{end}": f"{arr}actor.clip_ratio_{end}" for end in ("low", "high", "c")},
        "algorithm.filter_groups.enable": "algorithm.filter_groups.enable",
        "algorithm.overlong_buffer.len": penalty + "len",
        "algorithm.overlong_buffer.penalty_factor": penalty + "penalty_factor",
    }  # fmt: skip
    found = {names[key]: value for key, value in values.items() if key in names}
    found[names["actor.optim.lr_warmup_steps"]] //= updates
    found["data.use_dynamic_bsz" if sft else f"{arr}actor.use_dynamic_bsz"] = True
    if not sft:
        found[f"{arr}actor.policy_loss.loss_mode"] = found[f"{arr}actor.policy_loss.loss_mode"].replace(
            "ppo_clip", "vanilla"
        )
        found.setdefault("algorithm.adv_estimator", {"ppo": "gae"}.get(name, name))
        found[penalty + "enable"] = penalty + "len" in found
    return Settings({key: value for key, value in found.items() if value is not None}, sft, engine)


@pytest.mark.parametrize("name", TRANSLATED)
def test_what_an_example_means_in_verl_is_what_its_translation_means_here(name):
    settings = settings_of(TRANSLATED[name])
    translation = translate(settings, lambda files: from_verl.ROWS)
    assert translation.complete, translation.report()
    pairs = from_verl.compared(settings, translation)
    assert {key: value for key, value in TRANSLATED[name].items() if not from_verl.agree(value, pairs[key][1])} == {}


def test_most_of_verls_examples_for_text_models_translate():
    folders = [name for name in TABLE if name.partition("/")[0].endswith(("_trainer", "correction", "grouper"))]
    ours = [name for name in folders if name in TRANSLATED.keys() - SEEING and not name.startswith("mtp_trainer")]
    assert TRANSLATED.keys() >= SEEING
    assert len(ours) == 35 and len(ours) / (len(ours) + len(REFUSED)) > 34 / 42
    assert all(TABLE[name]["refused"] for name in REFUSED)
    assert sum(len(entry["differ"]) for entry in TABLE.values() if not entry["exit"]) == 0


@pytest.mark.skipif("VERL_EXAMPLES" not in os.environ, reason="VERL_EXAMPLES names no folder of verl's examples")
def test_verls_own_scripts_give_the_table(tmp_path):
    words = [os.environ["VERL_EXAMPLES"], "--source", "again", "--out", str(tmp_path / "again.json")]
    subprocess.run([sys.executable, "-m", "verl_fn.benchmarks.from_verl", *words], check=True)
    assert table_of(tmp_path / "again.json") == TABLE


SCRIPT = r"""#!/usr/bin/env bash
# As verl's examples are written.
set -xeuo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
HERE=$(cd -- "$(dirname "${BASH_SOURCE[0]}")/.." >/dev/null 2>&1 && pwd)
length=$((1024 * 2))
start_time=$(date +%Y)_$0
mkdir -p logs && rm -rf logs/old > logs/said 2>&1 || true
source ./no_such_file || true
ulimit -n 100000
DATA=(
    data.train_files="['$HERE/a b.parquet', '/c.parquet']"
    data.max_response_length=${length}  # twice
)
EXTRA=()
case "${DEVICE}" in
    gpu) EXTRA+=("+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_log_stats=True");;
    *) exit 1;;
esac
launch() {
    local n=$1; shift
    nohup env WANDB_MODE=offline python3 -u -m verl.trainer.main_ppo \
        "${DATA[@]}" ${EXTRA[@]+"${EXTRA[@]}"} actor_rollout_ref.rollout.n=$n \
        trainer.project_name="$DEVICE" trainer.logger=\[\'console\'\] "$@" 2>&1 | tee logs/$start_time.log
}
for n in 4; do launch "$n" "$@"; done
"""


@pytest.fixture
def script(tmp_path):
    def write(text, name="run.sh"):
        (tmp_path / "examples").mkdir(exist_ok=True)
        (tmp_path / "examples" / name).write_text(text)
        return str(tmp_path / "examples" / name)

    return write


def test_a_script_is_read_as_bash_reads_it_and_starts_nothing(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = script(SCRIPT)
    settings = read_settings([file, "trainer.total_epochs=2", "data.prompt_key=a b"])
    assert settings.module == "verl.trainer.main_ppo" and settings.values == {
        "data.train_files": [f"{tmp_path}/a b.parquet", "/c.parquet"], "data.max_response_length": 2048,
        "actor_rollout_ref.rollout.engine_kwargs.vllm.disable_log_stats": True, "actor_rollout_ref.rollout.n": 4,
        "trainer.project_name": "gpu", "trainer.logger": ["console"], "trainer.total_epochs": 2,
        "data.prompt_key": "a b",
    }  # fmt: skip
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["examples", "run.sh"], "nothing was written"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo hello\n", r"starts no trainer of verl \(it ended with: hello\)"),
        ("set -u\npython3 -m verl.trainer.main_ppo a.b=$NOT_SET_ANYWHERE\n", "NOT_SET_ANYWHERE: unbound variable"),
        ("for n in 1 2; do python3 -m verl.trainer.main_ppo rollout.n=$n; done\n", "starts verl 2 times"),
        ("/usr/bin/python3 -m verl.trainer.main_ppo a.b=1\n", "restricted"),
        ("python3 -m verl.trainer.main_ppo a.b=1 > old.log\n", "restricted: cannot redirect output"),
    ],
)
def test_what_cannot_be_read_from_a_script_is_an_error_with_a_way_out(script, tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.log").write_text("kept")
    with pytest.raises(ConfigError, match=said) as error:
        launch_of(script(text))
    assert "put 'verl-fn config --from-verl' in front" in str(error.value)
    assert (tmp_path / "old.log").read_text() == "kept"


@pytest.mark.parametrize(
    ("lines", "value", "program"),
    [
        ("", "run_$(python3 -c 'print(1)')_x", r"'python3 -c print\(1\)'"),
        ("", "$(python3 count.py a)", "'python3 count.py a'"),
        ("N=$(nvidia-smi -L | wc -l)", "$N", "'nvidia-smi -L'"),
        ("set -euo pipefail; N=$(hostname | awk '{print $1}' | head -1)", "$N", "'awk {print"),
        ("N=$(echo a/b | sed s,/,_,)", "$N", "'sed s,/,_,'"),
    ],
)
def test_a_setting_that_needs_a_program_is_not_made_of_nothing(script, lines, value, program):
    text = lines + f'\npython3 -m verl.trainer.main_ppo a.b={value} c.d=1 "$@" 2>&1 | tee x.log\n'
    with pytest.raises(ConfigError, match=f"the script computes a.b with {program}.*write the value"):
        read_settings([script(text)])
    assert read_settings([script(text), "a.b=2"]).values == {"a.b": 2, "c.d": 1}


def test_settings_behind_a_script_count_whether_it_hands_them_on_or_not(script):
    start = "python3 -m verl.trainer.main_ppo a.b=1 c.d=$1"
    words = ["7", "a.b=2", "+e.f=x y", "~g.h"]
    for handed_on in ('"${@:2}"', ""):
        assert read_settings([script(f"{start} g.h=3 {handed_on}\n"), *words]).values == {
            "a.b": 2, "c.d": 7, "e.f": "x y"
        }  # fmt: skip
    own = script('for word in "$@"; do eval "$word"; done; python3 -m verl.trainer.main_ppo a.b=$N\n')
    assert read_settings([own, "N=3"]).values == {"a.b": 3}
    assert read_settings([own, "N=3", "model_engine=megatron"]).engine == "megatron"
    asked = script(f"{start} e.f=$(nvidia-smi -L | wc -l)\n")
    assert read_settings([asked, "7", "e.f=8"]).values == {"a.b": 1, "c.d": 7, "e.f": 8}


@pytest.mark.parametrize("behind", ["# b.c=2 \\\n", "\n", "", "\nb.d=1\n"])
def test_settings_that_a_trainer_does_not_get_are_named(script, behind):
    text = f"python3 -m verl.trainer.main_ppo a.b=1 \\\n{behind}trainer.x=3 \\\n+data.y=4 2>&1 | tee log\n"
    if not behind:
        assert read_settings([script(text)]).values == {"a.b": 1, "trainer.x": 3, "data.y": 4}
        return
    read = read_settings([script(text)])
    assert read.values == {"a.b": 1} and read.lost[-1] == "trainer.x=3 +data.y=4" and read.not_run == ()
    assert read.lost[:-1] == (("b.d=1",) if "b.d" in behind else ())
    report = translate(read).report().partition("not read by verl's trainer")[2]
    assert report.endswith(f"\n  {read.lost[-1]}")


def test_a_line_like_a_setting_that_no_trainer_is_started_before_is_a_program(script):
    text = "python3 -m verl.trainer.main_ppo a.b=1\nmy.tool\n"
    assert read_settings([script("a.b=2\n" + text)]).lost == read_settings([script(text)]).lost == ()


def test_a_word_of_a_space_is_a_command_that_ended_early(script):
    text = "python3 -m verl.trainer.main_ppo a.b=1 \\  # one of 1, 2\n  +c=2\n"
    command = ["python3", "-m", "verl.trainer.main_ppo", "a.b=1", " "]
    for words in ([script(text)], command):
        with pytest.raises(ConfigError, match=r"a backslash with a space or a comment .* later lines are lost"):
            read_settings(words)
    # A variable that is not set gives an empty word.
    assert read_settings([*command[:-1], "", "\\"]).values == {"a.b": 1}


@pytest.mark.parametrize("program", ["xargs", "xargs -0", "parallel"])
def test_words_that_a_program_reads_for_a_trainer_are_not_left_out(script, program):
    text = f"cat words.txt | {program} python3 -m verl.trainer.main_ppo a.b=1\n"
    with pytest.raises(ConfigError, match=rf"starts no trainer.*it asks '{program} python3.*not run here"):
        read_settings([script(text)])


def test_of_a_launchers_words_only_the_ranks_must_be_known(script):
    text = 'head=$(scontrol show hostnames)\nsrun -w "$head" {}python3 -m verl.trainer.main_ppo a.b=1\n'
    settings = read_settings([script(text.format(""))])
    assert settings.values == {"a.b": 1} and settings.not_run == ("scontrol show hostnames",)
    assert read_settings([script(text.format('torchrun --nproc_per_node=8 --master_addr="$head" '))]).values == {
        "a.b": 1, "trainer.n_gpus_per_node": 8,
    }  # fmt: skip
    for ranks in ('torchrun --nnodes="$head" ', 'torchrun --nproc_per_node "$head" '):
        with pytest.raises(ConfigError, match=r"computes .* with 'scontrol show hostnames', which is not run here"):
            read_settings([script(text.format(ranks))])


@pytest.mark.parametrize(
    ("options", "nodes", "each"),
    [
        ("--nnodes=2 --nproc_per_node=8", 2, 8),
        ("--nproc_per_node 8 --nnodes 2", 2, 8),
        ("--nproc-per-node 4 --master_port=1234", None, 4),
        ("--nnodes 3 --standalone", 3, None),
        ("--nproc_per_node gpu", None, None),
        ("--standalone", None, None),
    ],
)
def test_the_processes_of_torchrun_are_the_ranks(options, nodes, each):
    known = {"a.b": 1, "trainer.nnodes": nodes, "trainer.n_gpus_per_node": each}
    words = ["torchrun", *options.split(), "-m", "verl.trainer.sft_trainer", "a.b=1"]
    assert read_settings(words).values == {key: value for key, value in known.items() if value}


def test_programs_on_which_branches_of_a_script_depend_are_named(script):
    text = """
    if [ "$(nvidia-smi -L | wc -l)" -ge 8 ]; then N=8; else N=1; fi
    if python3 -c "import flash_attn"; then M=8; else M=1; fi
    python3 prepare.py && mkdir -p logs
    if command -v nvidia-smi > /dev/null; then N=8; fi
    which rocm-smi &> /dev/null || type -P npu-smi > /dev/null || command -v cat python3 > /dev/null && which python3
    python3 -m verl.trainer.main_ppo rollout.n=$N rollout.m=$M
    """
    settings = read_settings([script(text)])
    asked = ("nvidia-smi -L", "python3 -c import flash_attn", "command -v nvidia-smi", "which rocm-smi")
    assert settings.not_run == (*asked, "python3 prepare.py")
    report = translate(settings, lambda files: 9).report()
    assert "not run, so look whether settings depend on it:\n  nvidia-smi -L\n" in report


def test_configs_of_the_users_replace_verls_and_are_composed_of_others(tmp_path):
    for name, text in {
        "ppo_trainer": "{rollout: {n: 8}}",
        "base": "{rollout: {n: 2, m: 3}}",
        "mine": "{defaults: [ppo_megatron_trainer, base, _self_], rollout: {n: 4}}",
        "last": "{defaults: [_self_, base], rollout: {n: 4}}",
        "own": "{defaults: [base], rollout: {n: 4}}",
        "other": "{defaults: [{override /model_engine: megatron}], a: 1}",
        "ppo_megatron_trainer": "{defaults: ppo_megatron_trainer, rollout: {n: 6}}",
        "nested": "{defaults: [data/more, _self_]}",
        "data/more": "{rollout: {n: 7}}",
        "lost": "{defaults: [nowhere]}",
        "grouped": "{defaults: [{data@data: own}]}",
    }.items():
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "data/own.yaml").write_text("{}")
    command = ["python3", "-m", "verl.trainer.main_ppo", f"--config-path={tmp_path}"]
    for words in ([], ["--config-name=ppo_trainer"]):
        assert read_settings([*command, *words]).values == {"rollout.n": 8}
    for place in (["--config-path=config"], []):
        assert read_settings([*command[:3], *place, "--config-name=ppo_trainer"]).values == {}
        megatron = read_settings([*command[:3], *place, "--config-name", "ppo_megatron_trainer"])
        assert (megatron.values, megatron.engine) == ({}, "megatron")
    for name, values, engine in (
        ("mine", {"rollout.n": 4, "rollout.m": 3}, "megatron"),
        ("nested", {"rollout.n": 7}, "fsdp"),
        ("last", {"rollout.n": 2, "rollout.m": 3}, "fsdp"),
        ("own", {"rollout.n": 4, "rollout.m": 3}, "fsdp"),
        ("other", {"a": 1}, "megatron"),
    ):
        settings = read_settings([*command, f"--config-name={name}"])
        assert (settings.values, settings.engine) == (values, engine)
    assert read_settings([str(tmp_path / "other.yaml"), "model_engine=fsdp"]).engine == "fsdp"
    for name, message in (("lost", "composed of nowhere"), ("grouped", "composed of .*data/own.yaml, which is not")):
        with pytest.raises(ConfigError, match=message):
            read_settings([*command, f"--config-name={name}"])
    with pytest.raises(ConfigError, match=r"there is no /nowhere/ppo_trainer\.yaml"):
        read_settings([*command[:3], "--config-path=/nowhere"])
    with pytest.raises(ConfigError, match=r"qwen2.5_grpo is none of verl's own.*/qwen2.5_grpo.yaml"):
        read_settings([*command, "--config-name=qwen2.5_grpo"])
    own = [*command[:3], "--config-path=/opt/verl/verl/trainer/config", "--config-name=ppo_trainer"]
    assert read_settings(own).values == {}


def test_overrides_of_the_optimizer_win_and_defaults_cannot_be_removed():
    start = "actor_rollout_ref.actor.optim."
    for words in (
        [f"{start}weight_decay=0.1", f"+{start}override_optimizer_config.weight_decay=0.0"],
        [f"+{start}override_optimizer_config.weight_decay=0.0", f"{start}weight_decay=0.1"],
    ):
        table = translate(read_settings([*words, "trainer.total_training_steps=3"])).table
        assert table["actor"]["optim"].get("weight_decay", 0.0) == 0.0
    assert read_settings(["a.b.c=1", "a.b.d=1", "a.bc=2", "~a.b"]).values == {"a.bc": 2}
    with pytest.raises(ConfigError, match="removes a default of verl's"):
        read_settings([f"~{start}betas"])


def test_groups_that_differ_only_by_a_penalty_are_refused():
    words = ["algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=True", "trainer.total_training_steps=3"]
    buffer = [f"reward.reward_kwargs.overlong_buffer_cfg.{one}" for one in ("enable=True", "len=4")]
    for metric, more, refused in (
        ("seq_reward", [], False),
        ("seq_reward", buffer, True),
        ("seq_final_reward", buffer, True),
        ("acc", buffer, False),
        ("seq_final_reward", ["algorithm.use_kl_in_reward=True"], True),
    ):
        found = translate(read_settings([*words, f"algorithm.filter_groups.metric={metric}", *more])).not_possible
        assert any("before penalties are taken off" in line for line in found) == refused, (metric, found)


def test_filters_of_a_script_filter(script):
    text = """
    LINES=$(printf '1\\n2\\n' | wc -l); NONE=$(printf '' | wc -l)
    LAST=$(printf 'b c\\na' | sort | tail -1 | tr ' ' _); GPUS=$(( $(echo 0,1,2,3 | tr -cd ',' | wc -c) + 1 ))
    python3 -m verl.trainer.main_ppo a.b=$LINES a.c=$NONE a.d=$LAST a.e=$(echo "2 * 3" | bc) a.f=$(head -1 <<< "x") \\
        a.g=$GPUS a.h=$(printf a | wc -l) a.i=$(printf '%s' 0,1 | tr ',' '\\n' | wc -l)
    """
    values = read_settings([script(text)]).values
    assert values == {"a.b": 2, "a.c": 0, "a.d": "b_c", "a.e": 6 if shutil.which("bc") else values["a.e"], "a.f": "x",
                      "a.g": 4, "a.h": 0, "a.i": 1}  # fmt: skip


def test_a_trainer_may_be_started_by_a_path_that_the_script_asks_for(script):
    text = "PY=$(which python3); RUN=$(conda run which python)\n$PY -m verl.trainer.main_ppo a.b=1\n"
    assert read_settings([script(text)]).values == {"a.b": 1}
    assert read_settings([script(text.replace("$PY", "$RUN"))]).values == {"a.b": 1}


def test_arithmetic_on_what_a_program_would_print_names_the_program(script):
    text = "N=$(nvidia-smi -L | wc -l)\npython3 -m verl.trainer.main_ppo a.b=$((N*1))\n"
    with pytest.raises(ConfigError, match="it asks 'nvidia-smi -L', which is not run here"):
        read_settings([script(text)])


def test_a_table_that_a_file_has_twice_is_refused(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("algorithm: {gamma: 1}\ntrainer:\n  nnodes: 2\ndata: {seed: 1}\ntrainer:\n  seed: 3\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml is not YAML: it has the key trainer twice .* line 5"):
        read_settings([str(file)])
    file.write_text("trainer:\n  nnodes: 2\nalgorithm: {<<: {gamma: 1}, lam: 1}\n")
    assert read_settings([str(file)]).values == {"trainer.nnodes": 2, "algorithm.gamma": 1, "algorithm.lam": 1}


def test_tables_of_a_file_are_merged_as_omegaconf_does(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, y: 3, z: 4}\nd: {<<: *a, <<: *b}\n"
        "e: {<<: [*b, *a]}\nf:\n  <<: *b\n  1: 5\n"
    )
    mine = {"a": {"x": 1, "y": 1}, "b": {"x": 2, "y": 1}, "c": {"x": 2, "y": 3, "z": 4}, "d": {"x": 2, "y": 1},
            "e": {"x": 2, "y": 1}, "f": {"x": 2, "y": 1, 1: 5}}  # fmt: skip
    read = {f"{table}.{key}": value for table, values in mine.items() for key, value in values.items()}
    assert read_settings([str(file)]).values == read
    # In Hydra's words, the last one counts.
    assert read_settings(["a.b={x: 1, x: 2}"]).values == {"a.b.x": 2}


def test_a_config_of_the_users_is_read_and_another_trainer_is_named(tmp_path):
    (tmp_path / "mine.yaml").write_text("actor_rollout_ref: {rollout: {multi_turn: {enable: True}, n: 3}}\n")
    words = ["python3", "-m", "verl.trainer.main_ppo", f"--config-path={tmp_path}", "--config-name", "mine"]
    settings = read_settings([*words, "actor_rollout_ref.rollout.n=5"])
    assert settings.values == {
        "actor_rollout_ref.rollout.multi_turn.enable": True, "actor_rollout_ref.rollout.n": 5
    }  # fmt: skip
    assert any("set env.name" in line for line in translate(settings, lambda files: 9).not_possible)
    with pytest.raises(ConfigError, match=r"none of verl's own configs, and there is no .*other\.yaml"):
        read_settings(["python3", "-m", "verl.trainer.main_ppo", "--config-name=other"])
    other = read_settings(["python3", "-m", "verl.experimental.fully_async_policy.fully_async_main", "a.b=1"])
    assert "fully_async_main is not translated" in " ".join(translate(other).not_possible)
    for words, engine in (
        (["model_engine=veomni"], "veomni"),
        (["torchrun", "-m", "verl.trainer.sft_trainer", "engine=automodel", "optim=automodel"], "automodel"),
        (["actor@actor_rollout_ref.actor=mlite_actor"], "mlite"),
    ):
        lines = translate(read_settings([*words, "trainer.total_training_steps=3"])).not_possible
        assert any(f"there is no engine {engine}" in line for line in lines)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("a.b=2026-01-05", "2026-01-05"), ("a.b=on", "on"), ("a.b=12:30:00", "12:30:00"), ("a.b=1e-6", 1e-6),
        ("a.b=010", "010"), ("a.b=", ""), ("a.b=null", None), ("a.b='1'", "1"), ("a.b='[0.9,0.95]'", [0.9, 0.95]),
        ("++a.b=True", True), ("a.b=[x,y]", ["x", "y"]), ("a.b=1.5e3", 1500.0), ("a.b=v1.0", "v1.0"), ("a.b=-1", -1),
        (r"a.b=/m/lr\=1e-6\,x", "/m/lr=1e-6,x"), ("a.b=one: two", "one: two"),
        ("a.b=[{c:1},{d:/e}]", [{"c": 1}, {"d": "/e"}]), ("a.b=[s3://c,d:e]", ["s3://c", "d:e"]),
        ("a.b=[${oc.env:NONE,c}/d,${oc.env:NONE,e}]", ["c/d", "e"]),
    ],
)  # fmt: skip
def test_words_have_the_values_that_hydra_gives_them(word, value):
    assert read_settings([word]).values == {"a.b": value}


@pytest.mark.parametrize("value", ["/p/q.py", "s3://p/q", "x:y", "'x, y:z'", "${oc.env:HOME}/q"])
def test_a_table_among_words_keeps_its_values(value):
    expected = value.strip("'").replace("${oc.env:HOME}", os.environ["HOME"])
    assert read_settings([f"a.b={{c:{value},d:1}}"]).values == {"a.b.c": expected, "a.b.d": 1}


def test_references_reach_verls_own_defaults():
    values = read_settings(["trainer.default_local_dir=/x/${trainer.experiment_name}/${oc.select:a.b,7}"]).values
    assert values == {"trainer.default_local_dir": "/x/gsm8k/7"}


def test_variables_of_files_that_a_script_reads_are_its_own(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = "\npython3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=${MODEL:-/other} data.seed=${SEED:-1}\n"
    (tmp_path / "examples").mkdir()
    for name in ("examples/settings.sh", ".env"):
        (tmp_path / name).write_text("export MODEL=/mine\nSEED=7\n")
    (tmp_path / "activate").write_text("SEED=9\n")
    here = 'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"; '
    for read in ('. "$(dirname "$0")/settings.sh"', "set -e; source .env", here + 'source "$HERE/settings.sh"'):
        assert read_settings([script(read + start)]).values == {
            "actor_rollout_ref.model.path": "/mine",
            "data.seed": 7,
        }, read
    for read in ("set -e; source ./activate", "source ./no_such_file", "source /etc/profile; source ~/.bashrc"):
        assert read_settings([script(read + start)]).values["data.seed"] == 1, read


def test_a_variable_that_is_not_set_is_no_value_of_verls(script):
    start = (
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=$MODEL data.seed=$SEED trainer.total_epochs=1"
    )
    said = translate(read_settings([script(start)])).report()
    assert "actor_rollout_ref.model.path: it is empty; set it" in said and "data.seed: expected a number" in said


def test_a_sweep_is_no_number_whatever_its_default_would_do(script):
    start = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4,8"
    assert (
        'actor_rollout_ref.rollout.n: expected a number, got "4,8"'
        in translate(read_settings([script(start)])).report()
    )


@pytest.mark.parametrize("trainer", ["main_ppo", "sft_trainer"])
def test_no_held_out_files_are_not_the_default_ones(script, trainer):
    made = translate(read_settings([script(f"python3 -m verl.trainer.{trainer} data.val_files=null")]))
    assert "val_files" not in made.table["data"] and "data.val_files: no held-out files" in made.report()


def test_a_frequency_of_once_an_epoch_is_refused_with_the_number_to_write(script):
    start = "python3 -m verl.trainer.sft_trainer trainer.save_freq=after_each_epoch trainer.test_freq=fast"
    said = " ".join(translate(read_settings([script(start)])).report().split())
    words = "give the steps of an epoch: the rows divided by data.train_batch_size"
    assert f'trainer.save_freq: expected a number, got "after_each_epoch"; {words}' in said
    assert said.count(words) == 1


def test_programs_that_only_end_are_named_too(script):
    text = """
    set -e
    mkdir -p logs && ray stop --force; pip install -U verl
    if ! nvidia-smi 2> /dev/null; then exit 1; fi
    if git diff --quiet; then N=8; else N=1; fi
    if pip show flash_attn || ray status; then N=8; fi
    exec python3 -m verl.trainer.main_ppo rollout.n=$N
    """
    settings = read_settings([script(text)])
    assert settings.not_run == ("nvidia-smi", "git diff --quiet", "pip show flash_attn")
    assert settings.values == {"rollout.n": 8}
    with pytest.raises(ConfigError, match=r"of what is not run here, it calls 'bash run\.sh a' last"):
        read_settings([script("mkdir x; bash run.sh a")])
