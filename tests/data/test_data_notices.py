"""Notices about data: one line for each unusual property, and none for usual data."""

import json

import attrs
import pytest
from run_configs import tiny_run
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_fn.backends.hf.new_model import char_tokenizer
from verl_fn.config.schema import DataConfig
from verl_fn.data.examples import Conversation, encode_examples
from verl_fn.data.files import FileData
from verl_fn.data.judged import Judged
from verl_fn.data.loading import read_files
from verl_fn.data.notices import notices, of_template
from verl_fn.data.rendering import following, token_ids
from verl_fn.data.tasks import Problem
from verl_fn.runs.prepare import _notices


def problems(*prompts, source="a", answer="b"):
    return [Problem(prompt, answer, i, source) for i, prompt in enumerate(prompts)]


def lines(training, validation=(), answers=False, sizes=(), **table):
    table = DataConfig(**{"train_batch_size": 1} | table)
    return list(notices(training, list(validation), table, char_tokenizer("abc"), answers=answers, sizes=sizes))


def chat(content):
    return ({"role": "user", "content": content},)


def test_usual_data_get_no_notice():
    assert lines(problems("a", "b"), problems("c", chat("a")), train_batch_size=2, val_size=1, answers=True) == []
    assert lines([], problems("a", "a"), train_batch_size=9) == []


@pytest.mark.parametrize("prompt", ["a", chat("a")])
def test_prompts_that_are_there_twice(prompt):
    assert lines(problems(prompt, "b", prompt, prompt)) == ["data.train_files: 2 of 4 prompts repeat an earlier one"]
    assert lines(problems(prompt, "b"), problems(prompt, prompt, "c")) == [
        "data.val_files: 2 of 3 held-out prompts are also in data.train_files"
    ]


def test_prompts_of_several_labelled_responses_are_no_repetition():
    labelled = [Judged("a", "", chosen=("b",)), Judged("a", "", rejected=("c",)), Judged("b", "", rejected=("c",))]
    assert lines(labelled) == [] and len(lines(labelled, labelled[:1])) == 1
    pair = Judged("a", "", chosen=("b",), rejected=("c",))
    for more in ([], labelled):
        assert lines([pair, pair, *more]) == ["data.train_files: 1 of 2 prompts repeat an earlier one"]


def test_ground_truths_that_no_response_can_equal():
    unknown = [*problems("a", answer="ba"), *problems("b", answer="two"), *problems("c", answer="ax")]
    said = lines(unknown)
    assert len(said) == 1 and said[0].startswith(
        "data.train_files: no response can be 2 of the first 3 ground truths; "
    )
    assert "every character of the ground truth 'two': it lacks 'o', 't', 'w'" in said[0]
    assert [line.partition(":")[0] for line in lines([], unknown)] == ["data.val_files"]
    # The rows of fine-tuning are refused for it.
    assert lines(unknown, answers=True) == []
    assert list(notices(unknown, [], DataConfig(train_batch_size=1), None, answers=False)) == []
    # An environment reads them as it likes.
    table = DataConfig(train_batch_size=1)
    assert list(notices(unknown, [], table, char_tokenizer("abc"), answers=False, judged_by_env=True)) == []


@pytest.mark.parametrize(("kind", "said"), [("good", {"chosen": ("b",)}), ("bad", {"rejected": ("c",)})])
def test_labels_of_one_kind(kind, said):
    labelled = [Judged(prompt, "", **said) for prompt in "ab"]
    assert lines(labelled) == [
        f"data.train_files: all responses are labelled {kind}: a preference is learned from responses of both kinds"
    ]
    assert lines([*labelled, Judged("c", "", chosen=("b",), rejected=("c",))]) == []


def test_what_a_chat_template_takes_from_outside():
    tokenizer = char_tokenizer("abc")
    tokenizer.chat_template = "{{ strftime_now('%d') if tools }}{{ 'b' if thinking else 'a' }}"
    table = DataConfig(chat_template_kwargs={"thinking": True, "thinkin": 1}, date="2026-01-02")
    rows = [attrs.evolve(one, chat_template_kwargs={"tone": "a"}) for one in problems(chat("a"), chat("b"))]
    assert list(of_template([rows], table, tokenizer)) == [
        "the chat template can ask for the date: it gets 2026-01-02 in this run, on all days (data.date)",
        "chat_template_kwargs.thinkin has no effect: the chat template has no variable of that name",
        "chat_template_kwargs.tone has no effect: the chat template has no variable of that name",
    ]
    tokenizer.chat_template = "{{ thinking }}"
    table = attrs.evolve(table, chat_template_kwargs={"thinking": True})
    assert list(of_template([[]], table, tokenizer)) == []


def test_arguments_of_templates_beside_prompts_that_no_template_renders():
    tokenizer = char_tokenizer("abc")
    tokenizer.chat_template = "{{ thinking }}{{ messages[0].content }}"
    everywhere, rows = DataConfig(chat_template_kwargs={"thinking": True}), problems("a", chat("b"), "c")
    line = "chat_template_kwargs have no effect on {} prompts: "
    line += "these are strings, and the chat template renders messages"
    assert list(of_template([rows[:2], rows[2:]], everywhere, tokenizer)) == [line.format("2 of 3")]
    assert list(of_template([rows], everywhere, tokenizer, converses=True)) == []
    assert list(of_template([rows], DataConfig(), tokenizer)) == []
    own = [attrs.evolve(one, chat_template_kwargs={"thinking": True}) for one in rows[:2]]
    assert list(of_template([[*own, rows[2]]], DataConfig(), tokenizer)) == [line.format("1 of 2")]


def test_a_batch_larger_than_the_data():
    assert lines(problems("a", "b"), train_batch_size=3) == [
        "data.train_batch_size is 3, but data.train_files has fewer prompts (2): "
        "a step takes some of them more than once"
    ]


def test_a_file_whose_weight_asks_for_more_prompts_than_it_has():
    files = {"train_files": ("x", "y"), "sizes": (1, 2), "train_batch_size": 3}
    assert lines(problems("a", "b", "c"), weights=(1.0, 2.0), **files) == []
    assert lines(problems("a", "b", "c"), weights=(2.0, 1.0), **files) == [
        "data.weights give x 2 of the 3 prompts of a step, and it has only 1: "
        "a step takes some of them more than once"
    ]


def test_sources_that_are_not_evaluated():
    validation = [*problems("a", "b"), *problems("c", source="z"), *problems("ab", source="y")]
    assert lines(problems("ac"), validation, val_size=2) == [
        "data.val_size = 2 leaves out all held-out problems of 'y', 'z'; raise it, or mix the rows of data.val_files"
    ]
    assert lines(problems("ac"), validation, val_size=4) == []


def test_empty_answers_to_train_on():
    training = [*problems("a", answer=""), *problems("b")]
    assert lines(training, answers=True) == [
        "data.train_files: 1 of 2 ground truths are empty: the model learns to say nothing"
    ]
    assert lines(training) == []


@pytest.mark.parametrize(
    ("problem", "answers"),
    [
        (Judged("a", "", chosen=("b<eos>a",), rejected=("c",)), False),
        (Judged(chat("a"), "", chosen=("b",), rejected=(({"role": "assistant", "content": "<eos>c"},),)), False),
        (Conversation(chat("a"), "c", messages=(*chat("a"), {"role": "assistant", "content": "b<eos>a"})), True),
        (Problem("a", "b", tools=({"name": "<eos>"},)), False),
        (Problem("a", "b", tools=({"name": "f", "enum": ["a", "<eos>"]},)), False),
    ],
)
def test_special_tokens_in_what_is_learned_or_shown_besides_the_prompt(problem, answers):
    assert any("1 of 1 problems have special tokens in" in line for line in lines([problem], answers=answers))


def test_special_tokens_inside_texts():
    assert lines(problems("a", chat("b<eos>"), "<pad>c"), problems("<bos>b")) == [
        "data.train_files: 2 of 3 problems have special tokens in their texts, such as '<eos>' in problem 1 of 'a'; "
        "they become control tokens",
        "data.val_files: 1 of 1 problems have special tokens in their texts, such as '<bos>' in problem 0 of 'a'; "
        "they become control tokens",
    ]
    in_answer = problems("a", answer="b<eos>")
    assert lines(in_answer) == []
    assert "such as '<eos>' in problem 0" in lines(in_answer, answers=True)[0]


def test_responses_that_repeat_their_prompt():
    said = "the responses of 1 of 101 prompts begin with the prompt's own text, so the model learns to say it again"
    others = problems(*(f"b{i}" for i in range(100)), answer="c")
    for prompt in ("a b c", chat(" a b c\n")):
        training = [*problems(prompt, answer="a b c d"), *others]
        assert said in lines(training, answers=True)[0] and not any("begin with" in line for line in lines(training))
        pairs = [
            Judged(prompt, "", chosen=("a b c d",), rejected=("a b c a",)),
            Judged("c d e", "", chosen=("c d e a",), rejected=("a",)),
        ]
        assert said.replace("101", "2") in lines(pairs)[0]
    assert lines(problems("Hi", chat("Good morning"), answer="Good morning, Hi"), answers=True) == []
    assert lines(problems("Hi", "Hi!", answer="Hi! How are you?"), answers=True) == []
    answer = ({"role": "assistant", "content": None, "tool_calls": [{"name": "a"}]},)
    assert lines([Judged(chat("a b c"), "", chosen=(answer,), rejected=("b",))]) == []


def fast(model, normalizer=None, pre_tokenizer=None, decoder=None, **special):
    backend = Tokenizer(model)
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(list(special.values()))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def ids(*pieces):
    return {piece: i for i, piece in enumerate(pieces)}


BYTES, LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet()), "abcdefghijklmnopqrstuvwxyz"
LOSSY = {
    "no accents": lambda: fast(
        models.WordPiece(ids("[U]", *LETTERS, *(f"##{one}" for one in LETTERS)), unk_token="[U]"),
        normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(), unk_token="[U]",
    ),
    "unknown are dropped": lambda: fast(models.BPE(ids(*LETTERS, " "), [])),
    "the unknown token is the end": lambda: fast(models.BPE(ids("<e>", *LETTERS, " "), [], unk_token="<e>"),
                                                 unk_token="<e>", eos_token="<e>"),
    "no bytes": lambda: fast(models.BPE(ids(*(b for b in BYTES if b != "©")), []), None,
                             pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()),
}  # fmt: skip
WHOLE = {
    "bytes": lambda: fast(models.BPE(ids(*BYTES), []), normalizers.NFC(), pre_tokenizers.ByteLevel(False),
                          decoders.ByteLevel()),
    "bytes without a decoder": lambda: fast(models.BPE(ids(*BYTES), []), None, pre_tokenizers.ByteLevel(False)),
    "bytes as a fallback": lambda: fast(
        models.BPE(ids("<u>", *(f"<0x{i:02X}>" for i in range(256)), *LETTERS, "▁"), [], byte_fallback=True,
                   unk_token="<u>"),
        normalizers.Replace(" ", "▁"), None,
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), unk_token="<u>",
    ),
    "words": lambda: fast(models.WordLevel(ids("<u>", "do", "not", "café", ",", "\u2013"), unk_token="<u>"), None,
                          pre_tokenizers.Whitespace(), decoders.WordPiece(), unk_token="<u>"),
    "other forms": lambda: fast(
        models.Unigram([("<u>", 0.0), *((one, -1.0) for one in [*LETTERS, *"é21\u2044,-▁"])], 0),
        normalizers.Sequence([normalizers.Replace("\u2013", "-"), normalizers.NFKC(), normalizers.Lowercase()]),
        pre_tokenizers.Metaspace(), decoders.Metaspace(), unk_token="<u>",
    ),
}  # fmt: skip


def of_tokenizer(tokenizer, *texts, answers=False):
    rows = [Problem(one if i % 2 else chat(one), one if answers else "", i, "s") for i, one in enumerate(texts)]
    found = notices(rows, [], DataConfig(train_batch_size=1), tokenizer, answers=answers)
    return [line for line in found if "drops characters or accents" in line]


@pytest.mark.parametrize("kind", LOSSY)
def test_characters_that_a_tokenizer_drops(kind):
    assert of_tokenizer(LOSSY[kind](), "abc", "café", "é a é") == [
        "data.train_files: the tokenizer drops characters or accents of 2 of the first 3 problems, "
        "and the model does not see them; problem 1 of 's': 'é'"
    ]
    assert of_tokenizer(LOSSY[kind](), "abc", "a b") == []


@pytest.mark.parametrize("kind", WHOLE)
def test_other_spaces_and_other_forms_of_characters_are_no_loss(kind):
    texts = ["do not", "caf\ufffd", "café", "cafe\u0301", "½ ﬁ ²", "Do \n\u200b not", "do \u2013 not,"]
    assert of_tokenizer(WHOLE[kind](), *(texts if kind != "words" else [texts[i] for i in (0, 2, 6)])) == []


def test_characters_are_looked_for_in_the_beginnings_of_one_problem_after_the_other():
    class Counted(list):
        def __getitem__(self, number):
            assert not isinstance(number, slice)
            return super().__getitem__(number)

    tokenizer = LOSSY["unknown are dropped"]()
    rows = Counted(problems("a" * 1999 + "é", "b" * 2000 + "é"))
    for answers in (False, True):
        found = notices(rows, Counted(), DataConfig(train_batch_size=1), tokenizer, answers=answers)
        assert sum("of 1 of the first 2 problems, and the model" in line for line in found) == 1


def test_characters_of_answers_are_looked_at_if_these_are_learned():
    tokenizer, table = LOSSY["unknown are dropped"](), DataConfig(train_batch_size=1)
    bad = ({"role": "assistant", "content": "ö"},)
    rows = [Problem("a", "é", 0, "s"), Judged("b", "b", 1, "s", chosen=("a",), rejected=(bad,))]
    learned, sampled = (list(notices(rows, [], table, tokenizer, answers=answers)) for answers in (True, False))
    assert len(learned) == len(sampled) == 1
    assert "of 2 of the first 2 problems, and the model does not see them; problem 0 of 's': 'é'" in learned[0]
    assert "of 1 of the first 2 problems, and the model does not see them; problem 1 of 's': 'ö'" in sampled[0]


TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)


LLAMA = "[INST] {{ messages[0].content }} [/INST]{% if messages[1:] %} {{ messages[1].content }} <eos>{% endif %}"


@pytest.mark.parametrize("template", [TURNS, LLAMA])
def test_prompts_as_strings_of_a_model_that_answers_in_turns(template):
    tokenizer = char_tokenizer("abc")
    tokenizer.chat_template = template
    rows = problems("a", chat("b"), "c")
    assert list(of_template([rows[:2], rows[2:]], DataConfig(), tokenizer)) == [
        "2 of the first 2 prompts that are strings are not as the chat template writes a prompt: the model continues "
        "them as text; write messages for a model that answers in turns"
    ]
    assert list(of_template([rows[1:2], []], DataConfig(), tokenizer)) == []
    assert list(of_template([rows], DataConfig(), tokenizer, converses=True)) == []
    assert list(of_template([], DataConfig(), tokenizer)) == []


OF_BASE = TURNS.replace("<eos>", "<|end|>")


@pytest.mark.parametrize(
    "template", [None, OF_BASE, "{{ messages[0].content }}\n", "{{ raise_exception('no system') }}"]
)
def test_prompts_as_strings_of_a_model_without_turns(template):
    tokenizer = char_tokenizer("abc")
    tokenizer.chat_template = template
    assert list(of_template([problems("a", "c")], DataConfig(), tokenizer)) == []


def test_prompts_as_strings_that_are_rendered_already():
    tokenizer = char_tokenizer("abc<|>sitnedru")
    tokenizer.chat_template = TURNS
    assert list(of_template([problems("<|user|>a<eos><|assistant|>")], DataConfig(), tokenizer)) == []
    tokenizer.chat_template = LLAMA
    for prompt in ("<bos>a<eos>", "[INST] a [/INST]"):
        assert list(of_template([problems(prompt)], DataConfig(), tokenizer)) == []
    for some in (["[INST] a [/INST]"] * 20 + ["a"], ["a"] + ["[INST] b [/INST]"] * 20):
        (line,) = of_template([problems(*some)], DataConfig(), tokenizer)
        assert line.startswith("1 of the first 21 prompts that are strings are not as the chat template writes")


@pytest.mark.parametrize(
    ("more", "told"),
    [([], True), (["env.name={folder}/mine.py:make"], False),
     (["env.name={folder}/mine.py:make", "reward.functions={folder}/mine.py:score"], True)],
)  # fmt: skip
def test_an_environment_may_have_ground_truths_that_nobody_writes(more, told, tiny, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def make():\n    pass\n\n\ndef score(solution_str, ground_truth):\n    return 0.0\n"
    )
    rows = {"prompt": "ab>", "data_source": "reverse", "reward_model": {"style": "rule", "ground_truth": "2"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows) + "\n")
    source = FileData(read_files([tmp_path / "rows.jsonl"], "samples"), (), True)
    settings = [f"data.train_files={tmp_path}/rows.jsonl", *(one.format(folder=tmp_path) for one in more)]
    plan = tiny_run(tiny, tmp_path / "run", *settings)
    said = list(_notices(source, plan, char_tokenizer("ab>"), answers=False))
    assert any("no response can be" in line for line in said) == told, said


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_answers_begin_without_the_space_that_a_tokenizer_begins_texts_with(scheme):
    """SentencePiece's write one before every text; an answer follows its prompt as the data have it."""
    tokenizer = fast(
        models.BPE(ids("<u>", *(f"<0x{i:02X}>" for i in range(256)), *LETTERS, "\u2581"), [], byte_fallback=True,
                   unk_token="<u>"),
        None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False), unk_token="<u>",
    )  # fmt: skip
    texts = "on", "do", " on", "\non", "\n\non", "\u2013", ""
    learned = [tokenizer.convert_ids_to_tokens(one) for one in following(list(texts), tokenizer)]
    feed = "<0x0A>"
    assert learned[:5] == [[*"on"], [*"do"], ["\u2581", *"on"], [feed, *"on"], [feed, feed, *"on"]]
    assert learned[5:] == [["<0xE2>", "<0x80>", "<0x93>"], []]
    for prompt in ("don", "d "):
        (row,) = encode_examples([Problem(prompt, "on")], tokenizer, 7)
        (whole,) = token_ids([f"{prompt}on"], tokenizer)
        assert row[0] == [*whole, 7]
