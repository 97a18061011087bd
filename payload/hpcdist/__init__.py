"""Distributed PyTorch on a cluster: one call that finds rank, peers, address and device.

    import hpcdist

    with hpcdist.session() as ctx:                  # or: ctx = hpcdist.init(); ctx.close()
        x = torch.ones(1, device=ctx.device) * ctx.rank
        torch.distributed.all_reduce(x)

The same script runs under torchrun, srun, mpirun (Open MPI, MPICH, Intel MPI), ibrun, or alone;
`ctx.explain()` tells which of them was recognised, and by what. Importing this package does not
import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hpcdist.context import Context
from hpcdist.errors import LaunchError
from hpcdist.launchers import Placement, identify

__all__ = ["Context", "LaunchError", "Placement", "identify", "init", "session"]
__version__ = "0.1.0"


def init(
    *, backend: str | Sequence[str] = "auto", timeout: float = 600.0, quiet: bool = False
) -> Context:
    """Join the process group of this job and return what this rank is in it.

    Parameters
    ----------
    backend
        "nccl", "gloo", "mpi"; or several in order of preference, the first one that *every* rank
        can use is taken; or "auto", which is ("nccl", "mpi", "gloo"): nccl where every rank has a
        GPU of its own, mpi where MPI launched the ranks and torch has that backend, gloo otherwise.
    timeout
        Seconds that ranks wait for each other, when they join and in each collective later.
    quiet
        Do not print rank 0's one line (launcher, backend, world, nodes, master, interface).

    Raises
    ------
    LaunchError
        The launch contradicts itself, ranks are missing, or there are too few GPUs.
    """
    from hpcdist import group  # torch is imported here and not before

    return group.init(backend=backend, timeout=timeout, quiet=quiet)


@contextmanager
def session(
    *, backend: str | Sequence[str] = "auto", timeout: float = 600.0, quiet: bool = False
) -> Iterator[Context]:
    """Like `init`, and leave the group at the end of the block.

    While an exception is flying there is no barrier and no orderly shutdown: the connections are
    dropped, so that the peers fail at once instead of waiting for this rank, and the exception
    goes on to end the process with a non-zero code.
    """
    context = init(backend=backend, timeout=timeout, quiet=quiet)
    try:
        yield context
    except BaseException:
        context.abandon()
        raise
    context.close()
