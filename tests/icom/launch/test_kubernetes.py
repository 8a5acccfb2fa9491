"""`icom launch kubernetes`: manifests by Kubernetes' and the operators' schemas, what pods run, what is refused.

Real pods are in tests/icom/launch/test_pods.py. Guards icom.launch.kubernetes and provisioning/eksctl.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from icom.cli import parse
from icom.config.finetune import FinetuneConfig
from icom.config.launch import KubernetesKind, LaunchKubernetesConfig
from icom.launch.kubernetes.manifests import GRACE_SECONDS, Object, files_pod, manifests
from icom.launch.launch import training_config
from icom.parallel.place import find_place
from tests.support.command import ROOT, Run, assert_refused, train_arguments
from tests.support.ranks import SWITCHES
from tests.support.schemas import errors, pod_templates

KINDS: tuple[KubernetesKind, ...] = ("job", "mpijob", "trainjob", "pytorchjob")
TRAINING = ["--train_data_dir=/data/photos", "--placeholder_token=<x>", "--initializer_token=toy"]
TRAINING += ["--output_dir=/data/out"]
SECRET = "0123456789abcdef" * 4
LAUNCH = ("launch", "kubernetes", "--image", "registry/icom:1", "--pvc", "icom")
EKSCTL = sorted((ROOT / "provisioning" / "eksctl").glob("*.yaml"))


def made(kind: KubernetesKind = "job", *options: str, training: list[str] | None = None, **more: Any) -> list[Object]:
    """What is made of options."""
    words = tuple(training or TRAINING) + options
    values: dict[str, Any] = {"image": "registry/icom:1", "pvc": "icom", "nodes": 3} | more
    config = LaunchKubernetesConfig(training_options=words, kind=kind, **values)
    return manifests(config, training_config(words, "icom"), SECRET)


def the(objects: list[Object], kind: str) -> Object:
    (found,) = (item for item in objects if item["kind"] == kind)
    return found


def templates(objects: list[Object]) -> list[Object]:
    return [template for item in objects for _, template in pod_templates(item)]


def everything(tmp_path: Path) -> dict[str, Any]:
    """All options that add something to the manifests."""
    file = tmp_path / "run.yaml"
    file.write_text("train_data_dir: /data/photos\nplaceholder_token: <x>\ninitializer_token: toy\n")
    return {
        "training": [f"--config={file}", "--output_dir=/data/out"],
        "namespace": "team",
        "service_account": "trainer",
        "node_selector": "icom=cpu,node.kubernetes.io/instance-type=m7i.8xlarge",
        "env_secret": "hub",
        "cpu": "7500m",
        "memory": "32Gi",
    }


# The schemas.


@pytest.mark.parametrize("gpus", [0, 1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_what_its_schema_says(kind: KubernetesKind, gpus: int, tmp_path: Path) -> None:
    for options in ({}, {"nodes": 1}, everything(tmp_path)):
        for item in made(kind, gpus=gpus, **options):
            assert errors(item) == [], item


def test_the_other_files_are_what_their_schemas_say() -> None:
    config = LaunchKubernetesConfig(image="registry/icom:1", pvc="icom")
    assert errors({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": files_pod(config)}) == []
    assert [path.name for path in EKSCTL] == ["cpu.yaml", "files.yaml", "gpu.yaml", "storage.yaml"]
    for path in EKSCTL:
        for item in yaml.safe_load_all(path.read_text()):
            assert errors(item) == [], path


def breaks(item: Object) -> Iterator[tuple[str, Object]]:
    """The object with one thing wrong: a field that there is not, in each place; and fields of another type."""

    def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
        if isinstance(value, dict):
            yield path
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(inner, dict | list):
                yield from places(inner, (*path, key))

    def at(root: Any, path: tuple[str | int, ...]) -> Any:
        for key in path:
            root = root[key]
        return root

    for path in places(item):
        if path and path[-1] not in FREE and "metadata" not in path:
            broken = copy.deepcopy(item)
            at(broken, path)["imagePullpolicy"] = "Always"
            yield f"{path}: a field that there is not", broken
        for key, value in at(item, path).items():
            if isinstance(value, int | bool | list) and "metadata" not in path:
                broken = copy.deepcopy(item)
                at(broken, path)[key] = "three"
                yield f"{(*path, key)}: text", broken


FREE = {"stringData", "data", "labels", "matchLabels", "selector", "requests", "limits", "nodeSelector", "parameters"}
"""Objects whose keys are anybody's."""
OF_PODS = ("containers", "volumes", "securityContext", "topologySpreadConstraints", "tolerations")
"""The same for all kinds: broken for one."""
TEXT_TOO = "port"
"""A port may be a name."""


@pytest.mark.parametrize("kind", KINDS)
def test_broken_on_purpose_fails(kind: KubernetesKind, tmp_path: Path) -> None:
    found = 0
    for item in made(kind, gpus=8, **everything(tmp_path)):
        for what, broken in breaks(item):
            in_pods = kind != "job" and any(f"'{place}'" in what for place in OF_PODS)
            if not in_pods and f"'{TEXT_TOO}')" not in what:
                assert errors(broken), f"{item['kind']}{what}"
                found += 1
    assert found > 10


@pytest.mark.parametrize("path", EKSCTL, ids=lambda path: path.stem)
def test_broken_files_fail(path: Path) -> None:
    for item in yaml.safe_load_all(path.read_text()):
        for what, broken in breaks(item):
            assert errors(broken), what


# What the pods are.


@pytest.mark.parametrize("kind", KINDS)
def test_pods_may_do_nothing_but_train(kind: KubernetesKind) -> None:
    """Pod Security Standard `restricted` (kubernetes.io/docs/concepts/security/pod-security-standards), and more."""
    for template in templates(made(kind, gpus=1)):
        spec = template["spec"]
        assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(spec)
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 1000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert {key for volume in spec["volumes"] for key in volume} == {"name", "emptyDir", "persistentVolumeClaim"}
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            writable = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert writable == {"/data", "/tmp", "/dev/shm"}
            environment = {variable["name"]: variable.get("value", "") for variable in container["env"]}
            for name in ("HOME", "HF_HOME", "ICOM_CACHE_DIR"):
                assert environment[name].startswith(("/tmp", "/data/"))


@pytest.mark.parametrize("kind", KINDS)
def test_secret_stands_in_the_secret_alone(kind: KubernetesKind) -> None:
    secret, *others = made(kind)
    assert secret["stringData"] == {"ICOM_SECRET": SECRET} and secret["immutable"]
    assert SECRET not in json.dumps(others)
    reference = {"secretKeyRef": {"name": secret["metadata"]["name"], "key": "ICOM_SECRET"}}
    for template in templates(others):
        (container,) = template["spec"]["containers"]
        assert {"name": "ICOM_SECRET", "valueFrom": reference} in container["env"]


@pytest.mark.parametrize("kind", KINDS)
def test_gpu_lines_only_with_gpus(kind: KubernetesKind) -> None:
    assert "nvidia" not in json.dumps(made(kind, cpu="4"))
    with_gpus = made(kind, gpus=2)
    computing = [
        template for template in templates(with_gpus) if template["spec"]["containers"][0]["name"] != "launcher"
    ]
    for template in computing:
        (container,) = template["spec"]["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"] == {"nvidia.com/gpu": "2"}
        assert template["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert len(computing) == {"pytorchjob": 2}.get(kind, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_restarts_go_on(kind: KubernetesKind) -> None:
    """Each start takes the last checkpoint, and a pod that has to go has time to save."""
    objects = made(kind, max_restarts=7)
    text = json.dumps(objects)
    assert re.search(r'"--resume_from_checkpoint", "latest"\]', text)
    assert '": 7' in text
    given = made(kind, "--resume_from_checkpoint=latest")
    assert json.dumps(given).count("resume_from_checkpoint") == text.count("resume_from_checkpoint")
    for template in templates(objects):
        assert template["spec"]["terminationGracePeriodSeconds"] == GRACE_SECONDS >= 60
        assert template["spec"]["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_which_ends_of_a_pod_end_the_job(kind: KubernetesKind) -> None:
    objects = made(kind)
    if kind == "job":
        job = the(objects, "Job")["spec"]
    else:
        (part,) = the(objects, "TrainingRuntime")["spec"]["template"]["spec"]["replicatedJobs"]
        job = part["template"]["spec"]
    assert job["maxFailedIndexes"] == 0 and job["podReplacementPolicy"] == "Failed"
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # else Kubernetes takes no podFailurePolicy
    fails, ignored = job["podFailurePolicy"]["rules"]
    (container,) = job["template"]["spec"]["containers"]
    assert fails["action"] == "FailJob" and fails["onExitCodes"]["containerName"] == container["name"]
    # A usage error, and what containerd says of an image without icom; not: 1, a lost peer, SIGTERM, memory.
    assert {2, 127, 128} <= set(fails["onExitCodes"]["values"]) and {1, 75, 137, 143}.isdisjoint(
        fails["onExitCodes"]["values"]
    )
    assert ignored == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def variables(container: Object, controller: dict[str, str]) -> dict[str, str]:
    return {variable["name"]: variable.get("value", SECRET) for variable in container.get("env", [])} | controller


def of_controllers(kind: KubernetesKind, pod: int, nodes: int) -> dict[str, str]:
    """What the controller of a kind sets in a pod.

    Job: kubernetes/pkg/controller/job/indexed_job_utils.go. PyTorchJob: training-operator,
    pkg/controller.v1/pytorch/envvar.go. TrainJob: trainer, pkg/runtime/framework/plugins/torch/torch.go.
    """
    indexed = {"JOB_COMPLETION_INDEX": str(pod)}
    if kind == "job":
        return indexed
    if kind == "trainjob":
        pet = {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(pod)}
        return indexed | pet | {"PET_MASTER_ADDR": "icom-node-0-0.icom", "PET_MASTER_PORT": "29400"}
    master = {"MASTER_ADDR": "icom-master-0", "MASTER_PORT": "23456"}
    pet = {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(pod)}
    return master | pet | {"RANK": str(pod), "WORLD_SIZE": str(nodes)}


@pytest.mark.parametrize("kind", ["job", "trainjob", "pytorchjob"])
def test_pods_find_their_places(kind: KubernetesKind) -> None:
    objects = made(kind)
    if kind == "trainjob":
        container = the(objects, "TrainJob")["spec"]["trainer"] | {
            "env": templates(objects)[0]["spec"]["containers"][0]["env"]
        }
    else:
        (container,) = templates(objects)[-1]["spec"]["containers"]
    places = [find_place(variables(container, of_controllers(kind, pod, 3))) for pod in range(3)]
    assert [(place.rank, place.world_size, place.local_rank, place.local_size) for place in places] == [
        (0, 3, 0, 1),
        (1, 3, 0, 1),
        (2, 3, 0, 1),
    ]
    assert len({(place.master_address, place.master_port) for place in places}) == 1
    if kind == "job":
        template = templates(objects)[0]
        service = the(objects, "Service")
        assert places[0].master_address == f"icom-0.{service['metadata']['name']}"
        assert template["spec"]["subdomain"] == service["metadata"]["name"]
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        assert service["spec"]["publishNotReadyAddresses"] and service["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize("kind", KINDS)
def test_pods_finetune(kind: KubernetesKind, tmp_path: Path, icom: Run) -> None:
    """Each kind starts `icom finetune` with its options, which it takes; nothing else changes."""
    options = ["--train_data_dir=s3://bucket/{0..9}.tar", "--output_dir=/data/out", "--use_ema", "--from_scratch=model"]
    (tmp_path / "run.yaml").write_text("train_data_dir: /data/shards\nfilters: {width: '>=512'}\n")
    from_file = [f"--config={tmp_path / 'run.yaml'}", "--output_dir=/data/out"]
    for training in (options, from_file):
        objects = made(kind, gpus=2, training=["finetune", *training])
        assert all(errors(item) == [] for item in objects)
        described = objects if kind != "trainjob" else [the(objects, "TrainJob")["spec"]["trainer"]]
        containers = [c for template in templates(objects) for c in template["spec"]["containers"]]
        container = next(c for c in [*described, *containers] if "finetune" in c.get("command", []) + c.get("args", []))
        words = [*container["command"], *container["args"]]
        if kind == "mpijob":
            assert words[:3] == ["icom", "launch", "mpirun"]
            words = words[words.index("--") + 1 :]
        else:
            assert words[:5] == ["python", "-m", "icom.launch.processes", "2", "icom"]
            words = words[5:]
        if training is from_file:
            file = tmp_path / "config.yaml"
            file.write_text(the(objects, "ConfigMap")["data"]["config.yaml"])
            words = [word.replace("/etc/icom/config.yaml", str(file)) for word in words]
        config = parse(words)
        assert isinstance(config, FinetuneConfig)
        assert (config.output_dir, config.resume_from_checkpoint) == ("/data/out", "latest")
        assert config.filters == ({"width": ">=512"} if training is from_file else {})


def test_mpijob_is_a_launch_by_mpirun(icom: Run, tmp_path: Path) -> None:
    """What the launcher runs is a command of icom's own, with the hosts file as the operator writes it."""
    spec = the(made("mpijob", gpus=2), "MPIJob")["spec"]
    assert (spec["mpiImplementation"], spec["slotsPerWorker"], spec["sshAuthMountPath"]) == (
        *("Intel", 2),
        "/home/icom/.ssh",
    )
    launcher, worker = (spec["mpiReplicaSpecs"][role]["template"]["spec"] for role in ("Launcher", "Worker"))
    assert spec["mpiReplicaSpecs"]["Worker"]["replicas"] == 3
    (container,) = launcher["containers"]
    assert "resources" not in container
    (sshd,) = worker["containers"]
    assert sshd["readinessProbe"]["tcpSocket"]["port"] == sshd["ports"][0]["containerPort"] == 2222
    hosts = tmp_path / "hostfile"
    hosts.write_text("localhost:2\n")  # the operator's have NAME-worker-0.NAME.NAMESPACE.svc:SLOTS
    words = [*container["command"], *container["args"]]
    assert words[0] == "icom"
    words = [word.replace("/etc/mpi/hostfile", str(hosts)).replace("/opt/icom/src", str(ROOT)) for word in words]
    words.remove("--mpi"), words.remove("intel")
    done = icom(*words[1:3], "--dry_run", *words[3:])
    assert done.code == 0 and "-n 2" in done.out and "mpirun_gpu.yaml" in done.out, done


def test_what_a_pod_runs_learns_and_goes_on(tmp_path: Path, icom: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container's command with its environment and its volume, here; with the file of --config, and a $ in it."""
    for name in SWITCHES:  # training sets them, and they are no other test's
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    folder = tmp_path / "cost $5 $(HOME)"
    (tmp_path / "run.yaml").write_text(f"output_dir: {folder}\nseed: 7\n")
    options = train_arguments(seed=None, output_dir=None, config=tmp_path / "run.yaml")[1:]
    for training in (options, [*train_arguments(output_dir=folder)[1:], "--max_train_steps=5"]):
        objects = made("job", training=training, nodes=1, mount_path=str(tmp_path))
        (container,) = templates(objects)[0]["spec"]["containers"]
        for variable in container["env"]:
            if variable["name"] not in ("HOME", "ICOM_CACHE_DIR", "HF_HOME"):
                monkeypatch.setenv(variable["name"], variable.get("value", SECRET))
        monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
        words = [expanded(word) for word in [*container["command"], *container["args"]]]
        if training is options:
            file = tmp_path / "config.yaml"
            file.write_text(the(objects, "ConfigMap")["data"]["config.yaml"])
            words = [word.replace("/etc/icom/config.yaml", str(file)) for word in words]
        assert words[:2] == ["icom", "train"]
        done = icom(*words[1:])
        assert done.code == 0, done
    assert "<robot>" in load_file(folder / "learned_embeds.safetensors")
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5]


def expanded(word: str) -> str:
    """As Kubernetes does (third_party/forked/golang/expansion/expand.go), without any variable to put in."""
    return re.sub(r"\$(\$|\([^)]*\))", lambda match: "$" if match[1] == "$" else "EXPANDED", word)


# What is refused.


@pytest.mark.parametrize(
    ("options", "training", "words"),
    [
        (["--name", "My_Run"], [], ["--name 'My_Run'", "small letters"]),
        (["--name", "x" * 46], [], ["at most 45"]),
        (["--name", "1st"], [], ["letter first"]),
        (["--namespace", "a.b"], [], ["--namespace 'a.b'"]),
        (["--pvc", "my_claim"], [], ["--pvc 'my_claim'"]),
        (["--service_account", "A"], [], ["--service_account 'A'"]),
        (["--image", "my image"], [], ["--image 'my image'"]),
        (["--node_selector", "m7i.8xlarge"], [], ["'m7i.8xlarge' is no label"]),
        (["--nodes", "0"], [], ["--nodes 0: at least 1"]),
        (["--gpus", "-1"], [], ["--gpus -1"]),
        (["--cpu", "16 cores"], [], ["--cpu '16 cores'", "7500m"]),
        (["--memory", "32GB"], [], ["--memory '32GB'", "32Gi"]),
        (["--mount_path", "data"], [], ["--mount_path 'data'"]),
        (["--kind", "deployment"], [], ["--kind", "trainjob"]),
        ([], ["--output_dir=out"], ["--output_dir out does not lie on the volume", "/data/out"]),
        ([], ["--output_dir=/data/../out"], ["--output_dir /data/../out"]),
        ([], ["--caption_templates=t.txt"], ["--caption_templates t.txt does not lie on the volume"]),
        ([], ["--sample_prompts=p.txt"], ["--sample_prompts p.txt does not lie on the volume"]),
        (
            [],
            ["--caption_templates=builtin", "--with_prior_preservation", "--class_data_dir=c", "--class_prompt=<x>"],
            ["--class_data_dir c does not lie on the volume"],
        ),
        ([], ["--train_data_dir=photos"], ["--train_data_dir photos", "docs/kubernetes.md#pictures"]),
        ([], ["--pretrained_model_name_or_path=/models/sd"], ["--pretrained_model_name_or_path /models/sd"]),
        ([], ["--tokenizer_name=~/clip"], ["--tokenizer_name ~/clip"]),
        ([], ["--resume_from_checkpoint=checkpoint-3"], ["each restart of a pod would go back to it"]),
        ([], ["--hub_token=hf_0"], ["--hub_token", "--env_secret"]),
        ([], ["--num_vectors=0"], ["--num_vectors"]),
    ],
)
def test_what_kubernetes_or_the_pods_would_refuse(
    options: list[str], training: list[str], words: list[str], icom: Run
) -> None:
    assert_refused(icom(*LAUNCH, "--dry_run", *options, "--", *TRAINING, *training), 2, *words)


@pytest.mark.parametrize(
    ("training", "words"),
    [
        (["--train_data_dir=shards/{0..9}.tar"], ["--train_data_dir shards/{0..9}.tar does not lie on the volume"]),
        (["--train_data_dir=bundled"], ["--train_data_dir bundled"]),
        (["--weights_from=checkpoint-3"], ["--weights_from checkpoint-3"]),
        (["--from_scratch=unet.yaml"], ["--from_scratch unet.yaml"]),
        (["--use_ema", "--ema_from=mean", "--index=i.parquet"], ["--ema_from mean", "--index i.parquet"]),
    ],
)
def test_what_pods_that_finetune_would_not_find(training: list[str], words: list[str], icom: Run) -> None:
    fine = ["finetune", "--train_data_dir=synthetic:64", "--output_dir=/data/out"]
    assert icom(*LAUNCH, "--dry_run", "--", *fine).code == 0
    assert_refused(icom(*LAUNCH, "--dry_run", "--", *fine, *training), 2, *words)


def test_all_that_is_wrong_is_told_at_once(icom: Run) -> None:
    told = icom(*LAUNCH, "--name", "A", "--memory", "1GB", "--dry_run", "--", *TRAINING, "--output_dir=out")
    assert_refused(told, 2, "--name", "--memory", "--output_dir")


def test_dry_run_is_what_kubectl_takes(icom: Run) -> None:
    done = icom(*LAUNCH, "--dry_run", "--", *TRAINING)
    assert done.code == 0
    objects = list(yaml.safe_load_all(done.out))
    assert [item["kind"] for item in objects] == ["Secret", "Service", "Job"]
    assert "nothing was applied" in done.err and "repositories" in done.err
    assert re.fullmatch(r"[0-9a-f]{64}", objects[0]["stringData"]["ICOM_SECRET"])
    assert objects[0]["stringData"]["ICOM_SECRET"] not in done.err
    again = list(yaml.safe_load_all(icom(*LAUNCH, "--dry_run", "--", *TRAINING).out))
    assert again[0] != objects[0] and again[1:] == objects[1:]


# kubectl. No cluster is to be had here: a program of that name answers with what kubectl 1.32 prints.


class Cluster:
    """The stand-in, and what it was asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        (folder / "asked").mkdir(parents=True)
        script = (
            "#!/bin/bash\n"
            f"cd {shlex.quote(str(folder))}; n=$(ls asked | wc -l); printf '%s\\n' \"$@\" >asked/$n\n"
            '[[ " $* " == *--filename=-* ]] && cat >stdin-$n\n'
            "for answer in answer-*; do\n"
            '  [[ -e $answer && " $* " == *" ${answer#answer-} "* ]] && source ./$answer\n'
            "done; exit 0\n"
        )
        (folder / "kubectl").write_text(script)
        (folder / "kubectl").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        self.answers("get", out=json.dumps({"spec": {"accessModes": ["ReadWriteMany"]}}))

    def answers(self, word: str, code: int = 0, out: str = "", err: str = "") -> None:
        """To a command line with that word."""
        lines = [f"echo {shlex.quote(out)}"] if out else []
        lines += [f"echo {shlex.quote(err)} >&2"] if err else []
        (self.folder / f"answer-{word}").write_text("\n".join([*lines, f"exit {code}\n"]))

    def asked(self) -> list[list[str]]:
        files = sorted((self.folder / "asked").iterdir(), key=lambda file: int(file.name))
        return [file.read_text().splitlines() for file in files]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path / "cluster", monkeypatch)


def test_cluster_is_asked_before_anything_is_made(cluster: Cluster, icom: Run) -> None:
    done = icom(*LAUNCH, "--nodes", "3", "--namespace", "team", "--", *TRAINING)
    assert done.code == 0, done
    claim, tried, applied = cluster.asked()
    assert claim == ["--namespace=team", "get", "persistentvolumeclaim", "icom", "--output=json"]
    assert tried == ["--namespace=team", "apply", "--dry-run=server", "--filename=-"]
    assert applied == ["--namespace=team", "apply", "--filename=-"]
    given = [list(yaml.safe_load_all((cluster.folder / f"stdin-{n}").read_text())) for n in (1, 2)]
    assert given[0] == given[1]
    assert [errors(item) for item in given[1]] == [[], [], []]
    assert given[1][0]["stringData"]["ICOM_SECRET"] not in done.out + done.err + json.dumps(cluster.asked())
    commands = [shlex.split(line) for line in done.out.splitlines() if line.startswith("  ")]
    assert [words[2] for words in commands] == ["get", "describe", "logs", "run", "wait", "cp", "delete", "delete"]
    assert all(words[:2] == ["kubectl", "--namespace=team"] for words in commands)
    (overrides,) = (word for word in commands[3] if word.startswith("--overrides="))
    pod = json.loads(overrides.removeprefix("--overrides=")) | {"kind": "Pod", "metadata": {"name": "x"}}
    assert errors(pod) == []
    assert commands[5][3:] == ["icom-files:/data/out", "out"]
    selector = commands[-1][-1].removeprefix("--selector=").split("=")
    for item in given[1]:
        assert item["metadata"]["labels"][selector[0]] == selector[1]
        assert item["kind"].lower() in commands[-1][3].split(",")


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_is_made_is_removed(kind: KubernetesKind, cluster: Cluster, icom: Run, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("seed: 7\n")
    done = icom(*LAUNCH, "--kind", kind, "--", *TRAINING, f"--config={tmp_path / 'run.yaml'}")
    assert done.code == 0, done
    removed = shlex.split(done.out.splitlines()[-1])[2].split(",")
    applied = list(yaml.safe_load_all((cluster.folder / "stdin-2").read_text()))
    assert {item["kind"].lower() for item in applied} == set(removed)
    # Trainer's check refuses a TrainJob whose runtime is not there, so that one cannot be tried before.
    tried = list(yaml.safe_load_all((cluster.folder / "stdin-1").read_text()))
    assert len(applied) - len(tried) == (kind == "trainjob")


def test_no_kubectl(icom: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_refused(icom(*LAUNCH, "--", *TRAINING), 1, "There is no kubectl here", "--dry_run")


MISSING = 'Error from server (NotFound): persistentvolumeclaims "icom" not found'
FORBIDDEN = (
    'Error from server (Forbidden): persistentvolumeclaims "icom" is forbidden: User "x" cannot get resource '
    '"persistentvolumeclaims" in API group "" in the namespace "default"'
)
AWAY = (
    'E1122 16:33:36.445789   12377 memcache.go:265] "Unhandled Error" err="couldn\'t get current server API group '
    'list"\nThe connection to the server localhost:8080 was refused - did you specify the right host or port?'
)
TAKEN = 'The Secret "icom" is invalid: data: Forbidden: field is immutable when `immutable` is set'
NO_OPERATOR = (
    'error: resource mapping not found for name: "icom" namespace: "" from "STDIN": no matches for kind "MPIJob" in '
    'version "kubeflow.org/v2beta1"\nensure CRDs are installed first'
)


@pytest.mark.parametrize(
    ("word", "said", "words"),
    [
        ("get", MISSING, ["no PersistentVolumeClaim icom here", "docs/kubernetes.md#storage"]),
        ("get", AWAY, ["icom: kubectl: The connection to the server localhost:8080 was refused"]),
        ("--dry-run=server", TAKEN, ["A run called icom is there already", "--name", "kubectl delete job,service"]),
        ("--dry-run=server", NO_OPERATOR, ["The operator of --kind job is not installed", "--kind job needs none"]),
        ("--dry-run=server", "Error: exceeded quota\x1b[2J", ["The cluster refuses: Error: exceeded quota"]),
    ],
)
def test_what_the_cluster_refuses(word: str, said: str, words: list[str], cluster: Cluster, icom: Run) -> None:
    cluster.answers(word, 1, err=said)
    told = icom(*LAUNCH, "--", *TRAINING)
    assert_refused(told, 1, *words)
    assert "\x1b" not in told.err and "memcache" not in told.err
    assert ["apply", "--filename=-"] not in cluster.asked()  # nothing was made


def test_claim_of_one_node_is_not_for_three(cluster: Cluster, icom: Run) -> None:
    cluster.answers("get", out=json.dumps({"spec": {"accessModes": ["ReadWriteOnce"]}}))
    assert_refused(icom(*LAUNCH, "--nodes", "3", "--", *TRAINING), 1, "mounted by one node alone", "ReadWriteMany")
    assert icom(*LAUNCH, "--nodes", "1", "--", *TRAINING).code == 0


def test_who_may_not_look_at_claims_goes_on(cluster: Cluster, icom: Run) -> None:
    cluster.answers("get", 1, err=FORBIDDEN)
    assert icom(*LAUNCH, "--", *TRAINING).code == 0
    assert cluster.asked()[-1] == ["apply", "--filename=-"]
