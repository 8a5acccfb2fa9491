"""Processes of their own in which torch and the libraries are looked at: one that crashes or hangs is a finding."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

_PROBE_SECONDS = 120
"""Patience with a process that loads libraries, from a slow disk on a busy machine."""


def in_fresh_python(code: str, **environment: str) -> tuple[str, str]:
    """Run code in a new interpreter; (its standard output, why it failed: empty if it did not)."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer in {_PROBE_SECONDS} s"
    if done.returncode < 0:
        return "", f"killed by {signal.Signals(-done.returncode).name}"
    return done.stdout, last_line(done.stderr) if done.returncode else ""


def last_line(text: str) -> str:
    """The last that is not empty: of a traceback, the error."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


@dataclass(frozen=True)
class TorchProbe:
    """What a fresh process with torch saw.

    Attributes:
        problem: why it failed; empty if it did not.
        threads: that torch computes with.
        isa: "matmul" and "convolution" -> oneDNN's implementation; a missing one did not run through oneDNN.
        factors: "matmul" and "convolution" -> time in bf16 over time in float32, by stock layers and by the engine's;
            measured where the CPU emulates bf16.
        libraries: file names of the allocators and OpenMP runtimes in that process.
    """

    problem: str = ""
    threads: int = 0
    isa: dict[str, str] = field(default_factory=dict)
    factors: dict[str, tuple[float, float]] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()


_PROBE_TORCH = """
import json, torch
matrix, picture = torch.ones(256, 256, dtype=torch.bfloat16), torch.ones(1, 64, 32, 32, dtype=torch.bfloat16)
kernel = torch.ones(64, 64, 3, 3, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
with torch.no_grad():
    matrix @ matrix
    torch.nn.functional.conv2d(picture.to(memory_format=torch.channels_last), kernel, padding=1)
from icom.engine.cost import bf16_factors
from icom.engine.operators import why_no_engine
from icom.engine.precision import product_dtype
factors = {}
if product_dtype(torch.bfloat16) != torch.bfloat16:
    stock, engine = (bf16_factors(packed=packed and not why_no_engine(torch.bfloat16)) for packed in (False, True))
    factors = {name: (stock[name], engine[name]) for name in stock}
told = {"threads": torch.get_num_threads(), "factors": factors, "maps": open("/proc/self/maps").read()}
print(json.dumps(told))
"""


def probe_torch() -> TorchProbe:
    """Multiply and convolve in bf16 in a fresh process, and read oneDNN's own account of it; time what is emulated."""
    verbose = {"ONEDNN_VERBOSE": "1", "DNNL_VERBOSE": "1", "ONEDNN_VERBOSE_TIMESTAMP": "0"}
    out, problem = in_fresh_python(_PROBE_TORCH, **verbose)
    if problem:
        return TorchProbe(problem)
    told = json.loads(out.splitlines()[-1])
    factors = {name: (stock, engine) for name, (stock, engine) in told["factors"].items()}
    return TorchProbe("", told["threads"], parse_onednn(out), factors, runtimes(told["maps"]))


def parse_onednn(text: str) -> dict[str, str]:
    """Kind of operation -> implementation, for the bf16 operations among the lines of ONEDNN_VERBOSE.

    In all forms of the line (`dnnl_verbose,exec,cpu,…`, `onednn_verbose,v1,primitive,exec,cpu,…`) engine, kind and
    implementation follow the word exec.
    """
    found = {}
    for line in text.splitlines():
        fields = line.split(",")
        if fields[0] in ("onednn_verbose", "dnnl_verbose") and "exec" in fields:
            after = fields[fields.index("exec") + 1 :]
            if len(after) > 3 and after[0] == "cpu" and "bf16" in line:
                found[after[1]] = after[2]
    return found


def runtimes(maps: str) -> tuple[str, ...]:
    """Allocators and OpenMP runtimes among the files of a /proc/PID/maps."""
    names = {Path(line.split(maxsplit=5)[5]).name for line in maps.splitlines() if "/" in line}
    return tuple(sorted(name for name in names if re.match(r"lib(tcmalloc|jemalloc|iomp5|gomp|omp)[-.\w]*\.so", name)))
