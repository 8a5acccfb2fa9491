"""Checkpoints: everything from which a run goes on bit-exactly, in safetensors and JSON.

A checkpoint is a folder `checkpoint-N` with `state.safetensors` (parameters, the optimizer's state) and `state.json`.
It is written under a temporary name, synced and renamed, and renamed before it is deleted: a folder of that name is
complete, whenever the process is killed.
"""

from __future__ import annotations

import functools
import itertools
import json
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from icom.errors import IcomError
from icom.files import ASIDE, file_digest, put_in_place, write_atomically, write_error, write_tensors

_TENSORS, _STATE = "state.safetensors", "state.json"
_PARAMETER, _OPTIMIZER, _MEAN = "parameter/", "optimizer/", "mean/"
"""Begin the names of tensors."""
_TEMPORARY = ".tmp"
"""Ends the name of a folder that is not complete yet, or no longer wanted."""
VALIDATION = "validation"
"""The folder of validation pictures in --output_dir."""


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
    """

    step: int
    next_sample: int
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)
    mean: dict[str, torch.Tensor] = field(default_factory=dict)
    mean_updates: int = 0


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
    document = to_document(state, identity) | {"config": settings, "versions": versions()}
    target = output / f"checkpoint-{state.step}"
    temporary = target.with_name(f".{target.name}{_TEMPORARY}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write_tensors(temporary / _TENSORS, to_tensors(state))
        document["sha256"] = file_digest(temporary / _TENSORS)
        write_atomically(temporary / _STATE, json.dumps(document, indent=1).encode())
        put_in_place(temporary, target)
    except OSError as error:
        mend_checkpoints(output)
        raise write_error(target, error) from error
    shutil.rmtree(temporary, ignore_errors=True)  # what the target was before
    return target


def mend_checkpoints(output: Path) -> None:
    """Finish what a process did not come to that was killed while it saved or deleted; no run may be writing.

    Raises nothing: what cannot be mended is in nobody's way.
    """
    with suppress(OSError):
        for aside in output.glob(f".checkpoint-*{ASIDE}"):
            target = aside.with_name(aside.name[1:].removesuffix(ASIDE))
            if target.exists():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                aside.rename(target)
    for rest in output.glob(f".checkpoint-*{_TEMPORARY}"):
        shutil.rmtree(rest, ignore_errors=True)


def delete_old_checkpoints(output: Path, keep: int, step: int) -> None:
    """Delete all but the `keep` newest checkpoints and that of `step` (newer ones may lie there from before)."""
    for old in list_checkpoints(output)[:-keep]:
        if old.name != f"checkpoint-{step}":
            rest = old.with_name(f".{old.name}{_TEMPORARY}")
            with suppress(OSError):
                old.rename(rest)
                shutil.rmtree(rest, ignore_errors=True)


def list_checkpoints(output: Path) -> list[Path]:
    """Checkpoints of a run in order of step."""
    found = [
        path
        for path in output.glob("checkpoint-*")
        if path.is_dir() and path.name.removeprefix("checkpoint-").isdigit()
    ]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def find_checkpoint(output: Path, wanted: str) -> Path | None:
    """The folder that --resume_from_checkpoint names; None for `latest` where there is none.

    Args:
        output: --output_dir.
        wanted: `latest` (the newest that is complete), a folder, or the name of a checkpoint in `output`.

    Raises:
        IcomError: no such folder, or none that is complete.
    """
    if wanted == "latest":
        return _latest(output)
    for candidate in (Path(wanted).expanduser(), output / wanted):
        if candidate.is_dir():
            return candidate
    there = ", ".join(path.name for path in list_checkpoints(output)) or "none"
    raise IcomError(
        f"No such checkpoint: {wanted}. In {output}: {there}. Name another one or `latest`, or drop "
        "--resume_from_checkpoint to start anew."
    )


def _latest(output: Path) -> Path | None:
    """The newest complete checkpoint, with word of those that it passes over; None where there are none at all.

    Raises:
        IcomError: there are some, and none is complete.
    """
    there = list_checkpoints(output)
    for folder in reversed(there):
        lacking = _lacking(folder)
        if not lacking:
            return folder
        what = "is a checkpoint of Accelerate" if _is_accelerates(folder) else f"is not complete (no {lacking})"
        print(f"icom: passing over {folder}: it {what}.", file=sys.stderr)
    if there and _is_accelerates(there[-1]):
        raise _cannot_continue(there[-1])
    if there:
        raise IcomError(f"No checkpoint in {output} is complete. Drop --resume_from_checkpoint to start anew.")
    return None


def _lacking(folder: Path) -> str:
    """What a folder lacks to be a complete checkpoint; empty if nothing."""
    return " and no ".join(name for name in (_TENSORS, _STATE) if not (folder / name).is_file())


def _is_accelerates(folder: Path) -> bool:
    """Whether it is what `accelerator.save_state` writes, in diffusers' scripts for instance."""
    theirs = ("optimizer.bin", "scheduler.bin", "random_states_0.pkl", "model.safetensors", "pytorch_model.bin")
    return not (folder / _STATE).exists() and any((folder / name).exists() for name in theirs)


def _cannot_continue(folder: Path) -> IcomError:
    """What to do about a checkpoint of Accelerate's: the rows are in an embedding file beside it."""
    beside = (f"learned_embeds-steps-{_step_of(folder)}", "learned_embeds")
    files = [folder.parent / f"{stem}{kind}" for stem in beside for kind in (".safetensors", ".bin")]
    file = next((path for path in files if path.is_file()), None)
    advice = "There is no learned_embeds-steps-N.safetensors of that step beside it to start from."
    if file:
        words = ["--initial_embedding", str(file), "--output_dir", f"{folder.parent}-icom"]
        advice = f"Start a new run from what it had learned, without --resume_from_checkpoint: {shlex.join(words)}"
    return IcomError(
        f"{folder} is a checkpoint of Accelerate, as diffusers' textual_inversion.py writes them: the whole text "
        f"encoder and optimizer, in pickles, where icom keeps the rows alone. icom cannot go on from it. {advice}"
    )


def load_checkpoint(folder: Path) -> tuple[State, Identity]:
    """Read a checkpoint and prove that it is whole.

    Raises:
        IcomError: a file is missing, truncated or altered, or it is another tool's; says what to use instead.
    """
    if _is_accelerates(folder):
        raise _cannot_continue(folder)
    try:
        document = json.loads((folder / _STATE).read_text())
        if file_digest(folder / _TENSORS) != document["sha256"]:
            raise ValueError(f"{_TENSORS} was altered or cut")
        return from_parts(load_file(folder / _TENSORS), document)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        others = [path for path in list_checkpoints(folder.parent) if path.name != folder.name and not _lacking(path)]
        advice = f"Use --resume_from_checkpoint {others[-1].name}" if others else "Start without resuming"
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise IcomError(f"The checkpoint {folder} is damaged ({what}). {advice}.") from error


def settings_of(folder: Path) -> dict[str, Any]:
    """The configuration of the run that wrote a checkpoint.

    Raises:
        IcomError: the checkpoint is damaged.
    """
    load_checkpoint(folder)
    settings: dict[str, Any] = json.loads((folder / _STATE).read_text())["config"]
    return settings


def to_tensors(state: State) -> dict[str, torch.Tensor]:
    """The large part of a checkpoint."""
    kept = {f"{_PARAMETER}{name}": tensor for name, tensor in state.parameters.items()}
    for name, of_parameter in state.optimizer.items():
        kept |= {f"{_OPTIMIZER}{name}/{what}": tensor for what, tensor in of_parameter.items()}
    return kept | {f"{_MEAN}{name}": tensor for name, tensor in state.mean.items()}


def to_document(state: State, identity: Identity) -> dict[str, Any]:
    """The small part of a checkpoint, for JSON."""
    small = {"step": state.step, "next_sample": state.next_sample, "choices": state.choices}
    if state.mean_updates:
        small["mean_updates"] = state.mean_updates
    return small | {"identity": asdict(identity)}


def from_parts(tensors: Mapping[str, torch.Tensor], document: Mapping[str, Any]) -> tuple[State, Identity]:
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
        if key.startswith(_PARAMETER):
            parameters[key.removeprefix(_PARAMETER)] = tensor
        elif key.startswith(_OPTIMIZER):
            name, _, what = key.removeprefix(_OPTIMIZER).rpartition("/")
            optimizer.setdefault(name, {})[what] = tensor
    mean = {key.removeprefix(_MEAN): tensor for key, tensor in tensors.items() if key.startswith(_MEAN)}
    state = State(
        *(document["step"], document["next_sample"], parameters, optimizer, document["choices"]),
        *(mean, document.get("mean_updates", 0)),
    )
    return state, Identity(**document["identity"])


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


def set_aside(output: Path, step: int = 0) -> None:
    """Move what another run left away, so that two runs never mix; nothing is deleted.

    Args:
        output: --output_dir.
        step: the run goes on after it: embeddings and validation pictures up to there are its own, and so are all
            checkpoints. 0: a new run, to which nothing belongs.
    """
    embeddings, validation = "learned_embeds-steps-*.safetensors", f"{VALIDATION}/step-*.png"
    groups = {
        "checkpoint(s)": [] if step else list_checkpoints(output),
        "embedding(s)": [path for path in output.glob(embeddings) if _step_of(path) > step],
        "validation picture(s)": [path for path in output.glob(validation) if _step_of(path) > step],
    }
    if not any(groups.values()):
        return
    folder = output / "earlier" / time.strftime("%Y%m%d-%H%M%S")
    try:
        for path in itertools.chain(*groups.values()):
            target = folder / path.relative_to(output)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
    except OSError as error:
        raise write_error(folder, error) from error
    moved = " and ".join(f"{len(paths)} {what}" for what, paths in groups.items() if paths)
    if step:
        print(f"icom: moved {moved} of steps after {step}, which are done again, to {folder}.", file=sys.stderr)
    else:
        print(
            f"icom: moved {moved} of an earlier run to {folder} (to continue such a run: --resume_from_checkpoint "
            "latest).",
            file=sys.stderr,
        )


def _step_of(path: Path) -> int:
    """N of checkpoint-N, learned_embeds-steps-N.safetensors and step-N.png; 0 if it is none of a run's."""
    number = path.stem.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


@functools.cache
def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    from importlib.metadata import version

    packages = ("icom", "torch", "diffusers", "transformers", "accelerate", "numpy")
    return {package: version(package) for package in packages}
