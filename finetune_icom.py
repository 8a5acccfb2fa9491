"""The script that `accelerate launch` and `mpirun` start: the same program as `icom finetune`."""

import sys

from icom.cli import program

if __name__ == "__main__":
    program(["finetune", *sys.argv[1:]])
