"""The options of `icom launch …`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from icom.config.common import check_at_least_one
from icom.errors import UsageError

Flavour = Literal["intel", "mpich", "openmpi"]
FlavourOrAuto = Literal["auto", "intel", "mpich", "openmpi"]
KubernetesKind = Literal["job", "mpijob", "trainjob", "pytorchjob"]
TrainingOptions = Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- TRAINING OPTIONS")]


@dataclass(kw_only=True)
class LaunchMpirunConfig:
    """Check all hosts, then train on them with mpirun.

    Example: icom launch mpirun --hosts hosts -- --train_data_dir photos --placeholder_token "<dicoo>" …
    """

    training_options: TrainingOptions = ()
    """Everything after `--`: the options of `icom train`, or `finetune` and its options. They are checked before
    anything starts."""
    hosts: str
    """Required. File with one host per line (hosts.example explains it); rank 0 runs on the first."""
    n: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Processes in all. Default: as many as the hosts have room for, by their slots or else --ppn."""
    ppn: Annotated[int, tyro.conf.arg(aliases=["-ppn"])] = 1
    """Processes per host whose line says nothing else (host:2). One per socket is best."""
    accelerate_config: str | None = None
    """Configuration for `accelerate launch`. Default: accelerate_configs/multi_cpu.yaml of this project."""
    mpi: FlavourOrAuto = "auto"
    """Whose mpirun. `auto`: this environment's own, else the first in PATH."""
    dry_run: bool = False
    """Print the command and the environment, and stop; no host is asked anything."""


@dataclass(kw_only=True)
class LaunchSlurmConfig:
    """Submit the training to Slurm: it goes on by itself after a time limit, preemption or the loss of a node.

    Example: icom launch slurm --nodes 3 --time 4:00:00 -- --train_data_dir photos --placeholder_token "<dicoo>" …
    """

    training_options: TrainingOptions = ()
    """Everything after `--`: the options of `icom train`, or `finetune` and its options. --output_dir has to lie where
    all nodes see it."""
    nodes: int
    """Required. Nodes of the job."""
    ppn: int | None = None
    """Processes per node. Default: one, or one for each of --gpus_per_node."""
    cpus_per_task: int | None = None
    """CPUs of each process. Default: all that the partition's smallest node has, shared by its processes."""
    time: str | None = None
    """Time limit, as in 90 (minutes), 4:00:00 or 1-12:00:00. At its end the job saves, waits its turn, and goes on."""
    partition: str | None = None
    """Partition to run in. Default: the cluster's."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    gpus_per_node: int | None = None
    """GPUs per node; one process each."""
    exclusive: bool = False
    """Share the nodes with no other job."""
    array: str | None = None
    """FILE or FILE%N: a run for each line, N at a time. A line has options that come on top of those after `--`, or
    names a YAML file of options. What is done already is not done again."""
    container_image: str | None = None
    """Image with icom to run in (Pyxis): a squash file, or registry#name:tag."""
    container_mounts: str | None = None
    """What the container sees of the nodes (Pyxis): SOURCE:TARGET, several with commas."""
    max_requeues: int = 10
    """How often the job may start again."""
    sbatch: str = ""
    """Further options of sbatch, in one argument and with `=`: --sbatch="--mail-type=END --constraint=avx512"."""
    dry_run: bool = False
    """Print the job's script, and stop. Where there is no Slurm, it lacks the default of --cpus_per_task."""
    wait: bool = False
    """Follow the log until the job ends; its exit code is then this command's. Ctrl-C leaves the job alone."""

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            UsageError: names the option and how to fix it.
        """
        counts = ("nodes", "ppn", "cpus_per_task", "gpus_per_node")
        check_at_least_one(**{name: getattr(self, name) for name in counts})
        if self.max_requeues < 0:
            raise UsageError("--max_requeues must not be negative.")
        if self.container_mounts and not self.container_image:
            raise UsageError("--container_mounts is for --container_image, which is missing.")
        for name in ("time", "partition", "account", "qos", "container_image", "container_mounts", "sbatch"):
            value = getattr(self, name)
            if value is not None and not value.isprintable():
                raise UsageError(f"--{name} has characters that no line of a script can have.")


@dataclass(kw_only=True)
class LaunchEnvConfig:
    """Print `export` lines for people who call mpirun themselves.

    Example: eval "$(icom launch env --hosts hosts)"; mpirun -f hosts -n 3 -ppn 1 accelerate launch …
    """

    hosts: str | None = None
    """File with one host per line. Default: this machine is the first, and the default route leads to the others."""
    mpi: FlavourOrAuto = "auto"
    """Whose mpirun, as in `icom launch mpirun`."""


@dataclass(kw_only=True)
class LaunchKubernetesConfig:
    """Train in pods of a Kubernetes cluster: checks, applies the manifests with kubectl, tells the next commands.

    Example: icom launch kubernetes --image REGISTRY/icom:1 --nodes 3 --pvc icom -- --train_data_dir /data/photos …
    """

    training_options: TrainingOptions = ()
    """Everything after `--`: the options of `icom train`, or `finetune` and its options, as the pods see files: below
    --mount_path."""
    image: str
    """Required. An image with icom in it that the cluster can pull (make image, make push)."""
    pvc: str
    """Required. The PersistentVolumeClaim with pictures and results, which all pods share (ReadWriteMany)."""
    mount_path: str = "/data"
    """Where that volume is in the pods."""
    kind: KubernetesKind = "job"
    """`job`: Kubernetes' own Indexed Job, which needs no operator. `mpijob`: Kubeflow's MPI operator, with Intel MPI.
    `trainjob`: Kubeflow's Trainer. `pytorchjob`: Kubeflow's training operator."""
    nodes: int = 1
    """Pods, each on a node of its own where there are enough."""
    cpu: str | None = None
    """CPUs of each pod, for instance 15 or 7500m: requested, and its limit. Default: neither."""
    memory: str | None = None
    """Memory of each pod, for instance 32Gi: requested, and its limit. Default: neither."""
    gpus: int = 0
    """NVIDIA GPUs of each pod; a process for each."""
    name: str = "icom"
    """Of the run, and of all that is made for it."""
    namespace: str | None = None
    """Default: that of kubectl's context."""
    service_account: str | None = None
    """Of the pods; it may bring imagePullSecrets. Default: the namespace's own."""
    node_selector: str | None = None
    """Labels that the nodes must have, as key=value,key=value."""
    env_secret: str | None = None
    """A Secret whose keys become variables of the pods: HF_TOKEN, WANDB_API_KEY."""
    max_restarts: int = 10
    """How often a pod may fail and start again, from the last checkpoint."""
    dry_run: bool = False
    """Print the manifests, with a secret made for this run in them, and stop; no cluster is asked anything."""
