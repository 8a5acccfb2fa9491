"""Bad input to `icom generate`: see test_bad_input.py.

Guards icom.commands.generate.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.command import Result, Run, assert_refused, cut


@pytest.mark.parametrize(
    "code, arguments, message",
    [
        (2, (), ("No prompt. Give one with --prompt", "--prompts_file")),
        (2, ("--prompts_file", "nowhere.txt"), ("Cannot read --prompts_file nowhere.txt",)),
        (2, ("--prompt", "x", "--resolution", "70"), ("multiple of 8, not 70. Nearest: 64 or 72",)),
        (2, ("--prompt", "x", "--num_inference_steps", "0"), ("--num_inference_steps has to be at least 1",)),
        (2, ("--prompt", "x", "--seed", "-1"), ("--seed has to be between 0 and",)),
        (2, ("--prompt", "x", "--seed", str(2**64)), ("--seed has to be between 0 and",)),
        (2, ("--prompt", "x", "--mixed_precision", "fp16"), ("fp16",)),
        (
            2,
            ("--prompt", "x", "--scheduler", "ddim", "--num_inference_steps", "2000"),
            ("--scheduler ddim cannot do --num_inference_steps 2000", "Try 25"),
        ),
        (
            1,
            ("--prompt", "x", "--embedding", "nowhere.safetensors"),
            ("embedding nowhere.safetensors does not exist",),
        ),
    ],
)
def test_generate(
    icom: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    arguments: tuple[str, ...],
    message: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(icom("generate", *arguments), code, *message)
    assert not list(tmp_path.rglob("*.png"))


def test_bad_embedding_files(icom: Run, tmp_path: Path) -> None:
    def draw(path: Path) -> Result:
        return icom("generate", f"--embedding={path}", "--prompt=x", f"--output_dir={tmp_path / 'out'}")

    file = tmp_path / "learned_embeds.safetensors"
    save_file({"<x>": torch.zeros(2, 768)}, file)
    result = draw(file)
    assert_refused(result, 1, str(file), "rows of width 768 and bundled has 128", "--pretrained_model_name_or_path")
    cut(file)
    assert_refused(draw(file), 1, f"{file} is not a safetensors file, or damaged (", "of a run")
    for tensors, message in (
        ({"<x>": torch.zeros(2, 3, 4)}, "of shape (2, 3, 4); expected (vectors, width)"),
        ({"<x>": torch.zeros(0, 128)}, "of shape (0, 128); expected (vectors, width)"),
        ({"<x>": torch.full((1, 128), torch.nan)}, "holds numbers that are not finite"),
    ):
        save_file(tensors, file)
        assert_refused(draw(file), 1, str(file), message)
    assert_refused(draw(tmp_path), 1, f"{tmp_path} is a folder. Name the learned_embeds.safetensors")
    assert not list(tmp_path.rglob("*.png"))
