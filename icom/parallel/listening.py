"""Where a process listens: on the network in use alone, and to no newcomers once everybody is there."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import struct

from icom import machine
from icom.parallel.place import Place


def listen(place: Place, port: int) -> socket.socket:
    """Listen where the processes of a run look for rank 0; called on its machine.

    On MASTER_ADDR itself where that is one address of this machine, through which the others can come. Else on all:
    it may be known to the others alone (behind an address translation), mean several addresses, or lead to 127.0.1.1
    here, as Debian has a machine's own name do.

    Args:
        place: of rank 0.
        port: 0 for any free one.

    Raises:
        OSError: the port is taken.
    """
    address = _own_address(place)
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # a machine whose IPv6 is switched off; or what IPv4 will say as well
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=socket.SOMAXCONN, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=socket.SOMAXCONN)


def _own_address(place: Place) -> str | None:
    assert place.master_address
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(place.master_address, None, type=socket.SOCK_STREAM)}
    except OSError:
        return None
    own = {address for interface in machine.interfaces() for address in interface.ipv4 + interface.ipv6}
    if place.local_size == place.world_size:
        # `localhost` is 127.0.0.1 and ::1: the processes try both.
        loopback = sorted(address for address in found if ipaddress.ip_address(address.split("%")[0]).is_loopback)
        if loopback:
            return loopback[0]
    elif any(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in found):
        return None
    return found.pop() if len(found) == 1 and found <= own else None


def refuse_newcomers(descriptor: int) -> None:
    """From now on nobody can connect to a listening socket; connections that there are stay.

    For a socket that another library accepts from, and would go wrong if it were closed: Linux drops what would open
    a connection, by a filter of one instruction. Where it cannot, nothing changes.

    Args:
        descriptor: of the socket, which stays its owner's.
    """
    attach_filter, drop_all = 26, struct.pack("=HBBI", 0x06, 0, 0, 0)  # SO_ATTACH_FILTER; BPF_RET | BPF_K: 0 bytes
    program = ctypes.create_string_buffer(drop_all)
    listener = socket.socket(fileno=descriptor)
    try:
        with contextlib.suppress(OSError):
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                described = struct.pack("@HP", 1, ctypes.addressof(program))
                listener.setsockopt(socket.SOL_SOCKET, attach_filter, described)
    finally:
        listener.detach()
