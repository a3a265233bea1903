"""Which of this host's network interfaces a run uses: the loopback if it is all on one host, else the one that leads to host 0."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_lit.errors import UserError

__all__ = ["ALL", "address_of", "check_interface", "interface_of", "listening_address", "on_interface", "route_to"]

ALL = "all"
"""``placement.interface=all``: listen on every interface."""

_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_SIOCGIFCONF = 0x8912
"""Of Linux: all IPv4 addresses, each with the name of its interface."""
_IFREQ = 40
"""Bytes of an entry: the name in 16, then a sockaddr."""
_IPV6 = Path("/proc/net/if_inet6")


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


def _addresses() -> list[tuple[str, str]]:
    """Names of interfaces and their addresses, IPv4 first; none where the system does not tell. Link-local IPv6 ones are left out."""
    if sys.platform != "linux":
        return []
    found = []
    entries = array.array("B", bytes(256 * _IFREQ))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        request = struct.pack("iP", len(entries), entries.buffer_info()[0])
        size = struct.unpack("iP", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))[0]
        for start in range(0, size, _IFREQ):
            entry = entries[start : start + _IFREQ].tobytes()
            label = entry[:16].split(b"\0", 1)[0].decode()
            found.append((label.split(":")[0], socket.inet_ntoa(entry[20:24])))  # "eth0:1" is a second one of eth0
    with suppress(OSError):
        for line in _IPV6.read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if int(scope, 16) != 0x20:
                found.append((name, str(ipaddress.IPv6Address(int(digits, 16)))))
    return found


def address_of(name: str) -> str | None:
    """Address of an interface, IPv4 if it has one; None if it has none, or the system does not tell."""
    return next((address for owner, address in _addresses() if owner == name), None)


def interface_of(address: str) -> str | None:
    """The interface of an own address; None if none is found."""
    if _is_loopback(address):
        return _LOOPBACK
    if "%" in address:
        return address.rsplit("%", 1)[1]  # link-local
    return next((name for name, own in _addresses() if own == address), None)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _is_name(address: str) -> bool:
    """Whether another host may mean another place by it."""
    return address != "localhost" and not _is_loopback(address)


def _resolved(address: str, port: int) -> str:
    return str(socket.getaddrinfo(address, port or None, type=socket.SOCK_STREAM)[0][4][0])


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
        chosen: ``placement.interface``. It is for gloo and NCCL; the store is there where ``address`` leads to no interface of host 0.

    Raises:
        UserError: if it is no address of this host, or one that no other host can reach.
    """
    if chosen == ALL:
        if (
            _is_name(address)
            and _route_interface(address, port) == _LOOPBACK
            and len(_outward()) > 1
            and not os.environ.get(_VARIABLES[0])
        ):
            raise UserError(
                f"MASTER_ADDR={address}: on host 0 that is the loopback, and which of {', '.join(_outward())} leads to the other hosts "
                f"placement.interface={ALL!r} does not say; name it, or set MASTER_ADDR to an address of host 0"
            )
        return ""
    if chosen is not None:
        with suppress(OSError):
            found = _resolved(address, port)
            if not _is_loopback(found) and interface_of(found) is not None:
                return found
        if (own := address_of(chosen)) is None:
            raise UserError(f"placement.interface={chosen!r}: has no address; name another, or {ALL!r}")
        return own
    cure = f"set MASTER_ADDR to an address of host 0, or placement.interface to its interface, or to {ALL!r}"
    try:
        found = _resolved(address, port)
        own = route_to(found, port)
    except (OSError, UnicodeError) as error:  # the latter of what can be no name
        raise UserError(f"MASTER_ADDR={address}: {getattr(error, 'strerror', None) or error}; {cure}") from None
    if _is_name(address) and _is_loopback(found):
        raise UserError(f"MASTER_ADDR={address}: on host 0 that is {found}, which other hosts do not reach; {cure}")
    if own != found and interface_of(found) is None:  # a second address of an interface is not the one it sends from
        raise UserError(f"MASTER_ADDR={address}: is no address of host 0, which reaches it from {own}; {cure}")
    return found


def _outward() -> list[str]:
    """Interfaces that may lead to other hosts."""
    return list(dict.fromkeys(name for name, address in _addresses() if not _is_loopback(address)))


def _route_interface(address: str, port: int) -> str | None:
    with suppress(OSError):
        return interface_of(route_to(address, port))
    return None


@contextmanager
def on_interface(address: str, port: int, chosen: str | None) -> Iterator[None]:
    """Inside, gloo and NCCL use the interface that leads to host 0; for both, what the user has set stays.

    Args:
        address, port: of host 0, as this host was told: the loopback if all of the run is here.
        chosen: ``placement.interface``.
    """
    name = _route_interface(address, port) if chosen in (None, ALL) else chosen
    if chosen in (None, ALL) and name == _LOOPBACK and _is_name(address):  # host 0's own, which leads nowhere else there
        (name,) = _outward() if len(_outward()) == 1 else (None,)
    if name is None:  # theirs to find, as without us
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
