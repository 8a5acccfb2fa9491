"""Memory, allocator, disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from icom import machine
from icom.commands.doctor.finding import GB, Finding, gigabytes
from icom.commands.doctor.probe import TorchProbe
from icom.engine.memory import keep_freed_memory
from icom.files import is_full, write_error

_ENOUGH_MEMORY = 6 * GB
"""SD1.5 at 512 px trains in 4 to 5 GB in bf16."""
_LEAST_MEMORY = 2 * GB
"""The weights of SD1.5 alone take this much in bf16."""
_MODEL_DOWNLOAD = 6 * GB
"""On disk, for a model like SD1.5."""
_RESULTS = GB // 10
"""On disk, for embeddings, checkpoints, pictures and logs."""


def check_memory(memory: machine.Memory) -> list[Finding]:
    """Against what SD1.5 takes at 512 px in bf16."""
    value = f"{gigabytes(memory.available)} available of {gigabytes(memory.total)}"
    if memory.available < _LEAST_MEMORY:
        fix = "Free memory or take a larger machine; the bundled model (icom demo) needs 1 GB."
        return [Finding("memory", "failure", f"{value}: SD1.5's weights do not fit", fix)]
    if memory.available < _ENOUGH_MEMORY:
        fix = "Use --mixed_precision bf16 --train_batch_size 1, and --gradient_checkpointing if that is not enough."
        return [Finding("memory", "warning", f"{value}; SD1.5 at 512 px takes 4 to 5 GB in bf16", fix)]
    return [Finding("memory", "ok", value)]


def check_allocator(probe: TorchProbe) -> list[Finding]:
    """Whether freed blocks are kept: by a preloaded allocator, or by glibc's with icom's settings."""
    preloaded = [name for name in probe.libraries if "tcmalloc" in name or "jemalloc" in name]
    if preloaded:
        return [Finding("allocator", "ok", f"{', '.join(preloaded)}, preloaded")]
    if keep_freed_memory():
        return [Finding("allocator", "ok", "glibc's, set to keep freed memory")]
    fix = "Preload tcmalloc: LD_PRELOAD=…/libtcmalloc.so.4"
    return [Finding("allocator", "warning", "cannot be told to keep freed memory: every step clears it anew", fix)]


def check_openmp(probe: TorchProbe) -> list[Finding]:
    """The OpenMP runtimes that are loaded with torch."""
    runtimes = [name for name in probe.libraries if "omp" in name]
    return [Finding("OpenMP", "note", ", ".join(runtimes))] if runtimes else []


def check_preloads() -> list[Finding]:
    """The loader's own complaints about LD_PRELOAD."""
    if not os.environ.get("LD_PRELOAD"):
        return [Finding("LD_PRELOAD", "note", "not set")]
    done = subprocess.run(
        [sys.executable, "-S", "-c", ""],
        env=os.environ | {"LC_ALL": "C"},
        capture_output=True,
        check=False,
        text=True,
        timeout=5,
    )
    bad = dict(re.findall(r"object '(.*?)' from LD_PRELOAD cannot be preloaded \((.*?)\)", done.stderr))
    if not bad:
        return [Finding("LD_PRELOAD", "ok", os.environ["LD_PRELOAD"])]
    fix = "Install it, or take it out of LD_PRELOAD: it is ignored."
    return [Finding("LD_PRELOAD", "warning", f"{path}: {reason}", fix) for path, reason in bad.items()]


def check_output(folder: Path) -> list[Finding]:
    """Training ends where it cannot write its results."""
    value, error = _try_writing(folder)
    if error:
        why = str(write_error(folder, error)).partition(" Choose another")[0]
        fix = "Free some space, or choose another --output_dir." if is_full(error) else "Choose another --output_dir."
        return [Finding("output_dir", "failure", why, fix)]
    if machine.free_disk(folder) < _RESULTS:
        return [
            Finding("output_dir", "warning", value, "Free some space: checkpoints and pictures take a few MB each.")
        ]
    return [Finding("output_dir", "ok", value)]


def check_cache(folder: Path) -> list[Finding]:
    """Without the latent cache training goes on, but encodes all pictures anew in each run. And the Hub's cache."""
    value, error = _try_writing(folder)
    if error:
        found = [Finding("cache_dir", "warning", f"{folder}: {error.strerror}", "Choose another --cache_dir.")]
    else:
        found = [Finding("cache_dir", "ok", value)]
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    models = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    value, error = _try_writing(models)
    fix = "Set HF_HOME to a folder on another disk."
    if error:
        return [*found, Finding("Hub's cache", "warning", f"{models}: {error.strerror}", fix)]
    if machine.free_disk(models) < _MODEL_DOWNLOAD:
        return [*found, Finding("Hub's cache", "warning", f"{value}; a model takes {gigabytes(_MODEL_DOWNLOAD)}", fix)]
    return [*found, Finding("Hub's cache", "ok", value)]


def _try_writing(folder: Path) -> tuple[str, OSError | None]:
    """Make a folder in the folder, or in the nearest parent that exists, and take it away again."""
    try:
        place = machine.nearest_existing(folder)
        with tempfile.TemporaryDirectory(prefix=".icom-doctor-", dir=place):
            pass
        return f"{folder}: writable, {gigabytes(machine.free_disk(folder))} free", None
    except OSError as error:
        return "", error
