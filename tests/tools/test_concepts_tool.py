"""Guards tools.concepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from icom.errors import UsageError
from tools.concepts import ConceptsToolConfig, measure


@pytest.mark.long
def test_processes_at_once_take_as_many_models(tmp_path: Path) -> None:
    found = measure(ConceptsToolConfig(words=2, steps=1, output=tmp_path / "cost.json"))
    listed, in_turn, at_once = found.values()
    # Each process has torch and a model, and nothing of it is shared as the kernel counts it.
    assert at_once.gigabytes > 1.8 * in_turn.gigabytes
    assert listed.gigabytes < 1.2 * in_turn.gigabytes
    assert json.loads((tmp_path / "cost.json").read_text())["ways"]["one process, a list"]["seconds"] == listed.seconds


def test_bad_options() -> None:
    with pytest.raises(UsageError, match="--words and --steps"):
        ConceptsToolConfig(words=0)
