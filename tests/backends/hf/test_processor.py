"""Prompts with images, beside transformers' own processors; image processors that are refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from vision_cases import ARCHS, SIZES, encoded, picture

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.new_model import new_model, new_tower
from verl_fn.backends.hf.processor import encode_text, parts_of, read_processor
from verl_fn.backends.hf.tokenizer import read_tokenizer
from verl_fn.cli import main

OWN = {
    "qwen2_5_vl": Qwen2_5_VLProcessor,
    "qwen3_vl": Qwen3VLProcessor,
    "idefics3": Idefics3Processor,
    "gemma3": Gemma3Processor,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def of(arch):
        if arch not in made:
            made[arch] = new_model(tmp_path_factory.mktemp(arch), chars="abcd? \n", arch=arch, **SIZES)
        return made[arch]

    return of


def own_processor(arch, processor):
    """transformers' processor, whose own constructor asks for torchvision where it also reads videos."""
    tokenizer, kind = processor.tokenizer, OWN[arch]
    if arch == "gemma3":
        tokenizer.image_token, tokenizer.image_token_id = "<image_soft_token>", processor.config.image_token_id
        tokenizer.boi_token, tokenizer.eoi_token = "<start_of_image>", "<end_of_image>"
        return kind(processor.image_processor, tokenizer, image_seq_length=4)
    if arch == "idefics3":
        return kind(processor.image_processor, tokenizer, image_seq_len=4)
    made = object.__new__(kind)
    made.image_processor, made.tokenizer, made.image_token = processor.image_processor, tokenizer, processor.mark
    made.image_token_id, made.video_token_id = processor.config.image_token_id, processor.config.video_token_id
    made.image_ids, made.video_ids, made.audio_ids = [made.image_token_id], [made.video_token_id], []
    made.video_token = "<|video_pad|>"
    return made


@pytest.mark.parametrize("arch", OWN)
def test_the_tokens_and_pixels_of_transformers_processor(folder, arch):
    processor = read_processor(folder(arch))
    text = f"<bos>ab{processor.in_text}cd{processor.in_text}?"
    images = [picture(0, (20, 48)), picture(1, (64, 16))]
    ids, found = encode_text(text, images, processor)
    expected = own_processor(arch, processor)(
        images=[images], text=[text], return_tensors="pt", add_special_tokens=False
    )
    assert ids == expected["input_ids"][0].tolist()
    assert torch.equal(found.fields["pixels"], expected["pixel_values"].view_as(found.fields["pixels"]))
    if arch.startswith("qwen"):
        assert torch.equal(found.fields["grids"], expected["image_grid_thw"])
        assert found.positions.shape == (len(ids), 4)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_prompt_without_images(folder, arch):
    ((ids, images),), processor = encoded(folder(arch), ["abc?"])
    assert images is None
    assert ids == processor.tokenizer.encode("<bos>abc?\n", add_special_tokens=False)


def changed(folder, out, **settings):
    shutil.copytree(folder, out)
    file = out / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return out


@pytest.mark.parametrize(
    ("arch", "settings", "says"),
    [
        ("qwen3_vl", {"patch_size": 16}, "makes patches of 1536 numbers in grids of .* reads 384 numbers"),
        ("qwen3_vl", {"merge_size": 1}, "merges 2 x 2 of them"),
        ("smolvlm", {"max_image_size": {"longest_edge": 16}}, "makes images of 16 x 16 pixels, and the"),
        ("gemma3", {"size": {"height": 48, "width": 48}}, "makes images of 48 x 48 pixels"),
        ("gemma3", {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 2,
                    "pan_and_scan_min_ratio_to_activate": 1.1}, "cuts images into crops"),
        ("gemma3", {"image_processor_type": "SiglipImageProcessor"}, "is of SiglipImageProcessor, and"),
    ],
)  # fmt: skip
def test_an_image_processor_of_another_model(folder, tmp_path, arch, settings, says):
    with pytest.raises(ModelError, match=says):
        processor = read_processor(changed(folder(arch), tmp_path / "other", **settings))
        encode_text(processor.in_text, [picture(0, (24, 48))], processor)


def test_what_is_refused(folder, tmp_path):
    processor = read_processor(folder("qwen3_vl"))
    with pytest.raises(ModelError, match=r"the text has 2 marks <\|image_pad\|> for 1 images"):
        encode_text(processor.in_text * 2, [picture(0, (16, 16))], processor)
    with pytest.raises(ModelError, match=r"the image processor fails on images of 4000 x 1 pixels: .*aspect ratio"):
        encode_text(processor.in_text, [picture(0, (1, 4000))], processor)
    with pytest.raises(ModelError, match="models of the type qwen3 read no images here"):
        read_processor(new_model(tmp_path / "text", chars="ab"))
    shutil.copytree(folder("qwen3_vl"), tmp_path / "bare")
    (tmp_path / "bare/preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match="has no preprocessor_config"):
        read_processor(tmp_path / "bare")
    with pytest.raises(ModelError, match="image_size = 20 is not a multiple of 16"):
        new_model(tmp_path / "odd", chars="ab", arch="qwen3_vl", image_size=20)


@pytest.fixture
def text_model(tmp_path):
    """A language model of the Llama type, whose template has roles and wants text."""
    folder = new_model(tmp_path / "text", chars="abcd? \n", arch="llama", hidden_size=32, chat_template=True)
    tokenizer = read_tokenizer(folder)
    tokenizer.chat_template = "{% for m in messages %}<bos>{{ m['role'][0] + m['content'] + '\n' }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("arch", ["smolvlm", "idefics3"])
def test_a_random_tower_before_a_language_model(text_model, tmp_path, arch):
    folder = new_tower(tmp_path / "made", text_model, arch=arch, seed=3, num_hidden_layers=1)
    weights, text = load_file(folder / "model.safetensors"), load_file(text_model / "model.safetensors")
    kept = {name: weights[name.replace("model.", "model.text_model.", 1)] for name in text}
    assert all(torch.equal(t[: len(text[name])], text[name]) for name, t in kept.items())
    tower = {name: t for name, t in weights.items() if "vision_model" in name}
    assert not any("layers.1." in name for name in tower)
    query = next(t for name, t in tower.items() if name.endswith("q_proj.weight"))
    assert abs(float(query.std()) * 32**0.5 - 1.0) < 0.1
    again = load_file(new_tower(tmp_path / "again", text_model, arch=arch, seed=3, num_hidden_layers=1)
                      / "model.safetensors")  # fmt: skip
    assert weights.keys() == again.keys() and all(torch.equal(t, again[name]) for name, t in weights.items())
    processor = read_processor(folder)
    before, tokenizer = read_tokenizer(text_model), processor.tokenizer
    messages = [{"role": "user", "content": "ab?"}, {"role": "assistant", "content": " d\n"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == before.apply_chat_template(
        messages, tokenize=False
    )
    parts = [{"role": "user", "content": parts_of("a<image>b?")}]
    shown = tokenizer.apply_chat_template(parts, tokenize=False)
    assert shown == "<bos>ua<image>b?\n"
    ids, images = encode_text(shown, [picture(0, (32, 32))], processor)
    assert ids.count(processor.config.image_token_id) == 4 and images.fields["pixels"].shape == (1, 3, 32, 32)
    assert tokenizer.encode("abcd", add_special_tokens=False) == before.encode("abcd", add_special_tokens=False)


def test_towers_that_cannot_be_made(text_model, tmp_path, folder, capsys):
    for arguments, says in (
        ({"arch": "qwen3_vl"}, "qwen3_vl has a language model of its own; set --arch smolvlm or idefics3"),
        ({"depth": 3}, "the tower of smolvlm has no field depth"),
        ({"image_size": 20}, "image_size = 20 is not a multiple of 16 pixels"),
    ):
        with pytest.raises(ModelError, match=says):
            new_tower(tmp_path / "made", text_model, **arguments)
    with pytest.raises(ModelError, match="is of the type qwen3_vl; smolvlm goes before models of type llama"):
        new_tower(tmp_path / "made", folder("qwen3_vl"))
    command = ["new-model", str(tmp_path / "made"), "--arch", "smolvlm", "--text-model", str(text_model)]
    assert main([*command, "--chars", "ab"]) == 2
    assert "leave out --chars and --chat-template" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
    assert main([*command, "num_hidden_layers=1", "image_size=48"]) == 0
    assert read_processor(tmp_path / "made").config.vision_config.image_size == 48
