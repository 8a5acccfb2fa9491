"""Encoders in workers of Ray give what the process itself gives, whatever becomes of them, and leave nothing behind.

Guards icom.data.ray_workers, icom.data.ray_driver, icom.data.ray_encoder, icom.data.precompute_work and
icom.training.finetune_online.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image
from safetensors.torch import load_file

from icom.config.encoders import EncoderOptions
from icom.data.ray_workers import RayWorkers, Stretch
from icom.errors import IcomError
from tests.support.command import ROOT, Result, assert_message, finetune_arguments, start_process
from tests.support.ranks import Ranks
from tests.support.ray_cluster import LOOPBACK, SIZE
from tests.support.waiting import wait_until

Icom = Callable[..., Result]
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (extra `ray`)")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven pictures with captions, one of them damaged."""
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for number in range(11):
        blocks = generator.integers(0, 256, (5, 5, 3), dtype=np.uint8)
        picture = Image.fromarray(blocks).resize((70 + 3 * number, 80), Image.Resampling.BICUBIC)
        picture.save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(f"a photo of thing {number}")
    damaged = folder / "04.png"
    damaged.write_bytes(damaged.read_bytes()[:2000])
    return folder


def cluster(*version: str) -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.ray_cluster", *version],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout
        yield process.stdout.readline().strip()
        process.communicate()


@pytest.fixture(scope="module")
def shared_ray() -> Iterator[str]:
    """The address of a Ray of three cores."""
    yield from cluster()


@pytest.fixture
def ray_address(shared_ray: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in LOOPBACK.items():
        monkeypatch.setenv(name, value)
    return shared_ray


def arguments(photos: Path, output: Path, **options: object) -> list[str]:
    chosen: dict[str, object] = {
        "train_data_dir": photos,
        "output_dir": output,
        "resolution": 64,
        "train_batch_size": 2,
        "max_train_steps": 16,
        "max_damaged_share": 0.5,
        "checkpointing_steps": 1000,
    }
    return finetune_arguments(**(chosen | options))


def rows(output: Path) -> list[dict[str, Any]]:
    log = output / "metrics.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def has_steps(output: Path, count: int, process: subprocess.Popen[str]) -> Callable[[], bool]:
    def so_many() -> bool:
        assert process.poll() is None, process.communicate()
        return len(rows(output)) >= count

    return so_many


def of_ray(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that a command has started for Ray; they are of the session that it gave their first."""
    (driver,) = psutil.Process(process.pid).children()
    return [one for one in psutil.process_iter() if one.pid != process.pid and session(one) == driver.pid]


def session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return 0


def actors(of: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in of if any("MapWorker" in word for word in one.cmdline())]


def folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("icom-ray-*"))


def wait_for_end(of: list[psutil.Process]) -> None:
    """Ray's processes end by themselves."""
    wait_until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in of))


@needs_ray
@pytest.mark.long
def test_losses_have_the_bits_of_training_alone_although_a_worker_is_killed(
    icom: Icom, photos: Path, tmp_path: Path
) -> None:
    """Damaged pictures are replaced and counted alike. Nobody beyond this machine reaches Ray, and nothing stays."""
    before = folders()
    alone, online = tmp_path / "alone", tmp_path / "online"
    held = {"num_validation_samples": 2, "validation_steps": 8}
    assert icom(*arguments(photos, alone, **held)).code == 0
    process = start_process(*arguments(photos, online, encoder_workers=2, **held))
    wait_until(has_steps(online, 2, process))
    started = of_ray(process)
    addresses = {c.laddr.ip for one in started for c in one.net_connections("inet") if c.status == "LISTEN"}
    assert addresses
    assert {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}
    actors(started)[0].kill()
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "2 workers of Ray" in out
    assert "04.png" in err
    wanted, found = rows(alone), rows(online)
    assert [(row["loss"], row["damaged"], row["grad_norm"]) for row in found] == [
        (row["loss"], row["damaged"], row["grad_norm"]) for row in wanted
    ]
    assert wanted[-1]["damaged"] > 0
    assert (online / "validation.jsonl").read_text() == (alone / "validation.jsonl").read_text()
    one, other = (load_file(folder / "checkpoint-16" / "state.safetensors") for folder in (alone, online))
    assert all((one[name] == other[name]).all() for name in one)
    wait_for_end(started)
    assert folders() == before


@needs_ray
@pytest.mark.long
def test_stopped_by_ctrl_c_and_gone_on_with_two_processes(
    icom: Icom, photos: Path, tmp_path: Path, ray_address: str
) -> None:
    """Each of the two has its own workers, in one cluster."""
    alone, online = tmp_path / "alone", tmp_path / "online"
    before = folders()
    assert icom(*arguments(photos, alone)).code == 0
    ray = {"encoder_workers": 1, "ray_address": ray_address}
    process = start_process(*arguments(photos, online, **ray))
    wait_until(has_steps(online, 3, process))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130, err
    stopped = len(rows(online))
    assert (online / f"checkpoint-{stopped}").is_dir()
    resumed = {"resume_from_checkpoint": "latest", "train_batch_size": 1}
    two = Ranks(tmp_path, 2, "-m", "icom", *arguments(photos, online, **ray, **resumed))
    assert [result.code for result in two.results()] == [0, 0]
    assert [row["step"] for row in rows(online)] == list(range(1, 17))
    assert [row["loss"] for row in rows(online)] == pytest.approx([row["loss"] for row in rows(alone)], abs=1e-6)
    assert folders() == before


@needs_ray
@pytest.mark.long
def test_lost_ray_ends_the_run_so_that_it_is_started_again(photos: Path, tmp_path: Path) -> None:
    before, output = folders(), tmp_path / "out"
    process = start_process(*arguments(photos, output, max_train_steps=5000, encoder_workers=1))
    wait_until(has_steps(output, 2, process))
    started = of_ray(process)
    (raylet,) = [one for one in started if one.name() == "raylet"]
    raylet.kill()
    _, err = process.communicate()
    assert_message(Result(process.returncode, "", err), 75, "lost", "--resume_from_checkpoint latest")
    assert (output / f"checkpoint-{len(rows(output))}").is_dir()
    wait_for_end(started)
    assert folders() == before


@needs_ray
@pytest.mark.long
def test_killed_training_leaves_nothing(photos: Path, tmp_path: Path) -> None:
    before, output = folders(), tmp_path / "out"
    process = start_process(*arguments(photos, output, max_train_steps=5000, encoder_workers=1))
    wait_until(has_steps(output, 1, process))
    started = of_ray(process)
    assert actors(started)
    process.kill()
    process.communicate()
    wait_for_end(started)
    wait_until(lambda: folders() == before)


@needs_ray
@pytest.mark.long
def test_precomputed_shards_are_the_same_bytes(icom: Icom, photos: Path, tmp_path: Path, ray_address: str) -> None:
    """Two resolutions, mirrors, batches that shards cut short, and a damaged picture."""
    made = []
    for name, more in (("alone", []), ("ray", ["--encoder_workers=2", f"--ray_address={ray_address}"])):
        words = ["data", "precompute", f"--train_data_dir={photos}", f"--output_dir={tmp_path / name}"]
        words += ["--resolution", "32", "64", "--random_flip", "--samples_per_shard=4", "--batch_size=3"]
        words += ["--max_damaged_share=0.5", "--format=tar", *more]
        result = icom(*words)
        assert result.code == 0, result
        made.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert made[0] == made[1]
    assert len(made[0]) == 7


def options(**changed: Any) -> EncoderOptions:
    return dataclasses.replace(EncoderOptions(encoder_workers=2), **changed)


@needs_ray
@pytest.mark.long
def test_all_come_once_and_in_order_and_only_some_are_made_ahead(ray_address: str, tmp_path: Path) -> None:
    """More than one stretch; the last batch of each is cut. A worker is killed in the middle."""
    log = tmp_path / "log"
    job = {"start": "tests.support.ray_cluster:slow_bytes", "log": str(log)}
    work = [Stretch(0, 600, 4, 3), Stretch(1001, 1004, 2, 2)]
    wanted = [(start, start + 3) for start in range(0, 600, 4)] + [(1001, 1003), (1003, 1004)]
    with RayWorkers(options(ray_address=ray_address), job, work, SIZE) as workers:
        got = [next(workers) for _ in range(10)]
        lines = [0]
        while lines[-1] != (now := len(log.read_text().splitlines())) or now <= 10:
            lines.append(now)
            signal.sigtimedwait([], 3)
        assert now < 10 + 40
        os.kill(int(log.read_text().splitlines()[-1].split()[1]), signal.SIGKILL)
        got += list(workers_until(workers, len(wanted) - 10))
    assert [tuple(map(int, content.split(b" ")[:2])) for content in got] == wanted


def workers_until(workers: RayWorkers, count: int) -> Iterator[bytes]:
    for _ in range(count):
        yield next(workers)


# What cannot work.


@needs_ray
@pytest.mark.long
def test_a_ray_of_another_version_and_what_is_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LOOPBACK.items():
        monkeypatch.setenv(name, value)
    for address in cluster("2.9.3"):
        with pytest.raises(IcomError, match=r"cannot be used: .*ersion.* 2\.9\.3") as error:
            RayWorkers(options(ray_address=address), {}, [Stretch(0, 1, 1, 1)], 1)
        assert error.value.exit_code == 1
    assert not folders()


@needs_ray
@pytest.mark.long
def test_more_cores_than_any_machine_has(ray_address: str) -> None:
    with pytest.raises(IcomError, match=r"No machine of Ray's has 64 cores, .* They have: 3 cores, 0 GPUs"):
        RayWorkers(options(ray_address=ray_address, encoder_cpus=64), {}, [Stretch(0, 1, 1, 1)], 1)


@needs_ray
def test_address_where_nobody_answers(icom: Icom, photos: Path, tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        result = icom(*arguments(photos, tmp_path / "out", encoder_workers=1, ray_address=address))
    assert_message(result, 1, f"Nothing answers at --ray_address {address} (", "ray start --head")


def test_without_ray(icom: Icom, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # what Python itself takes for "cannot be imported"
    said = ["--encoder_workers needs ray, which comes with the extra `ray`", "python -m pip install -e '.[ray]'"]
    assert_message(icom(*arguments(photos, tmp_path / "out", encoder_workers=1)), 1, *said)
    words = ["data", "precompute", f"--train_data_dir={photos}", f"--output_dir={tmp_path / 'kept'}"]
    assert_message(icom(*words, "--encoder_workers=1"), 1, *said)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"encoder_workers": -1}, "--encoder_workers must not be negative"),
        ({"encoder_workers": 1, "encoder_cpus": 0}, "--encoder_cpus has to be at least 1"),
        ({"encoder_workers": 1, "encoder_gpus": 1.5}, "--encoder_gpus has to be a share of a GPU"),
        ({"encoder_workers": 1, "encoder_gpus": "nan"}, "--encoder_gpus has to be a share of a GPU"),
        ({"encoder_workers": 1, "ray_address": "head"}, "--ray_address has to be HOST:PORT or auto, not 'head'"),
        ({"encoder_workers": 1, "ray_address": "ray://head:10001"}, "Ray's client protocol is not for this"),
        ({"encoder_workers": 1, "train_text_encoder": True}, "need a frozen text encoder"),
        ({"ray_address": "head:6379"}, "--ray_address is of workers with the encoders: add --encoder_workers"),
        ({"encoder_gpus": 1}, "--encoder_gpus is of workers with the encoders"),
    ],
)
def test_options_that_cannot_work(icom: Icom, tmp_path: Path, wrong: dict[str, object], message: str) -> None:
    result = icom(*finetune_arguments(output_dir=tmp_path / "out", **wrong))
    assert_message(result, 2, message)


def test_latents_need_no_encoders(icom: Icom, photos: Path, tmp_path: Path) -> None:
    latents = tmp_path / "latents"
    words = [f"--train_data_dir={photos}", f"--output_dir={latents}", "--max_damaged_share=0.5", "--format=tar"]
    assert icom("data", "precompute", *words).code == 0
    result = icom(*arguments(latents, tmp_path / "out", encoder_workers=1))
    assert_message(result, 2, "holds latents", "Drop --encoder_workers")
    shutil.rmtree(latents)
