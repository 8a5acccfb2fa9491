"""The options that say where captioned pictures come from: of `icom finetune`, `icom data` and all that reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import tyro

from icom.config.common import check_at_least_one
from icom.config.loading import required
from icom.errors import UsageError

Interpolation = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
"""What --image_interpolation_mode takes."""


@dataclass(kw_only=True)
class DataIndexConfig:
    """Index WebDataset tars, so that training reads any sample by its place: once, for all machines and runs.

    Example: icom data index shards   (or "s3://bucket/shards/{00000..00099}.tar" --output shards.parquet)
    """

    source: tyro.conf.Positional[str]
    """A folder with tars, also nested ones, or a pattern, as in --train_data_dir."""
    output: str | None = None
    """The file to write. Default: icom-index.parquet beside the shards, where training finds it."""
    workers: int = 4
    """Shards that are read at a time."""
    shard_cache_gb: float | None = None
    """How much of --cache_dir copies of shards may take that lie elsewhere. Default: no limit."""
    cache_dir: str | None = None
    """Folder of caches. Default: $ICOM_CACHE_DIR, else $XDG_CACHE_HOME/icom, else ~/.cache/icom."""

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            UsageError: names the option.
        """
        check_at_least_one(workers=self.workers)


@dataclass(kw_only=True)
class DataOptions:
    """Where captioned pictures come from, and which of them are taken."""

    train_data_dir: str = required("photos")
    """Required. Captioned pictures: a folder of pictures (captions in .txt or .caption files beside them,
    metadata.jsonl or metadata.csv), a folder of WebDataset tars or parquet files, a pattern of those
    (shards/{00000..00099}.tar, *.parquet; also s3://…, https://…, or pipe:COMMAND), or synthetic:N to measure."""
    index: str | None = None
    """The index of the shards (`icom data index`). Default: icom-index.parquet beside them, else one in --cache_dir."""
    image_column: str = "image"
    """The column of parquet files that holds the pictures' bytes."""
    caption_column: str = "text"
    """Where captions stand: a column of metadata or parquet; in tars `txt`, `json:FIELD`, or `cls` with
    --idx_to_prompt."""
    idx_to_prompt: str | None = None
    """JSON file: class number -> prompt, or a list of prompts, for shards with classes (cls) and no captions."""
    filters: tyro.conf.Fixed[dict[str, Any]] = field(default_factory=dict)
    """Which samples are taken, by their metadata: original_width: ">=512", pwatermark: "<=0.5" (docs/data.md)."""
    max_train_samples: int | None = None
    """Take only the first so many samples that pass the filters."""
    max_damaged_share: float = 0.01
    """A run ends when more than this share of the samples it read are damaged; fewer are counted, named, left out."""
    shard_cache_gb: float | None = None
    """How much of --cache_dir copies of shards may take that lie elsewhere (s3://, https://, pipe:); those not used for
    longest go first. Default: no limit."""
    cache_dir: str | None = None
    """Folder of caches. Default: $ICOM_CACHE_DIR, else $XDG_CACHE_HOME/icom, else ~/.cache/icom."""

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            UsageError: names the option.
        """
        if not 0 <= self.max_damaged_share <= 1:
            raise UsageError("--max_damaged_share has to be between 0 and 1.")
        check_at_least_one(max_train_samples=self.max_train_samples)
        if self.filters:
            from icom.data.filters import parse_filters

            parse_filters(self.filters)
