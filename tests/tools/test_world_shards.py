"""The world as tars: what they hold, and that training reads them. Guards tools.world.shards."""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from webdataset.tariterators import group_by_keys, tar_file_expander

from icom.config.finetune import FinetuneConfig
from icom.data.sources import open_source
from icom.errors import IcomError
from icom.world.concepts import CONCEPTS, seen_things
from icom.world.judge import load_judge
from icom.world.scene import describe, draw, random_scene
from tools.world.shards import ShardsConfig, write_shards


def test_tars_hold_the_scenes_and_captions_of_the_seed(tmp_path: Path) -> None:
    """As the webdataset package reads them, and as training does; a smaller set is the beginning of a larger one."""
    write_shards(ShardsConfig(output_dir=tmp_path / "a", pictures=30, per_shard=12, seed=3))
    write_shards(ShardsConfig(output_dir=tmp_path / "b", pictures=24, per_shard=12, seed=3))
    tars = sorted((tmp_path / "a").iterdir())
    assert [tar.name for tar in tars] == ["00000.tar", "00001.tar", "00002.tar"]
    assert [tar.read_bytes() for tar in tars[:2]] == [tar.read_bytes() for tar in sorted((tmp_path / "b").iterdir())]

    of_scenes, of_captions = random.Random("unet 3"), random.Random("captions unet 3")
    scenes = [random_scene(of_scenes, seen_things()) for _ in range(30)]
    captions = [describe(scene, of_captions) for scene in scenes]
    theirs = []
    for tar in tars:
        with tar.open("rb") as stream:  # webdataset.WebDataset leaves its files open
            theirs += group_by_keys(tar_file_expander([{"url": tar.name, "stream": stream}]))
    source = open_source(FinetuneConfig(train_data_dir=str(tmp_path / "a"), cache_dir=str(tmp_path / "cache")))
    assert len(theirs) == len(source) == 30
    for number, (scene, caption, their) in enumerate(zip(scenes, captions, theirs, strict=True)):
        ours = source.read(number)
        assert ours.caption == their["txt"].decode() == caption
        assert ours.picture
        with Image.open(io.BytesIO(their["png"])) as picture:
            for shown in (ours.picture, picture):
                assert np.array_equal(np.asarray(shown), np.asarray(draw(scene)))
    options = {"filters": {"background": "at night"}, "cache_dir": str(tmp_path / "cache")}
    night = open_source(FinetuneConfig(train_data_dir=str(tmp_path / "a"), **options))  # type: ignore[arg-type]
    assert len(night) == sum(scene.background == "at night" for scene in scenes) > 0


def test_a_held_out_thing_has_its_word(tmp_path: Path) -> None:
    """All pictures show it, and every second caption says the word in place of what it is made of."""
    options = ShardsConfig(output_dir=tmp_path / "new", things="green-star", word="blicket", pictures=60)
    write_shards(options)
    source = open_source(FinetuneConfig(train_data_dir=str(tmp_path / "new"), cache_dir=str(tmp_path / "cache")))
    records = [source.read(number) for number in range(len(source))]
    verdicts = load_judge().look_at([record.picture for record in records if record.picture])
    assert sum(verdict.thing == CONCEPTS["green-star"] for verdict in verdicts) >= 58
    named = [record.caption for record in records if "blicket" in record.caption.split()]
    assert 20 <= len(named) <= 45
    assert not [caption for caption in named if {"green", "striped", "star"} & set(caption.split())]
    with pytest.raises(IcomError, match="is there already"):
        write_shards(options)
    with pytest.raises(IcomError, match="say which with --things"):
        write_shards(ShardsConfig(output_dir=tmp_path / "other", word="blicket"))
