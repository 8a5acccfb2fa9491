"""Precomputed latents are what diffusers' own modules give, whatever interrupts the making.

Guards icom.data.precompute, icom.data.encode, icom.data.latent_set and icom.data.latent_files.
"""

from __future__ import annotations

import contextlib
import json
import random
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load, load_file, save_file

from icom.config.data import DataOptions
from icom.data import latent_set
from icom.data.latent_set import LatentSource, open_latents
from icom.data.order import WINDOW
from icom.data.parts import part_of
from icom.data.records import DamagedRecord
from icom.data.sources import open_source
from icom.errors import IcomError, UsageError
from icom.models.loading import BUNDLE
from tests.support.command import Result, assert_message, long, start_process
from tests.support.ranks import Ranks
from tests.support.small_disk import on_a_disk
from tests.support.waiting import wait_until

Icom = Callable[..., Result]
FORMATS = ["parquet", "tar"]
SIZES = [(64, 64), (100, 70), (70, 100), (40, 48), (130, 65), (64, 90), (90, 64)]


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven pictures of different shapes, with captions."""
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for number, (width, height) in enumerate(SIZES):
        blocks = generator.integers(0, 256, (5, 5, 3), dtype=np.uint8)
        picture = Image.fromarray(blocks).resize((width, height), Image.Resampling.BICUBIC)
        picture.save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a photo of thing {number}")
    return folder


def arguments(photos: Path | str, output: Path, **options: object) -> list[str]:
    words = ["data", "precompute", f"--train_data_dir={photos}", f"--output_dir={output}"]
    for name, value in ({"samples_per_shard": 2, "resolution": 32, "batch_size": 2} | options).items():
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        else:
            words.append(f"--{name}" if value is True else f"--{name}={value}")
    return words


@pytest.fixture
def make(icom: Icom, photos: Path, tmp_path: Path) -> Callable[..., Path]:
    """Precompute in this process: `make("name", format="tar")`, below the test's folder."""

    def run(name: str = "latents", of: Path | str = photos, **options: object) -> Path:
        result = icom(*arguments(of, tmp_path / name, **options))
        assert result.code == 0, result
        return tmp_path / name

    return run


def opened(folder: Path) -> LatentSource:
    source = open_source(DataOptions(train_data_dir=str(folder)))
    assert isinstance(source, LatentSource)
    return source


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# What is kept.


def window(photo: Path, top: int, left: int, side: int) -> torch.Tensor:
    """The square that torchvision's Resize, CenterCrop or RandomCrop, ToTensor and Normalize would give."""
    with Image.open(photo) as picture:
        short = min(picture.size)
        size = tuple(int(side * length / short) for length in picture.size)
        resized = picture.resize((size[0], size[1]), Image.Resampling.LANCZOS)
    square = resized.crop((left, top, left + side, top + side))
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)[None] / 127.5 - 1


@pytest.fixture(scope="module")
def pipeline() -> Any:
    from diffusers import StableDiffusionPipeline

    return StableDiffusionPipeline.from_pretrained(BUNDLE, safety_checker=None, local_files_only=True)


def assert_kept(found: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    """Equal up to the rounding of a batch in float32, and of the dtype: float16 has 11 significant bits."""
    found, expected = found.float(), expected.float()
    rounding = 2**-11 * expected.abs() + 2**-25 if dtype == "float16" else 0
    assert ((found - expected).abs() <= rounding + 2e-5 * (1 + expected.abs())).all()


@pytest.mark.parametrize(("shards", "dtype"), [("parquet", "float32"), ("parquet", "float16"), ("tar", "float16")])
@torch.no_grad()
def test_kept_is_what_the_pipelines_modules_give(
    make: Callable[..., Path], photos: Path, pipeline: Any, shards: str, dtype: str
) -> None:
    folder = make(resolution=[32, 64], crops_per_picture=2, random_flip=True, format=shards, dtype=dtype, seed=3)
    places = set()
    for side in (32, 64):
        source = opened(folder).at(side)
        assert len(source) == len(SIZES)
        for number, size in enumerate(SIZES):
            record = source.read(number)
            assert (record.key, record.caption) == (f"{number}.png", f"a photo of thing {number}")
            latents = record.latents
            assert latents is not None
            assert latents.size == size
            assert latents.mean.shape == latents.std.shape == (2, 2, 4, side // 8, side // 8)
            for crop, (top, left) in enumerate(latents.places):
                places.add((number, side, top, left))
                for mirror in (0, 1):
                    pixels = window(photos / f"{number}.png", top, left, side)
                    posterior = pipeline.vae.encode(pixels.flip(-1) if mirror else pixels).latent_dist
                    assert_kept(latents.mean[crop, mirror], posterior.mean[0], dtype)
                    assert_kept(latents.std[crop, mirror], posterior.std[0], dtype)
            states, empty = pipeline.encode_prompt(record.caption, "cpu", 1, True, negative_prompt="")
            assert_kept(latents.states, states[0], dtype)
            assert_kept(source.empty, empty[0], dtype)
            assert latents.states.dtype == source.empty.dtype == getattr(torch, dtype)
    # The square ones have one place each; of the others most drew two.
    assert len(places) > 2 * len(SIZES)
    assert {(top, left) for number, _, top, left in places if number == 0} == {(0, 0)}


def test_middle(make: Callable[..., Path]) -> None:
    """As torchvision's CenterCrop, of pictures resized to 64: see test_crops.py for where these come from."""
    source = opened(make(center_crop=True, resolution=64))
    places = [source.read(number).latents.places for number in (0, 1, 2, 4)]  # type: ignore[union-attr]
    assert places == [((0, 0),), ((0, 14),), ((14, 0),), ((0, 32),)]


def test_parquet_is_open_to_pyarrow(make: Callable[..., Path]) -> None:
    """With what the file itself says of shapes and dtype."""
    import pyarrow.parquet as pq

    folder = make(resolution=[32], crops_per_picture=2, random_flip=True)
    source, number = opened(folder), 0
    for shard in sorted(folder.glob("*.parquet")):
        table = pq.read_table(shard)
        made = json.loads(table.schema.metadata[b"icom"])
        for row in table.to_pylist():
            record = source.read(number)
            assert row["number"] == number
            assert (row["key"], row["caption"]) == (record.key, record.caption)
            assert record.latents is not None
            mean = np.frombuffer(row["mean_32"], made["dtype"]).reshape(made["shapes"]["mean_32"])
            assert np.array_equal(mean.astype(np.float32), record.latents.mean.numpy())
            assert [(at["top"], at["left"]) for at in row["crops_32"]] == list(record.latents.places)
            number += 1
    assert number == len(SIZES)


def test_tars_are_open_to_webdataset(make: Callable[..., Path]) -> None:
    from webdataset.tariterators import group_by_keys, tar_file_expander

    folder, number = make(format="tar"), 0
    source = opened(folder)
    for shard in sorted(folder.glob("*.tar")):
        with shard.open("rb") as file:
            for sample in group_by_keys(tar_file_expander([{"url": shard.name, "stream": file}])):
                latents = source.read(number).latents
                assert latents is not None
                assert int(sample["__key__"]) == number
                assert torch.equal(load(sample["safetensors"])["mean_32"].float(), latents.mean)
                number += 1
    assert number == len(SIZES)


def test_numbers_that_float16_cannot_hold(icom: Icom, photos: Path, tmp_path: Path) -> None:
    """They are never kept as infinite."""
    model = tmp_path / "model"
    shutil.copytree(BUNDLE, model)
    (weights,) = (model / "vae").glob("*.safetensors")
    tensors = {name: tensor.float() for name, tensor in load_file(weights).items()}
    tensors["quant_conv.weight"] *= 1e6
    save_file(tensors, weights, metadata={"format": "pt"})
    options = {"pretrained_model_name_or_path": model, "center_crop": True}
    result = icom(*arguments(photos, tmp_path / "latents", **options))
    assert_message(result, 1, "mean_32", "too large for float16; try --dtype float32", "7 of 7 samples")
    result = icom(*arguments(photos, tmp_path / "other", dtype="float32", **options))
    assert result.code == 0, result
    assert opened(tmp_path / "other").read(0).latents.mean.abs().max() > 65504  # type: ignore[union-attr]


# What interrupts the making.


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start_process`, and the end of what a failed test left running."""
    processes = []

    def start(*words: str) -> subprocess.Popen[str]:
        processes.append(start_process(*words))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.long
@pytest.mark.parametrize("shards", FORMATS)
def test_killed_at_random_moments(
    make: Callable[..., Path], start: Callable[..., subprocess.Popen[str]], tmp_path: Path, shards: str
) -> None:
    """kill -9 in some shards, and the bytes are those of a command that nobody disturbed."""
    options: dict[str, object] = {"format": shards, "samples_per_shard": 3, "resolution": 64, "random_flip": True}
    expected = content(make("whole", "synthetic:24", **options))
    folder, moments = tmp_path / "killed", random.Random(5)
    made: dict[str, int] = {}
    for _ in range(3):
        process, so_far = start(*arguments("synthetic:24", folder, **options)), len(made)
        wait_until(lambda: process.poll() is not None or len(list(folder.glob("*.json"))) > so_far)  # noqa: B023
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(moments.random() * 0.3)
        process.kill()
        process.communicate()
        now = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.json")}
        assert made.items() <= now.items()  # what is whole is not made again
        made = now
    make("killed", "synthetic:24", **options)
    assert content(folder) == expected
    assert all((folder / name).stat().st_mtime_ns == when for name, when in made.items())


def test_what_a_kill_cut_off_is_taken_over(make: Callable[..., Path]) -> None:
    """Be it in the middle of a shard, or of the file that says that it is whole."""
    options: dict[str, object] = {"samples_per_shard": 3, "resolution": 64}
    folder = make("set", "synthetic:9", **options)
    expected = content(folder)
    (folder / "00001.json").rename(folder / ".00001.json.part")
    (folder / ".00001.json.part").write_text("{")
    (folder / ".00001.parquet.part").write_text("PAR1")
    make("set", "synthetic:9", **options)
    assert content(folder) == expected


@pytest.mark.long
def test_interrupt_leaves_whole_shards(
    make: Callable[..., Path], start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    folder, options = tmp_path / "latents", {"samples_per_shard": 4, "resolution": 64}
    process = start(*arguments("synthetic:400", folder, **options))
    wait_until(lambda: process.poll() is not None or (folder / "00001.json").exists())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    said = "icom: stopped. The shards that are whole stay: give the same command again to go on."
    assert_message(Result(process.returncode, out, err), 130, "finishing this batch", said)
    assert not list(folder.glob(".*"))
    shards = {path.stem for path in folder.glob("*.parquet")}
    assert {"00000", "00001"} <= shards == {path.stem for path in folder.glob("*.json")}


@pytest.mark.long
def test_full_disk(icom: Icom, make: Callable[..., Path], tmp_path: Path) -> None:
    """It is named, what is whole stays, and elsewhere the rest is made."""
    options: dict[str, object] = {"samples_per_shard": 3, "resolution": 64}
    expected = content(make("whole", "synthetic:12", **options))
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    words = shlex.join([sys.executable, "-m", "icom", *arguments("synthetic:12", disk / "out", **options)])
    size = sum(map(len, expected.values())) * 2 // 3 // 1024
    script = (
        f'mount -t tmpfs -o size={size}k none "$DISK"; code=0; {words} || code=$?; cp -r "$DISK/out" {kept}; exit $code'
    )
    result = on_a_disk(disk, script)
    assert_message(result, 1, "The disk is full (", f"cannot write {disk}/out/0000", "give the same command again")
    there = content(kept)
    assert 0 < sum(name.endswith(".json") for name in there) < 4
    assert there.items() <= expected.items()  # nothing else, and nothing half
    make("kept", "synthetic:12", **options)
    assert content(kept) == expected


@pytest.mark.long
@pytest.mark.parametrize("shards", FORMATS)
def test_ranks_make_what_one_process_makes(
    make: Callable[..., Path], tmp_path: Path, photos: Path, shards: str
) -> None:
    expected = content(make("one", format=shards))
    words = arguments(photos, tmp_path / "two", format=shards)
    ranks = Ranks(tmp_path, 2, "-m", "icom", *words)
    try:
        results = ranks.results()
    finally:
        ranks.end()
    assert [result.code for result in results] == [0, 0], results
    assert content(tmp_path / "two") == expected
    assert "7 pictures in 4 shards" in results[0].out
    assert results[1].out == ""


def test_parts_make_what_one_command_makes(
    make: Callable[..., Path], icom: Icom, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = content(make("one"))
    result = icom(*arguments(photos, tmp_path / "parts", part="2/2"))
    assert (result.code, "; 2 shards of other parts are not there yet" in result.out) == (0, True), result
    assert sorted(path.name for path in (tmp_path / "parts").glob("*.parquet")) == ["00001.parquet", "00003.parquet"]
    with pytest.raises(IcomError, match=r"of 4 shards 2 are missing, cut or altered \(00000.parquet, 00002.parquet\)"):
        open_latents(tmp_path / "parts")
    for name, value in {"ID": "3", "MIN": "3", "MAX": "4", "COUNT": "2"}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    result = icom(*arguments(photos, tmp_path / "parts"))
    assert (result.code, "part 1 of 2" in result.out) == (0, True), result
    assert content(tmp_path / "parts") == expected


def test_which_part() -> None:
    def array(task: int, first: int, last: int, count: int) -> dict[str, str]:
        values = {"ID": task, "MIN": first, "MAX": last, "COUNT": count}
        return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}

    assert part_of(None, {}) == (1, 1)
    assert part_of("3/10", array(0, 0, 3, 4)) == (3, 10)
    assert [part_of(None, array(task, 0, 3, 4)) for task in range(4)] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    with pytest.raises(UsageError, match="4 of those from 1 to 5"):
        part_of(None, array(3, 1, 5, 4))


# Damage.


def change(path: Path) -> None:
    """Other bytes in the middle, where the numbers are."""
    altered = bytearray(path.read_bytes())
    middle = len(altered) // 2
    altered[middle : middle + 64] = bytes(byte ^ 0xFF for byte in altered[middle : middle + 64])
    path.write_bytes(altered)


@pytest.mark.parametrize("shards", FORMATS)
@pytest.mark.parametrize("damage", ["missing", "cut", "altered", "unsaid"])
def test_damaged_shard(make: Callable[..., Path], icom: Icom, shards: str, damage: str) -> None:
    folder = make(format=shards)
    expected, path = content(folder), folder / f"00001.{shards}"
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "altered":
        change(path)
    else:
        path.with_suffix(".json").write_text("{}")
    said = f"of 4 shards 1 are missing, cut or altered (00001.{shards})"
    assert_message(icom("data", "verify", str(folder)), 1, said, "it makes those alone")
    if damage == "altered":  # its size is right: found when the picture is read
        records = []
        for number in range(len(SIZES)):
            try:
                records.append(opened(folder).read(number))
            except DamagedRecord as error:
                assert str(error) == f"00001.{shards}, row {number - 2}: altered since it was written"
        assert len(records) == len(SIZES) - 1
    else:
        with pytest.raises(IcomError, match="are missing, cut or altered"):
            opened(folder)
    others = {path: path.stat().st_mtime_ns for path in folder.iterdir() if "00001" not in path.name}
    make(format=shards)
    assert content(folder) == expected
    assert all(path.stat().st_mtime_ns == when for path, when in others.items())
    result = icom("data", "verify", str(folder))
    assert (result.code, "whole: 7 pictures' latents in 4 shards (32 px, float16)" in result.out) == (0, True), result


def test_shard_without_a_column(make: Callable[..., Path]) -> None:
    """Rewritten by another tool."""
    import pyarrow.parquet as pq

    folder = make()
    shard = folder / "00000.parquet"
    pq.write_table(pq.read_table(shard).drop_columns(["std_32"]), shard)
    said = json.loads(shard.with_suffix(".json").read_text()) | {"bytes": shard.stat().st_size}
    shard.with_suffix(".json").write_text(json.dumps(said))
    with pytest.raises(IcomError, match=r"00000.parquet has no column std_32 \(it has number, key, caption"):
        opened(folder).read(0)


def test_damaged_set(make: Callable[..., Path], icom: Icom) -> None:
    folder = make()
    (folder / latent_set.SET).write_bytes(b"no")
    assert_message(icom("data", "verify", str(folder)), 1, f"{folder / latent_set.SET} is damaged (")


def test_damaged_pictures(icom: Icom, photos: Path, tmp_path: Path) -> None:
    """Left out and named, up to a share; the share is known across commands."""
    broken = tmp_path / "photos"
    shutil.copytree(photos, broken)
    (broken / "2.png").write_bytes(b"no picture")
    words = arguments(broken, tmp_path / "latents")
    result = icom(*words)
    assert_message(result, 1, "left out: 2.png:", "1 of 7 samples", "only 1.00% may be (--max_damaged_share)")
    result = icom(*words)
    assert_message(result, 1, "1 of 7 samples")
    assert "0 of 4 shards to make" in result.out
    result = icom(*words, "--max_damaged_share", "0.2")
    assert (result.code, "6 pictures in 4 shards" in result.out, "1 damaged ones left out" in result.out) == (0,) + (
        True,
    ) * 2, result
    source = opened(tmp_path / "latents")
    assert [source.read(number).key for number in range(len(source))] == [f"{n}.png" for n in (0, 1, 3, 4, 5, 6)]
    assert [len(run) for run in source.runs] == [2, 1, 2, 1]


# Reading.


@pytest.mark.parametrize("shards", FORMATS)
def test_threads_read_what_one_reads(make: Callable[..., Path], shards: str) -> None:
    """More shards than a thread keeps open, in any order."""
    count = WINDOW + 8
    source = opened(make(of=f"synthetic:{count}", samples_per_shard=1, resolution=16, format=shards, batch_size=1))
    numbers = [random.Random(1).randrange(count) for _ in range(200)]

    def read(number: int) -> tuple[str, float]:
        record = source.read(number)
        assert record.latents is not None
        return record.key, float(record.latents.mean.sum())

    expected = {number: read(number) for number in range(count)}
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, numbers)) == [expected[number] for number in numbers]
    assert len(set(expected.values())) == count


def test_choice_between_crops_and_mirrors(make: Callable[..., Path]) -> None:
    """All are as likely; a training that does not mirror takes none that are."""
    latents = opened(make(crops_per_picture=2, random_flip=True)).read(1).latents
    assert latents is not None
    words = np.random.default_rng(0).integers(0, 2**64, (400, 3), dtype=np.uint64).tolist()
    for random_flip in (True, False):
        found = {(place, mirror): 0 for place in (0, 1) for mirror in (0, 1)}
        for one in words:
            chosen = latents.choose(one, random_flip=random_flip)
            (match,) = [at for at in found if torch.equal(latents.mean[at], chosen.mean)]
            assert torch.equal(latents.std[match], chosen.std)
            found[match] += 1
        each = 100 if random_flip else 200
        assert all(abs(times - each) < 50 for (_, mirror), times in found.items() if random_flip or mirror == 0), found
        assert random_flip or found[0, 1] == found[1, 1] == 0


def test_order_does_not_depend_on_the_place(make: Callable[..., Path], tmp_path: Path) -> None:
    folder = make()
    shutil.copytree(folder, tmp_path / "copy")
    assert opened(folder).digest == opened(tmp_path / "copy").digest
    assert opened(make("other", seed=1)).digest != opened(folder).digest


# Bad input.


def test_other_options_into_the_same_folder(make: Callable[..., Path], icom: Icom, photos: Path) -> None:
    folder = make()
    before = content(folder)
    result = icom(*arguments(photos, folder, seed=1, resolution=64))
    assert_message(
        result, 1, "made otherwise: resolutions ((32,) | (64,)), seed (0 | 1), shapes", "another --output_dir"
    )
    assert content(folder) == before


def test_latents_of_latents(make: Callable[..., Path], icom: Icom, tmp_path: Path) -> None:
    result = icom(*arguments(make(), tmp_path / "again"))
    assert_message(result, 2, "holds latents already: name the pictures with --train_data_dir")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"resolution": 30}, "--resolution has to be a multiple of 8, not 30"),
        ({"part": "0/3"}, "--part has to be K/N"),
        ({"part": "4/3"}, "--part has to be K/N"),
        ({"samples_per_shard": 0}, "--samples_per_shard has to be at least 1"),
        ({"center_crop": True, "crops_per_picture": 2}, "A picture has one middle"),
        ({"seed": -1}, "--seed has to be between"),
    ],
)
def test_options_that_cannot_be(
    icom: Icom, photos: Path, tmp_path: Path, options: dict[str, object], said: str
) -> None:
    assert_message(icom(*arguments(photos, tmp_path / "latents", **options)), 2, said)
    assert not (tmp_path / "latents").exists()


def test_without_pyarrow(
    make: Callable[..., Path], icom: Icom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tars need none."""
    parquet = make("parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    advice = "needs pyarrow, which comes with the extra `data`"
    assert_message(icom(*arguments("synthetic:3", tmp_path / "latents")), 1, f"--format parquet {advice}")
    assert_message(icom(*finetune(tmp_path / "out", parquet)), 1, f"Reading the latents in {parquet} {advice}")
    assert opened(make("tar", format="tar")).read(0).latents is not None


def test_folder_without_latents(icom: Icom, photos: Path) -> None:
    assert_message(icom("data", "verify", str(photos)), 1, "No latents in", "`icom data precompute` makes them")


# Training on them.


def finetune(output: Path, data: Path, **options: object) -> list[str]:
    words = ["finetune", f"--train_data_dir={data}", f"--output_dir={output}"]
    values = {"resolution": 32, "max_train_steps": 4, "train_batch_size": 2, "seed": 1, "mixed_precision": "no"}
    for name, value in (values | {"report_to": "none", "caption_dropout_rate": 0.4} | options).items():
        words.append(f"--{name}" if value is True else f"--{name}={value}")
    return words


def losses(output: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("shards", ["parquet", long("tar")])
def test_training_on_latents_has_the_losses_of_training_on_pictures(
    make: Callable[..., Path], icom: Icom, photos: Path, tmp_path: Path, shards: str
) -> None:
    options: dict[str, object] = {"center_crop": True, "random_flip": True}
    # A shard for each picture: in a folder, too, each lies for itself, so that their order is the same.
    latents = make(resolution=[32, 64], format=shards, dtype="float32", samples_per_shard=1, **options)
    for name, data in (("pictures", photos), ("latents", latents)):
        result = icom(*finetune(tmp_path / f"of-{name}", data, **options))
        assert result.code == 0, result
    assert losses(tmp_path / "of-latents") == pytest.approx(losses(tmp_path / "of-pictures"), rel=1e-5)


def test_training_refuses_latents_that_do_not_fit(make: Callable[..., Path], icom: Icom, tmp_path: Path) -> None:
    latents = make()
    other = tmp_path / "other model"
    shutil.copytree(BUNDLE, other)
    (weights,) = (other / "vae").glob("*.safetensors")
    tensors = load_file(weights)
    tensors["quant_conv.bias"] += 1e-3
    save_file(tensors, weights, metadata={"format": "pt"})
    out = tmp_path / "out"
    for code, options, said in (
        (1, {"pretrained_model_name_or_path": other}, "made with another VAE (bundled) than that of"),
        (2, {"resolution": 64}, "are of 32 px, not of 64: give --resolution 32, or precompute them at 64"),
        (2, {"random_flip": True}, "were precomputed without --random_flip"),
        (2, {"center_crop": True}, "were precomputed without --center_crop"),
        (2, {"max_train_samples": 3}, "choose pictures: give them to `icom data precompute`"),
        (2, {"train_text_encoder": True}, "holds states of the frozen text encoder. Give the pictures"),
    ):
        assert_message(icom(*finetune(out, latents, **options)), code, said)  # type: ignore[arg-type]
    (latents / "00001.parquet").unlink()
    assert_message(icom(*finetune(out, latents)), 1, "of 4 shards 1 are missing")
