"""What a pod with several GPUs starts: one process for each of them.

python -m icom.launch.processes 8 icom train …

As torchrun would, but for two things that Kubernetes needs. The exit code is that of the process that ended first
with one: it says whether starting again is of use, and torchrun makes 1 of all. And after SIGTERM the processes have
the pod's time to save, where torchrun kills them after 30 s. Nobody has to be ended when another dies: icom's
processes see that themselves (icom/parallel/liveness.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from icom.errors import IcomError, UsageError
from icom.parallel.place import POD_VARIABLES, find_place

Process = subprocess.Popen[bytes]


def main(arguments: list[str]) -> int:
    """Start the processes and wait for all.

    Args:
        arguments: their number, and what each runs.

    Returns:
        0, or what the first one that failed ended with (128 + signal, where that was one).

    Raises:
        UsageError: no number or no command; or this process is one of several on its machine itself.
        IcomError: the command cannot be started.
    """
    if len(arguments) < 2 or not arguments[0].isdigit() or not int(arguments[0]):
        raise UsageError("processes: how many, and of what? Usage: python -m icom.launch.processes 8 icom train …")
    count, command = int(arguments[0]), arguments[1:]
    pod = find_place(os.environ)
    if pod.local_size > 1:
        raise UsageError(
            f"{pod.launcher} starts {pod.local_size} processes on this machine, and each would start {count}. One of "
            "the two has to be 1 (numProcPerNode of a TrainJob, nprocPerNode of a PyTorchJob)."
        )
    environment = {name: value for name, value in os.environ.items() if name not in POD_VARIABLES}
    environment |= {"WORLD_SIZE": str(pod.world_size * count), "LOCAL_WORLD_SIZE": str(count)}
    environment |= {"MASTER_ADDR": pod.master_address or "127.0.0.1", "MASTER_PORT": str(pod.master_port)}
    # Taken one by one below, where none can come between a start and the list of what was started.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    started: list[Process] = []
    for local_rank in range(count):
        place = {"RANK": str(pod.rank * count + local_rank), "LOCAL_RANK": str(local_rank)}
        try:
            # One thread, so that it may.
            started.append(Process(command, env=environment | place, preexec_fn=_unblock))
        except OSError as error:
            raise IcomError(f"Cannot start {command[0]}: {error.strerror}.") from None
    return _first_failure(started)


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _first_failure(running: list[Process]) -> int:
    """Hand signals on until all have ended; the exit code of the first that failed, else 0."""
    code = 0
    while running:
        number = signal.sigwait(_SIGNALS)
        if number != signal.SIGCHLD:
            for process in running:
                process.send_signal(number)
        for process in [*running]:  # one signal may stand for several ends
            if (its := process.poll()) is not None:
                running.remove(process)
                code = code or (128 - its if its < 0 else its)
    return code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except IcomError as error:
        print(f"icom: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
