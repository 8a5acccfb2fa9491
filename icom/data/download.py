"""`icom data download`: the pictures of a list of addresses, in WebDataset tars.

Tar N has what came of the rows from N · samples_per_shard on, whichever part makes it, so that parts may be more or
fewer the next time. NUMBER.json beside it says what is in it and what failed; a tar is whole once that is there.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from icom.config.shards import DownloadConfig
from icom.data.claims import DOWNLOADED, claim
from icom.data.damage import ENOUGH
from icom.data.fetch import Failed, Fetched, Fetcher
from icom.data.parts import part_of
from icom.data.shards import ShardCache
from icom.data.tar_writing import tar_of_samples
from icom.data.url_list import Row, UrlList, open_url_list
from icom.data.whole_file import whole_file, write_whole
from icom.errors import IcomError, Stopped
from icom.files import cache_folder, write_error
from icom.names import plain
from icom.progress import progress
from icom.signals import StopRequest

_OWN = ("url", "caption", "width", "height")
"""Fields of the .json that the download itself writes; columns of these names give way."""
_GO_ON = "The tars that are whole stay: give the same command again to go on."


@dataclass
class Tally:
    """What came, and what did not.

    Attributes:
        samples: pictures with captions.
        failed: reason -> rows.
        example: one that failed, for messages.
    """

    samples: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    example: str = ""

    def add(self, samples: int, failed: Sequence[dict[str, Any]]) -> None:
        """A tar's."""
        self.samples += samples
        self.failed.update(row["reason"] for row in failed)
        if failed:
            self.example = f"row {failed[-1]['row']}, {failed[-1]['url']}: {failed[-1]['reason']}"

    @property
    def rows(self) -> int:
        """Of the list, looked at."""
        return self.samples + self.failed.total()

    def table(self) -> str:
        """Reasons and how many rows failed for them, a line each."""
        width = len(f"{max(self.failed.values(), default=0):,}")
        return "\n".join(f"  {count:>{width},} {reason}" for reason, count in self.failed.most_common())

    def check(self, allowed: float, *, complete: bool) -> None:
        """Refuse to go on with too many.

        Args:
            allowed: share of rows that may fail.
            complete: no more are coming.

        Raises:
            IcomError: with reasons, one of them, and what to do.
        """
        count = self.failed.total()
        if not count or (self.rows < ENOUGH and not complete):
            return
        if count > allowed * self.rows or (complete and not self.samples):
            raise IcomError(
                f"{count:,} of {self.rows:,} downloads failed, and only {allowed:.0%} may (--max_failed_share):\n"
                f"{self.table()}\nThe last of them: {self.example}. {_GO_ON}"
            )


def download(config: DownloadConfig) -> Tally:
    """Write the tars that are missing in --output_dir.

    Raises:
        UsageError: the list is no list.
        IcomError: the list cannot be read or lacks a column, too many downloads fail, the disk is full, or --output_dir
            has tars of another list.
        Stopped: a signal came; the tars that are whole stay.
    """
    part, parts = part_of(config.part, os.environ)
    wanted = [(option, str(getattr(config, option))) for option in ("url_column", "caption_column")]
    urls = open_url_list(config.source, ShardCache(cache_folder(config.cache_dir) / "lists", None), wanted)
    output = Path(config.output_dir).expanduser()
    about = {"list": urls.describe(), "samples_per_shard": config.samples_per_shard}
    claim(output, DOWNLOADED, about | dict(wanted))
    tally = Tally()
    mine = range(math.ceil(len(urls) / config.samples_per_shard))[part - 1 :: parts]
    missing = []
    for number in mine:
        # One with too many failures is tried again: perhaps the network was down.
        if (there := _read(output, number)) and not _too_many(there, config.max_failed_share):
            tally.add(there["samples"], there["failed"])
        else:
            missing.append(_numbers(number, config, urls))
    of_part = f", part {part} of {parts}" if parts > 1 else ""
    print(f"icom: {len(urls):,} addresses; {len(missing):,} of {len(mine):,} tars to make{of_part}", flush=True)
    fetcher = Fetcher(config)
    with (
        StopRequest("waiting for the pictures under way; tars that are whole stay") as stop,
        progress(None, "download", "picture", total=sum(map(len, missing)), disable=not missing) as bar,
        ThreadPoolExecutor(config.threads, thread_name_prefix="icom-download") as pool,
    ):
        try:
            rows = urls.rows(missing)
            for numbers in missing:
                samples = _samples(config, fetcher, pool, numbers, islice(rows, len(numbers)))
                _make(output, numbers.start // config.samples_per_shard, samples, tally, stop, bar)
                tally.check(config.max_failed_share, complete=False)
        finally:
            fetcher.stopping.set()
            pool.shutdown(cancel_futures=True)
            fetcher.close()
    tally.check(config.max_failed_share, complete=True)
    print(plain(f"{tally.samples:,} pictures of {tally.rows:,} addresses in {output}"))
    if tally.failed:
        print(plain(f"failed ({tally.failed.total() / tally.rows:.1%}):\n{tally.table()}"))
    return tally


def _numbers(number: int, config: DownloadConfig, urls: UrlList) -> range:
    """Of the list's rows, those of a tar."""
    first = number * config.samples_per_shard
    return range(first, min(first + config.samples_per_shard, len(urls)))


def _read(output: Path, number: int) -> dict[str, Any] | None:
    """What is said of a tar; None: it is not whole."""
    try:
        about = json.loads((output / f"{number:05d}.json").read_text(encoding="utf-8"))
        whole = (output / f"{number:05d}.tar").stat().st_size == about["bytes"]
        return {"samples": int(about["samples"]), "failed": list(about["failed"])} if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _too_many(there: dict[str, Any], allowed: float) -> bool:
    failed = len(there["failed"])
    return failed > allowed * (int(there["samples"]) + failed)


def _make(
    output: Path, number: int, samples: Iterator[_Sample | dict[str, Any]], tally: Tally, stop: StopRequest, bar: Any
) -> None:
    """Make one tar.

    Raises:
        IcomError: the disk is full.
        Stopped: a signal came; nothing is left of it.
    """
    path = output / f"{number:05d}.tar"
    made, failed = 0, []
    try:
        with whole_file(path) as file, tar_of_samples(file) as tar:
            for sample in samples:
                if stop.signal_number is not None:
                    raise Stopped(f"stopped. {_GO_ON}", stop.signal_number)
                bar.update()
                if isinstance(sample, _Sample):
                    tar.add(f"{sample.key}.{sample.fetched.ending}", sample.fetched.content)
                    tar.add(f"{sample.key}.txt", sample.caption.encode())
                    tar.add(f"{sample.key}.json", json.dumps(sample.said).encode())
                    made += 1
                else:
                    failed.append(sample)
        about = {"samples": made, "bytes": file.size, "failed": failed}
        write_whole(path.with_suffix(".json"), json.dumps(about, indent=1).encode())
    except OSError as error:
        raise IcomError(f"{write_error(path, error)} {_GO_ON}") from error
    tally.add(made, failed)
    if tally.failed:
        bar.set_postfix_str(f"{tally.failed.total():,} failed", refresh=False)


@dataclass(frozen=True)
class _Sample:
    """What goes into the tar. `key` has nine digits or more."""

    key: str
    fetched: Fetched
    caption: str
    said: dict[str, Any]


def _samples(
    config: DownloadConfig, fetcher: Fetcher, pool: ThreadPoolExecutor, numbers: range, rows: Iterator[Row]
) -> Iterator[_Sample | dict[str, Any]]:
    """Of each row its sample, or what to say of its failure; in order. Some are fetched ahead."""
    coming: deque[Future[_Sample | dict[str, Any]]] = deque()
    for number, row in zip(numbers, rows, strict=True):
        coming.append(pool.submit(_sample, config, fetcher, number, row))
        if len(coming) > 2 * config.threads:
            yield coming.popleft().result()
    while coming:
        yield coming.popleft().result()


def _sample(config: DownloadConfig, fetcher: Fetcher, number: int, row: Row) -> _Sample | dict[str, Any]:
    url, caption = row.get(config.url_column), row.get(config.caption_column)
    try:
        if caption is None or not str(caption).strip():
            raise Failed("no caption")
        fetched = fetcher(url)
    except Failed as error:
        return {"row": number, "url": str(url), "reason": error.reason}
    said = {name: value for name, value in row.items() if name not in (config.url_column, config.caption_column)}
    said = {name: _plain(value) for name, value in said.items() if name not in _OWN and not _is_nothing(value)}
    text = str(caption).strip()
    own = {"url": url, "caption": text, "width": fetched.size[0], "height": fetched.size[1]}
    return _Sample(f"{number:09d}", fetched, text, said | own)


def _is_nothing(value: object) -> bool:
    return value is None or value == "" or (isinstance(value, float) and not math.isfinite(value))


def _plain(value: Any) -> Any:
    """As JSON has it; what it has no word for (dates) as text."""
    try:
        return json.loads(json.dumps(value, default=str, allow_nan=False))
    except ValueError:
        return str(value)
