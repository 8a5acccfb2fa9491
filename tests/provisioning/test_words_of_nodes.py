"""What a node says or sends, as provisioning's nodes, train_on and transfer take it: parsed, refused or shown plain.

Guards icom.names, provisioning.on_node, relay and transfer.
"""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from icom.errors import IcomError
from icom.launch.checks import HostProblem, show_problems
from icom.launch.hosts import read_hosts
from icom.names import plain
from provisioning import bootstrap as nodes_module
from provisioning import train_on
from provisioning.cluster import role_names
from provisioning.config import WhereConfig
from provisioning.folder import ClusterFolder, name_before_launch
from provisioning.hostkeys import KeyPair
from provisioning.openssh import OpenSsh
from provisioning.progress import Progress
from provisioning.script import Script
from provisioning.ssh import Login
from provisioning.train_on import RemoteTraining, check_ready
from tests.support import fake_ssh
from tests.support.command import Result
from tests.support.fake_ssh import Steps
from tests.support.hostile import SCREEN, TEXTS, obeyed
from tests.support.node_steps import node
from tests.support.wire import Icom

# RFC 8032, 7.1, test 1: the same in all processes that collect these tests.
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAINdamAGCsQq31Uv+08lkBzoO4XLz2qYjJa8CGmj3B1Ea"
KEYS = [
    *(f"{KEY}\n* {KEY}", f'{KEY}\ncommand="touch PWNED" {KEY}', f"@cert-authority * {KEY}", f"ssh-ed25519 {KEY}"),
    *("ssh-ed25519 AAAA", "ssh-ed25519 !!!!", "ssh-ed25519", f"no-pty {KEY}", KEY.replace("ssh-ed25519", "ssh-rsa")),
    *(f"{KEY[:-9]}\x1b[2J{KEY[-9:]}", f"{KEY[:-9]}$(x){KEY[-9:]}", "", SCREEN),
]
FACTS = [
    *("null", "[]", "{}", "{", '{"versions": 1}', "1e999", fake_ssh.FACTS.replace('"gpus": 0', '"gpus": "x"')),
    *(
        fake_ssh.FACTS.replace('{"torch": "2"}', "null"),
        fake_ssh.FACTS.replace('"interfaces": {}', '"interfaces": [1]'),
    ),
    *(
        fake_ssh.FACTS.replace('"2"', "2"),
        fake_ssh.FACTS.replace("}", ', "more": 1}'),
        fake_ssh.FACTS + "\nicom-node: 1",
    ),
    *(fake_ssh.FACTS.replace('"kernel": "6.8"', '"kernel": null'),),
]


@pytest.fixture
def set_up(steps: Steps, tmp_path: Path) -> Callable[[], ClusterFolder]:
    """Set a master and a worker up that say what `fake_ssh` has; the folder with their keys."""
    nodes = tuple(node(number, role, f"10.0.0.{number}") for number, role in enumerate(role_names(2), 1))
    folder = ClusterFolder(tmp_path / "box")
    folder.client_key()
    for one in nodes:
        folder.remember([one.id, name_before_launch(one.run, one.role)], KEY)

    def start() -> ClusterFolder:
        login = Login(folder, "root", folder.key)
        try:
            nodes_module.bootstrap(login, nodes, 0, 1, Progress(Console()), lambda: None)
        except IcomError as error:
            error.args = (plain(str(error)),)  # as the command shows it
            raise
        return folder

    return start


def test_keys_and_facts_that_are_ones(set_up: Callable[[], ClusterFolder]) -> None:
    assert len(set_up().known_hosts.read_text().splitlines()) == 4, "a new key for each"


@pytest.mark.parametrize("key", KEYS)
def test_host_key_that_is_none(
    key: str, set_up: Callable[[], ClusterFolder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not one line more in known_hosts; no key of it on a worker."""
    monkeypatch.setattr(fake_ssh, "make_key", lambda: KeyPair("", key))
    with pytest.raises(IcomError, match="made no ed25519 key"):
        set_up()
    known = (tmp_path / "box/known_hosts").read_text().splitlines()
    assert len(known) == 2
    assert all(line.endswith(KEY) for line in known)


@pytest.mark.parametrize("facts", FACTS)
def test_facts_that_are_none(facts: str, set_up: Callable[[], ClusterFolder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_ssh, "FACTS", facts)
    with pytest.raises(IcomError, match="its answer is none"):
        set_up()


def test_last_lines_of_a_node_do_nothing_to_the_terminal(make: Icom, steps: Steps) -> None:
    steps.says = f"a\r\nb{SCREEN}c"
    steps.meet_at(3, "error")
    result = make("--cluster", "loud", "--no_bake")
    assert result.code == 1
    assert obeyed(result.out + result.err) == []
    assert "all is well" in result.err, "what can be read is shown"


@pytest.mark.parametrize(
    "text", [SCREEN, "a\x9b2Jb", "a\x1bP1$r\x1b\\b", "a\x1b", "\x1b[", "a\x00\x7fb", "\u202ex", "\x85\u2028"]
)
def test_plain_text_is_obeyed_by_no_terminal(text: str) -> None:
    assert obeyed(plain(text)) == []
    assert plain(plain(text)) == plain(text)
    assert plain("a\tb\r\nc – ü 漢 →\n") == "a\tb\nc – ü 漢 →\n"


class Says(OpenSsh):
    """A way to a master that answers what it likes."""

    text = ""

    def run(self, command: str | Script, **_: Any) -> str:
        return self.text


def said(text: str) -> Says:
    way = Says(Path("/nowhere"), "icom-box-master")
    way.text = text
    return way


@pytest.mark.parametrize(
    "answer",
    [
        *(
            "",
            "\n",
            "/root",
            "/root\nmaybe",
            "root\nnew",
            "/root/../x\nnew",
            "/root\nnew\n1 a\nb",
            "/a b\nnew",
            "gpus\nnew",
        ),
        *("/root$(touch PWNED)\nnew", "/root\x1b[2J\nnew", "/root`x`\nknown", "/root;x\nknown"),
        *(f"/root\nknown\n12 {text}" for text in TEXTS if text.strip() and len(text.splitlines()) == 1),
    ],
)
def test_answer_whether_it_trains(answer: str, tmp_path: Path) -> None:
    """A home folder goes into a file, the other run's name into commands that the user is to type."""
    run = RemoteTraining(WhereConfig(cluster="box"), "0123456789ab", tmp_path / "out")
    with pytest.raises(IcomError) as refused:
        check_ready(said(answer), run, None)
    assert "See it" not in str(refused.value)
    assert obeyed(str(refused.value).replace("\n", "")) == []


@pytest.mark.parametrize("answer", ["\u00b2", "-1", "1e3", "99999999999999999999", "0x1", "\x1b[2J", "\u0663", ""])
def test_exit_code_that_is_none(answer: str, tmp_path: Path) -> None:
    run = RemoteTraining(WhereConfig(cluster="box"), "0123456789ab", tmp_path / "out")
    with pytest.raises(IcomError, match="Lost the connection"):
        train_on._outcome(said(answer), run)


@pytest.fixture
def master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], OpenSsh]:
    """Put an `ssh` first in PATH behind which is a shell script; the way to it."""
    (commands := tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")

    def become(script: str) -> OpenSsh:
        (commands / "ssh").write_text(f"#!/bin/sh\n{script}\n")
        (commands / "ssh").chmod(0o755)
        return OpenSsh(tmp_path / "config", "icom-box-master")

    return become


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", **more: str) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode, made.pax_headers = kind, link, 0o6777, more
    content = b"evil" if kind == tarfile.REGTYPE else b""
    made.size = len(content)
    return made, content


SYMLINK, HARDLINK = tarfile.SYMTYPE, tarfile.LNKTYPE
STREAMS: dict[str, list[tuple[tarfile.TarInfo, bytes]]] = {
    "up": [entry("./out/../../evil")],
    "up behind a folder": [entry("./out/a/../../../evil")],
    "up at once": [entry("../evil")],
    "absolute": [entry("/EVIL/evil")],
    "absolute inside": [entry("./out//EVIL/evil")],
    "another folder": [entry("./other/evil")],
    "the folder itself": [entry("./out")],
    "nothing": [entry("./")],
    "through a link": [entry("./out/l", SYMLINK, "EVIL"), entry("./out/l/evil")],
    "through a link that is here": [entry("./out/here/evil")],
    "hard link, then a write": [entry("./out/l", HARDLINK, "/EVIL/kept"), entry("./out/l")],
    "symbolic link": [entry("./out/l", SYMLINK, "/etc/passwd")],
    "hard link": [entry("./out/l", HARDLINK, "/EVIL/kept")],
    "pipe": [entry("./out/p", tarfile.FIFOTYPE)],
    "device": [entry("./out/d", tarfile.CHRTYPE)],
    "disk": [entry("./out/d", tarfile.BLKTYPE)],
    "name in a header": [entry("./out/x", path="../../evil")],
    "line break": [entry("./out/a\nb")],
    "escape sequence": [entry("./out/a\x1b[2Jb")],
    "sparse": [entry("./out/s", **{"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9" * 12})],
    "size that is none": [entry("./out/s", size="-5")],
    "size in words": [entry("./out/s", size="many")],
}


@pytest.mark.parametrize("name", STREAMS)
def test_stream_of_a_node(name: str, master: Callable[[str], OpenSsh], tmp_path: Path) -> None:
    """Whatever comes: files below the folder or nothing. No link, no device, nothing elsewhere, no set-user-id."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "kept").write_text("mine")
    (target := tmp_path / "here/out").mkdir(parents=True)
    (target / "here").symlink_to(elsewhere)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, content in STREAMS[name]:
            info.name, info.linkname = (text.replace("/EVIL", str(elsewhere)) for text in (info.name, info.linkname))
            tar.addfile(info, io.BytesIO(content))
    (tmp_path / "stream").write_bytes(stream.getvalue())
    way = master(f"cat {tmp_path / 'stream'}")
    before = set(tmp_path.rglob("*"))
    try:
        count = way.fetch("runs/x", "out", target)
    except IcomError as error:
        assert obeyed(str(error)) == []
        count = 0
    new = set(tmp_path.rglob("*")) - before
    assert len([path for path in new if path.is_file()]) == count
    for path in new:
        assert path.is_relative_to(target), path
        mode = path.lstat().st_mode
        assert stat.S_ISREG(mode) or stat.S_ISDIR(mode), path
        assert not mode & 0o7022, path
        assert str(path).isprintable()
    assert (elsewhere / "kept").read_text() == "mine"
    assert not (tmp_path / "here/.out.part").exists()


def test_stream_of_an_honest_node(master: Callable[[str], OpenSsh], tmp_path: Path) -> None:
    """As tar on the master makes it; a tracker's links stay there."""
    (out := tmp_path / "runs/x/o u t/checkpoint-1").mkdir(parents=True)
    (out / "a.safetensors").write_bytes(b"1" * 100_000)
    (out.parent / "learned.safetensors").write_text("2")
    (out.parent / "latest").symlink_to("checkpoint-1")
    way = master(f'for last; do :; done; cd {tmp_path}; eval "exec $last"')
    assert way.fetch("runs/x", "o u t", tmp_path / "back") == 2
    assert (tmp_path / "back/checkpoint-1/a.safetensors").read_bytes() == b"1" * 100_000
    assert not (tmp_path / "back/latest").exists()


def test_what_a_training_prints_far_away(master: Callable[[str], OpenSsh], tmp_path: Path) -> None:
    """In a real process: its text comes, no sequence does; progress bars may go back in their line."""
    (tmp_path / "said").write_text(f"step 1\r step 2\n{SCREEN} ü\n")
    way = master(f"cat > /dev/null; cat {tmp_path / 'said'}; cat {tmp_path / 'said'} >&2")
    code = (
        "from pathlib import Path; from provisioning import train_on as t; from provisioning.openssh import OpenSsh;"
        "from provisioning.config import WhereConfig;"
        "training = t.RemoteTraining(WhereConfig(cluster='box'), '1', Path('out'));"
        f"t._train(OpenSsh(Path('c'), {way.name!r}), training, [], '')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    for stream in (done.stdout, done.stderr):
        text = stream.decode()
        assert "step 1\r step 2\n" in text
        assert "all is well" in text
        assert "ü\n" in text
        assert obeyed(text.replace("\r", "")) == []


@pytest.mark.parametrize("text", [text for text in TEXTS if (text.strip() and "*" not in text) or text == "*"])
def test_hosts_file_of_a_stranger(text: str, tmp_path: Path) -> None:
    """Its names become words of mpirun's and ssh's command lines."""
    (file := tmp_path / "hosts").write_text(f"{text}\n", newline="")
    try:
        names = [host.name for host in read_hosts(str(file))]
    except IcomError as error:
        assert obeyed(str(error).replace("\n", "")) == []
    else:
        assert all(name.isascii() and name.replace("-", "").replace(".", "").isalnum() for name in names)
        assert not [name for name in names if name.startswith("-")]


def test_what_hosts_say_before_a_launch(capsys: pytest.CaptureFixture[str]) -> None:
    show_problems([HostProblem(f"node{SCREEN}", f"[red]{SCREEN}", SCREEN)])
    said = capsys.readouterr()
    assert obeyed(said.out + said.err) == []
    assert "hidden" in said.err


def test_message_of_the_command(icom: Callable[..., Result]) -> None:
    """Whatever goes into an error: here, an option's value."""
    result = icom("train", "--on", SCREEN, "--train_data_dir", f"/nowhere{SCREEN}", "--placeholder_token", "<x>")
    assert result.code
    assert obeyed(result.err) == []
