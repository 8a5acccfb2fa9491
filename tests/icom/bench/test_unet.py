"""Measuring the UNet's training: the same work as diffusers' step, a whole table, bytes as counted by the kernel.

Guards icom.bench.unet, icom.bench.unet_command, icom.bench.unet_report, icom.bench.reference_unet and
icom.parallel.traffic.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from icom.bench import unet_report
from icom.bench.job import Job, Measurement
from icom.bench.unet import made_reference, made_run
from icom.bench.unet_command import OUT_OF_MEMORY, compare, tabulate
from icom.config.bench import BenchConfig
from icom.models.architectures import ARCHITECTURES
from icom.models.parts import UNET
from icom.parallel.traffic import bytes_sent, sent_by_formula
from icom.training.finetune import advance, batches_of
from tests.support.command import Result, assert_message
from tests.support.ranks import Ranks

Icom = Callable[..., Result]

HERE = {"cpu": "a CPU", "cores": 2, "threads": 2, "torch": "2.0", "python": "3.10"}


def job(folder: Path, **changed: Any) -> Job:
    options = {"method": "unet", "data": "synthetic:16", "batch_size": 2, "steps": 2, "mixed_precision": "no"}
    return Job(**{"arch": "tiny", "resolution": 64, "cache": str(folder), **options, **changed})


def test_both_steps_do_the_same_work(tmp_path: Path) -> None:
    """Losses of three steps, and the optimizer's moments after them, which hold all gradients, clipped."""
    steps = 3
    with made_reference(job(tmp_path, backend=None)) as (reference, feed):
        theirs = [reference.step(next(feed)) for _ in range(steps)]
        moments = [reference.optimizer.state[p]["exp_avg"].clone() for p in reference.unet.parameters()]
    with made_run(job(tmp_path)) as run, batches_of(run, 0) as feed:
        ours = [advance(run, feed, step * run.samples_per_step, 0) for step in range(steps)]
        own = [run.optimizer.state[p]["exp_avg"] for p in run.unet.parameters()]
    assert [step.loss for step in ours] == pytest.approx(theirs, abs=1e-5)
    assert max(theirs) - min(theirs) > 1e-2  # other samples each time
    assert max(step.figures["grad_norm"] for step in ours) > 1  # so that clipping mattered
    largest = max(float(moment.abs().max()) for moment in moments)
    for mine, other in zip(own, moments, strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-5 * largest)


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "parallel", "precision"),
    [(2, "ddp", "no"), (2, "shard_grad_op", "no"), (2, "full_shard", "bf16"), (3, "full_shard", "no")],
)
def test_bytes_by_formula_are_those_that_leave(count: int, parallel: str, precision: str, tmp_path: Path) -> None:
    """Counted by the kernel at each process's TCP connections, over whole steps of real processes with gloo."""
    of_each = job(tmp_path, parallel=parallel, batch_size=1, steps=1, mixed_precision=precision)
    words = ["-m", "icom.bench.measure", json.dumps(dataclasses.asdict(of_each))]
    group = Ranks(tmp_path, count, *words)
    try:
        results = group.results()
    finally:
        group.end()
    assert [result.code for result in results] == [0] * count, results
    measured = [Measurement(**json.loads(result.out.splitlines()[-1])) for result in results]
    shapes = [tuple(parameter.shape) for parameter in UNET.build(ARCHITECTURES["tiny"]).parameters()]
    for one in measured:
        assert one.group == count
        formula = sent_by_formula(parallel, shapes, count, 2 if precision == "bf16" else 4)  # type: ignore[arg-type]
        assert one.bytes_per_step == round(formula)
        for sent in one.sent:
            assert sent == pytest.approx(formula, rel=5e-3)


def test_formula_by_hand() -> None:
    """SD1.5: 859,520,964 numbers between two: each sends its half of the sum and the other's half: 4 bytes a number."""
    with torch.device("meta"):
        shapes = [tuple(parameter.shape) for parameter in UNET.build(ARCHITECTURES["sd15"]).parameters()]
    numbers = 859_520_964
    assert sent_by_formula("ddp", shapes, 2, 4) == 4 * numbers
    assert sent_by_formula("one", shapes, 2, 4) == sent_by_formula("ddp", shapes, 1, 4) == 0
    # Half of all weights in bf16, once or twice, and half of the float32 gradients, by gloo twice. 4 output channels
    # and all widths can be halved: nothing is filled up.
    assert sent_by_formula("shard_grad_op", shapes, 2, 2) == numbers * (1 + 4)
    assert sent_by_formula("full_shard", shapes, 2, 2) == numbers * (2 + 4)
    assert sent_by_formula("full_shard", shapes, 2, 2, "nccl") == numbers * (2 + 2)
    assert sent_by_formula("full_shard", [(5, 3)], 4, 2, "nccl") == 3 / 4 * (8 * 3) * (2 * 2 + 4)  # 5 rows in 4 parts


def test_kernel_counts_what_a_connection_sent() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            before = bytes_sent()
            one.sendall(bytes(10_000))
            left = 10_000
            while left:
                left -= len(other.recv(left))
            assert bytes_sent() - before == 10_000


def measurement(seconds: float, **changed: Any) -> Measurement:
    values = {"forward": [seconds / 3], "backward": [seconds / 2], "waiting": [0.25], "description": "cpu"}
    return Measurement(**{"seconds": [seconds], "peak_gb": 1.5, **values, **changed})


def measured_table(tmp_path: Path) -> dict[str, Any]:
    config = BenchConfig(method="unet", synthetic=True, arch="tiny", resolution=64, rounds=1)
    shape = "1x4x64x64x24 float32 gradient"
    chosen = {"attention": {shape: "whole"}, "ways": {shape: {"stock": 2.5, "whole": 1.25}}}
    rows: list[Any] = []
    for number, (size, batch, ema) in enumerate((s, b, e) for s in (1, 2) for b in (1, 64) for e in (False, True)):
        one = job(tmp_path, batch_size=batch, ema=ema, parallel="ddp" if size > 1 else "auto")
        rounds = [[measurement(0.123456 * (number + 1), sent=[1000] * (size - 1), **chosen)] * size]
        rows.append((number, one, size, None if batch == 64 and not ema else rounds))
    return tabulate(config, HERE, rows)


def test_table_is_whole_and_the_same_everywhere(tmp_path: Path) -> None:
    """A row each; the same numbers in JSON, CSV and Markdown; images/s is batch x processes / seconds."""
    result = measured_table(tmp_path)
    rows = result["rows"]
    assert len(rows) == 8
    files = unet_report.files(result)
    read = list(csv.DictReader(io.StringIO(files["csv"].decode())))
    assert [list(row) for row in read] == [list(rows[0])] * 8
    for row, line in zip(rows, read, strict=True):
        assert line == {name: "" if value is None else str(value) for name, value in row.items()}
        if row["status"] == OUT_OF_MEMORY:
            assert row["seconds_per_step"] is row["images_per_second"] is row["efficiency"] is None
            continue
        images = row["micro_batch"] * row["processes"] / row["seconds_per_step"]
        assert row["images_per_second"] == pytest.approx(images, rel=1e-3)
        assert row["images_per_second_per_device"] * row["processes"] == pytest.approx(images, rel=1e-3)
    assert [row["status"] for row in rows] == ["measured", "measured", OUT_OF_MEMORY, "measured"] * 2
    assert rows[4]["efficiency"] == pytest.approx(1 / 5, rel=1e-3)
    lines = files["md"].decode().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    headings, *table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[first : first + 10]]
    for row, cells in zip(rows, table[1:], strict=True):
        shown = dict(zip(headings, cells, strict=True))
        assert (shown["processes"], shown["micro-batch"], shown["EMA"]) == (
            str(row["processes"]),
            str(row["micro_batch"]),
            row["ema"],
        )
        if row["status"] == OUT_OF_MEMORY:
            assert shown["s/step"] == OUT_OF_MEMORY
            assert shown["images/s"] == ""
        else:
            assert float(shown["s/step"]) == row["seconds_per_step"]
            assert float(shown["images/s"]) == row["images_per_second"]
            assert float(shown["peak GB"]) == row["peak_gb"]
    assert "| 1x4x64x64x24 float32 gradient | whole | stock 2.5, whole 1.25 |" in lines
    with Image.open(io.BytesIO(files["png"])) as picture:
        assert picture.format == "PNG"


def test_comparison_pairs_the_rounds(tmp_path: Path) -> None:
    config = BenchConfig(method="unet", synthetic=True, compare="reference", rounds=3)
    reference = [[measurement(seconds)] for seconds in (4.0, 8.0, 6.0)]
    ours = [[measurement(seconds)] for seconds in (2.0, 2.0, 2.0)]
    found = compare(
        config,
        HERE,
        [("diffusers' script", job(tmp_path, backend=None), 1, reference), ("icom", job(tmp_path), 1, ours)],
    )
    assert found["contenders"]["icom"]["faster_by"] == 3
    assert found["contenders"]["icom"]["faster_by_range"] == [2, 4]
    lacking = compare(config, HERE, [("diffusers' script", job(tmp_path), 1, None), ("icom", job(tmp_path), 1, ours)])
    assert lacking["contenders"]["diffusers' script"]["status"] == OUT_OF_MEMORY
    assert "faster_by" not in lacking["contenders"]["icom"]


@pytest.mark.long
def test_table_goes_on_where_memory_does_not_suffice(tmp_path: Path, icom: Icom) -> None:
    """A limit of the kernel's that the large micro-batch meets and the small one does not; real processes."""
    prefix = tmp_path / "table"
    words = "bench --method unet --synthetic --rounds 1 --steps 1 --mixed_precision no --ema on --workers 2".split()
    words += ["--engine", "on", "--sweep_batch_sizes", "512", "2", "--sweep", str(prefix), "--json"]
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (3 * 2**30, hard))
    try:
        result = icom(*words, str(tmp_path / "table.json"))
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert result.code == 0, result.err
    assert "out of memory" in result.out
    measured = json.loads((tmp_path / "table.json").read_text())
    large, small = measured["rows"]
    assert (large["micro_batch"], large["status"]) == (512, OUT_OF_MEMORY)
    assert (small["micro_batch"], small["status"]) == (2, "measured")
    assert 0.2 < small["peak_gb"] < 3
    assert small["forward_seconds"] + small["backward_seconds"] < small["seconds_per_step"]
    attention = measured["attention"]
    assert attention  # --engine on measures, also for the small model
    for shape, found in attention.items():
        assert shape.startswith("2x")
        assert found["milliseconds"][found["chosen"]] <= min(
            ms for way, ms in found["milliseconds"].items() if not way.endswith(", kept")
        )
    assert all(prefix.with_suffix(f".{suffix}").is_file() for suffix in ("csv", "md", "png"))


@pytest.mark.long
def test_comparison_in_one_run(tmp_path: Path, icom: Icom) -> None:
    file = tmp_path / "compare.json"
    words = "bench --method unet --synthetic --compare reference --rounds 1 --steps 1 --mixed_precision no --json"
    result = icom(*words.split(), str(file))
    assert result.code == 0, result.err
    measured = json.loads(file.read_text())["contenders"]
    reference = measured.pop("diffusers' script")
    assert list(measured) == ["icom", "icom, latents precomputed"]
    for row in measured.values():
        ratio = reference["seconds_per_step"] / row["seconds_per_step"]
        assert row["faster_by"] == pytest.approx(ratio, rel=2e-3)
    assert "faster by" in result.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--method unet", "give --synthetic or --train_data_dir"),
        ("--method unet --synthetic --train_data_dir photos", "give --synthetic or --train_data_dir"),
        ("--synthetic", "--synthetic is for --method unet"),
        ("--method unet --synthetic --compare reference --sweep x", "drop --sweep and --ranks"),
        ("--method unet --synthetic --compare reference --precomputed", "drop --precomputed"),
        ("--method unet --synthetic --workers 0", "--workers has to be at least 1"),
        ("--method unet --synthetic --backend ipex", "--backend ipex is for frozen models"),
        ("--method unet --synthetic --ranks 99", "99 processes with a core each"),
    ],
)
def test_what_cannot_be_measured(words: str, message: str, icom: Icom) -> None:
    assert_message(icom("bench", *words.split()), 2, message)
