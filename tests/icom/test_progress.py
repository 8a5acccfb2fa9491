"""icom.progress: bars on terminals, few lines elsewhere.

Guards icom.progress.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from icom import progress
from tests.support.command import ROOT, Run

COUNT = "from icom.progress import progress\nfor _ in progress(range(200), 'training', 'step', mininterval=0): pass"


def test_a_pipe_gets_no_bars(train: Run, tmp_path: Path) -> None:
    """A line for the latents, one for the training, one for each of the pictures; no returns of the carriage."""
    result = train(output_dir=tmp_path, cache_dir=tmp_path / "cache", num_comparison_images=1, max_train_steps=20)
    assert result.code == 0
    assert "\r" not in result.err
    kinds = [line.split(":")[0] for line in result.err.splitlines()]
    assert [kinds.count(what) for what in ("latents", "training", "pictures before", "pictures after")] == [1, 1, 1, 1]
    (last,) = (line for line in result.err.splitlines() if line.startswith("training"))
    assert last.startswith("training: 20/20 [")
    assert "loss 0." in last
    assert "s/step" in last


def test_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    assert list(progress.progress("abc", "letters", "letter")) == ["a", "b", "c"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" [")[0] for line in lines] == [f"letters: {n}/3" for n in (1, 2, 3)]

    with pytest.raises(RuntimeError), progress.progress(None, "steps", "step", total=9, initial=2) as bar:
        raise RuntimeError
    bar.close()
    assert [line.split(" [")[0] for line in capsys.readouterr().err.splitlines()] == ["steps: 2/9"]

    assert list(progress.progress("abc", "letters", "letter", disable=True)) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", COUNT], cwd=ROOT, stderr=theirs)
    os.close(theirs)
    shown = ""
    with contextlib.suppress(OSError):  # the terminal's end
        while part := os.read(ours, 10**5):
            shown += part.decode(errors="replace")
    os.close(ours)
    assert process.wait() == 0
    assert shown.count("\r") > 5
    assert "200/200" in shown
    piped = subprocess.run([sys.executable, "-c", COUNT], cwd=ROOT, stderr=subprocess.PIPE, check=True, text=True)
    assert piped.stderr.count("\n") == 1
    assert piped.stderr.startswith("training: 200/200 [")


def test_bars_are_made_in_one_place() -> None:
    users = [path.name for path in (ROOT / "icom").rglob("*.py") if "import tqdm" in path.read_text()]
    assert users == ["progress.py"]
