"""The script that `accelerate launch` and `mpirun` start: the same program as `icom train`."""

import sys

from icom.cli import program

if __name__ == "__main__":
    program(["train", *sys.argv[1:]])
