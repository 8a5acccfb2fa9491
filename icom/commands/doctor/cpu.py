"""The CPU: its instructions, cores, threads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from icom import machine
from icom.commands.doctor.finding import Finding, gigabytes
from icom.commands.doctor.probe import TorchProbe


def check_cpu(root: Path = machine.ROOT) -> list[Finding]:
    """Its name, and the flags that matter for bf16."""
    flags = machine.cpu_flags(root)
    wanted = [flag for flag in ("avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8") if flag in flags]
    return [
        Finding("CPU", "ok", machine.cpu_model(root)),
        Finding("CPU flags", "note", " ".join(wanted) or "neither AVX-512 nor AMX"),
    ]


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
    most = "no memory limit" if limits.memory is None else f"{gigabytes(limits.memory)} of memory"
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
