"""A crop is what torchvision's transforms make in diffusers' `train_text_to_image.py`.

Guards icom.data.crops.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from icom.data.crops import WORDS, crop
from icom.data.sampling import raw_words

TORCHVISION = [
    ((64, 64), 48, (48, 48), (0, 0)),
    ((100, 64), 48, (75, 48), (0, 14)),
    ((65, 200), 64, (64, 196), (66, 0)),
    ((65, 200), 48, (48, 147), (50, 0)),
    ((333, 127), 64, (167, 64), (0, 52)),
    ((31, 50), 64, (64, 103), (20, 0)),
    ((1000, 999), 64, (64, 64), (0, 0)),
    ((97, 64), 64, (97, 64), (0, 16)),
    ((641, 479), 64, (85, 64), (0, 10)),
]
"""Size, resolution -> size by Resize, (top, left) by CenterCrop, as torchvision 0.29 gave them."""


def noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def window(picture: Image.Image, size: tuple[int, int], top: int, left: int, resolution: int) -> torch.Tensor:
    """What ToTensor and Normalize([0.5], [0.5]) make of a window of the resized picture."""
    values = np.asarray(picture.resize(size, Image.Resampling.LANCZOS))[
        top : top + resolution, left : left + resolution
    ]
    return (torch.from_numpy(values.copy()).permute(2, 0, 1) / 255 - 0.5) / 0.5


@pytest.mark.parametrize(("size", "resolution", "resized", "corner"), TORCHVISION)
def test_middle_is_torchvisions(
    size: tuple[int, int], resolution: int, resized: tuple[int, int], corner: tuple[int, int]
) -> None:
    picture = noise(*size)
    made = crop(picture, resolution, center_crop=True, random_flip=False, words=(0, 0, 0))
    assert (made.top, made.left, made.flipped) == (*corner, False)
    torch.testing.assert_close(made.pixels, window(picture, resized, *corner, resolution), rtol=0, atol=1e-6)


def test_random_places_are_all_as_likely_and_function_of_the_words() -> None:
    picture = noise(20, 16)  # resized to 10 x 8: three places
    lefts, flips = [], 0
    for number in range(600):
        words = [int(word) for word in raw_words(7, number, count=WORDS)]
        made = crop(picture, 8, center_crop=False, random_flip=True, words=words)
        wanted = window(picture, (10, 8), made.top, made.left, 8)
        torch.testing.assert_close(made.pixels, wanted.flip(-1) if made.flipped else wanted, rtol=0, atol=1e-6)
        assert made.top == 0
        lefts.append(made.left)
        flips += made.flipped
        if number < 5:
            again = crop(picture, 8, center_crop=False, random_flip=True, words=words)
            assert torch.equal(again.pixels, made.pixels)
    counts = np.bincount(lefts, minlength=3)
    assert len(counts) == 3
    assert (abs(counts - 200) < 60).all()  # five standard deviations
    assert abs(flips - 300) < 60


def test_tall_picture_is_cut_above_and_below() -> None:
    tops = {
        crop(noise(8, 12), 8, center_crop=False, random_flip=False, words=(word, 0, 2**64 - 1)).top
        for word in range(50)
    }
    assert tops == {0, 1, 2, 3, 4}
