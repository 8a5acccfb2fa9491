"""Masks: which parts of a picture are learned, and how much the rest counts.

A mask is NAME-mask.png beside the picture NAME.*: white is learned, black is not, and so is what the mask leaves
transparent; or it is the picture's own alpha channel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from icom.data.images import Picture, read_picture
from icom.data.transform import Transform, seen
from icom.errors import IcomError

if TYPE_CHECKING:
    import torch
    from PIL import Image

ENDING = "-mask.png"
"""Of the names of masks."""


def is_mask(picture: Picture) -> bool:
    """Whether its name says so."""
    return picture.path.name.lower().endswith(ENDING)


def named_like_masks(pictures: list[Picture]) -> list[str]:
    """Names of pictures that would be masks of others, were masks asked for."""
    stems = {picture.path.stem for picture in pictures}
    return [picture.path.name for picture in pictures if is_mask(picture) and _of(picture) in stems]


def with_masks(files: list[Picture]) -> list[Picture]:
    """The pictures among the files, each with its mask, where it has one.

    Args:
        files: of a folder: pictures and masks.

    Raises:
        IcomError: masks without a picture, of another size, all black, or no masks at all; all of them are named.
    """
    masks = {_of(file): file for file in files if is_mask(file)}
    pictures = [dataclasses.replace(file, mask=masks.get(file.path.stem)) for file in files if not is_mask(file)]
    stems = {picture.path.stem for picture in pictures}
    problems = [f"{mask.path.name}: no picture {stem}.* is there" for stem, mask in masks.items() if stem not in stems]
    problems += [problem for picture in pictures if picture.mask for problem in _problems(picture, picture.mask)]
    _refuse(files, problems)
    if not masks:
        raise IcomError(
            f"--masked_loss: none of the pictures in {files[0].path.parent} has a mask. Put NAME{ENDING}, white where "
            "NAME.* is to be learned, beside them; or drop it."
        )
    return pictures


def with_alpha(pictures: list[Picture]) -> list[Picture]:
    """The pictures; those with an alpha channel have themselves as a mask.

    Raises:
        IcomError: one is transparent everywhere, or none has an alpha channel.
    """
    channels = [_alpha(picture) for picture in pictures]
    pairs = list(zip(pictures, channels, strict=True))
    empty = [picture.path.name for picture, alpha in pairs if alpha and not alpha.getbbox()]
    _refuse(pictures, [f"{name}: transparent everywhere, so that nothing of it would be learned" for name in empty])
    if not any(channels):
        raise IcomError(
            f"--alpha_mask: none of the pictures in {pictures[0].path.parent} has an alpha channel. Make transparent "
            "what is not to be learned (PNG, WebP), or drop it."
        )
    return [dataclasses.replace(picture, mask=picture) if alpha else picture for picture, alpha in pairs]


def read_mask(picture: Picture) -> Image.Image | None:
    """What of a picture is learned: grey of 8 bits, as large as the picture, 255 where it is; None: all of it."""
    if picture.mask is None:
        return None
    return _alpha(picture) if picture.mask.path == picture.path else _white_in(picture.mask)


def loss_weights(
    mask: Image.Image | None,
    transform: Transform,
    shape: tuple[int, int],
    *,
    flip: bool,
    place: int = 0,
    unmasked_weight: float,
) -> torch.Tensor:
    """What each latent pixel counts in the loss: the mean over its pixels of 1 inside and `unmasked_weight` outside.

    Args:
        mask: of the picture; None: all inside.
        transform: that makes the latents.
        shape: (height, width) of the latents.
        flip: whether they are of the mirrored picture.
        place: of its box.
        unmasked_weight: between 0 and 1.

    Returns:
        float32 of shape (1, height, width).
    """
    import numpy as np
    import torch

    if mask is None:
        return torch.ones(1, *shape)
    inside = torch.from_numpy(np.asarray(seen(mask, transform, flip=flip, place=place), dtype=np.float32) / 255)
    share = torch.nn.functional.adaptive_avg_pool2d(inside[None], shape)
    return unmasked_weight + (1 - unmasked_weight) * share


def _of(mask: Picture) -> str:
    """The stem of its picture's name."""
    return mask.path.name[: -len(ENDING)]


def _problems(picture: Picture, mask: Picture) -> Iterator[str]:
    if mask.size != picture.size:
        sizes = [f"{width} x {height}" for width, height in (mask.size, picture.size)]
        yield f"{mask.path.name}: {sizes[0]} pixels, and {picture.path.name} has {sizes[1]}: both need the same"
    if not _white_in(mask).getbbox():
        yield f"{mask.path.name}: black everywhere, so that nothing of {picture.path.name} would be learned"


def _white_in(mask: Picture) -> Image.Image:
    from PIL import Image

    image = read_picture(mask.path, alpha=True)
    if image.mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), image)
    return image.convert("L")


def _alpha(picture: Picture) -> Image.Image | None:
    image = read_picture(picture.path, alpha=True)
    return image.getchannel("A") if image.mode == "RGBA" else None


def _refuse(files: list[Picture], problems: list[str]) -> None:
    if problems:
        listed = "\n  ".join(problems)
        raise IcomError(f"In the picture folder {files[0].path.parent}, repair or remove:\n  {listed}")
