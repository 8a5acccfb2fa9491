"""An all-reduce of all processes that mpirun started, to see that they can train together.

mpirun -f hosts -n 3 -ppn 1 python -m icom.launch.all_reduce
"""

from __future__ import annotations

import os
import statistics
import sys
import time

from icom.errors import IcomError
from icom.parallel.place import choose_collectives, find_place
from icom.signals import own_process

CALLS = 21


def main() -> None:
    """Sum rank + 1 over all processes; rank 0 prints how many there are, and what a call takes.

    Raises:
        IcomError: the processes do not meet, or the sum is wrong.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # as for `icom train`
    import torch

    from icom.parallel.group import joined

    with joined(find_place(os.environ)) as group:
        collectives, _ = choose_collectives("auto", "gloo")
        group.agree("The collectives", {"collectives": collectives})
        group.connect(collectives)
        expected, seconds = group.size * (group.size + 1) / 2, []
        for _ in range(CALLS):
            value = torch.tensor([group.rank + 1.0])
            began = time.perf_counter()
            group.sum([value])
            total = value.item()
            seconds.append(time.perf_counter() - began)
            if total != expected:
                raise IcomError(f"The all-reduce with {collectives} gave {total}, not {expected}.")
        group.wait_for_everyone()
        if group.leads:
            count = "1 process" if group.size == 1 else f"{group.size} processes ({collectives})"
            milliseconds = statistics.median(seconds) * 1000
            print(f"icom: all-reduce of {count}: {milliseconds:.2f} ms, the median of {CALLS} calls", flush=True)


if __name__ == "__main__":
    own_process()
    try:
        main()
    except IcomError as error:
        if not error.told:
            print(f"icom: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
