"""Open the store through which the ranks find each other (imports torch)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hpcdist import mpi, network, rendezvous
from hpcdist.errors import LaunchError
from hpcdist.launchers import Placement
from hpcdist.rendezvous import Meeting

_IDENTITY = "hpcdist/identity"
# The listener writes its identity as soon as it listens; a peer that waits longer than this has
# connected to something else.
_IDENTITY_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True)
class Store:
    """torch's store, and where it is."""

    store: Any
    meeting: Meeting
    own: bool  # this rank serves it

    def publish(self, key: str, text: str) -> None:
        self.store.set(key, text)


def open_store(
    environ: Mapping[str, str], placement: Placement, *, timeout: float, keep_mpi: bool
) -> Store:
    """Meet the peers and return the store that all of them have opened.

    `keep_mpi`: where MPI had to be started to find rank 0's address, leave it running, because it
    may become the backend.

    Raises
    ------
    LaunchError
        The port is taken, the listener cannot be reached, or another job listens there.
    """
    if placement.world_size == 1 and placement.launcher != "torchrun":
        alone = Meeting("none", 0, True, "", "one rank")
        return Store(dist.HashStore(), alone, own=True)
    meeting = rendezvous.plan(environ, placement, ephemeral=network.read_ephemeral_range())
    if placement.launcher == "torchrun":
        assert meeting is not None  # plan() says so for torchrun
        return Store(_open_torchrun_store(timeout), meeting, own=False)
    listener: socket.socket | None = None
    if meeting is None:
        meeting, listener = mpi.meet(placement, keep=keep_mpi)
    if meeting.listens:
        if placement.spans_nodes:
            _check_host_is_here(meeting)
        listener = listener or network.listen(meeting.port)
        return Store(_serve(listener, meeting, placement, timeout), meeting, own=True)
    if placement.spans_nodes:
        _check_host_is_elsewhere_reachable(meeting)
    return Store(_connect(meeting, placement, timeout), meeting, own=False)


def make_collector(store: Any, *, timeout: float) -> Callable[[Sequence[str]], list[str]]:
    """Return collect(keys) for `agree.exchange`: wait for all keys, and name what is missing."""

    def collect(keys: Sequence[str]) -> list[str]:
        try:
            store.wait(list(keys), timedelta(seconds=timeout))
            return [value.decode() for value in store.multi_get(list(keys))]
        except RuntimeError as error:
            try:
                missing = [key.rsplit("/", 1)[1] for key in keys if not store.check([key])]
            except RuntimeError:
                raise LaunchError(f"the rank that serves the store has ended: {error}") from None
            raise LaunchError(_describe_missing(missing, len(keys), timeout)) from None

    return collect


def _describe_missing(missing: Sequence[str], total: int, timeout: float) -> str:
    if missing == ["verdict"]:
        return f"rank 0 did not join within {timeout:g} s"
    shown = ", ".join(missing[:10]) + (", …" if len(missing) > 10 else "")
    return (
        f"{len(missing)} of {total} ranks did not join within {timeout:g} s: {shown}; "
        "read these ranks' own output for the cause"
    )


def _open_torchrun_store(timeout: float) -> Any:
    from torch.distributed.rendezvous import rendezvous as torch_rendezvous

    store, _, _ = next(torch_rendezvous("env://", timeout=timedelta(seconds=timeout)))
    return store


def _serve(listener: socket.socket, meeting: Meeting, placement: Placement, timeout: float) -> Any:
    # torch takes over the socket that was tested, so nobody can grab the port in between. Its own
    # client goes through the loopback, whatever the host name resolves to here.
    store = dist.TCPStore(
        "127.0.0.1", listener.getsockname()[1], placement.world_size, is_master=True,
        wait_for_workers=False, timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    store.set(_IDENTITY, meeting.identity)
    return store


def _connect(meeting: Meeting, placement: Placement, timeout: float) -> Any:
    network.wait_for_port(meeting.host, meeting.port, timeout=timeout)
    where = f"{meeting.host} port {meeting.port}"
    try:
        store = dist.TCPStore(
            meeting.host, meeting.port, placement.world_size, is_master=False,
            wait_for_workers=False, timeout=timedelta(seconds=min(timeout, 60.0)),
        )  # fmt: skip
        store.set_timeout(timedelta(seconds=timeout))
        store.wait([_IDENTITY], _IDENTITY_TIMEOUT)
        identity = store.get(_IDENTITY).decode()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(f"{where} is not this job's store ({reason}): set MASTER_PORT") from None
    if identity != meeting.identity:
        raise LaunchError(
            f"{where} belongs to another job ({identity}, wanted {meeting.identity}): "
            "set MASTER_PORT to a free port, the same for all ranks"
        )
    return store


def _check_host_is_here(meeting: Meeting) -> None:
    if not network.is_this_host(meeting.host):
        raise LaunchError(
            f"the ranks would meet on {meeting.host} ({meeting.evidence}), but the rank that must "
            f"listen there runs on {socket.gethostname()}: set MASTER_ADDR={socket.gethostname()}"
        )


def _check_host_is_elsewhere_reachable(meeting: Meeting) -> None:
    if not network.is_this_host(meeting.host) and network.resolves_to_loopback(meeting.host):
        raise LaunchError(
            f"{meeting.host} resolves to a loopback address on {socket.gethostname()}: correct "
            f"/etc/hosts, or set MASTER_ADDR to the address of {meeting.host} on the network"
        )
