#!/bin/bash
# Let mpirun sum a number over all nodes. $1: the profile of icom's environment, $2: how many nodes there are, $3: a free
# port, $4: seconds, after which `timeout` exits with 124.
set -eu
# shellcheck source=/dev/null
. "$1"
cd icom
MASTER_PORT=$3 timeout "$4" mpirun -f ~/hosts -n "$2" -ppn 1 python -m icom.launch.all_reduce
