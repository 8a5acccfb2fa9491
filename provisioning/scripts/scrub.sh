#!/bin/bash
# As root: run provisioning/scrub.py, which was sent as $1, on the instance $2.
set -eu
python3 - --instance "$2" < "$1"
rm "$1"
sync
