"""`python -m hpcdist`: what the job scripts ask."""

from __future__ import annotations

import pytest
from hpcdist.__main__ import list_torchrun_arguments
from hpcdist.errors import LaunchError

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "0",
}


def step(node: int, **changes: str) -> dict[str, str]:
    return {**STEP, "SLURM_PROCID": str(node), "SLURM_NODEID": str(node), **changes}


def test_nodes_get_their_number_and_the_same_address() -> None:
    """Both nodes meet at the first host of the step, each under its own node rank."""
    first, second = (list_torchrun_arguments(step(node)) for node in (0, 1))
    assert first[:3] == ["--nnodes=2", "--node-rank=0", "--master-addr=n1"]
    assert second[:3] == ["--nnodes=2", "--node-rank=1", "--master-addr=n1"]
    assert first[3] == second[3]
    assert first[3].startswith("--master-port=")


def test_two_jobs_get_two_ports() -> None:
    """Jobs that share a node do not meet at one port."""
    ports = {list_torchrun_arguments(step(0, SLURM_JOB_ID=str(job)))[3] for job in range(50)}
    assert len(ports) == 50


def test_several_torchruns_on_a_node_are_refused() -> None:
    tasks = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    with pytest.raises(LaunchError, match=r"2 tasks on this node .* --ntasks-per-node=1"):
        list_torchrun_arguments(step(0, **tasks))
