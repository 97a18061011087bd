"""The job scripts, submitted as a user does, on two nodes: what they print and how they end."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from client import Job, Slurm

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "payload/examples"
MPI, NCCL = "distributed_learning_mpi.py", "distributed_learning_nccl.py"
JOBS = [("mpi", MPI), ("nccl", NCCL), ("torchrun", NCCL)]

pytestmark = [pytest.mark.slurm, pytest.mark.image]


def launch(
    slurm: Slurm, tmp_path: Path, job: str, script: str, *options: str, **env: str
) -> tuple[Job, str]:
    """`make launch` without make, so that logs/ is the test's own; returns job and what it said."""
    command = [
        sys.executable, str(ROOT / "scripts/launch.py"), "--site", "local", "--job", job,
        "--script", str(EXAMPLES / script), "--nodes", "2", "--tasks", "2", *options,
    ]  # fmt: skip
    done = slurm.run(command, cwd=tmp_path, env=env)
    found = re.search(r"^job (\d+); output: (\S+)$", done.stdout, re.M)
    assert found, done.stdout
    return Job(slurm, int(found[1])), found[2]


def check_four_ranks(job: Job, backend: str) -> None:
    """Four ranks, two on each node, all with the right sum."""
    ending, output = job.wait(timeout=180), job.output()
    assert (ending.state, ending.exit_code) == ("COMPLETED", 0), job.explain()
    assert f"OK: sum 10 over 4 ranks on 2 node(s) (backend {backend})" in output, output
    assert "timed out" not in output, output  # nobody tried an address that leads elsewhere
    ranks = re.findall(r"rank (\d) of 4 on (\S+), local rank (\d)", output)
    assert sorted(ranks) == [
        ("0", "n1", "0"), ("1", "n1", "1"), ("2", "n2", "0"), ("3", "n2", "1"),
    ], output  # fmt: skip


@pytest.mark.parametrize(("job", "script"), JOBS)
def test_job_reaches_both_nodes(slurm: Slurm, tmp_path: Path, job: str, script: str) -> None:
    """Each job script gives one world of four ranks over both nodes, and the right sum."""
    submitted, log = launch(slurm, tmp_path, job, script, "--arguments", "--expect-world 4")
    check_four_ranks(submitted, "mpi" if job == "mpi" else "gloo")
    assert (tmp_path / log).is_file()


@pytest.mark.parametrize(("job", "script"), JOBS)
def test_failing_rank_fails_the_job(slurm: Slurm, tmp_path: Path, job: str, script: str) -> None:
    """One rank that raises ends all of them, with an exit code that is not 0 and nothing left."""
    submitted, _ = launch(slurm, tmp_path, job, script, "--arguments", "--fail-rank 3")
    ending = submitted.wait(timeout=180)
    assert ending.state == "FAILED", submitted.explain()
    assert ending.exit_code != 0
    assert "rank 3 fails, as --fail-rank asked" in submitted.output()
    submitted.wait_until_gone()


def test_mpirun_of_the_host_starts_containers(slurm: Slurm, tmp_path: Path, bare_mpi: Path) -> None:
    """MPI=mpirun: the host's Open MPI over containers, as in the tutorials of old."""
    variables = {"MPI": "mpirun", "PATH": f"{bare_mpi}:{os.environ['PATH']}",
                 "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # fmt: skip
    submitted, _ = launch(slurm, tmp_path, "mpi", MPI, **variables)
    check_four_ranks(submitted, "mpi")
    assert "MPI ranks are started by mpirun (MPI=mpirun is set)" in submitted.output()


def test_job_says_what_starts_its_ranks(slurm: Slurm, tmp_path: Path) -> None:
    """Nothing is chosen in silence."""
    submitted, _ = launch(slurm, tmp_path, "mpi", MPI)
    submitted.wait(timeout=180)
    assert "MPI ranks are started by pmix (srun --mpi=list has pmix)" in submitted.output()


def test_gpus_are_asked_for(slurm: Slurm, tmp_path: Path) -> None:
    """GPUS=2 reaches Slurm; without a driver the ranks say that they do without."""
    submitted, _ = launch(slurm, tmp_path, "nccl", NCCL, "--gpus", "2")
    assert "gres:gpu" in submitted.record().get("TresPerNode", "")
    check_four_ranks(submitted, "gloo")


def test_make_launch(slurm: Slurm, tmp_path: Path) -> None:
    """The very command of the README, from the tree."""
    done = slurm.run([
        "make", "-s", "-C", ROOT, "launch", "JOB=nccl", "SITE=local", "NODES=2", "TASKS=2",
        f"SCRIPT=payload/examples/{NCCL}", "ARGS=--expect-world 4",
    ])  # fmt: skip
    found = re.search(r"^job (\d+)", done.stdout, re.M)
    assert found, done.stdout
    check_four_ranks(Job(slurm, int(found[1])), "gloo")


def test_cancelled_job_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    """scancel takes the containers' processes along, on both nodes."""
    script = tmp_path / "sleep.py"
    script.write_text("import time; print('sleeping', flush=True); time.sleep(600)")
    submitted, _ = launch(slurm, tmp_path, "nccl", str(script))
    submitted.wait_until(
        lambda: submitted.output().count("sleeping") == 4, "four ranks asleep", 120
    )
    submitted.cancel()
    assert submitted.wait(timeout=60).state == "CANCELLED"
    submitted.wait_until_gone()


def test_job_script_by_hand(slurm: Slurm, tmp_path: Path) -> None:
    """Plain sbatch will do: the script finds the tree that it was submitted from."""
    job = slurm.submit(
        ROOT / "scripts/jobs/nccl.sbatch", "--nodes=2", "--ntasks-per-node=2",
        f"--output={tmp_path}/job.out", arguments=[str(EXAMPLES / NCCL)], cwd=ROOT,
    )  # fmt: skip
    check_four_ranks(job, "gloo")


def test_missing_image_is_one_clear_line(slurm: Slurm, tmp_path: Path) -> None:
    """Inside the job as well: the line says what to type, and the job fails."""
    job = slurm.submit(
        ROOT / "scripts/jobs/nccl.sbatch", "--nodes=1", f"--output={tmp_path}/job.out",
        arguments=[str(EXAMPLES / NCCL)], cwd=ROOT, env={"IMAGE": "/nowhere/x.sif"},
    )  # fmt: skip
    assert job.wait().exit_code == 1
    assert "error: no image /nowhere/x.sif: run `make image`" in job.output()
