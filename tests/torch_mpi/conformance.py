"""PyTorch's own conformance suite for c10d backends, run for ``mpi`` under mpirun.

    mpirun -n 2 python tests/torch_mpi/conformance.py [test names]

The suite is ``DistributedTest._DistTestBase`` of torch's distributed_test module. Upstream runs it
once for each backend, in processes that it spawns itself. Here mpirun has spawned them: each test
gets a fresh default group, runs on all ranks, and rank 0 prints a table of what passed, what the
suite skipped and why. The exit code is 0 when nothing failed.
"""

import json
import os
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from collections import defaultdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# Tests that upstream's suite would run and that cannot pass here, with the reason.
SKIPS = {
    "test_barrier_timeout_global": "needs a rendezvous by file://, which mpi does not use",
    "test_SyncBatchNorm_process_group": "needs torchvision and a GPU",
    "test_all_to_all_cuda": "needs CUDA (the suite's own check is missing)",
    "test_all_to_all_cuda_complex": "needs CUDA (the suite's own check is missing)",
    "test_all_to_all_full_group_cuda": "needs CUDA (the suite's own check is missing)",
    "test_all_to_all_group_cuda": "needs CUDA (the suite's own check is missing)",
}
# Upstream leaves these out for all backends but gloo; this one can do them.
RUN_ANYWAY = {
    "Only gloo backend supports timeouts",
    "Only Nccl & Gloo backend support DistributedDataParallel",
}
# ranks a test needs without saying so
NEEDS = {"test_new_subgroups_with_group_param": 4}


def shared_folder():
    """Return a folder that all ranks of this job see, made by rank 0."""
    dist.init_process_group("mpi")
    folder = [tempfile.mkdtemp(prefix="conformance-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    return Path(folder[0]), rank, size


def load_suite(folder, size):
    """Import upstream's module, which reads its settings from the environment on import."""
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / name).mkdir(exist_ok=True)
    os.environ.update(BACKEND="mpi", WORLD_SIZE=str(size), TEMP_DIR=str(folder))
    from torch.testing._internal.common_distributed import DistTestCases

    # The suite describes upstream's own MPI backend; this one can do more.
    for feature in ("gpu", "cuda", "ddp", "subgroup"):
        DistTestCases.backend_feature[feature].add("mpi")
    DistTestCases.skip_collective["allgather_coalesced"].discard("mpi")
    torch.manual_seed(0)  # the suite's global models must be the same on all ranks
    from torch.testing._internal.distributed import distributed_test

    # Upstream's check for tests that need three ranks leaves mpi out, by this variable.
    os.environ["BACKEND"] = "mpi on two or more ranks"

    class TestMPI(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        """The suite bound to processes that exist already."""

    return TestMPI, distributed_test


def exit_reason(code):
    """Return why a test left with this exit code, or None if it is no skip."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    for skip in TEST_SKIPS.values():
        if skip.exit_code == code:
            return skip.message
    return None


def run_test(suite, module, name, rank):
    """Run one test on this rank; return (outcome, detail)."""
    from torch.testing._internal.common_utils import set_rng_seed

    function = getattr(suite, name)
    why = getattr(function, "__unittest_skip_why__", "")
    if getattr(function, "__unittest_skip__", False) and why not in RUN_ANYWAY:
        return "skipped", why
    if NEEDS.get(name, 0) > int(os.environ["WORLD_SIZE"]):
        return "skipped", f"Needs {NEEDS[name]} ranks"
    test = suite(name)
    test.rank = rank
    test.file_name = os.environ["TEMP_DIR"] + "/file"
    set_rng_seed(1234)
    seconds = module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout)
    dist.init_process_group("mpi", timeout=timedelta(seconds=seconds))
    try:
        dist.barrier()
        function(test)
        dist.barrier()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as end:
        reason = exit_reason(end.code)
        return ("skipped", reason) if reason else ("failed", f"sys.exit({end.code})")
    except BaseException:
        return "failed", traceback.format_exc()
    finally:
        dist.destroy_process_group()
    return "passed", ""


def main():
    """Run the suite; return the exit code."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder, rank, size = shared_folder()
    suite, module = load_suite(folder, size)
    names = sys.argv[1:] or sorted(n for n in dir(suite) if n.startswith("test_"))
    lines = folder / f"results.{rank}"
    with lines.open("w") as log:
        for name in names:
            start = time.perf_counter()
            if name in SKIPS:
                outcome, detail = "skipped", SKIPS[name]
            else:
                outcome, detail = run_test(suite, module, name, rank)
            seconds = round(time.perf_counter() - start, 2)
            log.write(json.dumps([name, outcome, detail, seconds]) + "\n")
            log.flush()
            if rank == 0 and outcome == "failed":
                print(f"{name} FAILED\n{detail}", flush=True)
    dist.init_process_group("mpi")
    dist.barrier()
    failed = 0
    if rank == 0:
        failed = report(folder, size)
    status = [failed]
    dist.broadcast_object_list(status)
    dist.destroy_process_group()
    return 1 if status[0] else 0


def report(folder, size):
    """Print the table; return the number of tests that failed on any rank."""
    outcomes = defaultdict(dict)
    for r in range(size):
        for line in (folder / f"results.{r}").read_text().splitlines():
            name, outcome, detail, seconds = json.loads(line)
            outcomes[name][r] = (outcome, detail, seconds)
    passed, failed, skipped = [], [], defaultdict(list)
    for name, by_rank in outcomes.items():
        kinds = {outcome for outcome, _, _ in by_rank.values()}
        if "failed" in kinds:
            failed.append(name)
        elif kinds == {"skipped"}:
            skipped[by_rank[0][1]].append(name)
        else:
            passed.append(name)
    print(f"\nPyTorch {torch.__version__}, backend mpi, {size} ranks")
    print(f"passed {len(passed)}, failed {len(failed)}, skipped {sum(map(len, skipped.values()))}")
    for reason, names in sorted(skipped.items(), key=lambda item: -len(item[1])):
        print(f"  {len(names):4} skipped: {reason}")
    for name in failed:
        ranks = [r for r, (outcome, _, _) in outcomes[name].items() if outcome == "failed"]
        detail = outcomes[name][ranks[0]][1].strip().splitlines()[-1]
        print(f"  FAILED on ranks {ranks}: {name}: {detail}")
    slow = sorted(((v[0][2], k) for k, v in outcomes.items()), reverse=True)[:5]
    print("slowest: " + ", ".join(f"{name} {seconds} s" for seconds, name in slow))
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
