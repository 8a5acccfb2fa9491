"""A concept's pictures on one background, each with its mask: what masks are measured with (docs/learning.md).

python -m tools.world.masked /tmp/masked --concept green-star
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from PIL import Image

from icom.config.demo import ConceptName
from icom.data.masks import ENDING
from icom.files import make_writable_folder
from icom.world.concepts import CONCEPTS, concept_scenes
from icom.world.scene import PLACES, SIZES, Scene, draw


@dataclass(kw_only=True)
class MaskedConfig:
    """Draw them."""

    folder: tyro.conf.Positional[Path]
    """Folder for N.png and N-mask.png."""
    concept: ConceptName = "green-star"
    """What they show, always on the background of the first picture of its set."""


def write_masked(config: MaskedConfig) -> None:
    """One picture at each place, in both sizes."""
    make_writable_folder(config.folder)
    background = concept_scenes(config.concept)[0].background
    rng = random.Random(f"masked {config.concept}")
    for number, (place, size) in enumerate(zip(PLACES, itertools.cycle(SIZES), strict=False)):
        scene = Scene(CONCEPTS[config.concept], size, place, background, rng.getrandbits(32))
        draw(scene).save(config.folder / f"{number}.png")
        mask_of(scene).save(config.folder / f"{number}{ENDING}")


def mask_of(scene: Scene) -> Image.Image:
    """White where the scene differs from itself without its object."""
    with_it, without = (np.asarray(picture, dtype=int) for picture in (draw(scene), draw(scene, outline=[])))
    return Image.fromarray((np.abs(with_it - without).max(axis=2) > 8).astype(np.uint8) * 255)


if __name__ == "__main__":
    write_masked(tyro.cli(MaskedConfig))
