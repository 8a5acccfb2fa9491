"""`icom doctor`: run for real, with real things wrong; the rules of single checks at their borders.

Guards icom.commands.doctor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from icom import machine
from icom.commands.doctor import command, cpu, memory, network, software
from icom.commands.doctor.finding import GB, MARKS, Finding
from icom.commands.doctor.probe import TorchProbe, parse_onednn, probe_torch, runtimes
from icom.engine.precision import has_bf16
from tests.support.command import ROOT, Result, start_process

AMX = frozenset("avx512f avx512_bf16 amx_tile amx_bf16 amx_int8".split())
BF16 = AMX - {"amx_tile", "amx_bf16", "amx_int8"}


@dataclass(frozen=True)
class Report:
    """What a run of the command said."""

    code: int
    lines: dict[str, Finding]
    err: str


def run(*arguments: str, **environment: str) -> Report:
    """`icom doctor --json -` in a process of its own."""
    process = start_process("doctor", "--json", "-", *arguments, **environment)
    out, err = process.communicate()
    report = json.loads(out)
    assert report["ok"] is (process.returncode == 0)
    findings = [Finding(**line) for line in report["findings"]]
    assert len({finding.name for finding in findings}) == len(findings)
    return Report(process.returncode, {finding.name: finding for finding in findings}, err)


def test_healthy_machine_in_table_and_json(tmp_path: Path) -> None:
    """The table at full length: one that is cut with … hides the fix."""
    file, output = tmp_path / "doctor.json", tmp_path / "not" / "yet"
    arguments = ("--json", str(file), "--output_dir", str(output), "--cache_dir", str(tmp_path))
    process = start_process("doctor", *arguments, COLUMNS="400")
    out, err = process.communicate()
    assert process.returncode == 0, err
    rows = [[cell.strip() for cell in row.split("│")[1:-1]] for row in out.splitlines() if row.startswith("│")]
    findings = [Finding(**line) for line in json.loads(file.read_text())["findings"]]
    assert rows == [[MARKS[f.status], f.name, f.value, f.fix] for f in findings]
    lines = {finding.name: finding for finding in findings}
    for name in ("torch", "diffusers", "transformers", "accelerate", "these together", "output_dir", "cache_dir"):
        assert lines[name].status == "ok"
        assert not lines[name].fix
    assert lines["CPU"].value == machine.cpu_model()
    for kind in ("matmul", "convolution"):
        # The CPU's own trouble and no other: a machine without bf16 instructions is healthy.
        assert lines[f"bf16 {kind}"].status == ("ok" if has_bf16(machine.cpu_flags(), os.environ) else "warning")
    assert lines["Hub"].status == "warning"  # conftest's address, where nobody listens
    assert "127.0.0.1:9" in lines["Hub"].value
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.long
def test_instruction_set_is_what_onednn_tells_of_the_same_work() -> None:
    """Against the names in oneDNN's lines for a bf16 product that is made here; and with AMX switched off."""
    work = "import torch; a = torch.ones(256, 256, dtype=torch.bfloat16); a @ a"
    for limit in ("ALL", "AVX2"):
        environment = {"ONEDNN_VERBOSE": "1", "ONEDNN_MAX_CPU_ISA": limit}
        told = subprocess.run(
            [sys.executable, "-c", work], env=os.environ | environment, capture_output=True, check=True, text=True
        ).stdout
        names = [line.split(",matmul,")[1].split(",")[0] for line in told.splitlines() if ",exec,cpu,matmul," in line]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ONEDNN_MAX_CPU_ISA", limit)
            probe = probe_torch()
        assert probe.problem == ""
        assert probe.isa.get("matmul") == (names[0] if names else None)


def test_everything_wrong_at_once(tmp_path: Path) -> None:
    """Each trouble has its line, the exit code is 1, and the JSON is written all the same."""
    (tmp_path / "file").write_text("")
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.6'\n")
    mpirun.chmod(0o755)
    report = run(
        *("--output_dir", str(tmp_path / "file" / "run"), "--cache_dir", "/proc/cache"),
        LD_PRELOAD="/no/such/libtcmalloc.so.4",
        HF_ENDPOINT="http://user:secret@127.0.0.1:9",
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        OMP_NUM_THREADS="99",
        MKL_DYNAMIC="FALSE",  # otherwise MKL bounds the threads, and torch follows it
        GOMP_CPU_AFFINITY="4000",
        GLOO_SOCKET_IFNAME="nosuch0",
        MASTER_ADDR="no-such-host.invalid",
        ONEDNN_MAX_CPU_ISA="AVX2",
    )
    lines = report.lines
    assert report.code == 1
    assert "output_dir" in report.err
    assert "Traceback" not in report.err
    assert lines["output_dir"].status == "failure"
    assert f"{tmp_path / 'file'} is a file" in lines["output_dir"].value
    assert "/no/such/libtcmalloc.so.4" in lines["LD_PRELOAD"].value
    assert lines["MPI"].value == f"Open MPI 4.1.6, {mpirun}"
    assert "secret" not in str(report)
    assert "127.0.0.1:9" in lines["Hub"].value
    assert f"OMP_NUM_THREADS={machine.usable_cores()}" in lines["threads"].fix
    assert "CPU 4000" in lines["GOMP_CPU_AFFINITY"].value
    assert "nosuch0" in lines["GLOO_SOCKET_IFNAME"].value
    assert "no-such-host.invalid" in lines["for MPI"].value
    if machine.cpu_flags() >= BF16:
        assert "ONEDNN_MAX_CPU_ISA" in lines["bf16 matmul"].fix
    warned = "cache_dir LD_PRELOAD Hub threads GOMP_CPU_AFFINITY GLOO_SOCKET_IFNAME".split()
    assert {lines[name].status for name in [*warned, "for MPI", "bf16 matmul", "bf16 convolution"]} == {"warning"}
    assert [line.name for line in lines.values() if line.status == "failure"] == ["output_dir"]
    for line in lines.values():
        assert line.fix or line.status in ("ok", "note"), line


def test_torch_that_crashes_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, icom: Callable[..., Result]
) -> None:
    """As one built for another CPU does. The command itself never loads torch, so it lives to tell."""
    (tmp_path / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file = tmp_path / "doctor.json"
    result = icom("doctor", "--json", str(file))
    assert result.code == 1
    lines = {line["name"]: line for line in json.loads(file.read_text())["findings"]}
    assert lines["torch"]["status"] == "failure"
    assert "SIGILL" in lines["torch"]["value"]
    assert lines["these together"]["status"] == "failure"
    assert lines["output_dir"]["status"] == "ok"


def test_no_torch_in_the_command_itself() -> None:
    code = "import sys, icom.commands.doctor.command; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_json_that_cannot_be_written(icom: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "examine", lambda config: [])
    result = icom("doctor", "--json", "/no/such/folder/x.json")
    assert result.code == 1
    assert "--json" in result.err


def test_check_that_breaks_does_not_hide_the_others() -> None:
    def broken() -> list[Finding]:
        raise KeyError("MemTotal")

    (finding,) = command._guarded("memory", broken)
    assert (finding.name, finding.status) == ("memory", "failure")
    assert "KeyError" in finding.value


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core_amx,undef,src:bf16::blocked:ab::f0",
            {"matmul": "brg_matmul:avx512_core_amx"},
        ),
        (
            "onednn_verbose,primitive,exec,cpu,convolution,brgconv_1x1:avx512_core_bf16,forward_training,src_bf16::",
            {"convolution": "brgconv_1x1:avx512_core_bf16"},
        ),
        ("dnnl_verbose,exec,cpu,matmul,gemm:jit,undef,src_bf16::blocked:ab:f0", {"matmul": "gemm:jit"}),
        ("onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core,undef,src:f32::blocked:ab::f0", {}),
        ("onednn_verbose,v1,primitive,create:cache_miss,cpu,matmul,brg:avx512_core,undef,src:bf16::", {}),
        ("onednn_verbose,v1,info,cpu,isa:Intel AMX with bfloat16", {}),
        ("bf16,exec,cpu,matmul,mine,x", {}),
    ],
)
def test_lines_of_onednn(line: str, expected: dict[str, str]) -> None:
    assert parse_onednn(f"noise\n{line}\n") == expected


@pytest.mark.parametrize(
    ("flags", "implementation", "status", "says"),
    [
        (AMX, "brg_matmul:avx512_core_amx", "ok", "AMX"),
        (AMX, "brg_matmul:avx10_1_512_amx", "ok", "AMX"),
        (AMX, "brg_matmul:avx512_core_bf16", "warning", "AMX, which is not used"),
        (AMX, "brg_matmul:avx10_1_512", "warning", "AMX, which is not used"),
        (AMX, "", "warning", "AMX, which is not used"),
        (BF16, "brg_matmul:avx512_core_bf16", "ok", "AVX512-BF16"),
        (BF16, "brg_matmul:avx10_1_512", "ok", "AVX512-BF16"),
        (frozenset({"avx_ne_convert"}), "brg_matmul:avx2_vnni_2", "ok", "AVX-NE-CONVERT"),
        (BF16, "gemm:jit:bf16", "warning", "AVX512-BF16, which is not used"),  # as oneDNN names a slow one
        (frozenset({"avx512f"}), "gemm:jit:bf16", "warning", "no bf16 instructions"),
        (frozenset({"avx2"}), "", "warning", "no bf16 instructions"),
    ],
)
def test_instruction_set_against_the_flags(flags: frozenset[str], implementation: str, status: str, says: str) -> None:
    probe = TorchProbe(isa={"matmul": implementation} if implementation else {})
    line = cpu.check_isa(flags, probe, {})[0]
    assert (line.status, bool(line.fix)) == (status, status == "warning")
    assert says in line.value


def test_emulated_bf16_is_told_with_its_price() -> None:
    """Measured in a process that emulates it whatever the CPU has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        patch.setenv("ATEN_CPU_CAPABILITY", "avx2")
        probe = probe_torch()
    assert probe.factors.keys() == {"matmul", "convolution"}
    for line in cpu.check_isa(frozenset({"avx2"}), probe, {}):
        stock, engine = probe.factors[line.name.removeprefix("bf16 ")]
        assert 0 < engine < stock
        assert f"{stock:.1f} x float32's time; {engine:.1f} x with icom's engine" in line.value
        assert (line.status, "--mixed_precision auto" in line.fix) == ("warning", True)


@pytest.mark.parametrize(("available", "status"), [(1.9, "failure"), (2.1, "warning"), (5.9, "warning"), (6.1, "ok")])
def test_memory(available: float, status: str) -> None:
    (line,) = memory.check_memory(machine.Memory(64 * GB, int(available * GB)))
    assert line.status == status


def test_threads_against_cores() -> None:
    found = [cpu.check_threads(TorchProbe(threads=threads), 4)[0].status for threads in (2, 4, 5)]
    assert found == ["note", "ok", "warning"]


@pytest.mark.parametrize(
    ("name", "setting", "status"),
    [
        ("KMP_AFFINITY", "granularity=fine,compact,1,0", "ok"),
        ("KMP_AFFINITY", "granularity=fine,proclist=[0-3],explicit,9,9", "ok"),
        ("KMP_AFFINITY", "proclist=[0-7],explicit", "warning"),
        ("GOMP_CPU_AFFINITY", "0-6:3", "warning"),
        ("GOMP_CPU_AFFINITY", "0-4:3", "ok"),
        ("GOMP_CPU_AFFINITY", "0 1-3", "ok"),
    ],
)
def test_pinning_to_cpus_that_are_not_ours(name: str, setting: str, status: str) -> None:
    (line,) = cpu.check_affinity({name: setting}, [0, 1, 2, 3], TorchProbe(libraries=("libiomp5.so",)))
    assert line.status == status


def test_kmp_affinity_without_its_runtime() -> None:
    (line,) = cpu.check_affinity({"KMP_AFFINITY": "compact"}, [0, 1], TorchProbe(libraries=("libgomp.so.1",)))
    assert "no effect" in line.value


def test_runtimes_are_found_where_they_are_mapped() -> None:
    row = "7f0000-7f1000 r-xp 00000000 fe:00 123        {}\n"
    paths = (
        "/a b/libtcmalloc_minimal.so.4 /x/libgomp-a34b3233.so.1.0.0 /x/libiomp5.so /x/libcomp.so /x/libjemalloc.so.2"
    )
    maps = "".join(row.format(path) for path in paths.replace("/a b", "/a_b").split()) + row.format("[heap]")
    assert runtimes(maps) == (
        *("libgomp-a34b3233.so.1.0.0", "libiomp5.so", "libjemalloc.so.2"),
        "libtcmalloc_minimal.so.4",
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Intel(R) MPI Library for Linux* OS, Version 2021.17 Build 20251009 (id: abc)\n", "Intel MPI 2021.17"),
        ("mpirun (Open MPI) 5.0.3\n\nReport bugs to https://www.open-mpi.org/community/help/\n", "Open MPI 5.0.3"),
        ("HYDRA build details:\n    Version:                                 4.2.0\n    CC: gcc\n", "MPICH 4.2.0"),
        ("something else 1.0\n", "an unknown MPI (something else 1.0)"),
    ],
)
def test_makers_of_mpirun(text: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "mpirun"
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert software.check_mpi() == [Finding("MPI", "ok", f"{name}, {script}")]


@pytest.mark.parametrize(
    ("script", "says", "limit"),
    [("echo no license >&2; exit 3", "no license", 600.0), ("exec sleep 36000", "does not answer", 0.5)],
)
def test_mpirun_that_does_not_work(
    script: str, says: str, limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(software, "_SHORT_SECONDS", limit)
    (line,) = software.check_mpi()
    assert line.status == "warning"
    assert says in line.value


def test_versions_that_do_not_fit() -> None:
    assert software.check_torch("2.7.1", TorchProbe())[0].status == "failure"
    assert software.check_torch("2.10.0", TorchProbe())[0].status == "ok"
    assert software.check_torch(None, TorchProbe("no torch"))[0].status == "failure"
    assert software.check_ipex("2.8.0", "2.13.0+cpu")[0].status == "warning"
    assert software.check_oneccl("2.8.0+cpu", "2.13.0+cpu")[0].status == "warning"
    for check in (software.check_ipex(None, "2.13.0"), software.check_oneccl(None, "2.13.0")):
        assert [line.status for line in check] == ["note"]


def test_oneccl_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads in a process of its own."""
    (tmp_path / "torch.py").write_text("")
    module = tmp_path / "oneccl_bindings_for_pytorch.py"
    module.write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert software.check_oneccl("2.8.0+cpu", "2.8.0")[0].status == "ok"
    module.write_text("raise ImportError('libmpi.so.12: cannot open shared object file')")
    (line,) = software.check_oneccl("2.8.0+cpu", "2.8.0")
    assert (line.status, "libmpi.so.12" in line.value) == ("warning", True)


@pytest.mark.parametrize(("code", "status"), [(200, "ok"), (404, "ok"), (403, "warning"), (503, "warning")])
def test_hub_that_answers(code: int, status: str) -> None:
    asked: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.headers["Authorization"])
            self.send_response(code)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        endpoint = f"http://me:secret@127.0.0.1:{server.server_port}/mirror"
        (line,) = network.check_hub({"HF_ENDPOINT": endpoint})
        server.shutdown()
    assert line.status == status
    assert "secret" not in f"{line}"
    assert asked == ["Basic bWU6c2VjcmV0"]


def test_hub_that_is_not_asked() -> None:
    for answer in ("1", "true"):
        assert (
            "not asked" in network.check_hub({"HF_HUB_OFFLINE": answer, "HF_ENDPOINT": "http://127.0.0.1:9"})[0].value
        )
    assert network.check_hub({"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "nonsense"})[0].status == "warning"


def test_secrets_are_not_shown() -> None:
    line = Finding("x", "warning", "a https://me:pw@host/path b hf_abcdefghij", "see http://me@host and me@host")
    assert command._without_secrets(line) == Finding(
        "x", "warning", "a https://host/path b hf_…", "see http://host and me@host"
    )


def test_cgroup_with_less_than_a_core(tmp_path: Path) -> None:
    for name, text in {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (line,) = (line for line in cpu.check_cores(tmp_path) if line.name == "cgroup")
    assert (line.status, "0.50 CPUs" in line.value) == ("warning", True)


@pytest.mark.long
def test_default_configuration_of_an_older_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate launch` without --config_file reads it, and ends in a traceback before icom runs."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert "accelerate config" not in {finding.name for finding in software.check_libraries()}
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("distributed_type: 'NO'\nipex_config: {ipex: true}\n")
    (finding,) = [finding for finding in software.check_libraries() if finding.name == "accelerate config"]
    assert finding.status == "warning"
    assert "default_config.yaml" in finding.value
    assert "['ipex_config']" in finding.value
