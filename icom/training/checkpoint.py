"""Checkpoints: everything from which a run goes on bit-exactly, in safetensors and JSON.

A checkpoint is a folder `checkpoint-N` with `state.safetensors` (parameters, the optimizer's state), or in place of it
a part from each process (icom/training/stored.py), and `state.json`.
It is written under a temporary name, synced and renamed, and renamed before it is deleted: a folder of that name is
complete, whenever the process is killed.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError

from icom.errors import IcomError
from icom.files import file_digest, put_in_place, write_atomically, write_error, write_tensors
from icom.training.checkpoint_folders import (
    STATE,
    TEMPORARY,
    cannot_continue,
    is_accelerates,
    lacking,
    list_checkpoints,
    mend_checkpoints,
)
from icom.training.stored import WHOLE, Stored, file_names, part_name

if TYPE_CHECKING:
    from icom.parallel.group import Group

PARAMETER, OPTIMIZER, MEAN, BEST = "parameter/", "optimizer/", "mean/", "best/"
"""Begin the names of tensors."""


@dataclass(frozen=True)
class Identity:
    """What has to be the same for a resumed run to be the same run.

    Attributes:
        seed: of the sample stream.
        model: digest of all frozen weights.
        pictures: file name -> digest.
        options: the training options that decide what a sample is.
    """

    seed: int
    model: str
    pictures: dict[str, str]
    options: dict[str, Any]


@dataclass(frozen=True)
class State:
    """A moment of a run, after optimizer step `step`.

    Attributes:
        step: optimizer steps done.
        next_sample: index into the sample stream.
        parameters: name -> what is trained.
        optimizer: name -> what the optimizer keeps of it, as torch's `state_dict` names it.
        choices: the backend's `choices` that led here.
        mean: name -> exponential mean of a parameter, where there is one.
        mean_updates: of it.
        curve: (step, validation loss) so far, where textual inversion has one.
        best: name -> a parameter at the step with the lowest loss of the curve.
    """

    step: int
    next_sample: int
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)
    mean: dict[str, torch.Tensor] = field(default_factory=dict)
    mean_updates: int = 0
    curve: list[tuple[int, float]] = field(default_factory=list)
    best: dict[str, torch.Tensor] = field(default_factory=dict)


class Saved(NamedTuple):
    """What a run goes on from.

    Attributes:
        state: where it goes on.
        identity: of the run that wrote it.
        settings: of that run.
        stored: where the state's tensors are, if it has none.
    """

    state: State
    identity: Identity
    settings: dict[str, Any]
    stored: Stored | None = None


def save_checkpoint(output: Path, state: State, identity: Identity, settings: dict[str, Any]) -> Path:
    """Write checkpoint-<step>.

    Args:
        output: --output_dir.
        state: to go on from.
        identity: compared when resuming.
        settings: the run's configuration, without secrets; kept for people.

    Raises:
        IcomError: disk full or folder not writable; earlier checkpoints are intact.
    """
    document = to_document(Saved(state, identity, settings)) | {"versions": versions()}
    with _new_folder(output, state.step) as folder:
        write_tensors(folder / WHOLE, to_tensors(state))
        document["sha256"] = file_digest(folder / WHOLE)
        write_atomically(folder / STATE, json.dumps(document, indent=1).encode())
    return output / f"checkpoint-{state.step}"


def save_part(output: Path, state: State, identity: Identity, settings: dict[str, Any], group: Group) -> None:
    """Write checkpoint-<step> together: each process its own part. It appears when all parts are there.

    Args:
        output: --output_dir, the same folder for all.
        state: this process's rows.
        identity, settings: as in `save_checkpoint`.
        group: the processes.

    Raises:
        IcomError: as `save_checkpoint`, or a process is gone.
    """
    document = to_document(Saved(state, identity, settings)) | {"versions": versions()}
    new = _new_folder(output, state.step) if group.leads else nullcontext(_temporary(output, state.step))
    with new as folder:
        group.wait_for_everyone()  # the folder is there
        file = folder / part_name(group.rank, group.size)
        try:
            write_tensors(file, to_tensors(state))
            mine = file_digest(file)
        except OSError as error:
            raise write_error(file, error) from error
        digests = group.gather(mine.encode())
        if group.leads:
            document["parts"] = {part_name(rank, group.size): said.decode() for rank, said in enumerate(digests)}
            write_atomically(folder / STATE, json.dumps(document, indent=1).encode())


@contextmanager
def _new_folder(output: Path, step: int) -> Iterator[Path]:
    """A folder to write a checkpoint into: it gets its name when all is written."""
    target, temporary = output / f"checkpoint-{step}", _temporary(output, step)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        put_in_place(temporary, target)
    except OSError as error:
        mend_checkpoints(output)
        raise write_error(target, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # what the target was before


def _temporary(output: Path, step: int) -> Path:
    return output / f".checkpoint-{step}{TEMPORARY}"


def load_checkpoint(folder: Path) -> Saved:
    """Read a checkpoint and prove that it is whole.

    Raises:
        IcomError: a file is missing, truncated or altered, or it is another tool's; says what to use instead.
    """
    if is_accelerates(folder):
        raise cannot_continue(folder)
    check_files(folder)
    with _damage_told(folder):
        return from_parts(dict(Stored(folder)), json.loads((folder / STATE).read_text()))


def load_shared(folder: Path, group: Group) -> Saved | None:
    """A checkpoint in parts, without its tensors: each process reads those that it needs. All of them call it together.

    Args:
        folder: of the checkpoint.
        group: each process proves some files to be whole.

    Returns:
        None where all is in one file.

    Raises:
        IcomError: as `load_checkpoint`, or this process does not see the folder.
    """
    if group.broadcast(b"%d" % _has_parts(folder) if group.leads else None) == b"0":
        return None
    if not group.leads and not (folder / STATE).is_file():
        raise IcomError(
            f"{group.hosts[group.rank]} (rank {group.rank}) does not see {folder}. A checkpoint in parts is read by "
            "all processes: its folder has to be on a disk that all machines share, under one name."
        )
    check_files(folder, group.rank, group.size)
    group.wait_for_everyone()
    with _damage_told(folder):
        return from_parts({}, json.loads((folder / STATE).read_text()))._replace(stored=Stored(folder))


def _has_parts(folder: Path) -> bool:
    return file_names(folder) != [WHOLE]


def check_files(folder: Path, first: int = 0, every: int = 1) -> None:
    """Prove that the files of a checkpoint are those that were written.

    Args:
        folder: of the checkpoint.
        first, every: check file `first` of them, and so on.

    Raises:
        IcomError: one is missing, truncated or altered.
    """
    with _damage_told(folder):
        document = json.loads((folder / STATE).read_text())
        digests = document["parts"] if _has_parts(folder) else {WHOLE: document["sha256"]}
        for name in sorted(digests)[first::every]:
            if file_digest(folder / name) != digests[name]:
                raise ValueError(f"{name} was altered or cut")


@contextmanager
def _damage_told(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        others = [path for path in list_checkpoints(folder.parent) if path.name != folder.name and not lacking(path)]
        advice = f"Use --resume_from_checkpoint {others[-1].name}" if others else "Start without resuming"
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise IcomError(f"The checkpoint {folder} is damaged ({what}). {advice}.") from error


def settings_of(folder: Path) -> dict[str, Any]:
    """The configuration of the run that wrote a checkpoint.

    Raises:
        IcomError: what says it is damaged.
    """
    if is_accelerates(folder):
        raise cannot_continue(folder)
    with _damage_told(folder):
        settings: dict[str, Any] = json.loads((folder / STATE).read_text())["config"]
        return settings


def to_tensors(state: State) -> dict[str, torch.Tensor]:
    """The large part of a checkpoint."""
    kept = {f"{PARAMETER}{name}": tensor for name, tensor in state.parameters.items()}
    for name, of_parameter in state.optimizer.items():
        kept |= {f"{OPTIMIZER}{name}/{what}": tensor for what, tensor in of_parameter.items()}
    kept |= {f"{MEAN}{name}": tensor for name, tensor in state.mean.items()}
    return kept | {f"{BEST}{name}": tensor for name, tensor in state.best.items()}


def to_document(saved: Saved) -> dict[str, Any]:
    """The small part of a checkpoint, for JSON."""
    state = saved.state
    small = {"step": state.step, "next_sample": state.next_sample, "choices": state.choices}
    if state.mean_updates:
        small["mean_updates"] = state.mean_updates
    if state.curve:
        small["curve"] = state.curve
    return small | {"identity": asdict(saved.identity), "config": saved.settings}


def from_parts(tensors: Mapping[str, torch.Tensor], document: Mapping[str, Any]) -> Saved:
    """What a checkpoint's parts were made of.

    Raises:
        ValueError, KeyError, TypeError: it is damaged.
    """
    parameters: dict[str, torch.Tensor] = {}
    optimizer: dict[str, dict[str, torch.Tensor]] = {}
    if "rows" in tensors:  # as icom wrote them before it knew several methods
        parameters["rows"] = tensors["rows"]
        moments = {what: tensors[what] for what in ("exp_avg", "exp_avg_sq")}
        optimizer["rows"] = {"step": torch.tensor(float(document["step"])), **moments}
    for key, tensor in tensors.items():
        if key.startswith(PARAMETER):
            parameters[key.removeprefix(PARAMETER)] = tensor
        elif key.startswith(OPTIMIZER):
            name, _, what = key.removeprefix(OPTIMIZER).rpartition("/")
            optimizer.setdefault(name, {})[what] = tensor
    mean, best = (
        {key.removeprefix(what): tensor for key, tensor in tensors.items() if key.startswith(what)}
        for what in (MEAN, BEST)
    )
    curve = [(int(step), float(loss)) for step, loss in document.get("curve", [])]
    state = State(
        *(document["step"], document["next_sample"], parameters, optimizer, document["choices"]),
        *(mean, document.get("mean_updates", 0), curve, best),
    )
    return Saved(state, Identity(**document["identity"]), document["config"])


def changes(saved: Identity, now: Identity) -> list[str]:
    """What changed between a checkpoint and this run, one phrase each."""
    found = []
    if saved.seed != now.seed:
        found.append(f"seed (checkpoint {saved.seed}, now {now.seed})")
    if saved.model != now.model:
        found.append("model (other weights or another precision)")
    if saved.pictures != now.pictures:
        names = sorted(saved.pictures.keys() | now.pictures.keys())
        changed = [name for name in names if saved.pictures.get(name) != now.pictures.get(name)]
        found.append(f"pictures ({', '.join(changed)})")
    for name in sorted(saved.options.keys() | now.options.keys()):
        before, after = saved.options.get(name), now.options.get(name)
        if before != after:
            found.append(f"{name} (checkpoint {before}, now {after})")
    return found


@functools.cache
def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    from importlib.metadata import version

    packages = ("icom", "torch", "diffusers", "transformers", "accelerate", "numpy")
    return {package: version(package) for package in packages}
