"""The work of the benchmark ``step``: a model, prompts in verl's columns, and sizes that both trainers get."""

from __future__ import annotations

import json
import random
from pathlib import Path

import attrs
import torch

from verl_fn.backends.hf.new_model import SPECIALS, char_tokenizer

from . import workload

BUDGET = workload.BUDGET  # tokens a micro-batch, and tokens that vLLM computes at once
LR = 1e-6
MEMORY = 0.4  # share of the GPU for vLLM
PRINTABLE = "".join(map(chr, range(35, 127)))
# verl's agent loop takes these for the ends of lines and of messages of any Qwen, and asks for a token for each.
NEWLINE, END = "\n", "<|im_end|>"
FIRST_FURTHER = 0x10000  # code points from here on are the rest of a large vocabulary
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@attrs.frozen
class Work:
    """What a step does, and where its model and its prompts are.

    Attributes:
        model: the model's folder.
        data: the file of prompts.
        device: ``cpu`` or ``cuda``.
        prompts: prompts of a step.
        n: responses to each.
        prompt: tokens of a prompt.
        response: tokens of a response.
        gpus: each has a rank and an engine.
        checkpointing: every layer is computed again in the backward pass.
    """

    model: Path
    data: Path
    device: str
    prompts: int
    n: int
    prompt: int
    response: int
    gpus: int = 1
    checkpointing: bool = False

    @property
    def rows(self) -> int:
        """Responses of a step."""
        return self.prompts * self.n

    @property
    def rows_of_engine(self) -> int:
        """Responses of a step that one engine draws."""
        return -(-self.rows // self.gpus)

    def random_rows(self, count: int, tokens: int, seed: int) -> list[list[int]]:
        """Rows of random tokens of the model's vocabulary."""
        size = json.loads((self.model / "config.json").read_text())["vocab_size"]
        generator = torch.Generator().manual_seed(seed)
        rows: list[list[int]] = torch.randint(len(SPECIALS), size, (count, tokens), generator=generator).tolist()
        return rows


def write_model(folder: Path, shape: str, device: str) -> Path:
    """A random model whose tokenizer has a character for each token of the vocabulary.

    verl lets vLLM draw no token that the tokenizer lacks, so a smaller one would change its work.
    """
    workload.write_model(folder, shape, device)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    further = size - len(SPECIALS) - len(PRINTABLE) - len((NEWLINE, END))
    rest = "".join(map(chr, range(FIRST_FURTHER, FIRST_FURTHER + further)))
    tokenizer = char_tokenizer(PRINTABLE + rest)
    tokenizer.add_tokens([NEWLINE, END], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def write_prompts(file: Path, count: int, tokens: int) -> Path:
    """Random prompts of one length, in verl's columns."""
    dice = random.Random(0)
    rows = [
        {
            "data_source": "step",
            "prompt": [{"role": "user", "content": "".join(dice.choices(PRINTABLE, k=tokens))}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i},
        }
        for i in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
