#!/bin/bash
# Folders of files in ~/pushed, on the master of a cluster and from there on all workers. Each is there once, and as a
# whole: .complete is the last of its files to arrive.
set -eu -o pipefail

# $1…: folders. Prints those that are not there.
lacking() { mkdir -p pushed && for name; do [ -e "pushed/$name/.complete" ] || echo "$name"; done; }

# $1: a worker, $2…: folders. What it has already is not sent.
pass_on() {
  local worker=$1 missing
  shift
  missing=$(ssh -n "$worker" "$(declare -f lacking); lacking $*") || return 1
  [ -n "$missing" ] || return 0
  cd pushed || return 1
  # shellcheck disable=SC2086  # their names are words
  { find $missing -type f ! -name .complete -print0; find $missing -name .complete -print0; } |
    tar --null --files-from=- -cf - | ssh "$worker" 'tar -xf - -C pushed'
}

# $1…: folders. To all workers at once.
to_workers() {
  local host pid running=
  for host in $(sed 's/#.*//; s/[:[:space:]].*//' hosts | grep -vx -e '' -e localhost || true); do
    (pass_on "$host" "$@" || { echo "Cannot bring the files to $host." >&2; exit 1; }) &
    running="$running $!"
  done
  for pid in $running; do wait "$pid"; done
}

case $1 in
  lacking) lacking "${@:2}" ;;
  to_workers) to_workers "${@:2}" ;;
esac
