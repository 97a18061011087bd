"""For job scripts: what hpcdist knows, put to use.

python -m hpcdist torchrun OPTIONS SCRIPT …   torchrun on this node of an srun step, joined to the
                                              torchruns of the step's other nodes
python -m hpcdist whoami                      this process's placement, and the evidence for it
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from hpcdist import network, rendezvous
from hpcdist.errors import LaunchError
from hpcdist.launchers import identify


def list_torchrun_arguments(environ: Mapping[str, str]) -> list[str]:
    """Return torchrun's options for the step with one task per node that this process is in.

    The rendezvous is static: every node knows its number and the address from Slurm, so torchrun
    need not recognise its own host under one of its names (with the c10d rendezvous it must).

    Raises
    ------
    LaunchError
        The step has several tasks on a node, which would start as many torchruns there.
    """
    placement = identify(environ)
    if placement.local_world_size != 1:
        raise LaunchError(
            f"{placement.local_world_size} tasks on this node would start as many torchruns: "
            "srun --ntasks-per-node=1"
        )
    meeting = rendezvous.plan(environ, placement, ephemeral=network.read_ephemeral_range())
    if meeting is None:
        raise LaunchError(
            "no srun step and no MASTER_ADDR: torchrun --standalone, or start by srun"
        )
    return [
        f"--nnodes={placement.world_size}",
        f"--node-rank={placement.node_rank}",
        f"--master-addr={meeting.host}",
        f"--master-port={meeting.port}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hpcdist")
    parser.add_argument("what", choices=("torchrun", "whoami"))
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="torchrun's own options, the script")
    given = parser.parse_args()
    try:
        if given.what == "torchrun":
            command = ["torchrun", *list_torchrun_arguments(os.environ), *given.rest]
            os.execvp(command[0], command)
        placement = identify(os.environ)
        print(f"rank {placement.rank} of {placement.world_size} by {placement.launcher}")
        print(*placement.evidence, sep="\n")
    except LaunchError as error:
        print(f"hpcdist: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
