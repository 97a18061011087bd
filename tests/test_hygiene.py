"""What leaks from the host into the container, and what must not: run on the host, with the SIF."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IMAGE = Path(os.environ.get("IMAGE", ROOT / "build/Pytorch_DL_HPC-cpu.sif"))

pytestmark = pytest.mark.image


def inside(*command: str, **variables: str) -> str:
    """Run a command in the image with more variables on the host; returns its output."""
    done = subprocess.run(
        ["apptainer", "exec", str(IMAGE), *command],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_modules_of_the_host_do_not_get_in(tmp_path: Path) -> None:
    """A numpy of the host's PYTHONPATH or ~/.local would break the image's torch."""
    (tmp_path / "numpy.py").write_text("raise SystemExit('the host leaks in')")
    user_site = tmp_path / ".local/lib/python3.11/site-packages"
    user_site.mkdir(parents=True)
    (user_site / "numpy.py").write_text("raise SystemExit('~/.local leaks in')")
    place = inside(
        "python", "-c", "import numpy; print(numpy.__file__)",
        PYTHONPATH=str(tmp_path), PYTHONHOME="/usr", PYTHONUSERBASE=str(tmp_path / ".local"),
        VIRTUAL_ENV="/nowhere", CONDA_PREFIX="/nowhere",
    )  # fmt: skip
    assert place.startswith("/opt/venv/")


def test_a_variable_passed_on_purpose_gets_in(tmp_path: Path) -> None:
    """The documented way: APPTAINERENV_PYTHONPATH."""
    (tmp_path / "mine.py").write_text("value = 42")
    command = ("python", "-c", "import mine; print(mine.value)")
    assert inside(*command, APPTAINERENV_PYTHONPATH=str(tmp_path)) == "42"


def test_directories_that_exist_only_outside_are_replaced() -> None:
    """TMPDIR, XDG_RUNTIME_DIR and CA files of the host that are not there inside."""
    assert inside("sh", "-c", "echo $TMPDIR", TMPDIR="/var/tmp") == "/var/tmp"
    script = 'echo "$TMPDIR ${XDG_RUNTIME_DIR:-none} ${SSL_CERT_FILE:-none} $LC_ALL"'
    variables = {"TMPDIR": "/nowhere/tmp", "XDG_RUNTIME_DIR": "/nowhere/run",
                 "SSL_CERT_FILE": "/nowhere/ca.pem", "LC_ALL": "de_DE.UTF-8"}  # fmt: skip
    assert inside("sh", "-c", script, **variables) == "/tmp none none C.UTF-8"


def test_variables_of_the_job_get_in() -> None:
    """Slurm's, PMIx's and OpenMP's variables must reach the ranks."""
    script = 'echo "$SLURM_PROCID $PMIX_RANK $OMP_NUM_THREADS"'
    variables = {"SLURM_PROCID": "3", "PMIX_RANK": "2", "OMP_NUM_THREADS": "7"}
    assert inside("sh", "-c", script, **variables) == "3 2 7"


def test_environment_is_defined_once() -> None:
    """Layers do not pile up their %environment."""
    text = inside("cat", "/.singularity.d/env/90-environment.sh")
    assert text.count("export PYTHONNOUSERSITE=1") == 1


def test_run_is_python_and_test_is_the_self_test() -> None:
    """`singularity run IMAGE script.py` and `singularity test IMAGE`, as %help says."""
    command = ["apptainer", "run", str(IMAGE), "-c", "import sys; print(sys.prefix)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "/opt/venv"
    tested = subprocess.run(["apptainer", "test", str(IMAGE)], capture_output=True, text=True)
    assert (tested.returncode, "2 MPI ranks: ok" in tested.stdout) == (0, True), tested.stderr


def test_help_says_what_is_in() -> None:
    """`singularity run-help IMAGE` names the flavour and whether torchvision is in."""
    command = ["apptainer", "run-help", str(IMAGE)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "cpu flavour" in text
    assert "torchvision: none" in text or "torchvision: 0." in text


def test_image_is_small() -> None:
    """The promise of the README: at most 450 MB."""
    assert IMAGE.stat().st_size <= 450e6


def test_record_names_no_path_of_the_build_host() -> None:
    """`singularity inspect` shows a definition and labels that hold no path of the host."""
    command = ["apptainer", "inspect", "--all", str(IMAGE)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for word in (str(ROOT), str(Path.home() / ".cache"), "local0", "pytorch-dl-hpc-"):
        assert word not in text, word
