"""What a node is told at its first boot, in cloud-init's language."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from provisioning.hostkeys import KeyPair
from provisioning.script import script


def user_data(host_key: KeyPair, client_key: str | None, ends: datetime | None) -> str:
    """A node's user data.

    Args:
        host_key: the node's first (and, at that moment, only) ssh host key.
        client_key: public key to let in, besides the EC2 key pair's; None for none.
        ends: when the node shuts itself down (UTC); None for never.
    """
    import yaml

    config: dict[str, Any] = {
        "ssh_deletekeys": True,
        "ssh_keys": {"ed25519_private": host_key.private, "ed25519_public": host_key.public},
        "ssh_pwauth": False,
        "disable_root": True,
    }
    if client_key:
        config["ssh_authorized_keys"] = [client_key]
    if ends:
        # The earliest that cloud-init offers: what fails later in the boot does not keep the node alive for ever. It
        # comes before write_files, and again with every boot.
        when = f"OnCalendar={ends:%Y-%m-%d %H:%M:%S} UTC"
        config["bootcmd"] = [["sh", "-c", script("end_timer").text, "end_timer.sh", when]]
    return "#cloud-config\n" + yaml.safe_dump(config, sort_keys=False)
