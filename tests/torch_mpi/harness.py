"""What the worker programs share: one mpi world, many checks, an exit code that tells."""

import sys
import time
import traceback
import warnings

import torch
import torch.distributed as dist


def check(condition, message):
    """Raise AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def same(got, want, message=""):
    """Check that two tensors have one dtype and shape and equal values; NaN equals NaN."""
    check(got.dtype == want.dtype, f"{message}: dtype {got.dtype}, wanted {want.dtype}")
    check(got.shape == want.shape, f"{message}: shape {got.shape}, wanted {want.shape}")
    if got.dtype.itemsize == 1 and got.dtype.is_floating_point:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    if got.is_floating_point():
        equal = bool(((got == want) | (got.isnan() & want.isnan())).all())
    else:
        equal = torch.equal(got, want)
    check(equal, f"{message}: got {got.flatten()[:5]} … wanted {want.flatten()[:5]} …")


def main(tests, backend="mpi"):
    """Run test(rank, size) for each test on all ranks; return the exit code.

    Arguments on the command line choose tests by name. A failing test ends the job: the ranks are
    out of step afterwards.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch renames its collectives
    chosen = [t for t in tests if len(sys.argv) == 1 or t.__name__ in sys.argv[1:]]
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    for test in chosen:
        start = time.perf_counter()
        try:
            test(rank, size)
            dist.barrier()
        except Exception:
            print(f"[{rank}] {test.__name__} FAILED\n{traceback.format_exc()}", flush=True)
            raise
        if rank == 0:
            print(f"{test.__name__}: ok ({time.perf_counter() - start:.1f} s)", flush=True)
    dist.destroy_process_group()
    return 0
