"""From a picture to the square of pixels that the VAE sees, as diffusers' `train_text_to_image.py` makes it.

The short side is resized to the resolution, a square is cut out, and it may be mirrored. In-process training and
`icom data precompute` share it, so that they give the same latents. Sizes and places are those of `icom train`'s crops,
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from icom.config.data import Interpolation

if TYPE_CHECKING:
    import torch
    from PIL import Image

Size = tuple[int, int]
"""(width, height) in pixels."""
WORDS = 3
"""So many random words a crop takes."""


@dataclass(frozen=True)
class Crop:
    """A square of a picture.

    Attributes:
        pixels: float32 of shape (3, resolution, resolution) in [-1, 1].
        top, left: of its corner in the resized picture, before it is mirrored.
        flipped: whether left and right are exchanged.
    """

    pixels: torch.Tensor
    top: int
    left: int
    flipped: bool


def crop(
    picture: Image.Image,
    resolution: int,
    *,
    center_crop: bool,
    random_flip: bool,
    words: Sequence[int],
    interpolation: Interpolation = "lanczos",
) -> Crop:
    """Resize the short side to the resolution and cut a square out.

    The sizes and the middle are those of torchvision's Resize and CenterCrop; so are the random places' odds.

    Args:
        picture: upright, RGB.
        resolution: side of the square in pixels. Smaller pictures are enlarged.
        center_crop: the middle; else the words choose the place, each with the same probability.
        random_flip: the words choose whether it is mirrored, with probability 1/2.
        words: WORDS uniform random numbers in [0, 2^64): for top, left and mirror. The crop is a function of these
            arguments alone.
        interpolation: Pillow's filter of this name.
    """
    from PIL import Image

    size, window = resized(picture.size, resolution), (resolution, resolution)
    top, left = middle(size, window) if center_crop else place(size, window, words)
    square = picture.resize(size, Image.Resampling[interpolation.upper()]).crop(
        (left, top, left + resolution, top + resolution)
    )
    flipped = random_flip and mirrors(words)
    if flipped:
        square = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return Crop(to_tensor(square), top, left, flipped)


def to_tensor(image: Image.Image) -> torch.Tensor:
    """An RGB picture as float32 of shape (3, height, width) in [-1, 1]."""
    import torch

    values = np.asarray(image, dtype=np.uint8).astype(np.float32) / 127.5 - 1.0
    return torch.from_numpy(values).permute(2, 0, 1).contiguous()


def resized(size: Size, resolution: int) -> Size:
    """(width, height) in pixels once the short side is the resolution; the long one is rounded down."""
    short = min(size)
    width, height = (resolution * side // short for side in size)
    return width, height


def middle(size: Size, window: Size) -> tuple[int, int]:
    """(top, left) of the window in the middle of a picture, as torchvision's CenterCrop rounds it."""
    return round((size[1] - window[1]) / 2), round((size[0] - window[0]) / 2)


def spread(size: Size, window: Size, count: int) -> list[tuple[int, int]]:
    """(top, left) of the window at `count` places, evenly from end to end; at fewer where they would coincide."""
    down, across = size[1] - window[1], size[0] - window[0]
    return list(dict.fromkeys((down * i // (count - 1), across * i // (count - 1)) for i in range(count)))


def place(size: Size, window: Size, words: Sequence[int]) -> tuple[int, int]:
    """(top, left) of the window at a place that the first two words choose, each with the same probability."""
    return int(words[0]) % (size[1] - window[1] + 1), int(words[1]) % (size[0] - window[0] + 1)


def mirrors(words: Sequence[int]) -> bool:
    """Whether these words of a sample mirror its crop."""
    return bool(int(words[2]) >> 63)
