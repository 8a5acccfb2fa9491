"""Latents are computed once: the VAE's mean and standard deviation of every picture and flip, kept on disk.

The VAE is frozen and a set has few variants (5 pictures x flip = 10), so a step needs no VAE: it samples from the
kept mean and standard deviation, which is the distribution of encoding the picture anew. Random
crops are of a few places, each encoded for itself: cut out of a whole picture's latents they would be others.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from icom.data.images import Picture, read_picture
from icom.data.transform import Transform, pixels
from icom.errors import IcomError
from icom.files import write_atomically
from icom.progress import progress

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

    from icom.data.sampling import Sample

_FORMAT = 2  # part of the key: raise it when the meaning of an entry changes


@dataclass(frozen=True)
class Moments:
    """Posterior of every variant.

    Attributes:
        mean, std: of each picture float32 of shape (2, places, channels, height, width); index 1 is the flip.
        hits: entries that came from the disk.
        computed: entries that this process encoded.
        weights: of each picture what its pixels count in the loss, float32 of shape (2, places, 1, height, width),
            where they do not all count the same.
    """

    mean: tuple[torch.Tensor, ...]
    std: tuple[torch.Tensor, ...]
    hits: int
    computed: int
    weights: tuple[torch.Tensor, ...] | None = None

    @property
    def variants(self) -> int:
        """How many there are."""
        return sum(mean.shape[0] * mean.shape[1] for mean in self.mean)

    def shape(self, picture: int) -> tuple[int, ...]:
        """Of a sample's latents: (channels, height, width)."""
        return tuple(self.mean[picture].shape[2:])

    def sample(self, sample: Sample, noise: torch.Tensor) -> torch.Tensor:
        """One draw from its variant's posterior: mean + std * noise (Kingma & Welling 2014), not yet scaled."""
        return self._seen(self.mean, sample) + self._seen(self.std, sample) * noise

    def weights_of(self, samples: Sequence[Sample]) -> torch.Tensor | None:
        """What the pixels of their latents count in the loss, (samples, 1, height, width); None: all the same."""
        if self.weights is None:
            return None
        return torch.stack([self._seen(self.weights, sample) for sample in samples])

    def _seen(self, variants: tuple[torch.Tensor, ...], sample: Sample) -> torch.Tensor:
        mine = variants[sample.picture][int(sample.flip)]
        return mine[sample.place % len(mine)]


@dataclass(frozen=True)
class _Variant:
    picture: Picture
    flip: bool
    place: int
    path: Path


def load_moments(
    pictures: list[Picture],
    transform: Transform,
    vae: AutoencoderKL,
    vae_digest: str,
    folder: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    local_rank: int = 0,
    local_size: int = 1,
    wait_for_everyone: Callable[[], None] = lambda: None,
    decode_threads: int = 0,
) -> Moments:
    """The moments of every picture and flip, from the cache or the VAE.

    Ranks compute disjoint parts, then read each other's. Of what is not found then (no shared disk) those of a machine
    compute disjoint parts, and what is still missing (the cache cannot be written) every rank for itself.

    Args:
        pictures: checked pictures.
        transform: to pixels.
        vae: frozen, on its device, in the dtype of training.
        vae_digest: digest of its weights (they include the dtype).
        folder: of the cache.
        rank: of this process.
        world_size: number of processes.
        local_rank: of this process among those on its machine.
        local_size: number of those.
        wait_for_everyone: barrier over all processes.
        decode_threads: threads that decode pictures ahead of the VAE.
    """
    places = [len(transform.view(picture.size).boxes) for picture in pictures]
    variants = [
        _Variant(picture, flip, place, folder / f"{_key(picture, transform, vae_digest, flip, place)}.safetensors")
        for picture, count in zip(pictures, places, strict=True)
        for flip in (False, True)
        for place in range(count)
    ]
    store = _Store(folder, speaks=local_rank == 0)
    found: dict[_Variant, tuple[torch.Tensor, torch.Tensor]] = {}
    computed: dict[_Variant, tuple[torch.Tensor, torch.Tensor]] = {}
    hits = None
    # By place among all variants: what a rank finds missing depends on when it looks.
    for part, parts in ((rank, world_size), (local_rank, local_size), (0, 1)):
        missing = [variant for variant in variants if variant not in found and variant not in computed]
        found |= {variant: entry for variant in missing if (entry := _read(variant.path)) is not None}
        hits = len(found) if hits is None else hits
        mine = [v for i, v in enumerate(variants) if i % parts == part and v not in found and v not in computed]
        computed |= dict(_encode(mine, transform, vae, store, decode_threads, show=rank == 0))
        wait_for_everyone()
    entries = [found.get(variant) or computed[variant] for variant in variants]
    moments: list[list[torch.Tensor]] = [[], []]
    for count in places:
        of_picture, entries = entries[: 2 * count], entries[2 * count :]
        for kept, tensors in zip(moments, zip(*of_picture, strict=True), strict=True):
            kept.append(torch.stack(tensors).unflatten(0, (2, count)))
    return Moments(tuple(moments[0]), tuple(moments[1]), hits or 0, len(computed))


def _key(picture: Picture, transform: Transform, vae_digest: str, flip: bool, place: int) -> str:
    parts = {
        "picture": picture.digest,
        "vae": vae_digest,
        "flip": flip,
        "format": _FORMAT,
        **transform.key(picture.size, place),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _encode(
    variants: list[_Variant],
    transform: Transform,
    vae: AutoencoderKL,
    store: _Store,
    threads: int,
    *,
    show: bool,
) -> Iterator[tuple[_Variant, tuple[torch.Tensor, torch.Tensor]]]:
    def decode(variant: _Variant) -> torch.Tensor:
        image = read_picture(variant.picture.path, alpha=transform.alpha_mask)
        return pixels(image, transform, flip=variant.flip, place=variant.place)

    with ThreadPoolExecutor(max(1, threads)) as pool:
        decoded = pool.map(decode, variants) if threads else map(decode, variants)
        bar = progress(decoded, "latents", "picture", total=len(variants), disable=not show or not variants)
        for variant, image in zip(variants, bar, strict=True):
            with torch.no_grad():
                posterior = vae.encode(image[None].to(vae.device, vae.dtype)).latent_dist
            entry = posterior.mean[0].float().cpu(), posterior.std[0].float().cpu()
            store.write(variant.path, entry)
            yield variant, entry


@dataclass
class _Store:
    """Keeps entries for the next run. Where it cannot, one process of a machine says so, once."""

    folder: Path
    speaks: bool
    refused: bool = False

    def write(self, path: Path, entry: tuple[torch.Tensor, torch.Tensor]) -> None:
        tensors = {"mean": entry[0].contiguous(), "std": entry[1].contiguous()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, save(tensors, metadata={"sha256": _tensors_digest(*entry)}), "--cache_dir")
        except (OSError, IcomError) as error:
            # The cache only saves time: without it the run goes on with what it has in memory.
            if self.speaks and not self.refused:
                print(f"icom: latents are not kept for the next run ({error})", file=sys.stderr)
            self.refused = True


def _read(path: Path) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The entry, or None when it is absent, truncated or altered."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            mean, std = file.get_tensor("mean"), file.get_tensor("std")
            intact = (file.metadata() or {}).get("sha256") == _tensors_digest(mean, std)
    except (OSError, SafetensorError):
        return None
    return (mean, std) if intact else None


def _tensors_digest(mean: torch.Tensor, std: torch.Tensor) -> str:
    digest = hashlib.sha256(mean.contiguous().numpy().tobytes())
    digest.update(std.contiguous().numpy().tobytes())
    return digest.hexdigest()
