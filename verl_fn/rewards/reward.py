"""Rewards of a batch: responses are decoded and judged, and the scores become fields of the batch.

By rule, the data source of a problem decides how its answers are scored.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import math
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from jaxtyping import Int
from torch import Tensor

from verl_fn.data.tasks import ARITHMETIC, GSM8K, SQUARES, TASKS, Problem, Task
from verl_fn.errors import ArgumentError, UserError
from verl_fn.pool.worker import LARGEST, short
from verl_fn.scores import boxed, equal, verdict
from verl_fn.state import Batch, conversations
from verl_fn.steps.aggregate import last_of_rows

OUTLIER = 1e6
MOST_REPEATED = 3  # times that a prompt's text repeats a token
Rule = Callable[[Problem, str, bool], dict[str, Any]]

MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
GEOMETRY3K = "hiyouga/geometry3k"
GSM8K_TAIL = 300  # characters at the end of a response in which verl looks for the answer


class RewardError(UserError, RuntimeError):
    """Raised where a reward cannot be computed; the message names the function and the answer."""


@attrs.frozen
class Answer:
    """A response to judge.

    Attributes:
        text: the response without end tokens and padding; other special tokens are a part of it.
        finished: whether it ended with the end token; False if it was cut off at the length limit.
        tokens: of the whole row, with its prompt and end token; None outside of ``Reward``.
    """

    problem: Problem
    text: str
    finished: bool = True
    tokens: Tensor | None = attrs.field(default=None, eq=False, repr=False)


Judge = Callable[[Sequence[Answer]], list[dict[str, Any]]]
"""Maps answers to ``score``, ``pred`` (the final answer as a string), ``acc`` if it is known which answers are right,
and further numbers for metrics."""


class Reward:
    """Scores the responses of a batch.

    Args:
        judge: returns the scores of a sequence of answers.
        tokenizer: decodes the responses.
        end_tokens: the model's; they are no part of a response's text. By default the
            tokenizer's own.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> rows = Batch.from_rows([[4, 5, 2]], {"response_mask": [[0.0, 1.0, 1.0]]}, {"finished": [1.0]})
        >>> judge = lambda answers: [{"score": 0.5, "acc": 0.0, "pred": a.text, "length": 1} for a in answers]
        >>> scored = Reward(judge, char_tokenizer("ab"))(rows, [Problem("a", "b")])
        >>> scored["token_level_scores"].tolist(), scored["reward/length"].tolist()
        ([0.0, 0.0, 0.5], [1.0])
    """

    def __init__(self, judge: Judge, tokenizer: Any, end_tokens: Sequence[int] = ()) -> None:
        try:
            names: Iterable[str] = inspect.signature(judge).parameters
        except (TypeError, ValueError):  # such as max
            names = ()
        if {"solution_str", "data_sources"} & set(names):
            raise ArgumentError(
                "Reward takes a function of a list of answers, and this one has verl's signature; pass "
                "RewardFunctions(['FILE.py:NAME']) of verl_fn.rewards.functions, which calls it"
            )
        self.judge, self._one_thread = judge, threading.Lock()
        self.tokenizer = tokenizer
        self.end_tokens = end_tokens

    def __call__(self, batch: Batch, problems: Sequence[Problem]) -> Batch:
        """Returns the batch with the judge's results for each row, and the score on each row's last response token.

        Row fields are ``score``, ``acc`` if the judge gives it, ``pred`` (an int64 hash of the string) and
        ``reward/*``, one for each further number, with nan for a number that a row lacks. Token fields are
        ``token_level_scores`` and ``token_level_rewards``. The last response token is the last one with
        ``response_mask`` set, also where a tool's output ends the response.

        A conversation with an environment is judged as a whole, and each of its rows has its score: the
        environment's reward plus the judge's score. ``acc`` is then the environment's, and the judge's is
        ``reward/acc``.

        Args:
            batch: rows with ``response_mask`` and ``finished``, as ``pack`` makes them.
            problems: what the rows answer. A row's ``group`` is its problem's id, and a problem may have any number
                of rows; without ``group``, each problem has equally many consecutive rows.

        Raises:
            RewardError: a reward function failed, a number is not finite, or a score is missing.
            ValueError: a row is of none of the problems, or two problems have one id.
        """
        conversation, last = conversations(batch)
        whole = batch.take(last)
        texts = response_texts(batch, self.tokenizer, self.end_tokens)
        judged = zip(
            problems_of(whole, problems),
            joined(texts, conversation),
            whole["finished"].tolist(),
            whole.rows(),
            strict=True,
        )
        answers = [Answer(problem, text, bool(finished), tokens) for problem, text, finished, tokens in judged]
        # Processes of functions answer one call at a time.
        with self._one_thread:
            fields = {name: values[conversation] for name, values in _columns(answers, self.judge(answers)).items()}
        if "env_score" in batch:
            own = {"reward/acc": fields["acc"]} if "acc" in fields else {}
            fields |= {"score": fields["score"] + batch["env_score"], "acc": batch["env_acc"], **own}
        if empty := int((batch.sum_rows(batch["response_mask"]) == 0).sum()):
            warnings.warn(
                f"{empty} of {len(batch)} responses have no token that the model drew; their scores are ignored",
                stacklevel=2,
            )
        on_last = batch.spread(fields["score"]) * last_of_rows(batch, batch["response_mask"])
        return batch.with_rows(**fields).with_tokens(token_level_scores=on_last, token_level_rewards=on_last)


def problems_of(batch: Batch, problems: Sequence[Problem]) -> list[Problem]:
    """Returns the problem of each row.

    Raises:
        ValueError: a row is of none of the problems, or two problems have one id.

    Example:
        >>> batch = Batch.from_rows([[1], [2], [3]], per_row={"group": [7, 4, 4]})
        >>> [problem.id for problem in problems_of(batch, [Problem("a", "", id=4), Problem("b", "", id=7)])]
        [7, 4, 4]
    """
    if "group" not in batch:
        rows_each = len(batch) // len(problems)
        return [problems[i // rows_each] for i in range(len(batch))]
    by_id = {problem.id: problem for problem in problems}
    if len(by_id) < len(problems):
        raise ValueError("two of the problems of one batch have the same id; ids name the problems of its rows")
    groups = batch["group"].tolist()
    if unknown := sorted({group for group in groups if group not in by_id}):
        raise ValueError(f"rows of the batch are of problems {unknown[:5]}, but these were not given")
    return [by_id[group] for group in groups]


def _columns(answers: Sequence[Answer], results: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    names = [name for name in dict.fromkeys(name for result in results for name in result) if name != "pred"]
    for answer, result in zip(answers, results, strict=True):
        for name in ("score", "pred"):
            if name not in result:
                raise RewardError(f"the reward of {describe(answer)} lacks {name!r}")
        for name in names:
            if name in result and not -LARGEST < result[name] < LARGEST:
                raise RewardError(f"the reward of {describe(answer)} has {result[name]} as {name!r}")
    fields = {"pred": torch.tensor([fingerprint(result["pred"]) for result in results])}
    for name in names:
        field = name if name in ("score", "acc") else f"reward/{name}"
        fields[field] = torch.tensor([float(result.get(name, math.nan)) for result in results], dtype=torch.float32)
    _warn_of_scale(answers, fields["score"])
    return fields


def _warn_of_scale(answers: Sequence[Answer], scores: torch.Tensor) -> None:
    """Warns of a score beside which the others vanish, as where a function has divided by almost nothing."""
    size = scores.abs().double()
    largest = int(size.argmax())
    usual = max(1.0, float(size.median()))
    if float(size[largest]) > OUTLIER * usual:
        warnings.warn(
            f"the reward of {describe(answers[largest])} is {float(scores[largest]):g}, and half of the others are "
            f"at most {usual:g}: beside it they hardly differ, so little is learned from them",
            stacklevel=4,
        )


def odd_answers(problem: Problem, right: str) -> list[Answer]:
    """Returns answers that a model may give to any problem, for trying a reward before a run.

    Args:
        right: an answer; one of the odd answers ends in its middle.

    Example:
        >>> [answer.text for answer in odd_answers(Problem("2+3?", "5"), "It is 5")]
        ['', 'It ', 'é世\\x00²']
    """
    cut = right[: len(right) // 2]
    # A digit that int() does not read, and a character that ends strings of C.
    return [Answer(problem, ""), Answer(problem, cut, finished=False), Answer(problem, "\u00e9\u4e16\u0000\u00b2")]


def describe(answer: Answer) -> str:
    """Returns a description of an answer for error messages.

    Example:
        >>> describe(Answer(Problem("2+2?", "4", id=7, data_source="sums"), "5"))
        "problem 7 of 'sums', response '5'"
    """
    return f"problem {answer.problem.id} of {answer.problem.data_source!r}, response {short(answer.text)!r}"


def fingerprint(string: str) -> int:
    """Returns a 64-bit hash of a string, the same in every process.

    Example:
        >>> fingerprint("42") == fingerprint("4" + "2"), fingerprint("42") == fingerprint("43")
        (True, False)
    """
    digest = hashlib.blake2b(string.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def joined(texts: Sequence[str], conversation: Tensor) -> list[str]:
    """Joins the texts of each conversation's rows by line breaks.

    Example:
        >>> joined(["a", "b", "c"], torch.tensor([0, 0, 1]))
        ['a\\nb', 'c']
    """
    parts: dict[int, list[str]] = {}
    for text, number in zip(texts, conversation.tolist(), strict=True):
        parts.setdefault(number, []).append(text)
    return ["\n".join(part) for part in parts.values()]


def response_texts(batch: Batch, tokenizer: Any, end_tokens: Sequence[int] = ()) -> list[str]:
    """Decodes the response of each row, as ``texts_of`` does.

    Of a conversation with an environment these are the model's replies, with line breaks between them.
    """
    rows = zip(batch.rows(), batch.rows("response_mask"), strict=True)
    if "conversation" not in batch:
        return texts_of([tokens[mask.bool()] for tokens, mask in rows], tokenizer, end_tokens)
    replies, row_of = [], []
    for row, (tokens, mask) in enumerate(rows):
        _, runs = torch.unique_consecutive(mask.bool(), return_counts=True)
        for part, drawn in zip(tokens.split(runs.tolist()), mask.bool().split(runs.tolist()), strict=True):
            if drawn[0] or len(runs) == 1:
                replies.append(part if drawn[0] else part[:0])
                row_of.append(row)
    return joined(texts_of(replies, tokenizer, end_tokens), torch.tensor(row_of))


def prompt_texts(batch: Batch, tokenizer: Any) -> list[str]:
    """Decodes what the model read before its first token in each row, with all special tokens.

    A special token that stands there more than three times in a row, as placeholders of an image do, is written once
    with its count.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> mask = {"response_mask": [[0, 0, 1, 1], [0, 0, 0, 0, 0, 1]]}
        >>> batch = Batch.from_rows([[1, 4, 5, 5], [3, 3, 3, 3, 5, 4]], mask)
        >>> prompt_texts(batch, char_tokenizer("ab"))
        ['<bos>a', '<unk> (4 times)b']
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    read = []
    for tokens, mask in zip(batch.rows(), batch.rows("response_mask"), strict=True):
        end = int(mask.bool().int().argmax()) if bool(mask.any()) else len(tokens)
        read.append(tuple(tokens[:end].tolist()))
    texts = {tokens: _prompt_text(tokens, special, tokenizer) for tokens in set(read)}
    return [texts[tokens] for tokens in read]


def _prompt_text(tokens: tuple[int, ...], special: set[int], tokenizer: Any) -> str:
    parts: list[str] = []
    plain: list[int] = []
    for token, repeated in itertools.groupby(tokens):
        same = list(repeated)
        if token not in special or len(same) <= MOST_REPEATED:
            plain += same
            continue
        parts += [tokenizer.decode(plain), f"{tokenizer.decode([token])} ({len(same)} times)"]
        plain = []
    return "".join([*parts, tokenizer.decode(plain)])


def texts_of(responses: Sequence[Int[Tensor, " T"]], tokenizer: Any, end_tokens: Sequence[int] = ()) -> list[str]:
    """Decodes token ids, without padding and without the end token that ends them.

    Other special tokens stay: a model may reason and call tools with them. An end token may be an ordinary one, which
    earlier in a response is text. Without ``end_tokens``, the tokenizer's eos token ends responses.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> texts_of([torch.tensor([4, 5, 2]), torch.tensor([5, 1])], char_tokenizer("ab"), end_tokens=[2])
        ['ab', 'b<bos>']
    """
    ends = set(end_tokens or [tokenizer.eos_token_id])
    # Read once: transformers looks the number up each time.
    padding = tokenizer.pad_token_id
    ids = [t if padding is None or padding in ends else t[t != padding] for t in responses]
    # Tensors, since transformers looks at each number of a list.
    ids = [t[:-1] if len(t) and int(t[-1]) in ends else t for t in ids]
    return tokenizer.batch_decode(ids, skip_special_tokens=False)


def rule_for(data_source: str) -> Rule:
    """Returns the rule of a data source.

    A rule takes a problem, a response and whether the response ended with the end token. It returns the numbers
    ``score`` and ``acc``, and ``pred``, the final answer as a string.

    Raises:
        RewardError: the data source has no rule.

    Example:
        >>> rule_for("openai/gsm8k")(Problem("What is 6 * 7?", "42"), "6 * 7 is #### 42", True)
        {'score': 1.0, 'acc': 1.0, 'pred': '42'}
    """
    if not has_rule(data_source):
        raise RewardError(
            f"the data source {data_source!r} has no rule of its own, only {', '.join(RULES)} do; set "
            "reward.functions or reward.url"
        )
    return RULES.get(data_source, gsm8k)


def has_rule(data_source: str) -> bool:
    """Returns whether a data source has a rule.

    Example:
        >>> has_rule("reverse"), has_rule("mine")
        (True, False)
    """
    return data_source in RULES or data_source.endswith("gsm8k")


def by_rules(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Scores each answer by the rule of its problem's data source.

    Raises:
        RewardError: a data source has no rule, or its rule does not fit the problem.
    """
    return [_scored(answer) for answer in answers]


def unscored(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Gives each answer the score 0, if only an environment gives the reward.

    Example:
        >>> unscored([Answer(Problem("2+3?", "5"), "5 ")])
        [{'score': 0.0, 'pred': '5'}]
    """
    return [{"score": 0.0, "pred": answer.text.strip()} for answer in answers]


def gsm8k(problem: Problem, response: str, finished: bool) -> dict[str, Any]:
    """Scores a response by verl's strict GSM8K rule.

    The score is 1.0 if the last ``#### number``, without its commas, is the same string as the ground truth.
    """
    numbers = re.findall(r"#### (\-?[0-9\.\,]+)", response[-GSM8K_TAIL:])
    pred = numbers[-1].replace(",", "") if numbers else ""
    return verdict(bool(numbers) and pred == problem.answer, pred)


def arithmetic(problem: Problem, response: str, finished: bool) -> dict[str, Any]:
    """Scores 1 if the last whole number of a response is the ground truth.

    Example:
        >>> arithmetic(Problem("What is 6 + 7?", "13"), "6 + 7 = 13.", True)
        {'score': 1.0, 'acc': 1.0, 'pred': '13'}
    """
    numbers = re.findall(r"-?\d+", response)
    pred = numbers[-1] if numbers else ""
    return verdict(pred == problem.answer, pred)


def one_word(problem: Problem, response: str, finished: bool) -> dict[str, Any]:
    """Scores 1 if a response is the ground truth and nothing else, whatever its case and a last full stop.

    Example:
        >>> one_word(Problem("<image>Which colour?", "red"), " Red.", True)
        {'score': 1.0, 'acc': 1.0, 'pred': 'red'}
    """
    pred = response.strip().lower().removesuffix(".")
    return verdict(finished and pred == problem.answer, pred)


def mathematics(problem: Problem, response: str, finished: bool) -> dict[str, Any]:
    r"""Scores 1 if the last box of a response to a problem of MATH is the ground truth, written in some way.

    Example:
        >>> mathematics(Problem("Half of 1?", r"\frac{1}{2}"), r"It is \boxed{\tfrac12}.", True)["score"]
        1.0
    """
    pred = boxed(response)
    return verdict(pred is not None and equal(pred, problem.answer), pred or "")


def geometry(problem: Problem, response: str, finished: bool) -> dict[str, Any]:
    r"""Scores 0.9 for the right box, as ``mathematics`` does, and 0.1 for thoughts in their tags before a box.

    Example:
        >>> geometry(Problem("<image>Find x.", "3"), r"<think>1 + 2</think> \boxed{3}", True)["score"]
        1.0

    Source:
        verl's ``geo3k.compute_score``, whose comparison of answers is mathruler's.
    """
    found = mathematics(problem, response, finished)
    formed = re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", response, re.DOTALL) is not None
    return found | {"score": 0.9 * found["acc"] + 0.1 * formed}


def _of_task(task: Task) -> Rule:
    def rule(problem: Problem, response: str, finished: bool) -> dict[str, Any]:
        score = float(task.score(problem, response)) if finished else 0.0
        return {"score": score, "acc": float(score >= 1.0), "pred": response}

    return rule


RULES: Mapping[str, Rule] = {
    **{name: _of_task(task) for name, task in TASKS.items()},
    GSM8K: gsm8k,
    ARITHMETIC: arithmetic,
    SQUARES: one_word,
    **dict.fromkeys(MATH, mathematics),
    GEOMETRY3K: geometry,
}


# Each rule reads an answer that a response ends with in this form.
FORMS: Mapping[Rule, str] = {
    gsm8k: "#### {}",
    arithmetic: "{}",
    one_word: "{}",
    mathematics: r"\boxed{{{}}}",
    geometry: r"\boxed{{{}}}",
}


def unattainable(problem: Problem) -> bool:
    """Returns whether no response is right by the rule of a problem, since its ground truth has another form.

    Example:
        >>> [unattainable(Problem("q", truth, data_source="openai/gsm8k")) for truth in ("72", "1,000", "#### 72")]
        [False, True, True]
    """
    if not has_rule(problem.data_source) or (rule := rule_for(problem.data_source)) not in FORMS:
        return False
    return not rule(problem, FORMS[rule].format(problem.answer), True)["acc"]


def _scored(answer: Answer) -> dict[str, Any]:
    rule = rule_for(answer.problem.data_source)
    try:
        return rule(answer.problem, answer.text, answer.finished)
    except Exception as error:
        # Files may use the name of a generated task for problems of another form.
        raise RewardError(
            f"the rule of its data source failed on {describe(answer)}: {error}; set reward.functions or reward.url"
        ) from error
