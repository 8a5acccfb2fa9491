"""What mpirun starts on each host: sets what this host has to decide for itself, and becomes the given command.

python -m icom.launch.on_host accelerate launch …
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from icom.errors import IcomError
from icom.launch.environment import host_variables
from icom.parallel.place import find_place


def main(command: list[str]) -> None:
    """Replace this process by `command`, in this host's environment.

    Raises:
        IcomError: there is no such program, or the environment contradicts itself.
    """
    if not command:
        raise IcomError("on_host: no command given. Usage: python -m icom.launch.on_host accelerate launch …")
    place = find_place(os.environ)
    os.environ |= {v.name: v.value for v in host_variables(os.environ, place.local_rank, place.local_size)}
    # accelerate lies beside Python, also where PATH does not lead there: mpirun's shell here reads no profile.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise IcomError(f"Cannot start {command[0]} on this host: {error.strerror}.") from None


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except IcomError as error:
        print(f"icom: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
