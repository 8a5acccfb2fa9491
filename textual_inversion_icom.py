"""The script that `accelerate launch` and `mpirun` start: the same program as `icom train`."""

import sys

from icom.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
