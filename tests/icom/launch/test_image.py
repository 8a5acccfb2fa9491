"""The image that `make image` builds: what is in it, what runs in it, and its way to a registry and back.

Guards Dockerfile and icom.setup_env.image.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
import torch
import yaml
from safetensors.torch import load_file

from icom.setup_env.image import pip_settings
from tests.support.clone import closed_port
from tests.support.command import ROOT, Result, train_arguments
from tests.support.containers import Store, missing, store
from tests.support.hosts import cluster
from tests.support.mpi import training_options
from tests.support.namespaces import children
from tests.support.pods import Nodes, run_mpijob
from tests.support.waiting import wait_until

IMAGE, SMALL = "localhost/icom:cpu", "localhost/small:none"
CLOSED = ("--rm", "--network=none", "--read-only", "--tmpfs=/tmp", "--env=HOME=/tmp")
"""How the image is run at its strictest."""

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """With the image, built on a Debian that is made here: no registry is asked for anything."""
    if lacking := missing("docker-registry", "mmdebstrap"):
        pytest.skip(f"images cannot be built on this machine: it lacks {', '.join(lacking)}")
    with store(tmp_path_factory.mktemp("containers") / "store") as made:
        base = made.folder / "base.tar"
        sources = ["apt-get", "indextargets", "--format=$(REPO_URI)", "Created-By: Packages", "Codename: bookworm"]
        mirror = subprocess.run(sources, capture_output=True, text=True, check=True).stdout.split()[:1]
        line = [f"deb {mirror[0]} bookworm main"] if mirror else []
        made.run("mmdebstrap", "--variant=minbase", "--mode=root", "bookworm", base, *line)
        made.run("podman", "import", "--quiet", base, default_base())
        base.unlink()
        volumes = [f"--volume={folder}:{folder}:ro" for folder in pip_folders()]
        made.run(*make("image", BUILD_OPTIONS=shlex.join(["--pull-never", "--network=host", *volumes])))
        yield made


def pip_folders() -> list[Path]:
    """Folders of this machine that pip is configured to look in: wheels, and what an index's pages link to."""
    found = []
    for name, value in pip_settings([Path(sys.executable)]).items():
        if name in ("find-links", "index-url", "extra-index-url"):
            folders = [Path(urlsplit(word).path) for word in value.split() if urlsplit(word).scheme in ("", "file")]
            found += [folder if name == "find-links" else folder.parent for folder in folders]
    return found


def default_base() -> str:
    (base,) = re.findall(r"^ARG BASE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    return base


def make(target: str, **settings: str) -> list[str]:
    """The command of somebody who has buildah alone."""
    words = [f"{name}={value}" for name, value in {"CONTAINER_TOOL": "buildah", **settings}.items()]
    return ["make", f"--directory={ROOT}", f"PYTHON={sys.executable}", target, *words]


def shell(containers: Store, script: str) -> list[str]:
    """The lines that a shell in the image prints."""
    return containers.run("podman", "run", *CLOSED, IMAGE, "sh", "-c", script).stdout.splitlines()


def test_what_it_is(containers: Store) -> None:
    config = containers.inspect("image", IMAGE)["Config"]
    labels = {name.rpartition(".")[2]: value for name, value in config["Labels"].items() if "opencontainers" in name}
    commit = labels["revision"].removesuffix("-changed")
    assert subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, check=False).returncode == 0
    assert (labels["title"], labels["licenses"], labels["name"]) == ("icom", "Apache-2.0", default_base())
    assert config["User"] == "1000:1000" and not config.get("Entrypoint")
    assert "usage: icom" in containers.run("podman", "run", *CLOSED, IMAGE).stdout


def test_nothing_is_in_it_that_should_not_be(containers: Store) -> None:
    programs = ("icom", "python", "mpirun", "icom-sshd")
    found = shell(containers, f"id -u; id -un; for name in {' '.join(programs)}; do command -v $name; done")
    assert found == ["1000", "icom", *(f"/opt/icom/bin/{name}" for name in programs)]
    # No compiler, no host key that all containers would share, nothing that came from pip's configuration here.
    compilers = "for name in cc gcc g++ clang ld as make rustc go; do command -v $name; done; true"
    assert shell(containers, f"{compilers}; ls /etc/ssh | grep host_key; true") == []
    assert (
        shell(containers, "ls -d /run/secrets /etc/pip.conf ~/.config ~/.netrc /opt/icom/pip.conf 2>/dev/null; true")
        == []
    )
    settings = pip_settings([Path(sys.executable)])
    words = {word for name in ("find-links", "index-url", "extra-index-url") for word in settings.get(name, "").split()}
    if words:  # all at once: the image is read from end to end, but for the modules, which are as they were published
        options = shlex.join(["--exclude=*.py", "--exclude=*.pyc", *(f"--regexp={word}" for word in words)])
        assert shell(containers, f"grep -rIlF {options} /opt/icom /etc /home 2>/dev/null; true") == []
    known = json.dumps([containers.inspect("image", IMAGE)["Config"], containers.inspect("image", IMAGE)["History"]])
    assert not [word for word in words if word in known]
    # Nobody can write to what runs, and nothing of the repository but what is needed is there.
    assert (
        shell(containers, "find /opt/icom /usr /etc \\( -user 1000 -o -perm -2 \\) ! -type l 2>/dev/null; true") == []
    )
    assert not {".git", "tests", ".venv", "docs"} & set(shell(containers, "ls -A /opt/icom/src"))


def test_doctor(containers: Store) -> None:
    words = ["icom", "doctor", "--json", "-", "--output_dir", "/tmp/out"]
    said = json.loads(containers.run("podman", "run", *CLOSED, "--workdir=/tmp", IMAGE, *words).stdout)
    text = json.dumps(said)
    assert "/opt/icom/bin/python" in text and "/opt/icom/bin/mpirun" in text


def test_demo_learns_offline_as_a_training_outside(
    containers: Store, train: Callable[..., Result], tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    os.chown(volume, 1000, 1000)
    mount = f"--volume={volume}:/data"
    # That a concept is learned, tests/icom/commands/test_demo.py shows. A thread more than there are free cores waits.
    one_thread = "--env=OMP_NUM_THREADS=1"
    demo = ["icom", "demo", "--max_train_steps", "3", "--num_images", "1", "--output_dir", "/data/demo"]
    said = containers.run("podman", "run", *CLOSED, one_thread, mount, IMAGE, *demo)
    assert re.search(r"\d+ of 1", said.stdout) or "%" in said.stdout, said.stdout
    assert (volume / "demo/before-after.png").stat().st_uid == 1000
    words = ["icom", *train_arguments(output_dir="/data/out")]
    containers.run("podman", "run", *CLOSED, one_thread, mount, IMAGE, *words)
    assert train(output_dir=tmp_path / "here").code == 0
    inside, outside = (
        load_file(folder / "learned_embeds.safetensors") for folder in (volume / "out", tmp_path / "here")
    )
    torch.testing.assert_close(inside["<robot>"], outside["<robot>"], rtol=1e-4, atol=1e-6)


def test_to_a_registry_and_back(containers: Store, tmp_path: Path) -> None:
    """An almost empty image: the tools do not look into the two gigabytes of the real one, they only copy them."""
    containers.make_empty_image(SMALL, [], {"LANG": "C.UTF-8"})
    port = closed_port()
    (tmp_path / "registry.yaml").write_text(
        yaml.safe_dump(
            {
                "version": "0.1",
                "storage": {"filesystem": {"rootdirectory": str(containers.folder / "registry")}},
                "http": {"addr": f"127.0.0.1:{port}"},
            }
        )
    )
    image = f"127.0.0.1:{port}/team/icom:1"
    command = containers.command("docker-registry", "serve", tmp_path / "registry.yaml")
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as registry:
        try:
            wait_until(lambda: answers(port) or registry.poll() is not None)
            containers.run("podman", "tag", SMALL, image)
            options = "--tls-verify=false --disable-compression"
            said = containers.run(*make("push", IMAGE=image, PUSH_OPTIONS=options)).stdout
            assert f"pushed {image}" in said and "STEP" not in said
            before = containers.inspect("image", SMALL)
            containers.run("podman", "untag", image, image)
            with store(tmp_path / "elsewhere") as other:
                other.run("podman", "pull", "--tls-verify=false", "--quiet", image)
                after = other.inspect("image", image)
        finally:
            # The one that entered the namespaces waits for it.
            for pid in children(registry.pid) or [registry.pid]:
                os.kill(pid, signal.SIGTERM)
    assert after["Id"] == before["Id"] and after["Config"] == before["Config"]


def answers(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/v2/") as response:
            return int(response.status) == 200
    except OSError:
        return False


VERIFIED = """
listens() { until true < /dev/tcp/127.0.0.1/2222; do sleep 0.1; done; } 2> /dev/null
umask 077
mkdir ~/.ssh && cd ~/.ssh
ssh-keygen -q -t ecdsa -N '' -f id_rsa && cp id_rsa.pub authorized_keys
ssh-keygen -q -t ecdsa -N '' -f /tmp/other
icom-sshd & listens; ssh job-worker-0.job.default.svc id -u; kill $!; wait
sed 's,-h "$keys/id_rsa",-h /tmp/other,' /opt/icom/bin/icom-sshd > /tmp/stranger
bash /tmp/stranger & listens; ssh job-worker-0.job.default.svc id -u; kill $!; wait
rm id_rsa; icom-sshd
"""


def test_ssh_to_a_worker_verifies_that_it_is_one_of_the_job(containers: Store) -> None:
    name = "--add-host=job-worker-0.job.default.svc:127.0.0.1"
    said = containers.run("podman", "run", "--rm", "--network=none", name, IMAGE, "bash", "-c", VERIFIED, fails=True)
    assert said.stdout.splitlines() == ["1000"], said
    assert "Host key verification failed" in said.stderr
    assert said.returncode == 1 and "icom-sshd: cannot read /home/icom/.ssh/id_rsa" in said.stderr


def test_mpijob_over_sshd_as_user_1000(
    icom: Callable[..., Result], containers: Store, hosts_possible: None, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    os.chown(volume, 1000, 1000)
    words = ["--kind", "mpijob", "--image", IMAGE, "--pvc", "claim", "--nodes", "2", "--dry_run", "--"]
    said = icom("launch", "kubernetes", *words, *training_options({"output_dir": "/data/out"}))
    assert said.code == 0, said.err
    objects = list(yaml.safe_load_all(said.out))
    for replica in objects[-1]["spec"]["mpiReplicaSpecs"].values():  # all pods share this machine's cores
        replica["template"]["spec"]["containers"][0]["env"].append({"name": "OMP_NUM_THREADS", "value": "1"})
    with cluster(3) as hosts, closing(Nodes(containers, hosts, tmp_path, {"claim": volume})) as nodes:
        launcher = run_mpijob(nodes, objects)
        wait_until(lambda: launcher.code is not None)
        log = "\n".join(pod.log for pod in nodes.pods)
        assert launcher.code == 0, log
        assert "(1 x 2 processes" in launcher.log and "Accepted publickey for icom" in log
        assert {pod.run("id", "-u").strip() for pod in nodes.pods[:-1]} == {"1000"}
    alone = icom("train", *training_options({"output_dir": tmp_path / "alone", "train_batch_size": 2}))
    assert alone.code == 0
    runs = (volume / "out", tmp_path / "alone")
    inside, outside = (load_file(folder / "learned_embeds.safetensors")["<concept>"] for folder in runs)
    torch.testing.assert_close(inside, outside, rtol=1e-4, atol=1e-6)
