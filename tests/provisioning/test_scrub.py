"""`provisioning/scrub.py` on a file tree as an instance has it after cloud-init, logins, a set-up and a training.

Guards provisioning.scrub.
"""

from __future__ import annotations

import ast
import json
import os
import secrets
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml

from provisioning.hostkeys import make_key
from provisioning.userdata import user_data
from tests.support.command import ROOT

SCRIPT = ROOT / "provisioning/scrub.py"
ID = "i-0123456789abcdef0"
HOME = "home/ubuntu"
HEADER = b"PRIVATE KEY-----"
LARGEST = 1 << 20  # bytes of a file that the script may write: it may not fill the disk with a hole
Snapshot = dict[str, tuple[int, bytes]]
"""Path -> (mode, content or target of the link) of everything but folders."""


def run(root: Path, instance: str = ID) -> CompletedProcess[str]:
    words = ["prlimit", f"--fsize={LARGEST}", sys.executable, "-I", str(SCRIPT), "--instance", instance, "--root", root]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def snapshot(root: Path) -> Snapshot:
    """By a walk that shares nothing with the script."""
    found = {}
    for folder, folders, files in os.walk(root):
        for path in (Path(folder, name) for name in [*folders, *files]):
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                found[str(path.relative_to(root))] = (mode, os.fsencode(path.readlink()))
            elif not stat.S_ISDIR(mode):
                found[str(path.relative_to(root))] = (mode, path.read_bytes() if stat.S_ISREG(mode) else b"")
    return found


@dataclass
class Machine:
    """A file tree, and what was planted in it."""

    root: Path
    secrets: list[str] = field(default_factory=list)
    stays: set[str] = field(default_factory=set)
    """Files that may not change."""

    def secret(self, form: str = "{}") -> str:
        self.secrets.append(text := secrets.token_hex(20))
        return form.format(text)

    def key(self) -> str:
        pem = make_key().private
        self.secrets.append(pem.splitlines()[2])
        return pem

    def put(self, path: str, content: str | bytes, mode: int = 0o644) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        file.chmod(mode)

    def keep(self, path: str, content: str | bytes, mode: int = 0o644) -> None:
        self.put(path, content, mode)
        self.stays.add(path)

    def link(self, path: str, target: str | Path) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).symlink_to(target)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """What links of the tree point at."""
    folder = tmp_path / "outside"
    for name in ("log/other.log", "ssh/id_ed25519", "tmp/file", "token", "bashrc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("export HF_TOKEN=theirs\n")
    return folder


@pytest.fixture
def machine(tmp_path: Path, outside: Path) -> Machine:
    """As root it would be one's own machine; so everything is in a folder."""
    m = Machine(tmp_path / "machine")
    m.keep(
        "etc/passwd",
        "root:x:0:0:root:/root:/bin/bash\nsys:x:3:3:sys:/dev:/usr/sbin/nologin\nnobody:x:65534:65534:x:/nonexistent:/x\n"
        "systemd-network:x:998:998:x:/:/x\npostgres:x:114:120:x:/var/lib/postgresql:/bin/bash\n"
        "ubuntu:x:1000:1000:Ubuntu:/home/ubuntu:/bin/bash\ndata:x:1001:1001::/srv/data:/bin/bash\nbroken line\n"
        "toor:x:0:0::/:/bin/sh\nkiosk:x:1002:1002::/:/bin/sh\n",
    )
    m.keep("usr/bin/python3", b"\x7fELF" + secrets.token_bytes(100), 0o755)
    m.keep("etc/hostname", "ip-10-0-0-4\n")
    m.keep("etc/sudoers.d/90-cloud-init-users", "ubuntu ALL=(ALL) NOPASSWD:ALL\n", 0o440)
    m.keep("etc/ssl/private/ssl-cert-snakeoil.key", make_key().private, 0o640)
    m.keep("etc/ssh/sshd_config", "UsePAM yes\n")
    m.put("etc/machine-id", m.secret("{}\n"))
    m.link("etc/systemd/system/timers.target.wants/fstrim.timer", "/usr/lib/systemd/system/fstrim.timer")
    m.stays.add("etc/systemd/system/timers.target.wants/fstrim.timer")

    # cloud-init's boot, and what it did by icom's user data.
    data = user_data(make_key(), make_key().public, datetime(2026, 1, 1) + timedelta(hours=8))
    told = yaml.safe_load(data)
    m.secrets.append(told["ssh_keys"]["ed25519_private"].splitlines()[2])
    ((shell, flag, script, *arguments),) = told["bootcmd"]
    units = m.root / "etc/systemd/system"
    for path in ("/etc/systemd/system", "/var/lib/systemd"):
        script = script.replace(path, f"{m.root}{path}")
    subprocess.run([shell, flag, f"systemctl() {{ :; }}\n{script}", *arguments], check=True)
    ended = {file.name: file.read_text() for file in units.glob("icom-end.*")}
    assert sorted(ended) == ["icom-end.service", "icom-end.timer"]
    m.secrets += ended.values()
    m.link("etc/systemd/system/timers.target.wants/icom-end.timer", "/etc/systemd/system/icom-end.timer")
    m.keep("var/lib/cloud/data/instance-id", f"{ID}\n")
    for name in ("user-data.txt", "cloud-config.txt", "obj.pkl"):
        m.put(f"var/lib/cloud/instances/{ID}/{name}", data, 0o600)
    for name in ("instances/x/sem/config_ssh", "sem/once", "seed/nocloud/user-data", "data/previous-instance-id"):
        m.put(f"var/lib/cloud/{name}", m.secret())
    m.link("var/lib/cloud/instance", f"/var/lib/cloud/instances/{ID}")
    m.put("etc/ssh/ssh_host_ed25519_key", told["ssh_keys"]["ed25519_private"], 0o600)
    m.put("etc/ssh/ssh_host_ed25519_key.pub", m.secret("ssh-ed25519 {}"))
    m.put("etc/ssh/ssh_host_rsa_key", m.key(), 0o600)
    m.put("etc/ssh/icom_new_key.pub", m.secret())
    m.put("etc/ssh/old/backup of key", m.key(), 0o600)

    # Logins, aws configure, a training with tokens.
    for home in ("root", HOME, "srv/data", "home/no-account"):
        m.put(f"{home}/.ssh/authorized_keys", m.secret("ssh-ed25519 {}"), 0o600)
        m.put(f"{home}/.ssh/authorized_keys.bak", m.secret(), 0o600)
        m.put(f"{home}/.ssh/id_ed25519", m.key(), 0o600)
        m.put(f"{home}/.ssh/icom_known_hosts", m.secret())
        m.put(f"{home}/.bash_history", m.secret("aws configure set aws_secret_access_key {}\n"), 0o600)
        m.put(f"{home}/.aws/credentials", m.secret("[default]\naws_secret_access_key = {}\n"), 0o600)
        m.put(f"{home}/.aws/sso/cache/x.json", m.secret(), 0o600)
        m.put(f"{home}/.cache/huggingface/token", m.secret("hf_{}"), 0o600)
        m.put(f"{home}/.cache/huggingface/stored_tokens", m.secret("[x]\nhf_token = hf_{}\n"), 0o600)
        m.keep(f"{home}/.cache/huggingface/hub/models--x/snapshots/1/config.json", '{"a": 1}\n')
        m.keep(f"{home}/.cache/huggingface/accelerate/default_config.yaml", "mixed_precision: bf16\n")
    files = [".zsh_history", ".python_history", ".lesshst", ".viminfo", ".node_repl_history", ".netrc", ".boto"]
    files += [".git-credentials", ".config/gh/hosts.yml", ".config/wandb/settings", ".docker/config.json"]
    files += [".kaggle/kaggle.json", ".pypirc", ".config/pip/pip.conf", ".huggingface/token", "hosts"]
    files += [".local/share/icom/clusters/eu-central-1/icom/known_hosts"]
    for name in files:
        m.put(f"{HOME}/{name}", m.secret("x {}\n"), 0o600)
    m.put("var/lib/postgresql/.ssh/id_rsa", m.key(), 0o600)
    m.put("var/lib/postgresql/.psql_history", m.secret())
    m.keep("var/lib/postgresql/14/server.key", make_key().private, 0o600)  # a service's own
    m.keep("var/lib/postgresql/hosts", "a service's\n")
    m.put(f"{HOME}/my-aws.pem", m.key(), 0o400)
    m.put(f"{HOME}/icom/notes/key with a name", "copied:\n    " + m.key().replace("\n", "\r\n    "))
    m.put(f"{HOME}/service-account.json", json.dumps({"private_key": m.key()}))
    m.put(f"{HOME}/legacy.key", f"-----BEGIN RSA {HEADER.decode()}\nProc-Type: 4,ENCRYPTED\n\n{m.secret()}\n")
    m.put(f"{HOME}/hf/token", m.secret("hf_{}"))  # HF_HOME=~/hf
    m.put(f"{HOME}/elsewhere/token", m.secret("api_org_{}"))
    m.keep(f"{HOME}/elsewhere/hub/x", "x")
    m.keep(f"{HOME}/icom/token", "a word of the lesson\n")
    m.keep(f"{HOME}/icom/scrub.py", SCRIPT.read_bytes(), 0o755)
    m.keep(f"{HOME}/icom/docs/keys.md", f"A key begins with `-----BEGIN OPENSSH {HEADER.decode()}`.\n")
    m.keep(f"{HOME}/icom/.venv/pyvenv.cfg", "home = /usr/bin\n")
    m.keep(f"{HOME}/icom/.venv/lib/tornado/test.key", make_key().private)
    m.keep(f"{HOME}/miniforge3/conda-meta/history", "==> 2026\n")
    m.keep(f"{HOME}/miniforge3/lib/python3.12/test/ssl_key.pem", make_key().private)
    m.keep(f"{HOME}/miniforge3/envs/x/conda-meta/state", '{"env_vars": {"OMP": "1"}}')
    m.keep(f"{HOME}/.local/lib/python3.12/site-packages/x/key.pem", make_key().private)

    # Everything else that remembers.
    m.put("var/log/syslog", m.secret() * 1000, 0o640)
    m.put("var/log/cloud-init-output.log", m.secret(), 0o640)
    m.put("var/log/apt/history.log.1.gz", m.secret())
    m.put("var/log/journal/0123/system.journal", m.secret(), 0o640)
    m.put("var/crash/_usr_bin_python3.crash", m.secret())
    m.put("tmp/pip-x/deep/er/file", m.secret())
    m.put("tmp/.hidden", m.secret())
    m.put("var/tmp/x", m.secret())
    m.put("var/mail/ubuntu", m.secret())
    m.put("var/lib/dhcp/dhclient.eth0.leases", m.secret())
    m.put("var/lib/systemd/random-seed", m.secret(), 0o600)
    m.put("var/lib/systemd/credential.secret", m.secret(), 0o600)
    m.link("var/lib/dbus/machine-id", "/etc/machine-id")
    (m.root / "tmp").chmod(0o1777)
    os.mkfifo(m.root / "tmp/pipe")
    os.mkfifo(m.root / HOME / "pipe")
    m.stays.add(f"{HOME}/pipe")
    m.put("tmp/other name of config", "")
    (m.root / "tmp/other name of config").unlink()
    (m.root / "tmp/other name of config").hardlink_to(m.root / HOME / "icom/docs/keys.md")

    m.link("var/log/elsewhere", outside / "log")
    m.link("var/log/other.log", outside / "log/other.log")
    m.link("tmp/elsewhere", outside / "tmp")
    m.link("home/no-account/.zshrc", outside / "bashrc")
    m.link("home/no-account/more", outside)
    m.link("home/linked", outside)
    m.stays |= {"var/log/elsewhere", "var/log/other.log", "home/no-account/.zshrc", "home/no-account/more"}
    m.stays.add("home/linked")
    m.put("home/no-account/.aws/link/x", "x")
    m.link("home/no-account/.aws/link/y", outside / "ssh")
    m.put("home/[x] */.ssh/id_ed25519", m.key(), 0o600)
    m.put("home/other/x", "x")
    m.link("home/other/.ssh", outside / "ssh")
    m.link("home/other/.netrc", outside / "token")
    return m


def test_no_secret_is_left_and_the_rest_stays(machine: Machine, outside: Path) -> None:
    before, theirs = snapshot(machine.root), snapshot(outside)
    done = run(machine.root)
    assert (done.returncode, done.stderr) == (0, ""), done
    after = snapshot(machine.root)
    assert len(machine.secrets) > 80
    for path, (_, content) in after.items():
        leaked = [secret for secret in machine.secrets if secret.encode() in content]
        assert not leaked, path
        assert HEADER not in content or path in machine.stays, path
    assert not [path for path in after if "icom-end" in path]  # else what starts from the image ends with the builder
    assert {path for path in machine.stays if after.get(path) != before[path]} == set()
    assert set(after) <= set(before)
    assert snapshot(outside) == theirs
    assert after["etc/machine-id"] == (before["etc/machine-id"][0], b"")  # systemd wants it to be there
    assert after["var/log/syslog"] == (before["var/log/syslog"][0], b"")
    assert stat.S_IMODE((machine.root / "tmp").stat().st_mode) == 0o1777
    emptied = {path for path in after if after[path] != before[path]}
    assert {path for path in emptied if not path.startswith("var/log/")} == {"etc/machine-id"}
    assert [path.name for path in (machine.root / "var/lib/cloud").iterdir()] == ["data"]

    assert not any(secret in done.stdout + done.stderr for secret in machine.secrets)
    counts = {line[7:]: int(line[:7]) for line in done.stdout.splitlines()}
    assert all(counts[kind] > 0 for kind in counts if "startup" not in kind), counts

    again = subprocess.run(  # as it comes over ssh
        [sys.executable, "-", "--instance", ID, "--root", machine.root],
        input=SCRIPT.read_text(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (again.returncode, again.stderr) == (0, "")
    assert snapshot(machine.root) == after
    assert {int(line[:7]) for line in again.stdout.splitlines()} == {0}


def test_startup_files_lose_lines_with_tokens_only(machine: Machine) -> None:
    token = machine.secret("hf_{}")
    lines = {
        "alias ll='ls -l'\n": True,
        f"export HF_TOKEN={token}\n": False,
        f"# export HUGGING_FACE_HUB_TOKEN='{token}'\n": False,
        "export AWS_SECRET_ACCESS_KEY=first\\\n": False,
        "second\n": False,
        f"export A=1 WANDB_API_KEY={token}\n": False,
        'echo "$HF_TOKEN" "${AWS_PROFILE:-none}"\n': True,
        "export HF_HOME=~/hf FLAWS_FOUND=0": True,
    }
    files = (f"{HOME}/.bashrc", f"{HOME}/.profile", "root/.zshrc", "etc/environment", "etc/profile.d/tokens.sh")
    for name in files:
        machine.put(name, "".join(lines), 0o640)
    inside = f'if true; then\n  export AWS_SESSION_TOKEN="{token}"\nfi\n'
    machine.put("srv/data/.bashrc", inside)
    done = run(machine.root)
    assert (done.returncode, done.stderr) == (0, "")
    for name in files:
        assert (machine.root / name).read_text() == "".join(line for line, stays in lines.items() if stays)
        assert stat.S_IMODE((machine.root / name).stat().st_mode) == 0o640
    assert not any(token in content.decode("latin-1") for _, content in snapshot(machine.root).values())
    bash = subprocess.run(["bash", "-n", machine.root / "srv/data/.bashrc"], capture_output=True, check=False)
    assert (bash.returncode, bash.stderr) == (0, b"")
    assert " 6 startup" in done.stdout


def test_what_was_removed_is_not_on_the_disk_either(machine: Machine) -> None:
    """A snapshot has the blocks of deleted files: they are written over. A file that is still open shows them."""
    paths = (f"{HOME}/.ssh/id_ed25519", f"{HOME}/.cache/huggingface/token", "tmp/.hidden")
    with (machine.root / "tmp/longer than the disk").open("wb") as holes:
        holes.truncate(1 << 43)
    with ExitStack() as stack:
        files = [stack.enter_context((machine.root / path).open("rb", buffering=0)) for path in paths]
        assert all(file.read(1) for file in files)
        sparse = stack.enter_context((machine.root / "tmp/longer than the disk").open("rb"))
        assert run(machine.root).returncode == 0
        assert os.fstat(sparse.fileno()).st_blocks == 0
        for file in files:
            file.seek(0)
            assert set(file.read()) == {0}


def other_id(machine: Machine) -> None:
    machine.put("var/lib/cloud/data/instance-id", f"{ID}0\n")


def no_id(machine: Machine) -> None:
    (machine.root / "var/lib/cloud/data/instance-id").unlink()


def id_by_a_link(machine: Machine) -> None:
    shutil.move(machine.root / "var/lib/cloud/data", machine.root / "var/lib/elsewhere")
    machine.link("var/lib/cloud/data", machine.root / "var/lib/elsewhere")


@pytest.mark.parametrize("change", [other_id, no_id, id_by_a_link])
def test_another_machine_is_not_touched(machine: Machine, change: Callable[[Machine], None]) -> None:
    change(machine)
    before = snapshot(machine.root)
    done = run(machine.root)
    assert done.returncode == 2
    assert ID in done.stderr and "Nothing was touched" in done.stderr
    assert snapshot(machine.root) == before
    assert run(machine.root, "").returncode == 2
    assert snapshot(machine.root) == before


def test_what_the_lists_do_not_know_is_found_and_named(machine: Machine) -> None:
    token = machine.secret("hf_{}")
    finds = {
        f"{HOME}/icom/.env": f"HF_TOKEN={token}\n",
        f"{HOME}/icom/run.sh": f'WANDB_API_KEY="{secrets.token_hex(20)}" python train.py\n',
        f"{HOME}/notes.txt": "key: AKIA" + "ABCDEFGH23456789\n",
        f"{HOME}/backup/authorized_keys": "ssh-ed25519 x\n",
        f"{HOME}/miniforge3/envs/x/conda-meta/state": json.dumps({"env_vars": {"HF_TOKEN": token}}),
        "srv/data/name with \n newline": f"token {token}",
        "etc/systemd/system/sysinit.target.requires/icom-end.timer": "",
    }
    for path, content in finds.items():
        machine.put(path, content)
    machine.link("home/away", "/home/ubuntu")
    machine.put("etc/passwd", (machine.root / "etc/passwd").read_text() + "away:x:1005:1005::/home/away:/bin/bash\n")
    done = run(machine.root)
    assert done.returncode == 1
    named = [line for line in done.stderr.splitlines() if line.startswith("scrub: still there: ")]
    assert len(named) == len(finds) + 1, done.stderr
    for path in [*finds, "home/away"]:
        assert any(str(machine.root / path).replace("\n", "\\n") + ": " in line for line in named), path
    assert token not in done.stdout + done.stderr


def test_other_file_systems_are_left_alone(machine: Machine) -> None:
    """Only what /tmp is goes, wherever it is."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount")
    places = [machine.root / path for path in (f"{HOME}/.ssh/data", "var/tmp/data", "tmp")]
    commands = 'for place in "${@:1:3}"; do mkdir -p "$place" && mount -t tmpfs x "$place" && touch "$place/x"; done'
    commands += ' && "${@:4}"; code=$?; find "${@:1:3}" -type f; exit $code'
    script = [sys.executable, "-I", SCRIPT, "--instance", ID, "--root", machine.root]
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", commands, "bash", *places, *script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    assert [line for line in done.stdout.splitlines() if line.startswith("/")] == [f"{p}/x" for p in places[:2]]


def test_it_is_one_file_for_the_oldest_python_of_an_image() -> None:
    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 9))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
