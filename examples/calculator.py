"""An environment with a tool: the model asks a calculator, and its answer is right if it is the calculator's result.
Half of the reward is for digits that are right, so that there is something to learn before the first right answer.

A call is ``=12*34``. Any other reply is the model's answer, which ends the conversation. From a random model, first
imitate some conversations, then learn by reward:

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
            agreeing = sum(a == b for a, b in zip(reply, self.answer, strict=False))
            share = agreeing / max(len(reply), len(self.answer))
            return Done(1.0 if reply == self.answer else 0.5 * share)
        call = re.fullmatch(r"=(\d{1,4})\*(\d{1,4})", reply)
        return [{"role": "tool", "content": str(int(call[1]) * int(call[2])) if call else "?"}]
