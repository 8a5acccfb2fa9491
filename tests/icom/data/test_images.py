"""Pictures become the pixels that diffusers' script makes of them.

Guards icom.data.images and icom.data.captions.
"""

from __future__ import annotations

import struct
import zlib
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, features

from icom.data.captions import TEMPLATES
from icom.data.images import list_pictures, notices, read_picture
from icom.data.transform import Transform, pixels
from icom.errors import IcomError


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


# Modes: what a decoder says of the pixels, as 8-bit RGB on white. The truth is arithmetic on arrays.


def arrays() -> dict[str, np.ndarray]:
    """A value per pixel, and colours with and without alpha, over their whole range."""
    y, x = np.mgrid[0:16, 0:32]
    grey = (y * 16 + x).clip(0, 255)
    rgb = np.stack([grey, 255 - grey, x * 8], axis=2)
    alpha = (x * 8)[..., None]
    return {"grey": grey, "rgb": rgb, "alpha": alpha, "cmyk": np.concatenate([rgb, alpha // 2], axis=2)}


def on_white(colour: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    return colour * (alpha / 255) + 255 * (1 - alpha / 255)


def as_grey(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey[..., None], 3, axis=2)


def palette_picture(alpha: bytes | int | None = None) -> tuple[Image.Image, np.ndarray]:
    """A picture with a palette, and its colours on white; alpha for each colour, or the colour that is transparent."""
    index = arrays()["grey"]
    palette = np.stack([255 - np.arange(256), np.arange(256), np.full(256, 40)], axis=1)
    image = Image.fromarray(index.astype(np.uint8))
    image.putpalette(palette.astype(np.uint8).tobytes())
    alphas = np.full(256, 255)
    if isinstance(alpha, bytes):
        alphas[: len(alpha)] = list(alpha)
    elif alpha is not None:
        alphas[alpha] = 0
    return image, on_white(palette[index], alphas[index][..., None])


def mode_cases() -> dict[str, tuple[str, Image.Image, np.ndarray, dict[str, object]]]:
    """Name -> (file ending, picture, what it is in RGB, how to save it)."""
    a = arrays()
    grey, rgb, alpha, cmyk = (a[name].astype(np.uint8) for name in ("grey", "rgb", "alpha", "cmyk"))
    sixteen = a["grey"].astype(np.uint16) * 257
    la = Image.merge("LA", [Image.fromarray(grey), Image.fromarray(alpha[..., 0])])
    plain, plain_colours = palette_picture()
    some, some_colours = palette_picture(bytes(range(256)))
    one, one_colours = palette_picture(7)
    opaque, opaque_colours = palette_picture()
    pa = opaque.convert("PA")
    pa.putalpha(Image.fromarray(alpha[..., 0]))
    key_grey = np.where(a["grey"] == 5, 255, a["grey"])
    return {
        "1": ("png", Image.fromarray(grey > 99), as_grey(np.where(grey > 99, 255, 0)), {}),
        "L": ("png", Image.fromarray(grey), as_grey(a["grey"]), {}),
        "L, a colour transparent": ("png", Image.fromarray(grey), as_grey(key_grey), {"transparency": 5}),
        "LA": ("png", la, on_white(as_grey(a["grey"]), a["alpha"]), {}),
        "I;16": ("png", Image.fromarray(sixteen), as_grey(a["grey"]), {}),
        "I;16, a colour transparent": ("png", Image.fromarray(sixteen), as_grey(key_grey), {"transparency": 5 * 257}),
        "I;16 of a TIFF": ("tif", Image.fromarray(sixteen), as_grey(a["grey"]), {}),
        "I of a PGM": ("pgm", Image.fromarray(sixteen), as_grey(a["grey"]), {}),
        "F": ("tif", Image.fromarray((a["grey"] / 255).astype(np.float32)), as_grey(a["grey"]), {}),
        "P": ("png", plain, plain_colours, {}),
        "P, each colour with its alpha": ("png", some, some_colours, {"transparency": bytes(range(256))}),
        "P, a colour transparent": ("gif", one, one_colours, {"transparency": 7}),
        "PA": ("tif", pa, on_white(opaque_colours, a["alpha"]), {}),
        "RGB": ("png", Image.fromarray(rgb), a["rgb"], {}),
        "RGBA": ("png", Image.fromarray(np.concatenate([rgb, alpha], axis=2)), on_white(a["rgb"], a["alpha"]), {}),
        "CMYK": (
            "tif",
            Image.frombytes("CMYK", (32, 16), cmyk.tobytes()),
            (255 - a["cmyk"][..., :3]) * (255 - a["cmyk"][..., 3:]) / 255,
            {},
        ),
    }


@pytest.mark.parametrize("case", mode_cases())
def test_every_mode_becomes_the_rgb_that_it_means(tmp_path: Path, case: str) -> None:
    ending, image, expected, options = mode_cases()[case]
    image.save(tmp_path / f"x.{ending}", **options)  # type: ignore[arg-type]
    mode = case.split(",", maxsplit=1)[0].split(" ", maxsplit=1)[0]
    with Image.open(tmp_path / f"x.{ending}") as stored:
        assert stored.mode == mode
    (picture,) = list_pictures(str(tmp_path))
    read = read_picture(picture.path)
    assert read.mode == "RGB"
    np.testing.assert_allclose(np.asarray(read, dtype=float), expected, atol=1)  # rounding in alpha and CMYK
    if not {"A", "C"} & set(mode) and not isinstance(options.get("transparency"), bytes):
        np.testing.assert_array_equal(np.asarray(read), expected)


def test_grey_that_is_multiplied_by_its_alpha(tmp_path: Path) -> None:
    """Mode La: a TIFF's associated alpha (tag 338 is 1)."""
    alpha = arrays()["alpha"].astype(np.uint8)[..., 0]
    grey = np.minimum(arrays()["grey"], alpha).astype(np.uint8)
    stored = Image.merge("LA", [Image.fromarray(grey), Image.fromarray(alpha)])
    stored.save(tmp_path / "x.tif")
    content = (tmp_path / "x.tif").read_bytes()
    unassociated, associated = (struct.pack("<HHII", 338, 3, 1, kind) for kind in (2, 1))
    assert unassociated in content
    (tmp_path / "x.tif").write_bytes(content.replace(unassociated, associated))
    with Image.open(tmp_path / "x.tif") as image:
        assert image.mode == "La"
    expected = as_grey(grey.astype(int) + 255 - alpha)
    np.testing.assert_allclose(np.asarray(read_picture(tmp_path / "x.tif"), dtype=int), expected, atol=1)


def tiff(values: np.ndarray, *, order: str = "<", bits: int = 16, white_is_zero: bool = False, turn: int = 1) -> bytes:
    """An uncompressed TIFF of one channel, of which Pillow cannot write all kinds."""
    height, width = values.shape
    kind = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    if bits == 12:  # two values in three bytes
        pairs = values.reshape(-1, 2).astype(int)
        triples = [pairs[:, 0] >> 4, (pairs[:, 0] & 15) << 4 | pairs[:, 1] >> 8, pairs[:, 1] & 255]
        content = np.stack(triples, axis=1).astype(np.uint8).tobytes()
    else:
        content = values.astype(values.dtype.newbyteorder(order)).tobytes()  # type: ignore[arg-type]
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: int(not white_is_zero), 273: 8, 274: turn}
    tags |= {277: 1, 278: height, 279: len(content), 339: kind}
    entries = b"".join(struct.pack(order + "HHII", tag, 4, 1, value) for tag, value in tags.items())
    header = {"<": b"II", ">": b"MM"}[order] + struct.pack(order + "HI", 42, 8 + len(content))
    return header + content + struct.pack(order + "H", len(tags)) + entries + bytes(4)


# Pillow reads no 16 bits of the other byte order whose zero is white.
@pytest.mark.parametrize(
    "order, kind, white_is_zero",
    [
        *product("<>", ["float"], [False, True]),
        ("<", "16 bits", False),
        ("<", "16 bits", True),
        (">", "16 bits", False),
    ],
)
def test_tiffs_from_other_programs(tmp_path: Path, order: str, kind: str, white_is_zero: bool) -> None:
    """Byte order, and which end is white."""
    grey = arrays()["grey"]
    values = (grey / 255).astype(np.float32) if kind == "float" else grey.astype(np.uint16) * 257
    content = tiff(values, order=order, bits=values.itemsize * 8, white_is_zero=white_is_zero)
    (tmp_path / "x.tif").write_bytes(content)
    expected = as_grey(255 - grey if white_is_zero else grey)
    np.testing.assert_array_equal(np.asarray(read_picture(tmp_path / "x.tif")), expected)


def test_tiff_that_uses_12_bits(tmp_path: Path) -> None:
    values = arrays()["grey"].astype(np.uint16) << 4
    (tmp_path / "x.tif").write_bytes(tiff(values, bits=12))
    np.testing.assert_array_equal(np.asarray(read_picture(tmp_path / "x.tif")), as_grey(values >> 4))


@pytest.mark.parametrize("kind, white", [("uint8", 255), ("uint16", 0xFFFF), ("float32", 1)])
def test_turned_tiff_without_compression(tmp_path: Path, kind: str, white: int) -> None:
    """Pillow maps such files into memory, and turns some of them wrongly then."""
    grey = np.arange(6).reshape(2, 3) * 51
    stored = (grey / 255 * white).astype(kind)
    (tmp_path / "x.tif").write_bytes(tiff(stored, bits=stored.itemsize * 8, turn=6))
    upright = np.rot90(grey, k=-1)
    np.testing.assert_array_equal(np.asarray(read_picture(tmp_path / "x.tif")), as_grey(upright))


UNCLEAR = {
    "floating-point values from 0 to 255, where black is 0 and white is 1": np.linspace(0, 255, 6, dtype=np.float32),
    "floating-point values from -0.5 to 1": np.linspace(-0.5, 1, 6, dtype=np.float32),
    "floating-point values from nan to nan": np.full(6, np.nan, np.float32),
    "whole numbers of 32 bits, from 0 to 500: white is unknown": np.arange(0, 600, 100, dtype=np.int32),
}


@pytest.mark.parametrize("message", UNCLEAR)
def test_pictures_whose_white_is_unknown_are_refused(tmp_path: Path, message: str) -> None:
    (tmp_path / "x.tif").write_bytes(tiff(UNCLEAR[message].reshape(2, 3), bits=32))
    with pytest.raises(IcomError) as refused:
        read_picture(tmp_path / "x.tif")
    assert str(refused.value).startswith(f"x.tif: {message}")
    assert str(refused.value).endswith("; save it as PNG with 8 bits")


def test_colours_that_pillow_does_not_convert_are_refused(tmp_path: Path) -> None:
    Image.new("LAB", (8, 8)).save(tmp_path / "x.tif")
    with pytest.raises(IcomError, match=r"x\.tif: CIELAB colours"):
        read_picture(tmp_path / "x.tif")


def test_heic(tmp_path: Path, gradient: Image.Image) -> None:
    pillow_heif = pytest.importorskip("pillow_heif", reason="pillow-heif is not installed")
    large = gradient.resize((192, 120))
    file = pillow_heif.from_pillow(large)
    file.save(tmp_path / "x.heic", quality=-1)  # without loss but for the conversion of colours
    (picture,) = list_pictures(str(tmp_path))
    difference = np.asarray(read_picture(picture.path), dtype=int) - np.asarray(large, dtype=int)
    assert np.abs(difference).mean() < 3
    (tmp_path / "x.heic").write_bytes((tmp_path / "x.heic").read_bytes()[:200])
    with pytest.raises(IcomError, match=r"x\.heic: (damaged|not a picture)"):
        read_picture(tmp_path / "x.heic")


# What phones and cameras make.


@pytest.mark.parametrize("ending", ["jpg", "webp", "avif", "heic", "tif"])
def test_phones_pictures_come_upright(tmp_path: Path, ending: str) -> None:
    """A picture that lies on its side in the file, and a note that says so, in each format that phones write."""
    upright = Image.new("RGB", (64, 96), "white")
    upright.paste((200, 0, 0), (0, 0, 64, 24))  # on top
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = upright.transpose(Image.Transpose.ROTATE_90)
    if ending == "heic":
        pillow_heif = pytest.importorskip("pillow_heif", reason="pillow-heif is not installed")
        pillow_heif.register_heif_opener()
    elif ending == "avif" and not features.check("avif"):
        pytest.skip("this Pillow reads no AVIF")
    stored.save(tmp_path / f"x.{ending}", quality=95, exif=exif.tobytes())
    read = np.asarray(read_picture(tmp_path / f"x.{ending}"), dtype=int)
    assert read.shape == (96, 64, 3)
    np.testing.assert_allclose(read, np.asarray(upright, dtype=int), atol=40)  # at the edge: compression
    assert np.abs(read - np.asarray(upright, dtype=int)).mean() < 3


def test_cmyk_jpeg_of_photoshop(tmp_path: Path) -> None:
    """Adobe's JPEGs hold the four inks inverted (marker APP14)."""
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "x.jpg", quality=100)
    assert b"Adobe" in (tmp_path / "x.jpg").read_bytes()
    np.testing.assert_allclose(np.asarray(read_picture(tmp_path / "x.jpg"), dtype=int)[8, 8], (255, 0, 0), atol=3)


def test_colours_of_16_bits(tmp_path: Path) -> None:
    """A PNG as Photoshop exports it: the high byte is what counts."""
    rgb = arrays()["rgb"].astype(np.uint16) * 256 + 77
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in rgb)
    header = struct.pack(">IIBBBBB", 32, 16, 16, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    packed = (struct.pack(">I", len(c)) + n + c + struct.pack(">I", zlib.crc32(n + c)) for n, c in chunks)
    (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(packed))
    np.testing.assert_array_equal(np.asarray(read_picture(tmp_path / "x.png")), arrays()["rgb"])


@pytest.mark.parametrize("ending", ["gif", "png", "webp", "tif", "mpo"])
def test_first_frame_of_what_moves(tmp_path: Path, ending: str) -> None:
    """It is learned, and told; of a photo that has its preview in the same file (MPO) nothing is told."""
    first, second = Image.new("RGB", (16, 16), (255, 0, 0)), Image.new("RGB", (16, 16), (0, 0, 255))
    first.save(tmp_path / f"x.{ending}", save_all=True, append_images=[second])
    still = Image.new("RGB", (16, 16))
    still.save(tmp_path / "still.png")
    pictures = list_pictures(str(tmp_path))
    read = np.asarray(read_picture(tmp_path / f"x.{ending}"), dtype=int)
    np.testing.assert_allclose(read, np.broadcast_to((255, 0, 0), read.shape), atol=3)
    told = f"learning the first frame of pictures that move or have pages (1: x.{ending} (2 frames))."
    assert list(notices(pictures)) == ([] if ending == "mpo" else [told])


FILM = b"\0\0\0\x14ftypqt  \0\0\0\0qt  \0\0\0\x08wide"
AVIF = b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf" + bytes(64)


def test_what_phones_make_and_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moving part of a Live Photo; raw data, of which Pillow would take the preview; AVIF without its decoder."""
    (tmp_path / "IMG_1.MOV").write_bytes(FILM)
    grey, samples = tiff(arrays()["grey"].astype(np.uint8), bits=8), struct.pack("<HHII", 277, 4, 1, 1)
    (tmp_path / "a.dng").write_bytes(grey.replace(samples, struct.pack("<HHII", 50706, 1, 4, 1)))
    (tmp_path / "b.nef").write_bytes(grey.replace(samples, struct.pack("<HHII", 254, 4, 1, 1)))
    (tmp_path / "c.avif").write_bytes(AVIF)
    monkeypatch.setattr(features, "check", lambda name: False)
    with pytest.raises(IcomError) as refused:
        list_pictures(str(tmp_path))
    said = str(refused.value)
    assert "IMG_1.MOV: a film (the moving part of a Live Photo is one); take it out" in said
    assert "a.dng: raw data of a camera, of which Pillow sees the preview alone; save it as JPEG" in said
    assert "b.nef: raw data of a camera" in said
    assert "c.avif: AVIF, which this Pillow lacks; convert it to JPEG" in said


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
    """And so are captions, which others read."""
    for name in ("b.png", "a.jpg", "c.webp"):
        Image.new("RGB", (8, 8), "red").save(tmp_path / name)
    for name in ("a.txt", "b.CAPTION", "metadata.csv"):
        (tmp_path / name).touch()
    (tmp_path / ".DS_Store").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    assert [picture.path.name for picture in list_pictures(str(tmp_path))] == ["a.jpg", "b.png", "c.webp"]


def test_templates_are_the_papers() -> None:
    assert len(TEMPLATES["object"]) == len(set(TEMPLATES["object"])) == 27
    assert len(TEMPLATES["style"]) == 19
    assert {"a photo of a {}", "the photo of a {}", "a rendition of the {}"} <= set(TEMPLATES["object"])
    assert "a painting in the style of {}" in TEMPLATES["style"]
    assert all(caption.count("{}") == 1 for captions in TEMPLATES.values() for caption in captions)
