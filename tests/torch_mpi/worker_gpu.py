"""CUDA tensors, also with several ranks on one GPU. Run by mpirun on two or more ranks."""

import sys

import torch
import torch.distributed as dist
from harness import check, main, same


def here(rank):
    return torch.device("cuda", rank % torch.cuda.device_count())


def test_values(rank, n):
    device = here(rank)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
        for size in (3, 100_000, 3_000_000):
            t = torch.full((size,), rank + 1, dtype=dtype, device=device)
            dist.all_reduce(t)
            same(t.cpu(), torch.full((size,), n * (n + 1) // 2, dtype=dtype), f"{dtype} {size}")
            t = torch.full((size,), rank, dtype=dtype, device=device)
            dist.broadcast(t, 1)
            same(t.cpu(), torch.ones(size, dtype=dtype), f"broadcast {dtype} {size}")
            out = torch.empty(n * size, dtype=dtype, device=device)
            dist.all_gather_into_tensor(out, torch.full_like(t, rank))
            same(out.cpu(), torch.arange(n).to(dtype).repeat_interleave(size))
            part = torch.empty(size, dtype=dtype, device=device)
            dist.reduce_scatter_tensor(part, out)
            same(part.cpu(), torch.full((size,), n * rank, dtype=dtype))
    column = torch.ones(40, 40, device=device)[:, 3]
    dist.all_reduce(column, dist.ReduceOp.AVG)
    same(column.cpu(), torch.ones(40))
    ring = torch.empty(50_000, device=device)
    work = dist.isend(torch.full((50_000,), float(rank), device=device), (rank + 1) % n)
    dist.recv(ring, (rank - 1) % n)
    work.wait()
    same(ring.cpu(), torch.full((50_000,), float((rank - 1) % n)))


def test_streams(rank, n):
    """The operation waits for the stream it was issued on; wait() orders the current stream."""
    device = here(rank)
    side = torch.cuda.Stream(device)
    for _ in range(20):
        t = torch.zeros(4_000_000, device=device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # the fill comes late
            t.fill_(rank + 1.0)
            work = dist.all_reduce(t, async_op=True)
            work.wait()
            doubled = t * 2
        side.synchronize()
        check(bool((doubled == n * (n + 1)).all()), "read too early")


def test_ddp(rank, n):
    device = here(rank)
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 10).to(device)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp(torch.full((4, 20), float(rank), device=device)).sum().backward()
    want = torch.full((10, 20), 4 * (n - 1) / 2)
    check(torch.allclose(model.weight.grad.cpu(), want), "DDP gradient")


TESTS = [v for k, v in list(globals().items()) if k.startswith("test_")]

if __name__ == "__main__":
    sys.exit(main(TESTS))
