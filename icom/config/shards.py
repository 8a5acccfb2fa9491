"""The options of `icom data download` and `icom data reorganise`, which make shards."""

from __future__ import annotations

import math
from dataclasses import dataclass

import tyro

from icom.config.common import check_at_least_one, check_not_negative
from icom.config.precompute import parse_part
from icom.errors import UsageError


@dataclass(kw_only=True)
class DownloadConfig:
    """Fetch the pictures of a list of addresses into WebDataset tars.

    A command that ended early goes on when it is given again.

    Example: icom data download urls.parquet --output_dir shards
    """

    source: tyro.conf.Positional[str]
    """The list: a file .parquet, .csv, .tsv or .jsonl, a folder of such, or a pattern of them (braces, stars, s3://…,
    https://…)."""
    output_dir: str = "downloaded"
    """Folder for the tars. All parts have to see it."""
    url_column: str = "url"
    """The column with the addresses, http:// or https://."""
    caption_column: str = "caption"
    """The column with the captions. All other columns become fields of the sample's .json."""
    samples_per_shard: int = 1000
    """Rows of the list per tar; those that fail are missing in it. What a command that ends early has to do again is
    less than one tar."""
    part: str | None = None
    """K/N: every N-th tar, beginning with the K-th, for N commands beside each other. Default: of a Slurm array's task,
    else all."""
    threads: int = 32
    """Pictures that are fetched at a time."""
    timeout: float = 10.0
    """Seconds that an attempt may take to connect, to go on after a pause, and in all."""
    retries: int = 1
    """Further attempts where it was perhaps for a moment: no answer in time, a broken connection, a server's error."""
    max_picture_mb: float = 20.0
    """Larger files are given up."""
    max_failed_share: float = 0.5
    """A part ends when more than this share of its rows failed; fewer are counted by reason and written down."""
    user_agent: str | None = None
    """Who asks, for servers. Default: icom and its version."""
    allow_private_addresses: bool = False
    """Also fetch from this machine and from networks that the internet does not reach (127.0.0.1, 10.0.0.0/8, …)."""
    cache_dir: str | None = None
    """Folder of caches, for lists that lie elsewhere. Default: $ICOM_CACHE_DIR, else $XDG_CACHE_HOME/icom, else
    ~/.cache/icom."""

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            UsageError: names the option.
        """
        check_at_least_one(samples_per_shard=self.samples_per_shard, threads=self.threads)
        check_not_negative(retries=self.retries)
        for name in ("timeout", "max_picture_mb"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"--{name} has to be a positive number, not {value}.")
        if not 0 <= self.max_failed_share <= 1:
            raise UsageError("--max_failed_share has to be between 0 and 1.")
        if self.user_agent is not None and not (self.user_agent.isascii() and self.user_agent.isprintable()):
            raise UsageError("--user_agent has characters that no line of a request can have.")
        if self.part is not None:
            parse_part(self.part)


@dataclass(kw_only=True)
class ReorganiseConfig:
    """Copy the samples of WebDataset tars into tars of so many each; what lacks a picture or a caption is left out.

    Example: icom data reorganise downloaded --output_dir shards --samples_per_shard 1000
    """

    source: tyro.conf.Positional[str]
    """A folder with tars, also nested ones, or a pattern, as in --train_data_dir."""
    output_dir: str = "reorganised"
    """Folder for the tars. All parts have to see it."""
    samples_per_shard: int = 1000
    """Samples per tar; the last one of each part has fewer."""
    caption_column: str = "text"
    """Where the caption stands, which a sample has to have: `txt` (the default's meaning), `json:FIELD`, or `cls`."""
    part: str | None = None
    """K/N: the K-th of N equal runs of the source's tars. Default: of a Slurm array's task, else all."""
    max_damaged_share: float = 0.01
    """A part ends when more than this share of its samples is left out."""
    shard_cache_gb: float | None = None
    """How much of --cache_dir copies of shards may take that lie elsewhere. Default: no limit."""
    cache_dir: str | None = None
    """Folder of caches. Default: $ICOM_CACHE_DIR, else $XDG_CACHE_HOME/icom, else ~/.cache/icom."""

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            UsageError: names the option.
        """
        check_at_least_one(samples_per_shard=self.samples_per_shard)
        if not 0 <= self.max_damaged_share <= 1:
            raise UsageError("--max_damaged_share has to be between 0 and 1.")
        if self.part is not None:
            parse_part(self.part)
