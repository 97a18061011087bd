"""What the ranks tell each other before there is a group, and what rank 0 decides from it.

Each rank publishes one `Fact`; rank 0 reads all of them, checks them, chooses the backend and
publishes one `Verdict`, which all ranks follow. A rank can thus not decide by its own node alone
(one node without GPUs would otherwise try gloo while the others wait in nccl).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from hpcdist.errors import LaunchError

BACKENDS = ("nccl", "mpi", "gloo")


@dataclass(frozen=True)
class Fact:
    """What one rank knows about itself. gpu: the UUID of its device, "" without one."""

    rank: int
    host: str
    node_rank: int | None
    local_rank: int
    local_world_size: int
    gpu: str
    mpi: bool  # MPI started this rank, and torch here has the backend


@dataclass(frozen=True)
class Verdict:
    backend: str
    why: str
    hosts: tuple[str, ...]  # one per node
    nodes: tuple[int, ...]  # the node of each rank
    error: str = ""

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> Verdict:
        loaded = json.loads(text)
        loaded.update(hosts=tuple(loaded["hosts"]), nodes=tuple(loaded["nodes"]))
        return Verdict(**loaded)


def dump_fact(fact: Fact) -> str:
    return json.dumps(asdict(fact))


def load_fact(text: str) -> Fact:
    return Fact(**json.loads(text))


def list_backends(wanted: str | Sequence[str]) -> tuple[str, ...]:
    """Return the backends to try, in order of preference.

    Raises
    ------
    ValueError
        One of them is unknown.
    """
    if wanted == "auto":
        return BACKENDS
    names = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    unknown = [name for name in names if name not in BACKENDS]
    if unknown or not names:
        raise ValueError(f"backend {wanted!r}: choose from auto, {', '.join(BACKENDS)}")
    return names


def decide(wanted: Sequence[str], facts: Sequence[Fact], *, nccl: bool) -> Verdict:
    """Return the first wanted backend that every rank can use; `nccl`: torch was built with it.

    Raises
    ------
    LaunchError
        The facts contradict the launcher, or no wanted backend can be used.
    """
    check_locality(facts)
    hosts, nodes = list_nodes(facts)
    obstacles = {"nccl": find_nccl_obstacle(facts, nccl), "mpi": find_mpi_obstacle(facts)}
    for name in wanted:
        if not obstacles.get(name):
            passed = [f"not {other}: {obstacles[other]}" for other in wanted[: wanted.index(name)]]
            return Verdict(name, "; ".join(passed) or "the first choice", hosts, nodes)
    raise LaunchError("; ".join(f"backend {name}: {obstacles[name]}" for name in wanted))


def find_nccl_obstacle(facts: Sequence[Fact], nccl: bool) -> str:
    """Say why nccl cannot be used: each rank needs a GPU that no other rank holds."""
    without = [fact for fact in facts if not fact.gpu]
    if without:
        return f"rank {without[0].rank} on {without[0].host} has no GPU"
    holder: dict[tuple[str, str], Fact] = {}
    for fact in facts:
        other = holder.setdefault((fact.host, fact.gpu), fact)
        if other is not fact:
            return (
                f"ranks {other.rank} and {fact.rank} on {fact.host} hold the same GPU {fact.gpu}: "
                f"{fact.local_world_size} wanted there (--gpus-per-task=1 gives each rank its own)"
            )
    return "" if nccl else "this torch was built without it"


def find_mpi_obstacle(facts: Sequence[Fact]) -> str:
    without = [fact for fact in facts if not fact.mpi]
    if without:
        return f"rank {without[0].rank} was not started by MPI, or its torch has no mpi backend"
    return ""


def check_locality(facts: Sequence[Fact]) -> None:
    """Check that the launcher's local ranks fit the hosts on which the ranks found themselves."""
    nodes = Counter((fact.host, fact.node_rank) for fact in facts)
    seats = Counter((fact.host, fact.node_rank, fact.local_rank) for fact in facts)
    for fact in facts:
        count = nodes[fact.host, fact.node_rank]
        taken = seats[fact.host, fact.node_rank, fact.local_rank]
        if count != fact.local_world_size or taken > 1:
            raise LaunchError(
                f"{count} ranks run on {fact.host}, but rank {fact.rank} there was told local rank "
                f"{fact.local_rank} of {fact.local_world_size}: set LOCAL_RANK and "
                "LOCAL_WORLD_SIZE for each rank, or use mpirun, srun or torchrun, which tell them"
            )


def list_nodes(facts: Sequence[Fact]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the nodes' hosts, and the node of each rank, in rank order.

    Launchers that number the nodes are believed; else nodes are numbered by their lowest rank.
    """
    keys = [(fact.host, fact.node_rank) for fact in sorted(facts, key=lambda fact: fact.rank)]
    order = list(dict.fromkeys(keys))
    if all(node is not None for _, node in order):
        order.sort(key=lambda key: key[1] or 0)
    return tuple(host for host, _ in order), tuple(order.index(key) for key in keys)


def exchange(
    own: Fact,
    judge: Callable[[Sequence[Fact]], Verdict],
    *,
    publish: Callable[[str, str], None],
    collect: Callable[[Sequence[str]], list[str]],
    world_size: int,
) -> Verdict:
    """Publish this rank's fact, let rank 0 judge all facts, return its verdict on every rank.

    `publish(key, text)` and `collect(keys)`, which waits for the keys, are a store's set and get.
    """
    publish(f"hpcdist/fact/{own.rank}", dump_fact(own))
    if own.rank == 0:
        try:
            texts = collect([f"hpcdist/fact/{rank}" for rank in range(world_size)])
            verdict = judge([load_fact(text) for text in texts])
        except LaunchError as error:
            verdict = Verdict("", "", (), (), str(error))
        publish("hpcdist/verdict", verdict.dump())
    else:
        verdict = Verdict.load(collect(["hpcdist/verdict"])[0])
    if verdict.error:
        raise LaunchError(verdict.error)
    return verdict
