"""The networks see what their own libraries see; files and packages that are not right are named.

Guards icom.evaluate.networks.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from icom.errors import IcomError
from icom.evaluate.distances import Normal, clip_score, frechet, kernel_distance
from icom.evaluate.networks import Clip, Inception, Unavailable
from tests.support.command import cut
from tests.support.tiny_clip import CONTEXT, SIDE, make_clip

PROMPTS = ["a red star on the beach", "a photo of a small blue ring at night", "x"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clip(tmp_path_factory.mktemp("clip"))


def pictures(count: int, size: tuple[int, int] = (64, 64)) -> list[Image.Image]:
    """Noise in blocks."""
    random = np.random.Generator(np.random.PCG64(0))
    noise = random.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    return [Image.fromarray(one).resize(size, Image.Resampling.NEAREST) for one in noise]


def test_clip_score_is_that_of_the_whole_model(clip: Path) -> None:
    """Its logits are cosines times a factor; pictures are resized, cut, and normalized as CLIP was trained."""
    from transformers import CLIPModel, CLIPTokenizer

    shown = pictures(3, (80, 64))
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
    spread = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
    pixels = []
    for picture in shown:
        small = picture.resize((SIDE * 80 // 64, SIDE), Image.Resampling.BICUBIC).crop((4, 0, 4 + SIDE, SIDE))
        pixels.append((torch.tensor(np.asarray(small) / 255).permute(2, 0, 1).float() - mean) / spread)
    model: Any = CLIPModel.from_pretrained(clip)
    words = CLIPTokenizer.from_pretrained(clip)(PROMPTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(pixel_values=torch.stack(pixels), **words).logits_per_image / model.logit_scale.exp()
    ours = Clip(str(clip))
    seen, read = ours.see(shown), ours.read(PROMPTS)
    cosines = seen @ read.T / np.outer(np.linalg.norm(seen, axis=1), np.linalg.norm(read, axis=1))
    assert cosines == pytest.approx(logits.numpy(), abs=1e-5)
    assert clip_score(seen, read) == pytest.approx(100 * logits.diag().clip(0).mean().item(), abs=1e-3)


def test_prompt_beyond_the_context_is_cut(clip: Path) -> None:
    ours = Clip(str(clip))
    long = ours.read(["a star " * CONTEXT])
    assert long == pytest.approx(ours.read(["a star " * (CONTEXT // 2)]))


def test_no_clip() -> None:
    with pytest.raises(Unavailable, match=r"--clip_model is missing: .*hf download openai/clip-vit-base-patch32"):
        Clip(None)


@pytest.mark.parametrize("wrong", ["nowhere", "cut", "other shapes", "no tokenizer", "no weights"])
def test_folder_that_holds_no_clip(wrong: str, clip: Path, tmp_path: Path) -> None:
    folder = tmp_path / "clip"
    if wrong != "nowhere":
        shutil.copytree(clip, folder)
    if wrong == "cut":
        cut(folder / "model.safetensors")
    if wrong == "other shapes":
        config = json.loads((folder / "config.json").read_text())
        config["projection_dim"] = 9
        (folder / "config.json").write_text(json.dumps(config))
    if wrong == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    if wrong == "no weights":
        (folder / "model.safetensors").unlink()
    with pytest.raises(IcomError, match=r"no CLIP model of transformers in .*clip .*preprocessor_config.*--clip_model"):
        Clip(str(folder))


class Pwned:
    """What a careless reader would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("PWNED"),))


@pytest.mark.parametrize("wrong", ["nowhere", "no tensors", "other weights", "a program"])
def test_file_that_holds_no_inception(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "weights.pth"
    if wrong == "no tensors":
        file.write_bytes(b"<html>not found</html>")
    elif wrong == "other weights":
        torch.save({"a": torch.zeros(1)}, file)
    elif wrong == "a program":
        torch.save({"a": Pwned()}, file)
    with pytest.raises(IcomError, match=r"weights.pth is not weights-inception-2015.*--inception_weights"):
        Inception(str(file))
    assert not Path("PWNED").exists()


def test_no_inception() -> None:
    with pytest.raises(Unavailable, match=r"--inception_weights is missing: download https://\S+6726825d.pth and give"):
        Inception(None)


def inception_file(folder: Path) -> Path:
    """Random weights under the names of the real ones, large enough to tell pictures apart."""
    extractor = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3", reason="no torch-fidelity")
    file = folder / "weights.pth"
    with torch.random.fork_rng(), pytest.MonkeyPatch.context() as patch:
        torch.manual_seed(0)
        patch.setattr(extractor, "load_state_dict_from_url", lambda url, progress: {})
        patch.setattr(extractor.FeatureExtractorInceptionV3, "load_state_dict", lambda self, state: None)
        network = extractor.FeatureExtractorInceptionV3("inception", ["2048"])
    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight)
    torch.save(network.state_dict(), file)
    return file


def test_scores_are_torch_fidelitys(tmp_path: Path) -> None:
    """FID and KID of two folders, by the function behind its own command."""
    file = inception_file(tmp_path)
    import torch_fidelity

    sets = {"one": pictures(10), "other": [picture.rotate(30) for picture in pictures(10)]}
    for name, shown in sets.items():
        (tmp_path / name).mkdir()
        for number, picture in enumerate(shown):
            picture.save(tmp_path / name / f"{number}.png")
    network = Inception(str(file))
    one, other = (network.see(shown) for shown in sets.values())
    theirs = torch_fidelity.calculate_metrics(
        **{"input1": str(tmp_path / "one"), "input2": str(tmp_path / "other"), "fid": True, "kid": True},
        **{"kid_subset_size": 10, "kid_subsets": 1, "feature_extractor_weights_path": str(file)},
        **{"cuda": False, "cache": False, "verbose": False, "batch_size": 4, "save_cpu_ram": True},
    )
    fid, kid = frechet(Normal.of(one), Normal.of(other)), kernel_distance(one, other)[0]
    assert fid == pytest.approx(theirs["frechet_inception_distance"], rel=1e-4) and fid > 1
    assert kid == pytest.approx(theirs["kernel_inception_distance_mean"], rel=1e-4)
