#!/usr/bin/env python3
"""all_reduce over MPI.

Launch it in one of these ways (--nv where there are GPUs):

    mpirun -n 4     singularity exec --nv IMAGE python -u distributed_learning_mpi.py
    srun --mpi=pmix singularity exec --nv IMAGE python -u distributed_learning_mpi.py
    singularity exec IMAGE mpirun -n 4 python -u distributed_learning_mpi.py     (one node)

torchrun is no MPI launcher: under it, this example says so and ends.

Every rank prints "rank R of W on HOST, local rank L, device D, backend mpi"; each contributes
rank + 1, and rank 0 ends with "OK: sum S over W ranks on N node(s) (backend mpi)". Any world size
will do. The exit code is 0 only if the sum is W(W+1)/2 on every rank.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Union

import hpcdist
import torch
import torch.distributed as dist
from hpcdist import mpi

Who = Union[hpcdist.Context, SimpleNamespace]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--expect-world", type=int, metavar="N", help="fail unless W is N")
    parser.add_argument("--fail-rank", type=int, metavar="R", help="raise an exception on rank R")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    return parser.parse_args()


def say(line: str) -> None:
    # The newline goes out with its line: python -u writes it by itself, and ranks' lines mix.
    print(f"{line}\n", end="", flush=True)


def run(
    who: Who,
    arguments: argparse.Namespace,
    all_reduce: Callable[[torch.Tensor], object],
    barrier: Callable[[], object],
) -> None:
    say(
        f"rank {who.rank} of {who.world_size} on {who.host}, local rank {who.local_rank}, "
        f"device {who.device}, backend {who.backend}"
    )
    if arguments.expect_world not in (None, who.world_size):
        raise SystemExit(f"world size is {who.world_size}, expected {arguments.expect_world}")
    if arguments.fail_rank == who.rank:
        raise RuntimeError(f"rank {who.rank} fails, as --fail-rank asked")

    tensor = torch.tensor([float(who.rank + 1)], device=who.device)
    all_reduce(tensor)

    total, wanted = int(tensor.item()), who.world_size * (who.world_size + 1) // 2
    if total != wanted:
        raise RuntimeError(f"rank {who.rank}: sum is {total}, expected {wanted}")
    barrier()  # OK is said only when all ranks have checked their sum
    if who.rank == 0:
        say(
            f"OK: sum {total} over {who.world_size} ranks on {who.num_nodes} node(s) "
            f"(backend {who.backend})"
        )


def run_with_mpi4py(arguments: argparse.Namespace) -> None:
    """The same over mpi4py, on the CPU, where torch has no mpi backend."""
    placement = hpcdist.identify(os.environ)
    mpi.require_launcher(placement)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    mpi.check_world(placement, world.Get_rank(), world.Get_size())
    try:
        host = socket.gethostname()
        who = SimpleNamespace(
            rank=placement.rank, world_size=placement.world_size, local_rank=placement.local_rank,
            host=host, num_nodes=len(set(world.allgather(host))), device="cpu", backend="mpi",
        )  # fmt: skip
        run(who, arguments, lambda x: world.Allreduce(MPI.IN_PLACE, x.numpy()), world.Barrier)
    except BaseException:
        # An ordinary exit would wait for the peers in MPI_Finalize.
        traceback.print_exc()
        world.Abort(1)


def main() -> None:
    arguments = parse_arguments()
    try:
        if not dist.is_mpi_available():
            return run_with_mpi4py(arguments)
        with hpcdist.session(backend="mpi", timeout=arguments.timeout) as ctx:
            run(ctx, arguments, dist.all_reduce, dist.barrier)
    except hpcdist.LaunchError as error:
        sys.exit(f"distributed_learning_mpi: {error}")


if __name__ == "__main__":
    main()
