"""What of `icom bench --backend cuda` shows without a GPU, and the commands of docs/gpu.md.

Guards icom.bench.cards, icom.config.bench and docs/gpu.md.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import pytest

from icom.bench.cards import peak_of
from icom.cli import parse
from tests.support.command import ROOT, Result, assert_message


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("", None),
    ],
)
def test_peaks_by_the_names_that_pytorch_gives(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--enable_cuda_graph --backend cpu", "--enable_cuda_graph is for --backend cuda"),
        ("--enable_cuda_graph --method unet --synthetic", "--enable_cuda_graph is for --method textual_inversion"),
        ("--profile trace.json --sweep table", "drop --method, --sweep, --ranks"),
        ("--profile trace.json --ranks 1,2", "drop --method, --sweep, --ranks"),
        ("--profile no/where/trace.json", "there is no folder"),
        ("--peak_tflops 0", "--peak_tflops has to be a positive number"),
        ("--peak_tflops inf", "--peak_tflops has to be a positive number"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: str, part: str, icom: Callable[..., Result]) -> None:
    assert_message(icom("bench", *words.split()), 2, part)


def test_commands_for_a_gpu_can_be_given() -> None:
    """All that the page says to run there: its options exist and go together."""
    page = (ROOT / "docs/gpu.md").read_text().partition("## What to run")[2]
    blocks = re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S)
    lines = re.findall(r"^.*?\b(icom (?:bench|train) .*?)(?:;|&|$)", "\n".join(blocks), re.M)
    assert len(lines) == 7
    for line in lines:
        words = shlex.split(re.sub(r"\$\w+", "1", line))
        assert parse(words[1:]).backend in ("cuda", "auto"), line
