"""Tiny models from nothing: a random Hugging Face folder with a character tokenizer, no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIALS = (PAD, BOS, EOS, UNK)


def char_tokenizer(chars: str) -> Any:
    """A tokenizer with one token a character, and pad, bos, eos and unk before them.

    >>> tokenizer = char_tokenizer("abc")
    >>> tokenizer.encode("cab"), tokenizer.decode([6, 4, 5])
    ([6, 4, 5], 'cab')
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate((*SPECIALS, *chars))}
    if len(vocab) != len(SPECIALS) + len(chars):
        raise ValueError(f"characters are given twice in {chars!r}")
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK)


def new_model(
    folder: str | Path,
    *,
    chars: str,
    arch: str = "qwen3",
    hidden_size: int = 64,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    max_position_embeddings: int = 256,
    tie_word_embeddings: bool = True,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Write a random model of a transformers architecture and its tokenizer into ``folder``.

    Args:
        chars: the alphabet.
        arch: a transformers model type, such as ``qwen3``, ``qwen2``, ``llama``.
        overrides: further fields of that architecture's config.

    Returns:
        The folder.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl_fn.backends.model import quiet

    tokenizer = char_tokenizer(chars)
    config = AutoConfig.for_model(
        arch,
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **({"head_dim": hidden_size // num_attention_heads} | overrides),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder = Path(folder)
    with quiet():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def export_model(source: str | Path, out: str | Path, dtype: str | None = None) -> Path:
    """Copy a model and its tokenizer into ``out``, cast to ``dtype`` if given.

    Raises:
        ConfigError: ``out`` holds something already.
        ModelError: ``source`` is no model folder that transformers can load.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from verl_fn.backends.model import ModelError, quiet, read_config
    from verl_fn.config import ConfigError

    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; choose another folder")
    read_config(source)
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype or "auto")
            model.save_pretrained(out)
        AutoTokenizer.from_pretrained(source).save_pretrained(out)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{source} cannot be copied to {out}: {error}") from error
    return out
