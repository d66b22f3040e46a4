"""The tables of what gives rewards: the functions or the judge of the user, and the environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs
from attrs.validators import ge, gt, le

from .fields import MOST, ConfigError, free, given, one_of, opt, paths, provided
from .judging import PATTERN, PROMPT, has_a_group, has_response, is_address

BY_FUNCTIONS, BY_JUDGE, IN_TURNS = given("functions"), given("url", label="judge"), given("name")
ASKED = (BY_JUDGE, given("api", "chat", label=""))

# What a reward function is given for each response, or for all of a batch.
GIVEN = frozenset(
    name + many for name in ("data_source", "solution_str", "ground_truth", "extra_info") for many in ("", "s")
)


@attrs.frozen(kw_only=True)
class RewardConfig:
    """Reward functions of the user, or a judge."""

    functions: tuple[str, ...] = paths(
        (), "rewards as module:function or FILE.py:function; if empty, the rule of the data source"
    )
    weights: tuple[float, ...] = opt((), "weight of each function, by default 1", when=BY_FUNCTIONS)
    arguments: Mapping[str, Any] = free(
        "a table of further keyword arguments of the functions; each gets the ones that it has parameters for",
        when=BY_FUNCTIONS,
    )
    timeout: float = opt(
        30.0,
        "seconds that one call of a function, or a judge's reply, may take",
        gt(0),
        le(MOST),
        when=provided(lambda o, cfg: o.by_user, "without reward.functions or reward.url"),
    )
    num_workers: int = opt(1, "processes that run the functions", ge(1), le(4096), when=BY_FUNCTIONS)
    env: tuple[str, ...] = opt(
        (), "environment variables that the functions get, such as the key of a judge's API", when=BY_FUNCTIONS
    )
    url: str = opt("", "API of a judge, such as http://localhost:8000/v1, as the reward", is_address)
    api: str = opt(
        "chat",
        "what is at its address: chat, a language model that is asked; pooling, a reward model that vLLM serves and "
        "that scores the tokens of a response with its prompt",
        one_of("chat", "pooling"),
        when=BY_JUDGE,
    )
    model: str = opt("", "the name of its model", when=BY_JUDGE)
    prompt: str = opt(
        PROMPT,
        "what it is asked; {prompt}, {response} and {ground_truth} are replaced",
        has_response,
        when=ASKED,
    )
    pattern: str = opt(
        PATTERN,
        "regular expression whose first group is the score; its last match in a reply counts",
        has_a_group,
        when=ASKED,
    )
    unreadable_score: float = opt(
        0.0,
        "the score of a response where the reply has none; these are counted",
        ge(-MOST),
        le(MOST),
        when=ASKED,
    )
    retries: int = opt(
        3, "further attempts where it is not reached, late, overloaded or broken", ge(0), le(100), when=BY_JUDGE
    )
    concurrency: int = opt(16, "most requests at a time", ge(1), le(1024), when=BY_JUDGE)
    api_key_env: str = opt("", "the environment variable with the key of its API, if it needs one", when=BY_JUDGE)
    offline: bool = opt(False, "take replies from judge.jsonl in trainer.dir alone, as a replay does", when=BY_JUDGE)

    def __attrs_post_init__(self) -> None:
        if self.url and self.functions:
            raise ConfigError(
                "reward.url and reward.functions are both set, and one of them must score; to add a judge to others, "
                "ask it in a function"
            )
        if taken := sorted(GIVEN & self.arguments.keys()):
            raise ConfigError(f"reward.arguments.{taken[0]} is given by the run, for each response; remove it")
        try:
            json.dumps(dict(self.arguments))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"reward.arguments must have values of JSON, since functions run in other processes: {error}"
            ) from error
        if self.url and not self.model:
            raise ConfigError("reward.model is empty; set it to the name of the judge's model at reward.url")

    @property
    def by_user(self) -> bool:
        """Returns whether the user's functions or a judge score, and not the rule of the data source."""
        return bool(self.functions or self.url)


@attrs.frozen(kw_only=True)
class EnvConfig:
    """The environment that the policy talks to in several turns."""

    name: str = paths("", "class as FILE.py:NAME or MODULE:NAME; if empty, a response ends a problem")
    arguments: Mapping[str, Any] = free("a table of keyword arguments of the class", when=IN_TURNS)
    python: str = paths(
        "",
        "interpreter of the processes with environments, if their packages differ from the trainer's",
        when=IN_TURNS,
    )
    max_turns: int = opt(8, "most replies of a conversation", ge(1), le(10_000), when=IN_TURNS)
    max_turn_length: int | None = opt(
        None,
        "longest reply in tokens, with its end token; by default data.max_response_length",
        ge(1),
        when=IN_TURNS,
    )
    timeout: float = opt(30.0, "seconds that one call of the environment may take", gt(0), le(MOST), when=IN_TURNS)
    num_workers: int = opt(
        1, "processes with environments beside each rollout engine", ge(1), le(4096), when=IN_TURNS
    )
    variables: tuple[str, ...] = opt(
        (), "environment variables that these processes get, such as the key of an API", when=IN_TURNS
    )
