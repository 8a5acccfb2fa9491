"""Trackers, for real and without a network.

Guards icom.training.tracking.
"""

from __future__ import annotations

import io
import json
import os
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from icom.training import tracking
from tests.support.command import Result, start_process, train_arguments

TOKEN = "hf_ThisIsTheSecretOfTheTests"
VALIDATION = {"validation_prompt": "a photo of <robot>", "validation_steps": 2, "num_validation_images": 2}
Train = Callable[..., Result]


def losses(output: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def everything_below(folder: Path) -> bytes:
    """All bytes, also of what lies in ZIP files."""
    found = b""
    for path in folder.rglob("*"):
        if path.is_file():
            found += path.read_bytes()
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    found += b"".join(archive.read(name) for name in archive.namelist())
    return found


@pytest.fixture
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "COMET_")) or name == "NETRC"]:
        monkeypatch.delenv(name)


def run_offline(tmp_path: Path, reporter: str) -> Result:
    """Train in a process of its own that knows no key and no home, and cannot ask for one."""
    home = tmp_path / "home"
    home.mkdir()
    arguments = train_arguments(output_dir=tmp_path / "out", report_to=reporter, hub_token=TOKEN, **VALIDATION)
    process = start_process(*arguments, HOME=str(home))
    try:
        out, err = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert (tmp_path / "out" / "learned_embeds.safetensors").is_file()
    assert TOKEN.encode() not in everything_below(tmp_path)
    assert TOKEN not in out + err
    return Result(process.returncode, out, err)


def test_tensorboard_is_the_default_and_gets_everything(train: Train, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = train(output_dir=tmp_path, report_to=None, hub_token=TOKEN, **VALIDATION)
    assert result.code == 0, result.err
    events = EventAccumulator(str(tmp_path / "logs" / "textual_inversion"), {"tensors": 0, "images": 0})
    events.Reload()
    scalars = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in ("loss", "lr")}
    assert [step for step, _ in scalars["loss"]] == [1, 2, 3]
    assert [value for _, value in scalars["loss"]] == pytest.approx(losses(tmp_path))
    assert [value for _, value in scalars["lr"]] == pytest.approx([1e-2] * 3)
    pictures = events.Images("validation")
    assert {picture.step for picture in pictures} == {2}
    # The pictures shown are those on disk; TensorBoard puts them side by side, our file leaves a gap of 4 pixels.
    shown = Image.open(io.BytesIO(pictures[0].encoded_image_string)).convert("RGB")
    with Image.open(tmp_path / "validation" / "step-2.png") as stored:
        assert shown.size == (128, 64)
        for left, left_stored in ((0, 0), (64, 68)):
            one, other = (s.crop((x, 0, x + 64, 64)) for s, x in ((shown, left), (stored, left_stored)))
            assert one.tobytes() == other.tobytes()
    assert TOKEN.encode() not in everything_below(tmp_path)


def test_logging_dir(train: Train, tmp_path: Path) -> None:
    assert train(output_dir=tmp_path, report_to="tensorboard", logging_dir="elsewhere").code == 0
    assert list((tmp_path / "elsewhere").rglob("events.out.tfevents.*"))
    assert not (tmp_path / "logs").exists()


@pytest.mark.long
def test_none_writes_nothing(train: Train, tmp_path: Path) -> None:
    result = train(output_dir=tmp_path, report_to="none", **VALIDATION)
    assert result.code == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        *("README.md", "checkpoint-3", "config.yaml", "learned_embeds.safetensors", "loss.png", "metrics.jsonl"),
        *("report.html", "run.json", "validation"),
    }


@pytest.mark.long
@pytest.mark.usefixtures("_no_keys")
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_works_offline(tmp_path: Path) -> None:
    result = run_offline(tmp_path, "wandb")
    (record,) = (tmp_path / "out" / "wandb").glob("offline-run-*/run-*.wandb")
    content = record.read_bytes()
    assert b"initializer_token" in content
    assert b"loss" in content
    pictures = list((tmp_path / "out" / "wandb").glob("offline-run-*/files/media/images/*.png"))
    assert len(pictures) == 2
    assert "Traceback" not in result.err


@pytest.mark.long
@pytest.mark.usefixtures("_no_keys")
@pytest.mark.skipif(find_spec("comet_ml") is None, reason="comet_ml is not installed")
def test_comet_works_offline(tmp_path: Path) -> None:
    result = run_offline(tmp_path, "comet_ml")
    (archive,) = (tmp_path / "out" / "logs").glob("*.zip")
    content = everything_below(archive.parent)
    assert b"initializer_token" in content
    assert b'"loss"' in content
    assert b"validation-0" in content
    assert "Traceback" not in result.err


@pytest.mark.parametrize("name", ["wandb", "comet_ml", "tensorboard"])
def test_tracker_that_is_not_installed(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # what Python itself takes for "cannot be imported"
    output = tmp_path / "out"
    result = train(output_dir=output, report_to=name)
    assert result.code == 2
    assert f"--report_to {name}: the package is not installed" in result.err
    assert f"pip install {name}" in result.err
    assert not output.exists()
    assert name not in tracking.choose("all")
    assert name not in tracking.choose("auto")


def test_folder_of_that_name_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B leaves a folder wandb/ behind; in the current folder it can be imported."""
    for name in [name for name in sys.modules if name.split(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert find_spec("wandb") is not None
    assert "wandb" not in tracking.choose("all")


def test_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_is_installed", lambda name: True)
    assert tracking.choose("auto") == ["tensorboard"]
    assert tracking.choose("all") == ["tensorboard", "wandb", "comet_ml"]
    assert tracking.choose("comet_ml") == ["comet_ml"]
    assert tracking.choose("none") == []
