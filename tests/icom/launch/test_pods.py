"""The pods of our manifests, run by podman with the files of this machine: they train as mpirun does, and come back.

Guards icom.launch.kubernetes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.support.command import ROOT, Result, train_arguments
from tests.support.containers import Store, missing, store
from tests.support.hosts import Cluster, cluster
from tests.support.pods import JobRun, Nodes

IMAGE = "localhost/icom:files"
BINDS = sorted({Path("/usr"), ROOT, Path(sys.prefix), Path(sys.base_prefix).resolve()} - {Path("/")})
"""The machine's own Python, environment and repository."""


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


def start(
    icom: Callable[..., Result], containers: Store, hosts: list[Any], volume: Path, *flags: str, **options: object
) -> JobRun:
    """Start the Job that `icom launch kubernetes` prints."""
    arguments = train_arguments(**{"output_dir": "/data/out", "max_train_steps": 6} | options)[1:]
    said = icom(
        *("launch", "kubernetes", "--dry_run", "--image", IMAGE, "--pvc", "claim", "--nodes", str(len(hosts))),
        *flags,
        "--",
        *arguments,
    )
    assert said.code == 0, said.err
    objects = list(yaml.safe_load_all(said.out))
    spec = objects[-1]["spec"]["template"]["spec"]
    for number, bind in enumerate(BINDS):  # what the image has not
        spec["volumes"].append({"name": f"bind{number}", "hostPath": {"path": str(bind)}})
        mount = {"name": f"bind{number}", "mountPath": str(bind), "readOnly": True}
        spec["containers"][0]["volumeMounts"].append(mount)
    folder = volume.parent / "pods"
    folder.mkdir()
    return Nodes(containers, hosts, folder, {"claim": volume}).run_job(objects)


def rows(folder: Path) -> torch.Tensor:
    return load_file(folder / "learned_embeds.safetensors")["<robot>"]


def test_two_pods_train_as_one_process(
    icom: Callable[..., Result], train: Callable[..., Result], containers: Store, hosts: Cluster, volume: Path
) -> None:
    job = start(icom, containers, hosts[:2], volume)
    assert job.wait() == "Complete", job.logs
    assert "(1 x 2 processes" in job.logs
    alone = train(output_dir=volume.parent / "alone", train_batch_size=2, max_train_steps=6)
    assert alone.code == 0
    torch.testing.assert_close(rows(volume / "out"), rows(volume.parent / "alone"), rtol=1e-4, atol=1e-6)
