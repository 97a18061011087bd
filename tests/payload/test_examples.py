"""The two examples on real ranks: sums, exit codes, and errors that say what to type."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the examples use torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "payload" / "examples"
NCCL = EXAMPLES / "distributed_learning_nccl.py"
MPI = EXAMPLES / "distributed_learning_mpi.py"
DEADLINE = 120.0
HOST = re.escape(socket.gethostname())


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    @property
    def ranks(self) -> list[str]:
        """The ranks' lines, sorted; mpirun does not keep the order."""
        return sorted(line for line in self.out.splitlines() if line.startswith("rank "))


def launch(command: Sequence[str | Path], **environ: str) -> Outcome:
    """Run a command on the CPU, with no variable of a launcher around the tests."""
    outer = ("SLURM_", "OMPI_", "PMI", "PRTE", "PBS_", "TORCHELASTIC_", "MASTER_", "MPI_LOCAL")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    clean |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    process = subprocess.Popen(
        [str(word) for word in command], text=True, start_new_session=True,
        env={**clean, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environ},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"no end within {DEADLINE:g} s: {command}\n{out}\n{err}")
    return Outcome(process.returncode, out, err)


@pytest.fixture(scope="session")
def mpirun() -> list[str]:
    """Return mpirun as a command, from this Python's environment if it is there."""
    pytest.importorskip("mpi4py", reason="ranks of MPI need mpi4py")
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("there is no mpirun")
    return [found, "--oversubscribe", "-n"]


def torchrun(count: int) -> list[str]:
    # A port of 0 lets the agent choose a free one.
    return [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0", f"--nproc-per-node={count}"]  # fmt: skip


def expect_sum(outcome: Outcome, world: int, backend: str) -> None:
    assert outcome.status == 0, outcome.err
    assert len(outcome.ranks) == world
    line = rf"rank (\d) of {world} on {HOST}, local rank (\d), device cpu, backend {backend}"
    found = [re.fullmatch(line, text) for text in outcome.ranks]
    assert all(found), outcome.ranks
    # Local ranks are each used once; which rank has which is the launcher's affair.
    for group in (1, 2):
        assert sorted(int(m.group(group)) for m in found if m) == list(range(world))
    # mpirun forwards the ranks' output in any order, so this line need not be the last one.
    said = [line for line in outcome.out.splitlines() if line.startswith("OK")]
    total = world * (world + 1) // 2
    assert said == [f"OK: sum {total} over {world} ranks on 1 node(s) (backend {backend})"]


def test_one_process() -> None:
    expect_sum(launch([sys.executable, NCCL, "--expect-world", "1"]), 1, "gloo")


def test_falling_back_to_gloo_is_said() -> None:
    outcome = launch([sys.executable, NCCL])
    said = f"backend gloo (not nccl: rank 0 on {socket.gethostname()} has no GPU)"
    assert outcome.err.count(said) == 1


@pytest.mark.parametrize("script", [NCCL, MPI])
def test_unexpected_world_fails(script: Path) -> None:
    if script == MPI:
        pytest.importorskip("mpi4py", reason="ranks of MPI need mpi4py")
    outcome = launch([sys.executable, script, "--expect-world", "4"])
    assert outcome.status != 0
    assert "world size is 1, expected 4" in outcome.err
    assert "OK" not in outcome.out


@pytest.mark.parametrize("script", [NCCL, MPI])
def test_batch_shell_is_told_to_use_srun(script: Path) -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    outcome = launch([sys.executable, script], **batch)
    assert outcome.status == 1
    assert outcome.err.startswith(f"{script.stem}: this is a single process, although")
    assert "Traceback" not in outcome.err


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_nccl_example_by_torchrun(world: int) -> None:
    command = [*torchrun(world), NCCL, "--expect-world", str(world)]
    expect_sum(launch(command), world, "gloo")


@pytest.mark.slow
@pytest.mark.parametrize("script", [NCCL, MPI])
@pytest.mark.parametrize("world", [3, 4])
def test_by_mpirun(mpirun: list[str], script: Path, world: int) -> None:
    command = [*mpirun, str(world), sys.executable, "-u", script, "--expect-world", str(world)]
    expect_sum(launch(command), world, "gloo" if script == NCCL else "mpi")


@pytest.mark.slow
@pytest.mark.parametrize("script", [NCCL, MPI])
@pytest.mark.parametrize("rank", [0, 3])
def test_failing_rank_ends_mpirun(mpirun: list[str], script: Path, rank: int) -> None:
    fail = ["--fail-rank", str(rank), "--timeout", "600"]
    outcome = launch([*mpirun, "4", sys.executable, "-u", script, *fail])
    assert outcome.status != 0
    assert f"RuntimeError: rank {rank} fails" in outcome.err
    assert "OK" not in outcome.out


@pytest.mark.slow
def test_failing_rank_ends_torchrun() -> None:
    outcome = launch([*torchrun(2), NCCL, "--fail-rank", "1", "--timeout", "600"])
    assert outcome.status != 0
    assert "RuntimeError: rank 1 fails" in outcome.err
    assert "OK" not in outcome.out


@pytest.mark.slow
def test_mpi_example_under_torchrun_says_what_mpi_needs() -> None:
    outcome = launch([*torchrun(2), MPI])
    assert outcome.status != 0
    assert "distributed_learning_mpi: MPI needs mpirun or `srun --mpi=pmix`" in outcome.err


@pytest.mark.slow
def test_wrong_sum_fails(mpirun: list[str], tmp_path: Path) -> None:
    """The check itself: a rank that contributes something else must not go unnoticed."""
    for script in (NCCL, MPI):
        broken = tmp_path / script.name
        broken.write_text(script.read_text().replace(".rank + 1)]", ".rank + 2)]"))
        assert broken.read_text() != script.read_text()
        outcome = launch([*mpirun, "2", sys.executable, "-u", broken])
        assert outcome.status != 0
        assert "sum is 5, expected 3" in outcome.err
        assert "OK" not in outcome.out
