"""Several processes: where each stands, what they tell each other, and that one's end is everybody's.

Guards icom.parallel.place and icom.parallel.group.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from icom.errors import UsageError
from icom.parallel.place import Place, choose_collectives, find_place, first_of_nodelist
from icom.training.checkpoint import load_checkpoint
from icom.training.report import read_metrics
from icom.training.step import message
from tests.support.command import ROOT, Result, long, train_arguments
from tests.support.ranks import Ranks, free_port

Train = Callable[..., Result]

PMI = {"PMI_RANK": "4", "PMI_SIZE": "6", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {"RANK": "4", "WORLD_SIZE": "6", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "4",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_PROCID": "4",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "xeon[07-09]",
}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "4", "WORLD_SIZE": "6"}
TRAINER = {"PET_NODE_RANK": "4", "PET_NNODES": "6", "PET_NPROC_PER_NODE": "1", "JOB_COMPLETION_INDEX": "4"}
PET_MASTER = {"PET_MASTER_ADDR": "10.0.0.1", "PET_MASTER_PORT": "29511"}
MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29511"}


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        (TORCHRUN | MASTER, "torchrun"),
        (PMI | MASTER, "Intel MPI or MPICH"),
        (OPEN_MPI | MASTER, "Open MPI"),
        (SLURM | MASTER, "Slurm"),
        (PMI | TORCHRUN | MASTER, "torchrun"),  # as Accelerate leaves it under mpirun
        # mpirun reaches the machines with srun: Slurm counts machines then.
        (PMI | MASTER | SLURM | {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3"}, "Intel MPI or MPICH"),
        # srun speaks PMI as well, which lacks the local numbers.
        ({"PMI_RANK": "4", "PMI_SIZE": "6"} | MASTER | SLURM, "Slurm"),
        # torchrun started by mpirun, once per machine.
        (TORCHRUN | MASTER | PMI | {"PMI_RANK": "2", "PMI_SIZE": "3", "TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        # torchrun in a TrainJob's pod, which took PET_* for its own options.
        (
            TORCHRUN | MASTER | PET_MASTER | TRAINER | {"PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "2"},
            "torchrun",
        ),
        # mpirun in the pods of an Indexed Job: the pod's number is not the process's.
        (PMI | MASTER | {"JOB_COMPLETION_INDEX": "0"}, "Intel MPI or MPICH"),
    ],
)
def test_place_under_each_launcher(environment: dict[str, str], launcher: str) -> None:
    assert find_place(environment) == Place(4, 6, 0, 2, launcher, "10.0.0.1", 29511)


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        (INDEXED_JOB | MASTER, "Indexed Job"),
        (TRAINER | PET_MASTER, "Kubeflow's Trainer"),
        ({"RANK": "4", "WORLD_SIZE": "6"} | MASTER | TRAINER, "torchrun"),  # Kubeflow's PyTorchJob
    ],
)
def test_place_of_a_process_in_a_pod_of_its_own(environment: dict[str, str], launcher: str) -> None:
    assert find_place(environment) == Place(4, 6, 0, 1, launcher, "10.0.0.1", 29511)


def test_place_without_a_launcher() -> None:
    assert find_place({}) == Place()
    # A batch script of Slurm's is no rank, though it has a number.
    assert find_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}) == Place()
    # A pod of many that do not know of each other has a number, too.
    assert find_place({"JOB_COMPLETION_INDEX": "4"}) == Place()


def test_master_address_where_nobody_gives_one() -> None:
    assert find_place(SLURM).master_address == "xeon07"
    on_one_machine = find_place(PMI | {"MPI_LOCALRANKID": "4", "MPI_LOCALNRANKS": "6"})
    assert (on_one_machine.master_address, on_one_machine.master_port) == ("127.0.0.1", 29500)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (PMI, "MASTER_ADDR is not set"),
        (PMI | {"MASTER_ADDR": "127.0.0.1"}, "MASTER_ADDR is 127.0.0.1"),
        (PMI | {"MASTER_ADDR": "localhost"}, "MASTER_ADDR is localhost"),
        (PMI | MASTER | {"RANK": "3", "WORLD_SIZE": "6"}, "torchrun rank 3 of 6.*rank 4 of 6"),
        (PMI | MASTER | OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "8"}, "rank 4 of 6.*rank 4 of 8"),
        ({"RANK": "1"}, "WORLD_SIZE is not set"),
        (PMI | MASTER | {"PMI_SIZE": "four"}, "PMI_SIZE is 'four'"),
        (PMI | MASTER | {"PMI_RANK": "6"}, "PMI_RANK=6, PMI_SIZE=6"),
        (PMI | MASTER | {"MASTER_PORT": "ssh"}, "MASTER_PORT is 'ssh'"),
        (INDEXED_JOB, "several machines .Indexed Job., but MASTER_ADDR is not set"),
        (INDEXED_JOB | MASTER | {"WORLD_SIZE": "4"}, "JOB_COMPLETION_INDEX=4, WORLD_SIZE=4"),
        (TRAINER | PET_MASTER | {"PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE asks for auto processes.*torchrun"),
        (TRAINER | PET_MASTER | {"PET_NNODES": "1:4"}, "PET_NNODES is '1:4'"),
        ({"PET_NNODES": "6"}, "PET_NODE_RANK is not set"),
    ],
)
def test_environments_that_cannot_be(environment: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_place(environment)


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [("node1", "node1"), ("node[3-5]", "node3"), ("a[007,9],b", "a007"), ("x,y[1-2]", "x"), ("", None)],
)
def test_first_of_slurms_nodelist(nodelist: str, first: str | None) -> None:
    assert first_of_nodelist(nodelist) == first


def test_collectives_that_are_not_there() -> None:
    assert choose_collectives("auto", "gloo") == ("gloo", "ships with PyTorch")
    assert choose_collectives("auto", "nccl")[0] == "nccl"
    for wanted, words in (("ccl", "docs/cluster.md"), ("nccl", "for GPUs"), ("mpi", "built without MPI")):
        with pytest.raises(UsageError, match=words):
            choose_collectives(wanted, "gloo")  # type: ignore[arg-type]


# ---------------------------------------------------------------- real processes


@pytest.mark.long
def test_three_ranks_equal_one(tmp_path: Path, train: Train, ranks: Callable[..., Ranks]) -> None:
    """The same samples on 1 x batch 3, 1 x accumulation 3 and 3 x batch 1; then on from the 3 ranks' checkpoint."""
    options = {"max_train_steps": 12, "num_vectors": 2, "initializer_token": "toy"}
    batch, accumulated = tmp_path / "batch", tmp_path / "accumulated"
    assert train(output_dir=batch, train_batch_size=3, **options).code == 0
    assert train(output_dir=accumulated, gradient_accumulation_steps=3, **options).code == 0
    results = ranks(3, checkpointing_steps=8, **options).results()
    assert [result.code for result in results] == [0, 0, 0], results
    assert "(1 x 3 processes over gloo x 1 accumulated)" in results[0].out
    assert [result.out + result.err for result in results[1:]] == ["", ""]
    assert [list(folder.iterdir()) for folder in (tmp_path / "rank1", tmp_path / "rank2")] == [[], []]
    three = tmp_path / "rank0" / "out"
    for other in (batch, accumulated):
        # Sums in another order; through Adam's division this grows to some 1e-7 of rows of size 1e-2 … 1.
        torch.testing.assert_close(_rows(three), _rows(other), rtol=0, atol=1e-6)
        assert _losses(three) == pytest.approx(_losses(other), rel=1e-5)

    on_one, on_two = tmp_path / "on_one", tmp_path / "on_two"
    resume = {"resume_from_checkpoint": three / "checkpoint-8", **options}
    assert train(output_dir=on_one, train_batch_size=3, **resume).code == 0
    torch.testing.assert_close(_rows(on_one), _rows(batch), rtol=0, atol=1e-6)
    assert [result.code for result in ranks(2, **(resume | {"output_dir": on_two})).results()] == [0, 0]
    state = load_checkpoint(on_two / "checkpoint-12").state
    assert (state.step, state.next_sample) == (12, 8 * 3 + 4 * 2)


@pytest.mark.long
def test_one_small_all_reduce_per_step(tmp_path: Path) -> None:
    """What goes over the network in a step is the rows' gradient, the loss and a number per process."""
    arguments = train_arguments(output_dir="out", max_train_steps=4)
    code = f"""if True:
        from torch import distributed
        from icom.cli import main
        true, sizes = distributed.all_reduce, []
        distributed.all_reduce = lambda t, *rest: (sizes.append(t.nbytes), true(t, *rest))
        try:
            main({arguments})
        finally:
            print("SIZES", sizes)
    """
    (result, _) = Ranks(tmp_path, 2, "-c", code).results()
    assert result.code == 0, result.err
    sizes = json.loads(re.findall(r"SIZES (.*)", result.out)[0])
    width = _rows(tmp_path / "rank0" / "out").shape[1]
    assert sizes == [4] + 4 * [4 * (width + 1 + 2)]  # the first one connects
    assert sum(part.nbytes for part in message([torch.zeros(1, 768)], torch.zeros(()), torch.zeros(64))) <= 10_000


CCL = """
import os, sys
from torch import distributed

def make(store, rank, size, timeout):
    started = "accelerate.state" in sys.modules and bool(sys.modules["accelerate.state"].PartialState._shared_state)
    told = [os.environ.get(name) for name in ("CCL_PROCESS_LAUNCHER", "CCL_LOCAL_RANK", "CCL_LOCAL_SIZE")]
    print("CCL", rank, size, started, *told, flush=True)
    return distributed.ProcessGroupGloo(store, rank, size, timeout)

distributed.Backend.register_backend("ccl", make, devices=["cpu"])
"""


@pytest.mark.long
def test_ccl_starts_before_accelerate(tmp_path: Path, train: Train) -> None:
    """With a stand-in for oneCCL's bindings that registers `ccl` as they do, and sums with gloo."""
    bindings = tmp_path / "bindings"
    bindings.mkdir()
    (bindings / "oneccl_bindings_for_pytorch.py").write_text(CCL)
    path = {"PYTHONPATH": f"{ROOT}:{bindings}"}
    arguments = train_arguments(output_dir="out")
    results = Ranks(tmp_path, 2, "-m", "icom", *arguments, of={0: path, 1: path}).results()
    assert [result.code for result in results] == [0, 0], results
    for rank, result in enumerate(results):
        assert f"CCL {rank} 2 False none {rank} 2" in result.out
    assert "2 processes over ccl" in results[0].out
    alone = tmp_path / "alone"
    assert train(output_dir=alone, train_batch_size=2).code == 0
    torch.testing.assert_close(_rows(tmp_path / "rank0" / "out"), _rows(alone), rtol=0, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 2])
def test_killed_rank_ends_all(victim: int, ranks: Callable[..., Ranks]) -> None:
    """One message, the exit code 75 (worth another start), and a checkpoint from which the others go on."""
    started = ranks(3, max_train_steps=10_000, checkpointing_steps=5)
    started.wait_for_steps(8)
    started.processes[victim].kill()
    results = started.results()
    assert [result.code for result in results] == [
        -signal.SIGKILL if rank == victim else os.EX_TEMPFAIL for rank in range(3)
    ]
    told = "".join(result.err for result in results)
    assert re.findall(r"icom: .*", told) == re.findall(rf"icom: lost \S+ \(rank {victim}\)\. .*", told)
    assert len(re.findall("icom: lost", told)) == 1
    assert "Traceback" not in told
    again = ranks(2, max_train_steps=30, resume_from_checkpoint="latest")
    assert [result.code for result in again.results()] == [0, 0]
    steps = [row["step"] for row in read_metrics(again.folders[0] / "out" / "metrics.jsonl")]
    assert steps == list(range(1, 31))


@pytest.mark.long
def test_divergence_is_told_by_the_one_that_knows_the_checkpoints(ranks: Callable[..., Ranks]) -> None:
    results = ranks(2, max_train_steps=9, checkpointing_steps=1, learning_rate=1e30).results()
    assert [result.code for result in results] == [1, 1]
    told = "".join(result.err for result in results)
    assert len(re.findall("icom: ", told)) == 1, told
    assert re.search(r"rank 0\): The loss became nan at step 2", told), told


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("pictures", r"rank 1\): The pictures of .* are not those of .* \(rank 0\): 1.png"),
        ("options", r"rank 1\): The options of .*: learning_rate \(0.01 \| 0.02\)"),
        ("broken", r"rank 1\): In the picture folder pictures, .*\s+1.png: not a picture"),
    ],
)
def test_rank_that_differs_ends_all(change: str, words: str, tmp_path: Path) -> None:
    """Before anything is trained, told once, by the one that differs."""
    for rank in range(3):
        pictures = tmp_path / f"rank{rank}" / "pictures"
        shutil.copytree(ROOT / "icom/assets/concepts/blue-heart", pictures)
        if rank == 1 and change == "pictures":
            shutil.copy(pictures / "2.png", pictures / "1.png")
        elif rank == 1 and change == "broken":
            (pictures / "1.png").write_bytes(b"no picture")
    rate = "0.02 if os.environ['PMI_RANK'] == '1' else 0.01" if change == "options" else "0.01"
    arguments = train_arguments(output_dir="out", train_data_dir="pictures", learning_rate="RATE")
    code = f"""if True:
        import os
        from icom.cli import main
        main([word.replace("RATE", str({rate})) for word in {arguments}])
    """
    results = Ranks(tmp_path, 3, "-c", code).results()
    assert all(result.code in (1, 2) for result in results), results
    told = "".join(result.err for result in results)
    assert len(re.findall("icom: ", told)) == 1, told
    assert re.search(words, told), told
    assert not (tmp_path / "rank0" / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, long(signal.SIGINT)])
def test_signal_to_one_rank_stops_all(number: int, ranks: Callable[..., Ranks]) -> None:
    """At the same step, saved by rank 0, told once."""
    started = ranks(2, max_train_steps=10_000)
    started.wait_for_steps(3)
    started.processes[1].send_signal(number)
    results = started.results()
    assert [result.code for result in results] == [128 + number] * 2
    assert "stopped after step" in results[0].err
    assert "stopped after step" not in results[1].err
    (checkpoint,) = (started.folders[0] / "out").glob("checkpoint-*")
    assert load_checkpoint(checkpoint)[0].next_sample == 2 * load_checkpoint(checkpoint)[0].step


JOIN = """
import os
from icom.parallel import group, meeting
from icom.cli import main
from icom.parallel.place import find_place
from icom.errors import IcomError
meeting.JOIN_SECONDS = int(os.environ["JOIN_SECONDS"])
try:
    with group.joined(find_place(os.environ)) as met:
        print("MET", met.hosts)
except IcomError as error:
    print("ERROR", error)
"""


@pytest.mark.long
def test_ranks_that_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not come, one that is told of another size, and two that are told to be the same."""
    monkeypatch.setenv("JOIN_SECONDS", "2")
    absent = Ranks(tmp_path, 1, "-c", JOIN, of={0: {"PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}}).results()
    assert "ERROR After 2 s rank 1, 2 of 3 did not come to 127.0.0.1:" in absent[0].out
    monkeypatch.setenv("JOIN_SECONDS", "12")  # two of them do meet, on a busy machine, too
    two_of_three = {rank: {"PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"} for rank in (0, 1)}
    zero, one = Ranks(tmp_path, 2, "-c", JOIN, of=two_of_three).results()
    assert "rank 2 of 3 did not come" in zero.out
    assert ("ERROR" in one.out, "Traceback" in one.err) == (True, False)
    other_size = {1: {"PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}}
    told = "".join(result.out for result in Ranks(tmp_path, 2, "-c", JOIN, of=other_size).results())
    assert "Is another run using 127.0.0.1:" in told
    same_rank = {2: {"PMI_RANK": "1", "MPI_LOCALRANKID": "1"}}
    told = "".join(result.out for result in Ranks(tmp_path, 3, "-c", JOIN, of=same_rank).results())
    assert "Two processes are rank 1" in told
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = {"MASTER_PORT": str(taken.getsockname()[1]), "JOIN_SECONDS": "2"}
        zero, one = Ranks(tmp_path, 2, "-c", JOIN, of={0: port, 1: port}).results()
    assert f"ERROR Rank 0 cannot listen on 127.0.0.1:{port['MASTER_PORT']}" in zero.out
    assert f"cannot reach rank 0 at 127.0.0.1:{port['MASTER_PORT']} within 2 s" in one.out


LATE_NAME = """
import os, socket
from icom.parallel import group
from icom.parallel.place import find_place
ask = socket.getaddrinfo
def asked(*name, **more):
    try:
        return ask(*name, **more)
    except OSError:
        print("UNKNOWN", flush=True)
        raise
socket.getaddrinfo = asked
with group.joined(find_place(os.environ)) as met:
    print("MET", met.hosts)
"""


@pytest.mark.long
@pytest.mark.usefixtures("hosts_possible")
def test_rank_0_whose_name_comes_later(tmp_path: Path) -> None:
    """As a pod's does, which starts before the cluster knows its name; rank 0 waits for it itself."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    names = {"MASTER_ADDR": "icom-0.icom", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    own_hosts = 'mount --bind "$0" /etc/hosts && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", own_hosts, str(hosts), sys.executable, "-c", LATE_NAME]
    pods = []
    for index in range(2):
        environment = os.environ | names | {"JOB_COMPLETION_INDEX": str(index)}
        pods.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    for pod in pods:
        assert pod.stdout
        assert pod.stdout.readline() == "UNKNOWN\n"
    with hosts.open("a") as file:  # the file that is mounted
        file.write("127.0.0.1 icom-0.icom\n")
    for pod in pods:
        out, err = pod.communicate()
        assert "MET" in out, (out, err)


def _rows(folder: Path) -> torch.Tensor:
    return load_file(folder / "learned_embeds.safetensors")["<robot>"]


def _losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


TENSORS = """
import os, torch
from icom.parallel import group
from icom.parallel.place import find_place

group._BUCKET_BYTES = 40  # ten floats
shapes = [(3,), (2, 4), (1,), (25,), (), (0, 5), (2, 2)]
kinds = [torch.float32, torch.float64, torch.int64]
tensors = [torch.arange(4.0 * n + 60).to(kinds[n % 3])[: torch.Size(s).numel()].view(s) for n, s in enumerate(shapes)]
with group.joined(find_place(os.environ)) as met:
    met.connect("gloo")
    mine = [tensor * (met.rank + 1) for tensor in tensors]
    mine[1] = mine[1].t()  # not contiguous
    met.sum(mine)
    mine[1] = mine[1].t()
    assert all(torch.equal(summed, 6 * tensor) for summed, tensor in zip(mine, tensors, strict=True))
    named = {str(n): tensor for n, tensor in enumerate(tensors)}
    got = met.broadcast_tensors(named if met.leads else None)
    assert list(got) == list(named)
    assert all(torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype for name, tensor in named.items())
    print("ALIKE")
"""


def test_any_number_of_tensors_of_any_kind_travels(tmp_path: Path) -> None:
    """Sums in place and rank 0's tensors for all, against the same computed alone; buckets end anywhere."""
    results = Ranks(tmp_path, 3, "-c", TENSORS).results()
    assert [result.out.split() for result in results] == [["ALIKE"]] * 3, results
