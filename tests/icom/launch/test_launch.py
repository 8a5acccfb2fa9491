"""`icom launch` on this machine: the hosts file, the command lines, what is refused before anything starts.

What runs over ssh on several hosts is tested in tests/icom/launch/test_training_on_hosts.py.

Guards icom.launch.mpirun, hosts and mpi.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from icom import machine
from icom.config.launch import Flavour
from icom.errors import IcomError, UsageError
from icom.launch import mpi
from icom.launch.hosts import Host, Share, read_hosts, share_out
from tests.support.command import (
    ROOT,
    Result,
    assert_message,
    finetune_arguments,
    start_process,
    train_arguments,
)
from tests.support.ranks import free_port

Icom = Callable[..., Result]

VERSIONS: dict[Flavour, str] = {
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.17 Build 20251215 (id: 2ac2f63)",
    "mpich": "HYDRA build details:\\n    Version:                                 4.0.2",
    "openmpi": "mpirun (Open MPI) 4.1.4",
}
"""The first lines of what they say."""

TRAINING = train_arguments()[1:]


def shares(*counts: int) -> list[Share]:
    """Hosts a, b, c … with so many processes."""
    return [Share(Host(chr(ord("a") + i), None, i + 1), count) for i, count in enumerate(counts)]


def stand_in(path: Path, script: str) -> Path:
    """A program of that name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def hosts_file(tmp_path: Path) -> Path:
    """Names this machine alone."""
    path = tmp_path / "hosts"
    path.write_text("localhost\n")
    return path


@pytest.fixture
def accelerate_config(tmp_path: Path) -> Path:
    """What Accelerate takes at the least."""
    path = tmp_path / "multi_cpu.yaml"
    path.write_text("distributed_type: MULTI_CPU\n")
    return path


# The hosts file.


def test_hosts_file_takes_all_dialects(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# mine\n\nlocalhost   # first\nbig:4\n  node-2.local slots=2\t\n10.0.0.7\nssh_alias\n")
    assert [(host.name, host.slots, host.line) for host in read_hosts(str(file))] == [
        *(("localhost", None, 3), ("big", 4, 4), ("node-2.local", 2, 5), ("10.0.0.7", None, 6), ("ssh_alias", None, 7)),
    ]


def test_example_is_a_hosts_file() -> None:
    assert read_hosts(str(ROOT / "hosts.example"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("a", "line 1 already"),
        ("localhost", "first line"),
        ("me@b", "User me"),
        ("b:0", "no number"),
        ("b:x", "no number"),
        ("b:", "no number"),
        ("b slots=-1", "no number"),
        ("b:2 slots=2", "two numbers"),
        ("b max_slots=2", "'max_slots=2' is not understood"),
        ("b;reboot", "not a host's name"),
        ("-oProxyCommand=x", "not a host's name"),
        ("fe80::1", "IPv6"),
    ],
)
def test_wrong_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"a\n# b\n{line}\n")
    with pytest.raises(UsageError) as error:
        read_hosts(str(file))
    assert f"{file}, line 3: {line!r}: " in str(error.value)
    assert reason in str(error.value)


def test_all_wrong_lines_are_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a\na\nb:x\nc\n")
    with pytest.raises(UsageError) as error:
        read_hosts(str(file))
    assert [f"line {number}:" in str(error.value) for number in (1, 2, 3, 4)] == [False, True, True, False]


def test_processes_are_shared_out_in_order() -> None:
    hosts = [Host("a", None, 1), Host("b", 3, 2), Host("c", None, 3)]

    def counts(n: int | None, ppn: int) -> list[int]:
        return [share.ranks for share in share_out(hosts, n, ppn)]

    assert counts(None, 1) == [1, 3, 1]
    assert counts(None, 2) == [2, 3, 2]
    assert counts(3, 1) == [1, 2]
    assert counts(1, 1) == [1]
    for n, ppn in ((6, 1), (0, 1), (None, 0)):
        with pytest.raises(UsageError):
            share_out(hosts, n, ppn)


# mpirun.


def own_command(flavour: Flavour, placed: list[Share]) -> str:
    found = mpi.Mpi(flavour, Path("/x/mpirun"), "")
    return shlex.join(mpi.command(found, placed, ["program", "--its", "option"], ["MASTER_ADDR", "HOSTNAME"]))


def test_command_lines() -> None:
    """As tried with Intel MPI 2021.17, MPICH 4.0 and Open MPI 4.1: each places the processes as it should."""
    tail = "program --its option"
    for flavour in ("intel", "mpich"):
        assert own_command(flavour, shares(2, 2)) == f"/x/mpirun -hosts a,b -n 4 -ppn 2 {tail}"
    # Two that read the same thing in different ways.
    assert own_command("intel", shares(1, 2)) == f"/x/mpirun -hosts a,b,b -n 3 -ppn 1 {tail}"
    assert own_command("mpich", shares(1, 2)) == f"/x/mpirun -hosts a:1,b:2 -n 3 {tail}"
    root = "--allow-run-as-root " if os.geteuid() == 0 else ""
    passed = "--bind-to none -x MASTER_ADDR"
    assert own_command("openmpi", shares(2, 2)) == (
        f"/x/mpirun {root}--host a:2,b:2 -n 4 --map-by ppr:2:node {passed} {tail}"
    )
    assert own_command("openmpi", shares(1, 2)) == f"/x/mpirun {root}--host a:1,b:2 -n 3 --map-by slot {passed} {tail}"


@pytest.mark.parametrize("flavour", VERSIONS)
def test_mpi_of_this_environment_goes_first(flavour: Flavour, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = stand_in(tmp_path / "env/bin/mpirun", f"printf '{VERSIONS[flavour]}\\n'")
    other = next(name for name in VERSIONS if name != flavour)
    theirs = stand_in(tmp_path / "bin/mpirun", f"printf '{VERSIONS[other]}\\n'")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env/bin/python"))
    monkeypatch.setenv("PATH", f"{theirs.parent}:/usr/bin:/bin")
    assert (mpi.find_mpi("auto").flavour, mpi.find_mpi("auto").mpirun) == (flavour, own)
    assert mpi.find_mpi(other).mpirun == theirs


def test_debians_names_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path / "mpirun", f"printf '{VERSIONS['openmpi']}\\n'")
    mpich = stand_in(tmp_path / "mpirun.mpich", f"printf '{VERSIONS['mpich']}\\n'")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env/bin/python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert mpi.find_mpi("mpich").mpirun == mpich


def test_without_mpirun_it_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path / "mpirun", "echo unheard of")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env/bin/python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(IcomError, match=r"of an unknown kind.*make setup-master EXTRAS=mpi.*openmpi-bin"):
        mpi.find_mpi("auto")


# The commands.


@pytest.fixture
def mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first mpirun in PATH: calls itself MPICH, tells what it was given, and fails."""
    script = (
        f'[ "$1" = --version ] && exec printf "{VERSIONS["mpich"]}\\n"; echo "$MASTER_ADDR:$MASTER_PORT $*"; '
        'echo "$ICOM_SECRET"; exit 7'
    )
    path = stand_in(tmp_path / "bin/mpirun.mpich", script)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    for name in ("MASTER_ADDR", "MASTER_PORT", "KMP_BLOCKTIME", "OMP_NUM_THREADS", "LD_PRELOAD", "ICOM_SECRET"):
        monkeypatch.delenv(name, raising=False)
    return path


def test_mpirun_gets_command_and_environment_and_gives_its_exit_code(
    mpirun: Path, hosts_file: Path, accelerate_config: Path
) -> None:
    """With the real checks of this host in between; at a port that no other test's launch can choose meanwhile."""
    port = str(free_port())
    options = [
        "--hosts",
        str(hosts_file),
        "--mpi",
        "mpich",
        "--ppn",
        "2",
        "--accelerate_config",
        str(accelerate_config),
    ]
    process = start_process("launch", "mpirun", *options, "--", *TRAINING, MASTER_PORT=port)
    out, err = process.communicate()
    assert process.returncode == 7, err
    line, secret = out.splitlines()
    assert re.fullmatch("[0-9a-f]{64}", secret)
    assert secret not in line + err
    master, _, given = line.partition(" ")
    assert master == f"127.0.0.1:{port}"
    launch = f"{sys.executable} -m icom.launch.on_host accelerate launch --quiet --config_file {accelerate_config}"
    where = f"--main_process_ip 127.0.0.1 --main_process_port {port}"
    script = f"{ROOT / 'textual_inversion_icom.py'} {' '.join(TRAINING)}"
    assert given == f"-hosts localhost -n 2 -ppn 2 {launch} {where} {script}"


def test_what_a_check_finds_starts_nothing(
    mpirun: Path, hosts_file: Path, accelerate_config: Path, tmp_path: Path
) -> None:
    options = ["--hosts", str(hosts_file), "--mpi", "mpich", "--accelerate_config", str(accelerate_config)]
    training = train_arguments(train_data_dir=tmp_path / "none")[1:]
    process = start_process("launch", "mpirun", *options, "--", *training, MASTER_PORT=str(free_port()))
    out, err = process.communicate()
    assert (process.returncode, out) == (1, "")
    assert "localhost" in err
    assert "No such picture folder" in err
    assert err.endswith("icom: Nothing was started.\n")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("ipex_config:\n  ipex: true\n  use_xpu: false\n", "unknown keys (['ipex_config'])"),
        ("use_xpu: false\n", "unknown keys (['use_xpu'])"),
        ("mpirun_config:\n  mpirun_ccl: '1'\n  mpirun_hostfile: hosts\n", "has an mpirun_config"),
        ("mixed_precision: [\n", "Accelerate does not take"),
        ("distributed_type: MULTI_XPUU\n", "'MULTI_XPUU' is not a valid DistributedType"),
    ],
)
def test_accelerate_configuration_of_an_older_guide(
    more: str, said: str, mpirun: Path, hosts_file: Path, accelerate_config: Path, icom: Icom
) -> None:
    """What Accelerate itself refuses is said before anything starts; what it still takes passes."""
    options = ["--hosts", str(hosts_file), "--mpi", "mpich", "--accelerate_config", str(accelerate_config), "--dry-run"]
    still_taken = "downcast_bf16: 'no'\ntpu_env: []\nfsdp_config: {}\ndynamo_backend: 'NO'\nrdzv_backend: static\n"
    accelerate_config.write_text(f"distributed_type: MULTI_CPU\n{still_taken}")
    assert icom("launch", "mpirun", *options, "--", *TRAINING).code == 0
    accelerate_config.write_text(f"distributed_type: MULTI_CPU\n{still_taken}{more}")
    result = icom("launch", "mpirun", *options, "--", *TRAINING)
    assert result.code == 2, result.err
    assert str(accelerate_config) in result.err
    assert said in result.err
    assert "Leave --accelerate_config out" in result.err


def test_dry_run_shows_what_comes_from_where(
    mpirun: Path, hosts_file: Path, accelerate_config: Path, icom: Icom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("MASTER_PORT", "29777")
    monkeypatch.setenv("KMP_BLOCKTIME", "7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    options = ["--hosts", str(hosts_file), "--mpi", "mpich", "--accelerate_config", str(accelerate_config), "--dry-run"]
    for secret, row in ((None, "(made for each run)"), ("0f" * 32, "(not shown) all hosts set by you")):
        if secret:
            monkeypatch.setenv("ICOM_SECRET", secret)
        shown = icom("launch", "mpirun", *options, "--", *TRAINING)
        assert f"ICOM_SECRET {row}" in " ".join(shown.out.split())
        assert "0f0f" not in shown.out + shown.err
    monkeypatch.setenv("ICOM_SECRET", "secret")
    refused = icom("launch", "mpirun", *options, "--", *TRAINING)
    assert refused.code == 2 and "ICOM_SECRET is no secret" in refused.err
    monkeypatch.delenv("ICOM_SECRET")
    shown = icom("launch", "mpirun", *options, "--", *TRAINING)
    assert shown.code == 0, shown.err
    assert shown.out.startswith(f"{mpirun} -hosts localhost -n 1 -ppn 1 ")
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in shown.out.splitlines() if line[:1].isupper()}
    assert rows["MASTER_ADDR"] == "127.0.0.1 all hosts all processes are on this machine"
    assert rows["MASTER_PORT"] == "29777 all hosts set by you"
    assert rows["KMP_BLOCKTIME"] == "7 all hosts set by you"
    assert f"{machine.usable_cores()} this host; each decides for itself" in rows["OMP_NUM_THREADS"]
    assert "HYDRA_IFACE" not in rows


@pytest.mark.parametrize(
    ("training", "said"),
    [
        (["--train_data_dirr", "x"], "train_data_dir"),
        (["--resolution", "65", *TRAINING[:3]], "multiple of 8"),
        (["--config", "no-such.yaml"], "no-such.yaml"),
        ([], "after `--`"),
    ],
)
def test_wrong_training_options_start_nothing(
    training: list[str], said: str, mpirun: Path, hosts_file: Path, accelerate_config: Path, icom: Icom
) -> None:
    options = ["--hosts", str(hosts_file), "--mpi", "mpich", "--accelerate_config", str(accelerate_config)]
    result = icom("launch", "mpirun", *options, "--", *training)
    assert result.code == 2
    assert said in result.err
    assert "Traceback" not in result.err


def test_training_options_are_passed_on_as_they_are(
    mpirun: Path, hosts_file: Path, accelerate_config: Path, icom: Icom
) -> None:
    """Also words that look like options of launch, or like the separator."""
    odd = [*TRAINING, "--validation_prompt", "-- a; $b 'c' --hosts x"]
    options = ["--hosts", str(hosts_file), "--mpi", "mpich", "--accelerate_config", str(accelerate_config), "--dry_run"]
    shown = icom("launch", "mpirun", *options, "--", *odd)
    assert shown.code == 0, shown.err
    assert shlex.split(shown.out.splitlines()[0])[-len(odd) :] == odd


def test_the_training_is_named_by_the_first_word(
    mpirun: Path, hosts_file: Path, accelerate_config: Path, icom: Icom
) -> None:
    def command(*words: str) -> list[str]:
        where = ["--hosts", str(hosts_file), "--mpi", "mpich", "--accelerate_config", str(accelerate_config)]
        shown = icom("launch", "mpirun", *where, "--dry_run", "--", *words)
        assert shown.code == 0, shown.err
        return shlex.split(shown.out.splitlines()[0])

    assert command("train", *TRAINING) == command(*TRAINING)
    options = ["--train_data_dir", "s3://bucket/{0..9}.tar", "--use_ema", "--validation_prompts", "train", "a cat"]
    assert command("finetune", *options)[-len(options) - 1 :] == [str(ROOT / "finetune_icom.py"), *options]
    for words, said in (
        (["finetun", *options], "'finetun' is no training. After `--` come options of `train`, or `finetune`"),
        (["finetune", "--placeholder_token", "<x>"], "icom finetune --help"),
        (["finetune"], "No training options"),
        (["finetune", "--train_data_dir", "x", "--on", "dicoo"], "--on is for `icom train`"),
    ):
        refused = icom("launch", "mpirun", "--hosts", str(hosts_file), "--dry_run", "--", *words)
        assert_message(refused, 2, said)


@pytest.mark.long
def test_script_is_the_command() -> None:
    options = finetune_arguments(output_dir="out", use_ema=True)[1:]
    script = ("accelerate.commands.launch", "--config_file", "accelerate_configs/single_cpu.yaml", "finetune_icom.py")
    said = [
        subprocess.run(
            [sys.executable, "-m", *words, *options, "--print_config"],
            cwd=ROOT,
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for words in (script, ("icom", "finetune"))
    ]
    assert "use_ema: true" in said[0] and said[0] == said[1]


def test_missing_files_are_named(tmp_path: Path, mpirun: Path, hosts_file: Path, icom: Icom) -> None:
    for options in (
        ["--hosts", str(tmp_path / "none")],
        ["--hosts", str(hosts_file), "--accelerate_config", str(tmp_path / "none")],
    ):
        result = icom("launch", "mpirun", *options, "--mpi", "mpich", "--", *TRAINING)
        assert result.code == 2
        assert str(tmp_path / "none") in result.err


def test_env_is_for_a_shell(mpirun: Path, hosts_file: Path, icom: Icom, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = '/tmp/it\'s $HOME; a "b" # c'
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{odd}")
    printed = icom("launch", "env", "--hosts", str(hosts_file), "--mpi", "mpich")
    assert printed.code == 0, printed.err
    script = 'eval "$1"; echo "$MASTER_ADDR $KMP_BLOCKTIME"; echo "$ICOM_SECRET"; echo "$PATH"'
    secrets = set()
    for given in ({}, {}, {"ICOM_SECRET": ""}, {"ICOM_SECRET": "ab" * 16}):
        words, environment = ["sh", "-euc", script, "sh", printed.out], {"PATH": os.defpath, **given}
        done = subprocess.run(words, capture_output=True, check=True, text=True, env=environment)
        first, secret, path = done.stdout.splitlines()
        secrets.add(secret)
    # What is set stays, and the others are new ones, which nobody has seen.
    assert {len(secret) for secret in secrets} == {0, 32, 64}
    assert len(secrets) == 4
    assert not any(secret in printed.out for secret in secrets if secret)
    assert first == "127.0.0.1 1"
    assert path.endswith(f":{odd}")
    assert path.startswith(str(Path(sys.executable).parent))
