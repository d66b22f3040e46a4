"""An environment of the package verifiers: the model can call a tool that multiplies, and is asked for products.

The package gets a virtual environment of its own. A random model first imitates conversations, in most of which the
assistant gives up. Then it learns by the reward of the environment to call the tool:

    .uv/bin/uv venv .venv-verifiers
    .uv/bin/uv pip install --python .venv-verifiers 'verifiers>=0.2,<0.4'
    python examples/products.py runs/products
    verl-fn train recipes/sft_products.toml
    verl-fn train recipes/grpo_products.toml
"""

import json
import random
import sys
from pathlib import Path

# A token each for the model of this example; it reads and writes all other text as characters.
CALL = ('<tool_call>{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}</tool_call>")


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a * b


def load_environment(train=4096, held_out=256):
    """Returns the environment; ``env.arguments`` can set the sizes of its datasets."""
    import verifiers as vf
    from datasets import Dataset

    def right(completion, answer):
        return float(completion[-1]["content"] == answer)

    rows = [{"question": f"{a}*{b}", "answer": str(a * b)} for a, b in factors()[: train + held_out]]
    return vf.ToolEnv(
        tools=[multiply],
        max_turns=3,
        # The model of this example knows no other characters than it needs.
        error_formatter=lambda error: "?",
        dataset=Dataset.from_list(rows[held_out:]),
        eval_dataset=Dataset.from_list(rows[:held_out]),
        rubric=vf.Rubric(funcs=[right]),
    )


def factors():
    """Returns all pairs of numbers below 100 and above 1, in an order that is always the same."""
    pairs = [(a, b) for a in range(2, 100) for b in range(2, 100)]
    random.Random(0).shuffle(pairs)
    return pairs


def conversation(number, a, b):
    """Returns messages to imitate; in one of four conversations the assistant calls the tool."""
    # The template shows the tool as its name, so a message has the name here.
    asked = [{"role": "system", "content": "multiply"}, {"role": "user", "content": f"{a}*{b}"}]
    if number % 4:
        return [*asked, {"role": "assistant", "content": "?"}]
    call, product = f"{CALL[0]}{a}{CALL[1]}{b}{CALL[2]}", str(a * b)
    return [
        *asked,
        {"role": "assistant", "content": call},
        {"role": "tool", "content": product},
        {"role": "assistant", "content": product},
    ]


def write_start(folder, conversations=4096):
    """Writes a random model and conversations to imitate into a folder."""
    from verl_fn.backends.hf.new_model import new_model
    from verl_fn.backends.hf.tokenizer import read_tokenizer

    model = new_model(folder / "new_model", chars="0123456789*?multipy\n", vocab_size=32, chat_template=True)
    tokenizer = read_tokenizer(model)
    tokenizer.add_tokens(list(CALL))
    tokenizer.save_pretrained(model)
    with open(folder / "conversations.jsonl", "w") as file:
        for number, (a, b) in enumerate(factors()[256 : 256 + conversations]):
            file.write(json.dumps({"messages": conversation(number, a, b)}) + "\n")


if __name__ == "__main__":
    write_start(Path(sys.argv[1]))
