"""Pictures as the options of `icom train` want them: masks, shapes, the order of buckets, what each pixel counts."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

import torch

from icom.data.bucket_order import BucketOrder
from icom.data.buckets import Buckets, NoBucket, table
from icom.data.masks import loss_weights, named_like_masks, read_mask, with_alpha, with_masks
from icom.data.transform import Transform, View
from icom.errors import IcomError, UsageError

if TYPE_CHECKING:
    from icom.config.train import TrainConfig
    from icom.data.images import Picture
    from icom.data.latents import Moments


def transform_of(config: TrainConfig) -> Transform:
    """How the options turn pictures into pixels."""
    buckets = None
    if config.enable_bucket:
        bounds = (config.min_bucket_reso, config.max_bucket_reso, config.bucket_reso_steps)
        buckets = Buckets(config.resolution, *bounds, config.bucket_no_upscale)
    places = config.crops_per_picture if config.random_crop else 0
    return Transform(config.resolution, config.center_crop, places, buckets, config.alpha_mask)


def learned_pictures(files: list[Picture], config: TrainConfig) -> list[Picture]:
    """The pictures among the files of a folder, with their masks, all of which can be used as the options say.

    Raises:
        IcomError: masks are no good or missing, or no bucket fits a picture.
    """
    pictures = files
    if config.masked_loss:
        pictures = with_masks(files)
    elif config.alpha_mask:
        pictures = with_alpha(files)
    views_of(pictures, transform_of(config))
    return pictures


def views_of(pictures: list[Picture], transform: Transform) -> list[View]:
    """What is used of each picture.

    Raises:
        IcomError: no bucket fits some of them; all of these are named.
    """
    views, problems = [], []
    for picture in pictures:
        try:
            views.append(transform.view(picture.size))
        except NoBucket as error:
            problems.append(f"{picture.path.name}: {error}")
    if problems:
        listed = "\n  ".join(problems)
        raise IcomError(f"In the picture folder {pictures[0].path.parent}, no bucket fits:\n  {listed}")
    return views


def check_vae(transform: Transform, vae_levels: int) -> None:
    """Refuse sizes that a model's VAE does not divide without a rest.

    Args:
        transform: of the options.
        vae_levels: of the VAE; each but the first halves the picture.

    Raises:
        UsageError: buckets in other steps.
    """
    factor = 2 ** (vae_levels - 1)
    if transform.buckets and transform.buckets.step % factor:
        raise UsageError(
            f"--bucket_reso_steps {transform.buckets.step}: this model's VAE makes one latent of {factor} x {factor} "
            f"pixels, so that it has to be a multiple of {factor}."
        )


def bucket_order(pictures: list[Picture], config: TrainConfig, seed: int, repeats: int) -> BucketOrder | None:
    """Which picture comes when, where a batch has one bucket.

    Args:
        pictures: that are trained on.
        config: the options.
        seed: of the samples.
        repeats: of a picture in an epoch.
    """
    if not config.enable_bucket:
        return None
    buckets: dict[tuple[int, int], list[int]] = {}
    for index, view in enumerate(views_of(pictures, transform_of(config))):
        buckets.setdefault(view.window, []).append(index)
    members = tuple(tuple(buckets[size]) for size in sorted(buckets))
    return BucketOrder(seed, members, repeats, config.train_batch_size)


def weighted(moments: Moments, pictures: list[Picture], config: TrainConfig) -> Moments:
    """With what each latent pixel counts in the loss, where there are masks."""
    if not (config.masked_loss or config.alpha_mask):
        return moments
    transform, weights = transform_of(config), []
    for picture, mean in zip(pictures, moments.mean, strict=True):
        mask, shape = read_mask(picture), (mean.shape[3], mean.shape[4])
        variants = [
            loss_weights(mask, transform, shape, flip=flip, place=place, unmasked_weight=config.unmasked_weight)
            for flip in (False, True)
            for place in range(mean.shape[1])
        ]
        weights.append(torch.stack(variants).unflatten(0, (2, mean.shape[1])))
    return dataclasses.replace(moments, weights=tuple(weights))


def say_pictures(pictures: list[Picture], moments: Moments, config: TrainConfig) -> None:
    """Which buckets there are, how many pictures have masks; and what is there and not used."""
    views = views_of(pictures, transform_of(config))
    if config.enable_bucket:
        print(table(view.window for view in views), flush=True)
    if moments.weights is not None:
        masked = sum(picture.mask is not None for picture in pictures)
        outside = f"what is outside counts {config.unmasked_weight:g}"
        print(f"icom: {masked} of {len(pictures)} pictures have a mask; {outside}", flush=True)
    elif named := named_like_masks(pictures):
        print(f"icom: {', '.join(named)}: learned as pictures. If they are masks, add --masked_loss.", file=sys.stderr)
    if config.random_crop and all(len(view.boxes) == 1 for view in views):
        print(
            "icom: --random_crop has nothing to choose from: no picture is longer than what is cut out of it.",
            file=sys.stderr,
        )
