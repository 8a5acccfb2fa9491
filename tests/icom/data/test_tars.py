"""WebDataset's tars, their index, and where they lie. Guards icom.data.tars, index, shards, remote, commands.data.

Tars are written by the webdataset package, and its own reader says what is in them.
"""

from __future__ import annotations

import gc
import gzip
import io
import json
import os
import shlex
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import webdataset
from PIL import Image
from webdataset.tariterators import group_by_keys, tar_file_expander

from icom.config.data import DataOptions
from icom.data import remote
from icom.data.feed import Feed
from icom.data.index import NAME
from icom.data.order import Order
from icom.data.records import DamagedRecord, Source
from icom.data.shards import Shard, ShardCache
from icom.data.sources import open_source
from icom.errors import IcomError, UsageError
from tests.support.clone import server
from tests.support.command import Result
from tests.support.small_disk import on_a_disk

Icom = Callable[..., Result]
Sample = dict[str, Any]


def picture(number: int) -> bytes:
    values = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(values).save(file, "PNG")
        return file.getvalue()


def sample(number: int, **members: Any) -> Sample:
    width = 100 * (number % 10)
    return {
        "__key__": f"{number:06d}",
        "png": picture(number),
        "txt": f"thing {number}",
        "cls": number % 3,
        "json": {"caption": f"json {number}", "width": width, "score": number / 2, "tags": ["x"], "licence": "cc0"},
    } | members


def write(path: Path, *samples: Sample) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as tar:
        for one in samples:
            tar.write({name: value for name, value in one.items() if value is not None})
    return path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three tars, one of them further down, with 7, 5 and 8 samples."""
    folder = tmp_path / "shards"
    write(folder / "00000.tar", *map(sample, range(7)))
    write(folder / "00001.tar", *map(sample, range(7, 12)))
    write(folder / "more/00002.tar", *map(sample, range(12, 20)))
    return folder


def opened(where: Path | str, **options: Any) -> Source:
    return open_source(DataOptions(train_data_dir=str(where), **options))


def everything(source: Source) -> list[tuple[str, str, bytes]]:
    records = [source.read(number) for number in range(len(source))]
    return [(record.key, record.caption, np.asarray(record.picture).tobytes()) for record in records]


def captions(source: Source) -> list[str]:
    return [caption for _, caption, _ in everything(source)]


def things(*numbers: int) -> list[str]:
    return [f"thing {number}" for number in numbers]


def test_webdatasets_own_reader_reads_the_same(shards: Path, icom: Icom) -> None:
    """Keys, pictures and captions, in order, also of members in folders, with long names and links beside them."""
    odd = shards / "odd.tar"
    write(
        odd,
        sample(20, __key__="folder/20"),
        sample(21, __key__="a" * 150 + "/" + "b" * 120),  # more than a tar's header holds
        sample(22, **{"png": None, "JPG": picture(22), "seg.png": picture(1)}),
        sample(23, txt="Käse 🧀 \n"),
    )
    with tarfile.open(odd, "a") as tar:
        link = tarfile.TarInfo("99.png")
        link.type, link.linkname = tarfile.SYMTYPE, "000022.jpg"
        tar.addfile(link)
        for name in ("__meta__/x.png", "no-ending", ".hidden.png"):
            tar.addfile(tarfile.TarInfo(name))
    assert icom("data", "index", str(shards)).code == 0
    paths = sorted(path.relative_to(shards).as_posix() for path in shards.rglob("*.tar"))
    theirs = []
    for path in paths:
        with (shards / path).open("rb") as stream:  # webdataset.WebDataset leaves its files open
            own = list(group_by_keys(tar_file_expander([{"url": path, "stream": stream}])))
        for one in own:
            image = one.get("png") or one.get("jpg")
            if image:
                with Image.open(io.BytesIO(image)) as decoded:
                    pixels = np.asarray(decoded.convert("RGB")).tobytes()
                theirs.append((f"{path}/{one['__key__']}", one["txt"].decode().strip(), pixels))
    assert len(theirs) == 24
    assert everything(opened(shards)) == theirs


def test_index_beside_the_shards_and_what_the_command_tells(shards: Path, icom: Icom) -> None:
    done = icom("data", "index", str(shards))
    assert done.code == 0, done.err
    assert "20 samples in 3 shards" in done.out
    assert "picture 20, .txt 20, .json 20, .cls 20" in done.out
    assert "width (int64)" in done.out
    assert "score (double)" in done.out
    assert "tags" not in done.out
    source = opened(shards)
    assert captions(source) == things(*range(20))
    assert [list(run) for run in source.runs] == [list(range(7)), list(range(7, 12)), list(range(12, 20))]
    assert source.describe() == "20 captioned pictures in 3 tars"
    rows = pq.read_table(shards / NAME).to_pylist()  # as the documentation has it: cut out of the tar by hand
    with (shards / "more/00002.tar").open("rb") as file:
        file.seek(rows[12]["txt_offset"])
        assert file.read(rows[12]["txt_size"]) == b"thing 12"


def test_patterns_choose_shards_of_the_index(shards: Path, icom: Icom) -> None:
    assert icom("data", "index", str(shards)).code == 0
    assert captions(opened(shards / "{00001,00000}.tar")) == things(*range(7, 12), *range(7))
    assert captions(opened(shards / "{00000..00001}.tar")) == things(*range(12))
    assert captions(opened(shards / "*.tar")) == things(*range(12))
    assert captions(opened(shards / "00001.tar")) == things(*range(7, 12))
    assert captions(opened(shards / "**/*2.tar")) == things(*range(12, 20))
    alone = opened(shards / "more", index=None)
    assert [record[0] for record in everything(alone)][:1] == ["00002.tar/000012"]


def test_braces_are_those_of_the_shell(tmp_path: Path) -> None:
    pattern = "{a,b}-{098..101}.tar"
    words = subprocess.run(["bash", "-c", f"echo {pattern}"], capture_output=True, check=True, text=True).stdout.split()
    for number, word in enumerate(words):
        write(tmp_path / word, sample(number))
    assert captions(opened(tmp_path / pattern)) == things(*range(8))
    with pytest.raises(UsageError, match="Unbalanced braces"):
        opened(tmp_path / "{0..9.tar")


def test_without_an_index_one_is_made_once(shards: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In the cache, for these shards; for others another one."""
    cache = str(tmp_path / "cache")
    first = opened(shards, cache_dir=cache)
    assert "no index of the 3 shards yet: making one" in capsys.readouterr().err
    assert captions(first) == things(*range(20))
    assert opened(shards, cache_dir=cache).digest == first.digest
    assert "making" not in capsys.readouterr().err
    write(shards / "00001.tar", *map(sample, range(50, 53)))
    assert captions(opened(shards, cache_dir=cache)) == things(*range(7), 50, 51, 52, *range(12, 20))
    assert "making" in capsys.readouterr().err
    assert not list(shards.glob("*.parquet"))


def test_digest_does_not_depend_on_the_place(shards: Path, tmp_path: Path, icom: Icom) -> None:
    """With the index beside them or in a cache, here or elsewhere; it does on all that decides what a number is."""
    here = opened(shards, caption_column="txt")
    (tmp_path / "moved").mkdir()
    moved = shards.rename(tmp_path / "moved/shards")
    assert icom("data", "index", str(moved)).code == 0
    assert opened(moved).digest == here.digest
    assert opened(moved / "**/*.tar").digest == here.digest
    different = [{"caption_column": "json:caption"}, {"filters": {"width": ">300"}}, {"max_train_samples": 3}]
    assert len({opened(moved, **options).digest for options in different} | {here.digest}) == 4


def test_captions_from_json_and_classes(shards: Path, tmp_path: Path) -> None:
    assert captions(opened(shards, caption_column="json:caption")) == [f"json {number}" for number in range(20)]
    prompts = ["a cat", "a dog", "a bird"]
    for content in (prompts, {str(number): prompt for number, prompt in enumerate(prompts)}):
        (tmp_path / "prompts.json").write_text(json.dumps(content))
        options = {"caption_column": "cls", "idx_to_prompt": str(tmp_path / "prompts.json")}
        assert captions(opened(shards, **options)) == [prompts[number % 3] for number in range(20)]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts[:2]))
    with pytest.raises(DamagedRecord, match=r"00000\.tar/000002: class 2 has no prompt"):
        opened(shards, **options).read(2)
    for wrong in ("[", '"x"', "[1]", '{"cat": "a cat"}', '[""]'):
        (tmp_path / "prompts.json").write_text(wrong)
        with pytest.raises(UsageError, match=r"--idx_to_prompt .*prompts\.json"):
            opened(shards, **options)
    for column in ("cls", "json", "json:", "caption"):
        with pytest.raises(UsageError, match=f"--caption_column {column}"):
            opened(shards, caption_column=column)


def test_filters_by_fields_of_json(shards: Path) -> None:
    source = opened(shards, filters={"width": ">=300", "or": [{"score": "<2"}, {"score": ">8.5"}]})
    assert captions(source) == things(3, 18, 19)
    assert [list(run) for run in source.runs] == [[0], [], [1, 2]]
    assert "(17 left out by filters)" in source.describe()
    assert captions(opened(shards, filters={"width": ">=300"}, max_train_samples=2)) == things(3, 4)
    with pytest.raises(UsageError, match=r"'height' has no such column .*caption, licence, score, width"):
        opened(shards, filters={"height": 1})
    with pytest.raises(UsageError, match="leave nothing of 20 samples"):
        opened(shards, filters={"width": ">5000"})


def test_fields_of_other_types_in_other_shards(tmp_path: Path) -> None:
    """Whole numbers here, others there; missing; numbers and texts; damaged .json lacks all."""
    write(tmp_path / "0.tar", sample(0, json={"a": 1, "b": 2, "c": True}), sample(1, json={"a": 2}))
    write(tmp_path / "1.tar", sample(2, json={"a": 0.5, "b": "x"}), sample(3, json=b"{"), sample(4, json=[1]))
    assert captions(opened(tmp_path, filters={"a": "0.2..1"})) == things(0, 2)
    assert captions(opened(tmp_path, filters={"b": "x"})) == things(2)
    assert captions(opened(tmp_path, filters={"b": 2})) == things(0)
    source = opened(tmp_path, filters={"c": True})
    assert captions(source) == things(0)
    assert "4 left out by filters, 4 of them for want of a field" in source.describe()


def test_incomplete_samples_are_named_and_damaged_ones_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        tmp_path / "0.tar",
        *map(sample, range(10)),
        sample(10, txt=None),
        sample(11, png=None),
        sample(99, __key__="\x1b[2Jclear", txt=None),
        sample(12, png=picture(1)[:30]),
        sample(13, txt=" "),
    )
    source = opened(tmp_path, max_damaged_share=0.2)
    told = capsys.readouterr().err
    assert "left out: 0.tar/000010: no caption" in told
    assert "left out: 0.tar/000011: no picture" in told
    assert "left out: 0.tar/clear: no caption" in told  # what a stranger called it does not reach the terminal
    assert len(source) == 12
    for number, reason in ((10, "not a picture"), (11, "empty")):
        with pytest.raises(DamagedRecord, match=rf"0\.tar/0000{number + 2}: .*{reason}"):
            source.read(number)
    with pytest.raises(IcomError, match=r"3 of 15 samples in .* are damaged"):
        opened(tmp_path)


def test_two_members_of_a_name_are_no_sample(tmp_path: Path) -> None:
    """webdataset's reader refuses the whole tar."""
    write(tmp_path / "0.tar", sample(0), sample(1))
    with tarfile.open(tmp_path / "0.tar", "a") as tar:
        tar.addfile(tarfile.TarInfo("000001.txt"))
    assert captions(opened(tmp_path, max_damaged_share=0.5)) == things(0)


def cut_in_a_picture(path: Path) -> None:
    os.truncate(path, 2000)


def cut_between_members(path: Path) -> None:
    with tarfile.open(path) as tar:
        place = tar.getmembers()[4].offset
    os.truncate(path, place)


def cut_in_a_header(path: Path) -> None:
    with tarfile.open(path) as tar:
        place = tar.getmembers()[4].offset
    os.truncate(path, place + 100)


def scratched(path: Path) -> None:
    with tarfile.open(path) as tar:
        place = tar.getmembers()[4].offset
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\xff" * 512)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def no_tar(path: Path) -> None:
    path.write_bytes(b"<html>not found</html>" * 100)


@pytest.mark.parametrize(
    "harm",
    [cut_in_a_picture, cut_between_members, cut_in_a_header, scratched, emptied, no_tar],
    ids=lambda f: f.__name__,
)
def test_cut_shards_are_named(shards: Path, icom: Icom, harm: Callable[[Path], None]) -> None:
    harm(shards / "00001.tar")
    done = icom("data", "index", str(shards))
    assert done.code == 1
    assert f"{shards}/00001.tar is cut, or no tar" in done.err
    assert not (shards / NAME).exists()


def test_compressed_shards_are_refused(shards: Path, tmp_path: Path, icom: Icom) -> None:
    """By name, and by what is in them."""
    content = (shards / "00000.tar").read_bytes()
    for name in ("zipped/0.tar.gz", "zipped/0.tgz", "named/0.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(content))
        done = icom("data", "index", str((tmp_path / name).parent))
        assert done.code == 1
        assert f"{tmp_path / name} is compressed" in done.err
        (tmp_path / name).unlink()


def test_missing_shards_are_named(shards: Path, icom: Icom) -> None:
    for pattern in ("{00000..00003}.tar", "x*.tar"):
        with pytest.raises(IcomError, match=r"The shard .*shards/(00002|x\*)\.tar cannot be read: No such file"):
            opened(shards / pattern)
    assert icom("data", "index", str(shards)).code == 0
    source = opened(shards)
    (shards / "00001.tar").unlink()
    assert source.read(0).caption == "thing 0"
    with pytest.raises(IcomError, match=r"The shard .*00001\.tar cannot be read: No such file"):
        source.read(8)
    assert icom("data", "index", str(shards / "nothing")).code == 1


def test_index_older_than_a_shard_is_refused(shards: Path, icom: Icom) -> None:
    assert icom("data", "index", str(shards)).code == 0
    made = (shards / NAME).stat().st_mtime_ns
    for shard in shards.rglob("*.tar"):  # a copy of shards and index, whose times are new
        os.utime(shard, ns=(made - 10**9, made - 10**9))
    assert len(opened(shards)) == 20
    os.utime(shards / "00001.tar", ns=(made + 10**9, made + 10**9))
    message = r"The index .*icom-index\.parquet is older than .*00001\.tar\. Make it anew: icom data index"
    with pytest.raises(IcomError, match=message):
        opened(shards)
    write(shards / "00001.tar", sample(3))
    os.utime(shards / "00001.tar", ns=(made - 10**9, made - 10**9))
    with pytest.raises(IcomError, match=message):
        opened(shards)
    assert icom("data", "index", str(shards)).code == 0
    assert len(opened(shards)) == 16
    write(shards / "00003.tar", sample(4))
    with pytest.raises(IcomError, match=r"does not have .*00003\.tar"):
        opened(shards)


def test_shard_cut_after_it_was_opened(shards: Path) -> None:
    source = opened(shards)
    source.read(5)
    os.truncate(shards / "00000.tar", 3000)
    with pytest.raises(IcomError, match=r"00000\.tar is cut: it ends before byte"):
        source.read(6)


def test_indexes_that_are_none(shards: Path, tmp_path: Path, icom: Icom) -> None:
    assert icom("data", "index", str(shards)).code == 0
    whole = (shards / NAME).read_bytes()
    pq.write_table(pq.read_table(shards / NAME).replace_schema_metadata(None), tmp_path / "stranger.parquet")
    for content, message in (
        (whole[: len(whole) // 2], "Cannot read the index"),
        (b"", "Cannot read the index"),
        ((tmp_path / "stranger.parquet").read_bytes(), "is no index of this icom"),
    ):
        (shards / NAME).write_bytes(content)
        with pytest.raises(IcomError, match=message):
            opened(shards)
    with pytest.raises(IcomError, match=r"Cannot read the index .*none\.parquet"):
        opened(shards, index=str(shards / "none.parquet"))


def test_tars_without_captions_or_pictures(tmp_path: Path) -> None:
    write(tmp_path / "a/0.tar", sample(0, txt=None))
    with pytest.raises(IcomError, match=r"0 a \.txt, 1 a \.json, 1 a \.cls.*json: with one of caption, width"):
        opened(tmp_path / "a")
    write(tmp_path / "b/0.tar", sample(0, png=None))
    with pytest.raises(IcomError, match="of 1 samples 0 a picture"):
        opened(tmp_path / "b")
    write(tmp_path / "c/0.tar")
    with pytest.raises(IcomError, match="are empty"):
        opened(tmp_path / "c")


def test_many_threads_read_many_shards(tmp_path: Path) -> None:
    """More shards than are kept open, in the order of a run; no file stays open behind it."""
    for number in range(50):
        write(tmp_path / f"{number:03d}.tar", sample(2 * number), sample(2 * number + 1))
    source = opened(tmp_path)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    order = Order(source.runs, seed=0)
    batches = [range(start, start + 10) for start in range(0, 300, 10)]

    def prepare(number: int, record: Any) -> str:
        return str(record.caption)

    with Feed(source, order, batches, prepare, workers=4, ahead=2, max_damaged_share=0) as feed:
        got = [caption for batch in feed for caption in batch]
    assert got == things(*(order[number] for number in range(300)))
    assert sorted(got[:100]) == sorted(things(*range(100)))
    del source, feed
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_without_the_extra(shards: Path, icom: Icom, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its packages is named, with the way to get it; a folder of pictures needs none."""
    for package in ("pyarrow", "braceexpand"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(IcomError, match=f"Reading tars needs {package}, which comes with the extra `data`"):
                opened(shards)
            assert "EXTRAS=data" in icom("data", "index", str(shards)).err
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "boto3", None)
        remote._s3.cache_clear()
        with pytest.raises(IcomError, match="s3:// needs boto3, which comes with the extra `data`"):
            opened("s3://bucket/0.tar")


# Shards that lie elsewhere.


@pytest.fixture
def s3(moto: str, shards: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The shards in s3://pictures/train/."""
    import boto3

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ENDPOINT_URL": moto,
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "no-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "no-credentials"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    remote._s3.cache_clear()
    client = boto3.client("s3", region_name="us-east-1")
    client.create_bucket(Bucket="pictures")
    for path in shards.rglob("*.tar"):
        client.upload_file(str(path), "pictures", f"train/{path.relative_to(shards).as_posix()}")
    client.put_object(Bucket="pictures", Key="train/readme.md", Body=b"x")
    yield client
    for item in client.list_objects_v2(Bucket="pictures").get("Contents", ()):
        client.delete_object(Bucket="pictures", Key=item["Key"])
    client.delete_bucket(Bucket="pictures")
    client.close()
    remote._s3.cache_clear()


def test_s3(s3: Any, shards: Path, tmp_path: Path, icom: Icom) -> None:
    """As from the disk, digest included; each shard is fetched once."""
    truth = everything(opened(shards))
    cache = str(tmp_path / "cache")
    source = opened("s3://pictures/train/**.tar", cache_dir=cache)
    assert everything(source) == truth
    assert source.digest == opened(shards).digest
    assert everything(opened("s3://pictures/train/{00000..00001}.tar", cache_dir=cache)) == truth[:12]
    with pytest.raises(IcomError, match="Nothing in S3 matches"):
        opened("s3://pictures/train/x*.tar", cache_dir=cache)
    with pytest.raises(IcomError, match=r"S3 refuses s3://pictures/train/9\.tar: (404|NoSuchKey)"):
        opened("s3://pictures/train/9.tar", cache_dir=cache)
    with pytest.raises(IcomError, match="S3 refuses s3://elsewhere/"):
        opened("s3://elsewhere/*.tar", cache_dir=cache)
    index = str(tmp_path / "index.parquet")
    assert icom("data", "index", "s3://pictures/train/**.tar", "--output", index, "--cache_dir", cache).code == 0
    assert icom("data", "index", "s3://pictures/train/**.tar", "--cache_dir", cache).code == 2
    s3.upload_file(index, "pictures", "train/index.parquet")
    again = opened("s3://pictures/train/**.tar", cache_dir=cache, index="s3://pictures/train/index.parquet")
    assert everything(again) == truth
    s3.upload_file(str(shards / "00000.tar"), "pictures", "train/00001.tar")
    with pytest.raises(IcomError, match=r"older than s3://pictures/train/00001\.tar"):
        opened("s3://pictures/train/**.tar", cache_dir=cache, index=index)
    unlisted = opened("s3://pictures/train/{00000,00001}.tar", cache_dir=str(tmp_path / "new"), index=index)
    assert unlisted.read(0).caption == "thing 0"
    with pytest.raises(IcomError, match=r"00001\.tar has changed since it was indexed"):
        unlisted.read(8)


def test_s3_without_credentials(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    remote._s3.cache_clear()
    for pattern in ("*", "{00000..00001}"):
        with pytest.raises(IcomError, match=r"No credentials for s3://pictures/train/.*AWS_ACCESS_KEY_ID"):
            opened(f"s3://pictures/train/{pattern}.tar")


def test_web(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("icom.data.remote._PAUSE", 0.0)
    truth = everything(opened(shards))
    with server(shards) as (address, asked):
        source = opened(f"{address}/{{00000..00001}}.tar", cache_dir=str(tmp_path / "cache"))
        assert everything(source) == truth[:12]
        assert everything(source) == truth[:12]
        assert sorted(asked) == sorted(2 * ["/00000.tar", "/00001.tar"])  # its size, and all of it
        with pytest.raises(IcomError, match=r"/9\.tar: the server answers 404"):
            opened(f"{address}/9.tar")
        with pytest.raises(UsageError, match="does not list its files"):
            opened(f"{address}/*.tar")
    with pytest.raises(IcomError, match=r"/9\.tar cannot be reached"):
        opened(f"{address}/9.tar")
    with pytest.raises(UsageError, match="gs:// cannot be read, only s3://, https://"):
        opened("gs://bucket/0.tar")


def test_connections_that_break_off(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the shard, an error of the server's, then all of it: a real server that does so."""
    from http.server import BaseHTTPRequestHandler, HTTPServer

    monkeypatch.setattr("icom.data.remote._PAUSE", 0.0)
    content = (shards / "00000.tar").read_bytes()
    answers = iter(["half", "error", "all"])

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()

        def do_GET(self) -> None:
            answer = next(answers)
            if answer == "error":
                return self.send_error(503)
            self.do_HEAD()
            self.wfile.write(content[: len(content) // 2] if answer == "half" else content)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            source = opened(f"http://127.0.0.1:{running.server_port}/00000.tar", cache_dir=str(tmp_path))
            assert captions(source) == things(*range(7))
        finally:
            running.shutdown()
            thread.join()
    assert next(answers, None) is None


def test_pipes(shards: Path, tmp_path: Path) -> None:
    """The command's output is the shard, kept; a command that fails is named with what it said."""
    cache = str(tmp_path / "cache")
    pattern = f"pipe:echo x >> {tmp_path}/calls; cat {shards}/{{00000..00001}}.tar"
    assert captions(opened(pattern, cache_dir=cache)) == things(*range(12))
    assert captions(opened(pattern, cache_dir=cache)) == things(*range(12))
    assert (tmp_path / "calls").read_text() == "x\nx\n"
    with pytest.raises(IcomError, match=r"The command of pipe:cat .*ended with code 1: cat: .*9\.tar: No such file"):
        opened(f"pipe:cat {shards}/9.tar", cache_dir=cache)
    with pytest.raises(IcomError, match="is compressed"):
        opened(f"pipe:gzip -c {shards}/00000.tar", cache_dir=cache)
    assert captions(opened(f"pipe:gzip -c {shards}/00000.tar | gunzip", cache_dir=cache)) == things(*range(7))
    leftovers = [path.name for path in Path(cache, "shards").iterdir() if path.name.startswith(".")]
    assert not leftovers


def test_cache_keeps_to_its_limit(tmp_path: Path) -> None:
    """What was not used for longest goes; who reads it goes on; it is fetched again when it is needed."""
    for number in range(4):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 1000)
    cache = ShardCache(tmp_path / "cache", limit=2500)

    def shard(number: int) -> Shard:
        command = f"pipe:echo >> {tmp_path}/calls-{number}; cat {tmp_path}/{number}"
        return Shard(str(number), command, 1000)

    def calls() -> list[int]:
        counts = (tmp_path / f"calls-{number}" for number in range(4))
        return [len(path.read_text()) if path.exists() else 0 for path in counts]

    def age(path: Path, seconds: int) -> None:
        os.utime(path, (seconds, seconds))

    age(cache.local(shard(0)), 1)
    age(cache.local(shard(1)), 2)
    with cache.local(shard(0)).open("rb") as reader:
        age(cache.local(shard(0)), 1)
        cache.local(shard(2))
        assert reader.read() == bytes([0]) * 1000
    assert calls() == [1, 1, 1, 0]
    assert cache.local(shard(1)).read_bytes() == bytes([1]) * 1000
    assert calls() == [1, 1, 1, 0]
    assert cache.local(shard(0)).read_bytes() == bytes([0]) * 1000
    assert calls() == [2, 1, 1, 0]
    kept = [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]
    assert sum(path.stat().st_size for path in kept) <= 2500


@pytest.mark.parametrize("full", ["--cache_dir", "--output"])
def test_disk_that_is_full(shards: Path, tmp_path: Path, full: str) -> None:
    """Of copies, or of the index: said in the user's terms; nothing half-written stays."""
    places = {"--cache_dir": str(tmp_path / "cache"), "--output": str(tmp_path / "index.parquet")}
    places[full] = str(tmp_path / "disk/index.parquet" if full == "--output" else tmp_path / "disk")
    words = shlex.join([sys.executable, "-m", "icom", "data", "index", f"pipe:cat {shards}/{{00000,00001}}.tar"])
    options = shlex.join(word for option in places.items() for word in option)
    script = f"""mount -t tmpfs -o size=64k none "$DISK"; cat /dev/zero >"$DISK/filler" 2>&- || :
        {words} {options} || code=$?; ls -A "$DISK"; exit $code"""
    done = on_a_disk(tmp_path / "disk", script)
    assert done.code == 1, done.err
    assert "The disk is full" in done.err
    assert f"choose another {full}" in done.err
    assert "Traceback" not in done.err
    assert [name for name in done.out.split() if not name.endswith(".lock")] in (["filler"], ["filler", "shards"])


def test_threads_fetch_a_shard_once(tmp_path: Path, shards: Path) -> None:
    place = f"pipe:echo x >> {tmp_path}/calls; sleep 0.2; cat {shards}/00000.tar"
    cache = ShardCache(tmp_path / "cache", None)
    threads = [threading.Thread(target=cache.local, args=(Shard("a", place),)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "calls").read_text() == "x\n"
