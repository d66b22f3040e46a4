"""The problems that an environment brings: rows of its datasets, read from its process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl_fn.config.names import VERIFIERS, verifiers_name
from verl_fn.config.schema import DataConfig, EnvConfig
from verl_fn.data.encoded import longest_prompt, short_enough
from verl_fn.data.files import FileData
from verl_fn.data.reading import encoded_problems
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import Problem

from .processes import EnvProcesses
from .verifiers import ROW


def environment_data(table: DataConfig, env: EnvConfig, tokenizer: Any, say: Callable[[str], None]) -> FileData:
    """Returns the datasets of the environment of verifiers that ``data.task`` names as a source of problems.

    Each problem keeps its row in ``extra_info``. Prompts are checked without the tools: the rollout adds them.

    Args:
        table: the config's ``[data]`` table.
        env: the config's ``[env]`` table.
        tokenizer: the model's tokenizer.
        say: prints a line; it reports prompts that were left out, and that there are no problems for evaluation.

    Raises:
        EnvError: the environment cannot be loaded, or its rows cannot be read.
        DataError: it has no training problems, or a prompt cannot be used or is too long.
    """
    processes = EnvProcesses(
        env.name, env.timeout, 1, None, env.variables, python=env.python, arguments=env.arguments
    )
    parts: dict[str, list[Problem]] = {"train": [], "held_out": []}
    for part, row in processes.problems():
        parts[part].append(_problem(row, len(parts[part]), verifiers_name(table.task)))
    if not parts["train"]:
        raise DataError(f"data.task: the environment {table.task} has no training dataset; give it one")
    if not parts["held_out"]:
        say(f"note: {table.task} has no evaluation dataset, so nothing is evaluated; give it an eval_dataset")
    training, validation = (
        short_enough("data.task", encoded_problems(problems, tokenizer), table, say) for problems in parts.values()
    )
    return FileData(training.problems, validation.problems, table.shuffle, longest_prompt([training, validation]))


def _problem(row: Mapping[str, Any], number: int, name: str) -> Problem:
    source = f"{VERIFIERS.removesuffix(':')}/{Path(name).name}"
    prompt, answer = row.get("prompt"), row.get("answer")
    if isinstance(prompt, list):
        # A dataset gives all its messages the same keys, of which some are None.
        prompt = tuple({k: v for k, v in message.items() if v is not None} for message in prompt)
    if not prompt or not isinstance(prompt, str | tuple):
        raise DataError(f"data.task: row {number} of {source} has the prompt {prompt!r:.80}; it must have messages")
    return Problem(
        prompt=prompt,
        answer=answer if isinstance(answer, str) else "",
        id=number,
        data_source=source,
        extra_info={ROW: dict(row)},
    )
