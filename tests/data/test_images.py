"""Columns of images: what is read, what becomes of it, and what is refused."""

import base64
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.hf.tokenizer import read_tokenizer
from verl_fn.config.schema import DataConfig
from verl_fn.data.encoded import Encoder, short_enough
from verl_fn.data.examples import pack_examples
from verl_fn.data.files import encode_prompts, prompt_lengths
from verl_fn.data.images import FromFile, images_in, pictures
from verl_fn.data.loading import read_files
from verl_fn.data.notices import traits_of
from verl_fn.data.prepare import ALPHABET, drawn_digit, prepare_squares
from verl_fn.data.reading import Unstorable, name_of, packed, unpacked
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import Problem

SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}


def picture(seed=0, shape=(32, 32)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8))


def png(seed=0, shape=(32, 32)):
    written = io.BytesIO()
    picture(seed, shape).save(written, "PNG")
    return written.getvalue()


TEXT = base64.b64encode(png()).decode()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return read_tokenizer(new_model(folder, chars="abcd?", arch="qwen3_vl", chat_template=True, **SIZES))


def row(content="<image>ab?", images=(None,), **more):
    prompt = [{"role": "user", "content": content}] if not isinstance(content, list) else content
    return {
        "data_source": "mine",
        "prompt": prompt,
        "images": list(images),
        "reward_model": {"ground_truth": "a"},
    } | more


def problems(folder, *rows, learns_from="samples"):
    pq.write_table(pa.Table.from_pylist(list(rows)), folder / "rows.parquet")
    return read_files([folder / "rows.parquet"], learns_from)


def refused(folder, says, *rows):
    with pytest.raises(DataError, match=says):
        problems(folder, *rows)


def test_every_form_of_an_image_is_the_same_image(tmp_path, tokenizer):
    (tmp_path / "a.png").write_bytes(png())
    forms = [
        {"bytes": png(), "path": None}, {"bytes": None, "path": "a.png"}, {"image": "a.png"}, "a.png",
        str(tmp_path / "a.png"), "data:image/png;base64," + TEXT, png(), picture(),
        np.asarray(picture()), {"image": picture()},
    ]  # fmt: skip
    found = [images_in(f"{tmp_path}/rows.jsonl, line 1", {"images": [form]}) for form in forms]
    found.append(images_in("rows.jsonl, line 1", {"image": png()}))
    rows = [pack_examples([Problem("<image>?", "a", images=images)], tokenizer, 2) for images in found]
    assert all(torch.equal(one["pixels"], rows[0]["pixels"]) for one in rows)
    assert images_in("rows.jsonl, line 1", {"images": [], "image": None}) == ()
    assert images_in("rows.jsonl, line 1", {"images": [None, png(), None]}) == (png(),)
    lines, other = base64.encodebytes(png()).decode(), base64.urlsafe_b64encode(png()).decode()
    for text in (lines, TEXT + "\n", other, other.rstrip("=")):
        assert images_in("rows.jsonl, line 1", {"images": ["data:image/png;base64," + text]}) == (png(),)
    with pytest.raises(DataError, match=r"long/picture cannot be read: No such file or directory$"):
        images_in("rows.jsonl, line 1", {"images": ["pictures/" * 9 + "long/picture"]})


def written(image, kind="PNG", **more):
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def seen(form):
    images = images_in("rows.jsonl, line 1", {"images": [form]})
    return np.asarray(pictures(Problem("<image>?", "a", images=images))[0])


def test_a_picture_is_what_a_viewer_shows():
    exif = Image.Exif()
    exif[274] = 6  # turn it by 90 degrees
    turned = np.rot90(np.asarray(picture(shape=(32, 48))), -1)
    lying = picture(shape=(32, 48))
    assert (seen(written(lying, exif=exif)) == turned).all()
    assert (seen(Image.open(io.BytesIO(written(lying, exif=exif)))) == turned).all()
    # Black strokes on nothing are not a black square.
    drawing = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    drawing.putpixel((1, 2), (0, 0, 0, 255))
    white = np.full((4, 4, 3), 255)
    white[2, 1] = 0
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([9, 9, 9, 0, 0, 0])
    palette.putpixel((1, 2), 1)
    forms = [
        drawing,
        written(drawing),
        written(drawing.convert("LA")),
        written(palette, transparency=0),
        np.array(drawing),
    ]
    assert all((seen(form) == white).all() for form in forms)
    assert (seen(torch.from_numpy(np.asarray(lying).copy())) == np.asarray(lying)).all()
    # The second frame of a camera's stereo photo shows the same scene.
    stereo = written(lying, "MPO", save_all=True, append_images=[picture(1)])
    assert (seen(stereo) == np.asarray(Image.open(io.BytesIO(stereo)))).all()


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (lambda: written(Image.fromarray(np.full((4, 4), 4095, np.uint16))), "16 bits or more.*I;16"),
        (lambda: np.full((4, 4), 300, np.uint16), "16 bits or more"),
        (lambda: np.full((4, 4), 0.5, np.float32), "or fractions"),
        (lambda: written(picture(), "GIF", save_all=True, append_images=[picture(1)]), "2 frames"),
        (lambda: written(picture(), "WEBP", save_all=True, append_images=[picture(1)]), "2 frames"),
        (lambda: written(picture(), "TIFF", save_all=True, append_images=[picture(1)]), "2 frames or pages"),
        (lambda: Image.new("RGB", (0, 5)), "no pixels: it is 0 x 5"),
        (lambda: np.zeros((0, 5, 3), np.uint8), "no pixels"),
        (lambda: Image.open(io.BytesIO(written(picture(), "JPEG")[:-200])), "image 1 is damaged"),
        (lambda: "a\x00b", "cannot be read: embedded null"),
        (lambda: "~a\x00b", "cannot be read: embedded null"),
        (lambda: "~nosuchuser.png", r"~nosuchuser\.png cannot be read: No such file"),
        (lambda: "iVBORw0KGgo" * 99, "^.{0,300} cannot be read: File name too long"),
        (lambda: torch.zeros(3, 8, 9, dtype=torch.uint8), "write height x width x 3"),
    ],
)
def test_pictures_that_would_be_seen_otherwise_are_refused(form, says):
    with pytest.raises(DataError, match=says):
        seen(form())


def test_marks_and_parts_are_the_same_prompt(tmp_path, tokenizer):
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "ab?"}]
    one, other = (
        problems(tmp_path, row(content, [{"bytes": png()}]))[0]
        for content in ("<image>ab?", [{"role": "user", "content": parts}])
    )
    assert one.prompt == other.prompt and one.images == other.images == (png(),)
    held = []
    ids = encode_prompts([one, Problem("b?", "")], tokenizer, images=held)
    assert held[0].fields["grids"].tolist() == [[1, 4, 4]] and held[1] is None
    assert ids[0].count(tokenizer.convert_tokens_to_ids("<|image_pad|>")) == 4
    assert prompt_lengths([one], tokenizer) == [len(ids[0])]


def test_conversations_and_string_prompts(tmp_path, tokenizer):
    """The image of each row goes with it, also of several turns; rows without images lie between them."""
    talk = [("user", "<image>a?"), ("assistant", "b"), ("user", "c?"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in talk]
    spoken = problems(tmp_path, {"messages": messages, "images": [{"bytes": png(1)}]}, learns_from="answers")[0]
    plain = problems(tmp_path, {**row(), "prompt": "b<image>?<image>", "images": [png(2), png(3, (32, 48))]})[0]
    batch = pack_examples([spoken, Problem("a?", "b"), plain], tokenizer, 2)
    assert batch.ragged["grids"].counts.tolist() == [1, 0, 2]
    learned = [tokenizer.decode(t[m == 1]) for t, m in zip(batch.rows(), batch.rows("response_mask"), strict=True)]
    assert learned == ["b<eos>d<eos>", "b<eos>", "a<eos>"]
    assert batch.rows("position_ids")[1][:, 2].tolist() == [0, 1, 2, 3, 4]


def test_each_of_several_rows_has_its_own_images(tmp_path, tokenizer):
    """Whether a row is a conversation or a string, and in whatever order they come."""

    def asked(content, *images):
        return Problem(content, "a", images=images)

    chat = [({"role": "user", "content": "<image>?" * count},) for count in range(3)]
    rows = [
        asked(chat[1], png(1)), asked("b<image>", png(2)), asked(chat[0]), asked(chat[2], png(3), png(4)),
        asked("a?"), asked("<image>b", png(5)),
    ]  # fmt: skip
    for order in (rows, rows[::-1]):
        whole, each = pack_examples(order, tokenizer, 2), [pack_examples([one], tokenizer, 2) for one in order]
        counts = [len(one.images) for one in order]
        assert whole.ragged["grids"].counts.tolist() == counts
        pixels = [one["pixels"] for one, count in zip(each, counts, strict=True) if count]
        assert torch.equal(whole["pixels"], torch.cat(pixels)) and not torch.equal(pixels[0], pixels[1])


BAD = {
    "no image": ("image 1 is no image that Pillow can read .4 bytes.", row(images=[b"text"])),
    "missing": (r"image 1: .*gone.png cannot be read: No such file", row(images=[{"path": "gone.png"}])),
    "an address": ("image 1 is the address 'https://.*nothing is downloaded", row(images=["https://a.b/c.png"])),
    "base64": ("cannot be read: .*; of base64, write data:image/png;base64, in front of it", row(images=[TEXT])),
    "damaged base64": (
        "image 1 is an address 'data:.* whose base64 is damaged", row(images=[f"data:image/png;base64,{TEXT[:-9]}!"]),
    ),
    "an address without base64": (
        "image 1 is an address 'data:,%89PNG' without ;base64, and what", row(images=["data:,%89PNG"]),
    ),
    "nothing": ("image 1 is a NoneType; write the bytes of an image file", row(images=[None])),
    "behind nothing": ("image 2 is no image that Pillow can read", row(images=[None, b"text"])),
    "nothing in it": ("image 1 is an object without bytes and path", row(images=[{"bytes": None, "path": None}])),
    "more marks": ("prompt has 2 marks <image> for 1 images; write one", row("<image><image>?", [png()])),
    "fewer marks": ("prompt has 0 marks <image> for 1 images", row("a?", [png()])),
    "a mark without an image": ("the mark <image> of an image", row("<image>a?", [])),
    "another mark": (r"the mark <\|image_pad\|> of an image", row("<image><|image_pad|>?", [png()])),
    "in a tool's reply": (
        "in a message of the assistant or of a tool",
        row([{"role": "user", "content": "a?"}, {"role": "tool", "content": "<image>"}], [png()]),
    ),
    "a video": (
        "has a part .*video.*; parts are of the type text or image",
        row([{"role": "user", "content": [{"type": kind, "text": None} for kind in ("image", "video")]}], [png()]),
    ),
    "an image in a part": (
        "holds its image in image; write it into the column images",
        row([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], [png()]),
    ),
    "a text in a part of an image": (
        "holds its image in text", row([{"role": "user", "content": [{"type": "image", "text": "a"}]}], [png()]),
    ),
    "a column of videos": ("the column videos has images, videos or sounds", row(images=[png()], videos=["a.mp4"])),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_rows_that_are_refused(tmp_path, name):
    says, bad = BAD[name]
    refused(tmp_path, says, bad)


def test_images_that_are_too_large_or_damaged(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("verl_fn.data.images.MOST_PIXELS", 1000)
    refused(tmp_path, "image 1 is too large: it has 32 x 32 pixels, more than 1,000", row(images=[png()]))
    monkeypatch.undo()
    torn = problems(tmp_path, row(images=[png()[:-200]]))
    with pytest.raises(DataError, match=r"rows.parquet, row 0: image 1 is damaged: .*truncated"):
        encode_prompts(torn, tokenizer)
    thin = problems(tmp_path, row(images=[png(0, (1, 900))]))
    with pytest.raises(DataError, match=r"row 0: the image processor fails on images of 900 x 1 pixels"):
        encode_prompts(thin, tokenizer)
    long = problems(tmp_path, row(images=[png()]))
    with pytest.raises(DataError, match="the prompt has 11 tokens, more than 8; raise data"):
        encode_prompts(long, tokenizer, 8, "left")


def test_models_and_templates_without_images(tmp_path, tokenizer):
    seen = Problem(({"role": "user", "content": "<image>?"},), "a", images=(png(),))
    text = read_tokenizer(new_model(tmp_path / "text", chars="abcd?<>img e", chat_template=True))
    for problem in (seen, Problem("<image>?", "a", images=(png(),))):
        with pytest.raises(DataError, match=r"models of the type qwen3 read no images here"):
            encode_prompts([problem], text)
    silent = read_tokenizer(tokenizer.name_or_path)
    silent.chat_template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}?{% endfor %}{% endfor %}"
    with pytest.raises(DataError, match=r"has 0 marks <\|image_pad\|> for 1 images; take a chat template"):
        encode_prompts([seen], silent)


@pytest.mark.parametrize(
    "content", ["a?", [{"type": "image"}, {"type": "text", "text": "a?"}]], ids=["text", "parts of a message"]
)
def test_preference_pairs_with_images_are_refused(tmp_path, content):
    prompt = content if isinstance(content, str) else [{"role": "user", "content": content}]
    pq.write_table(
        pa.Table.from_pylist([{"prompt": prompt, "chosen": "b", "rejected": "c", "images": [png()]}]),
        tmp_path / "pairs.parquet",
    )
    with pytest.raises(DataError, match="the row has images, which are not read beside judged responses"):
        read_files([tmp_path / "pairs.parquet"], "pairs")


@pytest.mark.parametrize("side", ["left", "error"])
def test_a_long_prompt_with_images_is_refused_at_the_start(tmp_path, tokenizer, side):
    """It is never cut, so that cutting is no advice; a long prompt without images is cut."""
    read = problems(tmp_path, row("ab?" * 30, images=()), row(images=[{"bytes": png()}]))
    encoded = Encoder((), (), tokenizer).part(list(read))
    assert (encoded.prompts > 10).all()
    table = DataConfig(max_prompt_length=10, truncation=side)
    with pytest.raises(
        DataError, match=rf"row {0 if side == 'error' else 1}: the prompt has .*, more than 10; raise"
    ) as told:
        short_enough("data.train_files", encoded, table, print)
    assert ("data.truncation" in str(told.value)) == (side == "error")
    said, cuts = [], DataConfig(max_prompt_length=10, truncation="left")
    assert len(short_enough("data.train_files", encoded[:1], cuts, said.append).problems) == 1
    assert said == ["data.train_files: 1 of 1 prompts are cut to 10 tokens (data.truncation)"]


def test_equal_questions_about_other_pictures_are_other_prompts():
    one, other = (Problem("<image>?", "a", images=(png(seed),)) for seed in (0, 1))
    assert len(set(traits_of([one, other, one], None).prompts.tolist())) == 2


def test_the_cache_holds_images_but_none_of_other_files(tmp_path, tokenizer):
    """The name of a cache follows the image processor's settings."""
    held = Problem("<image>?", "a", images=(png(),))
    assert unpacked(packed(held), 0).images == (png(),)
    with pytest.raises(Unstorable, match="FromFile"):
        packed(Problem("<image>?", "a", images=(FromFile(png()),)))
    folder = new_model(tmp_path / "model", chars="abcd?", arch="qwen3_vl", **SIZES)
    names = []
    for longest in (1024, 4096):
        file = folder / "preprocessor_config.json"
        settings = json.loads(file.read_text())
        file.write_text(json.dumps(settings | {"size": {"shortest_edge": 256, "longest_edge": longest}}))
        names.append(name_of([], Encoder((), (), read_tokenizer(folder)), ()).digest)
    assert names[0] != names[1]


def test_squares_are_drawn_from_a_seed(tmp_path):
    assert prepare_squares(tmp_path / "a") == {"train": 4000, "test": 200}
    prepare_squares(tmp_path / "b", seed=1)
    rows = {name: pq.read_table(tmp_path / name / "test.parquet").to_pylist() for name in ("a", "b")}
    trained = pq.read_table(tmp_path / "a" / "train.parquet").to_pylist()
    # Fingerprints of a run's data are of the bytes of its files.
    assert [*trained[0]] == ["data_source", "prompt", "images", "ability", "reward_model", "extra_info"]
    pictures = [one["images"][0]["bytes"] for one in (*trained, *rows["a"])]
    assert rows["a"] != rows["b"] and len(set(pictures)) == len(pictures) == 4200
    said = {one["reward_model"]["ground_truth"] for one in rows["a"]}
    assert {"red", "green", "blue", "yellow", *"0123456789"} == said and set("".join(said)) <= set(ALPHABET)
    for one in rows["a"]:
        seen = np.asarray(Image.open(io.BytesIO(one["images"][0]["bytes"])))
        asked, answer = one["extra_info"]["question"], one["reward_model"]["ground_truth"]
        lit = (seen.max(2) > 100).reshape(4, 8, 4, 8).any((1, 3))
        assert asked != "How many squares?" or lit.sum() == int(answer)


@pytest.mark.parametrize(("digit", "rows"), [(2, "###..#####..###"), (4, "#.##.####..#..#"), (7, "###..#..#..#..#")])
def test_a_digit_is_drawn_as_people_read_it(digit, rows):
    seen = drawn_digit(digit, "red", np.random.default_rng(0)).max(2) > 100
    whole = seen[seen.any(1)][:, seen.any(0)]
    assert whole.shape == (30, 18)
    assert "".join("#" if point else "." for point in whole[3::6, 3::6].ravel()) == rows
