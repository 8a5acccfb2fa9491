"""`icom launch kubernetes`: prints the manifests, or gives them to kubectl."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from icom.config.launch import LaunchKubernetesConfig
from icom.config.trainings import TrainingConfig
from icom.errors import IcomError
from icom.launch.kubernetes.checks import check
from icom.launch.kubernetes.manifests import Object, files_pod, instance, manifests
from icom.launch.launch import count, training_config
from icom.names import plain
from icom.parallel.secret import new_secret

_WEBHOOK_SECONDS = 30
"""Trainer's check of a TrainJob does not know a runtime yet that was made just before."""


def launch_kubernetes(config: LaunchKubernetesConfig) -> None:
    """Check the options, ask the cluster, and start the pods there.

    Raises:
        UsageError: options or training options are wrong.
        IcomError: there is no kubectl, or the cluster refuses.
    """
    training = training_config(config.training_options, "icom launch kubernetes --image IMAGE --pvc CLAIM")
    check(config, training)
    objects = manifests(config, training, new_secret())
    if config.dry_run:
        print(to_yaml(objects), end="")
        print(
            f"icom: nothing was applied. The Secret {config.name} holds what the pods of this run know each other by: "
            "keep it out of repositories. To start: the same without --dry_run, or `| kubectl apply -f -`.",
            file=sys.stderr,
        )
        return
    kubectl = Kubectl(config)
    kubectl.check_claim()
    # Asked first for all that can be asked about, so that nothing half is left where it refuses.
    kubectl.apply(objects[:-1] if config.kind == "trainjob" else objects, "--dry-run=server")
    kubectl.apply(objects)
    print(_told(config, training))


def to_yaml(objects: Sequence[Object]) -> str:
    """As kubectl reads them."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return str(yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=120))


class Kubectl:
    """kubectl for one run: its namespace, and errors that say what to do."""

    def __init__(self, config: LaunchKubernetesConfig) -> None:
        """Find it.

        Raises:
            IcomError: there is none.
        """
        self._config = config
        self._command = _kubectl(config)
        if not shutil.which("kubectl"):
            raise IcomError(
                "There is no kubectl here. Install it (https://kubernetes.io/docs/tasks/tools) and lead it to the "
                "cluster (EKS: aws eks update-kubeconfig --name CLUSTER); or print the manifests with --dry_run, and "
                "apply them where there is one."
            )

    def check_claim(self) -> None:
        """The claim is there, and as many nodes can mount it. Who may not look at claims goes on without.

        Raises:
            IcomError: it is not, or no answer came.
        """
        name = self._config.pvc
        done = self._run("get", "persistentvolumeclaim", name, "--output=json")
        if done.returncode:
            if "(Forbidden)" in done.stderr:
                return
            if "(NotFound)" in done.stderr:
                raise IcomError(
                    f"There is no PersistentVolumeClaim {name} here: the pods would wait for it for ever. Nothing was "
                    f"started. {shlex.join([*self._command, 'get', 'persistentvolumeclaims'])} lists those that there "
                    "are; docs/kubernetes.md#storage makes one."
                )
            raise IcomError(f"kubectl: {_said(done)}")
        modes = json.loads(done.stdout)["spec"]["accessModes"]
        if self._config.nodes > 1 and "ReadWriteMany" not in modes:
            raise IcomError(
                f"The PersistentVolumeClaim {name} can be mounted by one node alone ({', '.join(modes)}), and there "
                f"are to be {self._config.nodes}. Take one with ReadWriteMany (EFS, FSx for Lustre, NFS; "
                "docs/kubernetes.md#storage), or --nodes 1."
            )

    def apply(self, objects: Sequence[Object], *options: str) -> None:
        """Hand objects to the cluster.

        Raises:
            IcomError: it refuses; with what it said.
        """
        deadline = time.monotonic() + _WEBHOOK_SECONDS
        while True:
            done = self._run("apply", *options, "--filename=-", text=to_yaml(objects))
            if not done.returncode:
                return
            if "must be created before the TrainJob" not in done.stderr or time.monotonic() > deadline:
                break
            time.sleep(1)
        advice = ""
        if "is immutable" in done.stderr:
            advice = (
                f"\nA run called {self._config.name} is there already: choose another --name, or remove it:\n  "
                + _removal(self._config)
            )
        elif "no matches for kind" in done.stderr:
            advice = f"\nThe operator of --kind {self._config.kind} is not installed here; --kind job needs none."
        raise IcomError(f"The cluster refuses:\n{_said(done)}{advice}")

    def _run(self, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._command, *arguments], input=text, capture_output=True, check=False, text=True, errors="replace"
        )


def _said(done: subprocess.CompletedProcess[str]) -> str:
    """Its message without the log lines of its libraries (E1122 16:33:36.445789 …), unless there is nothing else."""
    lines = done.stderr.strip().splitlines()
    return plain("\n".join([line for line in lines if not re.match(r"[EWI]\d{4} ", line)] or lines))


def _kubectl(config: LaunchKubernetesConfig) -> list[str]:
    return ["kubectl", *([f"--namespace={config.namespace}"] if config.namespace else [])]


def _removal(config: LaunchKubernetesConfig) -> str:
    main = {"trainjob": "trainjob,trainingruntime", "job": "job,service"}.get(config.kind, config.kind)
    return shlex.join([*_kubectl(config), "delete", f"{main},secret,configmap", f"--selector={instance(config)}"])


def _told(config: LaunchKubernetesConfig, training: TrainingConfig) -> str:
    """What was started, and the commands for it."""
    own = shlex.join(_kubectl(config))
    files = f"{config.name}-files"
    overrides = json.dumps({"apiVersion": "v1", "spec": files_pod(config)})
    folder = training.output_dir
    return "\n".join(
        [
            f"icom: {config.kind} {config.name}: {count(config.nodes, 'pod')} with {config.image}.",
            "State (Pending: `describe` says what is missing; ImagePullBackOff: the cluster cannot get the image):",
            f"  {own} get pods --selector={instance(config)}",
            f"  {own} describe pods --selector={instance(config)}",
            "Log:",
            f"  {own} logs --follow --prefix --tail=-1 --max-log-requests={config.nodes + 1} "
            f"--selector={instance(config)}",
            "Result, by a pod that mounts the volume:",
            f"  {own} run {files} --image={config.image} --restart=Never --overrides={shlex.quote(overrides)}",
            f"  {own} wait --for=condition=Ready pod/{files}",
            f"  {own} cp {shlex.quote(f'{files}:{folder}')} {shlex.quote(PurePosixPath(folder).name)}",
            f"  {own} delete pod {files}",
            "Stop and remove (the volume stays; the same command again goes on from the last checkpoint):",
            f"  {_removal(config)}",
        ]
    )
