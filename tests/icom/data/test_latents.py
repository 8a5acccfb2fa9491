"""The latent cache keeps the distribution and survives damage.

Guards icom.data.latents.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL

from icom.data.images import list_pictures, read_picture
from icom.data.latents import Moments, load_moments
from icom.data.sampling import Sample
from icom.data.transform import Transform, pixels
from icom.models import loading

TRANSFORM = Transform(64, center_crop=False)


@pytest.fixture(scope="module")
def vae() -> AutoencoderKL:
    return loading.load(loading.find("bundled"), torch.float32).vae


class Spy(torch.nn.Module):
    """Counts what the VAE is asked to encode."""

    def __init__(self, vae: AutoencoderKL) -> None:
        super().__init__()
        self.vae, self.encoded = vae, 0

    @property
    def device(self) -> torch.device:
        return self.vae.device

    @property
    def dtype(self) -> torch.dtype:
        return self.vae.dtype

    def encode(self, batch: torch.Tensor) -> object:
        self.encoded += len(batch)
        return self.vae.encode(batch)


def moments(vae: AutoencoderKL, folder: Path, **options: object) -> tuple[Moments, int]:
    spy = Spy(vae)
    arguments = {"transform": TRANSFORM, "vae_digest": "digest"} | options
    result = load_moments(list_pictures("bundled"), vae=spy, folder=folder, **arguments)  # type: ignore[arg-type]
    return result, spy.encoded


def same(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_moments_are_the_vaes_per_picture_and_flip(vae: AutoencoderKL, tmp_path: Path) -> None:
    cached, _ = moments(vae, tmp_path)
    for again in (cached, moments(vae, tmp_path)[0]):
        for index, picture in enumerate(list_pictures("bundled")):
            for flip in (False, True):
                image = pixels(read_picture(picture.path), TRANSFORM, flip=flip)
                with torch.no_grad():
                    posterior = vae.encode(image[None]).latent_dist
                assert torch.equal(again.mean[index][int(flip), 0], posterior.mean[0])
                assert torch.equal(again.std[index][int(flip), 0], posterior.std[0])
                noise = torch.randn(again.shape(index))
                sample = again.sample(Sample(index, flip, template=0, timestep=0, noise_seed=0), noise)
                torch.testing.assert_close(sample, posterior.mean[0] + posterior.std[0] * noise)


def test_second_run_does_no_vae_work(vae: AutoencoderKL, tmp_path: Path) -> None:
    first, encoded = moments(vae, tmp_path)
    assert (encoded, first.computed, first.hits) == (10, 10, 0)
    second, encoded = moments(vae, tmp_path)
    assert (encoded, second.computed, second.hits) == (0, 0, 10)
    assert same(first.mean, second.mean)


@pytest.mark.parametrize("damage", ["truncated", "empty", "altered"])
def test_damaged_entry_is_recomputed(vae: AutoencoderKL, tmp_path: Path, damage: str) -> None:
    first, _ = moments(vae, tmp_path)
    entry = sorted(tmp_path.glob("*.safetensors"))[3]
    content = bytearray(entry.read_bytes())
    if damage == "altered":
        content[-5] ^= 0xFF
    entry.write_bytes({"truncated": content[:-7], "empty": b"", "altered": content}[damage])
    second, encoded = moments(vae, tmp_path)
    assert encoded == 1
    assert same(first.mean, second.mean)
    assert same(first.std, second.std)
    assert moments(vae, tmp_path)[1] == 0


@pytest.mark.parametrize(
    "change",
    [{"transform": Transform(128, False)}, {"transform": Transform(64, True)}, {"vae_digest": "other"}],
)
def test_another_transform_or_vae_is_another_entry(
    vae: AutoencoderKL, tmp_path: Path, change: dict[str, object]
) -> None:
    moments(vae, tmp_path)
    assert moments(vae, tmp_path, **change)[1] == 10


def test_ranks_compute_disjoint_parts_and_share_them(vae: AutoencoderKL, tmp_path: Path) -> None:
    other_rank = {}

    def meet() -> None:  # at the barrier the other rank has done its part
        if not other_rank:
            other_rank["encoded"] = moments(vae, tmp_path, rank=1, world_size=2)[1]

    alone, _ = moments(vae, tmp_path / "alone")
    both, encoded = moments(vae, tmp_path, rank=0, world_size=2, wait_for_everyone=meet)
    assert encoded == 5
    assert other_rank["encoded"] == 5
    assert same(both.mean, alone.mean)


def test_ranks_of_a_machine_share_what_others_keep_elsewhere(vae: AutoencoderKL, tmp_path: Path) -> None:
    """Four ranks on two machines without a shared disk: each of a machine's two encodes half."""
    met: list[None] = []

    def meet() -> None:
        met.append(None)
        if len(met) == 2:
            moments(vae, tmp_path, rank=1, world_size=4, local_rank=1, local_size=2)

    place = {"rank": 0, "world_size": 4, "local_rank": 0, "local_size": 2}
    assert moments(vae, tmp_path, wait_for_everyone=meet, **place)[1] == 5


def test_decoding_in_threads_changes_nothing(vae: AutoencoderKL, tmp_path: Path) -> None:
    one, _ = moments(vae, tmp_path / "a")
    many, _ = moments(vae, tmp_path / "b", decode_threads=3)
    assert same(one.mean, many.mean)


def test_unwritable_cache_only_costs_time(
    vae: AutoencoderKL, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    result, encoded = moments(vae, tmp_path / "file" / "cache")
    assert encoded == 10
    assert all(mean.isfinite().all() for mean in result.mean)
    assert capsys.readouterr().err.count("not kept") == 1
    _, encoded = moments(vae, tmp_path / "file" / "cache", rank=0, world_size=2, local_size=2)
    assert encoded == 10
    assert capsys.readouterr().err.count("not kept") == 1
    moments(vae, tmp_path / "file" / "cache", rank=1, world_size=2, local_rank=1, local_size=2)
    assert "not kept" not in capsys.readouterr().err
