"""Processes on one machine measured for real, and the model of many hosts against what can be computed by hand.

Guards icom.bench.ranks, tools.scaling, tools.scaling_unet and tools.allreduce.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from icom import machine
from icom.errors import UsageError
from tests.support.command import ROOT, Result
from tools.scaling import (
    Network,
    ScalingConfig,
    StepTime,
    allreduce_seconds,
    curves,
    main,
    points,
    row_bytes,
    scaling,
    simulate,
    table_bytes,
)
from tools.scaling_unet import ScalingUnetConfig, Step, point, scaling_unet

Icom = Callable[..., Result]

FREE = Network(latency=0.0, bandwidth=float("inf"))
EC2 = Network(latency=50e-6, bandwidth=10e9 / 8)
STEADY = StepTime(2.0, 2.0, 2.0)
SPREAD = StepTime(1.0, 2.0, 4.0)
MEASURED = ROOT / "benchmarks" / "sd15-512-2cores.json"


@pytest.mark.long
def test_ranks_are_measured_side_by_side_with_equal_cores(tmp_path: Path, icom: Icom) -> None:
    """Two processes that talk, two that do not, and one: all on half of the cores, with real gloo."""
    file = tmp_path / "ranks.json"
    arguments = "--arch tiny --ranks 1,2 --rounds 1 --steps 2 --mixed_precision no --json".split()
    result = icom("bench", *arguments, str(file))
    assert result.code == 0, result.err
    measured = json.loads(file.read_text())
    half = machine.usable_cores() // 2
    assert measured["machine"]["cores_per_rank"] == half
    assert f"{half} threads" in measured["backend"]
    one, ranks, alone = (measured["contenders"][name] for name in ("1 rank", "2 ranks", "2 alone"))
    assert [row["processes"] for row in (one, ranks, alone)] == [1, 2, 2]
    assert [row["group"] for row in (one, ranks, alone)] == [1, 2, 1]
    assert one["efficiency"] == 1
    assert ranks["efficiency"] == pytest.approx(ranks["images_per_second"] / 2 / one["images_per_second"])
    assert ranks["of_alone"] == pytest.approx(ranks["images_per_second"] / alone["images_per_second"])
    assert 0 < ranks["exchange_seconds"] <= ranks["waiting_seconds"] < ranks["slowest"]
    assert ranks["bytes_per_step"] == 4 * (128 + 1 + 2)  # gradient, loss, two processes' signals
    assert "of_alone" not in alone
    assert "2 ranks: a rank waits" in result.out


@pytest.mark.parametrize("ranks", ["0", "2,x", "", "1,,2", "-1", "1.5"])
def test_ranks_that_are_no_numbers(icom: Icom, ranks: str) -> None:
    result = icom("bench", "--arch", "tiny", f"--ranks={ranks}")
    assert result.code == 2
    assert "--ranks takes numbers of processes from 1 up, as in 1,2" in result.err


@pytest.mark.long
def test_more_ranks_than_cores(icom: Icom) -> None:
    many = machine.usable_cores() + 1
    result = icom("bench", "--arch", "tiny", "--ranks", f"1,{many}")
    assert result.code == 2
    assert f"{many} processes with a core each; {many - 1} can be used" in result.err


def test_ranks_do_not_mix_with_other_comparisons(tmp_path: Path, icom: Icom) -> None:
    for other in (["--compare", "reference"], ["--sweep", str(tmp_path / "sweep")]):
        result = icom("bench", "--arch", "tiny", "--ranks", "1", *other)
        assert result.code == 2
        assert "drop --sweep and --compare" in result.err


@pytest.mark.long
def test_rank_that_dies_ends_the_measurement(icom: Icom, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At once, not when the others give up waiting, and with what it said."""
    (tmp_path / "sitecustomize.py").write_text("import os\nif os.environ.get('RANK') == '1': os._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))
    result = icom("bench", "--arch", "tiny", "--ranks", "2", "--rounds", "1", "--steps", "1", "--mixed_precision", "no")
    assert result.code == 1
    assert "Measuring 2 ranks failed in process 1 (exit code 3)" in result.err


def test_one_host_loses_nothing() -> None:
    (point,) = points((1,), SPREAD, [table_bytes("sd15")], EC2, batch=3, seed=0)
    assert point.efficiency == 1
    assert point.network == 1
    assert point.bytes_sent == 0
    assert point.seconds == pytest.approx((1 + 2 * 2 + 4) / 4, rel=5e-3)  # the distribution's mean
    assert point.images_per_second == pytest.approx(3 / point.seconds)


@pytest.mark.parametrize("hosts", [2, 3, 8])
def test_free_network_leaves_only_the_slowest_host(hosts: int) -> None:
    """E[max of N] is the integral of N u^(N-1) Q(u), here by a fine sum."""
    share = (np.arange(100_000) + 0.5) / 100_000
    expected = float((hosts * share ** (hosts - 1) * SPREAD.quantile(share)).mean())
    assert simulate(hosts, SPREAD, 10**9, FREE, seed=0) == pytest.approx(expected, rel=5e-3)
    assert simulate(hosts, STEADY, 10**9, FREE, seed=0) == pytest.approx(2.0)


@pytest.mark.parametrize("hosts", [2, 5, 64])
def test_steady_hosts_lose_only_the_ring(hosts: int) -> None:
    """2 (N - 1) messages of latency and an N-th of the payload, whether simulated or not."""
    payload = 12_345_678
    ring = 2 * (hosts - 1) * (50e-6 + payload / hosts / (10e9 / 8))
    assert allreduce_seconds(hosts, payload, EC2) == pytest.approx(ring)
    assert simulate(hosts, STEADY, payload, EC2, seed=0) == pytest.approx(2.0 + ring)


def test_whole_table_between_two_hosts_by_hand() -> None:
    """49,409 rows of 768 float32; each of two hosts sends it once: 1.214 Gbit at 12.5 Gbit/s."""
    assert table_bytes("sd15") == 49_409 * 768 * 4
    network = Network(latency=0.0, bandwidth=12.5e9 / 8)
    assert allreduce_seconds(2, table_bytes("sd15"), network) == pytest.approx(0.09714, rel=1e-3)
    (point,) = points((2,), STEADY, [table_bytes("sd15")], network, batch=1, seed=0)
    assert point.bytes_sent == 151_784_448
    assert point.efficiency == pytest.approx(2 / 2.09714, rel=1e-5)
    assert point.network == pytest.approx(point.efficiency)


def test_rows_are_what_training_sends() -> None:
    """The message of an optimizer step: 768 numbers, the loss, and a float per process."""
    assert row_bytes("sd15", 2) == 4 * (768 + 1 + 2) == json.loads(MEASURED.read_text())["bytes_per_step"]
    assert row_bytes("sd15", 64) <= 10_000


def test_worse_networks_and_more_hosts_never_help() -> None:
    hosts = (1, 2, 4, 8, 16)

    def efficiencies(payload: int, network: Network) -> list[float]:
        return [point.efficiency for point in points(hosts, SPREAD, [payload] * len(hosts), network, 1, seed=0)]

    fine = efficiencies(10**6, EC2)
    assert fine == sorted(fine, reverse=True)
    for worse in (
        efficiencies(10**8, EC2),
        efficiencies(10**6, dataclasses.replace(EC2, latency=5e-3)),
        efficiencies(10**6, dataclasses.replace(EC2, bandwidth=EC2.bandwidth / 100)),
    ):
        assert all(a > b for a, b in zip(fine[1:], worse[1:], strict=True))


def test_steps_come_from_the_measurement() -> None:
    """Their median on as many cores as were measured; in proportion on others; the usual script's from its own."""
    measured = json.loads(MEASURED.read_text())
    config = ScalingConfig(hosts=(1, 4), spread=0.0)
    ours, whole, usual = curves(config, measured, cores=2).values()
    assert ours[0].seconds == pytest.approx(measured["seconds_per_step"])
    assert usual[0].seconds == pytest.approx(measured["reference_seconds_per_step"])
    assert whole[1].seconds - ours[1].seconds == pytest.approx(
        6 * (table_bytes("sd15") - row_bytes("sd15", 4)) / 4 / (10e9 / 8), rel=1e-6
    )
    faster, _, _ = curves(config, measured, cores=8).values()
    assert faster[0].seconds == pytest.approx(measured["seconds_per_step"] / 4)


@pytest.mark.long
def test_document_is_what_the_command_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Same seed, same figures: the committed tables are those of the committed measurements."""
    from PIL import Image

    document = tmp_path / "scaling.md"
    shutil.copy(ROOT / "docs" / "scaling.md", document)
    folder = ROOT / "benchmarks"
    files = {name: folder / f"{stem}.json" for name, stem in (("allreduce", "allreduce"), ("ranks", "sd15-512-ranks"))}
    scaling(ScalingConfig(measured=MEASURED, document=document, **files))
    assert document.read_text() == (ROOT / "docs" / "scaling.md").read_text()
    assert "Hosts with 8 cores" in capsys.readouterr().out
    with Image.open(document.with_suffix(".png")) as picture:
        assert picture.format == "PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "0"], "--hosts takes one or more numbers from 1 up"),
        (["--bandwidth", "0"], "--bandwidth has to be above 0"),
        (["--latency", "-1"], "--latency must not be negative"),
        (["--measured", "absent.json"], "Cannot read absent.json"),
        (["--measured", "benchmarks/sd15-512-2cores-without-amx.json"], "icom bench --compare reference"),
        (["--document", "README.md"], "needs the lines"),
    ],
)
def test_bad_input_is_named(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["tools.scaling", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(bool(os.geteuid()) or not shutil.which("tc"), reason="needs root and iproute2")
def test_real_allreduces_between_shaped_hosts(tmp_path: Path) -> None:
    """Both payloads go through the namespaces at no more than the rate, and nothing of the network stays."""
    file = tmp_path / "allreduce.json"
    options = "--hosts 2 --rates 1 --repeats 1 --arch tiny --output".split()
    command = [sys.executable, "-m", "tools.allreduce", *options, str(file)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        _, said = process.communicate()
    assert process.returncode == 0, said
    rows, table = json.loads(file.read_text())["rows"]
    assert rows["bytes"] == row_bytes("tiny", 2)
    assert table["bytes"] == table_bytes("tiny")
    assert 0 < rows["latency_seconds"] < 1
    # A lower bound: shaping works. How much longer it takes is the machine's affair.
    assert table["fastest"] > 0.9 * allreduce_seconds(2, table["bytes"], Network(0.0, 1e9 / 8))
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, check=True, text=True).stdout
    assert f"icom-{process.pid}-" not in namespaces


UNET_STEP = Step(StepTime(8.0, 8.0, 8.0), forward=2.0, backward=4.0, images=3)


@pytest.mark.parametrize(("kind", "sent", "meanwhile"), [("ddp", 2 * 4, 4.0), ("full_shard", 2 * 2 + 2 * 4, 6.0)])
@pytest.mark.parametrize("bandwidth", [10.0, 0.5])
def test_unet_on_two_hosts_by_hand(kind: str, sent: int, meanwhile: float, bandwidth: float) -> None:
    """SD1.5's 859,520,964 numbers over a wire without latency: half of them, so many bytes a number."""
    config = ScalingUnetConfig(hosts=(2,), latency=0.0, bandwidth=bandwidth)
    found = point(config, kind, 2, UNET_STEP, waited=8.5, alone=8.0)  # type: ignore[arg-type]
    seconds = 859_520_964 * sent / 2 / (bandwidth * 1e9 / 8)
    assert found.exchange == pytest.approx(seconds)
    assert found.slowest == pytest.approx(8.5 + seconds)
    assert found.fastest == pytest.approx(8.5 + max(0, seconds - meanwhile))
    assert found.efficiency == pytest.approx((8 / found.slowest, 8 / found.fastest))
    assert found.images_per_second == pytest.approx((6 / found.slowest, 6 / found.fastest))


def test_unet_latency_is_paid_once_for_each_message() -> None:
    """DDP: 132 buckets of 25 MB, 2 (N - 1) messages each. FSDP: 39 blocks, gathered; gloo sums in two rounds."""
    slow = ScalingUnetConfig(hosts=(4,), latency=1e6, bandwidth=float("inf"))
    assert point(slow, "ddp", 4, UNET_STEP, 8.0, 8.0).exchange == 132 * 2 * 3
    assert point(slow, "shard_grad_op", 4, UNET_STEP, 8.0, 8.0).exchange == 39 * (1 + 2) * 3
    assert point(slow, "full_shard", 4, UNET_STEP, 8.0, 8.0).exchange == 39 * (2 + 2) * 3
    assert point(slow, "full_shard", 1, UNET_STEP, 8.0, 8.0).exchange == 0


def test_unet_tables_are_written_from_a_measurement(tmp_path: Path) -> None:
    document, measured = tmp_path / "scaling.md", tmp_path / "measured.json"
    shutil.copy(ROOT / "docs" / "scaling.md", document)
    before = document.read_text()
    config = ScalingUnetConfig(measured=measured, document=document, hosts=(1, 64))
    scaling_unet(config)
    assert "| 64 | 6,769 | 8,463 | 10,155 | 5,078 | 6,770 |" in document.read_text()
    row = {"processes": 1, "micro_batch": 1, "forward_seconds": 8.0, "backward_seconds": 24.0}
    row |= {"seconds_per_step": 40.0, "fastest": 40.0, "slowest": 40.0}
    content = {
        "options": {"method": "unet", "arch": "sd15", "mixed_precision": "bf16"},
        "machine": {"cpu": "a CPU", "cores_per_process": 2},
        "rows": [row | {"processes": 2}, row],
    }
    measured.write_text(json.dumps(content))
    scaling_unet(config)
    text = document.read_text()
    assert "| 1 | ddp | 0.00 | 10.0–10.0 | 0.100–0.100 | 100%–100% |" in text  # a quarter of the time on 8 cores
    assert "| 64 | full_shard |" in text
    assert text.split("## The model against")[1] == before.split("## The model against")[1]
    for wrong in ({"options": content["options"] | {"arch": "tiny"}}, {"rows": []}):  # type: ignore[operator]
        measured.write_text(json.dumps(content | wrong))
        with pytest.raises(UsageError, match=r"arch|no row of one process"):
            scaling_unet(config)
