"""A Ray cluster on the loopback interface: `python -m tests.support.ray_cluster [VERSION]` says its address, and ends
with its standard input. With VERSION it says that it is of that version of Ray. And work for its workers."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray takes the machine's other address
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
}
"""For all that come to it."""
SIZE = 100_000


def main() -> None:
    os.environ |= LOOPBACK
    import ray

    if sys.argv[1:]:
        ray.__version__ = sys.argv[1]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        context = ray.init(
            address="local",
            num_cpus=3,
            num_gpus=0,
            object_store_memory=2**27,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        print(context.address_info["gcs_address"], flush=True)
        sys.stdin.read()
        ray.shutdown()


def slow_bytes(job: Mapping[str, Any]) -> Callable[[range], bytes]:
    """Work: the first number of each batch, and SIZE bytes. Leaves a line per batch, and its process's number."""

    def make(numbers: range) -> bytes:
        with Path(job["log"]).open("a") as log:
            log.write(f"{numbers.start} {os.getpid()}\n")
        time.sleep(0.05)
        return b"%d %d " % (numbers.start, numbers.stop) + bytes(SIZE)

    return make


if __name__ == "__main__":
    main()
