"""Pictures keep their shape where they should, and masks go where their pictures go.

Guards icom.data.transform and icom.data.masks.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from icom.data.buckets import Buckets
from icom.data.masks import loss_weights
from icom.data.transform import Transform, pixels, seen

BUCKETS = Buckets(64, 32, 128, 8, no_upscale=False)
TRANSFORMS = {
    "squeezed": Transform(64, center_crop=False),
    "middle": Transform(64, center_crop=True),
    "random crop": Transform(64, center_crop=False, random_crops=3),
    "bucket": Transform(64, center_crop=False, buckets=BUCKETS),
    "bucket, random crop": Transform(64, center_crop=False, random_crops=2, buckets=BUCKETS),
}
SHAPES = {
    (150, 90): (80, 48),
    (90, 151): (48, 80),
    (100, 97): (64, 64),
    (33, 80): (40, 96),
}
"""Picture -> its bucket, (width, height)."""


def smooth(width: int, height: int) -> Image.Image:
    """Waves of some ten pixels, as photos have them."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / 7 + y / 11), np.cos(x / 5), np.sin(y / 6 - x / 13)]
    return Image.fromarray((127.5 + 120 * np.stack(waves, axis=2)).round().astype(np.uint8))


def resized_by_torch(image: Image.Image, width: int, height: int) -> torch.Tensor:
    """As torchvision resizes tensors: (3, height, width) from 0 to 255. Pillow is not asked."""
    values = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None].float()
    return F.interpolate(values, (height, width), mode="bicubic", antialias=True)[0].clamp(0, 255)


def cut(whole: torch.Tensor, width: int, height: int) -> torch.Tensor:
    """The middle, as torchvision's CenterCrop."""
    top, left = round((whole.shape[1] - height) / 2), round((whole.shape[2] - width) / 2)
    return whole[:, top : top + height, left : left + width]


@pytest.mark.parametrize("size", SHAPES)
def test_bucket_keeps_the_shape(size: tuple[int, int]) -> None:
    """Both sides are scaled alike, by what covers the bucket, and the rest is cut off evenly: computed in torch."""
    width, height = SHAPES[size]
    scale = max(width / size[0], height / size[1])
    whole = resized_by_torch(smooth(*size), round(size[0] * scale), round(size[1] * scale))
    check(pixels(smooth(*size), TRANSFORMS["bucket"], flip=False), cut(whole, width, height))


@pytest.mark.parametrize("size", SHAPES)
def test_random_crops_keep_the_shape(size: tuple[int, int]) -> None:
    """The short side is resized to 64, the long one as torchvision's Resize rounds it: both ends, and the middle."""
    long = 64 * max(size) // min(size)
    whole = resized_by_torch(smooth(*size), *((long, 64) if size[0] > size[1] else (64, long)))
    starts = sorted({0, (long - 64) // 2, long - 64})
    assert len(TRANSFORMS["random crop"].view(size).boxes) == len(starts)
    for place, start in enumerate(starts):
        window = whole[:, :, start:][..., :64] if size[0] > size[1] else whole[:, start:][:, :64]
        check(pixels(smooth(*size), TRANSFORMS["random crop"], flip=False, place=place), window)


def check(made: torch.Tensor, expected: torch.Tensor) -> None:
    """Pixels in [-1, 1] against levels."""
    actual = (made + 1) * 127.5
    assert actual.shape == expected.shape
    difference = (actual - expected).abs()
    assert difference.max() <= 2.01  # Pillow rounds to whole numbers twice
    assert difference.mean() < 0.6


@pytest.mark.parametrize("size", SHAPES)
def test_middle_square_is_the_short_side_resized_and_the_middle_cut(size: tuple[int, int]) -> None:
    """--center_crop cuts first, which comes to the same but for the place (half a pixel) and the outermost pixels."""
    scale = 64 / min(size)
    whole = resized_by_torch(smooth(*size), *(round(side * scale) for side in size))
    expected = cut(whole, 64, 64)[:, 2:-2, 2:-2]
    actual = ((pixels(smooth(*size), TRANSFORMS["middle"], flip=False) + 1) * 127.5)[:, 2:-2, 2:-2]
    squeezed = ((pixels(smooth(*size), TRANSFORMS["squeezed"], flip=False) + 1) * 127.5)[:, 2:-2, 2:-2]
    assert (actual - expected).abs().mean() < 8
    if max(size) > 1.2 * min(size):
        assert (squeezed - expected).abs().mean() > 40


@pytest.mark.parametrize(("kind", "size", "flip"), [*product(TRANSFORMS, SHAPES, [False, True])])
def test_mask_goes_where_its_picture_goes(kind: str, size: tuple[int, int], flip: bool) -> None:
    """A picture whose red is its mask: afterwards it still is."""
    mask = Image.new("L", size, 0)
    mask.paste(255, (size[0] // 3, size[1] // 4, size[0] - 5, size[1] - 3))
    picture = Image.merge("RGB", [mask, *smooth(*size).split()[1:]])
    place = len(TRANSFORMS[kind].view(size).boxes) - 1
    made = seen(picture, TRANSFORMS[kind], flip=flip, place=place)
    moved = seen(mask, TRANSFORMS[kind], flip=flip, place=place)
    assert made.size == (SHAPES[size] if kind.startswith("bucket") else (64, 64))
    assert np.array_equal(np.asarray(made)[..., 0], np.asarray(moved))
    assert 0 < np.asarray(moved).mean() < 255
    plain = np.asarray(seen(mask, TRANSFORMS[kind], flip=False, place=place))
    assert np.array_equal(np.asarray(moved), plain[:, ::-1] if flip else plain)


@pytest.mark.parametrize("unmasked_weight", [0.0, 0.1, 1.0])
def test_weight_of_a_latent_is_the_mean_of_its_pixels(unmasked_weight: float) -> None:
    """A mask of the very size: each pixel counts 1 or `unmasked_weight`, each latent the mean of its 64."""
    inside = np.zeros((64, 64), bool)
    inside[13:40, 20:51] = True
    mask = Image.fromarray(inside.astype(np.uint8) * 255)
    weights = loss_weights(mask, TRANSFORMS["squeezed"], (8, 8), flip=False, unmasked_weight=unmasked_weight)
    of_pixels = np.where(inside, 1, unmasked_weight)
    expected = of_pixels.reshape(8, 8, 8, 8).mean(axis=(1, 3))
    np.testing.assert_allclose(weights[0].numpy(), expected, atol=1e-6)
    whole = loss_weights(None, TRANSFORMS["squeezed"], (8, 8), flip=False, unmasked_weight=unmasked_weight)
    assert torch.equal(whole, torch.ones(1, 8, 8))
