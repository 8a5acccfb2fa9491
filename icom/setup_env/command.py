"""The command line that the Makefile uses."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence

from icom.setup_env.common import SetupError
from icom.setup_env.constraints import refresh_constraints
from icom.setup_env.downloads import download_pictures, install_conda, install_test_tools
from icom.setup_env.image import build_image, push_image
from icom.setup_env.install import ensure, run

MIN_PYTHON = (3, 10)
SIMPLE = {
    "install-conda": install_conda,
    "pictures": download_pictures,
    "constraints": refresh_constraints,
    "test-tools": install_test_tools,
    "image": build_image,
    "push": push_image,
}
"""Commands that take what they need from the environment."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line that the Makefile uses."""
    parser = argparse.ArgumentParser(prog="setup_env", description="Build and enter icom's environment.")
    commands = parser.add_subparsers(dest="command", required=True)
    setup, enter = commands.add_parser("setup"), commands.add_parser("run")
    for command in (setup, enter):
        command.add_argument("--extra", action="append", default=[], help="install this extra as well")
    enter.add_argument("words", nargs="+", help="the command to run in the environment, after --")
    for name in SIMPLE:
        commands.add_parser(name)
    options = parser.parse_args(arguments)
    env = os.environ
    try:
        # install-conda brings a newer Python with it.
        if sys.version_info < MIN_PYTHON and options.command != "install-conda":
            raise SetupError(
                f"{sys.executable} is Python {platform.python_version()}; icom needs "
                f"{'.'.join(map(str, MIN_PYTHON))} or newer: give one with PYTHON=..."
            )
        if options.command == "setup":
            ensure(env, options.extra, explain=True)
        elif options.command == "run":
            run(env, options.extra, options.words)
        else:
            SIMPLE[options.command](env)
    except SetupError as error:
        print(f"icom setup: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
