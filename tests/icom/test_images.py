"""Pictures become the pixels that diffusers' script makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from icom.captions import TEMPLATES
from icom.images import Transform, list_pictures, pixels, read_picture


@pytest.fixture
def gradient() -> Image.Image:
    """48 x 30 pixels, every one different."""
    y, x = np.mgrid[0:30, 0:48]
    return Image.fromarray(np.stack([x * 5, y * 8, (x + y) * 3], axis=2).astype(np.uint8))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, gradient: Image.Image, orientation: int) -> None:
    """For each orientation, store the picture turned the way a camera would; reading it gives it upright."""
    stored = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = gradient if stored is None else gradient.transpose(stored)
    turned.save(tmp_path / "x.png", exif=exif)
    assert read_picture(tmp_path / "x.png").tobytes() == gradient.tobytes()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_becomes_white(tmp_path: Path, mode: str) -> None:
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 4, 8))
    image.convert(mode).save(tmp_path / "x.png")
    read = np.asarray(read_picture(tmp_path / "x.png"))
    assert read.shape == (8, 8, 3)
    assert (read[:, :4] == 0).all()
    assert (read[:, 4:] == 255).all()


@pytest.mark.parametrize("mode", ["L", "CMYK", "I;16", "1", "RGB"])
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    Image.new(mode, (8, 8)).save(tmp_path / ("x.tif" if mode == "CMYK" else "x.png"))
    (picture,) = list_pictures(str(tmp_path))
    assert read_picture(picture.path).mode == "RGB"


@pytest.mark.parametrize("crop", [False, True])
@pytest.mark.parametrize("flip", [False, True])
def test_pixels_follow_the_script(gradient: Image.Image, crop: bool, flip: bool) -> None:
    """The script's arithmetic on arrays, against ours on pictures."""
    array = np.asarray(gradient)
    if crop:
        side = min(array.shape[:2])
        height, width = array.shape[:2]
        array = array[(height - side) // 2 : (height + side) // 2, (width - side) // 2 : (width + side) // 2]
    resized = Image.fromarray(array).resize((16, 16), Image.Resampling.BICUBIC)
    expected = (np.asarray(resized) / 127.5 - 1).astype(np.float32)
    expected = np.ascontiguousarray(expected[:, ::-1] if flip else expected).transpose(2, 0, 1)
    actual = pixels(gradient, Transform(16, crop), flip=flip)
    assert actual.dtype == torch.float32
    np.testing.assert_allclose(actual.numpy(), expected, atol=1e-6)


def test_pictures_come_in_order_of_name_and_hidden_files_are_passed_over(tmp_path: Path) -> None:
    for name in ("b.png", "a.jpg", "c.webp"):
        Image.new("RGB", (8, 8), "red").save(tmp_path / name)
    (tmp_path / ".DS_Store").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    assert [picture.path.name for picture in list_pictures(str(tmp_path))] == ["a.jpg", "b.png", "c.webp"]


def test_templates_are_the_papers() -> None:
    assert len(TEMPLATES["object"]) == len(set(TEMPLATES["object"])) == 27
    assert len(TEMPLATES["style"]) == 19
    assert {"a photo of a {}", "the photo of a {}", "a rendition of the {}"} <= set(TEMPLATES["object"])
    assert "a painting in the style of {}" in TEMPLATES["style"]
    assert all(caption.count("{}") == 1 for captions in TEMPLATES.values() for caption in captions)
