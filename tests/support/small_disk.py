"""A disk that is small, or may only be read: mounted for one script."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.command import ROOT, Result


def on_a_disk(folder: Path, script: str, **environment: str) -> Result:
    """Run a shell script that may mount on `folder`, its $DISK; what it mounts is its alone and goes with it."""
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], check=False).returncode:
        pytest.skip("may not mount here")
    folder.mkdir()
    done = subprocess.run(
        [*unshare, "sh", "-euc", script],
        check=False,
        cwd=ROOT,
        env=os.environ | {"DISK": str(folder)} | environment,
        capture_output=True,
        text=True,
    )
    return Result(done.returncode, done.stdout, done.stderr)
