"""An environment with a tool: the model can ask a calculator, and is rewarded for the right product.

A call is ``=12*34``. Any other reply is the model's answer and ends the conversation. A random model first
imitates conversations, in most of which the assistant gives up. Then it learns by reward to call the calculator:

    verl-fn train recipes/sft_calculator.toml
    verl-fn train recipes/grpo_calculator.toml
"""

import re

from verl_fn.environments import Done


class Calculator:
    """Answers calls with the product, and calls that it cannot read with a question mark."""

    def reset(self, problem):
        self.answer = problem.answer
        return [{"role": "user", "content": problem.prompt}]

    def step(self, reply):
        if not reply.startswith("="):
            return Done(float(reply == self.answer))
        call = re.fullmatch(r"=(\d{1,4})\*(\d{1,4})", reply)
        return [{"role": "tool", "content": str(int(call[1]) * int(call[2])) if call else "?"}]
