"""What NVIDIA's data sheets say of GPUs."""

from __future__ import annotations

import re

DENSE_BF16 = {
    "H200 NVL": 835,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
}
"""Words of a name -> peak of matrix products in bf16 without sparsity, in 10^12 operations per second."""


def peak_of(name: str) -> float | None:
    """The peak of a GPU as PyTorch names it ("NVIDIA H100 80GB HBM3"); None where no data sheet was looked up."""
    words = re.findall(r"\w+", name)
    return next((peak for card, peak in DENSE_BF16.items() if set(card.split()) <= set(words)), None)
