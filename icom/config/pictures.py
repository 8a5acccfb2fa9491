"""The options of `icom train` that say in which shape pictures are learned, and which parts of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from icom.config.common import check_at_least_one
from icom.errors import UsageError

BUNDLED_BUCKETS = {"min_bucket_reso": 32, "max_bucket_reso": 128, "bucket_reso_steps": 8}
"""Defaults for the bundled model: those below, made for 512 pixels, at its 64."""


@dataclass(kw_only=True)
class PictureOptions:
    """Shapes of pictures, crops and masks. Names are those of kohya's sd-scripts and OneTrainer."""

    enable_bucket: bool = False
    """Keep the shapes of pictures: each is resized to cover the bucket (a width and a height of about resolution x
    resolution pixels together) that is nearest to its shape, and cut in the middle. A batch has one bucket."""
    min_bucket_reso: int = 256
    """Shortest side of buckets in pixels (bundled model: 32)."""
    max_bucket_reso: int = 1024
    """Longest side of buckets in pixels (bundled model: 128)."""
    bucket_reso_steps: int = 64
    """Sides of buckets are multiples of this, and it is one of 8 (bundled model: 8)."""
    bucket_no_upscale: bool = False
    """Enlarge nothing: a bucket is what is left of a picture (reduced, where it has more than resolution x resolution
    pixels) when its sides are cut down to multiples of --bucket_reso_steps."""
    random_crop: bool = False
    """Squeeze nothing: resize the short side, and cut a square out at a place that is drawn for each sample. With
    --enable_bucket: cut the bucket out at such a place, and not in the middle."""
    crops_per_picture: int = 8
    """Places to draw from with --random_crop, evenly from one end of a picture to the other; each is encoded once."""
    masked_loss: bool = False
    """Learn what is white in NAME-mask.png, which lies beside the picture NAME.* and has its size. A picture without a
    mask is learned whole."""
    alpha_mask: bool = False
    """Learn what is opaque in a picture. Colours behind the rest are taken as they are in the file, and not white."""
    unmasked_weight: float = 0.1
    """What the loss outside a mask counts, from 0 to 1; inside it counts 1."""

    def check_pictures(self, resolution: int, *, center_crop: bool) -> None:
        """Refuse what cannot work.

        Args:
            resolution, center_crop: the options of these names.

        Raises:
            UsageError: names the option and how to fix it.
        """
        if self.enable_bucket:
            self._check_buckets(resolution)
        elif self.bucket_no_upscale:
            raise UsageError("--bucket_no_upscale is about buckets: add --enable_bucket, or drop it.")
        if center_crop and (self.enable_bucket or self.random_crop):
            other = "enable_bucket" if self.enable_bucket else "random_crop"
            raise UsageError(f"--center_crop cuts the middle square out, --{other} does not: drop one of them.")
        if self.masked_loss and self.alpha_mask:
            raise UsageError("--masked_loss takes masks from files, --alpha_mask from pictures: drop one of them.")
        if self.crops_per_picture < 2:
            raise UsageError(f"--crops_per_picture has to be at least 2, not {self.crops_per_picture}.")
        if not 0 <= self.unmasked_weight <= 1:
            raise UsageError(f"--unmasked_weight has to be between 0 and 1, not {self.unmasked_weight}.")

    def _check_buckets(self, resolution: int) -> None:
        sides = ("min_bucket_reso", "max_bucket_reso")
        check_at_least_one(**{name: getattr(self, name) for name in (*sides, "bucket_reso_steps")})
        if self.bucket_reso_steps % 8:
            raise UsageError(_not_a_multiple("bucket_reso_steps", self.bucket_reso_steps, "8", 8))
        for name in sides:
            if getattr(self, name) % self.bucket_reso_steps:
                of = f"--bucket_reso_steps {self.bucket_reso_steps}"
                raise UsageError(_not_a_multiple(name, getattr(self, name), of, self.bucket_reso_steps))
        if self.min_bucket_reso > self.max_bucket_reso:
            raise UsageError(
                f"--min_bucket_reso {self.min_bucket_reso} is more than --max_bucket_reso {self.max_bucket_reso}."
            )
        if not self.min_bucket_reso <= resolution <= self.max_bucket_reso:
            raise UsageError(
                f"--resolution {resolution} is not between --min_bucket_reso {self.min_bucket_reso} and "
                f"--max_bucket_reso {self.max_bucket_reso}."
            )

    def of_pictures(self, batch_size: int) -> dict[str, Any]:
        """Those options that decide what a sample of this run is; none of them where they are at their defaults.

        Args:
            batch_size: samples of a batch.
        """
        chosen: dict[str, Any] = {}
        if self.enable_bucket:
            names = ("enable_bucket", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps", "bucket_no_upscale")
            chosen |= {name: getattr(self, name) for name in names} | {"train_batch_size": batch_size}
        if self.random_crop:
            chosen |= {"random_crop": True, "crops_per_picture": self.crops_per_picture}
        chosen |= {name: True for name in ("masked_loss", "alpha_mask") if getattr(self, name)}
        return chosen | ({"unmasked_weight": self.unmasked_weight} if self.masked_loss or self.alpha_mask else {})


def _not_a_multiple(name: str, value: int, of: str, step: int) -> str:
    below = max(step, value // step * step)
    return f"--{name} has to be a multiple of {of}, not {value}. Nearest: {below} or {below + step}."
