"""``verl-fn train --check``: what a run would do and need, without doing it."""

from run_configs import TINY, tiny_run

from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.sizes import parameter_counts
from verl_fn.backends.local import Local
from verl_fn.cli import main
from verl_fn.runs.check_run import check_run
from verl_fn.steps import adamw


def test_the_counts_are_those_of_the_states(tiny):
    for head in ("lm", "value"):
        for lora in (None, Lora(rank=2), Lora(rank=3, targets=("q_proj", "v_proj"))):
            state = Local(tiny, adamw(1e-3), head=head, lora=lora).load_pretrained()
            total = sum(p.numel() for p in state.params.values())
            trained = sum(state.params[name].numel() for name in state.params.trained())
            assert parameter_counts(tiny, head, lora) == (total, trained), (head, lora)


def test_a_check_prints_the_plan_and_makes_no_run(tiny, tmp_path, capsys):
    recipe = tmp_path / "empty.toml"
    recipe.write_text("")
    more = [
        "algorithm.use_kl_loss=true",
        "algorithm.ppo_epochs=2",
        "rollout.n=3",
        "algorithm.norm_adv_by_std_in_grpo=false",
    ]
    run = tmp_path / "run"
    assert main(["train", str(recipe), *TINY, *more, f"model.path={tiny}", f"trainer.dir={run}", "--check"]) == 0
    out = capsys.readouterr().out
    assert "note: algorithm.norm_adv_by_std_in_grpo has no effect" in out
    assert "8 prompts, 24 rows of at most 18 tokens" in out
    for role, updates in (("actor", "12 updates in 3 steps"), ("critic", "12 updates"), ("reference", "not updated")):
        line = next(line for line in out.splitlines() if line.startswith(role))
        assert updates in line and "parameters" in line
    assert "moments" in out and not run.exists()


def test_a_check_refuses_what_the_run_would_refuse(tiny, tmp_path, capsys):
    recipe = tmp_path / "empty.toml"
    recipe.write_text("")
    wrong = ["actor.ppo_max_token_len_per_gpu=5", f"model.path={tiny}", f"trainer.dir={tmp_path}/run", "--check"]
    assert main(["train", str(recipe), *TINY, *wrong]) == 2
    assert "more than actor.ppo_max_token_len_per_gpu = 5" in capsys.readouterr().err


def test_a_check_says_where_the_engines_are(tiny, tmp_path):
    for placement, words in (("colocated", "colocated with"), ("apart", "apart from")):
        more = ["driver.kind=ray", "rollout.engines=2", f"rollout.placement={placement}"]
        line = check_run(tiny_run(tiny, tmp_path, *more)).splitlines()[2]
        assert line.startswith("rollout     2 x sampler") and f"{words} the training processes" in line


def test_a_check_says_that_sampling_runs_ahead(tiny, tmp_path):
    more = ["driver.kind=ray", "rollout.placement=apart", "driver.max_lag=2"]
    ahead = [line for line in check_run(tiny_run(tiny, tmp_path, *more)).splitlines() if line.startswith("overlap")]
    assert ahead == ["overlap     sampling runs up to 2 steps ahead of learning; correction: token"]
    assert "overlap" not in check_run(tiny_run(tiny, tmp_path))
