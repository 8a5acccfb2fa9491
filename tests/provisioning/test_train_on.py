"""`icom train --on` on real hosts: a laptop, a master and two workers, with real ssh and mpirun.

EC2 is moto's server on the laptop; its instances have the hosts' addresses. The nodes are as `icom provision` leaves
them: the project in ~/icom, its environment in the login shell's PATH, ~/hosts, ssh from the master to the workers.

Guards provisioning.train_on and transfer.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from icom.config.train import TrainConfig
from icom.data.images import BUNDLED_CONCEPTS
from icom.errors import IcomError, UsageError
from icom.models.loading import BUNDLE
from provisioning.cluster import Node, role_names
from provisioning.config import WhereConfig
from provisioning.folder import ClusterFolder
from provisioning.openssh import OpenSsh
from provisioning.script import Script
from provisioning.train_on import RemoteTraining, _inputs, _options_there, check_ready
from tests.support.command import ROOT, Result, long
from tests.support.hosts import HOME, Cluster, Host, cluster
from tests.support.mpi import ranks
from tests.support.namespaces import Command
from tests.support.waiting import wait_until

REGION = "eu-central-1"
INSTANCES = """
import boto3
ec2 = boto3.client("ec2")
vpc = ec2.create_vpc(CidrBlock="198.18.0.0/24")["Vpc"]["VpcId"]
subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="198.18.0.0/24", AvailabilityZone="eu-central-1a")["Subnet"]["SubnetId"]
taken = {taken}
start = dict(ImageId="ami-00000000000000aa1", SubnetId=subnet)
ec2.run_instances(MinCount=taken, MaxCount=taken, **start)
for role in ("master", "worker-1", "worker-2"):
    tags = [dict(Key="icom:cluster", Value="box"), dict(Key="icom:role", Value=role)]
    spec = [dict(ResourceType="instance", Tags=tags)]
    made = ec2.run_instances(MinCount=1, MaxCount=1, TagSpecifications=spec, **start)["Instances"][0]
    print(made["InstanceId"], made["PrivateIpAddress"])
ec2.describe_instances()
"""
FIRST_IN_SUBNET = 4  # AWS keeps those before
PROFILE = f"""
export PATH="{Path(sys.executable).parent}:$PATH" PYTHONPATH="{ROOT}" HF_ENDPOINT=http://127.0.0.1:9 OMP_NUM_THREADS=1
"""
OPTIONS = {
    "placeholder_token": "<concept>",
    "initializer_token": "object",
    "resolution": 64,
    "train_batch_size": 2,
    "max_train_steps": 3,
    "learning_rate": 2e-3,
    "seed": 7,
    "report_to": "none",
    "num_comparison_images": 0,
    "mixed_precision": "no",
}
HOUR_LONG = 100_000  # steps


@dataclass
class Box:
    """The user's computer, and the cluster `box`."""

    hosts: Cluster
    environment: dict[str, str]
    folder: ClusterFolder

    @property
    def laptop(self) -> Host:
        return self.hosts[0]

    @property
    def nodes(self) -> list[Host]:
        return self.hosts[1:]

    def start(self, **options: object) -> Command:
        """`icom train --on box`, from the laptop."""
        words = [f"--{name}={value}" for name, value in (OPTIONS | options).items()]
        command = [sys.executable, "-m", "icom", "train", "--on", "box", *words]
        return self.laptop.start(command, self.environment, ROOT)

    def train(self, **options: object) -> tuple[int, str]:
        """To its end: exit code, and what it said."""
        with self.start(**options) as command:
            said, _ = command.communicate()
        return command.returncode, said


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's folder, which only the laptop is to look into."""
    return tmp_path_factory.mktemp("laptop")


@pytest.fixture(scope="module")
def box(shared: Path, hosts_possible: None) -> Iterator[Box]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | {
        **{"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_EC2_METADATA_DISABLED": "true"},
        **{"AWS_DEFAULT_REGION": REGION, "ICOM_CLUSTERS_DIR": str(shared / "clusters")},
    }
    with cluster(0, show=[shared]) as hosts:
        for name in ("laptop", "master", "node1", "node2"):
            hosts.add(name)
        with (shared / "moto.log").open("w") as log:
            server = hosts[0].start([sys.executable, "-m", "tests.support.moto_server"], environment, ROOT, errors=log)
        assert server.stdout
        with server.stdout:
            environment["AWS_ENDPOINT_URL"] = server.stdout.readline().strip()
        box = Box(hosts, environment, ClusterFolder(shared / "clusters" / "123456789012" / REGION / "box"))
        be_cluster(box)
        yield box


def be_cluster(box: Box) -> None:
    """What `icom provision` does."""
    taken = int(box.laptop.address.rpartition(".")[2]) - FIRST_IN_SUBNET + 1
    code = INSTANCES.replace("{taken}", str(taken))
    made = box.laptop.run([sys.executable, "-c", code], box.environment, ROOT)
    ids = dict(reversed(line.split()) for line in made.stdout.splitlines())
    assert list(ids) == [host.address for host in box.nodes], made
    public = box.folder.client_key()
    nodes = []
    for role, host in zip(role_names(3), box.nodes, strict=True):
        id = ids[host.address]
        nodes.append(
            Node(
                id,
                role,
                "",
                "running",
                "",
                "",
                "",
                "",
                "",
                host.address,
                None,
                spot=False,
                since=datetime.now(timezone.utc),
            )
        )
        box.folder.remember([id], host.key.public)
        with host.path(HOME / ".ssh/authorized_keys").open("a") as keys:
            keys.write(f"{public}\n")
        host.path(HOME / ".profile").write_text(PROFILE)
        host.path(HOME / "icom").symlink_to(ROOT)
    box.folder.write_ssh_config(tuple(nodes), "root", box.folder.key)
    box.nodes[0].path(HOME / "hosts").write_text("localhost\nnode1\nnode2\n")
    for name in ("known_hosts", "config", "id_ed25519"):
        box.laptop.path(HOME / ".ssh" / name).unlink()


@pytest.fixture(scope="module")
def photos(shared: Path) -> Path:
    """The user's pictures with their captions, beside what is none of the nodes' business."""
    folder = shared / "my photos"
    shutil.copytree(BUNDLED_CONCEPTS / "red-moon", folder)
    for picture in sorted(folder.iterdir()):
        picture.with_suffix(".txt").write_text(f"<concept> on sand, number {picture.stem}")
    (folder / ".hidden").write_text("no picture")
    return folder


@pytest.fixture(scope="module")
def model(shared: Path) -> Path:
    """The user's model, beside what no run reads of it."""
    folder = shared / "model"
    shutil.copytree(BUNDLE, folder)
    (folder / "unet/diffusion_pytorch_model.fp16.safetensors").write_bytes(b"another variant")
    (folder / "old.ckpt").write_bytes(b"a pickle")
    return folder


@dataclass(frozen=True)
class Learned:
    """A run that came to its end."""

    options: dict[str, object]
    output: Path
    said: str


@pytest.fixture(scope="module")
def learned(box: Box, shared: Path, photos: Path, model: Path) -> Learned:
    output = shared / "out"
    (output / "notes").mkdir(parents=True)
    (output / "notes/mine.txt").write_text("stays")
    options = {"train_data_dir": photos, "pretrained_model_name_or_path": model, "checkpointing_steps": 2}
    options["caption_templates"] = shared / "templates.txt"
    options["caption_templates"].write_text("a photo of [filewords]\n[filewords], again")
    code, said = box.train(**options, output_dir=output)
    assert code == 0, said
    return Learned(options, output, said)


def rows(output: Path) -> torch.Tensor:
    return load_file(output / "learned_embeds.safetensors")["<concept>"]


@pytest.mark.long
def test_results_are_those_of_one_process(
    box: Box, learned: Learned, train: Callable[..., Result], tmp_path: Path
) -> None:
    alone = train(**OPTIONS | learned.options | {"train_batch_size": 6, "output_dir": tmp_path})
    assert alone.code == 0, alone
    assert "total batch 6 (2 x 3 processes" in learned.said
    torch.testing.assert_close(rows(learned.output), rows(tmp_path), rtol=1e-4, atol=1e-6)
    names = {path.name for path in learned.output.rglob("*")}
    assert {path.name for path in tmp_path.rglob("*")} <= names
    assert {"checkpoint-2", "metrics.jsonl"} <= names
    assert (learned.output / "notes/mine.txt").read_text() == "stays"
    # It is the user's computer that config.yaml speaks of, and a run that it can repeat.
    config = yaml.safe_load((learned.output / "config.yaml").read_text())
    options = learned.options | {"output_dir": learned.output, "seed": 7}
    assert {name: config[name] for name in options} == {
        name: str(value) if isinstance(value, Path) else value for name, value in options.items()
    }
    assert "on" not in config and True not in config


def contents(folder: Path, pattern: str) -> dict[str, bytes]:
    """Name -> bytes of the files in a folder that do not begin with a dot."""
    files = [path for path in folder.glob(pattern) if path.is_file() and not path.name.startswith(".")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.long
def test_inputs_are_on_all_nodes_byte_for_byte_and_travel_once(box: Box, learned: Learned, photos: Path) -> None:
    def there() -> dict[Path, tuple[dict[str, bytes], dict[str, bytes]]]:
        found = {}
        for host in box.nodes:
            (pictures,) = host.path(HOME / "pushed").glob("my_photos-*")
            (model,) = host.path(HOME / "pushed").glob("model-*")
            found[host.path("/")] = contents(pictures, "*"), contents(model, "**/*")
        return found

    expected = contents(photos, "*"), contents(BUNDLE, "*/*")
    assert list(there().values()) == [expected] * 3
    assert "sending the pictures (10 files, " in learned.said
    # A worker that was made anew gets what it lacks from the master; from here nothing of it is sent again.
    shutil.rmtree(box.nodes[2].path(HOME / "pushed"))
    first = {path: path.stat().st_ino for path in box.nodes[1].path(HOME / "pushed").rglob("*")}
    # The same folder: the second run goes on where the first ended, whose checkpoints are on the master.
    again = learned.options | {"output_dir": learned.output, "max_train_steps": 4, "resume_from_checkpoint": "latest"}
    code, said = box.train(**again)
    assert code == 0, said
    assert "sending the pictures" not in said and "sending the model" not in said
    assert {path: path.stat().st_ino for path in first} == first
    assert list(there().values()) == [expected] * 3
    steps = [json.loads(line)["step"] for line in (learned.output / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


def wait_for_steps(box: Box, process: Command, name: str) -> None:
    """Until the run that writes to a folder of that name has made two steps."""

    def there() -> bool:
        assert process.poll() is None, process.communicate()[0]
        files = box.nodes[0].path(HOME).glob(f"runs/*/{name}/metrics.jsonl")
        return any(path.read_text().count("\n") >= 2 for path in files)

    wait_until(there)


@pytest.mark.long
def test_ctrl_c_saves_and_fetches_and_nobody_trains_beside(box: Box, shared: Path, photos: Path) -> None:
    output = shared / "long"
    with box.start(train_data_dir=photos, output_dir=output, max_train_steps=HOUR_LONG) as process:
        wait_for_steps(box, process, output.name)
        code, said = box.train(train_data_dir=photos, output_dir=shared / "second")
        assert (code, "A training runs on box already" in said) == (2, True), said
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate()
    assert process.returncode == 130, said
    (checkpoint,) = output.glob("checkpoint-*")
    steps = (output / "metrics.jsonl").read_text().splitlines()
    assert checkpoint.name == f"checkpoint-{len(steps)}"
    assert not any(ranks(host) for host in box.nodes)


@pytest.mark.long
def test_lost_connection_leaves_the_training_alone(box: Box, shared: Path, photos: Path) -> None:
    """The lines that icom then prints are those that see, stop and fetch it."""
    output, master = shared / "long" / "lost", box.nodes[0]
    with box.start(train_data_dir=photos, output_dir=output, max_train_steps=HOUR_LONG) as process:
        wait_for_steps(box, process, output.name)
        master.kill_sshd()
        said, _ = process.communicate()
    with master.path("/run/ssh/config").open("a") as settings:  # as systems have it, for scp
        settings.write("Subsystem sftp internal-sftp\n")
    master.start_sshd()
    assert process.returncode == 1, said
    assert ranks(master), said
    stop, fetch = (line.partition(": ")[2].strip() for line in said.splitlines()[-2:])
    for line in (stop, fetch):
        shell = line.replace("icom", f"{sys.executable} -m icom", 1)
        done = box.laptop.run(["bash", "-c", shell], box.environment, ROOT)
        assert done.returncode == 0, done
        wait_until(lambda: not any(ranks(host) for host in box.nodes))
    assert list(output.glob("checkpoint-*"))


@pytest.mark.long
def test_failing_training_gives_its_exit_code_and_message(box: Box, shared: Path, photos: Path) -> None:
    code, said = box.train(train_data_dir=photos, output_dir=shared / "failed", learning_rate=1e30)
    assert "The loss became nan" in said
    (told,) = box.nodes[0].path(HOME).glob("runs/*/failed/../exit")  # Intel's mpirun makes 255 of an icom's 1
    assert code == int(told.read_text()) != 0
    assert "Done" not in said
    assert "The training on box failed." in said


def test_what_a_run_reads_is_what_travels(tmp_path: Path) -> None:
    """Captions, templates, and pictures of the class where there are as many as the run wants."""
    photos = tmp_path / "photos"
    for folder, concept in (photos, "red-moon"), (tmp_path / "class", "blue-heart"):
        shutil.copytree(BUNDLED_CONCEPTS / concept, folder)
    (photos / "metadata.jsonl").write_text("".join(f'{{"file_name": "{i}.png", "text": "red"}}\n' for i in range(5)))
    (tmp_path / "t.txt").write_text("a [name], [filewords]")
    options = {name: OPTIONS[name] for name in ("placeholder_token", "initializer_token")}
    options |= {"train_data_dir": str(photos), "caption_templates": str(tmp_path / "t.txt")}
    options |= {
        "with_prior_preservation": True,
        "class_prompt": "a <concept>",
        "class_data_dir": str(tmp_path / "class"),
    }
    found = _inputs(TrainConfig(**options, num_class_images=5))  # type: ignore[arg-type]
    pictures = {f"{i}.png" for i in range(5)}
    assert {option: {file.name for file in some.files} for option, some in found.items()} == {
        "train_data_dir": {*pictures, "metadata.jsonl"},
        "caption_templates": {"t.txt"},
        "class_data_dir": pictures,
    }
    (tmp_path / "prompts.txt").write_text("a [name] --s 2\n# no prompt\n[name] at night\n")
    config = TrainConfig(**options, num_class_images=5, sample_prompts=[str(tmp_path / "prompts.txt")])  # type: ignore[arg-type]
    training = RemoteTraining(WhereConfig(cluster="box", region=None), "id", tmp_path / "out")
    there = _options_there(config, _inputs(config), "/home/me", training)
    assert there["caption_templates"].startswith("/home/me/pushed/") and there["output_dir"] == "/home/me/runs/id/out"
    assert there["sample_prompts"] == ["a [name] --s 2", "# no prompt", "[name] at night"]
    (tmp_path / "prompts.txt").write_text("[name] --x 2")
    with pytest.raises(UsageError, match=r"prompts\.txt, line 1: there is no --x"):
        _inputs(config)
    with pytest.raises(UsageError, match="has 5 pictures, and --num_class_images is 6"):
        _inputs(TrainConfig(**options, num_class_images=6))  # type: ignore[arg-type]
    options["class_data_dir"] = str(tmp_path / "none")
    assert "class_data_dir" not in _inputs(TrainConfig(**options))  # type: ignore[arg-type]
    (photos / "5.txt").write_text("no picture")
    with pytest.raises(IcomError, match=r"1: 5\.txt: captions without their pictures"):
        _inputs(TrainConfig(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_data_dir": "/tmp/nothing"}, "No such picture folder: /tmp/nothing"),
        long({"train_data_dir": "bundled", "on": "other"}, "There is no cluster other in eu-central-1"),
        long({"train_data_dir": "bundled", "pretrained_model_name_or_path": "./no"}, "No such model folder: ./no"),
    ],
)
def test_what_is_wrong_here_is_said_before_anything_is_sent(
    box: Box, shared: Path, options: dict[str, object], message: str
) -> None:
    code, said = box.train(output_dir=shared / "none", **options)
    assert code in (1, 2)
    assert message in said


@pytest.mark.long
def test_latest_of_a_cluster_that_is_gone_is_not_nothing(box: Box, shared: Path, photos: Path) -> None:
    """The checkpoints are here, but not on the new master."""
    (output := shared / "old").mkdir()
    (output / "checkpoint-5").mkdir()
    code, said = box.train(train_data_dir=photos, output_dir=output, resume_from_checkpoint="latest")
    assert code == 2
    assert f"--resume_from_checkpoint {output / 'checkpoint-N'}" in said


def test_nodes_with_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question is asked in bash here, where the driver's device is a file."""

    class Bash(OpenSsh):
        def run(self, command: str | Script, **_: Any) -> str:
            assert isinstance(command, Script)
            words = ["bash", "-c", command.line.replace("/dev/nvidiactl", str(device))]
            return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    monkeypatch.setenv("HOME", "/home/somebody")
    device, run = (
        tmp_path / "nvidiactl",
        RemoteTraining(WhereConfig(cluster="box", region=REGION), "1", tmp_path / "out"),
    )
    assert check_ready(Bash(tmp_path, "x"), run, None) == "/home/somebody"
    device.touch()
    with pytest.raises(UsageError, match=f"box have GPUs.* icom push --cluster box --region {REGION}"):
        check_ready(Bash(tmp_path, "x"), run, None)
