"""Parquet files with pictures' bytes. Guards icom.data.parquet and icom.data.sources.

Files are written by pyarrow, in the forms in which Hugging Face's datasets package stores images.
"""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from PIL import Image

from icom.config.data import DataOptions
from icom.data import parquet
from icom.data.feed import Feed
from icom.data.order import Order
from icom.data.records import DamagedRecord, Source
from icom.data.sources import open_source
from icom.errors import IcomError, UsageError
from tests.support.clone import server


def pixels(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)


def png(number: int) -> bytes:
    with io.BytesIO() as file:
        Image.fromarray(pixels(number)).save(file, "PNG")
        return file.getvalue()


def rows(numbers: range, **columns: Any) -> pa.Table:
    made = {
        "image": pa.array([{"bytes": png(n), "path": f"{n}.png"} for n in numbers]),
        "text": [f"thing {n}" for n in numbers],
        "width": [100 * (n % 10) for n in numbers],
        "score": pa.array([n / 2 for n in numbers], pa.float32()),
        "label": [n % 3 for n in numbers],
    }
    return pa.table(made | columns)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Two files, in groups of 4 rows: 10 and 6 rows."""
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    pq.write_table(rows(range(10)), folder / "data/train-00000-of-00002.parquet", row_group_size=4)
    pq.write_table(rows(range(10, 16)), folder / "data/train-00001-of-00002.parquet", row_group_size=4)
    return folder


def opened(where: Path | str, **options: Any) -> Source:
    return open_source(DataOptions(train_data_dir=str(where), **options))


def numbers(source: Source) -> list[int]:
    """The things of a source; each has its own picture."""
    found = []
    for number in range(len(source)):
        record = source.read(number)
        found.append(int(record.caption.removeprefix("thing ")))
        assert np.array_equal(np.asarray(record.picture), pixels(found[-1]))
    return found


def test_rows_in_order_and_runs_of_row_groups(files: Path) -> None:
    source = opened(files)
    assert numbers(source) == list(range(16))
    assert [(run.start, run.stop) for run in source.runs] == [(0, 4), (4, 8), (8, 10), (10, 14), (14, 16)]
    assert source.describe() == "16 captioned pictures in 2 parquet files"
    assert [source.read(n).key for n in (0, 9, 10)] == [
        "data/train-00000-of-00002.parquet/0",
        "data/train-00000-of-00002.parquet/9",
        "data/train-00001-of-00002.parquet/0",
    ]
    assert numbers(opened(files / "data/*-{00001,00000}-*.parquet")) == [*range(10, 16), *range(10)]
    assert numbers(opened(files / "data/train-00001-of-00002.parquet")) == list(range(10, 16))


@pytest.mark.parametrize(
    ("image", "text"),
    [
        (pa.binary(), pa.string()),
        (pa.large_binary(), pa.large_string()),
        (pa.struct({"path": pa.string(), "bytes": pa.binary()}), pa.string()),
    ],
)
def test_types_of_columns(tmp_path: Path, image: Any, text: Any) -> None:
    pictures = [{"bytes": png(n), "path": None} if pa.types.is_struct(image) else png(n) for n in range(3)]
    table = pa.table({"jpg": pa.array(pictures, image), "prompt": pa.array([f"thing {n}" for n in range(3)], text)})
    pq.write_table(table, tmp_path / "a.parquet")
    assert numbers(opened(tmp_path, image_column="jpg", caption_column="prompt")) == [0, 1, 2]


def test_classes_with_prompts(files: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text('["a cat", "a dog", "a bird"]')
    source = opened(files, caption_column="label", idx_to_prompt=str(tmp_path / "prompts.json"))
    assert [source.read(n).caption for n in range(4)] == ["a cat", "a dog", "a bird", "a cat"]


def test_filters_as_pyarrows(files: Path) -> None:
    """Runs stay those of the row groups; some of them are empty."""
    source = opened(files, filters={"width": "<=300", "score": ">1"})
    expression = (ds.field("width") <= 300) & (ds.field("score") > 1)
    truth = ds.dataset(files).to_table(filter=expression)["text"].to_pylist()
    assert [f"thing {number}" for number in numbers(source)] == truth == [f"thing {n}" for n in (3, 10, 11, 12, 13)]
    assert [(run.start, run.stop) for run in source.runs] == [(0, 1), (1, 1), (1, 1), (1, 5), (5, 5)]
    assert source.describe() == "5 captioned pictures in 2 parquet files (11 left out by filters)"
    assert numbers(opened(files, filters={"width": "<=300"}, max_train_samples=5)) == [0, 1, 2, 3, 10]
    with pytest.raises(UsageError, match=r"'height' has no such column .*image, label, score, text, width"):
        opened(files, filters={"height": 1})


def test_filter_on_a_column_that_one_file_lacks(files: Path) -> None:
    more = rows(range(16, 20), aesthetic=[5.0, 6.0, None, 7.0])
    pq.write_table(more, files / "data/train-00002.parquet")
    source = opened(files, filters={"aesthetic": ">=6"})
    assert numbers(source) == [17, 19]
    assert "18 left out by filters, 17 of them for want of a field" in source.describe()


def test_damaged_rows(tmp_path: Path) -> None:
    table = pa.table(
        {
            "image": pa.array([{"bytes": png(0)}, {"bytes": None}, None, {"bytes": b"no"}, {"bytes": png(4)}]),
            "text": ["thing 0", "thing 1", "thing 2", "thing 3", None],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    source = opened(tmp_path)
    assert source.read(0).caption == "thing 0"
    for number, reason in ((1, "no picture"), (2, "no picture"), (3, "not a picture"), (4, "no caption")):
        with pytest.raises(DamagedRecord, match=rf"a\.parquet/{number}: {reason}"):
            source.read(number)


def test_damaged_row_group(files: Path) -> None:
    """The rows of the others are read; those are left out by the run, one by one."""
    path = files / "data/train-00000-of-00002.parquet"
    source = opened(files)
    column = pq.read_metadata(path).row_group(1).column(0)
    with path.open("r+b") as file:
        file.seek(column.dictionary_page_offset or column.data_page_offset)
        file.write(b"\xff" * 64)
    assert source.read(0).caption == "thing 0"
    for _ in range(2):
        with pytest.raises(DamagedRecord, match=r"train-00000-of-00002\.parquet/5: row group 1 cannot be read"):
            source.read(5)
    path.unlink()
    with pytest.raises(IcomError, match=r"The shard .*train-00000-of-00002\.parquet is gone"):
        source.read(9)


def test_columns_that_are_not_there(files: Path) -> None:
    """The message says which there are."""
    there = r"It has image \(struct.*\), text \(string\), width \(int64\), score \(float\), label \(int64\)"
    for options, message in (
        ({"image_column": "picture"}, r"has no column 'picture' \(--image_column\)\. " + there),
        ({"caption_column": "prompt"}, r"has no column 'prompt' \(--caption_column\)\. " + there),
        ({"image_column": "text"}, "'text' of .* holds string, and no pictures' bytes .*" + there),
        ({"caption_column": "image"}, "'image' of .* holds struct.*, and neither texts"),
    ):
        with pytest.raises(IcomError, match=message):
            opened(files, **options)


def test_files_that_are_no_good(files: Path, tmp_path: Path) -> None:
    path = files / "data/train-00001-of-00002.parquet"
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(IcomError, match=rf"The shard {path} is cut, or no parquet file"):
        opened(files)
    path.write_bytes(b"")
    with pytest.raises(IcomError, match=rf"The shard {path} is cut, or no parquet file"):
        opened(files)
    with pytest.raises(IcomError, match="cannot be read: No such file"):
        opened(files / "data/train-{00000..00002}-of-00002.parquet")
    pq.write_table(rows(range(1)).slice(0, 0), tmp_path / "empty.parquet")
    with pytest.raises(IcomError, match="are empty"):
        opened(tmp_path / "empty.parquet")
    (files / "data/0.tar").write_bytes(b"")
    with pytest.raises(UsageError, match=r"holds tars \(data/0\.tar\) and parquet files"):
        opened(files)


def test_digest_is_of_content_and_choice(files: Path, tmp_path: Path) -> None:
    here = opened(files).digest
    moved = files.rename(tmp_path / "moved")
    assert opened(moved).digest == here
    different = [{"caption_column": "label"}, {"filters": {"width": ">300"}}, {"max_train_samples": 3}]
    assert len({opened(moved, **options).digest for options in different} | {here}) == 4


def test_row_groups_are_read_once_by_many_threads(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While they fit; where they do not, what comes is the same."""
    read: list[int] = []
    load, lock = parquet.Parquet._load, threading.Lock()

    def counted(self: Any, place: int) -> Any:
        with lock:
            read.append(place)
        return load(self, place)

    monkeypatch.setattr(parquet.Parquet, "_load", counted)

    def epochs() -> list[str]:
        source = opened(files)
        order = Order(source.runs, seed=0)
        batches = [range(start, start + 8) for start in range(0, 48, 8)]
        with Feed(
            source, order, batches, lambda i, record: record.caption, workers=4, ahead=2, max_damaged_share=0
        ) as feed:
            return [caption for batch in feed for caption in batch]

    kept = epochs()
    assert sorted(read) == [0, 1, 2, 3, 4]
    monkeypatch.setattr(parquet, "ROOM", 1)
    assert epochs() == kept
    assert len(read) > 15


def test_large_row_groups_are_told(files: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    opened(files)
    assert not capsys.readouterr().err
    monkeypatch.setattr(parquet, "ROOM", 1000)
    opened(files)
    assert "row_group_size=100" in capsys.readouterr().err


def test_from_the_web(files: Path, tmp_path: Path) -> None:
    with server(files / "data") as (address, asked):
        place = f"{address}/train-{{00000..00001}}-of-00002.parquet"
        assert numbers(opened(place, cache_dir=str(tmp_path / "cache"))) == list(range(16))
        assert numbers(opened(place, cache_dir=str(tmp_path / "cache"))) == list(range(16))
    assert len(asked) == 2 * 2 + 2  # sizes twice, files once
