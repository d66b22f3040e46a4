"""Tiny models with images, batches for them, and transformers' own forward of each row by itself."""

import json

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.hf.processor import encode_text, parts_of, read_processor
from verl_fn.backends.hf.tokenizer import read_tokenizer
from verl_fn.backends.hf.vision import PIXELS
from verl_fn.state import Batch, Key, with_images

ARCHS = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "gemma3")
SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "chat_template": True}
# One image; none; two of different shapes; one, higher than wide; none.
PROMPTS = ("<image>ab?", "abc?", "<image>d<image>ab?", "c<image>", "a", "d?")
SHAPES = ((32, 32), (16, 48), (48, 16), (64, 16))
ANSWERS = ("abcd", "ba", "cc", "dab", "bb", "c")
BUDGET = 44  # of three micro-batches or more, one of them without images


def seeing(folder, arch, chars="abcd?", **options):
    """A model whose weights are as large as trained ones, so that its answers depend on what it sees."""
    new_model(folder, chars=chars, arch=arch, **(SIZES | options))
    file = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(t.shape, generator=generator) * t.shape[-1] ** -0.5 if t.dim() > 1 else t
        for name, t in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def cut_into_tiles(folder, tiles=2):
    """Lets the image processor of Idefics3 or SmolVLM cut images into so many tiles a side, and one of the whole."""
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    size = {"longest_edge": tiles * settings["max_image_size"]["longest_edge"]}
    file.write_text(json.dumps(settings | {"do_image_splitting": True, "size": size}))
    tokenizer = read_tokenizer(folder)
    names = [f"<row_{row}_col_{col}>" for row in range(1, tiles + 1) for col in range(1, tiles + 1)]
    tokenizer.add_tokens(names, special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder


def name_tokens(folder):
    """Gives a tokenizer the names and tokens that vLLM's processor of Gemma 3 asks for, as published ones have."""
    named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens=named)
    tokenizer.add_tokens(["\n" * count for count in (1, 2, 3, 4)])
    tokenizer.save_pretrained(folder)


def picture(number, shape):
    rng = np.random.default_rng(number)
    return Image.fromarray(rng.integers(0, 256, (*shape, 3), dtype=np.uint8))


def encoded(folder, prompts=PROMPTS):
    """The prompts with their images, of which each has its own shape."""
    processor, made, shapes = read_processor(folder), [], iter(enumerate(SHAPES * len(prompts)))
    for prompt in prompts:
        text = processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": parts_of(prompt)}], tokenize=False
        )
        made.append(encode_text(text, [picture(*next(shapes)) for _ in range(prompt.count("<image>"))], processor))
    return made, processor


def seen_batch(folder, prompts=PROMPTS, answers=ANSWERS, blank=False):
    """Rows with their images; ``blank`` replaces all pixels by the same gray."""
    made, processor = encoded(folder, prompts)
    rows, masks = [], []
    for (ids, _), answer in zip(made, answers, strict=True):
        said = processor.tokenizer.encode(answer, add_special_tokens=False)
        rows.append([*ids, *said])
        masks.append([0.0] * len(ids) + [1.0] * len(said))
    batch = with_images(Batch.from_rows(rows, {"response_mask": masks}), [images for _, images in made])
    noise = Key.from_seed(5).generator()
    fields = {name: torch.randn(batch.num_tokens, generator=noise) * 0.3 for name in ("advantages", "old_log_probs")}
    fields["old_log_probs"] -= 3.0
    batch = batch.with_tokens(loss_weight=batch["response_mask"] / batch["response_mask"].sum(), **fields)
    if blank:
        batch = batch.with_ragged(pixels=[torch.full_like(row, 0.25) for row in batch.rows(PIXELS)])
    return batch


def arguments(arch, row, image_token):
    """What transformers' forward takes of one row's images."""
    if not len(row[PIXELS]):
        return {}
    images = (row.tokens == image_token).long()[None]
    if arch.startswith("qwen"):
        return {"pixel_values": row[PIXELS], "image_grid_thw": row["grids"], "mm_token_type_ids": images}
    if arch == "gemma3":
        return {"pixel_values": row[PIXELS], "token_type_ids": images}
    return {"pixel_values": row[PIXELS][None], "pixel_attention_mask": row["pixel_masks"][None]}


def own_logprobs(model, arch, batch):
    """transformers' log-probs of each row by itself, at the tokens that were answered."""
    parts = []
    for number in range(len(batch)):
        row = batch.take([number])
        given = arguments(arch, row, model.config.image_token_id)
        logits = model(input_ids=row.tokens[None], use_cache=False, **given).logits[0]
        told = logits.float().log_softmax(-1)[:-1].gather(1, row.tokens[1:, None])[:, 0]
        parts.append(torch.cat([torch.zeros(1), told]) * row["response_mask"])
    return torch.cat(parts)
