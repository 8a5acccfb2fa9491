"""`icom report`: what it says of a run is what the run's own files say.

Guards icom.commands.report and icom.training.outcome.
"""

from __future__ import annotations

import fcntl
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from icom.training.lock import RUNNING
from tests.support.command import Run, assert_message, finetune_arguments

LATEST = {"resume_from_checkpoint": "latest"}


def test_states_and_figures_of_runs(train: Run, icom: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, rate in enumerate((1e-2, 1e-3)):
        assert train(output_dir=f"runs/{number}", learning_rate=rate).code == 0
    assert train(output_dir="runs/10", max_train_steps=2).code == 0
    # As after kill -9: a run to 4 steps that came to the second one.
    config = Path("runs/10/config.yaml")
    config.write_text(config.read_text().replace("max_train_steps: 2", "max_train_steps: 4"))
    Path("runs/notes").mkdir()

    said = icom("report", "runs", "--json")
    told = [json.loads(line) for line in said.out.splitlines()]
    assert [(one["folder"], one["state"], one["step"], one["steps"]) for one in told] == [
        ("runs/0", "done", 3, 3),
        ("runs/1", "done", 3, 3),
        ("runs/10", "stopped", 2, 4),
    ]
    for one in told:
        rows = [json.loads(line) for line in Path(one["folder"], "metrics.jsonl").read_text().splitlines()]
        assert math.isclose(one["loss"], sum(row["loss"] for row in rows) / len(rows))
        assert math.isclose(one["seconds"], sum(row["seconds"] for row in rows))

    table = icom("report", "runs/0", "runs/1").out
    headings = table.splitlines()[0].split()
    assert headings == ["run", "state", "steps", "loss", "seconds", "learning_rate"], table
    assert [line.split()[-1] for line in table.splitlines()[1:]] == ["0.01", "0.001"]

    # Begun anew, the old embedding is not the new run's.
    with Path("runs/0", RUNNING).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert json.loads(icom("report", "runs/0", "--json").out)["state"] == "running"
    Path("runs/0/config.yaml").touch()
    assert json.loads(icom("report", "runs/0", "--json").out)["state"] == "stopped"


def test_runs_of_both_trainings(train: Run, icom: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def states() -> list[tuple[str, str, int]]:
        told = [json.loads(line) for line in icom("report", "runs", "--json").out.splitlines()]
        return [(one["training"], one["state"], one["step"]) for one in told]

    assert train(output_dir="runs/0", learning_rate="1e-3", max_train_steps=2).code == 0
    words = finetune_arguments(output_dir="runs/1", checkpointing_steps=1)
    assert icom(*words).code == 0
    assert states() == [("train", "done", 2), ("finetune", "done", 2)]
    headings = icom("report", "runs").out.splitlines()[0].split()
    assert headings[:3] == ["run", "training", "state"] and {"train_data_dir", "checkpointing_steps"} <= {*headings}
    assert {"placeholder_token", "use_ema"}.isdisjoint(headings)  # of one training alone

    # Killed in the last step: what is there is the pipeline of the step before.
    (Path("runs/1") / "loss.png").unlink()
    shutil.rmtree("runs/1/checkpoint-2")
    assert states()[1] == ("finetune", "stopped", 2)
    assert icom(*words, "--resume_from_checkpoint", "latest").code == 0
    assert states()[1] == ("finetune", "done", 2)
    # Killed between the last checkpoint and its pipeline: going on makes up for it.
    weights = Path("runs/1/current_pipeline/unet/diffusion_pytorch_model.safetensors")
    wanted = load_file(weights)
    save_file({name: torch.zeros_like(tensor) for name, tensor in wanted.items()}, weights)
    Path("runs/1/config.yaml").touch()
    assert states()[1] == ("finetune", "stopped", 2)
    assert icom(*words, "--resume_from_checkpoint", "latest").code == 0
    assert states()[1] == ("finetune", "done", 2)
    found = load_file(weights)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_folders_without_runs(icom: Run, tmp_path: Path) -> None:
    assert_message(icom("report"), 2, "Which runs?")
    assert_message(icom("report", str(tmp_path / "no")), 2, "No folder")
    assert_message(icom("report", str(tmp_path)), 2, "No run has written to")
