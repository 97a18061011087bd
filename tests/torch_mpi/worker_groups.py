"""Groups: subsets, overlap, threads, splits, mixed worlds, destroy and init again.

Run by mpirun on two or more ranks.
"""

import copy
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from harness import check, main, same
from torch_mpi import _C


def ones_sum(group, n, count=5):
    t = torch.ones(count)
    dist.all_reduce(t, group=group)
    same(t, torch.full((count,), float(n)))


def test_subsets(rank, n):
    for first in range(n):
        members = [first, (first + 1) % n]
        group = dist.new_group(members)
        if rank in members:
            t = torch.tensor([float(rank)])
            dist.all_reduce(t, group=group)
            same(t, torch.tensor([float(sum(members))]))
            check(dist.get_backend(group) == "mpi", "backend of a subset")
            check(dist.get_group_rank(group, rank) == sorted(members).index(rank), "group rank")
            root = max(members)
            t = torch.tensor([rank])
            dist.broadcast(t, root, group=group)
            same(t, torch.tensor([root]), "global root in a subset")
    alone = dist.new_group([rank and 0])
    if rank == 0:
        ones_sum(alone, 1)
        t = torch.full((3,), 4.0)
        dist.all_reduce(t, dist.ReduceOp.AVG, group=alone)
        same(t, torch.full((3,), 4.0))
        out = [torch.empty(2)]
        dist.all_gather(out, torch.ones(2), group=alone)
        same(out[0], torch.ones(2))


def test_unsorted_ranks(rank, n):
    order = list(range(n))[::-1]
    group = dist.new_group(order, sort_ranks=False)
    check(group.rank() == n - 1 - rank, f"group rank {group.rank()}")
    out = torch.empty(n)
    dist.all_gather_into_tensor(out, torch.tensor([float(rank)]), group=group)
    same(out, torch.arange(float(n)).flip(0))


def test_many_groups_do_not_leak(rank, n):
    before = _C.live_communicators()
    for _ in range(200):
        group = dist.new_group()
        ones_sum(group, n, 1)
        dist.destroy_process_group(group)
    check(_C.live_communicators() == before, f"{_C.live_communicators()} live, {before} before")
    # A communicator that MPI has really freed can be made again for ever: 3000 more would exceed
    # the 2048 contexts of MPICH.
    groups = [dist.new_group() for _ in range(10)]
    check(_C.live_communicators() == before + 10, "ten more live")
    for group in groups:
        dist.destroy_process_group(group)
    try:
        dist.all_reduce(torch.ones(1), group=groups[0])
    except Exception as error:
        check(
            "destroyed" in str(error) or "not initialized" in str(error) or "Invalid" in str(error),
            str(error),
        )
    else:
        check(False, "a destroyed group was usable")


def test_overlapping_groups_in_threads(rank, n):
    """Each thread has groups of its own; all run at the same time, in unrelated orders."""
    world = [dist.new_group() for _ in range(3)]
    pairs = [dist.new_group([a, b]) for a in range(n) for b in range(a + 1, n)]
    errors = []

    def work(group, seed):
        try:
            size = dist.get_world_size(group)
            generator = torch.Generator().manual_seed(seed)
            for i in range(40):
                count = int(torch.randint(1, 60_000, (1,), generator=generator))
                t = torch.full((count,), float(i))
                if i % 3:
                    dist.all_reduce(t, group=group)
                else:
                    dist.all_reduce(t, group=group, async_op=True).wait()
                same(t, torch.full((count,), float(i * size)), f"thread {seed} step {i}")
        except BaseException as error:
            errors.append(error)

    mine = [(g, i) for i, g in enumerate(world)]
    mine += [
        (g, 100 + i) for i, g in enumerate(pairs) if g is not dist.GroupMember.NON_GROUP_MEMBER
    ]
    threads = [threading.Thread(target=work, args=m) for m in mine]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    check(not errors, f"{errors}")


def test_device_mesh(rank, n):
    from torch.distributed.device_mesh import init_device_mesh

    if n % 2:
        return
    mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("dp", "tp"))
    for name in ("dp", "tp"):
        group = mesh.get_group(name)
        check(dist.get_backend(group) == "mpi", f"mesh backend {dist.get_backend(group)}")
        t = torch.tensor([rank])
        dist.all_reduce(t, group=group)
        members = dist.get_process_group_ranks(group)
        same(t, torch.tensor([sum(members)]), f"mesh {name}")


def test_split(rank, n):
    """ProcessGroup.split_group, below dist.split_group, which wants an accelerator."""
    half = [r for r in range(n) if r % 2 == rank % 2]
    child = dist.group.WORLD.split_group(half, group_name=f"split{rank % 2}")
    check(child.size() == len(half) and child.rank() == half.index(rank), "split's rank and size")
    t = torch.tensor([float(rank)])
    child.allreduce([t]).wait()
    same(t, torch.tensor([float(sum(half))]))


def test_gloo_group_beside_mpi(rank, n):
    gloo = dist.new_group(backend="gloo")
    check(dist.get_backend(gloo) == "gloo", "gloo group")
    ones_sum(gloo, n)
    sub = dist.new_group([0, 1], backend="gloo")
    if rank < 2:
        ones_sum(sub, 2)
    dist.monitored_barrier(gloo, timeout=timedelta(seconds=30))
    ones_sum(None, n)
    mixed = dist.new_group(backend="cpu:mpi")
    ones_sum(mixed, n)
    store = dist.distributed_c10d._get_default_store()
    store.add("seen", 1)
    dist.barrier()
    check(int(store.get("seen")) == n, "the default store is real")


def test_sequence_and_options(rank, n):
    group = dist.new_group(timeout=timedelta(seconds=77))
    backend = group._get_backend(torch.device("cpu"))
    check(backend.name() == "mpi", backend.name())
    check(backend.options._timeout == timedelta(seconds=77), f"{backend.options._timeout}")
    ones_sum(group, n)
    check(backend.supports_splitting, "supports_splitting")
    options = copy.deepcopy(backend.options)  # as dist.split_group does
    check(options is not backend.options, "a copy of its own")
    check(options.backend == "mpi", options.backend)


def test_init_again(rank, n):
    """Leaves the default group as it found it."""
    for _ in range(3):
        dist.destroy_process_group()
        check(not dist.is_initialized(), "destroyed")
        dist.init_process_group("mpi", timeout=timedelta(seconds=60))
        ones_sum(None, n)
        ones_sum(dist.new_group(), n)
        ones_sum(dist.new_group(backend="gloo"), n)


def test_default_gloo_with_mpi_groups(rank, n):
    """The other mixed world: the rendezvous is torch's, mpi serves groups only."""
    import os

    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["TEST_PORT"])
    dist.init_process_group("gloo", rank=rank, world_size=n)
    mpi = dist.new_group(backend="mpi")
    check(dist.get_backend(mpi) == "mpi", "mpi under gloo")
    ones_sum(mpi, n)
    ones_sum(None, n)
    sub = dist.new_group([0, n - 1], backend="mpi")
    if rank in (0, n - 1):
        ones_sum(sub, 2)
    # Gather the errors of a wrong order of ranks before anything could hang.
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("cpu:mpi", rank=rank, world_size=n)
    ones_sum(None, n)
    dist.destroy_process_group()
    dist.init_process_group("mpi")


TESTS = [v for k, v in list(globals().items()) if k.startswith("test_")]

if __name__ == "__main__":
    sys.exit(main(TESTS))
