"""The pods of our manifests, run by podman with the files of this machine: they train as mpirun does, and come back.

Guards icom.launch.kubernetes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.support.command import ROOT, Result
from tests.support.containers import Store, missing, store
from tests.support.hosts import Cluster, cluster
from tests.support.mpi import training_options
from tests.support.pods import JobRun, Nodes
from tests.support.waiting import wait_until

IMAGE, EMPTY = "localhost/icom:files", "localhost/empty:none"
BINDS = sorted({Path("/usr"), ROOT, Path(sys.prefix), Path(sys.base_prefix).resolve()} - {Path("/")})
"""The machine's own Python, environment and repository."""


RTOL, ATOL = 1e-4, 1e-6
"""The order in which float32 gradients are summed differs; losses and rows are of the order of 1 and 0.01."""


class Learned(NamedTuple):
    """A run's losses, one for each step, and rows (vectors, width)."""

    losses: torch.Tensor
    rows: torch.Tensor


def same(one: Learned, other: Learned) -> None:
    for ours, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=RTOL, atol=ATOL)


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    if lacking := missing():
        pytest.skip(f"containers cannot run on this machine: it lacks {', '.join(lacking)}")
    with store(tmp_path_factory.mktemp("containers") / "store") as made:
        variables = {
            "PATH": f"{Path(sys.prefix, 'bin')}:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",  # all pods share this machine's cores
            "HF_ENDPOINT": "http://127.0.0.1:9",
        }
        made.make_empty_image(IMAGE, BINDS, variables)
        made.run("podman", "tag", IMAGE, EMPTY)
        yield made


@pytest.fixture(scope="module")
def hosts(hosts_possible: None) -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """The claim's, which the pods' group may write to (fsGroup)."""
    folder = tmp_path / "volume"
    folder.mkdir()
    os.chown(folder, 1000, 1000)
    return folder


@pytest.fixture
def start(
    icom: Callable[..., Result], containers: Store, hosts: Cluster, volume: Path
) -> Iterator[Callable[..., JobRun]]:
    """Start the Job that `icom launch kubernetes` prints: `start(3, max_train_steps=9)` on three nodes."""
    started: list[Nodes] = []

    def run(count: int, *, image: str = IMAGE, **options: object) -> JobRun:
        launch = ["--dry_run", "--image", image, "--pvc", "claim", "--nodes", str(count), "--max_restarts", "3"]
        words = training_options({"output_dir": "/data/out"} | options)
        said = icom("launch", "kubernetes", *launch, "--", *words)
        assert said.code == 0, said.err
        objects = list(yaml.safe_load_all(said.out))
        spec = objects[-1]["spec"]["template"]["spec"]
        for number, bind in enumerate(BINDS if image == IMAGE else []):
            spec["volumes"].append({"name": f"bind{number}", "hostPath": {"path": str(bind)}})
            mount = {"name": f"bind{number}", "mountPath": str(bind), "readOnly": True}
            spec["containers"][0]["volumeMounts"].append(mount)
        started.append(Nodes(containers, hosts[:count], volume.parent, {"claim": volume}))
        return started[-1].run_job(objects)

    yield run
    for nodes in started:
        nodes.close()


def learned(folder: Path) -> Learned:
    """A run's losses and rows."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    rows = load_file(folder / "learned_embeds.safetensors")["<concept>"]
    return Learned(torch.tensor([step["loss"] for step in steps]), rows)


def steps_of(folder: Path) -> int:
    """How many steps a run has done so far."""
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def alone(icom: Callable[..., Result], folder: Path, batch: int, **options: object) -> Learned:
    """The same run in one process, here."""
    words = training_options({"output_dir": folder, "train_batch_size": batch} | options)
    assert icom("train", *words).code == 0
    return learned(folder)


@pytest.mark.long
def test_two_pods_train_as_one_process(start: Callable[..., JobRun], icom: Callable[..., Result], volume: Path) -> None:
    """And so as mpirun does on hosts: tests/icom/launch/test_training_on_hosts.py."""
    config = volume.parent / "run.yaml"  # becomes a ConfigMap
    config.write_text("num_vectors: 2\n")
    job = start(2, config=config)
    assert job.wait() == "Complete", job.logs
    assert "(1 x 2 processes" in job.logs
    same(learned(volume / "out"), alone(icom, volume.parent / "alone", 2, num_vectors=2))
    assert {file.stat().st_uid for file in volume.rglob("*")} == {1000}


@pytest.mark.long
def test_a_killed_pod_comes_back_and_the_job_goes_on(
    start: Callable[..., JobRun], icom: Callable[..., Result], volume: Path
) -> None:
    """Rank 0's, where the others' store is. Another one's is killed by test_failures_on_hosts.py."""
    victim = 0
    options = {"max_train_steps": 60, "checkpointing_steps": 5}
    job = start(3, **options)
    wait_until(lambda: steps_of(volume / "out") >= 12 or bool(job.look()))
    first = dict(job.pods)
    first[victim].signal("KILL")
    assert job.wait() == "Complete", job.logs
    # The others saw it, and every pod came back once.
    codes = [first[index].code for index in range(3)]
    assert codes == [137 if index == victim else 75 for index in range(3)], job.logs
    assert len(job.nodes.pods) == 6 and all(job.pods[index].code == 0 for index in range(3)), job.logs
    assert "lost " in job.logs
    same(learned(volume / "out"), alone(icom, volume.parent / "alone", 3, **options))


@pytest.mark.long
def test_a_pod_that_is_told_to_go_saves_and_comes_back(
    start: Callable[..., JobRun], icom: Callable[..., Result], volume: Path
) -> None:
    """SIGTERM, as the kubelet sends it when a node is drained."""
    options = {"max_train_steps": 60, "checkpointing_steps": 1000}
    job = start(2, **options)
    wait_until(lambda: steps_of(volume / "out") >= 12 or bool(job.look()))
    job.pods[0].signal("TERM")
    assert job.wait() == "Complete", job.logs
    assert len(job.nodes.pods) == 4 and list((volume / "out").glob("checkpoint-*")), job.logs
    same(learned(volume / "out"), alone(icom, volume.parent / "alone", 2, **options))


@pytest.mark.long
@pytest.mark.parametrize(
    ("image", "options", "code", "said"),
    [
        (IMAGE, {"collectives": "mpi"}, 2, "--collectives mpi cannot be used here"),
        (EMPTY, {}, 128, '"icom": executable file not found'),
    ],
)
def test_what_cannot_work_is_not_started_again(
    image: str, options: dict[str, object], code: int, said: str, start: Callable[..., JobRun]
) -> None:
    """Wrong options, and an image without icom."""
    job = start(1, image=image, **options)
    assert job.wait() == "Failed"
    (pod,) = job.nodes.pods
    assert pod.code == code and said in pod.log, pod.log
