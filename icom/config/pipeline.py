"""The options of `icom data pipeline`: a file with a section for each stage."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import tyro

from icom.config.common import check_at_least_one
from icom.config.data import DataIndexConfig
from icom.config.finetune import FinetuneConfig, load_finetune_config
from icom.config.launch import LaunchSlurmConfig
from icom.config.loading import literal, merge, read_yaml, required
from icom.config.precompute import PrecomputeConfig, load_precompute_config
from icom.config.shards import DownloadConfig, ReorganiseConfig
from icom.errors import UsageError

StageName = Literal["download", "reorganise", "index", "precompute", "train"]
STAGES: tuple[StageName, ...] = get_args(StageName)
"""In their order."""
StageOptions = DownloadConfig | ReorganiseConfig | DataIndexConfig | PrecomputeConfig | FinetuneConfig
LauncherName = Literal["here", "slurm"]
Section = tyro.conf.Fixed[dict[str, Any]]
"""What the file says of a stage; empty where it says nothing."""


@dataclass(kw_only=True)
class PipelineConfig:
    """From a list of pictures' addresses to a trained model, in stages that a file describes (docs/pipeline.md).

    Given again it goes on where it ended. Example: icom data pipeline laion.yaml   (or laion.yaml precompute.parts=8)
    """

    file: tyro.conf.Positional[str]
    """YAML file with output_dir and a section for each stage: download, reorganise, index, precompute, train. Words
    such as train.max_train_steps=100 give single options."""
    output_dir: str = required("laion")
    """Folder for all that the stages make, each in a folder of its own, and for the state."""
    launcher: LauncherName = "here"
    """`here`: one part after another in this process. `slurm`: a job array for each stage, which waits for the one
    before."""
    slurm: tyro.conf.Fixed[dict[str, Any]] = field(default_factory=dict)
    """Options of `icom launch slurm` for all stages' jobs; `slurm` in a section comes on top of them."""
    download: Section = field(default_factory=dict)
    """Options of `icom data download`."""
    reorganise: Section = field(default_factory=dict)
    """Options of `icom data reorganise`."""
    index: Section = field(default_factory=dict)
    """Options of `icom data index`."""
    precompute: Section = field(default_factory=dict)
    """Options of `icom data precompute`."""
    train: Section = field(default_factory=dict)
    """Options of `icom finetune`."""
    stage: StageName | None = None
    """Do one part of this stage alone; needs --part."""
    part: int | None = None
    """Number of that part, from 1."""
    state: bool = False
    """Print which parts are whole, and stop."""
    dry_run: bool = False
    """Print what would be done (commands, and with Slurm the scripts), and stop."""

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            UsageError: names the option.
        """
        if (self.stage is None) != (self.part is None):
            raise UsageError("--stage and --part belong together: --stage download --part 3.")
        if not any(getattr(self, name) for name in STAGES):
            raise UsageError(f"{self.file} has no stage. Give it a section {', '.join(STAGES[:-1])} or {STAGES[-1]}.")


@dataclass(kw_only=True)
class _Own:
    """What a section says beside the options of its command."""

    run: bool = True
    parts: int = 1
    redo: str | None = None
    slurm: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """A stage, checked.

    Attributes:
        name: of the stage.
        run: whether it is done now; else all of it has to be there for those after it.
        parts: how many it is done in.
        redo: parts that are done again, from 1.
        needs: the stage whose result it reads; None: nothing of this pipeline.
        given: options of its command that were chosen, by its section or by the stages before it.
        options: all of them.
        launcher: what starts it.
        slurm: of its jobs.
        at_once: how many parts may run together under Slurm; None: all.
    """

    name: StageName
    run: bool
    parts: int
    redo: tuple[int, ...]
    needs: StageName | None
    given: Mapping[str, Any]
    options: StageOptions
    launcher: LauncherName
    slurm: LaunchSlurmConfig
    at_once: int | None

    @property
    def all_again(self) -> bool:
        """Whether nothing that it has made is kept."""
        return len(self.redo) == self.parts


_LOADERS: dict[StageName, Callable[[Mapping[str, Any]], StageOptions]] = {
    "download": lambda section: merge(DownloadConfig, [literal(dict(section))], None),
    "reorganise": lambda section: merge(ReorganiseConfig, [literal(dict(section))], None),
    "index": lambda section: merge(DataIndexConfig, [literal(dict(section))], None),
    "precompute": load_precompute_config,
    "train": load_finetune_config,
}
_IN_PARTS = ("download", "reorganise", "precompute")
_NOT_OF_JOBS = ("training_options", "array", "dry_run", "wait")
"""Options of `icom launch slurm` that a pipeline has no use for."""


def load_pipeline_config(flags: Mapping[str, Any]) -> PipelineConfig:
    """Lay the flags that were given over the file.

    Raises:
        UsageError: unreadable file, unknown key, wrong type, missing value.
    """
    path = flags["file"]
    content = {name: value or {"run": True} if name in STAGES else value for name, value in read_yaml(path).items()}
    return merge(PipelineConfig, [content, literal(dict(flags))], path)


def stages_of(config: PipelineConfig) -> dict[StageName, Stage]:
    """The stages that the file has, in their order. Each reads what the one before it makes, unless it names a source.

    Raises:
        UsageError: names stage and option.
    """
    stages: dict[StageName, Stage] = {}
    made, by, index = None, None, None  # where the data are, which stage made them, and their index
    for name in STAGES:
        section = getattr(config, name)
        if not section:
            continue
        try:
            source = "source" if name in ("download", "reorganise", "index") else "train_data_dir"
            wired = {source: made} if made is not None and name != "download" else {}
            if source not in section and source not in wired:
                raise UsageError(f"no stage before it says what it reads. Give it {source}.")
            if name in ("precompute", "train") and index is not None:
                wired["index"] = index
            if name != "index":
                wired["output_dir"] = f"{config.output_dir.rstrip('/')}/{name}"
            if name == "train":
                wired["resume_from_checkpoint"] = "latest"
            stage = _stage(name, config, section, wired, by if source not in section else None)
        except UsageError as error:
            raise UsageError(f"{config.file}, {name}: {error}") from None
        stages[name] = stage
        by, options = name, stage.options
        if isinstance(options, DataIndexConfig):
            made, index = options.source, options.output
        else:
            made, index = options.output_dir, None
    return stages


def _stage(
    name: StageName, config: PipelineConfig, section: Mapping[str, Any], wired: Mapping[str, Any], by: StageName | None
) -> Stage:
    names = [f.name for f in dataclasses.fields(_Own) if f.name != "parts" or name in _IN_PARTS]
    own = merge(_Own, [{key: literal(value) for key, value in section.items() if key in names}], None)
    check_at_least_one(parts=own.parts)
    if "part" in section:
        raise UsageError("`part` is what the pipeline gives; `parts` says how many, and `redo` which ones again.")
    given = {**wired, **{key: value for key, value in section.items() if key not in names}}
    redo = () if own.redo is None else parse_numbers(own.redo, own.parts)
    if redo and not own.run:
        raise UsageError(f"redo is {own.redo}, and run is false: which of the two?")
    both = {**config.slurm, **own.slurm}
    for key in _NOT_OF_JOBS:
        if key in both:
            raise UsageError(f"slurm.{key} is not for pipelines.")
    if name != "train" and (wrong := [key for key in ("nodes", "ppn") if key in both]):
        raise UsageError(f"slurm.{wrong[0]} is for training alone: write it in the section train.")
    at_once = both.pop("at_once", None)
    if at_once is not None and not (isinstance(at_once, int) and at_once > 0):
        raise UsageError(f"slurm.at_once has to be a number of parts, not {at_once!r}.")
    jobs = merge(LaunchSlurmConfig, [{"nodes": 1}, literal(both)], None)
    return Stage(name, own.run, own.parts, redo, by, given, _LOADERS[name](given), config.launcher, jobs, at_once)


def parse_numbers(text: str, parts: int) -> tuple[int, ...]:
    """Parts that a text such as "3-5,8" or "all" names, in order.

    Raises:
        UsageError: it names none, or one that there is not.
    """
    if text == "all":
        return tuple(range(1, parts + 1))
    numbers: set[int] = set()
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", word, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not match or first > last:
            raise UsageError(f'redo: {text!r} names no parts. Write them as in "3-5,8", or "all".')
        if first < 1 or last > parts:
            raise UsageError(f"redo: {text!r} is out of range: there are parts 1 to {parts}.")
        numbers |= set(range(first, last + 1))
    return tuple(sorted(numbers))


def to_numbers(parts: list[int]) -> str:
    """What `parse_numbers` reads: 1, 2, 3, 8 is 1-3,8."""
    runs: list[list[int]] = []
    for part in parts:
        if runs and part == runs[-1][-1] + 1:
            runs[-1].append(part)
        else:
            runs.append([part])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def to_yaml(config: PipelineConfig, stages: Mapping[StageName, Stage]) -> str:
    """A file that says the same, with all of it settled, and without what is to be done again."""
    from omegaconf import OmegaConf

    content: dict[str, Any] = {"output_dir": config.output_dir, "launcher": config.launcher, "slurm": config.slurm}
    for name in stages:
        content[name] = {key: value for key, value in getattr(config, name).items() if key != "redo"}
    return OmegaConf.to_yaml(OmegaConf.create(literal(content)))
