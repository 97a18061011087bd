"""Where torch learns about the backend.

``torch.distributed`` has a place for MPI: ``distributed_c10d.ProcessGroupMPI`` with a ``create``
method, and a flag ``_MPI_AVAILABLE``. A stock wheel leaves both empty. Two things are missing from
that place, and both are added by going around ``_new_process_group_helper``, the one function
through which every group of every backend is made:

- ``create`` is given the ranks only; the group's timeout, name and store pass it by;
- an mpi default group gets a placeholder instead of a store, so that no gloo group can be made
  beside it. It gets a real one here (see ``_store``).
"""

import contextvars
import functools
import inspect

_request = contextvars.ContextVar("torch_mpi_request", default=None)


def install():
    """Put the backend into torch.distributed, unless torch has an MPI backend of its own.

    Raises
    ------
    Exception
        When torch.distributed does not look as expected; :func:`torch_mpi.autoload` keeps it.
    """
    from torch.distributed import is_available

    if not is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    if c10d._MPI_AVAILABLE:
        return
    c10d.ProcessGroupMPI = ProcessGroupMPI
    c10d._MPI_AVAILABLE = True
    c10d._new_process_group_helper = _with_request(c10d._new_process_group_helper)


def _uses_mpi(backend):
    """Whether a backend string ("mpi", "cpu:mpi,cuda:nccl", …) names mpi."""
    return "mpi" in str(backend).lower().replace(",", ":").split(":")


def _with_request(helper):
    """Wrap torch's group maker so that :meth:`ProcessGroupMPI.create` knows what is asked for."""
    signature = inspect.signature(helper)

    @functools.wraps(helper)
    def new_process_group(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        asked = bound.arguments
        if not _uses_mpi(asked["backend"]):
            return helper(*args, **kwargs)
        from . import _process

        # MPI_Init is collective: ranks outside the group take part here, then leave.
        _process.start()
        if asked["group_rank"] == -1 and asked["group_size"] == -1:
            asked["group_rank"], asked["group_size"] = _process.rank(), _process.size()
            asked["store"] = _process.new_world_store()
        token = _request.set(asked)
        try:
            return helper(*bound.args, **bound.kwargs)
        finally:
            _request.reset(token)

    return new_process_group


class ProcessGroupMPI:
    """Stands where torch expects its own class of this name."""

    @staticmethod
    def create(ranks):
        """Make the backend object of a group. Called by torch on the group's members.

        Parameters
        ----------
        ranks : list[int]
            Global ranks of the members in group order; empty for the default group.

        Returns
        -------
        torch.distributed.distributed_c10d.Backend

        Raises
        ------
        RuntimeError
            When the extension cannot be used or torch's and MPI's ranks differ.
        torch.distributed.DistBackendError
            When not all members come within the group's timeout.
        """
        from . import _process

        return _process.create_backend(ranks, _request.get() or {})
