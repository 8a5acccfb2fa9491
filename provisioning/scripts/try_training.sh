#!/bin/bash
# Train some steps, and leave nothing of it. $1: the project's folder.
set -eu
make -s -C "$1" single-node-test
rm -rf "$1/textual_inversion_output"
