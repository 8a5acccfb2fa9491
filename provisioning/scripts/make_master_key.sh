#!/bin/bash
# Make the key with which the master logs in to the workers, unless there is one, and print its public half.
set -eu
umask 077
mkdir -p .ssh
[ -f .ssh/id_ed25519 ] || ssh-keygen -q -t ed25519 -N '' -C icom -f .ssh/id_ed25519
ssh-keygen -y -f .ssh/id_ed25519
