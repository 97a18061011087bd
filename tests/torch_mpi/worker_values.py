"""Every collective, dtype and reduction against a float64 (or exact) reference.

Run by mpirun on any number of ranks; exits with 0 when all values are right. Each check builds the
inputs of all ranks from a seed, so that every rank knows what the others contribute.
"""

import sys

import torch
import torch.distributed as dist
from harness import check, main, same

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTS = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
COMPLEX = [torch.complex64, torch.complex128]
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
Op = dist.ReduceOp
SIZES = [1, 3, 1000, 5000, 70_001]


def sample(dtype, shape, rank, salt=0):
    """Return rank's contribution of this dtype and shape: small values, the same on all ranks."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype in INTS:
        return torch.randint(1, 6, shape, generator=generator).to(dtype)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def exact(t):
    """Return t in a type in which sums and products of it are exact enough to compare with."""
    if t.dtype.is_complex:
        return t.to(torch.complex128)
    return t.to(torch.float64 if t.dtype.is_floating_point else torch.int64)


def reference(parts, op):
    """Reduce a list of tensors in float64, int64 or complex128."""
    parts = [exact(p) for p in parts]
    stacked = torch.stack(parts)
    if op in (Op.SUM, Op.AVG):
        total = stacked.sum(0)
        if op == Op.AVG:
            total = (
                total / len(parts)
                if total.is_floating_point() or total.is_complex()
                else (torch.div(total, len(parts), rounding_mode="trunc"))
            )
        return total
    if op == Op.PRODUCT:
        return stacked.prod(0)
    if op == Op.MIN:
        return stacked.amin(0)
    if op == Op.MAX:
        return stacked.amax(0)
    result = parts[0]
    for p in parts[1:]:
        result = {Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor}[
            op
        ](result, p)
    return result


def tolerance(dtype):
    # One rounding from an accumulation in float32 is half a unit in the last place.
    return {
        torch.float64: 1e-12,
        torch.complex128: 1e-12,
        torch.float32: 1e-5,
        torch.complex64: 1e-5,
        torch.float16: 2.0**-11,
        torch.bfloat16: 2.0**-8,
    }.get(dtype, 0)


def close(got, want, dtype, what):
    got = exact(got)
    if dtype in INTS or dtype == torch.bool:
        info = None if dtype in (torch.bool, torch.uint64, torch.int64) else torch.iinfo(dtype)
        if info is not None:  # wraps as torch's own integers do
            span = info.max - info.min + 1
            want = (want - info.min) % span + info.min
        check(
            torch.equal(got, want.to(got.dtype)),
            f"{what}: {got.flatten()[:4]} != {want.flatten()[:4]}",
        )
        return
    error = (got - want).abs()
    bound = tolerance(dtype) * want.abs() * 1.01 + 1e-7
    if dtype in (torch.float32, torch.complex64):
        bound = bound + 1e-6
    check(
        bool((error <= bound).all()), f"{what}: off by {error.max()} where {bound.min()} is allowed"
    )


def reductions_of(dtype):
    if dtype == torch.bool:
        return {
            Op.SUM: Op.BOR,
            Op.MAX: Op.BOR,
            Op.BOR: Op.BOR,
            Op.PRODUCT: Op.BAND,
            Op.MIN: Op.BAND,
            Op.BAND: Op.BAND,
            Op.BXOR: Op.BXOR,
        }
    ops = [Op.SUM, Op.PRODUCT, Op.AVG]
    if not dtype.is_complex:
        ops += [Op.MIN, Op.MAX]
    if dtype in INTS:
        ops += [Op.BAND, Op.BOR, Op.BXOR]
    return {op: op for op in ops}


def test_all_reduce_every_dtype_and_op(rank, n):
    group = dist.group.WORLD
    for dtype in FLOATS + INTS + COMPLEX + [torch.bool]:
        for op, meaning in reductions_of(dtype).items():
            for size in SIZES if op == Op.SUM else (5, 5000):
                parts = [sample(dtype, (size,), r, size) for r in range(n)]
                want = reference(parts, meaning)
                t = parts[rank].clone()
                group.allreduce(
                    [t], op
                ).wait()  # below dist.all_reduce, which views complex as real
                close(t, want, dtype, f"allreduce {dtype} {op} {size}")
    for op in (Op.SUM, Op.AVG, Op.PRODUCT):
        t = torch.full((4,), 2.0)
        dist.all_reduce(t, op)
        same(t, torch.full((4,), {Op.SUM: 2.0 * n, Op.AVG: 2.0, Op.PRODUCT: 2.0**n}[op]))
    t = torch.ones(3, dtype=torch.complex64) * (rank + 1j)
    dist.all_reduce(t)
    same(t, torch.full((3,), complex(n * (n - 1) / 2, n), dtype=torch.complex64))


def test_chunk_borders(rank, n):
    from torch_mpi import _C

    sizes = set()
    for border in (_C.SMALL_BYTES, _C.CHUNK_BYTES, 2 * _C.CHUNK_BYTES):
        for delta in (-1, 0, 1, n):
            sizes.add(border // 4 + delta)
    for size in sorted(sizes):
        t = torch.arange(size, dtype=torch.float32) % 1000 + rank
        dist.all_reduce(t)
        want = (torch.arange(size, dtype=torch.float32) % 1000) * n + n * (n - 1) / 2
        same(t, want, f"float32 {size}")
        t = (torch.arange(size * 2) % 64).to(torch.bfloat16) + rank
        dist.all_reduce(t)
        want = ((torch.arange(size * 2) % 64) * n + n * (n - 1) // 2).to(torch.bfloat16)
        same(t, want, f"bfloat16 {size * 2}")
        kept = t = torch.arange(size, dtype=torch.int32) + rank
        t = t.clone()
        dist.reduce(t, n - 1)
        want = torch.arange(size, dtype=torch.int32) * n + n * (n - 1) // 2
        same(t, want if rank == n - 1 else kept, f"reduce {size}")


def test_half_precision_accumulates_in_float32(rank, n):
    # 1 + three times 2^-9: bfloat16 cannot hold any partial sum, float32 holds all of them.
    for size in (7, 200_000):
        for dtype, tiny in ((torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)):
            t = torch.full((size,), 1.0 if rank == 0 else tiny, dtype=dtype)
            want = torch.tensor(1.0 + (n - 1) * tiny).to(dtype).expand(size)
            dist.all_reduce(t)
            same(t, want, f"{dtype} {size}")
            blocks = torch.full((n * size,), 1.0 if rank == 0 else tiny, dtype=dtype)
            out = torch.empty(size, dtype=dtype)
            dist.reduce_scatter_tensor(out, blocks)
            same(out, want, f"reduce_scatter {dtype} {size}")


def test_special_values(rank, n):
    for dtype in FLOATS:
        t = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, 1.0] * 5, dtype=dtype)
        dist.all_reduce(t)
        want = torch.tensor(
            [float("inf"), -float("inf"), float("nan"), 0.0, float(n)] * 5, dtype=dtype
        )
        same(t, want, f"{dtype}")
        t = torch.tensor([1.0, float("nan") if rank == n - 1 else 2.0, 3.0 + rank], dtype=dtype)
        dist.all_reduce(t, Op.MAX)
        same(t, torch.tensor([1.0, float("nan"), 2.0 + n], dtype=dtype), f"max {dtype}")
    t = torch.full((17,), 60000.0, dtype=torch.float16)
    dist.all_reduce(t)
    check(bool(t.isinf().all()), "a float16 sum past 65504 is inf")
    subnormal = torch.full((9,), 2.0**-24, dtype=torch.float16)
    dist.all_reduce(subnormal)
    same(subnormal, torch.full((9,), n * 2.0**-24, dtype=torch.float16))


def test_premul_sum(rank, n):
    for factor in (0.5, torch.tensor([3.0])):
        op = dist._make_nccl_premul_sum(factor)
        for size in (4, 50_000):
            t = torch.full((size,), float(rank + 1))
            dist.all_reduce(t, op)
            same(t, torch.full((size,), float(factor) * n * (n + 1) / 2))
            source = torch.full((n * size,), float(rank + 1))
            out = torch.empty(size)
            dist.reduce_scatter_tensor(out, source, op)
            same(out, torch.full((size,), float(factor) * n * (n + 1) / 2))
            same(source, torch.full((n * size,), float(rank + 1)), "the input is left alone")


def test_movement_of_every_dtype(rank, n):
    for dtype in FLOATS + INTS + COMPLEX + FLOAT8 + [torch.bool]:
        if dtype in FLOAT8:
            parts = [sample(torch.float32, (6, 4), r).to(dtype) for r in range(n)]
        else:
            parts = [sample(dtype, (6, 4), r) for r in range(n)]
        t = parts[rank].clone()
        dist.broadcast(t, n - 1)
        same(t, parts[n - 1], f"broadcast {dtype}")
        out = [torch.empty_like(parts[0]) for _ in range(n)]
        dist.all_gather(out, parts[rank])
        for r in range(n):
            same(out[r], parts[r], f"all_gather {dtype}")
        flat = torch.empty((n * 6, 4), dtype=dtype)
        dist.all_gather_into_tensor(flat, parts[rank])
        same(flat, _cat(parts), f"all_gather_into_tensor {dtype}")
        stacked = torch.empty((n, 6, 4), dtype=dtype)
        dist.all_gather_into_tensor(stacked, parts[rank])
        same(stacked.view(n * 6, 4), _cat(parts), f"stacked all_gather_into_tensor {dtype}")
        gathered = [torch.empty_like(parts[0]) for _ in range(n)] if rank == 0 else None
        dist.gather(parts[rank], gathered, dst=0)
        if rank == 0:
            for r in range(n):
                same(gathered[r], parts[r], f"gather {dtype}")
        got = torch.empty_like(parts[0])
        dist.scatter(got, parts if rank == n - 1 else None, src=n - 1)
        same(got, parts[rank], f"scatter {dtype}")
        received = [torch.empty_like(parts[0]) for _ in range(n)]
        dist.all_to_all(received, [parts[rank]] * n)
        for r in range(n):
            same(received[r], parts[r], f"all_to_all {dtype}")
        ring = torch.empty_like(parts[0])
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, parts[rank], (rank + 1) % n),
                dist.P2POp(dist.irecv, ring, (rank - 1) % n),
            ]
        )
        for work in works:
            work.wait()
        same(ring, parts[(rank - 1) % n], f"ring {dtype}")


def _cat(parts):
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if parts[0].dtype.itemsize not in width:
        return torch.cat(parts)
    as_int = width[parts[0].dtype.itemsize]
    return torch.cat([p.view(as_int) for p in parts]).view(parts[0].dtype)


def test_movement_of_every_size(rank, n):
    for size in (1, 100, 4096, 16 * 1024, 100_003, 1_500_000):
        parts = [torch.arange(size, dtype=torch.int32) * (r + 1) for r in range(n)]
        for root in {0, n - 1}:
            t = parts[rank].clone()
            dist.broadcast(t, root)
            same(t, parts[root], f"broadcast {size}")
        flat = torch.empty(n * size, dtype=torch.int32)
        dist.all_gather_into_tensor(flat, parts[rank])
        same(flat, torch.cat(parts), f"all_gather {size}")
        flat.zero_()
        place = flat[rank * size : (rank + 1) * size]
        place.copy_(parts[rank])
        dist.all_gather_into_tensor(flat, place)
        same(flat, torch.cat(parts), f"all_gather in place {size}")
        out = torch.empty(size, dtype=torch.int32)
        dist.reduce_scatter_tensor(out, torch.cat(parts[:1] * n) + rank)
        same(out, parts[0] * n + n * (n - 1) // 2, f"reduce_scatter {size}")
        for dtype, op in (
            (torch.float32, Op.AVG),
            (torch.bfloat16, Op.SUM),
            (torch.float64, Op.MAX),
        ):
            whole = [sample(dtype, (n * size,), r, 7) for r in range(n)]
            out = torch.empty(size, dtype=dtype)
            dist.reduce_scatter_tensor(out, whole[rank], op)
            want = reference([w[rank * size : (rank + 1) * size] for w in whole], op)
            close(out, want, dtype, f"reduce_scatter {dtype} {op} {size}")


def test_uneven(rank, n):
    sizes = [3 * r + (0 if r == 1 else 2) for r in range(n)]
    for scale in (1, 20_000):
        parts = [torch.full((sizes[r] * scale,), float(r)) for r in range(n)]
        out = [torch.empty(s * scale) for s in sizes]
        dist.all_gather(out, parts[rank])
        for r in range(n):
            same(out[r], parts[r], "uneven all_gather")
        gathered = [torch.empty(s * scale) for s in sizes] if rank == 1 else None
        dist.gather(parts[rank], gathered, dst=1)
        if rank == 1:
            for r in range(n):
                same(gathered[r], parts[r], "uneven gather")
        got = torch.empty(sizes[rank] * scale)
        dist.scatter(got, parts if rank == 0 else None, src=0)
        same(got, parts[rank], "uneven scatter")
        got = torch.empty(sizes[rank] * scale)
        dist.reduce_scatter(got, [p + rank for p in parts])
        same(got, torch.full_like(got, n * rank + n * (n - 1) / 2), "uneven reduce_scatter")
        # rank r sends r + p + 1 rows to p
        send = [r_rows(rank, p) * scale for p in range(n)]
        recv = [r_rows(p, rank) * scale for p in range(n)]
        source = torch.cat([torch.full((rows, 2), 10.0 * rank + p) for p, rows in enumerate(send)])
        target = torch.empty((sum(recv), 2))
        dist.all_to_all_single(target, source, recv, send)
        want = torch.cat([torch.full((rows, 2), 10.0 * p + rank) for p, rows in enumerate(recv)])
        same(target, want, "uneven all_to_all_single")
        outs = [torch.empty((rows, 2)) for rows in recv]
        dist.all_to_all(outs, list(source.split(send)))
        same(torch.cat(outs), want, "uneven all_to_all")
    even = torch.arange(2.0 * n) + 100 * rank
    target = torch.empty(2 * n)
    dist.all_to_all_single(target, even)
    same(target, torch.cat([torch.arange(2.0) + 2 * rank + 100 * p for p in range(n)]))


def r_rows(sender, receiver):
    return 0 if (sender + receiver) % 3 == 2 else sender + receiver + 1


def test_layouts(rank, n):
    base = torch.arange(24.0).view(4, 6)
    total = n * (n - 1) / 2
    strided = (base + rank).t()
    dist.all_reduce(strided)
    same(strided, base.t() * n + total, "transposed")
    big = torch.zeros(300, 700)
    view = big[::2, 1::3]
    view += rank + 1
    dist.all_reduce(view)
    same(view, torch.full_like(view, n * (n + 1) / 2), "strided view")
    check(float(big.sum()) == view.numel() * n * (n + 1) / 2, "what is between the strides is left")
    images = (torch.ones(2, 3, 4, 4) * (rank + 1)).to(memory_format=torch.channels_last)
    dist.all_reduce(images)
    same(images, torch.full((2, 3, 4, 4), n * (n + 1) / 2))
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    same(scalar, torch.tensor(total), "0-dim")
    check(scalar.dim() == 0, "0-dim stays 0-dim")
    empty = torch.empty(0, 3)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    dist.all_gather([torch.empty(0, 3) for _ in range(n)], empty)
    dist.all_gather_into_tensor(torch.empty(0, 3), empty)
    dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0))
    dist.all_to_all_single(torch.empty(0), torch.empty(0))
    conj = torch.complex(torch.ones(3), torch.full((3,), float(rank))).conj()
    # Straight to the backend: torch's dispatcher hands a resolved copy to everyone else.
    dist.group.WORLD._get_backend(torch.device("cpu")).broadcast([conj]).wait()
    same(conj.resolve_conj(), torch.complex(torch.ones(3), torch.zeros(3)))
    column = (base + 100 * rank)[:, 1]
    out = [torch.empty(4, 6)[:, 2] for _ in range(n)]
    dist.all_gather(out, column)
    for r in range(n):
        same(out[r], (base + 100 * r)[:, 1], "strided all_gather")
    out_flat = torch.empty(4 * n, 2)[:, 0]
    dist.all_gather_into_tensor(out_flat, column)
    same(out_flat, torch.cat([(base + 100 * r)[:, 1] for r in range(n)]))
    leaf = torch.ones(4, requires_grad=True)
    dist.all_reduce(leaf)
    same(leaf.detach(), torch.full((4,), float(n)), "a leaf that requires grad")


def test_p2p(rank, n):
    for size in (0, 1, 5000, 400_000):
        t = torch.full((size,), float(rank))
        if rank == 0:
            for peer in range(1, n):
                dist.send(t + peer, peer, tag=peer)
        else:
            dist.recv(t, 0, tag=rank)
            same(t, torch.full((size,), float(rank)), f"send {size}")
        dist.barrier()
    if rank == 0:  # tags out of order
        works = [dist.isend(torch.full((3,), float(tag)), 1, tag=tag) for tag in (5, 6, 7)]
        for w in works:
            w.wait()
    elif rank == 1:
        for tag in (7, 5, 6):
            t = torch.empty(3)
            dist.recv(t, 0, tag=tag)
            same(t, torch.full((3,), float(tag)), f"tag {tag}")
    dist.barrier()
    if rank == 0:
        seen = set()
        for _ in range(n - 1):
            t = torch.empty(2)
            source = dist.recv(t)
            same(t, torch.full((2,), float(source)), "any source")
            seen.add(source)
        check(seen == set(range(1, n)), f"any source: {seen}")
    else:
        dist.send(torch.full((2,), float(rank)), 0)
    dist.barrier()  # else a fast rank's next message could be the any-source receive's
    column = torch.zeros(4, 4)
    if rank == 0:
        dist.send(torch.arange(16.0).view(4, 4)[:, 2], 1)
    elif rank == 1:
        dist.recv(column[:, 3], 0)
        same(column[:, 3], torch.tensor([2.0, 6.0, 10.0, 14.0]))
        same(column[:, :3], torch.zeros(4, 3))
    work = dist.isend(torch.ones(9), (rank + 1) % n)
    t = torch.empty(9)
    future = dist.irecv(t, (rank - 1) % n).get_future()
    future.wait()
    same(t, torch.ones(9), "get_future of irecv")
    work.wait()
    # A dropped isend must still arrive.
    dist.isend(torch.full((100_000,), 3.0), (rank + 1) % n)
    t = torch.empty(100_000)
    dist.recv(t, (rank - 1) % n)
    same(t, torch.full((100_000,), 3.0))


def test_async(rank, n):
    for size in (2, 300_000):
        tensors = [torch.full((size,), float(rank + i)) for i in range(20)]
        works = [dist.all_reduce(t, async_op=True) for t in tensors]
        for work in reversed(works):
            check(work.wait(), "wait() says True")
            check(work.is_completed() and work.is_success(), "complete after wait")
        for i, t in enumerate(tensors):
            same(t, torch.full((size,), n * i + n * (n - 1) / 2), "async all_reduce")
    t = torch.ones(10)
    work = dist.all_reduce(t, async_op=True)
    doubled = work.get_future().then(lambda f: f.value()[0] * 2).wait()
    same(doubled, torch.full((10,), 2.0 * n), "future")
    t = torch.ones(10)
    work = dist.all_reduce(t, async_op=True)
    while not work.is_completed():
        pass
    same(t, torch.full((10,), float(n)), "polled")
    works, outs = [], []
    for i in range(3):
        t = torch.full((1000,), float(rank * 10 + i))
        out = [torch.empty(1000) for _ in range(n)]
        flat = torch.empty(1000 * n)
        part = torch.empty(1000)
        works += [
            dist.all_gather(out, t, async_op=True),
            dist.all_gather_into_tensor(flat, t, async_op=True),
            dist.reduce_scatter_tensor(part, flat.clone().fill_(i), async_op=True),
            dist.barrier(async_op=True),
        ]
        outs.append((out, flat, part, t))
    t = torch.ones(4)
    dist.all_reduce(t)  # a synchronous call takes its turn
    same(t, torch.full((4,), float(n)))
    for w in works:
        w.wait()
    for i, (out, flat, part, _) in enumerate(outs):
        for r in range(n):
            same(out[r], torch.full((1000,), float(r * 10 + i)))
        same(flat, torch.cat(out))
        same(part, torch.full((1000,), float(i * n)))


def test_coalesced(rank, n):
    tensors = [torch.full((k + 1,), float(rank + k)) for k in range(5)] + [torch.ones(2_000_000)]
    for batch in (tensors[:5], [t.clone() for t in tensors]):
        with dist._coalescing_manager():
            for t in batch:
                dist.all_reduce(t)
    for k in range(5):
        first = n * k + n * (n - 1) / 2
        same(tensors[k], torch.full((k + 1,), first), "coalesced")
        same(batch[k], torch.full((k + 1,), first), "coalesced and large")
    same(batch[5], torch.full((2_000_000,), float(n)))
    outs = [torch.empty(n * (k + 1)) for k in range(3)]
    with dist._coalescing_manager(async_ops=True) as cm:
        for k in range(3):
            dist.all_gather_into_tensor(outs[k], torch.full((k + 1,), float(rank)))
    cm.wait()
    for k in range(3):
        same(outs[k], torch.arange(float(n)).repeat_interleave(k + 1))
    outs = [torch.empty(k + 1) for k in range(3)]
    with dist._coalescing_manager():
        for k in range(3):
            dist.reduce_scatter_tensor(outs[k], torch.full((n * (k + 1),), float(rank)))
    for k in range(3):
        same(outs[k], torch.full((k + 1,), n * (n - 1) / 2))
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as cm:
        a, b = torch.ones(3), torch.full((3,), float(rank))
        dist.all_reduce(a, async_op=True)
        dist.broadcast(b, 1, async_op=True)
    cm.wait()
    same(a, torch.full((3,), float(n)))
    same(b, torch.ones(3))


def test_objects(rank, n):
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * (rank * 1000)})
    check([o["rank"] for o in objects] == list(range(n)), "all_gather_object")
    items = [{"from": rank}, rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(items, src=1)
    check(items == [{"from": 1}, 1], "broadcast_object_list")
    got = [None]
    dist.scatter_object_list(got, [f"for {r}" for r in range(n)] if rank == 0 else None, src=0)
    check(got == [f"for {rank}"], "scatter_object_list")
    gathered = [None] * n if rank == 0 else None
    dist.gather_object((rank, "y"), gathered, dst=0)
    if rank == 0:
        check(gathered == [(r, "y") for r in range(n)], "gather_object")
    if rank == 0:
        dist.send_object_list(["a", 1], dst=1)
    elif rank == 1:
        got = [None, None]
        dist.recv_object_list(got, src=0)
        check(got == ["a", 1], "send_object_list")


def test_rejected(rank, n):
    def rejects(kind, words, call):
        try:
            call()
        except kind as error:
            check(words in str(error), f"{words!r} is not in {error}")
        else:
            check(False, f"no error for {words}")

    f = torch.ones(2)
    rejects(ValueError, "float8", lambda: dist.group.WORLD.allreduce([f.to(torch.float8_e5m2)]))
    rejects(ValueError, "integer", lambda: dist.all_reduce(f, Op.BAND))
    rejects(
        ValueError, "ordered", lambda: dist.group.WORLD.allreduce([f.to(torch.complex64)], Op.MAX)
    )
    rejects(ValueError, "AVG", lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), Op.AVG))
    rejects(ValueError, "sparse", lambda: dist.all_reduce(torch.eye(3).to_sparse()))
    rejects(
        ValueError,
        "group's size",
        lambda: dist.all_gather_into_tensor(torch.empty(5 * n + 1), torch.ones(5)),
    )
    rejects(ValueError, "tag", lambda: dist.isend(f, (rank + 1) % n, tag=2**31 - 1))
    rejects(
        Exception,
        "split",
        lambda: dist.all_to_all_single(torch.empty(4), torch.ones(4), [1] * n, [9] * n),
    )
    t = torch.ones(2)
    dist.all_reduce(t)  # and the group still works
    same(t, torch.full((2,), float(n)))


TESTS = [v for k, v in list(globals().items()) if k.startswith("test_")]

if __name__ == "__main__":
    sys.exit(main(TESTS))
