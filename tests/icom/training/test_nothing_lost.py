"""Runs that end badly keep what they had: full disk, NaN, Ctrl-C, checkpoints that are damaged or of another run.

Guards icom.training.checkpoint, icom.files and icom.signals.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from icom.data.images import BUNDLED_CONCEPTS
from icom.models.loading import BUNDLE
from icom.training.checkpoint import load_checkpoint
from icom.training.checkpoint_folders import list_checkpoints
from tests.support.command import ROOT, Result, Run, assert_message, long, start_process, train_arguments
from tests.support.small_disk import on_a_disk
from tests.support.waiting import handles, wait_until

LATEST = {"resume_from_checkpoint": "latest"}


def embedding(folder: Path) -> bytes:
    return (folder / "learned_embeds.safetensors").read_bytes()


# Checkpoints.


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `earlier` copies."""
    return tmp_path_factory.mktemp("earlier") / "run"


@pytest.fixture
def earlier(train: Run, tmp_path: Path, pristine: Path) -> Path:
    """The folder of a run with checkpoint-1, -2 and -3."""
    if not pristine.exists():
        assert train(output_dir=pristine, checkpointing_steps=1).code == 0
    return Path(shutil.copytree(pristine, tmp_path / "run"))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut tensors": (lambda c: os.truncate(c / "state.safetensors", 100), "state.safetensors was altered or cut"),
    "altered tensors": (
        lambda c: (c / "state.safetensors").write_bytes((c / "state.safetensors").read_bytes()[:-1] + b"\x01"),
        "state.safetensors was altered or cut",
    ),
    "no tensors": (lambda c: (c / "state.safetensors").unlink(), "No such file"),
    "no state": (lambda c: (c / "state.json").unlink(), "No such file"),
    "cut state": (lambda c: os.truncate(c / "state.json", 60), "line"),
    "empty state": (lambda c: (c / "state.json").write_text("{}"), "lacks 'sha256'"),
    "state of another kind": (lambda c: (c / "state.json").write_text("[]"), "list"),
}


@pytest.mark.parametrize("damage", [d if d in ("cut tensors", "no state") else long(d) for d in DAMAGES])
def test_damaged_checkpoint(train: Run, earlier: Path, damage: str) -> None:
    break_it, reason = DAMAGES[damage]
    break_it(earlier / "checkpoint-3")
    before = embedding(earlier)
    lacks_a_file = damage.startswith("no ")  # `latest` would pass over it
    wanted = {"resume_from_checkpoint": "checkpoint-3"} if lacks_a_file else LATEST
    result = train(output_dir=earlier, max_train_steps=5, **wanted)
    advice = "Use --resume_from_checkpoint checkpoint-2."
    assert_message(result, 1, f"The checkpoint {earlier / 'checkpoint-3'} is damaged (", reason, advice)
    assert embedding(earlier) == before
    result = train(output_dir=earlier, max_train_steps=5, resume_from_checkpoint="checkpoint-2")
    assert (result.code, "resumed after step 2" in result.out) == (0, True)


def test_checkpoint_that_does_not_exist(train: Run, earlier: Path) -> None:
    result = train(output_dir=earlier, resume_from_checkpoint="checkpoint-99")
    there = "checkpoint-1, checkpoint-2, checkpoint-3. Name another one or `latest`"
    assert_message(result, 1, f"No such checkpoint: checkpoint-99. In {earlier}: {there}")


def test_latest_without_a_checkpoint_starts_anew(train: Run, tmp_path: Path) -> None:
    assert_message(train(output_dir=tmp_path, **LATEST), 0, f"no checkpoint in {tmp_path} yet: starting anew")


def pictures_with_one_changed(tmp_path: Path) -> dict[str, object]:
    folder = Path(
        shutil.copytree(BUNDLED_CONCEPTS / "blue-heart", tmp_path / "pictures", ignore=shutil.ignore_patterns("_*"))
    )
    shutil.copy(folder / "0.png", folder / "1.png")
    (folder / "4.png").rename(folder / "new.png")
    return {"train_data_dir": folder}


def model_with_one_number_changed(tmp_path: Path) -> dict[str, object]:
    return {"pretrained_model_name_or_path": changed_model(tmp_path, 0.5)}


def changed_model(tmp_path: Path, number: float) -> Path:
    model = Path(shutil.copytree(BUNDLE, tmp_path / "model"))
    file = model / "unet/diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["conv_in.bias"][0] = number
    save_file(weights, file, metadata={"format": "pt"})
    return model


CHANGES: dict[str, tuple[Callable[[Path], dict[str, object]], str]] = {
    "seed": (lambda _: {"seed": 8}, "different: seed (checkpoint 7, now 8)."),
    "model": (model_with_one_number_changed, "different: model (other weights or another precision)."),
    "precision": (lambda _: {"mixed_precision": "bf16"}, "different: model (other weights or another precision)"),
    "pictures": (pictures_with_one_changed, "different: pictures (1.png, 4.png, new.png)."),
    "several": (
        lambda _: {"seed": 8, "num_vectors": 2, "center_crop": True},
        "different: seed (checkpoint 7, now 8); center_crop (checkpoint False, now True); num_vectors (checkpoint 1",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_resume_of_another_run(train: Run, tmp_path: Path, earlier: Path, what: str) -> None:
    change, message = CHANGES[what]
    files = {path: path.read_bytes() for path in earlier.rglob("*") if path.is_file()}
    result = train(output_dir=earlier, max_train_steps=5, **LATEST, **change(tmp_path))
    assert_message(result, 1, "This is not the run of the checkpoint;", message, "without --resume_from_checkpoint")
    assert files == {path: path.read_bytes() for path in earlier.rglob("*") if path.is_file()}


# Numbers that are not finite.


def test_divergence_keeps_the_last_good_checkpoint(train: Run, earlier: Path) -> None:
    shutil.rmtree(earlier / "checkpoint-3")
    before = embedding(earlier)
    options = {"output_dir": earlier, "max_train_steps": 9, "checkpointing_steps": 1, "checkpoints_total_limit": 1}
    # Step 3 still sees good rows and makes them huge: checkpoint-3 is bad, and checkpoint-2 must not make room for it.
    result = train(**options, **LATEST, learning_rate=1e30)
    good = earlier / "checkpoint-2"
    assert_message(
        result,
        1,
        "The loss became nan at step 4;",
        f"The last good checkpoint is {good}: continue from it with --resume_from_checkpoint checkpoint-2",
        "a lower learning rate (--learning_rate 0.001)",
        "--mixed_precision no or --adam_epsilon",
    )
    assert embedding(earlier) == before
    result = train(**options, resume_from_checkpoint="checkpoint-2", learning_rate=1e-3)
    assert (result.code, "resumed after step 2" in result.out) == (0, True)
    assert [path.name for path in list_checkpoints(earlier)] == ["checkpoint-9"]
    assert bool(torch.isfinite(load_file(earlier / "learned_embeds.safetensors")["<robot>"]).all())


def test_rows_that_overflow_are_not_saved(train: Run, earlier: Path) -> None:
    result = train(
        output_dir=earlier, max_train_steps=9, checkpointing_steps=1, **LATEST, learning_rate=3e38, adam_beta1=0
    )
    assert_message(result, 1, "The loss became nan at step 4;", f"last good checkpoint is {earlier / 'checkpoint-2'}")
    assert [path.name for path in list_checkpoints(earlier)] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_divergence_before_the_first_checkpoint(train: Run, tmp_path: Path) -> None:
    result = train(output_dir=tmp_path, learning_rate=1e30)
    assert_message(result, 1, "The loss became nan at step 2;", "no good checkpoint yet: start anew with a lower")
    assert not (tmp_path / "learned_embeds.safetensors").exists()


def test_model_with_a_weight_that_is_not_finite(train: Run, tmp_path: Path) -> None:
    model = changed_model(tmp_path, float("inf"))
    result = train(output_dir=tmp_path / "out", pretrained_model_name_or_path=model)
    assert_message(
        result, 1, "The loss became nan at step 1;", f"The weights of unet in {model} hold", "Fetch it again"
    )


# Disks.


def run_on_a_disk(folder: Path, script: str) -> Result:
    """A training into `folder`/out, as $TRAIN; see tests/support/small_disk.py."""
    words = train_arguments(max_train_steps=400, checkpointing_steps=20, output_dir=folder / "out")
    return on_a_disk(folder, script, TRAIN=shlex.join([sys.executable, "-m", "icom", *words]))


KEEP = """
    mkdir "$DISK/out"
    echo earlier > "$DISK/out/learned_embeds.safetensors"
    code=0
    eval "$TRAIN $OPTIONS" || code=$?
    cp -r "$DISK/out" "$DISK.kept"
    exit $code
"""


@pytest.mark.long
@pytest.mark.parametrize("tracker", ["none", "tensorboard"])
def test_full_disk(train: Run, tmp_path: Path, tracker: str) -> None:
    if tracker == "tensorboard":
        pytest.importorskip("tensorboard")
    disk, kept = tmp_path / "disk", tmp_path / "disk.kept"
    mount = f'mount -t tmpfs -o size=128k none "$DISK"; OPTIONS=--report_to={tracker}'
    result = run_on_a_disk(disk, mount + KEEP)
    assert_message(result, 1, "The disk is full (", f"cannot write {disk}", "intact. Free some space or choose another")
    checkpoints = list_checkpoints(kept)
    assert checkpoints, result
    for folder in checkpoints:
        load_checkpoint(folder)
    assert not list(kept.glob(".*"))
    assert embedding(kept) == b"earlier\n"
    steps = int(checkpoints[-1].name.removeprefix("checkpoint-")) + 2
    result = train(output_dir=kept, max_train_steps=steps, **LATEST)
    assert (result.code, "resumed after step" in result.out) == (0, True)


@pytest.mark.long
def test_disk_that_has_no_room_for_the_whole_pipeline(tmp_path: Path) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "disk.kept"
    mount = 'mount -t tmpfs -o size=500k none "$DISK"; OPTIONS="--save_as_full_pipeline --max_train_steps=2"'
    result = run_on_a_disk(disk, mount + KEEP)
    assert_message(result, 1, f"Cannot write the whole pipeline to {disk}/out: ", "No space left", "itself is saved")
    assert load_file(kept / "learned_embeds.safetensors")["<robot>"].shape == (1, 128)


def test_read_only_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    script = 'mount -t tmpfs -o size=64k none "$DISK"; mkdir "$DISK/out"; mount -o remount,ro "$DISK"; eval "$TRAIN"'
    result = run_on_a_disk(disk, script)
    assert_message(result, 1, f"Cannot write {disk}/out: Read-only file system. Choose another --output_dir.")
    assert "step/s" not in result.err


# Ctrl-C.

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start_process`, and the end of what a failed test left running."""
    processes = []

    def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        processes.append(start_process(*arguments, **environment))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_interrupt_saves_a_checkpoint_that_resumes(train: Run, start: Start, tmp_path: Path) -> None:
    process = start(*train_arguments(output_dir=tmp_path, max_train_steps=10**6))
    metrics = tmp_path / "metrics.jsonl"
    wait_until(lambda: process.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") > 3))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    (checkpoint,) = list_checkpoints(tmp_path)
    step = load_checkpoint(checkpoint)[0].step
    assert_message(
        Result(process.returncode, out, err),
        130,
        "icom: SIGINT: finishing this step, then saving (Ctrl-C: stop at once).",
        f"icom: stopped after step {step}; saved {checkpoint}. Continue with the same command and --resume_from_check",
    )
    result = train(output_dir=tmp_path, max_train_steps=step + 2, **LATEST)
    assert (result.code, f"resumed after step {step}" in result.out) == (0, True)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, step + 3))


def test_second_interrupt_stops_at_once(start: Start, tmp_path: Path) -> None:
    # One step of several minutes.
    process = start(*train_arguments(output_dir=tmp_path, gradient_accumulation_steps=10**5, report_to="none"))
    assert process.stdout
    assert process.stderr
    while "trainable numbers" not in process.stdout.readline():
        assert process.poll() is None
    wait_until(lambda: handles(process.pid, signal.SIGTERM))
    process.send_signal(signal.SIGINT)
    while "finishing this step" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert_message(Result(process.returncode, out, err), 130, "stopped at once. What was saved before is intact.")
    assert not list_checkpoints(tmp_path)


@pytest.mark.long
def test_second_sigterm_does_not_spoil_the_saving(start: Start, tmp_path: Path) -> None:
    """Schedulers send it again: srun when the first process of a run has ended, Kubernetes and people to be sure."""
    process = start(*train_arguments(output_dir=tmp_path, gradient_accumulation_steps=50, max_train_steps=1000))
    assert process.stderr
    wait_until(lambda: process.poll() is not None or handles(process.pid, signal.SIGTERM))
    process.send_signal(signal.SIGTERM)
    while "finishing this step" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    (checkpoint,) = list_checkpoints(tmp_path)
    assert (process.returncode, f"saved {checkpoint}" in err) == (143, True), err


LOADS_FOR_EVER = """
import os, sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            open(os.environ["LOADING"], "w").close()
            time.sleep(36000)

sys.meta_path.insert(0, Slow())
"""


def test_interrupt_while_loading(start: Start, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LOADS_FOR_EVER)
    path, loading = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]), tmp_path / "loading"
    arguments = train_arguments(output_dir=tmp_path / "out")
    process = start(*arguments, PYTHONPATH=path, LOADING=str(loading))
    wait_until(lambda: loading.exists() or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert_message(Result(process.returncode, out, err), 130, "stopped at once.")
    assert not (tmp_path / "out").exists()


def test_interrupt_where_python_drops_exceptions_is_not_lost() -> None:
    """Python ignores a KeyboardInterrupt that is raised inside a __del__, of which imports run many."""
    code = """
import os, signal, time
from icom.signals import stopping_at_once

class Dropper:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

with stopping_at_once():
    Dropper()
    print("went on")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False, text=True)
    assert_message(Result(done.returncode, done.stdout, done.stderr), 130, "stopped at once.")
    assert "went on" not in done.stdout
