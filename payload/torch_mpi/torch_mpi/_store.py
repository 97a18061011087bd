"""A key-value store for a job that has only MPI: gloo groups and timeouts need one."""

import contextlib
import json
import os
import socket
from datetime import timedelta
from pathlib import Path

_CONNECT = timedelta(seconds=10)


def _network():
    """Return a string that is the same for two processes exactly if 127.0.0.1 is the same to both.

    One kernel (its boot id) may hold several networks: containers and pods have their own
    namespaces (network_namespaces(7)), whose inode tells them apart.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"  # noqa: PTH115
    except OSError:
        return socket.gethostname()


def _addresses():
    """Return names and addresses under which others may reach this machine, best first."""
    name = socket.gethostname()
    found = []
    try:  # the source address of the default route; UDP connect sends nothing
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            found.append(probe.getsockname()[0])
    except OSError:
        pass
    found.append(name)
    with contextlib.suppress(OSError):
        found += [entry[4][0] for entry in socket.getaddrinfo(name, None, socket.AF_INET)]
    usable = [a for a in dict.fromkeys(found) if not a.startswith("127.")]
    given = os.environ.get("MASTER_ADDR")
    return ([given] if given else []) + usable


def create(extension):
    """Return a TCPStore that all ranks of the job share. Collective over the whole job.

    Rank 0 serves it on a free port and tells the others through MPI where; nobody needs
    MASTER_ADDR, MASTER_PORT, RANK or WORLD_SIZE.

    Parameters
    ----------
    extension : module
        ``torch_mpi._C`` with MPI started.

    Raises
    ------
    RuntimeError
        When rank 0 cannot be reached by TCP; names the addresses that were tried.
    """
    from torch.distributed import TCPStore

    rank, size = extension.world_rank(), extension.world_size()
    server = None
    if rank == 0:
        server = TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False)
        here = {"port": server.port, "network": _network(), "addresses": _addresses()}
    message = extension.broadcast_bytes(json.dumps(here).encode() if rank == 0 else b"")
    if server is not None:
        return server
    there = json.loads(message)
    port = there["port"]
    hosts = (["127.0.0.1"] if there["network"] == _network() else []) + there["addresses"]
    problems = []
    for host in hosts:
        try:
            store = TCPStore(host, port, size, False, timeout=_CONNECT, wait_for_workers=False)
        except Exception as error:
            problems.append(f"{host}: {str(error).splitlines()[0]}")
            continue
        store.set_timeout(timedelta(minutes=5))
        return store
    raise RuntimeError(
        f"Rank {rank} on {socket.gethostname()} cannot reach the store of rank 0 at port {port}: "
        + "; ".join(problems)
        + ". Set MASTER_ADDR to an address of rank 0's machine that all nodes can reach."
    )
