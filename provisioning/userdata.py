"""What a node is told at its first boot, in cloud-init's language."""

from __future__ import annotations

import shlex
from datetime import datetime
from typing import Any

from provisioning.hostkeys import KeyPair

END_UNIT = "icom-end"


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
        config["bootcmd"] = [["sh", "-c", _arm(ends)]]
    return "#cloud-config\n" + yaml.safe_dump(config, sort_keys=False)


def _arm(ends: datetime) -> str:
    """A shell script that starts the timer of the node's end; may run any number of times."""
    # Persistent: a node that was stopped over its end shuts down when it is started again.
    timer = (
        f"[Unit]\nDescription=End of this icom node\n\n[Timer]\nOnCalendar={ends:%Y-%m-%d %H:%M:%S} UTC\n"
        "AccuracySec=1s\nPersistent=true\n\n[Install]\nWantedBy=timers.target\n"
    )
    service = "[Unit]\nDescription=End this icom node\n\n[Service]\nExecStart=/usr/bin/systemctl poweroff\n"
    units, stamp = "/etc/systemd/system", f"/var/lib/systemd/timers/stamp-{END_UNIT}.timer"
    return "\n".join(
        [
            f"printf %s {shlex.quote(timer)} > {units}/{END_UNIT}.timer",
            f"printf %s {shlex.quote(service)} > {units}/{END_UNIT}.service",
            # When it last ran, for systemd: without this a node whose first boot comes after its end has missed it.
            f"mkdir -p {stamp.rpartition('/')[0]}",
            f"[ -e {stamp} ] || touch -d 2000-01-01 {stamp}",
            "systemctl daemon-reload",
            f"systemctl enable {END_UNIT}.timer",
            # Timers start after sysinit.target, which waits for this script: to wait for the timer would be for ever.
            f"systemctl start --no-block {END_UNIT}.timer",
        ]
    )
