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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

from icom import __version__
from icom.config.bench import BenchConfig
from icom.config.concepts import Concepts
from icom.config.convert import ConvertConfig
from icom.config.data import DataIndexConfig
from icom.config.demo import DemoConfig
from icom.config.doctor import DoctorConfig
from icom.config.evaluate import EvaluateConfig
from icom.config.finetune import FinetuneConfig
from icom.config.generate import GenerateConfig
from icom.config.inspect import InspectConfig
from icom.config.launch import LaunchEnvConfig, LaunchKubernetesConfig, LaunchMpirunConfig, LaunchSlurmConfig
from icom.config.loading import read_flags
from icom.config.params import ParamsConfig
from icom.config.pipeline import PipelineConfig, load_pipeline_config
from icom.config.precompute import PrecomputeConfig, VerifyConfig, load_precompute_config
from icom.config.report import ReportConfig
from icom.config.shards import DownloadConfig, ReorganiseConfig
from icom.config.train import TrainConfig
from icom.config.training import RunOptions, to_yaml
from icom.config.trainings import TRAININGS
from icom.config.tune import TuneConfig, load_tune_config
from icom.errors import IcomError
from icom.files import is_full, write_error
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
    "tune": (TuneConfig, "icom.training.tune:tune"),
    "finetune": (FinetuneConfig, "icom.training.finetune:finetune"),
    "data download": (DownloadConfig, "icom.data.download:download"),
    "data reorganise": (ReorganiseConfig, "icom.data.reorganise:reorganise"),
    "data index": (DataIndexConfig, "icom.commands.data:index"),
    "data precompute": (PrecomputeConfig, "icom.data.precompute:precompute"),
    "data pipeline": (PipelineConfig, "icom.pipeline.command:pipeline"),
    "data verify": (VerifyConfig, "icom.data.precompute:verify"),
    "generate": (GenerateConfig, "icom.commands.generate:generate"),
    "evaluate": (EvaluateConfig, "icom.evaluate.command:evaluate"),
    "convert": (ConvertConfig, "icom.methods.embedding_file:convert"),
    "params": (ParamsConfig, "icom.commands.params:params"),
    "bench": (BenchConfig, "icom.bench.command:bench"),
    "doctor": (DoctorConfig, "icom.commands.doctor.command:doctor"),
    "report": (ReportConfig, "icom.commands.report:report"),
    "inspect": (InspectConfig, "icom.commands.inspect:inspect"),
    "launch mpirun": (LaunchMpirunConfig, "icom.launch.mpirun:launch_mpirun"),
    "launch slurm": (LaunchSlurmConfig, "icom.launch.slurm.command:launch_slurm"),
    "launch kubernetes": (LaunchKubernetesConfig, "icom.launch.kubernetes.command:launch_kubernetes"),
    "launch env": (LaunchEnvConfig, "icom.launch.mpirun:launch_env"),
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

FROM_FILES: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    **{training.command: training.load for training in TRAININGS},
    "tune": load_tune_config,
    "data precompute": load_precompute_config,
    "data pipeline": load_pipeline_config,
    "provision": load_provision_config,
}
"""Commands with --config -> what lays their flags over the file."""

GROUPS = {
    "data": "Get captioned pictures ready for training: what VAE and text encoder make of them, before it.",
    "launch": "Train on several machines: with mpirun, under Slurm, or in pods of Kubernetes.",
}
"""First word of the commands with two -> what they are for."""


def program(argv: Sequence[str] | None = None) -> NoReturn:
    """`main` in a process that is icom's own: what the command and the scripts start."""
    own_process()
    main(argv)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit.

    With 0 when done, 1 failed, 2 wrong usage, 75 another process lost, 130/143 stopped by a signal after saving.
    """
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
    """Parse `argv` and run its command."""
    if argv == ["--version"]:
        print(f"icom {__version__}")
        return
    config = parse(argv)
    if isinstance(config, RunOptions | Concepts | PrecomputeConfig | PipelineConfig):
        # Else every lost connection is followed by pages of C++ stack. Read when torch is first imported.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if isinstance(config, RunOptions):
        if config.print_config:
            print(to_yaml(config), end="")
            return
        if isinstance(config, TrainConfig) and config.on:
            from provisioning.train_on import train_on

            train_on(config)
            return
    if isinstance(config, Concepts) and config.common.print_config:
        print("---\n".join(to_yaml(one) for one in config.concepts), end="")
        return
    for options, target in (*COMMANDS.values(), (Concepts, "icom.training.concepts:train_concepts")):
        if type(config) is options:  # options of one command may be another's and more
            module, function = target.split(":")
            getattr(importlib.import_module(module), function)(config)


def parse(argv: list[str]) -> Any:
    """The options of the command in `argv`, checked. tyro prints help (exit 0) and usage errors (exit 2) itself.

    Raises:
        UsageError: an impossible value, or a file that cannot be read.
    """
    import tyro

    if os.environ.get("NO_COLOR"):  # no-color.org; rich heeds it, tyro does not
        tyro._experimental_options["ansi_codes"] = False
    for words in (1, 2):
        name = " ".join(argv[:words])
        if load := FROM_FILES.get(name):
            return load(read_flags(COMMANDS[name][0], argv[words:], f"icom {name}"))
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
