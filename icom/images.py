"""From a folder to a checked list of pictures, and from a picture to the pixels that the VAE sees."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from icom.errors import IcomError

if TYPE_CHECKING:
    import torch
    from PIL import Image

BUNDLED_CONCEPTS = Path(__file__).parent / "assets" / "concepts"
"""Folders with the pictures of the concepts that ship with icom."""
MAX_PIXELS = 100_000_000
"""Larger pictures are refused before they are decoded (100 megapixels take 300 MB)."""


@dataclass(frozen=True)
class Picture:
    """A picture that decodes. `digest` is the SHA-256 of the file's bytes."""

    path: Path
    digest: str


@dataclass(frozen=True)
class Transform:
    """How a picture becomes square pixels; with the file's bytes it determines them."""

    resolution: int
    center_crop: bool


def list_pictures(folder: str) -> list[Picture]:
    """All pictures of a folder in order of name, each decoded once to be sure. Hidden files are passed over.

    Args:
        folder: a path, or `bundled:NAME` for a concept set that ships with icom (`bundled`: the first of them).

    Raises:
        IcomError: folder missing or empty, or files that are no good; all of them are named.
    """
    root = _bundled_folder(folder) if folder.split(":", maxsplit=1)[0] == "bundled" else Path(folder).expanduser()
    try:
        entries = sorted(root.iterdir())
    except (FileNotFoundError, NotADirectoryError) as error:
        what = "No such picture folder" if isinstance(error, FileNotFoundError) else "Not a picture folder but a file"
        raise IcomError(
            f"{what}: {folder}. Put 3 to 30 pictures of the concept into a folder and name it with "
            "--train_data_dir (`bundled` for the ones that ship with icom)."
        ) from None
    except OSError as error:
        raise IcomError(f"Cannot read the picture folder {folder}: {error.strerror}.") from error
    files = [path for path in entries if path.is_file() and not path.name.startswith(".")]
    if not files:
        folders = sum(path.is_dir() for path in entries)
        hint = f"It only holds folders ({folders}); name one of them" if folders else "Put 3 to 30 pictures into it"
        raise IcomError(f"The picture folder {folder} is empty. {hint} (--train_data_dir).")
    pictures, problems = [], []
    for path in files:
        try:
            read_picture(path)
            pictures.append(Picture(path, hashlib.sha256(path.read_bytes()).hexdigest()))
        except IcomError as error:
            problems.append(str(error))
    if problems:
        listed = "\n  ".join(problems)
        raise IcomError(f"In the picture folder {folder}, repair or remove:\n  {listed}")
    return pictures


def _bundled_folder(name: str) -> Path:
    names = sorted(path.name for path in BUNDLED_CONCEPTS.iterdir())
    chosen = name.partition(":")[2] or names[0]
    if chosen not in names:
        raise IcomError(f"No bundled concept {chosen!r}. There are {', '.join(names)} (--train_data_dir bundled:NAME).")
    return BUNDLED_CONCEPTS / chosen


def read_picture(path: Path) -> Image.Image:
    """Decode a picture: upright by its EXIF orientation, RGB of 8 bits, transparency composed on white.

    More bits than 8 are scaled so that white stays white; floating-point values are taken for 0 (black) to 1 (white).

    Raises:
        IcomError: not a picture, damaged, more than MAX_PIXELS, or with values of which nobody knows what is white.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # our own limit decides, and damaged metadata does not matter
            # From a file and not its name: what Pillow maps into memory it turns wrongly (a TIFF's orientation).
            with path.open("rb") as file, Image.open(file) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise IcomError(
                        f"{path.name}: {width} x {height} pixels are too many "
                        f"({MAX_PIXELS // 10**6} megapixels at most); scale it down"
                    )
                image.load()
                ImageOps.exif_transpose(image, in_place=True)
                return _on_white(_eight_bits(image))
    except _UnclearError as error:
        raise IcomError(f"{path.name}: {error}; save it as PNG with 8 bits") from None
    except Image.DecompressionBombError:
        # Pillow's own limit, some twice as high, strikes before it tells us the size.
        raise IcomError(
            f"{path.name}: too many pixels ({MAX_PIXELS // 10**6} megapixels at most); scale it down"
        ) from None
    except UnidentifiedImageError:
        raise IcomError(f"{path.name}: not a picture") from None
    except PermissionError:
        raise IcomError(f"{path.name}: not readable (permissions)") from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:  # what Pillow's decoders raise
        raise IcomError(f"{path.name}: damaged ({error})") from error


class _UnclearError(Exception):
    """What is in the file is whole, but what colours it means is not clear."""


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of more than 8 bits as 8 bits (Pillow's own conversion cuts off at 255); the others as they are."""
    from PIL import Image, ImageOps

    sixteen = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    if not sixteen and image.mode not in ("I", "F"):
        return image
    values = np.asarray(image)
    low, high = values.min(), values.max()
    tags = getattr(image, "tag_v2", {})
    if sixteen:
        # The high byte, as Pillow takes it where colours have 16 bits. A TIFF says whether only 12 are used.
        grey = values >> (tags.get(_BITS_PER_SAMPLE, (16,))[0] - 8)
    elif image.mode == "F":
        if not 0 <= low <= high <= 1:  # nor with NaN
            raise _UnclearError(f"floating-point values from {low:g} to {high:g}, where black is 0 and white is 1")
        grey = np.round(values * 255)
    else:
        raise _UnclearError(f"whole numbers of 32 bits, from {low} to {high}: white is unknown")
    scaled = Image.fromarray(grey.astype(np.uint8))
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:  # Pillow heeds it for 8 bits only
        scaled = ImageOps.invert(scaled)
    if "transparency" in image.info:
        scaled.putalpha(Image.fromarray(values != image.info["transparency"]).convert("L"))
    return scaled


_BITS_PER_SAMPLE, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0  # TIFF 6.0, section 8


def _on_white(image: Image.Image) -> Image.Image:
    """RGB, with white behind what is transparent."""
    from PIL import Image

    if image.mode == "LAB":
        raise _UnclearError("CIELAB colours, which Pillow does not convert")
    if image.mode == "La":  # grey with premultiplied alpha, from a TIFF: Pillow converts it to LA alone
        image = image.convert("LA")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def pixels(image: Image.Image, transform: Transform, *, flip: bool) -> torch.Tensor:
    """The picture as the VAE sees it: middle square if asked for, bicubic resize, optional left-right flip.

    Follows `TextualInversionDataset.__getitem__` of diffusers' script.

    Returns:
        float32 of shape (3, resolution, resolution) in [-1, 1].
    """
    import torch
    from PIL import Image

    if transform.center_crop:
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.crop((left, top, left + side, top + side))
    image = image.resize((transform.resolution, transform.resolution), Image.Resampling.BICUBIC)
    if flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    values = np.asarray(image, dtype=np.uint8).astype(np.float32) / 127.5 - 1.0
    return torch.from_numpy(values).permute(2, 0, 1).contiguous()
