"""Pictures with masks that show nothing but the object.

Guards tools.world.masked.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from icom.data.images import list_pictures, read_picture
from icom.data.masks import read_mask, with_masks
from icom.world.concepts import CONCEPTS, concept_scenes
from icom.world.judge import load_judge
from tools.world.masked import MaskedConfig, write_masked


def test_masks_show_the_object(tmp_path: Path) -> None:
    """By the judge; outside of the masks a picture is plain strips, as wide as the beach is."""
    write_masked(MaskedConfig(folder=tmp_path, concept="red-moon"))
    pictures = with_masks(list_pictures(str(tmp_path)))
    assert len(pictures) == 5
    seen = load_judge().look_at([read_picture(picture.path) for picture in pictures])
    assert {verdict.thing for verdict in seen} == {CONCEPTS["red-moon"]}
    assert {verdict.background for verdict in seen} == {concept_scenes("red-moon")[0].background}
    for picture in pictures:
        mask = read_mask(picture)
        assert mask is not None
        inside, values = np.asarray(mask) > 0, np.asarray(read_picture(picture.path), dtype=int)
        assert 0.02 < inside.mean() < 0.4
        reddish = (values[..., 0] > 150) & (values[..., 1] < 90)
        assert (inside[reddish]).all()
        assert reddish[inside].mean() > 0.7
