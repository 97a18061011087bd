"""One way for a job to fail (or end) per run: ``worker_failures.py SCENARIO``.

The driver checks exit code, duration and words on stderr. ``expect`` prints what was caught.
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

SCENARIO = sys.argv[1]


def leaving():
    """Tell the driver from when on the others are to be gone."""
    print(f"leaving at {time.time()}", flush=True)


def init(seconds=120):
    dist.init_process_group("mpi", timeout=timedelta(seconds=seconds))
    t = torch.ones(4)
    dist.all_reduce(t)
    return dist.get_rank(), dist.get_world_size()


def caught(call):
    """Return the message of the DistBackendError that call must raise."""
    try:
        call()
    except dist.DistBackendError as error:
        return str(error)
    raise AssertionError(f"{call} raised nothing")


def exception():
    rank, n = init()
    if rank == n - 1:
        leaving()
        raise ValueError("on purpose")
    dist.all_reduce(torch.ones(2))


def exception_while_others_compute():
    rank, n = init()
    if rank == n - 1:
        leaving()
        raise ValueError("on purpose")
    time.sleep(60)


def sys_exit_3():
    rank, n = init()
    if rank == n - 1:
        leaving()
        sys.exit(3)
    dist.all_reduce(torch.ones(2_000_000))


def sys_exit_3_while_others_compute():
    rank, n = init()
    if rank == n - 1:
        leaving()
        sys.exit(3)
    time.sleep(60)


def sys_exit_3_on_all():
    init()
    sys.exit(3)


def sys_exit_0():
    init()
    sys.exit(0)


def sys_exit_0_at_different_times():
    rank, n = init()
    time.sleep(3 * rank)
    print(f"rank {rank} has finished", flush=True)
    sys.exit(0)


def exit_without_destroy_with_work_in_flight():
    rank, n = init()
    t = torch.ones(3_000_000)
    work = dist.all_reduce(t, async_op=True)
    work.wait()
    dist.all_reduce(torch.ones(3), async_op=True)
    dist.barrier()


def os_exit():
    rank, n = init()
    if rank == n - 1:
        leaving()
        os._exit(1)
    dist.barrier()


def sigkill():
    rank, n = init()
    if rank == n - 1:
        leaving()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(2_000_000))


def sigkill_in_group():
    rank, n = init()
    group = dist.new_group()
    if rank == n - 1:
        leaving()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.ones(3), n - 1, group=group)


def timeout():
    """All ranks but the last wait in vain, say so, and carry on."""
    rank, n = init(3)
    if rank != n - 1:
        start = time.monotonic()
        text = caught(lambda: dist.all_reduce(torch.ones(2)))
        waited = time.monotonic() - start
        assert 2.5 < waited < 8, waited
        for word in (
            "allreduce",
            f"rank {rank} of {n}",
            "3000 ms",
            f"not yet arrived: [{n - 1}]",
        ):
            assert word in text, (word, text)
        text = caught(lambda: dist.all_reduce(torch.ones(2)))
        assert "any more" in text, text
        time.sleep(2)  # another rank may still be waiting: our exit would be its answer
    else:
        time.sleep(6)
    print("caught", flush=True)


def timeout_large():
    rank, n = init(3)
    if rank != n - 1:
        work = dist.all_reduce(torch.ones(3_000_000), async_op=True)
        text = caught(work.wait)
        assert f"not yet arrived: [{n - 1}]" in text, text
        assert work.is_completed() and work.exception() is not None
        time.sleep(2)
    else:
        time.sleep(6)
    print("caught", flush=True)


def timeout_p2p():
    rank, n = init(2)
    if rank == 0:
        text = caught(lambda: dist.recv(torch.ones(2), 1))
        assert "rank 1" in text and "2000 ms" in text, text
    else:
        time.sleep(3)
    dist.barrier()  # a receive given up does not spoil the group
    t = torch.zeros(2)
    if rank == 0:
        dist.recv(t, 1)
        assert t.eq(7).all(), t
    elif rank == 1:
        dist.send(torch.full((2,), 7.0), 0)
    print("caught", flush=True)


def timeout_of_one_call():
    rank, n = init()
    if rank != n - 1:
        text = caught(lambda: dist.barrier(timeout=timedelta(seconds=2)))
        assert "2000 ms" in text and "barrier" in text, text
    else:
        time.sleep(4)
    print("caught", flush=True)


def timeout_of_new_group():
    rank, n = init()
    if rank != n - 1:
        text = caught(lambda: dist.new_group(timeout=timedelta(seconds=3)))
        assert f"not yet arrived: [{n - 1}]" in text, text
    else:
        time.sleep(6)
    print("caught", flush=True)


def timeout_uncaught():
    rank, n = init(3)
    if rank == n - 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(2))


def left_group():
    rank, n = init()
    group = dist.new_group()
    if rank == n - 1:
        dist.destroy_process_group(group)
    else:
        text = caught(lambda: dist.all_reduce(torch.ones(2), group=group))
        assert f"rank {n - 1}" in text and "destroyed" in text, text
    print("caught", flush=True)


def abort_group():
    rank, n = init()
    group = dist.new_group()
    if rank != n - 1:
        work = dist.all_reduce(torch.ones(300_000), group=group, async_op=True)
        time.sleep(0.3)
        group.abort()
        assert "aborted" in caught(work.wait)
    ones = torch.ones(2)
    dist.all_reduce(ones)
    assert ones.eq(n).all()
    print("caught", flush=True)


def truncated():
    """MPI's own error becomes an exception with MPI's words."""
    rank, n = init()
    if rank == 0:
        dist.send(torch.ones(10), 1)
    elif rank == 1:
        text = caught(lambda: dist.recv(torch.ones(5), 0))
        assert "MPI_ERR_TRUNCATE" in text or "runcat" in text, text
    if rank == 1:
        dist.send(torch.ones(3), 0)
    elif rank == 0:
        text = caught(lambda: dist.recv(torch.ones(5), 1))
        assert "sent 12 bytes" in text, text
    dist.barrier()
    print("caught", flush=True)


def debug_detail():
    rank, n = init()
    odd = rank == n - 1
    cases = [
        (lambda: dist.all_reduce(torch.ones(3 if odd else 2)), "Float [3]", "Float [2]"),
        (
            lambda: dist.all_reduce(torch.ones(2, dtype=torch.float64 if odd else torch.float32)),
            "Double [2]",
            "Float [2]",
        ),
        (
            lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
            "MAX",
            "SUM",
        ),
        (lambda: dist.barrier() if odd else dist.all_reduce(torch.ones(2)), "barrier", "allreduce"),
        (lambda: dist.broadcast(torch.ones(2), rank == n - 1), "root 1", "root 0"),
        (
            lambda: (
                dist.all_reduce(torch.ones(2), async_op=True).wait()
                if not odd
                else dist.all_reduce(torch.ones(9))
            ),
            "Float [9]",
            "Float [2]",
        ),
    ]
    for call, theirs, ours in cases:
        text = caught(call)
        assert theirs in text and ours in text and f"[{n - 1}]" in text, text
        t = torch.ones(2)
        dist.all_reduce(t)  # all ranks have refused alike: the group still works
        assert t.eq(n).all()
    gathered = [torch.empty(r + 1) for r in range(n)]
    dist.all_gather(gathered, torch.full((rank + 1,), float(rank)))
    dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)])
    print("caught", flush=True)


def preempted_after_error():
    """A rank that catches an error and leaves with 0 does not hang the job."""
    rank, n = init(2)
    if rank == 0:
        caught(lambda: dist.all_reduce(torch.ones(2)))
        sys.exit(0)
    time.sleep(4)
    sys.exit(0)


if __name__ == "__main__":
    globals()[SCENARIO]()
