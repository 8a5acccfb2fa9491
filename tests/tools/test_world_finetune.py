"""What the teaching of a held-out thing is measured by. Guards tools.world.finetune."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.world.finetune import TeachConfig, teach


@pytest.mark.long
def test_before_it_is_taught_the_word_means_nothing_and_old_prompts_are_right(tmp_path: Path) -> None:
    """A step at a rate of nothing: tars, training, pictures and judge, end to end."""
    nothing = {"max_train_steps": "1", "learning_rate": "1e-12", "train_batch_size": "1", "lr_warmup_steps": "0"}
    numbers = {"new": 4, "old": 4, "num_images": 8, "num_old": 16}
    teach(TeachConfig(concepts=("green-star",), seeds=(0,), train=nothing, output_dir=tmp_path, **numbers))  # type: ignore[arg-type]
    (row,) = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert row["word"] <= 1 / 8
    assert row["old"] >= 15 / 16
