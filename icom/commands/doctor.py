"""`icom doctor`: what a long run needs, each line with a mark and, where something is wrong, the fix.

✗ means that training would fail, ! that it would be slow or lack something, · is a fact. torch and the libraries are
looked at in processes of their own: one that crashes, hangs or does not load becomes a line of the table.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NoResultInTime  # not the built-in one before Python 3.11
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from icom import machine
from icom.config.doctor import DoctorConfig
from icom.engine.memory import keep_freed_memory
from icom.errors import IcomError
from icom.files import cache_folder, is_full, write_atomically, write_error

Status = Literal["ok", "note", "warning", "failure"]
MARKS: dict[Status, str] = {"ok": "✓", "note": "·", "warning": "!", "failure": "✗"}
_COLOURS: dict[Status, str] = {"ok": "green", "note": "dim", "warning": "yellow", "failure": "red"}

GB = 2**30
_ENOUGH_MEMORY = 6 * GB
"""SD1.5 at 512 px trains in 4 to 5 GB in bf16."""
_LEAST_MEMORY = 2 * GB
"""The weights of SD1.5 alone take this much in bf16."""
_MODEL_DOWNLOAD = 6 * GB
"""On disk, for a model like SD1.5."""
_RESULTS = GB // 10
"""On disk, for embeddings, checkpoints, pictures and logs."""
_PROBE_SECONDS = 120
"""Patience with a process that loads libraries, from a slow disk on a busy machine."""
_SHORT_SECONDS = 5
"""Patience with the Hub and with `mpirun --version`."""


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        name: what was looked at.
        status: see MARKS.
        value: what was found.
        fix: what to do; empty where nothing has to be done.
    """

    name: str
    status: Status
    value: str
    fix: str = ""


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


def doctor(config: DoctorConfig) -> None:
    """Run every check, print the table, and write --json.

    Raises:
        IcomError: training would fail here, or --json cannot be written.
    """
    findings = examine(config)
    failed = [finding.name for finding in findings if finding.status == "failure"]
    report = json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, indent=1)
    if config.json == "-":
        print(report)
    else:
        _print_table(findings)
    if config.json not in (None, "-"):
        write_atomically(Path(str(config.json)), report.encode(), "--json")
    if failed:
        raise IcomError(f"Training would fail here: {', '.join(failed)}. The fix is on the line of each ✗.")


def examine(config: DoctorConfig) -> list[Finding]:
    """All findings, in the order of the table. Passwords in addresses are left out."""
    with ThreadPoolExecutor(12) as pool:
        probe = pool.submit(probe_torch)
        checks: list[tuple[str, Callable[[], list[Finding]]]] = [
            ("CPU", check_cpu),
            ("instruction set", lambda: check_isa(machine.cpu_flags(), probe.result(), os.environ)),
            ("cores", check_cores),
            ("threads", lambda: check_threads(probe.result(), machine.usable_cores())),
            ("affinity", lambda: check_affinity(os.environ, machine.allowed_cpus(), probe.result())),
            ("memory", lambda: check_memory(machine.memory())),
            ("allocator", lambda: check_allocator(probe.result())),
            ("OpenMP", lambda: check_openmp(probe.result())),
            ("LD_PRELOAD", check_preloads),
            ("output_dir", lambda: check_output(Path(config.output_dir))),
            ("cache_dir", lambda: check_cache(cache_folder(config.cache_dir))),
            ("Python", check_python),
            ("torch", lambda: check_torch(_version("torch"), probe.result())),
            ("engine", check_engine),
            ("diffusers", check_libraries),
            ("IPEX", lambda: check_ipex(_version("intel_extension_for_pytorch"), _version("torch"))),
            ("oneCCL", lambda: check_oneccl(_version("oneccl_bind_pt"), _version("torch"))),
            ("MPI", check_mpi),
            ("network", lambda: check_network(os.environ)),
            ("Hub", lambda: check_hub(os.environ)),
        ]
        running = [pool.submit(_guarded, name, check) for name, check in checks]
        return [_without_secrets(finding) for found in running for finding in found.result()]


def _guarded(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as error:  # a check that breaks must not hide what the others found
        problem = f"this check broke: {type(error).__name__}: {error}"
        return [Finding(name, "failure", problem, "Report it, with this line and the output of `icom --version`.")]


def _without_secrets(finding: Finding) -> Finding:
    def clean(text: str) -> str:
        text = re.sub(r"(?<=//)[^/@\s]+@", "", text)  # user:password@ of an address
        return re.sub(r"\bhf_[A-Za-z0-9]{8,}", "hf_…", text)

    return Finding(finding.name, finding.status, clean(finding.value), clean(finding.fix))


def _print_table(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="What training finds here")
    for column in ("", "what", "found", "to do"):
        table.add_column(column, overflow="fold")  # a path is of use only as a whole
    for finding in findings:
        mark = Text(MARKS[finding.status], style=_COLOURS[finding.status])
        # Text: brackets in a value are no markup.
        table.add_row(mark, Text(finding.name), Text(finding.value), Text(finding.fix))
    Console().print(table)


# The CPU.


def check_cpu(root: Path = machine.ROOT) -> list[Finding]:
    """Its name, and the flags that matter for bf16."""
    flags = machine.cpu_flags(root)
    wanted = [flag for flag in ("avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8") if flag in flags]
    return [
        Finding("CPU", "ok", machine.cpu_model(root)),
        Finding("CPU flags", "note", " ".join(wanted) or "neither AVX-512 nor AMX"),
    ]


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
    out, problem = _in_fresh_python(_PROBE_TORCH, **verbose)
    if problem:
        return TorchProbe(problem)
    told = json.loads(out.splitlines()[-1])
    factors = {name: (stock, engine) for name, (stock, engine) in told["factors"].items()}
    return TorchProbe("", told["threads"], parse_onednn(out), factors, _runtimes(told["maps"]))


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


def check_isa(flags: frozenset[str], probe: TorchProbe, environment: Mapping[str, str]) -> list[Finding]:
    """What oneDNN really runs for a bf16 matrix product and convolution, against what the CPU has."""
    if probe.problem:
        return [Finding("bf16 instructions", "warning", "unknown: torch does not run", "See the line of torch.")]
    return [_judge_isa(kind, probe, flags, environment) for kind in ("matmul", "convolution")]


def _judge_isa(kind: str, probe: TorchProbe, flags: frozenset[str], environment: Mapping[str, str]) -> Finding:
    name, implementation = f"bf16 {kind}", probe.isa.get(kind, "")
    # The instruction set is the part after the last colon; "gemm:jit:bf16" is a data type there.
    used = implementation.rpartition(":")[2]
    value = f"oneDNN {implementation}" if implementation else "PyTorch's own kernel, not oneDNN"
    if kind in probe.factors:
        stock, engine = probe.factors[kind]
        value = f"{value}, {stock:.1f} x float32's time; {engine:.1f} x with icom's engine"
    if "amx" in used:
        return Finding(name, "ok", f"{value}: AMX")
    limit = next((key for key in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA") if environment.get(key)), "")
    fix = f"unset {limit} (it is {environment[limit]})." if limit else ""
    if {"amx_tile", "amx_bf16"} <= flags:
        fix = fix or "Use Linux 5.16 or newer, and a newer torch; a hypervisor or sandbox may hold AMX back too."
        return Finding(name, "warning", f"{value}; the CPU has AMX, which is not used", fix)
    if re.search(r"avx512_core_(bf16|fp16)|avx10", used):
        return Finding(name, "ok", f"{value}: AVX512-BF16")
    if "avx2_vnni_2" in used:
        return Finding(name, "ok", f"{value}: AVX-NE-CONVERT")
    if "avx512_bf16" in flags:
        fix = fix or "Upgrade torch."
        return Finding(name, "warning", f"{value}; the CPU has AVX512-BF16, which is not used", fix)
    fix = "Use --mixed_precision auto: float32 here (twice the memory). Or take a CPU with AVX512-BF16 or AMX."
    return Finding(name, "warning", f"{value}; the CPU has no bf16 instructions", fix)


def check_cores(root: Path = machine.ROOT) -> list[Finding]:
    """Cores, sockets, NUMA nodes and the cgroup's limits."""
    cpus, cores = machine.cpus(root), machine.physical_cores(root)
    nodes = {cpu.node for cpu in cpus}
    online = len(machine.online_cpus(root))
    count = f"{len(cores)} physical, {len(cpus)} of {online} CPUs allowed, {len({c.socket for c in cpus})} socket(s)"
    limits = machine.cgroup_limits(root)
    quota = "no CPU quota" if limits.cpus is None else f"{limits.cpus:.2f} CPUs"
    most = "no memory limit" if limits.memory is None else f"{_gb(limits.memory)} of memory"
    found = [Finding("cores", "ok", count), Finding("NUMA nodes", "note", _nodes(nodes, root))]
    if limits.cpus is not None and limits.cpus < 1:
        fix = "Give the container or service at least one whole CPU."
        return [*found, Finding("cgroup", "warning", f"{quota}, {most}: less than one core", fix)]
    return [*found, Finding("cgroup", "note", f"{quota}, {most}")]


def _nodes(used: set[int], root: Path) -> str:
    count = len(machine.numa_nodes(root))
    return f"{count}" if len(used) == count else f"{len(used)} of {count} may be used"


def check_threads(probe: TorchProbe, usable: int) -> list[Finding]:
    """The threads that torch takes against the cores there are."""
    if probe.problem:
        return []
    value = f"torch takes {probe.threads} for {usable} usable core(s)"
    if probe.threads > usable:
        fix = f"export OMP_NUM_THREADS={usable}: more threads than cores or quota wait for each other."
        return [Finding("threads", "warning", value, fix)]
    if probe.threads < usable:
        return [Finding("threads", "note", value, f"export OMP_NUM_THREADS={usable} unless other processes share.")]
    return [Finding("threads", "ok", value)]


def check_affinity(environment: Mapping[str, str], allowed: list[int], probe: TorchProbe) -> list[Finding]:
    """Settings that pin threads to CPUs this process may not use, or that nobody reads."""
    found = []
    for name in ("KMP_AFFINITY", "GOMP_CPU_AFFINITY"):
        if not (setting := environment.get(name)):
            continue
        listed = (
            re.search(r"proclist=(\[[^\]]*\]|[^,]*)", setting) if name == "KMP_AFFINITY" else re.search(r".*", setting)
        )
        outside = sorted(_listed_cpus(listed.group()) - set(allowed)) if listed else []
        if outside:
            value = f"{setting} names CPU {outside[0]}, which is not allowed here"
            found.append(Finding(name, "warning", value, f"unset {name}, or name CPUs among {_ranges(allowed)}."))
        elif name == "KMP_AFFINITY" and not probe.problem and not any("iomp5" in lib for lib in probe.libraries):
            found.append(Finding(name, "note", f"{setting}: no effect without libiomp5"))
        else:
            found.append(Finding(name, "ok", setting))
    return found


def _listed_cpus(setting: str) -> set[int]:
    """CPUs of `[0-3,8]`, `0 2-6:2` and the like: ranges with an optional stride."""
    ranges = re.findall(r"(\d+)(?:-(\d+)(?::(\d+))?)?", setting)
    return {n for first, last, step in ranges for n in range(int(first), int(last or first) + 1, int(step or 1) or 1)}


def _ranges(numbers: list[int]) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) == numbers[-1] - numbers[0] + 1 else str(numbers)[1:-1]


# Memory, allocator, disk.


def check_memory(memory: machine.Memory) -> list[Finding]:
    """Against what SD1.5 takes at 512 px in bf16."""
    value = f"{_gb(memory.available)} available of {_gb(memory.total)}"
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
        timeout=_SHORT_SECONDS,
    )
    bad = dict(re.findall(r"object '(.*?)' from LD_PRELOAD cannot be preloaded \((.*?)\)", done.stderr))
    if not bad:
        return [Finding("LD_PRELOAD", "ok", os.environ["LD_PRELOAD"])]
    fix = "Install it, or take it out of LD_PRELOAD: it is ignored."
    return [Finding("LD_PRELOAD", "warning", f"{path}: {reason}", fix) for path, reason in bad.items()]


def _runtimes(maps: str) -> tuple[str, ...]:
    """Allocators and OpenMP runtimes among the files of a /proc/PID/maps."""
    names = {Path(line.split(maxsplit=5)[5]).name for line in maps.splitlines() if "/" in line}
    return tuple(sorted(name for name in names if re.match(r"lib(tcmalloc|jemalloc|iomp5|gomp|omp)[-.\w]*\.so", name)))


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
        return [*found, Finding("Hub's cache", "warning", f"{value}; a model takes {_gb(_MODEL_DOWNLOAD)}", fix)]
    return [*found, Finding("Hub's cache", "ok", value)]


def _try_writing(folder: Path) -> tuple[str, OSError | None]:
    """Make a folder in the folder, or in the nearest parent that exists, and take it away again."""
    try:
        place = machine.nearest_existing(folder)
        with tempfile.TemporaryDirectory(prefix=".icom-doctor-", dir=place):
            pass
        return f"{folder}: writable, {_gb(machine.free_disk(folder))} free", None
    except OSError as error:
        return "", error


# Software.


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
    out, problem = _in_fresh_python(_PROBE_ENGINE)
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
    versions = {name: _version(name) for name in names}
    fix = "make setup-master installs versions that fit together."
    found = [
        Finding(name, "ok", version) if version else Finding(name, "failure", "not installed", fix)
        for name, version in versions.items()
    ]
    if not all(versions.values()):
        return found
    said, problem = _in_fresh_python(_PROBE_LIBRARIES)
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
    _, problem = _in_fresh_python("import torch, intel_extension_for_pytorch")
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
    _, problem = _in_fresh_python("import torch, oneccl_bindings_for_pytorch")
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
        why = _last_line(done.stderr) or f"exit code {done.returncode}"
        return [Finding("MPI", "warning", f"{path} --version fails: {why}", fix)]
    return [Finding("MPI", "ok", f"{name_mpi(done.stdout + done.stderr)}, {path}")]


def name_mpi(text: str) -> str:
    """Maker and version, from what `mpirun --version` prints."""
    # Intel's launcher is a Hydra too, so it comes before MPICH.
    for name, pattern in (
        ("Intel MPI", r"Intel\(R\) MPI Library.*?Version\s+([\d.]+)"),
        ("Open MPI", r"(?:Open MPI|OpenRTE)\)?\s+v?([\d.]+\w*)"),
        ("MPICH", r"HYDRA build details:.*?Version:\s+([\d.]+\w*)"),
    ):
        if match := re.search(pattern, text, re.DOTALL):
            return f"{name} {match.group(1)}"
    return f"an unknown MPI ({text.strip().partition(chr(10))[0][:60]})"


# Networks.


def check_network(environment: Mapping[str, str]) -> list[Finding]:
    """The interfaces, the one that MPI and gloo should use, and whether their settings name real ones."""
    there = machine.interfaces()
    shown = [f"{i.name} {' '.join(i.ipv4 + i.ipv6)}" for i in there if i.up and not i.loopback and i.ipv4 + i.ipv6]
    found = [Finding("network", "note", "; ".join(shown) or "only this machine")]
    master = environment.get("MASTER_ADDR")
    name = machine.interface_towards(master)
    way = f"towards MASTER_ADDR {master}" if master else "of the default route"
    if name:
        fix = f"For several machines: export I_MPI_HYDRA_IFACE={name} GLOO_SOCKET_IFNAME={name}"
        found.append(Finding("for MPI", "ok", f"{name}, {way}", fix))
    elif master:
        fix = "Check its name, and the route to it."
        found.append(Finding("for MPI", "warning", f"no interface leads to MASTER_ADDR {master}", fix))
    else:
        found.append(Finding("for MPI", "note", "no default route: one machine only"))
    for key in ("I_MPI_HYDRA_IFACE", "GLOO_SOCKET_IFNAME"):
        absent = [name for name in environment.get(key, "").split(",") if name and name not in {i.name for i in there}]
        if absent:
            fix = f"unset {key}, or name one of {', '.join(i.name for i in there)}."
            found.append(Finding(key, "warning", f"there is no interface {absent[0]}", fix))
    return found


def check_hub(environment: Mapping[str, str]) -> list[Finding]:
    """Whether models can be downloaded. Needed only for the first run with a model from the Hub."""
    if environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return [Finding("Hub", "note", "not asked: HF_HUB_OFFLINE is set; local and cached models work")]
    endpoint = environment.get("HF_ENDPOINT") or "https://huggingface.co"
    parts = urlsplit(endpoint)
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    answer: Future[str] = Future()
    # Not of the pool: looking up a name has no timeout, and nobody should wait for it at the end.
    threading.Thread(target=_ask, args=(endpoint, answer), daemon=True).start()
    try:
        problem = answer.result(_SHORT_SECONDS + 1)
    except NoResultInTime:
        problem = f"no answer in {_SHORT_SECONDS} s"
    if not problem:
        return [Finding("Hub", "ok", f"{shown} answers")]
    fix = "Only the bundled model and local folders work; check network, proxy (https_proxy) and HF_ENDPOINT."
    return [Finding("Hub", "warning", f"{shown}: {problem}", fix)]


def _ask(endpoint: str, answer: Future[str]) -> None:
    """Set what is wrong with the server; nothing if it answers like one that has models."""
    parts = urlsplit(endpoint)
    credentials, _, host = parts.netloc.rpartition("@")
    try:
        request = urllib.request.Request(parts._replace(netloc=host).geturl(), method="HEAD")
        if credentials:
            coded = base64.b64encode(unquote(credentials).encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {coded}")
        with urllib.request.urlopen(request, timeout=_SHORT_SECONDS):
            answer.set_result("")
    except urllib.error.HTTPError as error:
        error.close()
        # A mirror need not have a front page.
        answer.set_result("" if error.code in (404, 405) else f"answers {error.code} {error.reason}")
    except (OSError, ValueError, HTTPException) as error:
        answer.set_result(str(getattr(error, "reason", error)) or type(error).__name__)


# Helpers.


def _in_fresh_python(code: str, **environment: str) -> tuple[str, str]:
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
    return done.stdout, _last_line(done.stderr) if done.returncode else ""


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def _gb(size: int) -> str:
    return f"{size / GB:.1f} GB"
