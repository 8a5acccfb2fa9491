"""The look at all nodes before a start, by one process on each: `python -m icom.launch.look SCRIPT [TRAINING] OPTIONS`.

What `icom launch mpirun` does over ssh, for launchers that start something on all nodes at once.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from icom.errors import IcomError
from icom.launch.checks import Target, compare, show_problems
from icom.launch.launch import training_config
from icom.launch.probe import Contents, look, notice_of, read_answer
from icom.parallel.place import find_place
from icom.signals import own_process


def main(script: str, words: list[str]) -> None:
    """Compare what the nodes have; the first one shows what is wrong.

    Args:
        script: of the job, in --output_dir; every node has to see it.
        words: the training and its options.

    Raises:
        IcomError: a node cannot take part, or the nodes do not reach each other.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # read when torch is first imported, as in icom/cli.py
    from icom.parallel.group import joined

    contents = Contents.of(training_config(words, "python -m icom.launch.look SCRIPT"))
    place = find_place(os.environ)
    with joined(place) as group:
        answer = look(contents)
        if not Path(script).is_file():
            fix = "give an --output_dir that all nodes share (NFS, Lustre): a job that starts again gets other nodes"
            answer.problems.append((f"no {script}", fix))
        answers = [read_answer(json.loads(said)) for said in group.gather(json.dumps(asdict(answer)).encode())]
        targets = [Target(host, local=False, ranks=1) for host in group.hosts]
        problems = compare([*zip(targets, answers, strict=True)])
        if group.leads and (notice := notice_of(contents)):
            print(notice, file=sys.stderr)
        if group.leads and problems:
            show_problems(problems)
        if any(problem.stops for problem in problems):
            raise IcomError("Nothing was started.")


if __name__ == "__main__":
    own_process()
    try:
        main(sys.argv[1], sys.argv[2:])
    except IcomError as error:
        if not error.told:
            print(f"icom: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
