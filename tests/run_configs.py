"""A run small enough to be made again in every test."""

import attrs

from verl_fn.config import load, make_plan

TINY = [
    "data.train_batch_size=8", "data.val_size=8", "data.max_response_length=8", "algorithm.ppo_mini_batch_size=4",
    "actor.optim.lr=1e-3", "critic.optim.lr=1e-3", "driver.num_threads=1", "driver.device=cpu",
    "trainer.save_freq=1", "trainer.max_ckpt_to_keep=9", "trainer.test_freq=2", "trainer.total_training_steps=3",
]  # fmt: skip


def tiny_run(model, folder, *more):
    return make_plan(load(overrides=[*TINY, f"model.path={model}", f"trainer.dir={folder}", *more]))


def paced(plan, steps, max_lag=0, in_flight=False):
    """The plan with so many steps, where sampling runs ahead of learning in one process too."""
    return attrs.evolve(
        plan,
        trainer=attrs.evolve(plan.trainer, total_training_steps=steps),
        driver=attrs.evolve(plan.driver, max_lag=max_lag),
        rollout=attrs.evolve(plan.rollout, in_flight_weight_updates=in_flight),
    )
