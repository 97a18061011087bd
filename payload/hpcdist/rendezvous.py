"""Where the ranks meet: address and port, from the environment and the step's host list.

Order, in `plan`:

1. torchrun: its agents have met already; MASTER_ADDR and MASTER_PORT are theirs.
2. MASTER_ADDR and MASTER_PORT set by the user: honoured, rank 0 listens there. With only one of
   them set, that one is honoured and the other one is found as below.
3. srun: the first task of the step's first node listens. That is rank 0 for block, cyclic and
   plane distributions. With --distribution=arbitrary rank 0 may be on any node, and Slurm tells
   no other node on which (SLURM_STEP_NODELIST is sorted); node 0 of the list is known to all.
4. One node: 127.0.0.1, rank 0 listens.
5. MPI launchers over several nodes: None; rank 0's address and a free port go through MPI.

SLURM_LAUNCH_NODE_IPADDR is never used: it is the host on which srun was typed.

The port is computed, not agreed: every rank must come to the same number before any of them can
talk. It lies below the ephemeral range (/proc/sys/net/ipv4/ip_local_port_range), from which the
kernel gives ports to anybody, and above the registered services that nodes commonly run.
"""

from __future__ import annotations

import ipaddress
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from hpcdist import slurm
from hpcdist.errors import LaunchError
from hpcdist.launchers import Placement

DEFAULT_EPHEMERAL = (32768, 60999)  # the kernel's default
_LOWEST_PORT = 10000  # above what most daemons of a cluster node listen on
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Meeting:
    """Where the ranks meet, who listens there, and why."""

    host: str
    port: int
    listens: bool  # does this rank serve the store
    identity: str  # what the peers must have in common, to notice a foreign job on this port
    evidence: str


def plan(
    environ: Mapping[str, str],
    placement: Placement,
    *,
    ephemeral: tuple[int, int] = DEFAULT_EPHEMERAL,
) -> Meeting | None:
    """Return where the ranks meet, or None where only MPI can tell.

    Raises
    ------
    LaunchError
        A preset address is a loopback although the job spans nodes, or MASTER_PORT is no port.
    """
    address, port = _read_preset(environ, placement)
    job = identify_job(environ)
    listens = placement.rank == 0
    identity = f"{job.text if job else placement.launcher} world {placement.world_size}"
    if address and port is not None:
        evidence = f"MASTER_ADDR={address} MASTER_PORT={port} as set"
        return Meeting(address, port, listens, identity, evidence)
    if placement.launcher == "torchrun":
        raise LaunchError("MASTER_ADDR and MASTER_PORT are not set, although torchrun sets them")
    why = "MASTER_ADDR as set"
    if not address and placement.launcher == "srun" and placement.spans_nodes:
        address = placement.hosts[0]
        listens = (placement.node_rank, placement.local_rank) == (0, 0)
        why = f"first host of SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']}"
    elif not address and not placement.spans_nodes:
        address, why = "127.0.0.1", "one node"
    if port is None and job is not None:
        port, why = choose_port(job, ephemeral), f"{why}; port from {job.text}"
    if not address or port is None:
        if placement.launcher == "env":
            raise LaunchError(
                "RANK and WORLD_SIZE are set, but not where the ranks meet: set MASTER_ADDR to "
                "rank 0's host and MASTER_PORT to a free port there, the same on all ranks"
            )
        return None
    return Meeting(address, port, listens, identity, why)


@dataclass(frozen=True)
class Job:
    """Two numbers that tell jobs on a node apart, and the text they were taken from."""

    number: int
    step: int
    text: str


def identify_job(environ: Mapping[str, str]) -> Job | None:
    """Return what is common to the ranks and different for every other job, or None.

    - an srun step: SLURM_JOB_ID and SLURM_STEP_ID (of the whole job where it is heterogeneous);
    - mpirun: PMIX_NAMESPACE, "prterun-HOST-PID@N" for Open MPI 5 and the 32-bit number
      (launcher << 16 | N) for Open MPI 4; two mpiruns on a node have two PIDs.

    A Slurm or PBS job id without a step is no answer: a job may run several mpiexecs at once.
    """
    namespace = environ.get("PMIX_NAMESPACE", "")
    if namespace and not namespace.startswith("slurm.pmix"):
        text = f"PMIX_NAMESPACE={namespace}"
        if namespace.isdigit():
            return Job(int(namespace) >> 16, int(namespace) & 0xFFFF, text)
        match = re.search(r"(\d+)@(\d+)$", namespace)
        if match:
            return Job(int(match.group(1)), int(match.group(2)), text)
        return Job(zlib.crc32(namespace.encode()), 0, text)
    step = slurm.find_step(environ)
    job = environ.get("SLURM_HET_JOB_ID", environ.get("SLURM_JOB_ID", ""))
    if step is not None and job.isdigit() and "OMPI_COMM_WORLD_RANK" not in environ:
        return Job(int(job), step, f"SLURM_JOB_ID={job} SLURM_STEP_ID={step}")
    return None


def choose_port(job: Job, ephemeral: tuple[int, int] = DEFAULT_EPHEMERAL) -> int:
    """Return the port of a job's step, below the ephemeral range.

    Jobs step through the range by its golden section, steps by one. Multiples of the golden
    section keep as far apart as points can: in the default range, of 22768 ports, two jobs whose
    ids differ by at most 60 have ports at least 140 apart, so that steps 0…139 of these never
    coincide; the same step of two jobs coincides only for ids that differ by a multiple of 22768.
    """
    low, high = list_ports(ephemeral)
    span = high - low
    stride = _find_stride(span)
    return low + (job.number * stride + job.step) % span


def list_ports(ephemeral: tuple[int, int]) -> tuple[int, int]:
    """Return the half-open range to choose from, given the kernel's ephemeral range.

    Where an administrator widened the ephemeral range downwards, use what is left between 1024 and
    it, or above it; where nothing is left, the usual range (the bind test will tell).
    """
    first, last = ephemeral
    for low, high in ((_LOWEST_PORT, first), (1024, first), (last + 1, 65536)):
        if high - low >= 2000:
            return low, high
    return _LOWEST_PORT, DEFAULT_EPHEMERAL[0]


def _find_stride(span: int) -> int:
    """Return the number nearest to the golden section of `span` that shares no factor with it."""
    middle = round(span * _GOLDEN)
    return next(
        candidate
        for offset in range(span)
        for candidate in (middle + offset, middle - offset)
        if math.gcd(candidate, span) == 1
    )


def is_loopback(address: str) -> bool:
    """Tell whether an address or host name means "this machine" by itself."""
    text = address.strip("[]").split("%")[0].rstrip(".").lower()
    if text in ("localhost", "localhost.localdomain", "localhost6", "ip6-localhost"):
        return True
    try:
        parsed = ipaddress.ip_address(text)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback or parsed.is_unspecified


def _read_preset(environ: Mapping[str, str], placement: Placement) -> tuple[str, int | None]:
    address = environ.get("MASTER_ADDR", "").strip().strip("[]")
    if address and placement.spans_nodes and is_loopback(address):
        raise LaunchError(
            f"MASTER_ADDR={environ['MASTER_ADDR']} means another machine on each of the "
            f"{placement.num_nodes or 'several'} nodes: unset it, or set it to rank 0's host name"
        )
    text = environ.get("MASTER_PORT", "").strip()
    if not text:
        return address, None
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise LaunchError(f"MASTER_PORT={environ['MASTER_PORT']!r} is no port: 1024…65535")
    return address, int(text)
