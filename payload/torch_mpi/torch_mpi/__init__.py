"""The ``mpi`` backend of torch.distributed for stock PyTorch wheels.

Installing the package is all there is to do: ``import torch`` calls :func:`autoload` through the
``torch.backends`` entry point, and ``torch.distributed.init_process_group("mpi")`` then works in
unmodified scripts under mpirun and srun. Programs that never ask for mpi pay nothing: neither MPI
nor the compiled extension is touched before.

Nothing here is meant to be imported by users, except :func:`info` for a look at what is installed.
"""

__version__ = "0.1.0"
__all__ = ["autoload", "info"]


def autoload():
    """Make torch answer to ``backend="mpi"``. Called by ``import torch``; never raises.

    Torch turns an exception of this function into a failed ``import torch``, so whatever is wrong
    (a torch whose internals have moved, no libmpi, an extension of another torch) is kept until a
    program asks for mpi. A torch that was built with its own MPI backend is left alone.
    """
    try:
        from . import _hooks

        _hooks.install()
    except (Exception, SystemExit) as error:
        global _autoload_error
        _autoload_error = error
        _answer_with(error)


def _answer_with(error):
    """Let ``init_process_group("mpi")`` give this reason instead of "build PyTorch from source"."""

    class ProcessGroupMPI:
        @staticmethod
        def create(ranks):
            raise RuntimeError(
                f"The mpi backend could not be set up when torch was imported: {error!r}. "
                "python -c 'import torch_mpi; print(torch_mpi.info())' shows what is installed."
            ) from error

    try:
        from torch.distributed import distributed_c10d as c10d

        if not c10d._MPI_AVAILABLE:
            c10d.ProcessGroupMPI = ProcessGroupMPI
            c10d._MPI_AVAILABLE = True
    except Exception:
        return  # not even the place for the answer is there: torch gives its own


_autoload_error = None


def info():
    """Return what the backend would run with, as a dict of strings.

    Starts no MPI. Keys: ``torch_mpi`` (version), ``torch``, ``built_for_torch``, ``mpicxx`` (the
    wrapper it was compiled with), ``problem`` (why mpi cannot be used, or an empty string).
    """
    import torch

    from . import _extension

    built = _extension.built_facts()
    try:
        if _autoload_error is not None:
            raise _autoload_error
        _extension.load()
        problem = ""
    except Exception as error:
        problem = str(error)
    return {
        "torch_mpi": __version__,
        "torch": torch.__version__,
        "built_for_torch": built.get("TORCH_VERSION", "?"),
        "mpicxx": built.get("MPICXX", "?"),
        "problem": problem,
    }
