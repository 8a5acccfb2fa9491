"""Python, torch, the libraries, IPEX, oneCCL, MPI."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata

from icom.commands.doctor.finding import Finding
from icom.commands.doctor.probe import TorchProbe, in_fresh_python, last_line
from icom.config.launch import Flavour
from icom.launch.mpi import NAMES, flavour_of

_SHORT_SECONDS = 5
"""Patience with `mpirun --version`."""


def check_python() -> list[Finding]:
    """The interpreter that runs this."""
    return [Finding("Python", "ok", f"{platform.python_version()}, {sys.executable}")]


def check_torch(version: str | None, probe: TorchProbe) -> list[Finding]:
    """Present, new enough, and computing."""
    fix = "make setup-master, or pip install 'torch>=2.8' from https://download.pytorch.org/whl/cpu"
    if version is None:
        return [Finding("torch", "failure", "not installed", fix)]
    if probe.problem:
        return [Finding("torch", "failure", f"{version} does not run: {probe.problem}", fix)]
    if _minor(version) < (2, 8):
        return [Finding("torch", "failure", f"{version}: icom needs 2.8 or newer", fix)]
    return [Finding("torch", "ok", version)]


_PROBE_ENGINE = """
import json, torch
from icom.engine.operators import FEATURES, why_not
print(json.dumps({name: [why_not(name, dtype) for dtype in (torch.bfloat16, torch.float32)] for name in FEATURES}))
"""


def check_engine() -> list[Finding]:
    """Whether the engine's private operators are there and compute right, in both precisions."""
    out, problem = in_fresh_python(_PROBE_ENGINE)
    if problem:
        return [Finding("engine", "warning", f"unknown: {problem}", "See the line of torch.")]
    told: dict[str, list[str | None]] = json.loads(out.splitlines()[-1])
    wrong = [f"{name} ({reason})" for name, reasons in told.items() for reason in reasons if reason]
    if wrong:
        fix = "Stock layers do that part, slower. Install PyTorch's own build: make setup-master"
        return [Finding("engine", "warning", f"cannot use {', '.join(dict.fromkeys(wrong))}", fix)]
    return [Finding("engine", "ok", f"{', '.join(told)} agree with stock PyTorch")]


_PROBE_LIBRARIES = """
import accelerate, safetensors.torch
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTokenizer
import os
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
try:
    os.path.isfile(default_config_file) and load_config_from_file(None)
except Exception as error:
    print(default_config_file, str(error).partition(", please")[0].replace(chr(10), " "), sep=": ")
"""


def check_libraries() -> list[Finding]:
    """diffusers, transformers and Accelerate: there, and fit to be imported together."""
    names = ("diffusers", "transformers", "accelerate")
    versions = {name: version(name) for name in names}
    fix = "make setup-master installs versions that fit together."
    found = [
        Finding(name, "ok", version) if version else Finding(name, "failure", "not installed", fix)
        for name, version in versions.items()
    ]
    if not all(versions.values()):
        return found
    said, problem = in_fresh_python(_PROBE_LIBRARIES)
    if problem:
        return [*found, Finding("these together", "failure", problem, fix)]
    found.append(Finding("these together", "ok", "diffusers, transformers and Accelerate load"))
    if refused := said.strip():
        fix = "Move it away; icom's accelerate_configs/ serve every machine: accelerate launch --config_file …"
        found.append(Finding("accelerate config", "warning", f"of an older version: {refused}", fix))
    return found


def check_ipex(version: str | None, torch: str | None) -> list[Finding]:
    """Optional; it loads only beside the torch it was built for."""
    if version is None:
        return [Finding("IPEX", "note", "not installed (optional)")]
    if torch is None or _minor(version) != _minor(torch):
        major, minor = _minor(version)
        fix = f"pip uninstall intel-extension-for-pytorch, or a venv of its own with torch {major}.{minor}."
        return [Finding("IPEX", "warning", f"{version} does not fit torch {torch}", fix)]
    _, problem = in_fresh_python("import torch, intel_extension_for_pytorch")
    if problem:
        return [Finding("IPEX", "warning", f"{version} does not load: {problem}", "Reinstall it or uninstall it.")]
    return [Finding("IPEX", "ok", version)]


def check_oneccl(version: str | None, torch: str | None) -> list[Finding]:
    """Optional; gloo serves without it."""
    if version is None:
        return [Finding("oneCCL", "note", "not installed (optional): several processes use gloo")]
    if torch is None or _minor(version) != _minor(torch):
        fix = "pip uninstall oneccl_bind_pt, or install the version of your torch."
        return [Finding("oneCCL", "warning", f"bindings {version} do not fit torch {torch}", fix)]
    _, problem = in_fresh_python("import torch, oneccl_bindings_for_pytorch")
    if problem:
        fix = "It needs libmpi and libfabric: source its env/setvars.sh, or start with Intel MPI's mpirun."
        return [Finding("oneCCL", "warning", f"bindings {version} do not load: {problem}", fix)]
    return [Finding("oneCCL", "ok", f"bindings {version}; several processes use them (--collectives)")]


def check_mpi() -> list[Finding]:
    """Which MPI the mpirun on PATH belongs to."""
    path = shutil.which("mpirun")
    if path is None:
        return [Finding("MPI", "note", "no mpirun on PATH (optional; for several machines)")]
    fix = "Put a working mpirun first on PATH, or take this one off it."
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            timeout=_SHORT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return [Finding("MPI", "warning", f"{path} --version does not answer in {_SHORT_SECONDS} s", fix)]
    except OSError as error:
        return [Finding("MPI", "warning", f"{path} does not start: {error.strerror}", fix)]
    if done.returncode:
        why = last_line(done.stderr) or f"exit code {done.returncode}"
        return [Finding("MPI", "warning", f"{path} --version fails: {why}", fix)]
    return [Finding("MPI", "ok", f"{name_mpi(done.stdout + done.stderr)}, {path}")]


_NUMBERS: dict[Flavour, str] = {
    "intel": r"Intel\(R\) MPI Library.*?Version\s+([\d.]+)",
    "openmpi": r"(?:Open MPI|OpenRTE)\)?\s+v?([\d.]+\w*)",
    "mpich": r"HYDRA build details:.*?Version:\s+([\d.]+\w*)",
}
"""Where each tells its version."""


def name_mpi(text: str) -> str:
    """Maker and version, from what `mpirun --version` prints."""
    flavour = flavour_of(text)
    number = re.search(_NUMBERS[flavour], text, re.DOTALL) if flavour else None
    if flavour is None or number is None:
        return f"an unknown MPI ({text.strip().partition(chr(10))[0][:60]})"
    return f"{NAMES[flavour]} {number[1]}"


def version(distribution: str) -> str | None:
    """Of an installed distribution; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)
