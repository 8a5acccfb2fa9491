"""A process, a host or the network is gone in the middle of a run, or the hosts do not fit together from the start.

Guards icom.parallel.liveness, icom.parallel.group and icom.launch.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator

import pytest
import torch
from safetensors.torch import load_file

from tests.support.command import long
from tests.support.hosts import HOME, Cluster, Host, cluster
from tests.support.mpi import HOSTS_FILE, OUTPUT, finish, launch, metrics, ranks, start, write_hosts_file
from tests.support.waiting import wait_until

HOUR_LONG = 100_000  # steps
PICTURES = "/tmp/pictures"
STEPS_BEFORE, STEPS_AFTER = 4, 3


@pytest.fixture(scope="module")
def hosts(hosts_possible: None) -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made


def kill_rank(host: Host) -> None:
    for pid in ranks(host):
        os.kill(pid, signal.SIGKILL)


def kill_sshd(host: Host) -> None:
    host.kill_sshd()


def cut_link(host: Host) -> None:
    host.link_down()


@pytest.mark.parametrize("happens", [kill_rank, long(kill_sshd), long(cut_link)])
def test_all_end_together_and_the_others_go_on(happens: Callable[[Host], None], hosts: Cluster) -> None:
    first, victim, third = hosts
    output = f"/tmp/{happens.__name__}"
    command = start(hosts, output_dir=output, max_train_steps=HOUR_LONG, checkpointing_steps=2)
    try:
        wait_until(lambda: len(metrics(first, output)) >= STEPS_BEFORE or command.poll() is not None)
        assert command.poll() is None, finish(command).said
        assert all(ranks(host) for host in hosts)
        happens(victim)
        run = finish(command)
        # The host that is cut off notices it by itself.
        wait_until(lambda: not any(ranks(host) for host in hosts))
    finally:
        victim.link_up()
        if not victim.processes("sshd.*listener"):
            victim.start_sshd()
    assert run.code not in (0, 2)
    lost = [line for line in run.lines if re.search(r"\blost\b", line)]
    assert len(lost) == 1 and lost[0].startswith("icom: lost ") and "node1" in lost[0], "\n".join(run.lines)
    assert run.told() == lost, "\n".join(run.lines)

    # All of what was computed is in the checkpoint, and two hosts go on from it.
    steps = len(metrics(first, output))
    assert steps >= STEPS_BEFORE
    assert first.path(f"{output}/checkpoint-{steps}/state.safetensors").exists()
    if happens is not cut_link:  # how the loss was noticed is nothing that the next run sees
        return
    last = steps + STEPS_AFTER
    resumed = finish(start([first, third], output_dir=output, max_train_steps=last, resume_from_checkpoint="latest"))
    assert resumed.code == 0, "\n".join(resumed.lines)
    assert [step["step"] for step in metrics(first, output)] == list(range(1, last + 1))
    assert "(1 x 2 processes" in resumed.said
    rows = load_file(first.path(output) / "learned_embeds.safetensors")["<concept>"]
    assert bool(torch.isfinite(rows).all())


@pytest.fixture(scope="module")
def odd(hosts: Cluster) -> dict[str, str]:
    """A second host with another torch than the first, and with other pictures. Gives the variables that say so."""
    from PIL import Image

    for host in hosts:
        host.path(PICTURES).mkdir()
        for name in ("a.png", "b.png"):
            colour = "red" if host is hosts[1] and name == "b.png" else "blue"
            Image.new("RGB", (64, 64), colour).save(host.path(PICTURES) / name)
    # mpirun makes PYTHONPATH the same everywhere; but only one host has something there.
    metadata = hosts[1].path(HOME / "packages/torch-1.2.3.dist-info/METADATA")
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n")
    return {"PYTHONPATH": str(HOME / "packages")}


def nothing_trained(hosts: Cluster) -> None:
    assert not any(ranks(host) or host.path(OUTPUT).exists() for host in hosts)


@pytest.mark.long
def test_another_torch_ends_the_run_before_it_trains(hosts: Cluster, odd: dict[str, str]) -> None:
    run = finish(start(hosts, variables=odd))
    told = run.told()
    assert run.code != 0 and len(told) == 1, "\n".join(run.lines)
    assert "node1" in told[0] and "torch" in told[0] and "1.2.3" in told[0]
    nothing_trained(hosts)


@pytest.mark.long
def test_other_pictures_end_the_run_before_it_trains(hosts: Cluster, odd: dict[str, str]) -> None:
    run = finish(start(hosts, train_data_dir=PICTURES))
    told = run.told()
    assert run.code != 0 and len(told) == 1, "\n".join(run.lines)
    assert "node1" in told[0] and "b.png" in told[0] and "a.png" not in told[0]
    nothing_trained(hosts)


def test_icom_launch_names_all_that_is_wrong_and_starts_nothing(hosts: Cluster, odd: dict[str, str]) -> None:
    hosts[2].kill_sshd()
    write_hosts_file(hosts)
    try:
        run = finish(launch(hosts, variables=odd | {"COLUMNS": "300"}, train_data_dir=PICTURES))
    finally:
        hosts[2].start_sshd()
    assert run.code == 1, run.said
    of_second = " ".join(line for line in run.lines if "node1" in line)
    assert "1.2.3" in of_second and "pictures" in of_second
    assert any("node2" in line and "ssh" in line for line in run.lines)
    assert run.told()[-1] == "icom: Nothing was started."
    nothing_trained(hosts)


def test_icom_launch_names_the_wrong_line_of_the_hosts_file(hosts: Cluster) -> None:
    hosts[0].path(HOSTS_FILE).write_text("localhost\nnode1\nnode2:many\n")
    run = finish(launch(hosts))
    assert run.code == 2
    assert len(run.told()) == 1 and "hosts" in run.said and "3" in run.said and "node2:many" in run.said
