"""The micro-batch that is found fits, is the largest, and changes nothing; what runs out of memory says what to do.

Guards icom.training.micro_batch.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from icom.errors import IcomError
from icom.training.micro_batch import largest_that_fits
from tests.support.command import Result, assert_message, assert_refused, finetune_arguments, start_python
from tests.support.ranks import Ranks

LIMITED = """
import os, resource, sys
import diffusers.models, transformers, icom.training.finetune
from icom.cli import program
if limit := os.environ.get("MEGABYTES"):
    status = open("/proc/self/status").read()
    taken = int(status.split("VmData:")[1].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (taken + int(limit) * 10**6,) * 2)
program(sys.argv[1:])
"""
"""icom, with so many MB beside those that its libraries take."""


def limited(megabytes: int, *words: str) -> Result:
    environment = os.environ | {"MEGABYTES": str(megabytes)}
    process = start_python("-c", LIMITED, *words, environment=environment, cold=True)
    out, err = process.communicate()
    return Result(process.returncode, out, err)


def found(result: Result) -> tuple[int, int]:
    """The micro-batch, and of how many samples."""
    assert result.code == 0, result
    line = re.search(r"^icom: micro-batch (\d+) of (\d+): ", result.out, re.MULTILINE)
    assert line, result.out
    return int(line[1]), int(line[2])


def assert_same_checkpoint(one: Path, other: Path) -> None:
    tensors = [load_file(folder / "state.safetensors") for folder in (one, other)]
    assert tensors[0].keys() == tensors[1].keys()
    assert not [name for name, tensor in tensors[0].items() if not torch.equal(tensor, tensors[1][name])]


def test_largest_divisor_that_fits_and_nothing_beyond() -> None:
    """Against trying all; memory that is exceeded ends the process, so no size may be tried that takes too much."""
    chance = random.Random(5)
    for _ in range(300):
        samples, each = chance.randint(1, 100), chance.randint(1, 50)
        always = chance.choice((0, 0, chance.randint(1, 200)))
        room = chance.randint(always + each, always + each * 120)
        tried: list[int] = []

        def attempt(size: int, always: int = always, each: int = each, tried: list[int] = tried) -> int:
            tried.append(size)
            return always + size * each

        verdict = largest_that_fits(samples, attempt, 0, room)
        divisors = [size for size in range(1, samples + 1) if samples % size == 0]
        fitting = [size for size in divisors if always + size * each <= room]
        assert all(always + size * each <= room for size in tried)
        assert len(tried) <= 2 * samples.bit_length()
        if always == 0:
            assert verdict.size == fitting[-1]
        else:
            assert verdict.size in fitting


def test_exception_counts_as_too_large() -> None:
    verdict = largest_that_fits(24, lambda size: None if size > 6 else size, 10**9, 10**9)
    assert verdict.size == 6
    assert "8 does not fit: runs out of memory" in verdict.why
    with pytest.raises(IcomError, match="not even one sample fits"):
        largest_that_fits(24, lambda size: None, 0, 10**9)


def test_found_by_trying_is_as_given_by_hand(tmp_path: Path, icom: Callable[..., Result]) -> None:
    """Nothing that was tried is left in weights, random numbers or data."""
    options: dict[str, object] = {"total_batch_size": 4, "use_ema": True, "gradient_checkpointing": True}
    tried = icom(*finetune_arguments(output_dir=tmp_path / "tried", train_batch_size="auto", **options))
    assert found(tried) == (4, 4)
    assert "train_batch_size: 4\n" in (tmp_path / "tried/config.yaml").read_text()
    given = icom(*finetune_arguments(output_dir=tmp_path / "given", train_batch_size=4, **options))
    assert "micro-batch" not in given.out
    assert_same_checkpoint(tmp_path / "tried/checkpoint-2", tmp_path / "given/checkpoint-2")


@pytest.mark.long
def test_less_memory_gives_a_smaller_one_that_is_kept(tmp_path: Path, icom: Callable[..., Result]) -> None:
    """The total batch stays, the bits are that micro-batch's; a run that resumes keeps it where more would fit."""
    options: dict[str, object] = {"total_batch_size": 8, "resolution": 128, "max_train_steps": 1}
    auto = finetune_arguments(output_dir=tmp_path / "tried", train_batch_size="auto", **options)
    result = limited(550, *auto)
    size, samples = found(result)
    assert size in (2, 4) and samples == 8  # and not 1: what malloc would like to keep in reserve is no use
    assert f"total batch 8 ({size} x 1 processes x {8 // size} accumulated)" in result.out
    assert f"icom: micro-batch {size} of 8: {2 * size} does not fit: " in result.out
    assert icom(*finetune_arguments(output_dir=tmp_path / "given", train_batch_size=size, **options)).code == 0
    assert_same_checkpoint(tmp_path / "tried/checkpoint-1", tmp_path / "given/checkpoint-1")
    resumed = icom(*auto, "--max_train_steps=2", "--resume_from_checkpoint=latest")
    assert f"total batch 8 ({size} x 1 processes" in resumed.out
    assert "micro-batch" not in resumed.out


@pytest.mark.long
def test_smallest_of_all_processes_counts(tmp_path: Path) -> None:
    """And the training fits as the search foretold, with what FSDP needs, in the same threads."""
    options = {"total_batch_size": 16, "resolution": 128, "max_train_steps": 1, "output_dir": "out"}
    words = finetune_arguments(train_batch_size="auto", parallel="full_shard", **options)
    group = Ranks(tmp_path, 2, "-c", LIMITED, *words, of={1: {"MEGABYTES": "600"}})
    try:
        results = group.results()
    finally:
        group.end()
    assert [result.code for result in results] == [0, 0], results
    size, samples = found(results[0])
    assert size in (2, 4) and samples == 8


@pytest.mark.long
def test_out_of_memory_names_the_micro_batch(tmp_path: Path) -> None:
    options: dict[str, object] = {"resolution": 256, "output_dir": tmp_path, "train_batch_size": 16}
    result = limited(700, *finetune_arguments(**options))
    assert_message(
        result,
        1,
        "Out of memory in step 1 with 16 samples at a time (--train_batch_size 16): ",
        "--train_batch_size 8 or less",
        "--train_batch_size auto --total_batch_size 16",
        "--gradient_checkpointing",
    )
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_batch_size": "auto"}, "--train_batch_size auto: give --total_batch_size, too"),
        ({"total_batch_size": 4, "gradient_accumulation_steps": 2}, "drop one of them"),
        ({"total_batch_size": 6, "train_batch_size": 4}, "has to be a multiple of 4"),
        ({"total_batch_size": 0}, "--total_batch_size has to be at least 1"),
        ({"train_batch_size": 0}, "--train_batch_size has to be at least 1"),
    ],
)
def test_batches_that_cannot_be(
    options: dict[str, object], message: str, tmp_path: Path, icom: Callable[..., Result]
) -> None:
    assert_refused(icom(*finetune_arguments(output_dir=tmp_path / "out", **options)), 2, message)
    bad = icom("finetune", "--train_batch_size", "some", "--train_data_dir", "synthetic:4")
    assert bad.code == 2
