#!/bin/bash
# As root: make a host key, which use_host_key.sh will put in its place, and print its public half. $1: its path.
set -eu
rm -f "$1" "$1.pub"
ssh-keygen -q -t ed25519 -N '' -C '' -f "$1"
cat "$1.pub"
