"""Sampling ahead of learning (``driver.max_lag``): which settings allow it, and which it changes."""

from __future__ import annotations

from .algorithms import DAPO, Distill, LearnsFrom
from .fields import ConfigError
from .schema import Config


def check_lag(cfg: Config, learns_from: LearnsFrom) -> None:
    """Checks that sampling can run ahead of learning, where the config asks for it.

    Args:
        cfg: the config.
        learns_from: what its algorithm learns from.

    Raises:
        ConfigError: the algorithm does not sample, needs rewards to sample, or samples of the newest weights; the
            engines cannot work while the trainer learns; or weights are to arrive in flight where engines do not
            sample ahead or record experts.
    """
    lag = f"driver.max_lag = {cfg.driver.max_lag}"
    if cfg.driver.max_lag == 0:
        if cfg.rollout.in_flight_weight_updates:
            raise ConfigError(
                f"rollout.in_flight_weight_updates lets weights reach engines that sample while the trainer learns, "
                f"and with {lag} they do not; set driver.max_lag=1 or more, or in_flight_weight_updates=false"
            )
        return
    if cfg.rollout.in_flight_weight_updates and cfg.actor.router_replay.mode == "R3":
        raise ConfigError(
            "new weights that arrive in flight may send earlier tokens to other experts than those that the engine "
            "recorded; set rollout.in_flight_weight_updates=false or actor.router_replay.mode=R2"
        )
    if learns_from != "samples":
        name = cfg.algorithm.name
        raise ConfigError(f"{lag} lets sampling run ahead of learning, and {name} samples nothing; leave it at 0")
    if isinstance(cfg.algorithm.options, DAPO) and cfg.algorithm.options.filter_groups.enable:
        raise ConfigError(
            f"{lag} asks engines for samples before those of earlier steps have arrived, and dynamic sampling asks "
            "for more where it has seen the rewards; set algorithm.filter_groups.enable=false, or driver.max_lag=0"
        )
    if isinstance(cfg.algorithm.options, Distill) and not cfg.algorithm.options.top_k:
        raise ConfigError(
            f"{lag} lets older weights draw the tokens, and the loss of distill on the drawn token has the right "
            "gradient only for tokens of the weights that learn; set algorithm.top_k=64 or so, whose gradient is "
            "exact for any tokens, or driver.max_lag=0"
        )
    if cfg.driver.kind == "local":
        raise ConfigError(
            f"{lag} lets engines sample while the trainer learns, and driver.kind = local has one process for both; "
            "set driver.kind=ray rollout.placement=apart, or driver.max_lag=0"
        )
    if cfg.rollout.placement == "colocated":
        raise ConfigError(
            f"{lag} lets engines sample while the trainer learns, and rollout.placement = colocated lets them share "
            "a GPU; set rollout.placement=apart, or driver.max_lag=0"
        )
