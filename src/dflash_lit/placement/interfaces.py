"""Which of this host's network interfaces a run uses: the loopback if it is all on one host, else the one that leads to host 0."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dflash_lit.errors import UserError

__all__ = ["ALL", "address_of", "check_interface", "interface_of", "listening_address", "on_interface", "route_to"]

ALL = "all"
"""``placement.interface=all``: listen on every interface."""

_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_SIOCGIFADDR = 0x8915
"""Of Linux: the IPv4 address of an interface."""


def names() -> list[str]:
    """Of this host's interfaces."""
    return [name for _, name in socket.if_nameindex()]


def check_interface(chosen: str | None) -> None:
    """Whether ``placement.interface`` can be.

    Raises:
        UserError: naming those that there are.
    """
    if chosen is not None and chosen != ALL and chosen not in names():
        raise UserError(f"placement.interface={chosen!r}: this host has {', '.join(names())}; name one, or {ALL!r}")


def address_of(name: str) -> str | None:
    """IPv4 address of an interface; None if it has none, or the system does not tell."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def interface_of(address: str) -> str | None:
    """The interface of an own IPv4 address; None if none is found."""
    if address.startswith("127."):
        return _LOOPBACK
    return next((name for name in names() if address_of(name) == address), None)


def route_to(address: str, port: int) -> str:
    """The own address from which this host reaches another (or itself). Nothing is sent."""
    family, kind, protocol, _, place = socket.getaddrinfo(address, port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def listening_address(address: str, port: int, chosen: str | None) -> str:
    """Where host 0 of several keeps the store: at the address by which the others reach it, and nowhere else.

    Args:
        address, port: of host 0, as all hosts were told.
        chosen: ``placement.interface``.

    Raises:
        UserError: if it is no address of this host, or one that no other host can reach.
    """
    if chosen == ALL:
        return ""
    if chosen is not None:
        if (own := address_of(chosen)) is None:
            raise UserError(f"placement.interface={chosen!r}: has no IPv4 address; name another, or {ALL!r}")
        return own
    cure = f"set MASTER_ADDR to an address of host 0, or placement.interface to its interface, or to {ALL!r}"
    try:
        found = str(socket.getaddrinfo(address, port or None, type=socket.SOCK_STREAM)[0][4][0])
        own = route_to(found, port)
    except (OSError, UnicodeError) as error:  # the latter of what can be no name
        raise UserError(f"MASTER_ADDR={address}: {getattr(error, 'strerror', None) or error}; {cure}") from None
    if found.startswith("127.") and address != "localhost" and not address.startswith("127."):
        raise UserError(f"MASTER_ADDR={address}: on host 0 that is {found}, which other hosts do not reach; {cure}")
    if own != found:
        raise UserError(f"MASTER_ADDR={address}: is no address of host 0, which reaches it from {own}; {cure}")
    return found


@contextmanager
def on_interface(address: str, port: int, chosen: str | None) -> Iterator[None]:
    """Inside, gloo and NCCL use the interface that leads to host 0; for both, what the user has set stays.

    Args:
        address, port: of host 0, as this host was told: the loopback if all of the run is here.
        chosen: ``placement.interface``.
    """
    name = chosen
    if chosen is None:
        with suppress(OSError):
            name = interface_of(route_to(address, port))
    if name is None or name == ALL:  # theirs to find, as without us
        yield
        return
    mine = [variable for variable in _VARIABLES if not os.environ.get(variable)]
    for variable in mine:
        # NCCL takes names for beginnings of names, unless told otherwise.
        os.environ[variable] = f"={name}" if variable.startswith("NCCL") else name
    try:
        yield
    finally:
        for variable in mine:
            os.environ.pop(variable, None)
