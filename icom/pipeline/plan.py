"""What there is to do: parts that are not whole, and parts that are done again, whose results go first."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from icom.config.data import DataIndexConfig
from icom.config.pipeline import PipelineConfig, Stage, StageName, load_pipeline_config, stages_of, to_numbers
from icom.data.claims import DOWNLOADED, REORGANISED
from icom.data.index import NAME
from icom.data.shards import common_root
from icom.errors import IcomError, UsageError
from icom.pipeline.marks import NOT_BEGUN, not_whole, parts_in, read_marks, remove_mark

FILE = "pipeline.yaml"
"""What is in the folder of a pipeline was made by this."""
COMMANDS: dict[StageName, str] = {
    "download": "data download",
    "reorganise": "data reorganise",
    "index": "data index",
    "precompute": "data precompute",
    "train": "finetune",
}
"""Stage -> the command whose options its section has."""
_FREE = {
    *("threads", "timeout", "retries", "user_agent", "max_failed_share", "allow_private_addresses", "workers"),
    *("max_damaged_share", "shard_cache_gb", "cache_dir", "batch_size", "dataloader_num_workers", "backend", "config"),
}
"""Options that may change between parts: what they make stays the same."""
_SIGNS = {
    "download": DOWNLOADED,
    "reorganise": REORGANISED,
    "precompute": "icom-latents.safetensors",
    "train": "config.yaml",
}
"""Stage -> a file that every folder has that it has begun to write."""

_PATIENCE = 60.0
"""Seconds for which NFS may show what was."""

Plan = dict[StageName, list[int]]
"""Stages that are done now -> their parts; none of them is empty."""


def plan(config: PipelineConfig, stages: Mapping[StageName, Stage], root: Path) -> Plan:
    """What is to be done, in order.

    Raises:
        UsageError: the folder is another pipeline's, something that is needed is switched off and not there, or parts
            are done again from which others were made.
    """
    _refuse_others(config, stages, root)
    made: Plan = {}
    for name, stage in stages.items():
        if not stage.run:
            continue
        before = stages.get(stage.needs) if stage.needs else None
        if parts := sorted({*not_whole(root, stage), *stage.redo}):
            if before and not before.run and (lacking := not_whole(root, before)):
                raise UsageError(
                    f"{name} reads what {before.name} makes, which is switched off ({before.name}.run=false), and not "
                    f"whole: {_of(before, lacking)}. Switch it on, or name what {name} reads in its section."
                )
            made[name] = parts
            _refuse_what_follows(stages, stage, parts, root)
    return made


def _refuse_others(config: PipelineConfig, stages: Mapping[StageName, Stage], root: Path) -> None:
    """Refuse to go on in a folder where something else was begun."""
    if not (root / FILE).exists():
        return
    earlier = stages_of(load_pipeline_config({"file": str(root / FILE)}))
    for name, stage in stages.items():
        then = earlier.get(name)
        if name == "train" or then is None or stage.all_again or not _is_begun(root, then):
            continue  # a training compares by itself
        mine, theirs = _decides(stage), _decides(then)
        for key in mine:
            if mine[key] != theirs.get(key):
                raise UsageError(
                    f"{root} was begun with another {name}.{key} ({theirs.get(key)!r}) than that of {config.file} "
                    f"({mine[key]!r}). Choose another output_dir, or do it all again: {name}.redo=all."
                )


def _refuse_what_follows(stages: Mapping[StageName, Stage], stage: Stage, parts: list[int], root: Path) -> None:
    """Refuse to change what others were made from, unless they are made again."""
    names = list(stages)
    later = [stages[name] for name in names[names.index(stage.name) + 1 :]]
    old = [one.name for one in later if not one.all_again and _is_begun(root, one) and _reads(stages, one, stage)]
    if old:
        words = " ".join(f"{name}.redo=all" for name in old)
        raise UsageError(
            f"{_of(stage, parts)} to be done, but {', '.join(old)}: made from what was there before. Do all of it "
            f"again (what is there is removed): {words}. Or choose another output_dir."
        )


def _reads(stages: Mapping[StageName, Stage], stage: Stage, other: Stage) -> bool:
    """Whether a stage's data come from another's, by however many steps."""
    while stage.needs is not None:
        stage = stages[stage.needs]
        if stage is other:
            return True
    return False


def _is_begun(root: Path, stage: Stage) -> bool:
    return len(parts_in(read_marks(root, stage), NOT_BEGUN)) < stage.parts


def _decides(stage: Stage) -> dict[str, object]:
    """What a stage's result depends on, beside what it reads."""
    return {"parts": stage.parts} | {
        name: value for name, value in dataclasses.asdict(stage.options).items() if name not in _FREE
    }


def _of(stage: Stage, parts: list[int]) -> str:
    """Parts, for people: "parts 3-5 of 8 of download"."""
    if stage.parts == 1:
        return stage.name
    return f"{'part' if len(parts) == 1 else 'parts'} {to_numbers(parts)} of {stage.parts} of {stage.name}"


def need_whole(stages: Mapping[StageName, Stage], stage: Stage, root: Path) -> None:
    """See that all is there of what a stage reads. Under Slurm the marks may come late: NFS keeps what it knew.

    Raises:
        IcomError: it is not.
    """
    if stage.needs is None:
        return
    before = stages[stage.needs]
    deadline = time.monotonic() + (_PATIENCE if stage.launcher == "slurm" else 0)
    while lacking := not_whole(root, before):
        if time.monotonic() >= deadline:
            raise IcomError(f"Not whole: {_of(before, lacking)}, and {stage.name} reads it.")
        time.sleep(1)


def clear(stage: Stage, root: Path) -> None:
    """Remove what the parts have made that are done again: their marks first.

    Raises:
        IcomError: a folder is not what the stage writes to.
    """
    if not stage.redo:
        return
    options = stage.options
    if isinstance(options, DataIndexConfig):
        remove_mark(root, stage, 1)
        Path(options.output or Path(common_root(options.source), NAME)).expanduser().unlink(missing_ok=True)
        return
    folder = Path(options.output_dir).expanduser()
    if folder.exists() and any(folder.iterdir()) and not (folder / _SIGNS[stage.name]).is_file():
        raise IcomError(f"{folder} was not made by `icom {COMMANDS[stage.name]}`: see what is in it, and remove it.")
    for part in stage.redo:
        remove_mark(root, stage, part)
    if stage.all_again:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.iterdir() if folder.exists() else ():
        if path.is_file() and _part_of(path, stage) in stage.redo:
            path.unlink()


def _part_of(path: Path, stage: Stage) -> int | None:
    """The part that makes a file."""
    number, _, rest = path.stem.partition("-")
    if not number.isdecimal() or bool(rest) != (stage.name == "reorganise"):
        return None
    return int(number) if rest else int(number) % stage.parts + 1


def command_of(stage: Stage, part: int) -> list[str]:
    """What a part does, as words after `icom`."""
    words = COMMANDS[stage.name].split()
    given = dict(stage.given)
    if "source" in given:
        words.append(str(given.pop("source")))
    for name, value in given.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        elif isinstance(value, dict):
            words += [f"{name}.{key}={inner}" for key, inner in value.items()]
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        else:
            words += [f"--{name}", str(value)]
    if stage.parts > 1:
        words += ["--part", f"{part}/{stage.parts}"]
    return words


def show(plan: Plan, stages: Mapping[StageName, Stage]) -> str:
    """The commands, for --dry_run."""
    lines = [shlex.join(["icom", *command_of(stages[name], part)]) for name, parts in plan.items() for part in parts]
    return "\n".join(lines)
