"""From a folder to a checked list of pictures, and from a picture to the pixels that the VAE sees."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from icom.errors import IcomError

if TYPE_CHECKING:
    import torch
    from PIL import Image

BUNDLED_CONCEPTS = Path(__file__).parents[1] / "assets" / "concepts"
"""Folders with the pictures of the concepts that ship with icom."""
MAX_PIXELS = 100_000_000
"""Larger pictures are refused before they are decoded (100 megapixels take 300 MB)."""

_TEXTS = {".txt", ".caption"}
"""Endings of the files in which other trainers keep the captions of pictures."""
_NAMED = 20
"""So many files are named in a message; the rest is counted."""


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
    """All pictures of a folder in order of name, each decoded once to be sure.

    Hidden files are passed over, and so are folders (`passed_over` names them).

    Args:
        folder: a path, or `bundled:NAME` for a concept set that ships with icom (`bundled`: the first of them).

    Raises:
        IcomError: folder missing or empty, or files that are no good; all of them are named.
    """
    root = _root(folder)
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
    visible = [path for path in entries if not path.name.startswith(".")]
    broken = [path.name for path in visible if path.is_symlink() and not path.exists()]
    texts = [path.name for path in visible if path.suffix.lower() in _TEXTS]
    files = [path for path in visible if path.is_file() and path.name not in texts]
    if not files and not broken:
        folders = [path.name for path in visible if path.is_dir()]
        hint = (
            f"It only holds folders ({_names(folders)}); name one of them"
            if folders
            else "Put 3 to 30 pictures into it"
        )
        what = "holds no pictures" if texts else "is empty"
        raise IcomError(f"The picture folder {folder} {what}. {hint} (--train_data_dir).")
    pictures, problems = [], []
    if broken:
        problems.append(f"{_names(broken)}: links to files that are not there")
    if texts:
        problems.append(
            f"{_names(texts)}: texts. icom does not use captions of pictures, it writes its own "
            "(--learnable_property); keep them in another folder"
        )
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


def passed_over(folder: str) -> str | None:
    """A sentence about the folders in a picture folder, where there are any: what is in them is not learned."""
    folders = sorted(path for path in _root(folder).iterdir() if path.is_dir() and not path.name.startswith("."))
    if not folders:
        return None
    files = 0
    for inner in folders:
        with contextlib.suppress(OSError):  # not ours to read
            files += sum(path.is_file() and not path.name.startswith(".") for path in inner.iterdir())
    return (
        f"passing over {files} {'file' if files == 1 else 'files'} in the folders of {folder} "
        f"({_names([path.name for path in folders])}). Pictures have to lie in the picture folder itself."
    )


def _names(names: list[str]) -> str:
    """How many and which, for instance: 3: a, b, c. Of many the first ones."""
    return f"{len(names)}: {', '.join(names[:_NAMED])}" + (", …" if len(names) > _NAMED else "")


def _root(folder: str) -> Path:
    return _bundled_folder(folder) if folder.split(":", maxsplit=1)[0] == "bundled" else Path(folder).expanduser()


def _bundled_folder(name: str) -> Path:
    names = sorted(path.name for path in BUNDLED_CONCEPTS.iterdir())
    chosen = name.partition(":")[2] or names[0]
    if chosen not in names:
        raise IcomError(f"No bundled concept {chosen!r}. There are {', '.join(names)} (--train_data_dir bundled:NAME).")
    return BUNDLED_CONCEPTS / chosen


def read_picture(path: Path) -> Image.Image:
    """Decode a picture's file, as `decode_picture` does.

    Raises:
        IcomError: not a picture, damaged, more than MAX_PIXELS, or with values of which nobody knows what is white.
    """
    try:
        # From a file and not its name: what Pillow maps into memory it turns wrongly (a TIFF's orientation).
        with path.open("rb") as file:
            return decode_picture(file, path.name)
    except PermissionError:
        raise IcomError(f"{path.name}: not readable (permissions)") from None
    except OSError as error:
        raise IcomError(f"{path.name}: damaged ({error})") from error
    except BadPicture as error:
        raise IcomError(f"{path.name}: {error}") from error


def endings() -> set[str]:
    """Of names of pictures: .jpg and so on."""
    from PIL import Image

    known = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    return known | {".heic", ".heif"}


class BadPicture(Exception):
    """What was read is no good as a picture; the message says why and what to do, but not which picture it is."""


def decode_picture(file: BinaryIO, name: str) -> Image.Image:
    """Decode a picture: upright by its EXIF orientation, RGB of 8 bits, transparency composed on white.

    More bits than 8 are scaled so that white stays white; floating-point values are taken for 0 (black) to 1 (white).
    Several threads may do so at a time.

    Args:
        file: its bytes.
        name: of the file they come from; its ending decides nothing but words.

    Raises:
        BadPicture: not a picture, damaged, more than MAX_PIXELS, or with values of which nobody knows what is white.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    # Our own limit decides, and damaged metadata does not matter. Not catch_warnings: threads undo it for each other.
    warnings.filterwarnings("ignore", module=r"PIL\.|pillow_heif")
    try:
        with _open(file) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise BadPicture(
                    f"{width} x {height} pixels are too many ({MAX_PIXELS // 10**6} megapixels at most); scale it down"
                )
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return _on_white(_eight_bits(image))
    except _UnclearError as error:
        raise BadPicture(f"{error}; save it as PNG with 8 bits") from None
    except Image.DecompressionBombError:
        # Pillow's own limit, some twice as high, strikes before it tells us the size.
        raise BadPicture(f"too many pixels ({MAX_PIXELS // 10**6} megapixels at most); scale it down") from None
    except UnidentifiedImageError:
        known = Path(name).suffix.lower() in Image.registered_extensions()
        what = "not a picture that Pillow can read; save it as PNG with 8 bits" if known else "not a picture"
        raise BadPicture(what) from None
    except (BadPicture, MemoryError):
        raise
    except Exception as error:  # what a damaged file leads Pillow's decoders to is not in any list
        raise BadPicture(f"damaged ({error})") from error


def _open(file: BinaryIO) -> Image.Image:
    """Let Pillow, or pillow-heif where it is installed, find out what the file holds. Decodes nothing.

    Raises:
        BadPicture: HEIC without pillow-heif.
    """
    from PIL import Image

    head = file.read(12)
    file.seek(0)
    if head[4:8] == b"ftyp" and head[8:] in _HEIC:
        try:
            import pillow_heif
        except ImportError:
            raise BadPicture(
                "HEIC; convert it to JPEG, or install what reads it: python -m pip install pillow-heif"
            ) from None
        pillow_heif.register_heif_opener()
    return Image.open(file)


_HEIC = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}
"""Brands of ISO/IEC 23008-12, as phones write them. AVIF has others, and Pillow reads it."""


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
