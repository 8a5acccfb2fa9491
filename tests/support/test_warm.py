"""A process that is forked off the template is what a fresh one would be. Guards tests/support/warm.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.command import Run, start_python, train_arguments

THREADS = "import torch; print(torch.get_num_threads())"


def test_template_is_not_what_a_test_made_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads is read when PyTorch is imported: a template without it would give all others more."""
    kept = dict(os.environ)
    warm.close()  # the next one to ask makes it
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert start_python("-c", THREADS, environment=os.environ).communicate()[0] == "2\n"
    assert start_python("-c", THREADS, environment=kept).communicate()[0] == f"{kept['OMP_NUM_THREADS']}\n"


def test_what_icom_sets_itself_needs_no_cold_start(icom: Run, tmp_path: Path) -> None:
    assert icom(*train_arguments(output_dir=tmp_path)).code == 0
    assert warm.can_start(os.environ)
