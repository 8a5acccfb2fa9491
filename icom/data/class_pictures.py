"""The folder with pictures of a concept's class, for prior preservation."""

from __future__ import annotations

import re
from pathlib import Path

from icom.config.train import TrainConfig
from icom.data.images import Picture, list_pictures
from icom.errors import IcomError

DRAWN = re.compile(r"class-\d{5}\.png")
"""Names of the pictures that the model drew; others are somebody's own."""


def pictures_there(config: TrainConfig) -> list[Picture]:
    """The pictures in --class_data_dir: first those that somebody put there, then those that were drawn.

    Raises:
        IcomError: it is no folder, or has files that are no good.
    """
    assert config.class_data_dir
    folder = Path(config.class_data_dir).expanduser()
    if not folder.exists() or (folder.is_dir() and all(path.name.startswith(".") for path in folder.iterdir())):
        return []
    try:
        pictures = list_pictures(config.class_data_dir)
    except IcomError as error:
        raise IcomError(str(error).replace("--train_data_dir", "--class_data_dir")) from error
    return sorted(pictures, key=lambda picture: DRAWN.fullmatch(picture.path.name) is not None)
