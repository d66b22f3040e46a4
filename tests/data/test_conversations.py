"""Conversations: what is learned of each turn, templates that cannot be rendered turn by turn, and bad rows."""

import json

import attrs
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from verl_fn.backends.hf.new_model import CHAT_TEMPLATE, char_tokenizer
from verl_fn.data.examples import Conversation, TaskDialogues, pack_examples, pack_pairs
from verl_fn.data.judged import Judged
from verl_fn.data.loading import read_files
from verl_fn.data.rendering import encode_parts, turn_parts
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import TASKS, Problem
from verl_fn.state import Key

# ChatML in one letter each: U and A begin a message, and a newline follows its end token.
CHATML = (
    "{% for m in messages %}{{ 'A' if m['role'] == 'assistant' else 'U' }}{{ m['content'] }}{{ eos_token + '\n' }}"
    "{% endfor %}{{ 'A' if add_generation_prompt }}"
)
# Earlier answers are cut to their first letter, as templates drop earlier reasoning.
FORGETFUL = CHATML.replace(
    "{{ m['content'] }}", "{{ m['content'] if loop.last or m['role'] == 'user' else m['content'][:1] }}"
)
END = 2


def tokenizer(template=CHATML):
    made = char_tokenizer("abcdUA\n")
    made.chat_template = template
    return made


def talk(*contents):
    return tuple({"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents))


def turn_tokens(made, messages, start=0):
    """The only row of a conversation."""
    problem = Conversation(messages[:-1], "", messages=messages)
    ((ids, mask),) = encode_parts(turn_parts(made, problem, messages, [END], start), made)
    return ids, mask


def learned(tokens, mask, made):
    """The text of every stretch that is learned from, with its end token."""
    stretches, current = [], []
    for token, on in zip(tokens, [*mask], strict=True):
        if on:
            current.append(token)
        elif current:
            stretches, current = [*stretches, current], []
    return [made.decode(stretch) for stretch in (*stretches, *([current] if current else []))]


def test_only_what_the_assistant_says_is_learned_turn_by_turn():
    made = tokenizer()
    messages = talk("ab", "c", "d", "ba")
    ids, mask = turn_tokens(made, messages)
    assert made.decode(ids) == "Uab<eos>\nAc<eos>\nUd<eos>\nAba<eos>"
    assert learned(ids, mask, made) == ["c<eos>", "ba<eos>"]
    ids, mask = turn_tokens(made, messages, start=2)
    assert learned(ids, mask, made) == ["ba<eos>"]
    system = ({"role": "system", "content": "dd"}, *messages[:2])
    ids, mask = turn_tokens(made, system)
    assert made.decode(ids).startswith("Udd<eos>\nUab") and learned(ids, mask, made) == ["c<eos>"]


def test_no_token_reaches_from_a_prompt_into_its_answer():
    """As they are sampled: the model is given the whole prompt, and draws the first token of its answer."""
    letters = {letter: i for i, letter in enumerate(["e", "b", "c", "bc", "cb"])}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(letters, [("b", "c"), ("c", "b")])))
    assert made.encode("bcb") == [3, 1]
    ((ids, mask), (apart, _)) = encode_parts([[("b", False), ("cb", True)], [("bc", False), ("b", True)]], made)
    assert (ids, mask) == ([1, 4], [0.0, 1.0]) and apart == [3, 1]


def test_one_turn_is_the_same_row_as_a_prompt_and_its_answer():
    made = tokenizer()
    conversation = Conversation(talk("ab"), "c", messages=talk("ab", "c"))
    whole, answered = (pack_examples([p], made, END) for p in (conversation, Problem(talk("ab"), "c")))
    assert whole.tokens.tolist() == answered.tokens.tolist()
    assert whole["response_mask"].tolist() == answered["response_mask"].tolist()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHATML.replace("'A' if add_generation_prompt", "'U' if add_generation_prompt"), "begins message 1"),
        (CHATML.replace("eos_token + ", ""), "does not end message 1 with '<eos>', so the model would never learn"),
        ("{{ raise_exception('no') }}", "chat template failed"),
        (None, "has no chat template; use a tokenizer folder with chat_template.jinja"),
    ],
)  # fmt: skip
def test_templates_that_cannot_be_used(template, message):
    problem = Conversation(talk("ab"), "b", 5, "mine", messages=talk("ab", "cd", "a", "b"))
    with pytest.raises(DataError, match=f"problem 5 of 'mine': .*{message}"):
        pack_examples([problem], tokenizer(template), END)


def test_reasoning_behind_a_prompt_that_says_there_is_none_is_named():
    closed = "{% if add_generation_prompt and quiet %}<think>\n\n</think>\n{% endif %}"
    made = char_tokenizer("abcdUA\n<think>/")
    made.chat_template = CHATML + closed
    messages = talk("ab", "<think>c</think>d")
    for quiet in (False, True):
        problem = Conversation(messages[:1], "d", messages=messages, chat_template_kwargs={"quiet": quiet})
        if quiet:
            with pytest.raises(DataError, match=r"message 1 has reasoning, .* as enable_thinking = false .*the row"):
                pack_examples([problem], made, END)
        else:
            pack_examples([problem], made, END)


def test_a_template_that_rewrites_earlier_turns_makes_a_row_for_each_turn_as_the_model_sees_it():
    made = tokenizer(FORGETFUL)
    messages = talk("ab", "cd", "a", "b", "d", "ac")
    batch = pack_examples([Conversation(messages[:-1], "ac", messages=messages), Problem(talk("a"), "b")], made, END)
    rows = [
        (made.decode(ids), learned(ids, mask, made))
        for ids, mask in zip(batch.rows(), batch.rows("response_mask"), strict=True)
    ]
    assert rows == [
        ("Uab<eos>\nAcd<eos>", ["cd<eos>"]),
        # What was said so far is rewritten once and then stays, so the last two turns share a row.
        ("Uab<eos>\nAc<eos>\nUa<eos>\nAb<eos>\nUd<eos>\nAac<eos>", ["b<eos>", "ac<eos>"]),
        ("Ua<eos>\nAb<eos>", ["b<eos>"]),
    ]
    two = (*talk("ab", "cd")[1:], *talk("a", "b"))
    pair = Judged(talk("ab"), "", 4, "mine", chosen=(two,), rejected=(talk("", "d")[1:],))
    with pytest.raises(
        DataError, match=r"problem 4 of 'mine': a response has several turns .* with the turns before it"
    ):
        pack_pairs([pair], made, END)


def test_pairs_of_messages_learn_from_the_responses_alone():
    made = tokenizer()
    prompt = talk("ab", "c", "d")
    rejected = ({"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
                {"role": "assistant", "content": "d"})  # fmt: skip
    pair = Judged(prompt, "", 4, chosen=(({"role": "assistant", "content": "ba"},),), rejected=(rejected,))
    batch = pack_pairs([pair], made, END)
    rows = zip(batch.rows(), batch.rows("response_mask"), strict=True)
    assert [learned(ids.tolist(), mask.tolist(), made) for ids, mask in rows] == [["ba<eos>"], ["b<eos>", "d<eos>"]]


def write(tmp_path, *rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_conversations_from_a_file(tmp_path):
    file = write(
        tmp_path, {"messages": talk("ab", "c", "d", "ba", "a")}, {"messages": talk("b", "c"), "data_source": "x"}
    )
    first, second = read_files([file], "answers")
    assert (first.prompt, first.answer, first.messages) == (talk("ab", "c", "d"), "ba", talk("ab", "c", "d", "ba"))
    assert (first.id, first.data_source, second.id, second.data_source) == (0, "messages", 1, "x")


def test_prompts_and_completions_are_the_rows_of_their_conversations(tmp_path):
    """As messages or strings, with turns in the prompt that are not learned, and several in the completion."""
    whole, several = talk("ab", "c", "d", "ba"), talk("ab", "c", "d", "ba", "a", "b")
    rows = [
        {"prompt": "ab", "completion": "c"},
        {"prompt": talk("ab"), "completion": "c"},
        {"prompt": "ab", "completion": talk("ab", "c")[1:]},
        {"prompt": whole[:3], "completion": whole[3:], "data_source": "x"},
        {"prompt": several[:3], "completion": several[3:], "tools": []},
    ]
    made, problems = tokenizer(), read_files([write(tmp_path, *rows)], "answers")
    assert [p.id for p in problems] == [0, 1, 2, 3, 4] and [p.data_source for p in problems[2:4]] == [
        "completion",
        "x",
    ]
    assert problems[0] == Problem("ab", "c", 0, "completion") and [p.answer for p in problems[1:]] == [
        "c",
        "c",
        "ba",
        "b",
    ]
    batch = pack_examples(problems[1:], made, END)
    found = [learned(*row, made) for row in zip(batch.rows(), batch.rows("response_mask"), strict=True)]
    assert found == [["c<eos>"], ["c<eos>"], ["ba<eos>"], ["ba<eos>", "b<eos>"]]
    assert made.decode(batch.rows()[2]) == "Uab<eos>\nAc<eos>\nUd<eos>\nAba<eos>"


@pytest.mark.parametrize("completion", ["c", " c\n", "c<|im_end|>", talk("ab", "c", "d")[1:], talk("ab", "c")[1:]])
def test_a_completion_beside_messages_may_have_space_and_an_end_token(completion, tmp_path):
    row = {"messages": talk("ab", "c", "d"), "completion": completion}
    assert [p.answer for p in read_files([write(tmp_path, row)], "answers")] == ["c"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "ab", "completion": ""}, "line 1: completion is empty"),
        ({"prompt": "ab", "completion": talk("cd")}, "completion has no message of the assistant to learn from"),
        ({"prompt": "ab", "completion": talk("ab")}, "completion repeats prompt, and nothing behind it is learned"),
        ({"question": "ab", "completion": "c"}, "required are prompt and completion, and data.prompt_key names"),
        ({"prompt": "ab", "completion": "c", "label": False}, "required are data_source, prompt, reward_model"),
    ],
)
def test_completions_that_cannot_be_learned_from(row, message, tmp_path):
    with pytest.raises(DataError, match=message):
        read_files([write(tmp_path, row)], "answers")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (talk("ab"), "line 1: messages has no message of the assistant to learn from"),
        (talk("ab", "", "c", "d"), "message 1 of messages is a turn of the assistant without content"),
        (talk("ab", "c")[1:], "messages begins with a turn of the assistant; add"),
        ("ab", "messages must be a list of messages, not the string"),
        ([{"role": "user"}], "messages must be a string or a list of messages"),
    ],
)
def test_conversations_that_cannot_be_learned_from(messages, message, tmp_path):
    with pytest.raises(DataError, match=message):
        read_files([write(tmp_path, {"messages": messages})], "answers")


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        ("c", None),
        (talk("ab", "c")[1:], None),
        (None, None),
        ("d", "line 1: messages does not end with completion, so it is not clear what is learned; correct or remove"),
        (talk("ab", "d")[1:], "messages does not end with completion"),
        ((*talk("ab", "c"), *talk("ab", "c")), "messages does not end with completion"),
    ],
)
def test_a_completion_beside_messages_must_be_what_they_end_with(completion, message, tmp_path):
    file = write(tmp_path, {"messages": talk("ab", "c", "d"), "completion": completion})
    if message is None:
        assert read_files([file], "answers")[0].messages == talk("ab", "c")
    else:
        with pytest.raises(DataError, match=message):
            read_files([file], "answers")


def test_an_answer_with_an_end_token_before_its_end_is_refused(tmp_path):
    made = tokenizer()
    said = r"the answer has '<eos>', the token that ends an answer, before its end"
    with pytest.raises(DataError, match=rf"problem 3 of 'x': {said}"):
        pack_examples([Problem("ab", "a<eos>b", 3, "x")], made, END)
    rows = [{"prompt": "ab", "completion": "c<eos>"}, {"prompt": "ab", "completion": "c<eos>ab<eos>"}]
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 2: {said}"):
        pack_examples(read_files([write(tmp_path, *rows)], "answers"), made, END)
    with pytest.raises(DataError, match="the response has '<eos>'"):
        pack_pairs([Judged("ab", "", chosen=("c<eos>b",), rejected=("d",))], made, END)


def test_an_answer_with_any_of_several_end_tokens_before_its_end_is_refused():
    """A model that samples stops at each of them; only what ends no answer may be in the middle of one."""
    made = tokenizer()
    other = made.bos_token_id
    assert pack_examples([Problem("ab", "a<bos>b")], made, END).tokens.tolist()[-4:] == [4, other, 5, END]
    said = r"the token that ends an answer, before its end"
    for ends in ((END, other), (other, END)):
        for token in ("<bos>", "<eos>"):
            with pytest.raises(DataError, match=rf"the answer has '{token}', {said}"):
                pack_examples([Problem("ab", f"a{token}b")], made, ends)
            with pytest.raises(DataError, match=rf"the response has '{token}', {said}"):
                pack_pairs([Judged("ab", "", chosen=("c",), rejected=(f"d{token}b",))], made, ends)
            with pytest.raises(DataError, match=rf"message 1 has '{token}', the token that ends an answer, inside"):
                pack_examples([Problem(talk("ab"), f"a{token}b")], made, ends)
            (end,) = made.encode(token, add_special_tokens=False)
            assert pack_examples([Problem("ab", f"a{token}")], made, ends).tokens.tolist()[-2:] == [4, end]


def test_conversations_of_generated_tasks():
    """Held-out ones keep the prompt and the answer that an evaluation asks for; the longest row is known."""
    for task in (TASKS["calculator"], TASKS["guess_number"]):
        made, dialogues, key = char_tokenizer(task.alphabet + "\n"), TaskDialogues(task), Key.from_seed(3)
        made.chat_template = CHAT_TEMPLATE
        held = dialogues.held_out(5)
        for one, problem in zip(held, task.held_out(5), strict=True):
            assert one.messages == task.dialogue(problem)
            for name in ("prompt", "answer", "id", "data_source"):
                assert getattr(one, name) == getattr(problem, name)
        rows = pack_examples([*dialogues.train(key, 7, 100), *held], made, END)
        assert int(rows.lengths.max()) <= dialogues.max_row and dialogues.max_prompt == task.max_prompt
    later = attrs.evolve(TASKS["calculator"], dialogue=lambda problem: talk(*"ab" * (1 + problem.id % 3)))
    assert TaskDialogues(later).max_row == 6 * (max(later.max_prompt, later.max_answer) + 2)
