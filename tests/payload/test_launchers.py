"""Who am I: an environment in, a placement (or an error that names the variable) out."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from environments import MPICH, OPENMPI, SRUN, TORCHRUN, without
from hpcdist import LaunchError, identify, slurm

# Measured in the ranks that mpirun (Open MPI 5) puts on a job's second node: the step is that of
# its daemon, and says that this is task 0 of 1.
DAEMONS_STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_STEP_NODELIST": "n2", "SLURM_NTASKS": "1",
}  # fmt: skip


def place(environ: dict[str, str]) -> tuple[str, int, int, int, int]:
    p = identify(environ)
    return p.launcher, p.rank, p.world_size, p.local_rank, p.local_world_size


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, ("torchrun", 3, 4, 1, 2)),
        (OPENMPI, ("openmpi", 2, 4, 0, 2)),
        (MPICH, ("mpich", 2, 4, 0, 2)),
        ({**MPICH, "I_MPI_MPIRUN": "mpirun"}, ("intelmpi", 2, 4, 0, 2)),
        ({**MPICH, "PBS_JOBID": "12.server"}, ("pbs (mpich)", 2, 4, 0, 2)),
        ({**OPENMPI, "PBS_JOBID": "12.server"}, ("pbs (openmpi)", 2, 4, 0, 2)),
        ({**MPICH, "TACC_SYSTEM": "frontera", "SLURM_JOB_ID": "7"}, ("ibrun (mpich)", 2, 4, 0, 2)),
        (
            {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2",
             "MV2_COMM_WORLD_LOCAL_RANK": "0", "MV2_COMM_WORLD_LOCAL_SIZE": "1"},
            ("mvapich", 1, 2, 0, 1),
        ),
        (
            {"PALS_RANKID": "3", "PMI_SIZE": "4", "PALS_LOCAL_RANKID": "1", "PMI_LOCAL_SIZE": "2",
             "PBS_JOBID": "12.server", "PMI_RANK": "3"},
            ("pbs (pals)", 3, 4, 1, 2),
        ),
        (SRUN, ("srun", 2, 5, 0, 2)),
        ({**SRUN, "SLURM_NODEID": "2", "SLURM_PROCID": "4"}, ("srun", 4, 5, 0, 1)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ("pmi", 1, 2, 1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("env", 1, 2, 1, 2)),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            ("env", 3, 4, 1, 2),
        ),
        ({}, ("single", 0, 1, 0, 1)),
        # Inner launchers come first.
        ({**OPENMPI, **DAEMONS_STEP}, ("openmpi", 2, 4, 0, 2)),
        ({**MPICH, **DAEMONS_STEP}, ("mpich", 2, 4, 0, 2)),
        (
            {**DAEMONS_STEP, **TORCHRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1",
             "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
             "SLURM_STEP_NODELIST": "n[1-2]"},
            ("torchrun", 3, 4, 1, 2),
        ),
        # srun --mpi=pmix, and the variables that an Open MPI may add by itself.
        ({**SRUN, "PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.7.1"}, ("srun", 2, 5, 0, 2)),
        (
            {**SRUN, "PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.7.1",
             "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "5",
             "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            ("srun", 2, 5, 0, 2),
        ),
        # Variables exported by hand that agree do no harm.
        ({**SRUN, "WORLD_SIZE": "5", "RANK": "2"}, ("srun", 2, 5, 0, 2)),
    ],
)  # fmt: skip
def test_recognises(environ: dict[str, str], expected: tuple[str, int, int, int, int]) -> None:
    assert place(environ) == expected


def test_srun_knows_nodes_hosts_and_evidence() -> None:
    placement = identify(SRUN)
    assert (placement.node_rank, placement.num_nodes) == (1, 3)
    assert placement.hosts == ("n9", "n10", "n11")
    assert "SLURM_STEP_NODELIST=n[9-11]" in placement.evidence
    assert "SLURM_PROCID=2" in placement.evidence


def test_node_rank_of_open_mpi_is_no_node() -> None:
    """OMPI_COMM_WORLD_NODE_RANK counts the processes on a node."""
    placement = identify({**OPENMPI, "OMPI_COMM_WORLD_NODE_RANK": "1"})
    assert placement.node_rank is None
    assert placement.spans_nodes


@pytest.mark.parametrize(
    "step",
    [
        {},
        {"SLURM_STEP_ID": "4294967291"},  # SLURM_BATCH_SCRIPT by %u
        {"SLURM_STEPID": "-5"},  # and by %d
        {"SLURM_STEP_ID": "4294967290"},  # SLURM_INTERACTIVE_STEP: the shell of salloc
        {"SLURM_STEP_ID": "-6"},
    ],
)
def test_batch_and_interactive_shells_are_no_tasks(step: dict[str, str]) -> None:
    shell = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
             "SLURM_STEP_NUM_TASKS": "1", **step}  # fmt: skip
    assert slurm.find_step(shell) is None
    assert identify({**shell, "SLURM_NTASKS": "1"}).launcher == "single"


def test_one_process_in_an_allocation_of_several_tasks_is_refused() -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    with pytest.raises(LaunchError, match=r"SLURM_JOB_ID=7 has 4 tasks.*srun python"):
        identify(batch)
    assert identify({**batch, "HPCDIST_SINGLE": "1"}).world_size == 1


def test_tasks_per_node_count_where_ntasks_is_unset() -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NUM_NODES": "2"}
    with pytest.raises(LaunchError, match="4 tasks"):
        identify(batch)
    # Without -n, SLURM_TASKS_PER_NODE counts CPUs.
    assert identify({"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "28"}).world_size == 1


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        # Missing pieces name themselves.
        (without(SRUN, "SLURM_PROCID"), r"SLURM_PROCID is not set.*cleanenv"),
        (without(SRUN, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST is not set"),
        (without(OPENMPI, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not set"),
        (without(MPICH, "PMI_SIZE"), "PMI_SIZE is not set"),
        (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK is not set"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, "LOCAL_WORLD_SIZE is not set"),
        ({"PMIX_RANK": "1"}, r"PMIX_RANK=1 tells the rank, but.*--mpi=pmix"),
        # No numbers, and numbers out of range.
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK='x' is no number"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, r"rank and world size contradict.*RANK=4 WORLD_SIZE=4"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "contradict"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank and local world size contradict"),
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, "local world size and world size"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x3"}, "SLURM_STEP_TASKS_PER_NODE='2"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "does not fit"),
        ({**SRUN, "SLURM_STEP_NODELIST": "n[9-10]"}, "does not fit"),
        ({**SRUN, "SLURM_STEP_NODELIST": "n[9-"}, r"SLURM_STEP_NODELIST='n\[9-' is not a host"),
        # Two launchers that disagree.
        ({**SRUN, "WORLD_SIZE": "4"}, r"WORLD_SIZE=4 is set, but srun says 5.*unset WORLD_SIZE"),
        ({**SRUN, "RANK": "0"}, r"RANK=0 is set, but srun says 2"),
        (
            {**SRUN, "PMIX_NAMESPACE": "slurm.pmix.7.1", "OMPI_COMM_WORLD_RANK": "0",
             "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
             "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            r"srun says rank 2 of 5.*but openmpi started 1",
        ),
        ({**SRUN, "PMI_RANK": "0", "PMI_SIZE": "1"}, "srun says rank 2 of 5"),
        # srun -n5 mpirun -n4: every task starts a job of its own.
        ({**SRUN, **OPENMPI}, r"each ran openmpi's launcher for 4 ranks.*without mpirun"),
        # srun with two tasks per node, each a torchrun of two processes.
        ({**SRUN, **TORCHRUN}, r"2 tasks per node × 2 processes.*--ntasks-per-node=1"),
        # A torchrun in each of several tasks that does not know the others.
        (
            {**SRUN, **TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
             "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"},
            r"WORLD_SIZE=1: that is 5 jobs; give torchrun --nnodes=5",
        ),
        ({**OPENMPI, **TORCHRUN}, r"openmpi started 4 tasks.*2 tasks per node × 2"),
    ],
)  # fmt: skip
def test_refuses(environ: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        identify(environ)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1(x2)", [1, 1]), ("3,1(x2),12", [3, 1, 1, 12])],
)
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert slurm.expand_tasks_per_node(text) == counts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu[01-03,07]", ("gpu01", "gpu02", "gpu03", "gpu07")),
        ("n[9-11]", ("n9", "n10", "n11")),
        ("login", ("login",)),
        ("a[1-2]b[1-2],c", ("a1b1", "a1b2", "a2b1", "a2b2", "c")),
        ("n2,n1,n2", ("n2", "n1")),
    ],
)
def test_host_lists(text: str, hosts: tuple[str, ...]) -> None:
    assert slurm.expand_hosts(text, variable="X") == hosts


@pytest.mark.parametrize(
    ("environ", "speaks"),
    [
        (OPENMPI, True), (MPICH, True), ({"PMI_RANK": "0", "PMI_SIZE": "1"}, True),
        (SRUN, False), ({**SRUN, "PMIX_RANK": "2"}, True),
        ({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "5"}, True),
        (TORCHRUN, False), ({}, False), ({"RANK": "0", "WORLD_SIZE": "1"}, False),
    ],
)  # fmt: skip
def test_who_speaks_mpi(environ: dict[str, str], speaks: bool) -> None:
    assert identify(environ).speaks_mpi is speaks


def test_import_loads_no_torch_and_takes_milliseconds() -> None:
    code = "import sys, hpcdist.rendezvous; sys.exit('torch' in sys.modules)"
    took = []
    for _ in range(3):
        begin = time.perf_counter()
        payload = Path(slurm.__file__).parents[1]
        done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(payload)})
        took.append(time.perf_counter() - begin)
        assert done.returncode == 0
    assert min(took) < 1.0  # the interpreter included; torch alone takes longer
