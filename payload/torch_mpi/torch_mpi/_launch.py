"""What the launcher says about the size of the job, to find a wrong libmpi.

Two MPI libraries of the same name on one machine, and the wrong one is loaded without a word: every
process then is rank 0 of 1. The launcher knows better.
"""


def expected_size(environ):
    """Return ``(size, variable)``: how many ranks the launcher started, and which variable says so.

    ``(None, None)`` when nothing says so: a process started by hand is a job of one. Only the
    launcher nearest to the process counts: mpirun inside a Slurm job runs its daemons with srun, so
    that SLURM_STEP_NUM_TASKS is then the number of nodes.

    Parameters
    ----------
    environ : Mapping[str, str]
        Usually ``os.environ``.
    """
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        value = environ.get(name, "")
        if value.isdigit():
            return int(value), name
    return None, None


def check_size(size, library, environ):
    """Raise if MPI's world is not the one the launcher started.

    Parameters
    ----------
    size : int
        Size of MPI_COMM_WORLD.
    library : str
        Version and path of the MPI library that is loaded.
    environ : Mapping[str, str]
        Usually ``os.environ``.

    Raises
    ------
    RuntimeError
        Names the library, both sizes and the way to launch.
    """
    wanted, variable = expected_size(environ)
    if wanted is None or wanted == size:
        return
    remedy = (
        "With Slurm launch as `srun --mpi=pmix ...` (Open MPI) or `srun --mpi=pmi2 ...` (MPICH); "
        "`srun --mpi=list` shows what this cluster has."
        if variable.startswith("SLURM")
        else "Launch with the mpirun of the same installation as the library, and see with "
        "`ldd` on torch_mpi/_C*.so and LD_LIBRARY_PATH which libmpi is found."
    )
    raise RuntimeError(
        f"MPI has {size} rank(s), but {variable}={wanted}: the library and the launcher do not "
        f"know each other. Loaded: {library}. {remedy}"
    )
