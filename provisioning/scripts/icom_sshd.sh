#!/bin/bash
# In a container, as the user that it runs as: accept mpirun's ssh on port 2222, until SIGTERM. The image has it as
# icom-sshd; it runs only where somebody starts it, as the workers of an MPIJob do.
#
# One key pair does it all: the one that the MPI operator makes for each job and mounts into its pods alone. Who has it
# may log in, and the host proves with it that it is one of the job's: icom_ssh.conf is the other side.
set -eu
# Where ssh itself looks, whatever HOME says.
keys=$(getent passwd "$(id -u)" | cut -d: -f6)/.ssh
for file in id_rsa authorized_keys; do
  if [ ! -r "$keys/$file" ]; then
    echo "icom-sshd: cannot read $keys/$file. Mount the job's key pair there (MPIJob: sshAuthMountPath: $keys)." >&2
    exit 1
  fi
done
# A secret is mounted in a folder that all may write to, though nobody can: that is what StrictModes would refuse.
exec /usr/sbin/sshd -D -e -f none -p 2222 -h "$keys/id_rsa" \
  -o AuthorizedKeysFile="$keys/authorized_keys" -o StrictModes=no -o PidFile=none -o UsePAM=no \
  -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no -o DisableForwarding=yes -o PermitUserRC=no
