"""Agreement among the ranks, and the ways into and out of the process group."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from environments import MPICH, OPENMPI, SRUN, TORCHRUN
from hpcdist import LaunchError, agree, identify, mpi, network
from hpcdist.agree import Fact, Verdict, decide, exchange, list_backends, list_nodes

ON_ONE = [Fact(rank, "n1", 0, rank, 2, f"GPU-{rank}", True) for rank in range(2)]
ON_TWO = [Fact(rank, f"n{1 + rank // 2}", None, rank % 2, 2, "", True) for rank in range(4)]


def choose(wanted: Sequence[str], facts: Sequence[Fact], *, nccl: bool = True) -> str:
    return decide(wanted, facts, nccl=nccl).backend


def test_auto_takes_nccl_where_each_rank_has_its_own_gpu() -> None:
    assert choose(list_backends("auto"), ON_ONE) == "nccl"


def test_auto_takes_mpi_where_ranks_share_a_gpu() -> None:
    shared = [replace(fact, gpu="GPU-0") for fact in ON_ONE]
    verdict = decide(list_backends("auto"), shared, nccl=True)
    assert verdict.backend == "mpi"
    assert "ranks 0 and 1 on n1 hold the same GPU GPU-0" in verdict.why


def test_auto_takes_mpi_without_gpus_and_gloo_without_mpi() -> None:
    assert choose(list_backends("auto"), ON_TWO) == "mpi"
    assert choose(list_backends("auto"), [replace(fact, mpi=False) for fact in ON_TWO]) == "gloo"


def test_one_rank_without_gpu_decides_for_all() -> None:
    facts = [ON_ONE[0], replace(ON_ONE[1], gpu="")]
    verdict = decide(("nccl", "gloo"), facts, nccl=True)
    assert (verdict.backend, verdict.why) == ("gloo", "not nccl: rank 1 on n1 has no GPU")


def test_one_rank_without_mpi_decides_for_all() -> None:
    facts = [ON_TWO[0], *ON_TWO[1:3], replace(ON_TWO[3], mpi=False)]
    assert choose(("mpi", "gloo"), facts) == "gloo"


def test_the_same_gpu_on_two_hosts_is_two_gpus() -> None:
    """Some virtual GPUs have the same UUID on every host."""
    facts = [replace(fact, gpu="GPU-0", local_rank=0, local_world_size=1, host=f"n{fact.rank}")
             for fact in ON_ONE]  # fmt: skip
    assert choose(("nccl",), [replace(fact, node_rank=None) for fact in facts]) == "nccl"


@pytest.mark.parametrize(
    ("facts", "nccl", "words"),
    [
        (ON_TWO, True, "backend nccl: rank 0 on n1 has no GPU"),
        ([replace(fact, gpu="GPU-0") for fact in ON_ONE], True, r"same GPU.*2 wanted.*gpus-per"),
        (ON_ONE, False, "built without it"),
    ],
)
def test_what_only_nccl_may_do_is_an_error_without_it(
    facts: list[Fact], nccl: bool, words: str
) -> None:
    with pytest.raises(LaunchError, match=words):
        decide(("nccl",), facts, nccl=nccl)


@pytest.mark.parametrize(
    "facts",
    [
        [replace(fact, local_rank=fact.rank, local_world_size=4) for fact in ON_TWO],
        [replace(fact, local_rank=0) for fact in ON_ONE],
        [replace(fact, local_world_size=1, local_rank=0, node_rank=None) for fact in ON_ONE],
    ],
)
def test_local_ranks_that_do_not_fit_the_hosts_are_refused(facts: list[Fact]) -> None:
    with pytest.raises(LaunchError, match=r"ranks run on n1, but rank \d there was told"):
        decide(("gloo",), facts, nccl=False)


def test_nodes_are_numbered_by_the_launcher_or_by_the_lowest_rank() -> None:
    cyclic = [Fact(rank, f"n{1 + rank % 2}", None, rank // 2, 2, "", False) for rank in range(4)]
    assert list_nodes(cyclic) == (("n1", "n2"), (0, 1, 0, 1))
    arbitrary = [Fact(0, "n2", 1, 0, 1, "", False), Fact(1, "n1", 0, 0, 1, "", False)]
    assert list_nodes(arbitrary) == (("n1", "n2"), (1, 0))


@pytest.mark.parametrize("backend", ["ucc", "", ["nccl", "ucc"], []])
def test_unknown_backends(backend: str | list[str]) -> None:
    with pytest.raises(ValueError, match="choose from auto, nccl, mpi, gloo"):
        list_backends(backend)


class Board:
    """A store in memory."""

    def __init__(self) -> None:
        self.table: dict[str, str] = {}

    def collect(self, keys: Sequence[str]) -> list[str]:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if all(key in self.table for key in keys):
                return [self.table[key] for key in keys]
            time.sleep(0.005)
        raise LaunchError("missing")


def let_ranks_agree(facts: Sequence[Fact], wanted: Sequence[str]) -> list[Verdict | str]:
    board, results = Board(), [Verdict("", "", (), ())] * len(facts)  # type: list[Verdict | str]

    def run(fact: Fact) -> None:
        try:
            results[fact.rank] = exchange(
                fact, lambda all_facts: decide(wanted, all_facts, nccl=True),
                publish=board.table.__setitem__, collect=board.collect, world_size=len(facts),
            )  # fmt: skip
        except LaunchError as error:
            results[fact.rank] = str(error)

    threads = [threading.Thread(target=run, args=(fact,)) for fact in facts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_ranks_follow_rank_0() -> None:
    verdicts = let_ranks_agree(ON_TWO, ("nccl", "gloo"))
    assert len(set(verdicts)) == 1
    assert isinstance(verdicts[0], Verdict)
    assert (verdicts[0].backend, verdicts[0].hosts) == ("gloo", ("n1", "n2"))


def test_all_ranks_hear_of_an_error() -> None:
    assert let_ranks_agree(ON_TWO, ("nccl",)) == ["backend nccl: rank 0 on n1 has no GPU"] * 4


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (TORCHRUN, r"MPI needs mpirun or `srun --mpi=pmix`.*torchrun"),
        (SRUN, r"without PMIx \(neither PMIX_RANK nor PMI_RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "was started by env"),
    ],
)
def test_mpi_without_an_mpi_launcher_is_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        mpi.require_launcher(identify(environ))


@pytest.mark.parametrize("environ", [OPENMPI, MPICH, {**SRUN, "PMIX_RANK": "2"}, {}])
def test_mpi_launchers_pass(environ: dict[str, str]) -> None:
    mpi.require_launcher(identify(environ))


def test_worlds_of_one_are_noticed() -> None:
    with pytest.raises(LaunchError, match=r"MPI says rank 0 of 1, .*STEP_NUM_TASKS=5.*--mpi=pmix"):
        mpi.check_world(identify(SRUN), 0, 1)
    with pytest.raises(LaunchError, match=r"MPI says rank 0 of 1, .*OMPI_COMM_WORLD_SIZE=4"):
        mpi.check_world(identify(OPENMPI), 0, 1)
    mpi.check_world(identify(OPENMPI), 2, 4)


# From here on torch is needed.


@pytest.fixture
def group() -> object:
    pytest.importorskip("torch", reason="the process group is torch's")
    from hpcdist import group

    return group


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine n1 that reaches n2 through eth1."""
    monkeypatch.setattr(network, "is_this_host", lambda host: host == "n1")
    monkeypatch.setattr(
        network, "find_own_address", lambda towards: "192.0.2.1" if towards == ["n2"] else None
    )
    monkeypatch.setattr(network, "find_interface", {"192.0.2.1": "eth1"}.get)


@pytest.mark.usefixtures("routed")
def test_interface_is_chosen_once_and_exactly(group: object) -> None:
    environ: dict[str, str] = {}
    said = group.choose_interface(environ, ["n1", "n2"], ("n1", "n2"))  # type: ignore
    assert environ == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    assert said == "eth1, which has 192.0.2.1 and leads to n2"


@pytest.mark.usefixtures("routed")
def test_interface_of_the_user_is_kept(group: object) -> None:
    environ = {"NCCL_SOCKET_IFNAME": "ib0"}
    said = group.choose_interface(environ, ["n1", "n2"], ("n1", "n2"))  # type: ignore
    assert environ["NCCL_SOCKET_IFNAME"] == "ib0"
    assert said == "NCCL_SOCKET_IFNAME=ib0 as set"


@pytest.mark.usefixtures("routed")
def test_one_host_needs_no_interface(group: object) -> None:
    environ: dict[str, str] = {}
    group.choose_interface(environ, ["n2"], ("n1", "n1"))  # type: ignore
    assert environ == {}


def start(code: str, **environ: str) -> subprocess.Popen[str]:
    """Start a process with these variables and none of a launcher around the tests."""
    outer = ("SLURM_", "OMPI_", "PMI", "PRTE", "PBS_", "TORCHELASTIC_", "MASTER_", "MPI_LOCAL")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    return subprocess.Popen(
        [sys.executable, "-c", code], env={**clean, "OMP_NUM_THREADS": "1", **environ}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], timeout: float = 60) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"no end within {timeout:g} s\n{out}\n{err}")
    return process.returncode, out, err


def free_port() -> str:
    with network.listen_below_ephemeral(os.getpid()) as listener:
        return str(listener.getsockname()[1])


ALONE = """
import hpcdist, torch, os
with hpcdist.session() as ctx:
    assert torch.distributed.is_initialized()
    x = torch.ones(3)
    torch.distributed.all_reduce(x)
    print(ctx.rank, ctx.world_size, ctx.backend, ctx.hosts, float(x.sum()))
    print(ctx.explain())
assert not torch.distributed.is_initialized()
ctx.close()  # once more does nothing
"""


@pytest.mark.usefixtures("group")
def test_alone() -> None:
    code, out, err = finish(start(ALONE, CUDA_VISIBLE_DEVICES=""))
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == f"0 1 gloo ('{socket.gethostname()}',) 3.0"
    named = {line.split()[0] for line in lines[1:]}
    assert named == {"launcher", "rendezvous", "interface", "device", "backend"}
    assert err.count("hpcdist: launcher single, backend gloo (not nccl: rank 0") == 1


@pytest.mark.usefixtures("group")
def test_missing_rank_is_named() -> None:
    code = "import hpcdist; hpcdist.init(backend='gloo', timeout=3)"
    ranks = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    status, _, err = finish(start(code, RANK="0", **ranks))
    assert status == 1
    assert "LaunchError: 2 of 3 ranks did not join within 3 s: 1, 2" in err


@pytest.mark.usefixtures("group")
def test_another_jobs_store_is_not_joined() -> None:
    import torch.distributed as dist

    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other.set("hpcdist/identity", "SLURM_JOB_ID=6 SLURM_STEP_ID=0 world 2")
    code = "import hpcdist; hpcdist.init(backend='gloo', timeout=10)"
    status, _, err = finish(
        start(code, RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(other.port))
    )
    assert status == 1
    assert "belongs to another job (SLURM_JOB_ID=6 SLURM_STEP_ID=0" in err


@pytest.mark.usefixtures("group")
def test_taken_port_ends_the_rank_that_listens() -> None:
    with network.listen(0) as holder:
        port = str(holder.getsockname()[1])
        code = "import hpcdist; hpcdist.init(backend='gloo', timeout=10)"
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        status, _, err = finish(start(code, RANK="0", WORLD_SIZE="2", **address))
    assert status == 1
    assert f"port {port} is taken" in err


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ["mpi", "nccl"])
def test_backend_that_cannot_work_here(name: str) -> None:
    code = f"import hpcdist; hpcdist.init(backend={name!r})"
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
    status, _, err = finish(start(code, **ranks))
    assert status == 1
    assert "LaunchError" in err
    assert "1 ranks" not in err


FAILING = """
import sys, time, hpcdist, torch, torch.distributed as dist
try:
    with hpcdist.session(backend="gloo", timeout=120, quiet=True) as ctx:
        if ctx.rank == 1:
            dist.all_reduce(torch.ones(1000), async_op=True) if PENDING else None
            raise RuntimeError("rank 1 fails")
        begin = time.monotonic()
        dist.broadcast(torch.ones(1), src=1)
        dist.all_reduce(torch.ones(1))
except RuntimeError as error:
    if ctx.rank == 1:
        print("failed at", time.monotonic(), flush=True)
        raise
    print("noticed at", time.monotonic(), flush=True)
    sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("pending", [False, True])
def test_failing_rank_ends_and_its_peer_notices(pending: bool) -> None:
    code = FAILING.replace("PENDING", str(pending))
    ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = [start(code, RANK=str(rank), **ranks) for rank in range(2)]
    (status_0, out_0, err_0), (status_1, out_1, err_1) = map(finish, processes)
    assert status_1 != 0, err_1
    assert status_0 == 3, err_0
    failed, noticed = float(out_1.split()[-1]), float(out_0.split()[-1])
    # Without pending work the peer knows at once; with it, at the latest when the process is gone.
    assert noticed - failed < (20 if pending else 2)


STEP = """
import hpcdist, torch
with hpcdist.session(backend="gloo", timeout=60) as ctx:
    x = torch.tensor([ctx.rank + 1.0])
    torch.distributed.all_reduce(x)
    print(ctx.launcher, ctx.local_rank, ctx.local_world_size, ctx.node_rank, int(x))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("group")
def test_step_of_srun_on_one_node() -> None:
    step = {**SRUN, "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "anything",
            "SLURM_NODEID": "0"}  # fmt: skip
    tasks = [start(STEP, **{**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
             for rank in range(2)]  # fmt: skip
    results = [finish(task) for task in tasks]
    assert [status for status, _, _ in results] == [0, 0], results
    assert [out.strip() for _, out, _ in results] == ["srun 0 2 0 3", "srun 1 2 0 3"]
    announced = "".join(err for _, _, err in results)
    assert announced.count("hpcdist: launcher srun, backend gloo, world 2, nodes 1, master ") == 1


def test_facts_and_verdicts_survive_the_way_through_the_store() -> None:
    assert agree.load_fact(agree.dump_fact(ON_TWO[3])) == ON_TWO[3]
    verdict = Verdict("gloo", "why", ("n1", "n2"), (0, 1, 0), "")
    assert Verdict.load(verdict.dump()) == verdict


def test_package_is_typed() -> None:
    assert (Path(agree.__file__).parent / "py.typed").exists()
