"""What Slurm's commands say: whether a job could run, its number, how it is doing."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from icom.errors import IcomError

_SECONDS = 60
"""Patience with a controller that is busy."""

_GOING_ON = {"PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "RESIZING"}
_GOING_ON |= {"REQUEUE_FED", "SIGNALING", "STAGE_OUT", "STOPPED", "SPECIAL_EXIT"}


@dataclass(frozen=True)
class Job:
    """A job, or one task of an array.

    Attributes:
        state: as Slurm calls it.
        reason: why it waits.
        code: as a shell would see it: exit code, or 128 + signal.
        task: number in its array; None: no array.
    """

    state: str
    reason: str
    code: int
    task: int | None

    @property
    def ended(self) -> bool:
        """Whether it will not run again by itself."""
        return self.state not in _GOING_ON


def need_slurm() -> None:
    """Refuse where there is no Slurm.

    Raises:
        IcomError: there is no sbatch.
    """
    if shutil.which("sbatch") is None:
        raise IcomError(
            "There is no `sbatch` here. Type this on a login node of a Slurm cluster (`module load slurm` where "
            "that brings it); --dry_run shows the script without it."
        )


def test_submission(script: str) -> str:
    """When and where Slurm would start the job.

    Raises:
        IcomError: it would never.
    """
    done = _ask("sbatch", "--test-only", script)
    said = _cleaned(done.stderr or done.stdout)
    if done.returncode:
        raise IcomError(f"Slurm would not take this job: {said}.{_what_there_is(said)} Nothing was submitted.")
    return said


def submit(script: str, after: str | None = None) -> str:
    """Submit, and give the job's number.

    Args:
        script: its file.
        after: another job; this one starts when all of that went well, and is cancelled when it did not.

    Raises:
        IcomError: Slurm did not take it.
    """
    waits = [] if after is None else [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    done = _ask("sbatch", "--parsable", *waits, script)
    number = done.stdout.strip().partition(";")[0]
    if done.returncode or not number.isdecimal():
        raise IcomError(f"Slurm did not take the job: {_cleaned(done.stderr or done.stdout)}.")
    return number


def look_up(number: str) -> list[Job]:
    """The job, or the tasks of its array that Slurm has begun or split off; empty when it has forgotten it.

    Raises:
        IcomError: the controller does not answer.
    """
    done = _ask("scontrol", "--oneliner", "show", "job", number)
    if done.returncode:
        if "Invalid job id" in done.stderr:
            return []
        raise IcomError(f"Slurm does not answer: {_cleaned(done.stderr)}.")
    return [_read(line) for line in done.stdout.splitlines() if line.startswith("JobId=")]


def cpus_of_smallest_node(partition: str | None) -> int | None:
    """CPUs (as Slurm counts them) of the smallest node in a partition, or in the default one; None: it did not say."""
    words = ["--partition", partition] if partition else []
    done = _ask("sinfo", "--noheader", "--Node", "--format", "%R %P %c", *words)
    rows = [line.split() for line in done.stdout.splitlines()]
    # The default one is marked by a star.
    cpus = [int(row[2]) for row in rows if len(row) == 3 and row[2].isdecimal() and (partition or row[1][-1] == "*")]
    return min(cpus, default=None)


def _what_there_is(refusal: str) -> str:
    """The partitions, where the refusal is about them."""
    if not any(word in refusal.lower() for word in ("partition", "node", "time limit")):
        return ""
    done = _ask("sinfo", "--noheader", "--format", "%R (%D nodes of %c CPUs, up to %l)")
    there = ", ".join(done.stdout.split("\n")).strip(", ")
    return f" There are the partitions {there}." if there else ""


def _read(line: str) -> Job:
    # Values may hold spaces; those that are read here do not.
    values = dict(word.partition("=")[::2] for word in line.split())
    code, _, signal = values.get("ExitCode", "0:0").partition(":")
    return Job(
        state=values.get("JobState", ""),
        reason=values.get("Reason", ""),
        code=128 + int(signal) if signal.isdecimal() and int(signal) else int(code),
        task=int(task) if (task := values.get("ArrayTaskId", "")).isdecimal() else None,
    )


def _ask(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, check=False, text=True, errors="replace", timeout=_SECONDS)
    except FileNotFoundError:
        raise IcomError(f"There is no `{words[0]}` here, which comes with Slurm.") from None
    except subprocess.TimeoutExpired:
        raise IcomError(f"`{words[0]}` does not answer within {_SECONDS} s. Is Slurm's controller up? sinfo") from None


def _cleaned(said: str) -> str:
    """Without the program's name before each line."""
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in said.splitlines()]
    return "; ".join(line.rstrip(".") for line in lines if line) or "it does not say why"
