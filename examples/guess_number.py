"""A game: the model finds a number from 1 to 7 in three guesses, and hears whether the number is higher or lower.

Who counts up from 1 finds three numbers of seven, and who halves finds all. A random model first imitates games, most
of which count up. Then it learns by reward to halve:

    verl-fn train recipes/sft_guess_number.toml
    verl-fn train recipes/grpo_guess_number.toml
"""

from verl_fn.environments import Done


class GuessNumber:
    """Says ``h`` if the number is higher than a guess and ``l`` if it is lower."""

    def reset(self, problem):
        self.secret, self.guesses = int(problem.answer), 0
        return [{"role": "user", "content": problem.prompt}]

    def step(self, reply):
        self.guesses += 1
        guess = int(reply) if reply in set("1234567") else None
        if guess is None or guess == self.secret or self.guesses == 3:
            return Done(float(guess == self.secret))
        return [{"role": "user", "content": "h" if guess < self.secret else "l"}]
