"""The `icom` command: parses, hands over to the module that does the work, turns errors into exit codes.

Nothing heavy is imported here: `icom --help` must not wait for torch.
"""

from __future__ import annotations

import functools
import importlib
import operator
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

from icom import __version__
from icom.config import (
    BenchConfig,
    ConvertConfig,
    DemoConfig,
    DoctorConfig,
    GenerateConfig,
    ParamsConfig,
    TrainConfig,
    load_train_config,
)
from icom.errors import IcomError
from icom.files import is_full, write_error
from icom.launch.config import LaunchEnvConfig, LaunchMpirunConfig
from icom.names import plain
from icom.signals import STOPPED, own_process, stopping_at_once
from provisioning.config import (
    BakeConfig,
    ProvisionConfig,
    PullConfig,
    PushConfig,
    RunConfig,
    SshConfig,
    StartConfig,
    StatusConfig,
    StopConfig,
    TeardownConfig,
    load_provision_config,
)

COMMANDS: dict[str, tuple[Any, str]] = {
    "demo": (DemoConfig, "icom.commands.demo:demo"),
    "train": (TrainConfig, "icom.training.train:train"),
    "generate": (GenerateConfig, "icom.commands.generate:generate"),
    "convert": (ConvertConfig, "icom.methods.embedding_file:convert"),
    "params": (ParamsConfig, "icom.commands.params:params"),
    "bench": (BenchConfig, "icom.bench.command:bench"),
    "doctor": (DoctorConfig, "icom.commands.doctor:doctor"),
    "launch mpirun": (LaunchMpirunConfig, "icom.launch.commands:launch_mpirun"),
    "launch env": (LaunchEnvConfig, "icom.launch.commands:launch_env"),
    "provision": (ProvisionConfig, "provisioning.provision:provision"),
    "bake": (BakeConfig, "provisioning.provision:bake"),
    "status": (StatusConfig, "provisioning.power:status"),
    "ssh": (SshConfig, "provisioning.remote:ssh"),
    "run": (RunConfig, "provisioning.remote:run"),
    "push": (PushConfig, "provisioning.remote:push"),
    "pull": (PullConfig, "provisioning.remote:pull"),
    "start": (StartConfig, "provisioning.power:start"),
    "stop": (StopConfig, "provisioning.power:stop"),
    "teardown": (TeardownConfig, "provisioning.teardown:teardown"),
}
"""Command -> (its options, the function that runs it)."""

GROUPS = {"launch": "Train on several machines with mpirun."}
"""First word of the commands with two -> what they are for."""


def program(argv: Sequence[str] | None = None) -> NoReturn:
    """`main` in a process that is icom's own: what the command and the scripts start."""
    own_process()
    main(argv)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit: 0 done, 1 failed, 2 wrong usage, 130/143 stopped by a signal after saving."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        with stopping_at_once():
            run(argv)
    except IcomError as error:
        if not error.told:
            print(f"icom: {plain(str(error))}", file=sys.stderr)  # what a node or a stranger said may be part of it
        sys.exit(error.exit_code)
    except BrokenPipeError:  # `icom --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes at its end
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        # A full disk strikes in libraries too: trackers, temporary files.
        if not is_full(error):
            raise
        print(f"icom: {write_error(Path(error.filename or tempfile.gettempdir()), error)}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


def run(argv: list[str]) -> None:
    """Parse `argv` and run its command. tyro prints help (exit 0) and usage errors (exit 2) itself."""
    if argv == ["--version"]:
        print(f"icom {__version__}")
        return
    config = parse(argv)
    if isinstance(config, TrainConfig):
        # Else every lost connection is followed by pages of C++ stack. Read when torch is first imported.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        config = load_train_config(config.config, config, given_options(argv))
        if config.print_config:
            from icom.config import to_yaml

            print(to_yaml(config), end="")
            return
        if config.on:
            from provisioning.train_on import train_on

            train_on(config)
            return
    if isinstance(config, ProvisionConfig):
        config = load_provision_config(config, given_options(argv, ProvisionConfig))
    for options, target in COMMANDS.values():
        if isinstance(config, options):
            module, function = target.split(":")
            getattr(importlib.import_module(module), function)(config)


def parse(argv: list[str]) -> Any:
    """The options object of the command in `argv`. Required values may still be missing: a YAML file can give them."""
    import tyro

    if os.environ.get("NO_COLOR"):  # no-color.org; rich heeds it, tyro does not
        tyro._experimental_options["ansi_codes"] = False
    # By first word: the command itself, or the union of those below it.
    commands: dict[str, Any] = {}
    for name, (options, _) in COMMANDS.items():
        first, *rest = name.split()
        command: Any = Annotated[options, tyro.conf.subcommand(*rest or [first])]
        commands[first] = commands[first] | command if first in commands else command
    for first, description in GROUPS.items():
        commands[first] = Annotated[commands[first], tyro.conf.subcommand(first, description=description)]
    return tyro.cli(
        functools.reduce(operator.or_, commands.values()),
        args=argv,
        prog="icom",
        description="Teach Stable Diffusion a new word from a handful of pictures, on CPUs.\n\n"
        "Try it without a download: icom demo",
        use_underscores=True,
    )


def given_options(argv: Sequence[str], options: Any = TrainConfig) -> list[str]:
    """Names of the options that stand in `argv`, whichever spelling (--a_b, --a-b, --no_a, --a=1)."""
    names = {f.name for f in fields(options)}
    given = []
    for word in argv:
        name = word.removeprefix("--").split("=")[0].replace("-", "_")
        if word.startswith("--"):
            given += [name for name in (name, name.removeprefix("no_")) if name in names][:1]
    return given
