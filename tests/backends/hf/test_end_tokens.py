"""One decision for each model folder: training, sampling and rewards agree on the tokens that end an answer."""

import json
import shutil

import pytest
from ragged_rows import OPTIMIZER
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.new_model import EOS, new_model
from verl_fn.backends.hf.tokenizer import contradiction, end_tokens, read_tokenizer
from verl_fn.backends.local import Local
from verl_fn.backends.sampler import Sampler
from verl_fn.data.examples import pack_examples
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import Problem
from verl_fn.rewards.reward import Reward, response_texts
from verl_fn.state import Batch, Key

ABSENT = "absent"
OWN = 2  # what the tokenizer calls <eos>


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Of an architecture whose own end token, 1, is not the tokenizer's."""
    return new_model(tmp_path_factory.mktemp("model"), chars="abcd", arch="gemma", hidden_size=16)


def write(file, **fields):
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({k: v for k, v in (content | fields).items() if v != ABSENT}))


@pytest.fixture
def folder(model, tmp_path):
    """Makes a copy whose files name these end tokens."""

    def make(generation, config):
        copy = shutil.copytree(model, tmp_path / "model")
        write(copy / "config.json", eos_token_id=config)
        (copy / "generation_config.json").unlink(missing_ok=True)
        if generation != ABSENT:
            write(copy / "generation_config.json", eos_token_id=generation)
        return copy

    return make


CASES = [
    # generation_config.json, config.json, all end tokens, whether the tokenizer's own is none of them
    (OWN, OWN, (OWN,), False),
    (1, OWN, (1,), True),
    ([5, OWN], 1, (OWN, 5), False),
    ([5, 6, 5], OWN, (5, 6), True),
    (ABSENT, 1, (1,), True),
    (None, [6, 1], (6, 1), True),
    ([], [1, OWN], (OWN, 1), False),
    (ABSENT, ABSENT, (OWN,), False),
    (ABSENT, None, (OWN,), False),
]


@pytest.mark.parametrize(("generation", "config", "tokens", "contradicts"), CASES, ids=str)
def test_training_sampling_and_rewards_agree(folder, tmp_path, generation, config, tokens, contradicts):
    """Also for a checkpoint of the model, whose architecture has an end token of its own."""
    made = folder(generation, config)
    backend = Local(made, OPTIMIZER)
    backend.save(backend.init(Key.from_seed(0)), tmp_path / "saved")
    for model in (made, tmp_path / "saved"):
        tokenizer = read_tokenizer(model)
        ends = end_tokens(model, tokenizer)
        assert ends == tokens
        assert Sampler(model).end_tokens == set(ends)
        assert (contradiction(model, tokenizer) is not None) == contradicts
        taught = pack_examples([Problem("ab", "dd")], tokenizer, ends[0])
        assert taught.tokens.tolist()[-1] in Sampler(model).end_tokens
        assert response_texts(taught, tokenizer, ends) == ["dd"]


def test_the_text_of_a_response_has_no_end_token_that_is_an_ordinary_one(model):
    """The token of the letter d ends answers: a response that is cut off keeps its last letter."""
    tokenizer, seen = read_tokenizer(model), []
    d = tokenizer.convert_tokens_to_ids("d")
    rows = [[4, 5, d, d], [4, 5, d, 6]]
    batch = Batch.from_rows(rows, {"response_mask": [[0.0, 1.0, 1.0, 1.0]] * 2}, {"finished": [1.0, 0.0]})

    def judge(answers):
        seen.extend(answer.text for answer in answers)
        return [{"score": 0.0, "acc": 0.0, "pred": ""}] * len(answers)

    Reward(judge, tokenizer, (d,))(batch, [Problem("a", ""), Problem("a", "", id=1)])
    assert seen == ["bd", "bdc"]


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    ("value", "says"),
    [
        (99, "has 99 as eos_token_id, which is none of the model's 8 tokens"),
        ([OWN, -1], "has -1 as eos_token_id, which is none of the model's"),
        ("<eos>", "it must be a token's id, or a list of them|cannot be read"),
        ([[OWN]], "it must be a token's id, or a list of them|cannot be read"),
        (True, "it must be a token's id, or a list of them|cannot be read"),
        (2.0, "it must be a token's id, or a list of them|cannot be read"),
    ],
)
def test_what_is_no_token_of_the_model_is_refused(folder, file, value, says):
    made = folder(*((value, OWN) if file.startswith("gen") else (ABSENT, value)))
    for read in (end_tokens, Sampler):
        with pytest.raises(ModelError, match=says) as error:
            read(made)
        assert file in str(error.value)


def test_a_contradiction_names_both_tokens(folder):
    line = contradiction(made := folder(1, OWN), read_tokenizer(made))
    assert f"ends texts with '{EOS}' (2), and generation_config.json ends answers with '<bos>' (1)" in line
    (made / "generation_config.json").write_text('{"eos_token_id": 9999}')
    line = contradiction(made, read_tokenizer(made))
    assert "generation_config.json ends answers with 9999, a token that the tokenizer does not have; " in line


@pytest.mark.parametrize("kind", ["bpe", "words", "unigram"])
def test_characters_are_lost_with_an_error_also_if_the_settings_name_no_unknown_token(kind, tmp_path):
    """As of a tokenizer of the package tokenizers that transformers wraps without unk_token."""
    words = {word: i for i, word in enumerate(["?", EOS, "a", "b", "c"])}
    model = {
        "bpe": lambda: models.BPE(vocab=words, merges=[], unk_token="?"),
        "words": lambda: models.WordLevel(words, unk_token="?"),
        "unigram": lambda: models.Unigram([(word, -1.0) for word in words], unk_id=0),
    }[kind]()
    core = Tokenizer(model)
    core.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS).save_pretrained(tmp_path)
    write(tmp_path / "config.json", model_type="qwen3")
    tokenizer = read_tokenizer(tmp_path)
    assert len(pack_examples([Problem("ab", "c")], tokenizer, 1)) == 1
    for problem, what in ((Problem("aZ", "c"), "prompt 'aZ'"), (Problem("a", "cZ"), "answer 'cZ'")):
        with pytest.raises(DataError, match=rf"does not know every character of the {what}.*: it lacks 'Z'"):
            pack_examples([problem], tokenizer, 1)


@pytest.mark.parametrize("model", [models.WordLevel({EOS: 0, "a": 1}), models.Unigram([(EOS, -1.0), ("a", -1.0)])])
def test_a_tokenizer_without_an_unknown_token_is_read(model, tmp_path):
    core = Tokenizer(model)
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS).save_pretrained(tmp_path)
    write(tmp_path / "config.json", model_type="qwen3")
    assert read_tokenizer(tmp_path).unk_token is None
