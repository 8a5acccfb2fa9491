"""What a checkpoint holds is said, and one that is damaged or diverged is told apart.

Guards icom.commands.inspect.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from icom.files import file_digest
from tests.support.command import Result, assert_message


def test_whole_damaged_and_diverged(tmp_path: Path, train: Callable[..., Result], icom: Callable[..., Result]) -> None:
    assert train(output_dir=tmp_path, num_vectors=2).code == 0
    folder = tmp_path / "checkpoint-3"
    tensors = load_file(folder / "state.safetensors")
    shown = icom("inspect", str(folder))
    assert shown.code == 0
    assert "After step 3 of 3; goes on with sample 3" in shown.out
    told = json.loads(icom("inspect", str(folder), "--json").out)
    rows = tensors["parameter/rows"]
    assert told["parts"]["weights"] | {"norm": 0} == {
        "tensors": 1,
        "numbers": rows.numel(),
        "bytes": 4 * rows.numel(),
        "dtype": "float32",
        "norm": 0,
        "finite": True,
    }
    assert abs(told["parts"]["weights"]["norm"] - float(torch.linalg.vector_norm(rows))) < 1e-4

    tensors["optimizer/rows/exp_avg"][0, 5] = torch.nan
    save_file(tensors, folder / "state.safetensors")
    assert_message(icom("inspect", str(folder)), 1, "damaged", "was altered or cut")
    document = json.loads((folder / "state.json").read_text())
    document["sha256"] = file_digest(folder / "state.safetensors")
    (folder / "state.json").write_text(json.dumps(document))
    assert_message(icom("inspect", str(folder)), 1, "not finite (optimizer: exp_avg)", "earlier checkpoint")
