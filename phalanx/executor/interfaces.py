"""Which of its addresses a node uses towards the others, and listening on that one only.

Nodes other than 0 use the address that their connection to node 0 comes from: the kernel's routes have chosen it. Node
0 uses what `--master-addr` says. A machine's own name is no evidence (it means 127.0.1.1 on many systems), nor is the
list of its interfaces (container bridges, unplugged ports). `PHALANX_HOST_IP` overrules the choice. Sends nothing.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket

from phalanx import env
from phalanx.config import ParallelConfig
from phalanx.errors import ConfigError

_SOMEWHERE = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))
"""Addresses that belong to nobody (RFC 5737, RFC 3849): the way to them is the default route."""

_TCP_THIN_LINEAR_TIMEOUTS = 16
"""Of Linux; Python has no name for it."""


def address_of_node_0(master_addr: str, override: str | None) -> str:
    """The address that node 0 listens on: `override`, or what `--master-addr` means on this machine.

    Raises ConfigError when that leaves no address that other nodes could use.
    """
    if override:
        return checked(override, "PHALANX_HOST_IP")
    try:
        address = ipaddress.ip_address(master_addr)
    except ValueError:
        return _by_name(master_addr)
    if address.is_unspecified:
        raise ConfigError(
            f"--master-addr {address} is no address that others could call, and would open this node to every network.",
            fix="Name the one address of node 0 that the other nodes reach.",
        )
    return str(address)


def _by_name(master_addr: str) -> str:
    try:
        found = socket.getaddrinfo(master_addr, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ConfigError(
            f"--master-addr {master_addr} is unknown on this node.", fix="Give node 0's address as a number."
        ) from None
    addresses = [str(entry[4][0]) for entry in found]
    if master_addr == "localhost":
        return addresses[0]
    usable = [address for address in addresses if not is_loopback(address)]
    if usable:
        return usable[0]
    for somewhere, family in _SOMEWHERE:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((somewhere, 9))
            return str(probe.getsockname()[0])
    raise ConfigError(
        f"--master-addr {master_addr} means {', '.join(sorted(set(addresses)))} on this node, which no other node can "
        "reach, and there is no default route to choose an address by.",
        fix="Give node 0's address as a number, or set PHALANX_HOST_IP here to the address that the others reach.",
    )


def checked(address: str, origin: str) -> str:
    """`address` in its normal form. Raises ConfigError when it is none, or does not belong to this machine."""
    try:
        plain = ipaddress.ip_address(address.strip())
    except ValueError:
        raise ConfigError(
            f"{origin} is '{address}', which is not an IP address.", fix="Write it as a number."
        ) from None
    if plain.is_unspecified:
        raise ConfigError(
            f"{origin} is {plain}, which would open this node to every network.",
            fix="Name the one address that the other nodes reach this node by.",
        )
    listener = listen(str(plain), 0, origin)
    listener.close()
    return str(plain)


def open_door(parallel: ParallelConfig, replica: int = 0) -> socket.socket:
    """Where the other nodes of that replica call, on node 0. Who opens it keeps it open over several engines, so that
    nodes can call while there is none. Raises ConfigError."""
    override = env.host_ip()
    host = address_of_node_0(parallel.master_addr or "", override)
    return listen(host, parallel.port_of(replica), "PHALANX_HOST_IP" if override else "--master-addr")


def listen(host: str, port: int, origin: str, in_use: str = "") -> socket.socket:
    """A listening socket on exactly this address; `origin` is the setting that named it, `in_use` what to do when the
    port is taken. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {port} on {host} is in use by another program.",
                fix=in_use or "Choose another --master-port, the same on every node.",
            ) from None
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise ConfigError(
                f"{origin} is {host}, which is not an address of this node.",
                fix="--master-addr names node 0. Where node 0 is behind address translation, set PHALANX_HOST_IP on it "
                "to its own address."
                if origin == "--master-addr"
                else "Set it to the address that the other nodes reach this node by, or leave it out.",
            ) from None
        raise ConfigError(f"Cannot listen on {host}, port {port}: {error.strerror or error}.") from None


def notice_silence(sock: socket.socket, milliseconds: int) -> None:
    """End the connection when nothing that was sent is acknowledged for so long; until then, try again all the time
    (not ever more rarely, as is usual), so that a shorter interruption is survived."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_THIN_LINEAR_TIMEOUTS, 1)


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def shown(host: str, port: int) -> str:
    """`10.0.0.1:29500`, `[fd00::1]:29500`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
