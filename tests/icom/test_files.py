"""Files of tensors are what safetensors' own reader takes for them. Guards icom.files."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from icom.files import write_tensors


def test_tensors_of_any_layout_are_read_back_by_safetensors(tmp_path: Path) -> None:
    tensors = {
        "convolution": torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last),
        "step": torch.tensor(3.0),
        "none": torch.zeros(0, 5),
        "transposed": torch.randn(5, 4).t(),
        "count": torch.tensor([2**40, -1]),
        "exact": torch.tensor(0.1, dtype=torch.float64),
        "parameter": torch.nn.Parameter(torch.randn(7)),
    }
    write_tensors(tmp_path / "file.safetensors", tensors)
    read = load_file(tmp_path / "file.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name], tensor)
    write_tensors(tmp_path / "again.safetensors", dict(reversed(tensors.items())))
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "file.safetensors").read_bytes()
