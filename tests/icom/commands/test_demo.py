"""Learning can be seen: the concept score before and after training.

Guards icom.commands.demo.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from icom.commands.demo import learn
from tests.support.command import Result

Icom = Callable[..., Result]


@pytest.mark.long
def test_a_concept_is_learned(tmp_path: Path) -> None:
    """The row that training starts from draws the concept by chance only, once in 192 pictures."""
    learned = learn("blue-heart", {"output_dir": str(tmp_path), "seed": 1, "max_train_steps": 150}, num_images=12)
    assert learned.before.score.share <= 0.1
    assert learned.after.score.share >= 0.5


def test_demo_shows_scores_grid_and_curve(tmp_path: Path, icom: Icom) -> None:
    arguments = "--concept red-moon --num_images 3 --max_train_steps 2 --seed 5".split()
    result = icom("demo", *arguments, "--output_dir", str(tmp_path / "demo"))
    assert result.code == 0, result.err
    for text in ("a red plain moon", "before training", "after training", "in a new context", "/3 ("):
        assert text in result.out
    with Image.open(tmp_path / "demo" / "before-after.png") as grid:
        assert grid.size == (3 * 64 + 2 * 4, 3 * 64 + 2 * 4)
    with Image.open(tmp_path / "demo" / "loss.png") as curve:
        assert curve.width > 500
    # `icom report` knows the score of a demo.
    score = f"{json.loads(icom('report', str(tmp_path / 'demo'), '--json').out)['score']:.0%}"
    after = next(line for line in result.out.splitlines() if "after training" in line)
    assert f"({score})" in after and score in icom("report", str(tmp_path / "demo")).out


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--num_images", "0"), 2, "--num_images has to be at least 1"),
        (("--concept", "pink-elephant"), 2, "purple-square"),
        (("--max_train_steps", "0"), 2, "--max_train_steps has to be at least 1"),
    ],
)
def test_bad_options(tmp_path: Path, icom: Icom, arguments: tuple[str, ...], code: int, text: str) -> None:
    result = icom("demo", "--output_dir", str(tmp_path), *arguments)
    assert result.code == code
    assert text in result.err + result.out
