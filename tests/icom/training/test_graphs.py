"""Recorded passes: each shape of batch has its own, and their results are those of passes that nobody recorded.

A stand-in records on the CPU: it keeps what was to be computed and does it again with the numbers that are then in the
same memory. CUDA's own recording is for tests/icom/backends/test_gpu.py.

Guards icom.training.graphs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image

from icom.backends.cpu import CpuBackend
from tests.support.checkpoints import assert_same_tensors
from tests.support.command import Result, assert_message

Train = Callable[..., Result]


class Recorder:
    """How often it recorded and played."""

    def __init__(self) -> None:
        self.recorded = self.played = 0

    def record(
        self, compute: Callable[[], Sequence[torch.Tensor]]
    ) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        self.recorded += 1
        results = [torch.full_like(result, torch.nan) for result in compute()]

        def play() -> None:
            self.played += 1
            for place, result in zip(results, compute(), strict=True):
                place.copy_(result)

        return results, play


def photos(folder: Path) -> Path:
    """Of two shapes."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    for number, size in enumerate([(96, 64), (64, 96), (96, 64), (64, 96)]):
        pixels = torch.randint(256, (size[1], size[0], 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    return folder


def test_what_is_learned_is_the_same(tmp_path: Path, train: Train) -> None:
    """Buckets, accumulation and pictures of the class: two shapes of two terms; their sums are those of `backward`."""
    options: dict[str, object] = {
        "train_data_dir": photos(tmp_path / "photos"),
        "enable_bucket": True,
        "train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_train_steps": 5,
        "checkpointing_steps": 3,
        "with_prior_preservation": True,
        "class_data_dir": photos(tmp_path / "class"),
        "class_prompt": "a photo of a <robot>",
        "num_class_images": 4,
        "prior_loss_weight": 0.5,
    }
    plain = train(output_dir=tmp_path / "plain", **options)
    assert plain.code == 0, plain
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuBackend, "asynchronous", True)
        patch.setattr(CpuBackend, "record", lambda _, compute: recorder.record(compute))
        recorded = train(output_dir=tmp_path / "recorded", enable_cuda_graph=True, **options)
        assert recorded.code == 0, recorded
    assert (recorder.recorded, recorder.played) == (4, 2 * 2 * 5)
    logs = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("plain", "recorded")]
    assert [json.loads(line)["loss"] for line in logs[0]] == [json.loads(line)["loss"] for line in logs[1]]
    for step in (3, 5):
        assert_same_tensors(tmp_path / f"plain/checkpoint-{step}", tmp_path / f"recorded/checkpoint-{step}")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({}, "--enable_cuda_graph is for --backend cuda, and this run is on cpu"),
        ({"gradient_checkpointing": True}, "--enable_cuda_graph records no --gradient_checkpointing"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    options: dict[str, object], part: str, tmp_path: Path, train: Train
) -> None:
    result = train(output_dir=tmp_path, enable_cuda_graph=True, backend="cpu", **options)
    assert_message(result, 2, part)
