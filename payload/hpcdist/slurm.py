"""Slurm's formats: which step is this, how many tasks has each node, which hosts.

Everything is a pure function of an environment mapping or a string; no command is run, because
`scontrol` is not there inside a container.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import hostlist

from hpcdist.errors import LaunchError

# Slurm's own step numbers (slurm.h: SLURM_EXTERN_CONT, SLURM_BATCH_SCRIPT, SLURM_INTERACTIVE_STEP)
# lie at the top of 32 bits, and are printed by %u in some places and by %d, thus negative, in
# others (src/common/env.c).
_FIRST_RESERVED_STEP = 0xFFFFFFF0


def find_step(environ: Mapping[str, str]) -> int | None:
    """Return the number of the srun step this process is a task of, or None.

    The batch shell and the shell of `salloc` also have SLURM_PROCID=0, so SLURM_PROCID alone
    proves nothing: SLURM_STEP_ID must be there, and must be the number of an ordinary step.
    """
    text = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if not re.fullmatch(r"\d+", text) or int(text) >= _FIRST_RESERVED_STEP:
        return None
    return int(text)


def expand_tasks_per_node(text: str) -> list[int]:
    """Expand SLURM_STEP_TASKS_PER_NODE: "2(x3),1" → [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise LaunchError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r} cannot be read: {part!r} is not N or N(xM)"
            )
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


def expand_hosts(text: str, *, variable: str) -> tuple[str, ...]:
    """Expand a host list such as "gpu[01-03,07]", in its order and without repeats."""
    try:
        names: list[str] = hostlist.expand_hostlist(text)
    except hostlist.BadHostlist as error:
        raise LaunchError(f"{variable}={text!r} is not a host list: {error}") from None
    return tuple(names)


def count_allocated_tasks(environ: Mapping[str, str]) -> int:
    """Return how many tasks the allocation was asked for; 1 where it does not say.

    SLURM_NTASKS is unset unless -n (or something that implies it) was given. SLURM_TASKS_PER_NODE
    is no substitute: without -n it counts CPUs.
    """
    if environ.get("SLURM_NTASKS", "").isdigit():
        return int(environ["SLURM_NTASKS"])
    per_node = environ.get("SLURM_NTASKS_PER_NODE", "")
    nodes = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", ""))
    if per_node.isdigit() and nodes.isdigit():
        return int(per_node) * int(nodes)
    return 1
