"""What must be true of the image: `singularity test IMAGE`, and the last step of every build.

Usage: selftest.py FLAVOUR TORCHVISION   (TORCHVISION: the version that is in, or `none`)

Exits non-zero at the first thing that is not as it must be, and names it.
"""

import importlib
import re
import site
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
SUM_OF_RANKS = """
import torch, torch.distributed as dist
dist.init_process_group("mpi")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
print(total.item(), flush=True)
dist.destroy_process_group()
"""


def check(holds: bool, what: str) -> None:
    """End the program with the sentence `what` unless it holds."""
    if not holds:
        sys.exit(f"selftest: {what}")


def check_python() -> None:
    """The image's own interpreter, and nothing of the host's ~/.local."""
    check(sys.prefix == "/opt/venv", f"python runs from {sys.prefix}, not from /opt/venv")
    check(not site.ENABLE_USER_SITE, "~/.local leaks in: PYTHONNOUSERSITE is not set")
    for name in ("hpcdist", "hostlist", "jupyterlab", "numpy", "pytest", "rich"):
        importlib.import_module(name)
    pip = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    check(pip.returncode == 0, f"pip check: {pip.stdout.strip()}")


def check_torch(flavour: str, torchvision: str) -> str:
    """The locked torch, of the right flavour, working together with numpy and torchvision.

    Returns torch's version.
    """
    import numpy
    import torch

    lock = (REQUIREMENTS / f"torch-{flavour}.txt").read_text()
    found = re.search(r"^torch==(\S+)", lock, re.M)
    wanted = found.group(1) if found else "unknown"
    check(torch.__version__ == wanted, f"torch is {torch.__version__}, the lock says {wanted}")
    if flavour == "cpu":
        check(
            torch.version.cuda is None, f"the cpu flavour holds torch for CUDA {torch.version.cuda}"
        )
    check(
        torch.from_numpy(numpy.ones(3)).sum().item() == 3.0, "torch and numpy do not work together"
    )
    check(torch.distributed.is_gloo_available(), "torch has no gloo backend")
    check(torch.distributed.is_mpi_available(), "torch has no mpi backend: torch_mpi did not load")
    if torchvision != "none":
        version = importlib.import_module("torchvision").__version__
        check(version == torchvision, f"torchvision is {version}, the label says {torchvision}")
    return str(torch.__version__)


def check_mpi() -> str:
    """The image's own Open MPI, and torch over it on two ranks; returns MPI's version."""
    from mpi4py import MPI

    library = MPI.Get_library_version().split(",")[0]
    check(library.startswith("Open MPI v5.0."), f"MPI is {library}, wanted Open MPI v5.0")
    maps = Path("/proc/self/maps").read_text()
    foreign = {p for p in re.findall(r"/\S*libmpi\.so\S*", maps) if not p.startswith("/opt/venv/")}
    check(not foreign, f"a foreign libmpi is loaded: {foreign}")
    command = ["mpirun", "-n", "2", "--oversubscribe", sys.executable, "-c", SUM_OF_RANKS]
    world = subprocess.run(command, capture_output=True, text=True, timeout=120)
    check(
        world.returncode == 0 and world.stdout.split() == ["3", "3"],
        f"mpirun -n 2: exit code {world.returncode}, {world.stdout!r}, {world.stderr[-2000:]!r}",
    )
    return library


def main() -> None:
    flavour, torchvision = sys.argv[1:]
    check_python()
    torch = check_torch(flavour, torchvision)
    library = check_mpi()
    print(f"selftest: torch {torch}, torchvision {torchvision}, {library}, 2 MPI ranks: ok")


if __name__ == "__main__":
    main()
