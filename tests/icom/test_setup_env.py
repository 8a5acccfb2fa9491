"""The set-up as a user meets it (icom/setup_env, the Makefile): make, real venvs and pip, local wheels, servers.

Guards icom.setup_env and the Makefile.
"""

import ast
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from icom.setup_env import constraints, downloads, environment, image, torch_wheel
from tests.support.clone import JPEG, TORCH, Clone, closed_port, make_wheel, server
from tests.support.command import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "clone")


# ---------------------------------------------------------------- torch


def test_cpu_index_is_taken_when_it_answers(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    with server(tmp_path) as (address, _):
        assert torch_wheel.torch_index({}, address)[0] == address


def test_cpu_index_that_refuses_is_passed_over() -> None:
    index, why = torch_wheel.torch_index({}, f"http://127.0.0.1:{closed_port()}")
    assert index is None
    assert "refused" in why


def test_cpu_index_that_hangs_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # takes the connection, never answers
        index, why = torch_wheel.torch_index({}, f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert index is None
    assert "no answer" in why or "timed out" in why


@pytest.mark.long
def test_cuda_build_is_refused_unless_allowed(clone: Clone) -> None:
    make_wheel(clone.wheels, "torch", TORCH, ("nvidia-cublas",))
    make_wheel(clone.wheels, "nvidia-cublas", "1.0")
    refused = clone.make("setup-master")
    assert refused.returncode != 0
    for word in ("nvidia-cublas", "GB", "TORCH_INDEX_URL", "ICOM_ALLOW_CUDA_TORCH=1"):
        assert word in refused.stderr
    assert "Traceback" not in refused.stderr
    assert f"torch-{TORCH}" not in clone.installed()

    allowed = clone.make("setup-master", "ICOM_ALLOW_CUDA_TORCH=1")
    assert allowed.returncode == 0, allowed.stderr
    assert {f"torch-{TORCH}", "nvidia_cublas-1.0"} <= clone.installed()


@pytest.mark.long
def test_torch_comes_from_the_given_index(clone: Clone, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "index", "torch", TORCH)
    (tmp_path / "index" / "torch").mkdir()
    wheel.rename(tmp_path / "index" / "torch" / wheel.name)
    with server(tmp_path / "index") as (address, asked):
        done = clone.make("setup-master", f"TORCH_INDEX_URL={address}", PIP_NO_INDEX="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"torch-{TORCH}" in clone.installed()
    assert f"/torch/{wheel.name}" in asked


# ---------------------------------------------------------------- once, and not again


@pytest.mark.long
def test_second_run_does_nothing_until_something_changes(clone: Clone) -> None:
    make_wheel(clone.wheels, "torch", TORCH)
    first = clone.make("setup-master")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "no conda" in first.stdout
    assert {f"torch-{TORCH}", "icom-0.1.0"} <= clone.installed()
    assert "gadget-1.0" not in clone.installed()

    second = clone.make("setup-stable-diffusion-icom-master")
    assert second.returncode == 0
    assert "up to date" in second.stdout
    assert "pip" not in second.stdout and "Requirement already" not in second.stdout

    # Another extra is added, and stays when a target does not ask for it.
    for words in (["setup-master", "EXTRAS=dev"], ["setup-master"]):
        assert clone.make(*words).returncode == 0
        assert "gadget-1.0" in clone.installed()
    ran = clone.make("run", "CMD=python -c 'import sys; print(sys.prefix)'")
    assert ran.stdout.splitlines()[-1] == str(clone.folder / ".venv")
    assert "Requirement already" not in ran.stdout

    make_wheel(clone.wheels, "torch", "9.1")
    (clone.folder / "constraints.txt").write_text("torch==9.1\n")
    changed = clone.make("setup-master")
    assert changed.returncode == 0, changed.stdout + changed.stderr
    assert {"torch-9.1", "gadget-1.0"} <= clone.installed()


def test_unknown_extra_is_named(clone: Clone) -> None:
    failed = clone.make("setup-master", "EXTRAS=nonsense")
    assert failed.returncode != 0
    assert "no extra 'nonsense'; there are: dev" in failed.stderr


# ---------------------------------------------------------------- conda or venv


@pytest.mark.long
def test_conda_is_used_where_there_is_one(clone: Clone) -> None:
    make_wheel(clone.wheels, "torch", TORCH)
    log, prefix = clone.add_conda()
    first = clone.make("setup-master")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "conda environment diffuser_icom" in first.stdout
    assert not (clone.folder / ".venv").exists()
    file = clone.folder / "environment.yml"
    assert f"env create -n diffuser_icom -f {file}" in log.read_text().splitlines()
    assert f"torch-{TORCH}" in clone.installed(prefix)

    again = clone.make("run", "CMD=python -c 'import sys; print(sys.prefix)'")
    assert again.stdout.splitlines()[-1] == str(prefix)
    assert "env update" not in log.read_text()

    file.write_text(file.read_text() + "# changed\n")
    assert clone.make("setup-master").returncode == 0
    assert f"env update -n diffuser_icom -f {file}" in log.read_text().splitlines()


def paste(clone: Clone, line: str, then: str, shell: str = "bash") -> subprocess.CompletedProcess[str]:
    """Type two lines into a shell in which make has just run."""
    text = f"{line}\n{then}\n"
    return subprocess.run([shell], input=text, env=clone.env, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_the_printed_way_in_works_in_a_shell_without_conda(clone: Clone) -> None:
    """As after install-miniconda in the same shell: nothing was added to PATH, and no `conda init` has run."""
    make_wheel(clone.wheels, "torch", TORCH)
    home = clone.folder.parent / "with space" / "forge"
    _, prefix = clone.add_conda(folder=home / "bin")
    for _ in range(2):  # a set-up and one that has nothing to do
        done = clone.make("setup-master", CONDA_PREFIX_DIR=str(home))
        assert done.returncode == 0, done.stdout + done.stderr
        line = done.stdout.rpartition("icom setup: to type icom commands in this shell: ")[2].strip()
        for shell in ("bash", "sh"):
            pasted = paste(clone, line, "python -c 'import sys; print(sys.prefix)'", shell)
            assert (pasted.stdout, pasted.stderr) == (f"{prefix}\n", ""), line


@pytest.mark.parametrize("name", ["mamba", "micromamba"])
def test_the_way_in_with_another_conda(clone: Clone, name: str) -> None:
    _, prefix = clone.add_conda(name, clone.folder / "elsewhere")
    (prefix / "bin").mkdir(parents=True)
    conda = environment.find_conda({**clone.env, "MAMBA_EXE": str(clone.folder / "elsewhere" / name)})
    pasted = paste(clone, environment.Environment("conda", prefix, conda).activation(), 'echo "$CONDA_PREFIX"')
    assert (pasted.stdout, pasted.stderr) == (f"{prefix}\n", "")


@pytest.mark.long
def test_the_printed_way_into_a_venv_works(clone: Clone) -> None:
    make_wheel(clone.wheels, "torch", TORCH)
    done = clone.make("setup-master", "VENV=my env")
    assert done.returncode == 0, done.stdout + done.stderr
    line = done.stdout.rpartition("icom setup: to type icom commands in this shell: ")[2].strip()
    pasted = paste(clone, line, "command -v python")
    assert pasted.stdout.strip() == str(clone.folder / "my env" / "bin" / "python"), pasted.stderr


def test_env_manager_forces_venv(clone: Clone) -> None:
    clone.add_conda("mamba")
    assert environment.choose_manager(clone.env)[0] == "conda"
    assert environment.choose_manager({**clone.env, "ENV_MANAGER": "venv"})[0] == "venv"


def test_env_manager_conda_without_conda_says_what_to_do(clone: Clone) -> None:
    for words in (["setup-master", "ENV_MANAGER=conda"], ["setup-master", "ENV_MANAGER=poetry"]):
        failed = clone.make(*words)
        assert failed.returncode != 0
        assert ("make install-miniconda" if "conda" in words[1] else "conda or venv") in failed.stderr


def test_install_miniconda(clone: Clone, tmp_path: Path) -> None:
    """A stand-in installer: downloaded, verified, run; then found, so not run twice."""
    installer = tmp_path / "site" / "Mini.sh"
    installer.parent.mkdir()
    installer.write_text('mkdir -p "$3/bin" && touch "$3/bin/conda" && chmod +x "$3/bin/conda"\n')
    prefix = tmp_path / "forge"
    unreachable = f"http://127.0.0.1:{closed_port()}/Mini.sh"
    failed = clone.make("install-miniconda", f"CONDA_INSTALLER_URL={unreachable}")
    assert failed.returncode != 0
    assert f"cannot download {unreachable}" in failed.stderr
    with server(installer.parent) as (address, asked):
        words = ("install-miniconda", f"CONDA_INSTALLER_URL={address}/Mini.sh", f"CONDA_PREFIX_DIR={prefix}")
        checksum = installer.with_name("Mini.sh.sha256")
        checksum.write_text("0" * 64 + "  Mini.sh\n")
        damaged = clone.make(*words)
        assert damaged.returncode != 0 and "is damaged" in damaged.stderr
        assert not prefix.exists()
        checksum.unlink()
        assert clone.make(*words).returncode == 0
        assert (prefix / "bin" / "conda").exists()
        count = len(asked)
        assert "nothing to do" in clone.make(*words).stdout
        assert len(asked) == count


# ---------------------------------------------------------------- pictures


def test_pictures_are_downloaded(clone: Clone, tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "sd-concepts-library/dicoo/resolve/main/concept_images"
    folder.mkdir(parents=True)
    for i in range(5):
        (folder / f"{i}.jpeg").write_bytes(JPEG + str(i).encode())
    with server(tmp_path / "hub") as (address, asked):
        for _ in range(2):
            done = clone.make("download-training-images", HF_ENDPOINT=address)
            assert done.returncode == 0, done.stderr
    got = {path.name: path.read_bytes() for path in (clone.folder / "dicoo").iterdir()}
    assert got == {f"{i}.jpeg": JPEG + str(i).encode() for i in range(5)}
    assert len(asked) == 5


@pytest.mark.parametrize("hub", ["unreachable", "incomplete"])
def test_pictures_without_the_hub_leave_nothing(clone: Clone, tmp_path: Path, hub: str) -> None:
    before = sorted(clone.folder.iterdir())
    folder = tmp_path / "hub" / "sd-concepts-library/dicoo/resolve/main/concept_images"
    folder.mkdir(parents=True)
    (folder / "0.jpeg").write_bytes(JPEG)
    with server(tmp_path / "hub") as (address, _):
        endpoint = address if hub == "incomplete" else f"http://127.0.0.1:{closed_port()}"
        failed = clone.make("download-training-images", HF_ENDPOINT=endpoint)
    assert failed.returncode != 0
    assert failed.stdout == ""
    lines = [line for line in failed.stderr.splitlines() if not line.startswith("make")]
    assert len(lines) == 1
    assert f"cannot download {endpoint}" in lines[0]
    assert sorted(clone.folder.iterdir()) == before


# ---------------------------------------------------------------- what the tests need


def test_missing_test_tools_are_installed_by_root_and_named_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(downloads, "TEST_TOOLS", {"sh": "dash", "no-such-command": "no-such-package"})
    monkeypatch.setattr(downloads, "BROWSER", {"sh": "dash"})
    called, apt = tmp_path / "called", tmp_path / "apt-get"
    apt.write_text(f'#!/bin/sh\necho "$@" >> {called}\n[ ! -e {tmp_path}/broken ] || exit 100\n')
    apt.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    monkeypatch.setenv("PATH", env["PATH"])
    monkeypatch.setattr(downloads.os, "geteuid", lambda: 0)
    downloads.install_test_tools(env)
    update, install = called.read_text().splitlines()
    assert update.split()[-1] == "update"
    assert "install" in install and install.split()[-1] == "no-such-package" and "dash" not in install
    assert "skipped" not in capfd.readouterr().out
    (tmp_path / "broken").touch()
    downloads.install_test_tools(env)
    assert "no no-such-command here" in (said := capfd.readouterr().out) and "exit code 100" in said
    monkeypatch.setattr(downloads.os, "geteuid", lambda: 1000)
    called.unlink()
    downloads.install_test_tools(env)
    assert "takes root on Debian" in capfd.readouterr().out and not called.exists()
    monkeypatch.setattr(downloads, "TEST_TOOLS", {"sh": "dash"})
    downloads.install_test_tools(env)
    assert capfd.readouterr().out == ""
    monkeypatch.setattr(downloads, "BROWSER", {"no-such-browser": "no-such-package"})
    downloads.install_test_tools(env)
    assert "tests in a browser are skipped: no no-such-browser here" in capfd.readouterr().out


# ---------------------------------------------------------------- the image


def test_image_without_a_tool_and_push_without_a_registry_say_what_to_do(clone: Clone) -> None:
    clone.env["PATH"] = str(clone.tools)  # with make alone
    for name in ("make", "bash", "git", "sh"):
        (clone.tools / name).symlink_to(shutil.which(name) or name)
    failed = clone.make("image")
    assert failed.returncode != 0
    assert "no docker; no podman; no buildah" in failed.stderr and "apt-get install" in failed.stderr
    (clone.tools / "docker").write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    (clone.tools / "docker").chmod(0o755)
    failed = clone.make("image", CONTAINER_TOOL="docker")
    assert "docker does not work (Cannot connect to the Docker daemon)" in failed.stderr
    failed = clone.make("push", "IMAGE=icom:cpu")
    assert failed.returncode != 0 and "IMAGE=REGISTRY/NAME:TAG" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_the_build_is_told_what_pip_is_told_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours.pem").touch()
    (tmp_path / "theirs").write_text(
        "[global]\nindex-url = https://user:word@mirror.test/simple\ntimeout = 7\n"
        f"find-links =\n    /one\n    /two\ncert = {tmp_path / 'ours.pem'}\n[install]\nno-binary = x\n"
    )
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "theirs"))
    monkeypatch.setenv("PIP_TIMEOUT", "9")
    settings = image.pip_settings([tmp_path / "no-python", Path(sys.executable)])
    files = image.secrets(settings, {}, tmp_path)
    assert files["ca.pem"] == tmp_path / "ours.pem" and files["pip.conf"].stat().st_mode & 0o077 == 0
    # As pip itself understands it.
    monkeypatch.delenv("PIP_TIMEOUT")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(files["pip.conf"]))
    there = image.pip_settings([Path(sys.executable)])
    expected = {
        "index-url": ["https://user:word@mirror.test/simple"],
        "timeout": ["9"],
        "find-links": ["/one", "/two"],
        "cert": ["/run/secrets/ca.pem"],
        "no-binary": ["x"],
    }
    assert {name: there[name].split() for name in expected} == expected


# ---------------------------------------------------------------- the files


def test_constraints_pin_every_direct_dependency() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    direct = {constraints.canonical(one) for one in constraints.direct_requirements(project)}
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*( ; python_version .*)?", pin) for pin in pins)
    assert {pin.partition("==")[0] for pin in pins} == direct
    assert {"torch", "pytest", "boto3", "wandb"} <= direct


def test_pins_follow_what_each_python_can_have() -> None:
    assert constraints.pin_lines("x", {"3.10": "1", "3.11": "1"}) == ["x==1"]
    assert constraints.pin_lines("x", {"3.10": "1", "3.11": "2", "3.12": "2", "3.13": "3"}) == [
        'x==1 ; python_version < "3.11"',
        'x==2 ; python_version >= "3.11" and python_version < "3.13"',
        'x==3 ; python_version >= "3.13"',
    ]


def test_what_is_installed_needs_nothing_that_is_not() -> None:
    """Where icom is installed there is no tools/ and no tests/, as in an image."""
    files = [file for package in ("icom", "provisioning") for file in (ROOT / package).rglob("*.py")]
    imports = [(file, node) for file in files for node in ast.walk(ast.parse(file.read_text()))]
    for file, node in imports:
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert not {name.partition(".")[0] for name in names} & {"tools", "tests"}, file


def test_help_lists_targets_that_exist(clone: Clone) -> None:
    listing = clone.make()
    assert listing.returncode == 0
    targets = re.findall(r"^  make (\S+) +\S", listing.stdout, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert set(targets) == set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    for target in targets:
        assert clone.make("-n", target).returncode == 0, target


def test_python_too_old_or_absent_is_said(clone: Clone) -> None:
    for name in ("python3", *(f"python3.{minor}" for minor in (10, 11, 12, 13))):
        (clone.tools / name).write_text("#!/bin/sh\nexit 1\n")  # as an old one answers our question
        (clone.tools / name).chmod(0o755)
    del clone.env["PYTHON"]
    failed = clone.make("setup-master")
    assert failed.returncode != 0
    assert "no Python >= 3.10" in failed.stderr and "PYTHON=" in failed.stderr
