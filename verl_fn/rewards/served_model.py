"""A reward model that vLLM serves: it is sent the tokens of a row, and its reply is their score."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import attrs

from verl_fn.rewards.reward import Answer
from verl_fn.rewards.worker import LARGEST


@attrs.frozen
class ServedModel:
    """What ``Judge`` sends to vLLM's pooling API, and how it reads the score.

    The model gets the tokens that the policy drew, with prompt and end token, so no text is encoded again. It has the
    policy's tokenizer, as a reward model that was trained from the policy has.

    Attributes:
        model: the name under which the model is served.

    Example:
        >>> import torch
        >>> from verl_fn.data.tasks import Problem
        >>> served = ServedModel("scores")
        >>> served.body(Answer(Problem("2+2?", "4"), "4", tokens=torch.tensor([5, 9, 2])))["input"]
        [5, 9, 2]
        >>> served.score(served.read({"data": [{"data": [[0.5], [0.1], [0.25]]}]}))
        0.25
    """

    model: str

    path: ClassVar[str] = "/pooling"
    unreadable_score: ClassVar[float] = 0.0  # never used: a reply without a score is none
    expected: ClassVar[str] = (
        "one number, or one for each token, in data[0].data, as vLLM's pooling API gives for a reward model"
    )

    def body(self, answer: Answer) -> dict[str, Any]:
        """Returns the request for the score of an answer."""
        assert answer.tokens is not None  # Reward gives them
        # Without its activation, a sigmoid, the score is the model's number.
        return {
            "model": self.model,
            "input": answer.tokens.tolist(),
            "use_activation": False,
            "encoding_format": "float",
        }

    def read(self, content: Any) -> str | None:
        """Returns the score in the content of a reply as a string with all of its digits; None if there is none.

        A head that classifies tokens gives a number for each, and that of the last token is the score.
        """
        match content:
            case {"data": [{"data": [*_, [score]] | [score]}]} if (
                isinstance(score, int | float) and math.isfinite(score) and abs(score) < LARGEST
            ):
                return repr(float(score))
        return None

    def score(self, reply: str) -> float:
        """Returns the score of a reply that ``read`` has returned."""
        return float(reply)
