"""From a folder to a checked list of pictures, and from a file to a picture."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from icom.data.caption_files import speaks_of_pictures
from icom.errors import IcomError

if TYPE_CHECKING:
    from PIL import Image

BUNDLED_CONCEPTS = Path(__file__).parents[1] / "assets" / "concepts"
"""Folders with the pictures of the concepts that ship with icom."""
MAX_PIXELS = 100_000_000
"""Larger pictures are refused before they are decoded (100 megapixels take 300 MB)."""

_NAMED = 20
"""So many files are named in a message; the rest is counted."""


@dataclass(frozen=True)
class Picture:
    """A picture that decodes.

    Attributes:
        path: its file.
        digest: SHA-256 of the file's bytes.
        size: (width, height) in pixels, upright.
        mask: the file that says which parts are learned, where there is one: this one itself where its alpha channel
            does (`icom.data.masks`).
    """

    path: Path
    digest: str
    size: tuple[int, int]
    mask: Picture | None = None


def list_pictures(folder: str) -> list[Picture]:
    """All pictures of a folder in order of name, each decoded once to be sure.

    Hidden files are passed over, captions (`icom.data.caption_reading` reads them), and folders (`notices` names them).

    Args:
        folder: a path, or `bundled:NAME` for a concept set that ships with icom (`bundled`: the first of them).

    Raises:
        IcomError: folder missing or empty, or files that are no good; all of them are named.
    """
    root = folder_of(folder)
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
    texts = [path for path in visible if speaks_of_pictures(path.name)]
    files = [path for path in visible if path.is_file() and path not in texts]
    if not files and not broken:
        folders = [path.name for path in visible if path.is_dir()]
        hint = (
            f"It only holds folders ({names_of(folders)}); name one of them"
            if folders
            else "Put 3 to 30 pictures into it"
        )
        what = "holds no pictures" if texts else "is empty"
        raise IcomError(f"The picture folder {folder} {what}. {hint} (--train_data_dir).")
    pictures, problems = [], []
    if broken:
        problems.append(f"{names_of(broken)}: links to files that are not there")
    for path in files:
        try:
            size = read_picture(path).size
            pictures.append(Picture(path, hashlib.sha256(path.read_bytes()).hexdigest(), size))
        except IcomError as error:
            problems.append(str(error))
    if problems:
        listed = "\n  ".join(problems)
        raise IcomError(f"In the picture folder {folder}, repair or remove:\n  {listed}")
    return pictures


def files_of(folder: str) -> list[Path]:
    """All that a training reads of a picture folder in order of name: the pictures, and what is said of them there."""
    return sorted(path for path in folder_of(folder).iterdir() if path.is_file() and not path.name.startswith("."))


def notices(pictures: list[Picture]) -> Iterator[str]:
    """Sentences about what a picture folder has and nobody learns: folders, and frames after the first."""
    folder = pictures[0].path.parent
    if inner := sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        yield _passed_over(folder, inner)
    frames = {picture.path.name: _frames(picture.path) for picture in pictures}
    if moving := [f"{name} ({count} frames)" for name, count in frames.items() if count > 1]:
        yield f"learning the first frame of pictures that move or have pages ({names_of(moving)})."


def _passed_over(folder: Path, folders: list[Path]) -> str:
    files = 0
    for inner in folders:
        with contextlib.suppress(OSError):  # not ours to read
            files += sum(path.is_file() and not path.name.startswith(".") for path in inner.iterdir())
    return (
        f"passing over {files} {'file' if files == 1 else 'files'} in the folders of {folder} "
        f"({names_of([path.name for path in folders])}). Pictures have to lie in the picture folder itself."
    )


def _frames(path: Path) -> int:
    """Of a picture that is shown in turn, or has pages; 1 for what cameras keep several of: a photo and its preview."""
    from PIL import Image

    with path.open("rb") as file, Image.open(file) as image:
        return getattr(image, "n_frames", 1) if image.format in _MOVING else 1


_MOVING = {"AVIF", "GIF", "PNG", "TIFF", "WEBP"}
"""Pillow's names of formats whose frames are what people call frames or pages."""


def names_of(several: list[str]) -> str:
    """How many and which, for instance: 3: a, b, c. Of many the first ones."""
    return f"{len(several)}: {', '.join(several[:_NAMED])}" + (", …" if len(several) > _NAMED else "")


def folder_of(folder: str) -> Path:
    """The folder that --train_data_dir names."""
    return _bundled_folder(folder) if folder.split(":", maxsplit=1)[0] == "bundled" else Path(folder).expanduser()


def _bundled_folder(name: str) -> Path:
    names = sorted(path.name for path in BUNDLED_CONCEPTS.iterdir())
    chosen = name.partition(":")[2] or names[0]
    if chosen not in names:
        raise IcomError(f"No bundled concept {chosen!r}. There are {', '.join(names)} (--train_data_dir bundled:NAME).")
    return BUNDLED_CONCEPTS / chosen


def read_picture(path: Path, *, alpha: bool = False) -> Image.Image:
    """Decode a picture's file, as `decode_picture` does.

    Args:
        path: of the file.
        alpha: as there.

    Raises:
        IcomError: not a picture, damaged, more than MAX_PIXELS, or with values of which nobody knows what is white.
    """
    try:
        # From a file and not its name: what Pillow maps into memory it turns wrongly (a TIFF's orientation).
        with path.open("rb") as file:
            return decode_picture(file, path.name, alpha=alpha)
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


class NotAPicture(BadPicture):
    """It does not even begin as a picture."""


def decode_picture(file: BinaryIO, name: str, formats: list[str] | None = None, *, alpha: bool = False) -> Image.Image:
    """Decode a picture: upright by its EXIF orientation, RGB of 8 bits, transparency composed on white.

    More bits than 8 are scaled so that white stays white; floating-point values are taken for 0 (black) to 1 (white).
    Several threads may do so at a time.

    Args:
        file: its bytes.
        name: of the file they come from; its ending decides nothing but words.
        formats: Pillow's names of those that are tried. Default: all.
        alpha: what is transparent is not composed on white: a picture that has such comes as RGBA.

    Raises:
        BadPicture: not a picture, damaged, more than MAX_PIXELS, or with values of which nobody knows what is white.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    # Our own limit decides, and damaged metadata does not matter. Not catch_warnings: threads undo it for each other.
    warnings.filterwarnings("ignore", module=r"PIL\.|pillow_heif")
    try:
        with _open(file, formats) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise BadPicture(
                    f"{width} x {height} pixels are too many ({MAX_PIXELS // 10**6} megapixels at most); scale it down"
                )
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            colours = _colours(_eight_bits(image))
            return colours if alpha else _on_white(colours)
    except _UnclearError as error:
        raise BadPicture(f"{error}; save it as PNG with 8 bits") from None
    except Image.DecompressionBombError:
        # Pillow's own limit, some twice as high, strikes before it tells us the size.
        raise BadPicture(f"too many pixels ({MAX_PIXELS // 10**6} megapixels at most); scale it down") from None
    except UnidentifiedImageError:
        known = Path(name).suffix.lower() in Image.registered_extensions()
        what = "not a picture that Pillow can read; save it as PNG with 8 bits" if known else "not a picture"
        raise NotAPicture(what) from None
    except (BadPicture, MemoryError):
        raise
    except Exception as error:  # what a damaged file leads Pillow's decoders to is not in any list
        raise BadPicture(f"damaged ({error})") from error


def _open(file: BinaryIO, formats: list[str] | None) -> Image.Image:
    """Let Pillow, or pillow-heif where it is installed, find out what the file holds. Decodes nothing.

    Raises:
        BadPicture: a film, a camera's raw data, or HEIC or AVIF without what reads them.
    """
    from PIL import Image, features

    head = file.read(64)
    file.seek(0)
    if head[4:8] == b"ftyp":
        major, *others = (head[i : i + 4] for i in (8, *range(16, min(len(head), int.from_bytes(head[:4], "big")), 4)))
        if major in _AVIF or (major in _ANY and _AVIF.intersection(others)):
            if not features.check("avif"):
                raise BadPicture(
                    "AVIF, which this Pillow lacks; convert it to JPEG, or: python -m pip install -U pillow"
                )
        elif major in _HEIC or major in _ANY:
            try:
                import pillow_heif
            except ImportError:
                raise BadPicture(
                    "HEIC; convert it to JPEG, or install what reads it: python -m pip install pillow-heif"
                ) from None
            pillow_heif.register_heif_opener()
        else:
            raise NotAPicture("a film (the moving part of a Live Photo is one); take it out")
    image = Image.open(file, formats=formats)
    tags = getattr(image, "tag_v2", {})
    if _DNG_VERSION in tags or tags.get(_NEW_SUBFILE_TYPE, 0) & 1:
        image.close()
        raise BadPicture("raw data of a camera, of which Pillow sees the preview alone; save it as JPEG")
    return image


_ANY = {b"mif1", b"msf1"}
_HEIC = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"}
_AVIF = {b"avif", b"avis"}
"""Brands of ISO/IEC 23008-12, as phones write them: of any coding, of HEVC's, of AV1's."""
_DNG_VERSION, _NEW_SUBFILE_TYPE = 50706, 254
"""Tags of DNG 1.7 and TIFF 6.0; the second is odd where a smaller version of another picture comes first."""


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


def _colours(image: Image.Image) -> Image.Image:
    """RGB, or RGBA where something may be transparent."""
    if image.mode == "LAB":
        raise _UnclearError("CIELAB colours, which Pillow does not convert")
    if image.mode == "La":  # grey with premultiplied alpha, from a TIFF: Pillow converts it to LA alone
        image = image.convert("LA")
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """RGB, with white behind what is transparent."""
    from PIL import Image

    if image.mode == "RGB":
        return image
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
