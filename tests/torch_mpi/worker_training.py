"""What training needs: DDP, FSDP2, ZeRO, distributed checkpoints, DTensor, functional collectives.

Run by mpirun on two or more ranks. Where a result is compared, gloo computes the reference.
"""

import copy
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from harness import check, main, same
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 20


class Net(nn.Module):
    """Three layers, and one that is used in every other step only."""

    def __init__(self, width=64):
        super().__init__()
        self.a = nn.Linear(16, width)
        self.norm = nn.BatchNorm1d(width)
        self.b = nn.Linear(width, width)
        self.extra = nn.Linear(width, width)
        self.c = nn.Linear(width, 4)

    def forward(self, x, use_extra=True):
        x = torch.relu(self.norm(self.a(x)))
        x = torch.relu(self.b(x))
        if use_extra:
            x = x + self.extra(x)
        return self.c(x)


def batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)


def train(group, rank, prepare=None, accumulate=False, skip_extra=False, **options):
    """Train for STEPS steps with DDP over group; return the parameters."""
    torch.manual_seed(0)
    model = Net()
    ddp = DDP(model, process_group=group, **{"bucket_cap_mb": 0.02, **options})
    if prepare:
        prepare(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        x, y = batch(step, rank)
        if accumulate:
            with ddp.no_sync():
                nn.functional.mse_loss(ddp(x), y).backward()
        out = ddp(x, use_extra=not (skip_extra and step % 2))
        nn.functional.mse_loss(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def compare(ours, theirs, what, tolerance=1e-6):
    for a, b in zip(ours, theirs):
        check(
            torch.allclose(a, b, rtol=tolerance, atol=tolerance),
            f"{what}: off by {(a - b).abs().max()}",
        )


def equal_on_all_ranks(parameters, n):
    flat = torch.cat([p.flatten() for p in parameters])
    all_flat = torch.empty(n * flat.numel())
    dist.all_gather_into_tensor(all_flat, flat)
    for r in range(n):
        same(all_flat[r * flat.numel() : (r + 1) * flat.numel()], flat, "parameters of all ranks")


def test_ddp_equals_gloo(rank, n):
    gloo = dist.new_group(backend="gloo")
    mpi = dist.new_group()
    for options in (
        {},
        {"find_unused_parameters": True, "skip_extra": True},
        {"accumulate": True},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
    ):
        ours = train(mpi, rank, **options)
        compare(ours, train(gloo, rank, **options), f"DDP {options}")
        equal_on_all_ranks(ours, n)
    dist.destroy_process_group(gloo)
    dist.destroy_process_group(mpi)


def test_ddp_comm_hooks(rank, n):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def bfloat16_hook(state, bucket):  # DDP wants CUDA for a hook of torch's own name
        return default_hooks.bf16_compress_hook(state, bucket)

    plain = train(None, rank)
    for hook, tolerance in (
        (default_hooks.allreduce_hook, 1e-6),
        (default_hooks.fp16_compress_hook, 2e-2),
        (bfloat16_hook, 2e-2),
    ):
        ours = train(None, rank, lambda ddp, hook=hook: ddp.register_comm_hook(None, hook))
        compare(ours, plain, hook.__name__, tolerance)
        equal_on_all_ranks(ours, n)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
    # This hook issues collectives from callbacks. With several buckets their order would be a race
    # on any backend that completes futures on a thread (gloo too), so there is one bucket.
    ours = train(
        None,
        rank,
        lambda ddp: ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook),
        bucket_cap_mb=25,
    )
    equal_on_all_ranks(ours, n)


def test_uneven_inputs_join(rank, n):
    model = DDP(nn.Linear(4, 2))
    with model.join():
        for _ in range(3 + rank):
            model(torch.ones(2, 4)).sum().backward()


def test_fsdp2(rank, n):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (n,))
    check(dist.get_backend(mesh.get_group()) == "mpi", "mesh over mpi")

    def build():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 7), nn.ReLU(), nn.Linear(7, 4)
        )

    reference = DDP(build())
    sharded = build()
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for model, sgd in (
        (reference, torch.optim.SGD(reference.parameters(), lr=0.1)),
        (sharded, torch.optim.SGD(sharded.parameters(), lr=0.1)),
    ):
        for step in range(STEPS):
            x, y = batch(step, rank)
            nn.functional.mse_loss(model(x), y).backward()
            sgd.step()
            sgd.zero_grad()
    whole = [p.full_tensor() for p in sharded.parameters()]
    compare(whole, list(reference.parameters()), "FSDP2", 1e-5)
    half = build()
    fully_shard(half, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    x, y = batch(0, rank)
    nn.functional.mse_loss(half(x).float(), y).backward()
    check(all(p.grad is not None for p in half.parameters()), "FSDP2 in bfloat16")


def test_zero_redundancy_optimizer(rank, n):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    results = []
    for zero in (False, True):
        torch.manual_seed(0)
        model = Net()
        ddp = DDP(model)
        if zero:
            optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
        else:
            optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
        for step in range(5):
            x, y = batch(step, rank)
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    compare(*results, "ZeRO", 1e-7)


def test_distributed_checkpoint(rank, n):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    torch.manual_seed(rank)
    model = nn.Linear(10, 6)
    for p in model.parameters():
        dist.broadcast(p, 0)
    want = copy.deepcopy(model.state_dict())
    fully_shard(model, mesh=init_device_mesh("cpu", (n,)))
    path = Path(folder[0]) / "step1"
    dcp.save({"model": model.state_dict(), "step": 7}, checkpoint_id=path)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = {"model": model.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=path)
    check(state["step"] == 7, "step")
    for name, value in state["model"].items():
        same(value.full_tensor(), want[name], f"checkpoint {name}")
    future = dcp.async_save(
        {"model": model.state_dict()},
        checkpoint_id=Path(folder[0]) / "step2",
        process_group=dist.new_group(backend="cpu:gloo"),
    )
    t = torch.ones(3)
    dist.all_reduce(t)  # goes on meanwhile
    future.result()
    same(t, torch.full((3,), float(n)))


def test_dtensor(rank, n):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (n,))
    whole = torch.arange(40.0).view(10, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    same(sharded.full_tensor(), whole)
    same(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), whole, "all_to_all")
    same(sharded.sum().full_tensor(), whole.sum())
    product = (sharded.t() @ sharded).redistribute(mesh, [Replicate()])
    same(product.to_local(), whole.t() @ whole, "partial sums")
    check(Partial() is not None, "")


def test_functional_collectives_compiled(rank, n):
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD

    def step(x):
        y = funcol.all_reduce(x * 2, "sum", group)
        z = funcol.all_gather_tensor(y, 0, group)
        w = funcol.reduce_scatter_tensor(z, "sum", 0, group)
        v = funcol.all_to_all_single(torch.cat([x] * n), None, None, group)
        return w + 1, v * 2, funcol.broadcast(x, 0, group)

    x = torch.arange(6.0) + rank
    total = (torch.arange(6.0) * n + n * (n - 1) / 2) * 2
    wants = (
        total * n + 1,
        torch.cat([torch.arange(6.0) + r for r in range(n)]) * 2,
        torch.arange(6.0),
    )
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        for got, want in zip(function(x), wants):
            same(torch.as_tensor(got) + 0, want)
    leaf = torch.ones(3, requires_grad=True)
    import torch.distributed.nn.functional as dnn

    dnn.all_reduce(leaf * (rank + 1)).sum().backward()
    same(leaf.grad, torch.full((3,), float(n * (rank + 1))), "autograd through all_reduce")


def test_pipeline_of_sends(rank, n):
    """isend/irecv chains as pipeline schedules post them: many in flight, both directions."""
    right, left = (rank + 1) % n, (rank - 1) % n
    received = [torch.empty(1000) for _ in range(8)]
    works = [dist.irecv(t, left) for t in received]
    works += [dist.isend(torch.full((1000,), float(10 * rank + i)), right) for i in range(8)]
    for w in works:
        w.wait()
    for i, t in enumerate(received):
        same(t, torch.full((1000,), float(10 * left + i)), "in order")


TESTS = [v for k, v in list(globals().items()) if k.startswith("test_")]

if __name__ == "__main__":
    sys.exit(main(TESTS))
