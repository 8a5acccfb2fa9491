#!/bin/bash
# As root: let sshd use the host key that make_host_key.sh has made. $1: its path.
set -eu
mv "$1" /etc/ssh/ssh_host_ed25519_key
mv "$1.pub" /etc/ssh/ssh_host_ed25519_key.pub
{ systemctl reload ssh || systemctl reload sshd || kill -HUP "$(cat /run/sshd.pid)"; } 2>/dev/null
