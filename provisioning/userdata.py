"""What a node is told at its first boot, in cloud-init's language."""

from __future__ import annotations

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
        # Persistent: a node that was stopped over its end shuts down when it is started again.
        timer = (
            f"[Unit]\nDescription=End of this icom node\n\n[Timer]\nOnCalendar={ends:%Y-%m-%d %H:%M:%S} UTC\n"
            "AccuracySec=1s\nPersistent=true\n\n[Install]\nWantedBy=timers.target\n"
        )
        service = "[Unit]\nDescription=End this icom node\n\n[Service]\nExecStart=/usr/bin/systemctl poweroff\n"
        config["write_files"] = [
            {"path": f"/etc/systemd/system/{END_UNIT}.timer", "content": timer},
            {"path": f"/etc/systemd/system/{END_UNIT}.service", "content": service},
        ]
        # bootcmd runs early, so that what fails later in the boot does not keep the node alive for ever; but the
        # files are written after it. runcmd is the first that finds them.
        config["runcmd"] = [["systemctl", "daemon-reload"], ["systemctl", "enable", "--now", f"{END_UNIT}.timer"]]
    return "#cloud-config\n" + yaml.safe_dump(config, sort_keys=False)
