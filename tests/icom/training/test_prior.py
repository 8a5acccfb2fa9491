"""Prior preservation. Guards icom.training.prior, icom.data.class_pictures and icom.config.prior."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from icom.config.words import Word
from icom.data.captions import TEMPLATES
from icom.data.images import BUNDLED_CONCEPTS
from icom.data.sampling import SampleStream, Stream, raw_words
from icom.methods.embedding import add_placeholders
from icom.models import loading
from icom.training.report import read_metrics
from tests.support.command import Run, assert_refused
from tests.support.plain_loss import plain_loss

PRIOR = {"with_prior_preservation": True, "class_prompt": "a photo of a <robot>"}


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


def rows(folder: Path) -> torch.Tensor:
    return load_file(folder / "learned_embeds.safetensors")["<robot>"]


def own_pictures(folder: Path, count: int) -> Path:
    """Somebody's own pictures of the class."""
    folder.mkdir()
    for path in sorted((BUNDLED_CONCEPTS / "blue-heart").iterdir())[:count]:
        shutil.copy(path, folder)
    return folder


def test_loss_is_that_of_the_pictures_and_so_much_of_the_class(tmp_path: Path, train: Run) -> None:
    """By a plain loop over both streams; rows that hardly move mean what the initializer means."""
    folder = own_pictures(tmp_path / "class", 3)
    options = {"learning_rate": 1e-12, "gradient_accumulation_steps": 2, "prior_loss_weight": 0.5}
    result = train(output_dir=tmp_path / "out", class_data_dir=folder, num_class_images=3, **options, **PRIOR)
    assert result.code == 0, result.err
    seed = int(raw_words(7, Stream.PRIOR, count=1)[0]) >> 1
    own, of_the_class = SampleStream(7, 5, 100, 27, 1000), SampleStream(seed, 3, 1, 1, 1000)
    expected = []
    for step in range(3):
        loss = 0.0
        for i in (2 * step, 2 * step + 1):
            text = TEMPLATES["object"][own[i].template].format("toy")
            loss += plain_loss(BUNDLED_CONCEPTS / "blue-heart" / f"{own[i].picture}.png", text, own[i])
            loss += 0.5 * plain_loss(folder / f"{of_the_class[i].picture}.png", "a photo of a toy", of_the_class[i])
        expected.append(loss / 2)
    assert losses(tmp_path / "out") == pytest.approx(expected, rel=1e-4)


def test_prompt_without_the_word_would_teach_nothing(train: Run, tmp_path: Path) -> None:
    """What the refusal says: no gradient reaches the rows."""
    model = loading.load(loading.find("bundled"), torch.float32)
    concept = add_placeholders(model.tokenizer, model.text_encoder, [Word("<robot>", "toy", 1)])
    for prompt, reaches in (("a photo of a toy", False), ("a photo of a <robot>", True)):
        ids = model.tokenizer(prompt, return_tensors="pt").input_ids
        (gradient,) = torch.autograd.grad(model.text_encoder(ids)[0].pow(2).sum(), concept.words[0])
        assert bool(gradient.abs().max() > 0) == reaches
    options = PRIOR | {"class_prompt": "a photo of a toy", "class_data_dir": tmp_path / "class"}
    result = train(output_dir=tmp_path, **options)
    assert_refused(
        result, 2, "--class_prompt 'a photo of a toy' does not say <robot>", 'for instance "a photo of a <robot>"'
    )


def test_missing_pictures_are_drawn_once(tmp_path: Path, train: Run, icom: Run) -> None:
    """As `icom generate` draws them, of the initializer; somebody's own ones come first, and what is there stays."""
    folder, options = own_pictures(tmp_path / "class", 1), {"num_class_images": 3, "max_train_steps": 2, **PRIOR}
    result = train(output_dir=tmp_path / "out", class_data_dir=folder, **options)
    assert result.code == 0, result.err
    assert f"icom: drawing 2 pictures of 'a photo of a toy' into {folder}" in result.out
    words = ["--prompt", "a photo of a toy", "--seed", "0", "1", "--resolution", "64", "--mixed_precision", "no"]
    assert icom("generate", "--output_dir", str(tmp_path / "drawn"), *words).code == 0
    drawn = sorted((tmp_path / "drawn").iterdir())
    made = [folder / "class-00000.png", folder / "class-00001.png"]
    assert [opened(path) for path in made] == [opened(path) for path in drawn]
    before = {path: path.read_bytes() for path in made}

    made[1].unlink()
    again = train(output_dir=tmp_path / "again", class_data_dir=folder, **options)
    assert "icom: drawing 1 pictures" in again.out
    assert {path: path.read_bytes() for path in made} == before
    assert torch.equal(rows(tmp_path / "again"), rows(tmp_path / "out"))
    resume = {"output_dir": tmp_path / "out", "resume_from_checkpoint": "latest", "class_data_dir": folder}
    told = train(**options | {"num_class_images": 2}, **resume)
    assert_refused(told, 1, "This is not the run of the checkpoint; different: class_pictures (")
    told = train(
        **options | {"class_prompt": "a drawing of a <robot>"}, class_data_dir=folder, output_dir=tmp_path / "x"
    )
    assert_refused(
        told, 1, "class-00000.png was drawn for something else: 'a photo of a toy", "now it would be 'a drawing"
    )


def opened(path: Path) -> bytes:
    with Image.open(path) as image:
        return bytes(image.tobytes())


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"class_data_dir": None}, 2, "--with_prior_preservation needs --class_data_dir"),
        ({"class_prompt": None}, 2, "--with_prior_preservation needs --class_prompt, for instance"),
        ({"with_prior_preservation": None}, 2, "--class_data_dir is for --with_prior_preservation: give that too"),
        ({"num_class_images": 0}, 2, "--num_class_images has to be at least 1"),
        ({"prior_loss_weight": 0}, 2, "--prior_loss_weight has to be a positive number, not 0"),
        ({"class_data_dir": "file"}, 1, "Not a picture folder but a file"),
        ({"class_data_dir": "broken"}, 1, "bad.png: not a picture"),
        ({"class_data_dir": "file/below"}, 1, "Choose another --class_data_dir"),
    ],
)
def test_what_cannot_work(
    options: dict[str, Any], code: int, words: str, tmp_path: Path, train: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/bad.png").write_text("no picture")
    result = train(
        **{"output_dir": tmp_path / "out", "class_data_dir": "class", "num_class_images": 1, **PRIOR, **options}
    )
    assert_refused(result, code, words)
