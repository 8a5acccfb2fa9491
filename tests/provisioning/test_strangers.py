"""icom.names where EC2's tags, options and files of strangers come in: what they say reaches no file, shell or ssh.

Guards icom.names, provisioning.cluster and sshfiles.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from icom.errors import IcomError
from icom.names import address
from provisioning import launches
from provisioning.bootstrap import hosts_file, ssh_config
from provisioning.cluster import Node
from provisioning.config import PARSED
from provisioning.folder import ClusterFolder
from provisioning.hostkeys import make_key
from tests.support.ec2 import output_of
from tests.support.hostile import LINES, ROLES, SCREEN, TEXTS, obeyed
from tests.support.wire import Icom, Wire

UBUNTU = "ami-00000000000000aa1"
OPTIONS = {
    *("host", "hostname", "hostkeyalias", "user", "identityfile", "identitiesonly", "userknownhostsfile"),
    *("globalknownhostsfile", "stricthostkeychecking", "batchmode", "connecttimeout"),
    *("serveraliveinterval", "serveralivecountmax"),
}
"""What icom writes into an ssh config."""
NODE = Node(
    **{field.name: None for field in fields(Node)}
    | {"id": "i-0123456789abcdef0", "role": "worker-1", "private_ip": "10.0.0.2", "run": "run", "state": "running"}
    | {"since": datetime.now(timezone.utc), "efa": False}
)


def stranger(ec2: Any, cluster: str, **tags: str) -> str:
    """An instance that carries the cluster's tag, and others; its id."""
    marks = [{"Key": f"icom:{key}", "Value": value} for key, value in {"cluster": cluster, **tags}.items()]
    made = ec2.run_instances(
        *(), ImageId=UBUNTU, MinCount=1, MaxCount=1, ClientToken=os.urandom(4).hex(),
        TagSpecifications=[{"ResourceType": "instance", "Tags": marks}],
    )  # fmt: skip
    ec2.describe_instances()
    return str(made["Instances"][0]["InstanceId"])


def assert_only_ours(folder: Path) -> None:
    """What ssh itself reads from the config has icom's options alone; the text, no others."""
    for file in folder.rglob("ssh_config"):
        text = file.read_bytes().decode()
        assert obeyed(text) == []
        words = [line.split(None, 1)[0].lower() for line in text.splitlines() if line.strip()]
        assert set(words) <= OPTIONS, text
        names = [name for line in text.splitlines() if line.startswith("Host ") for name in line.split()[1:]]
        for name in names:
            said = dict(
                line.split(" ", 1) for line in output_of("ssh", "-G", "-F", file, name).splitlines() if " " in line
            )
            assert not {"proxycommand", "localcommand", "remotecommand", "knownhostscommand"} & set(said)
            assert said["stricthostkeychecking"] == "true"


@pytest.mark.long
def test_roles_of_strangers_while_nodes_are_waited_for(
    provision: Icom, ec2: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The plan is made by then. It is told, and what was made goes."""
    wait_for, met = launches.wait_for, []

    def meanwhile(*arguments: Any) -> None:
        met.extend([] if met else [stranger(ec2, "tagged", role=role) for role in ROLES])
        wait_for(*arguments)

    monkeypatch.setattr(launches, "wait_for", meanwhile)
    result = provision("--cluster", "tagged")
    assert_only_ours(tmp_path)
    assert result.code == 1, result
    assert "carries the tag of cluster tagged" in result.err
    assert any(f"{id} carries" in result.err for id in met)
    assert obeyed(result.out + result.err) == []


@pytest.mark.long
def test_strangers_do_not_keep_icom_from_the_cluster(provision: Icom, icom: Icom, ec2: Any, tmp_path: Path) -> None:
    """They are shown by their ids, and go with the rest; a second call takes none for a node."""
    assert provision("--cluster", "tagged").code == 0
    ids = [stranger(ec2, "tagged", role=role) for role in ROLES]
    for tag in ("run", "base", "master", "ends"):
        ids += [stranger(ec2, "tagged", role="worker-1", **{tag: text}) for text in LINES]
    shown = icom("status", "--cluster", "tagged")
    assert shown.code == 0, shown
    assert all(id in shown.out for id in ids)
    again = provision("--cluster", "tagged")
    assert again.code == 1, again
    gone = icom("teardown", "--yes", "--cluster", "tagged")
    assert gone.code == 0, gone
    said = shown.out + again.err + gone.out + gone.err
    assert obeyed(said) == []
    assert "PWNED" not in said
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"PWNED" not in file.read_bytes()


@pytest.mark.parametrize(
    "text", [*TEXTS, "1.2.3.4\n  ProxyCommand x", "localhost", "::1%x y", "1.2.3", "0x7f.1", "1.2.3.4 "]
)
def test_text_that_is_no_address(text: str) -> None:
    with pytest.raises(IcomError):
        address(text)
    assert (address("10.0.0.2"), address("2001:DB8::0")) == ("10.0.0.2", "2001:db8::")


def test_address_that_is_none(provision: Icom, wire: Wire, tmp_path: Path) -> None:
    def lie(answer: dict[str, Any]) -> None:
        for reservation in answer["Reservations"]:
            for instance in reservation["Instances"]:
                instance["PublicIpAddress"] = "1.2.3.4\n  ProxyCommand touch PWNED"

    wire.changes["ec2:DescribeInstances"] = lie
    result = provision("--cluster", "liar")
    assert result.code == 1, result
    assert "EC2 gave no public address" in result.err
    assert_only_ours(tmp_path)


@pytest.mark.parametrize("option", sorted(PARSED))
def test_option_from_a_strangers_file(option: str, icom: Icom, provision: Icom, wire: Wire, tmp_path: Path) -> None:
    """Refused in words before AWS is asked, and before anything is written."""
    file = tmp_path / "cluster.yaml"
    urls = ["file:///etc/passwd", "ftp://x/", "https://x y", "javascript:x"] if option == "address_url" else []
    for text in [*TEXTS, *urls]:
        value = text.replace("${", "\\${")  # else OmegaConf takes it for an interpolation
        file.write_text(yaml.safe_dump({"cluster": "theirs", option: [value] if option == "subnet" else value}))
        # The fixture gives an --address_url, and flags go first.
        run = partial(icom, "provision", "--yes", "--no_setup") if option == "address_url" else provision
        result = run("--config", str(file))
        if result.code == 2:
            assert wire.calls == [], (text, result)
            assert f"--{option.removesuffix('_name')}" in result.err, (text, result)
        else:  # AWS allows such names: nothing but a request has it
            assert (option, text) == ("instance_profile", "worker-1,other"), result
        assert obeyed(result.out + result.err) == [], text
        assert not list((tmp_path / "clusters").rglob("ssh_config")), text
        wire.calls.clear()


@pytest.mark.parametrize("name", ['a"\n  ProxyCommand touch PWNED', 'a" b', "a\\", "a${HOME}", "a\tb", "a\x1b[2Jb"])
@pytest.mark.parametrize("what", ["key_file", "ICOM_CLUSTERS_DIR"])
def test_path_that_ssh_would_read_otherwise(
    what: str, name: str, provision: Icom, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (place := tmp_path / name).mkdir()
    options = []
    if what == "key_file":
        (key := place / "key").write_text(make_key().private)
        key.chmod(0o600)
        options = ["--key_name", "mine", "--key_file", str(key)]
    else:
        monkeypatch.setenv(what, str(place))
    result = provision("--cluster", "odd", *options)
    assert result.code == 2, result
    assert what in result.err
    assert obeyed(result.err) == []
    assert not list(tmp_path.rglob("ssh_config"))


def test_percent_signs_and_blanks_in_paths_stay_what_they_are(
    provision: Icom, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ICOM_CLUSTERS_DIR", str(tmp_path / "50%h off"))
    assert provision("--cluster", "odd").code == 0
    (file,) = tmp_path.rglob("ssh_config")
    said = output_of("ssh", "-G", "-F", file, "icom-odd").splitlines()
    assert f"identityfile {file.parent}/id_ed25519".replace("%", "%%") in said
    command = ["ssh", "-v", "-F", str(file), "-o", "ProxyCommand=false", "icom-odd", "true"]
    tried = output_of("sh", "-c", f"{shlex.join(command)} 2>&1 || true")
    assert f"{file.parent}/id_ed25519" in tried, "the key that ssh looks for"


@pytest.mark.parametrize("text", TEXTS)
def test_writers_refuse_whatever_a_node_is_made_of(text: str, tmp_path: Path) -> None:
    """By construction: also what no edge has parsed. Nothing is written then."""
    folder, key = ClusterFolder(tmp_path / "box"), make_key().public
    folder.client_key()
    before = {file: file.read_bytes() for file in folder.path.iterdir()}
    writers: dict[str, Callable[[Node], object]] = {
        "ssh_config": lambda node: folder.write_ssh_config((node,), "ubuntu", folder.key),
        "hosts": lambda node: hosts_file((node,)),
        "the master's ssh_config": lambda node: ssh_config((node,)),
        "known_hosts": lambda node: folder.remember([node.id], key),
    }
    for name, write in writers.items():
        for field in {"hosts": ["role"], "known_hosts": ["id"]}.get(name, ["role", "id", "private_ip"]):
            node = replace(NODE, **{field: text})
            if field == "id" and text and not text.strip("w-0"):
                continue  # a word, if no id
            with pytest.raises(IcomError):
                write(node)
    with pytest.raises(IcomError):
        folder.write_ssh_config((NODE,), text, folder.key)
    with pytest.raises(IcomError):
        folder.remember([NODE.id], text)
    with pytest.raises(IcomError):
        folder.remember([NODE.id], f"{key} x\n* {key}")
    assert {file: file.read_bytes() for file in folder.path.iterdir()} == before


@pytest.mark.parametrize("text", [text for text in TEXTS if text])
def test_node_and_cluster_on_the_command_line(text: str, icom: Icom, provision: Icom, wire: Wire) -> None:
    assert icom("ssh", "--cluster", text).code == 2
    assert icom("train", "--on", text, "--train_data_dir", "bundled", "--placeholder_token", "<x>").code == 2
    assert wire.calls == []
    assert icom("run", "--node", text, "--", "true").code == 2


def test_names_that_may_be_anything_are_shown_plain(provision: Icom, icom: Icom, ec2: Any, wire: Wire) -> None:
    """A key pair with the cluster's tag and a name of somebody's choice; EC2's own words in an error."""
    assert provision("--cluster", "named").code == 0

    def lie(answer: dict[str, Any]) -> None:
        for item in answer["KeyPairs"]:
            item["KeyName"] = f"[red]{SCREEN}"

    wire.changes["ec2:DescribeKeyPairs"] = lie
    shown = icom("status", "--cluster", "named")
    assert shown.code == 0
    assert obeyed(shown.out) == []
