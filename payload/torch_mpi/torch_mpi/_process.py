"""The process's part in an MPI job: start, groups, end."""

import atexit
import os
import sys
import threading
from datetime import timedelta

from . import _extension, _launch, _store

_DEFAULT_TIMEOUT = timedelta(minutes=30)
_state = {"extension": None, "store": None, "worlds": 0, "failed": False}
_lock = threading.Lock()


def start():
    """Load the extension and start MPI; collective over the job, cheap when done already.

    Raises
    ------
    RuntimeError
        When the extension cannot be loaded, or the MPI library is not the launcher's.
    torch.distributed.DistBackendError
        When MPI cannot give MPI_THREAD_MULTIPLE or was finalised.
    """
    with _lock:
        if _state["extension"] is not None:
            return _state["extension"]
        extension = _extension.load()
        extension.start()
        _launch.check_size(extension.world_size(), extension.library(), os.environ)
        _watch_exit(extension)
        _state["extension"] = extension
        return extension


def rank():
    """Return this process's rank in MPI_COMM_WORLD."""
    return start().world_rank()


def size():
    """Return the size of MPI_COMM_WORLD."""
    return start().world_size()


def new_world_store():
    """Return a fresh corner of the job's store for a new default group. Collective over the job.

    The server lives as long as rank 0's process; each init_process_group gets a prefix of its own,
    so that no key of an earlier one is seen again.
    """
    from torch.distributed import PrefixStore

    extension = start()
    if _state["store"] is None:
        _state["store"] = _store.create(extension)
    _state["worlds"] += 1
    return PrefixStore(f"world{_state['worlds']}", _state["store"])


def create_backend(ranks, request):
    """Make the C++ backend of one group.

    Parameters
    ----------
    ranks : list[int]
        Global ranks in group order; empty for the default group.
    request : Mapping[str, object]
        Arguments of torch's ``_new_process_group_helper``: ``timeout`` (timedelta), ``group_name``
        (str), ``store``, ``group_rank`` and ``group_size`` (int).
    """
    extension = start()
    members = list(ranks) or list(range(request.get("group_size") or size()))
    position = request.get("group_rank")
    me = extension.world_rank()
    if position is not None and (position >= len(members) or members[position] != me):
        raise RuntimeError(
            f"torch calls this process rank {position} of the group {members}, MPI calls it rank "
            f"{me} of {extension.world_size()}: give init_process_group the ranks of MPI, or leave "
            'rank and world_size out and use init_process_group("mpi")'
        )
    if max(members) >= extension.world_size():
        raise RuntimeError(
            f"The group has rank {max(members)}, but MPI has only {extension.world_size()} ranks "
            f"({extension.library()}): start all of them with one mpirun or srun --mpi=pmix"
        )
    from torch.distributed import PrefixStore

    store = request.get("store")
    name = str(request.get("group_name", "mpi"))
    if store is not None:
        store = PrefixStore(f"mpi/{name}", store)
    return extension.create_backend(
        members, store, request.get("timeout") or _DEFAULT_TIMEOUT, name
    )


def _watch_exit(extension):
    """Let no rank be left behind: an uncaught exception ends the job, other exits are announced.

    The exit status itself is dealt with in C++ (``farewell``), which is told it by exit().
    """
    previous = sys.excepthook

    def note_exception(kind, value, traceback):
        _state["failed"] = True
        # Threads that wait for a peer may keep the interpreter from getting to its atexit handlers.
        timer = threading.Timer(3.0, _abort, (extension,))
        timer.daemon = True
        timer.start()
        previous(kind, value, traceback)

    sys.excepthook = note_exception

    def say_goodbye():
        if _state["failed"]:
            _abort(extension)
        extension.leave_all_groups()

    atexit.register(say_goodbye)


def _abort(extension):
    sys.stdout.flush()
    sys.stderr.flush()
    who = f"rank {extension.world_rank()}"
    extension.abort(1, f"{who} ended with an uncaught exception (its traceback is above)")
