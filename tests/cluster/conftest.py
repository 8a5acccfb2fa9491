"""What the tests of a cluster share."""

from __future__ import annotations

import pytest

from tests.cluster.hosts import missing


@pytest.fixture(autouse=True, scope="session")
def _hosts_are_possible() -> None:
    """Every test in this folder needs hosts."""
    if lacking := missing():
        pytest.skip(f"hosts cannot be made on this machine: it lacks {', '.join(lacking)}")
