"""A game: the model finds a number from 1 to 7 in three guesses, and hears whether the number is higher or lower.

Random guesses find it in about four games of ten, halving in all. From a random model, first imitate random guesses,
then learn by reward:

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
