"""Compare torch.distributed backends with each other and with raw MPI, interleaved in one job.

    mpirun -n 2 python payload/bench_backends.py [--quick] [--json FILE] [--only WORDS]

Every repetition measures all contenders one after another, so that a change of the machine's load
hits all of them; the table gives median and minimum over the repetitions. Contenders: ``mpi`` (this
project), ``gloo``, ``fake`` (torch's backend that does nothing: the cost of torch's own Python
path), and ``raw`` (mpi4py on the same buffers, if installed). Values are checked before anything is
timed. These are measurements, not tests: nothing fails for being slow.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

KIB, MIB = 1024, 1024 * 1024


@dataclass(frozen=True)
class Row:
    """One measured quantity of one contender; seconds of a single operation."""

    case: str
    contender: str
    median: float
    minimum: float
    repetitions: int
    bytes: int = 0


class Groups:
    """A process group of each backend over all ranks, and mpi4py's world."""

    def __init__(self):
        dist.init_process_group("mpi")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mpi = dist.new_group()
        self.gloo = dist.new_group(backend="gloo")
        import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers "fake")

        self.fake = dist.new_group(backend="fake")
        try:
            from mpi4py import MPI
        except ImportError:
            self.raw = None
        else:
            self.raw = MPI.COMM_WORLD.Dup()
            self.MPI = MPI

    def named(self, *names):
        """Return {name: group} of those that exist."""
        return {n: getattr(self, n) for n in names if getattr(self, n) is not None}


def timed(call, inner):
    """Return seconds of one call, averaged over `inner` calls after a common start."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(inner):
        call()
    return (time.perf_counter() - start) / inner


def interleave(case, calls, repetitions, inner, size=0):
    """Time each of {contender: call} once per repetition; return their Rows."""
    seconds = {name: [] for name in calls}
    for call in calls.values():  # first touches, lazily made connections
        call()
    for _ in range(repetitions):
        for name, call in calls.items():
            seconds[name].append(timed(call, inner))
    return [
        Row(case, name, statistics.median(s), min(s), repetitions, size)
        for name, s in seconds.items()
    ]


def small_calls(groups, repetitions, inner):
    """Latency of 8 bytes: the three ways to call, issue only, and 1000 calls back to back."""
    rows = []
    tensors = {n: torch.ones(1, dtype=torch.float64) for n in ("mpi", "gloo", "fake")}
    inner = {"mpi": inner, "fake": inner, "gloo": max(1, inner // 20)}

    def add(case, make, names=("mpi", "gloo", "fake"), with_raw=True):
        calls = {}
        for name, group in groups.named(*names).items():
            once = make(tensors[name], group)
            calls[name] = _repeat(once, inner[name])
        if with_raw and groups.raw is not None:
            buffer = tensors["mpi"].clone().numpy()
            calls["raw"] = _repeat(
                lambda: groups.raw.Allreduce(groups.MPI.IN_PLACE, buffer, groups.MPI.MAX),
                inner["mpi"],
            )
        scale = {**inner, "raw": inner["mpi"]}
        for row in interleave(case, calls, repetitions, 1, 8):
            rows.append(
                Row(
                    case,
                    row.contender,
                    row.median / scale[row.contender],
                    row.minimum / scale[row.contender],
                    repetitions,
                    8,
                )
            )

    maximum = dist.ReduceOp.MAX  # the value stays 1, however often
    options = dist.AllreduceOptions()
    options.reduceOp = maximum
    add("all_reduce 8 B sync", lambda t, g: lambda: dist.all_reduce(t, maximum, group=g))
    add(
        "pg.allreduce 8 B + wait",
        lambda t, g: lambda: g.allreduce([t], options).wait(),
        with_raw=False,
    )
    add(
        "all_reduce 8 B async + wait",
        lambda t, g: lambda: dist.all_reduce(t, maximum, group=g, async_op=True).wait(),
        with_raw=False,
    )

    def issue(t, g):
        def call():
            start = time.perf_counter()
            work = dist.all_reduce(t, maximum, group=g, async_op=True)
            spent[0] += time.perf_counter() - start
            work.wait()

        spent = [0.0]
        call.spent = spent
        return call

    for name, group in groups.named("mpi", "gloo", "fake").items():
        call, samples = issue(tensors[name], group), []
        for _ in range(repetitions):
            dist.barrier()
            call.spent[0] = 0.0
            for _ in range(inner[name]):
                call()
            samples.append(call.spent[0] / inner[name])
        rows.append(
            Row(
                "all_reduce 8 B issue",
                name,
                statistics.median(samples),
                min(samples),
                repetitions,
                8,
            )
        )

    def thousand(t, g):
        def call():
            works = [dist.all_reduce(t, maximum, group=g, async_op=True) for _ in range(1000)]
            for w in works:
                w.wait()

        return call

    calls = {n: thousand(tensors[n], g) for n, g in groups.named("mpi", "gloo").items()}
    rows += interleave("1000 all_reduces 8 B in flight", calls, max(2, repetitions // 3), 1, 8000)
    return rows


def _repeat(call, times):
    def many():
        for _ in range(times):
            call()

    return many


def bandwidth(groups, repetitions, sizes):
    """all_reduce in three dtypes, all_gather and reduce_scatter, against raw MPI."""
    return [row for size in sizes for row in bandwidth_of(groups, repetitions, size)]


def bandwidth_of(groups, repetitions, size):
    """Return the rows for one size in bytes."""
    rows = []
    inner = max(1, min(20, 8 * MIB // size))
    data = torch.zeros(size // 4)
    calls = {
        n: (lambda g=g: dist.all_reduce(data, group=g))
        for n, g in groups.named("mpi", "gloo").items()
    }
    if groups.raw is not None:
        buffer = torch.zeros(size // 4).numpy()
        calls["raw"] = lambda: groups.raw.Allreduce(groups.MPI.IN_PLACE, buffer)
    for dtype in (torch.bfloat16, torch.float16):
        half = torch.zeros(size // 2, dtype=dtype)
        calls[f"mpi {str(dtype)[6:]}"] = lambda t=half: dist.all_reduce(t, group=groups.mpi)
    rows += interleave(f"all_reduce {size // KIB} KiB", calls, repetitions, inner, size)

    part, whole = torch.zeros(size // 4 // groups.size), torch.zeros(size // 4)
    calls = {
        n: (lambda g=g: dist.all_gather_into_tensor(whole, part, group=g))
        for n, g in groups.named("mpi", "gloo").items()
    }
    if groups.raw is not None:
        raw_part, raw_whole = part.clone().numpy(), whole.clone().numpy()
        calls["raw"] = lambda: groups.raw.Allgather(raw_part, raw_whole)
    rows += interleave(f"all_gather {size // KIB} KiB", calls, repetitions, inner, size)

    calls = {
        n: (lambda g=g: dist.reduce_scatter_tensor(part, whole, group=g))
        for n, g in groups.named("mpi", "gloo").items()
    }
    if groups.raw is not None:
        calls["raw"] = lambda: groups.raw.Reduce_scatter_block(raw_whole, raw_part)
    rows += interleave(f"reduce_scatter {size // KIB} KiB", calls, repetitions, inner, size)
    return rows


def network(millions):
    """Return an MLP of about this many million parameters."""
    width = int((millions * 1e6 / 4) ** 0.5)
    layers = []
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers), width


def ddp_step(groups, repetitions, millions):
    """One training step (batch 8): without communication, over gloo, over mpi."""
    torch.manual_seed(0)
    model, width = network(millions)
    x = torch.randn(8, width)
    models = {"none": model}
    for name, group in groups.named("mpi", "gloo").items():
        replica, _ = network(millions)
        replica.load_state_dict(model.state_dict())
        models[name] = DistributedDataParallel(replica, process_group=group)
    # What DDP itself costs (copies into and out of buckets) when communication takes no time.
    replica, _ = network(millions)
    models["ddp alone"] = DistributedDataParallel(replica, process_group=groups.mpi)
    models["ddp alone"].register_comm_hook(None, _no_communication)

    def step(m):
        m.zero_grad(set_to_none=False)
        m(x).square().mean().backward()

    calls = {name: (lambda m=m: step(m)) for name, m in models.items()}
    for call in calls.values():
        call()
    return interleave(f"DDP step {millions} M parameters", calls, repetitions, 1)


def _no_communication(_, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def check_values(groups):
    """The contenders must agree before their speed means anything."""
    for group in groups.named("mpi", "gloo").values():
        t = torch.arange(100_000.0) + groups.rank
        dist.all_reduce(t, group=group)
        want = torch.arange(100_000.0) * groups.size + groups.size * (groups.size - 1) / 2
        if not torch.equal(t, want):
            raise SystemExit("wrong values: nothing is measured")


def print_table(rows):
    """Print cases as blocks: time, bandwidth where it means something, and the ratio to mpi."""
    ours = {row.case: row.median for row in rows if row.contender == "mpi"}
    print(f"{'case':34}{'contender':14}{'median':>11}{'min':>11}{'GB/s':>8}{'/ mpi':>8}")
    for row in rows:
        unit, scale = ("µs", 1e6) if row.median < 1e-3 else ("ms", 1e3)
        rate = f"{row.bytes / row.median / 1e9:8.2f}" if row.bytes > KIB * 64 else " " * 8
        ratio = f"{row.median / ours[row.case]:8.2f}" if ours.get(row.case) else " " * 8
        print(
            f"{row.case:34}{row.contender:14}{row.median * scale:8.1f} {unit}"
            f"{row.minimum * scale:8.1f} {unit}{rate}{ratio}"
        )


def main():
    """Measure, print and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument(
        "--only", choices=("small", "bandwidth", "ddp"), help="one part of the cases"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine as JSON")
    options = parser.parse_args()
    ranks_here = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", 2))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))
    groups = Groups()
    check_values(groups)
    repetitions = 5 if options.quick else 15
    rows = []
    if options.only in (None, "small"):
        rows += small_calls(groups, repetitions, 200 if options.quick else 500)
    if options.only in (None, "bandwidth"):
        rows += bandwidth(groups, repetitions, [MIB, 16 * MIB, 64 * MIB])
    if options.only in (None, "ddp"):
        rows += ddp_step(groups, repetitions, 1.6)
        rows += ddp_step(groups, repetitions, 25)
    machine = {
        "torch": torch.__version__,
        "mpi": _mpi_library(),
        "ranks": groups.size,
        "threads a rank": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "cpu": platform.processor() or platform.machine(),
    }
    if groups.rank == 0:
        print(", ".join(f"{k} {v}" for k, v in machine.items()))
        print_table(rows)
        if options.json:
            found = {"machine": machine, "rows": [asdict(r) for r in rows]}
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


def _mpi_library():
    from torch_mpi import _C

    return _C.library()


if __name__ == "__main__":
    sys.exit(main())
