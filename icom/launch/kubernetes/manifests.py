"""The objects of a run on Kubernetes: a pod for each node, and what starts them, of four kinds.

- `job`: Kubernetes' own Indexed Job, and a headless Service by which pods have names. Rank: JOB_COMPLETION_INDEX.
- `trainjob`: Kubeflow's Trainer, which makes a JobSet of it, and so an Indexed Job. Rank: PET_NODE_RANK.
- `pytorchjob`: Kubeflow's training operator. Rank: RANK.
- `mpijob`: Kubeflow's MPI operator: workers with an sshd, and a launcher in which `icom launch mpirun` runs.

Field names and meanings: Kubernetes' API reference (batch/v1 and v1), the operators' custom resource definitions.
"""

from __future__ import annotations

from typing import Any

from icom.config.launch import LaunchKubernetesConfig
from icom.config.training import to_yaml
from icom.config.trainings import TrainingConfig, split_training
from icom.parallel.place import DEFAULT_PORT
from icom.parallel.secret import SECRET

Object = dict[str, Any]

USER = 1000
"""The image's user and group."""
SOURCE = "/opt/icom/src"
"""Where the image has icom's repository."""
SSH_FOLDER = "/home/icom/.ssh"
"""Where that user's ssh and sshd look for keys."""
SSH_PORT = 2222
CONFIG_FOLDER = "/etc/icom"
"""Where the pods see the file of --config."""
GRACE_SECONDS = 120
"""Between SIGTERM and SIGKILL: finishing a step and saving take seconds, a step with much accumulation a minute."""
NO_USE = (2, 126, 127, 128)
"""Exit codes after which starting again is no use: wrong options (icom); no such program in the image (shell,
containerd)."""

_POD_SECURITY: Object = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
_CONTAINER_SECURITY: Object = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""Together what Kubernetes' Pod Security Standard `restricted` wants, and a root that nothing is written to."""

INSTANCE = "app.kubernetes.io/instance"


def manifests(config: LaunchKubernetesConfig, training: TrainingConfig, secret: str) -> list[Object]:
    """All that is applied, in this order; the last object is what starts the pods. Pure: it looks at nothing but these.

    Args:
        config: checked by `checks.check`.
        training: the same options as config.training_options, read.
        secret: by which the processes know each other (icom/parallel/secret.py).
    """
    objects: list[Object] = [
        _object("v1", "Secret", config, type="Opaque", immutable=True, stringData={SECRET: secret}),
    ]
    if training.config:
        # The file is on this computer. What it says together with the flags is what the pods get.
        objects.append(_object("v1", "ConfigMap", config, data={"config.yaml": to_yaml(training)}))
    return objects + _KINDS[config.kind](config, training)


def training_arguments(config: LaunchKubernetesConfig, training: TrainingConfig) -> list[str]:
    """The training's options in the pods."""
    _, options = split_training(config.training_options)
    if training.config:
        options = ["--config", f"{CONFIG_FOLDER}/config.yaml"]
    if training.config or training.resume_from_checkpoint is None:
        options += ["--resume_from_checkpoint", "latest"]
    return options


def files_pod(config: LaunchKubernetesConfig) -> Object:
    """The spec of a pod that does nothing but have the volume mounted, for an hour; for `kubectl cp`."""
    container: Object = {
        "name": "files",
        "image": config.image,
        "command": ["sleep", "3600"],
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": [{"name": "data", "mountPath": config.mount_path}],
    }
    return {
        "automountServiceAccountToken": False,
        "securityContext": _POD_SECURITY,
        "containers": [container],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": config.pvc}}],
    }


def instance(config: LaunchKubernetesConfig) -> str:
    """The label by which all objects and pods of a run are found."""
    return f"{INSTANCE}={config.name}"


def _job(config: LaunchKubernetesConfig, training: TrainingConfig) -> list[Object]:
    # Pods find each other by it while they start, so before they are ready.
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(config)}
    env = [
        _variable("WORLD_SIZE", str(config.nodes)),
        _variable("MASTER_ADDR", f"{config.name}-0.{config.name}"),
        _variable("MASTER_PORT", str(DEFAULT_PORT)),
    ]
    container = _container(config, training, "icom") | _program(config, training)
    container["env"] = env + container["env"]
    template = _template(config, training, container, subdomain=config.name, restartPolicy="Never")
    size = {"completions": config.nodes, "parallelism": config.nodes}
    return [
        _object("v1", "Service", config, spec=service),
        _object("batch/v1", "Job", config, spec=size | _job_spec(config, "icom", template)),
    ]


def _trainjob(config: LaunchKubernetesConfig, training: TrainingConfig) -> list[Object]:
    # A runtime of its own: what a TrainJob may change in the cluster's torch-distributed is called otherwise in each
    # version of Trainer, and reaches neither restarts nor the containers' security.
    container = _container(config, training, "node")
    template = _template(config, training, container, restartPolicy="Never")
    job = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": _job_spec(config, "node", template),
        },
    }
    runtime = {
        "mlPolicy": {"numNodes": config.nodes, "torch": {}},
        "template": {"spec": {"replicatedJobs": [job]}},
    }
    trainer: Object = {
        "image": config.image,
        **_program(config, training),
        "numNodes": config.nodes,
        # One for Trainer: without it, Trainer would count CPUs. Those for the GPUs are started in the pod.
        "numProcPerNode": 1,
    }
    if resources := _resources(config):
        trainer["resourcesPerNode"] = resources
    api = "trainer.kubeflow.org/v1alpha1"
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": config.name}
    return [
        _object(api, "TrainingRuntime", config, spec=runtime),
        _object(api, "TrainJob", config, spec={"runtimeRef": reference, "trainer": trainer}),
    ]


def _pytorchjob(config: LaunchKubernetesConfig, training: TrainingConfig) -> list[Object]:
    container = _container(config, training, "pytorch") | _program(config, training)

    def replicas(count: int) -> Object:
        # Not ExitCode: that takes 75 for an error that stays.
        return {
            "replicas": count,
            "restartPolicy": "OnFailure",
            "template": _template(config, training, container),
        }

    specs = {"Master": replicas(1)} | ({"Worker": replicas(config.nodes - 1)} if config.nodes > 1 else {})
    spec = {
        "nprocPerNode": "1",
        "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": config.max_restarts},
        "pytorchReplicaSpecs": specs,
    }
    return [_object("kubeflow.org/v1", "PyTorchJob", config, spec=spec)]


def _mpijob(config: LaunchKubernetesConfig, training: TrainingConfig) -> list[Object]:
    accelerate = f"{SOURCE}/accelerate_configs/{'mpirun_gpu' if config.gpus else 'multi_cpu'}.yaml"
    launch = ["--hosts", "/etc/mpi/hostfile", "--mpi", "intel", "--accelerate_config", accelerate, "--"]
    words = split_training(config.training_options)[0].words
    launcher = _container(config, training, "launcher", computes=False) | {
        "command": ["icom", "launch", "mpirun"],
        "args": _literal([*launch, *words, *training_arguments(config, training)]),
    }
    worker = _container(config, training, "worker") | {
        "command": ["/opt/icom/bin/icom-sshd"],
        "ports": [{"containerPort": SSH_PORT}],
        "readinessProbe": {"tcpSocket": {"port": SSH_PORT}, "periodSeconds": 2},
    }
    spec = {
        "mpiImplementation": "Intel",
        "slotsPerWorker": config.gpus or 1,
        "sshAuthMountPath": SSH_FOLDER,
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": config.max_restarts},
        "mpiReplicaSpecs": {
            # A new pod for each start, so that the log of the last one stays.
            "Launcher": {
                "replicas": 1,
                "restartPolicy": "Never",
                "template": _template(config, training, launcher, computes=False),
            },
            "Worker": {
                "replicas": config.nodes,
                "restartPolicy": "OnFailure",
                "template": _template(config, training, worker),
            },
        },
    }
    return [_object("kubeflow.org/v2beta1", "MPIJob", config, spec=spec)]


_KINDS = {"job": _job, "mpijob": _mpijob, "trainjob": _trainjob, "pytorchjob": _pytorchjob}


def _job_spec(config: LaunchKubernetesConfig, container: str, template: Object) -> Object:
    """Of an Indexed Job: which pod's end means what."""
    return {
        "completionMode": "Indexed",
        "backoffLimitPerIndex": config.max_restarts,
        # The others cannot go on without the one that has used up its restarts.
        "maxFailedIndexes": 0,
        # Not before the old pod is gone: they would write to the same folder.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": container, "operator": "In", "values": list(NO_USE)},
                },
                # Drained, preempted, evicted: not the pod's fault, and not counted.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": template,
    }


def _program(config: LaunchKubernetesConfig, training: TrainingConfig) -> Object:
    """What a pod runs: one process, or one for each GPU."""
    several = ["python", "-m", "icom.launch.processes", str(config.gpus)] if config.gpus > 1 else []
    command = split_training(config.training_options)[0].command
    return {"command": [*several, "icom", command], "args": _literal(training_arguments(config, training))}


def _literal(words: list[str]) -> list[str]:
    """As the program shall see them: Kubernetes expands $(NAME), and $$ to $."""
    return [word.replace("$", "$$") for word in words]


def _container(config: LaunchKubernetesConfig, training: TrainingConfig, name: str, *, computes: bool = True) -> Object:
    """A container without its command; `computes`: whether it trains itself."""
    caches = f"{config.mount_path.rstrip('/')}/.cache"
    container: Object = {
        "name": name,
        "image": config.image,
        "env": [
            _variable("ICOM_RESTARTED_BY", "kubernetes"),
            {"name": SECRET, "valueFrom": {"secretKeyRef": {"name": config.name, "key": SECRET}}},
            # The image's own file system is read-only.
            _variable("HOME", "/tmp"),
            # On the volume, so that a model is loaded from the Hub once, and a picture encoded once.
            _variable("HF_HOME", f"{caches}/huggingface"),
            _variable("ICOM_CACHE_DIR", f"{caches}/icom"),
        ],
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": [
            {"name": "data", "mountPath": config.mount_path},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
            *([{"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True}] if training.config else []),
        ],
    }
    if config.env_secret:
        container["envFrom"] = [{"secretRef": {"name": config.env_secret}}]
    if computes and (resources := _resources(config)):
        container["resources"] = resources
    return container


def _resources(config: LaunchKubernetesConfig) -> Object:
    """Requests equal limits: icom takes as many threads as the limit allows, and no pod is the first to be evicted."""
    wanted = {"cpu": config.cpu, "memory": config.memory} | (
        {"nvidia.com/gpu": str(config.gpus)} if config.gpus else {}
    )
    given = {name: amount for name, amount in wanted.items() if amount}
    return {"requests": given, "limits": dict(given)} if given else {}


def _template(
    config: LaunchKubernetesConfig, training: TrainingConfig, container: Object, *, computes: bool = True, **more: Any
) -> Object:
    """A pod template, of one container."""
    claim = {"claimName": config.pvc}
    spec: Object = {
        **more,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        # Else a signal is lost that comes before icom listens for it: process 1 has no default action.
        "shareProcessNamespace": True,
        # A Service called icom would set ICOM_PORT and more.
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": _POD_SECURITY,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": _labels(config)},
            }
        ],
        "containers": [container],
        "volumes": [
            {"name": "data", "persistentVolumeClaim": claim},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            *([{"name": "config", "configMap": {"name": config.name}}] if training.config else []),
        ],
    }
    if config.service_account:
        spec["serviceAccountName"] = config.service_account
    if config.node_selector:
        spec["nodeSelector"] = dict(pair.split("=", 1) for pair in config.node_selector.split(","))
    if config.gpus and computes:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return {"metadata": {"labels": _labels(config)}, "spec": spec}


def _object(api: str, kind: str, config: LaunchKubernetesConfig, **content: Any) -> Object:
    metadata: Object = {"name": config.name, "labels": _labels(config)}
    if config.namespace:
        metadata["namespace"] = config.namespace
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


def _labels(config: LaunchKubernetesConfig) -> dict[str, str]:
    return {"app.kubernetes.io/name": "icom", INSTANCE: config.name}


def _variable(name: str, value: str) -> Object:
    return {"name": name, "value": value}
