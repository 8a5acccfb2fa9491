"""Folders of captioned pictures, and made-up ones. Guards icom.data.folder, icom.data.synthetic, icom.data.sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from icom.config.data import DataOptions
from icom.data.images import BUNDLED_CONCEPTS, read_picture
from icom.data.records import DamagedRecord, Source
from icom.data.sources import open_source
from icom.errors import IcomError, UsageError


def draw(path: Path, colour: str = "red") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), colour).save(path)


def opened(folder: Path, **options: Any) -> Source:
    return open_source(DataOptions(train_data_dir=str(folder), **options))


def captions(source: Source) -> dict[str, str]:
    return {record.key: record.caption for record in map(source.read, range(len(source)))}


def lines(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_texts_beside_pictures_in_subfolders(tmp_path: Path) -> None:
    """In order of name, each with its own caption and its own colour; what is hidden or no picture is passed over."""
    for name, colour in {"b.png": "red", "a/x.JPG": "blue", "a/deep/y.webp": "lime"}.items():
        draw(tmp_path / name, colour)
        ending = ".caption" if colour == "blue" else ".txt"
        (tmp_path / name).with_suffix(ending).write_text(f"\ufeff a {colour} thing\n", encoding="utf-8")
    (tmp_path / "b.caption").write_text("the .txt counts")
    for name in (".hidden.png", ".thumbs/x.png"):
        draw(tmp_path / name)
    (tmp_path / "notes.md").write_text("not one")
    source = opened(tmp_path)
    assert captions(source) == {"a/deep/y.webp": "a lime thing", "a/x.JPG": "a blue thing", "b.png": "a red thing"}
    assert list(captions(source)) == sorted(captions(source))
    picture = source.read(2).picture
    assert picture is not None
    assert (picture.mode, picture.size, picture.getpixel((0, 0))) == ("RGB", (8, 6), (255, 0, 0))
    assert [list(run) for run in source.runs] == [[0], [1], [2]]


def test_pictures_are_those_of_textual_inversion(tmp_path: Path) -> None:
    """Real photographs as the other reader decodes them, to the bit."""
    photos = sorted(next(BUNDLED_CONCEPTS.iterdir()).iterdir())
    for photo in photos:
        (tmp_path / photo.name).write_bytes(photo.read_bytes())
        (tmp_path / photo.name).with_suffix(".txt").write_text("thing")
    source = opened(tmp_path)
    for number, photo in enumerate(photos):
        picture = source.read(number).picture
        assert picture is not None
        assert picture.tobytes() == read_picture(photo).tobytes()


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_metadata_as_in_imagefolder(tmp_path: Path, kind: str) -> None:
    """Names are relative to the metadata's folder; the nearest file counts; a picture without a row may have a text."""
    for name in ("one.png", "two.png", "in/three.png", "in/four.png", "without ending"):
        draw(tmp_path / "x.png")
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / "x.png").rename(tmp_path / name)
    rows = [
        {"file_name": "one.png", "words": 'said "hello", left', "width": 8},
        {"file_name": "in/three.png", "words": "from above", "width": 8},
        {"file_name": "./without ending", "words": "two\nlines", "width": 9},
    ]
    below = [{"file_name": "three.png", "words": "from beside", "width": 1}]
    for folder, content in ((tmp_path, rows), (tmp_path / "in", below)):
        file = folder / f"metadata.{kind}"
        if kind == "jsonl":
            lines(file, *content)
        elif kind == "csv":
            import csv

            with file.open("w", newline="") as handle:
                writer = csv.DictWriter(handle, list(content[0]))
                writer.writeheader()
                writer.writerows(content)
        else:
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist(content), file)
    (tmp_path / "two.txt").write_text("a text")
    (tmp_path / "in/four.txt").write_text("another")
    assert captions(opened(tmp_path, caption_column="words")) == {
        "in/four.png": "another",
        "in/three.png": "from beside",
        "one.png": 'said "hello", left',
        "two.png": "a text",
        "without ending": "two\nlines",
    }


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_filters_by_metadata(tmp_path: Path, kind: str) -> None:
    """Numbers in CSV are numbers; what has no row lacks the field; a caption of digits stays a caption."""
    rows = [
        {"file_name": f"{n}.png", "text": str(n), "width": n * 100, "licence": "cc0" if n % 2 else "12"}
        for n in range(8)
    ]
    for n in range(9):
        draw(tmp_path / f"{n}.png")
        (tmp_path / f"{n}.txt").write_text("from the text")
    if kind == "csv":
        table = "".join(f"{','.join(map(str, row.values()))}\n" for row in rows)
        (tmp_path / "metadata.csv").write_text(f"file_name,text,width,licence\n{table}")
    else:
        lines(tmp_path / "metadata.jsonl", *rows)
    source = opened(tmp_path, filters={"width": ">=300", "licence": "cc0"})
    assert captions(source) == {"3.png": "3", "5.png": "5", "7.png": "7"}
    assert (
        source.describe()
        == f"3 captioned pictures in {tmp_path} (6 left out by filters, 1 of them for want of a field)"
    )
    assert len(opened(tmp_path, filters={"width": ">=300"}, max_train_samples=2)) == 2
    assert source.digest != opened(tmp_path).digest
    with pytest.raises(UsageError, match=r"no such column .*licence, text, width"):
        opened(tmp_path, filters={"height": ">=300"})


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    draw(tmp_path / "elsewhere/a.png")
    (tmp_path / "elsewhere/a.txt").write_text("a")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "photos/once-more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/loop").symlink_to(tmp_path / "photos")
    assert captions(opened(tmp_path / "photos")) == {"linked/a.png": "a"}


def test_damaged_records_are_told_one_by_one(tmp_path: Path) -> None:
    """Opening looks into no file; reading says what is wrong with which."""
    for name in ("a-cut", "b-empty", "c-latin", "d-whole"):
        draw(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text("good")
    (tmp_path / "a-cut.png").write_bytes((tmp_path / "a-cut.png").read_bytes()[:50])
    (tmp_path / "b-empty.txt").write_text(" \n")
    (tmp_path / "c-latin.txt").write_bytes("Käse".encode("latin-1"))
    source = opened(tmp_path)
    for number, reason in enumerate(["a-cut.png: .*damaged", "b-empty.png: .*empty", "c-latin.png: .*UTF-8"]):
        with pytest.raises(DamagedRecord, match=reason):
            source.read(number)
    assert source.read(3).caption == "good"
    (tmp_path / "d-whole.png").unlink()
    with pytest.raises(DamagedRecord, match=r"d-whole\.png: No such file"):
        source.read(3)
    for path in tmp_path.iterdir():
        path.unlink()
    tmp_path.rmdir()
    with pytest.raises(IcomError, match="is gone"):
        source.read(3)


def test_pictures_without_captions_are_named_up_to_a_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(10):
        draw(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text("good")
    (tmp_path / "7.txt").unlink()
    lines(tmp_path / "metadata.jsonl", {"file_name": "gone.png", "text": "x"})
    assert len(opened(tmp_path, max_damaged_share=0.2)) == 9
    told = capsys.readouterr().err
    assert "left out: 7.png: no caption" in told
    assert "left out: gone.png: named in the metadata, but not there" in told
    with pytest.raises(IcomError, match=r"2 of 11 samples in .* are damaged, and only 1.00% may be"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"photos: no such folder, and no shards, whose names end in \.tar or \.parquet"),
        ({"photos/readme.md": ""}, "holds no pictures"),
        ({"photos/a.png": ""}, r"No captions in .*\.txt or.*--caption_column"),
        ({"photos/a.png": "", "photos/metadata.jsonl": '{"file_name": "a.png", "prompt": "x"}'}, "metadata: prompt"),
        ({"photos/a.png": "", "photos/metadata.jsonl": '{"name": "a.png"}'}, "row 1: no 'file_name' .*name"),
        ({"photos/a.png": "", "photos/metadata.jsonl": '\n{"file_name":'}, "metadata.jsonl, line 2"),
        ({"photos/a.png": "", "photos/metadata.csv": "file,text\na.png,x\n"}, "row 1: no 'file_name' .*file, text"),
        ({"photos/metadata.csv": "", "photos/metadata.jsonl": ""}, "several metadata files"),
    ],
)
def test_folders_that_cannot_work(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(IcomError, match=message):
        opened(tmp_path / "photos")


def test_digest_is_of_the_content_and_not_of_the_place(tmp_path: Path) -> None:
    for place in ("here", "there"):
        for name in "ab":
            draw(tmp_path / place / f"{name}.png")
            (tmp_path / place / f"{name}.txt").write_text(name)
    here = opened(tmp_path / "here").digest
    assert opened(tmp_path / "there").digest == here
    assert opened(tmp_path / "there", max_train_samples=1).digest != here
    assert len(opened(tmp_path / "there", max_train_samples=1)) == 1
    (tmp_path / "there/a.txt").write_text("a longer one")
    assert opened(tmp_path / "there").digest != here


def test_synthetic_is_a_function_of_the_number() -> None:
    one, other = (open_source(DataOptions(train_data_dir=f"synthetic:{count}")) for count in (5, 1000))
    assert (len(one), len(other), one.describe()) == (5, 1000, "5 made-up pictures of 512 px")
    pictures = [one.read(number).picture for number in range(5)]
    assert len({np.asarray(picture).tobytes() for picture in pictures}) == 5
    assert len({one.read(number).caption for number in range(5)}) == 5
    assert len(open_source(DataOptions(train_data_dir="synthetic:10", max_train_samples=4))) == 4
    with pytest.raises(UsageError, match="have no metadata"):
        open_source(DataOptions(train_data_dir="synthetic:10", filters={"width": 1}))
    again = other.read(3)
    assert np.array_equal(np.asarray(again.picture), np.asarray(pictures[3]))
    assert again.caption == one.read(3).caption


@pytest.mark.parametrize("text", ["synthetic:", "synthetic:0", "synthetic:-3", "synthetic:many", "synthetic:²"])
def test_synthetic_without_a_number_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="synthetic:1000"):
        open_source(DataOptions(train_data_dir=text))
