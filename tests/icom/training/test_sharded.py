"""A checkpoint in parts is the one in one file: for whoever reads it, in whatever number.

Guards icom.training.stored, and what writes and reads parts in icom.training.checkpoint and finetune_state.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from icom.files import file_digest
from icom.training.stored import Stored
from tests.support.checkpoints import tensors_in
from tests.support.command import Result, assert_message, finetune_arguments
from tests.support.ranks import Ranks
from tests.support.small_unet import write_small_unet

ADAM = {"adam_epsilon": "1e-3", "use_ema": True, "ema_decay": 0.9, "max_grad_norm": 0.5}


def deal_out(tensors: dict[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    """As torch.chunk does, which may come to fewer pieces than asked for; what has no rows is the first one's."""
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(size)]
    for name, tensor in tensors.items():
        for part, rows in zip(parts, tensor.chunk(size) if tensor.dim() else [tensor], strict=False):
            part[name] = rows.contiguous()
    return parts


def split(checkpoint: Path, size: int) -> None:
    """Make of a checkpoint in one file one in parts, by hand."""
    whole = checkpoint / "state.safetensors"
    digests = {}
    for rank, part in enumerate(deal_out(load_file(whole), size)):
        name = f"state-{rank + 1:05}-of-{size:05}.safetensors"
        save_file(part, checkpoint / name)
        digests[name] = file_digest(checkpoint / name)
    whole.unlink()
    document = json.loads((checkpoint / "state.json").read_text())
    del document["sha256"]
    (checkpoint / "state.json").write_text(json.dumps(document | {"parts": digests}))


def same(one: Path, other: Path) -> bool:
    left, right = tensors_in(one), tensors_in(other)
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def near(one: Path, other: Path) -> None:
    left, right = tensors_in(one), tensors_in(other)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.allclose(left[name], right[name], rtol=0, atol=1e-6), name


def test_rows_are_those_of_the_whole(tmp_path: Path) -> None:
    tensors = {"matrix": torch.randn(7, 3, 2), "short": torch.randn(2), "count": torch.tensor(4.0)}
    for written in (1, 2, 3, 5):
        folder = tmp_path / str(written)
        folder.mkdir()
        for rank, part in enumerate(deal_out(tensors, written)):
            save_file(part, folder / f"state-{rank + 1:05}-of-{written:05}.safetensors")
        stored = Stored(folder)
        assert {name: stored.shape(name) for name in stored} == {name: tuple(t.shape) for name, t in tensors.items()}
        assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())
        for name in ("matrix", "short"):
            count = len(tensors[name])
            for begin in range(count + 1):
                for end in range(begin, count + 1):
                    assert torch.equal(stored.rows(name, range(begin, end)), tensors[name][begin:end])


@pytest.mark.long
def test_parts_are_read_as_one_file_is(tmp_path: Path, icom: Callable[..., Result]) -> None:
    """Resuming, inspecting, starting from its weights; and what is damaged or missing is said."""
    one, parts = tmp_path / "one", tmp_path / "parts"
    options = ADAM | {"max_train_steps": 4, "checkpointing_steps": 2}
    assert icom(*finetune_arguments(output_dir=one, **options)).code == 0
    shutil.copytree(one, parts)
    shutil.rmtree(parts / "checkpoint-4")
    split(parts / "checkpoint-2", 3)
    told = [json.loads(icom("inspect", str(folder / "checkpoint-2"), "--json").out) for folder in (one, parts)]
    for summary in [*told[0]["parts"].values(), *told[1]["parts"].values()]:
        summary["norm"] = round(summary["norm"], 9)  # the order in which it is summed up differs
    assert told[0] == told[1]
    assert icom(*finetune_arguments(output_dir=parts, resume_from_checkpoint="latest", **options)).code == 0
    assert same(one / "checkpoint-4", parts / "checkpoint-4")
    started = []
    for folder in (one, parts):
        words = {"weights_from": folder / "checkpoint-2", "max_train_steps": 1}
        assert icom(*finetune_arguments(output_dir=tmp_path / f"from-{folder.name}", **ADAM | words)).code == 0
        started.append(tmp_path / f"from-{folder.name}" / "checkpoint-1")
    assert same(*started)

    middle = parts / "checkpoint-2/state-00002-of-00003.safetensors"
    content = middle.read_bytes()
    middle.write_bytes(content[:-1] + b"\x01")
    assert_message(icom("inspect", str(parts / "checkpoint-2")), 1, "damaged", f"{middle.name} was altered or cut")
    middle.unlink()
    shutil.rmtree(parts / "checkpoint-4")
    resumed = icom(*finetune_arguments(output_dir=parts, resume_from_checkpoint="latest", **options))
    assert_message(resumed, 1, f"it is not complete (no {middle.name})", "No checkpoint in")


def run(folder: Path, count: int, **options: object) -> list[Result]:
    """A training in so many processes."""
    options = {"max_train_steps": 4, "checkpointing_steps": 2, "total_batch_size": 6} | options
    words = finetune_arguments(**ADAM, from_scratch=write_small_unet(folder.parent), **options)
    group = Ranks(folder, count, "-m", "icom", *words)
    try:
        return group.results()
    finally:
        group.end()


@pytest.mark.long
def test_each_process_writes_its_part_and_any_number_goes_on(tmp_path: Path) -> None:
    """Two write parts; three, one, and two with another way to share go on; and from one file into parts."""
    out = tmp_path / "out"
    results = run(tmp_path / "a", 2, output_dir=out, parallel="full_shard")
    assert [result.code for result in results] == [0, 0], results
    assert "sharded checkpoints: each process writes its own part" in results[0].out
    files = sorted((out / "checkpoint-4").glob("*.safetensors"))
    assert [file.name for file in files] == [f"state-0000{rank}-of-00002.safetensors" for rank in (1, 2)]
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 0.55 * sum(sizes)  # nobody has, or sends, the other's
    assert not list(out.glob(".*"))
    plain = tmp_path / "plain"
    results = run(tmp_path / "b", 2, output_dir=plain, parallel="full_shard", checkpoint_format="whole")
    assert [result.code for result in results] == [0, 0], results
    assert same(out / "checkpoint-4", plain / "checkpoint-4")
    pipelines = [load_file(at / "current_pipeline/unet/diffusion_pytorch_model.safetensors") for at in (out, plain)]
    mean = {name[5:]: tensor for name, tensor in tensors_in(plain / "checkpoint-4").items() if name.startswith("mean/")}
    assert all(torch.equal(pipelines[0][name], mean[name]) for name in mean)
    assert all(torch.equal(pipelines[1][name], mean[name]) for name in mean)
    for start, count, changed, exact in (
        (out, 2, {"parallel": "full_shard"}, True),
        (plain, 2, {"parallel": "full_shard"}, True),
        (out, 3, {"parallel": "shard_grad_op"}, False),
        (out, 2, {"parallel": "ddp"}, False),
        (out, 1, {}, False),
    ):
        again = tmp_path / f"{start.name}-{count}-{changed.get('parallel')}"
        shutil.copytree(start, again)
        shutil.rmtree(again / "checkpoint-4")
        changed |= {"train_batch_size": 2 if count == 3 else 1, "resume_from_checkpoint": "latest"}
        results = run(tmp_path / f"of-{again.name}", count, output_dir=again, **changed)
        assert [result.code for result in results] == [0] * count, results
        assert "resumed after step 2" in results[0].out
        near(again / "checkpoint-4", out / "checkpoint-4")
        if exact:
            assert same(again / "checkpoint-4", out / "checkpoint-4")


@pytest.mark.long
def test_output_that_is_not_shared(tmp_path: Path) -> None:
    """Each process stands in a folder of its own, as on machines without a common disk."""
    results = run(tmp_path / "a", 2, output_dir="out", parallel="shard_grad_op", checkpoint_format="sharded")
    assert [result.code for result in results] == [1, 1]
    assert "(rank 1) cannot see what rank 0 writes to out" in results[0].err + results[1].err
    results = run(tmp_path / "b", 2, output_dir="out", parallel="shard_grad_op")
    assert [result.code for result in results] == [0, 0], results
    assert "whole checkpoints: not all machines share --output_dir" in results[0].out
    out = tmp_path / "b/rank0/out"
    for step in (2, 4):
        split(out / f"checkpoint-{step}", 2)
    words = {"parallel": "shard_grad_op", "max_train_steps": 6, "resume_from_checkpoint": "latest"}
    results = run(tmp_path / "b", 2, output_dir="out", **words)
    assert [result.code for result in results] == [1, 1]
    assert "(rank 1) does not see" in results[0].err + results[1].err


def test_parts_where_each_process_has_all(tmp_path: Path, icom: Callable[..., Result]) -> None:
    result = icom(*finetune_arguments(output_dir=tmp_path, checkpoint_format="sharded"))
    assert_message(result, 2, "--checkpoint_format sharded is for --parallel shard_grad_op and full_shard")
