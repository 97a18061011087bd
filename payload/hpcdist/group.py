"""Join and leave torch's process group (imports torch)."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpcdist import agree, devices, launchers, meet, mpi, network
from hpcdist.agree import Fact, Verdict
from hpcdist.context import Context
from hpcdist.devices import Choice
from hpcdist.errors import LaunchError
from hpcdist.launchers import Placement

# How long a failed rank may take to close its connections, and then to end.
_ABORT_SECONDS = 2.0
_EXIT_SECONDS = 15
# How long the rank that serves the store stays for the others after it has finished.
_FAREWELL_SECONDS = 10.0


def init(*, backend: str | Sequence[str], timeout: float, quiet: bool) -> Context:
    """Join the process group; see `hpcdist.init`."""
    if dist.is_initialized():
        raise RuntimeError("torch.distributed has a process group already: call init() once")
    wanted = agree.list_backends(backend)
    placement = launchers.identify(os.environ)
    if wanted == ("mpi",):
        check_mpi_wanted(placement)
    visible = devices.look(os.environ)
    choice = devices.choose(
        placement.local_rank,
        placement.local_world_size,
        visible,
        may_share=wanted != ("nccl",),
    )
    if choice.index is not None:
        torch.cuda.set_device(choice.index)  # before anything may create a context on device 0
    fact = _state_fact(placement, choice, visible)
    if wanted == ("mpi",):
        return _join_by_mpi(placement, choice, fact, timeout=timeout, quiet=quiet)
    return _join_by_store(wanted, placement, choice, fact, timeout=timeout, quiet=quiet)


def check_mpi_wanted(placement: Placement) -> None:
    """Raise LaunchError where the mpi backend cannot work, before MPI makes worlds of one."""
    if not dist.is_mpi_available():
        raise LaunchError("backend mpi: this torch has none (torch.distributed.is_mpi_available)")
    mpi.require_launcher(placement)


def _state_fact(placement: Placement, choice: Choice, visible: Sequence[str]) -> Fact:
    return Fact(
        rank=placement.rank,
        host=socket.gethostname(),
        node_rank=placement.node_rank,
        local_rank=placement.local_rank,
        local_world_size=placement.local_world_size,
        gpu="" if choice.index is None else devices.name_hardware(choice.index, visible),
        mpi=placement.speaks_mpi and dist.is_mpi_available(),
    )


def _join_by_mpi(
    placement: Placement, choice: Choice, fact: Fact, *, timeout: float, quiet: bool
) -> Context:
    _start_mpi(placement, timeout)
    facts: list[Any] = [None] * placement.world_size
    dist.all_gather_object(facts, fact)
    agree.check_locality(facts)
    hosts, nodes = agree.list_nodes(facts)
    verdict = Verdict("mpi", "the only choice", hosts, nodes)
    how = (("rendezvous", "MPI"),)
    return _finish(placement, choice, verdict, how, store=None, quiet=quiet)


def _join_by_store(
    wanted: Sequence[str], placement: Placement, choice: Choice, fact: Fact,
    *, timeout: float, quiet: bool,
) -> Context:  # fmt: skip
    opened = meet.open_store(
        os.environ, placement, timeout=timeout, keep_mpi="mpi" in wanted and fact.mpi
    )
    verdict = agree.exchange(
        fact,
        lambda facts: agree.decide(wanted, facts, nccl=dist.is_nccl_available()),
        publish=opened.publish,
        collect=meet.make_collector(opened.store, timeout=timeout),
        world_size=placement.world_size,
    )
    meeting = opened.meeting
    where = f"{meeting.host} port {meeting.port}" if meeting.port else meeting.host
    how = [("rendezvous", f"{where}: {meeting.evidence}")]
    if verdict.backend == "mpi":
        _start_mpi(placement, timeout)
    else:
        peers = [meeting.host, *verdict.hosts]
        how.append(("interface", choose_interface(os.environ, peers, verdict.hosts)))
        device = None if verdict.backend != "nccl" else torch.device("cuda", choice.index or 0)
        dist.init_process_group(
            verdict.backend, store=opened.store, rank=placement.rank,
            world_size=placement.world_size, timeout=timedelta(seconds=timeout), device_id=device,
        )  # fmt: skip
    return _finish(placement, choice, verdict, tuple(how), store=opened, quiet=quiet)


def _start_mpi(placement: Placement, timeout: float) -> None:
    dist.init_process_group("mpi", timeout=timedelta(seconds=timeout))
    mpi.check_world(placement, dist.get_rank(), dist.get_world_size())


def choose_interface(
    environ: MutableMapping[str, str], peers: Sequence[str], hosts: Sequence[str]
) -> str:
    """Let gloo and nccl use the interface that leads to the peers; return what to report.

    Only where the ranks are on several hosts, and only variables that are unset are set. NCCL
    takes the name as a prefix ("eth1" is "eth10" too) unless it begins with "=".
    """
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    preset = [f"{name}={environ[name]} as set" for name in names if name in environ]
    if len(set(hosts)) < 2:
        return "; ".join(preset) or "one host: the library's own choice"
    # Towards itself a host goes by its loopback, so ask for the way to the others first.
    others = [peer for peer in peers if not network.is_this_host(peer)]
    address = network.find_own_address(others)
    interface = network.find_interface(address) if address else None
    if interface is None:
        return "; ".join(preset) or "no route to the peers was found: the library's own choice"
    environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    return "; ".join(preset) or f"{interface}, which has {address} and leads to {others[0]}"


def _finish(
    placement: Placement, choice: Choice, verdict: Verdict, how: Sequence[tuple[str, str]],
    *, store: meet.Store | None, quiet: bool,
) -> Context:  # fmt: skip
    device = torch.device("cpu") if choice.index is None else torch.device("cuda", choice.index)
    evidence = (
        ("launcher", f"{placement.launcher}: {' '.join(placement.evidence)}"),
        *how,
        ("device", f"{device}: {choice.reason}"),
        ("backend", f"{verdict.backend}: {verdict.why}"),
    )
    group = _Group(verdict.backend, store, placement.world_size)
    context = Context(
        rank=placement.rank, world_size=placement.world_size,
        local_rank=placement.local_rank, local_world_size=placement.local_world_size,
        node_rank=verdict.nodes[placement.rank], num_nodes=len(verdict.hosts),
        host=socket.gethostname(), hosts=verdict.hosts, device=device, backend=verdict.backend,
        launcher=placement.launcher, evidence=evidence, _leave=group.leave, _drop=group.drop,
    )  # fmt: skip
    if context.rank == 0 and not quiet:
        print(f"{announce(context)}\n", end="", file=sys.stderr, flush=True)
    return context


def announce(context: Context) -> str:
    """Return the line that rank 0 prints."""
    facts = dict(context.evidence)
    why = facts["backend"].split(": ", 1)[1]
    backend = context.backend if not why.startswith("not ") else f"{context.backend} ({why})"
    return (
        f"hpcdist: launcher {context.launcher}, backend {backend}, world {context.world_size}, "
        f"nodes {context.num_nodes}, master {facts['rendezvous'].split(': ')[0]}, "
        f"interface {facts.get('interface', 'chosen by MPI')}"
    )


@dataclass
class _Group:
    """The ways out of the process group."""

    backend: str
    store: meet.Store | None
    world_size: int

    def leave(self) -> None:
        if not dist.is_initialized():
            return
        dist.destroy_process_group()
        if self.store is not None:
            _say_farewell(self.store, self.world_size)
            self.store = None

    def drop(self) -> None:
        if not dist.is_initialized():
            return
        atexit.register(_limit_exit)
        # Closes this rank's connections, so that the peers fail now and not at their timeout. MPI
        # has no such call: there, whoever started MPI must end the job (MPI_Abort) at exit.
        if self.backend in ("nccl", "gloo"):
            # In a thread, because it waits for collectives that this rank has begun itself.
            abort = threading.Thread(target=_abort, daemon=True)
            abort.start()
            abort.join(_ABORT_SECONDS)


def _abort() -> None:
    # Private until torch makes it public; without it the end of the process has the same effect.
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is not None:
        with contextlib.suppress(Exception):  # another exception is being raised already
            abort()


def _limit_exit() -> None:
    """End this process, with a signal's exit code, if its last destructors wait for the peers.

    torch's destructors wait for collectives that were started and will never end (until their
    timeout, which may be half an hour); no Python code runs any more by then, so an alarm it is.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_EXIT_SECONDS)


def _say_farewell(opened: meet.Store, world_size: int) -> None:
    """Keep the store alive until the others are gone: they may still be reading from it.

    No barrier: only the rank that serves the store waits, and not for long.
    """
    with contextlib.suppress(RuntimeError):  # the server is gone: nothing to wait for
        gone = opened.store.add("hpcdist/gone", 1)
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while opened.own and gone < world_size and time.monotonic() < deadline:
            time.sleep(0.01)
            gone = opened.store.add("hpcdist/gone", 0)
