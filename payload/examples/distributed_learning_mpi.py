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
import sys

import hpcdist
import torch
import torch.distributed as dist


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--expect-world", type=int, metavar="N", help="fail unless W is N")
    parser.add_argument("--fail-rank", type=int, metavar="R", help="raise an exception on rank R")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    return parser.parse_args()


def say(line: str) -> None:
    # The newline goes out with its line: python -u writes it by itself, and ranks' lines mix.
    print(f"{line}\n", end="", flush=True)


def run(ctx: hpcdist.Context, arguments: argparse.Namespace) -> None:
    say(
        f"rank {ctx.rank} of {ctx.world_size} on {ctx.host}, local rank {ctx.local_rank}, "
        f"device {ctx.device}, backend {ctx.backend}"
    )
    if arguments.expect_world not in (None, ctx.world_size):
        raise SystemExit(f"world size is {ctx.world_size}, expected {arguments.expect_world}")
    if arguments.fail_rank == ctx.rank:
        raise RuntimeError(f"rank {ctx.rank} fails, as --fail-rank asked")

    tensor = torch.tensor([float(ctx.rank + 1)], device=ctx.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)

    total, wanted = int(tensor.item()), ctx.world_size * (ctx.world_size + 1) // 2
    if total != wanted:
        raise SystemExit(f"rank {ctx.rank}: sum is {total}, expected {wanted}")
    dist.barrier()  # OK is said only when all ranks have checked their sum
    if ctx.rank == 0:
        say(
            f"OK: sum {total} over {ctx.world_size} ranks on {ctx.num_nodes} node(s) "
            f"(backend {ctx.backend})"
        )


def main() -> None:
    arguments = parse_arguments()
    try:
        with hpcdist.session(backend="mpi", timeout=arguments.timeout) as ctx:
            run(ctx, arguments)
    except hpcdist.LaunchError as error:
        sys.exit(f"distributed_learning_mpi: {error}")


if __name__ == "__main__":
    main()
