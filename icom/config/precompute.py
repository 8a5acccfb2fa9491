"""The options of `icom data precompute` and `icom data verify`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import tyro

from icom.config.common import (
    BackendName,
    PrecisionName,
    check_at_least_one,
    check_not_negative,
    check_resolution,
)
from icom.config.data import DataOptions, Interpolation
from icom.config.encoders import EncoderOptions
from icom.config.loading import layers, merge
from icom.config.training import ModelOptions
from icom.errors import UsageError

ShardFormat = Literal["parquet", "tar"]
KeptDtype = Literal["float16", "float32"]


@dataclass(kw_only=True)
class PrecomputeConfig(DataOptions, EncoderOptions, ModelOptions):
    """Keep what VAE and text encoder make of captioned pictures, so that training needs neither.

    A command that ended early goes on when it is given again. Example: icom data precompute --train_data_dir photos
    --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5 --resolution 512 --output_dir latents
    """

    output_dir: str = "latents"
    """Folder for the shards, which `icom finetune --train_data_dir` reads. All processes have to see it."""
    resolution: list[int] = field(default_factory=lambda: [512])
    """One or several: the short side is resized to it and a square cut out; multiples of 8."""
    center_crop: bool = False
    """Cut the middle out. Default: random places, which depend on --seed and the picture's number."""
    crops_per_picture: int = 1
    """How many random places of each picture; the training takes one of them each time."""
    random_flip: bool = False
    """Keep mirrored pictures, too; the training takes one of both each time."""
    image_interpolation_mode: Interpolation = "lanczos"
    """How pictures are resized."""
    dtype: KeptDtype = "float16"
    """What numbers are kept in. float16 rounds to 11 significant bits, and takes half the room."""
    format: ShardFormat = "parquet"
    """Of the shards: parquet files, or WebDataset tars of safetensors."""
    samples_per_shard: int = 1000
    """Pictures per shard. What a command that ends early has to do again is less than one shard per process."""
    seed: int = 0
    """Of the random places."""
    part: str | None = None
    """K/N: every N-th shard, beginning with the K-th, for N commands beside each other. Default: of a Slurm array's
    task, else all."""
    batch_size: int = 4
    """Pictures that are encoded together; memory grows with it. Rounding may differ between sizes."""
    dataloader_num_workers: int = 0
    """Threads that read and decode pictures ahead; 0: one."""
    backend: BackendName = "auto"
    """What computes, as in `icom train`."""
    mixed_precision: PrecisionName = "no"
    """Precision of the encoders; `auto` as in `icom train`."""
    config: str | None = None
    """YAML file with these options; flags go before it."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything is loaded.

        Raises:
            UsageError: names the option and how to fix it.
        """
        DataOptions.__post_init__(self)
        EncoderOptions.__post_init__(self)
        if not self.resolution:
            raise UsageError("--resolution is empty. Give one or several, for instance 512.")
        for resolution in self.resolution:
            check_resolution(resolution)
        self.resolution = sorted(set(self.resolution))
        check_at_least_one(
            crops_per_picture=self.crops_per_picture,
            samples_per_shard=self.samples_per_shard,
            batch_size=self.batch_size,
        )
        check_not_negative(dataloader_num_workers=self.dataloader_num_workers)
        if not 0 <= self.seed < 2**63:
            raise UsageError("--seed has to be between 0 and 2^63 - 1.")
        if self.center_crop and self.crops_per_picture > 1:
            raise UsageError("A picture has one middle: drop --center_crop or --crops_per_picture.")
        if self.part is not None:
            parse_part(self.part)


@dataclass(kw_only=True)
class VerifyConfig:
    """Read all shards of `icom data precompute` and compare them with their digests."""

    folder: tyro.conf.Positional[str]
    """The folder with the shards."""


def parse_part(text: str) -> tuple[int, int]:
    """(K, N) of "K/N".

    Raises:
        UsageError: it is something else.
    """
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--part has to be K/N with K from 1 to N, for instance 3/10; not {text!r}.")
    return int(match[1]), int(match[2])


def load_precompute_config(flags: Mapping[str, Any]) -> PrecomputeConfig:
    """Lay the flags that were given over --config, and over both the defaults of the model that they name.

    Raises:
        UsageError: unreadable file, unknown key, wrong type, missing or impossible value.
    """

    def of_the_model(merged: Any) -> Mapping[str, Any]:
        return {"resolution": [64]} if merged.pretrained_model_name_or_path == "bundled" else {}

    return merge(PrecomputeConfig, layers(flags), flags.get("config"), of_the_model)
