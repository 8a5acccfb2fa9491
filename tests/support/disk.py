"""A root file system of a host's own: what it writes and deletes is its alone, can be kept, and can be started from."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.namespaces import call, children

# What such a host does first. The machine's root file system is a layer that is only read; above it lies one in memory
# that takes every change, "the disk". What of the machine is a person's own is not on it: /root and /home are empty.
# Nothing of the machine's is reachable any more after pivot_root, but for the folders that have to be seen.
INIT = r"""
set -eu
name=$1 image=$2
shift 2
hostname "$name"
mount -t tmpfs -o mode=0755 disk /mnt
mkdir /mnt/upper /mnt/work /mnt/root
if [ -n "$image" ]; then
    cp -dR --preserve=mode,ownership,timestamps,links,xattr "$image/." /mnt/upper
else
    mknod /mnt/upper/root c 0 0  # "deleted", in overlayfs's words
    mknod /mnt/upper/home c 0 0
fi
exec 9< /mnt/upper  # for who saves the disk: there will be no path to it
# xino: one device number for all files, as a disk has it; the scrub stays within a file system.
layers=lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work
mount -t overlay -o $layers,redirect_dir=off,metacopy=off,index=off,xino=on overlay /mnt/root
cd /mnt/root
[ -n "$image" ] || { mkdir -m 0700 root; mkdir home; }
mount -t proc proc proc
mount -t sysfs sysfs sys
mount --rbind /sys/fs/cgroup sys/fs/cgroup
mount -t tmpfs -o mode=0755 tmpfs dev  # the machine's could be deleted from
for device in "null 1 3" "zero 1 5" "full 1 7" "random 1 8" "urandom 1 9" "tty 5 0"; do
    set -- $device "$@"
    mknod -m 0666 "dev/$1" c "$2" "$3"
    shift 3
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/0 dev/stdin
ln -s /proc/self/fd/1 dev/stdout
ln -s /proc/self/fd/2 dev/stderr
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -t tmpfs -o mode=0755 tmpfs run
for folder in "$@"; do
    mkdir -p ".$folder"
    # What is on the disk already can be changed there without harm.
    [ -n "$(ls -A ".$folder")" ] || mount -o bind,ro "$folder" ".$folder"
done
mkdir run/sshd
echo "127.0.0.1 localhost" > run/hosts
mount --bind run/hosts etc/hosts
sed -i 's/^root:[^:]*:/root:*:/' etc/shadow  # an account that is locked may not log in, not even with a key
pivot_root . mnt
cd /
umount -l /mnt
ip link set lo up
"""


def save(keeper: int, folder: Path) -> None:
    """Copy a host's disk, with its deletions, to a folder that is made for it.

    Args:
        keeper: pid of the process that keeps the host's namespaces, whose child has the disk open.
        folder: may not exist.
    """
    (first,) = children(keeper)
    copy(Path(f"/proc/{first}/fd/9"), folder)


def copy(disk: Path, folder: Path) -> None:
    """Copy a disk that was saved to a folder that is made for it."""
    folder.mkdir(parents=True)
    call(["cp", "-dR", "--preserve=mode,ownership,timestamps,links,xattr", f"{disk}/.", os.fspath(folder)])
