#!/bin/bash
# Install a conda where one can be had. $1: the project's folder.
make -s -C "$1" install-miniconda || echo 'no conda can be had here: a venv does as well'
