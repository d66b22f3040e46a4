"""Questions of Reasoning Gym as a source of problems, generated from a key."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from verl_fn.config.names import reasoning_names
from verl_fn.config.schema import DataConfig
from verl_fn.data.columns import truth
from verl_fn.data.files import encode_prompts
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import HELD_OUT, MAX_FAILED_DRAWS, Problem, is_held_out
from verl_fn.scores import SOURCE, reasoning_question
from verl_fn.state import Key

INSTRUCTION = "Give the final answer between <answer> and </answer>."


@attrs.frozen(eq=False)
class ReasoningSets:
    """Sets of Reasoning Gym: a source of problems whose prompts are a user's messages.

    The package makes a question from a seed that is drawn here, and a problem keeps it in ``extra_info`` with the
    options. One question in eight is held out, by its text.

    Attributes:
        names: of the sets.
        weights: the share of each set among problems, up to a common factor.
        options: of each set by its name; sets without options have the package's defaults.
        max_prompt: tokens that no prompt may exceed.
        fits: whether a problem's prompt is short enough; another one is drawn where it is not.
    """

    names: Sequence[str]
    weights: Sequence[float]
    options: Mapping[str, Mapping[str, Any]]
    max_prompt: int
    fits: Callable[[Problem], bool] = lambda problem: True

    def train(self, key: Key, start: int, count: int) -> tuple[Problem, ...]:
        """Returns training problems ``start`` to ``start + count`` of the stream that ``key`` names.

        Raises:
            DataError: a set makes no question that can be used.
        """
        return tuple(self._draw(key.fold_in("train").fold_in(i), i, False) for i in range(start, start + count))

    def held_out(self, count: int | None) -> tuple[Problem, ...]:
        """Returns up to ``count`` different problems that no training stream contains, the same for every run.

        Raises:
            DataError: a set makes no question that can be used.
        """
        count = HELD_OUT if count is None else count
        problems: dict[str, Problem] = {}
        key, draws, last_new = Key.from_seed(0).fold_in("held-out"), 0, 0
        while len(problems) < count and draws - last_new < MAX_FAILED_DRAWS:
            problem = self._draw(key.fold_in(draws), len(problems), True)
            draws += 1
            question = problem.extra_info["question"]
            if question not in problems:
                problems[question], last_new = problem, draws
        return tuple(problems.values())

    def _draw(self, key: Key, number: int, held_out: bool) -> Problem:
        rng = random.Random(key.seed())
        # The set stays the same until a question can be used: a set with many unusable ones keeps its share.
        name = rng.choices(self.names, self.weights)[0]
        options = self.options.get(name, {})
        for _ in range(MAX_FAILED_DRAWS):
            seed = rng.getrandbits(31)
            made = reasoning_question(name, seed, options)
            if is_held_out(made["question"]) != held_out:
                continue
            problem = Problem(
                prompt=({"role": "user", "content": f"{made['question']}\n\n{INSTRUCTION}"},),
                answer="" if made["answer"] is None else truth(made["answer"]),
                id=number,
                data_source=f"{SOURCE}{name}",
                extra_info={"seed": seed, "options": dict(options), "question": made["question"]},
            )
            if self.fits(problem):
                return problem
        kind = "held-out" if held_out else "training"
        raise DataError(
            f"data.task: of {MAX_FAILED_DRAWS} questions of {name} none can be a {kind} problem: the set has too few "
            "different questions, or all prompts are too long; change data.task_options or data.max_prompt_length"
        )


def reasoning_data(table: DataConfig, tokenizer: Any) -> ReasoningSets:
    """Returns the sets that ``data.task`` names as a source, after making a question of each.

    Args:
        table: the config's ``[data]`` table.
        tokenizer: the model's tokenizer.

    Raises:
        DataError: the package is not installed, has no such set or refuses its options, or the tokenizer has no chat
            template.
    """
    names = reasoning_names(table.task)
    source = ReasoningSets(
        names, table.weights or (1.0,) * len(names), table.task_options, table.max_prompt_length,
        lambda problem: not table.filter_overlong_prompts
        or len(encode_prompts([problem], tokenizer)[0]) <= table.max_prompt_length,
    )  # fmt: skip
    for name in names:
        options = source.options.get(name, {})
        try:
            reasoning_question(name, 0, options)
        except ImportError as error:
            raise DataError(f"data.task: {error}") from error
        # Sets check their options by assertions, and some fail later than that.
        except Exception as error:
            raise DataError(
                f"data.task: Reasoning Gym makes no question of {name} with data.task_options.{name} = "
                f"{dict(options)}: {type(error).__name__}: {error}"
            ) from error
    encode_prompts(source.train(Key.from_seed(0), 0, 1), tokenizer)
    return source
