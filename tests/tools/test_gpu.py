"""What `make test-gpu` does on a machine whose Python lacks something, and what is carried there.

Guards tools.gpu.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.command import ROOT
from tools import gpu


def imported_first(file: Path) -> set[str]:
    """Packages that are imported when the file is, but for icom's own and those for type checkers."""
    tree = ast.parse(file.read_text())
    names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names} - {"icom", "tests", "tools"} - set(sys.stdlib_module_names)


def test_what_the_tests_import_is_carried() -> None:
    """What they need beside torch: icom's dependencies, and what is imported by these test files and their fixtures."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    listed = re.findall(r'^  "([\w-]+)', pyproject.split("dependencies = [")[1].split("]")[0], re.M)
    carried = gpu.closure(gpu.NEEDED, "3.12")
    assert set(listed) - {"torch"} <= carried.keys()
    provider = importlib.metadata.packages_distributions()
    support = [ROOT / "tests/conftest.py", *(ROOT / "tests/support" / f"{name}.py" for name in ("command", "warm"))]
    for file in [*(ROOT / test for test in gpu.TESTS), *support]:
        for package in imported_first(file) - {"torch"}:
            assert any(name.lower() in carried for name in provider[package]), (file, package)


def test_torch_and_what_it_brings_stay_out() -> None:
    carried = gpu.closure(gpu.NEEDED, "3.12")
    assert not any(re.search("torch|nvidia|triton|cuda", name) for name in carried)
    assert carried["tyro"] == importlib.metadata.version("tyro")
    assert "docstring-parser" in carried  # tyro's


def wheel(folder: Path, name: str, needs: str = "") -> None:
    """The smallest that pip takes."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", "here = True\n")
        needed = f"Requires-Dist: {needs}\n" if needs else ""
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needed}")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


def test_what_is_missing_is_taken_from_the_folder_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wheels, carried = tmp_path / "wheels", tmp_path / "carried"
    wheels.mkdir()
    wheel(wheels, "carried_first", "carried_second")
    wheel(wheels, "carried_second", "pluggy")
    wheel(wheels, "pluggy")  # which is there
    monkeypatch.setattr(gpu, "CARRIED", carried)
    monkeypatch.setattr(gpu, "NEEDED", ("pytest", "carried-first"))
    assert gpu.bring_in(wheels) is None
    assert {path.name for path in carried.glob("*.py")} == {"carried_first.py", "carried_second.py"}
    taken = capfd.readouterr().out.partition(f"{wheels}: ")[2]
    assert "carried_second==1.0" in taken and "pytest" not in taken
    # Where pip finds something amiss, the tests may still run with what is there.
    shutil.rmtree(carried)
    (wheels / "carried_second-1.0-py3-none-any.whl").unlink()
    assert gpu.bring_in(wheels) is None
    assert "carried-second" in capfd.readouterr().out.partition("only what is not there")[0].replace("_", "-")
    assert [path.name for path in carried.glob("*.py")] == ["carried_first.py"]


@pytest.mark.long
def test_the_command_says_what_is_there_and_leaves_a_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "CARRIED", tmp_path / "carried")
    words = ["test", "--reports", str(tmp_path), "--processes", "1", "--", "-k", "nccl or precisions"]
    assert gpu.main(words) == 0
    said = capfd.readouterr().out
    assert "PyTorch, its CUDA, whether it sees a GPU: " in said and "missing: none" in said
    report = (tmp_path / "test-gpu.xml").read_text()
    assert "test_nccl_sums_a_steps_message" in report
