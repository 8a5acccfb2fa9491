#!/bin/sh
# At boot, as root: start the timer of this node's end. $1: its line that says when. May run any number of times.
units=/etc/systemd/system stamp=/var/lib/systemd/timers/stamp-icom-end.timer
# Persistent: a node that was stopped over its end shuts down when it is started again.
cat > $units/icom-end.timer <<END
[Unit]
Description=End of this icom node

[Timer]
$1
AccuracySec=1s
Persistent=true

[Install]
WantedBy=timers.target
END
cat > $units/icom-end.service <<END
[Unit]
Description=End this icom node

[Service]
ExecStart=/usr/bin/systemctl poweroff
END
# When it last ran, for systemd: without this a node whose first boot comes after its end has missed it.
mkdir -p "${stamp%/*}"
[ -e $stamp ] || touch -d 2000-01-01 $stamp
systemctl daemon-reload
systemctl enable icom-end.timer
# Timers start after sysinit.target, which waits for this script: to wait for the timer would be for ever.
systemctl start --no-block icom-end.timer
