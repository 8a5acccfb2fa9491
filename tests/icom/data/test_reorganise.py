"""Samples of tars in tars of N: what WebDataset's own reader finds before and after. Guards icom.data.reorganise."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import webdataset
from webdataset.tariterators import group_by_keys, tar_file_expander

from tests.support.command import Result, assert_message, cut
from tests.support.picture_server import picture

Icom = Callable[..., Result]
Sample = dict[str, Any]


def sample(number: int, **members: Any) -> Sample:
    made = {"__key__": f"{number:04d}", "png": picture(number), "txt": f"thing {number}", "json": {"n": number}}
    return {name: value for name, value in (made | members).items() if value is not None}


def write(path: Path, *samples: Sample) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as tar:
        for one in samples:
            tar.write(one)
    return path


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Of 1, 9, 0 and 4 samples, one of them far down."""
    folder = tmp_path / "tars"
    write(folder / "a.tar", sample(0))
    write(folder / "b.tar", *(sample(number, **{"seg.npy": b"more"}) for number in range(1, 10)))
    write(folder / "c.tar")
    write(folder / "deep/down.below/here/d.tar", *map(sample, range(10, 14)))
    return folder


def read(folder: Path) -> list[list[Sample]]:
    """Samples of each tar, as the webdataset package reads them."""
    found = []
    for path in sorted(folder.rglob("*.tar")):
        with path.open("rb") as stream:
            found.append(list(group_by_keys(tar_file_expander([{"url": path.name, "stream": stream}]))))
    return found


def plain(tars_: list[list[Sample]]) -> list[Sample]:
    """Without what says where they are."""
    return [{k: v for k, v in one.items() if not k.startswith("__")} for tar in tars_ for one in tar]


def words(source: Path | str, output: Path, **options: object) -> list[str]:
    given = {"samples_per_shard": 3} | options
    return ["data", "reorganise", str(source), f"--output_dir={output}", *(f"--{n}={v}" for n, v in given.items())]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.tar")}


def test_all_samples_in_tars_of_n(tars: Path, tmp_path: Path, icom: Icom) -> None:
    """With all their members, in order, each under a key of its own; twice the same bytes."""
    done = icom(*words(tars, tmp_path / "out"))
    assert done.code == 0, done
    assert "14 samples in 5 tars" in done.out
    made = read(tmp_path / "out")
    assert [len(tar) for tar in made] == [3, 3, 3, 3, 2]
    assert plain(made) == plain(read(tars))
    keys = [one["__key__"] for tar in made for one in tar]
    assert keys[0] == "a/0000" and keys[-1] == "deep/down.below/here/d/0013" and len(set(keys)) == 14
    first = content(tmp_path / "out")
    assert icom(*words(tars, tmp_path / "out")).code == 0
    assert icom(*words(tars, tmp_path / "other")).code == 0
    assert content(tmp_path / "out") == content(tmp_path / "other") == first


def test_parts_have_all_samples_once(tars: Path, tmp_path: Path, icom: Icom) -> None:
    for part in (2, 3, 1):
        assert icom(*words(tars, tmp_path / "out", part=f"{part}/3")).code == 0
    assert plain(read(tmp_path / "out")) == plain(read(tars))
    before = content(tmp_path / "out")
    for path in (tmp_path / "out").glob("00003-*"):
        path.write_bytes(b"of an attempt that was killed")
    assert icom(*words(tars, tmp_path / "out", part="3/3")).code == 0
    assert content(tmp_path / "out") == before
    assert_message(icom(*words(tars, tmp_path / "out", part="1/2")), 1, "parts differs")


def test_what_lacks_something_does_not_take_others_with_it(tmp_path: Path, icom: Icom) -> None:
    """It is counted and named; those behind it stay."""
    folder = tmp_path / "tars"
    bad: list[Sample] = [{"txt": None}, {"png": None}, {"txt": b""}, {"txt": b"\xff"}, {"txt": None, "seg.txt": "x"}]
    write(folder / "a.tar", *(sample(number, **bad.pop(0)) if number % 2 else sample(number) for number in range(10)))
    with tarfile.open(folder / "b.tar", "w") as tar:
        for name in ("1.png", "1.txt", "1.txt"):
            tar.addfile(tarfile.TarInfo(name))
    done = icom(*words(folder, tmp_path / "out", max_damaged_share=0.6))
    assert done.code == 0, done
    assert [one["txt"] for one in plain(read(tmp_path / "out"))] == [b"thing %d" % n for n in (0, 2, 4, 6, 8)]
    assert "5 samples in 2 tars" in done.out and "; 6 left out" in done.out
    reasons = {1: "no caption", 3: "no picture", 5: "no caption", 7: "the caption is not UTF-8", 9: "no caption"}
    for number, reason in reasons.items():
        assert f"left out: a/{number:04d}: {reason}" in done.err
    assert "left out: b/1: two members of the same name" in done.err
    assert_message(icom(*words(folder, tmp_path / "out")), 1, "6 of 11 samples", "--max_damaged_share")


def test_captions_elsewhere(tmp_path: Path, icom: Icom) -> None:
    folder = tmp_path / "tars"
    said = [{"title": "one"}, {"title": ""}, {"other": 1}, {"title": "four"}]
    write(folder / "a.tar", *(sample(n, txt=None, json=one, cls=n) for n, one in enumerate(said)))
    for column, left in (("json:title", [0, 3]), ("cls", [0, 1, 2, 3])):
        out = tmp_path / column
        assert icom(*words(folder, out, caption_column=column, max_damaged_share=0.5)).code == 0
        assert [int(one["cls"]) for one in plain(read(out))] == left
    assert_message(icom(*words(folder, tmp_path / "x", caption_column="title")), 2, "--caption_column title: in tars")


def test_what_is_refused(tars: Path, tmp_path: Path, icom: Icom) -> None:
    assert icom(*words(tars, tmp_path / "out")).code == 0
    assert_message(icom(*words(tars, tmp_path / "out", samples_per_shard=4)), 1, "samples_per_shard differs")
    assert_message(icom(*words(tars, tars / "new")), 2, "lies in", "choose another --output_dir")
    cut(tars / "b.tar")
    assert_message(icom(*words(tars, tmp_path / "cut")), 1, "tars/b.tar is cut")
    assert_message(icom(*words(tmp_path / "none/*.tar", tmp_path / "cut")), 1, "cannot be read")
    (tmp_path / "empty").mkdir()
    assert_message(icom(*words(tmp_path / "empty", tmp_path / "cut")), 1, "has no tars")
    assert_message(icom(*words(tars, tmp_path / "cut", samples_per_shard=0)), 2, "has to be at least 1")
