#!/bin/bash
# Print the clock, what provisioning/on_node.py says, the clock again. $1: what comes before such lines, $2: the
# profile of icom's environment, $3…: addresses of the other nodes.
set -eu
mark=$1 profile=$2
shift 2
clock() { date "+$mark%s.%N"; }
clock
(
  # shellcheck source=/dev/null
  . "$profile"
  cd icom
  python -m provisioning.on_node facts "$@"
)
clock
