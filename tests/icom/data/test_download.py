"""Pictures of a list of addresses, from a server on loopback that does all that strangers' servers do.

Guards icom.data.download, icom.data.fetch and icom.data.url_list.
"""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from icom import __version__
from icom.config.shards import DownloadConfig
from icom.data.fetch import Failed, Fetcher, is_public
from tests.support.clone import closed_port
from tests.support.clone import server as files
from tests.support.command import Result, assert_message, start_process
from tests.support.picture_server import caption, picture, pictures
from tests.support.waiting import wait_until

Icom = Callable[..., Result]
Row = dict[str, Any]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with pictures() as (address, _):
        yield address


def rows(server: str, *names: str) -> list[Row]:
    return [
        {"url": f"{server}/{name}", "caption": f"{name} & so on", "score": number / 2, "WIDTH": 7, "width": 1}
        for number, name in enumerate(names)
    ]


def numbered(server: str, count: int) -> list[Row]:
    return [
        {"url": f"{server}/{number}.{'jpg' if number % 2 else 'png'}", "caption": caption(number), "score": number / 2}
        for number in range(count)
    ]


def write(path: Path, content: list[Row]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(content), path, row_group_size=5)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(content[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(content)
    return path


def words(source: Path, output: Path, **options: object) -> list[str]:
    given = {"samples_per_shard": 4, "timeout": 5, "retries": 0} | options
    named = [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]
    return ["data", "download", str(source), f"--output_dir={output}", "--allow_private_addresses", *named]


def members(folder: Path) -> dict[str, bytes]:
    """All that is in the tars, read by Python's own module."""
    found = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                content = tar.extractfile(member)
                assert content
                found[member.name] = content.read()
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["parquet", "csv", "tsv", "jsonl"])
def test_tars_have_what_the_server_has(kind: str, server: str, tmp_path: Path, icom: Icom) -> None:
    """Bytes, captions and all columns, in the list's order; the same tars from every kind of list."""
    done = icom(*words(write(tmp_path / f"urls.{kind}", numbered(server, 11)), tmp_path / "out"))
    assert done.code == 0, done
    assert "11 pictures of 11 addresses" in done.out and "failed" not in done.out
    found = members(tmp_path / "out")
    assert len(found) == 33
    for number in range(11):
        ending, form = ("jpg", "JPEG") if number % 2 else ("png", "PNG")
        assert found[f"{number:09d}.{ending}"] == picture(number, form)
        assert found[f"{number:09d}.txt"].decode() == caption(number)
        said = {"url": f"{server}/{number}.{ending}", "caption": caption(number), "score": number / 2}
        assert json.loads(found[f"{number:09d}.json"]) == said | {"width": 64, "height": 64}
    assert sorted(path.name for path in (tmp_path / "out").glob("*.tar")) == ["00000.tar", "00001.tar", "00002.tar"]


def test_parts_make_together_what_one_makes(server: str, tmp_path: Path, icom: Icom) -> None:
    """From several files, whatever the number of parts."""
    folder = tmp_path / "lists"
    folder.mkdir()
    everything = numbered(server, 23)
    for number, name in enumerate(("a.parquet", "b.jsonl", "c.parquet")):
        write(folder / name, everything[8 * number : 8 * number + 8])
    assert icom(*words(folder, tmp_path / "one")).code == 0
    for part in (3, 1, 2):
        assert icom(*words(folder, tmp_path / "three", part=f"{part}/3")).code == 0
        made = sorted(path.stem for path in (tmp_path / "three").glob("*.tar"))
        assert part != 3 or made == ["00002", "00005"]
    assert content(tmp_path / "three") == content(tmp_path / "one")
    assert [name for name in members(tmp_path / "one") if name.endswith(".txt")] == [f"{n:09d}.txt" for n in range(23)]


FAILURES = {
    "missing": "HTTP 404",
    "broken/1": "a damaged picture, or one of too many pixels",
    "text": "not a picture of the web",
    "eps": "not a picture of the web",
    "huge": "more than 2 MB",
    "cut": "the connection broke off",
    "never": "not in time",
    "slow": "not in time",
    "round": "more than 5 redirects",
    "optout": "X-Robots-Tag",
    "to/file:///etc/hostname": "no http:// or https:// address",
    "to/ftp://host/1.png": "no http:// or https:// address",
}


def test_failures_are_counted_by_reason(server: str, tmp_path: Path, icom: Icom) -> None:
    others = {
        "file:///etc/hostname": "no http:// or https:// address",
        "": "no http:// or https:// address",
        f"http://127.0.0.1:{closed_port()}/1.png": "no connection",
        "http://no-such-host.invalid/1.png": "no such host",
        "http://[::1": "no http:// or https:// address",
    }
    expected = {f"{server}/{name}": reason for name, reason in FAILURES.items()} | others
    listed = [{"url": url, "caption": "x"} for url in expected]
    good = rows(server, "to//2.png", f"to/{server}/3.png", "4.png")
    lacking = [{"url": f"{server}/5.png", "caption": " "}]
    source = write(tmp_path / "urls.jsonl", good + listed + lacking)
    limits = {"max_failed_share": 0.9, "timeout": 1.5, "max_picture_mb": 2, "samples_per_shard": 100}
    done = icom(*words(source, tmp_path / "out", **limits))
    assert done.code == 0, done
    said = json.loads((tmp_path / "out/00000.json").read_text())
    found = {row["url"]: (row["row"], row["reason"]) for row in said["failed"]}
    for number, (url, reason) in enumerate(expected.items(), 3):
        assert found[url][0] == number and reason in found[url][1], (url, found[url])
    assert found[f"{server}/5.png"][1] == "no caption"
    assert "failed (85.7%):\n  5 no http:// or https:// address\n" in done.out
    assert "3 pictures of 21 addresses" in done.out
    kept = [name for name in members(tmp_path / "out") if name.endswith(".png")]
    assert kept == [f"{number:09d}.png" for number in range(3)]


def test_own_fields_count_and_others_stay(server: str, tmp_path: Path, icom: Icom) -> None:
    listed = [*rows(server, "1.png"), {**rows(server, "2.png")[0], "score": float("nan"), "tags": ["a"]}]
    source = write(tmp_path / "urls.jsonl", listed)
    assert icom(*words(source, tmp_path / "out", caption_column="caption")).code == 0
    first, second = (json.loads(members(tmp_path / "out")[f"{number:09d}.json"]) for number in (0, 1))
    assert (first["width"], first["WIDTH"], first["score"]) == (64, 7, 0.0)
    assert "score" not in second and second["tags"] == ["a"]


def test_what_may_go_better_is_tried_again_and_who_asks(tmp_path: Path, icom: Icom) -> None:
    with pictures() as (address, asked):
        source = write(tmp_path / "urls.csv", rows(address, "busy/1.png", "missing"))
        done = icom(*words(source, tmp_path / "out", retries=1, user_agent="me (mail@example.org)"))
        assert done.code == 0, done
        paths = [path for path, _ in asked]
        assert (paths.count("/busy/1.png"), paths.count("/missing")) == (2, 1)
        assert {agent for _, agent in asked} == {"me (mail@example.org)"}
        asked.clear()
        Fetcher(DownloadConfig(source="", allow_private_addresses=True))(f"{address}/1.png")
        assert asked == [("/1.png", f"icom/{__version__}")]


def test_private_addresses_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by number, not by name, not where a public server leads to: the server sees no request."""
    with pictures() as (address, asked), pictures("127.0.0.2") as (public, _):
        fetch = Fetcher(DownloadConfig(source="", retries=0))
        for url in (f"{address}/1.png", f"{address}/1.png".replace("127.0.0.1", "localhost"), f"{public}/1.png"):
            with pytest.raises(Failed, match="a private address"):
                fetch(url)
        monkeypatch.setattr("icom.data.fetch.is_public", lambda number: number == "127.0.0.2")
        assert fetch(f"{public}/1.png").content == picture(1)
        with pytest.raises(Failed, match="a private address"):
            fetch(f"{public}/to/{address}/1.png")
        assert not asked


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *((a, False) for a in "127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0".split()),
        *((a, False) for a in "::1 fe80::1%eth0 fd00:ec2::254 ::ffff:10.0.0.1 2002:7f00:1::1 224.0.0.1 ::".split()),
        *((a, True) for a in "8.8.8.8 2606:4700::1111 ::ffff:8.8.8.8".split()),
    ],
)
def test_what_the_internet_does_not_reach(address: str, public: bool) -> None:
    """Metadata services of clouds among them."""
    assert is_public(address) == public


def test_stopped_and_killed_downloads_go_on(tmp_path: Path, icom: Icom) -> None:
    """To the same bytes; what was whole is not asked for again."""
    hold = tmp_path / "hold"
    hold.touch()
    with pictures(held=hold) as (address, asked):
        listed = numbered(address, 10)
        listed[9]["url"] = f"{address}/held/9.png"
        source = write(tmp_path / "urls.parquet", listed)
        arguments = words(source, tmp_path / "out", timeout=60)
        for number in (signal.SIGKILL, signal.SIGINT):
            process = start_process(*arguments)
            wait_until(lambda: any(path.startswith("/held") for path, _ in asked))
            wait_until((tmp_path / "out/00001.json").exists)
            os.kill(process.pid, number)
            if number == signal.SIGINT:
                wait_until(lambda: not hold.unlink(missing_ok=True))
            out, err = process.communicate()
            assert process.returncode == (-9 if number == signal.SIGKILL else 130), (out, err)
            assert not (tmp_path / "out/00002.json").exists()
            asked.clear()
        done = icom(*arguments)
        assert done.code == 0 and "1 of 3 tars to make" in done.out
        assert sorted(path for path, _ in asked) == ["/8.png", "/held/9.png"]
        assert icom(*words(source, tmp_path / "whole")).code == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_tar_that_was_cut_is_made_again(server: str, tmp_path: Path, icom: Icom) -> None:
    source = write(tmp_path / "urls.parquet", numbered(server, 6))
    assert icom(*words(source, tmp_path / "out")).code == 0
    before = content(tmp_path / "out")
    (tmp_path / "out/00001.tar").write_bytes(b"cut")
    assert "1 of 2 tars to make" in icom(*words(source, tmp_path / "out")).out
    assert content(tmp_path / "out") == before


def test_what_failed_for_a_while_is_tried_again(tmp_path: Path, icom: Icom) -> None:
    """A tar whose server was down is not whole for ever; one with a few dead addresses is."""
    with pictures() as (address, asked):
        names = [*(f"{n}.png" for n in range(3)), "missing", *(f"busy/{n}.png" for n in range(4))]
        source = write(tmp_path / "urls.csv", rows(address, *names))
        assert_message(icom(*words(source, tmp_path / "out")), 1, "5 of 8 downloads failed", "4 HTTP 503 1 HTTP 404")
        before = len(asked)
        done = icom(*words(source, tmp_path / "out"))
        assert done.code == 0 and "1 of 2 tars to make" in done.out and "7 pictures of 8 addresses" in done.out
        assert sorted(path for path, _ in asked[before:]) == [f"/busy/{n}.png" for n in range(4)]


def test_too_many_failures(server: str, tmp_path: Path, icom: Icom) -> None:
    source = write(tmp_path / "urls.csv", rows(server, *["missing"] * 3, *["text"] * 2, "1.png", "2.png", "3.png"))
    assert_message(
        icom(*words(source, tmp_path / "out")),
        1,
        "5 of 8 downloads failed, and only 50% may (--max_failed_share)",
        "3 HTTP 404 2 not a picture",
        "The last of them: row 4",
    )
    assert icom(*words(source, tmp_path / "out", max_failed_share=0.7)).code == 0
    nothing = write(tmp_path / "nothing.csv", rows(server, "missing", "missing"))
    assert_message(icom(*words(nothing, tmp_path / "n", max_failed_share=1)), 1, "2 of 2 downloads failed")


@pytest.mark.parametrize(
    ("name", "text", "options", "code", "parts"),
    [
        ("urls.csv", "link,caption\nx,y\n", {}, 1, ("no column 'url' (--url_column)", "'link', 'caption'")),
        ("urls.csv", "url,text\nx,y\n", {}, 1, ("no column 'caption' (--caption_column)", "'url', 'text'")),
        ("urls.csv", "", {}, 1, ("has no rows",)),
        ("urls.csv", "url,caption\n", {}, 1, ("has no rows",)),
        ("urls.jsonl", '{"url": 1', {}, 1, ("urls.jsonl cannot be read",)),
        ("urls.jsonl", "[1]\n", {}, 1, ("line 1 is [1], and no object",)),
        ("urls.parquet", "no parquet", {}, 1, ("urls.parquet cannot be read",)),
        ("urls.txt", "x", {}, 2, ("urls.txt is no list of addresses", ".jsonl")),
        ("urls.csv", "x", {"timeout": 0}, 2, ("--timeout has to be a positive number",)),
        ("urls.csv", "x", {"part": "3/2"}, 2, ("--part has to be K/N",)),
        ("urls.csv", "x", {"max_failed_share": 2}, 2, ("--max_failed_share has to be between 0 and 1",)),
        ("urls.csv", "x", {"user_agent": "a\nb"}, 2, ("--user_agent has characters",)),
    ],
)
def test_lists_and_options_that_cannot_work(
    name: str, text: str, options: Row, code: int, parts: tuple[str, ...], tmp_path: Path, icom: Icom
) -> None:
    (tmp_path / name).write_text(text)
    assert_message(icom(*words(tmp_path / name, tmp_path / "out", **options)), code, *parts)
    assert not list(tmp_path.glob("out/*.tar"))


def test_folder_of_another_download(server: str, tmp_path: Path, icom: Icom) -> None:
    source = write(tmp_path / "urls.csv", rows(server, "1.png", "2.png"))
    assert icom(*words(source, tmp_path / "out")).code == 0
    assert_message(icom(*words(source, tmp_path / "out", samples_per_shard=5)), 1, "samples_per_shard differs")
    write(source, rows(server, "1.png"))
    assert_message(icom(*words(source, tmp_path / "out")), 1, "list differs", "Choose another --output_dir")
    assert_message(icom(*words(tmp_path / "none.csv", tmp_path / "out")), 1, "none.csv cannot be read")


def test_pictures_too_large_to_decode(tmp_path: Path) -> None:
    """A bomb: few bytes, many pixels."""
    with io.BytesIO() as file:
        Image.new("1", (20000, 20000)).save(file, "PNG")
        bomb = file.getvalue()
    (tmp_path / "bomb.png").write_bytes(bomb)
    with files(tmp_path) as (address, _):
        fetch = Fetcher(DownloadConfig(source="", allow_private_addresses=True))
        with pytest.raises(Failed, match="too many pixels"):
            fetch(f"{address}/bomb.png")
