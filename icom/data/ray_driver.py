"""`python -m icom.data.ray_driver`: Ray's driver, for icom/data/ray_workers.py alone.

It reads what to do as a line of JSON, writes what comes, and ends with everything that it started when its standard
input ends.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from icom.data.ray_workers import BATCH, FAILED, STARTED, write
from icom.errors import IcomError, TemporaryFailure

_AHEAD = 4
"""Batches per worker that may wait for the training."""
_END_SECONDS = 10.0
_STORE_BYTES = 2**28
"""Of shared memory that a Ray of our own takes at least; Ray asks for 75 MB."""
_ROWS = 1000
"""Batches whose numbers are made at a time."""


def main() -> None:
    """Until all is written, or the other end is gone."""
    # What libraries print goes to the log.
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    says = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_input, args=[says["folder"]], daemon=True).start()
    try:
        try:
            _drive(says, pipe)
        except IcomError as error:
            write(pipe, FAILED, json.dumps({"message": str(error), "code": error.exit_code}).encode())
    except Exception as error:
        # Nobody reads any more, or Ray was ended under way: the thread sees, or has seen, the input's end.
        if not isinstance(error, BrokenPipeError) and not _leaving.is_set():
            raise
    threading.Event().wait()  # the thread ends the process, when it has tidied up


def _end_with_input(folder: str) -> None:
    sys.stdin.buffer.read()
    _leaving.set()
    threading.Thread(target=_shut_down, daemon=True).start()
    _ended.wait(_END_SECONDS)
    for _ in range(10):  # a worker that is still ending may write to its log meanwhile
        shutil.rmtree(folder, ignore_errors=True)
        if not Path(folder).exists():
            break
        time.sleep(0.2)
    os._exit(0)  # what Ray started is bound to this process


_leaving, _ended = threading.Event(), threading.Event()


def _shut_down() -> None:
    if "ray" in sys.modules:
        import ray

        ray.shutdown()
    _ended.set()


def _drive(says: Mapping[str, Any], pipe: IO[bytes]) -> None:
    """Connect, and write what workers make.

    Raises:
        IcomError: Ray cannot be used, or a worker cannot go on.
    """
    _connect(says)
    import ray.exceptions

    write(pipe, STARTED, b"")
    try:
        for row in _rows(says):
            if row["code"]:
                write(pipe, FAILED, json.dumps({"message": row["message"], "code": row["code"]}).encode())
                return
            write(pipe, BATCH, row["content"])
    except ray.exceptions.RayTaskError as error:  # a worker's own
        raise IcomError(f"A worker of Ray failed: {_last_line(error)}") from error
    except ray.exceptions.RayError as error:
        raise TemporaryFailure(f"Ray's workers are lost: {_last_line(error)}") from error


def _connect(says: Mapping[str, Any]) -> None:
    """Start a Ray of our own, or join a cluster.

    Raises:
        IcomError: it cannot be.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    options: dict[str, Any] = {"namespace": "icom", "log_to_driver": False, "logging_level": "ERROR"}
    if says["address"] is None:
        # Its ports are on the loopback interface alone (the variable's name notwithstanding), and take a token.
        os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
        os.environ["RAY_AUTH_TOKEN"] = says["token"]
        options |= {
            "address": "local",
            "num_cpus": says["workers"] * says["cpus"],
            "object_store_memory": max(_STORE_BYTES, 2 * _bytes_ahead(says)),
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "_temp_dir": says["folder"],
        }
        if not says["gpus"]:
            options["num_gpus"] = 0
    else:
        options["address"] = says["address"]
    import ray

    try:
        ray.init(**options)
        # A launcher that stops the run sends this to all processes; the training saves, and ends this one.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
    except Exception as error:  # ConnectionError, RuntimeError, ValueError, or Ray's own
        reason = " ".join(str(error).split())[:600]
        if says["address"] is None:
            raise IcomError(f"Ray does not start: {reason}") from error
        raise IcomError(
            f"Ray at {says['address']} cannot be used: {reason} This machine has to be a node of the cluster (ray "
            "start --address=HOST:PORT --num-cpus=0), with the same versions of Ray and Python, and its token "
            "(RAY_AUTH_TOKEN)."
        ) from error
    need = {"CPU": float(says["cpus"]), "GPU": float(says["gpus"])}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(what, 0.0) >= count for what, count in need.items()) for node in nodes):
        wanted = f"{says['cpus']} cores" + (f" and {says['gpus']:g} GPUs" if says["gpus"] else "")
        there = "; ".join(f"{node.get('CPU', 0):g} cores, {node.get('GPU', 0):g} GPUs" for node in nodes)
        raise IcomError(
            f"No machine of Ray's has {wanted}, which each worker needs (--encoder_cpus, --encoder_gpus). They have: "
            f"{there or 'nothing'}."
        )


def _rows(says: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What workers make of the batches, in order."""
    import ray.data
    from ray.data import ActorPoolStrategy, DataContext, ExecutionResources, TaskPoolStrategy

    from icom.data.ray_encoder import RayEncoder

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = 1  # each batch is a block, which goes its way as soon as it is made
    context.max_tasks_in_flight_per_actor = 2
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ExecutionResources(object_store_memory=_bytes_ahead(says))
    parts = []
    for start, stop, step, batch in says["work"]:
        for first in range(start, stop, step * _ROWS):
            parts.append({"start": first, "stop": min(stop, first + step * _ROWS), "end": stop, "by": [step, batch]})

    def batches(part: dict[str, Any]) -> Iterator[dict[str, int]]:
        step, batch = part["by"]
        for first in range(part["start"], part["stop"], step):
            yield {"start": first, "stop": min(first + batch, part["end"])}

    dataset = (
        ray.data.from_items(parts, override_num_blocks=len(parts))
        .flat_map(batches, compute=TaskPoolStrategy(size=1), num_cpus=0)
        .map(
            RayEncoder,
            fn_constructor_args=[says["job"], says["cpus"]],
            compute=ActorPoolStrategy(size=says["workers"]),
            num_cpus=says["cpus"],
            num_gpus=says["gpus"],
        )
    )
    for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        yield from table.to_pylist()


def _bytes_ahead(says: Mapping[str, Any]) -> int:
    size, workers = int(says["size"]), int(says["workers"])
    return size * _AHEAD * (workers + 1)


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[-1][:300]


if __name__ == "__main__":
    main()
