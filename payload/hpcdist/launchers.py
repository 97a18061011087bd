"""Who am I: rank, local rank and world size, from what the launcher left in the environment.

`identify` is a pure function of an environment mapping. The launchers are tried in a fixed order,
the innermost first, because a process started by an inner launcher still carries the variables of
the outer one:

1. torchrun   TORCHELASTIC_RUN_ID, then RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE.
2. openmpi    OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE: mpirun of Open MPI 4 and 5.
              It comes before srun because mpirun starts its daemons by srun: on the other nodes
              the ranks inherit SLURM_STEP_ID, and SLURM_PROCID is the *daemon's* number.
              (OMPI_COMM_WORLD_NODE_RANK is no node number: it counts processes on the node.)
3. mpich, intelmpi  PMI_RANK, PMI_SIZE with MPI_LOCALRANKID, MPI_LOCALNRANKS: Hydra's mpiexec,
              which starts its proxies by srun too. mvapich: MV2_COMM_WORLD_*. pals: PALS_RANKID.
4. srun       SLURM_STEP_ID of an ordinary step, then SLURM_PROCID, SLURM_LOCALID,
              SLURM_STEP_NUM_TASKS, SLURM_STEP_TASKS_PER_NODE, SLURM_NODEID, SLURM_STEP_NODELIST.
              Also with --mpi=pmix: Slurm's plug-in sets PMIX_RANK and PMIX_NAMESPACE only, the
              OMPI_COMM_WORLD_* variables come from mpirun alone.
5. pmi        PMI_RANK and PMI_SIZE without local ranks.
6. env        RANK and WORLD_SIZE, set by hand (LOCAL_RANK and LOCAL_WORLD_SIZE go with them).
7. single     nothing of these: one process.

PMIX_RANK without any of these is an error: it tells the rank but not the world size.
Under ibrun (TACC) and PBS the MPI variables are those of 2 and 3; the launcher is then called
"ibrun (mpich)" or "pbs (openmpi)", so that a person recognises the command that was typed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcdist import slurm
from hpcdist.errors import LaunchError


@dataclass(frozen=True)
class Placement:
    """Where this process stands in the job. None: the launcher does not say."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int | None
    num_nodes: int | None
    hosts: tuple[str, ...]  # one per node in the step's order; empty where unknown
    launcher: str
    evidence: tuple[str, ...]  # the variables used, as NAME=value; rank and world size come first
    speaks_mpi: bool = False  # an MPI library started by this launcher finds its peers

    @property
    def spans_nodes(self) -> bool:
        return (self.num_nodes or 1) > 1 or self.world_size > self.local_world_size

    @property
    def claim(self) -> str:
        """The variables that told rank and world size, for messages."""
        return " ".join(self.evidence[:2])


def identify(environ: Mapping[str, str]) -> Placement:
    """Return who this process is; see the module's text for the order and the variables.

    Raises
    ------
    LaunchError
        A variable is missing or no number, rank ≥ world size, nested launchers disagree, or one
        plain process runs in an allocation that was asked for several tasks.
    """
    inner, outer = _recognise(environ)
    if inner is None:
        _refuse_lonely_process(environ)
        inner = Placement(0, 1, 0, 1, 0, 1, (), "single", ("no launcher's variable is set",))
    _check_ranges(inner)
    if outer is not None:
        _check_nesting(inner, outer)
    _check_preset(inner, environ)
    return inner


def _recognise(environ: Mapping[str, str]) -> tuple[Placement | None, Placement | None]:
    """Return the innermost launcher's placement, and the next one around it."""
    readers = (_read_torchrun, _read_openmpi, _read_mpich, _read_srun, _read_pmi)
    if environ.get("PMIX_NAMESPACE", "").startswith("slurm.pmix"):
        # Slurm itself is the PMIx server of this process, so no mpirun stands in between.
        readers = (_read_torchrun, _read_srun, _read_openmpi, _read_mpich, _read_pmi)
    found: list[Placement] = []
    for read in readers:
        try:
            placement = read(environ)
        except LaunchError:
            if not found:
                raise
            continue  # leftovers of an outer launcher, incomplete where an inner one has its own
        if placement is not None:
            found.append(placement)
    if not found:
        return _read_plain(environ), None
    return found[0], found[1] if len(found) > 1 else None


def _read_torchrun(environ: Mapping[str, str]) -> Placement | None:
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    rank, size, local, local_size, group = _numbers(environ, "torchrun", names)
    agents = int(environ.get("GROUP_WORLD_SIZE") or -(-size // local_size))
    evidence = _quote(environ, (*names, "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID"))
    return Placement(rank, size, local, local_size, group, agents, (), "torchrun", evidence)


def _read_openmpi(environ: Mapping[str, str]) -> Placement | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    parts = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return _read_mpi(environ, "openmpi", tuple(f"OMPI_COMM_WORLD_{part}" for part in parts))


def _read_mpich(environ: Mapping[str, str]) -> Placement | None:
    if "MV2_COMM_WORLD_RANK" in environ:
        parts = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        return _read_mpi(environ, "mvapich", tuple(f"MV2_COMM_WORLD_{part}" for part in parts))
    if "PALS_RANKID" in environ:
        names = ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE")
        return _read_mpi(environ, "pals", names)
    if "MPI_LOCALRANKID" in environ and ("PMI_RANK" in environ or "PMI_SIZE" in environ):
        intel = any(name.startswith("I_MPI_") for name in environ)
        names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        return _read_mpi(environ, "intelmpi" if intel else "mpich", names)
    return None


def _read_mpi(environ: Mapping[str, str], library: str, names: Sequence[str]) -> Placement:
    rank, size, local, local_size = _numbers(environ, library, names)
    one_node = local_size == size
    launcher = library
    if "TACC_SYSTEM" in environ and "SLURM_JOB_ID" in environ:
        launcher = f"ibrun ({library})"
    elif "PBS_JOBID" in environ:
        launcher = f"pbs ({library})"
    node_rank, num_nodes = (0, 1) if one_node else (None, None)
    evidence = _quote(environ, (*names, "TACC_SYSTEM", "PBS_JOBID"))
    return Placement(
        rank, size, local, local_size, node_rank, num_nodes, (), launcher, evidence, True
    )


def _read_srun(environ: Mapping[str, str]) -> Placement | None:
    if slurm.find_step(environ) is None:
        return None
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
    rank, size, local, node = _numbers(environ, "srun", names)
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"):
        if not environ.get(name):
            raise _missing(name, "srun")
    per_node = slurm.expand_tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    hosts = slurm.expand_hosts(environ["SLURM_STEP_NODELIST"], variable="SLURM_STEP_NODELIST")
    if node >= len(per_node) or len(hosts) != len(per_node) or sum(per_node) != size:
        raise LaunchError(
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']} does not fit "
            f"SLURM_NODEID={node}, SLURM_STEP_NUM_TASKS={size} and "
            f"SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']}: variables of another step are "
            "in the environment; start from a clean shell, or with `srun --export=ALL` only"
        )
    pmi = [name for name in ("PMIX_RANK", "PMI_RANK", "PMI_FD") if name in environ]
    more = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID")
    evidence = _quote(environ, (*names, *more, "SLURM_DISTRIBUTION", *pmi))
    return Placement(
        rank, size, local, per_node[node], node, len(per_node), hosts, "srun", evidence, bool(pmi)
    )


def _read_pmi(environ: Mapping[str, str]) -> Placement | None:
    if "MPI_LOCALRANKID" in environ or not {"PMI_RANK", "PMI_SIZE"} <= environ.keys():
        return None
    rank, size = _numbers(environ, "mpiexec", ("PMI_RANK", "PMI_SIZE"))
    return _place_on_one_node(environ, rank, size, "pmi", ("PMI_RANK", "PMI_SIZE"), mpi=True)


def _read_plain(environ: Mapping[str, str]) -> Placement | None:
    if "RANK" in environ or "WORLD_SIZE" in environ:
        rank, size = _numbers(environ, "env", ("RANK", "WORLD_SIZE"))
        return _place_on_one_node(environ, rank, size, "env", ("RANK", "WORLD_SIZE"), mpi=False)
    if "PMIX_RANK" in environ:
        raise LaunchError(
            f"PMIX_RANK={environ['PMIX_RANK']} tells the rank, but nothing tells the world size: "
            "start the ranks with mpirun or `srun --mpi=pmix`, or set WORLD_SIZE and RANK"
        )
    return None


def _place_on_one_node(
    environ: Mapping[str, str], rank: int, size: int, launcher: str, names: Sequence[str], mpi: bool
) -> Placement:
    """Fill in local ranks for launchers that may not tell them: they must, or all is one node."""
    local_names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    local, local_size = rank, size
    if any(name in environ for name in local_names):
        local, local_size = _numbers(environ, launcher, local_names)
    one_node = local_size == size
    return Placement(
        rank, size, local, local_size, 0 if one_node else None, 1 if one_node else None, (),
        launcher, _quote(environ, (*names, *local_names)), mpi,
    )  # fmt: skip


def _check_ranges(placement: Placement) -> None:
    pairs = (
        ("rank", placement.rank, "world size", placement.world_size),
        ("local rank", placement.local_rank, "local world size", placement.local_world_size),
        ("local world size", placement.local_world_size - 1, "world size", placement.world_size),
    )
    for name, value, limit_name, limit in pairs:
        if not 0 <= value < limit:
            raise LaunchError(
                f"{name} and {limit_name} contradict each other in what {placement.launcher} set: "
                + " ".join(placement.evidence)
            )


def _check_nesting(inner: Placement, outer: Placement) -> None:
    """Refuse what two launchers, one inside the other, make of the job by mistake."""
    seen = f"{outer.launcher} started {outer.world_size} tasks ({outer.claim})"
    if inner.launcher == "torchrun":
        product = f"{outer.local_world_size} tasks per node × {inner.local_world_size} processes"
        if outer.local_world_size > 1 and inner.local_world_size > 1:
            raise LaunchError(
                f"{seen} and each ran torchrun --nproc-per-node={inner.local_world_size}: {product}"
                " each; start one task per node (--ntasks-per-node=1), or leave torchrun out"
            )
        if outer.world_size > 1 and inner.num_nodes == 1:
            raise LaunchError(
                f"{seen} and each ran a torchrun of its own, WORLD_SIZE={inner.world_size}: that "
                f"is {outer.world_size} jobs; give torchrun --nnodes={outer.world_size} and one "
                "rendezvous endpoint, or leave torchrun out"
            )
        return
    same = (inner.rank, inner.world_size) == (outer.rank, outer.world_size)
    if "srun" not in (inner.launcher, outer.launcher) or inner.launcher == "srun":
        if not same:
            raise LaunchError(
                f"{inner.launcher} says rank {inner.rank} of {inner.world_size} "
                f"({inner.claim}) but {seen}; start the ranks with one of the two"
            )
    elif outer.local_world_size > 1 and not same:
        # mpirun's and mpiexec's own daemons are one task per node, and are no mistake.
        raise LaunchError(
            f"{seen} and each ran {inner.launcher}'s launcher for {inner.world_size} ranks; "
            "use mpirun without srun, or srun --mpi=pmix without mpirun"
        )


def _check_preset(placement: Placement, environ: Mapping[str, str]) -> None:
    """RANK and WORLD_SIZE, exported by hand around another launcher, must agree with it."""
    if placement.launcher in ("torchrun", "env"):
        return
    for name, value in (("RANK", placement.rank), ("WORLD_SIZE", placement.world_size)):
        if environ.get(name, str(value)) != str(value):
            raise LaunchError(
                f"{name}={environ[name]} is set, but {placement.launcher} says {value} "
                f"({placement.claim}): unset {name}"
            )


def _refuse_lonely_process(environ: Mapping[str, str]) -> None:
    tasks = slurm.count_allocated_tasks(environ) if "SLURM_JOB_ID" in environ else 1
    if tasks > 1 and environ.get("HPCDIST_SINGLE") != "1":
        raise LaunchError(
            f"this is a single process, although allocation SLURM_JOB_ID={environ['SLURM_JOB_ID']} "
            f"has {tasks} tasks: start it with `srun python -u SCRIPT` (or mpirun); "
            "HPCDIST_SINGLE=1 allows one process"
        )


def _numbers(environ: Mapping[str, str], launcher: str, names: Sequence[str]) -> list[int]:
    """Read variables that must all be there and be numbers."""
    values = []
    for name in names:
        text = environ.get(name)
        if text is None:
            raise _missing(name, launcher)
        try:
            values.append(int(text))
        except ValueError:
            raise LaunchError(f"{name}={text!r} is no number ({launcher})") from None
    return values


def _missing(name: str, launcher: str) -> LaunchError:
    return LaunchError(
        f"{name} is not set, although other variables of {launcher} are: let the whole environment "
        "into the container (no --cleanenv, no --containall, no `env -i`)"
    )


def _quote(environ: Mapping[str, str], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{name}={environ[name]}" for name in names if name in environ)
