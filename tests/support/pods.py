"""A small stand-in for Kubernetes: runs the pods of our manifests by `podman play kube`, one on each host.

What the kubelet and the controllers do for a pod is done here as their documentation says (kubernetes.io, and the
operators' sources), and no more than icom relies on:

- Job controller, "Indexed" completion mode (kubernetes.io/docs/concepts/workloads/controllers/job): the index is in
  the annotation batch.kubernetes.io/job-completion-index, in JOB_COMPLETION_INDEX and, as JOB-INDEX, in the hostname.
  With the pod's subdomain and a headless Service of that name it is a name, JOB-INDEX.SERVICE. A pod that failed is
  made anew as podFailurePolicy's rules say, first match first; backoffLimitPerIndex ends that. (The real one waits
  10 s, 20 s, … before.)
- MPI operator v2 (kubeflow/mpi-operator, pkg/controller/mpi_job_controller.go): one ECDSA key pair for each job,
  mounted at sshAuthMountPath as id_rsa, id_rsa.pub and authorized_keys; the hosts file /etc/mpi/hostfile of lines
  JOB-worker-N.JOB.NAMESPACE.svc:SLOTS; I_MPI_HYDRA_HOST_FILE and I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS for the
  launcher, which comes when the workers are ready. (Here no launcher is made anew.)
- kubelet: values of Secrets, claims and ConfigMaps as folders, emptyDir as one that all may write to, pods' names in
  DNS (here in /etc/hosts), the pod's security context for its containers.
"""

from __future__ import annotations

import copy
import itertools
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.support.containers import Store
from tests.support.hosts import Host

Object = dict[str, Any]
NAMESPACE = "default"
POLL_SECONDS = 0.2
_NUMBERS = itertools.count()
"""Of pods, for their names."""
INDEX = "batch.kubernetes.io/job-completion-index"


@dataclass
class Pod:
    """One pod that was started.

    Attributes:
        name: its name.
        container: podman's name of its one container.
        store: where it is.
        refused: why the container could not be started; empty where it was.
    """

    name: str
    container: str
    store: Store
    refused: str = ""
    _end: subprocess.Popen[str] | None = None
    """Waits for its end. To ask podman again and again would take a core."""
    _code: int | None = None

    def wait_for_end(self) -> None:
        """Have its end waited for."""
        words = self.store.command("podman", "wait", self.container)
        pipe = subprocess.PIPE
        self._end = subprocess.Popen(words, env=self.store.env, stdout=pipe, stderr=pipe, text=True)

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs. containerd's is 128 for a program that is not there (StartError)."""
        if self.refused:
            return 128
        if self._end and self._end.poll() is not None:
            said, complaint = self._end.communicate()
            assert self._end.returncode == 0, complaint
            self._end, self._code = None, int(said)
        return self._code

    @property
    def log(self) -> str:
        """What it wrote, output and errors."""
        if self.refused:
            return self.refused
        done = self.store.run("podman", "logs", self.container, fails=True)
        return done.stdout + done.stderr

    def signal(self, name: str) -> None:
        """Send a signal to the container's first process."""
        self.store.run("podman", "kill", f"--signal={name}", self.container)

    def run(self, *words: str) -> str:
        """Run a command in it."""
        return self.store.run("podman", "exec", self.container, *words).stdout

    def remove(self, seconds: int = 0) -> None:
        """SIGTERM, and SIGKILL after so many seconds."""
        self.store.run("podman", "pod", "rm", "--force", f"--time={seconds}", self.name)
        if self._end:
            self._end.communicate()  # that it is gone, or its code
            self._end = None


@dataclass
class Nodes:
    """Hosts as Kubernetes' nodes.

    Attributes:
        store: where images and containers are.
        hosts: one for each pod.
        folder: for files that are mounted.
        claims: name of a claim -> folder of its volume.
        pods: all that were started, in order.
    """

    store: Store
    hosts: Sequence[Host]
    folder: Path
    claims: dict[str, Path]
    pods: list[Pod] = field(default_factory=list)

    def start(self, template: Object, name: str, hostname: str, host: Host, known: Sequence[Object], names: str) -> Pod:
        """Start a pod from its template.

        Args:
            template: of a Job or replica.
            name: of the pod.
            hostname: the pod's.
            host: the node.
            known: all objects of the run, for the Secrets and ConfigMaps among them.
            names: content of its /etc/hosts.
        """
        folder = self.folder / name
        folder.mkdir()
        spec = copy.deepcopy(template["spec"])
        (container,) = spec["containers"]
        container.pop("ports", None)  # for people to read; podman would forward them
        pod = Pod(name, f"{name}-{container['name']}", self.store)
        security = {n: spec["securityContext"][n] for n in ("runAsUser", "runAsGroup") if "securityContext" in spec}
        container["securityContext"] = security | container.get("securityContext", {})
        container["env"] = [_value(variable, known) for variable in container.get("env", [])]
        spec["volumes"] = [self._volume(volume, folder, known) for volume in spec.get("volumes", [])]
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        spec["volumes"].append({"name": "hosts", "hostPath": {"path": str(folder / "hosts"), "type": "File"}})
        container["volumeMounts"].append({"name": "hosts", "mountPath": "/etc/hosts", "readOnly": True})
        spec |= {"hostname": hostname}
        metadata = {**template["metadata"], "name": name}
        text = yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        play = ["podman", "play", "kube", "--network=host", "--log-driver=k8s-file", "-"]
        done = self.store.run(*play, on=host, text=text, fails=True)
        self.pods.append(pod)
        if done.returncode:
            assert "executable file" in done.stderr, done.stderr
            pod.refused = done.stderr
        else:
            pod.wait_for_end()
        return pod

    def _volume(self, volume: Object, folder: Path, known: Sequence[Object]) -> Object:
        name = volume["name"]
        if "hostPath" in volume:
            return volume
        if claim := volume.get("persistentVolumeClaim"):
            path = self.claims[claim["claimName"]]
        else:
            path = folder / name
            path.mkdir()
            path.chmod(0o777)
            if config := volume.get("configMap"):
                for file, content in _find("ConfigMap", config["name"], known)["data"].items():
                    (path / file).write_text(content)
        return {"name": name, "hostPath": {"path": str(path), "type": "Directory"}}

    def run_job(self, objects: Sequence[Object]) -> JobRun:
        """Start an Indexed Job's pods, one on each host."""
        job, service = objects[-1], _find("Service", objects[-1]["spec"]["template"]["spec"]["subdomain"], objects)
        labels = job["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items() and service["spec"]["clusterIP"] == "None"
        return JobRun(self, list(objects))

    def close(self) -> None:
        """End all pods at once."""
        for pod in self.pods:
            pod.remove()


class JobRun:
    """An Indexed Job that runs."""

    def __init__(self, nodes: Nodes, objects: list[Object]) -> None:
        """Start its pods."""
        self.nodes, self.objects, self.job = nodes, objects, objects[-1]
        self.name, self.spec = self.job["metadata"]["name"], self.job["spec"]
        assert (self.spec["completionMode"], self.spec["completions"]) == ("Indexed", len(nodes.hosts))
        assert self.spec["template"]["spec"]["restartPolicy"] == "Never"
        self.failures = dict.fromkeys(range(len(nodes.hosts)), 0)
        self.done: set[int] = set()
        self.pods = {index: self._start(index) for index in self.failures}

    def _start(self, index: int) -> Pod:
        subdomain = self.spec["template"]["spec"]["subdomain"]
        names = [f"{self.name}-{i}.{subdomain}" for i in self.failures]
        # Each pod's own name, and the Service's for all.
        known = "".join(
            f"{host.address} {name}.{NAMESPACE}.svc.cluster.local {name}{f' {self.name}-{i}' if i == index else ''}\n"
            for i, (host, name) in enumerate(zip(self.nodes.hosts, names, strict=True))
        )
        template = copy.deepcopy(self.spec["template"])
        template["metadata"].setdefault("annotations", {})[INDEX] = str(index)
        (container,) = template["spec"]["containers"]
        container["env"] = [*container.get("env", []), {"name": "JOB_COMPLETION_INDEX", "value": str(index)}]
        name = f"{self.name}-{index}-{next(_NUMBERS)}"
        return self.nodes.start(template, name, f"{self.name}-{index}", self.nodes.hosts[index], self.objects, known)

    def look(self) -> str | None:
        """What the controller does when pods have ended.

        Returns:
            "Complete", "Failed", or None while it goes on.
        """
        for index, pod in list(self.pods.items()):
            if index in self.done or (code := pod.code) is None:
                continue
            if code == 0:
                self.done.add(index)
                continue
            action = self._action(code, pod)
            self.failures[index] += action != "Ignore"
            if action == "FailJob" or self.failures[index] > self.spec["backoffLimitPerIndex"]:
                for other in self.pods.values():
                    if other.code is None:
                        other.remove(self.spec["template"]["spec"]["terminationGracePeriodSeconds"])
                return "Failed"
            self.pods[index] = self._start(index)
        return "Complete" if len(self.done) == len(self.pods) else None

    def _action(self, code: int, pod: Pod) -> str:
        for rule in self.spec["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            if codes and codes["operator"] == "In" and code in codes["values"]:
                assert pod.container.endswith(f"-{codes['containerName']}")
                return str(rule["action"])
        return "Count"

    def wait(self) -> str:
        """Until it has ended: Complete or Failed."""
        while not (end := self.look()):
            time.sleep(POLL_SECONDS)
        return end

    @property
    def logs(self) -> str:
        """Of all its pods, earlier ones too."""
        return "\n".join(f"--- {pod.name}: {pod.code}\n{pod.log}" for pod in self.nodes.pods)


def run_mpijob(nodes: Nodes, objects: Sequence[Object]) -> Pod:
    """Start an MPIJob's workers, and its launcher when they are ready; gives the launcher.

    The launcher is on a host of its own, the last one.
    """
    job = objects[-1]
    name, spec = job["metadata"]["name"], job["spec"]
    assert spec["mpiImplementation"] == "Intel" and spec["launcherCreationPolicy"] == "WaitForWorkersReady"
    *workers, last = nodes.hosts
    assert spec["mpiReplicaSpecs"]["Worker"]["replicas"] == len(workers)
    hostnames = [f"{name}-worker-{i}" for i in range(len(workers))]
    known = "".join(
        f"{host.address} {hostname}.{name}.{NAMESPACE}.svc {hostname}\n"
        for host, hostname in zip(workers, hostnames, strict=True)
    )
    known += f"{last.address} {name}-launcher\n"
    keys, hostfile = nodes.folder / "ssh", nodes.folder / "mpi"
    keys.mkdir()
    hostfile.mkdir()
    make = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", str(keys / "id_rsa")]
    subprocess.run(make, check=True)
    (keys / "authorized_keys").write_bytes((keys / "id_rsa.pub").read_bytes())
    for file in keys.iterdir():
        file.chmod(0o644)  # a Secret's default, whoever reads it: they are root's
    keys.chmod(0o1777)
    lines = [f"{hostname}.{name}.{NAMESPACE}.svc:{spec['slotsPerWorker']}\n" for hostname in hostnames]
    (hostfile / "hostfile").write_text("".join(lines))
    mounts = {"ssh-auth": (keys, spec["sshAuthMountPath"]), "mpi-job-config": (hostfile, "/etc/mpi")}

    def template(role: str, mounted: Sequence[str], env: Sequence[tuple[str, str]]) -> Object:
        made: Object = copy.deepcopy(spec["mpiReplicaSpecs"][role]["template"])
        made["spec"]["restartPolicy"] = spec["mpiReplicaSpecs"][role]["restartPolicy"]
        (container,) = made["spec"]["containers"]
        container["env"] = [*container.get("env", []), *({"name": name, "value": value} for name, value in env)]
        for volume in mounted:
            path, place = mounts[volume]
            made["spec"].setdefault("volumes", []).append({"name": volume, "hostPath": {"path": str(path)}})
            container["volumeMounts"].append({"name": volume, "mountPath": place, "readOnly": True})
        return made

    role = template("Worker", ["ssh-auth"], [("K_MPI_JOB_ROLE", "worker")])
    started = [
        nodes.start(role, f"{hostname}-{next(_NUMBERS)}", hostname, host, objects, known)
        for hostname, host in zip(hostnames, workers, strict=True)
    ]
    port = spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["readinessProbe"]["tcpSocket"]["port"]
    for pod, host in zip(started, workers, strict=True):
        while not _listens(host, port):
            assert pod.code is None, pod.log
            time.sleep(POLL_SECONDS)
    variables = [
        ("K_MPI_JOB_ROLE", "launcher"),
        ("I_MPI_HYDRA_HOST_FILE", "/etc/mpi/hostfile"),
        ("I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS", "-o ConnectionAttempts=10"),
    ]
    role = template("Launcher", ["ssh-auth", "mpi-job-config"], variables)
    return nodes.start(role, f"{name}-launcher-{next(_NUMBERS)}", f"{name}-launcher", last, objects, known)


def _find(kind: str, name: str, objects: Sequence[Object]) -> Object:
    (found,) = [one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def _value(variable: Object, objects: Sequence[Object]) -> Object:
    """A container's variable, with the value of the Secret that it is from."""
    if "valueFrom" not in variable:
        return variable
    source = variable["valueFrom"]["secretKeyRef"]
    return {"name": variable["name"], "value": _find("Secret", source["name"], objects)["stringData"][source["key"]]}


def _listens(host: Host, port: int) -> bool:
    return host.run(["bash", "-c", f": < /dev/tcp/{host.address}/{port}"]).returncode == 0
