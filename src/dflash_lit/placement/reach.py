"""Whether the hosts of a run reach each other at ports that nobody knew before, as gloo and NCCL need it.

Gloo itself tries for minutes where a firewall drops what it sends, and does not say what to do then. So one rank of each host opens a
door, tells the others where, and knocks at theirs, before the drafters meet.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import TYPE_CHECKING

from dflash_lit.errors import UserError
from dflash_lit.placement.interfaces import address_of

if TYPE_CHECKING:
    from dflash_lit.placement.world import World

__all__ = ["meet"]

_KNOCK_S = 10.0
"""For a connection; one whose first packet is lost comes with the second or third, 1 and 3 seconds later."""


def meet(world: World) -> list[str]:
    """Find that all hosts reach each other; called by local rank 0 of each. Rank 0 says which hosts there are.

    Returns:
        their names.

    Raises:
        UserError: naming the host that is not reached, and what to do.
        RankError: if a rank fails meanwhile.
    """
    hosts = range(world.layout.hosts)
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    address = address_of(name) if name else None  # where neither is known, gloo finds its own
    with contextlib.ExitStack() as stack:
        port = None
        if address is not None:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            door = stack.enter_context(socket.create_server((address, 0), family=family, backlog=len(hosts)))
            port = door.getsockname()[1]
        world.tell(f"door/{world.host}", [socket.gethostname(), name, address, port])
        doors = [world.told(f"door/{host}") for host in hosts]
        if world.rank == 0:
            places = ", ".join(_place(host, *door[:3]) for host, door in enumerate(doors))
            print(f"hosts: {places}", file=sys.stderr, flush=True)
        for host, (*place, number) in enumerate(doors):
            if host == world.host or number is None:
                continue
            try:
                socket.create_connection((place[2], number), _KNOCK_S).close()
            except OSError as error:
                raise UserError(
                    f"host {world.host} ({socket.gethostname()}, {name}) does not reach host {host} ({', '.join(place)}) at port {number}: "
                    f"{error.strerror or error}; gloo and NCCL choose ports when they start: let all through between the hosts, or set "
                    "placement.interface to the interface that leads to the others"
                ) from None
        world.tell(f"knocked/{world.host}", True)
        for host in hosts:
            world.told(f"knocked/{host}")
    return [door[0] for door in doors]


def _place(host: int, name: str, interface: str, address: str | None) -> str:
    """As in "1 is node7 (eth0, 10.0.0.2)"."""
    return f"{host} is {name}" + (f" ({interface}, {address})" if address else "")
