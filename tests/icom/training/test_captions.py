"""Trainings with captions. Guards icom.data.captions, icom.methods.textual_inversion and icom.methods.embedding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from icom.data.captions import TEMPLATES
from icom.data.images import BUNDLED_CONCEPTS
from icom.data.sampling import SampleStream
from icom.training.report import read_metrics
from tests.support.command import Run, assert_refused
from tests.support.plain_loss import plain_loss
from tests.support.ranks import Ranks

SAYINGS = ["<robot> on sand", "a small <robot>, red, on water", "at night, <robot>"]
STILL = {"learning_rate": 1e-12, "max_train_steps": 6}
"""Rows that hardly move: each step's loss is a function of its sample."""


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three pictures without captions."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("0.png", "1.png", "2.png"):
        shutil.copy(BUNDLED_CONCEPTS / "red-moon" / name, folder)
    return folder


def write_captions(photos: Path) -> None:
    for number, text in enumerate(SAYINGS):
        (photos / f"{number}.txt").write_text(text)


def rows(folder: Path) -> torch.Tensor:
    return load_file(folder / "learned_embeds.safetensors")["<robot>"]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


def test_losses_are_those_of_the_captions(tmp_path: Path, train: Run, photos: Path) -> None:
    """Of a plain loop over the stream: as they are, and in the templates of a file; with the initializer's meaning."""
    write_captions(photos)
    templates = ["a photo of <robot>, {}", "{} and <robot>"]
    (tmp_path / "t").write_text("\n".join(line.replace("{}", "[filewords]") for line in templates))
    for file, texts in ((None, ["{}"]), (tmp_path / "t", templates)):
        result = train(output_dir=tmp_path / "out", train_data_dir=photos, caption_templates=file, **STILL)
        assert result.code == 0, result.err
        stream = SampleStream(7, 3, 100, len(texts), 1000)
        expected = []
        for sample in (stream[i] for i in range(6)):
            caption = texts[sample.template].replace("{}", SAYINGS[sample.picture]).replace("<robot>", "toy")
            expected.append(plain_loss(photos / f"{sample.picture}.png", caption, sample))
        assert losses(tmp_path / "out") == pytest.approx(expected, rel=1e-4)
        assert "icom: captions: those of the 3 pictures" in result.out


def test_the_papers_templates_from_a_file_give_the_same_bits(tmp_path: Path, train: Run, photos: Path) -> None:
    """And so does a folder with captions that nobody asks for."""
    (tmp_path / "t").write_text("\n".join(template.replace("{}", "[name]") for template in TEMPLATES["object"]))
    assert train(output_dir=tmp_path / "plain", train_data_dir=photos).code == 0
    write_captions(photos)
    for name, templates in (("file", tmp_path / "t"), ("builtin", "builtin")):
        result = train(output_dir=tmp_path / name, train_data_dir=photos, caption_templates=templates)
        assert result.code == 0, result.err
        assert "3: 0.txt, 1.txt, 2.txt): no template has [filewords]" in result.err
        assert torch.equal(rows(tmp_path / name), rows(tmp_path / "plain"))


def test_shuffled_captions_resume_to_the_same_bits(tmp_path: Path, train: Run, photos: Path) -> None:
    """Other captions, or another order, are another run."""
    write_captions(photos)
    options = {"train_data_dir": photos, "shuffle_caption": True, "caption_dropout_rate": 0.3, "max_train_steps": 6}
    assert train(output_dir=tmp_path / "whole", checkpointing_steps=3, num_vectors=2, **options).code == 0
    resume = {"resume_from_checkpoint": tmp_path / "whole/checkpoint-3", "num_vectors": 2, "output_dir": tmp_path / "r"}
    assert train(**options, **resume).code == 0
    assert torch.equal(rows(tmp_path / "r"), rows(tmp_path / "whole"))
    assert_refused(
        train(**options | {"caption_dropout_rate": 0.2}, **resume), 1, "caption_dropout_rate (checkpoint 0.3"
    )
    (photos / "0.txt").write_text("another <robot>")
    assert_refused(train(**options, **resume), 1, "This is not the run of the checkpoint; different: captions (")


def test_checkpoint_of_a_plain_run_knows_nothing_of_captions(tmp_path: Path, train: Run) -> None:
    """As those that were written before there were captions, which go on."""
    assert train(output_dir=tmp_path).code == 0
    identity = json.loads((tmp_path / "checkpoint-3/state.json").read_text())["identity"]["options"]
    assert set(identity) == {
        *("placeholder_token", "num_vectors", "learnable_property", "resolution", "center_crop", "repeats", "engine"),
    }


@pytest.mark.long
def test_three_ranks_have_the_captions_of_one(
    tmp_path: Path, train: Run, photos: Path, ranks: Callable[..., Ranks]
) -> None:
    """With prior preservation, whose pictures the ranks draw together."""
    write_captions(photos)
    options = {"train_data_dir": photos, "shuffle_caption": True, "caption_dropout_rate": 0.3, "max_train_steps": 6}
    options |= {"with_prior_preservation": True, "class_prompt": "a photo of a <robot>", "num_class_images": 4}
    alone, three = tmp_path / "alone", tmp_path / "rank0/out"
    assert train(output_dir=alone, train_batch_size=3, class_data_dir=tmp_path / "a", **options).code == 0
    results = ranks(3, class_data_dir=tmp_path / "b", **options).results()
    assert [result.code for result in results] == [0, 0, 0], results
    torch.testing.assert_close(rows(three), rows(alone), rtol=0, atol=1e-6)
    assert losses(three) == pytest.approx(losses(alone), rel=1e-5)
    names = [f"class-{number:05}.png" for number in range(4)]
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert sorted(path.name for path in folder.iterdir()) == names
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)


def test_captions_that_are_too_long(tmp_path: Path, train: Run, photos: Path) -> None:
    """What the text encoder does not read is told once; it is an error where the word is among it."""
    write_captions(photos)
    (photos / "1.txt").write_text("<robot>" + ", red" * 60)
    result = train(output_dir=tmp_path / "out", train_data_dir=photos)
    assert result.code == 0, result.err
    assert result.err.count("does not read the ends of captions (1: 1.txt (121 tokens)).") == 1
    shuffled = train(output_dir=tmp_path / "out", train_data_dir=photos, shuffle_caption=True)
    assert_refused(shuffled, 1, "reads 75 tokens, and <robot> can stand beyond them in 1: 1.txt: put it nearer")
    kept = train(output_dir=tmp_path / "out", train_data_dir=photos, shuffle_caption=True, keep_tokens=1)
    assert kept.code == 0, kept.err
    (photos / "1.txt").write_text("red, " * 60 + "<robot>")
    assert_refused(train(output_dir=tmp_path / "out", train_data_dir=photos), 1, "<robot> can stand beyond them")


def test_words_of_several_rows_reach_the_text_encoder_whole(tmp_path: Path, train: Run, photos: Path) -> None:
    """One that would be read otherwise is refused with the caption that shows it."""
    write_captions(photos)
    (photos / "2.txt").write_text("robots at the <robot>")
    result = train(output_dir=tmp_path / "out", train_data_dir=photos, num_vectors=3, placeholder_token="<robot>")
    assert result.code == 0, result.err
    for number in range(3):
        (photos / f"{number}.txt").write_text("a hoto of a photo")
    result = train(output_dir=tmp_path / "out", train_data_dir=photos, placeholder_token="hoto")
    assert_refused(result, 1, "0.txt: hoto stands inside another word (photo)")
