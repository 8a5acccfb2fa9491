"""The folders of checkpoints in --output_dir: which there are, which to go on from, which to delete or move away."""

from __future__ import annotations

import itertools
import shlex
import shutil
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from icom.errors import IcomError
from icom.files import ASIDE, write_error
from icom.training.stored import file_names

STATE = "state.json"
"""In a checkpoint: all of it that is small."""
TEMPORARY = ".tmp"
"""Ends the name of a folder that is not complete yet, or no longer wanted."""
VALIDATION = "validation"
"""The folder of validation pictures in --output_dir."""
SAMPLES = "samples"
"""The folder of pictures of --sample_prompts there."""
PIPELINE = "current_pipeline"
"""The folder of the pipeline with the trained UNet there."""


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
    for rest in output.glob(f".checkpoint-*{TEMPORARY}"):
        shutil.rmtree(rest, ignore_errors=True)


def delete_old_checkpoints(output: Path, keep: int, step: int) -> None:
    """Delete all but the `keep` newest checkpoints and that of `step` (newer ones may lie there from before)."""
    for old in list_checkpoints(output)[:-keep]:
        if old.name != f"checkpoint-{step}":
            rest = old.with_name(f".{old.name}{TEMPORARY}")
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
        missing = lacking(folder)
        if not missing:
            return folder
        what = "is a checkpoint of Accelerate" if is_accelerates(folder) else f"is not complete (no {missing})"
        print(f"icom: passing over {folder}: it {what}.", file=sys.stderr)
    if there and is_accelerates(there[-1]):
        raise cannot_continue(there[-1])
    if there:
        raise IcomError(f"No checkpoint in {output} is complete. Drop --resume_from_checkpoint to start anew.")
    return None


def lacking(folder: Path) -> str:
    """What a folder lacks to be a complete checkpoint; empty if nothing."""
    return " and no ".join(name for name in (*file_names(folder), STATE) if not (folder / name).is_file())


def is_accelerates(folder: Path) -> bool:
    """Whether it is what `accelerator.save_state` writes, in diffusers' scripts for instance."""
    theirs = ("optimizer.bin", "scheduler.bin", "random_states_0.pkl", "model.safetensors", "pytorch_model.bin")
    return not (folder / STATE).exists() and any((folder / name).exists() for name in theirs)


def cannot_continue(folder: Path) -> IcomError:
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


def set_aside(output: Path, step: int = 0) -> None:
    """Move what another run left away, so that two runs never mix; nothing is deleted.

    Args:
        output: --output_dir.
        step: the run goes on after it: embeddings and validation pictures up to there are its own, and so are all
            checkpoints. 0: a new run, to which nothing belongs.
    """
    embeddings, validation = "learned_embeds-steps-*.safetensors", f"{VALIDATION}/step-*.png"
    samples = f"{SAMPLES}/prompt-*-step-*.png"
    groups = {
        "checkpoint(s)": [] if step else list_checkpoints(output),
        "pipeline(s)": [] if step else list(output.glob(PIPELINE)),  # its other parts may be another model's
        "embedding(s)": [path for path in output.glob(embeddings) if _step_of(path) > step],
        "validation picture(s)": [path for path in output.glob(validation) if _step_of(path) > step],
        # Those of step 0 are a new run's only if it draws them.
        "sample(s)": [path for path in output.glob(samples) if not step or _step_of(path) > step],
    }
    if not any(groups.values()):
        return
    folder = move_aside(output, itertools.chain(*groups.values()))
    moved = " and ".join(f"{len(paths)} {what}" for what, paths in groups.items() if paths)
    if step:
        print(f"icom: moved {moved} of steps after {step}, which are done again, to {folder}.", file=sys.stderr)
    else:
        print(
            f"icom: moved {moved} of an earlier run to {folder} (to continue such a run: --resume_from_checkpoint "
            "latest).",
            file=sys.stderr,
        )


def move_aside(output: Path, paths: Iterable[Path]) -> Path:
    """Move what lies in `output` to a folder of its own there, and return that."""
    folder = output / "earlier" / time.strftime("%Y%m%d-%H%M%S")
    try:
        for path in paths:
            target = folder / path.relative_to(output)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
    except OSError as error:
        raise write_error(folder, error) from error
    return folder


def _step_of(path: Path) -> int:
    """N of checkpoint-N, learned_embeds-steps-N.safetensors and step-N.png; 0 if it is none of a run's."""
    number = path.stem.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
