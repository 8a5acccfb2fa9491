"""`--wait`: the log of a job while it runs, and how it ended."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from icom.errors import IcomError
from icom.launch.slurm.queue import Job, look_up
from icom.progress import progress

_OFTEN, _SELDOM = 1.0, 5.0
"""Seconds between two questions to the controller: at first, and after the first minute."""


def follow(number: str, log: Path) -> int:
    """Show the log until the job ends.

    Args:
        number: of the job.
        log: that it writes; it need not be there yet.

    Returns:
        Its exit code, as a shell would see it.

    Raises:
        IcomError: Slurm has forgotten the job before its end was seen, or it ended without a log.
    """
    began, read, last = time.monotonic(), 0, ""
    while True:
        job = _only(look_up(number), number)
        read += _show(log, read)
        # Not at once: Slurm starts jobs a second later, and gives its reason then.
        if job.state == "PENDING" and job.reason not in ("None", last):
            print(f"icom: job {number} waits ({job.reason}) …", file=sys.stderr)
        last = job.reason
        if job.ended:
            time.sleep(_OFTEN)  # it may be on its way back into the queue, and files come late over NFS
            job = _only(look_up(number), number)
            if job.ended:
                read += _show(log, read)
                return _code(job, number, log if not read else None)
        _pause(began)


def follow_array(number: str, tasks: int) -> int:
    """Show how many tasks are done until all have ended.

    Returns:
        0, or the exit code of the first task that failed.
    """
    seen: dict[int, Job] = {}
    began = time.monotonic()
    with progress(None, "runs", "run", total=tasks) as bar:
        while True:
            # Slurm forgets those that ended minutes ago.
            seen |= {job.task: job for job in look_up(number) if job.task is not None}
            ended = [job for job in seen.values() if job.ended]
            bar.update(len(ended) - bar.n)
            if len(ended) == tasks:
                return next((_code(job, number, None) for job in ended if job.state != "COMPLETED"), 0)
            _pause(began)


def _pause(began: float) -> None:
    time.sleep(_OFTEN if time.monotonic() - began < 60 else _SELDOM)


def _only(jobs: list[Job], number: str) -> Job:
    if not jobs:
        raise IcomError(f"Slurm knows no job {number} any more. What it said: its log. How it ended: sacct -j {number}")
    return jobs[0]


def _code(job: Job, number: str, missing_log: Path | None) -> int:
    if missing_log and job.state != "COMPLETED":
        raise IcomError(
            f"Job {number} ended ({job.state}) without a word: {missing_log} was not written. --output_dir and the "
            "current folder have to lie where all nodes see them."
        )
    # A job that was cancelled in the queue has exit code 0.
    return job.code if job.state == "COMPLETED" else job.code or 1


def _show(log: Path, start: int) -> int:
    """Print what the log has from `start` bytes on; how many bytes those were."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            content = file.read()
    except FileNotFoundError:
        return 0
    sys.stdout.write(content.decode(errors="replace"))
    sys.stdout.flush()
    return len(content)
