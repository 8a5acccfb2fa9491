"""A run that was interrupted anywhere, and resumed, is the run that was not.

Guards icom.training.checkpoint and icom.training.train.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from icom.training.checkpoint_folders import list_checkpoints
from tests.support.command import Result, long, start_process, train_arguments
from tests.support.waiting import wait_until

STEPS = 60
OPTIONS = {
    "max_train_steps": STEPS,
    "checkpointing_steps": 2,
    "checkpoints_total_limit": 3,
    "gradient_accumulation_steps": 2,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 10,
    "num_vectors": 2,
    "repeats": 3,
}


def rows(folder: Path) -> torch.Tensor:
    return load_file(folder / "learned_embeds.safetensors")["<robot>"]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def snapshot(folder: Path) -> dict[str, bytes]:
    """What has a step in its name: path below `folder` -> content."""
    patterns = ("checkpoint-*/*", "learned_embeds-steps-*", "validation/step-*")
    found = (path for pattern in patterns for path in folder.glob(pattern))
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def wait_for_steps(process: subprocess.Popen[str], folder: Path, more_than: int) -> None:
    """Until metrics.jsonl has more lines, or the process ended."""
    metrics = folder / "metrics.jsonl"
    wait_until(lambda: process.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") > more_than))


@pytest.mark.parametrize("kills", [(1, 2), long((0, 1, 2, 3))])
def test_kill_9_at_random_moments(kills: tuple[int, ...], tmp_path: Path, train: Callable[..., Result]) -> None:
    """Half of them while it starts, half while it trains and saves."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(output_dir=whole, **OPTIONS).code == 0
    chance = random.Random(5)
    arguments = train_arguments(output_dir=killed, resume_from_checkpoint="latest", **OPTIONS)
    for kill in kills:
        done = len(losses(killed)) if (killed / "metrics.jsonl").exists() else 0
        process = start_process(*arguments)
        if kill > 1:  # the first two die while they start
            wait_for_steps(process, killed, done + 3)  # so that a checkpoint is there
        time.sleep(chance.uniform(0, 0.1) + (1 if kill == 1 else 0))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "the run was over before it was killed: raise STEPS"
    # One more than the limit until the step after it has shown the newest to be good.
    assert 0 < len(list_checkpoints(killed)) <= 4
    result = train(output_dir=killed, resume_from_checkpoint="latest", **OPTIONS)
    assert result.code == 0
    assert "resumed after step" in result.out
    assert torch.equal(rows(killed), rows(whole))
    assert losses(killed) == losses(whole)
    assert not list(killed.glob(".*.tmp"))
    last = f"checkpoint-{STEPS}/state.safetensors"
    assert (killed / last).read_bytes() == (whole / last).read_bytes()


@pytest.mark.long
def test_sigterm_saves_and_exits_143(tmp_path: Path, train: Callable[..., Result]) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    options = OPTIONS | {"checkpointing_steps": 1000}
    assert train(output_dir=whole, **options).code == 0
    process = start_process(*train_arguments(output_dir=stopped, **options))
    wait_for_steps(process, stopped, 5)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 143
    assert "--resume_from_checkpoint latest" in err
    (checkpoint,) = list_checkpoints(stopped)
    assert f"saved {checkpoint}" in err
    assert int(checkpoint.name.removeprefix("checkpoint-")) == len(losses(stopped))
    assert train(output_dir=stopped, resume_from_checkpoint=str(checkpoint), **options).code == 0
    assert torch.equal(rows(stopped), rows(whole))


@pytest.mark.long
def test_resume_from_an_older_checkpoint_and_with_more_steps(tmp_path: Path, train: Callable[..., Result]) -> None:
    options: dict[str, object] = {"checkpointing_steps": 2, "lr_scheduler": "constant"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(output_dir=whole, max_train_steps=8, **options).code == 0
    assert train(output_dir=parts, max_train_steps=5, seed=7, **options).code == 0
    older = {"resume_from_checkpoint": "checkpoint-2", "max_train_steps": 8, "seed": None}
    assert train(output_dir=parts, **(options | older)).code == 0  # the seed comes from the checkpoint
    assert torch.equal(rows(parts), rows(whole))
    assert losses(parts) == losses(whole)


def test_resume_from_a_checkpoint_of_before_there_were_methods(tmp_path: Path, train: Callable[..., Result]) -> None:
    """Rows and moments under their bare names, the step in state.json alone: as icom wrote them until November 2026."""
    options: dict[str, object] = {"max_train_steps": 4, "lr_scheduler": "cosine", "lr_warmup_steps": 1}
    whole, old = tmp_path / "whole", tmp_path / "old"
    assert train(output_dir=whole, checkpointing_steps=2, **options).code == 0
    shutil.copytree(whole / "checkpoint-2", old / "checkpoint-2")
    tensors = load_file(old / "checkpoint-2/state.safetensors")
    content = save(
        {
            "rows": tensors["parameter/rows"],
            "exp_avg": tensors["optimizer/rows/exp_avg"],
            "exp_avg_sq": tensors["optimizer/rows/exp_avg_sq"],
        }
    )
    (old / "checkpoint-2/state.safetensors").write_bytes(content)
    document = json.loads((old / "checkpoint-2/state.json").read_text())
    document["sha256"] = hashlib.sha256(content).hexdigest()
    (old / "checkpoint-2/state.json").write_text(json.dumps(document))
    assert train(output_dir=old, resume_from_checkpoint="latest", **options).code == 0
    assert torch.equal(rows(old), rows(whole))
    assert losses(old) == losses(whole)[2:]


def test_starting_anew_never_mixes_with_an_earlier_run(tmp_path: Path, train: Callable[..., Result]) -> None:
    """A second run without --resume keeps what has a step in its name apart; one that goes on, what comes after."""
    watch = {"validation_prompt": "a <robot>", "num_validation_images": 1, "validation_steps": 2}
    assert train(output_dir=tmp_path, max_train_steps=6, checkpointing_steps=2, save_steps=2, **watch).code == 0
    old = snapshot(tmp_path)
    assert sorted(old) == sorted(
        [f"checkpoint-{step}/{name}" for step in (2, 4, 6) for name in ("state.json", "state.safetensors")]
        + [f"learned_embeds-steps-{step}.safetensors" for step in (2, 4, 6)]
        + [f"validation/step-{step}.png" for step in (2, 4, 6)]
    )
    (tmp_path / "learned_embeds-steps-mine.safetensors").write_text("no step")

    older = {"resume_from_checkpoint": "checkpoint-4", "max_train_steps": 5, "save_steps": 5}
    result = train(output_dir=tmp_path, **watch, **older)
    (first,) = (tmp_path / "earlier").iterdir()
    moved = "moved 1 embedding(s) and 1 validation picture(s) of steps after 4, which are done again, to"
    assert f"icom: {moved} {first}.\n" in result.err
    later = ("learned_embeds-steps-6.safetensors", "validation/step-6.png")
    assert snapshot(first) == {name: old[name] for name in later}
    now = snapshot(tmp_path)
    assert {name: now[name] for name in old if name not in later} == {n: old[n] for n in old if n not in later}
    assert "learned_embeds-steps-5.safetensors" in now

    first.rename(tmp_path / "first")  # so that it is not in the same second's folder
    result = train(output_dir=tmp_path, max_train_steps=2, checkpointing_steps=1, save_steps=1)
    (second,) = (tmp_path / "earlier").iterdir()
    assert "moved 4 checkpoint(s) and 3 embedding(s) and 2 validation picture(s) of an earlier run to" in result.err
    assert snapshot(second) == {
        name: content for name, content in now.items() if name != "learned_embeds-steps-mine.safetensors"
    }
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-2"]
    assert [*(tmp_path / "validation").iterdir()] == []
    assert {name for name in snapshot(tmp_path) if "embeds" in name} == {
        *(f"learned_embeds-steps-{step}.safetensors" for step in (1, 2, "mine"))
    }


@pytest.mark.parametrize("limit", [1, 2])
def test_limit_keeps_the_newest(tmp_path: Path, train: Callable[..., Result], limit: int) -> None:
    train(output_dir=tmp_path, max_train_steps=4, checkpointing_steps=1, checkpoints_total_limit=limit)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-4"][-limit:]


def test_resume_at_the_end_and_past_it(tmp_path: Path, train: Callable[..., Result]) -> None:
    assert train(output_dir=tmp_path, max_train_steps=3).code == 0
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = train(output_dir=tmp_path, max_train_steps=2, resume_from_checkpoint="latest")
    assert result.code == 1
    assert "The checkpoint is of step 3, past --max_train_steps 2: nothing was changed. Give more steps" in result.err
    assert "Learned" not in result.out
    assert "/?" not in result.err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    (tmp_path / "learned_embeds.safetensors").unlink()  # killed between its last step and its results
    result = train(output_dir=tmp_path, max_train_steps=3, resume_from_checkpoint="latest")
    assert result.code == 0
    assert "Step 3 was done already: wrote <robot> again in " in result.out
    assert "Learned" not in result.out
    assert (tmp_path / "learned_embeds.safetensors").read_bytes() == files[tmp_path / "learned_embeds.safetensors"]
