"""What a word is learned from, read and checked before anything is loaded: pictures, and what is said of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from icom.config.rows import hint
from icom.config.train import TrainConfig
from icom.data.caption_reading import read_captions, unused
from icom.data.captions import Captions
from icom.data.class_pictures import pictures_there
from icom.data.images import Picture, list_pictures, notices
from icom.parallel.group import ALONE, Group
from icom.training.optimizers import need_package
from icom.training.pictures import learned_pictures, transform_of, views_of
from icom.training.train_validation import held_out_last


@dataclass(frozen=True)
class Material:
    """The pictures of a word, checked.

    Attributes:
        pictures: all of them, of which those that are held out are the last.
        trained: the first so many are trained on.
        captions: of all of them.
        digests: of all files, by name: what all processes must have alike.
    """

    pictures: list[Picture]
    trained: int
    captions: Captions
    digests: dict[str, str]

    @property
    def files(self) -> dict[str, str]:
        """Digests of pictures and masks, by name: what a checkpoint belongs to."""
        return {file.path.name: file.digest for one in self.pictures for file in (one, one.mask) if file}


def open_material(config: TrainConfig, group: Group = ALONE) -> Material:
    """Look at what is quick to check, so that nothing is loaded for a run that cannot work.

    Args:
        config: checked.
        group: rank 0 talks.

    Raises:
        UsageError: templates that cannot be read, or options of captions without captions.
        IcomError: pictures, masks or captions are no good, or the optimizer's package is missing.
    """
    need_package(config.optimizer)
    if group.leads and (advice := hint(config, config.learning_rate)):
        print(f"icom: {advice}", file=sys.stderr)
    files = list_pictures(config.train_data_dir)
    found = learned_pictures(files, config)
    pictures, trained = held_out_last(found) if config.share_for_validation else (found, len(found))
    captions = read_captions(config, pictures)
    for notice in (*notices(pictures), *unused(pictures, captions)) if group.leads else ():
        print(f"icom: {notice}", file=sys.stderr)
    if config.with_prior_preservation:
        views_of(pictures_there(config), transform_of(config))  # those that are no good are told now
    return Material(pictures, trained, captions, {file.path.name: file.digest for file in files} | captions.facts())
