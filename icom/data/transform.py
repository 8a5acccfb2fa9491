"""From a picture to the pixels that the VAE sees in textual inversion: squeezed, cut, or of a bucket's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from icom.data import crops

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from icom.data.buckets import Buckets
    from icom.data.crops import Size

Box = tuple[int, int, int, int]
"""(left, top, right, bottom) in pixels."""


@dataclass(frozen=True)
class View:
    """What of a picture is used.

    Attributes:
        resized: (width, height) in pixels that all of it is resized to.
        boxes: of what samples see; all of one size.
    """

    resized: Size
    boxes: tuple[Box, ...]

    @property
    def window(self) -> Size:
        """(width, height) of the boxes."""
        left, top, right, bottom = self.boxes[0]
        return right - left, bottom - top


@dataclass(frozen=True)
class Transform:
    """How pictures become pixels; with a file's bytes it determines them.

    Attributes:
        resolution: of squares, in pixels.
        center_crop: the middle square is cut out before resizing; else a picture is squeezed.
        random_crops: nothing is squeezed, and samples see parts at up to so many places; 0: the middle.
        buckets: shapes to choose from, in place of a square.
        alpha_mask: colours behind what is transparent are taken as they are in the file, and not white.
    """

    resolution: int
    center_crop: bool
    random_crops: int = 0
    buckets: Buckets | None = None
    alpha_mask: bool = False

    def view(self, size: Size) -> View:
        """What is used of a picture.

        Args:
            size: (width, height) of the picture, after its middle square is cut out where that is done.

        Raises:
            NoBucket: no bucket fits.
        """
        window = resized = (self.resolution, self.resolution)
        if self.buckets:
            resized, window = self.buckets.fit(size)
        elif self.random_crops:
            resized = crops.resized(size, self.resolution)
        corners = crops.spread(resized, window, self.random_crops) or [crops.middle(resized, window)]
        return View(resized, tuple((left, top, left + window[0], top + window[1]) for top, left in corners))

    def key(self, size: Size, place: int) -> dict[str, Any]:
        """What tells the pixels of a picture of this size apart from others of it; `place` is that of the box."""
        if not (self.random_crops or self.buckets):
            parts: dict[str, Any] = {"resolution": self.resolution, "center_crop": self.center_crop}
        else:
            view = self.view(size)
            parts = {"resized": view.resized, "box": view.boxes[place]}
        return parts | ({"alpha_mask": True} if self.alpha_mask else {})


def seen(image: Image.Image, transform: Transform, *, flip: bool, place: int = 0) -> Image.Image:
    """The part of a picture, or of its mask, that the VAE sees.

    The middle square if asked for, bicubic resize, cut, optional left-right flip. Squeezed and square pictures follow
    `TextualInversionDataset.__getitem__` of diffusers' script.
    """
    from PIL import Image

    if transform.center_crop:
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.crop((left, top, left + side, top + side))
    view = transform.view(image.size)
    image = image.resize(view.resized, Image.Resampling.BICUBIC).crop(view.boxes[place])
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else image


def pixels(image: Image.Image, transform: Transform, *, flip: bool, place: int = 0) -> torch.Tensor:
    """The picture as the VAE sees it. If it has alpha, that is left out.

    Returns:
        float32 of shape (3, height, width) in [-1, 1].
    """
    image = image if image.mode == "RGB" else image.convert("RGB")
    return crops.to_tensor(seen(image, transform, flip=flip, place=place))
