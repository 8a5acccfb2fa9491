"""What a package of icom says of its license (pyproject.toml, LICENSE, NOTICE).

Guards LICENSE, NOTICE and pyproject.toml.
"""

import email
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

from provisioning.project import project_files
from tests.support.command import ROOT

APACHE_2_0 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""SHA-256 of https://www.apache.org/licenses/LICENSE-2.0.txt, as many projects ship it."""


def test_a_package_carries_the_license(tmp_path: Path) -> None:
    """Built by the real setuptools, as pip does it, from what a cluster's node gets of a clone."""
    for path in project_files():
        if len(path.parts) == 1:
            shutil.copy(ROOT / path, tmp_path)
    code = "import sys; from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    info = tmp_path / done.stdout.splitlines()[-1]
    metadata = email.message_from_string((info / "METADATA").read_text())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE", "NOTICE"]
    assert hashlib.sha256((info / "licenses" / "LICENSE").read_bytes()).hexdigest() == APACHE_2_0
    assert (info / "licenses" / "NOTICE").read_bytes() == (ROOT / "NOTICE").read_bytes()


def test_notice_names_every_asset() -> None:
    """A picture or weight that is added needs a line that says where it comes from."""
    named = re.findall(r"^  (\S+/\S+)  ", (ROOT / "NOTICE").read_text(), re.MULTILINE)
    assert all((ROOT / name).exists() for name in named), named
    files = [path for folder in ("docs", "benchmarks") for path in (ROOT / folder).rglob("*.*") if is_binary(path)]
    files += [path for path in (ROOT / "icom" / "assets").rglob("*") if path.is_file() and ".py" not in path.suffix]
    missing = [str(path) for path in files if not any(path.is_relative_to(ROOT / name) for name in named)]
    assert len(files) > 30 and missing == []


def is_binary(path: Path) -> bool:
    return b"\0" in path.read_bytes()
