"""More than 2^31 elements or bytes in one operation. Needs about 11 GiB for two ranks."""

import sys

import torch
import torch.distributed as dist
from harness import check, main

BEYOND = 2**31 + 1000


def same_everywhere(t, want, what):
    """Check ends, middle and chunk borders, and the sum by pieces: a mask of 2 GiB is too much."""
    for i in (0, 2**30 - 1, 2**30, 2**31 - 1, 2**31, t.numel() - 1):
        if i < t.numel():
            check(t[i].item() == want, f"{what}: element {i} is {t[i].item()}, wanted {want}")
    for piece in t.split(2**28):
        check(bool((piece == want).all()), f"{what}: a wrong value")


def test_all_reduce_of_2_31_elements(rank, n):
    t = torch.full((BEYOND,), rank + 1, dtype=torch.uint8)
    dist.all_reduce(t)
    same_everywhere(t, n * (n + 1) // 2, "all_reduce")


def test_broadcast_and_send(rank, n):
    t = torch.full((BEYOND,), 7 if rank == 1 else 0, dtype=torch.uint8)
    dist.broadcast(t, 1)
    same_everywhere(t, 7, "broadcast")
    if rank == 0:
        t.fill_(9)
        dist.send(t, 1)
    elif rank == 1:
        source = dist.recv(t)  # from any source: the rest must follow the first piece
        check(source == 0, f"source {source}")
        same_everywhere(t, 9, "send")


def test_all_gather(rank, n):
    part = torch.full((BEYOND // n,), rank + 1, dtype=torch.uint8)
    out = torch.empty(BEYOND // n * n, dtype=torch.uint8)
    dist.all_gather_into_tensor(out, part)
    for r in range(n):
        same_everywhere(out[r * part.numel() : (r + 1) * part.numel()], r + 1, "all_gather")


TESTS = [v for k, v in list(globals().items()) if k.startswith("test_")]

if __name__ == "__main__":
    sys.exit(main(TESTS))
