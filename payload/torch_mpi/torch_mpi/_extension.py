"""Loading the compiled part, with reasons a person can act on."""

import importlib
import os

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ./payload/torch_mpi"


def built_facts():
    """Return what setup.py noted about the build: TORCH_VERSION and MPICXX (str), or nothing."""
    try:
        from . import _built
    except ImportError:
        return {}
    return {name: getattr(_built, name) for name in ("TORCH_VERSION", "MPICXX")}


def _release(version):
    return version.split("+")[0]


def load():
    """Import and return ``torch_mpi._C``.

    Raises
    ------
    RuntimeError
        When the extension is missing, was compiled for another torch (loading it could crash), or
        its libmpi is not found. The message says which, and what to type.
    """
    import torch

    built_for = built_facts().get("TORCH_VERSION")
    if built_for is not None and _release(built_for) != _release(torch.__version__):
        raise RuntimeError(
            f"The mpi backend was compiled for torch {built_for}, but this is torch "
            f"{torch.__version__}. Compile it again: {REBUILD}"
        )
    try:
        return importlib.import_module("torch_mpi._C")
    except ImportError as error:
        text = str(error)
        if "libmpi" in text:
            remedy = (
                "Its MPI library is not found: load the MPI module it was compiled with "
                f"({built_facts().get('MPICXX', 'unknown')}), or set LD_LIBRARY_PATH to the "
                "directory of that library. LD_LIBRARY_PATH is now "
                f"{os.environ.get('LD_LIBRARY_PATH', 'unset')!r}."
            )
        else:
            remedy = f"Compile it for this environment: {REBUILD}"
        raise RuntimeError(f"The mpi backend cannot be loaded: {text}. {remedy}") from error
