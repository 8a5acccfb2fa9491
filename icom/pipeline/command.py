"""`icom data pipeline`: what there is to do, here or as Slurm's jobs, and what is whole."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from icom.config.data import DataIndexConfig
from icom.config.finetune import FinetuneConfig
from icom.config.pipeline import PipelineConfig, Stage, StageName, parse_numbers, stages_of, to_numbers, to_yaml
from icom.config.precompute import PrecomputeConfig
from icom.config.shards import DownloadConfig, ReorganiseConfig
from icom.errors import IcomError, Stopped, UsageError
from icom.files import make_writable_folder, write_atomically
from icom.names import plain
from icom.pipeline import jobs
from icom.pipeline.marks import FAILED, STATES, UNFINISHED, WHOLE, parts_in, read_marks, write_mark
from icom.pipeline.plan import FILE, Plan, clear, need_whole, plan, show
from icom.training.lock import only_run_in


def pipeline(config: PipelineConfig) -> None:
    """Do what is not whole yet, or submit it, or say what is.

    Raises:
        UsageError: the file, or what it asks for, cannot work.
        IcomError: a part failed, or Slurm did not take a job.
        Stopped: a signal came; what is whole stays.
    """
    stages = stages_of(config)
    root = Path(config.output_dir).expanduser()
    if config.state:
        show_state(root, stages)
        return
    if config.stage is not None and config.part is not None:
        _one_part(config.stage, config.part, stages, root)
        return
    todo = plan(config, stages, root)
    if not todo:
        print("icom: all stages are whole: nothing to do.")
        return
    if config.dry_run:
        print(jobs.show(stages, todo, root) if config.launcher == "slurm" else show(todo, stages))
        return
    make_writable_folder(root)
    with only_run_in(root):
        if config.launcher == "slurm":
            jobs.need_none_queued(root)
        for name in reversed(todo):
            clear(stages[name], root)
        write_atomically(root / FILE, to_yaml(config, stages).encode(), "output_dir")
        if config.launcher == "slurm":
            jobs.submit(config, stages, todo, root)
        else:
            _here(stages, todo, root)


def _here(stages: Mapping[StageName, Stage], todo: Plan, root: Path) -> None:
    """One part after another."""
    for name, parts in todo.items():
        for part in parts:
            run_part(stages[name], part, root)
    print()
    show_state(root, stages)


def _one_part(name: StageName, part: int, stages: Mapping[StageName, Stage], root: Path) -> None:
    """What one of many beside each other does."""
    if name not in stages:
        raise UsageError(f"--stage {name}: the file has no such section.")
    stage = stages[name]
    parse_numbers(str(part), stage.parts)
    need_whole(stages, stage, root)
    make_writable_folder(root)
    run_part(stage, part, root)


def run_part(stage: Stage, part: int, root: Path) -> None:
    """Do a part; its mark says that it is begun, and then how it ended.

    Raises:
        IcomError: it failed.
        Stopped: a signal came.
    """
    what = f"{stage.name}, part {part} of {stage.parts}" if stage.parts > 1 else stage.name
    print(f"icom: {what}", flush=True)
    if isinstance(stage.options, FinetuneConfig):
        from icom.training.finetune import finetune

        finetune(stage.options)  # its folder has its state
        return
    write_mark(root, stage, part, UNFINISHED)
    try:
        _do(stage, f"{part}/{stage.parts}")
    except Stopped:
        raise
    except IcomError as error:
        write_mark(root, stage, part, FAILED, str(error))
        print(f"icom: failed: {what}", file=sys.stderr)
        raise
    write_mark(root, stage, part, WHOLE)


def _do(stage: Stage, part: str) -> None:
    """The stage's command."""
    options = stage.options
    if isinstance(options, DownloadConfig):
        from icom.data.download import download

        download(replace(options, part=part))
    elif isinstance(options, ReorganiseConfig):
        from icom.data.reorganise import reorganise

        reorganise(replace(options, part=part))
    elif isinstance(options, DataIndexConfig):
        from icom.commands.data import index

        index(options)
    elif isinstance(options, PrecomputeConfig):
        from icom.data.precompute import precompute

        precompute(replace(options, part=part))


def show_state(root: Path, stages: Mapping[StageName, Stage]) -> None:
    """A table of the parts in each state, and how the failed ones failed."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("stage", "parts", *STATES):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    failures = []
    for name, stage in stages.items():
        marks = read_marks(root, stage)
        cells = []
        for state in STATES:
            parts = parts_in(marks, state)
            some = f" ({to_numbers(parts)})" if 0 < len(parts) < stage.parts else ""
            cells.append(f"{len(parts)}{some}" if parts else "–")
        whole = len(parts_in(marks, WHOLE)) == stage.parts
        off = "" if stage.run else " (off)"
        table.add_row(name + off, str(stage.parts), *cells, style=None if whole else "yellow")
        failures += [f"{name}, part {part}: {marks[part - 1].said}" for part in parts_in(marks, FAILED)]
    # In a file or a pipe a table is as wide as it needs to be.
    Console(highlight=False, width=None if sys.stdout.isatty() else 400).print(table)
    for failure in failures:
        print(plain(failure))
