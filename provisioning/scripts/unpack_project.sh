#!/bin/bash
# Replace the project by what is in an archive. $1: the archive, $2: the project's folder.
# The environment stays: an update of the project keeps what has not changed.
set -eu
if [ -e runs/lock ] && ! flock -n runs/lock true; then
  echo 'A training runs here, from the files that are to be replaced. Wait for its end.' >&2
  exit 1
fi
rm -rf "$2.new"
mkdir "$2.new"
tar -xzf "$1" -C "$2.new"
rm "$1"
[ ! -d "$2/.venv" ] || mv "$2/.venv" "$2.new/"
rm -rf "$2"
mv "$2.new" "$2"
