"""What libraries read from the environment of a process among several: the one place that writes it.

What is the same for all processes of a launch, and what each host decides, is in icom/launch/environment.py: that is
in the environment before the process starts.
"""

from __future__ import annotations

import os

from icom import machine
from icom.parallel.place import Place, is_loopback

CCL_ENVIRONMENT = {
    # The group's addresses come through icom's own store, so that oneCCL needs no MPI. Below `accelerate launch` a
    # process is mpirun's grandchild, and PMI cannot be reached from there.
    "CCL_PROCESS_LAUNCHER": "none",
    "CCL_ATL_TRANSPORT": "ofi",
    # One thread sends, and without a launcher handing it small messages would cost milliseconds.
    "CCL_WORKER_COUNT": "1",
    "CCL_WORKER_OFFLOAD": "0",
}
"""What oneCCL reads, the same for all processes."""


def export(place: Place) -> None:
    """Put the place into this process's environment as torchrun would: what Accelerate and torch.distributed read."""
    assert place.master_address is not None
    os.environ |= {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "MASTER_ADDR": place.master_address,
        "MASTER_PORT": str(place.master_port),
    }


def for_collectives(collectives: str, place: Place) -> None:
    """Set what gloo and oneCCL read from the environment, where the user has not."""
    assert place.master_address is not None
    interface = machine.interface_towards(place.master_address)
    if interface in {i.name for i in machine.interfaces() if i.loopback}:
        interface = machine.interface_towards()  # the master's own name leads to 127.0.1.1 on Debian
    if interface and place.world_size > place.local_size:
        # Else gloo takes the address that the machine's own name resolves to, on many 127.0.0.1 or 127.0.1.1.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    elif place.world_size == place.local_size and is_loopback(place.master_address):
        # Else it listens at that address, where others may reach it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", next((i.name for i in machine.interfaces() if i.loopback), "lo"))
    if collectives == "ccl":
        own = {"CCL_LOCAL_RANK": str(place.local_rank), "CCL_LOCAL_SIZE": str(place.local_size)}
        if interface and place.world_size > place.local_size:
            own["FI_TCP_IFACE"] = interface
        for name, value in (CCL_ENVIRONMENT | own).items():
            os.environ.setdefault(name, value)


def for_accelerate() -> None:
    """Tell Accelerate the number of threads; else it counts cores by itself, warns, and changes it."""
    import torch

    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
