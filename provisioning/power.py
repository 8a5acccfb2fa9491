"""`icom status`, `icom stop`, `icom start`."""

from __future__ import annotations

from icom.errors import UsageError
from icom.names import plain
from provisioning.aws import Aws, connect, explained, filters, wait_for
from provisioning.cluster import Cluster, Node, find_cluster, find_nodes, find_outside_master
from provisioning.config import StartConfig, StatusConfig, StopConfig
from provisioning.ec2 import ssh_from
from provisioning.folder import folder_of


def status(config: StatusConfig) -> None:
    """`icom status`."""
    from rich.console import Console

    console = Console(highlight=False)
    with explained():
        aws = connect(config.region, config.profile)
        cluster = find_cluster(aws, config.cluster)
        images = aws.ec2.describe_images(Owners=["self"], Filters=filters(tag_cluster=config.cluster))["Images"]
        master = find_outside_master(aws, cluster.master) if cluster.master else None
    for image in images:
        size = sum(disk["Ebs"]["VolumeSize"] for disk in image["BlockDeviceMappings"] if "Ebs" in disk)
        console.print(f"Image {image['ImageId']} ({image['State']}), a snapshot of {size} GB at most.")
    if cluster.empty:
        console.print(f"There is no cluster {config.cluster} in {aws.region}.")
        return
    console.print(_table(aws, cluster, master))


def _table(aws: Aws, cluster: Cluster, master: Node | None) -> object:
    """`master`: an instance that is the master without being the cluster's own."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    nodes = (master, *cluster.nodes) if master else cluster.nodes
    kinds = ", ".join(dict.fromkeys(f"{n.type}{' spot' if n.spot else ''} in {n.zone}" for n in nodes))
    title = f"Cluster {cluster.name} in {aws.region}: {len(nodes)} nodes" + (f", {kinds}" if kinds else "")
    table = Table(title=title, title_justify="left", box=box.SIMPLE, caption_justify="left")
    for column in ("node", "id", "state", "private", "public"):
        table.add_column(column, no_wrap=True)
    for node in nodes + cluster.builders:
        addresses = (node.private_ip or "–", node.public_ip or "–")
        table.add_row(node.role, node.id, node.state, *addresses)
    group = cluster.group
    names = [f"security group {group['GroupId']} (ssh from {', '.join(ssh_from(group)) or 'nowhere'})"] if group else []
    names += [f"key pair {cluster.key['KeyName']}"] if cluster.key else []
    names += [f"placement group {cluster.placement}"] if cluster.placement else []
    names += [f"since {min(node.since for node in cluster.nodes):%Y-%m-%d %H:%M} UTC"] if cluster.nodes else []
    ends = sorted({node.ends for node in cluster.nodes if node.ends})
    names += [f"ends {' and '.join(f'{end:%Y-%m-%d %H:%M}' for end in ends)} UTC (--max_hours)"] if ends else []
    table.caption = Text(plain(", ".join(names)))  # names of keys and groups may be anything
    return table


def stop(config: StopConfig) -> None:
    """`icom stop`.

    Raises:
        UsageError: there is no such cluster, or it is made of spot instances.
        IcomError: it did not stop in time.
    """
    with explained():
        aws, nodes = _nodes(config)
        if spots := [node.role for node in nodes if node.spot]:
            raise UsageError(f"{', '.join(spots)}: one-time spot instances cannot be stopped, only torn down.")
        awake = [node.id for node in nodes if node.state in ("pending", "running")]
        wait_for(aws, "running", awake, config.wait_minutes)  # EC2 stops nothing that only starts
        if awake:
            aws.ec2.stop_instances(InstanceIds=awake)
        wait_for(aws, "stopped", [node.id for node in nodes], config.wait_minutes)
    print(f"{len(nodes)} nodes of {config.cluster} are stopped. Their disks still cost money.")


def start(config: StartConfig) -> None:
    """`icom start`.

    Raises:
        UsageError: there is no such cluster.
        IcomError: it did not start in time.
    """
    with explained():
        aws, nodes = _nodes(config)
        wait_for(aws, "stopped", [node.id for node in nodes if node.state == "stopping"], config.wait_minutes)
        asleep = [node.id for node in nodes if node.state in ("stopping", "stopped")]
        if asleep:
            aws.ec2.start_instances(InstanceIds=asleep)
        wait_for(aws, "running", [node.id for node in nodes], config.wait_minutes)
        nodes = find_nodes(aws, filters(tag_cluster=config.cluster))
        folder = folder_of(aws.account, aws.region, config.cluster)
    if folder.ssh_config.exists():  # public addresses change with every start
        folder.update_addresses(tuple(nodes))
    print(f"{len(nodes)} nodes of {config.cluster} run.")


def _nodes(config: StartConfig | StopConfig) -> tuple[Aws, list[Node]]:
    aws = connect(config.region, config.profile)
    nodes = find_nodes(aws, filters(tag_cluster=config.cluster))
    if not nodes:
        raise UsageError(f"There is no cluster {config.cluster} in {aws.region}.")
    return aws, nodes
