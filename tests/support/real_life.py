"""The life of a cluster by the command line alone, on AWS itself: it costs money. What was made is always removed.

`python -m tests.support.real_life [--cluster NAME] [--region R] [--profile P] [--yes] [options of icom provision]`:
says what it costs and asks; then icom provision --count 3 --max_hours 1, status, run, mpirun, train --on, and, whatever
failed and whichever signal came, teardown. Exit code 0: all of it worked, and nothing is left. 1: it says what did not
work, or what may be left.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from provisioning.cluster import role_names

COUNT, HOURS = 3, 1
HOURS_IN_MONTH = 730
STEP_MINUTES = 50
"""After which a command is told to stop: the nodes end themselves not long after."""
END_MINUTES = 15
"""After which a command that was told to stop is killed."""
TRAINING = {
    **{"train_data_dir": "bundled:red-moon", "placeholder_token": "<test>", "initializer_token": "moon"},
    **{"max_train_steps": "5", "report_to": "none"},
}


class Failed(Exception):
    """Something did not go as it should; says what."""


class Commands:
    """icom's commands, one after the other. A signal is passed on to the one that runs, and none is begun after it."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.removing = False
        self._running: subprocess.Popen[str] | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def icom(self, *arguments: str | Path) -> str:
        """Run `icom` to its end; what it printed, which is shown as well.

        Raises:
            Failed: it did, or there was a signal.
        """
        if self.signal and not self.removing:
            raise Failed(f"{self.signal.name} came")
        line = shlex.join(["icom", *map(str, arguments)])
        say(f"$ {line}")
        # In a session of its own: Ctrl-C in a terminal is for us, who decide what it is to reach.
        self._running = subprocess.Popen(
            [sys.executable, "-m", "icom", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "200"},
        )
        if self.signal and not self.removing:  # it came meanwhile
            self._running.send_signal(self.signal)
        said = self._follow(self._running)
        if self.signal and not self.removing:
            raise Failed(f"{self.signal.name} came during {line}")
        if self._running.returncode:
            raise Failed(f"exit code {self._running.returncode} from {line}")
        return said

    def _follow(self, process: subprocess.Popen[str]) -> str:
        """Show what it prints until it ends, or does not end in time."""
        said = ""
        minutes = {STEP_MINUTES: process.terminate, STEP_MINUTES + END_MINUTES: process.kill}
        timers = [threading.Timer(60 * after, end) for after, end in minutes.items()]
        for timer in timers:
            timer.start()
        try:
            assert process.stdout
            for text in process.stdout:
                say(text.rstrip("\n"))
                said += text
            process.wait()
        finally:
            for timer in timers:
                timer.cancel()
        return said

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.removing:
            say(f"{signal.Signals(number).name}: still removing; kill -9 ends this, and leaves what there is")
            return
        self.signal = self.signal or signal.Signals(number)
        if self._running:
            self._running.send_signal(number)


def say(text: str) -> None:
    """Print; a terminal that is closed must not keep us from removing things."""
    with suppress(OSError, ValueError):
        print(text, flush=True)


def cost(plan: str) -> str:
    """What it costs at most, from the table that icom provision shows."""
    found = re.search(rf"{COUNT} nodes running, [a-z ]+ +([0-9.]+) +([0-9.]+)", plan)
    ends = f"The nodes end themselves {HOURS} hour after they were asked for, whatever happens here"
    if found is None:
        return f"What it costs is not known: the table above has no price. {ends}."
    hour, month = map(float, found.groups())
    most = HOURS * (hour + month / HOURS_IN_MONTH) * (COUNT + 1) / COUNT
    return f"At most {most:.2f} USD: {COUNT} nodes, and one more that makes their image, for {HOURS} hour. {ends}."


def live(commands: Commands, provision: Sequence[str], name: str) -> None:
    """From icom provision to a trained embedding.

    Raises:
        Failed: something did not go as it should.
    """
    commands.icom(*provision, "--yes")
    status = commands.icom("status", "--cluster", name)
    if missing := [role for role in role_names(COUNT) if not re.search(rf"\b{role} .*\brunning\b", status)]:
        raise Failed(f"icom status shows no running {', '.join(missing)}")
    if not commands.icom("run", "--cluster", name, "--", "hostname").strip():
        raise Failed("icom run -- hostname printed nothing")
    options = [f"--{option}={value}" for option, value in TRAINING.items()]
    program = ["accelerate", "launch", "textual_inversion_icom.py", "--output_dir=/tmp/by_hand", *options]
    line = f"cd ~/icom && mpirun -f ~/hosts -n {COUNT} -ppn 1 {shlex.join(program)}"
    if f"x {COUNT} processes" not in commands.icom("run", "--cluster", name, "--", line):
        raise Failed(f"mpirun did not train with {COUNT} processes")
    with tempfile.TemporaryDirectory() as folder:
        commands.icom("train", "--on", name, f"--output_dir={folder}/learned", *options)
        if not Path(folder, "learned", "learned_embeds.safetensors").exists():
            raise Failed("icom train --on brought no learned_embeds.safetensors back")


def remove(commands: Commands, name: str) -> list[str]:
    """Tear the cluster down, whatever signals come; what failed."""
    commands.removing = True
    try:
        commands.icom("teardown", "--yes", "--all_images", "--cluster", name)
    except Failed as error:
        return [f"{error}\nThings of {name} may be left, see above: icom teardown --all_images --cluster {name}"]
    return []


def main() -> int:
    """The command line; its exit code."""
    parser = argparse.ArgumentParser(prog="real_life", description=__doc__, allow_abbrev=False)
    parser.add_argument("--cluster", default=f"test-{secrets.token_hex(3)}")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--region")
    parser.add_argument("--profile")
    options, others = parser.parse_known_args()
    name = str(options.cluster)
    for variable, value in (("AWS_REGION", options.region), ("AWS_PROFILE", options.profile)):
        if value:
            os.environ[variable] = value
    provision = ["provision", "--cluster", name, "--count", str(COUNT), "--max_hours", str(HOURS), *others]
    commands = Commands()
    problems = []
    try:
        if "There is no cluster" not in commands.icom("status", "--cluster", name):
            raise Failed(f"{name} exists, and this would remove it in the end: choose another --cluster")
        say(cost(commands.icom(*provision, "--dry_run")))
        if not options.yes and input("Type yes: ") != "yes":
            raise Failed("nothing was done")
    except Failed as error:
        say(f"real_life: {error}")
        return 1
    try:
        live(commands, provision, name)
    except Failed as error:
        problems.append(str(error))
    finally:
        problems += remove(commands, name)
    for problem in problems:
        say(f"real_life: {problem}")
    say("It did not go well." if problems else "All of it worked, and nothing is left.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
