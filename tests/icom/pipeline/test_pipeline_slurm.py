"""The pipeline as job arrays of a real Slurm, each after the one before. Guards icom.pipeline.jobs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support import slurm
from tests.support.picture_server import caption
from tests.support.slurm import Box

COUNT = 16


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory, hosts_possible: None) -> Iterator[Box]:
    if lacking := slurm.missing():
        pytest.skip(
            f"no Slurm here: it lacks {', '.join(lacking)} (make test installs it, as root on Debian or Ubuntu)"
        )
    with slurm.slurm(2, tmp_path_factory.mktemp("slurm"), cpus=4) as made:
        yield made


def states(box: Box) -> dict[str, list[str]]:
    """Stage -> parts, whole, unfinished, failed, not begun."""
    said = box.icom("data", "pipeline", "pipeline.yaml", "--state")
    assert said.returncode == 0, said
    return {line.split()[0]: line.split()[1:] for line in said.stdout.splitlines()[1:] if len(line.split()) >= 6}


def submitted(said: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Stage -> number of its job."""
    assert said.returncode == 0, said
    return {stage: number for number, stage in re.findall(r"^icom: job (\d+): (\w+)", said.stdout, re.MULTILINE)}


def logs(box: Box) -> str:
    return "\n".join(f"{path.name}\n{path.read_text()}" for path in sorted((box.shared / "work").rglob("*.log")))


def in_queue(box: Box) -> str:
    return box.run("squeue", "--noheader", "--array", "--format=%i %j %T %r").stdout


@pytest.fixture
def server(box: Box) -> Iterator[tuple[str, Path]]:
    """The address of one on the first host, and the file that holds its pictures below /held/ back."""
    held = box.shared / "held"
    held.touch()
    words = [sys.executable, "-m", "tests.support.picture_server", box.hosts[0].address, held]
    with box.hosts[0].start(words, box.environment) as running:
        assert running.stdout
        yield running.stdout.readline().strip(), held
        running.kill()


@pytest.mark.long
def test_arrays_after_each_other_and_a_part_that_is_killed(box: Box, server: tuple[str, Path]) -> None:
    """Its array fails, what would follow is cancelled; done again by its name, all goes on to the training's end."""
    address, held = server
    rows = [{"url": f"{address}/{'held/' if n == 6 else ''}{n}.png", "caption": caption(n)} for n in range(COUNT)]
    (box.shared / "urls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "output_dir": "work",
        "launcher": "slurm",
        "slurm": {"cpus_per_task": 1, "max_requeues": 0},
        "download": {
            **{"source": "urls.jsonl", "parts": 3, "samples_per_shard": 4, "allow_private_addresses": True},
            **{"timeout": 600, "slurm": {"at_once": 2}},
        },
        "reorganise": {"samples_per_shard": 5, "parts": 2},
        "index": {},
        "precompute": {"resolution": [32], "samples_per_shard": 4},
        "train": {
            **{"resolution": 32, "max_train_steps": 2, "train_batch_size": 1, "seed": 1, "mixed_precision": "no"},
            **{"report_to": "none", "slurm": {"nodes": 1}},
        },
    }
    (box.shared / "pipeline.yaml").write_text(yaml.safe_dump(content))
    icom = ("data", "pipeline", "pipeline.yaml")

    marks = box.shared / "work/marks/download"
    jobs = submitted(box.icom(*icom))
    assert list(jobs) == ["download", "reorganise", "index", "precompute", "train"]
    wanted = ["whole", "unfinished", "whole"]
    box.wait(lambda: [json.loads(path.read_text())["state"] for path in sorted(marks.glob("*.json"))] == wanted)
    assert in_queue(box).count("Dependency") == 5  # two parts of reorganise, and one of each other
    again = box.icom(*icom)
    assert again.returncode == 1 and "is in the queue" in again.stdout + again.stderr, again
    (part,) = [pid for host in box.hosts for pid in host.processes(r"^\S*python\S* -m icom data .* --part 2\s*$")]
    os.kill(part, signal.SIGKILL)
    box.wait(lambda: not in_queue(box))
    assert states(box) == {
        "download": ["3", "2", "(1,3)", "1", "(2)", "–", "–"],
        **{name: [parts, *"–––", parts] for name, parts in zip(list(jobs)[1:], "2111", strict=True)},
    }

    held.unlink()
    jobs = submitted(box.icom(*icom, "download.redo=2"))
    assert list(jobs) == ["download", "reorganise", "index", "precompute", "train"]
    box.wait(lambda: not in_queue(box))
    assert all(row[1] == row[0] for row in states(box).values()), logs(box)
    numbers = {path.name for path in (box.shared / "work/slurm").glob(f"download-{jobs['download']}_*.log")}
    assert numbers == {f"download-{jobs['download']}_2.log"}
    said = "".join(path.read_text() for path in (box.shared / "work/train").glob("slurm-*.log"))
    assert "16 pictures" in logs(box) and "total batch 1 (1 x 1 processes" in said, logs(box)
    assert (box.shared / "work/train/current_pipeline/model_index.json").exists()
    assert "nothing to do" in box.icom(*icom).stdout
