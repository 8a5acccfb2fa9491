"""The plan of `icom provision` for people: what is there, what is made, and what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from provisioning.plan import Plan, builder_plan, disk_sizes

if TYPE_CHECKING:
    from rich.table import Table


def plan_table(plan: Plan) -> Table:
    """The plan for people: every resource with what it costs, and the checks."""
    from rich import box
    from rich.table import Table

    config, found, prices = plan.config, plan.found, plan.found.prices
    title = f"Cluster {config.cluster} in {found.region}, account {found.account}"
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE)
    table.add_column("", no_wrap=True)
    table.add_column("what", overflow="fold")
    table.add_column("USD/hour", justify="right")
    table.add_column("USD/month", justify="right")

    def row(new: bool, what: str, hour: float | None = 0.0, month: float | None = 0.0) -> None:
        table.add_row("+" if new else "there", what, _dollars(hour), _dollars(month))

    anywhere = " (the whole internet)" if found.ssh_from.prefixlen == 0 else ""
    row(plan.make_group, f"security group {plan.name}: ssh from {found.ssh_from}{anywhere}, all among the nodes")
    if not config.key_name:
        row(plan.make_key, f"key pair {plan.name}")
    if config.placement_group:
        row(plan.make_placement, f"placement group {plan.name}")
    if plan.this_instance:
        node = plan.this_instance.node
        row(False, f"master: {node.id}, {node.zone}: this instance ({node.type}), which stays as it is")
        if plan.join:
            row(True, f"the security group at this instance too ({plan.this_instance.interface}), until icom teardown")
        if found.bake:
            row(True, "raw image of this instance's root disk, until the image is made from it")
    if found.bake:
        builder = builder_plan(plan).config
        what = f"builder: {builder.instance_type}, {builder.volume_gb} GB, until the image is made"
        row(True, what, None if found.gpus else prices.per_hour)
        what = "image with icom in it, tested, for all clusters; per GB of its snapshot"
        row(True, what, month=prices.snapshot_gb_month)
    per_disk = None if prices.per_gb_month is None else prices.per_gb_month * sum(disk_sizes(plan).values())
    for node in plan.there:
        row(False, f"{node.role}: {node.id}, {node.zone}, {node.state}", prices.per_hour, per_disk)
    kind = f"{config.instance_type}{' spot' if config.spot else ''}, {config.volume_gb} GB encrypted gp3"
    for role in plan.roles:
        row(True, f"{role}: {kind}", prices.per_hour, per_disk)
    nodes = len(plan.there) + len(plan.roles)
    addresses = 0 if config.private_ip else nodes
    if addresses:
        what = f"{addresses} public IPv4 addresses, {prices.per_address:g} USD/hour each while their nodes run"
        row(bool(plan.roles), what, prices.per_address * addresses)
    table.add_section()
    hour = None if prices.per_hour is None else prices.per_hour * nodes + prices.per_address * addresses
    table.add_row(
        *("", f"{nodes} {'workers' if plan.this_instance else 'nodes'} running, with all that is theirs"),
        *(_dollars(hour), _dollars(_times(per_disk, nodes))),
    )
    zones = " or ".join(dict.fromkeys(subnet.zone for subnet in found.subnets))
    per_gb = "" if prices.per_gb_month is None else f"; a GB of disk {prices.per_gb_month:g} USD/month"
    image = f"made of {plan.image.base}" if plan.this_instance and found.bake else plan.image.id
    table.caption = (
        f"Image: {image}. Zone: {zones}. Prices: {prices.source}{per_gb}. Quota: {found.quota}. Ends: {_ends(plan)}."
    )
    return table


def _ends(plan: Plan) -> str:
    """When the nodes end, and what has decided it."""
    asked = plan.config.max_hours is not None
    if plan.ends is None:
        return "when you say so: icom teardown" + (
            " (--max_hours has no effect on nodes that are there)" if asked else ""
        )
    if not plan.there:
        why = "--max_hours"
    else:
        why = "as the nodes that are there" + ("; --max_hours has no effect on them" if asked else "")
    return f"{plan.ends:%Y-%m-%d %H:%M} UTC ({why})"


def _times(value: float | None, factor: int) -> float | None:
    return None if value is None else value * factor


def _dollars(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}" if value else ""
