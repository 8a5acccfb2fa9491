"""`icom doctor`: what a long run needs, each line with a mark and, where something is wrong, the fix.

✗ means that training would fail, ! that it would be slow or lack something, · is a fact. torch and the libraries are
looked at in processes of their own: one that crashes, hangs or does not load becomes a line of the table.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from icom import machine
from icom.commands.doctor.cpu import check_affinity, check_cores, check_cpu, check_isa, check_threads
from icom.commands.doctor.finding import MARKS, Finding, Status
from icom.commands.doctor.memory import (
    check_allocator,
    check_cache,
    check_memory,
    check_openmp,
    check_output,
    check_preloads,
)
from icom.commands.doctor.network import check_hub, check_network
from icom.commands.doctor.probe import probe_torch
from icom.commands.doctor.software import (
    check_engine,
    check_ipex,
    check_libraries,
    check_mpi,
    check_oneccl,
    check_python,
    check_torch,
    version,
)
from icom.config.doctor import DoctorConfig
from icom.errors import IcomError
from icom.files import cache_folder, write_atomically

_COLOURS: dict[Status, str] = {"ok": "green", "note": "dim", "warning": "yellow", "failure": "red"}


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
            ("torch", lambda: check_torch(version("torch"), probe.result())),
            ("engine", check_engine),
            ("diffusers", check_libraries),
            ("IPEX", lambda: check_ipex(version("intel_extension_for_pytorch"), version("torch"))),
            ("oneCCL", lambda: check_oneccl(version("oneccl_bind_pt"), version("torch"))),
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
