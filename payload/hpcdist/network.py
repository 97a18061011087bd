"""The machine's side of the rendezvous: sockets, names and interfaces (Linux, no torch)."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from hpcdist.errors import LaunchError
from hpcdist.rendezvous import DEFAULT_EPHEMERAL, is_loopback, list_ports

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def read_ephemeral_range(
    path: Path = Path("/proc/sys/net/ipv4/ip_local_port_range"),
) -> tuple[int, int]:
    """Return the range from which the kernel gives out ports; its default where unreadable."""
    try:
        first, last = path.read_text().split()
        return int(first), int(last)
    except (OSError, ValueError):
        return DEFAULT_EPHEMERAL


def listen(port: int) -> socket.socket:
    """Return a socket that listens on `port` (0: any free one), for IPv4 and IPv6.

    Raises
    ------
    LaunchError
        The port is taken.
    """
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        what = "is taken" if error.errno == errno.EADDRINUSE else "is privileged"
        raise LaunchError(
            f"port {port} {what} on {socket.gethostname()}, where the ranks should meet: "
            "set MASTER_PORT to a free port, the same for all ranks, and start again"
        ) from None


def listen_below_ephemeral(start: int) -> socket.socket:
    """Listen on the first free port of the range, from a place that `start` (a pid) decides."""
    low, high = list_ports(read_ephemeral_range())
    for offset in range(100):
        try:
            return listen(low + (start + offset) % (high - low))
        except LaunchError:
            continue
    return listen(0)


def wait_for_port(host: str, port: int, *, timeout: float) -> None:
    """Return when something listens on host:port.

    Raises
    ------
    LaunchError
        Nothing does within `timeout` seconds, or the name cannot be resolved.
    """
    deadline = time.monotonic() + timeout
    pause, reason = 0.02, "no answer"
    while time.monotonic() < deadline:
        try:
            limit = min(5.0, max(0.1, deadline - time.monotonic()))
            socket.create_connection((host, port), timeout=limit).close()
            return
        except socket.gaierror as error:
            reason = f"its name cannot be resolved ({error.strerror})"
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
    raise LaunchError(
        f"{socket.gethostname()} could not reach {host} port {port} within {timeout:g} s: "
        f"{reason}. Did the rank there start, and does a firewall let the nodes talk? "
        "MASTER_ADDR and MASTER_PORT choose another place to meet"
    )


def resolves_to_loopback(host: str) -> bool:
    """Tell whether all addresses of a name are loopbacks (as by "127.0.1.1 NAME" in /etc/hosts)."""
    addresses = _resolve(host)
    return bool(addresses) and all(is_loopback(address) for address in addresses)


def is_this_host(host: str) -> bool:
    """Tell whether a host name or address is this machine."""
    own = socket.gethostname()
    if is_loopback(host) or host.split(".")[0] == own.split(".")[0]:
        return True
    return any(_is_own_address(family, target) for family, *_, target in _look_up(host))


def _is_own_address(family: int, target: tuple[str, int]) -> bool:
    # Only an address of this machine can be bound; unlike a look through the interfaces, this
    # also knows their secondary addresses.
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((target[0], 0, *target[2:]))
            return True
    except OSError:
        return False


def find_own_address(towards: Sequence[str]) -> str | None:
    """Return the address from which this machine reaches the first of some hosts that it can.

    A datagram socket's connect() asks the routing table and sends nothing. Addresses that are
    loopbacks say nothing about the network and are passed over.
    """
    for host in towards:
        for family, kind, _, _, target in _look_up(host):
            if is_loopback(str(target[0])):
                continue
            try:
                with socket.socket(family, kind) as probe:
                    probe.connect(target)
                    return str(probe.getsockname()[0])
            except OSError:
                continue
    return None


def find_interface(address: str) -> str | None:
    """Return the name of the interface that has this address, or None."""
    try:
        wanted = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return None
    if wanted.version == 6:
        mapped = wanted.ipv4_mapped
        if mapped is None:
            return _find_interface_v6(wanted)
        wanted = mapped
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            if reply[20:24] == wanted.packed:
                return name
    return None


def _find_interface_v6(wanted: ipaddress.IPv6Address) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        digits, *_, name = line.split()
        if bytes.fromhex(digits) == wanted.packed:
            return name
    return None


def _resolve(host: str) -> list[str]:
    return [str(target[0]) for *_, target in _look_up(host)]


def _look_up(host: str) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    try:
        # Port 9 is "discard": any number will do, as nothing is sent.
        return socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)  # type: ignore[return-value]
    except (OSError, UnicodeError):
        return []
