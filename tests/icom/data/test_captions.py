"""What is said of a sample. Guards icom.data.captions, icom.data.caption_reading and icom.data.caption_files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from io import BytesIO
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from icom.config.train import TrainConfig
from icom.data.caption_reading import read_captions, read_templates
from icom.data.captions import Captions, Text
from icom.data.images import list_pictures
from icom.data.sampling import Sample, SampleStream
from icom.errors import IcomError, UsageError

STREAM = SampleStream(seed=7, pictures=1, repeats=4000, templates=1, timesteps=1000)
Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Puts pictures into a folder: `folder("a.png", "b.png")`."""

    def make(*pictures: str) -> Path:
        for name in pictures:
            Image.new("RGB", (8, 8), "red").save(tmp_path / name)
        return tmp_path

    return make


def _picture() -> bytes:
    file = BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    return file.getvalue()


def read(folder: Path, **options: Any) -> Captions:
    settings = {"placeholder_token": "<x>", "initializer_token": "toy", **options}
    return read_captions(TrainConfig(train_data_dir=str(folder), **settings), list_pictures(str(folder)))


def said(captions: Captions, picture: int = 0, template: int = 0) -> str:
    return captions.of(Sample(picture, False, template, 0, noise_seed=1))


def shuffled(text: str, keep: int = 0, dropout: float = 0.0, template: str = "[filewords]") -> list[str]:
    captions = Captions((Text(template, ""),), (Text(text, "a.txt"),), shuffle=True, keep=keep, dropout=dropout)
    return [captions.of(STREAM[i]) for i in range(4000)]


def test_tags_are_shuffled_evenly_and_the_first_are_kept() -> None:
    """Each order comes as often as any other; the same sample has the same one."""
    texts = shuffled("{}, sand ,red,, blue", keep=1)
    assert texts == shuffled("{}, sand ,red,, blue", keep=1)
    found = Counter(texts)
    assert set(found) == {", ".join(("{}", *order)) for order in permutations(("sand", "red", "blue"))}
    assert all(abs(count - 4000 / 6) < 4 * (4000 * 5 / 36) ** 0.5 for count in found.values())
    assert set(shuffled("a, b", keep=9)) == {"a, b"}


@pytest.mark.parametrize(
    ("template", "caption", "kept"),
    [
        ("[filewords]", "{} on sand, red", "{}"),
        ("a photo of {}, [filewords]", "red, blue", "a photo of {}"),
        ("[filewords], a photo of {}", "red, blue", "a photo of {}"),
        ("a [filewords] photo of {}, sharp", "red", "a photo of {}, sharp"),
        ("a photo, [filewords]", "{}, red", "a photo, {}"),
    ],
)
def test_dropout_leaves_the_word(template: str, caption: str, kept: str) -> None:
    """In as many samples as asked for; in the others nothing is lost, and no order is more frequent."""
    texts = shuffled(caption, dropout=0.25, template=template)
    whole = {", ".join(order) for order in permutations(caption.split(", "))}
    assert set(texts) == {kept, *(template.replace("[filewords]", text) for text in whole)}
    assert abs(texts.count(kept) - 1000) < 4 * (4000 * 3 / 16) ** 0.5
    orders = Counter(text for text in texts if text != kept)
    assert max(orders.values()) - min(orders.values()) < 8 * 3000**0.5 / 2


def test_sources_of_captions(folder: Folder, tmp_path: Path) -> None:
    """Texts beside pictures and rows of metadata, which count more; letters' case is the tokenizer's."""
    folder("a.png", "b.jpg", "c.webp")
    (tmp_path / "a.txt").write_text("\ufeffa <X> on sand\n", encoding="utf-8")
    (tmp_path / "b.caption").write_text("[name] {in braces}, <x> again")
    (tmp_path / "c.TXT").write_text("<x>")
    captions = read(tmp_path)
    assert [said(captions, picture) for picture in range(3)] == ["a {} on sand", "{} {in braces}, {} again", "{}"]
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "<x> of metadata", "other": "o <x>"}\n')
    assert [text.text for text in read(tmp_path).own] == ["{} of metadata", "{} {in braces}, {} again", "{}"]
    assert read(tmp_path, caption_column="other").own[0].text == "o {}"
    assert said(read(tmp_path, caption_templates="builtin")) == "a photo of a {}"


def test_templates_of_a_file(tmp_path: Path) -> None:
    """Each is one; a caption without the word gets it from the template; A1111's marks, and the word itself."""
    file = tmp_path / "templates"
    file.write_text("# a comment\n\na photo of [name], [filewords]\n  [filewords] and <x>\n")
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    (folder / "a.txt").write_text("red")
    captions = read(folder, caption_templates=str(file))
    assert [said(captions, template=i) for i in range(2)] == ["a photo of {}, red", "red and {}"]
    assert captions.identity().keys() == {"captions", "caption_templates"}


def test_plain_folders_have_the_papers_templates_and_nothing_to_identify(folder: Folder) -> None:
    """So that checkpoints of before there were captions go on."""
    captions = read(folder("a.png"))
    assert (len(captions.templates), captions.own, captions.identity(), captions.facts()) == (27, (), {}, {})
    assert said(captions, template=26) == "the photo of a {}"


@pytest.mark.parametrize(
    ("files", "options", "words"),
    [
        (
            {"a.txt": "<x>", "c.txt": "<x>"},
            {},
            ["1: c.txt: captions without their pictures", "1: b.png: pictures without"],
        ),
        ({"a.txt": " \n", "b.txt": "<x>"}, {}, ["a.txt: the caption is empty"]),
        ({"a.txt": b"\xff\xfe", "b.txt": "<x>"}, {}, ["a.txt: the caption is not UTF-8"]),
        ({"a.txt": "<x>", "b.txt": "red"}, {}, ["Captions without <x>: 1: b.txt. Write it", "[name], [filewords]"]),
        ({"a.txt": "<x>", "a.caption": "<x>", "b.txt": "<x>"}, {}, ["a.png has a.txt and a.caption: keep one"]),
        ({"a.txt": "a sksy cat", "b.txt": "sks"}, {"placeholder_token": "sks"}, ["a.txt: sks stands inside another"]),
        ({"metadata.jsonl": '{"file_name": "a.png", "text": "<x>"}'}, {}, ["1: b.png: pictures without a caption"]),
        (
            {"a.txt": "<x>", "b.txt": "<x>", "a-mask.png": _picture()},
            {},
            ["a-mask.png: if these are masks, add --masked_loss"],
        ),
        (
            {"metadata.csv": "file_name,text\na.png,<x>\nb.png,<x>\ngone.png,<x>\nin/c.png,<x>"},
            {},
            ["2: gone.png, in/c.png: in metadata.csv, but not in the folder"],
        ),
        (
            {"metadata.jsonl": '{"file_name": "a.png", "prompt": "<x>"}'},
            {},
            ["No column 'text' of metadata", "metadata.jsonl has prompt. Name another (--caption_column)"],
        ),
        ({"a.txt": "<x>", "b.txt": "<x>"}, {"caption_column": "words"}, ["No column 'words'", "there is none"]),
        ({"metadata.jsonl": "{"}, {}, ["Cannot read", "metadata.jsonl, line 1"]),
        ({"metadata.jsonl": "{}"}, {}, ["row 1: no 'file_name' among its columns"]),
        ({}, {"shuffle_caption": True}, ["--shuffle_caption acts on captions of pictures, and none are used"]),
        ({"a.txt": ""}, {"caption_templates": "builtin", "caption_dropout_rate": 0.1}, ["--caption_dropout_rate acts"]),
    ],
)
def test_captions_that_cannot_be_used(
    files: dict[str, str | bytes], options: dict[str, Any], words: list[str], folder: Folder, tmp_path: Path
) -> None:
    folder("a.png", "b.png")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(IcomError) as refused:
        read(tmp_path, **options)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["Cannot read --caption_templates", "No such file"]),
        (b"\xff\xfe\xfa", ["Cannot read --caption_templates", "utf-8"]),
        (b"# nothing\n\n", ["is empty. Write a template such as"]),
        (
            b"a [name]\na photo of [nmae]\n",
            ["line 2: there is no [nmae]. Marks are [name], the new word, and [filewords]"],
        ),
        (b"a photo\n", ["line 1 has neither [name] nor [filewords]: it would teach nothing"]),
    ],
)
def test_templates_that_cannot_be_used(content: bytes | None, words: list[str], tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "t.txt").write_bytes(content)
    with pytest.raises(UsageError) as refused:
        read_templates(str(tmp_path / "t.txt"), ["<x>"])
    assert all(word in str(refused.value) for word in words), refused.value


def test_templates_that_ask_for_captions_that_are_not_there(folder: Folder, tmp_path: Path) -> None:
    file = tmp_path / "inner" / "t.txt"
    file.parent.mkdir()
    file.write_text("[name]\n[name], [filewords]\n")
    folder("a.png")
    with pytest.raises(IcomError, match=r"line 2 asks for captions \(\[filewords\]\), and there are none beside"):
        read(tmp_path, caption_templates=str(file))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_tokens": 1}, "--keep_tokens says which tags --shuffle_caption leaves"),
        ({"keep_tokens": -1, "shuffle_caption": True}, "--keep_tokens must not be negative"),
        ({"caption_dropout_rate": 1.5}, "--caption_dropout_rate has to be between 0 and 1, not 1.5"),
    ],
)
def test_options_that_do_not_fit_together(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TrainConfig(train_data_dir="x", placeholder_token="<x>", initializer_token="toy", **options)
