"""Starts `command` by the folder's name, from a clone in which nothing is installed."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python put this folder there, even with -I. The clone's has no module that could hide one of Python's.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from icom.setup_env.command import main

    sys.exit(main())
