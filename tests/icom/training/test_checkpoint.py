"""icom.training.checkpoint: whenever a process is killed, the newest complete checkpoint is found.

Guards icom.training.checkpoint and icom.training.checkpoint_folders.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from icom import files
from icom.files import exchange
from icom.training import checkpoint_folders
from icom.training.checkpoint import Identity, State, load_checkpoint, save_checkpoint
from icom.training.checkpoint_folders import delete_old_checkpoints, list_checkpoints
from tests.support.command import Result, Run, assert_refused, long

IDENTITY = Identity(seed=7, model="m", pictures={"0.png": "p"}, options={"repeats": 1})
CHANGES = {
    "open",
    "mkdir",
    "write",
    "flush",
    "fsync",
    "close",
    "rename",
    "replace",
    "unlink",
    "rmdir",
    "link",
    "symlink",
}
"""Before any other call things are as they are before one of these."""
KILLED, DONE = 9, 0


def save(folder: Path, step: int, value: float) -> None:
    rows = torch.full((1, 4), value)
    save_checkpoint(
        folder,
        State(step, step, {"rows": rows}, {"rows": {"exp_avg": rows.clone(), "exp_avg_sq": rows.clone()}}),
        IDENTITY,
        {},
    )


def killed_before_each_call(prepared: Path, action: Callable[[Path], None]) -> Iterator[Path]:
    """Folders like `prepared` in which a process died while it did `action`: one for each call of the file system's."""
    for number in range(1, 1000):
        folder = prepared.with_name(f"killed-{number}")
        shutil.copytree(prepared, folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: the child uses none
            child = os.fork()
        if child == 0:
            _die_before(number)
            action(folder)
            os._exit(DONE)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (KILLED, DONE)
        if code == DONE:
            assert number > 1, "no call was seen"
            return
        yield folder
        shutil.rmtree(folder)
    raise AssertionError("there is no end of calls")


def _die_before(number: int) -> None:
    """End this process, as `kill -9` does, when it is about to make call `number` to the file system."""
    seen = 0

    def profile(_: FrameType, event: str, function: Any) -> None:
        nonlocal seen
        if event == "c_call" and function.__name__ in CHANGES:
            seen += 1
            if seen == number:
                os._exit(KILLED)

    sys.setprofile(profile)


def there(folder: Path) -> dict[int, float]:
    """Step -> the number in its rows; all checkpoints load."""
    states = [load_checkpoint(path)[0] for path in list_checkpoints(folder)]
    assert [path.name for path in list_checkpoints(folder)] == [f"checkpoint-{state.step}" for state in states]
    return {state.step: float(state.parameters["rows"][0, 0]) for state in states}


def newest(folder: Path) -> tuple[int, float]:
    """What `latest` goes on from."""
    found = checkpoint_folders.find_checkpoint(folder, "latest")
    assert found is not None
    state = load_checkpoint(found).state
    return state.step, float(state.parameters["rows"][0, 0])


@pytest.fixture(params=["exchange", "no exchange"])
def swaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file system can exchange two names; the tests' own can."""
    if request.param == "no exchange":
        monkeypatch.setattr(files, "exchange", lambda *_: False)
    return bool(request.param == "exchange")


ACTIONS: dict[str, tuple[Callable[[Path], None], dict[int, float]]] = {
    "a new one": (lambda folder: save(folder, 4, 2.0), {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0}),
    "the newest again": (lambda folder: save(folder, 3, 2.0), {1: 1.0, 2: 1.0, 3: 2.0}),
    "an older one again": (lambda folder: save(folder, 2, 2.0), {1: 1.0, 2: 2.0, 3: 1.0}),
    "delete old ones": (lambda folder: delete_old_checkpoints(folder, 1, 3), {3: 1.0}),
}


@pytest.mark.parametrize("what", [what if what == "the newest again" else long(what) for what in ACTIONS])
def test_killed_before_any_call_of_the_file_systems(tmp_path: Path, what: str, swaps: bool) -> None:
    action, after = ACTIONS[what]
    (prepared := tmp_path / "prepared").mkdir()
    for step in (1, 2, 3):
        save(prepared, step, 1.0)
    before = there(prepared)
    cases = 0
    for folder in killed_before_each_call(prepared, action):
        cases += 1
        if swaps:  # no need of mending
            assert newest(folder)[0] >= 3
        checkpoint_folders.mend_checkpoints(folder)
        found = there(folder)
        assert newest(folder)[0] >= 3
        for step, value in found.items():  # each is the old one or the new one, whole
            assert value in (before.get(step), after.get(step))
        assert set(found) >= set(before) & set(after)
        assert {path.name for path in folder.iterdir()} == {f"checkpoint-{step}" for step in found}
        action(folder)
        assert there(folder) == after
        assert {path.name for path in folder.iterdir()} == {f"checkpoint-{step}" for step in after}
    assert cases > 10


def test_exchange_swaps_or_changes_nothing(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other \u00e9"
    one.mkdir()
    (one / "file").write_text("of one")
    assert not exchange(one, other)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    other.mkdir()
    assert exchange(one, other), "this file system cannot: run the tests on a local disk"
    assert (other / "file").read_text() == "of one"
    assert not list(one.iterdir())


def test_disk_that_fails_while_names_change_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where names cannot be exchanged, and the second of the renames fails."""
    save(tmp_path, 1, 1.0)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(files, "exchange", lambda *_: False)
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(Exception, match=r"Cannot write .*checkpoint-1: Input/output error"):
        save(tmp_path, 1, 2.0)
    assert there(tmp_path) == {1: 1.0}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_latest_passes_over_what_is_not_complete(train: Run, tmp_path: Path) -> None:
    assert train(output_dir=tmp_path, checkpointing_steps=1).code == 0
    (tmp_path / "checkpoint-3/state.json").unlink()
    shutil.rmtree(tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2").mkdir()
    result = train(output_dir=tmp_path, max_train_steps=4, resume_from_checkpoint="latest")
    assert (result.code, "resumed after step 1" in result.out) == (0, True)
    assert f"icom: passing over {tmp_path}/checkpoint-3: it is not complete (no state.json).\n" in result.err
    assert "checkpoint-2: it is not complete (no state.safetensors and no state.json).\n" in result.err
    for path in list_checkpoints(tmp_path):
        (path / "state.safetensors").unlink(missing_ok=True)
    result = train(output_dir=tmp_path, max_train_steps=4, resume_from_checkpoint="latest")
    assert result.code == 1
    assert f"No checkpoint in {tmp_path} is complete. Drop --resume_from_checkpoint to start anew." in result.err


def accelerates(folder: Path, step: int, rows: torch.Tensor) -> Path:
    """A run of diffusers' script: Accelerate itself writes the checkpoint, beside the embedding of that step."""
    from accelerate import Accelerator

    table = torch.nn.Embedding(8, 128)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(table, torch.optim.AdamW(table.parameters()))
    accelerator.save_state(str(folder / f"checkpoint-{step}"))
    save_file({"<theirs>": rows}, folder / f"learned_embeds-steps-{step}.safetensors")
    return folder / f"checkpoint-{step}"


def test_checkpoints_of_accelerate_are_named_and_their_embedding_started_from(train: Run, tmp_path: Path) -> None:
    theirs, out = tmp_path / "theirs", tmp_path / "theirs-icom"
    rows = torch.randn(2, 128, generator=torch.Generator().manual_seed(1))
    accelerates(theirs, 500, rows)
    last = accelerates(theirs, 1000, rows * 2)
    for wanted in ("latest", "checkpoint-1000", str(last)):
        result = train(output_dir=theirs, resume_from_checkpoint=wanted, num_vectors=2)
        assert_refused(result, 1, f"{last} is a checkpoint of Accelerate, as diffusers' textual_inversion.py writes")
        assert "damaged" not in result.err
        _, _, advice = result.err.rpartition("without --resume_from_checkpoint: ")
        assert advice == f"--initial_embedding {theirs}/learned_embeds-steps-1000.safetensors --output_dir {out}\n"
    option, file, _, _ = shlex.split(advice)
    # A rate so small that the rows stay: what is learned is what was started from.
    options = {"output_dir": out, "num_vectors": 2, "learning_rate": 1e-30, "adam_weight_decay": 0, option[2:]: file}
    assert train(**options, max_train_steps=2, checkpointing_steps=1).code == 0
    assert torch.equal(load_file(out / "learned_embeds.safetensors")["<robot>"], rows * 2)
    # An icom checkpoint among theirs is what `latest` means.
    shutil.copytree(out / "checkpoint-2", theirs / "checkpoint-2")
    result = train(**options | {"output_dir": theirs, "initial_embedding": None}, resume_from_checkpoint="latest")
    assert (result.code, "resumed after step 2" in result.out) == (0, True)
    assert f"passing over {last}: it is a checkpoint of Accelerate.\n" in result.err


def test_initial_embedding_that_does_not_fit(train: Run, tmp_path: Path) -> None:
    def refusal(rows: torch.Tensor | None, **options: object) -> Result:
        file = tmp_path / "rows.safetensors"
        file.unlink(missing_ok=True)
        if rows is not None:
            save_file({"<x>": rows}, file)
        return train(**{"output_dir": tmp_path / "out", "initial_embedding": file} | options)

    file = f"--initial_embedding {tmp_path}/rows.safetensors"
    assert_refused(refusal(None), 2, f"{file} is no file")
    assert_refused(refusal(torch.ones(3, 128)), 2, f"{file} holds 3 vectors: give --num_vectors 3.")
    assert_refused(refusal(torch.ones(1, 768)), 2, f"{file} holds rows of width 768 and bundled has 128")
    assert_refused(refusal(torch.full((1, 128), float("nan"))), 1, "holds numbers that are not finite")
    assert_refused(refusal(torch.ones(1, 128), output_dir=tmp_path), 2, f"{file} lies in --output_dir, where a run")
