"""A device that computes while Python goes on: what a step came to is known when the next one has begun.

The CPU stands in for it. All that people get is what they get where nothing is late.

Guards icom.training.loop and icom.training.step.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from icom.backends.cpu import CpuBackend
from icom.training.checkpoint_folders import list_checkpoints
from tests.support.checkpoints import assert_same_tensors, validation_curve
from tests.support.command import Result, assert_message
from tests.support.ranks import Ranks

Train = Callable[..., Result]

STEPS = 9
PLAIN: dict[str, object] = {"max_train_steps": STEPS, "checkpointing_steps": 4, "save_steps": 5}
OPTIONS: list[dict[str, object]] = [
    {"gradient_accumulation_steps": 2, "max_grad_norm": 1e-3, "use_ema": True, "lr_scheduler": "cosine"},
    {"validation_share": 0.4, "train_batch_size": 4, "preserve_embedding_norm": 0.5, "snr_gamma": 5},
]


class Device:
    """Numbers of a device that nobody may look at before they are asked for.

    Attributes:
        begun: steps.
        log: for each step that became known, how many had begun by then.
        at: called with the number of each step, as it is begun.
    """

    def __init__(self, at: Callable[[int], None] = lambda step: None) -> None:
        self.begun, self.at = 0, at
        self.log: list[int] = []

    def read_later(self, numbers: torch.Tensor) -> Callable[[], list[float]]:
        self.begun += 1
        self.at(self.begun)
        copy = numbers.clone()

        def read() -> list[float]:
            self.log.append(self.begun)
            return copy.tolist()

        return read

    def put(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(CpuBackend, "asynchronous", True)
        patch.setattr(CpuBackend, "read_later", lambda _, numbers: self.read_later(numbers))


def rows_of(folder: Path) -> torch.Tensor:
    return load_file(folder / "learned_embeds.safetensors")["<robot>"]


def told(folder: Path) -> list[dict[str, Any]]:
    """Metrics, without what is measured."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(row.pop("seconds") > 0 for row in rows)
    return rows


def assert_same_run(one: Path, other: Path) -> None:
    assert told(one) == told(other)
    assert torch.equal(rows_of(one), rows_of(other))
    names = [path.name for path in list_checkpoints(one)]
    assert names == [path.name for path in list_checkpoints(other)]
    for name in names:
        assert_same_tensors(one / name, other / name)
    for path in one.glob("learned_embeds-steps-*"):
        assert path.read_bytes() == (other / path.name).read_bytes()


@pytest.mark.parametrize("options", OPTIONS)
def test_people_get_the_same(options: dict[str, object], tmp_path: Path, train: Train) -> None:
    result = train(output_dir=tmp_path / "known", **PLAIN, **options)
    assert result.code == 0, result
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        device.put(patch)
        assert train(output_dir=tmp_path / "late", **PLAIN, **options).code == 0
    assert_same_run(tmp_path / "known", tmp_path / "late")
    if "validation_share" in options:
        assert validation_curve(tmp_path / "known") == validation_curve(tmp_path / "late")
    else:  # asked for one step late, and at once only where something is made of the rows: at steps 4, 5, 8 and 9
        assert device.log == [2, 3, 4, 4, 5, 7, 8, 8, 9]


def test_interrupted_and_resumed_is_the_whole_run(tmp_path: Path, train: Train) -> None:
    assert train(output_dir=tmp_path / "known", **PLAIN).code == 0
    device = Device(lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 2 else None)
    with pytest.MonkeyPatch.context() as patch:
        device.put(patch)
        # The signal is part of step 3, which is known when step 4 has begun: what is saved is all of that.
        stopped = train(output_dir=tmp_path / "late", **PLAIN)
        assert_message(stopped, 130, "stopped after step 4;", "--resume_from_checkpoint latest")
        assert [path.name for path in list_checkpoints(tmp_path / "late")] == ["checkpoint-4"]
        assert [row["step"] for row in told(tmp_path / "late")] == [1, 2, 3, 4]
        assert train(output_dir=tmp_path / "late", resume_from_checkpoint="latest", **PLAIN).code == 0
    assert_same_run(tmp_path / "known", tmp_path / "late")


def test_nothing_of_a_step_that_diverged_is_saved(tmp_path: Path, train: Train) -> None:
    """Noticed a step late; and at once where the next thing would be to save."""
    options = PLAIN | {"learning_rate": 1e-2, "checkpointing_steps": 2}
    assert train(output_dir=tmp_path, **options | {"max_train_steps": 4}).code == 0
    good = rows_of(tmp_path)
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        device.put(patch)
        again: dict[str, Any] = {
            "output_dir": tmp_path,
            "resume_from_checkpoint": "checkpoint-4",
            "learning_rate": 1e30,
        }
        result = train(**options | again)
        assert_message(result, 1, "The loss became nan at step 6;", "checkpoint-4: continue from it")
        # Step 5 makes the rows huge, and 6 would be saved.
        assert [row["step"] for row in told(tmp_path)] == [1, 2, 3, 4, 5]
        assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4"]
        result = train(**options | again | {"checkpointing_steps": 100, "save_steps": 100})
        assert_message(result, 1, "The loss became nan at step 6;")
    assert device.begun == 2 + 3
    assert [row["step"] for row in told(tmp_path)] == [1, 2, 3, 4, 5]
    assert torch.equal(rows_of(tmp_path), good)


@pytest.mark.long
def test_several_processes(tmp_path: Path, train: Train, ranks: Callable[..., Ranks]) -> None:
    """The signal of one of them ends all at the same step."""
    options: dict[str, object] = {"max_train_steps": 40, "checkpointing_steps": 1000}
    code = (
        "import sys; from icom.backends.cpu import CpuBackend; CpuBackend.asynchronous = True\n"
        "from icom.cli import main; main(sys.argv[1:])"
    )
    group = ranks(2, of={}, **options)
    started = Ranks(tmp_path / "late", 2, "-c", code, *group.arguments[2:])
    try:
        started.wait_for_steps(2)
        started.processes[1].send_signal(signal.SIGTERM)
        results = started.results()
    finally:
        started.end()
    assert [result.code for result in results] == [143, 143], results
    late = tmp_path / "late/rank0/out"
    (checkpoint,) = list_checkpoints(late)
    done = int(checkpoint.name.removeprefix("checkpoint-"))
    assert len(told(late)) == done
    assert [result.code for result in group.results()] == [0, 0]
    assert told(late) == told(tmp_path / "rank0/out")[:done]
