"""What the commands for EC2 clusters can be told. Imports nothing heavy: `icom --help` reads it."""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from icom import names
from icom.config.loading import layers, merge
from icom.errors import UsageError
from icom.names import Malformed

NODE_LIKE = re.compile(r"-(master|worker-\d+)$")
CLUSTER_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
LEAST_GB = {False: 8, True: 30}
"""Of a node's disk, without and with icom on it."""
AS_THIS_INSTANCE = frozenset(("ami", "instance_type", "ssh_user"))
"""What --from_this_instance decides: nodes of a cluster are alike."""
PARSED: dict[str, Callable[[object], object]] = {
    "instance_type": names.word,
    "ami": names.word,
    "ssh_user": names.user,
    "subnet": names.word,
    "key_name": names.label,
    "address_url": names.web_address,
    "capacity_reservation": names.word,
    "instance_profile": names.label,
}
"""Options -> what they have to be: they come into files, messages with commands to type, and requests."""
WIDEST_PREFIX = 8  # 10.0.0.0/8 is the largest network that can be one owner's own


@dataclass(kw_only=True)
class WhereConfig:
    """Which cluster, in which region, with whose credentials."""

    cluster: str = "icom"
    """Name of the cluster: small letters, digits and hyphens."""
    region: str | None = None
    """AWS region. Default: $AWS_REGION, $AWS_DEFAULT_REGION or the profile's."""
    profile: str | None = None
    """Profile in ~/.aws. Default: $AWS_PROFILE, or the credentials in the environment."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, before AWS is asked anything.

        Raises:
            UsageError: names the option and how to fix it.
        """
        # The name becomes part of the names of EC2 resources, hosts and a folder.
        if not CLUSTER_NAME.fullmatch(self.cluster):
            raise UsageError(
                f"--cluster {self.cluster!r} has to be small letters, digits and hyphens, a letter first, 32 "
                "characters at most."
            )
        if NODE_LIKE.search(self.cluster):
            raise UsageError(
                f"--cluster {self.cluster} would be mistaken for a node of another cluster by ssh. Choose another name."
            )
        for option in ("wait_minutes", "max_hours"):
            time = getattr(self, option, None)  # of the commands that have it
            if time is not None and not 0 < time < 10_000:  # nor is NaN
                raise UsageError(f"--{option} has to be a positive number below 10000, not {time}.")


@dataclass(kw_only=True)
class InstanceConfig(WhereConfig):
    """What instances are made of, and how to reach them."""

    instance_type: str = "m7i.4xlarge"
    """EC2 type of all nodes. GPU types get a Deep Learning base image."""
    ami: str | None = None
    """Base image. Default: the current Ubuntu 24.04 or, for GPU types, Deep Learning image of AWS."""
    ssh_user: str = "ubuntu"
    """User that the image lets in by ssh."""
    subnet: list[str] = field(default_factory=list)
    """Subnets to try in this order, of one VPC. Default: the default VPC's, one per zone that has the type."""
    key_name: str | None = None
    """EC2 key pair of yours to log in with. Default: a key made for this cluster."""
    key_file: str | None = None
    """Private half of --key_name. Default: ~/.ssh/KEY_NAME.pem."""
    ssh_from: str | None = None
    """Addresses that may use ssh, as CIDR. Default: yours alone, as --address_url tells it."""
    ssh_from_anywhere: bool = False
    """Allow an --ssh_from wider than /8, such as 0.0.0.0/0."""
    address_url: str = "https://checkip.amazonaws.com"
    """Service that answers with the caller's public IPv4 address."""
    private_ip: bool = False
    """No public addresses: you are in the VPC or reach it by VPN. The nodes need a way out (NAT) to be installed."""
    wait_minutes: float = 10
    """How long to wait for the nodes to run, and again for their ssh."""
    keep_on_failure: bool = False
    """Do not remove what this call made when it fails or is stopped; the same command again goes on from there."""
    dry_run: bool = False
    """Show the plan, check permissions and quotas, and make nothing."""
    yes: bool = False
    """Do not ask before making things that cost money."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, parse in PARSED.items():
            value = getattr(self, option, None)
            for one in value if isinstance(value, list) else [] if value is None else [value]:
                _check_option(option, parse, one)
        if self.ssh_from is not None:
            ssh_source(self.ssh_from, self.ssh_from_anywhere)
        elif self.ssh_from_anywhere:
            raise UsageError(
                "--ssh_from_anywhere allows a wide --ssh_from, such as 0.0.0.0/0: give that too, or drop it."
            )
        if self.key_file and not self.key_name:
            raise UsageError("--key_file is the private half of --key_name: give both, or neither.")
        if self.key_name:
            _check_option("key_file", names.ssh_path, key_file(self))
            check_key_file(key_file(self))


@dataclass(kw_only=True)
class ProvisionConfig(InstanceConfig):
    """Make an EC2 cluster, or finish one. Shows a plan with its prices first. Needs the extra `aws`; see docs/aws.md.

    Example: icom provision --count 3 --max_hours 8
    """

    count: int = 1
    """Nodes in all: 3 is a master and two workers."""
    from_this_instance: bool = False
    """Run on an EC2 instance: it becomes the master, as it is; the workers start from an image of its disk."""
    bake: bool = True
    """Start from an image that holds icom, tested; made first, once per content of this project. Else each installs."""
    volume_gb: int = 250
    """Size of each node's encrypted gp3 disk."""
    spot: bool = False
    """Spot instances: cheaper, and AWS may end them at any time. They cannot be stopped and started."""
    placement_group: bool = False
    """Place the nodes near each other in one zone (cluster placement group)."""
    capacity_reservation: str | None = None
    """Id of a capacity reservation or capacity block to start in."""
    efa: bool = False
    """Elastic Fabric Adapter on the first network card, for types that have it."""
    instance_profile: str | None = None
    """Name of an instance profile: gives the nodes AWS credentials. Default: they have none."""
    max_hours: float | None = None
    """The nodes end themselves (are terminated) so many hours after this command, whatever happens to your computer."""
    setup: bool = True
    """Set the nodes up for training. Without it they are instances of the base image that run."""
    ssh_include: bool = True
    """Add one line to ~/.ssh/config, so that `ssh icom-NAME` and editors find the nodes. `icom teardown` removes it."""
    config: str | None = None
    """YAML file with these options; flags go first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count < 1:
            raise UsageError(f"--count has to be at least 1 (a master alone), not {self.count}.")
        if self.from_this_instance and self.count < 2:
            raise UsageError("--from_this_instance: this instance is the first of --count, which has to be 2 or more.")
        if self.from_this_instance and not (self.bake and self.setup):
            raise UsageError("--from_this_instance makes an image and sets nodes up: drop --no_bake and --no_setup.")
        if self.volume_gb < (least := LEAST_GB[self.setup]):
            raise UsageError(f"--volume_gb has to be at least {least}, not {self.volume_gb}: the system has to fit.")
        if self.spot and self.capacity_reservation:
            raise UsageError("--spot instances cannot start in a --capacity_reservation: drop one of them.")


@dataclass(kw_only=True)
class BakeConfig(InstanceConfig):
    """Make the image that nodes start from: icom installed and tested. `icom provision` does it when there is none.

    Example: icom bake --instance_type m7i.4xlarge
    """


@dataclass(kw_only=True)
class StatusConfig(WhereConfig):
    """Show a cluster's nodes, as EC2's tags tell them."""


@dataclass(kw_only=True)
class StartConfig(WhereConfig):
    """Start the nodes of a cluster that was stopped."""

    wait_minutes: float = 10
    """How long to wait until they run."""


@dataclass(kw_only=True)
class StopConfig(WhereConfig):
    """Stop a cluster's nodes: only their disks cost money then."""

    wait_minutes: float = 10
    """How long to wait until they have stopped."""


@dataclass(kw_only=True)
class TeardownConfig(WhereConfig):
    """Remove a cluster and prove by its tags that nothing is left. Exit code 1 and a list where something is."""

    all_images: bool = False
    """Also remove the images that carry the cluster's tag, and their snapshots."""
    wait_minutes: float = 10
    """How long to wait until the nodes are gone."""
    yes: bool = False
    """Do not ask."""


@dataclass(kw_only=True)
class SshConfig(WhereConfig):
    """Log in to a node."""

    node: tyro.conf.Positional[str] = "master"
    """master, worker-1, worker-2, …"""


@dataclass(kw_only=True)
class RunConfig(WhereConfig):
    """Run a command on a node, with its output and its exit code. Example: icom run -- mpirun -f hosts hostname"""

    command: tyro.conf.Positional[tuple[str, ...]]
    """The command, after `--`. One word is a line for the node's shell."""
    node: str = "master"
    """master, worker-1, worker-2, …"""


@dataclass(kw_only=True)
class PushConfig(WhereConfig):
    """Copy a file or folder to a node."""

    source: tyro.conf.Positional[str]
    """File or folder here."""
    target: tyro.conf.Positional[str] = "."
    """Where to on the node, from its home folder on."""
    node: str = "master"
    """master, worker-1, worker-2, …"""


@dataclass(kw_only=True)
class PullConfig(WhereConfig):
    """Copy a file or folder from a node."""

    source: tyro.conf.Positional[str]
    """File or folder on the node, from its home folder on."""
    target: tyro.conf.Positional[str] = "."
    """Where to here."""
    node: str = "master"
    """master, worker-1, worker-2, …"""


def _check_option(option: str, parse: Callable[[Any], object], value: object) -> None:
    try:
        parse(value)
    except Malformed as error:
        raise UsageError(f"--{option}: {error}") from None


def load_provision_config(flags: Mapping[str, Any]) -> ProvisionConfig:
    """Lay the flags that were given over --config, and check the whole.

    Raises:
        UsageError: unreadable file, unknown key, wrong type or impossible value.
    """
    chosen = layers(flags)
    config = merge(ProvisionConfig, chosen, flags.get("config"))
    if config.from_this_instance and (fixed := sorted(AS_THIS_INSTANCE & set().union(*chosen))):
        raise UsageError(f"The workers' {', '.join(fixed)} are this instance's with --from_this_instance: drop it.")
    return config


def as_options(where: WhereConfig) -> str:
    """` --cluster NAME`, with region and profile where they were given: for commands that are shown, to be typed."""
    options = (("cluster", where.cluster), ("region", where.region), ("profile", where.profile))
    return "".join(f" --{name} {shlex.quote(value)}" for name, value in options if value)


def ssh_source(text: str, anywhere: bool) -> ipaddress.IPv4Network:
    """Who may use ssh: an IPv4 address or network, such as 203.0.113.7 or 203.0.113.0/24, wherever it comes from.

    Raises:
        UsageError: it is none, or so wide that it takes `anywhere`.
    """
    try:
        network = ipaddress.IPv4Network(text)
    except ValueError as error:
        raise UsageError(f"--ssh_from {text}: {error}. Give an IPv4 network, for instance 203.0.113.7/32.") from None
    if network.prefixlen < WIDEST_PREFIX and not anywhere:
        who = "the whole internet" if network.prefixlen == 0 else f"{network.num_addresses:,} addresses"
        raise UsageError(
            f"--ssh_from {network} lets {who} try your nodes' ssh. If you mean it, add --ssh_from_anywhere; else leave "
            "--ssh_from away and only your address is let in."
        )
    return network


def key_file(config: InstanceConfig) -> Path:
    """Where the private half of --key_name is looked for."""
    return Path(config.key_file or f"~/.ssh/{config.key_name}.pem").expanduser().resolve()  # it goes into an ssh config


def check_key_file(path: Path) -> None:
    """Refuse a private key that is missing, that others can read or that needs a passphrase: it would fail later.

    Raises:
        UsageError: with the command that fixes it.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UsageError(f"Cannot read the private key {path}: {error.strerror}. Give --key_file.") from None
    if mode & 0o077:
        raise UsageError(f"Others can read the private key {path}. Close it: chmod 600 {path}")
    try:
        import paramiko
    except ModuleNotFoundError:  # with boto3, which tells
        return
    try:
        paramiko.PKey.from_path(path)
    except (TypeError, paramiko.PasswordRequiredException):  # the former is how cryptography says it
        raise UsageError(
            f"The private key {path} has a passphrase, and nobody is there to type it. Drop --key_name (icom makes a "
            f"key for the cluster), or give a copy without: cp -p {path} {path}.open && "
            f"ssh-keygen -p -N '' -f {path}.open"
        ) from None
    except (OSError, ValueError, paramiko.SSHException, paramiko.UnknownKeyType) as error:
        raise UsageError(f"{path} is no private key that can be read: {error}. Give another --key_file.") from None
