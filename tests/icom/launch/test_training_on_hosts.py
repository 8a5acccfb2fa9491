"""One run on several hosts gives what it gives on one.

Guards icom.training.train and icom.launch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.command import Result, finetune_arguments
from tests.support.hosts import HOME, Cluster, Host, cluster
from tests.support.mpi import MPICH, OUTPUT, Run, finish, launch, metrics, ranks, start, write_hosts_file
from tests.support.namespaces import Command

GLOBAL_BATCH = 6
VARIANTS = 10  # of the bundled pictures: five, and each mirrored
# The order in which float32 gradients are summed differs; losses and rows are of the order of 1 and 0.01.
RTOL, ATOL = 1e-4, 1e-6


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all hosts see, such as on NFS."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def hosts(shared: Path, hosts_possible: None) -> Iterator[Cluster]:
    with cluster(3, show=[shared]) as made:
        yield made


@dataclass(frozen=True)
class Learned:
    """A run's result."""

    run: Run
    losses: torch.Tensor
    rows: torch.Tensor


def end_of(command: Command, first: Host) -> Learned:
    """Wait for a run to learn."""
    run = finish(command)
    assert run.code == 0, run.said
    rows = load_file(first.path(OUTPUT) / "learned_embeds.safetensors")["<concept>"]
    return Learned(run, torch.tensor([step["loss"] for step in metrics(first)]), rows)


def same(one: Learned, other: Learned) -> None:
    torch.testing.assert_close(one.losses, other.losses, rtol=RTOL, atol=ATOL)
    torch.testing.assert_close(one.rows, other.rows, rtol=RTOL, atol=ATOL)


def computed(run: Run) -> int:
    """How many latents rank 0 computed, by the last line of each of its progress reports."""
    return sum(int(count) for count in re.findall(r"latents: (\d+)/\1 \[", run.said))


@pytest.fixture(scope="module")
def on_three(hosts: Cluster) -> Learned:
    return end_of(start(hosts, train_batch_size=GLOBAL_BATCH // 3), hosts[0])


def test_seeds_command_trains_on_three_hosts(hosts: Cluster, on_three: Learned) -> None:
    assert f"total batch {GLOBAL_BATCH} (2 x 3 processes" in on_three.run.said
    assert on_three.run.told() == []
    assert on_three.losses.shape == (6,) and on_three.rows.shape[0] == 1
    # Rank 0 alone writes; the others have disks of their own.
    assert [host.path(OUTPUT).exists() for host in hosts] == [True, False, False]
    assert not any(ranks(host) for host in hosts)


def test_each_host_keeps_the_latents_on_its_own_disk(hosts: Cluster, on_three: Learned) -> None:
    kept = [list(host.path(HOME / ".cache/icom").rglob("*.safetensors")) for host in hosts]
    assert [len(entries) for entries in kept] == [VARIANTS] * 3
    assert computed(on_three.run) == VARIANTS


@pytest.mark.long
def test_as_on_one_host(hosts: Cluster, on_three: Learned) -> None:
    same(on_three, end_of(start(hosts[:1], train_batch_size=GLOBAL_BATCH), hosts[0]))


@pytest.mark.long
def test_two_hosts_by_mpich_and_a_shared_disk(hosts: Cluster, on_three: Learned, shared: Path) -> None:
    learned = end_of(start(hosts[:2], MPICH, train_batch_size=GLOBAL_BATCH // 2, cache_dir=shared), hosts[0])
    same(on_three, learned)
    assert len(list(shared.rglob("*.safetensors"))) == VARIANTS
    # The first of two computes its half; the other's are there when it needs them.
    assert computed(learned.run) <= VARIANTS // 2


@pytest.mark.long
@pytest.mark.parametrize("mpi", ["intel", "openmpi"])
def test_icom_launch(mpi: str, hosts: Cluster, on_three: Learned) -> None:
    write_hosts_file(hosts)
    same(on_three, end_of(launch(hosts, mpi, train_batch_size=GLOBAL_BATCH // 3), hosts[0]))


@pytest.mark.long
def test_a_list_of_words(hosts: Cluster, shared: Path, train: Callable[..., Result], tmp_path: Path) -> None:
    """By the seed's command: two hosts learn each word as one process alone does."""
    words = {"<heart>": {"train_data_dir": "bundled:blue-heart"}, "<moon>": {"num_vectors": 2, "seed": 3}}
    file = shared / "words.yaml"
    file.write_text(json.dumps([{"placeholder_token": token, **own} for token, own in words.items()]))
    same_for_all = {"placeholder_token": None, "max_train_steps": 3, "output_dir": "/tmp/words"}
    run = finish(start(hosts[:2], concepts_list=file, **same_for_all))
    assert run.code == 0, run.said
    assert not hosts[1].path("/tmp/words").exists()
    for token, own in words.items():
        alone = {"initializer_token": "object", "learning_rate": 2e-3, "train_batch_size": 2, **own}
        assert train(output_dir=tmp_path / token, placeholder_token=token, **alone).code == 0
        found, expected = hosts[0].path("/tmp/words") / token.strip("<>"), tmp_path / token
        assert [step["loss"] for step in steps_in(found)] == pytest.approx(
            [step["loss"] for step in steps_in(expected)], rel=RTOL
        )
        rows = [load_file(folder / "learned_embeds.safetensors")[token] for folder in (found, expected)]
        torch.testing.assert_close(*rows, rtol=RTOL, atol=ATOL)


def steps_in(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_icom_launch_finetunes(hosts: Cluster) -> None:
    """By the script that accelerate starts; two hosts as one."""
    found = []
    for some, batch in ((hosts[:2], 1), (hosts[:1], 2)):
        write_hosts_file(some)
        output = f"/tmp/finetuned-{len(some)}"
        # Adam's own epsilon would make of a rounding error in a tiny gradient a step in another direction.
        words = finetune_arguments(output_dir=output, train_batch_size=batch, use_ema=True, adam_epsilon="1e-3")
        run = finish(launch(some, training=words))
        assert run.code == 0 and f"({batch} x {len(some)} processes" in run.said, run.said
        found.append(load_file(hosts[0].path(output) / "checkpoint-2/state.safetensors"))
    assert not hosts[1].path("/tmp/finetuned-2").exists()
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=RTOL, atol=ATOL)
