"""Errors that a user can act on.

Each carries a message that says what is wrong, where, and what to do; the command line prints it without a traceback
and ends with the class's exit code. Any other exception is a bug, and keeps its traceback.
"""

import os


class IcomError(Exception):
    """The run cannot go on (exit code 1).

    Attributes:
        told: whether the user has been told already, by this process or by another one of the run.
    """

    exit_code = 1
    told = False


class UsageError(IcomError):
    """The command line or the configuration is wrong; nothing was started (exit code 2)."""

    exit_code = 2


class TemporaryFailure(IcomError):
    """Something that the run needs is gone and may come back (exit code 75): schedulers start the run again."""

    exit_code = os.EX_TEMPFAIL


class Stopped(IcomError):
    """A signal ended the run after it saved what it had (exit code 128 + signal: 130 for Ctrl-C, 143 for SIGTERM)."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number
