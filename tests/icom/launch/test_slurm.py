"""`icom launch slurm` with a real Slurm on hosts whose node names do not resolve: training, and going on by itself.

Guards icom.launch.slurm, icom.launch.look, and how icom.training ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from icom.cli import parse
from icom.config.finetune import FinetuneConfig
from icom.config.train import TrainConfig
from icom.launch.launch import training_config
from icom.launch.slurm.array import read_array
from tests.support import slurm
from tests.support.command import ROOT, Result, Run, assert_message, finetune_arguments, train_arguments
from tests.support.mpi import training_options
from tests.support.slurm import Box

# The order in which float32 gradients are summed differs.
RTOL, ATOL = 1e-4, 1e-6
# A partition whose jobs go first, and one whose jobs get time when they have to give way.
PARTITIONS = """\
PartitionName=urgent Nodes=ALL PriorityTier=10
PartitionName=graced Nodes=ALL PriorityTier=1 GraceTime=30
"""
PLUGIN = ROOT / "tests/support/pyxis.c"
HEADER = Path("/usr/include/slurm/spank.h")


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory, hosts_possible: None) -> Iterator[Box]:
    if lacking := slurm.missing():
        pytest.skip(
            f"no Slurm here: it lacks {', '.join(lacking)} (make test installs it, as root on Debian or Ubuntu)"
        )
    with slurm.slurm(3, tmp_path_factory.mktemp("slurm"), cpus=4, names="compute-{}", more=PARTITIONS) as made:
        yield made


@pytest.fixture(autouse=True)
def _all_free(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test finds no other's jobs, and all nodes up."""
    yield
    if "box" in request.fixturenames:
        box: Box = request.getfixturevalue("box")
        box.run("scancel", "--user=root")
        box.wait(lambda: not box.run("squeue", "--noheader").stdout and box.is_idle())


def launch(
    box: Box, *words: str, nodes: int = 2, options: dict[str, object] | None = None
) -> subprocess.CompletedProcess[str]:
    """`icom launch slurm`, training 2 pictures a step in all on the bundled model."""
    training = training_options({"train_batch_size": 1} | (options or {}))
    return box.icom("launch", "slurm", "--nodes", str(nodes), "--cpus_per_task", "1", *words, "--", *training)


def number(said: subprocess.CompletedProcess[str]) -> str:
    """Of the job that was submitted."""
    match = re.search(r"^icom: job (\d+) \(", said.stdout, re.MULTILINE)
    assert said.returncode == 0 and match, said
    return match[1]


def rows(folder: Path) -> torch.Tensor:
    return load_file(folder / "learned_embeds.safetensors")["<concept>"]


def steps(folder: Path) -> int:
    """How many a run has written so far."""
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def log(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("slurm-*.log"))


def end(box: Box, job: str) -> dict[str, str]:
    """Wait for a job's end, with all that it did in the queue."""
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def is_over() -> bool:
        return box.state(job) in ended

    box.wait(is_over)
    return box.values(job)


# Thin: what `make test` runs.


def test_trains_on_three_nodes_as_one_process_does(box: Box, train: Run, tmp_path: Path) -> None:
    """And so as mpirun does on the same hosts: test_training_on_hosts.py."""
    learned = launch(box, "--wait", nodes=3, options={"output_dir": "three", "train_batch_size": 2})
    assert learned.returncode == 0, learned
    assert "total batch 6 (2 x 3 processes" in learned.stdout  # its log
    alone = training_options({"output_dir": tmp_path, "train_batch_size": 6})
    assert train(**dict(word.removeprefix("--").split("=", 1) for word in alone)).code == 0
    torch.testing.assert_close(rows(box.shared / "three"), rows(tmp_path), rtol=RTOL, atol=ATOL)


# What Slurm and the user may do to a job.


@pytest.fixture(scope="module")
def uninterrupted(box: Box) -> torch.Tensor:
    """What a run of 30 steps on two nodes learns."""
    said = launch(box, "--wait", options={"output_dir": "uninterrupted", "max_train_steps": 30})
    assert said.returncode == 0, said
    return rows(box.shared / "uninterrupted")


def urgent(box: Box) -> None:
    """A job that goes first, on all nodes."""
    words = ["sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    assert box.run(*words).returncode == 0


def unplug(box: Box) -> None:
    box.hosts[1].link_down()


def kill_slurmd(box: Box) -> None:
    """A node without its daemon goes on with its tasks. They stand still until Slurm has noticed, or they end first."""
    box.kill_slurmd(box.hosts[1])
    tasks = [pid for host in box.hosts for pid in host.processes(r"^\S*python\S* -m icom train")]
    assert len(tasks) == 2
    for pid in tasks:
        os.kill(pid, signal.SIGSTOP)
    box.wait(lambda: "down" in box.run("sinfo", "--noheader", "--format=%T").stdout)
    for pid in tasks:
        with contextlib.suppress(ProcessLookupError):  # Slurm may have ended it
            os.kill(pid, signal.SIGCONT)


INTERRUPTIONS: dict[str, tuple[str, int, Callable[[Box, str], object]]] = {
    "preempted": ("main", 1, lambda box, job: urgent(box)),
    "preempted, with time to save": ("graced", 2, lambda box, job: urgent(box)),
    "slurmd killed": ("main", 2, lambda box, job: kill_slurmd(box)),
    "node unplugged": ("main", 2, lambda box, job: unplug(box)),
}
"""What happens -> in which partition, to a job on how many nodes: two where one of them may miss it. The signal before
a time limit is test_time_limit's, a requeue by hand test_finetuning_goes_on_to_the_same_weights'."""


@pytest.mark.long
@pytest.mark.parametrize("what", INTERRUPTIONS)
def test_goes_on_by_itself_to_the_same_rows(what: str, box: Box, uninterrupted: torch.Tensor) -> None:
    partition, nodes, interrupt = INTERRUPTIONS[what]
    folder = box.shared / what.replace(" ", "-").replace(",", "")
    options: dict[str, object] = {"output_dir": folder.name, "max_train_steps": 30, "checkpointing_steps": 5}
    job = number(launch(box, "--partition", partition, nodes=nodes, options=options | {"train_batch_size": 2 // nodes}))
    box.wait(lambda: steps(folder) >= 6)
    try:
        interrupt(box, job)
        box.wait(lambda: int(box.values(job)["Restarts"]) > 0)
    finally:
        box.hosts[1].link_up()
        if what == "slurmd killed":
            box.start_slurmd(box.hosts[1])
    ended = end(box, job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), log(folder)
    said = log(folder)
    assert "resumed after step" in said
    if what == "node unplugged":
        assert "The job goes back into Slurm's queue, and on from the last checkpoint" in said
    rtol, atol = (0.0, 0.0) if nodes == 2 else (RTOL, ATOL)
    torch.testing.assert_close(rows(folder), uninterrupted, rtol=rtol, atol=atol)


@pytest.mark.long
def test_time_limit(box: Box) -> None:
    """Slurm's own signal, which comes 60 s before a limit of 2 minutes, or up to a minute earlier.

    On a machine that is so busy that training has not begun by then, a later turn saves.
    """
    folder = box.shared / "limited"
    options = {"output_dir": folder.name, "max_train_steps": 10**6, "checkpointing_steps": 10**6}
    job = number(launch(box, "--time", "2", options=options))
    box.wait(lambda: "resumed after step" in log(folder))
    assert int(box.values(job)["Restarts"]) > 0 and "back into the queue" in log(folder)


@pytest.mark.long
def test_scancel_stays_cancelled_and_saves(box: Box, uninterrupted: torch.Tensor) -> None:
    folder = box.shared / "cancelled"
    job = number(launch(box, options={"output_dir": folder.name, "max_train_steps": 30}))
    box.wait(lambda: steps(folder) >= 3)
    box.run("scancel", job)
    assert end(box, job)["JobState"] == "CANCELLED"
    box.wait(lambda: not box.run("squeue", "--noheader").stdout)
    assert [path.name for path in folder.glob("checkpoint-*")], log(folder)
    assert int(box.values(job)["Restarts"]) == 0
    # By hand, as `icom launch slurm` and the script say.
    again = box.run("sbatch", "--parsable", folder / "icom.sbatch").stdout.strip()
    assert end(box, again)["JobState"] == "COMPLETED"
    assert torch.equal(rows(folder), uninterrupted)


@pytest.mark.long
def test_restarts_end(box: Box) -> None:
    folder = box.shared / "often"
    options = {"output_dir": folder.name, "max_train_steps": 10**6}
    job = number(launch(box, "--max_requeues", "1", nodes=1, options=options))
    for resumed in (0, 1):
        box.wait(lambda count=resumed: log(folder).count("resumed after step") == count and steps(folder) > 3)
        before = steps(folder)
        box.wait(lambda count=before: steps(folder) > count)
        box.run("scancel", "--signal=TERM", job)
    ended = end(box, job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "143:0", "1")


@pytest.mark.long
def test_usage_error_is_not_tried_again(box: Box) -> None:
    """One that only the model can tell."""
    said = launch(box, "--wait", nodes=1, options={"output_dir": "wrong", "initializer_token": "zzyzxqj"})
    assert said.returncode == 2, said
    assert "zzyzxqj" in said.stdout
    (job,) = re.findall(r"job (\d+) \(", said.stdout)
    assert box.values(job)["Restarts"] == "0"


@pytest.mark.long
def test_finetuning_goes_on_to_the_same_weights(box: Box) -> None:
    """Raw weights, their mean and the optimizer's: requeued by hand in the middle, on two nodes."""
    steps_, every = 14, 4

    def submit(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        options = finetune_arguments(
            output_dir=name, max_train_steps=steps_, checkpointing_steps=every, use_ema=True, ema_decay=0.9
        )
        return box.icom("launch", "slurm", "--nodes", "2", "--cpus_per_task", "1", *words, "--", *options)

    def saved(folder: Path) -> dict[str, torch.Tensor]:
        return load_file(folder / f"checkpoint-{steps_}/state.safetensors")

    whole, folder = box.shared / "finetuned", box.shared / "finetuned-in-two"
    said = submit(whole.name, "--wait")
    assert said.returncode == 0 and "total batch 2 (1 x 2 processes" in said.stdout, said
    job = number(submit(folder.name))
    box.wait(lambda: steps(folder) >= every + 2)
    box.run("scontrol", "requeue", job)
    box.wait(lambda: int(box.values(job)["Restarts"]) > 0)
    ended = end(box, job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), log(folder)
    assert "resumed after step" in log(folder)
    found, wanted = saved(folder), saved(whole)
    assert found.keys() == wanted.keys() and {name.partition("/")[0] for name in wanted} >= {"parameter", "mean"}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    raw, mean = (next(wanted[name] for name in wanted if name.startswith(what)) for what in ("parameter/", "mean/"))
    assert not torch.equal(raw, mean)
    table = box.icom("report", folder.name, "--json").stdout
    assert [json.loads(line)["state"] for line in table.splitlines()] == ["done"]


# What else a job can be.


@pytest.mark.long
def test_two_jobs_on_one_node(box: Box) -> None:
    where = ("--ppn", "2", "--sbatch=--nodelist=compute-node0")
    folders = [box.shared / name for name in ("one", "other")]
    jobs = [
        number(launch(box, *where, nodes=1, options={"output_dir": f.name, "max_train_steps": 30})) for f in folders
    ]
    box.wait(lambda: [box.state(job) for job in jobs] == ["RUNNING"] * 2)
    assert [end(box, job)["JobState"] for job in jobs] == ["COMPLETED"] * 2, [log(folder) for folder in folders]
    assert torch.equal(rows(folders[0]), rows(folders[1]))


@pytest.mark.long
def test_array_with_a_run_that_fails(box: Box) -> None:
    file = box.shared / "runs.txt"
    (box.shared / "empty").mkdir()
    lines = ["--learning_rate 1e-3", "# the next one has no pictures", "--train_data_dir empty", "--seed 8"]
    file.write_text("\n".join(lines))
    words = ("--wait", "--array", "runs.txt%2")
    said = launch(box, *words, nodes=1, options={"output_dir": "sweep"})
    assert said.returncode == 1, said
    outcomes = [line.split() for line in said.stdout.splitlines() if line.startswith("sweep/")]
    assert [(line[0], line[1]) for line in outcomes] == [("sweep/0", "done"), ("sweep/1", "no"), ("sweep/2", "done")]
    learned = rows(box.shared / "sweep/0")
    assert not torch.equal(learned, rows(box.shared / "sweep/2"))

    # Once more, mended: the others are left alone.
    written = (box.shared / "sweep/0/learned_embeds.safetensors").stat().st_mtime_ns
    file.write_text("\n".join(lines).replace("empty", "bundled"))
    said = launch(box, *words, nodes=1, options={"output_dir": "sweep"})
    assert (said.returncode, "(1 run on 1 node, 1 process each; 2 are done already)" in said.stdout) == (0, True), said
    assert (box.shared / "sweep/0/learned_embeds.safetensors").stat().st_mtime_ns == written
    assert rows(box.shared / "sweep/1").shape == learned.shape

    again = launch(box, *words, nodes=1, options={"output_dir": "sweep"})
    assert "all 3 runs of runs.txt%2 are done: nothing was submitted" in again.stdout
    table = box.icom("report", "sweep", "--json").stdout
    assert [json.loads(line)["state"] for line in table.splitlines()] == ["done"] * 3


@pytest.mark.long
def test_container_options_reach_all_steps(tmp_path_factory: pytest.TempPathFactory, hosts_possible: None) -> None:
    """Pyxis's options, which a plugin of our own understands."""
    shared = tmp_path_factory.mktemp("slurm-pyxis")
    plugin, stack = shared / "pyxis.so", shared / "plugstack.conf"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", plugin, PLUGIN], check=True)
    stack.write_text(f"required {plugin}\n")
    with slurm.slurm(1, shared, more=f"PlugStackConfig={stack}\n") as box:
        image = "registry.example#icom:1"
        words = ("--container_image", image, "--container_mounts", f"{shared}:{shared},/data:/data:ro", "--wait")
        # A `python` that says what it got, in place of the container's.
        fake = box.shared / "bin/python"
        fake.parent.mkdir()
        fake.write_text('#!/bin/sh\necho "step $3: $STAND_IN_IMAGE | $STAND_IN_MOUNTS | $STAND_IN_WORKDIR"\n')
        fake.chmod(0o755)
        said = box.run(
            *(shlex.split("icom launch slurm --nodes 1 --cpus_per_task 1")),
            *(*words, "--", *training_options({"output_dir": "out"})),
            PATH=f"{fake.parent}:{box.environment['PATH']}",
        )
    expected = f"{image} | {shared}:{shared},/data:/data:ro | {shared}"
    assert said.stdout.count(expected) == 2, said


# Refused.


def test_output_folder_that_is_not_shared(box: Box) -> None:
    said = launch(box, "--wait", options={"output_dir": "/tmp/own"})
    assert said.returncode == 1, said
    text = " ".join(said.stdout.split())
    assert "no /tmp/own/icom.sbatch" in text and "an --output_dir that all nodes share" in text
    assert "Nothing was started" in text and "step/s" not in text


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--partition", "nowhere"), ("invalid partition", "There are the partitions main (3 nodes of 4 CPUs")),
        (("--nodes", "7"), ("not available", "main (3 nodes")),
        (("--cpus_per_task", "64"), ("not available",)),
        (("--sbatch=--no-such-thing=1",), ("unrecognized option",)),
    ],
)
def test_what_slurm_would_not_take(words: tuple[str, ...], parts: tuple[str, ...], box: Box) -> None:
    said = launch(box, *words, nodes=1, options={"output_dir": "refused"})
    assert_message(Result(said.returncode, said.stdout, said.stderr), 1, "would not take this job", *parts)
    assert box.run("squeue", "--noheader").stdout == ""


TRAINING = train_arguments(output_dir="out")[1:]


def test_no_slurm(icom: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = icom("launch", "slurm", "--nodes", "1", "--", *TRAINING)
    assert_message(result, 1, "There is no `sbatch` here", "login node", "--dry_run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--nodes", "0"), ("--nodes has to be at least 1",)),
        (("--time", "soon"), ("--time soon is no time limit", "1-12:00:00")),
        (("--max_requeues", "-1"), ("--max_requeues must not be negative",)),
        (("--container_mounts", "/a:/a"), ("--container_image, which is missing",)),
        (("--container_image", "x", "--container_mounts", "/a:/b"), ("out lies in none of the folders", "(/a:/b)")),
        (("--array", "no.txt"), ("no.txt cannot be read",)),
        (("--array", "runs.txt%x"), ("after % comes how many",)),
        (("--sbatch=word",), ("'word' belongs to no option",)),
        (("--sbatch=--comment='it\"s'",), ("no quotes",)),
        (("--partition", "a\nb"), ("--partition has characters",)),
    ],
)
def test_options_that_cannot_work(
    words: tuple[str, ...], parts: tuple[str, ...], icom: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = () if "--nodes" in words else ("--nodes", "1")
    result = icom("launch", "slurm", "--dry_run", *nodes, *words, "--", *TRAINING)
    assert_message(result, 2, *parts)


def test_training_options_that_cannot_work(icom: Run) -> None:
    words = ("launch", "slurm", "--nodes", "1", "--dry_run", "--", *TRAINING)
    assert_message(icom(*words, "--resume_from_checkpoint", "checkpoint-3"), 2, "would go back to it every time")
    assert_message(icom(*words, "--hub_token", "hf_x"), 2, "would stand in the job's script", "HF_TOKEN")
    assert_message(icom(*words, "--on", "dicoo"), 2, "--on is for")


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (["--seed 1", "--seed x"], ("runs.txt, line 2: '--seed x' is wrong",)),
        (["--seed 1", "", "--learning_rate=-1"], ("line 3", "--learning_rate has to be a positive number")),
        (["--seed 'x"], ("line 1", "No closing quotation")),
        (["no.yaml"], ("line 1", "No such configuration file: no.yaml")),
        (["seed.yaml"], ("line 1", "--seed is after `--` too")),
        (["--output_dir a", "--output_dir ./a"], ("line 2", "line 1 writes to")),
        (["# nothing"], ("has no line with options",)),
    ],
)
def test_array_files_that_cannot_work(
    lines: list[str], parts: tuple[str, ...], icom: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs.txt").write_text("\n".join(lines))
    Path("seed.yaml").write_text("seed: 3\n")
    result = icom("launch", "slurm", "--nodes", "1", "--dry_run", "--array", "runs.txt", "--", *TRAINING)
    assert_message(result, 2, *parts)


def test_runs_of_an_array_lie_where_the_common_file_says(
    icom: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs.txt").write_text("--seed 1\n--seed 2\n")
    Path("common.yaml").write_text("output_dir: sweep\n")
    options = [word for word in TRAINING if not word.startswith(("--output_dir", "--seed"))]
    words = ("--array", "runs.txt", "--", "--config", "common.yaml", *options)
    said = icom("launch", "slurm", "--nodes", "1", "--dry_run", *words)
    assert f"--config {tmp_path}/sweep/tasks/" in said.out and f"#SBATCH --output={tmp_path}/sweep/" in said.out
    tasks = read_array(Path("runs.txt"), ["--config", "common.yaml", *options], processes=2)
    assert [task.training.output_dir for task in tasks] == ["sweep/0", "sweep/1"]


def test_array_of_finetuning(icom: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lines differ in options alone; what is done is told by what a run's own config.yaml says."""
    monkeypatch.chdir(tmp_path)
    given = {"max_train_steps": None, "mixed_precision": "auto"}
    common = finetune_arguments(**given, output_dir="sweep")
    Path("runs.txt").write_text("--num_examples_to_see 2\n--num_examples_to_see 4 --output_dir sweep/0-longer\n")
    first, second = read_array(Path("runs.txt"), common, processes=1)
    assert (first.training.output_dir, first.done, second.done) == ("sweep/0", False, False)
    assert icom(*finetune_arguments(**given, output_dir="sweep/0", num_examples_to_see=2)).code == 0

    def done(line: str, processes: int) -> bool:
        Path("runs.txt").write_text(f"{line} --output_dir sweep/0\n")
        return read_array(Path("runs.txt"), common, processes)[0].done

    assert done("--num_examples_to_see 2", 1) and done("--num_examples_to_see 4", 2)
    assert not done("--num_examples_to_see 2", 2) and not done("--num_examples_to_see 3", 1)
    assert not done("--num_examples_to_see 2 --use_ema", 1)

    for line, said in (("train --seed 1", "all runs are of one training"), ("finetune", "Leave 'finetune' out here")):
        Path("runs.txt").write_text(line)
        result = icom("launch", "slurm", "--nodes", "1", "--dry_run", "--array", "runs.txt", "--", *common)
        assert_message(result, 2, "runs.txt, line 1", said)


# The script.


def script(icom: Run, *words: str, **options: object) -> str:
    arguments = train_arguments(**({"output_dir": "out"} | options))[1:]
    result = icom("launch", "slurm", "--nodes", "2", "--dry_run", *words, "--", *arguments)
    assert result.code == 0, result
    return result.out


def test_script_is_sound_shell(icom: Run, tmp_path: Path) -> None:
    path = tmp_path / "job"
    hard = {"validation_prompt": 'it\'s "<robot>" for $HOME `id` \\', "output_dir": str(tmp_path / "my runs")}
    words = ("--time", "90", "--container_image", "my image.sqsh", "--container_mounts", f"{tmp_path}:{tmp_path}")
    path.write_text(script(icom, *words, **hard))
    shellcheck = Path(sys.executable).parent / "shellcheck"  # PyPI's
    done = subprocess.run([shellcheck, "--severity=warning", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    # The options arrive as they were typed.
    training = re.search(r"training=\(.*?\n\)", path.read_text(), re.DOTALL)
    assert training
    shell = f'{training[0]}\nprintf "%s\\0" "${{training[@]}}"'
    arrived = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout.split("\0")
    assert f"--validation_prompt={hard['validation_prompt']}" in arrived
    assert arrived[-3:] == ["--resume_from_checkpoint", "latest", ""]


def test_script_starts_the_training_that_was_named(icom: Run, tmp_path: Path) -> None:
    """The two steps as srun gets them, in a shell that has a stand-in for it."""
    train = script(icom)
    assert icom("launch", "slurm", "--nodes", "2", "--dry_run", "--", "train", *TRAINING).out == train
    words = finetune_arguments(output_dir=tmp_path, use_ema=True)
    fine = icom("launch", "slurm", "--nodes", "2", "--dry_run", "--", *words).out
    for text, kind in ((train, TrainConfig), (fine, FinetuneConfig)):
        stand_in = 'scontrol() { :; }; srun() { printf "%s\\n" "$*" >&3; }; '
        variables = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "2", "SLURMD_NODENAME": "x", "PATH": os.defpath}
        done = subprocess.run(
            ["bash", "-c", f"exec 3>&1; {stand_in}\n{text}"], env=variables, capture_output=True, text=True, check=True
        )
        looked, ran = (shlex.split(line) for line in done.stdout.splitlines())
        _, *options = looked[looked.index("icom.launch.look") + 1 :]
        assert isinstance(training_config(options, "look"), kind)
        assert isinstance(parse(ran[ran.index("icom") + 1 :]), kind)


@pytest.mark.parametrize(
    ("time_", "seconds"),
    [("1", 30), ("3", 90), ("10", 120), ("0:30", 15), ("1:00:00", 120), ("1-0", 120), ("0-0:01", 30), ("0", 120)],
)
def test_time_to_save_before_the_limit(time_: str, seconds: int, icom: Run) -> None:
    assert f"#SBATCH --signal=TERM@{seconds}\n" in script(icom, "--time", time_)


def test_what_is_asked_of_slurm(icom: Run) -> None:
    words = ("--gpus_per_node", "4", "--partition", "gpu", "--account", "me", "--qos", "high", "--exclusive")
    said = script(icom, *words, "--cpus_per_task", "8", "--max_requeues", "0", "--sbatch=--mail-type END")
    wanted = ["nodes=2", "ntasks-per-node=4", "cpus-per-task=8", "gpus-per-node=4", "partition=gpu", "account=me"]
    for line in (*wanted, "qos=high", "exclusive", "no-requeue", "mail-type=END"):
        assert f"#SBATCH --{line}\n" in said
    assert "  --ntasks-per-node=4 \\" in said.replace('srun "${step[@]}"', " ")


def test_slurms_number_of_cpus_is_the_number_of_threads() -> None:
    from icom.launch.environment import host_variables

    of_slurm = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_CPUS_PER_TASK": "1", "LD_PRELOAD": ""}
    threads = {v.name: v.value for v in host_variables(of_slurm, 0, 1)}["OMP_NUM_THREADS"]
    assert threads == "1"
