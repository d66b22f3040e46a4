# ruff: noqa: RUF001
"""Rows of the shapes of public chat templates: as transformers renders them, with what is learned written out."""

import copy
import functools
import json

import attrs
import pytest
from chat_templates import FAMILIES, PHI3_FIRST
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_fn.backends.hf.new_model import CHAT_TEMPLATE, char_tokenizer, new_model
from verl_fn.backends.hf.tokenizer import chat_texts, read_tokenizer, with_chat_arguments
from verl_fn.config.schema import DataConfig
from verl_fn.data.examples import Conversation, encode_examples, encode_rows
from verl_fn.data.files import encode_prompts
from verl_fn.data.judged import Judged
from verl_fn.data.notices import of_template
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import Problem

TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)
SYSTEM, ASKS, MORE = (
    {"role": role, "content": text} for role, text in (("system", "Be kind."), ("user", "2+3?"), ("user", "And 4?"))
)
SAYS, ADDS = {"role": "assistant", "content": "5"}, {"role": "assistant", "content": "9"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": "2"}}}],
}
RESULT = {"role": "tool", "content": "five"}


@functools.cache
def tokenizer(family):
    """A tokenizer of bytes with the special tokens of a family, and the tokens that end an answer."""
    template, eos, bos, ends = FAMILIES[family]
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    special = dict.fromkeys([eos, *([bos] if bos else []), *ends])
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, **({"bos_token": bos} if bos else {}))
    made.chat_template = template
    return made, tuple(made.convert_tokens_to_ids(ends))


def talk(*messages, **more):
    return Conversation(tuple(messages[:-1]), "", messages=messages, **more)


def rows(family, problem):
    """Each row of a problem as the text before what is learned and a list of the learned texts."""
    made, ends = tokenizer(family)
    results = []
    for ids, mask in encode_examples([problem], made, ends):
        learned, last = [], 0.0
        for token, on in zip(ids, mask, strict=True):
            learned = [*learned, []] if on and not last else learned
            if on:
                learned[-1].append(token)
            last = on
        results.append((made.decode(ids), [made.decode(part) for part in learned]))
    return results


def rendered(family, messages, tools=(), *, prompt=False, **more):
    made, _ = tokenizer(family)
    return made.apply_chat_template(
        list(messages), tools=list(tools) or None, add_generation_prompt=prompt, tokenize=False, **more
    )


# What is learned of an answer "5", with its end token.
ANSWERS = {
    "Qwen2.5": "5<|im_end|>",
    "Qwen3": "<think>\n\n</think>\n\n5<|im_end|>",
    "Qwen3.5": "\n</think>\n\n5<|im_end|>",
    "Llama 3": "5<|eot_id|>",
    "Gemma 3": "5<end_of_turn>",
    "Phi-3": "5<|end|>",
    "Phi-4": "5<|im_end|>",
    "DeepSeek-R1": "\n</think>\n\n5<｜end▁of▁sentence｜>",
    "gpt-oss": "<|channel|>final<|message|>5<|return|>",
    "Mistral": " 5</s>",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_the_same_row_in_every_layout(family):
    system = () if family == "Mistral" else (SYSTEM,)
    prompt = (*system, ASKS)
    before = rendered(family, prompt, prompt=True)
    expected = [(before + ANSWERS[family], [ANSWERS[family]])]
    assert rows(family, talk(*prompt, SAYS)) == rows(family, Problem(prompt, "5")) == expected
    # The end token in the data is the template's.
    assert rows(family, talk(*prompt, SAYS | {"content": "5" + FAMILIES[family][3][-1]})) == expected
    pair = rows(family, Judged(prompt, "", chosen=("5",), rejected=((ADDS,),)))
    assert pair == [*expected, (before + ANSWERS[family].replace("5", "9"), [ANSWERS[family].replace("5", "9")])]
    if family != "DeepSeek-R1":  # whose template leaves out what it opens
        assert rendered(family, [*prompt, SAYS]).startswith(expected[0][0])
    made, ends = tokenizer(family)
    (asked,), ((ids, _),) = (
        encode_prompts([Problem(prompt, "")], made),
        encode_examples([Problem(prompt, "5")], made, ends),
    )
    assert ids[: len(asked)] == asked


# The learned texts of two turns, "5" and "9", and whether they share a row.
TURNS = {family: (ANSWERS[family], True) for family in FAMILIES} | dict.fromkeys(
    ["Qwen3", "Qwen3.5", "DeepSeek-R1", "gpt-oss"], None
)


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_share_a_row_unless_the_template_rewrites_earlier_ones(family):
    first, second = ANSWERS[family], ANSWERS[family].replace("5", "9")
    got = rows(family, talk(ASKS, SAYS, MORE, ADDS))
    whole = rendered(family, [ASKS, SAYS, MORE], prompt=True) + second
    if TURNS[family]:
        assert got == [(whole, [first, second])]
    else:
        assert got == [(rendered(family, [ASKS], prompt=True) + first, [first]), (whole, [second])]
    # A turn with weight 0 is context.
    assert rows(family, talk(ASKS, SAYS | {"weight": 0}, MORE, ADDS)) == [(whole, [second])]


REASONED = {
    "Qwen3": "<think>\nhm\n</think>\n\n5<|im_end|>",
    "Qwen3.5": "hm\n</think>\n\n5<|im_end|>",
    "DeepSeek-R1": "hm\n</think>\n\n5<｜end▁of▁sentence｜>",
    "gpt-oss": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>5<|return|>",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_reasoning_is_learned_or_refused(family):
    field = "thinking" if family == "gpt-oss" else "reasoning_content"
    problem = talk(ASKS, SAYS | {field: "hm"})
    if family not in REASONED:
        with pytest.raises(DataError, match=f"leaves out {field} of message 1, of the role assistant"):
            rows(family, problem)
        return
    expected = [(rendered(family, [ASKS], prompt=True) + REASONED[family], [REASONED[family]])]
    assert rows(family, problem) == expected
    if family == "gpt-oss":
        with pytest.raises(DataError, match=r"leaves out reasoning_content .*other names for reasoning"):
            rows(family, talk(ASKS, SAYS | {"reasoning_content": "hm"}))
    else:
        assert rows(family, Problem((ASKS,), "<think>\nhm\n</think>\n\n5")) == expected


CALLS = {
    "Qwen2.5": '<tool_call>\n{"name": "add", "arguments": {"a": "2"}}\n</tool_call><|im_end|>',
    "Qwen3": '<think>\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": "2"}}\n</tool_call><|im_end|>',
    "Qwen3.5": "\n</think>\n\n<tool_call>\n<function=add><parameter=a>2</function>\n</tool_call><|im_end|>",
    "Llama 3": '{"name": "add", "arguments": {"a": "2"}}<|eot_id|>',
    "gpt-oss": ' to=functions.add<|channel|>commentary json<|message|>{"a": "2"}<|call|>',
    "Mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": "2"}}]</s>',
}


def test_a_call_without_content_reaches_the_template_of_new_models():
    """It shows no calls, and the error says so."""
    made = char_tokenizer("ab0123456789")
    made.chat_template = CHAT_TEMPLATE
    with pytest.raises(DataError, match="leaves out tool_calls of message 1"):
        encode_examples([talk(ASKS, CALL | {"content": None})], made, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_tools_and_calls_are_shown_or_refused(family):
    made, _ = tokenizer(family)
    asked = Problem((ASKS,), "5", tools=TOOLS)
    if family not in CALLS:
        for use in (lambda: encode_prompts([asked], made), lambda: rows(family, talk(ASKS, SAYS, tools=TOOLS))):
            with pytest.raises(DataError, match="does not show the tools of the row to the model"):
                use()
        if family != "DeepSeek-R1":
            with pytest.raises(DataError, match=r"leaves out tool_calls of message 1|template failed"):
                rows(family, talk(ASKS, CALL))
        return
    assert made.decode(encode_prompts([asked], made)[0]) == rendered(family, [ASKS], TOOLS, prompt=True)
    got = rows(family, talk(ASKS, CALL, RESULT, SAYS, tools=TOOLS))
    assert [part for _, learned in got for part in learned] == [CALLS[family], ANSWERS[family]]
    assert got[0][0].startswith(rendered(family, [ASKS], TOOLS, prompt=True) + CALLS[family])
    assert got[-1][0] == rendered(family, [ASKS, CALL, RESULT], TOOLS, prompt=True) + ANSWERS[family]
    if family == "Qwen3.5":
        text = {"type": "function", "function": {"name": "add", "arguments": '{"a": "2"}'}}
        with pytest.raises(DataError, match=r"leaves out the arguments of tool_calls .* only an object"):
            rows(family, talk(ASKS, CALL | {"tool_calls": [text]}))


def test_messages_that_a_template_drops_are_refused():
    made, ends = tokenizer("Phi-3")
    first = PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer, eos_token=made.eos_token)
    first.chat_template = PHI3_FIRST
    for use in (
        lambda: encode_prompts([Problem((SYSTEM, ASKS), "")], first),
        lambda: encode_examples([talk(SYSTEM, ASKS, SAYS)], first, ends),
    ):
        with pytest.raises(DataError, match="leaves out content of message 0, of the role system"):
            use()
    with pytest.raises(
        DataError, match=r"message 1 has '<\|end\|>', the token that ends an answer, inside its content"
    ):
        encode_examples([talk(ASKS, SAYS | {"content": "a<|end|>b"})], made, ends)


# A template of questions and answers that knows nothing else.
PLAIN = (
    "{% for m in messages if m.role in ('user', 'assistant') %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def asks(text):
    return {"role": "user", "content": text}


def calls(content, **more):
    function = {"name": "add", "arguments": {"a": "2"}}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"type": "function", "function": function}],
        **more,
    }


@pytest.mark.parametrize(
    ("messages", "tools", "message"),
    [
        ([asks("Please add 2 and 3."), SAYS], TOOLS, "does not show the tools of the row"),
        ([{"role": "system", "content": "Hi"}, asks("Hi there"), SAYS], (), "leaves out content of message 0"),
        ([asks("Is 5 right?"), ADDS, {"role": "tool", "content": "5"}, MORE, ADDS], (), "content of message 2"),
        ([asks("add 2"), calls("", weight=0), MORE, SAYS], (), "leaves out tool_calls of message 1"),
        ([asks("Yes?"), calls("I add 2.")], (), "leaves out tool_calls of message 1"),
    ],
)
def test_what_a_template_drops_is_noticed_if_other_messages_have_its_words(messages, tools, message, monkeypatch):
    made, ends = tokenizer("Qwen2.5")
    monkeypatch.setattr(made, "chat_template", PLAIN)
    with pytest.raises(DataError, match=message):
        encode_examples([talk(*messages, tools=tools)], made, ends)


def test_every_call_and_every_tool_is_shown(monkeypatch):
    made, ends = tokenizer("gpt-oss")
    two = [CALL["tool_calls"][0], {"type": "function", "function": {"name": "add", "arguments": {"a": "7"}}}]
    for messages in (
        [ASKS, CALL | {"tool_calls": two}],
        [ASKS, CALL | {"tool_calls": two, "weight": 0}, RESULT, SAYS],
    ):
        with pytest.raises(DataError, match="leaves out tool_calls of message 1"):
            encode_examples([talk(*messages)], made, ends)
    assert "7" in rows("Mistral", talk(ASKS, CALL | {"tool_calls": two}))[0][1][0]
    tools = (*TOOLS, {"type": "function", "function": {"name": "multiply"}})
    rows("gpt-oss", talk(ASKS, SAYS, tools=tools))
    monkeypatch.setattr(made, "chat_template", made.chat_template.replace("tools | tojson", "tools[0] | tojson"))
    with pytest.raises(DataError, match="does not show the tools of the row to the model, such as 'multiply'"):
        encode_examples([talk(ASKS, SAYS, tools=tools)], made, ends)
    longer = {"type": "function", "function": {"name": "multiply_add"}}
    with pytest.raises(DataError, match="such as 'add'"):
        encode_examples([talk(ASKS, SAYS, tools=(longer, *TOOLS))], made, ends)


def test_an_end_token_ends_an_answer_once_or_is_refused():
    made, ends = tokenizer("Qwen3")
    for text in ("5<|im_end|><|im_end|>", "5<|im_end|>\n<|endoftext|>\n"):
        assert rows("Qwen3", talk(ASKS, SAYS)) == rows("Qwen3", talk(ASKS, {"role": "assistant", "content": text}))
        assert rows("Qwen3", Problem("2+3?", text)) == [("2+3?5<|im_end|>", ["5<|im_end|>"])]
    call = calls("")
    call["tool_calls"][0]["function"]["arguments"] = {"a": "2<|im_end|>"}
    for message in (SAYS | {"reasoning_content": "So <|im_end|> it is"}, call, SAYS | {"content": "5<|im_end|>6"}):
        with pytest.raises(DataError, match=r"the token that ends an answer, inside its (rea|tool|content)"):
            encode_examples([talk(ASKS, message)], made, ends)


def test_pairs_of_the_same_tokens_are_refused():
    made, ends = tokenizer("Qwen2.5")
    pair = Judged((ASKS,), "", chosen=((SAYS,),), rejected=((SAYS | {"name": "x"},),))
    with pytest.raises(DataError, match="chosen and rejected are the same tokens"):
        encode_examples([pair], made, ends)


def test_arguments_of_templates_reach_what_is_learned():
    made, ends = tokenizer("Qwen3.5")
    problem = attrs.evolve(Problem((ASKS,), "5"), chat_template_kwargs={"enable_thinking": False})
    ((ids, mask),) = encode_rows([problem], made, ends)[0]
    assert made.decode(ids) == rendered("Qwen3.5", [ASKS], prompt=True, enable_thinking=False) + "5<|im_end|>"
    assert made.decode([token for token, on in zip(ids, mask, strict=True) if on]) == "5<|im_end|>"


def test_arguments_of_a_problem_replace_those_of_the_run():
    made = char_tokenizer("abcd?")
    made.chat_template = "{{ messages[0].content }}{{ one }}{{ two }}"
    asked, own = ({"role": "user", "content": "?"},), {"two": "d"}
    problems = [attrs.evolve(Problem(asked, "a"), chat_template_kwargs=kwargs) for kwargs in ({}, own)]
    with_chat_arguments(made, {"one": "a", "two": "b"}, None)
    assert made.batch_decode(encode_prompts(problems, made, 8)) == ["?ab", "?ad"]
    texts = [chat_texts(made, [(asked, True)], chat_template_kwargs=kwargs)[0] for kwargs in ({}, own)]
    assert texts == ["?ab", "?ad"]


def test_reasoning_that_begins_an_answer_is_not_said_to_be_unseen():
    """R1's template leaves reasoning out of every turn, and the prompt of an answer opens it."""
    made, _ = tokenizer("DeepSeek-R1")
    thinks = SAYS | {"reasoning_content": "2+3 is 5"}
    learned = [talk(ASKS, thinks), Judged((ASKS,), "", chosen=((thinks,),), rejected=((SAYS,),))]
    unseen = [talk(ASKS, thinks | {"weight": 0}, MORE, ADDS), Problem((ASKS, thinks, MORE), "9")]
    assert "2+3 is 5\n</think>" in rows("DeepSeek-R1", learned[0])[0][0]
    for problem, lines in [(one, 0) for one in learned] + [(one, 1) for one in unseen]:
        said = list(of_template([[problem]], DataConfig(), made))
        assert len(said) == lines and all(
            "does not see them: assistant.reasoning_content (1 rows)" in one for one in said
        )


# What a template of models with images has that shows a content only as parts.
SMOLVLM = (
    "{% for m in messages %}{{ m['role'] | capitalize }}{% if m['content'][0]['type'] == 'image' %}:{% else %}: "
    "{% endif %}{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)


def test_a_template_that_shows_only_parts_gets_text_as_parts():
    made, ends = tokenizer("Qwen2.5")
    made = copy.deepcopy(made)
    made.chat_template = SMOLVLM
    ((ids, mask),) = encode_examples([talk(SYSTEM, ASKS, SAYS)], made, ends)
    assert made.decode(ids) == "System: Be kind.<|im_end|>\nUser: 2+3?<|im_end|>\nAssistant: 5<|im_end|>"
    assert made.decode([token for token, on in zip(ids, mask, strict=True) if on]) == "5<|im_end|>"
    made.chat_template = FAMILIES["Qwen2.5"][0]
    assert (
        made.decode(encode_examples([talk(ASKS, SAYS)], made, ends)[0][0])
        == rendered("Qwen2.5", [ASKS, SAYS]).strip()
    )


def test_a_template_in_the_older_file_of_processors_is_read(tmp_path):
    folder = new_model(tmp_path / "m", chars="abcd?\n", chat_template=True)
    (file := folder / "chat_template.jinja").rename(tmp_path / "template")
    assert not file.exists() and read_tokenizer(folder).chat_template is None
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": (tmp_path / "template").read_text()}))
    assert encode_prompts([Problem(({"role": "user", "content": "ab?"},), "")], read_tokenizer(folder), 9)
