"""What only MPI can tell, and whether it may be asked (no torch; mpi4py only inside functions)."""

from __future__ import annotations

import os
import socket
import sys

from hpcdist import network
from hpcdist.errors import LaunchError
from hpcdist.launchers import Placement
from hpcdist.rendezvous import Meeting


def require_launcher(placement: Placement) -> None:
    """Raise LaunchError where the launcher does not let an MPI library find its peers.

    Without this, MPI_Init makes N worlds of one rank, and each of them ends with success.
    """
    if placement.speaks_mpi or placement.launcher == "single":
        return
    how = {
        "srun": "was started by srun without PMIx (neither PMIX_RANK nor PMI_RANK is set)",
        "torchrun": "was started by torchrun, which is no MPI launcher",
    }.get(placement.launcher, f"was started by {placement.launcher}")
    raise LaunchError(
        f"MPI needs mpirun or `srun --mpi=pmix`, but rank {placement.rank} of "
        f"{placement.world_size} {how}"
    )


def check_world(placement: Placement, rank: int, size: int) -> None:
    """Raise LaunchError where MPI came to another world than the launcher started."""
    if (rank, size) == (placement.rank, placement.world_size):
        return
    fix = "the MPI library in use must be of the family whose mpirun started the ranks"
    if placement.launcher == "srun":
        fix = "use `srun --mpi=pmix` (`srun --mpi=list` shows what Slurm offers)"
    raise LaunchError(
        f"MPI says rank {rank} of {size}, but {placement.launcher} started rank {placement.rank} "
        f"of {placement.world_size} ({placement.claim}): {fix}"
    )


def meet(placement: Placement, *, keep: bool) -> tuple[Meeting, socket.socket | None]:
    """Let rank 0 take a free port, and tell its address and port to all by a broadcast.

    Returns the meeting, and on rank 0 the socket that holds the port. MPI is finalized again
    unless `keep` (it may become the backend) or the program had started it itself.

    Raises
    ------
    LaunchError
        There is no mpi4py, or MPI's world is not the launcher's.
    """
    was_loaded = "mpi4py.MPI" in sys.modules
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise LaunchError(
            f"{placement.launcher} does not tell where rank 0 is, and MPI cannot be asked "
            f"({error}): set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there"
        ) from None
    world = MPI.COMM_WORLD
    check_world(placement, world.Get_rank(), world.Get_size())
    hosts = list(dict.fromkeys(world.allgather(socket.gethostname())))
    listener, told = None, None
    if placement.rank == 0:
        listener = network.listen_below_ephemeral(os.getpid())
        address = network.find_own_address(hosts[1:]) if len(hosts) > 1 else "127.0.0.1"
        told = (address or socket.gethostname(), listener.getsockname()[1], os.getpid())
    host, port, pid = world.bcast(told)
    if not keep and not was_loaded:
        # A rank that fails must not wait for its peers in MPI_Finalize at exit.
        MPI.Finalize()
    identity = f"mpi {host} {pid} world {placement.world_size}"
    return Meeting(host, port, placement.rank == 0, identity, "told by rank 0 over MPI"), listener
